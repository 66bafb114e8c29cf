/*
 * A deadline for phases without a heartbeat: starting and ending MPI. There a stopped or dead peer would block this
 * rank silently.
 *
 * A thread reports on standard error that the phase takes long. It ends the process with HAPT_ERR_COMM when the limit
 * has passed. Only time in which this process ran counts, so a job that is suspended as a whole survives.
 */
#ifndef HAPT_DEADLINE_H
#define HAPT_DEADLINE_H

/* Starts the phase `what`, which may last `limit_s` (s); it replaces the previous phase. Before MPI_Init the rank is
 * read from the launcher's environment. */
void hapt_deadline_set(const char *what, double limit_s);
/* Ends this process with that exit code after at most `limit_s`, without a message: its error is already printed. */
void hapt_deadline_exit(int code, double limit_s);
/* Stops watching. */
void hapt_deadline_clear(void);

#endif
