/* The best plan on given submeshes, by the formula HAPT (13). */
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

#endif
