/* Heartbeats in a ring of all ranks. */
#include "hapt/heartbeat.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "hapt/link.h"

#define BEAT_S 0.5     /* between two heartbeats sent */
#define LOOK_S 0.1     /* between two polls for the neighbour's heartbeat */
#define MAX_TICK_S 1.0 /* a longer interval: this process itself was suspended; so it counts as this */
#define BEAT_TAG 1

struct beat {
    int64_t leaving, agreements;
    char doing[160];
};

static struct {
    MPI_Comm comm;
    int rank, size;
    double silence_s;
    pthread_t thread;
    bool running;
    pthread_mutex_t lock;
    pthread_cond_t left;           /* signalled with `leaving` */
    struct hapt_activity activity; /* under the lock, like `leaving` */
    bool leaving;
} heartbeat = {.lock = PTHREAD_MUTEX_INITIALIZER, .activity = {"start", -1, -1, -1, -1}};

void hapt_heartbeat_note(struct hapt_activity activity)
{
    pthread_mutex_lock(&heartbeat.lock);
    heartbeat.activity = activity;
    pthread_mutex_unlock(&heartbeat.lock);
}

static void describe(const struct hapt_activity *activity, char *text, size_t size)
{
    int length = 0;
    if (activity->stage >= 0) length += snprintf(text + length, size - (size_t)length, "stage %d, ", activity->stage);
    length += snprintf(text + length, size - (size_t)length, "%s", activity->what);
    if (activity->step >= 0)
        length += snprintf(text + length, size - (size_t)length, " of step %lld", (long long)activity->step);
    if (activity->microbatch >= 0)
        length += snprintf(text + length, size - (size_t)length, ", microbatch %d", activity->microbatch);
    if (activity->peer_stage >= 0)
        snprintf(text + length, size - (size_t)length, ", peer stage %d", activity->peer_stage);
}

static bool fill(struct beat *beat)
{
    pthread_mutex_lock(&heartbeat.lock);
    const struct hapt_activity activity = heartbeat.activity;
    beat->leaving = heartbeat.leaving;
    pthread_mutex_unlock(&heartbeat.lock);
    beat->agreements = hapt_env_agreements();
    describe(&activity, beat->doing, sizeof beat->doing);
    return beat->leaving != 0;
}

static bool passed(MPI_Request *request)
{
    int done = 0;
    return MPI_Test(request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || done;
}

_Noreturn static void name_silent(int rank, const struct beat *last, double silent_s)
{
    char mine[160];
    struct beat now;
    fill(&now);
    snprintf(mine, sizeof mine, "%s", now.doing);
    hapt_die(hapt_fail(
        HAPT_ERR_COMM, "look for a stopped or dead process or an unreachable host there; --timeout sets the limit",
        "rank %d on host %s has not been heard of for %.3g s; its last activity: %s; rank %d on host %s was at: %s",
        rank, hapt_env_host(rank), silent_s, last->doing, heartbeat.rank, hapt_env_host(heartbeat.rank), mine));
}

/* This rank waits in an agreement that its neighbour completed. MPI can lose messages of a collective operation when
 * memory is short (Open MPI 4.1). */
_Noreturn static void name_lost(int rank, double behind_s)
{
    struct beat now;
    fill(&now);
    hapt_die(
        hapt_fail(HAPT_ERR_COMM, "start again; MPI loses messages when memory is short: see that each host has enough",
                  "rank %d on host %s has waited for %.3g s in an agreement of all ranks that rank %d completed: MPI "
                  "lost a message; activity: %s",
                  heartbeat.rank, hapt_env_host(heartbeat.rank), behind_s, rank, now.doing));
}

/* Waits until then, or until the rank is to leave. */
static void rest_until(double until_s)
{
    const struct timespec until = hapt_time_spec(until_s);
    pthread_mutex_lock(&heartbeat.lock);
    while (!heartbeat.leaving && pthread_cond_timedwait(&heartbeat.left, &heartbeat.lock, &until) == 0) {
    }
    pthread_mutex_unlock(&heartbeat.lock);
}

static void *run_heartbeat(void *argument)
{
    (void)argument;
    pthread_setname_np(pthread_self(), "hapt-heartbeat");
    const int next = (heartbeat.rank + 1) % heartbeat.size,
              before = (heartbeat.rank + heartbeat.size - 1) % heartbeat.size;
    struct beat out = {0}, in = {0}, last = {.doing = "nothing"};
    MPI_Request sending = MPI_REQUEST_NULL, hearing = MPI_REQUEST_NULL;
    double silent_s = 0, behind_s = 0, looked_s = hapt_time_s(), beat_s = 0;
    int64_t agreements = 0;
    bool said_farewell = false, heard_farewell = false;
    while (!said_farewell || !heard_farewell || sending != MPI_REQUEST_NULL) {
        const double now_s = hapt_time_s();
        const double tick_s = fmin(now_s - looked_s, MAX_TICK_S);
        silent_s += tick_s;
        const bool waits = last.agreements > agreements && hapt_env_agreements() == agreements;
        behind_s = waits ? behind_s + tick_s : 0;
        agreements = hapt_env_agreements();
        looked_s = now_s;
        if (sending != MPI_REQUEST_NULL && passed(&sending)) sending = MPI_REQUEST_NULL;
        bool hurried;
        pthread_mutex_lock(&heartbeat.lock);
        hurried = heartbeat.leaving;
        pthread_mutex_unlock(&heartbeat.lock);
        if (sending == MPI_REQUEST_NULL && !said_farewell && (hurried || now_s >= beat_s + BEAT_S)) {
            said_farewell = fill(&out);
            beat_s = now_s;
            if (MPI_Isend(&out, (int)sizeof out, MPI_BYTE, next, BEAT_TAG, heartbeat.comm, &sending) != MPI_SUCCESS)
                break;
        }
        for (;;) { /* receive all that have arrived */
            if (hearing == MPI_REQUEST_NULL && !heard_farewell &&
                MPI_Irecv(&in, (int)sizeof in, MPI_BYTE, before, BEAT_TAG, heartbeat.comm, &hearing) != MPI_SUCCESS)
                return NULL;
            if (hearing == MPI_REQUEST_NULL || !passed(&hearing)) break;
            hearing = MPI_REQUEST_NULL;
            last = in;
            silent_s = 0;
            heard_farewell = in.leaving != 0;
        }
        if (!heard_farewell && silent_s > heartbeat.silence_s) name_silent(before, &last, silent_s);
        if (behind_s > heartbeat.silence_s) name_lost(before, behind_s);
        if (hurried)
            hapt_time_sleep_until(now_s + 1e-3);
        else
            rest_until(now_s + LOOK_S);
    }
    return NULL;
}

/* Runs before MPI ends: the thread says farewell to its neighbour and waits for the other neighbour's farewell. */
static void stop_heartbeat(void)
{
    if (!heartbeat.running) return;
    pthread_mutex_lock(&heartbeat.lock);
    heartbeat.leaving = true;
    pthread_cond_signal(&heartbeat.left);
    pthread_mutex_unlock(&heartbeat.lock);
    pthread_join(heartbeat.thread, NULL);
    heartbeat.running = false;
    pthread_cond_destroy(&heartbeat.left);
    MPI_Comm_free(&heartbeat.comm);
}

enum hapt_status hapt_heartbeat_start(const struct hapt_env *env, double silence_s)
{
    if (env->world_size == 1 || heartbeat.running) return HAPT_OK;
    HAPT_MPI(MPI_Comm_dup(env->world, &heartbeat.comm));
    MPI_Comm_set_errhandler(heartbeat.comm, MPI_ERRORS_RETURN);
    heartbeat.rank = env->world_rank;
    heartbeat.size = env->world_size;
    heartbeat.silence_s = silence_s;
    hapt_time_condition_init(&heartbeat.left);
    const int error = hapt_thread_start(&heartbeat.thread, run_heartbeat, NULL);
    heartbeat.running = error == 0;
    /* Without a thread, the neighbour would declare this rank dead. */
    if (error) hapt_die(hapt_fail(HAPT_ERR_MEMORY, NULL, "cannot start the heartbeat thread: %s", strerror(error)));
    hapt_env_at_release(stop_heartbeat);
    return HAPT_OK;
}
