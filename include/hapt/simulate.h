/*
 * The simulator: executes a schedule's instruction lists as the DAG of HAPT 4.2.1 and Pfeife 3.3, with given costs.
 *
 * Links are full duplex: messages from one submesh to another are one serial channel, in the order in which they were
 * sent. Sends do not occupy compute. Each edge holds HAPT_TRANSFER_SLOTS microbatches, as in the trainer: a received
 * one until its computation ends, a gradient to be sent until its transfer ends. An activation is sent from its slot,
 * which no other microbatch takes before.
 *
 * The ranks of a stage advance together here. In training, ranks with their own rows drift apart while waiting for
 * transfers, and their messages take turns on the link instead of sharing it. So 1F1B over a slow link took up to a
 * seventh less time than simulated (bench/lab).
 */
#ifndef HAPT_SIMULATE_H
#define HAPT_SIMULATE_H

#include "hapt/schedule.h"

enum { HAPT_SIMULATE_STEPS = 3 }; /* at most */
/* The part of a forward pass that still follows when a deferred update ends: operators that read the last piece of the
 * weights, a half of the window (hapt_memory_window). */
#define HAPT_DEFERRED_TAIL (1.0 / 16)

struct hapt_costs {
    const double *forward_s;  /* [chunk] per microbatch */
    const double *backward_s; /* [chunk] split: without the gradients of parameters */
    const double *weight_s;   /* [chunk] split: the gradients of parameters; may be NULL */
    const double *comm_s;     /* [chunk] one transfer over the boundary behind the chunk, either direction; last 0 */
    const double *edge_s;     /* [edge] one transfer, by schedule->edges; NULL: comm_s between neighbours, else 0 */
    const double *step_s;     /* [chunk] once per step: reduction, update; may be NULL */
    /* [chunk] The part of step_s that the first forward pass behind the update may hide, and how much of this part is
     * computation, which the pass then takes longer. NULL: none. With `agrees`. */
    const double *deferred_s, *deferred_work_s;
    double exchange_s;  /* gradients of tied parameters */
    bool blocking;      /* no overlap: transfers occupy sender and receiver */
    int transfer_slots; /* 0: unlimited, as in the paper's DAG */
    int steps;          /* one after another; 0: one */
    bool agrees;        /* NORM waits for all submeshes; false: no stage waits for others before its update */
    /* With `agrees`: submeshes agreed on the step before at time 0, and begin with its updates, which the passes behind
     * them may hide. So one step takes as long as each but the first of several. */
    bool steady;
};

struct hapt_simulated_instruction {
    double start_s, end_s;
};

struct hapt_simulation {
    double total_s;  /* end of the first step */
    double step_s;   /* from the end of the step before the last one to that of the last */
    double period_s; /* seconds per microbatch over whole launch rounds in the second half; total_s / B in a shorter
                        step */
    double *busy_s, *comm_s;                  /* [chunk] computing; transfers over the boundary behind it */
    double *idle_s;                           /* [chunk] of its submesh: step_s minus computing */
    int *peak_slots;                          /* [submesh] microbatches in flight at most */
    struct hapt_simulated_instruction **time; /* [submesh][instruction] of the first step */
    double **arrived_s;                       /* [edge][microbatch] of the first step; edges inside a submesh: NULL */
};

/* Memory of a simulation, for reuse. All zero at first. */
struct hapt_simulate_work {
    void *block;
    size_t bytes;
};
void hapt_simulate_work_release(struct hapt_simulate_work *work);

/* HAPT_ERR_INTERNAL if the lists deadlock. */
enum hapt_status hapt_simulate(const struct hapt_schedule *schedule, const struct hapt_costs *costs,
                               struct hapt_arena *arena, struct hapt_simulation **simulation);
/* Only the time of a step: total_s, or step_s of several. Nothing is allocated if `work` is large enough. */
enum hapt_status hapt_simulate_step(const struct hapt_schedule *schedule, const struct hapt_costs *costs,
                                    struct hapt_simulate_work *work, double *step_s);
/* A chain of chunks, each on a submesh of its own, with messages between neighbours. The schedule is one that launch
 * counts describe: GPipe (all counts B), 1F1B, eager 1F1B or H-1F1B. */
struct hapt_chain {
    int chunks, microbatches;
    const int *launches; /* [chunk] 1 to B, never rise */
    bool tied;           /* the ends exchange gradients of tied parameters */
};
/* Gives the bits of hapt_simulate_step for such a schedule. It makes no lists, so it is several times faster. If the
 * only step takes longer than `most_s`, it ends early: *step_s is then above most_s, and at most the step. `costs`:
 * with overlap, without edge_s; several steps only with agreement. */
enum hapt_status hapt_simulate_chain(const struct hapt_chain *chain, const struct hapt_costs *costs, double most_s,
                                     struct hapt_simulate_work *work, double *step_s);
/* Steady-state seconds per microbatch under the schedule's launch counts, from a run that is long enough for it. GPipe
 * launches B microbatches and has no steady state: the average cost of one more microbatch. */
enum hapt_status hapt_simulate_period(const struct hapt_schedule *schedule, const struct hapt_costs *costs,
                                      struct hapt_arena *arena, double *period_s);
/* Hidden share of the communication at boundary `chunk`: 1 - (T(c) - T(0)) / (B c) over the steady phase
 * (ARCHITECTURE.md, "Objective"). */
enum hapt_status hapt_simulate_overlap(const struct hapt_schedule *schedule, const struct hapt_costs *costs, int chunk,
                                       struct hapt_arena *arena, double *overlap);

/*
 * The critical path: what decided the start of each instruction, from the end of the step back to its start. Each part
 * begins when the one before ends. A steady step begins with updates of the step before, and ends with the agreement.
 */
struct hapt_critical_part {
    int submesh, instruction; /* computing; or -1, and: */
    int edge, microbatch;     /* a transfer */
    double start_s, end_s;
};
struct hapt_critical_path {
    int count;
    struct hapt_critical_part *part; /* in order of time */
};
/* `simulation`: of the same schedule and costs, one step. Ties are decided for the submesh's own list. */
enum hapt_status hapt_simulate_critical_path(const struct hapt_schedule *schedule, const struct hapt_costs *costs,
                                             const struct hapt_simulation *simulation, struct hapt_arena *arena,
                                             struct hapt_critical_path *path);

#endif
