/* Inside src/study: explains why a rival is worse, and searches rivals by stage count. */
#ifndef HAPT_STUDY_RIVALS_H
#define HAPT_STUDY_RIVALS_H

#include "hapt/search.h"
#include "hapt/rivals.h"

/* Fills loss, its parts and the reason of a rival whose plan is known. */
enum hapt_status rivals_judge(const struct hapt_profile *profile, enum hapt_objective objective,
                              const struct hapt_plan *plan, struct hapt_arena *arena, struct hapt_rival *rival);

/* The best plan on the submeshes of `plan`, with one change. `more` 1: two stages share the devices of one. `more` -1:
 * one stage takes those of two neighbours in a subcluster. Idle devices of the subcluster may be added. Boundaries,
 * programs and t_max are free. NULL: no plan, or `plan` has mixed stages. Rank-local, the same on every rank. */
enum hapt_status rivals_stages(const struct hapt_profile *profile, const struct hapt_search_options *options,
                               const struct hapt_plan *plan, int more, struct hapt_arena *arena,
                               struct hapt_plan **found);

#endif
