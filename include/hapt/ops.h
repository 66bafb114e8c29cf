/*
 * THE operator table: everything the system knows of an operator stands in its row (src/model/ops.c).
 *
 * Index signature, one letter per dimension: "bti,io,o?->bto". A letter in the inputs but not in an output is
 * contracted (summed); '?' ends an optional input, a term that is added ('?' in the outputs: its gradient, absent when
 * the forward operator lacks that input; it is made of the last input alone); a scalar is an operand without letters.
 * Marks behind a letter: !     cannot be sharded in that operand ~     indexed by the values of an integer operand: a
 * shard serves the values in its range; the last shards may be padded
 *   ...   (before the letters of an operand) any number of leading dimensions, the same in every operand that has it:
 * they get the letters b, t, y, z, which such a signature then uses for nothing else /3h   three equal blocks, each of
 * which is sharded when letter h is (/h: one block): heads inside a width From it derive shapes, FLOPs, bytes and all
 * sharding rules (HAP Fig. 9): an operator whose operands are all sharded on letter x yields outputs sharded on x where
 * they have it, and partial sums (all-reduce) where not.
 */
#ifndef HAPT_OPS_H
#define HAPT_OPS_H

#include "hapt/collective_kind.h"
#include "hapt/graph.h"

struct hapt_op_type {
    const char *name;
    const char *signature;
    /* Element type of each operand, in order, "icc->c": i int32, f always fp32, c the compute type (fp32 or bf16), the
     * same for all operands c of one call. */
    const char *dtypes;
    bool heavy;   /* matrix product or convolution: counts for module detection (HAPT 5.1) and tensor cores */
    bool product; /* heavy: one matrix product in other words (a convolution), though its letters do not tell its FLOPs
                   */
    bool contracts; /* FLOPs are 2 x the product of all letters; else `flops_per_element` x the largest operand */
    double flops_per_element;
    /* Extra FLOPs or NULL: attention and the like. */
    double (*flops)(const struct hapt_graph *graph, const struct hapt_op *op, double rows_fraction);
    /* Most bytes that any one operand moves, or NULL: of tables only the rows that are named are touched. */
    double (*operand_bytes_limit)(const struct hapt_graph *graph, const struct hapt_op *op, double rows_fraction);
    /* Checks attributes and completes output shapes that letters alone do not give, or NULL. output[o] comes with dims,
     * dtype and the known sizes filled in, 0 where the letter is unknown. */
    enum hapt_status (*infer)(const struct hapt_graph *graph, const struct hapt_op *op, struct hapt_tensor *output);
    /* Appends this forward operator's backward operators, or fails where it passes no gradient on. NULL: no forward
     * operator, and no model has it. */
    enum hapt_status (*gradient)(struct hapt_graph *graph, int op);
    /* Letter k, if any: integer[k] is that letter's size, a shard's is its own (also of a letter that stands inside
     * widths alone: the heads of "/h"); NULL: none. */
    const char *sized;
    /* Over an indexed letter that an output lacks the operator does not sum: it exchanges this many all-reduces of its
     * last output in fp32 among the shards while it runs, and every shard gets whole outputs. 0: plain partial sums. */
    int exchanges;
    /* Linear in all inputs together: of partial sums it makes partial sums (HAP Fig. 9 names none; sums and copies
     * are). */
    bool linear;
    /* What it moves over a mesh axis; HAPT_COLLECTIVE_NONE: it computes. */
    enum hapt_collective_kind collective;
    const char *attributes; /* documentation of integer[] and real[] */
};

int hapt_op_type_count(void);
const struct hapt_op_type *hapt_op_type_at(int type);
int hapt_op_type_find(const char *name); /* -1: unknown */

/* The letter (lower case) of dimension `dim` of input/output operand `index`, whether it may be sharded, and with which
 * letter it then is (its own, but for "/3h") and in how many blocks. */
struct hapt_signature_operand {
    int dims;
    char letter[HAPT_MAX_DIMS], along[HAPT_MAX_DIMS];
    int blocks[HAPT_MAX_DIMS];
    bool shardable[HAPT_MAX_DIMS], indexed[HAPT_MAX_DIMS];
    bool optional;
    bool ellipsis; /* was written with "..." */
};
struct hapt_signature {
    int input_count, output_count;
    struct hapt_signature_operand input[HAPT_MAX_INPUTS], output[HAPT_MAX_OUTPUTS];
};
/* The signature of an operator of a graph: "..." stands for as many dimensions as its first operand that has it shows.
 */
const struct hapt_signature *hapt_op_signature_of(const struct hapt_graph *graph, const struct hapt_op *op);
/* The signature by type alone: counts of operands; "..." stands for two dimensions. */
const struct hapt_signature *hapt_op_signature(int type);

/* Shapes and types of a forward operator's outputs, from its inputs: fills output[o].dims/shape/dtype of all outputs.
 * HAPT_ERR_INPUT names the operator and the tensor that does not fit. */
enum hapt_status hapt_op_infer(const struct hapt_graph *graph, const struct hapt_op *op, struct hapt_tensor *output);

/* Cost of one whole microbatch, or of the share `fraction` of its rows (parameters count whole in bytes). */
double hapt_op_flops(const struct hapt_graph *graph, const struct hapt_op *op, double fraction);
double hapt_op_bytes(const struct hapt_graph *graph, const struct hapt_op *op, double fraction);

#endif
