#include "state_copies.h"

#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/env.h"

enum { MOST_JOBS = 256 };
#define PIECE_BYTES ((size_t)1 << 20) /* small against a window, large against a wakeup */

struct job {
    const char *what;
    char *to;
    const char *from;
    size_t bytes, at;            /* at: the first byte of the current piece */
    double submitted_s, begin_s; /* begin: the previous copy was due, or this one was submitted */
};

struct channel {
    struct job job[MOST_JOBS]; /* ring: copy k is in k % MOST_JOBS */
    int64_t submitted, done;
    int64_t pieces; /* completed ones, of all copies */
    bool copied;    /* the current piece; it waits for due_s */
    double due_s;
};

struct state_copies {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* of any state; on CLOCK_MONOTONIC */
    double bandwidth, timeout_s;
    bool ends;
    struct hapt_span_log *log; /* NULL: none */
    struct channel channel[2]; /* by enum state_direction */
};

static size_t piece_of(const struct job *job)
{
    return job->bytes - job->at < PIECE_BYTES ? job->bytes - job->at : PIECE_BYTES;
}

/* Starts the current piece, or completes it if it is due. Holds the lock, except while it copies. Returns true if the
 * state changed; else *next_s becomes the time at which it will, if that is earlier. */
static bool advance(struct state_copies *copies, struct channel *channel, double *next_s)
{
    if (channel->done == channel->submitted) return false;
    struct job *job = &channel->job[channel->done % MOST_JOBS];
    const size_t bytes = piece_of(job);
    if (!channel->copied) {
        const double begin_s = fmax(channel->due_s, job->submitted_s);
        if (job->at == 0) job->begin_s = begin_s;
        channel->due_s = begin_s + (double)bytes / copies->bandwidth;
        pthread_mutex_unlock(&copies->lock);
        memcpy(job->to + job->at, job->from + job->at, bytes);
        pthread_mutex_lock(&copies->lock);
        channel->copied = true;
        return true;
    }
    if (hapt_time_s() < channel->due_s) {
        *next_s = fmin(*next_s, channel->due_s);
        return false;
    }
    channel->copied = false;
    channel->pieces++;
    job->at += bytes;
    if (job->at == job->bytes) {
        hapt_span_log_add(copies->log, state_span(channel == &copies->channel[STATE_IN] ? STATE_IN : STATE_OUT),
                          job->begin_s, channel->due_s);
        channel->done++;
    }
    pthread_cond_broadcast(&copies->changed);
    return true;
}

static void *run(void *argument)
{
    struct state_copies *copies = argument;
    pthread_setname_np(pthread_self(), "hapt-state");
    pthread_mutex_lock(&copies->lock);
    while (!copies->ends) {
        double next_s = INFINITY;
        bool moved = false;
        for (int d = 0; d < 2; d++) moved |= advance(copies, &copies->channel[d], &next_s);
        if (moved) continue;
        if (isfinite(next_s)) {
            const struct timespec at = hapt_time_spec(next_s);
            pthread_cond_timedwait(&copies->changed, &copies->lock, &at);
        } else {
            pthread_cond_wait(&copies->changed, &copies->lock);
        }
    }
    pthread_mutex_unlock(&copies->lock);
    return NULL;
}

enum hapt_status state_copies_create(double bandwidth, double timeout_s, struct state_copies **copies)
{
    struct state_copies *made = calloc(1, sizeof *made);
    pthread_condattr_t monotonic;
    if (!made) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no host memory for an engine");
    made->bandwidth = bandwidth;
    made->timeout_s = timeout_s;
    pthread_mutex_init(&made->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&made->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    const int error = hapt_thread_start(&made->thread, run, made);
    if (error) {
        pthread_cond_destroy(&made->changed);
        pthread_mutex_destroy(&made->lock);
        free(made);
        return hapt_fail(HAPT_ERR_MEMORY, NULL, "cannot start the thread that copies optimizer state: %s",
                         strerror(error));
    }
    *copies = made;
    return HAPT_OK;
}

void state_copies_log(struct state_copies *copies, struct hapt_span_log *log)
{
    pthread_mutex_lock(&copies->lock);
    copies->log = log;
    pthread_mutex_unlock(&copies->lock);
}

void state_copies_destroy(struct state_copies *copies)
{
    if (!copies) return;
    pthread_mutex_lock(&copies->lock);
    copies->ends = true;
    pthread_cond_broadcast(&copies->changed);
    pthread_mutex_unlock(&copies->lock);
    pthread_join(copies->thread, NULL);
    pthread_cond_destroy(&copies->changed);
    pthread_mutex_destroy(&copies->lock);
    free(copies);
}

void state_copies_submit(struct state_copies *copies, enum state_direction direction, const char *what, void *to,
                         const void *from, size_t bytes)
{
    struct channel *channel = &copies->channel[direction];
    if (bytes == 0) return;
    if (channel->submitted >= MOST_JOBS) /* one thread at a time submits: state_copies.h */
        state_copies_wait(copies, direction, channel->submitted - MOST_JOBS + 1);
    const double now_s = hapt_time_s();
    pthread_mutex_lock(&copies->lock);
    channel->job[channel->submitted++ % MOST_JOBS] =
        (struct job){.what = what, .to = to, .from = from, .bytes = bytes, .submitted_s = now_s};
    pthread_cond_broadcast(&copies->changed);
    pthread_mutex_unlock(&copies->lock);
}

int64_t state_copies_mark(struct state_copies *copies, enum state_direction direction)
{
    return copies->channel[direction].submitted;
}

/* Ends the job: other ranks would wait for this one. */
_Noreturn static void name_stalled(const struct state_copies *copies, enum state_direction direction)
{
    const struct channel *channel = &copies->channel[direction];
    hapt_die(hapt_fail(
        HAPT_ERR_COMM,
        "see that the host is not overloaded, and that \"bandwidth\" of \"host\" in the cluster file is "
        "right; --timeout sets the limit",
        "the copy of offloaded memory %s has made no progress for %.3g s: %lld of %lld blocks are complete, and "
        "%zu of %zu bytes of the next one, which begins with %s",
        direction == STATE_IN ? "from the host to the device" : "from the device to the host", copies->timeout_s,
        (long long)channel->done, (long long)channel->submitted, channel->job[channel->done % MOST_JOBS].at,
        channel->job[channel->done % MOST_JOBS].bytes, channel->job[channel->done % MOST_JOBS].what));
}

void state_copies_wait(struct state_copies *copies, enum state_direction direction, int64_t mark)
{
    const struct channel *channel = &copies->channel[direction];
    pthread_mutex_lock(&copies->lock);
    int64_t pieces = channel->pieces;
    double since_s = hapt_time_s();
    while (channel->done < mark) {
        if (copies->timeout_s > 0) {
            const struct timespec limit = hapt_time_spec(since_s + copies->timeout_s);
            pthread_cond_timedwait(&copies->changed, &copies->lock, &limit);
        } else {
            pthread_cond_wait(&copies->changed, &copies->lock);
        }
        const double now_s = hapt_time_s();
        if (channel->pieces != pieces) {
            pieces = channel->pieces;
            since_s = now_s;
        } else if (copies->timeout_s > 0 && now_s > since_s + copies->timeout_s) {
            name_stalled(copies, direction);
        }
    }
    pthread_mutex_unlock(&copies->lock);
}
