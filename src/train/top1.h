/* Top-1: how many targets are the largest logit of their row, counted on the host after forward passes of the last
 * chunk. */
#ifndef HAPT_TRAIN_TOP1_H
#define HAPT_TRAIN_TOP1_H

#include "logits.h"

struct top1 {
    struct logits logits;
    void *logit;     /* host copy of [block_rows][classes] */
    int32_t *target; /* host copy of all */
    int64_t block_rows;
    int64_t hits; /* so far */
};

/* *top1 NULL: not known, because ranks hold parts of a row of logits. The same on all ranks. Rank-local; call after
 * worker_build. */
enum hapt_status top1_create(struct worker *worker, struct top1 **top1);
/* A worker_observer of forward passes: adds the hits of the microbatch in `slot`. `context`: the struct top1. */
enum hapt_status top1_add(void *context, struct stage *stage, int microbatch, int slot);

#endif
