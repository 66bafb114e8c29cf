/*
 * The profile: everything the planner knows. File format: DESIGN "Profile", `hapt profile --help`.
 *
 * Entry [s][i][j] covers layers [i, j + 1). A candidate exists where i <= j and stage_time is finite.
 */
#ifndef HAPT_PROFILE_H
#define HAPT_PROFILE_H

#include "hapt/cluster.h"
#include "hapt/config.h"
#include "hapt/env.h"
#include "hapt/layers.h"
#include "hapt/layout.h"
#include "hapt/model.h"

/* A submesh and the program it runs: n x m devices as n m / tp data-parallel groups of tp tensor-parallel devices, the
 * tp neighbours on one node. tp 0 in a question: whichever serves best. program k >= 1 (then tp is 1): the profile's
 * layout k instead. */
struct hapt_submesh {
    int n, m, tp, program;
};

/* Seconds of a collective of a stage's program as predicted profiles price it: over an axis of the submesh, on `bytes`
 * that all shards along the axis have together (0: shares are even). Of plain programs axis 0 are the data-parallel
 * groups, axis 1 tensor-parallel devices. `efficiency` NULL: the built-in tables. */
struct hapt_efficiency;
double hapt_profile_collective_s(const struct hapt_cluster *cluster, int subcluster, struct hapt_submesh submesh,
                                 enum hapt_dtype dtype, const struct hapt_efficiency *efficiency, int axis,
                                 enum hapt_collective_kind kind, double bytes);

struct hapt_profile_cluster {
    char name[64];
    int nodes, devices_per_node;
    double device_memory_bytes, peak_flops;
    int submesh_count; /* S */
    struct hapt_submesh
        *submesh; /* (1, m) for m = M and powers of two that divide M, ascending; then (2, M) ... (N, M);
                   * (n, m) stands once for each tensor-parallel degree tp and each layout that has candidates */
    /* [S][L][L] each: */
    double *stage_time;         /* s per microbatch, forward + backward; NaN: no candidate */
    double *stage_forward_time; /* s per microbatch, forward */
    double *parameter_bytes;    /* per device, resident */
    double *activation_bytes;   /* per device and microbatch in flight */
    double *step_time;          /* s per step outside the pipeline; NULL: 0 */
};

/* Stages over devices of several subclusters: one program on devices[i] devices of each subcluster cluster[i].
 * Subclusters rise; no two groups have the same devices and program. Entry [i][j] covers layers [i, j + 1), as
 * hapt_profile_index(profile, row, i, j) finds it. */
struct hapt_profile_mixed {
    int count;              /* K, at least 2 */
    int *cluster, *devices; /* [K] */
    int program; /* 0: data-parallel, rows by `ratio`; k >= 1: the profile's layout k, whose axis 0 are all the devices,
                  * subcluster by subcluster (HAP), with ratios of its own */
    double *ratio;      /* [sum of devices] of the work of each device, subcluster by subcluster; NULL: not told */
    double *stage_time; /* [L][L] s per microbatch, forward + backward; NaN: no candidate */
    double *stage_forward_time; /* [L][L] */
    double *step_time;          /* [L][L] s per step outside the pipeline; NULL: 0 */
    int memory_rows;          /* 1: the rows hold for every device, and the tightest one relative to its memory decides;
                               * K: each for the devices of its subcluster */
    double *parameter_bytes;  /* [memory_rows][L][L] per device, resident */
    double *activation_bytes; /* [memory_rows][L][L] per device and microbatch in flight */
};

/* What making a profile took; zeros in one that was read. */
struct hapt_profile_effort {
    int64_t unique; /* layer ranges that differ in structure or device count, of those with candidates, in each kind of
                       device */
    int64_t timed;  /* of them run; the times of the others are composed */
    int64_t programs; /* engines built to run them */
    int64_t runs;     /* of a range, forward and backward */
    double seconds;
};

/* Where its times come from. */
enum hapt_profile_origin { HAPT_PROFILE_UNKNOWN, HAPT_PROFILE_MEASURED, HAPT_PROFILE_PREDICTED };
const char *hapt_profile_origin_name(enum hapt_profile_origin origin); /* "measured", "predicted", "unknown" */
enum hapt_profile_origin hapt_profile_origin_find(const char *name);

struct hapt_profile {
    int layer_count;               /* L */
    enum hapt_precision precision; /* that the model computed in; files of others do not tell */
    enum hapt_profile_origin origin;
    int cluster_count; /* C */
    struct hapt_profile_cluster *cluster;
    int mixed_count;
    struct hapt_profile_mixed *mixed; /* [mixed_count] */
    double *boundary_bytes;           /* [L] */
    double *tied_bytes;     /* [L] of parameters that layers before l and layers from l on both read; NULL: none */
    double *link_bandwidth; /* [C][C] byte/s */
    double *link_latency;   /* [C][C] s */
    struct hapt_profile_effort effort;
    double noise; /* measured: relative, what the times may be off by; 0: not known */
    double drift; /* measured: relative, what the devices became slower by meanwhile (faster: negative); 0: not known */
    double flops; /* of the model for one microbatch, forward and backward; 0: unknown */
    int layout_count;
    const struct hapt_stage_layout *const *layout; /* [layout_count]; hapt_submesh.program k is layout[k - 1] */
};

static inline size_t hapt_profile_index(const struct hapt_profile *profile, int submesh, int first, int last)
{
    return ((size_t)submesh * (size_t)profile->layer_count + (size_t)first) * (size_t)profile->layer_count +
           (size_t)last;
}

/* Allocates tables for a cluster's shape, NaN-filled times. */
enum hapt_status hapt_profile_create(int layer_count, int cluster_count, struct hapt_arena *arena,
                                     struct hapt_profile **profile);
enum hapt_status hapt_profile_add_cluster(struct hapt_profile *profile, int index, const char *name, int nodes,
                                          int devices_per_node, double memory_bytes, double peak_flops,
                                          struct hapt_arena *arena);
/* The same with a list of submeshes of the caller's choice (checked by hapt_profile_check). */
enum hapt_status hapt_profile_add_cluster_of(struct hapt_profile *profile, int index, const char *name, int nodes,
                                             int devices_per_node, double memory_bytes, double peak_flops,
                                             const struct hapt_submesh *submesh, int count, struct hapt_arena *arena);
/* Adds a group of mixed stages: NaN-filled times, memory for each subcluster, no ratios and no step_time (the caller
 * may set both). `mixed` is void once another group is added. */
enum hapt_status hapt_profile_add_mixed(struct hapt_profile *profile, int count, const int *cluster, const int *devices,
                                        struct hapt_arena *arena, struct hapt_profile_mixed **mixed);
enum hapt_status hapt_profile_check(const struct hapt_profile *profile);
enum hapt_status hapt_profile_write(struct hapt_h5 *file, const char *group, const struct hapt_profile *profile);
enum hapt_status hapt_profile_save(const char *path, const struct hapt_profile *profile);
/* Foreign files are welcome: any numeric width, fixed or variable strings, chunked or deflated; hostile content fails
 * with HAPT_ERR_INPUT. `group` "" for a profile file, "/profile" inside a run file. */
enum hapt_status hapt_profile_read(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                   struct hapt_profile **profile);
enum hapt_status hapt_profile_load(const char *path, struct hapt_arena *arena, struct hapt_profile **profile);
/* What the file says that it was made in, before all of it is read. */
enum hapt_status hapt_profile_precision(const char *path, enum hapt_precision *precision);

/* Holds a profile once per node instead of once per rank. Collective over env->world.
 *
 * The first rank of every node (env->node_rank 0) brings `made`, or the status of its failure to make it; what the
 * others bring is not looked at. Every rank gets a profile whose tables are common to the node and must not be written;
 * they live as long as env. Only the first rank of a node needs `made`. Where a node has several ranks its tables are
 * void from here on: they moved; where it has one, `*profile` is `made` itself. Agrees on failures: the lowest failing
 * rank prints. */
enum hapt_status hapt_profile_share(const struct hapt_env *env, enum hapt_status status, struct hapt_profile *made,
                                    struct hapt_arena *result, struct hapt_profile **profile);
/* hapt_profile_load by one rank of every node, then hapt_profile_share. Collective over env->world. */
enum hapt_status hapt_profile_load_shared(const struct hapt_env *env, const char *path, struct hapt_arena *result,
                                          struct hapt_profile **profile);

/* Measures the model on the ranks of a bound cluster (collective over env->world; every rank gets the whole profile):
 * enumerate candidates, prune (out of memory; badly unbalanced), alias structural duplicates, run the rest by the
 * engine in parallel. hapt_profile_predict does the same from the device description alone, rank-local and
 * deterministic, and knows tensor-parallel variants of a submesh (--tensor-parallel): costs come from the operators'
 * local shapes, collectives from the latency and bandwidth of the submesh's links, memory from the planner. */
enum hapt_status hapt_profile_measure(const struct hapt_env *env, const struct hapt_cluster *cluster,
                                      const struct hapt_model *model, const struct hapt_layers *layers,
                                      const struct hapt_config *config, struct hapt_arena *result,
                                      struct hapt_profile **profile);
enum hapt_status hapt_profile_predict(const struct hapt_cluster *cluster, const struct hapt_model *model,
                                      const struct hapt_layers *layers, const struct hapt_config *config,
                                      struct hapt_arena *result, struct hapt_profile **profile);

/* Efficiency tables by kind of device and element type: measured by hapt_profile_calibrate, kept in a file, taken by
 * prediction instead of the built-in ones (src/profile/efficiency.h). */
/* Times every operator of the model, forward and backward, at every number of devices that the rows of a microbatch
 * divide over, on the ranks of a bound cluster, and fits the tables. Collective over env->world; every rank gets them
 * all. */
enum hapt_status hapt_profile_calibrate(const struct hapt_env *env, const struct hapt_cluster *cluster,
                                        const struct hapt_model *model, const struct hapt_layers *layers,
                                        const struct hapt_config *config, struct hapt_arena *result,
                                        struct hapt_efficiency **efficiency);
enum hapt_status hapt_efficiency_save(const char *path, const struct hapt_efficiency *efficiency);
enum hapt_status hapt_efficiency_load(const char *path, struct hapt_arena *arena, struct hapt_efficiency **efficiency);
/* What was fitted, a knot of a curve a row. */
struct hapt_efficiency_row {
    const char *device;
    enum hapt_dtype dtype;
    const char *class, *unit; /* of the size */
    double size;              /* FLOP, or byte of class memory */
    int samples;
    double efficiency;     /* share of the device's rate */
    double worst_residual; /* |predicted / measured - 1| */
};
int hapt_efficiency_row_count(const struct hapt_efficiency *efficiency);
struct hapt_efficiency_row hapt_efficiency_row_at(const struct hapt_efficiency *efficiency, int index);
/* Whether it holds a table for such a device and type; prediction takes the built-in one where not. */
bool hapt_efficiency_covers(const struct hapt_efficiency *efficiency, const char *device, enum hapt_dtype dtype);
/* hapt_profile_predict with these tables (NULL: the built-in ones). */
enum hapt_status hapt_profile_predict_with(const struct hapt_cluster *cluster, const struct hapt_model *model,
                                           const struct hapt_layers *layers, const struct hapt_config *config,
                                           const struct hapt_efficiency *efficiency, struct hapt_arena *result,
                                           struct hapt_profile **profile);

/* Profiles for questions: a copy whose tables the caller may change, and ways to take candidates out of it. */
enum hapt_status hapt_profile_copy(const struct hapt_profile *profile, struct hapt_arena *arena,
                                   struct hapt_profile **copy);
/* Only subclusters whose bit is set keep their candidates; mixed stages must have all of theirs set. */
void hapt_profile_keep_subclusters(struct hapt_profile *profile, unsigned subclusters);
/* Only "data"-parallel, "tensor"-parallel or "synthesised" programs keep their candidates; a single device's is any of
 * them. */
void hapt_profile_keep_programs(struct hapt_profile *profile, const char *program);

/*
 * What the boundary after layer `last` costs: latency + bytes / bandwidth of one link, 0 after the last layer.
 *
 * Between stages of one subcluster each it is their link. A stage on several subclusters holds a part of the boundary
 * in each: every subcluster of either stage exchanges its part with the nearest one (by this cost) of the other stage,
 * all at once, so the slowest of these links decides. The whole of boundary_bytes is charged to it, though less may
 * cross.
 */
struct hapt_subclusters {
    int count;
    const int *index;
};
/* Seconds from a stage in subclusters `from` to one in `to`; the deciding link where `link` is given (from, to).
 * Everything that prices a boundary comes here. */
double hapt_profile_boundary_s(const struct hapt_profile *profile, int last, struct hapt_subclusters from,
                               struct hapt_subclusters to, int link[2]);
/*
 * The exchange of tied parameters' gradients between the first and the last stage, once a step: all shards together
 * cross the link once, whatever the variants. Its price depends on both stages' subclusters, a candidate knows its own
 * only; so step_time holds a share: what the last stage's subcluster owes at least, over its best link to any other,
 * and what the first stage's owes on top at least. The shares never exceed the price and are exact where the prices are
 * such sums: always with two subclusters, and when all links between subclusters are equal. (A pipeline inside one of
 * several subclusters is charged as if it left it.) The simulator takes the price, and step_time without the shares
 * (price.c).
 */
double hapt_profile_tied_share_s(const struct hapt_profile *profile, int subcluster, int first, int last);
/* The price, when the last stage begins at layer `cut`: over the slowest link between a subcluster of one and one of
 * the other. */
double hapt_profile_tied_s(const struct hapt_profile *profile, int cut, struct hapt_subclusters first,
                           struct hapt_subclusters last);
/* The same as hapt_profile_boundary_s between two single subclusters. */
double hapt_profile_comm_s(const struct hapt_profile *profile, int last, int from, int to);

#endif
