/*
 * Status codes and the error record of a process.
 *
 * The first function that finds a failure fills the record (what happened, and a hint that says what to do)
 * and returns its status; callers only pass the status on. The record is printed once, by hapt_env_agree
 * (all ranks of a communicator) or by main.
 */
#ifndef HAPT_STATUS_H
#define HAPT_STATUS_H

#include <stdbool.h>

/* The values are the process's exit codes. */
enum hapt_status {
    HAPT_OK = 0,
    HAPT_ERR_USAGE = 2,      /* unknown, impossible or missing option */
    HAPT_ERR_INPUT = 3,      /* a file or a table is missing, truncated, corrupt or inconsistent */
    HAPT_ERR_INFEASIBLE = 4, /* no plan exists */
    HAPT_ERR_MEMORY = 5,     /* host or device memory is exhausted */
    HAPT_ERR_IO = 6,         /* a file cannot be written */
    HAPT_ERR_COMM = 7,       /* MPI or NCCL failed, or a peer did not answer in time */
    HAPT_ERR_INTERNAL = 8,   /* a bug of ours, or an impossible state in memory: replicas of weights that differ */
    HAPT_STOPPED = 9         /* stopped early with a checkpoint: start again with --resume */
};

/* Records the first failure of this process and returns `status`. Control characters become '?'. `hint` NULL: the
 * default hint of that status. Thread safe. */
enum hapt_status hapt_fail(enum hapt_status status, const char *hint, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* The recorded message and hint; "" if there is none. Borrowed. */
const char *hapt_fail_message(void);
const char *hapt_fail_hint(void);
/* Clears the record, for callers that can continue after a failure. */
void hapt_fail_reset(void);

/* A record for work whose failure the process survives. Initialise with {0}. */
struct hapt_failure {
    enum hapt_status status;
    char message[1024], hint[512];
};
/* From here on the functions above use *failure on this thread, instead of the process's record. NULL: the process's
 * record again. `failure` is borrowed until then. Returns what was set before: pass it to the next call to restore it.
 */
struct hapt_failure *hapt_fail_divert(struct hapt_failure *failure);

const char *hapt_status_name(enum hapt_status status);

/* Passes a failure on to the caller. */
#define HAPT_TRY(expression)                           \
    do {                                               \
        const enum hapt_status status_ = (expression); \
        if (status_ != HAPT_OK) return status_;        \
    } while (0)

/* A condition that only a bug of ours can break. */
#define HAPT_ASSERT(condition) ((condition) ? (void)0 : hapt_assert_failed(#condition, __FILE__, __LINE__))
#ifdef __cplusplus
[[noreturn]]
#else
_Noreturn
#endif
void hapt_assert_failed(const char *condition, const char *file, int line);

#endif
