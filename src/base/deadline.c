#include "hapt/deadline.h"

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "hapt/env.h"

#define TICK_S 0.25
#define FIRST_WORD_S 5.0 /* after which the phase is told of */
#define LATER_WORD_S 15.0
#define TURN_S 1.5 /* ranks speak one behind the other: the first one that does ends the job */
enum { LAST_TURN = 20 };

static struct {
    pthread_mutex_t lock;
    bool running;
    const char *what; /* NULL: none */
    int code;         /* to end with in silence; 0: the phase is told of */
    double limit_s, lasted_s, next_word_s;
} deadline = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* The launcher's word, since MPI may not be up. */
static int launched_rank(void)
{
    static const char *const name[] = {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"};
    for (size_t i = 0; i < sizeof name / sizeof *name; i++) {
        const char *value = getenv(name[i]);
        if (value && *value) return atoi(value);
    }
    return 0;
}

_Noreturn static void end_process(const char *what, double limit_s)
{
    char host[HAPT_HOSTNAME_CHARS] = "?";
    gethostname(host, sizeof host - 1);
    fprintf(stderr,
            "hapt: error: %s lasted longer than %.3g s (rank %d on host %s): a rank is stopped, dead or out of reach\n"
            "hint: look at the processes and the network of all hosts of the job; --timeout allows longer waits\n",
            what, limit_s, launched_rank(), host);
    fflush(stderr);
    _exit(HAPT_ERR_COMM);
}

static void *watch(void *argument)
{
    (void)argument;
    const int rank = launched_rank();
    const double turn_s = TURN_S * (rank < LAST_TURN ? rank : LAST_TURN);
    for (double looked_s = hapt_time_s();;) {
        hapt_time_sleep_until(looked_s + TICK_S);
        const double now_s = hapt_time_s();
        pthread_mutex_lock(&deadline.lock);
        if (!deadline.what) break;
        deadline.lasted_s += fmin(now_s - looked_s, 4 * TICK_S);
        looked_s = now_s;
        const bool quiet = deadline.code != 0, late = deadline.lasted_s > deadline.limit_s + (quiet ? 0 : turn_s);
        if (late && quiet) _exit(deadline.code);
        if (rank == 0 && !quiet && !late && deadline.lasted_s > deadline.next_word_s) {
            fprintf(stderr, "hapt: %s: %.0f s so far, at most %.3g s\n", deadline.what, deadline.lasted_s,
                    deadline.limit_s);
            deadline.next_word_s = deadline.lasted_s + LATER_WORD_S;
        }
        if (late) end_process(deadline.what, deadline.limit_s);
        pthread_mutex_unlock(&deadline.lock);
    }
    deadline.running = false; /* the next phase starts another one */
    pthread_mutex_unlock(&deadline.lock);
    return NULL;
}

static void start(void)
{
    pthread_t thread;
    sigset_t every, before;
    sigfillset(&every); /* signals belong to the compute thread */
    pthread_sigmask(SIG_SETMASK, &every, &before);
    deadline.running = pthread_create(&thread, NULL, watch, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!deadline.running) return; /* then nothing is watched; all else works */
    pthread_setname_np(thread, "hapt-deadline");
    pthread_detach(thread);
}

static void begin(const char *what, int code, double limit_s)
{
    pthread_mutex_lock(&deadline.lock);
    if (!deadline.running) start();
    deadline.what = what;
    deadline.code = code;
    deadline.limit_s = limit_s;
    deadline.lasted_s = 0;
    deadline.next_word_s = FIRST_WORD_S;
    pthread_mutex_unlock(&deadline.lock);
}

void hapt_deadline_set(const char *what, double limit_s)
{
    begin(what, 0, limit_s);
}

void hapt_deadline_exit(int code, double limit_s)
{
    begin("the end", code, limit_s);
}

void hapt_deadline_clear(void)
{
    pthread_mutex_lock(&deadline.lock);
    deadline.what = NULL;
    pthread_mutex_unlock(&deadline.lock);
}
