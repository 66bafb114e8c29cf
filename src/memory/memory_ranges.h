/*
 * What is gathered once of a sharding, so that the memory of any range of it can be told (memory_ranges.c). Forward
 * operators of the source number the model's places; every operator of the expanded graph stands at one, and backward
 * operators run from the last place to the first. Tensors here are places in memory: those that share one
 * (hapt_sharding.storage) go by the lowest index.
 */
#ifndef HAPT_MEMORY_RANGES_H
#define HAPT_MEMORY_RANGES_H

#include <limits.h>

#include "gaps.h"
#include "lifetime.h"

/* Where a tensor is touched, by operators of either section. */
struct touch {
    int place;
    bool writes;
    int last_forward; /* the last forward operator there that touches it, or -1 */
};

/* What a tensor adds to a range that touches it anywhere: parameters, inputs, sums of gradients, gradients of frozen
 * weights. */
struct amounts {
    size_t elements, trained, copies, slot, resident;
    size_t summed[HAPT_MEMORY_GROUPS]; /* of the trained elements: by the axes over which their gradients are summed */
};

/* A tensor that is touched again: ranges with both places count it once. */
struct repeat {
    int before, place;
    struct amounts amounts;
};

/* A workspace tensor of a backward operator. */
struct operand {
    int tensor;
    int next;  /* the next operator that touches it, or INT_MAX */
    bool born; /* nobody touched it before */
};

/* A place at which something is written into a parameter's gradient. */
struct written {
    int place, next;
};

struct hapt_memory_ranges {
    const struct hapt_sharding *sharding;
    const struct hapt_graph *graph; /* expanded */
    struct hapt_memory_options options;
    int places;         /* forward operators of the source */
    int *forward_start; /* [places + 1] the first forward operator at a place or behind */
    size_t *bytes;      /* [tensor] local, aligned */
    int *kept_from; /* [tensor] the first place whose backward operators, or the trainer, read an activation, or INT_MAX
                     */
    int *touch_start;    /* [tensor + 1] */
    struct touch *touch; /* by place, each place once */
    int *cut_start;      /* [places + 1] cut c lies before place c */
    int *cut;            /* activations and their gradients that are touched on both sides, ascending */
    int *leaving_start;  /* [places + 2] */
    int *leaving;        /* by cut: tensors of the source that are made before and read, in whatever version, behind */
    int *version_start;  /* [source tensor + 1] */
    int *version;        /* of an activation: versions that may leave a range that makes them, by storage */
    unsigned *summed_over;  /* [tensor] a gradient is all-reduced in place, once a step, over these axes (bits) */
    struct amounts *prefix; /* [places + 1] of the places before, repeats included */
    int repeat_count;
    struct repeat *repeat;
    size_t *kept_before;      /* [places + 1] bytes of activations whose kept_from lies before */
    int *first_forward;       /* [tensor] the forward operator that writes an activation first; */
    int *last_forward;        /* ... the last forward operator that touches an activation */
    int *death_start, *death; /* [forward operators + 1] activations by last_forward */
    int *backward_start;      /* [places + 1] first backward operator whose place is below; [0]: their end */
    int *operand_start;       /* [op_count + 1] */
    struct operand *operand;  /* of an operator, by tensor */
    struct written *written;
    int written_count, written_room, *first_written; /* [tensor] of its versions, or -1 */
    size_t *op_scratch;                              /* [op_count], or NULL */
};

static inline bool ranges_is_forward_activation(const struct hapt_memory_ranges *made, int tensor)
{
    const struct hapt_tensor *of = &made->graph->tensor[tensor];
    return of->kind == HAPT_TENSOR_ACTIVATION && of->producer >= 0 && of->producer < made->graph->forward_count;
}

/* Lives in the backward section alone. */
static inline bool ranges_is_backward_tensor(const struct hapt_memory_ranges *made, int tensor)
{
    const struct hapt_tensor *of = &made->graph->tensor[tensor];
    if (of->kind == HAPT_TENSOR_GRADIENT) return !hapt_lifetime_parameter_gradient(made->graph, tensor);
    return of->kind == HAPT_TENSOR_ACTIVATION && of->producer >= made->graph->forward_count;
}

static inline int ranges_place_of(const struct hapt_memory_ranges *made, int op)
{
    return made->graph->op[op].forward_op;
}

static inline void amounts_add(struct amounts *sum, const struct amounts *more)
{
    sum->elements += more->elements;
    sum->trained += more->trained;
    sum->copies += more->copies;
    sum->slot += more->slot;
    sum->resident += more->resident;
    for (int g = 0; g < HAPT_MEMORY_GROUPS; g++) sum->summed[g] += more->summed[g];
}

#endif
