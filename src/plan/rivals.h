/* Inside src/plan: what a rival loses by, in words and numbers. */
#ifndef HAPT_PLAN_RIVALS_H
#define HAPT_PLAN_RIVALS_H

#include "hapt/rivals.h"

/* Fills loss, the parts of it, and the reason of a rival whose plan is known. */
enum hapt_status rivals_judge(const struct hapt_profile *profile, const struct hapt_plan *plan,
                              struct hapt_arena *arena, struct hapt_rival *rival);

/* The best plan on the submeshes of `plan` but one: `more` 1: two share the devices of one stage, -1: one takes those
 * of two neighbours in a subcluster; idle devices of the subcluster may join in. Cuts, programs and pace are free.
 * NULL: none, or the plan has mixed stages. Rank-local, the same on every rank. */
enum hapt_status rivals_stages(const struct hapt_profile *profile, const struct hapt_search_options *options,
                               const struct hapt_plan *plan, int more, struct hapt_arena *arena,
                               struct hapt_plan **found);

#endif
