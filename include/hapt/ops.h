/*
 * THE operator table: everything the system knows of an operator stands in its row (src/model/ops.c).
 *
 * Index signature, one letter per dimension: "bti,io,o?->bto". A letter in the inputs but not in an output is contracted
 * (summed); '!' behind a letter marks a dimension that cannot be sharded in that operand; '?' ends an optional input; a scalar
 * is an operand without letters. From it derive shapes, FLOPs, bytes and all sharding rules (HAP Fig. 9): an operator whose
 * operands are all sharded on letter x yields outputs sharded on x where they have it, and partial sums (all-reduce) where not.
 */
#ifndef HAPT_OPS_H
#define HAPT_OPS_H

#include "hapt/graph.h"

struct hapt_op_type {
    const char *name;
    const char *signature;
    bool heavy;        /* matrix product or convolution: counts for module detection (HAPT 5.1) and tensor cores */
    bool contracts;    /* FLOPs are 2 x the product of all letters; else `flops_per_element` x the largest operand */
    double flops_per_element;
    /* Extra FLOPs or NULL: attention and the like. */
    double (*flops)(const struct hapt_graph *graph, const struct hapt_op *op, double rows_fraction);
    /* Output shapes where letters alone do not give them (dtype too), or NULL. Fills output[o].dims/shape/dtype. */
    enum hapt_status (*infer)(const struct hapt_graph *graph, const struct hapt_op *op, struct hapt_tensor *output);
    /* Appends this forward operator's backward operators, or NULL when it has no gradient. */
    enum hapt_status (*gradient)(struct hapt_graph *graph, int op);
    const char *attributes; /* documentation of integer[] and real[] */
};

int hapt_op_type_count(void);
const struct hapt_op_type *hapt_op_type_at(int type);
int hapt_op_type_find(const char *name); /* -1: unknown */

/* The letter (lower case) of dimension `dim` of input/output operand `index`, and whether it may be sharded. */
struct hapt_signature_operand { int dims; char letter[HAPT_MAX_DIMS]; bool shardable[HAPT_MAX_DIMS]; bool optional; };
struct hapt_signature {
    int input_count, output_count;
    struct hapt_signature_operand input[HAPT_MAX_INPUTS], output[HAPT_MAX_OUTPUTS];
};
const struct hapt_signature *hapt_op_signature(int type);

/* Cost of one whole microbatch, or of the share `fraction` of its rows (parameters count whole in bytes). */
double hapt_op_flops(const struct hapt_graph *graph, const struct hapt_op *op, double fraction);
double hapt_op_bytes(const struct hapt_graph *graph, const struct hapt_op *op, double fraction);

#endif
