/*
 * The state of a graph while the instructions of one axis expand it: the versions that exist of every tensor. Both
 * applying and completing a program walk over the operators with it, so a version means the same in both. Private to
 * the room.
 */
#ifndef HAPT_SPMD_EXPANSION_H
#define HAPT_SPMD_EXPANSION_H

#include "hapt/rules.h"

#define NONE (-1)

/* A version of a tensor of sharding->graph. */
struct version {
    int tensor;
    struct hapt_property property;
    int next;             /* older version of the same tensor, or NONE */
    int maker;            /* node that writes it first; NONE: model inputs and layouts of parameters */
    int writer;           /* node that writes it last */
    bool valid;           /* may be read; for a parameter's gradient: holds a part of the sum */
    bool separate_addend; /* a gradient's summand in a layout that no version has */
    int index;            /* in the expanded graph, once numbered */
};

/* An operator of the expanded graph. */
struct node {
    int op;     /* of sharding->graph; NONE: a communication or the addition after it */
    int type;   /* row of the operator table */
    int anchor; /* operator of sharding->graph next to it; op_count: the end; NONE: no reader yet */
    int side;   /* -1 before the anchor, 0 is the anchor, 1 after */
    struct hapt_cut cut;
    unsigned first_rank_inputs, accumulate;
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
    int next_op; /* operators before it are done */
    int version_count, version_room, node_count, node_room;
    struct version *version;
    struct node *node;
    int *newest;          /* [graph->tensor_count] newest version, or NONE */
    int *separate_addend; /* [graph->tensor_count] the separate addend, or NONE */
    int *layout;          /* [graph->tensor_count] version that is a parameter's layout, or NONE */
};

enum hapt_status expansion_begin(struct expansion *expansion, const struct hapt_sharding *sharding, int axis_index,
                                 const struct hapt_axis *axis, struct hapt_arena *scratch);
/* Runs the next operator, by one of its rules. */
enum hapt_status expansion_compute(struct expansion *expansion, int op, const struct hapt_rule *rule);
enum hapt_status expansion_communicate(struct expansion *expansion, const struct hapt_axis_instruction *instruction);
/* Runs all operators by one rule each, rule [op_count], with the communications that the rules need. program: they
 * become its instructions, in scratch; NULL: they are not listed. */
enum hapt_status expansion_complete(struct expansion *expansion, const struct hapt_rule *rule,
                                    struct hapt_axis_program *program);
/* The program that the rules complete to, in `arena`. */
enum hapt_status expansion_program_of_rules(const struct hapt_sharding *sharding, int axis_index,
                                            const struct hapt_axis *axis, const struct hapt_rule *rule,
                                            struct hapt_arena *arena, struct hapt_axis_program **program);
/* hapt_sharding_apply with the program that the rules complete to, in one walk. */
enum hapt_status expansion_apply_rules(const struct hapt_sharding *sharding, int axis_index,
                                       const struct hapt_axis *axis, const struct hapt_rule *rule,
                                       struct hapt_arena *arena, struct hapt_sharding **expanded);
/* The version of `tensor` with that property that operator `op` can read, or NONE. Makes no version. */
int expansion_find(const struct expansion *expansion, int tensor, struct hapt_property property, int op);
/* True if operator `op` can read the version. */
bool expansion_sees(const struct expansion *expansion, int version, int op);
/* Call after all operators: checks that the gradient of every trained parameter is in its layout, once. */
enum hapt_status expansion_check_end(const struct expansion *expansion);
/* The version of a parameter's gradient that its update reads, or NONE. */
int expansion_final(const struct expansion *expansion, int gradient);

/* The cut of an elementwise operator on an axis where its tensor has that property. */
struct hapt_cut expansion_cut_through(const struct hapt_graph *graph, const struct hapt_op *op,
                                      struct hapt_property property);

/* True for the gradient that a parameter's update reads (not for a version that an outer axis sums). */
static inline bool expansion_is_trained_gradient(const struct hapt_graph *graph, int tensor)
{
    if (!hapt_graph_is_parameter_gradient(graph, tensor)) return false;
    const struct hapt_tensor *primal = &graph->tensor[graph->tensor[tensor].primal];
    return primal->trainable && primal->gradient == tensor;
}

#endif
