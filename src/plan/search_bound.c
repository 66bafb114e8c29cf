/*
 * What bounds a pass before it makes any point: which candidates and which states can lie on a plan of this pace at
 * all, and how little the prefix in front of a state costs.
 *
 * All bounds are relaxations: dropping what they exclude changes no result.
 *   launches: no stage launches less than the cheapest way to the last layer asks for, devices aside (HAPT 5.2.1's
 * eta); reach: a prefix and a suffix must meet, so devices not yet used must suffice for the layers in front; prefixes:
 * the least sum over plans of the prefix without launch counts.
 */
#include "search.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>

#ifdef __x86_64__
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE
#endif

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

/* The fewest launches of a stage of subcluster c that ends at `end`. */
static int least_behind(const struct search_table *table, int c, int end)
{
    const struct search_problem *problem = table->problem;
    int least = INT_MAX;
    if (end == problem->L) return 1;
    for (int next = 0; next < problem->C; next++) {
        const int after = table->least_launches[end * problem->C + next];
        const int delta = table->delta[search_link(problem, c, next, end - 1)];
        if (after == INT_MAX || delta == UCHAR_MAX) continue;
        const int launches = search_launches(problem, after, delta);
        if (launches < least) least = launches;
    }
    return least;
}

/* Candidates of layer k and subcluster c to start from. */
static const struct search_candidate *source(const struct search_table *table, int k, int c, int64_t *count)
{
    const struct search_problem *problem = table->problem;
    const int list = k * problem->C + c;
    if (table->t_max_s <= table->ceiling_s && !isinf(table->ceiling_s)) {
        *count = table->ceiling_end[list] - table->ceiling_first[list];
        return table->ceiling + table->ceiling_first[list];
    }
    *count = problem->candidate_count[c * problem->L + k];
    return problem->candidate[c * problem->L + k];
}

/* The candidates that are fast enough and fit the launches that the layers behind them ask for. */
static void narrow(struct search_table *table)
{
    const struct search_problem *problem = table->problem;
    const int C = problem->C, L = problem->L;
    const double fast_s = table->t_max_s * (1 - 1e-9); /* certainly at most t_max */
    int64_t last = problem->all_candidates;            /* filled from the back: the last layers first */
    for (int k = L - 1; k >= 0; k--) {
        /* what a stage that ends at k + 1 needs, by its subcluster; all stages behind are known */
        for (int c = 0; c < C; c++) table->behind[(k + 1) * C + c] = least_behind(table, c, k + 1);
        for (int c = C - 1; c >= 0; c--) {
            const int list = k * C + c;
            int64_t count;
            const struct search_candidate *all = source(table, k, c, &count);
            int least = INT_MAX;
            table->active_end[list] = last;
            for (int64_t i = count - 1; i >= 0; i--) {
                if (all[i].time_s > fast_s && !hapt_at_most(all[i].time_s, table->t_max_s)) continue;
                const int behind = table->behind[all[i].end * C + c];
                if (behind > all[i].launches) continue;
                table->active[--last] = all[i];
                if (behind < least) least = behind;
            }
            table->active_first[list] = last;
            table->least_launches[list] = least;
        }
    }
}

static void swap_lists(int64_t **a, int64_t **b)
{
    int64_t *kept = *a;
    *a = *b;
    *b = kept;
}

void search_table_keep(struct search_table *table)
{
    struct search_candidate *kept = table->active;
    table->active = table->ceiling;
    table->ceiling = kept;
    swap_lists(&table->active_first, &table->ceiling_first);
    swap_lists(&table->active_end, &table->ceiling_end);
    table->ceiling_s = table->t_max_s;
}

void search_table_forget(struct search_table *table)
{
    table->ceiling_s = INFINITY;
}

/* Furthest ends by start and nearest starts by end, for each subcluster and class of device counts. */
static void find_spans(struct search_table *table)
{
    const struct search_problem *problem = table->problem;
    const int C = problem->C, L = problem->L, K = problem->class_count;
    int *furthest = table->furthest, *nearest = table->nearest;
    for (int64_t i = 0; i < (int64_t)K * (L + 1); i++) {
        furthest[i] = -1;
        nearest[i] = L + 1;
    }
    for (int k = 0; k < L; k++) {
        for (int c = 0; c < C; c++) {
            for (int64_t i = table->active_first[k * C + c]; i < table->active_end[k * C + c]; i++) {
                const struct search_candidate *at = &table->active[i];
                const int class = problem->class_of[c][at->submesh], end = at->end;
                if (end > furthest[class * (L + 1) + k]) furthest[class * (L + 1) + k] = end;
                if (k < nearest[class * (L + 1) + end]) nearest[class * (L + 1) + end] = k;
            }
        }
    }
    /* no state is worse off for standing nearer to its goal: prefixes end at or behind, suffixes start at or before */
    for (int class = 0; class < K; class ++) {
        int *far = &furthest[class * (L + 1)], *near = &nearest[class * (L + 1)];
        for (int k = 1; k <= L; k++)
            if (far[k - 1] > far[k]) far[k] = far[k - 1];
        for (int k = L - 1; k >= 0; k--)
            if (near[k + 1] < near[k]) near[k] = near[k + 1];
    }
}

/* [group][d]: the first layer that a suffix of the group can start at with at most d devices of its first subcluster.
 */
static void reach_backwards(struct search_table *table, bool *reaches)
{
    const struct search_problem *problem = table->problem;
    const int C = problem->C, L = problem->L, width = problem->most_devices + 1;
    *reaches = false;
    for (int g = 0; g < problem->valid_count; g++) {
        const unsigned mask = problem->group[g].mask;
        const int current = problem->group[g].current;
        const unsigned rest = mask & ~(1u << current);
        int *reach = &table->suffix_reach[search_group(problem, mask, current) * (size_t)width];
        int behind = rest ? L + 1 : L; /* where the stages of `current` may end */
        for (int next = 0; next < C; next++)
            if (problem->valid[search_group(problem, rest, next)]) {
                const int at = table->suffix_reach[search_group(problem, rest, next) * (size_t)width +
                                                   (size_t)problem->devices[next]];
                if (at < behind) behind = at;
            }
        for (int d = 0; d <= problem->devices[current]; d++) {
            reach[d] = d > 0 ? reach[d - 1] : L + 1;
            for (int class = problem->first_class[current]; class < problem->first_class[current + 1]; class ++) {
                const int left = d - problem->class_devices[class];
                if (left < 0) break;
                const int *near = &table->nearest[class * (L + 1)];
                if (behind <= L && near[behind] < reach[d]) reach[d] = near[behind];
                if (left > 0 && reach[left] <= L && near[reach[left]] < reach[d]) reach[d] = near[reach[left]];
            }
        }
        *reaches |= reach[problem->devices[current]] == 0;
    }
}

/* [group][r]: the last layer that a prefix can end at, in front of a suffix of the group, with r devices of its first
 * subcluster still free. */
static void reach_forwards(struct search_table *table)
{
    const struct search_problem *problem = table->problem;
    const int C = problem->C, L = problem->L, width = problem->most_devices + 1;
    for (int g = problem->valid_count - 1; g >= 0; g--) {
        const unsigned mask = problem->group[g].mask;
        const int current = problem->group[g].current;
        int *reach = &table->prefix_reach[search_group(problem, mask, current) * (size_t)width];
        int before = 0; /* where the stages of `current` may start */
        for (int last = 0; last < C; last++) {
            if (mask >> last & 1u || !problem->valid[search_group(problem, mask | 1u << last, last)]) continue;
            const int *there = &table->prefix_reach[search_group(problem, mask | 1u << last, last) * (size_t)width];
            for (int class = problem->first_class[last]; class < problem->first_class[last + 1]; class ++) {
                const int left = problem->devices[last] - problem->class_devices[class];
                if (left < 0) break;
                const int far = table->furthest[class * (L + 1) + there[left]];
                if (far > before) before = far;
            }
        }
        for (int r = 0; r <= problem->devices[current]; r++) {
            reach[r] = r > 0 ? reach[r - 1] : before;
            for (int class = problem->first_class[current]; class < problem->first_class[current + 1]; class ++) {
                const int left = r - problem->class_devices[class];
                if (left < 0) break;
                const int far = table->furthest[class * (L + 1) + reach[left]];
                if (far > reach[r]) reach[r] = far;
            }
        }
    }
}

enum hapt_status search_bound_reach(struct search_table *table, double t_max_s, bool *reaches)
{
    table->t_max_s = t_max_s;
    find_deltas(table);
    narrow(table);
    find_spans(table);
    reach_backwards(table, reaches);
    return HAPT_OK;
}

/* Layers [*low, *high] at which a suffix of the group and a prefix in front of it can meet. */
static void meeting_layers(const struct search_table *table, size_t group, int devices, int *low, int *high)
{
    const int width = table->problem->most_devices + 1;
    const int *suffix = &table->suffix_reach[group * (size_t)width],
              *prefix = &table->prefix_reach[group * (size_t)width];
    *low = INT_MAX;
    *high = -1;
    for (int d = 1; d <= devices; d++) {
        const int first = suffix[d];
        int last = prefix[devices - d];
        if (last > table->problem->L - 1) last = table->problem->L - 1;
        if (first > last) continue;
        if (first < *low) *low = first;
        if (last > *high) *high = last;
    }
}

static enum hapt_status no_memory(int64_t count)
{
    return hapt_fail(HAPT_ERR_MEMORY, "plan with fewer layers (--layers-per-model), or with --gap",
                     "the search needs %lld states", (long long)count);
}

static enum hapt_status reserve_rows(struct search_table *table, int64_t count)
{
    if (count <= table->row_room) return HAPT_OK;
    free(table->row);
    free(table->handover_s);
    table->row_room = 0;
    table->row = malloc((size_t)count * sizeof *table->row);
    table->handover_s = malloc((size_t)count * sizeof *table->handover_s);
    if (!table->row || !table->handover_s) return no_memory(count);
    table->row_room = count;
    return HAPT_OK;
}

static enum hapt_status reserve_cells(struct search_table *table, int64_t count)
{
    if (count <= table->cell_room) return HAPT_OK;
    free(table->prefix_s);
    free(table->starts);
    table->cell_room = 0;
    count += count / 4;
    table->prefix_s = malloc((size_t)count * sizeof *table->prefix_s);
    table->starts = malloc((size_t)count * sizeof *table->starts);
    if (!table->prefix_s || !table->starts) return no_memory(count);
    table->cell_room = count;
    return HAPT_OK;
}

/* The devices d with which a suffix from layer k and a prefix up to it can meet. */
static void fill_row(const struct search_table *table, size_t group, int devices, int k, struct search_row *row)
{
    const int width = table->problem->most_devices + 1;
    const int *suffix = &table->suffix_reach[group * (size_t)width],
              *prefix = &table->prefix_reach[group * (size_t)width];
    int low = 1, high = devices;
    while (low <= devices && suffix[low] > k) low++;
    while (high >= low && prefix[devices - high] < k) high--;
    *row = (struct search_row){.low = low, .high = high, .start = -1};
}

static enum hapt_status lay_rows(struct search_table *table)
{
    const struct search_problem *problem = table->problem;
    int64_t rows = 0, cells = 0;
    for (int group = 0; group < problem->group_count; group++) {
        const int current = group % problem->C;
        table->group_low[group] = 0;
        table->group_high[group] = -1;
        if (!problem->valid[group]) continue;
        meeting_layers(table, (size_t)group, problem->devices[current], &table->group_low[group],
                       &table->group_high[group]);
        table->group_row[group] = rows;
        if (table->group_low[group] <= table->group_high[group])
            rows += table->group_high[group] - table->group_low[group] + 1;
    }
    HAPT_TRY(reserve_rows(table, rows));
    table->row_count = rows;
    for (int group = 0; group < problem->group_count; group++) {
        for (int k = table->group_low[group]; k <= table->group_high[group]; k++) {
            struct search_row *row = &table->row[table->group_row[group] + (k - table->group_low[group])];
            fill_row(table, (size_t)group, problem->devices[group % problem->C], k, row);
            row->cell = cells;
            if (row->low <= row->high) cells += row->high - row->low + 2; /* starts have one more */
        }
    }
    HAPT_TRY(reserve_cells(table, cells));
    table->cell_count = cells;
    return HAPT_OK;
}

WIDE static void lower(double *restrict to, const double *restrict from, double more_s, int count)
{
#pragma omp simd
    for (int i = 0; i < count; i++) {
        const double sum_s = from[i] + more_s;
        to[i] = sum_s < to[i] ? sum_s : to[i];
    }
}

/* A stage of layers [k, end) behind the prefixes of a row, the next stage in the same subcluster. */
static void extend_same(const struct search_table *table, const struct search_candidate *at,
                        const struct search_row *row, size_t group, double cost_s)
{
    const struct search_row *to = search_row(table, at->end, group);
    if (!to) return;
    const int low = row->low > to->low + at->devices ? row->low : to->low + at->devices;
    const int high = row->high < to->high + at->devices ? row->high : to->high + at->devices;
    if (low > high) return;
    lower(&table->prefix_s[to->cell + (low - at->devices - to->low)], &table->prefix_s[row->cell + (low - row->low)],
          cost_s, high - low + 1);
}

static void extend_prefixes(const struct search_table *table, int k, unsigned mask, int current, double *least_s)
{
    const struct search_problem *problem = table->problem;
    const size_t group = search_group(problem, mask, current);
    const struct search_row *row = search_row(table, k, group);
    const unsigned rest = mask & ~(1u << current);
    const int list = k * problem->C + current;
    for (int64_t i = table->active_first[list]; i < table->active_end[list]; i++) {
        const struct search_candidate *at = &table->active[i];
        /* the sum of all that stands before the last stage of `current`, which uses its devices alone */
        const bool within = at->devices >= row->low && at->devices <= row->high;
        const double before_s = within ? table->prefix_s[row->cell + (at->devices - row->low)] : INFINITY;
        if (at->end == problem->L) {
            if (rest == 0 && before_s + at->time_s < *least_s) *least_s = before_s + at->time_s;
            continue;
        }
        const size_t link = search_link(problem, current, current, at->end - 1);
        if (table->delta[link] != UCHAR_MAX) extend_same(table, at, row, group, at->time_s + 2 * problem->comm_s[link]);
        if (!isfinite(before_s)) continue;
        for (int next = 0; next < problem->C; next++) {
            if (!(rest >> next & 1u)) continue;
            const size_t over = search_link(problem, current, next, at->end - 1);
            const struct search_row *to = search_row(table, at->end, search_group(problem, rest, next));
            if (!to || table->delta[over] == UCHAR_MAX) continue;
            double *least = &table->handover_s[to - table->row];
            *least = fmin(*least, before_s + (at->time_s + 2 * problem->comm_s[over]));
        }
    }
}

/* Prefixes that end in another subcluster leave this one untouched. */
static void take_handover(const struct search_table *table, struct search_row *row, int devices)
{
    const double handover_s = table->handover_s[row - table->row];
    double least_s = INFINITY;
    for (int d = row->low; d <= row->high; d++) {
        double *cell = &table->prefix_s[row->cell + (d - row->low)];
        const bool whole = !table->problem->options->use_all_devices || d == devices;
        if (whole && handover_s < *cell) *cell = handover_s;
        if (*cell < least_s) least_s = *cell;
    }
    row->least_prefix_s = least_s;
}

enum hapt_status search_bound_prefixes(struct search_table *table, double *least_s)
{
    const struct search_problem *problem = table->problem;
    const unsigned every = (1u << problem->C) - 1;
    *least_s = INFINITY;
    reach_forwards(table);
    HAPT_TRY(lay_rows(table));
    for (int64_t i = 0; i < table->cell_count; i++) table->prefix_s[i] = INFINITY;
    for (int64_t i = 0; i < table->row_count; i++) table->handover_s[i] = INFINITY;
    for (int k = 0; k < problem->L; k++) {
        if (table->poll) table->poll(table->poll_context);
        for (int g = problem->valid_count - 1; g >= 0; g--) {
            const unsigned mask = problem->group[g].mask;
            const int current = problem->group[g].current;
            struct search_row *row = search_row(table, k, search_group(problem, mask, current));
            if (!row) continue;
            /* the empty prefix; where every device must be used, what it leaves is everything */
            if (k == 0 && (!problem->options->use_all_devices || mask == every))
                table->handover_s[row - table->row] = 0;
            take_handover(table, row, problem->devices[current]);
            if (isfinite(row->least_prefix_s)) extend_prefixes(table, k, mask, current, least_s);
        }
    }
    table->effort.cells += table->cell_count;
    return HAPT_OK;
}
