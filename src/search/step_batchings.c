/*
 * The least simulated step over several ways to divide the rows of a step into microbatches.
 *
 * Each batching gets seeds and a lower bound first. They are refined in order of their best seed. A batching is left
 * out if its bound is not below the best step so far, or if refinement has never gained as much as it needs. The work
 * of the refinement is limited over all of them together. Backward passes are split at the end.
 */
#include "search.h"
#include "step.h"

#include "hapt/stop.h"

#include <math.h>

/* A batching is refined if its best seed is at most this factor slower than the best refined step. Refinement gains
 * less: 1 to 5 % in trials. */
#define BATCHING_WORTH 1.06
/* Seeds are split if their step is at most this factor longer than the best one. */
#define SPLIT_WORTH 1.01

/* Plans of other batchings are given if their step is at most this factor longer than the best one. */
#define EACH_WORTH 1.5

struct batchings {
    MPI_Comm comm;
    const struct hapt_search_batching *batching; /* [count] */
    const struct hapt_search_options *options;
    int count;
    struct step_search *search; /* [count] */
    struct hapt_counter counter;
    bool *feasible;
    int *owner; /* [count] the rank that starts it */
    int *order; /* [count] by ascending step of the best seed; the infeasible ones last */
    int best;   /* -1: none */
};

static enum hapt_status may_lack(enum hapt_status status)
{
    if (status != HAPT_ERR_INFEASIBLE) return status;
    hapt_fail_reset();
    return HAPT_OK;
}

static double best_s(const struct batchings *all)
{
    return all->best < 0 ? INFINITY : all->search[all->best].best.step_s;
}

static void take_best(struct batchings *all)
{
    for (int k = 0; k < all->count; k++)
        if (all->feasible[k] && all->search[k].best.step_s < best_s(all)) all->best = k;
}

static enum hapt_status start_one(struct batchings *all, int k)
{
    const enum hapt_status status = step_start(&all->search[k]);
    all->feasible[k] = status == HAPT_OK;
    return all->count > 1 ? may_lack(status) : status;
}

/* Sorts all->order by ascending microbatches: more rows take longer, so they are started first. */
static void sort_by_rows(struct batchings *all)
{
    for (int k = 0; k < all->count; k++) {
        int at = k;
        for (; at > 0; at--) {
            if (all->batching[all->order[at - 1]].microbatches <= all->batching[k].microbatches) break;
            all->order[at] = all->order[at - 1];
        }
        all->order[at] = k;
    }
}

/* This rank's share of the batchings. */
static enum hapt_status start_own(struct batchings *all)
{
    for (int i = 0; i < all->count; i++) {
        const int k = all->order[i];
        all->owner[k] = -1;
        if (!hapt_counter_is_mine(&all->counter, i)) continue;
        all->owner[k] = all->counter.rank;
        if (hapt_stop_due()) return HAPT_STOPPED;
        const struct step_ranks ranks = step_leave(&all->search[k]);
        const enum hapt_status status = start_one(all, k);
        step_rejoin(&all->search[k], ranks);
        HAPT_TRY(status);
    }
    return HAPT_OK;
}

static enum hapt_status share_all(struct batchings *all)
{
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, all->owner, all->count, MPI_INT, MPI_MAX, all->comm));
    for (int k = 0; k < all->count; k++) {
        int feasible = all->feasible[k];
        HAPT_MPI(MPI_Bcast(&feasible, 1, MPI_INT, all->owner[k], all->comm));
        all->feasible[k] = feasible;
        HAPT_TRY(step_share(&all->search[k], all->owner[k])); /* the figures also of infeasible ones */
    }
    return HAPT_OK;
}

/* Starts the searches. If there are several for each rank, each rank starts its own; else they share each one. */
static enum hapt_status start_each(struct batchings *all)
{
    const int size = all->counter.size;
    if (size > 1 && all->count >= 2 * size) {
        sort_by_rows(all);
        hapt_counter_begin(&all->counter);
        HAPT_TRY(hapt_env_agree(all->comm, start_own(all)));
        return share_all(all);
    }
    for (int k = 0; k < all->count; k++) HAPT_TRY(start_one(all, k));
    return HAPT_OK;
}

static enum hapt_status start_all(struct batchings *all)
{
    HAPT_TRY(start_each(all));
    take_best(all);
    for (int k = 0; k < all->count; k++) { /* insertion: equal steps keep their order */
        int at = k;
        const double step_s = all->feasible[k] ? all->search[k].best.step_s : INFINITY;
        while (at > 0) {
            const int before = all->order[at - 1];
            if (all->feasible[before] && !(step_s < all->search[before].best.step_s)) break;
            if (!all->feasible[before] && !isfinite(step_s)) break;
            all->order[at] = before;
            at--;
        }
        all->order[at] = k;
    }
    return HAPT_OK;
}

/* The step to be beaten. */
static double known_s(const struct batchings *all)
{
    return all->options->known_s > 0 ? fmin(all->options->known_s, best_s(all)) : best_s(all);
}

/* The time of a microbatch that waits, over all stages. A split shortens a step by about that, because the drain lacks
 * it; by more where few microbatches are in flight. */
static double waiting_s(const struct step_search *search)
{
    const struct hapt_profile *profile = search->profile;
    double sum_s = 0;
    for (int i = 0; i < search->best.count; i++) {
        const struct step_stage *stage = &search->best.stage[i];
        if (stage->device_set >= search->C || !profile->cluster[stage->device_set].weight_time) continue;
        const double time_s =
            profile->cluster[stage->device_set]
                .weight_time[hapt_profile_index(profile, stage->submesh, i > 0 ? stage[-1].end : 0, stage->end - 1)];
        if (isfinite(time_s)) sum_s += time_s;
    }
    return sum_s;
}

/* True if the batching has no better plan by its bound, or if none is to be expected. The known step may be that of a
 * split plan. */
static bool is_hopeless(const struct batchings *all, int k)
{
    const struct step_search *search = &all->search[k];
    const double gain_s = all->options->split == HAPT_SPLIT_NO ? 0 : waiting_s(search);
    if (search->best.step_s - gain_s > BATCHING_WORTH * known_s(all)) return true;
    return all->count > 1 && hapt_at_most(best_s(all), (1 + search->options.gap) * search->bound_s);
}

static enum hapt_status improve_all(struct batchings *all)
{
    double work = 0;
    for (int i = 0; i < all->count; i++) {
        const int k = all->order[i];
        struct step_search *search = &all->search[k];
        if (!all->feasible[k] || is_hopeless(all, k)) continue;
        search->known_s = known_s(all);
        search->most_work -= work;
        HAPT_TRY(step_improve(search));
        work += search->work;
        take_best(all);
    }
    return HAPT_OK;
}

/* *fits false: the launches of the plan do not fit when it is split, so it is not. known_s: a step that is known, or
 * INFINITY. */
static enum hapt_status make_plan(MPI_Comm comm, const struct batchings *all, int k,
                                  const struct step_candidate *candidate, double known_s, struct hapt_arena *result,
                                  struct hapt_plan **plan, bool *fits)
{
    struct hapt_search_options options = all->search[k].options;
    enum hapt_status status = HAPT_OK;
    if (isfinite(known_s)) options.known_s = options.known_s > 0 ? fmin(options.known_s, known_s) : known_s;
    *plan = hapt_arena_alloc(result, 1, sizeof **plan);
    if (!*plan) status = HAPT_ERR_MEMORY;
    if (status == HAPT_OK) status = step_finish(&all->search[k], candidate, result, *plan);
    HAPT_TRY(hapt_env_agree(comm, status));
    return hapt_plan_choose_split(comm, all->batching[k].profile, &options, result, plan, fits);
}

/* The best plan of those whose launches fit when they are split, if that is shorter. */
static enum hapt_status search_again(struct batchings *all, int k, struct hapt_arena *result, struct hapt_plan **plan)
{
    const struct hapt_profile *profile = all->batching[k].profile;
    struct hapt_search_options again = search_split_again(&all->search[k].options);
    struct hapt_plan *split = NULL;
    again.known_s = fmin(known_s(all), (*plan)->simulated_s);
    const enum hapt_status status = hapt_plan_search_step(all->comm, profile, &again, result, &split);
    return search_take_split(profile, status, split, plan);
}

static bool is_shorter(double step_s, const struct hapt_plan *plan)
{
    return step_s < plan->simulated_s && !hapt_at_most(plan->simulated_s, step_s);
}

static void keep_shorter(struct hapt_plan **plan, struct hapt_plan *other)
{
    if (is_shorter(other->simulated_s, *plan)) *plan = other;
}

/* Seeds that a split may make better than the best candidate. */
static bool may_split_better(const struct step_search *search, const struct step_candidate *seed)
{
    return seed->step_s <= SPLIT_WORTH * search->best.step_s && !step_same_stages(seed, &search->best);
}

/* seed_s [seed_count]: the steps that make_plan finds for these seeds; INFINITY for others. The ranks share them. */
static enum hapt_status price_seeds(const struct batchings *all, int k, double known_s, double *seed_s)
{
    const struct step_search *search = &all->search[k];
    enum hapt_status status = HAPT_OK;
    for (int i = 0, number = 0; i < search->seed_count; i++) {
        struct hapt_arena scratch;
        struct hapt_plan *plan;
        bool fits;
        seed_s[i] = INFINITY;
        if (!may_split_better(search, &search->seed[i])) continue;
        if (number++ % search->size != search->rank || status != HAPT_OK) continue;
        hapt_arena_init(&scratch);
        status = make_plan(MPI_COMM_SELF, all, k, &search->seed[i], known_s, &scratch, &plan, &fits);
        if (status == HAPT_OK) seed_s[i] = plan->simulated_s;
        hapt_arena_release(&scratch);
    }
    HAPT_TRY(hapt_search_agree(all->comm, &search->options, status));
    return hapt_env_mpi(MPI_Allreduce(MPI_IN_PLACE, seed_s, search->seed_count, MPI_DOUBLE, MPI_MIN, all->comm),
                        "MPI_Allreduce");
}

static enum hapt_status enumerate_split(struct batchings *all, int k, struct hapt_arena *result,
                                        struct hapt_plan **plan)
{
    const struct hapt_profile *profile = all->batching[k].profile, *view;
    struct hapt_arena scratch;
    struct step_search search;
    hapt_arena_init(&scratch);
    enum hapt_status status = hapt_plan_split_view(profile, &scratch, &view);
    if (status == HAPT_OK) {
        status = step_begin(&search, all->comm, view, &all->search[k].options);
        if (status == HAPT_OK) status = step_enumerate_split(&search, profile, result, plan);
        step_release(&search);
    } else if (status == HAPT_ERR_INPUT) { /* it cannot be split */
        hapt_fail_reset();
        status = HAPT_OK;
    }
    hapt_arena_release(&scratch);
    return status;
}

/* The best plan of a batching. If it may be split: of its best candidate, of the seeds near that, and of all if there
 * are few. */
static enum hapt_status finish_one(struct batchings *all, int k, struct hapt_arena *result, struct hapt_plan **plan)
{
    struct step_search *search = &all->search[k];
    bool fits, seed_fits;
    double seed_s[STEP_MOST_SEEDS];
    HAPT_TRY(make_plan(all->comm, all, k, &search->best, INFINITY, result, plan, &fits));
    if (all->options->split == HAPT_SPLIT_NO) return HAPT_OK;
    const struct hapt_plan *const first = *plan;
    const bool priced = search->size > 1;
    if (priced) HAPT_TRY(price_seeds(all, k, first->simulated_s, seed_s));
    for (int i = 0; i < search->seed_count; i++) {
        const struct step_candidate *seed = &search->seed[i];
        struct hapt_plan *other;
        if (!may_split_better(search, seed)) continue;
        /* once a seed is better, later seeds are planned beside a shorter known step: seed_s does not hold */
        if (priced && *plan == first && !is_shorter(seed_s[i], first)) continue;
        HAPT_TRY(make_plan(all->comm, all, k, seed, (*plan)->simulated_s, result, &other, &seed_fits));
        keep_shorter(plan, other);
    }
    if (!fits) HAPT_TRY(search_again(all, k, result, plan));
    return hapt_env_agree(all->comm, enumerate_split(all, k, result, plan));
}

/* True if no split of the best plan is to be expected to beat the step that is known. */
static bool is_beaten(const struct batchings *all)
{
    const struct step_search *best = &all->search[all->best];
    return all->options->known_s > 0 && best->best.step_s - waiting_s(best) >= all->options->known_s;
}

/* Plans of the batchings among which a split may decide; *plan: the shortest. */
static enum hapt_status finish_best(struct batchings *all, struct hapt_arena *result, struct hapt_plan **plan)
{
    const int first = all->best;
    bool fits;
    if (is_beaten(all))
        return make_plan(all->comm, all, first, &all->search[first].best, INFINITY, result, plan, &fits);
    HAPT_TRY(finish_one(all, first, result, plan));
    for (int i = 0; all->options->split != HAPT_SPLIT_NO && i < all->count; i++) {
        const int k = all->order[i];
        struct hapt_plan *other;
        if (k == first || !all->feasible[k]) continue;
        if (all->search[k].best.step_s - waiting_s(&all->search[k]) >= (*plan)->simulated_s) continue;
        HAPT_TRY(finish_one(all, k, result, &other));
        keep_shorter(plan, other);
        if (*plan == other) all->best = k;
    }
    return HAPT_OK;
}

/* A lower bound of the steps of all batchings; split plans: at most `most_s`. The ranks share the batchings. */
static enum hapt_status bound_all(struct batchings *all, double most_s, double *bound_s)
{
    int rank, size;
    enum hapt_status status = HAPT_OK;
    double least_s = *bound_s;
    HAPT_MPI(MPI_Comm_rank(all->comm, &rank));
    HAPT_MPI(MPI_Comm_size(all->comm, &size));
    for (int k = rank; k < all->count && status == HAPT_OK; k += size) {
        double own_s = all->search[k].bound_s;
        if (!all->feasible[k]) continue;
        if (all->options->split != HAPT_SPLIT_NO) status = step_bound_split(&all->search[k], most_s, &own_s);
        least_s = fmin(least_s, own_s);
    }
    HAPT_TRY(hapt_env_agree(all->comm, status));
    HAPT_MPI(MPI_Allreduce(&least_s, bound_s, 1, MPI_DOUBLE, MPI_MIN, all->comm));
    return HAPT_OK;
}

static enum hapt_status finish(struct batchings *all, struct hapt_arena *result, struct hapt_plan **found)
{
    HAPT_TRY(finish_best(all, result, found));
    struct hapt_plan *plan = *found;
    plan->search.gap = 0;
    plan->search.candidates = plan->search.evaluated = 0;
    plan->bound_s = plan->simulated_s;
    for (int k = 0; k < all->count; k++) {
        plan->search.candidates += all->search[k].figures.candidates;
        plan->search.evaluated += all->search[k].figures.evaluated;
    }
    return bound_all(all, fmin(known_s(all), plan->simulated_s), &plan->bound_s);
}

/* Plans of the batchings that are not much slower than the best one, without splits; NULL: none. Rank-local. */
static enum hapt_status make_each(struct batchings *all, struct hapt_arena *result, const struct hapt_plan *best,
                                  struct hapt_plan **each)
{
    for (int k = 0; k < all->count; k++) {
        each[k] = NULL;
        if (!all->feasible[k] || all->search[k].best.step_s > EACH_WORTH * best->simulated_s) continue;
        HAPT_NEW(each[k], result, 1);
        HAPT_TRY(step_finish(&all->search[k], &all->search[k].best, result, each[k]));
    }
    return HAPT_OK;
}

static enum hapt_status run(struct batchings *all, struct hapt_arena *result, struct hapt_plan **plan,
                            struct hapt_plan **each)
{
    const double start_s = hapt_time_s();
    HAPT_TRY(start_all(all));
    if (all->best < 0) { /* the search of the formula says why */
        struct hapt_search_options first = *all->options;
        struct hapt_plan *none;
        first.microbatches = all->batching[0].microbatches;
        HAPT_TRY(hapt_plan_search_formula(all->comm, all->search[0].profile, &first, result, &none));
        return hapt_search_agree(all->comm, all->options,
                                 hapt_fail(HAPT_ERR_INFEASIBLE, "use fewer microbatches, or devices with more memory",
                                           "no launch counts of the planned stages fit the devices' memory"));
    }
    HAPT_TRY(improve_all(all));
    HAPT_TRY(finish(all, result, plan));
    if (each) HAPT_TRY(hapt_env_agree(all->comm, make_each(all, result, *plan, each)));
    (*plan)->search.seconds = hapt_time_s() - start_s;
    return hapt_env_mpi(MPI_Bcast(&(*plan)->search.seconds, 1, MPI_DOUBLE, 0, all->comm), "MPI_Bcast");
}

static enum hapt_status create(struct batchings *all, struct hapt_arena *scratch)
{
    HAPT_NEW(all->search, scratch, all->count);
    HAPT_NEW(all->feasible, scratch, all->count);
    HAPT_NEW(all->owner, scratch, all->count);
    HAPT_NEW(all->order, scratch, all->count);
    for (int k = 0; k < all->count; k++) {
        const struct hapt_profile *profile = all->batching[k].profile;
        struct hapt_search_options own = *all->options;
        own.microbatches = all->batching[k].microbatches;
        own.may_fail = all->options->may_fail || all->count > 1;
        own.unexplained = all->count > 1; /* run() asks again if no batching has a plan */
        HAPT_TRY(search_check_options(&own));
        if (own.split == HAPT_SPLIT_YES) HAPT_TRY(hapt_plan_split_view(profile, scratch, &profile));
        HAPT_TRY(step_begin(&all->search[k], all->comm, profile, &own));
        all->search[k].counter = &all->counter;
        HAPT_TRY(step_prepare(&all->search[k]));
    }
    return HAPT_OK;
}

enum hapt_status search_batchings(MPI_Comm comm, const struct hapt_search_batching *batching, int count,
                                  const struct hapt_search_options *options, struct hapt_arena *result,
                                  struct hapt_plan **plan, int *chosen, struct hapt_plan **each)
{
    struct batchings all = {.comm = comm, .batching = batching, .options = options, .count = count, .best = -1};
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    enum hapt_status status = hapt_env_agree(comm, hapt_counter_create(comm, &all.counter));
    if (status == HAPT_OK) status = hapt_env_agree(comm, create(&all, &scratch));
    if (status == HAPT_OK) status = run(&all, result, plan, each);
    for (int k = 0; all.search && k < count; k++) step_release(&all.search[k]);
    hapt_counter_release(&all.counter);
    hapt_arena_release(&scratch);
    if (status == HAPT_OK) *chosen = all.best;
    return status;
}

/* The floor of one batching: its bound on devices without limits of memory. */
static enum hapt_status floor_of(MPI_Comm comm, const struct hapt_search_batching *batching,
                                 const struct hapt_search_options *options, double most_s, struct hapt_arena *scratch,
                                 double *floor_s)
{
    struct hapt_profile *roomy;
    struct hapt_search_options own = *options;
    struct step_search search;
    own.microbatches = batching->microbatches;
    HAPT_TRY(hapt_profile_roomy_view(batching->profile, scratch, &roomy));
    enum hapt_status status = step_begin(&search, comm, roomy, &own);
    search.best.step_s = most_s;
    if (status == HAPT_OK)
        status = own.split == HAPT_SPLIT_NO ? step_bound(&search, floor_s) : step_bound_split(&search, most_s, floor_s);
    step_release(&search);
    return status;
}

enum hapt_status hapt_plan_floors(MPI_Comm comm, const struct hapt_search_batching *batching, int count,
                                  const struct hapt_search_options *options, double most_s, double *floor_s)
{
    struct hapt_arena scratch;
    enum hapt_status status = HAPT_OK;
    hapt_arena_init(&scratch);
    for (int k = 0; k < count && status == HAPT_OK; k++) {
        floor_s[k] = most_s;
        status = floor_of(comm, &batching[k], options, most_s, &scratch, &floor_s[k]);
        floor_s[k] = fmin(floor_s[k], most_s);
    }
    hapt_arena_release(&scratch);
    return hapt_env_agree(comm, status);
}

enum hapt_status hapt_plan_search_step(MPI_Comm comm, const struct hapt_profile *profile,
                                       const struct hapt_search_options *options, struct hapt_arena *result,
                                       struct hapt_plan **plan)
{
    const struct hapt_search_batching only = {options->microbatches, profile, false};
    int chosen;
    return search_batchings(comm, &only, 1, options, result, plan, &chosen, NULL);
}
