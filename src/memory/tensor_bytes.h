/* Bytes and blocks of single tensors. */
#ifndef HAPT_MEMORY_TENSOR_BYTES_H
#define HAPT_MEMORY_TENSOR_BYTES_H

#include "hapt/memory.h"

/* Bytes of a program tensor (local shape, compute type). */
size_t tensor_bytes(const struct hapt_program *program, int tensor);
/* True for gradients that the update reads: they are in the gradient block. */
bool tensor_is_updating(const struct hapt_graph *graph, int tensor);

/* Parameters of one class are contiguous. Order: 0 with weight decay, 1 trained without decay, 2 frozen. */
static inline int tensor_parameter_class(const struct hapt_tensor *parameter)
{
    if (!parameter->trainable) return 2;
    return hapt_tensor_published_dims(parameter) >= 2 && !parameter->undecayed ? 0 : 1;
}

/* Elements with padding, so that parameters start on 64-byte boundaries in the fp32 and the bf16 block. */
static inline size_t tensor_pad(size_t elements)
{
    return (elements + 31) / 32 * 32;
}

#endif
