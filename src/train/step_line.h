/* The line of a step, for people. */
#ifndef HAPT_TRAIN_STEP_LINE_H
#define HAPT_TRAIN_STEP_LINE_H

#include "hapt/progress.h"
#include "hapt/train.h"

/* Shows the newest step of the history: time of day, loss, gradient norm, learning rate, rate of the items, MFU, memory
 * of the rank with most, expected end. `progress` decides when a line is due. */
void step_line_show(const struct hapt_train_result *result, struct hapt_progress *progress);

#endif
