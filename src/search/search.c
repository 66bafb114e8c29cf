/*
 * One pass of the DP (HAPT 5.2.1) for a given t_max, from the last layer to the first.
 *
 * Both latency and launch count of a suffix matter to the stages in front of it. So a state keeps every point that no
 * other beats in both. Points are extended by the paper's (14) and (18); the suffix state generalises them to more than
 * two subclusters in any order. Rounding is monotone, so a larger t_max never gives a larger latency; search_mpi.c
 * relies on this.
 *
 * A point is made only if it and the least prefix in front of it stay within a budget. The pass starts with the budget
 * that suffices if memory does not limit, and widens it until a plan is found. So its work grows with the cost of
 * limited memory.
 */
#include "search.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>

/* 1e-12: sums from the front and from the back round differently; far below the difference between plans. */
#define ROUNDING (1 + 1e-12)
/* Share of the budget, more than rounding, for tests that only save time. */
#define SLACK 1e-9

static int longest_list(const struct search_problem *problem)
{
    int longest = 0;
    for (int list = 0; list < problem->device_set_count * problem->L; list++)
        if (problem->candidate_count[list] > longest) longest = problem->candidate_count[list];
    return longest;
}

enum hapt_status search_table_init(const struct search_problem *problem, struct hapt_arena *arena,
                                   struct search_table *table)
{
    *table = (struct search_table){.problem = problem, .ceiling_s = INFINITY, .limit_s = INFINITY};
    const size_t sets = (size_t)problem->device_set_count, L = (size_t)problem->L,
                 states = (size_t)problem->suffix_state_count;
    const size_t devices = (size_t)problem->most_devices + 1, launches = (size_t)problem->most_launches + 1;
    HAPT_NEW(table->delta, arena, sets * sets * L);
    HAPT_NEW(table->active_first, arena, sets * L);
    HAPT_NEW(table->active_end, arena, sets * L);
    HAPT_NEW(table->ceiling_first, arena, sets * L);
    HAPT_NEW(table->ceiling_end, arena, sets * L);
    HAPT_NEW(table->least_behind_s, arena, L + 1);
    HAPT_NEW(table->close, arena, longest_list(problem));
    HAPT_NEW(table->least_launches, arena, sets * L);
    HAPT_NEW(table->behind, arena, sets * (L + 1));
    HAPT_NEW(table->furthest, arena, (size_t)problem->class_count * (L + 1));
    HAPT_NEW(table->nearest, arena, (size_t)problem->class_count * (L + 1));
    HAPT_NEW(table->prefix_reach, arena, states * devices);
    HAPT_NEW(table->suffix_reach, arena, states * devices);
    HAPT_NEW(table->suffix_state_low, arena, states);
    HAPT_NEW(table->suffix_state_high, arena, states);
    HAPT_NEW(table->suffix_state_row, arena, states);
    HAPT_NEW(table->work, arena, devices * launches);
    HAPT_NEW(table->carry, arena, launches);
    HAPT_NEW(table->low, arena, devices);
    HAPT_NEW(table->high, arena, devices);
    for (size_t i = 0; i < devices * launches; i++) table->work[i] = INFINITY;
    for (size_t n = 0; n < launches; n++) table->carry[n] = INFINITY;
    for (size_t d = 0; d < devices; d++) {
        table->low[d] = problem->most_launches + 1;
        table->high[d] = -1;
    }
    /* not from the arena, which would touch all pages: few candidates are active at once */
    const size_t bytes = ((size_t)problem->all_candidates + 1) * sizeof *table->active;
    table->active = malloc(bytes);
    table->ceiling = malloc(bytes);
    if (!table->active || !table->ceiling)
        return hapt_fail(HAPT_ERR_MEMORY, "plan with fewer layers (--layers-per-model)",
                         "host memory exhausted by the search");
    return HAPT_OK;
}

void search_table_release(struct search_table *table)
{
    free(table->active);
    free(table->ceiling);
    free(table->pool);
    free(table->row);
    free(table->untouched_prefix_s);
    free(table->prefix_s);
    free(table->starts);
    *table = (struct search_table){.problem = table->problem};
}

/* Adds a point to the current row, if a plan within the budget can contain it. */
static inline void put(const struct search_table *table, const struct search_row *row, int devices, int launches,
                       double latency_s)
{
    if (latency_s + table->prefix_s[row->cell + (devices - row->low)] > table->budget_s) return;
    double *cell = &table->work[(size_t)devices * (size_t)(table->problem->most_launches + 1) + (size_t)launches];
    if (latency_s < *cell) *cell = latency_s;
    if (launches < table->low[devices]) table->low[devices] = launches;
    if (launches > table->high[devices]) table->high[devices] = launches;
}

/* Puts a stage in front of the suffixes [first, end) of the pool. `devices`: those of the front subcluster then used.
 */
static inline void extend_points(const struct search_table *table, const struct search_candidate *at,
                                 const struct search_row *row, int first, int end, int devices, double cost_s,
                                 int delta)
{
    for (int i = first; i < end; i++) {
        const int launches = search_launches(table->problem, table->pool[i].launches, delta);
        if (launches <= at->launches) put(table, row, devices, launches, cost_s + table->pool[i].latency_s);
    }
}

/* Puts a stage in front of a suffix of the same subcluster. */
static void extend_same(const struct search_table *table, const struct search_candidate *at,
                        const struct search_row *row, const struct search_row *after, double cost_s, int delta)
{
    const int *start = &table->starts[after->start];
    const int low = row->low - at->devices > after->first_d ? row->low - at->devices : after->first_d;
    const int high = row->high - at->devices < after->last_d ? row->high - at->devices : after->last_d;
    for (int d = low; d <= high; d++)
        extend_points(table, at, row, start[d - after->low], start[d + 1 - after->low], d + at->devices, cost_s, delta);
}

/* Puts a mixed stage in front of a suffix that may use `left` devices of the subcluster that they share. */
static void extend_shared(const struct search_table *table, const struct search_candidate *at,
                          const struct search_row *row, const struct search_row *after, int left, double cost_s,
                          int delta)
{
    const int *start = &table->starts[after->start];
    const int high = after->last_d < left ? after->last_d : left;
    const int low = table->problem->options->use_all_devices && left > after->first_d ? left : after->first_d;
    if (low <= high)
        extend_points(table, at, row, start[low - after->low], start[high + 1 - after->low], at->devices, cost_s,
                      delta);
}

/* Puts a stage in front of the suffixes whose first stage is on device set `next`. */
static void extend_to(const struct search_table *table, const struct search_candidate *at, const struct search_row *row,
                      unsigned mask, int next, bool within)
{
    const struct search_problem *problem = table->problem;
    const int current = row->current, shared_subcluster = search_shared_subcluster(problem, current, next);
    if (shared_subcluster == SEARCH_NOT_ALLOWED) return;
    const unsigned rest = search_rest(problem, mask, current, shared_subcluster);
    const size_t link = search_link(problem, current, next, at->end - 1);
    const struct search_row *after = search_row(table, at->end, search_suffix_state(problem, rest, next));
    const double left_s = table->budget_s - at->time_s - row->least_prefix_s; /* for the stages behind */
    if (table->delta[link] == UCHAR_MAX || !after || after->start < 0 ||
        after->least_s > left_s + SLACK * table->budget_s)
        return;
    const double cost_s = at->time_s + 2 * problem->comm_s[link];
    if (shared_subcluster >= 0 && problem->device_set[current].mixed_group < 0)
        extend_same(table, at, row, after, cost_s, table->delta[link]);
    else if (shared_subcluster >= 0)
        extend_shared(table, at, row, after, search_left(problem, current, shared_subcluster), cost_s,
                      table->delta[link]);
    else if (within) /* the last stage of its subcluster */
        extend_points(table, at, row, after->any_first, after->any_end, at->devices, cost_s, table->delta[link]);
}

static void extend(const struct search_table *table, const struct search_candidate *at, const struct search_row *row,
                   unsigned mask)
{
    const struct search_problem *problem = table->problem;
    const int current = row->current;
    const struct search_device_set *device_set = &problem->device_set[current];
    const unsigned rest = mask & ~device_set->clusters;
    const bool within = at->devices >= row->low && at->devices <= row->high;
    if (at->end == problem->L) {
        if (rest == 0 && within && device_set->ends) put(table, row, at->devices, 1, at->time_s);
        return;
    }
    if (device_set->mixed_group < 0) extend_to(table, at, row, mask, current, within);
    for (int next = 0; within && next < problem->C; next++)
        if (rest >> next & 1u || (device_set->mixed_group >= 0 && device_set->clusters >> next & 1u))
            extend_to(table, at, row, mask, next, within);
    for (int next = problem->C; next < problem->device_set_count; next++) extend_to(table, at, row, mask, next, within);
}

static enum hapt_status reserve(struct search_table *table, int64_t more)
{
    if (table->pool_count + more <= table->pool_room) return HAPT_OK;
    const int64_t room = 2 * table->pool_room + more + 4096;
    struct search_point *pool = room > INT32_MAX ? NULL : realloc(table->pool, (size_t)room * sizeof *pool);
    if (!pool) return search_no_memory(room);
    table->pool = pool;
    table->pool_room = room;
    return HAPT_OK;
}

/* Stores the Pareto points with d devices: no point with as few devices and launches is faster. Clears its part of the
 * work table. */
static void store_devices(struct search_table *table, int d, bool exact)
{
    double *work = &table->work[(size_t)d * (size_t)(table->problem->most_launches + 1)];
    double best = INFINITY;
    for (int n = table->low[d]; n <= table->high[d]; n++) {
        if (!exact && table->carry[n] < best) best = table->carry[n];
        if (work[n] < best) {
            best = work[n];
            table->pool[table->pool_count++] = (struct search_point){best, n};
        }
        work[n] = INFINITY;
    }
    table->low[d] = table->problem->most_launches + 1;
    table->high[d] = -1;
}

/* Stores the Pareto points of a row, and clears the work table. */
static enum hapt_status store(struct search_table *table, struct search_row *row)
{
    const bool exact = table->problem->options->use_all_devices;
    int *start = &table->starts[row->cell];
    int least = INT_MAX, most = -1; /* range of launches in the row */
    const int64_t first = table->pool_count;
    row->start = -1;
    row->any_first = row->any_end = (int)table->pool_count;
    for (int d = row->low; d <= row->high; d++) {
        if (table->low[d] < least) least = table->low[d];
        if (table->high[d] > most) most = table->high[d];
    }
    if (most < 0) return HAPT_OK;
    HAPT_TRY(reserve(table, (int64_t)(row->high - row->low + 2) * (most - least + 1)));
    for (int d = row->low; d <= row->high; d++) {
        const int64_t here = table->pool_count;
        start[d - row->low] = (int)here;
        if (table->high[d] < 0) continue;
        store_devices(table, d, exact);
        if (table->pool_count > here) {
            if (here == first) row->first_d = d;
            row->last_d = d;
        }
        for (int64_t i = here; i < table->pool_count; i++)
            for (int n = table->pool[i].launches; n <= most && table->pool[i].latency_s < table->carry[n]; n++)
                table->carry[n] = table->pool[i].latency_s;
    }
    start[row->high + 1 - row->low] = (int)table->pool_count;
    if (table->pool_count > first) row->start = row->cell;
    row->least_s = INFINITY;
    for (int64_t i = first; i < table->pool_count; i++)
        if (table->pool[i].latency_s < row->least_s) row->least_s = table->pool[i].latency_s;
    const int D = search_front_devices(table->problem, row->current);
    row->any_first = row->any_end = (int)table->pool_count;
    if (exact && row->start >= 0) { /* the subcluster before must be used up */
        row->any_first = start[(D <= row->high ? D : row->high + 1) - row->low];
        row->any_end = start[row->high + 1 - row->low];
    }
    double best = INFINITY;
    for (int n = least; n <= most; n++) {
        if (!exact && table->carry[n] < best) {
            best = table->carry[n];
            table->pool[table->pool_count++] = (struct search_point){best, n};
        }
        table->carry[n] = INFINITY;
    }
    if (!exact) row->any_end = (int)table->pool_count;
    return HAPT_OK;
}

static double best_latency(const struct search_table *table)
{
    const struct search_problem *problem = table->problem;
    const unsigned every = (1u << problem->C) - 1;
    double best = INFINITY;
    for (int g = 0; g < problem->valid_count; g++) {
        const struct search_suffix_state *state = &problem->suffix_state[g];
        if (problem->options->use_all_devices && state->mask != every) continue;
        const struct search_row *row = search_row(table, 0, search_suffix_state(problem, state->mask, state->current));
        for (int i = row ? row->any_first : 0; row && i < row->any_end; i++)
            if (table->pool[i].latency_s < best) best = table->pool[i].latency_s;
    }
    return best;
}

/* Collects the candidates of a layer and device set that stay within the budget with the least prefix and suffix at
 * their ends. */
static int find_close(const struct search_table *table, int k, int current, double least_prefix_s)
{
    const int list = k * table->problem->device_set_count + current;
    const double left_s = table->budget_s * (1 + SLACK) - least_prefix_s;
    int count = 0;
    for (int64_t i = table->active_first[list]; i < table->active_end[list]; i++) {
        const struct search_candidate *at = &table->active[i];
        if (at->time_s + table->least_behind_s[at->end] <= left_s) table->close[count++] = at;
    }
    return count;
}

static enum hapt_status fill_layer(struct search_table *table, int k, int current)
{
    const struct search_problem *problem = table->problem;
    double least_prefix_s = INFINITY;
    for (int g = 0; g < problem->valid_count; g++) {
        if (problem->suffix_state[g].current != current) continue;
        const struct search_row *row =
            search_row(table, k, search_suffix_state(problem, problem->suffix_state[g].mask, current));
        if (row && row->least_prefix_s < least_prefix_s) least_prefix_s = row->least_prefix_s;
    }
    const int count = isfinite(least_prefix_s) ? find_close(table, k, current, least_prefix_s) : 0;
    for (int g = 0; g < problem->valid_count; g++) {
        const unsigned mask = problem->suffix_state[g].mask;
        if (problem->suffix_state[g].current != current) continue;
        struct search_row *row = search_row(table, k, search_suffix_state(problem, mask, current));
        if (!row) continue;
        row->current = current;
        if (isfinite(row->least_prefix_s))
            for (int i = 0; i < count; i++) extend(table, table->close[i], row, mask);
        HAPT_TRY(store(table, row));
        if (row->start >= 0 && row->least_s < table->least_behind_s[k]) table->least_behind_s[k] = row->least_s;
    }
    return HAPT_OK;
}

/* Makes every point that a plan within the budget can contain. */
static enum hapt_status fill(struct search_table *table, double budget_s, double *latency_s)
{
    const struct search_problem *problem = table->problem;
    table->budget_s = budget_s * ROUNDING;
    table->pool_count = 0;
    for (int k = 0; k < problem->L; k++) table->least_behind_s[k] = INFINITY;
    table->least_behind_s[problem->L] = 0;
    for (int k = problem->L - 1; k >= 0; k--) {
        if (table->poll) table->poll(table->poll_context);
        for (int current = 0; current < problem->device_set_count; current++) HAPT_TRY(fill_layer(table, k, current));
    }
    table->effort.points += table->pool_count;
    *latency_s = best_latency(table);
    return HAPT_OK;
}

enum hapt_status search_table_reaches(struct search_table *table, double t_max_s, bool *reaches)
{
    const double start_s = hapt_time_s();
    const enum hapt_status status = search_bound_reach(table, t_max_s, reaches);
    table->effort.narrow_s += hapt_time_s() - start_s;
    return status;
}

/* Widens the budget from the least sum (only rounding) up to the caller's budget. */
static enum hapt_status widen(struct search_table *table, double least_s, double budget_s, bool whole,
                              double *latency_s)
{
    static const double slack[] = {0, 0.01, 0.04, 0.15, 0.5, INFINITY};
    for (int i = whole ? 5 : 0; i < 6; i++) {
        const double wider_s = isinf(slack[i]) ? budget_s : fmin(budget_s, least_s * (1 + slack[i]) + 1e-300);
        HAPT_TRY(fill(table, wider_s, latency_s));
        if (isfinite(*latency_s) || wider_s >= budget_s) break;
    }
    if (*latency_s > budget_s * ROUNDING) *latency_s = INFINITY;
    return HAPT_OK;
}

enum hapt_status search_table_fill(struct search_table *table, double t_max_s, double budget_s, bool whole,
                                   double *latency_s)
{
    bool reaches;
    double least_s;
    *latency_s = INFINITY;
    HAPT_TRY(search_table_reaches(table, t_max_s, &reaches));
    if (!reaches) return HAPT_OK;
    const double start_s = hapt_time_s();
    HAPT_TRY(search_bound_prefixes(table, &least_s));
    const double relaxed_s = hapt_time_s();
    table->effort.relax_s += relaxed_s - start_s;
    if (!isfinite(least_s) || least_s > budget_s * ROUNDING) return HAPT_OK;
    const enum hapt_status status = widen(table, least_s, budget_s, whole, latency_s);
    table->effort.exact_s += hapt_time_s() - relaxed_s;
    return status;
}
