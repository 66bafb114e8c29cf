#include "snapshot.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "hapt/link.h"

#define WRITER_NICE 5 /* nice increment: training goes first if cores are scarce */

static enum hapt_status work(struct snapshot *snapshot, enum snapshot_phase phase, struct checkpoint_shard *shard)
{
    struct hapt_arena scratch;
    enum hapt_status status = HAPT_OK;
    hapt_arena_init(&scratch);
    if (phase == SNAPSHOT_WRITING)
        status = checkpoint_write_shard(&snapshot->writer, snapshot->step, &scratch, shard);
    else
        status = checkpoint_publish(&snapshot->writer, snapshot->step, &snapshot->history, snapshot->shards,
                                    snapshot->env->world_size, &scratch);
    hapt_arena_release(&scratch);
    return status;
}

static bool busy(enum snapshot_phase phase)
{
    return phase == SNAPSHOT_WRITING || phase == SNAPSHOT_PUBLISHING;
}

static void *run(void *context)
{
    struct snapshot *snapshot = context;
    pthread_setname_np(pthread_self(), "hapt-save");
    const int self = (int)syscall(SYS_gettid);
    setpriority(PRIO_PROCESS, (id_t)self, getpriority(PRIO_PROCESS, (id_t)self) + WRITER_NICE);
    pthread_mutex_lock(&snapshot->lock);
    for (;;) {
        while (!snapshot->quit && !busy(snapshot->phase)) pthread_cond_wait(&snapshot->changed, &snapshot->lock);
        if (!busy(snapshot->phase)) break;
        const enum snapshot_phase phase = snapshot->phase;
        struct checkpoint_shard shard = snapshot->shard;
        pthread_mutex_unlock(&snapshot->lock);
        const enum hapt_status status = work(snapshot, phase, &shard);
        pthread_mutex_lock(&snapshot->lock);
        snapshot->shard = shard;
        snapshot->status = status;
        snapshot->phase = status != HAPT_OK           ? SNAPSHOT_FAILED
                          : phase == SNAPSHOT_WRITING ? SNAPSHOT_WRITTEN
                                                      : SNAPSHOT_PUBLISHED;
        pthread_cond_broadcast(&snapshot->changed);
    }
    pthread_mutex_unlock(&snapshot->lock);
    return NULL;
}

enum hapt_status snapshot_open(struct snapshot *snapshot, const struct hapt_env *env,
                               const struct hapt_checkpoint_writer *writer, struct hapt_arena *arena)
{
    *snapshot = (struct snapshot){.env = env, .writer = *writer};
    HAPT_NEW(snapshot->all, arena, env->world_size);
    HAPT_NEW(snapshot->shards, arena, env->world_size);
    if (writer->shard < 0 && env->world_rank != 0) return HAPT_OK;
    pthread_mutex_init(&snapshot->lock, NULL);
    hapt_time_condition_init(&snapshot->changed);
    const int error = hapt_thread_start(&snapshot->thread, run, snapshot);
    if (error) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no thread to write checkpoints: %s", strerror(error));
    snapshot->running = true;
    return HAPT_OK;
}

static void set_phase(struct snapshot *snapshot, enum snapshot_phase phase)
{
    if (!snapshot->running) {
        snapshot->phase = phase;
        return;
    }
    pthread_mutex_lock(&snapshot->lock);
    snapshot->phase = phase;
    pthread_cond_broadcast(&snapshot->changed);
    pthread_mutex_unlock(&snapshot->lock);
}

void snapshot_start(struct snapshot *snapshot, int64_t step, const struct hapt_history *history)
{
    HAPT_ASSERT(!snapshot->under_way);
    snapshot->step = step;
    snapshot->history = *history;
    snapshot->status = HAPT_OK;
    snapshot->shard = (struct checkpoint_shard){.shard = -1};
    snapshot->under_way = true;
    set_phase(snapshot, snapshot->writer.shard < 0 ? SNAPSHOT_WRITTEN : SNAPSHOT_WRITING);
}

void snapshot_vote(struct snapshot *snapshot, struct snapshot_vote *vote)
{
    if (snapshot->running) pthread_mutex_lock(&snapshot->lock);
    *vote = (struct snapshot_vote){.phase = snapshot->phase, .shard = snapshot->shard};
    if (snapshot->running) pthread_mutex_unlock(&snapshot->lock);
}

static void describe(const struct snapshot *snapshot, char what[64])
{
    snprintf(what, 64, "checkpoint of step %lld", (long long)snapshot->step);
}

/* Waits until this rank's thread is idle; returns its status. Has a deadline, because the disk may hang. */
static enum hapt_status wait_for_thread(struct snapshot *snapshot)
{
    struct timespec until;
    int error = 0;
    if (!snapshot->running) return HAPT_OK;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += (time_t)snapshot->writer.patience_s + 1;
    pthread_mutex_lock(&snapshot->lock);
    while (busy(snapshot->phase) && error != ETIMEDOUT)
        error = pthread_cond_timedwait(&snapshot->changed, &snapshot->lock, &until);
    const bool late = busy(snapshot->phase);
    const enum hapt_status status = snapshot->status;
    pthread_mutex_unlock(&snapshot->lock);
    if (late)
        hapt_die(hapt_fail(HAPT_ERR_IO,
                           "check the file system; older checkpoints are intact: start again with --resume",
                           "the disk of %s took more than %.0f s for the checkpoint of step %lld",
                           snapshot->writer.folder, snapshot->writer.patience_s, (long long)snapshot->step));
    return status;
}

/* Handles a failure on any rank: each waits for its thread; the lowest failing rank prints. */
static enum hapt_status fail(struct snapshot *snapshot)
{
    char what[64];
    struct hapt_arena scratch;
    describe(snapshot, what);
    enum hapt_status status = wait_for_thread(snapshot);
    status = hapt_link_agree(snapshot->env->world, what, snapshot->writer.patience_s, status);
    hapt_arena_init(&scratch);
    if (snapshot->env->world_rank == 0) checkpoint_discard(&snapshot->writer, snapshot->step, &scratch);
    hapt_arena_release(&scratch);
    snapshot->under_way = false;
    set_phase(snapshot, SNAPSHOT_NONE);
    return status;
}

enum hapt_status snapshot_advance(struct snapshot *snapshot, bool *done)
{
    bool written = true;
    *done = false;
    if (!snapshot->under_way) return HAPT_OK;
    for (int r = 0; r < snapshot->env->world_size; r++) {
        if (snapshot->all[r].phase == SNAPSHOT_FAILED) return fail(snapshot);
        written = written && snapshot->all[r].phase == SNAPSHOT_WRITTEN;
    }
    if (snapshot->all[0].phase == SNAPSHOT_PUBLISHED) {
        *done = true;
        snapshot->under_way = false;
        set_phase(snapshot, SNAPSHOT_NONE);
    } else if (written && snapshot->env->world_rank == 0) {
        for (int r = 0; r < snapshot->env->world_size; r++) snapshot->shards[r] = snapshot->all[r].shard;
        set_phase(snapshot, SNAPSHOT_PUBLISHING);
    }
    return HAPT_OK;
}

enum hapt_status snapshot_finish(struct snapshot *snapshot, bool *done)
{
    char what[64];
    struct snapshot_vote mine;
    describe(snapshot, what);
    *done = false;
    while (snapshot->under_way) {
        wait_for_thread(snapshot);
        snapshot_vote(snapshot, &mine);
        const enum hapt_status status = hapt_link_all_gather(snapshot->env->world, what, snapshot->writer.patience_s,
                                                             &mine, sizeof mine, snapshot->all);
        if (status != HAPT_OK) hapt_die(status);
        HAPT_TRY(snapshot_advance(snapshot, done));
    }
    return HAPT_OK;
}

void snapshot_release(struct snapshot *snapshot)
{
    if (!snapshot->running) return;
    pthread_mutex_lock(&snapshot->lock);
    snapshot->quit = true;
    pthread_cond_broadcast(&snapshot->changed);
    pthread_mutex_unlock(&snapshot->lock);
    pthread_join(snapshot->thread, NULL);
    pthread_cond_destroy(&snapshot->changed);
    pthread_mutex_destroy(&snapshot->lock);
    snapshot->running = false;
}
