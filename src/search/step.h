/*
 * Inside src/search: the plan of the least simulated step.
 *
 *   step.c            the order of the work: seeds, rows, enumeration, refinement, bound
 *   step_batchings.c  the same over several numbers of microbatches
 *   step_price.c      the step of given stages: bounds, and the best launch counts by simulation
 *   step_bound.c      a lower bound of every plan's step
 *   step_rest.c       lower bounds of the layers behind a boundary, and of those in front
 *   step_suffix.c     partial plans, from the last layer on, and their bounds
 *   step_grow.c       plans from the partial plans that promise most
 *   step_windows.c    other stages in windows of good candidates
 *   step_enumerate.c  all plans of a small instance, by depth-first search with bounds
 *   step_seed.c       optima of the formula as candidates
 *   step_views.c      seeds from restricted and altered profiles
 *   step_trim.c       leaves out stages of no use beside a known plan
 *   step_relax.c      profiles whose activations take fewer bytes
 *   step_rows.c       other rows of submeshes around a candidate
 *   step_gather.c     the best few candidates of a rank, and of all; searches that one rank has begun
 *   step_refine.c     the beam over stage boundaries and programs
 */
#ifndef HAPT_SEARCH_STEP_H
#define HAPT_SEARCH_STEP_H

#include <math.h>

#include "beam.h"
#include "hapt/search.h"
#include "hapt/counter.h"

/* A stage: `device_set` is a subcluster, or the number of subclusters + a mixed group. `submesh`: index in the
 * profile; 0 for mixed stages. The layers end at `end`. */
struct step_stage {
    int device_set, submesh, end;
};

/* Stages, their launch counts, and the simulated step. */
struct step_candidate {
    int count;
    struct step_stage *stage; /* [count] */
    int *launches;            /* [count] never rise */
    enum hapt_schedule_kind schedule;
    double hide_threshold; /* of the rule that the launch counts come from */
    double step_s;         /* INFINITY: no candidate; may be an estimate (hapt_plan_estimate) */
    double lower_s;        /* no launch counts of these stages have a shorter step; set with step_s */
};

enum { STEP_MOST_SEEDS = 24, STEP_RELAXATIONS = 3 };
/* Tensors that go past the next stage are simulated with instruction lists. Those take about so many times as long. */
#define STEP_LISTS_TIME 16

struct step_search {
    MPI_Comm comm;
    int rank, size;
    struct hapt_counter *counter; /* of the ranks of `comm`; NULL: numbered work is not shared (step_is_mine) */
    const struct hapt_profile *profile;
    /* For bounds: boundary_bytes are the least that crosses in any plan. lowest: from stage to stage; link_load: over
     * the link between the last stage of a subcluster and those of the next one. */
    const struct hapt_profile *lowest, *link_load;
    struct hapt_search_options options;
    int L, C, B;
    int most_stages;
    int estimate;            /* steps longer than about four times this many microbatches are extrapolated; B: none */
    struct hapt_arena arena; /* lives as long as the search */
    struct hapt_arena trial; /* of one pricing */
    struct hapt_profile passes;                    /* the profile without step times */
    struct hapt_profile useful;                    /* passes, without stages of no use (step_trim) */
    struct hapt_profile relaxed[STEP_RELAXATIONS]; /* useful, with fewer bytes of activations */
    bool is_relaxed[STEP_RELAXATIONS];             /* it was created */
    struct step_candidate best;
    int seed_count;
    struct step_candidate seed[STEP_MOST_SEEDS]; /* optima of the formula under several launch rules */
    bool enumerated;                             /* the best over all stages and launch rules is known */
    double known_s;                              /* the step of a plan that is known otherwise; INFINITY: none */
    double trimmed_s; /* `useful` lacks stages of no use beside this step; INFINITY: it has all */
    double bound_s;   /* no plan that the options allow has a shorter step, unless it is split */
    struct hapt_plan_search_figures figures;
    struct hapt_simulate_work simulation;
    struct beam_memo memo; /* of step_price */
    int64_t simulated;     /* number of simulations on this rank */
    double work;           /* microbatches times stages of all simulations by the beam, on all ranks */
    double most_work;      /* refinement ends there */
};

/* Begins the search in a profile. step_release ends it. Rank-local, except for the rank numbers. */
enum hapt_status step_begin(struct step_search *search, MPI_Comm comm, const struct hapt_profile *profile,
                            const struct hapt_search_options *options);
void step_release(struct step_search *search);
/* Reserves memory for seeds. Rank-local. */
enum hapt_status step_prepare(struct step_search *search);
/* Seeds, enumeration and bound: sets search->best and bound_s. HAPT_ERR_INFEASIBLE: there is no plan; it is printed
 * unless options.may_fail. Collective. */
enum hapt_status step_start(struct step_search *search);
/* Sends the results of step_start on rank `from` to all ranks. Collective. */
enum hapt_status step_share(struct step_search *search, int from);
/* Refines search->best. Collective. */
enum hapt_status step_improve(struct step_search *search);
/* Shares out numbered work: hapt_counter_begin and hapt_counter_is_mine, for a search on `size` ranks. */
static inline void step_begin_numbers(const struct step_search *search, int size)
{
    HAPT_ASSERT(size == 1 || search->counter);
    if (size > 1) hapt_counter_begin(search->counter);
}
static inline bool step_is_mine(const struct step_search *search, int size, int64_t number)
{
    return size == 1 || hapt_counter_is_mine(search->counter, number);
}
/* The plan of a candidate, with the exact simulated step. Rank-local. */
enum hapt_status step_finish(struct step_search *search, const struct step_candidate *candidate,
                             struct hapt_arena *result, struct hapt_plan *plan);

/* A plan this close to the bound needs no views: the answer of no smaller cluster is faster by more. */
#define STEP_CLOSE 1.01
/* The same for far rows. */
#define STEP_CLOSE_FOR_ROWS 1.015
/* The same for windows. */
#define STEP_CLOSE_FOR_WINDOWS 1.02
/* Seeds that are slower than the best by more than this factor are not refined. */
#define STEP_SEED_WORTH 1.02

/* Stages with room for `most_stages`; no candidate yet. */
enum hapt_status step_candidate_create(struct step_search *search, struct step_candidate *candidate);
bool step_same_stages(const struct step_candidate *a, const struct step_candidate *b);
/* A hash of all that the step depends on: stages and launch counts. */
struct beam_key step_key(const struct step_candidate *candidate);
void step_candidate_copy(struct step_candidate *to, const struct step_candidate *from);

/* The best few of many candidates. */
enum { STEP_MOST_KEPT = 16 };
struct step_kept {
    int size;                                        /* at most */
    struct step_candidate candidate[STEP_MOST_KEPT]; /* by ascending step, then by number; unused: INFINITY */
    int64_t number[STEP_MOST_KEPT];
};
enum hapt_status step_kept_create(struct step_search *search, int size, struct step_kept *kept);
void step_kept_clear(struct step_kept *kept);
/* Sends a candidate of rank `from` to all ranks. Collective. */
enum hapt_status step_send(const struct step_search *search, int from, struct step_candidate *candidate);
/* Between these two calls, what is collective otherwise is rank-local. */
struct step_ranks {
    MPI_Comm comm;
    int rank, size;
};
struct step_ranks step_leave(struct step_search *search);
void step_rejoin(struct step_search *search, struct step_ranks ranks);
/* Adds a candidate, unless it is no candidate, slower than all, or known. `number`: its rank in step_gather, among
 * candidates with equal steps; any without that. */
void step_keep(struct step_kept *kept, const struct step_candidate *candidate, int64_t number);
/* all: the best of the candidates that the ranks have kept. Candidates of two ranks have distinct numbers. Collective.
 */
enum hapt_status step_gather(const struct step_search *search, const struct step_kept *kept, struct step_kept *all);

/* Reads the stages and launch counts of a plan. */
enum hapt_status step_candidate_from(const struct step_search *search, const struct hapt_plan *plan,
                                     struct step_candidate *candidate);
/* Makes a plan of the candidate's stages, without prices, in `arena`. */
enum hapt_status step_candidate_plan(const struct step_search *search, const struct step_candidate *candidate,
                                     struct hapt_arena *arena, struct hapt_plan *plan);
/* True if launch counts beside those of the rules are allowed. */
static inline bool step_launches_are_free(const struct step_search *search, const struct step_candidate *candidate)
{
    return search->options.any_threshold && candidate->schedule != HAPT_SCHEDULE_GPIPE &&
           (search->options.any_schedule || search->options.schedule == HAPT_SCHEDULE_H1F1B);
}

/* The most microbatches in flight that fit, from 1 to B. */
static inline double step_in_flight(double parameter_bytes, double activation_bytes, double memory_bytes, int B)
{
    const double most = floor((memory_bytes - parameter_bytes) / activation_bytes * (1 + 1e-9) + 1e-6);
    return most >= 1 ? fmin(most, B) : activation_bytes > 0 ? 1 : B; /* NaN: no activations */
}
static inline int step_device_sets(const struct step_search *search)
{
    return search->C + search->profile->mixed_count;
}

static inline struct hapt_subclusters step_subclusters_of(const struct step_search *search, const int *device_set)
{
    if (*device_set < search->C) return (struct hapt_subclusters){1, device_set};
    const struct hapt_profile_mixed *mixed = &search->profile->mixed[*device_set - search->C];
    return (struct hapt_subclusters){mixed->count, mixed->cluster};
}

static inline int step_submeshes_of(const struct step_search *search, int device_set)
{
    return device_set < search->C ? search->profile->cluster[device_set].submesh_count : 1;
}

/* Work per microbatch of layers [first, end); NaN or infinite: no candidate. */
static inline double step_work_s(const struct step_search *search, int device_set, int submesh, int first, int end)
{
    const struct hapt_profile *profile = search->profile;
    const size_t cell = hapt_profile_index(profile, submesh, first, end - 1);
    return device_set < search->C ? profile->cluster[device_set].stage_time[cell]
                                  : profile->mixed[device_set - search->C].stage_time[cell];
}

/* Devices of subcluster c that a stage takes. */
static inline int step_devices_of(const struct step_search *search, int device_set, int submesh, int c)
{
    if (device_set < search->C) {
        const struct hapt_submesh *at = &search->profile->cluster[device_set].submesh[submesh];
        return device_set == c ? at->n * at->m : 0;
    }
    const struct hapt_profile_mixed *mixed = &search->profile->mixed[device_set - search->C];
    for (int k = 0; k < mixed->count; k++)
        if (mixed->cluster[k] == c) return mixed->devices[k];
    return 0;
}

/* Lower bounds of the layers in front of a boundary. */
struct step_front {
    double *pass_s; /* [L + 1] a microbatch, its transfers included, there and back, with unlimited devices */
    double *work_s; /* [L + 1] device time of a microbatch; 0 with mixed stages */
    double *ratio;  /* [C]     subcluster c needs at least ratio[c] times as much; INFINITY: it has no stage */
};
enum hapt_status step_front_create(struct step_search *search, struct step_front *front);
/* rest_s [L + 1]: as front->pass_s, for the layers behind. Rank-local, as step_front_create. */
enum hapt_status step_least_rest(struct step_search *search, double **rest_s);

/* The least time of a transfer behind a layer, and of a stage of layers [first, end), over all device sets. */
double step_least_comm_s(const struct step_search *search, int layer);
double step_least_time_s(const struct step_search *search, int first, int end);

/* Prices the candidate's stages under its own launch counts. step_s becomes INFINITY if the stages are no candidates,
 * exceed memory, or cannot be faster than `limit_s`. A step above `most_s` may become any shorter
 * one that is above most_s, too. */
enum hapt_status step_price(struct step_search *search, double limit_s, double most_s,
                            struct step_candidate *candidate);
/* The same with the best launch counts of the rules that the options allow. */
enum hapt_status step_price_launches(struct step_search *search, double limit_s, struct step_candidate *candidate);
/* Adds or takes single launches of a priced candidate as long as its step becomes shorter. */
enum hapt_status step_price_nearby(struct step_search *search, struct step_candidate *candidate);
/* Candidates that are slower than the best by more than this factor are not worth that. */
#define STEP_NEARBY_WORTH 1.05

/* The optimum of the formula in a profile becomes `trial`, and the best candidate if it is faster. Collective.
 * HAPT_ERR_INFEASIBLE: there is none. */
enum hapt_status step_add_seed(struct step_search *search, const struct hapt_profile *profile,
                               const struct hapt_search_options *rule, struct step_candidate *trial);
/* Refines a seed; it becomes the best candidate if it is faster. Collective. */
enum hapt_status step_improve_seed(struct step_search *search, struct step_candidate *seed);
/* HAPT_OK instead of HAPT_ERR_INFEASIBLE: a rule or a restriction may leave no plan. */
enum hapt_status step_may_lack(enum hapt_status status);
/* Leaves stages out of `useful` that are of no use beside the best candidate and known_s. Rank-local. */
enum hapt_status step_trim(struct step_search *search);
/* The profile without step times, whose activations take fewer bytes, the higher `level` the fewer. Rank-local. */
enum hapt_status step_relaxed(struct step_search *search, int level, const struct hapt_profile **view);
/* Seeds from views of the cluster. Improves the best candidate with them. Collective. */
enum hapt_status step_views(struct step_search *search);
/* Enumerates all plans if there are few. *bound_s: no plan has a shorter step, with any launch counts; 0: there are too
 * many plans. Else search->best is the best over all stages and launch rules. */
enum hapt_status step_enumerate(struct step_search *search, double *bound_s);
/* Enumerates plans of few stages, as many as are soon done, where step_enumerate was not. Improves search->best. */
enum hapt_status step_enumerate_short(struct step_search *search);
/* Grows plans layer by layer, keeping the partial plans that promise most, and refines the best few. Collective. */
enum hapt_status step_grow(struct step_search *search);
/* Replaces windows of a few stages of the best candidate and of the seeds, as long as that helps. Collective. */
enum hapt_status step_windows(struct step_search *search);
/* Enumerates again, with larger limits, behind the refinement: a good step drops more partial plans. Improves
 * search->best and bound_s. */
enum hapt_status step_enumerate_late(struct step_search *search);
/* Enumerates plans with split backward passes of a small instance, as many as are soon done. search->profile is the
 * split view of `profile`. The best one replaces *plan if it is worth it (hapt_plan_split_worth). */
enum hapt_status step_enumerate_split(struct step_search *search, const struct hapt_profile *profile,
                                      struct hapt_arena *result, struct hapt_plan **plan);
/* Tries rows of submeshes beside that of the best candidate, and refines the best of them. `far`: also rows that are
 * less likely, and rows beside the seeds. Collective. */
enum hapt_status step_rows(struct step_search *search, bool far);
/* Improves candidate boundaries and programs until nothing changes. Collective over search->comm. */
enum hapt_status step_refine(struct step_search *search, struct step_candidate *candidate);
/* A lower bound of the simulated step of all plans without split backward passes that the options allow. */
enum hapt_status step_bound(struct step_search *search, double *bound_s);
/* The same, at most `most_s`, of all plans, split and not. */
enum hapt_status step_bound_split(struct step_search *search, double most_s, double *bound_s);

#endif
