/*
 * The loss scale of fp16 training (Micikevicius et al., Mixed Precision Training, 2018). The backward pass starts from
 * the scaled loss, so that small gradients do not vanish. If a gradient overflows, all ranks skip the step and halve
 * the scale. After many good steps the scale is doubled. The scale is a function of all gradient norms so far, so
 * checkpoints store nothing else for it.
 */
#ifndef HAPT_TRAIN_LOSS_SCALE_H
#define HAPT_TRAIN_LOSS_SCALE_H

#include <stdbool.h>
#include <stdint.h>

#include "hapt/dtype.h"

struct loss_scale {
    bool dynamic; /* fp16; else the scale is 1 */
    double value;
    int64_t good;    /* since the last change */
    int64_t skipped; /* total number of skipped steps */
};

/* Sets the scale after `steps` steps with these gradient norms, starting at `first`. Infinite norm: skipped step. */
void loss_scale_begin(struct loss_scale *scale, enum hapt_dtype dtype, double first, const double *norm, int64_t steps);
/* True if such gradients are an overflow that a smaller scale may avoid; the step is then skipped. */
bool loss_scale_overflows(const struct loss_scale *scale, double loss, double norm);
/* Updates the scale after a step. */
void loss_scale_note(struct loss_scale *scale, double norm);

#endif
