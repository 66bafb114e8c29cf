/* Predicted times of a mixed stage's program. Private to src/predict. */
#ifndef HAPT_PREDICT_PREDICT_MIXED_H
#define HAPT_PREDICT_PREDICT_MIXED_H

#include "hapt/candidates.h"

/* Seconds of a group's program, from its operators' local shapes, the rooflines of both kinds of device and
 * group->sums; fills group->times. Rank-local. */
enum hapt_status predict_mixed_program(const struct hapt_candidates *candidates, struct hapt_mixed_group *group,
                                       struct hapt_arena *arena, struct hapt_arena *scratch);

#endif
