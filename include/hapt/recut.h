/* Rows of submeshes: the best plan on a given row by the formula HAPT (13), and the ways to share devices out. */
#ifndef HAPT_RECUT_H
#define HAPT_RECUT_H

#include "hapt/search.h"

struct hapt_recut_slot {
    int subcluster, n, m;
};

/* The best plan whose stages run on these submeshes in this order. Boundaries, programs and t_max are free. NULL: none
 * takes less than `bound_s`. Exact; rank-local, the same on every rank. */
enum hapt_status hapt_plan_recut(const struct hapt_profile *profile, const struct hapt_search_options *options,
                                 const struct hapt_recut_slot *slot, int count, double bound_s,
                                 struct hapt_arena *arena, struct hapt_plan **plan);

/* Shares `devices` of subcluster c out over slot[0] and, if `two`, slot[1], in every way; calls `take` for each way.
 * `exact`: no device stays idle. Stops at the first failure of `take`, and returns it. */
enum hapt_status hapt_recut_share(const struct hapt_profile *profile, int c, int devices, bool two, bool exact,
                                  struct hapt_recut_slot *slot, enum hapt_status (*take)(void *context), void *context);

#endif
