/* The data of a run, by its options. Private to the train room. */
#ifndef HAPT_TRAIN_RUN_DATA_H
#define HAPT_TRAIN_RUN_DATA_H

#include "hapt/train.h"

/* The end of the range of steps (--stop-after), for a run of `steps`. */
int64_t run_data_end(const struct hapt_config *config, int64_t steps);
/* Opens the data for steps [0, end). *data is NULL on modelled devices without data. Collective over env->world; ends
 * in agreement. */
enum hapt_status run_data_open(const struct hapt_env *env, const struct hapt_config *config,
                               const struct hapt_model *model, const struct hapt_plan *plan, int64_t end,
                               struct hapt_data **data);

#endif
