/*
 * The lock of a folder: one process of one job owns it. A small text file, FOLDER/.hapt-lock, says who: host, process,
 * job, since when. Its time of change is a heartbeat (every HAPT_LOCK_BEAT_S). An owner of this host and boot is judged
 * by its process (number and start time), any other one by its heartbeat, by the clock of the file server. An owner
 * that was silent longer than HAPT_LOCK_STALE_S has lost the lock.
 */
#ifndef HAPT_LOCK_H
#define HAPT_LOCK_H

#include <stdbool.h>

#include "hapt/status.h"

#define HAPT_LOCK_BEAT_S 5
#define HAPT_LOCK_STALE_S 30
#define HAPT_LOCK_TOKEN_CHARS 40

enum hapt_lock_state { HAPT_LOCK_FREE, HAPT_LOCK_STALE, HAPT_LOCK_HELD };
/* The lock's state now; HAPT_LOCK_FREE and STALE can be taken. `owner` (size >= 256) describes the one that holds or
 * held it, "" where there is none. */
enum hapt_lock_state hapt_lock_look(const char *folder, char *owner, int size);

/* Takes the lock, for this process; a stale one is taken over after a note. If the owner is on another host and may be
 * dead, this waits for its heartbeat, up to HAPT_LOCK_STALE_S. HAPT_ERR_USAGE: somebody has it, the message names the
 * owner. HAPT_ERR_IO: the folder cannot be written. One lock a process. From here on a thread keeps the heartbeat, and
 * ends the process by hapt_die if the lock is lost. */
enum hapt_status hapt_lock_take(const char *folder);
/* Secret of the lock that this process holds; "" for none. */
const char *hapt_lock_token(void);
/* Does the folder's lock carry this token, as seen from this host? Waits some seconds for a slow file server. */
bool hapt_lock_visible(const char *folder, const char *token);
/* HAPT_ERR_IO if this process took a lock and somebody else has it now. */
enum hapt_status hapt_lock_check(void);
/* Gives it back. Does nothing without one. */
void hapt_lock_release(void);

#endif
