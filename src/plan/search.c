/*
 * One pass of the DP (HAPT 5.2.1) for a given t_max, from the last layer to the first.
 *
 * Both the latency and the launch count of a suffix matter to what stands before it, so a state keeps every point that
 * no other beats in both. Points are extended as the paper's (14), (18) do; more than two subclusters and every order
 * of them come from the group. Rounding is monotone, so a larger t_max never yields a larger latency: search_mpi.c
 * relies on it.
 */
#include "search.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>

enum hapt_status search_table_init(const struct search_problem *problem, struct hapt_arena *arena,
                                   struct search_table *table)
{
    *table = (struct search_table){.problem = problem};
    int devices = 0;
    for (int c = 0; c < problem->C; c++)
        if (problem->devices[c] > devices) devices = problem->devices[c];
    const size_t rows = (size_t)problem->L * (size_t)problem->group_count;
    const size_t launches = (size_t)problem->most_launches + 1;
    HAPT_NEW(table->row, arena, rows);
    HAPT_NEW(table->delta, arena, (size_t)problem->C * (size_t)problem->C * (size_t)problem->L);
    HAPT_NEW(table->starts, arena, rows * ((size_t)devices + 2));
    HAPT_NEW(table->work, arena, ((size_t)devices + 1) * launches);
    HAPT_NEW(table->carry, arena, launches);
    HAPT_NEW(table->low, arena, devices + 1);
    HAPT_NEW(table->high, arena, devices + 1);
    for (size_t i = 0; i < ((size_t)devices + 1) * launches; i++) table->work[i] = INFINITY;
    for (int d = 0; d <= devices; d++) {
        table->low[d] = problem->most_launches + 1;
        table->high[d] = -1;
    }
    return HAPT_OK;
}

void search_table_release(struct search_table *table)
{
    free(table->pool);
    table->pool = NULL;
}

static void put(const struct search_table *table, int devices, int launches, double latency_s)
{
    double *cell = &table->work[(size_t)devices * (size_t)(table->problem->most_launches + 1) + (size_t)launches];
    if (latency_s < *cell) *cell = latency_s;
    if (launches < table->low[devices]) table->low[devices] = launches;
    if (launches > table->high[devices]) table->high[devices] = launches;
}

/* Stages before a suffix of the same subcluster. */
static void extend_same(const struct search_table *table, const struct search_candidate *at,
                        const struct search_row *after, int total, double cost_s, int delta)
{
    if (!after->start) return;
    for (int d = 1; d + at->devices <= total; d++) {
        for (int i = after->start[d]; i < after->start[d + 1]; i++) {
            const int launches = search_launches(table->problem, table->pool[i].launches, delta);
            if (launches <= at->launches) put(table, d + at->devices, launches, cost_s + table->pool[i].latency_s);
        }
    }
}

/* The last stage of its subcluster, before a suffix that starts in another. */
static void extend_other(const struct search_table *table, const struct search_candidate *at,
                         const struct search_row *after, double cost_s, int delta)
{
    for (int i = after->any_first; i < after->any_end; i++) {
        const int launches = search_launches(table->problem, table->pool[i].launches, delta);
        if (launches <= at->launches) put(table, at->devices, launches, cost_s + table->pool[i].latency_s);
    }
}

static void extend(const struct search_table *table, const struct search_candidate *at, unsigned mask, int current)
{
    const struct search_problem *problem = table->problem;
    const unsigned rest = mask & ~(1u << current);
    if (at->end == problem->L) {
        const int launches = problem->options->schedule == HAPT_SCHEDULE_GPIPE ? problem->B : 1;
        if (rest == 0 && launches <= at->launches) put(table, at->devices, launches, at->time_s);
        return;
    }
    const size_t link = search_link(problem, current, current, at->end - 1);
    if (table->delta[link] != UCHAR_MAX)
        extend_same(table, at, search_row(table, at->end, search_group(problem, mask, current)),
                    problem->devices[current], at->time_s + 2 * problem->comm_s[link], table->delta[link]);
    for (int next = 0; next < problem->C; next++) {
        if (!(rest >> next & 1u)) continue;
        const size_t over = search_link(problem, current, next, at->end - 1);
        if (table->delta[over] != UCHAR_MAX)
            extend_other(table, at, search_row(table, at->end, search_group(problem, rest, next)),
                         at->time_s + 2 * problem->comm_s[over], table->delta[over]);
    }
}

static enum hapt_status reserve(struct search_table *table, int64_t more)
{
    if (table->pool_count + more <= table->pool_room) return HAPT_OK;
    const int64_t room = 2 * table->pool_room + more + 4096;
    struct search_point *pool = room > INT32_MAX ? NULL : realloc(table->pool, (size_t)room * sizeof *pool);
    if (!pool)
        return hapt_fail(HAPT_ERR_MEMORY, "plan with fewer layers (--layers-per-model)", "the search needs %lld states",
                         (long long)room);
    table->pool = pool;
    table->pool_room = room;
    return HAPT_OK;
}

/* Keeps the points that no point with as few devices and launches beats, and empties the work table. */
static enum hapt_status store(struct search_table *table, struct search_row *row, int *start, int total)
{
    const int launches = table->problem->most_launches + 1;
    const bool exact = table->problem->options->use_all_devices;
    for (int n = 0; n < launches; n++) table->carry[n] = INFINITY;
    const int64_t first = table->pool_count;
    for (int d = 0; d <= total; d++) {
        start[d] = (int)table->pool_count;
        if (table->high[d] < 0) continue;
        double *work = &table->work[(size_t)d * (size_t)launches];
        HAPT_TRY(reserve(table, table->high[d] - table->low[d] + 1));
        double best = INFINITY;
        for (int n = table->low[d]; n <= table->high[d]; n++) {
            if (!exact && table->carry[n] < best) best = table->carry[n];
            if (work[n] < best) {
                best = work[n];
                table->pool[table->pool_count++] = (struct search_point){best, n};
            }
            work[n] = INFINITY;
        }
        for (int64_t i = start[d]; i < table->pool_count; i++)
            for (int n = table->pool[i].launches; n < launches && table->pool[i].latency_s < table->carry[n]; n++)
                table->carry[n] = table->pool[i].latency_s;
        table->low[d] = launches;
        table->high[d] = -1;
    }
    start[total + 1] = (int)table->pool_count;
    row->start = table->pool_count > first ? start : NULL;
    row->any_first = row->any_end = (int)table->pool_count;
    if (!row->start) return HAPT_OK;
    if (exact) { /* what hands over must have used everything */
        row->any_first = start[total];
        row->any_end = start[total + 1];
        return HAPT_OK;
    }
    HAPT_TRY(reserve(table, launches));
    double best = INFINITY;
    for (int n = 0; n < launches; n++) {
        if (!(table->carry[n] < best)) continue;
        best = table->carry[n];
        table->pool[table->pool_count++] = (struct search_point){best, n};
    }
    row->any_end = (int)table->pool_count;
    return HAPT_OK;
}

static void find_deltas(struct search_table *table)
{
    const struct search_problem *problem = table->problem;
    const struct hapt_search_options *options = problem->options;
    const size_t count = (size_t)problem->C * (size_t)problem->C * (size_t)problem->L;
    for (size_t i = 0; i < count; i++) {
        const double comm_s = problem->comm_s[i];
        table->delta[i] =
            hapt_at_most(comm_s, table->t_max_s)
                ? (unsigned char)hapt_schedule_delta(options->schedule, comm_s, table->t_max_s, options->hide_threshold)
                : UCHAR_MAX;
    }
}

static double best_latency(const struct search_table *table)
{
    const struct search_problem *problem = table->problem;
    const unsigned every = (1u << problem->C) - 1;
    double best = INFINITY;
    for (unsigned mask = problem->options->use_all_devices ? every : 1; mask <= every; mask++) {
        for (int current = 0; current < problem->C; current++) {
            if (!(mask >> current & 1u)) continue;
            const struct search_row *row = search_row(table, 0, search_group(problem, mask, current));
            for (int i = row->any_first; i < row->any_end; i++)
                if (table->pool[i].latency_s < best) best = table->pool[i].latency_s;
        }
    }
    return best;
}

enum hapt_status search_table_fill(struct search_table *table, double t_max_s, double *latency_s)
{
    const struct search_problem *problem = table->problem;
    int *start = table->starts;
    table->t_max_s = t_max_s;
    table->pool_count = 0;
    find_deltas(table);
    for (int layer = problem->L - 1; layer >= 0; layer--) {
        for (unsigned mask = 1; mask < 1u << problem->C; mask++) {
            for (int current = 0; current < problem->C; current++) {
                if (!(mask >> current & 1u)) continue;
                const int list = current * problem->L + layer;
                const struct search_candidate *candidate = problem->candidate[list];
                for (int i = 0; i < problem->candidate_count[list] && hapt_at_most(candidate[i].time_s, t_max_s); i++)
                    extend(table, &candidate[i], mask, current);
                struct search_row *row = search_row(table, layer, search_group(problem, mask, current));
                HAPT_TRY(store(table, row, start, problem->devices[current]));
                if (row->start) start += problem->devices[current] + 2;
            }
        }
    }
    *latency_s = best_latency(table);
    return HAPT_OK;
}
