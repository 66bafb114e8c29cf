/* Inside src/plan: what a rival loses by, in words and numbers. */
#ifndef HAPT_PLAN_RIVALS_H
#define HAPT_PLAN_RIVALS_H

#include "hapt/rivals.h"

/* Fills loss, the parts of it, and the reason of a rival whose plan is known. */
enum hapt_status rivals_judge(const struct hapt_profile *profile, const struct hapt_plan *plan, struct hapt_arena *arena,
                              struct hapt_rival *rival);

#endif
