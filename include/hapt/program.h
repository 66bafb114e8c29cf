/*
 * SPMD programs: the steps that one rank of a submesh executes (HAP 4.1-4.3).
 *
 * A program is the part of a sharded graph (sharding.h) that belongs to one range of its operators. Every tensor has a
 * property per mesh axis. Every step is a computation on local shards or a collective over one axis.
 */
#ifndef HAPT_PROGRAM_H
#define HAPT_PROGRAM_H

#include <stdio.h>

#include "hapt/sharding.h"

struct hapt_program_tensor {
    int tensor; /* index in the expanded graph */
    struct hapt_property property[HAPT_MESH_AXES];
    int64_t shape[HAPT_MAX_DIMS]; /* local */
    int root; /* program tensor whose storage it uses (hapt_sharding.storage): itself or a lower index */
};

struct hapt_program_step {
    int op;                         /* of the expanded graph */
    enum hapt_collective_kind kind; /* HAPT_COLLECTIVE_NONE: a computation */
    /* Collective: its mesh axis. Computation: the axis over which the operator communicates while it runs
     * (hapt_op_type.inner_all_reduces), or -1. */
    int axis;
    unsigned first_rank_inputs[HAPT_MESH_AXES]; /* computation: bit i: only the axis' first rank has input i */
    bool weight; /* hapt_sharding.weight: in HAPT_SECTION_WEIGHT if the sharding is split, else in BACKWARD */
};

enum hapt_section {
    HAPT_SECTION_FORWARD,  /* once per microbatch */
    HAPT_SECTION_BACKWARD, /* once per microbatch */
    HAPT_SECTION_WEIGHT,   /* once per microbatch, of split shardings: gradients of parameters, taken from BACKWARD */
    HAPT_SECTION_REDUCE,   /* once per step: parameter gradients across the submesh */
    HAPT_SECTION_COUNT
};

/*
 * Tensors (of the expanded graph, ascending) that enter or leave the range [first_op, end_op); never partial sums.
 * Programs of other ranges may use other layouts, so tensors of two programs are matched by origin. One version of each
 * origin leaves a range; every version that is read enters one.
 */
struct hapt_boundary {
    int count;
    int *tensor;
};

struct hapt_program {
    const struct hapt_sharding *sharding;
    const struct hapt_graph *graph; /* the sharding's expanded graph */
    const struct hapt_graph *shard; /* the same with local shapes and attributes; lives as long as the sharding */
    const int *origin;              /* [graph->tensor_count] tensor of the source */
    int first_op, end_op;           /* forward operators of the source */
    int nodes, devices; /* sizes of mesh axis 0 and 1: n, m if both are data-parallel, else the degrees dp, tp */
    int tensor_count;
    struct hapt_program_tensor *tensor;
    int *local; /* [graph->tensor_count] program tensor of a graph tensor, or -1 */
    int step_count[HAPT_SECTION_COUNT];
    struct hapt_program_step *step[HAPT_SECTION_COUNT];
    struct hapt_boundary
        forward_in; /* activations made before first_op and read here (by forward or backward operators) */
    struct hapt_boundary forward_out;  /* activations made here and read by operators of later ranges */
    struct hapt_boundary backward_in;  /* gradients first written by ranges from end_op on, and read or added to here */
    struct hapt_boundary backward_out; /* gradients written here, read or added to by earlier ranges */
    int inputs;                        /* bit r: the program reads the input of role r */
};

/* The program of operators [first_op, end_op). The sharding must outlive it. The steps of a split sharding that only
 * make gradients of parameters are in HAPT_SECTION_WEIGHT, in the same order. HAPT_ERR_INFEASIBLE if partial sums cross
 * one of its ends. Rank-local and deterministic; shapes are those of sharding->mesh_coordinate. */
enum hapt_status hapt_program_build(const struct hapt_sharding *sharding, int first_op, int end_op,
                                    struct hapt_arena *arena, struct hapt_program **program);
/* Seconds of a step that moves data; NaN if unknown. */
struct hapt_program_costs {
    const void *context;
    double (*step_s)(const void *context, const struct hapt_program *program, const struct hapt_program_step *step);
};
/* Prints a readable listing, one step a line: its operator; the index sharded over each axis of several ranks (-:
 * replicated, +: partial sums); its tensors with local shapes and properties; the cost of communication (`costs` NULL:
 * not printed). */
void hapt_program_print(const struct hapt_program *program, const struct hapt_program_costs *costs, FILE *stream);

#endif
