/* Where a loss or a gradient that is not finite began. */
#ifndef HAPT_TRAIN_WATCH_ORIGIN_H
#define HAPT_TRAIN_WATCH_ORIGIN_H

#include "stage.h"

/* "; it began at the gradient of NAME on rank R of stage S, host H": a weight that is not finite before any gradient,
 * the first stage's first; else the last stage's last gradient, where the backward pass met it first. "" where neither
 * is to be seen. `weights`: it is a weight, so these must not be saved. Collective over env->world: the same on all
 * ranks. */
enum hapt_status watch_origin_find(struct stage *stage, char *text, size_t size, bool *weights);

#endif
