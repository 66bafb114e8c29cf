/*
 * Asynchronous checkpoints: a thread writes this rank's shard from a copy during training, and on rank 0 the manifest
 * when all shards are written. Ranks exchange their progress with the data that they exchange at the end of each step
 * anyway. So no rank waits for a disk.
 */
#ifndef HAPT_TRAIN_SNAPSHOT_H
#define HAPT_TRAIN_SNAPSHOT_H

#include <pthread.h>

#include "checkpoint.h"

enum snapshot_phase {
    SNAPSHOT_NONE,
    SNAPSHOT_WRITING,    /* this rank's shard */
    SNAPSHOT_WRITTEN,    /* or this rank has none */
    SNAPSHOT_PUBLISHING, /* rank 0: writes the manifest and renames */
    SNAPSHOT_PUBLISHED,
    SNAPSHOT_FAILED
};

/* Progress of a rank, exchanged once per step. */
struct snapshot_vote {
    int64_t phase;
    struct checkpoint_shard shard;
};

struct snapshot {
    const struct hapt_env *env;
    struct hapt_checkpoint_writer writer; /* its write_shard reads the copy */
    int64_t step;
    struct hapt_history history;     /* at that step; later steps only append */
    struct snapshot_vote *all;       /* [world_size] latest votes */
    struct checkpoint_shard *shards; /* [world_size] of the checkpoint being published */
    bool running, under_way;         /* the thread runs; a checkpoint is in progress, the same on all ranks */
    /* shared with the thread, protected by the lock */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool quit;
    enum snapshot_phase phase;
    enum hapt_status status;
    struct checkpoint_shard shard;
};

/* Starts the thread if this rank has something to write. Rank-local. */
enum hapt_status snapshot_open(struct snapshot *snapshot, const struct hapt_env *env,
                               const struct hapt_checkpoint_writer *writer, struct hapt_arena *arena);
/* Starts writing after the copy is made. No other may be in progress. Call on all ranks. */
void snapshot_start(struct snapshot *snapshot, int64_t step, const struct hapt_history *history);
/* This rank's progress, to exchange with the others. */
void snapshot_vote(struct snapshot *snapshot, struct snapshot_vote *vote);
/* Continues according to the exchanged votes (snapshot->all), the same on every rank; *done: the checkpoint is
 * complete. One failed rank fails all (usually HAPT_ERR_IO). Collective over env->world if one failed. */
enum hapt_status snapshot_advance(struct snapshot *snapshot, bool *done);
/* Waits for the checkpoint in progress, if any. Collective over env->world; ends in agreement. */
enum hapt_status snapshot_finish(struct snapshot *snapshot, bool *done);
/* Ends the thread; waits for its disk writes. */
void snapshot_release(struct snapshot *snapshot);

#endif
