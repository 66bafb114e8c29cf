/*
 * The guard: damaged files are opened by somebody else first.
 *
 * The HDF5 library can crash or hang on a damaged file, and would take the job with it. So a helper process, forked
 * before MPI starts, holds a copy of the program that knows neither ranks nor threads. For each file it forks a child
 * that opens the file and reads what hapt may read (h5.h: hapt_h5_rehearse), within limits of memory and time. What
 * that child dies of, or finds broken, becomes HAPT_ERR_INPUT here: one clear line instead of a dead job. Both are
 * believed only when a second child finds the same, and only while memory is to be had: the want of memory, and a file
 * system that does not answer, are told as that. A file is asked for once, known by device, inode, size and time of
 * change; once per node where its ranks share what they know.
 *
 * The helper holds no descriptor but its socket, ignores the signals that launchers send around, and ends with its
 * process, however that ends. Where it cannot be had (limits on processes, or it was killed) files are opened without
 * it.
 */
#ifndef HAPT_GUARD_H
#define HAPT_GUARD_H

#include <stdbool.h>
#include <sys/stat.h>

#include "hapt/status.h"

struct hapt_env;

/* Forks the helper; `rehearse` runs in its children and says whether the file may be opened; with NULL, in the helper
 * itself, it makes the library ready and touches no file. In main behind hapt_env_prepare, before any thread and before
 * MPI. `argv` is what the process was called with: the helper writes its own name over its copy, so that process lists
 * tell them apart. */
typedef bool hapt_guard_rehearsal(const char *path);
void hapt_guard_start(char **argv, hapt_guard_rehearsal *rehearse);
/* For campaigns over very many files, before hapt_guard_start: a child reads so many files before the next one is
 * forked. What it dies of is read again by a child of its own, so that a file is blamed for its own sake only; one may
 * take `most_cpu_s`. */
void hapt_guard_batch(int files, int most_cpu_s);
/* From here on the ranks of a node ask for a file once together. Collective over env->node. */
void hapt_guard_share(const struct hapt_env *env);
/* For rehearsals: the system refused something (errno), so a failure that follows says nothing about the file. Errors
 * that a damaged file can cause itself do not count. */
void hapt_guard_refused(int error);
/* HAPT_ERR_INPUT when the child crashed over `path`, found it broken, or needed more than the allowed time.
 * HAPT_ERR_MEMORY when it got no memory or the system killed it, HAPT_ERR_IO when the system refused to open or to read
 * the file: neither says that the file is damaged. Thread safe. HAPT_OK without a helper. */
enum hapt_status hapt_guard_check(const char *path, const struct stat *about);
/* This process wrote the file itself: nobody is asked. */
void hapt_guard_trust(const char *path);
/* Ends the helper and waits for it, so that no zombie is left. */
void hapt_guard_stop(void);

#endif
