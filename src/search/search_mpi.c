/*
 * The search over t_max, shared by the ranks of a communicator.
 *
 * F(t) is the least sum of t_i + 2 c_i at t_max = t; F decreases. For t_max in (a, b] the objective is at least
 * F(b) + (B - 1) a. So intervals of candidates are split, and dropped from both ends (HAPT 5.2.2, extended). The range
 * of t_max is narrowed first. Below it the available devices cannot cover the layers. Above it (B - 1) t_max alone
 * exceeds a known plan.
 *
 * Intervals are priced in rounds. Within a round each rank takes the next t_max from a shared counter, so ranks wait
 * only at the end. They share better objectives by one-sided MPI. A better objective only ends passes early whose
 * result the end of the round would discard. So the priced t_max values, and all results, are the same for every number
 * of ranks. If a gap to the optimum is allowed, the dropped part depends on the objective. Then all passes use the
 * objective of the round's start.
 */
#include "search.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/progress.h"

/* TIE: objectives this close are equal. SAFE: bounds leave a few times as much. */
#define TIE 1e-12
#define SAFE 4e-12
enum { BRACKET_STEPS = 10 }; /* halvings to 1e-3 of the range, as shown by the progress display */

struct interval {
    int64_t first, last; /* candidates with unknown F, both inclusive */
    double least_s;      /* lower bound of their F: F of the next larger candidate, or another bound */
};

struct priced {
    int64_t index;
    double latency_s; /* F */
};

/* A t_max to price: the upper end of a part of an interval. */
struct probe {
    int64_t index, below; /* `below`: first candidate of that part */
};

struct shared_state { /* of all ranks; on rank 0 */
    int64_t next;     /* number of probes taken */
    double best_s;
};

struct search {
    MPI_Comm comm;
    int rank, size;
    /* one-sided MPI on `shared_state`; MPI_WIN_NULL (one rank, or no one-sided MPI): probes are dealt cyclically */
    MPI_Win mpi_window;
    struct shared_state alone, *shared_state;
    int64_t handed; /* counter at the start of the round */
    const struct search_problem *problem;
    struct search_table table;
    double *t_max;
    int64_t t_max_count;
    struct priced *priced;
    int64_t priced_count;
    double best_s;  /* best objective so far */
    double lower_s; /* no dropped candidate has a smaller objective; needed if a gap is allowed */
};

static double objective(const struct search *search, int64_t index, double latency_s)
{
    return latency_s + (search->problem->B - 1) * search->t_max[index];
}

static double gap(const struct search *search)
{
    return search->problem->options->gap;
}

/* The largest sum at this t_max with which the objective still matters. */
static double budget(const struct search *search, double best_s, double t_max_s)
{
    return best_s / (1 + gap(search)) + SAFE * best_s - (search->problem->B - 1) * t_max_s;
}

static void note_price(struct search *search, int64_t index, double latency_s)
{
    search->priced[search->priced_count++] = (struct priced){index, latency_s};
    if (objective(search, index, latency_s) < search->best_s) search->best_s = objective(search, index, latency_s);
}

/* Takes the number of the next probe. share_best: exchanges the least known objective. */
static enum hapt_status take_next(struct search *search, int64_t *next)
{
    const int64_t one = 1;
    if (search->mpi_window == MPI_WIN_NULL) {
        *next = search->shared_state->next;
        search->shared_state->next += search->size;
        return HAPT_OK;
    }
    HAPT_MPI(MPI_Fetch_and_op(&one, next, MPI_INT64_T, 0, (MPI_Aint)offsetof(struct shared_state, next), MPI_SUM,
                              search->mpi_window));
    HAPT_MPI(MPI_Win_flush(0, search->mpi_window));
    return HAPT_OK;
}

static enum hapt_status share_best(struct search *search, double *best_s)
{
    const double mine_s = *best_s;
    double known_s = mine_s;
    if (search->mpi_window == MPI_WIN_NULL) return HAPT_OK;
    HAPT_MPI(MPI_Fetch_and_op(&mine_s, &known_s, MPI_DOUBLE, 0, (MPI_Aint)offsetof(struct shared_state, best_s),
                              MPI_MIN, search->mpi_window));
    HAPT_MPI(MPI_Win_flush(0, search->mpi_window));
    if (known_s < *best_s) *best_s = known_s;
    return HAPT_OK;
}

/* Enters MPI, because requests of other ranks may need this rank's progress. */
static void serve(void *context)
{
    const struct search *search = context;
    int flag;
    MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, search->comm, &flag, MPI_STATUS_IGNORE);
}

static enum hapt_status open_shared_state(struct search *search)
{
    search->shared_state = &search->alone;
    search->alone = (struct shared_state){.next = search->rank, .best_s = INFINITY};
    if (search->size == 1) return HAPT_OK;
    struct shared_state *shared_state;
    const MPI_Aint bytes = search->rank == 0 ? (MPI_Aint)sizeof *shared_state : 0;
    int failed =
        MPI_Win_allocate(bytes, 1, MPI_INFO_NULL, search->comm, &shared_state, &search->mpi_window) != MPI_SUCCESS;
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, search->comm));
    if (failed) { /* a window that only some ranks have cannot be freed collectively */
        search->mpi_window = MPI_WIN_NULL;
        return HAPT_OK;
    }
    search->shared_state = shared_state;
    if (search->rank == 0) {
        HAPT_MPI(MPI_Win_lock(MPI_LOCK_EXCLUSIVE, 0, 0, search->mpi_window));
        *shared_state = (struct shared_state){.best_s = INFINITY};
        HAPT_MPI(MPI_Win_unlock(0, search->mpi_window));
        search->table.poll = serve;
        search->table.poll_context = search;
    }
    HAPT_MPI(MPI_Barrier(search->comm));
    return hapt_env_mpi(MPI_Win_lock_all(0, search->mpi_window), "MPI_Win_lock_all");
}

static void close_shared_state(struct search *search)
{
    if (search->mpi_window == MPI_WIN_NULL) return;
    MPI_Win_unlock_all(search->mpi_window);
    MPI_Win_free(&search->mpi_window);
}

/* Takes and prices probes until none is left. */
static enum hapt_status price_some(struct search *search, const struct probe *probe, int count, double *latency_s)
{
    double best_s = search->best_s;
    for (;;) {
        int64_t next;
        HAPT_TRY(take_next(search, &next));
        next -= search->handed;
        if (next >= count) return HAPT_OK;
        if (gap(search) <= 0) HAPT_TRY(share_best(search, &best_s));
        const struct probe *at = &probe[next];
        HAPT_TRY(search_table_fill(&search->table, search->t_max[at->index],
                                   budget(search, best_s, search->t_max[at->below]), false, &latency_s[next]));
        if (gap(search) > 0) continue;
        best_s = fmin(best_s, objective(search, at->index, latency_s[next]));
        HAPT_TRY(share_best(search, &best_s));
    }
}

/* Prices candidates; every rank gets all prices. A price too large to matter is infinite. `status`: of this rank so
 * far; all ranks return if one has failed. */
static enum hapt_status price(struct search *search, enum hapt_status status, const struct probe *probe, int count,
                              double *latency_s)
{
    for (int i = 0; status == HAPT_OK && i < count; i++) latency_s[i] = INFINITY;
    if (status == HAPT_OK) status = price_some(search, probe, count, latency_s);
    const double done_s = hapt_time_s();
    HAPT_TRY(hapt_env_agree(search->comm, status));
    if (search->size > 1) HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, latency_s, count, MPI_DOUBLE, MPI_MIN, search->comm));
    search->table.effort.wait_s += hapt_time_s() - done_s;
    search->handed += count + search->size;
    if (search->mpi_window == MPI_WIN_NULL) search->shared_state->next = search->handed + search->rank;
    for (int i = 0; i < count; i++) note_price(search, probe[i].index, latency_s[i]);
    return HAPT_OK;
}

/* True if an interval with this lower bound may hold a plan as good as the best, within the gap. */
static bool matters(const struct search *search, double bound_s)
{
    return gap(search) > 0 ? bound_s * (1 + gap(search)) < search->best_s : hapt_at_most(bound_s, search->best_s);
}

static void drop(struct search *search, double bound_s)
{
    if (bound_s < search->lower_s) search->lower_s = bound_s;
}

/* Drops the upper end that cannot be as good as the best so far; false: nothing is left. */
static bool trim(struct search *search, struct interval *interval)
{
    int64_t low = interval->first - 1, high = interval->last + 1;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (matters(search, objective(search, middle, interval->least_s)))
            low = middle;
        else
            high = middle;
    }
    if (high <= interval->last) drop(search, objective(search, high, interval->least_s));
    interval->last = low;
    return interval->first <= interval->last;
}

/* Number of probes per interval: more if there are few intervals, so that all ranks have work. */
static int64_t probes_per_interval(const struct interval *interval, int count)
{
    enum { ENOUGH = 4 };
    const int64_t probes = count >= ENOUGH ? 1 : (ENOUGH + count - 1) / count,
                  room = interval->last - interval->first + 1;
    return probes < room ? probes : room;
}

static int choose_probes(const struct interval *interval, int count, struct probe *probe)
{
    int chosen = 0;
    for (int i = 0; i < count; i++) {
        const int64_t parts = probes_per_interval(&interval[i], count) + 1,
                      room = interval[i].last - interval[i].first + 1;
        int64_t below = interval[i].first;
        for (int64_t k = 1; k < parts; k++) {
            const int64_t at = interval[i].first + (room * k - 1) / parts;
            if (at < below) continue;
            probe[chosen++] = (struct probe){at, below};
            below = at + 1;
        }
    }
    return chosen;
}

/* Appends the remaining parts of an interval after its probes were priced; returns the number of its probes. */
static int split(struct search *search, const struct interval *interval, const struct probe *probe,
                 const double *latency_s, int count, struct interval *next, int *next_count)
{
    int own = 0;
    while (own < count && probe[own].index <= interval->last) own++;
    for (int k = 0; k <= own; k++) {
        const struct interval part = {k > 0 ? probe[k - 1].index + 1 : interval->first,
                                      k < own ? probe[k].index - 1 : interval->last,
                                      k < own ? latency_s[k] : interval->least_s};
        /* an infinite price: beyond the budget of the whole part */
        if (isinf(part.least_s)) drop(search, search->best_s / (1 + gap(search)));
        if (part.first > part.last || isinf(part.least_s)) continue;
        /* F is already at its least, so a larger t_max gains nothing */
        if (k > 0 && latency_s[k - 1] <= part.least_s) continue;
        next[(*next_count)++] = part;
    }
    return own;
}

struct round {
    struct interval *now, *next;
    struct probe *probe;
    double *latency_s;
};

static enum hapt_status make_room(struct round *round, int kept, struct hapt_arena *scratch)
{
    HAPT_NEW(round->probe, scratch, kept + 8);
    HAPT_NEW(round->latency_s, scratch, kept + 8);
    HAPT_NEW(round->next, scratch, 2 * kept + 8);
    return HAPT_OK;
}

static enum hapt_status refine_intervals(struct search *search, double least_s, struct hapt_arena *scratch)
{
    const struct priced *known = &search->priced[0];
    struct interval start[2] = {{0, known->index - 1, known->latency_s},
                                {known->index + 1, search->t_max_count - 1, least_s}};
    struct round round = {.now = start};
    /* each round halves the rest */
    long left = (long)ceil(log2((double)search->t_max_count + 1)) + 1;
    hapt_progress_expect(left);
    for (int count = 2;;) {
        int kept = 0, probes = 0, next_count = 0;
        if (left-- > 0) hapt_progress_advance(1);
        for (int i = 0; i < count; i++)
            if (trim(search, &round.now[i])) round.now[kept++] = round.now[i];
        if (kept == 0) return HAPT_OK;
        const enum hapt_status status = make_room(&round, kept, scratch);
        if (status == HAPT_OK) probes = choose_probes(round.now, kept, round.probe);
        HAPT_TRY(price(search, status, round.probe, probes, round.latency_s));
        for (int i = 0, at = 0; i < kept; i++)
            at += split(search, &round.now[i], &round.probe[at], &round.latency_s[at], probes - at, round.next,
                        &next_count);
        round.now = round.next;
        count = next_count;
    }
}

/* Brackets the least feasible t_max: at *low_s and below, stages cannot cover the layers; at *high_s they can, or
 * nowhere. */
static enum hapt_status bracket_t_max(struct search *search, double *low_s, double *high_s, bool *reaches)
{
    *low_s = 0;
    *high_s = search->problem->longest_s;
    HAPT_TRY(search_table_reaches(&search->table, *high_s, reaches));
    if (!*reaches) return HAPT_OK;
    hapt_progress_expect(BRACKET_STEPS);
    for (int i = 0; i < 200 && *high_s - *low_s > 1e-3 * *high_s; i++) {
        if (i < BRACKET_STEPS) hapt_progress_advance(1);
        const double middle_s = *low_s + 0.5 * (*high_s - *low_s);
        bool here;
        HAPT_TRY(search_table_reaches(&search->table, middle_s, &here));
        *(here ? high_s : low_s) = middle_s;
        if (here) search_table_keep(&search->table);
    }
    search_table_forget(&search->table);
    return HAPT_OK;
}

/* Finds the smallest of a few t_max values that has a plan, and its F. Every rank does the same work. Infinite F: no
 * plan. */
static enum hapt_status find_known(struct search *search, double *low_s, double high_s, double *t_max_s,
                                   double *latency_s)
{
    const double longest_s = search->problem->longest_s;
    double step = 0.002;
    for (*t_max_s = high_s;; step *= 2) {
        HAPT_TRY(search_table_fill(&search->table, *t_max_s, INFINITY, false, latency_s));
        if (isfinite(*latency_s)) return HAPT_OK;
        *low_s = *t_max_s;
        if (*t_max_s >= longest_s) return HAPT_OK;
        *t_max_s = fmin(longest_s, *t_max_s * (1 + step));
    }
}

/* Lists the remaining candidates, and prices the one of the known plan. */
static enum hapt_status list_t_max(struct search *search, double low_s, double t_max_s, double latency_s,
                                   double least_s, struct hapt_arena *scratch)
{
    const int B = search->problem->B;
    const double known_s = latency_s + (B - 1) * t_max_s;
    const double most_s = B > 1 ? (known_s * (1 + SAFE) - least_s) / (B - 1) * (1 + SAFE) : search->problem->longest_s;
    int64_t low = -1, high;
    HAPT_TRY(search_t_max_candidates(search->problem, low_s, most_s, scratch, &search->t_max, &search->t_max_count));
    HAPT_NEW(search->priced, scratch, search->t_max_count);
    for (high = search->t_max_count; high - low > 1;) { /* the last one that is not larger */
        const int64_t middle = low + (high - low) / 2;
        *(search->t_max[middle] <= t_max_s * (1 + SAFE) ? &low : &high) = middle;
    }
    HAPT_ASSERT(low >= 0);
    bool reaches; /* at the largest remaining t_max: all others start from its candidates */
    HAPT_TRY(search_table_reaches(&search->table, search->t_max[search->t_max_count - 1], &reaches));
    search_table_keep(&search->table);
    /* between the largest candidate up to t_max_s and t_max_s nothing changes, so F is the same */
    if (search->t_max[low] > t_max_s)
        HAPT_TRY(search_table_fill(&search->table, search->t_max[low], INFINITY, false, &latency_s));
    HAPT_ASSERT(isfinite(latency_s));
    note_price(search, low, latency_s);
    return HAPT_OK;
}

static enum hapt_status start(struct search *search, struct hapt_arena *scratch, double *least_s, bool *found)
{
    double low_s, high_s, t_max_s, latency_s;
    *found = false;
    if (search->problem->all_candidates == 0) return HAPT_OK;
    HAPT_TRY(bracket_t_max(search, &low_s, &high_s, found));
    if (!*found) return HAPT_OK;
    HAPT_TRY(find_known(search, &low_s, high_s, &t_max_s, &latency_s));
    *found = isfinite(latency_s);
    if (!*found) return HAPT_OK;
    HAPT_TRY(search_least_sum(search->problem, scratch, least_s));
    return list_t_max(search, low_s, t_max_s, latency_s, *least_s, scratch);
}

static enum hapt_status search_all(struct search *search, struct hapt_arena *scratch, bool *found)
{
    double least_s;
    const double start_s = hapt_time_s();
    HAPT_TRY(hapt_env_agree(search->comm, start(search, scratch, &least_s, found)));
    search->table.effort.start_s = hapt_time_s() - start_s;
    if (!*found) return HAPT_OK;
    HAPT_TRY(hapt_env_agree(search->comm, open_shared_state(search)));
    return refine_intervals(search, least_s, scratch);
}

/* The smallest t_max among those whose objective ties with the best. */
static struct priced choose(const struct search *search)
{
    struct priced chosen = {-1, INFINITY};
    for (int64_t i = 0; i < search->priced_count; i++) {
        const struct priced *at = &search->priced[i];
        if (!isfinite(at->latency_s)) continue;
        const bool ties = hapt_at_most(objective(search, at->index, at->latency_s), search->best_s);
        if (ties && (chosen.index < 0 || at->index < chosen.index)) chosen = *at;
    }
    return chosen;
}

static enum hapt_status make_plan(struct search *search, struct hapt_arena *scratch, struct hapt_arena *result,
                                  struct hapt_plan *plan)
{
    const struct search_problem *problem = search->problem;
    struct search_problem *whole;
    const struct priced chosen = choose(search);
    const double t_max_s = search->t_max[chosen.index];
    /* the sum that the best objective allows at this t_max, including rounding */
    const double left_s =
        fmax(0, search->best_s - objective(search, chosen.index, chosen.latency_s)) + TIE * search->best_s;
    if (problem->thinned) {
        HAPT_TRY(search_problem_create(problem->profile, problem->options, 1, t_max_s * (1 + 1e-6),
                                       SAFE * search->best_s, scratch, &whole));
        problem = whole;
    }
    HAPT_TRY(search_trace(problem, t_max_s, chosen.latency_s + left_s, result, plan));
    HAPT_TRY(hapt_plan_price_at(problem->profile, t_max_s, plan));
    plan->search.candidates = search->t_max_count;
    plan->search.evaluated = search->priced_count;
    plan->search.gap = gap(search) > 0 && search->lower_s < search->best_s ? search->best_s / search->lower_s - 1 : 0;
    return HAPT_OK;
}

static enum hapt_status set_up(struct search *search, const struct hapt_profile *profile,
                               const struct hapt_search_options *options, struct hapt_arena *scratch)
{
    struct search_problem *problem;
    HAPT_TRY(search_check_options(options));
    HAPT_TRY(search_problem_create(profile, options, 1, INFINITY, -1, scratch, &problem));
    search->problem = problem;
    return search_table_init(problem, scratch, &search->table);
}

static enum hapt_status run_search(struct search *search, const struct hapt_profile *profile,
                                   const struct hapt_search_options *options, struct hapt_arena *result,
                                   struct hapt_arena *scratch, struct hapt_plan *plan)
{
    bool found;
    const double start_s = hapt_time_s();
    HAPT_TRY(hapt_search_agree(search->comm, options, set_up(search, profile, options, scratch)));
    search->table.effort.index_s = hapt_time_s() - start_s;
    HAPT_TRY(search_all(search, scratch, &found));
    if (!found && options->may_fail && options->unexplained)
        return hapt_search_agree(search->comm, options, hapt_fail(HAPT_ERR_INFEASIBLE, NULL, "no plan"));
    if (!found) return hapt_search_agree(search->comm, options, search_explain(profile, options));
    *plan = hapt_search_plan(profile, options);
    const double searched_s = hapt_time_s();
    HAPT_TRY(hapt_env_agree(search->comm, make_plan(search, scratch, result, plan)));
    search->table.effort.trace_s = hapt_time_s() - searched_s;
    search->table.effort.candidates = search->problem->all_candidates;
    if (options->effort) *options->effort = search->table.effort;
    plan->search.seconds = hapt_time_s() - start_s;
    HAPT_MPI(MPI_Bcast(&plan->search.seconds, 1, MPI_DOUBLE, 0, search->comm));
    return HAPT_OK;
}

enum hapt_status hapt_plan_search_formula(MPI_Comm comm, const struct hapt_profile *profile,
                                          const struct hapt_search_options *options, struct hapt_arena *result,
                                          struct hapt_plan **plan)
{
    struct search search = {.comm = comm, .mpi_window = MPI_WIN_NULL, .best_s = INFINITY, .lower_s = INFINITY};
    struct hapt_arena scratch;
    struct hapt_plan found;
    HAPT_MPI(MPI_Comm_rank(comm, &search.rank));
    HAPT_MPI(MPI_Comm_size(comm, &search.size));
    hapt_arena_init(&scratch);
    struct hapt_progress progress;
    hapt_progress_init(&progress, NULL, "searching", 0);
    enum hapt_status status = run_search(&search, profile, options, result, &scratch, &found);
    hapt_progress_release(&progress);
    close_shared_state(&search);
    search_table_release(&search.table);
    hapt_arena_release(&scratch);
    if (status != HAPT_OK) return status;
    struct hapt_plan *made = hapt_arena_alloc(result, 1, sizeof *made);
    HAPT_TRY(hapt_env_agree(comm, made ? HAPT_OK : HAPT_ERR_MEMORY));
    *made = found;
    *plan = made;
    return HAPT_OK;
}
