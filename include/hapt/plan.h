/*
 * The plan, and the exact search for it (HAPT 5.2 under DESIGN's objective).
 *
 * Stages of one subcluster are neighbours. Mixed stages run on devices of several subclusters; such a stage may stand
 * only where the pipeline passes from one of its subclusters to another:
 *   - all stages that use one of its subclusters are neighbours;
 *   - the stages in front of it use at most one of its subclusters, those behind it at most one, and not the same one.
 * So it stands between the stages of two of its subclusters, or first or last, or where a side has no stage of its own;
 * two neighbouring subclusters have at most one mixed stage between them, and a third subcluster of it has no other
 * stage. Plans with two mixed stages of the same subclusters in a row are outside the search, as are those that visit a
 * subcluster twice. What a boundary costs: hapt_profile_boundary_s.
 */
#ifndef HAPT_PLAN_H
#define HAPT_PLAN_H

#include "hapt/config.h"
#include "hapt/env.h"
#include "hapt/h5.h"
#include "hapt/layout.h"
#include "hapt/profile.h"
#include "hapt/schedule.h"
#include "hapt/sharding.h"
#include "hapt/simulate.h"

/* What a mixed stage runs on. Subclusters rise. */
struct hapt_plan_mixed {
    int count;              /* K, at least 2 */
    int *cluster, *devices; /* [K] */
    const char **name;      /* [K] of the subclusters */
    double *ratio;          /* [sum of devices] of the work of each device, subcluster by subcluster; NULL: not told */
    double *parameter_bytes, *activation_bytes, *device_memory_bytes; /* [K] of a device of each */
};
struct hapt_plan_stage {
    int first_layer, end_layer;    /* [first, end) */
    int first_op, end_op;          /* forward operators; -1 when planned from a profile alone */
    int subcluster;                /* mixed: the first of them */
    char subcluster_name[64];      /* mixed: the names joined by '+', cut off where they are too long */
    int nodes, devices_per_node;   /* submesh (n, m); mixed: (1, all devices), along axis 0 of a layout */
    struct hapt_plan_mixed *mixed; /* NULL: a stage of one subcluster */
    int tensor_parallel;           /* tp of its program; the other factor of n m is data-parallel */
    int program; /* k >= 1: layout k of its profile, and tensor_parallel is 1; 0: data-parallel, or tensor-parallel as
                    above */
    const struct hapt_stage_layout *layout; /* how its operators are laid out (borrowed); NULL where program is 0 */
    double compute_s;                       /* t_i, step_time / B included */
    double forward_s, step_s;
    double tied_s; /* the share of step_s that stands for the exchange of tied parameters; first and last stage */
    double comm_s; /* c_i */
    int warmup;    /* N_i */
    double parameter_bytes, activation_bytes; /* mixed: of the tightest device relative to its memory */
    double memory_bytes;                      /* parameter_bytes + warmup * activation_bytes */
    double device_memory_bytes;
};

struct hapt_plan {
    int microbatches; /* B */
    enum hapt_schedule_kind schedule;
    double hide_threshold; /* epsilon */
    int replicas;          /* of the pipeline; 1 */
    int layer_count;
    bool blocking; /* transfers occupy sender and receiver: how systems without overlap are priced */
    int threads;   /* CPU threads per rank it was measured with; 0 unknown */
    enum hapt_precision
        precision; /* that its times and bytes are of; what crosses between stages has its element type */
    enum hapt_profile_origin profile; /* where its times come from */
    int stage_count;
    struct hapt_plan_stage *stage;
    double exchange_s;  /* of tied parameters between the first and the last stage, once a step; 0: none */
    double latency_s;   /* the objective's value */
    double simulated_s; /* the simulator's */
    double t_max_s;
    const char *limit;  /* what paces it: "compute", "link", "memory" */
    double balance_eta; /* HAPT (25) */
    double flops;       /* of the model for one microbatch; 0: unknown */
    double peak_flops;  /* of all devices of the cluster, idle ones included; 0: unknown */
    struct {
        double seconds;
        int64_t candidates, evaluated; /* paces: between the bounds from both sides, priced */
        double gap; /* proven: latency_s is at most (1 + gap) times the optimum; 0: it is the optimum */
    } search;
};

/* The subclusters that a stage runs on (borrowed), and its devices of one of them. */
struct hapt_subclusters hapt_plan_stage_subclusters(const struct hapt_plan_stage *stage);
int hapt_plan_stage_devices(const struct hapt_plan_stage *stage, int subcluster);
/* "2 x 4 tp2", or "2+1" devices of the subclusters of a mixed stage. */
const char *hapt_plan_stage_submesh(const struct hapt_plan_stage *stage, char text[64]);
/* As --stages takes it: "0-6@fast:1x2t1", "0-6@fast:2+slow:1p0". */
#define HAPT_PLAN_STAGE_CHARS 2048
const char *hapt_plan_stage_text(const struct hapt_plan_stage *stage, char text[HAPT_PLAN_STAGE_CHARS]);
/* Whether two stages run on as many devices of the same subclusters with the same program. */
bool hapt_plan_same_devices(const struct hapt_plan_stage *a, const struct hapt_plan_stage *b);
/* The first stage that is mixed; -1: none. */
int hapt_plan_first_mixed(const struct hapt_plan *plan);

/* Where a search spends its time on this rank, and how much it makes. */
struct hapt_search_effort {
    double index_s;                    /* candidates out of the profile */
    double start_s;                    /* bounds of t_max and a first plan */
    double narrow_s;                   /* per pace: candidates that are fast enough, states that can be reached */
    double relax_s;                    /* per pace: least sums of prefixes */
    double exact_s;                    /* per pace: points of suffixes */
    double wait_s;                     /* for other ranks */
    double trace_s;                    /* from the best pace to the plan */
    int64_t candidates, cells, points; /* stages; prefixes and suffix points made, over all paces */
};

struct hapt_search_options {
    int microbatches;
    enum hapt_schedule_kind schedule; /* H-1F1B: the objective's warm-up rule; others: their own launch counts */
    double hide_threshold;
    bool use_all_devices;
    double gap;                        /* stop when this close to the optimum, proven; 0: exact */
    struct hapt_search_effort *effort; /* written where given */
    bool may_fail;                     /* having no plan is an answer: agreed upon quietly (hapt_env_agree_quietly) */
};

/* The optimum, or a plan within options->gap of it with plan->search.gap proven; t_max candidates are spread over the
 * ranks of `comm`. The same plan, bit for bit, on every rank and for every number of ranks. Collective.
 * HAPT_ERR_INFEASIBLE names the nearest obstacle; HAPT_ERR_INPUT for more than 12 subclusters; HAPT_ERR_MEMORY on all
 * ranks when one is short of it. */
enum hapt_status hapt_plan_search(MPI_Comm comm, const struct hapt_profile *profile,
                                  const struct hapt_search_options *options, struct hapt_arena *result,
                                  struct hapt_plan **plan);
/* Model FLOPs utilisation of the simulated step, in (0, 1]; 0: unknown. */
double hapt_plan_mfu(const struct hapt_plan *plan);
/* Prices forced stages "0-6@fast:1x2,6-9@slow:1x2t2" (half-open layer ranges; t2: tensor-parallel over 2, p3: layout 3
 * of the profile, without either the fastest program that fits; "0-6@fast:2+slow:1": a mixed stage on 2 devices of fast
 * and 1 of slow, p3 behind it as above, p0: rows alone). HAPT_ERR_INPUT for stages that are no candidates,
 * HAPT_ERR_INFEASIBLE when they exceed memory. */
enum hapt_status hapt_plan_force(const struct hapt_profile *profile, const struct hapt_search_options *options,
                                 const char *stages, struct hapt_arena *result, struct hapt_plan **plan);
/* Warm-up, latency, t_max, memory, eta and simulated time of the stages already in `plan`. */
enum hapt_status hapt_plan_price(const struct hapt_profile *profile, struct hapt_plan *plan,
                                 struct hapt_arena *scratch);
/* The same stages under another schedule, number of microbatches or epsilon, at the plan's pace (that of its slowest
 * stage where compute set it): launch counts, memory, latency and simulated time follow; memory may then exceed the
 * devices'. */
enum hapt_status hapt_plan_change(struct hapt_plan *plan, enum hapt_schedule_kind schedule, int microbatches,
                                  double hide_threshold);
/* The comparison plan: the optimum's submeshes and order under H-1F1B, the layers split evenly over them, priced with
 * options->schedule. Collective. HAPT_ERR_INPUT or HAPT_ERR_INFEASIBLE when the even stages cannot run. */
enum hapt_status hapt_plan_even(MPI_Comm comm, const struct hapt_profile *profile,
                                const struct hapt_search_options *options, struct hapt_arena *result,
                                struct hapt_plan **plan);
/* One step of the plan by the simulator under `kind`; launch counts are the plan's for its own schedule. */
enum hapt_status hapt_plan_simulate(const struct hapt_plan *plan, enum hapt_schedule_kind kind,
                                    struct hapt_arena *arena, struct hapt_simulation **simulation);
/* Steady-state seconds per microbatch (hapt_simulate_period), however few microbatches the step has. */
enum hapt_status hapt_plan_period(const struct hapt_plan *plan, enum hapt_schedule_kind kind, double *period_s);
/* Share of the communication behind `stage` that is hidden (hapt_simulate_overlap). */
enum hapt_status hapt_plan_overlap(const struct hapt_plan *plan, enum hapt_schedule_kind kind, int stage,
                                   double *overlap);
enum hapt_status hapt_plan_check(const struct hapt_plan *plan);

enum hapt_status hapt_plan_write(struct hapt_h5 *file, const char *group, const struct hapt_plan *plan);
enum hapt_status hapt_plan_save(const char *path, const struct hapt_plan *plan);
enum hapt_status hapt_plan_read(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                struct hapt_plan **plan);
enum hapt_status hapt_plan_load(const char *path, struct hapt_arena *arena, struct hapt_plan **plan);
/* What the file says that it was made in, before all of it is read. */
enum hapt_status hapt_plan_precision(const char *path, enum hapt_precision *precision);
void hapt_plan_print(const struct hapt_env *env, const struct hapt_plan *plan);
/* New references; NULL without memory. */
struct json_t *hapt_plan_json(const struct hapt_plan *plan);
struct json_t *hapt_plan_stage_json(const struct hapt_plan_stage *stage);
/* On standard output; `extra` (an object, may be NULL, stays the caller's) adds its members. */
enum hapt_status hapt_plan_print_json(const struct hapt_plan *plan, struct json_t *extra);
/* First world rank index (into subcluster->ranks) of each stage: stages of a subcluster pack whole nodes first, then
 * parts of nodes by falling size, then what mixed stages take, in their order. first_device[stage_count]; of a mixed
 * stage in its first subcluster. HAPT_ERR_INPUT when they do not fit the cluster. */
enum hapt_status hapt_plan_place(const struct hapt_plan *plan, const struct hapt_cluster *cluster, int *first_device);
/* The world ranks of a stage's devices under that placement, subcluster by subcluster, on a bound cluster.
 * rank[nodes * devices_per_node]. */
enum hapt_status hapt_plan_ranks(const struct hapt_plan *plan, const struct hapt_cluster *cluster, int stage,
                                 int *rank);

#endif
