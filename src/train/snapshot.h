/*
 * A checkpoint written behind the back of training: a thread of its own writes the shard of this rank from a copy, and
 * on rank 0, when all shards are there, the manifest. Ranks tell each other how far they are in what they exchange at
 * the end of each step anyway, so nobody waits for a disk.
 */
#ifndef HAPT_TRAIN_SNAPSHOT_H
#define HAPT_TRAIN_SNAPSHOT_H

#include <pthread.h>

#include "checkpoint.h"

enum snapshot_phase {
    SNAPSHOT_NONE,
    SNAPSHOT_WRITING,    /* the shard of this rank */
    SNAPSHOT_WRITTEN,    /* or there is none to write */
    SNAPSHOT_PUBLISHING, /* rank 0: manifest, names */
    SNAPSHOT_PUBLISHED,
    SNAPSHOT_FAILED
};

/* How far a rank is: what it tells the others once a step. */
struct snapshot_vote {
    int64_t phase;
    struct checkpoint_shard shard;
};

struct snapshot {
    const struct hapt_env *env;
    struct hapt_checkpoint_writer writer; /* its write_shard reads the copy */
    int64_t step;
    struct hapt_history history;     /* as it was then: later steps only add to it */
    struct snapshot_vote *all;       /* [world_size] as told last */
    struct checkpoint_shard *shards; /* [world_size] of the one that is being published */
    bool running, under_way;         /* the thread; a checkpoint, on all ranks alike */
    /* shared with the thread, under the lock */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool quit;
    enum snapshot_phase phase;
    enum hapt_status status;
    struct checkpoint_shard shard;
};

/* Starts the thread where there is something to write. Rank-local. */
enum hapt_status snapshot_open(struct snapshot *snapshot, const struct hapt_env *env,
                               const struct hapt_checkpoint_writer *writer, struct hapt_arena *arena);
/* The copy is made: write it. None may be under way. On all ranks. */
void snapshot_start(struct snapshot *snapshot, int64_t step, const struct hapt_history *history);
/* What to tell the others. */
void snapshot_vote(struct snapshot *snapshot, struct snapshot_vote *vote);
/* Goes on from what all told (snapshot->all), the same on every rank; *done: the checkpoint stands. A rank that failed
 * fails all (HAPT_ERR_IO as a rule). Collective over env->world where one failed. */
enum hapt_status snapshot_advance(struct snapshot *snapshot, bool *done);
/* Waits for the one under way, if any. Collective over env->world; ends in agreement. */
enum hapt_status snapshot_finish(struct snapshot *snapshot, bool *done);
/* Ends the thread; waits for its disk. */
void snapshot_release(struct snapshot *snapshot);

#endif
