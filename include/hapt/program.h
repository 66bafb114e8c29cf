/*
 * SPMD programs: what one rank of a submesh executes (HAP 4.1-4.3).
 *
 * A submesh (n, m) has two axes. Every tensor has a property per axis; every step is a computation on local shards or a
 * collective over one axis. Data parallelism is the program whose inputs are sharded on their batch dimension: the rest follows
 * from the operators' index signatures.
 */
#ifndef HAPT_PROGRAM_H
#define HAPT_PROGRAM_H

#include <stdio.h>

#include "hapt/graph.h"
#include "hapt/ops.h"

#define HAPT_MESH_AXES 2

enum hapt_property_kind {
    HAPT_PROPERTY_IDENTITY,   /* every rank holds the whole tensor */
    HAPT_PROPERTY_ALL_GATHER, /* sharded on dimension `dim`; concatenated shards are the tensor */
    HAPT_PROPERTY_ALL_REDUCE  /* partial sums; their sum is the tensor */
};
struct hapt_property { enum hapt_property_kind kind; int dim; };

struct hapt_program_tensor {
    int tensor; /* index in the graph */
    struct hapt_property property[HAPT_MESH_AXES];
    int64_t shape[HAPT_MAX_DIMS]; /* local */
};

enum hapt_step_kind { HAPT_STEP_COMPUTE, HAPT_STEP_ALL_REDUCE, HAPT_STEP_ALL_GATHER, HAPT_STEP_REDUCE_SCATTER };
struct hapt_program_step {
    enum hapt_step_kind kind;
    int op;     /* COMPUTE: operator of the graph */
    int tensor; /* collective: program tensor */
    int axis;   /* collective: 0 (nodes), 1 (devices of a node), -1 both */
};

enum hapt_section {
    HAPT_SECTION_FORWARD,  /* once per microbatch */
    HAPT_SECTION_BACKWARD, /* once per microbatch */
    HAPT_SECTION_REDUCE,   /* once per step: gradients of parameters across the submesh */
    HAPT_SECTION_COUNT
};

/* Tensors (graph indices, ascending) that enter or leave the range [first_op, end_op). */
struct hapt_boundary { int count; int *tensor; };

struct hapt_program {
    const struct hapt_graph *graph;
    int first_op, end_op; /* forward operators */
    int nodes, devices;   /* mesh (n, m) */
    int tensor_count;
    struct hapt_program_tensor *tensor;
    int *local; /* [graph->tensor_count] program tensor of a graph tensor, or -1 */
    int step_count[HAPT_SECTION_COUNT];
    struct hapt_program_step *step[HAPT_SECTION_COUNT];
    struct hapt_boundary forward_in;   /* activations made before first_op and read here (by forward or backward operators) */
    struct hapt_boundary forward_out;  /* activations made here and read by operators of ranges behind */
    struct hapt_boundary backward_in;  /* gradients written first behind end_op, read or added to here */
    struct hapt_boundary backward_out; /* gradients written here, read or added to by ranges before */
    int inputs;                        /* bit r: reads the input of role r */
};

/* Batch-sharded program of a range over n x m ranks. HAPT_ERR_INFEASIBLE when the rows do not divide or an operator's signature
 * forbids it. Rank-local, deterministic; all ranks of a submesh have equal shapes. */
enum hapt_status hapt_program_data_parallel(const struct hapt_graph *graph, int first_op, int end_op, int nodes,
                                            int devices, struct hapt_arena *arena, struct hapt_program **program);
enum hapt_status hapt_program_check(const struct hapt_program *program);
/* Readable listing, one step a line. */
void hapt_program_print(const struct hapt_program *program, FILE *stream);
/* FLOPs of one rank in a section. */
double hapt_program_flops(const struct hapt_program *program, enum hapt_section section);
/* Bytes of all gradients that REDUCE sums, one rank. */
double hapt_program_reduce_bytes(const struct hapt_program *program);

#endif
