/*
 * The process among its peers: ranks, logging, clocks, and agreement at the end of a phase.
 */
#ifndef HAPT_ENV_H
#define HAPT_ENV_H

#include <mpi.h>
#include <stddef.h>
#include <stdint.h>

#include "hapt/status.h"

struct hapt_env {
    MPI_Comm world;
    int world_rank, world_size;
    MPI_Comm node; /* the ranks that share this host's memory */
    int node_rank, node_size;
    int node_index, node_count; /* hosts in order of their lowest world rank */
    int cores;                  /* cores this process's node offers to its ranks (affinity of all node ranks) */
    bool quiet;                 /* results go to standard output as JSON; everything else to standard error */
    double start_s;             /* hapt_time_s at the start */
    double timeout_s;           /* of hapt_env_init; at least some seconds */
};

/* Starts the program anew with the settings that the OpenMP library reads before main: a thread that waits for its
 * siblings spins for some 100 us, then sleeps. The library's default spins for milliseconds, which costs up to ten
 * times the run time where ranks, their communication threads or other people share cores. What the user set stays.
 * First in main. */
void hapt_env_prepare(char **argv);

/* Sets the library environment (singleton start-up, yielding when ranks outnumber cores, a folder with room for MPI's
 * segments), then MPI_Init_thread with MPI_THREAD_MULTIPLE. Collective. Fails with HAPT_ERR_COMM; a lone process whose
 * launcher says that there are more fails with a hint. Waits for other ranks here, and in hapt_env_release after the
 * heartbeats (pulse.h), end the process after `timeout_s` (deadline.h), and more with many ranks. */
#define HAPT_ENV_TIMEOUT_S 60.0
enum hapt_status hapt_env_init(struct hapt_env *env, int *argc, char ***argv, double timeout_s);
/* Collective. */
void hapt_env_release(struct hapt_env *env);
/* Waits, without spinning, until all ranks come here; heartbeats (pulse.h) watch them meanwhile. Collective over
 * env->world. */
void hapt_env_meet(const struct hapt_env *env);
/* hapt_env_release calls `function` before MPI_Finalize, the last one added first: for libraries that must end while
 * MPI lives. A bounded number of places; not from several threads at once. */
void hapt_env_at_release(void (*function)(void));

/* Which of the `devices` that a host offers this rank drives: ranks take them in turn. */
static inline int hapt_env_device(const struct hapt_env *env, int devices)
{
    return env->node_rank % devices;
}

/* Name of the host that a world rank runs on, cut off at HAPT_HOSTNAME_CHARS; "?" before hapt_env_init. */
#define HAPT_HOSTNAME_CHARS 64
const char *hapt_env_host(int world_rank);

/* CPU threads of a rank: `asked` when it is positive, else the node's cores shared by its ranks. */
int hapt_env_threads(const struct hapt_env *env, int asked);

/* Ends a phase: all ranks of `comm` learn the status of the lowest rank that failed, and that rank alone prints
 * its error record (one line, then a hint). Returns that status on every rank. Where all ranks meet and one was asked
 * to leave (stop.h), that is HAPT_STOPPED. Collective over `comm`. */
enum hapt_status hapt_env_agree(MPI_Comm comm, enum hapt_status status);
/* The same where "there is none" is an answer: HAPT_ERR_INFEASIBLE and HAPT_ERR_INPUT are agreed upon and stay in the
 * error record of the ranks that found them, but nobody prints them. */
enum hapt_status hapt_env_agree_quietly(MPI_Comm comm, enum hapt_status status);

/* How long an agreement waits for the last rank before it ends the job (hapt_die); 0, the start value: for ever. */
void hapt_env_set_patience(double seconds);

/* Translates an MPI return code. */
enum hapt_status hapt_env_mpi(int mpi_error, const char *what);
#define HAPT_MPI(call) HAPT_TRY(hapt_env_mpi((call), #call))

/* Memory that the ranks of a host hold together, at whatever address it has in each of them. It does not depend on the
 * size of /dev/shm. Where processes cannot map each other's memory every rank has a private copy, which publishing
 * fills. */
struct hapt_shared;
/* `bytes` as the node's first rank asks for them, aligned to 64. Collective over env->node; the status is the same on
 * all its ranks. Lives until hapt_shared_release or, at the latest, hapt_env_release. */
enum hapt_status hapt_shared_create(const struct hapt_env *env, size_t bytes, struct hapt_shared **shared);
/* Common memory of the ranks of `comm`, which run on one host; zeros at first. *shared is NULL on all of them where it
 * cannot be had. Collective over comm; until hapt_shared_release, before comm is freed. */
enum hapt_status hapt_shared_open(MPI_Comm comm, size_t bytes, struct hapt_shared **shared);
void *hapt_shared_memory(const struct hapt_shared *shared);
/* Makes the first rank's writes visible to all. Collective over the ranks that share. */
enum hapt_status hapt_shared_publish(struct hapt_shared *shared);
/* NULL is fine. */
void hapt_shared_release(struct hapt_shared *shared);
/* What was created last; NULL: nothing is left. */
struct hapt_shared *hapt_shared_newest(void);
/* Releases what was created after `mark`, everything where it is NULL, as hapt_env_release does. */
void hapt_shared_release_newer(struct hapt_shared *mark);

/* The readable result of a phase: rank 0 to standard output, or to standard error under --json. */
void hapt_print(const struct hapt_env *env, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Notes for the user, on standard error, from rank 0 alone. */
void hapt_note(const struct hapt_env *env, const char *format, ...) __attribute__((format(printf, 2, 3)));
void hapt_warn(const struct hapt_env *env, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Ends the whole job from one rank, because peers may wait for ever. Prints the error record. */
_Noreturn void hapt_die(enum hapt_status status);

/* Monotonic wall clock, and the CPU time of the calling thread. */
double hapt_time_s(void);
double hapt_time_thread_cpu_s(void);
/* Sleeps until hapt_time_s() >= time_s. */
void hapt_time_sleep_until(double time_s);

/* Deterministic 64-bit hash (FNV-1a folded by a mixer) and generator (splitmix64) for seeds, names and structures. */
uint64_t hapt_hash(uint64_t seed, const void *data, size_t bytes);
uint64_t hapt_random_next(uint64_t *state);
double hapt_random_unit(uint64_t *state); /* [0, 1) */

#endif
