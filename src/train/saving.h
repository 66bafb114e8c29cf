/*
 * The writing of a checkpoint: one state machine on each rank, one checkpoint at a time.
 *
 *        saving_begin        saving_copied         work           all vote WRITTEN           work
 *   IDLE ------------> COPYING ----------> WRITING ----> WRITTEN -----------------> PUBLISHING ----> PUBLISHED
 *    ^ |                                   ^   |                   (rank 0 alone)       |                |
 *    | +------- synchronous: no copy ------+   +--------------> FAILED <----------------+                |
 *    |                                                             |                                     |
 *    +---- saving_advance: one votes FAILED, so all fail; or rank 0 votes PUBLISHED, so it is complete --+
 *
 * COPYING     the caller copies its tensors to host memory, then calls saving_copied
 * WRITING     writes this rank's shard into the folder .partial-N; a rank without a shard skips it after a copy
 * PUBLISHING  rank 0 writes the manifest, renames the folder to step-N, and removes older checkpoints
 *
 * With a copy the writer thread does the work during training. Ranks exchange their states as votes, with the data that
 * they exchange at the end of each step anyway. So no rank waits for a disk. saving_finish exchanges votes until the
 * machine is idle. Synchronous: the same states without the copy; the caller does the work, in saving_begin and
 * saving_advance.
 */
#ifndef HAPT_TRAIN_SAVING_H
#define HAPT_TRAIN_SAVING_H

#include <pthread.h>

#include "checkpoint.h"

enum saving_state {
    SAVING_IDLE,
    SAVING_COPYING,
    SAVING_WRITING,
    SAVING_WRITTEN,
    SAVING_PUBLISHING,
    SAVING_PUBLISHED,
    SAVING_FAILED
};

/* State of a rank, exchanged with the others. */
struct saving_vote {
    int64_t state;
    struct checkpoint_shard shard;
};

struct saving {
    const struct hapt_env *env;
    const struct hapt_checkpoint_writer *writer; /* what is written; unchanged while there is work */
    int64_t step;
    bool copies;                     /* the writer thread works, else the caller */
    bool publishes;                  /* rank 0: has entered PUBLISHING */
    struct hapt_history history;     /* at that step; later steps only append */
    struct saving_vote *all;         /* [world_size] latest votes */
    struct checkpoint_shard *shards; /* [world_size] of the checkpoint being published */
    bool running;                    /* the thread */
    /* shared with the thread, protected by the lock */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool quit;
    enum saving_state state;
    enum hapt_status status;
    struct checkpoint_shard shard;
};

/* `writer` must live as long. Rank-local. */
enum hapt_status saving_open(struct saving *saving, const struct hapt_env *env,
                             const struct hapt_checkpoint_writer *writer, struct hapt_arena *arena);
/* Starts the thread, for checkpoints from a copy, if this rank has something to write. Rank-local. */
enum hapt_status saving_start_thread(struct saving *saving);
/* Begins a checkpoint; none may be in progress. Without copies: collective over env->world; a failure is agreed, and
 * nothing is in progress then. */
enum hapt_status saving_begin(struct saving *saving, int64_t step, const struct hapt_history *history, bool copies);
void saving_copied(struct saving *saving);
/* A checkpoint is in progress: the same on all ranks. */
bool saving_is_active(struct saving *saving);
/* This rank's state, to exchange with the others. */
void saving_vote(struct saving *saving, struct saving_vote *vote);
/* Continues according to the exchanged votes (saving->all), the same on every rank; *done: the checkpoint is complete.
 * One failed rank fails all (usually HAPT_ERR_IO). Collective over env->world if one failed. */
enum hapt_status saving_advance(struct saving *saving, bool *done);
/* Waits for the checkpoint in progress, if any. Collective over env->world; ends in agreement. */
enum hapt_status saving_finish(struct saving *saving, bool *done);
/* Ends the thread; waits for its disk writes. */
void saving_release(struct saving *saving);

#endif
