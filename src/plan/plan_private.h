/* Functions that the files of this folder share: parts of plan files, and the slots of lists. */
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

/* Slots of a stage: of activations, and of passes that wait between BACKWARD and WEIGHT. */
struct plan_slots {
    int slots, weight_slots;
};
/* price.c: the simulated step, and the most slots that the simulated lists use, by stage; `used` may be NULL. Stages
 * that share a submesh have those of the submesh. */
enum hapt_status plan_simulate_slots(const struct hapt_plan *plan, struct hapt_arena *scratch, struct plan_slots *used,
                                     double *step_s);

#endif
