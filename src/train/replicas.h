/*
 * Comparison of weight copies between ranks (--replica-check N).
 *
 * Ranks that hold the same part of a parameter hold the same bits: data-parallel replicas of a stage, and stages that
 * share a tied parameter. A rank whose memory or processor corrupts them trains on unnoticed, and checkpoints may store
 * its weights. So the ranks compare hashes of their weights every N steps and before each checkpoint.
 *
 * Not compared: different parts (sharded axes), and ranks on unlike devices, whose updates may round differently.
 */
#ifndef HAPT_TRAIN_REPLICAS_H
#define HAPT_TRAIN_REPLICAS_H

#include "worker.h"

struct replicas {
    struct worker *worker;
    int64_t every;                   /* steps; 0: never */
    int64_t checked;                 /* after this many steps; -1: never */
    int count;                       /* parameters of the model */
    int *parameter;                  /* [count] tensors of the model's graph */
    float *value;                    /* buffer for the largest parameter of this rank */
    struct replica_mark *mine, *all; /* [stages of a rank][block], [holders][block] */
    int holders;                     /* records of all ranks: worker_record */
    int shared, most;                /* parameters with copies on several ranks; most ranks with copies of one */
};

/* Call after worker_build. `every` 0: reserves nothing. Rank-local. */
enum hapt_status replicas_prepare(struct replicas *replicas, struct worker *worker, int64_t every);
/* Call after `done` steps; compares if it is due, or if `now` (before a checkpoint). *compared: it did.
 * HAPT_ERR_INTERNAL, agreed on, names the rank that differs from the others, or both of two. Collective over
 * env->world. */
enum hapt_status replicas_check(struct replicas *replicas, int64_t done, bool now, bool *compared);

#endif
