/*
 * Candidates: which layer ranges may stand on which submeshes, and what they are alike in. Measuring and predicting
 * share it.
 *
 * Two ranges of equal structure on as many devices are one item: planned, timed and priced once.
 */
#ifndef HAPT_PROFILE_CANDIDATES_H
#define HAPT_PROFILE_CANDIDATES_H

#include "hapt/engine.h"
#include "hapt/profile.h"

struct candidates {
    const struct hapt_cluster *cluster;
    const struct hapt_model *model;
    const struct hapt_layers *layers;
    const struct hapt_efficiency *efficiency; /* calibrated tables to predict with; NULL: the built-in ones */
    int layer_count;  /* L */
    double imbalance; /* candidates over this share of their submesh's speed are pruned */
    int state_count;  /* of the optimizer */
    int degree_count;
    int *degree; /* device counts n * m that share the microbatch's rows evenly, ascending */
    int structure_count;
    int *structure;    /* [L][L] which structure the layers [i, j + 1) have; -1 below the diagonal */
    int *first, *last; /* [structure_count] the first range that has it */
    int item_count;    /* structure_count * degree_count */
    double *work;      /* [L + 1] FLOPs of the layers before, prefix sums */
    double speed;      /* of the whole cluster, FLOP/s */
};

/* One device's share of an item; doubles, so that ranks can sum their parts of a table. */
struct item_memory {
    double parameter_bytes, activation_bytes, trained_elements, update_bytes;
};
struct item_time {
    double forward_s, backward_s, update_s;
};

enum hapt_status candidates_build(const struct hapt_cluster *cluster, const struct hapt_model *model,
                                  const struct hapt_layers *layers, const struct hapt_config *config,
                                  struct hapt_arena *arena, struct candidates *candidates);
static inline int candidates_item(const struct candidates *candidates, int degree_index, int first, int last)
{
    return candidates->structure[first * candidates->layer_count + last] * candidates->degree_count + degree_index;
}
/* The submeshes of a subcluster in the profile's order; written where `submesh` is given. */
int candidates_submeshes(const struct hapt_subcluster *subcluster, struct hapt_submesh *submesh);
/* Index of a device count, or -1 when the rows do not divide. */
int candidates_degree(const struct candidates *candidates, int devices);
/* The program of an item's first range. */
enum hapt_status candidates_program(const struct candidates *candidates, int first, int last, int degree_index,
                                    struct hapt_arena *arena, struct hapt_program **program);
/* Memory of an item; `engine` NULL: without kernel scratch. */
enum hapt_status candidates_plan_memory(const struct candidates *candidates, int item,
                                        const struct hapt_engine_options *engine, struct item_memory *memory);
/* Fits with one microbatch in flight, and is not badly unbalanced. */
bool candidates_wanted(const struct candidates *candidates, int subcluster, struct hapt_submesh submesh, int first,
                       int last, const struct item_memory *memory);
/* FLOP/s of one device of a subcluster in the model's type, slowdown included. */
double candidates_device_speed(const struct candidates *candidates, int subcluster);

/* Seconds to sum `bytes` over a submesh, which stands at `index` in its subcluster's list. */
typedef double candidates_all_reduce(const void *context, int subcluster, int index, struct hapt_submesh submesh,
                                     double bytes);
/* Makes the profile: memory[c] and time[c] are tables by item for subcluster c (time in real seconds of its devices).
 */
enum hapt_status candidates_fill(const struct candidates *candidates, struct item_memory *const *memory,
                                 struct item_time *const *time, candidates_all_reduce *all_reduce, const void *context,
                                 struct hapt_arena *result, struct hapt_profile **profile);

#endif
