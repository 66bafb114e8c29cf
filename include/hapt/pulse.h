/*
 * The pulse: a thread per rank that tells the next rank, around all of them, a few times a second that this one lives
 * and what it does. A rank that is stopped, dead or out of reach is named by its neighbour, in every phase, before
 * anybody's wait for it has run out: who waits knows only for whom it waits, which may itself wait for another one.
 */
#ifndef HAPT_PULSE_H
#define HAPT_PULSE_H

#include "hapt/env.h"

/* Nothing heard for `silence_s` (of time in which the listener ran: a job that is suspended as a whole goes on) ends
 * the job by hapt_die. Ends by itself before MPI does. Nothing where the rank is alone. Collective over env->world;
 * ends in agreement. */
enum hapt_status hapt_pulse_start(const struct hapt_env *env, double silence_s);

/* What the compute thread does from here on. `what` lives for ever; -1 where a number says nothing. */
struct hapt_activity {
    const char *what;
    int stage, peer_stage;
    int64_t step;
    int microbatch;
};
void hapt_pulse_note(struct hapt_activity activity);

#endif
