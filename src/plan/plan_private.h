/* The parts of plan files that have a file of their own. */
#ifndef HAPT_PLAN_PRIVATE_H
#define HAPT_PLAN_PRIVATE_H

#include "hapt/plan.h"

/* plan_edges_io.c: nothing, if the plan has the edges of neighbours alone. */
enum hapt_status plan_write_edges(struct hapt_h5 *file, const char *group, const struct hapt_plan *plan);
enum hapt_status plan_read_edges(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                 struct hapt_plan *plan);
/* plan_units_io.c: nothing, if no stage recomputes or has weights on the host. */
enum hapt_status plan_write_units(struct hapt_h5 *file, const char *group, const struct hapt_plan *plan,
                                  struct hapt_arena *scratch);
enum hapt_status plan_read_units(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                 struct hapt_plan *plan);

#endif
