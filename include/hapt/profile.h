/*
 * The profile: input of the planner (HAPT 5.1). `hapt help profile` describes the file.
 *
 * Entry [s][i][j] covers layers [i, j + 1). A candidate exists if i <= j and stage_time is finite.
 */
#ifndef HAPT_PROFILE_H
#define HAPT_PROFILE_H

#include "hapt/cluster.h"
#include "hapt/config.h"
#include "hapt/env.h"
#include "hapt/layers.h"
#include "hapt/layout.h"
#include "hapt/model.h"

/* A submesh and the program it runs: n x m devices as n m / tp data-parallel groups of tp tensor-parallel devices.
 * The tp devices of a group are neighbours on one node. tp 0 in a query: the best degree. program k >= 1 (then tp is
 * 1): the profile's layout k instead. */
struct hapt_submesh {
    int n, m, tp, program;
    int recompute;  /* what a range recomputes (AutoHete; layers.h) */
    int weights_at; /* enum hapt_weights_at */
};
/* The trained weights of a stage (hapt_memory_plan): on each of its devices; on the host; there with their gradients,
 * where it is possible; or sharded over the devices that sum their gradients (ZeRO-3, Rajbhandari et al. 2020). */
enum hapt_weights_at { HAPT_WEIGHTS_RESIDENT, HAPT_WEIGHTS_ON_HOST, HAPT_GRADIENTS_ON_HOST, HAPT_WEIGHTS_SHARDED };
#define HAPT_WEIGHTS_CHOICES 4
/* True if kernels read the weights of a unit in a place that is filled while the stage runs. */
static inline bool hapt_weights_move(int weights_at)
{
    return weights_at != HAPT_WEIGHTS_RESIDENT;
}
static inline bool hapt_weights_on_host(int weights_at)
{
    return weights_at == HAPT_WEIGHTS_ON_HOST || weights_at == HAPT_GRADIENTS_ON_HOST;
}
/* The part of the training state that is on the hosts. STAGES: the optimizer state of all stages, and the weights of
 * those that are planned so; STAGES_GRADIENTS: and their gradients. WEIGHTS, GRADIENTS: of all stages. */
enum hapt_offload {
    HAPT_OFFLOAD_NO,
    HAPT_OFFLOAD_OPTIMIZER,
    HAPT_OFFLOAD_STAGES,
    HAPT_OFFLOAD_STAGES_GRADIENTS,
    HAPT_OFFLOAD_WEIGHTS,
    HAPT_OFFLOAD_GRADIENTS
};
/* Data-parallel stages whose weights are sharded: none, those that are planned so, or all. */
enum hapt_weight_sharding { HAPT_WEIGHT_SHARDING_NO, HAPT_WEIGHT_SHARDING_MAY, HAPT_WEIGHT_SHARDING_ALL };
/* The parts of the training state that not every device of a stage has. */
struct hapt_offloading {
    enum hapt_offload what;
    bool host_update; /* the host updates the parameters whose state it has */
    enum hapt_weight_sharding weight_sharding;
};
/* True if two rows are the same submesh with the same program. */
static inline bool hapt_submesh_same(const struct hapt_submesh *a, const struct hapt_submesh *b)
{
    return a->n == b->n && a->m == b->m && a->tp == b->tp && a->program == b->program && a->recompute == b->recompute &&
           a->weights_at == b->weights_at;
}

#define HAPT_UNLIMITED_BYTES 1e30 /* of a device that lacks no memory */

/* The ends of candidates with the same submesh and first layer. */
struct hapt_profile_ends {
    int least, most; /* least > most: none */
};

struct hapt_profile_cluster {
    char name[64];
    int nodes, devices_per_node;
    double device_memory_bytes, peak_flops;
    int submesh_count;            /* S */
    struct hapt_submesh *submesh; /* (1, m) for m = M and the powers of two that divide M, ascending; then (2, M) ...
                                     (N, M); (n, m) appears once for each tensor-parallel degree tp, layout and choice
                                     of recomputation with candidates */
    /* [S][L][L] each: */
    double *stage_time;         /* s per microbatch, forward + backward; NaN: no candidate */
    double *stage_forward_time; /* s per microbatch, forward */
    double *parameter_bytes;    /* per device, always resident */
    double *activation_bytes;   /* per device and microbatch in flight */
    double *step_time;          /* s per step outside the pipeline; NULL: 0 */
    /* Split backward passes (hapt_sharding_split); all three or none. Other files and mixed stages have none. */
    double *weight_time;           /* s per microbatch, the part of the backward pass that waits; NULL: unknown */
    double *split_parameter_bytes; /* as parameter_bytes, of the split program */
    double *weight_slot_bytes;     /* per device and microbatch between BACKWARD and WEIGHT */
    /* With the state on the host: the part of step_time that is copies, which hide behind a forward pass if the update
     * is deferred; the rest computes. 0: updates are not deferred. */
    double deferrable;
    double split_overhead; /* a split backward pass takes 1 + split_overhead times as long as an unsplit one */
    /* [S][L] by submesh and first layer: stages with other ends are no candidates, whatever their times. NULL: unknown.
     * Views of a search only. */
    const struct hapt_profile_ends *ends;
};

/* Stages over devices of several subclusters: one program on devices[i] devices of each subcluster cluster[i].
 * Subclusters ascend; no two entries have the same devices and program. Entry [i][j] covers layers [i, j + 1); its
 * index is hapt_profile_index(profile, row, i, j). */
struct hapt_profile_mixed {
    int count;              /* K, at least 2 */
    int *cluster, *devices; /* [K] */
    int program; /* 0: data-parallel, rows by `ratio`; k >= 1: the profile's layout k, whose axis 0 is all the devices,
                    subcluster by subcluster (HAP), with ratios of its own */
    double *ratio;      /* [sum of devices] share of the work of each device, subcluster by subcluster; NULL: unknown */
    double *stage_time; /* [L][L] s per microbatch, forward + backward; NaN: no candidate */
    double *stage_forward_time; /* [L][L] */
    double *step_time;          /* [L][L] s per step outside the pipeline; NULL: 0 */
    int memory_rows; /* 1: the rows hold for every device, and the device with the least memory to spare, relatively,
                        decides; K: one row for the devices of each subcluster */
    double *parameter_bytes;  /* [memory_rows][L][L] per device, always resident */
    double *activation_bytes; /* [memory_rows][L][L] per device and microbatch in flight */
};

/* Activations and gradients that several layers use. Tensors with the same layers are one entry. */
struct hapt_crossings {
    int count;     /* K */
    double *bytes; /* [K] of a microbatch */
    int *start;    /* [K + 1] into the next two */
    int *layer; /* in the order of computing: activations ascend, gradients descend. The first one writes the tensor, */
    bool *writes; /* others read it, and may add to it (gradients) */
};

/* Cost of making the profile; zeros in a profile that was loaded. */
struct hapt_profile_effort {
    int64_t unique;   /* distinct layer ranges (structure, device count) that have candidates, counted for each kind of
                         device */
    int64_t timed;    /* ranges that were run; the times of the others are composed */
    int64_t programs; /* engines built to run them */
    int64_t runs;     /* of a range, one forward and backward pass each */
    double seconds;
};

/* Origin of the times. */
enum hapt_profile_origin { HAPT_PROFILE_UNKNOWN, HAPT_PROFILE_MEASURED, HAPT_PROFILE_PREDICTED };
const char *hapt_profile_origin_name(enum hapt_profile_origin origin); /* "measured", "predicted", "unknown" */
enum hapt_profile_origin hapt_profile_origin_find(const char *name);

/* Element type of the messages that exchange gradients of tied parameters between stages. 16BIT: bf16; fp16 for a model
 * in fp16. */
enum hapt_tied_exchange { HAPT_TIED_EXCHANGE_FP32, HAPT_TIED_EXCHANGE_16BIT };
const char *hapt_tied_exchange_name(enum hapt_tied_exchange exchange); /* "fp32", "16bit" */
bool hapt_tied_exchange_find(const char *name, enum hapt_tied_exchange *exchange);
static inline double hapt_tied_exchange_bytes(enum hapt_tied_exchange exchange)
{
    return exchange == HAPT_TIED_EXCHANGE_16BIT ? 2 : 4;
}

struct hapt_profile {
    int layer_count;               /* L */
    bool host_state;               /* the optimizer state is on the host */
    bool host_update;              /* the host updates the parameters whose state it has */
    enum hapt_precision precision; /* precision of the model's computation; other tools' files do not contain it */
    enum hapt_profile_origin origin;
    int cluster_count; /* C */
    struct hapt_profile_cluster *cluster;
    int mixed_count;
    struct hapt_profile_mixed *mixed;       /* [mixed_count] */
    double *boundary_bytes;                 /* [L] */
    const struct hapt_crossings *crossings; /* NULL: each layer reads from the layer before it alone */
    double *tied_bytes; /* [L] bytes of the messages for parameters that layers before l and layers from l on both read;
                           NULL: none */
    enum hapt_tied_exchange exchange; /* type of these messages; step_time holds their time */
    double *link_bandwidth;           /* [C][C] byte/s */
    double *link_latency;             /* [C][C] s */
    const double *tied_latency; /* [C][C] s of exchanges of tied parameters, where a search forbids boundaries by an
                                   infinite link_latency; NULL: link_latency */
    struct hapt_profile_effort effort;
    double noise; /* measured: relative uncertainty of the times; 0: unknown */
    double drift; /* measured: relative slowdown of the devices meanwhile (speedup: negative); 0: unknown */
    double flops; /* per microbatch, forward and backward; 0: unknown */
    int layout_count;
    const struct hapt_stage_layout *const *layout; /* [layout_count]; hapt_submesh.program k is layout[k - 1] */
};

static inline size_t hapt_profile_index(const struct hapt_profile *profile, int submesh, int first, int last)
{
    return ((size_t)submesh * (size_t)profile->layer_count + (size_t)first) * (size_t)profile->layer_count +
           (size_t)last;
}

/* Finds the ends of a subcluster's candidates: *ends [submeshes][L], in `arena`, from its stage times
 * [submeshes][L][L]. */
enum hapt_status hapt_profile_find_ends(int layer_count, int submeshes, const double *stage_time,
                                        struct hapt_arena *arena, const struct hapt_profile_ends **ends);

/* All candidates of the submesh that start at layer `first` end in this range. */
static inline struct hapt_profile_ends hapt_profile_ends_of(const struct hapt_profile *profile,
                                                            const struct hapt_profile_cluster *cluster, int submesh,
                                                            int first)
{
    const size_t at = (size_t)submesh * (size_t)profile->layer_count + (size_t)first;
    return cluster->ends ? cluster->ends[at] : (struct hapt_profile_ends){first + 1, profile->layer_count};
}

enum hapt_status hapt_profile_create(int layer_count, int cluster_count, struct hapt_arena *arena,
                                     struct hapt_profile **profile);
/* Allocates the tables of a subcluster; times are NaN. The submeshes are copied (hapt_profile_check checks them). */
enum hapt_status hapt_profile_add_cluster(struct hapt_profile *profile, int index, const char *name, int nodes,
                                          int devices_per_node, double memory_bytes, double peak_flops,
                                          const struct hapt_submesh *submesh, int count, struct hapt_arena *arena);
/* stage_time of a stage with split backward passes. */
static inline double hapt_profile_split_time_s(const struct hapt_profile_cluster *cluster, size_t cell)
{
    const double backward_s = cluster->stage_time[cell] - cluster->stage_forward_time[cell];
    return cluster->stage_time[cell] + cluster->split_overhead * (backward_s > 0 ? backward_s : 0);
}
/* The part of that time that waits. */
static inline double hapt_profile_split_weight_s(const struct hapt_profile_cluster *cluster, size_t cell)
{
    return cluster->weight_time[cell] * (1 + cluster->split_overhead);
}
/* Allocates weight_time (NaN) and the bytes of split programs of a subcluster. */
enum hapt_status hapt_profile_add_split(struct hapt_profile *profile, int index, struct hapt_arena *arena);
/* Adds an entry of mixed stages: times are NaN, one memory row per subcluster, no ratios and no step_time (the
 * caller may set both). `mixed` becomes invalid when another entry is added. */
enum hapt_status hapt_profile_add_mixed(struct hapt_profile *profile, int count, const int *cluster, const int *devices,
                                        struct hapt_arena *arena, struct hapt_profile_mixed **mixed);
enum hapt_status hapt_profile_check(const struct hapt_profile *profile);
enum hapt_status hapt_profile_write(struct hapt_h5 *file, const char *group, const struct hapt_profile *profile);
enum hapt_status hapt_profile_save(const char *path, const struct hapt_profile *profile);
/* Accepts files of other tools: any numeric width, fixed or variable strings, chunked or deflated. Invalid content
 * fails with HAPT_ERR_INPUT. `group`: "" for a profile file, "/profile" inside a run file. */
enum hapt_status hapt_profile_read(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                   struct hapt_profile **profile);
enum hapt_status hapt_profile_load(const char *path, struct hapt_arena *arena, struct hapt_profile **profile);
/* Reads only the precision that the file names. */
enum hapt_status hapt_profile_precision(const char *path, enum hapt_precision *precision);

/* Holds a profile once per node instead of once per rank. Collective over env->world.
 *
 * The first rank of every node (env->node_rank 0) passes `made`, or its failure as `status`; the arguments of other
 * ranks are ignored. Every rank gets a read-only profile whose tables are shared by the node and live as long as env.
 * If a node has several ranks, the tables of `made` are invalid from here on, since they were moved. If it has one,
 * `*profile` is `made` itself. Agrees on failures: the lowest failing rank prints. */
enum hapt_status hapt_profile_share(const struct hapt_env *env, enum hapt_status status, struct hapt_profile *made,
                                    struct hapt_arena *result, struct hapt_profile **profile);
/* hapt_profile_load on one rank per node, then hapt_profile_share. Collective over env->world. */
enum hapt_status hapt_profile_load_shared(const struct hapt_env *env, const char *path, struct hapt_arena *result,
                                          struct hapt_profile **profile);

/* A copy whose tables the caller may change, for what-if questions; the next functions remove candidates from it. */
enum hapt_status hapt_profile_copy(const struct hapt_profile *profile, struct hapt_arena *arena,
                                   struct hapt_profile **copy);
/* Keeps only the candidates of subclusters whose bit is set; mixed stages need all of their subclusters. */
void hapt_profile_keep_subclusters(struct hapt_profile *profile, unsigned subclusters);
/* Keeps only the candidates with "data"-parallel, "tensor"-parallel or "synthesised" programs; a single device
 * counts as each of them. */
void hapt_profile_keep_programs(struct hapt_profile *profile, const char *program);
/* Keeps only the candidates of this tensor-parallel degree; false: none is left. A single device has degree 1;
 * synthesised programs and mixed stages have none. */
bool hapt_profile_keep_degree(struct hapt_profile *profile, int degree);

/* The same candidates with the times and the memory of split programs; other tables are shared. For searches of plans
 * whose backward passes are split afterwards. Mixed stages and subclusters without these figures have no candidates in
 * it. */
enum hapt_status hapt_profile_split_view(const struct hapt_profile *profile, struct hapt_arena *arena,
                                         struct hapt_profile **view);
/* True if a device of each subcluster can hold all layers, and so every range: none is left out for lack of memory. */
bool hapt_profile_holds_all(const struct hapt_profile *profile);
/* The profile on devices without limits of memory. */
enum hapt_status hapt_profile_roomy_view(const struct hapt_profile *profile, struct hapt_arena *arena,
                                         struct hapt_profile **view);
/* The profile without the stages that recompute. */
enum hapt_status hapt_profile_kept_view(const struct hapt_profile *profile, struct hapt_arena *arena,
                                        struct hapt_profile **view);

/*
 * Cost of the boundary after layer `last`: latency + bytes / bandwidth of one link; 0 after the last layer.
 *
 * Between stages of one subcluster each, it is their link. A stage on several subclusters holds a part of the boundary
 * in each. Every subcluster of either stage exchanges its part with the nearest one (by this cost) of the other stage.
 * All do so at once, so the slowest of these links decides. The full boundary_bytes are charged to it, though less may
 * cross.
 */
struct hapt_subclusters {
    int count;
    const int *index;
};
/* Seconds from a stage in subclusters `from` to one in `to`. `link` (may be NULL): the deciding link (from, to).
 * All code that prices a boundary calls this. */
double hapt_profile_boundary_s(const struct hapt_profile *profile, int last, struct hapt_subclusters from,
                               struct hapt_subclusters to, int link[2]);
/* The same for any number of bytes, from a stage to any later or earlier one. */
double hapt_profile_transfer_s(const struct hapt_profile *profile, double bytes, struct hapt_subclusters from,
                               struct hapt_subclusters to, int link[2]);
/*
 * Cost of exchanging tied parameters' gradients between the first and the last stage, once a step. All shards together
 * cross the link once, whatever the variants. The price depends on both stages' subclusters, but a candidate knows only
 * its own, so its step_time holds a lower bound. The last stage's share is the price over its subcluster's best link to
 * any other. The first stage's share is the least that its subcluster adds to that. The shares never exceed the price.
 * They are exact with two subclusters, and if all links between subclusters are equal. (A pipeline inside one of
 * several subclusters is charged as if it left it.) The simulator uses the price, and step_time without the shares
 * (price.c).
 */
double hapt_profile_tied_share_s(const struct hapt_profile *profile, int subcluster, int first, int last);
/* The price if the last stage begins at `first_layer`: over the slowest link between subclusters of the two stages. */
double hapt_profile_tied_s(const struct hapt_profile *profile, int first_layer, struct hapt_subclusters first,
                           struct hapt_subclusters last);
/* hapt_profile_boundary_s between two single subclusters. */
double hapt_profile_comm_s(const struct hapt_profile *profile, int last, int from, int to);

/* tied [layer_count]: bytes of gradients of parameters that layers on both sides of the boundary before a layer read;
 * NULL: none (tied.c). */
enum hapt_status hapt_profile_tied_bytes(const struct hapt_graph *graph, const struct hapt_layers *layers,
                                         enum hapt_tied_exchange exchange, struct hapt_arena *result,
                                         struct hapt_arena *scratch, double **tied);
/* Gives the messages another type: changes tied_bytes and the share of step_time, which the caller may change. */
void hapt_profile_exchange_in(struct hapt_profile *profile, enum hapt_tied_exchange exchange);

/* The crossings of a graph; NULL: none goes past the next layer. */
enum hapt_status hapt_crossings_find(const struct hapt_graph *graph, const struct hapt_layers *layers,
                                     struct hapt_arena *result, struct hapt_arena *scratch,
                                     const struct hapt_crossings **crossings);
/* The crossings between coarser layers: coarse_layer [layer]. */
enum hapt_status hapt_crossings_coarsen(const struct hapt_crossings *fine, const int *coarse_layer,
                                        struct hapt_arena *arena, const struct hapt_crossings **coarse);
/* Lower bounds [layer_count] of the bytes that cross the boundary behind each layer, for all choices of the other
 * boundaries. next: from the stage in front of it to the next one, and back, the smaller of the two. all: activations
 * from the stage in front of it to all stages beyond the boundary. */
enum hapt_status hapt_crossings_least_bytes(const struct hapt_crossings *crossings, int layer_count,
                                            struct hapt_arena *arena, double **next, double **all);
enum hapt_status hapt_crossings_check(const struct hapt_crossings *crossings, int layer_count);

/* Counts the submeshes of a subcluster, and lists them in the profile's order if `submesh` is not NULL. */
int hapt_profile_submeshes(int nodes, int devices_per_node, struct hapt_submesh *submesh);

#endif
