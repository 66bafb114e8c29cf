/*
 * Bounds computed before a pass makes any point: the candidates and states that can be part of a plan at this t_max,
 * and the least cost of the prefix in front of a state.
 *
 * All bounds are relaxations, so excluding candidates and states by them changes no result.
 *   - launches: no stage launches less than the cheapest path to the last layer needs (HAPT 5.2.1's eta). Devices are
 *     ignored.
 *   - reach: a prefix and a suffix must meet, so the unused devices must suffice for the layers in front.
 *   - prefixes: the least sum over all prefixes, without launch counts.
 */
#include "search.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>

/* Not under ThreadSanitizer: the resolvers of target_clones run before it is initialised. */
#if defined __x86_64__ && !defined __SANITIZE_THREAD__
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE
#endif

static void find_deltas(struct search_table *table)
{
    const struct search_problem *problem = table->problem;
    const struct hapt_search_options *options = problem->options;
    const size_t count = (size_t)problem->device_set_count * (size_t)problem->device_set_count * (size_t)problem->L;
    for (size_t i = 0; i < count; i++) {
        const double comm_s = problem->comm_s[i];
        table->delta[i] =
            hapt_at_most(comm_s, table->t_max_s)
                ? (unsigned char)hapt_schedule_delta(options->schedule, comm_s, table->t_max_s, options->hide_threshold)
                : UCHAR_MAX;
    }
}

/* The fewest launches of a stage on device set p that ends at `end`. */
static int least_behind(const struct search_table *table, int p, int end)
{
    const struct search_problem *problem = table->problem;
    int least = INT_MAX;
    if (end == problem->L) return 1;
    for (int next = 0; next < problem->device_set_count; next++) {
        const int after = table->least_launches[end * problem->device_set_count + next];
        const int delta = table->delta[search_link(problem, p, next, end - 1)];
        if (after == INT_MAX || delta == UCHAR_MAX) continue;
        const int launches = search_launches(problem, after, delta);
        if (launches < least) least = launches;
    }
    return least;
}

/* Candidates of layer k and device set p before narrowing. */
static const struct search_candidate *source(const struct search_table *table, int k, int p, int64_t *count)
{
    const struct search_problem *problem = table->problem;
    const int list = k * problem->device_set_count + p;
    if (table->t_max_s <= table->ceiling_s && !isinf(table->ceiling_s)) {
        *count = table->ceiling_end[list] - table->ceiling_first[list];
        return table->ceiling + table->ceiling_first[list];
    }
    *count = problem->candidate_count[p * problem->L + k];
    return problem->candidate[p * problem->L + k];
}

/* Keeps the candidates that are fast enough and whose memory fits the launches that the layers behind them need. */
static void narrow(struct search_table *table)
{
    const struct search_problem *problem = table->problem;
    const int sets = problem->device_set_count, L = problem->L;
    const double fast_s = table->t_max_s * (1 - 1e-9); /* at most t_max beyond doubt */
    int64_t last = problem->all_candidates;            /* filled from the back: the last layers first */
    for (int k = L - 1; k >= 0; k--) {
        /* needs of a stage that ends at k + 1, by device set; all stages behind are known */
        for (int p = 0; p < sets; p++) table->behind[(k + 1) * sets + p] = least_behind(table, p, k + 1);
        for (int p = sets - 1; p >= 0; p--) {
            const int list = k * sets + p;
            int64_t count;
            const struct search_candidate *all = source(table, k, p, &count);
            int least = INT_MAX;
            table->active_end[list] = last;
            for (int64_t i = count - 1; i >= 0; i--) {
                if (all[i].time_s > fast_s && !hapt_at_most(all[i].time_s, table->t_max_s)) continue;
                const int behind = table->behind[all[i].end * sets + p];
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

/* Furthest ends by start and nearest starts by end, for each device set and class of device counts. */
static void find_spans(struct search_table *table)
{
    const struct search_problem *problem = table->problem;
    const int sets = problem->device_set_count, L = problem->L, K = problem->class_count;
    int *furthest = table->furthest, *nearest = table->nearest;
    for (int64_t i = 0; i < (int64_t)K * (L + 1); i++) {
        furthest[i] = -1;
        nearest[i] = L + 1;
    }
    for (int k = 0; k < L; k++) {
        for (int p = 0; p < sets; p++) {
            for (int64_t i = table->active_first[k * sets + p]; i < table->active_end[k * sets + p]; i++) {
                const struct search_candidate *at = &table->active[i];
                const int class = problem->class_of[p][at->submesh], end = at->end;
                int *const far = &furthest[class * (L + 1) + k], *const near = &nearest[class * (L + 1) + end];
                *far = end > *far ? end : *far; /* without branches, which are not predictable here */
                *near = k < *near ? k : *near;
            }
        }
    }
    /* a state nearer to its goal is never worse: prefixes may end at or behind k, suffixes start at or before k */
    for (int class = 0; class < K; class ++) {
        int *far = &furthest[class * (L + 1)], *near = &nearest[class * (L + 1)];
        for (int k = 1; k <= L; k++)
            if (far[k - 1] > far[k]) far[k] = far[k - 1];
        for (int k = L - 1; k >= 0; k--)
            if (near[k + 1] < near[k]) near[k] = near[k + 1];
    }
}

static int *reach_of(const struct search_table *table, int *reach, unsigned mask, int device_set)
{
    return &reach[search_suffix_state(table->problem, mask, device_set) * (size_t)(table->problem->most_devices + 1)];
}

/* First layer at which the stages on the state's device set may end, so that a suffix can start there. The suffix
 * shares nothing, or only the subcluster of which a mixed stage takes its part. L + 1: none. */
static int nearest_behind(const struct search_table *table, unsigned mask, int current)
{
    const struct search_problem *problem = table->problem;
    const bool mixed = problem->device_set[current].mixed_group >= 0;
    int behind = mask == problem->device_set[current].clusters && problem->device_set[current].ends ? problem->L
                                                                                                    : problem->L + 1;
    for (int next = 0; next < problem->device_set_count; next++) {
        const int shared_subcluster = search_shared_subcluster(problem, current, next);
        const unsigned rest = search_rest(problem, mask, current, shared_subcluster);
        if (shared_subcluster == SEARCH_NOT_ALLOWED || (shared_subcluster >= 0 && !mixed) ||
            !problem->valid[search_suffix_state(problem, rest, next)])
            continue;
        const int left = shared_subcluster >= 0 ? search_left(problem, current, shared_subcluster)
                                                : search_front_devices(problem, next);
        const int at = reach_of(table, table->suffix_reach, rest, next)[left];
        if (at < behind) behind = at;
    }
    return behind;
}

/* The first layer at which a suffix can start with `left` devices of subcluster `front`, if the stage in front also
 * uses it. */
static int nearest_same(const struct search_table *table, unsigned mask, int front, int left)
{
    const struct search_problem *problem = table->problem;
    int nearest = reach_of(table, table->suffix_reach, mask, front)[left];
    for (int next = problem->C; next < problem->device_set_count; next++) {
        if (search_shared_subcluster(problem, front, next) != front ||
            !problem->valid[search_suffix_state(problem, mask, next)])
            continue;
        const int at = reach_of(table, table->suffix_reach, mask, next)[left];
        if (at < nearest) nearest = at;
    }
    return nearest;
}

/* [suffix state][d]: the first layer at which a suffix of the state can start, with at most d devices of its front
 * subcluster. Sets *reaches. */
static void reach_backwards(struct search_table *table, bool *reaches)
{
    const struct search_problem *problem = table->problem;
    const int L = problem->L;
    *reaches = false;
    for (int g = 0; g < problem->valid_count; g++) {
        const unsigned mask = problem->suffix_state[g].mask;
        const int current = problem->suffix_state[g].current, devices = search_front_devices(problem, current);
        const bool mixed = problem->device_set[current].mixed_group >= 0;
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

/* The last layer at which a prefix can end whose last stage is mixed, precedes the state and shares `wanted`. */
static int furthest_mixed(const struct search_table *table, unsigned mask, int current, int wanted, int devices)
{
    const struct search_problem *problem = table->problem;
    const int L = problem->L;
    int furthest = 0;
    for (int last = problem->C; last < problem->device_set_count; last++) {
        const int shared_subcluster = search_shared_subcluster(problem, last, current);
        const unsigned more = mask | problem->device_set[last].clusters,
                       shared = shared_subcluster >= 0 ? 1u << shared_subcluster : 0;
        if (shared_subcluster != wanted || (problem->device_set[last].clusters & mask) != shared) continue;
        if (!problem->valid[search_suffix_state(problem, more, last)]) continue;
        if (shared_subcluster >= 0 && problem->taken[last * problem->C + shared_subcluster] > devices) continue;
        const int class = problem->first_class[last];
        const int left = search_front_devices(problem, last) - problem->class_devices[class];
        const int far = table->furthest[class * (L + 1) + reach_of(table, table->prefix_reach, more, last)[left]];
        if (far > furthest) furthest = far;
    }
    return furthest;
}

/* The same for a last stage of another single subcluster. */
static int furthest_other(const struct search_table *table, unsigned mask, int current)
{
    const struct search_problem *problem = table->problem;
    const int L = problem->L;
    int furthest = 0;
    for (int last = 0; last < problem->C; last++) {
        if (mask >> last & 1u || !problem->valid[search_suffix_state(problem, mask | 1u << last, last)]) continue;
        if (search_shared_subcluster(problem, last, current) != SEARCH_NOTHING_SHARED) continue;
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

/* [suffix state][r]: the last layer at which a prefix can end in front of a suffix of the state, with r devices of its
 * front subcluster still free. */
static void reach_forwards(struct search_table *table)
{
    const struct search_problem *problem = table->problem;
    const int L = problem->L;
    for (int g = problem->valid_count - 1; g >= 0; g--) {
        const unsigned mask = problem->suffix_state[g].mask;
        const int current = problem->suffix_state[g].current, front = problem->device_set[current].front;
        int *reach = reach_of(table, table->prefix_reach, mask, current);
        /* for stages of the front subcluster in front; the reverse order visits these states of a mask first */
        const int *same = reach_of(table, table->prefix_reach, mask, front);
        int before = furthest_other(table, mask, current);
        const int apart = furthest_mixed(table, mask, current, SEARCH_NOTHING_SHARED, 0);
        if (apart > before) before = apart;
        for (int r = 0; r <= problem->devices[front]; r++) {
            reach[r] = r > 0 ? reach[r - 1] : before;
            for (int class = problem->first_class[front]; class < problem->first_class[front + 1]; class ++) {
                const int left = r - problem->class_devices[class];
                if (left < 0) break;
                const int far = table->furthest[class * (L + 1) + same[left]];
                if (far > reach[r]) reach[r] = far;
            }
            const int joined =
                problem->device_set_count > problem->C ? furthest_mixed(table, mask, current, front, r) : 0;
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

/* The range [*low, *high] of devices that a suffix of the state may use in its front subcluster. */
static void front_range(const struct search_problem *problem, size_t state, int *low, int *high)
{
    const int current = (int)(state % (size_t)problem->device_set_count), class = problem->first_class[current];
    const bool mixed = problem->device_set[current].mixed_group >= 0;
    *low = mixed ? problem->class_devices[class] : 1;
    *high = mixed ? problem->class_devices[class] : problem->devices[current];
}

/* Layers [*low, *high] at which a suffix of the state and a prefix in front of it can meet. */
static void meeting_layers(const struct search_table *table, size_t state, int *low, int *high)
{
    const int devices = search_front_devices(table->problem, (int)(state % (size_t)table->problem->device_set_count));
    const int width = table->problem->most_devices + 1;
    const int *suffix = &table->suffix_reach[state * (size_t)width],
              *prefix = &table->prefix_reach[state * (size_t)width];
    int least, most;
    front_range(table->problem, state, &least, &most);
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

static enum hapt_status reserve_rows(struct search_table *table, int64_t count)
{
    if (count <= table->row_room) return HAPT_OK;
    free(table->row);
    free(table->untouched_prefix_s);
    table->row_room = 0;
    table->row = malloc((size_t)count * sizeof *table->row);
    table->untouched_prefix_s = malloc((size_t)count * sizeof *table->untouched_prefix_s);
    if (!table->row || !table->untouched_prefix_s) return search_no_memory(count);
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
    if (!table->prefix_s || !table->starts) return search_no_memory(count);
    table->cell_room = count;
    return HAPT_OK;
}

/* The range of devices d with which a suffix from layer k and a prefix up to it can meet. */
static void fill_row(const struct search_table *table, size_t state, int k, struct search_row *row)
{
    const int devices = search_front_devices(table->problem, (int)(state % (size_t)table->problem->device_set_count));
    const int width = table->problem->most_devices + 1;
    const int *suffix = &table->suffix_reach[state * (size_t)width],
              *prefix = &table->prefix_reach[state * (size_t)width];
    int low, high;
    front_range(table->problem, state, &low, &high);
    while (low <= high && suffix[low] > k) low++;
    while (high >= low && prefix[devices - high] < k) high--;
    *row = (struct search_row){.low = low, .high = high, .start = -1};
}

static enum hapt_status lay_rows(struct search_table *table)
{
    const struct search_problem *problem = table->problem;
    int64_t rows = 0, cells = 0;
    for (int state = 0; state < problem->suffix_state_count; state++) {
        table->suffix_state_low[state] = 0;
        table->suffix_state_high[state] = -1;
        if (!problem->valid[state]) continue;
        meeting_layers(table, (size_t)state, &table->suffix_state_low[state], &table->suffix_state_high[state]);
        table->suffix_state_row[state] = rows;
        if (table->suffix_state_low[state] <= table->suffix_state_high[state])
            rows += table->suffix_state_high[state] - table->suffix_state_low[state] + 1;
    }
    HAPT_TRY(reserve_rows(table, rows));
    table->row_count = rows;
    for (int state = 0; state < problem->suffix_state_count; state++) {
        for (int k = table->suffix_state_low[state]; k <= table->suffix_state_high[state]; k++) {
            struct search_row *row = &table->row[table->suffix_state_row[state] + (k - table->suffix_state_low[state])];
            fill_row(table, (size_t)state, k, row);
            row->cell = cells;
            if (row->low <= row->high) cells += row->high - row->low + 2; /* `starts` needs one more */
        }
    }
    HAPT_TRY(reserve_cells(table, cells));
    table->cell_count = cells;
    return HAPT_OK;
}

WIDE static void lower(double *restrict to, const double *restrict from, double more_s, double most_s, int count)
{
#pragma omp simd
    for (int i = 0; i < count; i++) {
        const double sum_s = from[i] <= most_s ? from[i] + more_s : INFINITY;
        to[i] = sum_s < to[i] ? sum_s : to[i];
    }
}

/* Adds a stage of layers [k, end) behind the prefixes of a row; the next stage, at `next`, uses the same subcluster.
 * `state`: of the suffix that begins with it. */
static void extend_same(const struct search_table *table, const struct search_candidate *at,
                        const struct search_row *row, double most_s, size_t state, int next)
{
    const struct search_problem *problem = table->problem;
    const size_t link = search_link(problem, row->current, next, at->end - 1);
    const struct search_row *to = search_row(table, at->end, state);
    if (!to || table->delta[link] == UCHAR_MAX) return;
    const double cost_s = at->time_s + 2 * problem->comm_s[link];
    const int low = row->low > to->low + at->devices ? row->low : to->low + at->devices;
    const int high = row->high < to->high + at->devices ? row->high : to->high + at->devices;
    if (low > high) return;
    lower(&table->prefix_s[to->cell + (low - at->devices - to->low)], &table->prefix_s[row->cell + (low - row->low)],
          cost_s, most_s, high - low + 1);
}

/* A next stage on another device set. */
struct onward {
    int next, shared_subcluster;
    size_t state; /* of the suffix that begins with it */
};

static struct onward onward_to(const struct search_problem *problem, unsigned mask, int current, int next)
{
    const int shared_subcluster = search_shared_subcluster(problem, current, next);
    const unsigned rest = search_rest(problem, mask, current, shared_subcluster);
    return (struct onward){next, shared_subcluster, search_suffix_state(problem, rest, next)};
}

/* Adds the last stage of the front subcluster, or a mixed stage that leaves some devices of the next stage's front.
 * `before_s`: sum of all stages in front of it. */
static void extend_other(const struct search_table *table, const struct search_candidate *at,
                         const struct search_row *row, const struct onward *onward, double before_s)
{
    const struct search_problem *problem = table->problem;
    const int shared_subcluster = onward->shared_subcluster;
    const size_t link = search_link(problem, row->current, onward->next, at->end - 1);
    if (shared_subcluster == SEARCH_NOT_ALLOWED || table->delta[link] == UCHAR_MAX) return;
    const struct search_row *to = search_row(table, at->end, onward->state);
    if (!to) return;
    const double sum_s = before_s + (at->time_s + 2 * problem->comm_s[link]);
    if (shared_subcluster < 0) {
        double *least = &table->untouched_prefix_s[to - table->row];
        if (sum_s < *least) *least = sum_s;
        return;
    }
    const int left = search_left(problem, row->current, shared_subcluster), high = to->high < left ? to->high : left;
    for (int d = to->low; d <= high; d++) {
        double *least = &table->prefix_s[to->cell + (d - to->low)];
        if ((!problem->options->use_all_devices || d == left) && sum_s < *least) *least = sum_s;
    }
}

static void extend_prefixes(const struct search_table *table, int k, unsigned mask, int current, double *least_s)
{
    const struct search_problem *problem = table->problem;
    const struct search_row *row = search_row(table, k, search_suffix_state(problem, mask, current));
    const struct search_device_set *device_set = &problem->device_set[current];
    const bool mixed = device_set->mixed_group >= 0;
    const unsigned rest = mask & ~device_set->clusters;
    const int list = k * problem->device_set_count + current;
    const size_t same = search_suffix_state(problem, mask, current);
    struct onward onward[HAPT_SEARCH_MAX_SUBCLUSTERS];
    int onwards = 0;
    for (int next = 0; next < problem->C; next++)
        if (mixed || rest >> next & 1u) onward[onwards++] = onward_to(problem, mask, current, next);
    for (int64_t i = table->active_first[list]; i < table->active_end[list]; i++) {
        const struct search_candidate *at = &table->active[i];
        /* sum of all stages in front of the last stage of `current`, if that one uses its devices alone */
        const bool within = at->devices >= row->low && at->devices <= row->high;
        const double most_s = table->limit_s - problem->B * at->time_s; /* the sum in front of this stage */
        double before_s = within ? table->prefix_s[row->cell + (at->devices - row->low)] : INFINITY;
        if (before_s > most_s) before_s = INFINITY;
        if (at->end == problem->L) {
            if (rest == 0 && device_set->ends && before_s + at->time_s < *least_s) *least_s = before_s + at->time_s;
            continue;
        }
        if (!mixed) extend_same(table, at, row, most_s, same, current);
        for (int next = problem->C; !mixed && next < problem->device_set_count; next++)
            if (search_shared_subcluster(problem, current, next) == current)
                extend_same(table, at, row, most_s, search_suffix_state(problem, mask, next), next);
        if (!isfinite(before_s)) continue;
        for (int n = 0; n < onwards; n++) extend_other(table, at, row, &onward[n], before_s);
        for (int next = problem->C; next < problem->device_set_count; next++) {
            if (!mixed && search_shared_subcluster(problem, current, next) != SEARCH_NOTHING_SHARED) continue;
            const struct onward to = onward_to(problem, mask, current, next);
            extend_other(table, at, row, &to, before_s);
        }
    }
}

/* Prefixes that do not use the front subcluster leave all its devices free. */
static void take_untouched_prefix(const struct search_table *table, struct search_row *row, int devices)
{
    const double untouched_prefix_s = table->untouched_prefix_s[row - table->row];
    double least_s = INFINITY;
    for (int d = row->low; d <= row->high; d++) {
        double *cell = &table->prefix_s[row->cell + (d - row->low)];
        const bool whole = !table->problem->options->use_all_devices || d == devices;
        if (whole && untouched_prefix_s < *cell) *cell = untouched_prefix_s;
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
    for (int64_t i = 0; i < table->row_count; i++) table->untouched_prefix_s[i] = INFINITY;
    for (int k = 0; k < problem->L; k++) {
        if (table->poll) table->poll(table->poll_context);
        for (int g = problem->valid_count - 1; g >= 0; g--) {
            const unsigned mask = problem->suffix_state[g].mask;
            const int current = problem->suffix_state[g].current;
            struct search_row *row = search_row(table, k, search_suffix_state(problem, mask, current));
            if (!row) continue;
            /* the empty prefix; if every device must be used, it leaves all of them */
            if (k == 0 && (!problem->options->use_all_devices || mask == every))
                table->untouched_prefix_s[row - table->row] = 0;
            row->current = current;
            take_untouched_prefix(table, row, search_front_devices(problem, current));
            if (isfinite(row->least_prefix_s)) extend_prefixes(table, k, mask, current, least_s);
        }
    }
    table->effort.cells += table->cell_count;
    return HAPT_OK;
}
