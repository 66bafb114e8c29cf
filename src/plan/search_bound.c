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

/* Clones are chosen by functions that run before ThreadSanitizer is ready for them. */
#if defined __x86_64__ && !defined __SANITIZE_THREAD__
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE
#endif

static void find_deltas(struct search_table *table)
{
    const struct search_problem *problem = table->problem;
    const struct hapt_search_options *options = problem->options;
    const size_t count = (size_t)problem->P * (size_t)problem->P * (size_t)problem->L;
    for (size_t i = 0; i < count; i++) {
        const double comm_s = problem->comm_s[i];
        table->delta[i] =
            hapt_at_most(comm_s, table->t_max_s)
                ? (unsigned char)hapt_schedule_delta(options->schedule, comm_s, table->t_max_s, options->hide_threshold)
                : UCHAR_MAX;
    }
}

/* The fewest launches of a stage at place p that ends at `end`. */
static int least_behind(const struct search_table *table, int p, int end)
{
    const struct search_problem *problem = table->problem;
    int least = INT_MAX;
    if (end == problem->L) return 1;
    for (int next = 0; next < problem->P; next++) {
        const int after = table->least_launches[end * problem->P + next];
        const int delta = table->delta[search_link(problem, p, next, end - 1)];
        if (after == INT_MAX || delta == UCHAR_MAX) continue;
        const int launches = search_launches(problem, after, delta);
        if (launches < least) least = launches;
    }
    return least;
}

/* Candidates of layer k and place p to start from. */
static const struct search_candidate *source(const struct search_table *table, int k, int p, int64_t *count)
{
    const struct search_problem *problem = table->problem;
    const int list = k * problem->P + p;
    if (table->t_max_s <= table->ceiling_s && !isinf(table->ceiling_s)) {
        *count = table->ceiling_end[list] - table->ceiling_first[list];
        return table->ceiling + table->ceiling_first[list];
    }
    *count = problem->candidate_count[p * problem->L + k];
    return problem->candidate[p * problem->L + k];
}

/* The candidates that are fast enough and fit the launches that the layers behind them ask for. */
static void narrow(struct search_table *table)
{
    const struct search_problem *problem = table->problem;
    const int P = problem->P, L = problem->L;
    const double fast_s = table->t_max_s * (1 - 1e-9); /* certainly at most t_max */
    int64_t last = problem->all_candidates;            /* filled from the back: the last layers first */
    for (int k = L - 1; k >= 0; k--) {
        /* what a stage that ends at k + 1 needs, by its place; all stages behind are known */
        for (int p = 0; p < P; p++) table->behind[(k + 1) * P + p] = least_behind(table, p, k + 1);
        for (int p = P - 1; p >= 0; p--) {
            const int list = k * P + p;
            int64_t count;
            const struct search_candidate *all = source(table, k, p, &count);
            int least = INT_MAX;
            table->active_end[list] = last;
            for (int64_t i = count - 1; i >= 0; i--) {
                if (all[i].time_s > fast_s && !hapt_at_most(all[i].time_s, table->t_max_s)) continue;
                const int behind = table->behind[all[i].end * P + p];
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

/* Furthest ends by start and nearest starts by end, for each place and class of device counts. */
static void find_spans(struct search_table *table)
{
    const struct search_problem *problem = table->problem;
    const int P = problem->P, L = problem->L, K = problem->class_count;
    int *furthest = table->furthest, *nearest = table->nearest;
    for (int64_t i = 0; i < (int64_t)K * (L + 1); i++) {
        furthest[i] = -1;
        nearest[i] = L + 1;
    }
    for (int k = 0; k < L; k++) {
        for (int p = 0; p < P; p++) {
            for (int64_t i = table->active_first[k * P + p]; i < table->active_end[k * P + p]; i++) {
                const struct search_candidate *at = &table->active[i];
                const int class = problem->class_of[p][at->submesh], end = at->end;
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

static int *reach_of(const struct search_table *table, int *reach, unsigned mask, int place)
{
    return &reach[search_group(table->problem, mask, place) * (size_t)(table->problem->most_devices + 1)];
}

/* Where the stages of the group's first place may end: a suffix that shares nothing, or only the subcluster of which a
 * mixed stage takes its part, starts there. L + 1: nowhere. */
static int nearest_behind(const struct search_table *table, unsigned mask, int current)
{
    const struct search_problem *problem = table->problem;
    const bool mixed = problem->place[current].group >= 0;
    int behind = mask == problem->place[current].clusters && problem->place[current].ends ? problem->L : problem->L + 1;
    for (int next = 0; next < problem->P; next++) {
        const int joint = search_joint(problem, current, next);
        const unsigned rest = search_rest(problem, mask, current, joint);
        if (joint == SEARCH_NEVER || (joint >= 0 && !mixed) || !problem->valid[search_group(problem, rest, next)])
            continue;
        const int left = joint >= 0 ? search_left(problem, current, joint) : search_front_devices(problem, next);
        const int at = reach_of(table, table->suffix_reach, rest, next)[left];
        if (at < behind) behind = at;
    }
    return behind;
}

/* The first layer that a suffix can start at with `left` devices of subcluster `front`, of which stages in front have
 * more. */
static int nearest_same(const struct search_table *table, unsigned mask, int front, int left)
{
    const struct search_problem *problem = table->problem;
    int nearest = reach_of(table, table->suffix_reach, mask, front)[left];
    for (int next = problem->C; next < problem->P; next++) {
        if (search_joint(problem, front, next) != front || !problem->valid[search_group(problem, mask, next)]) continue;
        const int at = reach_of(table, table->suffix_reach, mask, next)[left];
        if (at < nearest) nearest = at;
    }
    return nearest;
}

/* [group][d]: the first layer that a suffix of the group can start at with at most d devices of its front subcluster.
 */
static void reach_backwards(struct search_table *table, bool *reaches)
{
    const struct search_problem *problem = table->problem;
    const int L = problem->L;
    *reaches = false;
    for (int g = 0; g < problem->valid_count; g++) {
        const unsigned mask = problem->group[g].mask;
        const int current = problem->group[g].current, devices = search_front_devices(problem, current);
        const bool mixed = problem->place[current].group >= 0;
        int *reach = reach_of(table, table->suffix_reach, mask, current);
        const int behind = nearest_behind(table, mask, current);
        for (int d = 0; d <= devices; d++) {
            reach[d] = d > 0 ? reach[d - 1] : L + 1;
            for (int class = problem->first_class[current]; class < problem->first_class[current + 1]; class ++) {
                const int left = d - problem->class_devices[class];
                if (left < 0) break;
                const int *near = &table->nearest[class * (L + 1)];
                if (behind <= L && near[behind] < reach[d]) reach[d] = near[behind];
                const int same = left > 0 && !mixed ? nearest_same(table, mask, current, left) : L + 1;
                if (same <= L && near[same] < reach[d]) reach[d] = near[same];
            }
        }
        *reaches |= reach[devices] == 0;
    }
}

/* Where a prefix can end at most whose last stage is a mixed one in front of the group, and shares `wanted` with it. */
static int furthest_mixed(const struct search_table *table, unsigned mask, int current, int wanted, int devices)
{
    const struct search_problem *problem = table->problem;
    const int L = problem->L;
    int furthest = 0;
    for (int last = problem->C; last < problem->P; last++) {
        const int joint = search_joint(problem, last, current);
        const unsigned more = mask | problem->place[last].clusters, shared = joint >= 0 ? 1u << joint : 0;
        if (joint != wanted || (problem->place[last].clusters & mask) != shared) continue;
        if (!problem->valid[search_group(problem, more, last)]) continue;
        if (joint >= 0 && problem->taken[last * problem->C + joint] > devices) continue;
        const int class = problem->first_class[last];
        const int left = search_front_devices(problem, last) - problem->class_devices[class];
        const int far = table->furthest[class * (L + 1) + reach_of(table, table->prefix_reach, more, last)[left]];
        if (far > furthest) furthest = far;
    }
    return furthest;
}

/* The same for the last stage of another subcluster. */
static int furthest_other(const struct search_table *table, unsigned mask, int current)
{
    const struct search_problem *problem = table->problem;
    const int L = problem->L;
    int furthest = 0;
    for (int last = 0; last < problem->C; last++) {
        if (mask >> last & 1u || !problem->valid[search_group(problem, mask | 1u << last, last)]) continue;
        if (search_joint(problem, last, current) != SEARCH_APART) continue;
        const int *there = reach_of(table, table->prefix_reach, mask | 1u << last, last);
        for (int class = problem->first_class[last]; class < problem->first_class[last + 1]; class ++) {
            const int left = problem->devices[last] - problem->class_devices[class];
            if (left < 0) break;
            const int far = table->furthest[class * (L + 1) + there[left]];
            if (far > furthest) furthest = far;
        }
    }
    return furthest;
}

/* [group][r]: the last layer that a prefix can end at, in front of a suffix of the group, with r devices of its front
 * subcluster still free. */
static void reach_forwards(struct search_table *table)
{
    const struct search_problem *problem = table->problem;
    const int L = problem->L;
    for (int g = problem->valid_count - 1; g >= 0; g--) {
        const unsigned mask = problem->group[g].mask;
        const int current = problem->group[g].current, front = problem->place[current].front;
        int *reach = reach_of(table, table->prefix_reach, mask, current);
        /* with stages of the front subcluster in front; of one mask those groups come first here */
        const int *same = reach_of(table, table->prefix_reach, mask, front);
        int before = furthest_other(table, mask, current);
        const int apart = furthest_mixed(table, mask, current, SEARCH_APART, 0);
        if (apart > before) before = apart;
        for (int r = 0; r <= problem->devices[front]; r++) {
            reach[r] = r > 0 ? reach[r - 1] : before;
            for (int class = problem->first_class[front]; class < problem->first_class[front + 1]; class ++) {
                const int left = r - problem->class_devices[class];
                if (left < 0) break;
                const int far = table->furthest[class * (L + 1) + same[left]];
                if (far > reach[r]) reach[r] = far;
            }
            const int joined = problem->P > problem->C ? furthest_mixed(table, mask, current, front, r) : 0;
            if (joined > reach[r]) reach[r] = joined;
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

/* The devices [*low, *high] of its front subcluster that a suffix of the group may use. */
static void front_range(const struct search_problem *problem, size_t group, int *low, int *high)
{
    const int current = (int)(group % (size_t)problem->P), class = problem->first_class[current];
    const bool mixed = problem->place[current].group >= 0;
    *low = mixed ? problem->class_devices[class] : 1;
    *high = mixed ? problem->class_devices[class] : problem->devices[current];
}

/* Layers [*low, *high] at which a suffix of the group and a prefix in front of it can meet. */
static void meeting_layers(const struct search_table *table, size_t group, int *low, int *high)
{
    const int devices = search_front_devices(table->problem, (int)(group % (size_t)table->problem->P));
    const int width = table->problem->most_devices + 1;
    const int *suffix = &table->suffix_reach[group * (size_t)width],
              *prefix = &table->prefix_reach[group * (size_t)width];
    int least, most;
    front_range(table->problem, group, &least, &most);
    *low = INT_MAX;
    *high = -1;
    for (int d = least; d <= most; d++) {
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
static void fill_row(const struct search_table *table, size_t group, int k, struct search_row *row)
{
    const int devices = search_front_devices(table->problem, (int)(group % (size_t)table->problem->P));
    const int width = table->problem->most_devices + 1;
    const int *suffix = &table->suffix_reach[group * (size_t)width],
              *prefix = &table->prefix_reach[group * (size_t)width];
    int low, high;
    front_range(table->problem, group, &low, &high);
    while (low <= high && suffix[low] > k) low++;
    while (high >= low && prefix[devices - high] < k) high--;
    *row = (struct search_row){.low = low, .high = high, .start = -1};
}

static enum hapt_status lay_rows(struct search_table *table)
{
    const struct search_problem *problem = table->problem;
    int64_t rows = 0, cells = 0;
    for (int group = 0; group < problem->group_count; group++) {
        table->group_low[group] = 0;
        table->group_high[group] = -1;
        if (!problem->valid[group]) continue;
        meeting_layers(table, (size_t)group, &table->group_low[group], &table->group_high[group]);
        table->group_row[group] = rows;
        if (table->group_low[group] <= table->group_high[group])
            rows += table->group_high[group] - table->group_low[group] + 1;
    }
    HAPT_TRY(reserve_rows(table, rows));
    table->row_count = rows;
    for (int group = 0; group < problem->group_count; group++) {
        for (int k = table->group_low[group]; k <= table->group_high[group]; k++) {
            struct search_row *row = &table->row[table->group_row[group] + (k - table->group_low[group])];
            fill_row(table, (size_t)group, k, row);
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

/* A stage of layers [k, end) behind the prefixes of a row, the next stage at `next` using the same subcluster. */
static void extend_same(const struct search_table *table, const struct search_candidate *at,
                        const struct search_row *row, unsigned mask, int next)
{
    const struct search_problem *problem = table->problem;
    const size_t link = search_link(problem, row->current, next, at->end - 1);
    const struct search_row *to = search_row(table, at->end, search_group(problem, mask, next));
    if (!to || table->delta[link] == UCHAR_MAX) return;
    const double cost_s = at->time_s + 2 * problem->comm_s[link];
    const int low = row->low > to->low + at->devices ? row->low : to->low + at->devices;
    const int high = row->high < to->high + at->devices ? row->high : to->high + at->devices;
    if (low > high) return;
    lower(&table->prefix_s[to->cell + (low - at->devices - to->low)], &table->prefix_s[row->cell + (low - row->low)],
          cost_s, high - low + 1);
}

/* The last stage to use the front subcluster, or a mixed one that leaves `left` devices of the next one's: `before_s`
 * is the sum of all in front of it. */
static void extend_other(const struct search_table *table, const struct search_candidate *at,
                         const struct search_row *row, unsigned mask, int next, double before_s)
{
    const struct search_problem *problem = table->problem;
    const int joint = search_joint(problem, row->current, next);
    const size_t link = search_link(problem, row->current, next, at->end - 1);
    if (joint == SEARCH_NEVER || table->delta[link] == UCHAR_MAX) return;
    const unsigned rest = search_rest(problem, mask, row->current, joint);
    const struct search_row *to = search_row(table, at->end, search_group(problem, rest, next));
    if (!to) return;
    const double sum_s = before_s + (at->time_s + 2 * problem->comm_s[link]);
    if (joint < 0) {
        double *least = &table->handover_s[to - table->row];
        *least = fmin(*least, sum_s);
        return;
    }
    const int left = search_left(problem, row->current, joint), high = to->high < left ? to->high : left;
    for (int d = to->low; d <= high; d++) {
        double *least = &table->prefix_s[to->cell + (d - to->low)];
        if (!problem->options->use_all_devices || d == left) *least = fmin(*least, sum_s);
    }
}

static void extend_prefixes(const struct search_table *table, int k, unsigned mask, int current, double *least_s)
{
    const struct search_problem *problem = table->problem;
    const struct search_row *row = search_row(table, k, search_group(problem, mask, current));
    const struct search_place *place = &problem->place[current];
    const bool mixed = place->group >= 0;
    const unsigned rest = mask & ~place->clusters;
    const int list = k * problem->P + current;
    for (int64_t i = table->active_first[list]; i < table->active_end[list]; i++) {
        const struct search_candidate *at = &table->active[i];
        /* the sum of all that stands before the last stage of `current`, which uses its devices alone */
        const bool within = at->devices >= row->low && at->devices <= row->high;
        const double before_s = within ? table->prefix_s[row->cell + (at->devices - row->low)] : INFINITY;
        if (at->end == problem->L) {
            if (rest == 0 && place->ends && before_s + at->time_s < *least_s) *least_s = before_s + at->time_s;
            continue;
        }
        if (!mixed) extend_same(table, at, row, mask, current);
        for (int next = problem->C; !mixed && next < problem->P; next++)
            if (search_joint(problem, current, next) == current) extend_same(table, at, row, mask, next);
        if (!isfinite(before_s)) continue;
        for (int next = 0; next < problem->C; next++)
            if (mixed || rest >> next & 1u) extend_other(table, at, row, mask, next, before_s);
        for (int next = problem->C; next < problem->P; next++)
            if (mixed || search_joint(problem, current, next) == SEARCH_APART)
                extend_other(table, at, row, mask, next, before_s);
    }
}

/* Prefixes that do not use the front subcluster leave it untouched. */
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
            row->current = current;
            take_handover(table, row, search_front_devices(problem, current));
            if (isfinite(row->least_prefix_s)) extend_prefixes(table, k, mask, current, least_s);
        }
    }
    table->effort.cells += table->cell_count;
    return HAPT_OK;
}
