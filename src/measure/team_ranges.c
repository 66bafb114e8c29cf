/* Ranges of a team: their order, running them, composing the rest. */
#include "team_ranges.h"

#include <math.h>
#include <string.h>

#include "hapt/progress.h"

#define LONGEST_SHARE 0.3   /* of the time, for the longest range of each kind */
enum { FEWEST_FITTED = 5 }; /* one of them may be an outlier */

/* 0, or 1 if the range is timed as the last stage. */
static int kind_of(const struct team_ranges *ranges, int cell)
{
    return team_ends_model(ranges->candidates, cell % ranges->candidates->layer_count);
}

/* Orders them such that the first ones, however many, are spread evenly over all: by the reversed bits of their
 * position. */
static void spread(const int *cell, int count, int *order)
{
    int bits = 0, next = 0;
    while (1 << bits < count) bits++;
    for (int k = 0; k < 1 << bits; k++) {
        int reversed = 0;
        for (int b = 0; b < bits; b++) reversed |= (k >> b & 1) << (bits - 1 - b);
        if (reversed < count) order[next++] = cell[reversed];
    }
}

enum hapt_status team_ranges_list(const struct hapt_candidates *candidates, team_wanted *wanted, const void *context,
                                  struct hapt_range_times *times, struct hapt_arena *arena, struct team_ranges *ranges)
{
    const int L = candidates->layer_count;
    bool *listed;
    int *more, others = 0;
    *ranges = (struct team_ranges){.candidates = candidates, .times = times, .longest = {-1, -1}};
    HAPT_NEW(ranges->order, arena, L * L);
    HAPT_NEW(ranges->run, arena, L * L);
    HAPT_NEW(ranges->like, arena, candidates->structure_count);
    HAPT_NEW(more, arena, L * L);
    HAPT_NEW(listed, arena, candidates->structure_count);
    for (int length = L - 1; length >= 0; length--)
        for (int i = 0; i + length < L; i++) {
            const int cell = i * L + i + length, structure = candidates->structure[cell], kind = kind_of(ranges, cell);
            if (listed[structure] || !wanted(context, i, i + length)) continue;
            listed[structure] = true;
            if (length > 0 && ranges->longest[kind] >= 0) {
                more[others++] = cell;
                continue;
            }
            if (ranges->longest[kind] < 0) ranges->longest[kind] = cell;
            ranges->order[ranges->count++] = cell;
        }
    spread(more, others, ranges->order + ranges->count);
    ranges->count += others;
    return HAPT_OK;
}

enum hapt_status team_ranges_mark_sharded(struct team_ranges *ranges, team_wanted *sharded, const void *context,
                                          struct hapt_arena *arena)
{
    const int L = ranges->candidates->layer_count;
    HAPT_NEW(ranges->sharded, arena, L * L);
    for (int k = 0; k < ranges->count; k++)
        ranges->sharded[ranges->order[k]] = sharded(context, ranges->order[k] / L, ranges->order[k] % L);
    return HAPT_OK;
}

static void keep(struct team_ranges *ranges, int cell, const struct team_seconds *seconds)
{
    const struct hapt_candidates *candidates = ranges->candidates;
    for (int like = 0; like < candidates->layer_count * candidates->layer_count; like++) {
        if (candidates->structure[like] != candidates->structure[cell]) continue;
        ranges->run[like] = true;
        ranges->times->stage_s[like] = seconds->stage_s;
        ranges->times->forward_s[like] = seconds->forward_s;
        ranges->times->step_s[like] = seconds->step_s;
    }
}

enum hapt_status team_ranges_run(struct team_ranges *ranges, struct team_stage *stage, double budget_s)
{
    const int L = ranges->candidates->layer_count;
    const double start_s = hapt_time_s();
    hapt_progress_expect(ranges->count);
    for (int k = 0; k < ranges->count; k++) {
        struct team_seconds seconds;
        hapt_progress_advance(1);
        double spent_s = hapt_time_s() - start_s; /* one rank's clock, so that all stop at the same range */
        HAPT_MPI(MPI_Bcast(&spent_s, 1, MPI_DOUBLE, 0, stage->comm));
        const double left_s = budget_s - spent_s;
        if (k > 0 && left_s <= 0) break;
        const int cell = ranges->order[k];
        const bool longest = cell == ranges->longest[kind_of(ranges, cell)];
        stage->options.sharded_state = ranges->sharded && ranges->sharded[cell];
        HAPT_TRY(team_stage_time(stage, cell / L, cell % L,
                                 longest ? LONGEST_SHARE * budget_s : left_s / (ranges->count - k), &seconds));
        keep(ranges, cell, &seconds);
        ranges->runs++;
    }
    return HAPT_OK;
}

enum hapt_status team_ranges_sums(const struct team_ranges *ranges, const double *const layer[3],
                                  struct hapt_arena *arena, double *base[3])
{
    const struct hapt_candidates *candidates = ranges->candidates;
    const int L = candidates->layer_count;
    const double *const table[3] = {ranges->times->stage_s, ranges->times->forward_s, ranges->times->step_s};
    bool known = true;
    for (int l = 0; l < L; l++) known = known && ranges->run[l * L + l];
    for (int t = 0; t < 3; t++) {
        HAPT_NEW(base[t], arena, L * L);
        for (int i = 0; i < L; i++) {
            double sum = 0;
            for (int j = i; j < L; j++) base[t][i * L + j] = sum += known ? table[t][j * L + j] : layer[t][j];
        }
    }
    return HAPT_OK;
}

/* The shortest range run of that kind that contains [i, j], or else the longest one. If none of that kind was run,
 * any kind. */
static int enclosing_range(const struct team_ranges *ranges, int i, int j)
{
    const int L = ranges->candidates->layer_count, kind = kind_of(ranges, i * L + j);
    const bool own = ranges->longest[kind] >= 0 && ranges->run[ranges->longest[kind]];
    int best = own ? ranges->longest[kind] : ranges->order[0], least = L;
    for (int first = i; first >= 0; first--)
        for (int last = j; last < L; last++) {
            const int cell = first * L + last;
            if (!ranges->run[cell] || last - first >= least || (own && kind_of(ranges, cell) != kind)) continue;
            best = cell;
            least = last - first;
        }
    return best;
}

/* The times of ranges: `once_s` for each pass, and `factor` times the base. */
struct fit {
    bool known;
    double once_s, factor;
};

/* [0..n): 1 / base and time / base of the ranges that were run; kind -1: of both. Single layers whose own times are the
 * base say nothing. */
static int list_points(const struct team_ranges *ranges, int kind, const double *time_s, const double *base_s,
                       double *x, double *y)
{
    const int L = ranges->candidates->layer_count;
    int count = 0;
    for (int k = 0; k < ranges->count; k++) {
        const int cell = ranges->order[k];
        const bool is_base = cell / L == cell % L && time_s[cell] == base_s[cell];
        if (!ranges->run[cell] || is_base || (kind >= 0 && kind_of(ranges, cell) != kind) || base_s[cell] <= 0)
            continue;
        x[count] = 1 / base_s[cell];
        y[count++] = time_s[cell] / base_s[cell];
    }
    return count;
}

/* A robust line through the ranges of a kind that were run, or if those are few, through all (Theil and Sen: the
 * median of the slopes between all pairs). It goes through time over base, against 1 / base, since noise is in
 * proportion to the time. */
static enum hapt_status fit_kind(const struct team_ranges *ranges, int kind, const double *time_s, const double *base_s,
                                 struct hapt_arena *scratch, struct fit *fit)
{
    double *x, *y, *slope;
    int pairs = 0;
    *fit = (struct fit){.known = false};
    HAPT_NEW(x, scratch, ranges->count);
    HAPT_NEW(y, scratch, ranges->count);
    int count = list_points(ranges, kind, time_s, base_s, x, y);
    if (count < FEWEST_FITTED) count = list_points(ranges, -1, time_s, base_s, x, y);
    if (count < FEWEST_FITTED) return HAPT_OK;
    HAPT_NEW(slope, scratch, (size_t)count * (size_t)count);
    for (int a = 0; a < count; a++)
        for (int b = 0; b < a; b++)
            if (x[a] != x[b]) slope[pairs++] = (y[a] - y[b]) / (x[a] - x[b]);
    if (pairs == 0) return HAPT_OK;
    fit->once_s = fmax(hapt_median(slope, pairs), 0);
    for (int k = 0; k < count; k++) y[k] -= fit->once_s * x[k];
    fit->factor = hapt_median(y, count);
    fit->known = fit->factor > 0;
    return HAPT_OK;
}

enum hapt_status team_ranges_compose(const struct team_ranges *ranges, team_wanted *wanted, const void *context,
                                     const double *const base[3], struct hapt_arena *scratch)
{
    const int L = ranges->candidates->layer_count;
    double *const table[3] = {ranges->times->stage_s, ranges->times->forward_s, ranges->times->step_s};
    struct fit fit[2][3];
    for (int kind = 0; kind < 2; kind++)
        for (int t = 0; t < 3; t++) HAPT_TRY(fit_kind(ranges, kind, table[t], base[t], scratch, &fit[kind][t]));
    for (int i = 0; ranges->count > 0 && i < L; i++)
        for (int j = i; j < L; j++) {
            const int cell = i * L + j;
            if (ranges->run[cell] || !wanted(context, i, j)) continue;
            int *like = &ranges->like[ranges->candidates->structure[cell]];
            if (*like > 0) {
                for (int t = 0; t < 3; t++) table[t][cell] = table[t][*like - 1];
                continue;
            }
            *like = 1 + cell;
            const int whole = enclosing_range(ranges, i, j);
            for (int t = 0; t < 3; t++) {
                const struct fit *line = &fit[kind_of(ranges, cell)][t];
                if (line->known)
                    table[t][cell] = base[t][cell] > 0 ? line->once_s + line->factor * base[t][cell] : 0;
                else
                    table[t][cell] = base[t][whole] > 0 ? table[t][whole] * base[t][cell] / base[t][whole] : 0;
            }
        }
    return HAPT_OK;
}
