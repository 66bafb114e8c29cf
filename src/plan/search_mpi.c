/*
 * The search over t_max, shared by the ranks of a communicator.
 *
 * For a t_max in (a, b] the objective is at least F(b) + (B - 1) a, F falling: intervals of candidates are halved and
 * dropped from both ends (HAPT 5.2.2, taken further). Which t_max are priced does not depend on the number of ranks.
 */
#include "search.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct interval {
    int64_t first, last; /* candidates whose F is not known yet, both inclusive */
    double least_s;      /* F of the nearest larger candidate: F of these is no smaller */
};

struct priced {
    int64_t index;
    double latency_s; /* F */
};

struct search {
    MPI_Comm comm;
    int rank, size;
    const struct search_problem *problem;
    struct search_table table;
    struct priced *priced;
    int64_t priced_count;
    double best_s; /* objective */
};

static double objective(const struct search *search, int64_t index, double latency_s)
{
    return latency_s + (search->problem->B - 1) * search->problem->t_max[index];
}

static void note_price(struct search *search, int64_t index, double latency_s)
{
    search->priced[search->priced_count++] = (struct priced){index, latency_s};
    if (objective(search, index, latency_s) < search->best_s) search->best_s = objective(search, index, latency_s);
}

/* Prices candidates, the ranks in turn; every rank learns every price. */
static enum hapt_status price(struct search *search, const int64_t *index, int count, double *latency_s)
{
    enum hapt_status status = HAPT_OK;
    for (int i = 0; i < count; i++) {
        latency_s[i] = INFINITY;
        if (i % search->size == search->rank && status == HAPT_OK)
            status = search_table_fill(&search->table, search->problem->t_max[index[i]], &latency_s[i]);
    }
    HAPT_TRY(hapt_env_agree(search->comm, status));
    if (search->size > 1) HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, latency_s, count, MPI_DOUBLE, MPI_MIN, search->comm));
    for (int i = 0; i < count; i++) note_price(search, index[i], latency_s[i]);
    return HAPT_OK;
}

/* Finds the smallest feasible t_max; every rank does the same work. Infeasible everywhere: *first is the count. */
static enum hapt_status find_first(struct search *search, int64_t *first, double *latency_s)
{
    const struct search_problem *problem = search->problem;
    int64_t low = -1, high = problem->t_max_count; /* low is infeasible, high feasible or beyond the end */
    while (high - low > 1) {
        /* the largest first: where it is infeasible everything is */
        const int64_t middle = high == problem->t_max_count ? high - 1 : low + (high - low) / 2;
        double found_s;
        HAPT_TRY(search_table_fill(&search->table, problem->t_max[middle], &found_s));
        note_price(search, middle, found_s);
        if (isfinite(found_s)) {
            high = middle;
            *latency_s = found_s;
        } else if (high == problem->t_max_count) {
            break;
        } else {
            low = middle;
        }
    }
    *first = high;
    return HAPT_OK;
}

/* Drops the upper end that cannot be as good as the best so far; false when nothing is left. */
static bool trim(const struct search *search, struct interval *interval)
{
    int64_t low = interval->first - 1, high = interval->last + 1;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (hapt_at_most(objective(search, middle, interval->least_s), search->best_s))
            low = middle;
        else
            high = middle;
    }
    interval->last = low;
    return interval->first <= interval->last;
}

/* Halves every interval by the price of its middle. `next` has room for twice the intervals. */
static enum hapt_status halve(struct search *search, const struct interval *interval, int count, struct interval *next,
                              int64_t *middle, double *latency_s, int *next_count)
{
    for (int i = 0; i < count; i++) middle[i] = interval[i].first + (interval[i].last - interval[i].first) / 2;
    HAPT_TRY(price(search, middle, count, latency_s));
    *next_count = 0;
    for (int i = 0; i < count; i++) {
        const struct interval below = {interval[i].first, middle[i] - 1, latency_s[i]};
        const struct interval above = {middle[i] + 1, interval[i].last, interval[i].least_s};
        if (isfinite(below.least_s)) next[(*next_count)++] = below;
        /* where F has already fallen to its least, a slower pace gains nothing */
        if (latency_s[i] > above.least_s) next[(*next_count)++] = above;
    }
    return HAPT_OK;
}

static enum hapt_status refine_intervals(struct search *search, int64_t first, double first_s,
                                         struct hapt_arena *scratch)
{
    const int64_t all = search->problem->t_max_count;
    struct interval *now, *next;
    int64_t *middle;
    double *latency_s;
    int count = 0;
    /* the largest was priced first; its F is the least of all */
    const double least_s = search->priced[0].latency_s;
    size_t room = 64;
    HAPT_NEW(now, scratch, 1);
    if (first < all - 1 && first_s > least_s) now[count++] = (struct interval){first + 1, all - 2, least_s};
    for (;;) {
        int kept = 0;
        for (int i = 0; i < count; i++)
            if (trim(search, &now[i])) now[kept++] = now[i];
        if (kept == 0) return HAPT_OK;
        while (room < 2 * (size_t)kept) room *= 2;
        HAPT_NEW(next, scratch, room);
        HAPT_NEW(middle, scratch, kept);
        HAPT_NEW(latency_s, scratch, kept);
        HAPT_TRY(halve(search, now, kept, next, middle, latency_s, &count));
        now = next;
    }
}

/* The smallest t_max among those whose objective ties with the best. */
static int64_t choose(const struct search *search)
{
    int64_t chosen = -1;
    for (int64_t i = 0; i < search->priced_count; i++) {
        const struct priced *at = &search->priced[i];
        if (!isfinite(at->latency_s)) continue;
        const bool ties = hapt_at_most(objective(search, at->index, at->latency_s), search->best_s);
        if (ties && (chosen < 0 || at->index < chosen)) chosen = at->index;
    }
    return chosen;
}

static enum hapt_status make_plan(struct search *search, struct hapt_arena *result, struct hapt_plan *plan)
{
    const struct search_problem *problem = search->problem;
    const int64_t chosen = choose(search);
    double latency_s;
    HAPT_TRY(search_table_fill(&search->table, problem->t_max[chosen], &latency_s));
    /* what the best objective leaves for the sum at this pace, rounding included */
    const double budget_s =
        latency_s + fmax(0, search->best_s - objective(search, chosen, latency_s)) + 1e-12 * search->best_s;
    HAPT_TRY(search_trace(&search->table, budget_s, result, plan));
    return plan_price_at(problem->profile, problem->t_max[chosen], plan);
}

static enum hapt_status search_all(struct search *search, struct hapt_arena *scratch, int64_t *first)
{
    double first_s = INFINITY;
    const enum hapt_status status = find_first(search, first, &first_s);
    HAPT_TRY(hapt_env_agree(search->comm, status));
    if (*first == search->problem->t_max_count) return HAPT_OK;
    return refine_intervals(search, *first, first_s, scratch);
}

static enum hapt_status set_up(struct search *search, const struct hapt_profile *profile,
                               const struct hapt_search_options *options, struct hapt_arena *scratch)
{
    struct search_problem *problem;
    if (options->microbatches < 1)
        return hapt_fail(HAPT_ERR_USAGE, "give --microbatches 1 or more", "%d microbatches a step",
                         options->microbatches);
    HAPT_TRY(search_problem_create(profile, options, 1, scratch, &problem));
    search->problem = problem;
    HAPT_NEW(search->priced, scratch, problem->t_max_count + 1);
    return search_table_init(problem, scratch, &search->table);
}

static enum hapt_status run_search(struct search *search, const struct hapt_profile *profile,
                                   const struct hapt_search_options *options, struct hapt_arena *result,
                                   struct hapt_arena *scratch, struct hapt_plan *plan)
{
    int64_t first = 0;
    const double start_s = hapt_time_s();
    HAPT_TRY(search_agree(search->comm, options, set_up(search, profile, options, scratch)));
    HAPT_TRY(search_all(search, scratch, &first));
    if (first == search->problem->t_max_count)
        return search_agree(search->comm, options, search_explain(profile, options));
    *plan = (struct hapt_plan){.microbatches = options->microbatches,
                               .schedule = options->schedule,
                               .hide_threshold = options->hide_threshold,
                               .replicas = 1,
                               .layer_count = profile->layer_count};
    HAPT_TRY(hapt_env_agree(search->comm, make_plan(search, result, plan)));
    plan->search.seconds = hapt_time_s() - start_s;
    HAPT_MPI(MPI_Bcast(&plan->search.seconds, 1, MPI_DOUBLE, 0, search->comm));
    plan->search.candidates = search->problem->t_max_count;
    plan->search.evaluated = search->priced_count;
    return HAPT_OK;
}

enum hapt_status hapt_plan_search(MPI_Comm comm, const struct hapt_profile *profile,
                                  const struct hapt_search_options *options, struct hapt_arena *result,
                                  struct hapt_plan **plan)
{
    struct search search = {.comm = comm, .best_s = INFINITY};
    struct hapt_arena scratch;
    struct hapt_plan found;
    HAPT_MPI(MPI_Comm_rank(comm, &search.rank));
    HAPT_MPI(MPI_Comm_size(comm, &search.size));
    hapt_arena_init(&scratch);
    enum hapt_status status = run_search(&search, profile, options, result, &scratch, &found);
    search_table_release(&search.table);
    hapt_arena_release(&scratch);
    if (status != HAPT_OK) return status;
    struct hapt_plan *made = hapt_arena_alloc(result, 1, sizeof *made);
    HAPT_TRY(hapt_env_agree(comm, made ? HAPT_OK : HAPT_ERR_MEMORY));
    *made = found;
    *plan = made;
    return HAPT_OK;
}
