/* Forward passes without training: what hapt evaluate and hapt generate share. */
#ifndef HAPT_TRAIN_EVALUATE_H
#define HAPT_TRAIN_EVALUATE_H

#include "worker.h"

/* Builds the worker's part of the plan. Collective over env->world; ends in agreement, as the next one does. */
enum hapt_status evaluate_build(struct worker *worker, const struct hapt_config *config);
/* Connects the ranks (worker_join), and sets the weights of `checkpoint`, or (NULL) those of the model. */
enum hapt_status evaluate_join(struct worker *worker, const struct hapt_config *config,
                               const struct hapt_checkpoint *checkpoint, bool *together);

#endif
