/*
 * The state of a graph that is being expanded by the instructions of one axis: which versions of every tensor there
 * are. Applying a program and completing one both walk over the operators with it, so both mean the same by a version.
 * Private to the room.
 */
#ifndef HAPT_SPMD_EXPANSION_H
#define HAPT_SPMD_EXPANSION_H

#include "rules.h"

#define NONE (-1)

/* A version of a tensor of sharding->graph. */
struct version {
    int tensor;
    struct hapt_property property;
    int next;   /* older version of the same tensor, or NONE */
    int maker;  /* node that writes it first; NONE: inputs of the model and layouts of parameters */
    int writer; /* ... and last */
    bool valid; /* may be read; of a parameter's gradient: holds a part of the sum */
    bool alone; /* what was added to a gradient in a layout that no version has */
    int index;  /* in the expanded graph, once numbered */
};

/* An operator of the expanded graph. */
struct node {
    int op;     /* of sharding->graph, or NONE: a communication or the addition behind it */
    int type;   /* row of the operator table */
    int anchor; /* operator of sharding->graph beside which it stands, op_count: the end; NONE: nobody reads it yet */
    int side;   /* -1 before the anchor, 0 is the anchor, 1 behind */
    struct hapt_cut cut;
    unsigned once, accumulate;
    bool exchange;
    int from_dim, to_dim;
    int input[HAPT_MAX_INPUTS], output[HAPT_MAX_OUTPUTS]; /* versions, or NONE */
    int forward_op;
};

struct expansion {
    const struct hapt_sharding *sharding; /* so far */
    const struct hapt_graph *graph;       /* sharding->graph */
    int axis_index;
    struct hapt_axis axis;
    struct hapt_arena *scratch;
    int next_op; /* operators before are done */
    int version_count, version_room, node_count, node_room;
    struct version *version;
    struct node *node;
    int *newest; /* [graph->tensor_count] newest version, or NONE */
    int *alone;  /* [graph->tensor_count] the version that stands alone, or NONE */
    int *layout; /* [graph->tensor_count] version that is a parameter's layout, or NONE */
};

enum hapt_status expansion_begin(struct expansion *expansion, const struct hapt_sharding *sharding, int axis_index,
                                 const struct hapt_axis *axis, struct hapt_arena *scratch);
/* The next operator, by a rule of it. */
enum hapt_status expansion_compute(struct expansion *expansion, int op, const struct hapt_rule *rule);
enum hapt_status expansion_communicate(struct expansion *expansion, const struct hapt_axis_instruction *instruction);
/* The version of `tensor` with that property that operator `op` can read, or NONE. Makes none. */
int expansion_find(const struct expansion *expansion, int tensor, struct hapt_property property, int op);
/* Can operator `op` read the version? */
bool expansion_sees(const struct expansion *expansion, int version, int op);
/* All operators are done: the gradient of every trained parameter is in its layout, once. */
enum hapt_status expansion_check_end(const struct expansion *expansion);
/* The version that update reads of a parameter's gradient, or NONE. */
int expansion_final(const struct expansion *expansion, int gradient);

static inline bool expansion_is_parameter_gradient(const struct hapt_graph *graph, int tensor)
{
    const struct hapt_tensor *gradient = &graph->tensor[tensor];
    return gradient->kind == HAPT_TENSOR_GRADIENT && gradient->primal >= 0 &&
           graph->tensor[gradient->primal].kind == HAPT_TENSOR_PARAMETER;
}
/* The gradient that a parameter's update reads (not a version that an outer axis sums). */
static inline bool expansion_is_trained_gradient(const struct hapt_graph *graph, int tensor)
{
    if (!expansion_is_parameter_gradient(graph, tensor)) return false;
    const struct hapt_tensor *primal = &graph->tensor[graph->tensor[tensor].primal];
    return primal->trainable && primal->gradient == tensor;
}

#endif
