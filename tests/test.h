/*
 * The test harness. A test file holds functions `static void name(void)` and ends with
 *     int main(int argc, char **argv) { test_init(&argc, &argv); RUN(name); ...; return test_finish(); }
 *
 * MPI tests call test_init_mpi instead and find the environment in test_env. A comment `ranks: 1 2 4` in their first
 * lines gives their rank counts; `ranks: 1 2 4; HAPT_LONG: 3` adds one for long campaigns. A failure on any rank fails
 * the test. HAPT_LONG=1 selects long campaigns (test_long()). HAPT_TEST_ONLY=NAME,NAME runs only those functions.
 */
#ifndef HAPT_TEST_H
#define HAPT_TEST_H

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/arena.h"
#include "hapt/env.h"

static struct hapt_env test_env;
static bool test_uses_mpi;
static long test_checks, test_failures;

static inline bool test_long(void)
{
    const char *value = getenv("HAPT_LONG");
    return value && *value && strcmp(value, "0");
}

/* Is it one of the words of a comma-separated list? Without a list every word is. */
__attribute__((unused)) static bool test_listed(const char *list, const char *word)
{
    const size_t length = strlen(word);
    if (!list) return true;
    for (const char *at = list; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        if (strncmp(at, word, length) == 0 && (at[length] == ',' || at[length] == '\0')) return true;
    return false;
}

__attribute__((unused, format(printf, 4, 5))) static bool test_check(bool passed, const char *file, int line,
                                                                     const char *format, ...)
{
    test_checks++;
    if (passed) return true;
    if (++test_failures <= 20) {
        va_list arguments;
        va_start(arguments, format);
        fprintf(stderr, "%s:%d: ", file, line);
        if (test_uses_mpi) fprintf(stderr, "[rank %d] ", test_env.world_rank);
        vfprintf(stderr, format, arguments);
        fputc('\n', stderr);
        va_end(arguments);
    }
    return false;
}

#define CHECK(condition) test_check((condition), __FILE__, __LINE__, "%s does not hold", #condition)
#define CHECK_MESSAGE(condition, ...) test_check((condition), __FILE__, __LINE__, __VA_ARGS__)
#define CHECK_OK(call)                                                                                     \
    do {                                                                                                   \
        const enum hapt_status status_ = (call);                                                           \
        test_check(status_ == HAPT_OK, __FILE__, __LINE__, "%s: %s: %s", #call, hapt_status_name(status_), \
                   hapt_fail_message());                                                                   \
        if (status_ != HAPT_OK) hapt_fail_reset();                                                         \
    } while (0)
/* The call must fail with this status. The error record is then cleared. */
#define CHECK_FAILS(call, expected)                                                                                    \
    do {                                                                                                               \
        const enum hapt_status status_ = (call);                                                                       \
        test_check(status_ == (expected), __FILE__, __LINE__, "%s gives %s, not %s", #call, hapt_status_name(status_), \
                   hapt_status_name(expected));                                                                        \
        test_check(hapt_fail_message()[0] != '\0', __FILE__, __LINE__, "%s leaves no message", #call);                 \
        hapt_fail_reset();                                                                                             \
    } while (0)
/* |a - b| <= tolerance; NaN fails. */
#define CHECK_NEAR(a, b, tolerance)                                                                                   \
    do {                                                                                                              \
        const double a_ = (double)(a), b_ = (double)(b), t_ = (double)(tolerance);                                    \
        test_check(fabs(a_ - b_) <= t_, __FILE__, __LINE__, "%s = %.9g, %s = %.9g: apart by %.3g > %.3g", #a, a_, #b, \
                   b_, fabs(a_ - b_), t_);                                                                            \
    } while (0)

#define RUN(function)                                                            \
    do {                                                                         \
        const long before_ = test_failures;                                      \
        if (!test_listed(getenv("HAPT_TEST_ONLY"), #function)) break;            \
        function();                                                              \
        if (test_failures > before_) fprintf(stderr, "failed: %s\n", #function); \
    } while (0)

__attribute__((unused)) static void test_init(int *argc, char ***argv)
{
    (void)argc, (void)argv;
}

__attribute__((unused)) static void test_init_mpi(int *argc, char ***argv)
{
    test_uses_mpi = true;
    if (hapt_env_init(&test_env, argc, argv, HAPT_ENV_TIMEOUT_S) != HAPT_OK) {
        fprintf(stderr, "%s\n", hapt_fail_message());
        exit(1);
    }
}

__attribute__((unused)) static int test_finish(void)
{
    long failures = test_failures;
    if (test_uses_mpi) {
        MPI_Allreduce(MPI_IN_PLACE, &failures, 1, MPI_LONG, MPI_SUM, test_env.world);
        const int rank = test_env.world_rank;
        hapt_env_release(&test_env);
        if (rank != 0) return failures != 0;
    }
    printf("%ld checks, %ld failed\n", test_checks, failures);
    return failures != 0;
}

#endif
