/*
 * The simulator: executes a schedule's instruction lists as the DAG of HAPT 4.2.1, with given costs.
 *
 * Links are full duplex: transfers over one boundary in one direction run in order, one at a time. Sends do not occupy
 * compute. Each boundary and direction holds HAPT_TRANSFER_SLOTS microbatches, as in the trainer: a received one until
 * its computation ends, a gradient to be sent until its transfer ends.
 *
 * The ranks of a stage advance together here. In training, ranks with their own rows drift apart while waiting for
 * transfers, and their messages take turns on the link instead of sharing it. So 1F1B over a slow link took up to a
 * seventh less time than simulated (bench/lab).
 */
#ifndef HAPT_SIMULATE_H
#define HAPT_SIMULATE_H

#include "hapt/schedule.h"

struct hapt_costs {
    const double *forward_s;  /* [chunk] per microbatch */
    const double *backward_s; /* [chunk] */
    const double *comm_s;     /* [chunk] one transfer over the boundary behind the chunk, either direction; last 0 */
    const double *step_s;     /* [chunk] once per step: reduction, update; may be NULL */
    double exchange_s;        /* gradients of tied parameters */
    bool blocking;            /* no overlap: transfers occupy sender and receiver */
    int transfer_slots;       /* 0: unlimited, as in the paper's DAG */
};

struct hapt_simulated_instruction {
    double start_s, end_s;
};

struct hapt_simulation {
    double total_s;  /* one whole step */
    double period_s; /* seconds per microbatch over whole launch rounds in the second half; total_s / B in a shorter
                        step */
    double *busy_s, *comm_s;                  /* [chunk] computing; transfers over the boundary behind it */
    double *idle_s;                           /* [chunk] of its submesh: total minus computing */
    int *peak_slots;                          /* [submesh] microbatches in flight at most */
    struct hapt_simulated_instruction **time; /* [submesh][instruction] */
};

/* HAPT_ERR_INTERNAL if the lists deadlock. */
enum hapt_status hapt_simulate(const struct hapt_schedule *schedule, const struct hapt_costs *costs,
                               struct hapt_arena *arena, struct hapt_simulation **simulation);
/* Steady-state seconds per microbatch under the schedule's launch counts, from a run that is long enough for it. GPipe
 * launches B microbatches and has no steady state: the average cost of one more microbatch. */
enum hapt_status hapt_simulate_period(const struct hapt_schedule *schedule, const struct hapt_costs *costs,
                                      struct hapt_arena *arena, double *period_s);
/* Hidden share of the communication at boundary `chunk`: 1 - (T(c) - T(0)) / (B c) over the steady phase
 * (ARCHITECTURE.md, "Objective"). */
enum hapt_status hapt_simulate_overlap(const struct hapt_schedule *schedule, const struct hapt_costs *costs, int chunk,
                                       struct hapt_arena *arena, double *overlap);

#endif
