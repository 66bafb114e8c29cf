/* Weights and optimizer state of a run: filled before the first step, saved between steps. */
#ifndef HAPT_TRAIN_SAVE_H
#define HAPT_TRAIN_SAVE_H

#include "stage.h"

struct saver {
    const struct hapt_env *env;
    struct stage *stage;
    int state_count;
    struct hapt_checkpoint_writer writer;
    int64_t saved;         /* step of the newest checkpoint, -1: none */
    double shard_bytes;    /* the largest shard of a checkpoint */
    float *buffer, *local; /* as large as the largest parameter */
};

/* After stage_build; `folder` is the run's. Rank-local. */
enum hapt_status saver_prepare(struct saver *saver, struct stage *stage, const struct hapt_config *config, int state_count,
                               const char *folder);
/* The parameters of this rank: from `checkpoint`, or (NULL) as the model says. Rank-local. */
enum hapt_status saver_fill(struct saver *saver, const struct hapt_checkpoint *checkpoint);
/* A checkpoint after history->count steps; *path in `arena`. Collective over env->world; ends in agreement. */
enum hapt_status saver_save(struct saver *saver, const struct hapt_history *history, struct hapt_arena *arena, const char **path);

#endif
