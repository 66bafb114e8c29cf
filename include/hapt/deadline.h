/*
 * A deadline for what no heartbeat watches: MPI's own start and end, in which a stopped or dead peer would be waited
 * for in silence. A thread tells on standard error that the phase lasts, and ends the process with HAPT_ERR_COMM when
 * it lasts too long. Only time in which this process ran counts: a job that is suspended as a whole goes on.
 */
#ifndef HAPT_DEADLINE_H
#define HAPT_DEADLINE_H

/* The phase "what" begins and may last `limit_s`; it replaces the one before. Before MPI is up, the rank comes from the
 * launcher's environment. */
void hapt_deadline_set(const char *what, double limit_s);
/* This process ends with that exit code after `limit_s` at the latest, without another word: its error is printed. */
void hapt_deadline_exit(int code, double limit_s);
/* No phase is watched. */
void hapt_deadline_clear(void);

#endif
