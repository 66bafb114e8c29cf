/* Validation: the mean loss on held-out data with the current weights, by the forward passes of the plan. */
#ifndef HAPT_TRAIN_VALIDATION_H
#define HAPT_TRAIN_VALIDATION_H

#include "top1.h"
#include "watch.h"

struct validation_vote;

struct validation {
    struct worker *worker;
    struct hapt_data *data;       /* NULL: there is no validation */
    struct validation_vote *vote; /* [world_size] */
    int64_t every;                /* steps between two of them */
    double longest_s;             /* the longest one so far */
    int64_t steps, rows, targets; /* of the data */
    struct top1 *top1;            /* NULL: not counted */
};

/* Opens the data at `path`, at most `most` rows of them (0: all). `top1`: count the targets that are the largest logit,
 * if this plan can (top1_create). Call after worker_build. Collective over env->world; ends in agreement. */
enum hapt_status validation_open(struct validation *validation, struct worker *worker, const char *path, int64_t most,
                                 bool top1);
/* True if validation follows after `done` of `steps` steps: before the first one, after each `every` steps, and at the
 * end. */
bool validation_is_due(const struct validation *validation, int64_t done, int64_t steps);
/* Evaluates the current weights between two steps. `watch` may be NULL. *stop: 0, or the bits of enum watch_stop that
 * ended it without a result, the same on all ranks. A rank that fails ends the job (hapt_die). Collective over
 * env->world. */
enum hapt_status validation_run(struct validation *validation, const struct watch *watch, int *stop,
                                struct hapt_evaluation *result);
void validation_release(struct validation *validation);

#endif
