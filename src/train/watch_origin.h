/* Finds the origin of a loss or gradient that is not finite. */
#ifndef HAPT_TRAIN_WATCH_ORIGIN_H
#define HAPT_TRAIN_WATCH_ORIGIN_H

#include "worker.h"

/* Writes "; it began at the gradient of NAME on rank R of stage S, host H". A weight that is not finite precedes all
 * gradients; the first stage's first is named. Otherwise the last stage's last gradient is named, because the backward
 * pass reached it first. "": none found. `weights`: it is a weight, so the weights must not be saved. Collective over
 * env->world, the same on all ranks. */
enum hapt_status watch_origin_find(struct worker *worker, char *text, size_t size, bool *weights);

#endif
