/* Where a program's tensors live and when: what the memory plan is made of. */
#ifndef HAPT_MEMORY_LIFETIME_H
#define HAPT_MEMORY_LIFETIME_H

#include "hapt/memory.h"

/* Steps of one instruction between which a workspace tensor must keep its place, both ends included. Incoming gradients
 * live from -1 (they are copied in before the first step), outgoing ones to step_count (copied out behind the last). */
struct hapt_lifetime {
    int first, last;
};

/* Region of every program tensor; lifetime[section][tensor] of tensors that have a place of their own
 * (hapt_program_tensor.root), those that share it included; {0, -1} where the section does not touch it. */
enum hapt_status hapt_lifetime_derive(const struct hapt_program *program, struct hapt_arena *arena,
                                      enum hapt_region *region, struct hapt_lifetime **lifetime);
/* Bytes of a program tensor (local shape, compute type). */
size_t hapt_lifetime_bytes(const struct hapt_program *program, int tensor);
/* True for fp32 gradients of parameters, which are resident. */
bool hapt_lifetime_parameter_gradient(const struct hapt_graph *graph, int tensor);
/* ... of those that the update reads: they stand in the gradient block. */
bool hapt_lifetime_updates(const struct hapt_graph *graph, int tensor);

/* Parameters of one class stand together, in this order: 0 decayed, 1 trained without decay, 2 frozen. */
static inline int hapt_lifetime_parameter_class(const struct hapt_tensor *parameter)
{
    if (!parameter->trainable) return 2;
    return hapt_tensor_published_dims(parameter) >= 2 ? 0 : 1;
}

/* Elements with padding, so that a parameter's place in the fp32 and in the bf16 block both start on a 64-byte
 * boundary. */
static inline size_t hapt_lifetime_pad(size_t elements)
{
    return (elements + 31) / 32 * 32;
}

static inline size_t hapt_lifetime_align(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

#endif
