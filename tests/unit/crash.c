/* Crash reports of children: the signal is still the cause of their end, and the report names this program's code. */
#include "hapt/crash.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "test.h"

typedef int way_to_crash(volatile int depth);

static int write_to_null(volatile int depth)
{
    *(volatile int *)(intptr_t)(depth - 1) = 1;
    return depth;
}

static int abort_now(volatile int depth)
{
    if (depth) abort();
    return depth;
}

/* No room is left on the stack for a handler. */
static int overflow_stack(volatile int depth)
{
    volatile char room[4096];
    room[0] = (char)depth;
    return depth + (depth < 1 << 30 ? overflow_stack(depth + 1) : 0) + room[0];
}

static void check_report(way_to_crash *crash, int number, const char *rank, const char *first_line)
{
    int end[2], status = 0;
    char said[8192] = "";
    size_t bytes = 0;
    if (pipe(end)) exit(1);
    const pid_t child = fork();
    if (child == 0) {
        setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
        dup2(end[1], STDERR_FILENO);
        if (rank) setenv("OMPI_COMM_WORLD_RANK", rank, 1);
        hapt_crash_catch();
        _exit(crash(1));
    }
    close(end[1]);
    for (ssize_t more; (more = read(end[0], said + bytes, sizeof said - 1 - bytes)) > 0;) bytes += (size_t)more;
    close(end[0]);
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == number);
#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__
    CHECK(!strncmp(said, first_line, strlen(first_line)));
    CHECK(strstr(said, "call stack"));
    CHECK(strstr(said, program_invocation_short_name)); /* a frame of this program */
#else
    (void)first_line;
#endif
}

static void reports_of_crashes(void)
{
    unsetenv("OMPI_COMM_WORLD_RANK");
    unsetenv("PMIX_RANK");
    check_report(write_to_null, SIGSEGV, "3", "hapt: rank 3: crashed with SIGSEGV, ");
    check_report(abort_now, SIGABRT, NULL, "hapt: crashed with SIGABRT, ");
    check_report(overflow_stack, SIGSEGV, NULL, "hapt: crashed with SIGSEGV, ");
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(reports_of_crashes);
    return test_finish();
}
