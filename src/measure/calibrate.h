/* Calibration with a time budget. Private to src/measure. */
#ifndef HAPT_MEASURE_CALIBRATE_H
#define HAPT_MEASURE_CALIBRATE_H

#include "hapt/measure.h"

/* hapt_profile_calibrate in about `budget_s`. */
enum hapt_status calibrate_within(const struct hapt_env *env, const struct hapt_cluster *cluster,
                                  const struct hapt_model *model, const struct hapt_layers *layers,
                                  const struct hapt_config *config, double budget_s, struct hapt_arena *result,
                                  struct hapt_efficiency **efficiency);

#endif
