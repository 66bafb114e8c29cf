/*
 * How a whole graph is laid out over one logical mesh (HAP 4.1-4.3): a property per tensor and axis, and the collectives that
 * stand between the operators. Derived from the operators' index signatures alone; programs of ranges are views of it.
 *
 * The mesh has two axes. Data parallelism shards rows on both. Tensor parallelism (Shoeybi et al. 2019, Megatron-LM) shards rows
 * on axis 0 and, on axis 1, what the signatures allow: a product with a parameter is cut by columns where its input is whole and
 * whatever reads its output can work on shards down to a product that sums over the cut index (by rows); tables are cut by the
 * values that index them. Partial sums are all-reduced where they arise, in the backward part before anybody reads them; what
 * cannot be cut stays whole on every rank of the axis.
 */
#ifndef HAPT_SHARDING_H
#define HAPT_SHARDING_H

#include "hapt/graph.h"
#include "hapt/ops.h"

#define HAPT_MESH_AXES 2

enum hapt_property_kind {
    HAPT_PROPERTY_IDENTITY,   /* every rank holds the whole tensor */
    HAPT_PROPERTY_ALL_GATHER, /* sharded on dimension `dim`; concatenated shards are the tensor */
    HAPT_PROPERTY_ALL_REDUCE  /* partial sums; their sum is the tensor */
};
/*
 * Which part of a dimension a rank holds. The dimension is `blocks` equal blocks, one behind the other, each made of units of
 * `unit` elements that stay together (the width of a head); a rank holds its run of units of every block. Zeros count as ones.
 * `ratio`: which of the axis' ratio vectors says how many units (hapt_axis).
 *
 * With more than one block a sharded dimension is that many equal blocks, one behind the other, and a rank holds its shard of each
 * (q, k and v of some heads); 0 counts as 1. Where the ranks do not divide an indexed dimension, shards are rounded up: elements
 * behind the tensor's end are padding. */
struct hapt_property {
    enum hapt_property_kind kind;
    int dim, blocks;
    int64_t unit;
    int ratio;
};

/* A mesh axis and how its ranks share what is sharded over it: ratio[k][rank], one vector a model segment (HAP 5.2), each summing
 * to 1; NULL: evenly. Units are shared out by hapt_split (ratios.h). */
struct hapt_axis {
    int size;
    int ratio_count;
    const double *ratio; /* [ratio_count][size] */
};

/* An index of an operator and how it is cut; letter 0: every operand is whole. Operands that carry the letter alone are sharded with
 * these blocks and units; where it is an index inside a width ("/3h") they follow from the shapes. */
struct hapt_cut {
    char letter;
    int blocks;
    int64_t unit;
    int ratio;
};

/*
 * One instruction of the program of one axis (HAP 4.1), in the order of the graph's operators: either operator `op` run on shards
 * of a cut, or (op -1) a communication that makes another version of `tensor`.
 *
 * A tensor may have several versions, one a property. An operator reads for every input the version that its cut asks for; inputs
 * of the model and parameters are there in every version that is asked for (a parameter in one alone). Its outputs have one
 * version until something moves them. A writer that adds to a gradient adds to the version that has the property of what it adds;
 * the other versions are void from then on. Gradients of parameters: what the backward pass leaves is brought to the layout of the
 * parameter once a step (HAPT_SECTION_REDUCE), by communications that stand at the end.
 */
struct hapt_axis_instruction {
    int op;
    struct hapt_cut cut;
    int tensor;
    enum hapt_collective_kind kind;
    struct hapt_property from, to;
};
struct hapt_axis_program {
    int count;
    struct hapt_axis_instruction *instruction;
};

/* A sum over one axis that stands behind an operator. */
struct hapt_sharding_reduction {
    int op;    /* the last writer of the partial sums */
    int first; /* the first one: all writers or none belong to a range */
    int tensor, axis;
};

struct hapt_sharding {
    const struct hapt_graph *graph;
    /* The same graph as one rank sees it: local shapes, attributes that are sizes. Costs and kernels are asked of it. */
    const struct hapt_graph *shard;
    int size[HAPT_MESH_AXES];
    struct hapt_property (*property)[HAPT_MESH_AXES]; /* [graph->tensor_count] as readers find them, behind the reductions */
    /* [graph->op_count] bit i: input i is a term of partial sums and is added by the first rank of the axis alone (a bias). */
    unsigned (*once)[HAPT_MESH_AXES];
    int *exchange; /* [graph->op_count] axis over which the operator exchanges while it runs (hapt_op_type.exchanges), or -1 */
    int reduction_count;
    struct hapt_sharding_reduction *reduction; /* by operator, ascending */
};

/* Rows over both axes. HAPT_ERR_INFEASIBLE when the rows do not divide or an operator's signature forbids it. The sharding lives in
 * `arena`, with the graph. Rank-local, deterministic; all ranks of a mesh have equal shapes. */
enum hapt_status hapt_sharding_data_parallel(const struct hapt_graph *graph, int nodes, int devices, struct hapt_arena *arena,
                                             struct hapt_sharding **sharding);
/* Rows over `dp` on axis 0, operators over `tp` on axis 1. */
enum hapt_status hapt_sharding_tensor_parallel(const struct hapt_graph *graph, int dp, int tp, struct hapt_arena *arena,
                                               struct hapt_sharding **sharding);
/* False when the ends of operators [first_op, end_op) part the writers of one partial sum: no program can stand there. */
bool hapt_sharding_allows(const struct hapt_sharding *sharding, int first_op, int end_op);
/* Mixes how every operator is laid out, and the sums it takes part in, into mark [op_count]: ranges of equal structure whose operators
 * have equal marks have equal programs. */
void hapt_sharding_mark(const struct hapt_sharding *sharding, uint64_t *mark);
/* Bytes of all all-reduces inside operator `op` of a shard graph together (hapt_op_type.exchanges). */
double hapt_sharding_exchange_bytes(const struct hapt_graph *shard, int op);

#endif
