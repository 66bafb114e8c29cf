/* Ranges of a team: their order, running them, composing the rest. */
#include "team_ranges.h"

#include <math.h>
#include <string.h>

#include "hapt/progress.h"

#define LONGEST_SHARE 0.3 /* of the time, for the longest range of each kind */

/* 0, or 1 if the range is timed as the last stage. */
static int kind_of(const struct team_ranges *ranges, int cell)
{
    return team_ends_model(ranges->candidates, cell % ranges->candidates->layer_count);
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
    memcpy(ranges->order + ranges->count, more, (size_t)others * sizeof *more);
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

void team_ranges_compose(const struct team_ranges *ranges, team_wanted *wanted, const void *context,
                         const double *const base[3])
{
    const int L = ranges->candidates->layer_count;
    double *const table[3] = {ranges->times->stage_s, ranges->times->forward_s, ranges->times->step_s};
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
            for (int t = 0; t < 3; t++)
                table[t][cell] = base[t][whole] > 0 ? table[t][whole] * base[t][cell] / base[t][whole] : 0;
        }
}
