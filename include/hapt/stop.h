/*
 * Being asked to leave: SIGTERM and SIGUSR1, as batch systems and launchers send them, to all ranks or to one.
 *
 * The first one is a request. Before training it is granted by the next agreement of all ranks, and after HAPT_STOP_GRACE_S at the
 * latest; a phase that has something to save defers it and looks for itself (hapt_stop_asked). The process leaves with
 * HAPT_STOPPED either way. A second one ends the process where it stands, with 128 + the signal's number; files become visible by
 * being renamed when they are whole, so nothing half written is left under a final name. What comes within a second of the first
 * one is the same request: a batch system and a launcher both deliver it.
 */
#ifndef HAPT_STOP_H
#define HAPT_STOP_H

#include "hapt/env.h"

#define HAPT_STOP_GRACE_S 10

/* From here on until the process ends. */
void hapt_stop_listen(const struct hapt_env *env);
/* Nobody but the caller grants requests: one that came before is kept. */
void hapt_stop_defer(void);
/* Was this rank asked? By the terminating signal (SIGTERM), which launchers send when they tear a job down? */
bool hapt_stop_asked(void);
bool hapt_stop_terminated(void);
/* Asked, not deferred: an agreement of all ranks ends with HAPT_STOPPED. */
bool hapt_stop_due(void);

#endif
