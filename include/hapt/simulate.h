/*
 * The simulator: the DAG of HAPT 4.2.1 over a schedule's instruction lists, with costs given as arguments.
 *
 * Full-duplex links: transfers of one direction over one boundary are in order, one at a time. Sends do not occupy the
 * compute. Per boundary and direction HAPT_TRANSFER_SLOTS microbatches find room, as in the trainer: a received one
 * until it is computed with, a gradient to be sent until it is over.
 *
 * The ranks of a stage move together here. In training, those with rows of their own drift apart where they wait for
 * transfers, and their messages take turns on the link instead of sharing it: 1F1B over a slow link took up to a
 * seventh less time than this says (bench/lab).
 */
#ifndef HAPT_SIMULATE_H
#define HAPT_SIMULATE_H

#include "hapt/schedule.h"

struct hapt_costs {
    const double *forward_s;  /* [chunk] per microbatch */
    const double *backward_s; /* [chunk] */
    const double *comm_s;     /* [chunk] boundary behind the chunk, either direction; last 0 */
    const double *step_s;     /* [chunk] once per step: reduction, update; may be NULL */
    double exchange_s;        /* tied parameters */
    bool blocking;            /* transfers occupy sender and receiver: a system without overlap */
    int transfer_slots;       /* 0: unlimited, as in the paper's DAG */
};

struct hapt_simulated_instruction {
    double start_s, end_s;
};

struct hapt_simulation {
    double total_s;  /* one whole step */
    double period_s; /* seconds per microbatch over whole rounds of launches in the second half; total_s / B in a
                        shorter step */
    double *busy_s, *comm_s, *idle_s;         /* [submesh] compute; active transfers over its outgoing boundary; rest */
    int *peak_slots;                          /* [submesh] microbatches in flight at most */
    struct hapt_simulated_instruction **time; /* [submesh][instruction] */
};

/* HAPT_ERR_INTERNAL when the lists deadlock. */
enum hapt_status hapt_simulate(const struct hapt_schedule *schedule, const struct hapt_costs *costs,
                               struct hapt_arena *arena, struct hapt_simulation **simulation);
/* Steady-state seconds per microbatch under the schedule's launch counts, from a run of as many microbatches as that
 * takes. GPipe, whose launch count is B, is never steady: what a microbatch more costs on average. Plain pipelines,
 * chunk i on submesh i. */
enum hapt_status hapt_simulate_period(const struct hapt_schedule *schedule, const struct hapt_costs *costs,
                                      struct hapt_arena *arena, double *period_s);
/* Share of communication hidden at boundary `chunk`: 1 - (T(c) - T(0)) / (B c) over the steady phase (DESIGN
 * "Objective"). */
enum hapt_status hapt_simulate_overlap(const struct hapt_schedule *schedule, const struct hapt_costs *costs, int chunk,
                                       struct hapt_arena *arena, double *overlap);

#endif
