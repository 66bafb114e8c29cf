/*
 * How a whole graph is laid out over one logical mesh (HAP 4.1-4.3).
 *
 * The program of one mesh axis is a list of instructions over a graph's operators: compute one on shards of an index,
 * or make another version of a tensor by a collective. Applied to the graph it gives the expanded graph: the same
 * operators on versions of the same tensors, and the collectives as operators between them. Every instruction is
 * checked by the Hoare triples that the index signatures of the operators mean (src/spmd/rules.h): what cannot be
 * derived is refused, so an expanded graph is the proof that its shards together compute what the source computes.
 *
 * The mesh has two axes, the outer one 0 first. Its collectives are ordinary operators to axis 1, so a dimension that
 * both axes shard is split by axis 0 first and by axis 1 inside. Shares need not be even: they are whole units of the
 * dimension, by ratios (ratios.h). Every rank runs the same operators; shapes alone differ.
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
 * Which part of a dimension a rank holds. The dimension is `blocks` equal blocks, one behind the other (q, k and v of
 * some heads), each made of units of `unit` elements that stay together (the width of a head); a rank holds its run of
 * units of every block. Zeros count as ones. `ratio`: which of the axis' ratio vectors says how many units (hapt_axis).
 * A sharding holds properties in canonical form, where equal shares have equal blocks, units and ratios, and nothing is
 * set that means nothing.
 */
struct hapt_property {
    enum hapt_property_kind kind;
    int dim, blocks;
    int64_t unit;
    int ratio;
};

/* A mesh axis and how its ranks share what is sharded over it: ratio[k][rank], one vector a model segment (HAP 5.2),
 * each summing to 1; NULL: evenly. Units are shared out by hapt_split (ratios.h). */
struct hapt_axis {
    int size;
    int ratio_count;
    const double *ratio; /* [ratio_count][size] */
};

#define HAPT_CUT_WHOLE '\0'  /* every operand is whole: replicated */
#define HAPT_CUT_PARTIAL '+' /* a linear operator on partial sums: every operand is partial */

/* An index of an operator and how it is cut. Operands that carry the letter alone are sharded with these blocks and
 * units; where it is an index inside a width ("/3h") the blocks and units of the width follow from the shapes, in units
 * of the index. */
struct hapt_cut {
    char letter;
    int blocks;
    int64_t unit;
    int ratio;
};

/*
 * One instruction of the program of one axis (HAP 4.1), in the order of the graph's operators: either operator `op` run
 * on shards of a cut, or (op -1) a communication that makes another version of `tensor`. Every operator stands once.
 *
 * Versions. A tensor may have several, one a property. An operator reads for every input the version that its cut asks
 * for, the newest one.
 * - Inputs of the model are there in every version that is asked for and are never communicated.
 * - A parameter has one layout, that of its first reader; where a slice of the parameter comes before, it is whole.
 * Nothing but slices is made of it, each for the operators of one forward operator (it and its backward ones).
 * - A version of an activation is there for the operators of its maker and of those behind; one that is made in the
 * backward part for the operators of one forward operator. (So every range of forward operators has what it reads.)
 * - A writer that adds to the gradient of an activation adds to the version that has the property of what it adds, and
 * the others are void from then on. Where there is none, what it adds stands alone until the next communication of that
 * tensor, which must bring it to a version that there is; there it is added.
 * - Gradients of parameters are summed over the microbatches as they are written, in a version of its own for every
 * property; behind all operators they are brought to the layout of their parameter, once a step (HAPT_SECTION_REDUCE).
 * Communications that remove partial sums stand behind the last writer, the others before their first reader; those
 * that nobody reads are left out.
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
/* All of it in `arena`. */
enum hapt_status hapt_axis_program_copy(const struct hapt_axis_program *program, struct hapt_arena *arena,
                                        struct hapt_axis_program *copy);

struct hapt_sharding {
    const struct hapt_graph *source; /* what was sharded */
    /* Expanded: the tensors of the source first, with their indices and whole shapes (of several versions: an
     * activation as its operator makes it, a parameter's gradient as the update reads it), more versions behind.
     * hapt_op.forward_op of every operator is a forward operator of the source. */
    const struct hapt_graph *graph;
    /* The same graph as the rank at `place` sees it: local shapes, attributes that are sizes. Costs and kernels are
     * asked of it. */
    const struct hapt_graph *shard;
    struct hapt_axis axis[HAPT_MESH_AXES];
    int place[HAPT_MESH_AXES];
    int reduce_first; /* operators [reduce_first, graph->op_count) bring gradients of parameters to their layout, once a
                         step */
    struct hapt_property (*property)[HAPT_MESH_AXES]; /* [graph->tensor_count] */
    struct hapt_cut (*cut)[HAPT_MESH_AXES];           /* [graph->op_count]; of a collective on its own axis: nothing */
    /* [graph->op_count] bit i: input i is a term of partial sums and is added by the first rank of the axis alone (a
     * bias). */
    unsigned (*once)[HAPT_MESH_AXES];
    int *exchange; /* [graph->op_count] axis over which the operator exchanges while it runs (hapt_op_type.exchanges),
                      or -1 */
    int64_t *first_value; /* [graph->op_count] hapt_call.first_value at `place` */
    int *origin;          /* [graph->tensor_count] tensor of the source of which it is a version */
    int *source_op; /* [graph->op_count] operator of the source; of a collective: the one beside which it stands */
    /* [graph->tensor_count] the tensor, itself or a lower index, in whose place it stands: all-reduces work in place
     * where nothing else reads the partial sums. */
    int *storage;
    bool *parted; /* [source->forward_count + 1] no range can begin or end there: partial sums would cross */
};

/* One rank. The sharding lives in `arena`, with the graph. All functions here are rank-local and deterministic. */
enum hapt_status hapt_sharding_trivial(const struct hapt_graph *graph, struct hapt_arena *arena,
                                       struct hapt_sharding **sharding);
/* The sharding with one more axis, seen from place 0. The axes come in order. HAPT_ERR_INFEASIBLE names the instruction
 * that the rules do not allow, or what is missing at the end. An axis of one rank needs no program (NULL). */
enum hapt_status hapt_sharding_apply(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis,
                                     const struct hapt_axis_program *program, struct hapt_arena *arena,
                                     struct hapt_sharding **expanded);
/* The same sharding for another rank: shapes, sizes and first values of its own; all else is shared. */
enum hapt_status hapt_sharding_at(const struct hapt_sharding *sharding, const int *place, struct hapt_arena *arena,
                                  struct hapt_sharding **local);
/* The whole instruction list for chosen cuts, one for every operator of sharding->graph: each version that a cut asks
 * for is made of the cheapest one that there is. A parameter whose readers differ is whole. HAPT_ERR_INFEASIBLE where a
 * cut cannot be had. */
enum hapt_status hapt_axis_program_complete(const struct hapt_sharding *sharding, int axis_index,
                                            const struct hapt_axis *axis, const struct hapt_cut *cut,
                                            struct hapt_arena *arena, struct hapt_axis_program **program);

/* The program that shares out the rows by the axis' (first) ratios and all else follows. HAPT_ERR_INFEASIBLE where an
 * operator's signature forbids it or there are fewer rows than devices. */
enum hapt_status hapt_axis_program_data_parallel(const struct hapt_sharding *sharding, int axis_index,
                                                 const struct hapt_axis *axis, struct hapt_arena *arena,
                                                 struct hapt_axis_program **program);

/* The program that cuts products as hapt_sharding_tensor_parallel does. */
enum hapt_status hapt_axis_program_tensor_parallel(const struct hapt_sharding *sharding, int axis_index,
                                                   const struct hapt_axis *axis, struct hapt_arena *arena,
                                                   struct hapt_axis_program **program);

/* Rows over both axes, as evenly as whole rows can be; the first ranks have the larger shares. HAPT_ERR_INFEASIBLE when
 * a rank would have none or an operator's signature forbids it. */
enum hapt_status hapt_sharding_data_parallel(const struct hapt_graph *graph, int nodes, int devices,
                                             struct hapt_arena *arena, struct hapt_sharding **sharding);
/* Rows over the ranks of one axis by its ratios (ratio vector 0), one row at least each: data parallelism on unlike
 * devices (HAP 5). HAPT_ERR_INFEASIBLE when there are fewer rows than ranks or an operator's signature forbids it. */
enum hapt_status hapt_sharding_rows(const struct hapt_graph *graph, const struct hapt_axis *axis,
                                    struct hapt_arena *arena, struct hapt_sharding **sharding);
/* Rows over `dp` on axis 0 in the same way as above, operators over `tp` on axis 1 evenly (Shoeybi et al. 2019,
 * Megatron-LM): a product with a parameter is cut by columns where its input is whole and whatever reads its output can
 * work on shards down to a product that sums over the cut index (by rows); tables are cut by the values that index
 * them, which need not divide. What cannot be cut stays whole. */
enum hapt_status hapt_sharding_tensor_parallel(const struct hapt_graph *graph, int dp, int tp, struct hapt_arena *arena,
                                               struct hapt_sharding **sharding);

/* False when partial sums cross an end of forward operators [first_op, end_op) of the source: no program can stand
 * there. */
bool hapt_sharding_allows(const struct hapt_sharding *sharding, int first_op, int end_op);
/* Mixes how every operator is laid out, and the collectives beside it, into mark [source->op_count]: ranges of equal
 * structure whose operators have equal marks have equal programs. */
void hapt_sharding_mark(const struct hapt_sharding *sharding, uint64_t *mark);
/* Bytes of all all-reduces inside operator `op` of a shard graph together (hapt_op_type.exchanges). */
double hapt_sharding_exchange_bytes(const struct hapt_graph *shard, int op);

/* ---- properties ---- */

bool hapt_property_same(struct hapt_property a, struct hapt_property b);
/* "whole", "partial", "sharded(d)" and what else matters: "sharded(2) 3 blocks of units of 16 by ratio 1". */
#define HAPT_PROPERTY_TEXT 80
const char *hapt_property_text(struct hapt_property property, char buffer[HAPT_PROPERTY_TEXT]);
/* Of a dimension of `extent` elements, the elements [*first, *first + *count) of every block that a rank of the axis
 * holds. False when blocks and units do not divide the dimension or there are fewer units than ranks. */
bool hapt_property_share(struct hapt_property property, const struct hapt_axis *axis, int64_t extent, int rank,
                         int64_t *first, int64_t *count);

/* What a rank holds of a tensor of the expanded graph: in every dimension runs of the whole, in the order in which they
 * stand in its shard. A whole or partial tensor is one run. */
#define HAPT_MAX_RUNS 20
struct hapt_box_run {
    int64_t start, count;
};
struct hapt_box {
    int dims;
    int runs[HAPT_MAX_DIMS];
    int64_t extent[HAPT_MAX_DIMS]; /* local: the sum of the runs */
    struct hapt_box_run run[HAPT_MAX_DIMS][HAPT_MAX_RUNS];
};
void hapt_sharding_box(const struct hapt_sharding *sharding, int tensor, const int *place, struct hapt_box *box);

#endif
