/*
 * Weights and optimizer state of a run: filled before the first step, saved between steps; at once, or
 * (--checkpoint-async) from a copy while training goes on.
 */
#ifndef HAPT_TRAIN_SAVE_H
#define HAPT_TRAIN_SAVE_H

#include "snapshot.h"
#include "stage.h"

struct saver {
    const struct hapt_env *env;
    struct stage *stage;
    struct hapt_data *data;
    int state_count;
    struct hapt_checkpoint_writer writer;
    struct hapt_data_identity identity; /* of the data, at the step that is being saved */
    int64_t saved;                      /* step of the newest checkpoint that stands, -1: none */
    int64_t count;                      /* checkpoints of this run */
    const char *path;                   /* the newest */
    const char *folder;                 /* of the run */
    bool overwrites;                    /* an earlier run that was in the folder goes with the first checkpoint */
    double shard_bytes;                 /* the largest shard of a checkpoint */
    double started_s, taken_s;          /* when the newest one was begun; from there until it stood */
    float *buffer, *local;              /* as large as the largest parameter */
    struct snapshot snapshot;
    bool background; /* checkpoints are written while training goes on, from `copy` */
    bool slow;       /* the user was told that the disk is */
    float *copy;
    size_t copy_bytes;
};

/* After stage_build; `folder` is the run's. Rank-local. */
enum hapt_status saver_prepare(struct saver *saver, struct stage *stage, const struct hapt_config *config,
                               int state_count, const char *folder);
/* The parameters of this rank: from `checkpoint`, or (NULL) as the model says. Rank-local. */
enum hapt_status saver_fill(struct saver *saver, const struct hapt_checkpoint *checkpoint);
/* The folder of checkpoints is there and clean, damaged ones that the search for `checkpoint` (may be NULL) passed over
 * are renamed; where the run will write some on its way (`several`), memory for a copy and a thread that writes it, or
 * a note why not. Collective over env->world; ends in agreement. */
enum hapt_status saver_open(struct saver *saver, const struct hapt_config *config, struct hapt_data *data,
                            const struct hapt_checkpoint *checkpoint, bool several);
/* Says so where the data are not those that `checkpoint` was trained on. */
void saver_compare_data(const struct saver *saver, const struct hapt_checkpoint *checkpoint);
/* A checkpoint after history->count steps. `last`: it stands on return; else the one before does. Collective over
 * env->world; ends in agreement. */
enum hapt_status saver_save(struct saver *saver, const struct hapt_history *history, bool last);
/* Between saver_vote and this one every rank was told what all voted (saver->snapshot.all). HAPT_ERR_IO where a rank
 * could not write, on all ranks. */
enum hapt_status saver_advance(struct saver *saver);
void saver_vote(struct saver *saver, struct snapshot_vote *vote);
void saver_release(struct saver *saver);

#endif
