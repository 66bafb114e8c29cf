/*
 * Stop requests by signals, sent to all ranks or to one: SIGTERM and SIGUSR1 (batch systems, launchers), SIGINT
 * (Ctrl-C), SIGHUP (the terminal closed), SIGPIPE (the reader of the output closed) and SIGXFSZ (file size limit).
 *
 * The first signal is a request. Before training, the next agreement of all ranks grants it, HAPT_STOP_GRACE_S at the
 * latest. A phase that must save data defers it and polls hapt_stop_asked. Either way the process exits with
 * HAPT_STOPPED.
 *
 * A second signal ends the process at once, with 128 + its number. Files are renamed only when complete, so no partial
 * file is left under a final name. A signal within a second of the first one is the same request, because a batch
 * system and a launcher both deliver it. SIGPIPE and SIGXFSZ are never a second request: each printed line raises them
 * again. A signal that was ignored when the process started (nohup) stays ignored.
 */
#ifndef HAPT_STOP_H
#define HAPT_STOP_H

#include "hapt/env.h"

#define HAPT_STOP_GRACE_S 10

/* Installs the handlers, until the process ends. Call before MPI starts and again after it, since MPI may install its
 * own. */
void hapt_stop_listen(void);
/* From here on only the caller grants requests; an earlier request is kept. */
void hapt_stop_defer(void);
/* Was this rank asked to stop? By SIGTERM, which launchers send when they end a job? */
bool hapt_stop_asked(void);
bool hapt_stop_terminated(void);
/* Name of the first signal, such as "SIGINT"; "a signal" if another rank was asked. */
const char *hapt_stop_name(void);
/* Asked and not deferred: an agreement of all ranks ends with HAPT_STOPPED. */
bool hapt_stop_due(void);

#endif
