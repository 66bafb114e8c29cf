/*
 * Ranges as they train: a stage's program is run by the ranks that would train it, all at once, with its collectives,
 * each slowed down as its device is, on the threads it will have; then what ends a step, the update included. What is
 * timed is wall time.
 */
#ifndef HAPT_PROFILE_TEAM_TIME_H
#define HAPT_PROFILE_TEAM_TIME_H

#include "candidates.h"
#include "hapt/team.h"

struct team_stage {
    const struct candidates *candidates;
    const struct hapt_sharding *sharding; /* as this rank sees it */
    struct hapt_engine_options options;   /* back end, device, threads, state_count */
    MPI_Comm comm;                        /* its ranks are the team's, in order */
    int rank;
    double slowdown, timeout_s;
    double memory_bytes;   /* of this rank's device: so many microbatches are in flight as it has room for */
    struct hapt_team team; /* its communicators serve all ranges */
};

struct team_seconds {
    double stage_s, forward_s; /* per microbatch, of the slowest rank */
    double step_s;             /* what a step of candidates->microbatches takes beyond that */
};

/* Such a range is the last stage, which has one microbatch in flight; others are timed with more. */
static inline bool team_ends_model(const struct candidates *candidates, int last)
{
    return last == candidates->layer_count - 1;
}

/* Opens the communicators; then layers [first, last] for about `budget_s`, *seconds the same on all ranks. Collective
 * over stage->comm; fails on all ranks alike. */
enum hapt_status team_stage_open(struct team_stage *stage);
/* Behind it, and behind what paces the collectives: hapt_team_use_devices. Collective over stage->comm. */
enum hapt_status team_stage_use_devices(struct team_stage *stage);
enum hapt_status team_stage_time(struct team_stage *stage, int first, int last, double budget_s,
                                 struct team_seconds *seconds);
void team_stage_close(struct team_stage *stage);

#endif
