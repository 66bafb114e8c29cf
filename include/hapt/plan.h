/*
 * The plan, and the exact search for it (HAPT 5.2; objective HAPT (13)).
 *
 * The stages of one subcluster are neighbours. A mixed stage runs on devices of several subclusters. It stands only
 * where the pipeline passes from one of its subclusters to another:
 *   - All stages that use one of its subclusters are neighbours.
 *   - The stages in front of it use at most one of its subclusters, the stages behind it at most one other.
 * So it stands between the stages of two of its subclusters, or first, or last, or next to stages that use none of its
 * subclusters. Two neighbouring subclusters have at most one mixed stage between them; a third subcluster of that stage
 * has no other stage. The search excludes plans with two mixed stages of the same subclusters in a row, and plans that
 * visit a subcluster twice. Cost of a boundary: hapt_profile_boundary_s.
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

/* The devices of a mixed stage. Subclusters ascend. */
struct hapt_plan_mixed {
    int count;              /* K, at least 2 */
    int *cluster, *devices; /* [K] */
    const char **name;      /* [K] names of the subclusters */
    double *ratio; /* [sum of devices] share of the work of each device, subcluster by subcluster; NULL: unknown */
    double *parameter_bytes, *activation_bytes, *device_memory_bytes; /* [K] per device of each */
};
struct hapt_plan_stage {
    int first_layer, end_layer;    /* [first, end) */
    int first_op, end_op;          /* forward operators; -1 if planned from a profile alone */
    int subcluster;                /* mixed: the first of them */
    char subcluster_name[64];      /* mixed: the names joined by '+', truncated if too long */
    int nodes, devices_per_node;   /* submesh (n, m); mixed: (1, all devices), along axis 0 of a layout */
    struct hapt_plan_mixed *mixed; /* NULL: a stage of one subcluster */
    int tensor_parallel;           /* tp of its program; the other factor of n m is data-parallel */
    int program; /* k >= 1: layout k of its profile, tensor_parallel is 1; 0: data- or tensor-parallel as above */
    const struct hapt_stage_layout *layout; /* layout of its operators (borrowed); NULL if program is 0 */
    double compute_s;                       /* t_i, step_time / B included */
    double forward_s, step_s;
    double tied_s; /* the part of step_s for the exchange of tied parameters; first and last stage */
    double comm_s; /* c_i */
    int warmup;    /* N_i */
    double parameter_bytes, activation_bytes; /* mixed: of the device that is fullest relative to its memory */
    double memory_bytes;                      /* parameter_bytes + warmup * activation_bytes */
    double device_memory_bytes;
};

struct hapt_plan {
    int microbatches; /* B */
    enum hapt_schedule_kind schedule;
    double hide_threshold; /* epsilon */
    int replicas;          /* of the pipeline; 1 */
    int layer_count;
    bool blocking;                    /* transfers occupy sender and receiver: prices systems without overlap */
    int threads;                      /* CPU threads per rank during the measurement; 0: unknown */
    enum hapt_precision precision;    /* of its times and bytes; tensors between stages have its element type */
    enum hapt_profile_origin profile; /* source of its times */
    int stage_count;
    struct hapt_plan_stage *stage;
    double exchange_s;  /* exchange of tied parameters between the first and the last stage, once a step; 0: none */
    double latency_s;   /* value of the objective */
    double simulated_s; /* step time by the simulator */
    double t_max_s;
    const char *limit;  /* what sets t_max: "compute", "link", "memory" */
    double balance_eta; /* HAPT (25) */
    double flops;       /* of the model per microbatch; 0: unknown */
    double peak_flops;  /* of all devices of the cluster, including idle ones; 0: unknown */
    struct {
        double seconds;
        int64_t candidates, evaluated; /* t_max values: between the bounds from both sides; priced */
        double gap;                    /* proven: latency_s <= (1 + gap) * optimum; 0: it is the optimum */
    } search;
};

/* The subclusters that a stage runs on (borrowed), and its number of devices in one of them. */
struct hapt_subclusters hapt_plan_stage_subclusters(const struct hapt_plan_stage *stage);
int hapt_plan_stage_devices(const struct hapt_plan_stage *stage, int subcluster);
/* "2 x 4 tp2"; for a mixed stage "2+1", the devices of each subcluster. */
const char *hapt_plan_stage_submesh(const struct hapt_plan_stage *stage, char text[64]);
/* In the syntax of --stages: "0-6@fast:1x2t1", "0-6@fast:2+slow:1p0". */
#define HAPT_PLAN_STAGE_CHARS 2048
const char *hapt_plan_stage_text(const struct hapt_plan_stage *stage, char text[HAPT_PLAN_STAGE_CHARS]);
/* True if two stages run the same program on equally many devices of the same subclusters. */
bool hapt_plan_same_devices(const struct hapt_plan_stage *a, const struct hapt_plan_stage *b);
/* The first mixed stage; -1: none. */
int hapt_plan_first_mixed(const struct hapt_plan *plan);

/* Time and work of a search on this rank. */
struct hapt_search_effort {
    double index_s;                    /* to read the candidates from the profile */
    double start_s;                    /* bounds of t_max and a first plan */
    double narrow_s;                   /* per t_max: fast enough candidates, reachable states */
    double relax_s;                    /* per t_max: least sums of prefixes */
    double exact_s;                    /* per t_max: points of suffixes */
    double wait_s;                     /* waiting for other ranks */
    double trace_s;                    /* from the best t_max to the plan */
    int64_t candidates, cells, points; /* stages; prefixes and suffix points, over all t_max values */
};

struct hapt_search_options {
    int microbatches;
    enum hapt_schedule_kind schedule; /* H-1F1B: the objective's warm-up rule; others: their own launch counts */
    double hide_threshold;
    bool use_all_devices;
    double gap;                        /* stop when proven this close to the optimum; 0: exact */
    struct hapt_search_effort *effort; /* output; may be NULL */
    bool may_fail;                     /* "no plan" is a valid answer and is not printed (hapt_env_agree_quietly) */
};

/* The optimal plan, or one within options->gap of it (plan->search.gap is proven). The ranks of `comm` share the t_max
 * candidates. The plan is bit-identical on every rank and for every number of ranks. Collective. HAPT_ERR_INFEASIBLE
 * names the nearest obstacle; HAPT_ERR_INPUT: more than 12 subclusters; HAPT_ERR_MEMORY on all ranks if one runs out of
 * memory. */
enum hapt_status hapt_plan_search(MPI_Comm comm, const struct hapt_profile *profile,
                                  const struct hapt_search_options *options, struct hapt_arena *result,
                                  struct hapt_plan **plan);
/* Model FLOPs utilisation of the simulated step, in (0, 1]; 0: unknown. */
double hapt_plan_mfu(const struct hapt_plan *plan);
/* Prices given stages "0-6@fast:1x2,6-9@slow:1x2t2" (half-open layer ranges). t2: tensor-parallel over 2; p3: layout 3
 * of the profile; neither: the fastest program that fits. "0-6@fast:2+slow:1": a mixed stage on 2 devices of fast and 1
 * of slow; then p3 as above, p0: data-parallel rows only. HAPT_ERR_INPUT: a stage is no candidate; HAPT_ERR_INFEASIBLE:
 * they exceed memory. */
enum hapt_status hapt_plan_force(const struct hapt_profile *profile, const struct hapt_search_options *options,
                                 const char *stages, struct hapt_arena *result, struct hapt_plan **plan);
/* Computes warm-up, latency, t_max, memory, eta and simulated time of the stages already in `plan`. */
enum hapt_status hapt_plan_price(const struct hapt_profile *profile, struct hapt_plan *plan,
                                 struct hapt_arena *scratch);
/* The same stages with another schedule, number of microbatches or epsilon. Only a new number of microbatches changes
 * t_max: it becomes the largest t_i or c_i if compute set it, else at least that. Launch counts, memory, latency and
 * simulated time follow. Memory may then exceed the devices' memory. */
enum hapt_status hapt_plan_change(struct hapt_plan *plan, enum hapt_schedule_kind schedule, int microbatches,
                                  double hide_threshold);
/* The comparison plan: submeshes and order of the optimum under H-1F1B, layers split evenly, priced with
 * options->schedule. Collective. HAPT_ERR_INPUT or HAPT_ERR_INFEASIBLE: the even stages cannot run. */
enum hapt_status hapt_plan_even(MPI_Comm comm, const struct hapt_profile *profile,
                                const struct hapt_search_options *options, struct hapt_arena *result,
                                struct hapt_plan **plan);
/* Simulates one step of the plan under `kind`. The plan's own schedule uses the plan's launch counts. */
enum hapt_status hapt_plan_simulate(const struct hapt_plan *plan, enum hapt_schedule_kind kind,
                                    struct hapt_arena *arena, struct hapt_simulation **simulation);
/* Steady-state seconds per microbatch (hapt_simulate_period); independent of the number of microbatches. */
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
/* The precision that the file states, read before the rest. */
enum hapt_status hapt_plan_precision(const char *path, enum hapt_precision *precision);
void hapt_plan_print(const struct hapt_env *env, const struct hapt_plan *plan);
/* New references; NULL: out of memory. */
struct json_t *hapt_plan_json(const struct hapt_plan *plan);
struct json_t *hapt_plan_stage_json(const struct hapt_plan_stage *stage);
/* Prints to standard output. `extra` (an object, may be NULL, stays the caller's) adds its members. */
enum hapt_status hapt_plan_print_json(const struct hapt_plan *plan, struct json_t *extra);
/* Index of each stage's first rank in subcluster->ranks. Stages of a subcluster fill whole nodes first, then parts of
 * nodes in descending size, then the parts of mixed stages, in pipeline order. first_device[stage_count]; for a mixed
 * stage in its first subcluster. HAPT_ERR_INPUT: they do not fit the cluster. */
enum hapt_status hapt_plan_assign_devices(const struct hapt_plan *plan, const struct hapt_cluster *cluster,
                                          int *first_device);
/* The world ranks of a stage's devices under that placement, subcluster by subcluster; the cluster must be bound.
 * rank[nodes * devices_per_node]. */
enum hapt_status hapt_plan_ranks(const struct hapt_plan *plan, const struct hapt_cluster *cluster, int stage,
                                 int *rank);

#endif
