/* Reports of crashes: handlers that write the call stack. */
#include "hapt/crash.h"

#include <execinfo.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    STACK_BYTES = 1 << 16, /* a frame with AVX-512 and AMX state takes 11 KB, the unwinder a few more */
    MAX_FRAMES = 64,
};

void hapt_crash_set_stack(void)
{
    static _Alignas(64) char stack[STACK_BYTES];
    sigaltstack(&(stack_t){.ss_sp = stack, .ss_size = sizeof stack}, NULL);
}

#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__
static char rank[32]; /* "rank N: ", or empty */

static void say(const char *text)
{
    if (write(STDERR_FILENO, text, strlen(text)) < 0) {
    } /* then the report is lost */
}

/* Every function here is safe in a signal handler. The first call of backtrace, which loads a library, was made
 * before. */
static void report(int number)
{
    void *frame[MAX_FRAMES];
    const char *name = sigabbrev_np(number);
    signal(SIGALRM, SIG_DFL);
    alarm(HAPT_CRASH_REPORT_S);
    say("hapt: ");
    say(rank);
    say("crashed with SIG");
    say(name ? name : "?");
    say(number == SIGBUS ? ": the data file, which is mapped, was truncated during the run or cannot be read; or it is "
                         : ", ");
    say("a defect of hapt or of a library; to be reported with this call stack:\n");
    backtrace_symbols_fd(frame, backtrace(frame, MAX_FRAMES), STDERR_FILENO);
    raise(number); /* SA_RESETHAND restored the default action */
}

void hapt_crash_catch(void)
{
    static const int deadly[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
    struct sigaction action = {.sa_handler = report, .sa_flags = (int)(SA_RESETHAND | SA_NODEFER | SA_ONSTACK)};
    void *frame[1];
    const char *launched = getenv("OMPI_COMM_WORLD_RANK");
    if (!launched) launched = getenv("PMIX_RANK");
    if (launched) snprintf(rank, sizeof rank, "rank %.12s: ", launched);
    hapt_crash_set_stack();
    backtrace(frame, 1);
    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < sizeof deadly / sizeof *deadly; i++) sigaction(deadly[i], &action, NULL);
}
#else
void hapt_crash_catch(void) {}
#endif
