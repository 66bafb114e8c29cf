/*
 * Checkpoints of a run, saved between steps. A save is synchronous. With --checkpoint-async it is written from a copy
 * during training.
 */
#ifndef HAPT_TRAIN_SAVE_H
#define HAPT_TRAIN_SAVE_H

#include "saving.h"
#include "worker.h"

struct saver {
    const struct hapt_env *env;
    struct worker *worker;
    struct hapt_data *data;
    int state_count;
    struct hapt_checkpoint_writer writer;
    struct hapt_data_identity identity; /* of the data, at the step being saved */
    struct hapt_data_identity held_out; /* kind "": there is no validation */
    struct hapt_attachments files;      /* of the model, on rank 0 */
    int64_t saved;                      /* step of the newest complete checkpoint; -1: none */
    int64_t count;                      /* checkpoints of this run */
    const char *path;                   /* the newest */
    const char *folder;                 /* of the run */
    bool overwrites;                    /* the first checkpoint removes an earlier run from the folder */
    double shard_bytes;                 /* of a submesh, at most */
    double started_s, taken_s;          /* start of the newest checkpoint; time until it was complete */
    float *buffer, *local;              /* size of the largest block (worker_block_elements) */
    struct saving saving;
    bool background; /* write checkpoints from `copy` during training */
    bool slow;       /* the warning about a slow disk was printed */
    float *copy;
    size_t copy_bytes;
    long tensors; /* that this rank's stages save, without constants */
    /* Constant tensors: frozen weights. */
    long constants;        /* that this rank's stages save */
    int64_t changing;      /* elements of the other tensors, which come first in a copy */
    size_t constant_bytes; /* in a copy, without links */
    struct hapt_checkpoint_constant constant;
    bool waits; /* training waits for the newest checkpoint */
};

/* Call after worker_build; `folder` is the run's. Rank-local. */
enum hapt_status saver_prepare(struct saver *saver, struct worker *worker, const struct hapt_config *config,
                               int state_count, const char *folder);
/* Creates and cleans the folder of checkpoints; renames damaged ones that the search for `checkpoint` (may be NULL)
 * skipped. If the run will write more than the last one (`several`): reserves memory for a copy and starts a writer
 * thread, or prints why not. `held_out` may be NULL. Collective over env->world; ends in agreement. */
enum hapt_status saver_open(struct saver *saver, const struct hapt_config *config, struct hapt_data *data,
                            struct hapt_data *held_out, const struct hapt_checkpoint *checkpoint, bool several);
/* Decides whether later checkpoints link to the constant tensors of the first one, or of `checkpoint` (may be NULL),
 * from which the run resumed (save_constant.c). Otherwise each has its own. Collective over env->world. */
enum hapt_status saver_find_links(struct saver *saver, const struct hapt_checkpoint *checkpoint);
/* Warns if the data, or the held-out data, differ from those of `checkpoint`. */
void saver_compare_data(const struct saver *saver, const struct hapt_checkpoint *checkpoint);
/* Waits for the checkpoint in progress, if any; unless `last`, a note says so. Collective over env->world; ends in
 * agreement. */
enum hapt_status saver_finish(struct saver *saver, bool last);
/* Saves a checkpoint after history->count steps; none may be in progress. `last`: it is complete on return. Collective
 * over env->world; ends in agreement. */
enum hapt_status saver_save(struct saver *saver, const struct hapt_history *history, bool last);
/* Call saving_vote, exchange the votes of all ranks (saver->saving.all), then call this. HAPT_ERR_IO on all ranks if
 * one could not write. */
enum hapt_status saver_advance(struct saver *saver);
void saver_release(struct saver *saver);

#endif
