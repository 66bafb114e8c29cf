/*
 * Input: a graph and one program per mesh axis. Output: the expanded graph, i.e. the layout of the whole graph on one
 * logical mesh (HAP 4.1-4.3).
 *
 * The program of an axis is a list of instructions over the graph's operators. An instruction computes an operator on
 * shards of one index, or makes another version of a tensor by a collective. The expanded graph has the same operators
 * on versions of the same tensors, with the collectives as operators between them. Every instruction is checked by
 * Hoare triples, derived from the operators' index signatures (src/spmd/rules.h). An instruction that cannot be derived
 * is refused. So an expanded graph proves that its shards together compute what the source computes.
 *
 * The mesh has two axes; axis 0 is the outer one and comes first. Its collectives are ordinary operators to axis 1. A
 * dimension sharded over both axes is split by axis 0 first, then by axis 1 inside each shard. Shares may be uneven:
 * they are whole units of the dimension, by ratios (ratios.h). Every rank runs the same operators; only shapes differ.
 */
#ifndef HAPT_SHARDING_H
#define HAPT_SHARDING_H

#include "hapt/graph.h"
#include "hapt/ops.h"

#define HAPT_MESH_AXES 2

enum hapt_property_kind {
    HAPT_PROPERTY_REPLICATED, /* every rank holds the full tensor */
    HAPT_PROPERTY_SHARDED,    /* sharded on dimension `dim`; concatenated shards are the tensor */
    HAPT_PROPERTY_PARTIAL     /* partial sums; their sum is the tensor */
};
/*
 * The part of a dimension that a rank holds. The dimension is `blocks` equal consecutive blocks (q, k and v of some
 * heads). A block is made of units of `unit` elements that stay together (the width of a head). A rank holds its run of
 * units of every block. Zeros count as ones. `ratio`: the index of the axis' ratio vector that gives the number of
 * units (hapt_axis). Properties of a sharding are canonical: equal shares have equal blocks, units and ratios, and
 * unused fields are 0.
 */
struct hapt_property {
    enum hapt_property_kind kind;
    int dim, blocks;
    int64_t unit;
    int ratio;
};

/* A mesh axis and the shares of its ranks: ratio[k][rank], one vector per model segment (HAP 5.2), each summing to
 * 1. NULL: even shares. hapt_split (ratios.h) turns ratios into units. */
struct hapt_axis {
    int size;
    int ratio_count;
    const double *ratio; /* [ratio_count][size] */
};

#define HAPT_CUT_REPLICATED '\0' /* every operand is replicated */
#define HAPT_CUT_PARTIAL '+'     /* a linear operator on partial sums: every operand is partial */

/* An operator's index and how it is sharded. An operand with the letter as a dimension of its own is sharded by
 * these blocks and units. If the letter is an index inside a width ("/3h"), the width's blocks and units follow from
 * the shapes, in units of the index. */
struct hapt_cut {
    char letter;
    int blocks;
    int64_t unit;
    int ratio;
};

/*
 * One instruction of the program of one axis (HAP 4.1), in the order of the graph's operators. It runs operator `op` on
 * shards of a cut, or (op -1) is a communication that makes another version of `tensor`. Every operator appears once.
 *
 * Versions. A tensor may have several versions, one per property. For every input, an operator reads the newest version
 * with the property that its cut needs.
 *
 * - Every version of a model input exists and is never communicated.
 *
 * - A parameter has one layout: that of its first reader, or replicated if a slice of the parameter comes earlier. The
 *   only communications of a parameter are slices. Each is for the operators of one forward operator (itself and its
 *   backward operators).
 *
 * - A version of an activation is visible to its maker's operators and to those of later forward operators. A version
 *   made in the backward part is visible to the operators of one forward operator only. So every range of forward
 *   operators has what it reads.
 *
 * - A writer that adds to the gradient of an activation adds to the version that has the property of the addend. The
 *   other versions become invalid. If there is no such version, the addend stays separate until the next communication
 *   of that tensor. That communication must bring it to the property of an existing version, and adds it there.
 *
 * - Gradients of parameters are summed over the microbatches as they are written, in a separate version per property.
 *   After all operators, once a step, they are brought to the layout of their parameter (HAPT_SECTION_REDUCE).
 *
 * Communications that remove partial sums run after the last writer; the others run before their first reader. A
 * communication that has no reader is left out.
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
/* Everything lives in `arena`. */
enum hapt_status hapt_axis_program_copy(const struct hapt_axis_program *program, struct hapt_arena *arena,
                                        struct hapt_axis_program *copy);

struct hapt_sharding {
    const struct hapt_graph *source; /* the graph before sharding */
    /* Expanded graph: first the tensors of the source, with their indices and global shapes, then further versions.
     * The source's index names one of several versions: for an activation the one its operator makes, for a
     * parameter's gradient the one the update reads. hapt_op.forward_op of every operator is a forward operator of the
     * source. */
    const struct hapt_graph *graph;
    /* The same graph as seen by the rank at `mesh_coordinate`: local shapes and local size attributes. Costs
     * and kernels use this one. */
    const struct hapt_graph *shard;
    struct hapt_axis axis[HAPT_MESH_AXES];
    int mesh_coordinate[HAPT_MESH_AXES];
    int reduce_first; /* operators [reduce_first, graph->op_count) bring parameter gradients to their parameter's
                         layout, once a step */
    struct hapt_property (*property)[HAPT_MESH_AXES]; /* [graph->tensor_count] */
    struct hapt_cut (*cut)[HAPT_MESH_AXES];           /* [graph->op_count]; unused for a collective on its own axis */
    /* [graph->op_count] bit i: input i is a term of partial sums (a bias), so only the first rank of the axis adds
     * it */
    unsigned (*first_rank_inputs)[HAPT_MESH_AXES];
    int *exchange;        /* [graph->op_count] axis over which the operator itself communicates while it runs
                             (hapt_op_type.inner_all_reduces), or -1 */
    int64_t *first_value; /* [graph->op_count] hapt_call.first_value at `mesh_coordinate` */
    int *origin;          /* [graph->tensor_count] the source tensor that this is a version of */
    int *source_op;       /* [graph->op_count] operator of the source; for a collective: the operator next to it */
    /* [graph->tensor_count] the tensor whose storage it uses: itself or a lower index. An all-reduce works in place
     * if nothing else reads the partial sums. */
    int *storage;
    /* [graph->op_count] backward operators that make gradients of parameters only, and collectives that only serve
     * those: in the split sharding they can wait until all others of their range have run. Either all writers of a
     * gradient can wait, or none can. */
    bool *weight;
    bool split; /* made by hapt_sharding_split */
    /* Made by hapt_sharding_recompute; else 0 and NULL. */
    int unit_count;
    const struct hapt_unit *unit;
    int *again;   /* [graph->tensor_count] of a version that is made again: that of the forward part; else -1 */
    int *repeats; /* [graph->op_count] of an operator that runs again: its unit; else -1 */
    bool *light;  /* [graph->op_count] of such an operator: it would also run again if its unit were selective */
    bool *not_a_boundary; /* [source->forward_count + 1] no range begins or ends here: partial sums would cross */
};

/* The sharding over one rank. It lives in `arena`, with the graph. All functions here are rank-local and
 * deterministic. */
enum hapt_status hapt_sharding_trivial(const struct hapt_graph *graph, struct hapt_arena *arena,
                                       struct hapt_sharding **sharding);
/* The sharding with one more axis, seen from mesh coordinate 0. Apply axis 0 before axis 1. HAPT_ERR_INFEASIBLE
 * names the instruction that the rules forbid, or what is missing at the end. An axis of one rank needs no program
 * (NULL). */
enum hapt_status hapt_sharding_apply(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis,
                                     const struct hapt_axis_program *program, struct hapt_arena *arena,
                                     struct hapt_sharding **expanded);
/* The same sharding for another rank. Shapes, sizes and first values are its own; everything else is shared. */
enum hapt_status hapt_sharding_at(const struct hapt_sharding *sharding, const int *mesh_coordinate,
                                  struct hapt_arena *arena, struct hapt_sharding **local);
/* The same sharding for split backward passes (zero bubble). Gradients of activations are summed in place, so an
 * operator that waits may read one that others add to meanwhile. It reads a copy instead, a further version. No other
 * operator changes. */
enum hapt_status hapt_sharding_split(const struct hapt_sharding *sharding, struct hapt_arena *arena,
                                     struct hapt_sharding **split);
/* The same sharding for programs that recompute the units, which are ascending and disjoint (AutoHete 3.1, activation
 * checkpointing). Right before the first backward operator of a unit, the forward operators that its backward operators
 * depend on run again, and make further versions ("NAME.again"). Activations that operators outside of their unit read
 * are not made again. Programs may not begin or end inside a unit. To split the backward passes as well, split the
 * result.
 * A selective unit repeats light operators alone: no products, no collectives, none that reads much more than it makes,
 * and only if all that they read is kept in any case, or made by light operators from that. So a unit of a transformer
 * makes its norms and activation functions again, and keeps the rest. */
enum hapt_status hapt_sharding_recompute(const struct hapt_sharding *sharding, const struct hapt_unit *unit, int count,
                                         struct hapt_arena *arena, struct hapt_sharding **result);
/* The full instruction list for chosen cuts, one for every operator of sharding->graph. Each version that a cut
 * needs is made from the cheapest existing one. A parameter whose readers need different layouts is replicated.
 * HAPT_ERR_INFEASIBLE if a cut is impossible. */
enum hapt_status hapt_axis_program_complete(const struct hapt_sharding *sharding, int axis_index,
                                            const struct hapt_axis *axis, const struct hapt_cut *cut,
                                            struct hapt_arena *arena, struct hapt_axis_program **program);

/* The data-parallel program: rows are shared by the axis' first ratio vector, and all else follows.
 * HAPT_ERR_INFEASIBLE if an operator's signature forbids it or there are fewer rows than devices. */
enum hapt_status hapt_axis_program_data_parallel(const struct hapt_sharding *sharding, int axis_index,
                                                 const struct hapt_axis *axis, struct hapt_arena *arena,
                                                 struct hapt_axis_program **program);

/* The program that shards matrix products as hapt_sharding_tensor_parallel does. */
enum hapt_status hapt_axis_program_tensor_parallel(const struct hapt_sharding *sharding, int axis_index,
                                                   const struct hapt_axis *axis, struct hapt_arena *arena,
                                                   struct hapt_axis_program **program);

/* Rows over both axes, as evenly as whole rows allow; the first ranks get the larger shares. HAPT_ERR_INFEASIBLE if
 * a rank would get no row or an operator's signature forbids it. */
enum hapt_status hapt_sharding_data_parallel(const struct hapt_graph *graph, int nodes, int devices,
                                             struct hapt_arena *arena, struct hapt_sharding **sharding);
/* Rows over the ranks of one axis by ratio vector 0, at least one row each: data parallelism on heterogeneous
 * devices (HAP 5). HAPT_ERR_INFEASIBLE if there are fewer rows than ranks or an operator's signature forbids it. */
enum hapt_status hapt_sharding_rows(const struct hapt_graph *graph, const struct hapt_axis *axis,
                                    struct hapt_arena *arena, struct hapt_sharding **sharding);
/* Rows evenly over `dp` ranks on axis 0, operators evenly over `tp` ranks on axis 1 (Shoeybi et al. 2019,
 * Megatron-LM). A product with a parameter is sharded by columns if its input is replicated and all readers of its
 * output can work on shards. The readers may lead to a product that sums over the sharded index (by rows). Tables are
 * sharded by the values that index them; their size need not be divisible by tp. Everything else stays replicated. */
enum hapt_status hapt_sharding_tensor_parallel(const struct hapt_graph *graph, int dp, int tp, struct hapt_arena *arena,
                                               struct hapt_sharding **sharding);
/* The same in two steps, where several tp share the rows: axis 0, and then axis 1 of what that gave. */
enum hapt_status hapt_sharding_outer_rows(const struct hapt_graph *graph, int dp, struct hapt_arena *arena,
                                          struct hapt_sharding **outer);
enum hapt_status hapt_sharding_inner_tensor(const struct hapt_sharding *outer, int tp, struct hapt_arena *arena,
                                            struct hapt_sharding **sharding);

/* False if partial sums cross an end of forward operators [first_op, end_op) of the source: no program can begin or
 * end there. */
bool hapt_sharding_allows(const struct hapt_sharding *sharding, int first_op, int end_op);
/* Hashes the layout of every operator, and of the collectives next to it, into hash [source->op_count]. Ranges of
 * equal structure whose operators have equal marks have equal programs. */
void hapt_sharding_hash(const struct hapt_sharding *sharding, uint64_t *hash);
/* Total bytes of all all-reduces inside operator `op` of a shard graph (hapt_op_type.inner_all_reduces). */
double hapt_sharding_exchange_bytes(const struct hapt_graph *shard, int op);

/* ---- properties ---- */

bool hapt_property_same(struct hapt_property a, struct hapt_property b);
/* "replicated", "partial" or "sharded(d)" with the details that matter: "sharded(2) in 3 blocks by units of 16
 * ratio 1". */
#define HAPT_PROPERTY_TEXT 80
const char *hapt_property_text(struct hapt_property property, char buffer[HAPT_PROPERTY_TEXT]);
/* The elements [*first, *first + *count) of every block that a rank of the axis holds, for a dimension of `extent`
 * elements. False if blocks and units do not divide the dimension or there are fewer units than ranks. */
bool hapt_property_share(struct hapt_property property, const struct hapt_axis *axis, int64_t extent, int rank,
                         int64_t *first, int64_t *count);

/* The part of an expanded graph's tensor that a rank holds: in every dimension, runs of global indices in the order
 * of its shard. A replicated or partial tensor is one run. */
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
void hapt_sharding_box(const struct hapt_sharding *sharding, int tensor, const int *mesh_coordinate,
                       struct hapt_box *box);

/* Splits `units` of a dimension into one shard per rank: shard j is [first[j], first[j + 1]). The shards add up
 * exactly; each has at least one unit. `ratio` [ranks] >= 0 need not sum to 1. NULL or equal ratios: even, and the
 * first (units mod ranks) shards get one more. Otherwise sizes are rounded to nearest, then the shard with the
 * smallest resulting error changes by one until the sum fits (HAP 5.1). Each is less than one unit off its ratio
 * unless a shard had to be raised to one unit. False, with `first` [ranks + 1] unchanged, if there are fewer units
 * than ranks or the ratios are invalid (negative, not finite, all zero). Pure: every rank computes the same. */
bool hapt_split(const double *ratio, int ranks, int64_t units, int64_t *first);
/* Returns what hapt_split would return. */
bool hapt_split_exists(const double *ratio, int ranks, int64_t units);

#endif
