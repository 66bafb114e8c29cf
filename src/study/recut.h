/* Inside src/study: the best plan on given submeshes. */
#ifndef HAPT_STUDY_RECUT_H
#define HAPT_STUDY_RECUT_H

#include "hapt/search.h"

struct recut_slot {
    int subcluster, n, m;
};

/* The best plan whose stages run on these submeshes in this order. Boundaries, programs and t_max are free. NULL: none
 * takes less than `bound_s`. Exact; rank-local, the same on every rank. */
enum hapt_status recut_search(const struct hapt_profile *profile, const struct hapt_search_options *options,
                              const struct recut_slot *slot, int count, double bound_s, struct hapt_arena *arena,
                              struct hapt_plan **plan);

#endif
