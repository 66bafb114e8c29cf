/*
 * Data gathered once per sharding, from which memory_ranges.c computes the memory of any range. Forward operators of
 * the source number the model's positions. Every operator of the expanded graph has a position; backward
 * operators run from the last position to the first. Tensors that share memory (hapt_sharding.storage) are represented
 * by the lowest index.
 */
#ifndef HAPT_MEMORY_RANGES_H
#define HAPT_MEMORY_RANGES_H

#include <limits.h>

#include "gaps.h"
#include "tensor_bytes.h"

/* A position at which a tensor is touched, by operators of either section. */
struct touch {
    int position;
    bool writes;
    int last_forward; /* the last forward operator there that touches it, or -1 */
};

/* Amounts that a tensor adds to a range that touches it anywhere: parameters, inputs, gradient sums, gradients of
 * frozen weights. */
struct amounts {
    size_t elements, trained, copies, slot, resident;
    bool away, gradients_away;            /* of a range: its weights, their gradients are on the host */
    bool shared;                          /* the same: its weights are sharded */
    size_t trained_fp32;                  /* trained elements without compute copies */
    size_t summed[HAPT_PARAMETER_GROUPS]; /* trained elements by the axes over which their gradients are summed */
};

/* A tensor touched at two positions: ranges with both count it once. */
struct repeat {
    int before, position;
    struct amounts amounts;
};

/* A workspace tensor of a backward operator. */
struct operand {
    int tensor;
    int next;           /* the next operator that touches it, or INT_MAX */
    bool born;          /* no earlier operator touches it */
    int next_selective; /* the same of those operators that a selective unit runs */
};

/* A unit that reads an activation when it runs again, at the position of a backward operator. */
struct again_reader {
    int unit, position;
    bool light; /* also if it is selective */
};

/* A position that writes into a parameter's gradient. */
struct written {
    int position, next;
};

struct hapt_memory_ranges {
    const struct hapt_sharding *sharding;
    const struct hapt_graph *graph; /* expanded */
    struct hapt_memory_options options;
    int positions;      /* forward operators of the source */
    int *forward_start; /* [positions + 1] first forward operator at or behind a position */
    size_t *bytes;      /* [tensor] local, aligned */
    int *kept_from;     /* [tensor] first position whose backward operators, or the trainer, read an activation; else
                           INT_MAX */
    int *own_from;      /* [tensor] the same of operators that read it unless its unit makes it again */
    int *again_start;   /* [tensor + 1] */
    struct again_reader *again_reader; /* units that read an activation if they recompute, ascending */
    int *made_start, *made;            /* [positions + 1] activations by the position that makes them */
    int *unit_of;                      /* [positions] or -1 */
    int *again_unit;                   /* [tensor] of a version that is made again: its unit; else -1 */
    bool *again_light;                 /* [tensor] of such a version, and of its forward version: a selective unit makes
                                          it again, too */
    int *touch_start;                  /* [tensor + 1] */
    struct touch *touch;               /* by position, each position once */
    int *boundary_start;               /* [positions + 2] boundary c lies before position c */
    int *boundary_tensor;   /* activations and their gradients touched on both sides of a boundary, ascending */
    int *leaving_start;     /* [positions + 2] */
    int *leaving;           /* by boundary: source tensors produced before it, and read behind it in any version */
    int *version_start;     /* [source tensor + 1] */
    int *version;           /* by source activation: versions that can leave a range that produces them, by storage */
    unsigned *summed_over;  /* [tensor] a gradient is all-reduced in place, once a step, over these axes (bits) */
    struct amounts *prefix; /* [positions + 1] sums over earlier positions, repeats included */
    int repeat_count;
    struct repeat *repeat;
    int *first_forward;       /* [tensor] first forward operator that writes an activation */
    int *last_forward;        /* [tensor] last forward operator that touches an activation */
    int *death_start, *death; /* [forward operators + 1] activations by last_forward */
    int *backward_start;      /* [positions + 1] first backward operator at a lower position; [0]: their end */
    int *operand_start;       /* [op_count + 1] */
    struct operand *operand;  /* operands by operator, then by tensor */
    struct written *written;
    int written_count, written_room, *first_written; /* [tensor] index of its first `written`, or -1 */
    size_t *op_scratch;                              /* [op_count], or NULL */
};

static inline bool ranges_is_forward_activation(const struct hapt_memory_ranges *made, int tensor)
{
    const struct hapt_tensor *of = &made->graph->tensor[tensor];
    return of->kind == HAPT_TENSOR_ACTIVATION && of->producer >= 0 && of->producer < made->graph->forward_count;
}

/* True for tensors that live only in the backward section. */
static inline bool ranges_is_backward_tensor(const struct hapt_memory_ranges *made, int tensor)
{
    const struct hapt_tensor *of = &made->graph->tensor[tensor];
    if (of->kind == HAPT_TENSOR_GRADIENT) return !hapt_graph_is_parameter_gradient(made->graph, tensor);
    return of->kind == HAPT_TENSOR_ACTIVATION && of->producer >= made->graph->forward_count;
}

/* The forward part's version of one that is made again; -1: it is not. */
static inline int ranges_again(const struct hapt_memory_ranges *made, int tensor)
{
    return made->sharding->again ? made->sharding->again[tensor] : -1;
}

/* The unit of an operator that runs again; -1: it does not. */
static inline int ranges_repeats(const struct hapt_memory_ranges *made, int op)
{
    return made->sharding->repeats ? made->sharding->repeats[op] : -1;
}

static inline int ranges_position_of(const struct hapt_memory_ranges *made, int op)
{
    return made->graph->op[op].forward_op;
}

/* The parts of a range's memory, aligned. */
struct memory_walk {
    struct hapt_memory_activations activations; /* without kernel scratch */
    size_t resident_bytes;                      /* blocks of parameters, and resident tensors outside of them */
    size_t sharded_bytes;                       /* the same with sharded optimizer state */
    size_t host_bytes, sharded_host_bytes;      /* on the host */
    size_t trained_elements;
    bool copies, masters_unread;
    bool host_weights, host_gradients; /* on the host: trained weights, their gradients */
    bool sharded_weights;
    size_t weight_bytes, fetch_bytes; /* of them; hapt_memory_bytes */
    int weight_units;
    size_t gradient_bytes, gradient_fetch_bytes, gradient_last_bytes;
};
/* The largest peak of a section. */
static inline size_t memory_workspace_bytes(const struct hapt_memory_activations *activations)
{
    return activations->forward_bytes > activations->backward_bytes ? activations->forward_bytes
                                                                    : activations->backward_bytes;
}
void memory_walk(const struct hapt_memory_ranges *ranges, int first_op, int end_op, const unsigned char *again,
                 struct hapt_memory_work *work, struct memory_walk *walk);
/* Region of a tensor that the range touches, by `storage`, after memory_walk. *offset: in the workspace; else
 * unchanged. */
enum hapt_region memory_walk_region(const struct hapt_memory_ranges *ranges, const struct hapt_memory_work *work,
                                    int tensor, size_t *offset);

static inline void amounts_add(struct amounts *sum, const struct amounts *more)
{
    sum->elements += more->elements;
    sum->trained += more->trained;
    sum->trained_fp32 += more->trained_fp32;
    sum->copies += more->copies;
    sum->slot += more->slot;
    sum->resident += more->resident;
    for (int g = 0; g < HAPT_PARAMETER_GROUPS; g++) sum->summed[g] += more->summed[g];
}

#endif
