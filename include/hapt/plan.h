/*
 * The plan: stages on submeshes, their programs, launch counts and times (HAPT 4, 5.2). hapt/search.h finds it.
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
#include "hapt/graph.h"
#include "hapt/h5.h"
#include "hapt/layout.h"
#include "hapt/profile.h"
#include "hapt/schedule.h"
#include "hapt/sharding.h"
#include "hapt/simulate.h"

enum { HAPT_SUBMESH_NAME = 64, HAPT_PLAN_MOST_LOOPED_PASSES = 1 << 20 /* stages times microbatches */ };
/*
 * Devices on which stages run, as a mesh. One part: nodes x devices_per_node devices of a subcluster. Several parts: a
 * mixed submesh, 1 x all devices, part by part.
 */
struct hapt_plan_submesh {
    int nodes, devices_per_node;  /* (n, m) */
    int part_count;               /* subclusters, ascending */
    int *subcluster, *devices;    /* [part_count] */
    const char **part_name;       /* [part_count] names of the subclusters */
    double *device_memory_bytes;  /* [part_count] */
    char name[HAPT_SUBMESH_NAME]; /* the parts' names joined by '+', truncated if too long */
    int ahead; /* looped: forwards before its first backward; 0: those of the schedule and its prefetch */
    int slots; /* looped: activation slots of its list; 0: the launches of its stages together */
};
/* Contiguous layers on one submesh, under one layout: a chunk of the model. */
struct hapt_plan_stage {
    int first_layer, end_layer;        /* [first, end) */
    int first_op, end_op;              /* forward operators; -1 if planned from a profile alone */
    struct hapt_plan_submesh *submesh; /* one of plan->submesh */
    struct hapt_layout layout;         /* of its operators over the submesh */
    double compute_s;                  /* t_i, step_time / B included */
    double forward_s, step_s;
    double weight_s; /* part of the backward time that a split backward pass defers; NaN: unknown */
    double tied_s;   /* the part of step_s for the exchange of tied parameters; first and last stage */
    /* With the optimizer state on the host: the part of step_s that the next step's first forward pass may hide
     * (hapt_engine_defer_update), and how much of this part is computation. 0: the update is not deferred. */
    double deferred_s, deferred_work_s;
    double comm_s;    /* c_i */
    int warmup;       /* N_i */
    int slots;        /* split: activation slots that it may hold; at most N_i: N_i */
    int weight_slots; /* split: microbatches whose gradients of parameters may wait; unsplit: 0 */
    int forward_only; /* 1: neither it nor a stage before it has a backward pass (a frozen prefix) */
    double *part_parameter_bytes, *part_activation_bytes; /* [submesh->part_count] per device of each part */
    /* of the device that is fullest relative to its memory */
    double parameter_bytes, activation_bytes;
    double weight_slot_bytes; /* of one weight slot; unsplit: 0 */
    double memory_bytes;      /* parameter_bytes + its slots * activation_bytes + weight_slots * weight_slot_bytes */
    double device_memory_bytes;
};

/* A message of each microbatch from one stage to another. */
struct hapt_plan_edge {
    struct hapt_schedule_edge edge; /* link: 0 inside a subcluster, else the same number for messages that share it */
    double time_s, bytes;
    double share; /* of the link's bandwidth: other submeshes may send over it in the same direction; 1: none does */
};

struct hapt_plan_search_figures {
    double seconds;
    int64_t candidates, evaluated; /* t_max values: between the bounds from both sides; priced */
    double gap;                    /* proven: latency_s <= (1 + gap) * optimum; 0: it is the optimum */
};

struct hapt_plan {
    struct hapt_arena *arena; /* of its arrays */
    int microbatches;         /* B */
    int rows;                 /* of a microbatch, if the planner chose them; 0: the model's own */
    enum hapt_schedule_kind schedule;
    bool split;            /* backward passes are split (zero bubble): WEIGHT instructions, bytes of split programs */
    double hide_threshold; /* epsilon */
    int loop_batch;        /* B_l of a looped schedule; 0: the kind's (hapt_schedule_loop_batch) */
    int prefetch;          /* b of Pfeife's B_f; HAPT_SCHEDULE_LOOPED only */
    int transfer_slots;    /* of each boundary, if loops or skips need more; 0: HAPT_TRANSFER_SLOTS */
    int replicas;          /* of the pipeline; 1 */
    int layer_count;
    bool blocking;                    /* transfers occupy sender and receiver: prices systems without overlap */
    int threads;                      /* CPU threads per rank during the measurement; 0: unknown */
    bool host_state;                  /* the optimizer state is on the host */
    bool host_update;                 /* the host updates the parameters whose state it has */
    enum hapt_precision precision;    /* of its times and bytes; tensors between stages have its element type */
    enum hapt_profile_origin profile; /* source of its times */
    int submesh_count;
    struct hapt_plan_submesh *submesh; /* each is used by at least one stage */
    int stage_count;
    struct hapt_plan_stage *stage;
    int edge_count;              /* 0: each stage sends to its neighbours alone, over links of its own, in comm_s */
    struct hapt_plan_edge *edge; /* in the order of hapt_schedule_edges; plan_edges.c finds them */
    int relay_count;
    struct hapt_schedule_relay *relay; /* messages whose tensors the receiver passes on */
    double exchange_s; /* exchange of tied parameters between the first and the last stage, once a step; 0: none */
    enum hapt_tied_exchange exchange; /* type of its messages */
    double exchange_bytes;            /* in each direction; 0: unknown, if exchange_s is not 0 */
    double latency_s;                 /* value of the objective */
    double simulated_s;               /* step time by the simulator */
    double bound_s;                   /* proven: no plan that was searched has a shorter simulated step; 0: unknown */
    double t_max_s;
    const char *limit;  /* what sets t_max: "compute", "link", "memory" */
    double balance_eta; /* HAPT (25) */
    double flops;       /* of the model per microbatch; 0: unknown */
    double peak_flops;  /* of all devices of the cluster, including idle ones; 0: unknown */
    struct hapt_plan_search_figures search;
};

/* Gives a plan `stages` stages, each on a submesh of its own with one part; all else is zero, first_op and end_op -1.
 */
enum hapt_status hapt_plan_allot(struct hapt_plan *plan, int stages, struct hapt_arena *arena);
/* Gives the submesh of a stage `parts` parts; all zero. */
enum hapt_status hapt_plan_stage_parts(struct hapt_plan_stage *stage, int parts, struct hapt_arena *arena);
/* Sets submesh->name from the parts' names. */
void hapt_plan_submesh_set_name(struct hapt_plan_submesh *submesh);
/* True if stages update during the next step's first forward pass. */
bool hapt_plan_defers(const struct hapt_plan *plan);
static inline bool hapt_plan_is_mixed(const struct hapt_plan_stage *stage)
{
    return stage->submesh->part_count > 1;
}
/* The number of transfer slots of each boundary. */
static inline int hapt_plan_transfer_slots(const struct hapt_plan *plan)
{
    return plan->transfer_slots > 0 ? plan->transfer_slots : HAPT_TRANSFER_SLOTS;
}
/* The number of its devices. */
static inline int hapt_plan_submesh_size(const struct hapt_plan_submesh *submesh)
{
    return submesh->nodes * submesh->devices_per_node;
}
/* The number of microbatches whose activations the stage may hold. An unsplit stage holds its launches. */
static inline int hapt_plan_stage_slots(const struct hapt_plan_stage *stage)
{
    return stage->slots > stage->warmup ? stage->slots : stage->warmup;
}
/* Bytes on a device of part k. */
static inline double hapt_plan_stage_bytes(const struct hapt_plan_stage *stage, int k)
{
    return stage->part_parameter_bytes[k] + hapt_plan_stage_slots(stage) * stage->part_activation_bytes[k] +
           stage->weight_slots * stage->weight_slot_bytes;
}
/* True if the stages of a submesh fit into its memory together; each slot has room for the largest activations. */
bool hapt_plan_submesh_fits(const struct hapt_plan *plan, const struct hapt_plan_submesh *submesh);
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

/* Rows of a step; 0: unknown. */
static inline int64_t hapt_plan_global_batch(const struct hapt_plan *plan)
{
    return (int64_t)plan->rows * plan->microbatches;
}
/* Microbatches per second of the simulated step; infinite if it takes no time (a profile may have only zero times). */
static inline double hapt_plan_rate(const struct hapt_plan *plan)
{
    return plan->simulated_s > 0 ? plan->microbatches / plan->simulated_s : INFINITY;
}
/* Model FLOPs utilisation of the simulated step, in (0, 1]; 0: unknown. */
double hapt_plan_mfu(const struct hapt_plan *plan);
/* Computes warm-up, latency, t_max, memory, eta and simulated time of the stages already in `plan`. */
enum hapt_status hapt_plan_price(const struct hapt_profile *profile, struct hapt_plan *plan);
/* The same stages with another schedule, number of microbatches or epsilon. Without loops, only a new number of
 * microbatches changes t_max. It becomes the largest t_i or c_i if compute set it, else at least that. With loops,
 * t_max is hapt_plan_busiest_s; the caller sets loop_batch, prefetch and `ahead` before. Launch counts, memory, latency
 * and simulated time are computed anew. Memory may then exceed the devices' memory. */
enum hapt_status hapt_plan_change(struct hapt_plan *plan, enum hapt_schedule_kind schedule, int microbatches,
                                  double hide_threshold);
/*
 * The stage from which reader[index] gets a tensor that `producer` makes and the stages reader[] use, in ascending
 * order. Inside the producer's subcluster, and for mixed stages, it is the producer. Readers in another subcluster form
 * a chain, so that the tensor crosses the link to it once: each passes it on to the next. A tensor that is passed on
 * waits in a transfer slot, and these are few. So a reader on the same submesh as the one before it, or more than
 * HAPT_TRANSFER_SLOTS stages behind it, gets the tensor from the producer.
 */
int hapt_plan_source(const struct hapt_plan *plan, int producer, const int *reader, int index);
/* Sets the edges of a plan with given stages and comm_s. */
enum hapt_status hapt_plan_find_edges(const struct hapt_profile *profile, struct hapt_plan *plan);
/* The same from the model, for a plan without edges whose profile did not know which tensors skip stages. Messages
 * between neighbours keep c_i; others take no time, since each c_i counts all that crosses its boundary. Stages must
 * have operators. */
enum hapt_status hapt_plan_find_model_edges(const struct hapt_graph *graph, struct hapt_plan *plan);
/* Gives the plan's edges to a schedule; those of neighbours are the default. Gradients to forward-only stages have no
 * edge. */
enum hapt_status hapt_plan_add_edges(const struct hapt_plan *plan, struct hapt_arena *arena,
                                     struct hapt_schedule_options *options);
/* The share of the link's bandwidth for messages from one stage to another. */
double hapt_plan_link_share(const struct hapt_plan *plan, int from, int to);
/* True if a message of the plan is not sent, because the receiver is forward-only. */
static inline bool hapt_plan_drops_edge(const struct hapt_plan *plan, const struct hapt_plan_edge *edge)
{
    return edge->edge.backward && plan->stage[edge->edge.to].forward_only;
}
/* The plan's edge that is edge e of its schedule; the plan must have edges. */
static inline const struct hapt_plan_edge *hapt_plan_sent_edge(const struct hapt_plan *plan, int e)
{
    int at = 0;
    for (int sent = -1; (sent += !hapt_plan_drops_edge(plan, &plan->edge[at])) < e;) at++;
    return &plan->edge[at];
}
/* True if a schedule has the plan's edges. */
bool hapt_plan_has_edges(const struct hapt_plan *plan, const struct hapt_schedule *schedule);
enum hapt_status hapt_plan_check_edges(const struct hapt_plan *plan);
/* The instruction lists of one step. `tied`: chunks share parameters. HAPT_ERR_INPUT, HAPT_ERR_USAGE: as
 * hapt_schedule_build. */
enum hapt_status hapt_plan_schedule(const struct hapt_plan *plan, bool tied, struct hapt_arena *arena,
                                    struct hapt_schedule **schedule);
/* The simulator's costs of a plan; arrays in `arena`. */
enum hapt_status hapt_plan_costs(const struct hapt_plan *plan, struct hapt_arena *arena, struct hapt_costs *costs);
/* The simulator's input: instruction lists and costs of one step. The arena owns both. */
enum hapt_status hapt_plan_lay_out(const struct hapt_plan *plan, struct hapt_arena *arena,
                                   struct hapt_schedule **schedule, struct hapt_costs *costs);
/* Simulates one step of the plan. hapt_plan_change gives it another schedule. */
enum hapt_status hapt_plan_simulate(const struct hapt_plan *plan, struct hapt_arena *arena,
                                    struct hapt_simulation **simulation);
/* The step of a plan without lists: hapt_simulate_chain. Its stages have a submesh each, no splits, no loops, and no
 * edges of their own. */
enum hapt_status hapt_plan_simulate_chain(const struct hapt_plan *plan, double most_s, struct hapt_arena *scratch,
                                          struct hapt_simulate_work *work, double *step_s);
/* The critical path of the simulated step (hapt_simulate_critical_path), in seconds. The sum is the step. */
struct hapt_plan_path {
    double *compute_s;  /* [stage] passes */
    double *transfer_s; /* [stage] transfers between it and later stages */
    double *update_s;   /* [stage] sums of gradients and update */
    double exchange_s;  /* gradients of tied parameters */
};
enum hapt_status hapt_plan_path(const struct hapt_plan *plan, struct hapt_arena *arena, struct hapt_plan_path *path);
/* The part of the simulated step that would not be there without what stages do once a step: sums of gradients, updates
 * and, with the optimizer state on hosts, its copies. */
enum hapt_status hapt_plan_exposed(const struct hapt_plan *plan, double *exposed_s);
/* Steady-state seconds per microbatch (hapt_simulate_period); independent of the number of microbatches. */
enum hapt_status hapt_plan_period(const struct hapt_plan *plan, double *period_s);
/* Share of the communication behind `stage` that is hidden (hapt_simulate_overlap). */
enum hapt_status hapt_plan_overlap(const struct hapt_plan *plan, int stage, double *overlap);
/* Computes stage tables from the profile, launch counts, latency, eta and simulated time for a given t_max. */
enum hapt_status hapt_plan_price_at(const struct hapt_profile *profile, double t_max_s, struct hapt_plan *plan);
/* Computes stage tables, launch counts and memory only. `misfit`: the first stage that exceeds its devices' memory;
 * -1: none. */
enum hapt_status hapt_plan_launch(const struct hapt_profile *profile, double t_max_s, struct hapt_plan *plan,
                                  int *misfit);

/* Sets launch counts and memory of priced stages under a launch rule and t_max. Returns the first stage that exceeds
 * its devices' memory, or -1. */
int hapt_plan_relaunch(struct hapt_plan *plan, enum hapt_schedule_kind schedule, double hide_threshold, double t_max_s);
/* Stage tables only: times, bytes, the exchange of tied parameters. Checks that the devices suffice. */
enum hapt_status hapt_plan_price_tables(const struct hapt_profile *profile, struct hapt_plan *plan);
/* Sets the memory of priced stages with given launch counts. Returns the first stage that exceeds its devices' memory,
 * or -1. */
int hapt_plan_tighten(struct hapt_plan *plan);
/* Splits the backward passes of a priced plan, with its launch counts. Each stage gets the numbers of slots
 * and weight slots, of those that fit its devices, with which the simulated step is shortest. There is then no bound_s.
 * HAPT_ERR_INPUT: the profile does not know the part of the backward time that waits. HAPT_ERR_INFEASIBLE: the launches
 * of a stage do not fit; the plan is unchanged. */
enum hapt_status hapt_plan_split_backward(const struct hapt_profile *profile, struct hapt_plan *plan);
/* A split plan is worth it if its simulated step is less than this share of that without: 1, or with measured times
 * 0.99, because their errors are about as large. */
double hapt_plan_split_worth(const struct hapt_profile *profile);
/* The same, if its simulated step is then shorter (hapt_plan_split_worth); else the plan is unchanged. *fits false: the
 * launches of a stage do not fit. HAPT_OK also if the profile does not know the times. */
enum hapt_status hapt_plan_split_if_shorter(const struct hapt_profile *profile, struct hapt_plan *plan, bool *fits);
/* Prices given stages with given launch counts; t_max becomes the largest t_i or c_i. HAPT_ERR_INFEASIBLE: a stage
 * exceeds its devices' memory. */
enum hapt_status hapt_plan_price_launches(const struct hapt_profile *profile, struct hapt_plan *plan);

/* ---- Looped schedules and frozen prefixes: plan_loops.c, plan_freeze.c ---- */

/* How many times the pipeline visits submesh 0; 1: each submesh once. */
int hapt_plan_loops(const struct hapt_plan *plan);
/* The submesh of visit-ordered chunk k among D. Loops: k mod D. A V goes back and forth, so that the neighbours at its
 * turns share a submesh. */
int hapt_plan_place(int chunk, int submeshes, bool v);
/* True if the stages are placed as a V of at least two visits. */
bool hapt_plan_is_v(const struct hapt_plan *plan);
/* Lets stage k of an allotted plan run on submesh hapt_plan_place(k), which must have the same devices and program;
 * `submeshes` divides the number of stages. HAPT_ERR_INPUT: it does not, or they differ. */
enum hapt_status hapt_plan_fold(struct hapt_plan *plan, int submeshes, bool v);
/* Sets transfer_slots of a looped plan to the least number, from its present one on, with which its lists run; price
 * its stages afterwards. HAPT_ERR_USAGE: no number helps; the hint names settings that work. */
enum hapt_status hapt_plan_choose_transfer_slots(struct hapt_plan *plan);
/* The same, with the lists in `arena`. *schedule NULL: no number helps. */
enum hapt_status hapt_plan_find_lists(struct hapt_plan *plan, struct hapt_arena *arena,
                                      struct hapt_schedule **schedule);
/* Sets launch counts, slots and memory of a looped plan with priced stages from its lists, which are checked. *misfit:
 * the first stage whose submesh lacks memory; -1: none. HAPT_ERR_USAGE: the lists do not work; the hint names settings
 * that do. */
enum hapt_status hapt_plan_launch_loops(struct hapt_plan *plan, int *misfit);
/* Bytes of a submesh's fullest device, relative to its memory: all stages, each slot and weight slot as large as the
 * largest. *have_bytes: its memory. */
double hapt_plan_submesh_bytes(const struct hapt_plan *plan, const struct hapt_plan_submesh *submesh,
                               double *have_bytes);
/* The largest t_i (*compute_s) or c_i. Looped: c_i or hapt_plan_looped_work_s. */
double hapt_plan_busiest_s(const struct hapt_plan *plan, double *compute_s);
/* The largest work per microbatch of a looped plan, of a submesh (*compute_s) or of a channel between two. A step takes
 * at least as long for each microbatch. */
double hapt_plan_looped_work_s(const struct hapt_plan *plan, double *compute_s);
/* hapt_plan_choose_transfer_slots, after hapt_plan_find_model_edges if the plan has no edges of its own: the messages
 * of skips wait longer than those between neighbours. Stages must have operators. It does nothing if the plan is not
 * looped. */
enum hapt_status hapt_plan_choose_skip_slots(struct hapt_plan *plan, const struct hapt_graph *graph);
/* Gives a priced plan without loops more transfer slots, if messages to stages far away would wait for them and the
 * simulated step gets shorter: the least number that is enough, of those that fit. There is then no bound_s. Launch
 * counts stay. Nothing, if the plan is looped. skip_slots.c */
enum hapt_status hapt_plan_widen_skips(const struct hapt_profile *profile, struct hapt_plan *plan);
/* Marks the stages before operator `first_trained_op` as forward-only, with the launches that they need, and simulates
 * the step anew if there are any. A looped plan that this would slow down keeps empty backward passes. Stages must have
 * operators. */
enum hapt_status hapt_plan_freeze(struct hapt_plan *plan, int first_trained_op);

/* Estimates the simulated step of priced stages with launch counts. A long step is extrapolated from two that are at
 * least `microbatches` and twice that long. Exact if the step is shorter. */
enum hapt_status hapt_plan_estimate(const struct hapt_plan *plan, int microbatches, struct hapt_arena *scratch,
                                    double *step_s);

/* hapt_plan_stage_run puts the stage on a submesh of subcluster c, with its program. hapt_plan_stage_mix makes it a
 * stage of the profile's mixed group. Times and bytes are left unset. */
void hapt_plan_stage_run(const struct hapt_profile *profile, int c, const struct hapt_submesh *submesh,
                         struct hapt_plan_stage *stage);
/* True if the stage is on such a submesh, with its program. */
bool hapt_plan_stage_runs(const struct hapt_plan_stage *stage, const struct hapt_submesh *submesh);
enum hapt_status hapt_plan_stage_mix(const struct hapt_profile *profile, int group, struct hapt_arena *arena,
                                     struct hapt_plan_stage *stage);
/* Sets its bytes to those of the device that its launches fill most, relative to its memory. */
void hapt_plan_stage_tighten(struct hapt_plan_stage *stage);
/* "2x4" with `times` "x"; for a mixed stage hapt_plan_stage_submesh. */
const char *hapt_plan_stage_short(const struct hapt_plan_stage *stage, const char *times, char text[64]);
/* "stage 1 (layers 3-6 on slow 2 x 4)" */
#define HAPT_PLAN_STAGE_TITLE 192
const char *hapt_plan_stage_title(const struct hapt_plan *plan, int stage, char text[HAPT_PLAN_STAGE_TITLE]);
/* The mixed group of a stage; -1: the profile has none on these devices. */
int hapt_plan_stage_mixed_group(const struct hapt_profile *profile, const struct hapt_plan_stage *stage);
/* HAPT_ERR_INPUT: a mixed stage is at a wrong position (hapt/plan.h). */
enum hapt_status hapt_plan_check_mixed_order(const struct hapt_plan *plan);
enum hapt_status hapt_plan_check(const struct hapt_plan *plan);

#define HAPT_PLAN_VERSION 2 /* of plan files that are written; earlier ones are read */
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
struct json_t *hapt_plan_stages_json(const struct hapt_plan *plan); /* an array */
/* Prints to standard output. `extra` (an object, may be NULL, stays the caller's) adds its members. */
enum hapt_status hapt_plan_print_json(const struct hapt_plan *plan, struct json_t *extra);
/* The world ranks of a stage's devices, subcluster by subcluster; the cluster must be bound. Stages of a subcluster
 * fill whole nodes first, then parts of nodes in descending size, then the parts of mixed stages, in pipeline order.
 * rank[nodes * devices_per_node]. HAPT_ERR_INPUT: the stages do not fit the cluster. */
enum hapt_status hapt_plan_ranks(const struct hapt_plan *plan, const struct hapt_cluster *cluster, int stage,
                                 int *rank);

#endif
