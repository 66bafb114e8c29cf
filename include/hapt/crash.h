/*
 * Reports of crashes, and the stack on which signal handlers run.
 *
 * On SIGSEGV, SIGBUS, SIGFPE, SIGILL or SIGABRT the process writes one line with its rank and the signal to standard
 * error, and then its call stack. It is no error message: one may stand before it. Then the signal takes its default
 * action, so that the exit code and the core dump are those of a process without a handler. The report allocates no
 * memory. If it does not end within HAPT_CRASH_REPORT_S (another thread may hold a lock of the loader), the process
 * ends without the rest.
 */
#ifndef HAPT_CRASH_H
#define HAPT_CRASH_H

#define HAPT_CRASH_REPORT_S 5

/* Installs the handlers. Call first in main. With address or thread sanitizers, which have their own reports, it does
 * nothing. */
void hapt_crash_catch(void);

/* Gives the calling thread, the main thread, a stack for handlers with SA_ONSTACK. After a stack overflow no other
 * stack is left. And oneDNN's matrix product points the stack register into the heap, where a signal frame would
 * overwrite the data below. */
void hapt_crash_set_stack(void);

#endif
