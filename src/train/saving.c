#include "saving.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "hapt/link.h"

#define WRITER_NICE 5 /* nice increment: training goes first if cores are scarce */

static void lock(struct saving *saving)
{
    if (saving->running) pthread_mutex_lock(&saving->lock);
}

static void unlock(struct saving *saving)
{
    if (saving->running) pthread_mutex_unlock(&saving->lock);
}

static bool is_work(enum saving_state state)
{
    return state == SAVING_WRITING || state == SAVING_PUBLISHING;
}

/* Does the work of the state and enters the next. The lock is held, but not while working. */
static void work(struct saving *saving)
{
    struct hapt_arena scratch;
    const bool writes = saving->state == SAVING_WRITING;
    struct checkpoint_shard shard = saving->shard;
    unlock(saving);
    hapt_arena_init(&scratch);
    const enum hapt_status status = writes ? checkpoint_write_shard(saving->writer, saving->step, &scratch, &shard)
                                           : checkpoint_publish(saving->writer, saving->step, &saving->history,
                                                                saving->shards, saving->env->world_size, &scratch);
    hapt_arena_release(&scratch);
    lock(saving);
    saving->shard = shard;
    saving->status = status;
    saving->state = status != HAPT_OK ? SAVING_FAILED : writes ? SAVING_WRITTEN : SAVING_PUBLISHED;
    if (saving->running) pthread_cond_broadcast(&saving->changed);
}

static void *run(void *context)
{
    struct saving *saving = context;
    pthread_setname_np(pthread_self(), "hapt-save");
    const int self = (int)syscall(SYS_gettid);
    setpriority(PRIO_PROCESS, (id_t)self, getpriority(PRIO_PROCESS, (id_t)self) + WRITER_NICE);
    pthread_mutex_lock(&saving->lock);
    for (;;) {
        if (saving->copies && is_work(saving->state))
            work(saving);
        else if (saving->quit)
            break;
        else
            pthread_cond_wait(&saving->changed, &saving->lock);
    }
    pthread_mutex_unlock(&saving->lock);
    return NULL;
}

enum hapt_status saving_open(struct saving *saving, const struct hapt_env *env,
                             const struct hapt_checkpoint_writer *writer, struct hapt_arena *arena)
{
    *saving = (struct saving){.env = env, .writer = writer};
    HAPT_NEW(saving->all, arena, env->world_size);
    HAPT_NEW(saving->shards, arena, env->world_size);
    return HAPT_OK;
}

enum hapt_status saving_start_thread(struct saving *saving)
{
    if (saving->writer->shard < 0 && saving->env->world_rank != 0) return HAPT_OK;
    pthread_mutex_init(&saving->lock, NULL);
    hapt_time_condition_init(&saving->changed);
    const int error = hapt_thread_start(&saving->thread, run, saving);
    if (error) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no thread to write checkpoints: %s", strerror(error));
    saving->running = true;
    return HAPT_OK;
}

static void enter(struct saving *saving, enum saving_state state)
{
    lock(saving);
    saving->state = state;
    if (saving->running) pthread_cond_broadcast(&saving->changed);
    if (is_work(state) && !saving->copies) work(saving);
    unlock(saving);
}

static const char *describe(const struct saving *saving, char what[64])
{
    snprintf(what, 64, "checkpoint of step %lld", (long long)saving->step);
    return what;
}

/* All ranks return the status of the lowest failing one, which prints. */
static enum hapt_status agree(const struct saving *saving, enum hapt_status status)
{
    char what[64];
    return hapt_link_agree(saving->env->world, describe(saving, what), saving->writer->patience_s, status);
}

enum hapt_status saving_begin(struct saving *saving, int64_t step, const struct hapt_history *history, bool copies)
{
    HAPT_ASSERT(!saving_is_active(saving));
    lock(saving); /* the idle thread may look */
    saving->step = step;
    saving->history = *history;
    saving->copies = copies;
    saving->publishes = false;
    saving->status = HAPT_OK;
    saving->shard = (struct checkpoint_shard){.shard = -1, .constant = -1};
    unlock(saving);
    if (!copies) HAPT_TRY(agree(saving, saving->env->world_rank ? HAPT_OK : checkpoint_begin(saving->writer, step)));
    enter(saving, copies ? SAVING_COPYING : SAVING_WRITING);
    return HAPT_OK;
}

void saving_copied(struct saving *saving)
{
    enter(saving, saving->writer->shard < 0 ? SAVING_WRITTEN : SAVING_WRITING);
}

void saving_vote(struct saving *saving, struct saving_vote *vote)
{
    lock(saving);
    *vote = (struct saving_vote){.state = saving->state, .shard = saving->shard};
    unlock(saving);
}

bool saving_is_active(struct saving *saving)
{
    struct saving_vote mine;
    saving_vote(saving, &mine);
    return mine.state != SAVING_IDLE;
}

/* Waits until this rank's work is done; returns its status. Has a deadline, because the disk may hang. */
static enum hapt_status wait_for_work(struct saving *saving)
{
    struct timespec until;
    int error = 0;
    if (!saving->running) return saving->status;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += (time_t)saving->writer->patience_s + 1;
    lock(saving);
    while (is_work(saving->state) && error != ETIMEDOUT)
        error = pthread_cond_timedwait(&saving->changed, &saving->lock, &until);
    const bool late = is_work(saving->state);
    const enum hapt_status status = saving->status;
    unlock(saving);
    if (late)
        hapt_die(hapt_fail(HAPT_ERR_IO,
                           "check the file system; older checkpoints are intact: start again with --resume",
                           "the disk of %s took more than %.0f s for the checkpoint of step %lld",
                           saving->writer->folder, saving->writer->patience_s, (long long)saving->step));
    return status;
}

/* Handles a failure on any rank. Rank 0 frees the space of a full disk; a failed publication has done so itself. */
static enum hapt_status fail(struct saving *saving)
{
    const enum hapt_status status = agree(saving, wait_for_work(saving));
    if (saving->env->world_rank == 0 && !saving->publishes) checkpoint_discard(saving->writer, saving->step);
    enter(saving, SAVING_IDLE);
    return status;
}

enum hapt_status saving_advance(struct saving *saving, bool *done)
{
    bool written = true;
    *done = false;
    if (!saving_is_active(saving)) return HAPT_OK;
    for (int r = 0; r < saving->env->world_size; r++) {
        if (saving->all[r].state == SAVING_FAILED) return fail(saving);
        written = written && saving->all[r].state == SAVING_WRITTEN;
    }
    *done = saving->all[0].state == SAVING_PUBLISHED;
    if (*done) {
        enter(saving, SAVING_IDLE);
    } else if (written && saving->env->world_rank == 0) {
        for (int r = 0; r < saving->env->world_size; r++) saving->shards[r] = saving->all[r].shard;
        saving->publishes = true;
        enter(saving, SAVING_PUBLISHING);
    }
    return HAPT_OK;
}

enum hapt_status saving_finish(struct saving *saving, bool *done)
{
    char what[64];
    struct saving_vote mine;
    *done = false;
    while (saving_is_active(saving)) {
        wait_for_work(saving);
        saving_vote(saving, &mine);
        const enum hapt_status status =
            hapt_link_all_gather(saving->env->world, what, saving->writer->patience_s, &mine, sizeof mine, saving->all);
        if (status != HAPT_OK) hapt_die(status);
        HAPT_TRY(saving_advance(saving, done));
    }
    return HAPT_OK;
}

void saving_release(struct saving *saving)
{
    if (!saving->running) return;
    lock(saving);
    saving->quit = true;
    pthread_cond_broadcast(&saving->changed);
    unlock(saving);
    pthread_join(saving->thread, NULL);
    pthread_cond_destroy(&saving->changed);
    pthread_mutex_destroy(&saving->lock);
    saving->running = false;
}
