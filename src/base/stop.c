/* Signals that request a stop. The handler only stores the time, writes a line, or ends the process. */
#include "hapt/stop.h"

#include <signal.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "hapt/crash.h"

#define SAME_REQUEST_S 1.0

static struct {
    bool listening;
    volatile sig_atomic_t asked, terminated, deferred, silent; /* silent: another rank prints */
    double asked_s;                                            /* written by the handler only */
} state;

static const struct {
    int number;
    const char *name;
} heard[] = {{SIGTERM, "SIGTERM"}, {SIGUSR1, "SIGUSR1"}, {SIGINT, "SIGINT"},
             {SIGHUP, "SIGHUP"},   {SIGPIPE, "SIGPIPE"}, {SIGXFSZ, "SIGXFSZ"}};
enum { HEARD = sizeof heard / sizeof *heard };

static void note_signal(int number)
{
    static const char first[] =
        "\nhapt: asked to stop: the current step ends and is saved; press Ctrl-C again to stop at once\n";
    static const char early[] = "hapt: stopped by a signal before training began; start again\n";
    static const char again[] = "hapt: asked again: stopping at once; the newest complete checkpoint remains\n";
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const double now_s = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    if (number == SIGALRM) {
        if (!state.asked || state.deferred) return;
        if (!state.silent && write(STDERR_FILENO, early, sizeof early - 1) < 0) _exit(HAPT_STOPPED);
        _exit(HAPT_STOPPED);
    }
    if (number == SIGTERM) state.terminated = 1;
    if (!state.asked) {
        state.asked = number;
        state.asked_s = now_s;
        if (number == SIGINT && !state.silent && write(STDERR_FILENO, first, sizeof first - 1) < 0) state.silent = 1;
        if (!state.deferred) alarm(HAPT_STOP_GRACE_S);
        return;
    }
    if (now_s - state.asked_s < SAME_REQUEST_S || number == SIGPIPE || number == SIGXFSZ) return;
    if (!state.silent && write(STDERR_FILENO, again, sizeof again - 1) < 0) _exit(128 + number);
    _exit(128 + number);
}

void hapt_stop_listen(void)
{
    struct sigaction action = {.sa_handler = note_signal, .sa_flags = SA_RESTART | SA_ONSTACK}, before;
    const char *rank = getenv("OMPI_COMM_WORLD_RANK");
    if (!rank) rank = getenv("PMIX_RANK");
    state.silent = rank && atoi(rank) != 0;
    /* Block the other signals: two handlers must not run at once. */
    sigemptyset(&action.sa_mask);
    for (int i = 0; i < HEARD; i++) sigaddset(&action.sa_mask, heard[i].number);
    sigaddset(&action.sa_mask, SIGALRM);
    hapt_crash_set_stack();
    sigaction(SIGALRM, &action, NULL);
    for (int i = 0; i < HEARD; i++) {
        /* Ignored by nohup or a background shell: stay ignored. */
        const bool may_be_ignored = heard[i].number == SIGINT || heard[i].number == SIGHUP;
        if (may_be_ignored && sigaction(heard[i].number, NULL, &before) == 0 && before.sa_handler == SIG_IGN) continue;
        sigaction(heard[i].number, &action, NULL);
    }
    state.listening = true;
}

void hapt_stop_defer(void)
{
    state.deferred = 1;
    if (state.listening) alarm(0);
}

bool hapt_stop_asked(void)
{
    return state.asked;
}

bool hapt_stop_terminated(void)
{
    return state.terminated;
}

const char *hapt_stop_name(void)
{
    for (int i = 0; i < HEARD; i++)
        if (heard[i].number == state.asked) return heard[i].name;
    return "a signal";
}

bool hapt_stop_due(void)
{
    return state.asked && !state.deferred;
}
