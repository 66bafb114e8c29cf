/* Private to src/plan. */
#ifndef HAPT_PLAN_PRIVATE_H
#define HAPT_PLAN_PRIVATE_H

#include "hapt/plan.h"

/* Tables of mixed stages in plan files (plan_io.c). */
enum hapt_status plan_write_mixed(struct hapt_h5 *file, const char *group, const struct hapt_plan *plan,
                                  struct hapt_arena *scratch);
enum hapt_status plan_read_mixed(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                 struct hapt_plan *plan);

#endif
