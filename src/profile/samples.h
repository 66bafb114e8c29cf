/* Numbers to time an engine with: their values do not change the time, infinities and denormals might. */
#ifndef HAPT_PROFILE_SAMPLES_H
#define HAPT_PROFILE_SAMPLES_H

#include "hapt/engine.h"
#include "hapt/model.h"

/* Weights and inputs of a program's engine, in slot 0. */
enum hapt_status samples_fill(const struct hapt_model *model, const struct hapt_engine_options *options,
                              const struct hapt_program *program, struct hapt_engine *engine);
/* What comes in from other stages, in a transfer slot. */
enum hapt_status samples_fill_boundary(const struct hapt_engine_options *options, const struct hapt_program *program,
                                       struct hapt_engine *engine, enum hapt_staging_kind kind, int transfer,
                                       const struct hapt_boundary *boundary);

#endif
