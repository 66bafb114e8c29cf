/*
 * Candidates: the layer ranges that may run on each submesh, and the equal ones among them. Used by measuring and
 * predicting.
 *
 * A submesh (n, m) has a variant for each program that may run on it: n m / tp data-parallel groups of tp devices, or a
 * program found by synthesis (synthesised.h). Two ranges of equal structure on equal meshes (dp, tp) are one item,
 * which is planned, timed and priced once.
 */
#ifndef HAPT_CANDIDATES_H
#define HAPT_CANDIDATES_H

#include "hapt/collective_cost.h"
#include "hapt/engine.h"
#include "hapt/profile.h"
#include "hapt/unit_choice.h"

/* One of three: degrees of data and tensor parallelism; (dp 0) a device of a mixed stage with `rows` rows of a
 * microbatch; or a program k >= 1 for (n, m), for candidates of these subclusters (bits) only. */
struct hapt_candidate_mesh {
    int dp, tp, rows;
    int n, m, program;
    unsigned subclusters;
};

/* Seconds of a mixed group's ranges; [i * L + j]: layers [i, j + 1). */
struct hapt_range_times {
    double *stage_s, *forward_s; /* per microbatch; NaN: unknown */
    double *step_s;              /* per step, in addition */
};
/* Devices of two subclusters that may run a stage together: data-parallel with `rows` rows of a microbatch per
 * device of either side, or a program k >= 1. mesh_index[side]: the mesh seen by a device of that side; for a program,
 * by the device that holds most. */
struct hapt_mixed_group {
    int cluster[2], devices[2], rows[2], mesh_index[2], program;
    struct hapt_collective_model sums; /* over all of its devices */
    struct hapt_range_times *times;    /* NULL: composed of the items' times */
};

/* One for none, all, and parts between. */
enum { HAPT_MOST_KEEPS = 16 }; /* 6 with weights in two places, 3 with them in a third one, 1 with gradients */
/* A choice of what the stages of a submesh keep on their devices. */
struct hapt_keep {
    int recompute, weights_at; /* as in a hapt_submesh */
};

/* The programs that are candidates. A single device has only one program, which counts as each of them. */
enum { PROGRAM_DATA = 1, PROGRAM_TENSOR = 2, PROGRAM_SYNTHESISED = 4 };
struct hapt_candidates_options {
    unsigned programs;
    int tensor_parallel;                      /* largest degree; 0: the devices of a node */
    const struct hapt_efficiency *efficiency; /* calibrated tables for prediction; NULL: the built-in ones */
    bool split;                               /* also the figures of split backward passes */
    bool recompute;                           /* also those of stages that recompute, as --recompute says */
    struct hapt_offloading offload;
    bool roomy; /* hapt_predict_options */
};
/* True if --split-backward or `hapt profile` needs the figures of split backward passes. */
bool hapt_candidates_wants_split(const struct hapt_config *config);
/* Optimizer states per parameter: 2 AdamW, 1 SGD with momentum, 0 without. */
int hapt_candidates_states(const struct hapt_config *config);
/* --update-order priority */
bool hapt_candidates_defers(const struct hapt_config *config);
/* The programs of --program. */
unsigned hapt_candidates_programs(const struct hapt_config *config);

struct hapt_candidates {
    const struct hapt_cluster *cluster;
    const struct hapt_model *model;
    const struct hapt_layers *layers;
    const struct hapt_efficiency *efficiency; /* calibrated tables for prediction; NULL: the built-in ones */
    int layer_count;                          /* L */
    bool split;                               /* also the figures of split backward passes */
    double imbalance; /* candidates with more work, relative to their submesh's part of the speed, are pruned */
    int state_count;  /* number of optimizer states */
    bool host_state;  /* they are on the host */
    bool host_update; /* the host updates the parameters whose state it has */
    bool host_weights, host_gradients; /* stages whose weights are there, or gradients as well, are candidates, too */
    enum hapt_weight_sharding weight_sharding;
    bool roomy; /* hapt_predict_options */
    /* ZeRO-1: ranks that sum a gradient hold one slice each of its optimizer state. STATE_REPLICATED: never;
     * STATE_AS_NEEDED: if not all microbatches of a step fit otherwise; STATE_SHARDED: always. */
    enum state_sharing { STATE_REPLICATED, STATE_AS_NEEDED, STATE_SHARDED } state_sharing;
    unsigned programs;
    int tensor_parallel;              /* largest tensor-parallel degree; 0: the devices of a node */
    enum hapt_tied_exchange exchange; /* element type of the gradients of tied parameters */
    int layout_count;
    const struct hapt_stage_layout **layout; /* [layout_count] program k is layout[k - 1] */
    /* Choices of stages; the first keeps all, if some may. Plain programs alone have such choices, data-parallel ones
     * those with sharded weights. */
    int keep_count, keep_stride; /* stride: of tables by item and choice, of which a copy may use fewer */
    struct hapt_keep keep[HAPT_MOST_KEEPS];
    int unit_count;
    struct hapt_unit *unit;          /* [unit_count] of the model */
    struct hapt_unit_choices *units; /* which of them recompute */
    int weight_unit_count;
    struct hapt_unit *weight_unit; /* [weight_unit_count] all modules; 0: all weights are on the devices of a stage */
    int mesh_count;
    struct hapt_candidate_mesh
        *mesh; /* meshes that can share the model and the microbatch's rows, ascending; then those with programs */
    struct hapt_sharding **sharding; /* [mesh_count] of the full graph */
    int mixed_count;
    struct hapt_mixed_group *mixed; /* [mixed_count] by rows, then those with a program */
    int mixable_count;
    struct hapt_mixed_group *mixable; /* [mixable_count] devices for synthesised programs */
    int microbatches;                 /* per step */
    int structure_count;
    int *structure;    /* [L][L] structure of layers [i, j + 1); -1 below the diagonal */
    int *first, *last; /* [structure_count] the first range of that structure */
    int item_count;    /* structure_count * mesh_count */
    double *work;      /* [L + 1] FLOPs of the layers before, prefix sums */
    double speed;      /* of all devices of the cluster, FLOP/s */
};

/* One device's share of an item; doubles, so that ranks can sum their parts of a table. */
struct hapt_item_memory {
    double parameter_bytes, activation_bytes, trained_elements, update_bytes;
    double sharded_bytes;                            /* parameter_bytes if the optimizer state were sharded */
    double host_bytes, sharded_host_bytes;           /* of optimizer state on the host; 0: it is on the device */
    double split_parameter_bytes, weight_slot_bytes; /* of the split program, which has the same activation_bytes */
    double masters_unread;                           /* 1: as in hapt_memory_plan; else 0 */
    double copies;                                   /* 1: hapt_memory_bytes; else 0 */
    double weight_bytes, fetch_bytes, weight_units;  /* hapt_memory_bytes */
    double gradient_bytes, gradient_fetch_bytes, gradient_last_bytes; /* the same */
};
#define FITS_NOWHERE ((struct hapt_item_memory){.parameter_bytes = INFINITY, .sharded_bytes = INFINITY})
struct hapt_item_time {
    double forward_s, backward_s, update_s;
    double end_s; /* rest of a step's end, not stretched by a slowdown; 0 if update_s includes it */
};
/* The same if the item does not keep all on its devices. */
struct hapt_item_again {
    struct hapt_item_memory memory;
    double again_s; /* more than backward_s, for recomputation */
};

enum hapt_status hapt_candidates_build(const struct hapt_cluster *cluster, const struct hapt_model *model,
                                       const struct hapt_layers *layers, const struct hapt_config *config,
                                       const struct hapt_candidates_options *options, struct hapt_arena *arena,
                                       struct hapt_candidates *candidates);
static inline int hapt_candidates_item(const struct hapt_candidates *candidates, int mesh_index, int first, int last)
{
    return candidates->structure[first * candidates->layer_count + last] * candidates->mesh_count + mesh_index;
}
/* Lists the data-parallel submeshes of a subcluster in the profile's order and returns their number; `submesh` may
 * be NULL. */
int hapt_candidates_submeshes(const struct hapt_subcluster *subcluster, struct hapt_submesh *submesh);
/* Index of a submesh in that order. */
int hapt_candidates_submesh_index(const struct hapt_subcluster *subcluster, struct hapt_submesh submesh);
/* The same with all programs; tensor-parallel degrees are powers of two that divide m. */
enum hapt_status hapt_candidates_variants(const struct hapt_candidates *candidates, int subcluster,
                                          struct hapt_arena *arena, struct hapt_submesh **variant, int *count);
/* Index of a mesh; -1 if it cannot share the model or the rows. */
int hapt_candidates_mesh_index(const struct hapt_candidates *candidates, int dp, int tp);
int hapt_candidates_mesh_index_of_program(const struct hapt_candidates *candidates, int program);
static inline int hapt_candidates_mesh_index_of(const struct hapt_candidates *candidates, struct hapt_submesh submesh)
{
    return submesh.program > 0 ? hapt_candidates_mesh_index_of_program(candidates, submesh.program)
                               : hapt_candidates_mesh_index(candidates, submesh.n * submesh.m / submesh.tp, submesh.tp);
}
/* A device's seconds for the full model, forward and backward, at r rows: fixed_s + r * row_s; and for the update. */
struct hapt_device_times {
    double fixed_s, row_s, update_s;
};
/* A device's speed is measured with all rows of a microbatch and with this number. hapt_candidates_few_rows_mesh
 * finds the mesh of devices with this number of rows and adds it if missing. */
static inline int hapt_candidates_few_rows(const struct hapt_candidates *candidates)
{
    return (candidates->model->microbatch + 1) / 2;
}
enum hapt_status hapt_candidates_few_rows_mesh(struct hapt_candidates *candidates, struct hapt_arena *arena,
                                               int *mesh_index);
struct hapt_device_times hapt_candidates_device_times(const struct hapt_candidates *candidates, double all_s,
                                                      double few_s, double update_s);
/* True if mixed stages are requested and possible. */
bool hapt_candidates_may_mix(const struct hapt_candidates *candidates, const struct hapt_config *config);
/* Finds the groups of mixed stages that are worth a table (--mixed). If `programs` includes data-parallel ones:
 * groups by rows (--mixed-rows) and the meshes that they need. If it includes synthesised ones: ->mixable, the
 * devices for them. measured[cluster->count]: speeds of the devices; NULL: predicted. Call after hapt_candidates_build
 * and before hapt_candidates_find_structures. */
enum hapt_status hapt_candidates_mix(struct hapt_candidates *candidates, const struct hapt_config *config,
                                     unsigned programs, const struct hapt_device_times *measured,
                                     struct hapt_arena *arena, struct hapt_arena *scratch);
/* Adds a mixed group for a program on the devices of `like`, with its meshes; the layout is borrowed. */
enum hapt_status hapt_candidates_mix_program(struct hapt_candidates *candidates, const struct hapt_mixed_group *like,
                                             const struct hapt_stage_layout *layout, struct hapt_arena *arena);
/* All times are NaN. */
enum hapt_status hapt_range_times_create(int layer_count, struct hapt_arena *arena, struct hapt_range_times **times);
/* Finds the ranges that are equal in all shardings. */
enum hapt_status hapt_candidates_find_structures(struct hapt_candidates *candidates, struct hapt_arena *arena);
/* True if the range fits every device of the mixed group and is not badly unbalanced. memory[k]: of the item of
 * group->mesh_index[k]. */
bool hapt_candidates_wanted_mixed(const struct hapt_candidates *candidates, const struct hapt_mixed_group *group,
                                  int first, int last, const struct hapt_item_memory *const memory[2]);
/* The program of an item's first range. */
enum hapt_status hapt_candidates_program(const struct hapt_candidates *candidates, int first, int last, int mesh_index,
                                         struct hapt_arena *arena, struct hapt_program **program);
struct hapt_item_memory hapt_candidates_memory(const struct hapt_candidates *candidates,
                                               const struct hapt_memory_bytes *figures);
/* Memory of an item by its program; `engine` NULL: without kernel scratch. */
enum hapt_status hapt_candidates_plan_memory(const struct hapt_candidates *candidates, int item,
                                             const struct hapt_engine_options *engine, struct hapt_item_memory *memory);
/* Bytes of optimizer state per element on the device; -1: none (hapt_mesh_options.optimizer_bytes_per_element). */
static inline double hapt_candidates_state_bytes(const struct hapt_candidates *candidates)
{
    return candidates->state_count > 0 && !candidates->host_state ? 4.0 * candidates->state_count : -1;
}
/* True if a stage on devices of `limit` bytes is a candidate with sharded optimizer state: as needed also if the state
 * is on the host, since a slice takes less time to copy. */
bool hapt_candidates_shards_state(const struct hapt_candidates *candidates, const struct hapt_item_memory *memory,
                                  double limit);
/* Least resident bytes on a device of `limit` bytes. A stage that fits with unsharded state is trained so and takes
 * more. */
double hapt_candidates_resident_bytes(const struct hapt_candidates *candidates, const struct hapt_item_memory *memory,
                                      double limit);
/* Its bytes on the host, in the same cases. */
double hapt_candidates_host_bytes(const struct hapt_candidates *candidates, const struct hapt_item_memory *memory,
                                  double limit);
/* Seconds in which the host updates so many elements of an item, once a step: gradients are copied to it while the part
 * before is updated and the weights of the one before that are copied back. Masters that the device has are copied both
 * ways, one after the other. The first and the last half of the window have nothing beside them. Weights
 * and gradients on the host are not copied. */
double hapt_candidates_host_update_s(const struct hapt_subcluster *subcluster, const struct hapt_item_memory *memory,
                                     double elements, enum hapt_weights_at weights_at);
/* Seconds to copy what an item has on the host to its device and back, once a step, or to update it there. Both
 * directions at a time, but CPUs copy themselves, unless their copies are paced. */
double hapt_candidates_host_copies_s(const struct hapt_candidates *candidates, int subcluster,
                                     const struct hapt_item_memory *memory);
/* Bytes that the device's own part of an update touches: all, or if the host updates the gradients alone, for their
 * norm and to zero them. */
double hapt_candidates_update_bytes(const struct hapt_candidates *candidates, const struct hapt_item_memory *memory);
/* Figures of so many trained elements that a device of a mixed stage has: for the two functions above alone. */
struct hapt_item_memory hapt_candidates_state_memory(const struct hapt_candidates *candidates, double elements);
/* Bytes of the all-reduce that takes as long as the sums of a step. Ranks that share the state reduce and scatter fp32
 * gradients, then gather weights, in 16 bits if they have slices of the masters: three quarters of the bytes. */
double hapt_candidates_summed_bytes(const struct hapt_candidates *candidates, int subcluster,
                                    const struct hapt_item_memory *memory);
/* True if the part of the work of layers [first, last] is at most `imbalance` times the part of their devices in the
 * speed of all (FLOP/s), or if it is one layer. A longer range is never balanced if a shorter one with the same first
 * layer is not. */
bool hapt_candidates_are_balanced(const struct hapt_candidates *candidates, double speed, int first, int last);
/* True if it fits with one microbatch in flight, on the device and on its host. */
bool hapt_candidates_fit(const struct hapt_candidates *candidates, int subcluster,
                         const struct hapt_item_memory *memory);
/* True if it fits so, and is balanced. */
bool hapt_candidates_wanted(const struct hapt_candidates *candidates, int subcluster, struct hapt_submesh submesh,
                            int first, int last, const struct hapt_item_memory *memory);
/* True if a range is balanced on any submesh of that mesh; otherwise it needs no figures. */
bool hapt_candidates_may_be_wanted(const struct hapt_candidates *candidates, int mesh_index, int first, int last);
/* The same for a plain mesh inside a subcluster. Stages in mixed stages recompute nothing. */
bool hapt_candidates_may_recompute(const struct hapt_candidates *candidates, int mesh_index, int first, int last);
/* FLOP/s of one device of a subcluster in the model's type, including slowdown. */
double hapt_candidates_device_speed(const struct hapt_candidates *candidates, int subcluster);

/* True if stages that recompute are candidates. */
bool hapt_candidates_recompute(const struct hapt_candidates *candidates);
/* True if some stages do not keep all on their devices: items then have figures for each choice. */
bool hapt_candidates_chooses(const struct hapt_candidates *candidates);
/* True if the thread of a device that computes also copies: CPUs without paced copies. */
bool hapt_candidates_copies_itself(const struct hapt_subcluster *subcluster);
/* The shardings of a mesh: `again`: all units recompute, if any may; split: the same with split backward passes, or
 * NULL. */
struct hapt_candidate_shardings {
    struct hapt_sharding *again, *split;
    bool recomputes;
};
enum hapt_status hapt_candidates_shardings(const struct hapt_candidates *candidates, int mesh_index,
                                           struct hapt_arena *arena, struct hapt_candidate_shardings *shardings);
/* Memory of every item of a mesh, equal to hapt_candidates_plan_memory: memory[item]. A range whose weights alone
 * exceed every device fits nowhere; single layers have figures in any case. And again[item][keep_stride] with
 * again_s 0 unless it is NULL. kernel_scratch NULL: without. Advances the innermost progress line by one for each
 * structure. */
enum hapt_status hapt_candidates_sizes(const struct hapt_candidates *candidates, int mesh_index,
                                       const struct hapt_candidate_shardings *shardings,
                                       hapt_kernel_scratch *kernel_scratch, struct hapt_engine_options *engine,
                                       struct hapt_arena *scratch, struct hapt_item_memory *memory,
                                       struct hapt_item_again *again);
/* Sets again_s of the items of a mesh: repeat_s[o] are the seconds of operator o of `sharding`, which repeats another
 * one. */
enum hapt_status hapt_candidates_again(const struct hapt_candidates *candidates, int mesh_index,
                                       const struct hapt_sharding *sharding, const double *repeat_s,
                                       struct hapt_arena *scratch, struct hapt_item_again *again);

/* Seconds to sum gradients of `bytes` per device over the data-parallel groups of a submesh. */
typedef double hapt_candidates_all_reduce(const void *context, int subcluster, struct hapt_submesh submesh,
                                          double bytes);
/* Makes the profile. memory[c] and time[c]: tables by item for subcluster c; time in real seconds of its devices.
 * again[c]: [item][keep_stride] of the shares beside 0; NULL: none recompute.
 * weight_share[c]: the part of backward_s that a split backward pass defers, NaN: unknown; NULL: all are unknown.
 * Variants without candidates are left out. So are variants that another one of the same submesh beats in time and
 * memory on every range (a plain variant is compared with plain ones only). A submesh keeps its data-parallel row if
 * that is its only variant. */
enum hapt_status hapt_candidates_fill(const struct hapt_candidates *candidates, struct hapt_item_memory *const *memory,
                                      struct hapt_item_time *const *time, double *const *weight_share,
                                      struct hapt_item_again *const *again, hapt_candidates_all_reduce *all_reduce,
                                      const void *context, struct hapt_arena *result, struct hapt_profile **profile);

#endif
