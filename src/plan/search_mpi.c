/*
 * The search over t_max, shared by the ranks of a communicator.
 *
 * For a t_max in (a, b] the objective is at least F(b) + (B - 1) a, F falling: intervals of candidates are split and
 * dropped from both ends (HAPT 5.2.2, taken further). The window of paces comes first: below it no stages reach over
 * the layers with the devices there are, above it the pace alone costs more than a plan that is known.
 *
 * Intervals are priced in rounds. Within a round the ranks take the next pace from a counter, so none waits for another
 * but at the end, and pass on better objectives by one-sided MPI. A better objective only lets a pass end early that
 * the end of the round would have made void, so which paces are priced, and all else, is the same for every number of
 * ranks. With a gap to the optimum allowed, what may be dropped depends on the objective itself: then passes take the
 * objective of the round's start.
 */
#include "search.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/progress.h"

/* Objectives this close tie (DESIGN "Objective"); bounds leave a few times as much. */
#define TIE 1e-12
#define SAFE 4e-12
enum { BRACKET_STEPS = 10 }; /* halvings to a thousandth */

struct interval {
    int64_t first, last; /* candidates whose F is not known yet, both inclusive */
    double least_s;      /* F of the nearest larger candidate or another bound: F of these is no smaller */
};

struct priced {
    int64_t index;
    double latency_s; /* F */
};

/* A pace to be priced: the upper end of what lies between its neighbours. */
struct probe {
    int64_t index, below; /* `below`: first candidate of the part that ends with it */
};

struct board {    /* on rank 0 */
    int64_t next; /* probes handed out */
    double best_s;
};

struct search {
    MPI_Comm comm;
    int rank, size;
    MPI_Win window; /* of the board; MPI_WIN_NULL: alone, or without one-sided MPI: probes are dealt in turn */
    struct board alone, *board;
    int64_t handed; /* counter at the start of the round */
    const struct search_problem *problem;
    struct search_table table;
    double *pace;
    int64_t pace_count;
    struct priced *priced;
    int64_t priced_count;
    double best_s;  /* objective */
    double lower_s; /* no dropped candidate has a smaller objective; kept where a gap is allowed */
};

static double objective(const struct search *search, int64_t index, double latency_s)
{
    return latency_s + (search->problem->B - 1) * search->pace[index];
}

static double gap(const struct search *search)
{
    return search->problem->options->gap;
}

/* What a sum at this pace may be for the objective to matter. */
static double budget(const struct search *search, double best_s, double pace_s)
{
    return best_s / (1 + gap(search)) + SAFE * best_s - (search->problem->B - 1) * pace_s;
}

static void note_price(struct search *search, int64_t index, double latency_s)
{
    search->priced[search->priced_count++] = (struct priced){index, latency_s};
    if (objective(search, index, latency_s) < search->best_s) search->best_s = objective(search, index, latency_s);
}

/* The board's ranks: the next number of a probe, and the least objective that any rank knows. */
static enum hapt_status take_next(struct search *search, int64_t *next)
{
    const int64_t one = 1;
    if (search->window == MPI_WIN_NULL) {
        *next = search->board->next;
        search->board->next += search->size;
        return HAPT_OK;
    }
    HAPT_MPI(
        MPI_Fetch_and_op(&one, next, MPI_INT64_T, 0, (MPI_Aint)offsetof(struct board, next), MPI_SUM, search->window));
    HAPT_MPI(MPI_Win_flush(0, search->window));
    return HAPT_OK;
}

static enum hapt_status share_best(struct search *search, double *best_s)
{
    const double mine_s = *best_s;
    double known_s = mine_s;
    if (search->window == MPI_WIN_NULL) return HAPT_OK;
    HAPT_MPI(MPI_Fetch_and_op(&mine_s, &known_s, MPI_DOUBLE, 0, (MPI_Aint)offsetof(struct board, best_s), MPI_MIN,
                              search->window));
    HAPT_MPI(MPI_Win_flush(0, search->window));
    if (known_s < *best_s) *best_s = known_s;
    return HAPT_OK;
}

/* Requests of other ranks may need this rank inside MPI to be served. */
static void serve(void *context)
{
    const struct search *search = context;
    int flag;
    MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, search->comm, &flag, MPI_STATUS_IGNORE);
}

static enum hapt_status open_board(struct search *search)
{
    search->board = &search->alone;
    search->alone = (struct board){.next = search->rank, .best_s = INFINITY};
    if (search->size == 1) return HAPT_OK;
    struct board *board;
    const MPI_Aint bytes = search->rank == 0 ? (MPI_Aint)sizeof *board : 0;
    int failed = MPI_Win_allocate(bytes, 1, MPI_INFO_NULL, search->comm, &board, &search->window) != MPI_SUCCESS;
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, search->comm));
    if (failed) { /* a window that only some ranks have cannot be freed together either */
        search->window = MPI_WIN_NULL;
        return HAPT_OK;
    }
    search->board = board;
    if (search->rank == 0) {
        HAPT_MPI(MPI_Win_lock(MPI_LOCK_EXCLUSIVE, 0, 0, search->window));
        *board = (struct board){.best_s = INFINITY};
        HAPT_MPI(MPI_Win_unlock(0, search->window));
        search->table.poll = serve;
        search->table.poll_context = search;
    }
    HAPT_MPI(MPI_Barrier(search->comm));
    return hapt_env_mpi(MPI_Win_lock_all(0, search->window), "MPI_Win_lock_all");
}

static void close_board(struct search *search)
{
    if (search->window == MPI_WIN_NULL) return;
    MPI_Win_unlock_all(search->window);
    MPI_Win_free(&search->window);
}

/* Takes probes until none is left. */
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
        HAPT_TRY(search_table_fill(&search->table, search->pace[at->index],
                                   budget(search, best_s, search->pace[at->below]), false, &latency_s[next]));
        if (gap(search) > 0) continue;
        best_s = fmin(best_s, objective(search, at->index, latency_s[next]));
        HAPT_TRY(share_best(search, &best_s));
    }
}

/* Prices candidates; every rank learns every price. A price beyond what can matter counts as infinite. `status`: of
 * this rank so far; all leave when one has failed. */
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
    if (search->window == MPI_WIN_NULL) search->board->next = search->handed + search->rank;
    for (int i = 0; i < count; i++) note_price(search, probe[i].index, latency_s[i]);
    return HAPT_OK;
}

/* The objective below which an interval must come to be looked at. */
static bool matters(const struct search *search, double bound_s)
{
    return gap(search) > 0 ? bound_s * (1 + gap(search)) < search->best_s : hapt_at_most(bound_s, search->best_s);
}

static void drop(struct search *search, double bound_s)
{
    if (bound_s < search->lower_s) search->lower_s = bound_s;
}

/* Drops the upper end that cannot be as good as the best so far; false when nothing is left. */
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

/* Where few intervals are left they are cut into more parts, so that several ranks have work. */
static int64_t cuts(const struct interval *interval, int count)
{
    enum { ENOUGH = 4 };
    const int64_t cut = count >= ENOUGH ? 1 : (ENOUGH + count - 1) / count, room = interval->last - interval->first + 1;
    return cut < room ? cut : room;
}

static int place_probes(const struct interval *interval, int count, struct probe *probe)
{
    int placed = 0;
    for (int i = 0; i < count; i++) {
        const int64_t parts = cuts(&interval[i], count) + 1, room = interval[i].last - interval[i].first + 1;
        int64_t below = interval[i].first;
        for (int64_t k = 1; k < parts; k++) {
            const int64_t at = interval[i].first + (room * k - 1) / parts;
            if (at < below) continue;
            probe[placed++] = (struct probe){at, below};
            below = at + 1;
        }
    }
    return placed;
}

/* What is left of an interval behind its probes; returns how many of them were its own. */
static int split(struct search *search, const struct interval *interval, const struct probe *probe,
                 const double *latency_s, int count, struct interval *next, int *next_count)
{
    int own = 0;
    while (own < count && probe[own].index <= interval->last) own++;
    for (int k = 0; k <= own; k++) {
        const struct interval part = {k > 0 ? probe[k - 1].index + 1 : interval->first,
                                      k < own ? probe[k].index - 1 : interval->last,
                                      k < own ? latency_s[k] : interval->least_s};
        /* an infinite price: beyond the budget of the part, its lower end included */
        if (isinf(part.least_s)) drop(search, search->best_s / (1 + gap(search)));
        if (part.first > part.last || isinf(part.least_s)) continue;
        /* where F has already fallen to its least, a slower pace gains nothing */
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
                                {known->index + 1, search->pace_count - 1, least_s}};
    struct round round = {.now = start};
    /* Each round halves what is left. */
    long left = (long)ceil(log2((double)search->pace_count + 1)) + 1;
    hapt_progress_expect(left);
    for (int count = 2;;) {
        int kept = 0, probes = 0, next_count = 0;
        if (left-- > 0) hapt_progress_advance(1);
        for (int i = 0; i < count; i++)
            if (trim(search, &round.now[i])) round.now[kept++] = round.now[i];
        if (kept == 0) return HAPT_OK;
        const enum hapt_status status = make_room(&round, kept, scratch);
        if (status == HAPT_OK) probes = place_probes(round.now, kept, round.probe);
        HAPT_TRY(price(search, status, round.probe, probes, round.latency_s));
        for (int i = 0, at = 0; i < kept; i++)
            at += split(search, &round.now[i], &round.probe[at], &round.latency_s[at], probes - at, round.next,
                        &next_count);
        round.now = round.next;
        count = next_count;
    }
}

/* No stages reach over the layers at *low_s and below; they do at *high_s, or nowhere. */
static enum hapt_status bracket_pace(struct search *search, double *low_s, double *high_s, bool *reaches)
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

/* The smallest of a few paces with a plan, and its F; every rank does the same work. Infinite F: there is none. */
static enum hapt_status find_known(struct search *search, double *low_s, double high_s, double *pace_s,
                                   double *latency_s)
{
    const double longest_s = search->problem->longest_s;
    double step = 0.002;
    for (*pace_s = high_s;; step *= 2) {
        HAPT_TRY(search_table_fill(&search->table, *pace_s, INFINITY, false, latency_s));
        if (isfinite(*latency_s)) return HAPT_OK;
        *low_s = *pace_s;
        if (*pace_s >= longest_s) return HAPT_OK;
        *pace_s = fmin(longest_s, *pace_s * (1 + step));
    }
}

/* The candidates that are left, and the price of the one that the known plan belongs to. */
static enum hapt_status list_paces(struct search *search, double low_s, double pace_s, double latency_s, double least_s,
                                   struct hapt_arena *scratch)
{
    const int B = search->problem->B;
    const double known_s = latency_s + (B - 1) * pace_s;
    const double most_s = B > 1 ? (known_s * (1 + SAFE) - least_s) / (B - 1) * (1 + SAFE) : search->problem->longest_s;
    int64_t low = -1, high;
    HAPT_TRY(search_paces(search->problem, low_s, most_s, scratch, &search->pace, &search->pace_count));
    HAPT_NEW(search->priced, scratch, search->pace_count);
    for (high = search->pace_count; high - low > 1;) { /* the last that is no larger */
        const int64_t middle = low + (high - low) / 2;
        *(search->pace[middle] <= pace_s * (1 + SAFE) ? &low : &high) = middle;
    }
    HAPT_ASSERT(low >= 0);
    bool reaches; /* at the largest pace that is left: the others are narrowed down from it */
    HAPT_TRY(search_table_reaches(&search->table, search->pace[search->pace_count - 1], &reaches));
    search_table_keep(&search->table);
    HAPT_TRY(search_table_fill(&search->table, search->pace[low], INFINITY, false, &latency_s));
    HAPT_ASSERT(isfinite(latency_s));
    note_price(search, low, latency_s);
    return HAPT_OK;
}

static enum hapt_status start(struct search *search, struct hapt_arena *scratch, double *least_s, bool *found)
{
    double low_s, high_s, pace_s, latency_s;
    *found = false;
    if (search->problem->all_candidates == 0) return HAPT_OK;
    HAPT_TRY(bracket_pace(search, &low_s, &high_s, found));
    if (!*found) return HAPT_OK;
    HAPT_TRY(find_known(search, &low_s, high_s, &pace_s, &latency_s));
    *found = isfinite(latency_s);
    if (!*found) return HAPT_OK;
    HAPT_TRY(search_least_sum(search->problem, scratch, least_s));
    return list_paces(search, low_s, pace_s, latency_s, *least_s, scratch);
}

static enum hapt_status search_all(struct search *search, struct hapt_arena *scratch, bool *found)
{
    double least_s;
    const double start_s = hapt_time_s();
    HAPT_TRY(hapt_env_agree(search->comm, start(search, scratch, &least_s, found)));
    search->table.effort.start_s = hapt_time_s() - start_s;
    if (!*found) return HAPT_OK;
    HAPT_TRY(hapt_env_agree(search->comm, open_board(search)));
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

/* The plan at the chosen pace, from a table that holds every program that ties. */
static enum hapt_status trace_plan(const struct search_problem *problem, double pace_s, double budget_s,
                                   struct hapt_arena *scratch, struct hapt_arena *result, struct hapt_plan *plan)
{
    struct search_table table;
    double latency_s;
    HAPT_TRY(search_table_init(problem, scratch, &table));
    enum hapt_status status = search_table_fill(&table, pace_s, budget_s, true, &latency_s);
    if (status == HAPT_OK) status = search_trace(&table, budget_s, result, plan);
    search_table_release(&table);
    return status;
}

static enum hapt_status make_plan(struct search *search, struct hapt_arena *scratch, struct hapt_arena *result,
                                  struct hapt_plan *plan)
{
    const struct search_problem *problem = search->problem;
    struct search_problem *whole;
    const struct priced chosen = choose(search);
    const double pace_s = search->pace[chosen.index];
    /* what the best objective leaves for the sum at this pace, rounding included */
    const double left_s =
        fmax(0, search->best_s - objective(search, chosen.index, chosen.latency_s)) + TIE * search->best_s;
    if (problem->thinned) {
        HAPT_TRY(search_problem_create(problem->profile, problem->options, 1, SAFE * search->best_s, scratch, &whole));
        problem = whole;
    }
    HAPT_TRY(trace_plan(problem, pace_s, chosen.latency_s + left_s, scratch, result, plan));
    HAPT_TRY(plan_price_at(problem->profile, pace_s, plan));
    plan->search.candidates = search->pace_count;
    plan->search.evaluated = search->priced_count;
    plan->search.gap = gap(search) > 0 && search->lower_s < search->best_s ? search->best_s / search->lower_s - 1 : 0;
    return HAPT_OK;
}

static enum hapt_status set_up(struct search *search, const struct hapt_profile *profile,
                               const struct hapt_search_options *options, struct hapt_arena *scratch)
{
    struct search_problem *problem;
    if (options->microbatches < 1)
        return hapt_fail(HAPT_ERR_USAGE, "give --microbatches 1 or more", "%d microbatches a step",
                         options->microbatches);
    HAPT_TRY(search_problem_create(profile, options, 1, -1, scratch, &problem));
    search->problem = problem;
    return search_table_init(problem, scratch, &search->table);
}

static enum hapt_status run_search(struct search *search, const struct hapt_profile *profile,
                                   const struct hapt_search_options *options, struct hapt_arena *result,
                                   struct hapt_arena *scratch, struct hapt_plan *plan)
{
    bool found;
    const double start_s = hapt_time_s();
    HAPT_TRY(search_agree(search->comm, options, set_up(search, profile, options, scratch)));
    search->table.effort.index_s = hapt_time_s() - start_s;
    HAPT_TRY(search_all(search, scratch, &found));
    if (!found) return search_agree(search->comm, options, search_explain(profile, options));
    *plan = (struct hapt_plan){.microbatches = options->microbatches,
                               .schedule = options->schedule,
                               .hide_threshold = options->hide_threshold,
                               .replicas = 1,
                               .layer_count = profile->layer_count};
    const double searched_s = hapt_time_s();
    HAPT_TRY(hapt_env_agree(search->comm, make_plan(search, scratch, result, plan)));
    search->table.effort.trace_s = hapt_time_s() - searched_s;
    search->table.effort.candidates = search->problem->all_candidates;
    if (options->effort) *options->effort = search->table.effort;
    plan->search.seconds = hapt_time_s() - start_s;
    HAPT_MPI(MPI_Bcast(&plan->search.seconds, 1, MPI_DOUBLE, 0, search->comm));
    return HAPT_OK;
}

enum hapt_status hapt_plan_search(MPI_Comm comm, const struct hapt_profile *profile,
                                  const struct hapt_search_options *options, struct hapt_arena *result,
                                  struct hapt_plan **plan)
{
    struct search search = {.comm = comm, .window = MPI_WIN_NULL, .best_s = INFINITY, .lower_s = INFINITY};
    struct hapt_arena scratch;
    struct hapt_plan found;
    HAPT_MPI(MPI_Comm_rank(comm, &search.rank));
    HAPT_MPI(MPI_Comm_size(comm, &search.size));
    hapt_arena_init(&scratch);
    struct hapt_progress progress;
    hapt_progress_init(&progress, NULL, "searching", 0);
    enum hapt_status status = run_search(&search, profile, options, result, &scratch, &found);
    hapt_progress_release(&progress);
    close_board(&search);
    search_table_release(&search.table);
    hapt_arena_release(&scratch);
    if (status != HAPT_OK) return status;
    struct hapt_plan *made = hapt_arena_alloc(result, 1, sizeof *made);
    HAPT_TRY(hapt_env_agree(comm, made ? HAPT_OK : HAPT_ERR_MEMORY));
    *made = found;
    *plan = made;
    return HAPT_OK;
}
