/* Chooses the ranges of layers that a team runs (team_time.h), and composes the times of the others from them. */
#ifndef HAPT_MEASURE_TEAM_RANGES_H
#define HAPT_MEASURE_TEAM_RANGES_H

#include "team_time.h"

struct team_ranges {
    const struct hapt_candidates *candidates;
    struct hapt_range_times *times; /* output; equal for ranges of equal structure */
    int count, *order;              /* cells (first * L + last) in the order of running */
    bool *sharded;                  /* [L * L] cells that run with sharded optimizer state; NULL: none */
    bool *run;                      /* [L * L] cells that were run */
    int *like;                      /* [structures] 1 + the first wanted cell of that structure; 0: none */
    int longest[2]; /* cell of the longest range that ends before the last layer, and of the longest that ends with it;
                       -1: none */
    int64_t runs;
};
/* True if layers [first, last] are a candidate. The same on all ranks of a team. */
typedef bool team_wanted(const void *context, int first, int last);

/* Lists one range of each structure: the longest of both kinds, then single layers, then the others, such that the
 * first ones are of all lengths. */
enum hapt_status team_ranges_list(const struct hapt_candidates *candidates, team_wanted *wanted, const void *context,
                                  struct hapt_range_times *times, struct hapt_arena *arena, struct team_ranges *ranges);
/* Marks the listed ranges for which `sharded` is true: they run with sharded optimizer state. */
enum hapt_status team_ranges_mark_sharded(struct team_ranges *ranges, team_wanted *sharded, const void *context,
                                          struct hapt_arena *arena);
/* Runs them in order for about `budget_s`, the first in any case. Collective over stage->comm; the same times on
 * all its ranks. */
enum hapt_status team_ranges_run(struct team_ranges *ranges, struct team_stage *stage, double budget_s);
/* Base times for ranges that were not run: the sums of their layers' times. If not all layers were run alone, the sums
 * of layer[stage, forward, step][L], which are in proportion to them. */
enum hapt_status team_ranges_sums(const struct team_ranges *ranges, const double *const layer[3],
                                  struct hapt_arena *arena, double *base[3]);
/* Composes the other wanted ranges: a time for each pass, and a factor times base[stage, forward, step][L * L]. Both
 * come from all ranges of the same kind that were run, or if those are few, from those of both kinds. If there are few
 * of both, the time is in proportion to the base, by the shortest range that contains it, or else by the longest. Equal
 * ranges get equal times. */
enum hapt_status team_ranges_compose(const struct team_ranges *ranges, team_wanted *wanted, const void *context,
                                     const double *const base[3], struct hapt_arena *scratch);

#endif
