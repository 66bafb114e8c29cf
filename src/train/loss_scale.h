/*
 * The loss scale of training in fp16: the backward pass starts from so many times the loss, so that small gradients do
 * not vanish; where one overflows the step is left out on all ranks and the scale halved, and after many good steps it
 * is doubled (Micikevicius et al., Mixed Precision Training, 2018). It is a function of the norms of all gradients so
 * far, so checkpoints keep nothing more.
 */
#ifndef HAPT_TRAIN_LOSS_SCALE_H
#define HAPT_TRAIN_LOSS_SCALE_H

#include <stdbool.h>
#include <stdint.h>

#include "hapt/dtype.h"

struct loss_scale {
    bool dynamic; /* fp16; else the scale is 1 */
    double value;
    int64_t good;    /* steps since it changed */
    int64_t skipped; /* steps in all that updated nothing */
};

/* As it stands behind `steps` steps, from `first` on, whose gradients had those norms (infinite: the step was left
 * out). */
void loss_scale_begin(struct loss_scale *scale, enum hapt_dtype dtype, double first, const double *norm, int64_t steps);
/* Whether such gradients are an overflow that a smaller scale may cure, so that the step is left out. */
bool loss_scale_overflows(const struct loss_scale *scale, double loss, double norm);
/* Behind a step. */
void loss_scale_note(struct loss_scale *scale, double norm);

#endif
