#include "hapt/deadline.h"

#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "hapt/env.h"
#include "hapt/stop.h"

#define TICK_S 0.25
#define FIRST_REPORT_S 5.0 /* first progress message */
#define LATER_REPORT_S 15.0
#define RANK_DELAY_S 1.5 /* delay per rank before it reports: the first rank that reports ends the job */
enum { MAX_DELAYED_RANK = 20 };

static struct {
    pthread_mutex_t lock;
    bool running;
    const char *what; /* NULL: no phase is watched */
    int code;         /* silent exit with this code; 0: report the phase */
    double limit_s, lasted_s, next_report_s;
} deadline = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* From the launcher's environment, since MPI may not be initialized. */
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
    /* When a launcher ends the job, the rank that failed first has reported the error already. */
    if (hapt_stop_terminated()) _exit(HAPT_ERR_COMM);
    fprintf(stderr,
            "hapt: error: %s lasted longer than %.3g s (rank %d on host %s): a rank is stopped, dead or unreachable\n"
            "hint: check the processes and the network of all hosts of the job; --timeout allows longer waits\n",
            what, limit_s, launched_rank(), host);
    fflush(stderr);
    _exit(HAPT_ERR_COMM);
}

static void *watch(void *argument)
{
    (void)argument;
    const int rank = launched_rank();
    const double delay_s = RANK_DELAY_S * (rank < MAX_DELAYED_RANK ? rank : MAX_DELAYED_RANK);
    for (double looked_s = hapt_time_s();;) {
        hapt_time_sleep_until(looked_s + TICK_S);
        const double now_s = hapt_time_s();
        pthread_mutex_lock(&deadline.lock);
        if (!deadline.what) break;
        deadline.lasted_s += fmin(now_s - looked_s, 4 * TICK_S);
        looked_s = now_s;
        const bool quiet = deadline.code != 0, late = deadline.lasted_s > deadline.limit_s + (quiet ? 0 : delay_s);
        if (late && quiet) _exit(deadline.code);
        if (rank == 0 && !quiet && !late && deadline.lasted_s > deadline.next_report_s) {
            fprintf(stderr, "hapt: %s: %.0f s so far, at most %.3g s\n", deadline.what, deadline.lasted_s,
                    deadline.limit_s);
            deadline.next_report_s = deadline.lasted_s + LATER_REPORT_S;
        }
        if (late) end_process(deadline.what, deadline.limit_s);
        pthread_mutex_unlock(&deadline.lock);
    }
    deadline.running = false; /* the next phase starts a new thread */
    pthread_mutex_unlock(&deadline.lock);
    return NULL;
}

static void start(void)
{
    pthread_t thread;
    deadline.running = hapt_thread_start(&thread, watch, NULL) == 0;
    if (!deadline.running) return; /* then no phase is watched; everything else works */
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
    deadline.next_report_s = FIRST_REPORT_S;
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
