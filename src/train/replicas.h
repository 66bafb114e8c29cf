/*
 * Copies of weights, compared (--replica-check N).
 *
 * Ranks that hold the same part of a parameter hold the same bits: data-parallel replicas of a stage, and stages that
 * share a tied parameter. A rank whose memory or processor corrupts them trains on unnoticed, and its weights may be
 * those that a checkpoint holds. So every N steps, and before each checkpoint, the ranks compare hashes of what they
 * hold.
 *
 * Not compared: parts that differ (sharded axes), and ranks on unlike devices, whose updates may round differently.
 */
#ifndef HAPT_TRAIN_REPLICAS_H
#define HAPT_TRAIN_REPLICAS_H

#include "stage.h"

struct replicas {
    struct stage *stage;
    int64_t every;                   /* steps; 0: never */
    int64_t checked;                 /* after so many steps, -1: not yet */
    int count;                       /* parameters of the model */
    int *parameter;                  /* [count] tensors of the model's graph */
    float *value;                    /* the largest parameter of this rank */
    struct replica_mark *mine, *all; /* [block], [world_size][block] */
    int shared, most;                /* parameters with copies, and on how many ranks at most */
};

/* After stage_build. `every` 0: nothing is reserved. Rank-local. */
enum hapt_status replicas_prepare(struct replicas *replicas, struct stage *stage, int64_t every);
/* After `done` steps: when it is time, or (`now`) before a checkpoint; *compared: it was. HAPT_ERR_INTERNAL, which is
 * agreed on, names the rank that differs from the others, or both of two. Collective over env->world. */
enum hapt_status replicas_check(struct replicas *replicas, int64_t done, bool now, bool *compared);

#endif
