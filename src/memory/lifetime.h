/* Regions and lifetimes of a program's tensors: the input of the memory plan. */
#ifndef HAPT_MEMORY_LIFETIME_H
#define HAPT_MEMORY_LIFETIME_H

#include "hapt/memory.h"

/* Steps of one instruction during which a workspace tensor keeps its memory, both ends included. Incoming gradients
 * live from -1 (copied in before the first step), outgoing ones to step_count (copied out after the last). */
struct hapt_lifetime {
    int first, last;
};

/* Region of every program tensor. lifetime[section][tensor], for tensors with memory of their own
 * (hapt_program_tensor.root), covers all tensors that share it; {0, -1}: the section does not touch it. */
enum hapt_status hapt_lifetime_derive(const struct hapt_program *program, struct hapt_arena *arena,
                                      enum hapt_region *region, struct hapt_lifetime **lifetime);
/* Bytes of a program tensor (local shape, compute type). */
size_t hapt_lifetime_bytes(const struct hapt_program *program, int tensor);
/* True for fp32 gradients of parameters, which are resident. */
bool hapt_lifetime_parameter_gradient(const struct hapt_graph *graph, int tensor);
/* True for those that the update reads: they are in the gradient block. */
bool hapt_lifetime_updates(const struct hapt_graph *graph, int tensor);

/* Parameters of one class are contiguous. Order: 0 with weight decay, 1 trained without decay, 2 frozen. */
static inline int hapt_lifetime_parameter_class(const struct hapt_tensor *parameter)
{
    if (!parameter->trainable) return 2;
    return hapt_tensor_published_dims(parameter) >= 2 ? 0 : 1;
}

/* Elements with padding, so that parameters start on 64-byte boundaries in the fp32 and the bf16 block. */
static inline size_t hapt_lifetime_pad(size_t elements)
{
    return (elements + 31) / 32 * 32;
}

#endif
