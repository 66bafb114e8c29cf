/* Fine-grained layers that preserve the model's repeated structure (HAPT 5.1). */
#ifndef HAPT_LAYERS_H
#define HAPT_LAYERS_H

#include "hapt/env.h"
#include "hapt/graph.h"
#include "hapt/h5.h"

struct hapt_module {
    int first_op, end_op;
    int kind; /* modules of one kind have the same structure; -1: not repeated */
};

struct hapt_layers {
    const struct hapt_graph *graph; /* whose forward operators they divide */
    int count;                      /* L */
    int *end_op;                    /* [L] layer l has the forward operators [end_op[l-1], end_op[l]) */
    int module_count;
    struct hapt_module *module;
    int *module_of;         /* [L] */
    double *flops;          /* [L] of one microbatch, forward and backward */
    double *boundary_bytes; /* [L] size of all activations live across the boundary after layer l; the last is 0 */
};

/* A granularity: the layers of granularity 0 are divided further, until each has one heavy operator at most. */
#define HAPT_LAYERS_BY_OPERATOR (-1)
struct hapt_layers_options {
    int granularity;   /* approximate number of layers; 0: as fine as balance allows; HAPT_LAYERS_BY_OPERATOR */
    int heavy_minimum; /* z: minimum number of heavy operators in a repeated module */
};

/* Detects modules iteratively, then clusters the operators of each module into balanced layers. Rank-local,
 * deterministic. */
enum hapt_status hapt_layers_build(const struct hapt_graph *graph, const struct hapt_layers_options *options,
                                   struct hapt_arena *arena, struct hapt_layers **layers);
/* Hashes of all layer ranges: structure [L][L], entry [i][j] for layers [i, j + 1), j >= i. Two ranges have the same
 * hash exactly when their forward and backward programs, shapes and boundaries are equal, so one measurement serves
 * both. mark [op_count]: further distinguishes operators; NULL: none. Costs O(L) passes over the graph, not O(L^2). */
enum hapt_status hapt_layers_structures(const struct hapt_layers *layers, const struct hapt_graph *graph,
                                        const uint64_t *mark, uint64_t *structure);
static inline int hapt_layers_first_op(const struct hapt_layers *layers, int layer)
{
    return layer == 0 ? 0 : layers->end_op[layer - 1];
}
/* layer_of [forward operator]. */
static inline enum hapt_status hapt_layers_of_operators(const struct hapt_layers *layers, struct hapt_arena *arena,
                                                        int **layer_of)
{
    HAPT_NEW(*layer_of, arena, layers->end_op[layers->count - 1]);
    for (int l = 0, op = 0; l < layers->count; l++)
        for (; op < layers->end_op[l]; op++) (*layer_of)[op] = l;
    return HAPT_OK;
}
/* The model's units of recomputation: its repeated modules; all modules, if none is repeated. */
enum hapt_status hapt_layers_units(const struct hapt_layers *layers, struct hapt_arena *arena, struct hapt_unit **unit,
                                   int *count);
/* The units of weights on the host, or sharded: all modules, which cover the model. */
enum hapt_status hapt_layers_weight_units(const struct hapt_layers *layers, struct hapt_arena *arena,
                                          struct hapt_unit **unit, int *count);
/* The recomputation of a range, as a number. So many of HAPT_RECOMPUTE_PARTS parts of the units that lie in it, rounded
 * up, make all their activations again: the first ones. HAPT_RECOMPUTE_SELECTIVE is added if its other units are
 * selective. HAPT_RECOMPUTE_BY_BYTES is added if the parts are not of their number but of the bytes that all of them
 * could free, and the units those that take the least time (unit_choice.h). */
enum { HAPT_RECOMPUTE_PARTS = 12, HAPT_RECOMPUTE_SELECTIVE = 16, HAPT_RECOMPUTE_BY_BYTES = 32 };
static inline int hapt_recompute_parts(int recompute)
{
    return recompute % HAPT_RECOMPUTE_SELECTIVE;
}
static inline bool hapt_recompute_is_selective(int recompute)
{
    return recompute % HAPT_RECOMPUTE_BY_BYTES >= HAPT_RECOMPUTE_SELECTIVE;
}
static inline bool hapt_recompute_is_valid(int recompute)
{
    return recompute >= 0 && hapt_recompute_parts(recompute) <= HAPT_RECOMPUTE_PARTS &&
           recompute < 2 * HAPT_RECOMPUTE_BY_BYTES;
}
/* The number for a choice of --recompute: no, selective, all, every=K. -1: unreadable; auto has none. */
int hapt_layers_recompute(const char *choice);
void hapt_layers_print(const struct hapt_env *env, const struct hapt_layers *layers, const struct hapt_graph *graph);
enum hapt_status hapt_layers_write(struct hapt_h5 *file, const char *group, const struct hapt_layers *layers);

#endif
