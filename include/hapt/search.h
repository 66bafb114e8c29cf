/*
 * The search for the best plan, and plans whose stages are given.
 *
 * Objectives. FORMULA: HAPT (13), the exact optimum (HAPT 5.2). STEP: the simulated step, with a proven lower bound.
 * Candidates of STEP come from the exact search under several launch rules, from other rows of submeshes, from the
 * enumeration of small instances, and from a beam over stage boundaries (Pfeife 4.3).
 */
#ifndef HAPT_SEARCH_H
#define HAPT_SEARCH_H

#include "hapt/plan.h"

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

enum hapt_objective { HAPT_OBJECTIVE_FORMULA, HAPT_OBJECTIVE_STEP };

/* Split backward passes (zero bubble). AUTO: if it is worth it (hapt_plan_split_worth). */
enum hapt_split_choice { HAPT_SPLIT_NO, HAPT_SPLIT_AUTO, HAPT_SPLIT_YES };

/* Restrictions of a looped schedule. */
struct hapt_search_loops {
    int loops;      /* stages of each submesh, N_l of Pfeife 3.4; 0: 2 to 4, with given stages 2 */
    int loop_batch; /* B_l; 0: the kind's, HAPT_SCHEDULE_LOOPED: free */
    int prefetch;   /* b, HAPT_SCHEDULE_LOOPED only; -1: free */
    bool v;         /* the pipeline goes back and forth; else around */
};

struct hapt_search_options {
    enum hapt_objective objective;
    bool any_schedule, any_threshold; /* STEP: the search chooses them; false: as given below */
    bool any_loops;                   /* with any_schedule: also looped schedules, where they may pay */
    double work; /* STEP: limit of the refinement, in simulated microbatches times stages; 0: about 1 s on a core */
    bool no_enumeration; /* STEP: do not enumerate a small instance; shows what the refinement alone finds */
    int microbatches;
    enum hapt_schedule_kind schedule; /* H-1F1B: the objective's warm-up rule; others: their own launch counts */
    struct hapt_search_loops loops;   /* of a looped schedule */
    double hide_threshold;
    enum hapt_split_choice split;
    bool use_all_devices;
    double known_s;                    /* STEP: a step that is known; much longer ones are not searched; 0: none */
    double gap;                        /* stop when proven this close to the optimum; 0: exact */
    struct hapt_search_effort *effort; /* output; may be NULL */
    bool may_fail;                     /* "no plan" is a valid answer and is not printed (hapt_env_agree_quietly) */
    bool unexplained;                  /* with may_fail: the reason for "no plan" is not worked out */
};

/* By options->schedule and options->objective: hapt_plan_search_loops, hapt_plan_search_formula or
 * hapt_plan_search_step. Then splits backward passes, as options->split says. HAPT_ERR_INPUT: they have to be split,
 * but the profile does not know the part of their time that waits. */
enum hapt_status hapt_plan_search(MPI_Comm comm, const struct hapt_profile *profile,
                                  const struct hapt_search_options *options, struct hapt_arena *result,
                                  struct hapt_plan **plan);
/* The plan of the least simulated step that was found, split as options->split says. plan->bound_s: no plan of these
 * options takes less. options->any_loops is not read. The result is bit-identical on every rank and for every
 * number of ranks. Collective. Errors: as hapt_plan_search_formula. */
enum hapt_status hapt_plan_search_step(MPI_Comm comm, const struct hapt_profile *profile,
                                       const struct hapt_search_options *options, struct hapt_arena *result,
                                       struct hapt_plan **plan);
/* A way to divide the rows of a step into microbatches. */
struct hapt_search_batching {
    int microbatches;
    const struct hapt_profile *profile; /* of microbatches with these rows */
    bool kept_is_known; /* options->known_s is at most the step of the best plan that keeps all on the devices */
};
/* floor_s [count]: for each batching a lower bound of the steps of its plans, at most `most_s`, if no device lacked
 * memory: no plan that recomputes activations takes less either. Collective. */
enum hapt_status hapt_plan_floors(MPI_Comm comm, const struct hapt_search_batching *batching, int count,
                                  const struct hapt_search_options *options, double most_s, double *floor_s);
/* The plan of the least simulated step over all batchings; *chosen is its batching. options->known_s: if no plan is
 * shorter, some plan. plan->bound_s: no plan of any
 * batching without loops takes less; 0: the plan is looped. A batching without a plan is left out.
 * options->microbatches is not read. Collective; the result is bit-identical on every rank and for every number of
 * ranks. Errors: as hapt_plan_search_formula, for the first batching, if none has a plan. */
enum hapt_status hapt_plan_search_batchings(MPI_Comm comm, const struct hapt_search_batching *batching, int count,
                                            const struct hapt_search_options *options, struct hapt_arena *result,
                                            struct hapt_plan **plan, int *chosen);
/* A plan under a looped schedule with a short simulated step: boundaries by Pfeife's beam on rows of submeshes around
 * those of plans without loops. Mixed stages are left out; nothing is proven (bound_s 0). The result is bit-identical
 * on every rank and for every number of ranks. Collective. HAPT_ERR_USAGE: no setting gives lists that run. */
enum hapt_status hapt_plan_search_loops(MPI_Comm comm, const struct hapt_profile *profile,
                                        const struct hapt_search_options *options, struct hapt_arena *result,
                                        struct hapt_plan **plan);
/* The optimal plan, or one within options->gap of it (plan->search.gap is proven). The ranks of `comm` share the t_max
 * candidates. The plan is bit-identical on every rank and for every number of ranks. Collective. HAPT_ERR_INFEASIBLE
 * names the nearest obstacle; HAPT_ERR_INPUT: more than 12 subclusters; HAPT_ERR_MEMORY on all ranks if one runs out of
 * memory. */
enum hapt_status hapt_plan_search_formula(MPI_Comm comm, const struct hapt_profile *profile,
                                          const struct hapt_search_options *options, struct hapt_arena *result,
                                          struct hapt_plan **plan);
/* Prices given stages "0-6@fast:1x2,6-9@slow:1x2t2" (half-open layer ranges). t2: tensor-parallel over 2; p3: layout 3
 * of the profile; neither: the fastest program that fits. "0-6@fast:2+slow:1": a mixed stage on 2 devices of fast and 1
 * of slow; then p3 as above, p0: data-parallel rows only. HAPT_ERR_INPUT: a stage is no candidate; HAPT_ERR_INFEASIBLE:
 * they exceed memory. A looped schedule: the stages visit the submeshes options->loops.loops times, and those of one
 * submesh name the same devices. */
enum hapt_status hapt_plan_force(const struct hapt_profile *profile, const struct hapt_search_options *options,
                                 const char *stages, struct hapt_arena *result, struct hapt_plan **plan);
/* Prices given stages. STEP: with the launch counts of the least simulated step, where they are free. Rank-local. */
enum hapt_status hapt_plan_price_stages(const struct hapt_profile *profile, const struct hapt_search_options *options,
                                        struct hapt_plan *plan);
/* hapt_profile_split_view. HAPT_ERR_INPUT: the profile does not know the part of the backward time that waits. */
enum hapt_status hapt_plan_split_view(const struct hapt_profile *profile, struct hapt_arena *arena,
                                      const struct hapt_profile **view);
/* Splits the backward passes of a plan that was searched without, as options->split says. STEP, without loops: also
 * moves its stage boundaries. *fits false (AUTO only): its launches do not fit when it is split; the plan is unchanged.
 * Collective. */
enum hapt_status hapt_plan_choose_split(MPI_Comm comm, const struct hapt_profile *profile,
                                        const struct hapt_search_options *options, struct hapt_arena *result,
                                        struct hapt_plan **plan, bool *fits);
/* Replaces a plan by one with split backward passes and other stage boundaries on the same submeshes, if a short search
 * finds one with a shorter simulated step. Looped plans and those with mixed stages stay. Collective; the result does
 * not depend on the number of ranks. HAPT_ERR_INPUT: the profile does not know the part of the backward time that
 * waits. */
enum hapt_status hapt_plan_search_split(MPI_Comm comm, const struct hapt_profile *profile,
                                        const struct hapt_search_options *options, struct hapt_arena *arena,
                                        struct hapt_plan **plan);
/* The comparison plan: submeshes and order of the optimum under H-1F1B, layers split evenly, priced with
 * options->schedule. Collective. HAPT_ERR_INPUT or HAPT_ERR_INFEASIBLE: the even stages cannot run. */
enum hapt_status hapt_plan_even(MPI_Comm comm, const struct hapt_profile *profile,
                                const struct hapt_search_options *options, struct hapt_arena *result,
                                struct hapt_plan **plan);

/* A plan under these options, still without stages. */
static inline struct hapt_plan hapt_search_plan(const struct hapt_profile *profile,
                                                const struct hapt_search_options *options)
{
    return (struct hapt_plan){.microbatches = options->microbatches,
                              .schedule = options->schedule,
                              .hide_threshold = options->hide_threshold,
                              .replicas = 1,
                              .layer_count = profile->layer_count};
}
/* The value that the search minimises. */
static inline double hapt_search_value_s(enum hapt_objective objective, const struct hapt_plan *plan)
{
    return objective == HAPT_OBJECTIVE_STEP ? plan->simulated_s : plan->latency_s;
}
/* Agrees at the end of a planning phase; with options->may_fail a missing plan is not printed. A plan is also missing
 * if the lists of a looped schedule do not run with these microbatches. */
static inline enum hapt_status hapt_search_agree(MPI_Comm comm, const struct hapt_search_options *options,
                                                 enum hapt_status status)
{
    if (!options->may_fail) return hapt_env_agree(comm, status);
    if (status == HAPT_ERR_USAGE && hapt_schedule_loops(options->schedule)) status = HAPT_ERR_INFEASIBLE;
    return hapt_env_agree_quietly(comm, status);
}

#endif
