/*
 * Copies between a device whose memory is the host's (CPUs) and the optimizer state on the host, at the bandwidth of
 * the cluster file. So a run behaves as if a bus lay between them. A thread copies both directions side by side.
 *
 *   submit --> queue of its direction --> piece by piece: copied at once, complete at its due time --> wait returns
 *
 * Copies of a direction follow each other. A piece is due when the one before is, or when its copy was submitted, plus
 * its bytes over the bandwidth. So late wakeups do not add up.
 */
#ifndef HAPT_STATE_COPIES_H
#define HAPT_STATE_COPIES_H

#include <stddef.h>
#include <stdint.h>

#include "hapt/span_log.h"
#include "hapt/status.h"

struct state_copies;

enum state_direction { STATE_IN, STATE_OUT }; /* to the device, to the host */
static inline enum hapt_span_kind state_span(enum state_direction direction)
{
    return direction == STATE_IN ? HAPT_SPAN_TO_DEVICE : HAPT_SPAN_TO_HOST;
}

/* bandwidth: byte/s in each direction. */
enum hapt_status state_copies_create(double bandwidth, double timeout_s, struct state_copies **copies);
/* Logs complete copies from now on, with the times at which they are due. */
void state_copies_log(struct state_copies *copies, struct hapt_span_log *log);
/* NULL is allowed. Copies that were not waited for may be lost. */
void state_copies_destroy(struct state_copies *copies);
/* Returns at once, but waits if MOST_JOBS copies of the direction are pending. `what` names the copy in messages and
 * must outlive it. One thread at a time submits: the compute thread, or during an update on the host the thread of that
 * update. */
void state_copies_submit(struct state_copies *copies, enum state_direction direction, const char *what, void *to,
                         const void *from, size_t bytes);
/* Number of copies submitted so far, for state_copies_wait. */
int64_t state_copies_mark(struct state_copies *copies, enum state_direction direction);
/* Waits until so many copies of the direction are complete. Ends the job (hapt_die) if none of their pieces completes
 * for timeout_s; 0: waits for ever. */
void state_copies_wait(struct state_copies *copies, enum state_direction direction, int64_t mark);

#endif
