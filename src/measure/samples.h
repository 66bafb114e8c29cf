/* Sample values for timing an engine. Values do not change the time, except infinities and denormals. */
#ifndef HAPT_MEASURE_SAMPLES_H
#define HAPT_MEASURE_SAMPLES_H

#include "hapt/engine.h"
#include "hapt/model.h"

/* Fills weights and inputs of a program's engine, in slot 0. */
enum hapt_status samples_fill(const struct hapt_model *model, const struct hapt_engine_options *options,
                              const struct hapt_program *program, struct hapt_engine *engine);
/* Fills the tensors that come from other stages, in a transfer slot. */
enum hapt_status samples_fill_boundary(const struct hapt_engine_options *options, const struct hapt_program *program,
                                       struct hapt_engine *engine, enum hapt_staging_kind kind, int transfer,
                                       const struct hapt_boundary *boundary);

#endif
