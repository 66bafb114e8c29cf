/*
 * Being asked to leave: SIGTERM and SIGUSR1, as batch systems and launchers send them, SIGINT (Ctrl-C) and SIGHUP (the
 * terminal is gone), SIGPIPE (nobody reads the output) and SIGXFSZ (a limit on file sizes), to all ranks or to one.
 *
 * The first one is a request. Before training the next agreement of all ranks grants it, and after HAPT_STOP_GRACE_S it
 * is granted at the latest; a phase that has something to save defers it and looks for itself (hapt_stop_asked). The
 * process leaves with HAPT_STOPPED either way. A second one ends the process where it stands, with 128 + the signal's
 * number; files become visible by being renamed when they are whole, so nothing half written is left under a final
 * name. A signal within a second of the first one is the same request: a batch system and a launcher both deliver it.
 * SIGPIPE and SIGXFSZ are never a second request: each line that is printed raises them again. A signal that was
 * ignored when the process started (nohup) stays ignored.
 */
#ifndef HAPT_STOP_H
#define HAPT_STOP_H

#include "hapt/env.h"

#define HAPT_STOP_GRACE_S 10

/* From here on until the process ends. Before MPI starts, and once more behind it, since MPI may have put handlers of
 * its own in place. */
void hapt_stop_listen(void);
/* Nobody but the caller grants requests: one that came before is kept. */
void hapt_stop_defer(void);
/* Was this rank asked? By the terminating signal (SIGTERM), which launchers send when they tear a job down? */
bool hapt_stop_asked(void);
bool hapt_stop_terminated(void);
/* "SIGINT": the signal that asked first; "a signal" when another rank was asked. */
const char *hapt_stop_name(void);
/* Asked, not deferred: an agreement of all ranks ends with HAPT_STOPPED. */
bool hapt_stop_due(void);

#endif
