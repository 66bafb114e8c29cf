/* The weights and optimizer state of a run before its first step. */
#ifndef HAPT_TRAIN_INITIAL_H
#define HAPT_TRAIN_INITIAL_H

#include "worker.h"

/* Sets this rank's parameters: weights and `state_count` states from `checkpoint`, or (NULL) weights as the model says;
 * its states are 0. `full` and `local` have room for a block (worker_block_elements). Rank-local. */
enum hapt_status initial_set(struct worker *worker, const struct hapt_checkpoint *checkpoint, int state_count,
                             float *full, float *local);

#endif
