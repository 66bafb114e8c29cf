/*
 * The sandbox: a child process opens each file first, because the HDF5 library can crash or hang on a damaged file and
 * would end the job.
 *
 * A helper process, forked before MPI starts, holds a copy of the program without ranks or threads. For each file it
 * forks a child that opens the file and reads what hapt may read (h5.h: hapt_h5_trial_read), within limits of memory
 * and time. If the child crashes or finds damage, the result here is HAPT_ERR_INPUT: one clear line instead of a dead
 * job. Either finding counts only if a second child confirms it while memory is available. A lack of memory, or a file
 * system that does not answer, is reported as such. Each file is checked once, identified by device, inode, size and
 * modification time; once per node if its ranks share results.
 *
 * The helper holds no descriptor except its socket, ignores the signals that launchers send, and ends with its process
 * in every case. If the helper is missing (process limits, or it was killed), files are opened without it.
 */
#ifndef HAPT_SANDBOX_H
#define HAPT_SANDBOX_H

#include <stdbool.h>
#include <sys/stat.h>

#include "hapt/status.h"

struct hapt_env;

/* Forks the helper. `trial_read` runs in its children and returns whether the file may be opened. Called with NULL, in
 * the helper itself, it initializes the library and touches no file. Call in main after hapt_env_prepare, before any
 * thread and before MPI. `argv` is the process's own: the helper overwrites its copy with its own name, so that process
 * lists tell the two apart. */
typedef bool hapt_sandbox_reader(const char *path);
void hapt_sandbox_start(char **argv, hapt_sandbox_reader *trial_read);
/* From here on the ranks of a node check each file once together. Collective over env->node. */
void hapt_sandbox_share(const struct hapt_env *env);
/* For trial reads: the system refused a call (errno), so a failure that follows says nothing about the file. Errors
 * that a damaged file itself can cause do not count. */
void hapt_sandbox_note_system_error(int error);
/* HAPT_ERR_INPUT: the child crashed on `path`, found it broken, or exceeded the time limit. HAPT_ERR_MEMORY: the child
 * got no memory, or the system killed it. HAPT_ERR_IO: the system refused to open or to read the file. The last two do
 * not mean that the file is damaged. HAPT_OK without a helper. Thread safe. */
enum hapt_status hapt_sandbox_check(const char *path, const struct stat *about);
/* This process wrote the file itself, so it is not checked. */
void hapt_sandbox_trust(const char *path);
/* Ends the helper and waits for it, so that no zombie remains. */
void hapt_sandbox_stop(void);

#endif
