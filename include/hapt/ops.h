/*
 * THE operator table: each row (src/model/ops_*.c) holds everything the system knows about one operator.
 *
 * The index signature has one letter per dimension: "bti,io,o?->bto". A letter that is in the inputs but not in an
 * output is contracted (summed). An operand without letters is a scalar. A '?' ends an optional input, which is an
 * added term. In the outputs, '?' marks its gradient: it is computed from the last input alone, and is absent if the
 * forward operator lacks the optional input.
 *
 * Marks after a letter (and "..." before the letters):
 * - "!"    this dimension cannot be sharded in that operand
 * - "!+"   nor can it, and it may be longer than the letter's size, which an operand before it gives
 * - "~"    indexed by an integer operand: a shard serves the values in its range; the last shards may be padded
 * - "..."  any number of leading dimensions, equal in all operands that have it; they get letters b, t, y, z, k
 *          (reserved)
 * - "/3h"  three equal blocks, each sharded when letter h is ("/h": one block): heads inside a width
 *
 * The letters of some operators depend on attributes or shapes (reshape). The row's signature is then an example, and
 * `sign` writes that of one operator.
 *
 * Shapes, FLOPs, bytes and all sharding rules are derived from the signature (HAP Fig. 9). If all operands that have
 * letter x are sharded on x, outputs with x are sharded on x, and outputs without it are partial sums (all-reduce).
 */
#ifndef HAPT_OPS_H
#define HAPT_OPS_H

#include "hapt/collective_kind.h"
#include "hapt/graph.h"

enum { HAPT_SIGNATURE_SIZE = 96 }; /* characters of a signature, with the final zero */

struct hapt_op_type {
    const char *name;
    const char *signature;
    /* Writes the signature of one operator, without "...", or NULL. It checks the attributes and may read the shapes of
     * inputs, in backward operators also those of outputs. HAPT_ERR_INPUT names the operator. */
    enum hapt_status (*sign)(const struct hapt_graph *graph, const struct hapt_op *op, char text[HAPT_SIGNATURE_SIZE]);
    /* Element type of each operand, in order, "icc->c": i int32, f always fp32, c the compute type (fp32 or bf16, the
     * same for all c operands of one call). */
    const char *dtypes;
    bool heavy;     /* matrix product or convolution: counts for module detection (HAPT 5.1) and tensor cores */
    bool product;   /* heavy: a matrix product in another form (convolution); its letters do not give its FLOPs */
    bool contracts; /* FLOPs are 2 x the product of all letters; else `flops_per_element` x the largest operand */
    double flops_per_element;
    /* Extra FLOPs (attention and the like), or NULL. */
    double (*flops)(const struct hapt_graph *graph, const struct hapt_op *op, double rows_fraction);
    /* Maximum bytes that one operand moves, or NULL. For tables: only the rows that are looked up. */
    double (*operand_bytes_limit)(const struct hapt_graph *graph, const struct hapt_op *op, double rows_fraction);
    /* Bytes that it moves in a pass over memory before it computes, or NULL: hapt_op_bytes does not count them. */
    double (*pass_bytes)(const struct hapt_graph *graph, const struct hapt_op *op);
    /* Checks attributes and fills in output sizes that the letters alone do not give, or NULL. On entry output[o] has
     * dims, dtype and the known sizes; 0 where the letter is unknown. */
    enum hapt_status (*infer)(const struct hapt_graph *graph, const struct hapt_op *op, struct hapt_tensor *output);
    /* The backward operator of a forward operator that has one: its type, and its operands "READS>INPUTS", a character
     * each. READS: 0, 1, ... inputs, A, B, ... outputs, d the gradient of the first output. INPUTS: those whose
     * gradients it computes, as far as the operator has them. "0d>0": reads input 0 and dy, and computes dx. */
    const char *backward, *backward_operands;
    /* A backward operator for frozen parameters, or NULL: reads the same and computes the gradient of input 0 alone. */
    const char *backward_frozen;
    /* For others: appends the backward operators, or fails if it passes no gradient. Neither: not a forward operator;
     * no model contains it. */
    enum hapt_status (*gradient)(struct hapt_graph *graph, int op);
    /* The letters, in order, whose sizes are in integer[]: integer[k] is the size of letter k, or a shard's own size. A
     * letter inside widths only (heads of "/h") may be listed. NULL: none. */
    const char *sized_letters;
    /* The input that is a packed parameter (packing.h), of which a kernel needs an unpacked copy; 0: none. */
    int packed;
    /* Number of fp32 all-reduces of its last output that the operator runs among the shards of an indexed letter that
     * an output lacks. Every shard then gets the full output. 0: outputs are plain partial sums. */
    int inner_all_reduces;
    /* Linear in all inputs together, so partial sums in give partial sums out. (HAP Fig. 9 names none; sums and copies
     * qualify.) */
    bool linear;
    /* Its gradients have the compute type, so it reads no parameter itself, but a copy of it. */
    bool reads_no_parameter;
    /* integer[0] is the number of values of a statistic over a whole microbatch: a multiple of its rows. */
    bool counts_batch;
    /* Inputs that are running statistics, a bit each: parameters that training averages and does not differentiate. */
    unsigned statistics;
    /* integer[0] is a number of its own: operators that differ in it alone are equal for plans and profiles. */
    bool numbered;
    /* The collective it runs over a mesh axis; HAPT_COLLECTIVE_NONE: it computes. */
    enum hapt_collective_kind collective;
    const char *attributes; /* documentation of integer[] and real[] */
};

int hapt_op_type_count(void);
const struct hapt_op_type *hapt_op_type_at(int type);
int hapt_op_type_find(const char *name); /* -1: unknown */

/* Per dimension of an operand: its letter (lower case), whether it may be sharded, the letter it is sharded with (its
 * own, except for "/3h") and in how many blocks. */
struct hapt_signature_operand {
    int dims;
    char letter[HAPT_MAX_DIMS], sharded_with[HAPT_MAX_DIMS];
    int blocks[HAPT_MAX_DIMS];
    bool shardable[HAPT_MAX_DIMS], indexed[HAPT_MAX_DIMS], longer[HAPT_MAX_DIMS];
    bool optional;
    bool ellipsis; /* written with "..." */
};
struct hapt_signature {
    const char *text; /* what it was read from */
    int input_count, output_count;
    struct hapt_signature_operand input[HAPT_MAX_INPUTS], output[HAPT_MAX_OUTPUTS];
};
/* Signature of an operator in a graph. "..." has as many dimensions as in the first operand that has it. If `sign`
 * fails, it is that of the row. Safe in several threads. */
const struct hapt_signature *hapt_op_signature_of(const struct hapt_graph *graph, const struct hapt_op *op);
/* Signature by type alone, for operand counts; "..." stands for two dimensions. */
const struct hapt_signature *hapt_op_signature(int type);

/* Infers shapes and types of a forward operator's outputs from its inputs: fills output[o].dims/shape/dtype of all
 * outputs. HAPT_ERR_INPUT names the operator and the tensor that does not fit. */
enum hapt_status hapt_op_infer(const struct hapt_graph *graph, const struct hapt_op *op, struct hapt_tensor *output);

/* Adds integer[] to a hash, apart from a number of its own (numbered). */
uint64_t hapt_op_hash_integers(uint64_t hash, const struct hapt_op *op);

/* Cost of one full microbatch, or of the share `fraction` of its rows (bytes always count all of the parameters). */
double hapt_op_flops(const struct hapt_graph *graph, const struct hapt_op *op, double fraction);
double hapt_op_bytes(const struct hapt_graph *graph, const struct hapt_op *op, double fraction);
/* Bytes of the pass before the operator computes; mostly 0. */
double hapt_op_pass_bytes(const struct hapt_graph *graph, const struct hapt_op *op);

#endif
