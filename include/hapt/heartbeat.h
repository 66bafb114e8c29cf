/*
 * The heartbeat: a thread on each rank tells the next rank in a ring, a few times a second, that this rank lives and
 * what it does. A stopped, dead or unreachable rank is thus named by its neighbour, in every phase, before other
 * ranks' waits time out. A waiting rank alone knows only its direct peer, which may itself wait for another rank.
 * Heartbeats also count agreements of all ranks. A rank that stays in an agreement that its neighbour has completed
 * ends the job, too, since phases before training have no deadline.
 */
#ifndef HAPT_HEARTBEAT_H
#define HAPT_HEARTBEAT_H

#include "hapt/env.h"

/* Ends the job by hapt_die if nothing is heard for `silence_s`, or if this rank stays behind in an agreement so long.
 * Only time in which the listener ran counts, so a job that is suspended as a whole survives. Ends by itself before MPI
 * does. No effect with one rank. Collective over env->world; a rank that cannot start its thread ends the job. */
enum hapt_status hapt_heartbeat_start(const struct hapt_env *env, double silence_s);

/* Sets the current activity of the compute thread. `what` must live forever; -1: the number is not shown. */
struct hapt_activity {
    const char *what;
    int stage, peer_stage;
    int64_t step;
    int microbatch;
};
void hapt_heartbeat_note(struct hapt_activity activity);

#endif
