/* Which ranges of layers a team runs (team_time.h), and what is made of them for those that it has no time for. */
#ifndef HAPT_PROFILE_TEAM_RANGES_H
#define HAPT_PROFILE_TEAM_RANGES_H

#include "team_time.h"

struct team_ranges {
    const struct candidates *candidates;
    struct range_times *times; /* what is found; ranges of equal structure alike */
    int count, *order;         /* cells (first * L + last), as they are to be run */
    bool *run;                 /* [L * L] cells that were */
    int longest[2]; /* cell of the longest range that ends before the last layer, with it; -1: there is none */
    int64_t runs;
};
/* Is layers [first, last] a candidate? The same on all ranks of a team. */
typedef bool team_wanted(const void *context, int first, int last);

/* One range of each structure: the longest of both kinds, then single layers, then by falling length. */
enum hapt_status team_ranges_list(const struct candidates *candidates, team_wanted *wanted, const void *context,
                                  struct range_times *times, struct hapt_arena *arena, struct team_ranges *ranges);
/* Runs them in order for about `budget_s`, the first in any case. Collective over stage->comm, the same times on all
 * its ranks. */
enum hapt_status team_ranges_run(struct team_ranges *ranges, struct team_stage *stage, double budget_s);
/* The others that are wanted, in proportion to base[stage, forward, step][L * L]: by the shortest range of their kind
 * around that was run, or else by the longest. */
void team_ranges_compose(const struct team_ranges *ranges, team_wanted *wanted, const void *context,
                         const double *const base[3]);

#endif
