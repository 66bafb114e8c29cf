/* Which programs a measurement has, and how ranks exchange synthesised ones. */
#ifndef HAPT_MEASURE_MEASURE_PROGRAMS_H
#define HAPT_MEASURE_MEASURE_PROGRAMS_H

#include "measure.h"

/* Builds the candidates with the programs of --program. For synthesised ones it calibrates operators first. Collective
 * over env->world; agrees on failures. */
enum hapt_status programs_build(struct measure *measure, const struct hapt_model *model,
                                const struct hapt_layers *layers, struct hapt_candidates *candidates,
                                struct hapt_arena *arena);
/* With --program auto: leaves out the tensor-parallel candidates unless data-parallel ones lack memory. Call when the
 * memory of all items is known. The same on all ranks. */
enum hapt_status programs_choose(const struct measure *measure, struct hapt_candidates *candidates);
/* Sets measure->efficiency from operators timed here, unless it is set. Collective over env->world. */
enum hapt_status programs_calibrate(struct measure *measure, const struct hapt_model *model,
                                    const struct hapt_layers *layers, struct hapt_arena *arena);
/* Broadcasts a layout from rank 0; elsewhere `own` is NULL. Collective over env->world. */
enum hapt_status programs_share_layout(const struct hapt_env *env, const struct hapt_stage_layout *own,
                                       struct hapt_arena *arena, const struct hapt_stage_layout **layout);

#endif
