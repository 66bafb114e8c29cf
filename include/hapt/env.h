/*
 * The process among its peers: ranks, logging, clocks, and the agreement at the end of a phase.
 */
#ifndef HAPT_ENV_H
#define HAPT_ENV_H

#include <mpi.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "hapt/status.h"

struct hapt_env {
    MPI_Comm world;
    int world_rank, world_size;
    MPI_Comm node; /* ranks that share this host's memory */
    int node_rank, node_size;
    int node_index, node_count; /* hosts in order of their lowest world rank */
    int cores;                  /* cores that the node offers to its ranks (union of their affinity masks) */
    bool quiet;                 /* results go to standard output as JSON; everything else to standard error */
    double start_s;             /* hapt_time_s at the start */
    double timeout_s;           /* of hapt_env_init, raised to a minimum of some seconds */
};

/* Restarts the program with settings that the OpenMP runtime reads before main: a waiting thread spins for some 100 us,
 * then sleeps. The runtime's default spins for milliseconds, which costs up to ten times the run time if ranks, their
 * communication threads or other users share cores. Settings of the user stay. Call first in main. */
void hapt_env_prepare(char **argv);

/* Sets the library environment (singleton start-up, yielding when ranks outnumber cores, a folder with room for MPI's
 * segments), then calls MPI_Init_thread with MPI_THREAD_MULTIPLE. Collective. Fails with HAPT_ERR_COMM. A process that
 * started alone although its launcher announces more ranks fails with a hint. A wait for other ranks here, or in
 * hapt_env_release after the heartbeats (heartbeat.h), ends the process after `timeout_s` (deadline.h), later with many
 * ranks. */
#define HAPT_ENV_TIMEOUT_S 60.0
enum hapt_status hapt_env_init(struct hapt_env *env, int *argc, char ***argv, double timeout_s);
/* Collective. */
void hapt_env_release(struct hapt_env *env);
/* Waits, without spinning, until all ranks call it; heartbeats (heartbeat.h) watch the ranks meanwhile. Collective over
 * env->world. */
void hapt_env_barrier(const struct hapt_env *env);
/* hapt_env_release calls `function` before MPI_Finalize, in reverse order: for libraries that must end before MPI does.
 * A bounded number of functions; not thread safe. */
void hapt_env_at_release(void (*function)(void));

/* Index, among the host's `devices`, of the device that this rank uses: round-robin by node_rank. */
static inline int hapt_env_device(const struct hapt_env *env, int devices)
{
    return env->node_rank % devices;
}

/* Name of the host that a world rank runs on, truncated to HAPT_HOSTNAME_CHARS; "?" before hapt_env_init. */
#define HAPT_HOSTNAME_CHARS 64
const char *hapt_env_host(int world_rank);

/* CPU threads of a rank: `asked` if positive, else the node's cores divided by its ranks. */
int hapt_env_threads(const struct hapt_env *env, int asked);

/* Ends a phase. All ranks of `comm` learn the status of the lowest rank that failed. That rank alone prints its error
 * record (one line, then a hint). Returns that status on every rank. If `comm` has all ranks and a rank received a stop
 * request (stop.h), the result is HAPT_STOPPED. Collective over `comm`. */
enum hapt_status hapt_env_agree(MPI_Comm comm, enum hapt_status status);
/* The same for phases in which "no solution" is a valid result. HAPT_ERR_INFEASIBLE and HAPT_ERR_INPUT are agreed on
 * but not printed; they stay in the error record of the ranks that found them. */
enum hapt_status hapt_env_agree_quietly(MPI_Comm comm, enum hapt_status status);

/* Time limit (s) of an agreement's wait for the last rank, after which it ends the job (hapt_die). 0, the initial
 * value: no limit. */
void hapt_env_set_agree_timeout(double seconds);

/* Number of agreements of all ranks that this rank has completed. Another rank can only complete one that this rank has
 * begun, so a rank that stays behind another for long waits for a lost message. */
int64_t hapt_env_agreements(void);

/* Translates an MPI return code. */
enum hapt_status hapt_env_mpi(int mpi_error, const char *what);
#define HAPT_MPI(call) HAPT_TRY(hapt_env_mpi((call), #call))

/* Memory shared by the ranks of a host, at addresses that may differ between the ranks. Its size is not limited by
 * /dev/shm. If processes cannot map each other's memory, every rank has a private copy, which publishing fills. */
struct hapt_shared;
/* `bytes` is the size that the node's rank 0 passes; the memory is aligned to 64. Collective over env->node, with the
 * same status on all its ranks. All its pages exist at once. Lives until hapt_shared_release, at the latest until
 * hapt_env_release. */
enum hapt_status hapt_shared_create(const struct hapt_env *env, size_t bytes, struct hapt_shared **shared);
/* Shared memory of the ranks of `comm`, which run on one host; initially zero. *shared is NULL on all of them if the
 * host cannot provide it. Collective over comm. Release with hapt_shared_release before comm is freed. */
enum hapt_status hapt_shared_open(MPI_Comm comm, size_t bytes, struct hapt_shared **shared);
void *hapt_shared_memory(const struct hapt_shared *shared);
/* Makes the writes of rank 0 visible to all. Collective over the ranks that share. */
enum hapt_status hapt_shared_publish(struct hapt_shared *shared);
/* NULL is allowed. */
void hapt_shared_release(struct hapt_shared *shared);
/* The memory created last; NULL: none is left. */
struct hapt_shared *hapt_shared_newest(void);
/* Releases memory created after `mark`; NULL: all, as hapt_env_release does. */
void hapt_shared_release_newer(struct hapt_shared *mark);

/* The readable result of a phase, from rank 0: to standard output, or to standard error under --json. */
void hapt_print(const struct hapt_env *env, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The same for sentences: lines break at spaces before HAPT_PRINT_COLUMNS, and continue behind `hang` spaces. */
enum { HAPT_PRINT_COLUMNS = 100 };
void hapt_print_wrapped(const struct hapt_env *env, int hang, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Messages to the user on standard error, from rank 0 alone. */
void hapt_note(const struct hapt_env *env, const char *format, ...) __attribute__((format(printf, 2, 3)));
void hapt_warn(const struct hapt_env *env, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Ends the whole job from one rank, because peers may wait forever. Prints the error record. */
_Noreturn void hapt_die(enum hapt_status status);
/* True if the last agreement of all ranks was on a failure, so that no rank waits for this one. */
bool hapt_env_leaves_together(void);
/* Call before collective clean-up. If a call of MPI failed on this rank alone (HAPT_ERR_COMM without an agreement), the
 * others may wait for it: ends the job. */
void hapt_env_end_alone(const struct hapt_env *env, enum hapt_status status);

/* Monotonic wall clock, and CPU time of the calling thread. */
double hapt_time_s(void);
double hapt_time_thread_cpu_s(void);
/* The time of day, s since 1970. */
double hapt_time_epoch_s(void);
/* Writes such a time as ISO 8601 with milliseconds and zone: 2026-11-29T18:41:32.125+00:00. Returns `text`. */
enum { HAPT_TIME_ISO_CHARS = 40 };
const char *hapt_time_iso(double epoch_s, char text[HAPT_TIME_ISO_CHARS]);
/* A time of the monotonic clock for system calls. */
struct timespec hapt_time_spec(double time_s);
/* Sleeps until hapt_time_s() >= time_s. */
void hapt_time_sleep_until(double time_s);
/* Initializes a condition whose waits end at times of that clock. */
void hapt_time_condition_init(pthread_cond_t *condition);
/* Starts a thread that handles no signals: they belong to the compute thread. Returns errno; 0: it runs. */
int hapt_thread_start(pthread_t *thread, void *(*run)(void *argument), void *argument);
/* Compares two numbers for qsort, in ascending order. */
int hapt_compare_doubles(const void *a, const void *b);
/* Sorts `value` and returns the median; 0: no values. */
double hapt_median(double *value, int64_t count);
/* Reads the first line of a small system file, without the newline. False: none; `text` is then empty. */
bool hapt_first_line(const char *path, char *text, int size);

/* Deterministic 64-bit hash (FNV-1a with a final mixer) and generator (splitmix64), for seeds, names and structures. */
uint64_t hapt_hash(uint64_t seed, const void *data, size_t bytes);
uint64_t hapt_hash_word(uint64_t seed, int64_t value); /* faster, for one number */
/* The same as hapt_hash for bytes that come in parts. `bytes` of the end: their sum. */
uint64_t hapt_hash_begin(uint64_t seed);
uint64_t hapt_hash_add(uint64_t hash, const void *data, size_t bytes);
uint64_t hapt_hash_end(uint64_t hash, size_t bytes);
uint64_t hapt_random_next(uint64_t *state);
double hapt_random_unit(uint64_t *state); /* [0, 1) */

#endif
