/*
 * Times ranges as in training. The ranks that would train a stage run its program all at once, with its collectives,
 * device slowdowns and threads. They also run the end of a step, including the update. The result is wall time.
 */
#ifndef HAPT_MEASURE_TEAM_TIME_H
#define HAPT_MEASURE_TEAM_TIME_H

#include "hapt/candidates.h"
#include "hapt/team.h"

struct team_stage {
    const struct hapt_candidates *candidates;
    const struct hapt_sharding *sharding; /* as seen by this rank */
    struct hapt_engine_options options;   /* back end, device, threads, state_count */
    MPI_Comm comm;                        /* its ranks are the team's, in order */
    int rank;
    double slowdown, timeout_s;
    double memory_bytes;   /* of this rank's device; determines the number of microbatches in flight */
    struct hapt_team team; /* its communicators are used for all ranges */
};

struct team_seconds {
    double stage_s, forward_s; /* per microbatch, on the slowest rank */
    double step_s;             /* time of a step of candidates->microbatches beyond stage_s */
};

/* True for the last stage, which has one microbatch in flight; others are timed with more. */
static inline bool team_ends_model(const struct hapt_candidates *candidates, int last)
{
    return last == candidates->layer_count - 1;
}

/* team_stage_open opens the communicators; team_stage_time times layers [first, last] for about `budget_s`,
 * *seconds the same on all ranks. Collective over stage->comm; both fail on all ranks alike. */
enum hapt_status team_stage_open(struct team_stage *stage);
/* Calls hapt_team_use_devices. Call it after team_stage_open and after throttling the collectives. Collective over
 * stage->comm. */
enum hapt_status team_stage_use_devices(struct team_stage *stage);
enum hapt_status team_stage_time(struct team_stage *stage, int first, int last, double budget_s,
                                 struct team_seconds *seconds);
void team_stage_close(struct team_stage *stage);

#endif
