/* Signals that ask the process to leave. The handler does nothing but note the time, write a line, or end the process. */
#include "hapt/stop.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#define SAME_REQUEST_S 1.0

static struct {
    bool listening;
    int world_rank;
    volatile sig_atomic_t asked, terminated, deferred;
    double asked_s; /* written by the handler alone */
} state;

static const int heard[3] = {SIGTERM, SIGUSR1, SIGALRM};

static void note_signal(int number)
{
    static const char again[] = "hapt: asked again: leaving at once; the newest whole checkpoint stands\n";
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const double now_s = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    if (number == SIGALRM) {
        if (state.asked && !state.deferred) _exit(HAPT_STOPPED);
        return;
    }
    if (number == SIGTERM) state.terminated = 1;
    if (!state.asked) {
        state.asked = 1;
        state.asked_s = now_s;
        if (!state.deferred) alarm(HAPT_STOP_GRACE_S);
        return;
    }
    if (now_s - state.asked_s < SAME_REQUEST_S) return;
    if (state.world_rank == 0 && write(STDERR_FILENO, again, sizeof again - 1) < 0) _exit(128 + number);
    _exit(128 + number);
}

/* The handler runs on a stack of its own: oneDNN's matrix product points the stack register into the heap while it
 * works, and a signal's frame would be written over whatever lies below. */
void hapt_stop_listen(const struct hapt_env *env)
{
    static _Alignas(64) char stack[65536];
    const stack_t alternate = {.ss_sp = stack, .ss_size = sizeof stack};
    struct sigaction action = {.sa_handler = note_signal, .sa_flags = SA_RESTART | SA_ONSTACK};
    state.world_rank = env->world_rank;
    /* One at a time: two different signals must not run through each other. */
    sigemptyset(&action.sa_mask);
    for (int i = 0; i < 3; i++) sigaddset(&action.sa_mask, heard[i]);
    sigaltstack(&alternate, NULL);
    for (int i = 0; i < 3; i++) sigaction(heard[i], &action, NULL);
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

bool hapt_stop_due(void)
{
    return state.asked && !state.deferred;
}
