/*
 * The lock of a folder: one process of one job owns it. A small text file, FOLDER/.hapt-lock, holds the owner's host,
 * process, job and start time. Its modification time is a heartbeat (every HAPT_LOCK_BEAT_S). An owner on this host and
 * boot is checked by its process (number and start time). Any other owner is checked by its heartbeat, on the file
 * server's clock. An owner that was silent longer than HAPT_LOCK_STALE_S has lost the lock.
 */
#ifndef HAPT_LOCK_H
#define HAPT_LOCK_H

#include <stdbool.h>

#include "hapt/status.h"

#define HAPT_LOCK_BEAT_S 5
#define HAPT_LOCK_STALE_S 30
#define HAPT_LOCK_TOKEN_CHARS 40

enum hapt_lock_state { HAPT_LOCK_FREE, HAPT_LOCK_STALE, HAPT_LOCK_HELD };
/* The state of the lock now. FREE and STALE locks can be taken. `owner` (size >= 256) describes the present or last
 * owner; "" if there is none. */
enum hapt_lock_state hapt_lock_look(const char *folder, char *owner, int size);

/* Takes the lock for this process; a stale lock is taken over after a message. If the owner is on another host and may
 * be dead, this waits up to HAPT_LOCK_STALE_S for its heartbeat. HAPT_ERR_USAGE: the lock is held, and the message
 * names the owner. HAPT_ERR_IO: the folder cannot be written. A process holds at most one lock. Afterwards a thread
 * keeps the heartbeat; it ends the process by hapt_die if the lock is lost. */
enum hapt_status hapt_lock_take(const char *folder);
/* Secret token of the lock that this process holds; "" for none. */
const char *hapt_lock_token(void);
/* True if the folder's lock carries this token, as seen from this host. Waits some seconds for a slow file server. */
bool hapt_lock_visible(const char *folder, const char *token);
/* HAPT_ERR_IO if this process took a lock and another process has it now. */
enum hapt_status hapt_lock_check(void);
/* Releases the lock; does nothing without one. */
void hapt_lock_release(void);

#endif
