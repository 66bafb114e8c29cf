/*
 * Candidates: which layer ranges may stand on which submeshes, and what they are alike in. Measuring and predicting
 * share it.
 *
 * A submesh (n, m) has a variant for each program that may run on it: n m / tp data-parallel groups of tp devices, or
 * what synthesis finds (synthesised.h). Two ranges of equal structure on equal meshes (dp, tp) are one item: planned,
 * timed and priced once.
 */
#ifndef HAPT_PROFILE_CANDIDATES_H
#define HAPT_PROFILE_CANDIDATES_H

#include "hapt/collective_cost.h"
#include "hapt/engine.h"
#include "hapt/profile.h"

/* Degrees of data and tensor parallelism; or (dp 0) a device of a mixed stage that has `rows` rows of a microbatch; or
 * a program k >= 1 for (n, m), candidates of these subclusters (bits) alone. */
struct mesh {
    int dp, tp, rows;
    int n, m, program;
    unsigned subclusters;
};

/* Seconds of a group's ranges, [i * L + j] for layers [i, j + 1). */
struct range_times {
    double *stage_s, *forward_s; /* per microbatch; NaN: not known */
    double *step_s;              /* per step beyond that */
};
/* Devices of two subclusters that may run a stage together: data-parallel with so many rows of a microbatch for each of
 * them, or a program k >= 1. degree[side]: as a device of that side sees it; of a program, one that holds most. */
struct mixed_group {
    int cluster[2], devices[2], rows[2], degree[2], program;
    struct hapt_collective_model sums; /* over all of them */
    struct range_times *times;         /* NULL: composed of the items' */
};

/* Which programs are candidates. A single device has but one, which is all of them. */
enum { PROGRAM_DATA = 1, PROGRAM_TENSOR = 2, PROGRAM_SYNTHESISED = 4 };
struct candidates_options {
    unsigned programs;
    int tensor_parallel;                      /* largest degree; 0: the devices of a node */
    const struct hapt_efficiency *efficiency; /* calibrated tables to predict with; NULL: the built-in ones */
};
/* As --program says. */
unsigned candidates_programs(const struct hapt_config *config);

struct candidates {
    const struct hapt_cluster *cluster;
    const struct hapt_model *model;
    const struct hapt_layers *layers;
    const struct hapt_efficiency *efficiency; /* calibrated tables to predict with; NULL: the built-in ones */
    int layer_count;                          /* L */
    double imbalance;                         /* candidates over this share of their submesh's speed are pruned */
    int state_count;                          /* of the optimizer */
    /* Ranks that sum a gradient hold a slice each of its optimizer's state (ZeRO-1): never, where not all
     * microbatches of a step fit otherwise, always. */
    enum state_sharing { STATE_WHOLE, STATE_AS_NEEDED, STATE_SHARDED } state_sharing;
    unsigned programs;
    int tensor_parallel; /* largest tensor-parallel degree; 0: the devices of a node */
    int layout_count;
    const struct hapt_stage_layout **layout; /* [layout_count] program k is layout[k - 1] */
    int degree_count;
    struct mesh
        *degree; /* meshes that can share the model and the microbatch's rows, ascending; then those with programs */
    struct hapt_sharding **sharding; /* [degree_count] of the whole graph */
    int mixed_count;
    struct mixed_group *mixed; /* [mixed_count] by rows, then those with a program */
    int mixable_count;
    struct mixed_group *mixable; /* [mixable_count] devices for programs */
    int microbatches;            /* of a step */
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
    double sharded_bytes; /* parameter_bytes, were the optimizer's state sharded */
};
#define FITS_NOWHERE ((struct item_memory){.parameter_bytes = INFINITY, .sharded_bytes = INFINITY})
struct item_time {
    double forward_s, backward_s, update_s;
    double end_s; /* of a step besides the update, which a slowed device does not stretch; 0 where update_s has all of
                     it */
};

enum hapt_status candidates_build(const struct hapt_cluster *cluster, const struct hapt_model *model,
                                  const struct hapt_layers *layers, const struct hapt_config *config,
                                  const struct candidates_options *options, struct hapt_arena *arena,
                                  struct candidates *candidates);
static inline int candidates_item(const struct candidates *candidates, int degree_index, int first, int last)
{
    return candidates->structure[first * candidates->layer_count + last] * candidates->degree_count + degree_index;
}
/* The submeshes of a subcluster in the profile's order, data-parallel; written where `submesh` is given. */
int candidates_submeshes(const struct hapt_subcluster *subcluster, struct hapt_submesh *submesh);
/* Place of a submesh in that order. */
int candidates_submesh_index(const struct hapt_subcluster *subcluster, struct hapt_submesh submesh);
/* The same with every program: tensor-parallel degrees are powers of two that divide m. */
enum hapt_status candidates_variants(const struct candidates *candidates, int subcluster, struct hapt_arena *arena,
                                     struct hapt_submesh **variant, int *count);
/* Index of a mesh, or -1 when it cannot share the model or the rows. */
int candidates_degree(const struct candidates *candidates, int dp, int tp);
int candidates_degree_of_program(const struct candidates *candidates, int program);
static inline int candidates_degree_of(const struct candidates *candidates, struct hapt_submesh submesh)
{
    return submesh.program > 0 ? candidates_degree_of_program(candidates, submesh.program)
                               : candidates_degree(candidates, submesh.n * submesh.m / submesh.tp, submesh.tp);
}
/* A device's seconds for the whole model, forward and backward, at r rows: fixed_s + r * row_s; and for the update. */
struct device_pace {
    double fixed_s, row_s, update_s;
};
/* Rows beside all of a microbatch at which a pace is found, and the degree of devices that have them (added where there
 * is none). */
static inline int candidates_few_rows(const struct candidates *candidates)
{
    return (candidates->model->microbatch + 1) / 2;
}
enum hapt_status candidates_few_degree(struct candidates *candidates, struct hapt_arena *arena, int *degree);
struct device_pace candidates_pace(const struct candidates *candidates, double all_s, double few_s, double update_s);
/* Whether mixed stages are asked for and possible. */
bool candidates_may_mix(const struct candidates *candidates, const struct hapt_config *config);
/* Finds the groups of mixed stages that are worth a table (--mixed): data-parallel ones by rows (--mixed-rows) with the
 * degrees that they need, where `programs` has them; and in ->mixable the devices that a synthesised program may run
 * on, where it has those. measured[cluster->count]: paces of the devices; NULL: predicted ones. After candidates_build;
 * candidates_find_structures comes next. */
enum hapt_status candidates_mix(struct candidates *candidates, const struct hapt_config *config, unsigned programs,
                                const struct device_pace *measured, struct hapt_arena *arena,
                                struct hapt_arena *scratch);
/* A group for a program of the devices of `like`, with its degrees; the layout is borrowed. */
enum hapt_status candidates_mix_program(struct candidates *candidates, const struct mixed_group *like,
                                        const struct hapt_stage_layout *layout, struct hapt_arena *arena);
/* NaN all over. */
enum hapt_status range_times_create(int layer_count, struct hapt_arena *arena, struct range_times **times);
/* Which ranges are alike, by all shardings that there are. */
enum hapt_status candidates_find_structures(struct candidates *candidates, struct hapt_arena *arena);
/* Fits, on every device of the group, and is not badly unbalanced. memory[k]: of the item of group->degree[k]. */
bool candidates_wanted_mixed(const struct candidates *candidates, const struct mixed_group *group, int first, int last,
                             const struct item_memory *const memory[2]);
/* The program of an item's first range. */
enum hapt_status candidates_program(const struct candidates *candidates, int first, int last, int degree_index,
                                    struct hapt_arena *arena, struct hapt_program **program);
struct item_memory candidates_memory(const struct candidates *candidates, const struct hapt_memory_figures *figures);
/* Memory of an item by its program; `engine` NULL: without kernel scratch. */
enum hapt_status candidates_plan_memory(const struct candidates *candidates, int item,
                                        const struct hapt_engine_options *engine, struct item_memory *memory);
/* What stays on a device of `limit` bytes. A stage that fits with whole state all the same is trained so and takes more
 * than this. */
double candidates_resident_bytes(const struct candidates *candidates, const struct item_memory *memory, double limit);
/* Fits with one microbatch in flight, and is not badly unbalanced. */
bool candidates_wanted(const struct candidates *candidates, int subcluster, struct hapt_submesh submesh, int first,
                       int last, const struct item_memory *memory);
/* A program of few meshes: is a range balanced on any of them? Others need no figures. */
bool candidates_may_be_wanted(const struct candidates *candidates, int degree_index, int first, int last);
/* FLOP/s of one device of a subcluster in the model's type, slowdown included. */
double candidates_device_speed(const struct candidates *candidates, int subcluster);

/* Seconds to sum gradients of `bytes` a device over the data-parallel groups of a submesh. */
typedef double candidates_all_reduce(const void *context, int subcluster, struct hapt_submesh submesh, double bytes);
/* Makes the profile: memory[c] and time[c] are tables by item for subcluster c (time in real seconds of its devices).
 * Variants without any candidate are left out, and those that another variant of the same submesh (of plain ones:
 * another plain one) beats in time and memory on every range; a submesh keeps its data-parallel row when that is its
 * only variant. */
enum hapt_status candidates_fill(const struct candidates *candidates, struct item_memory *const *memory,
                                 struct item_time *const *time, candidates_all_reduce *all_reduce, const void *context,
                                 struct hapt_arena *result, struct hapt_profile **profile);

#endif
