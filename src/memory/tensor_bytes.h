/* Bytes and blocks of single tensors. */
#ifndef HAPT_MEMORY_TENSOR_BYTES_H
#define HAPT_MEMORY_TENSOR_BYTES_H

#include "hapt/memory.h"

/* Bytes of a program tensor (local shape, compute type). */
size_t tensor_bytes(const struct hapt_program *program, int tensor);
/* True for gradients that the update reads: they are in the gradient block. */
bool tensor_is_updating(const struct hapt_graph *graph, int tensor);

/* Parameters of one class are contiguous, in this order. */
enum tensor_parameter_class {
    TENSOR_DECAYED, /* with weight decay */
    TENSOR_UNDECAYED,
    TENSOR_STATISTIC,
    TENSOR_FROZEN,
    TENSOR_PARAMETER_CLASSES
};

static inline enum tensor_parameter_class tensor_parameter_class(const struct hapt_tensor *parameter)
{
    if (!parameter->trainable) return TENSOR_FROZEN;
    if (parameter->statistic) return TENSOR_STATISTIC;
    return hapt_tensor_published_dims(parameter) >= 2 && !parameter->undecayed ? TENSOR_DECAYED : TENSOR_UNDECAYED;
}

/* Elements with padding, so that parameters start on 64-byte boundaries in the fp32 and the bf16 block. */
static inline size_t tensor_pad(size_t elements)
{
    return (elements + 31) / 32 * 32;
}

#endif
