/*
 * Pipeline schedules as data: one instruction list per submesh, used by the simulator, the memory planner and the
 * trainer.
 *
 * Pure functions. Papers: HAPT 2.1 (1F1B), 2.3 (eager 1F1B), 4.1 (H-1F1B); GPipe.
 */
#ifndef HAPT_SCHEDULE_H
#define HAPT_SCHEDULE_H

#include <math.h>

#include "hapt/arena.h"

enum hapt_schedule_kind { HAPT_SCHEDULE_GPIPE, HAPT_SCHEDULE_1F1B, HAPT_SCHEDULE_EAGER, HAPT_SCHEDULE_H1F1B };
/* "gpipe", "1f1b", "eager1f1b", "h1f1b". */
const char *hapt_schedule_kind_name(enum hapt_schedule_kind kind);
bool hapt_schedule_kind_parse(const char *name, enum hapt_schedule_kind *kind);

enum hapt_instruction_kind {
    HAPT_INSTRUCTION_RECEIVE_FORWARD, /* wait until all incoming activations of the microbatch are in transfer slots */
    HAPT_INSTRUCTION_FORWARD,
    HAPT_INSTRUCTION_SEND_FORWARD, /* hand outgoing activations to the communication thread */
    HAPT_INSTRUCTION_RECEIVE_BACKWARD,
    HAPT_INSTRUCTION_BACKWARD,
    HAPT_INSTRUCTION_SEND_BACKWARD,
    HAPT_INSTRUCTION_REDUCE,   /* gradients across the submesh */
    HAPT_INSTRUCTION_EXCHANGE, /* gradients of tied parameters across chunks; no chunk */
    HAPT_INSTRUCTION_NORM,     /* all ranks agree on loss, gradient norm, and whether the step updates; no chunk */
    HAPT_INSTRUCTION_UPDATE    /* one parameter group of a chunk; nothing if the step was refused or skipped */
};

struct hapt_instruction {
    enum hapt_instruction_kind kind;
    int step;       /* relative to the list's first step */
    int chunk;      /* part of the graph; chunks ascend along it, a submesh may run several; -1: for all of them */
    int microbatch; /* -1 for once-per-step instructions */
    int slot;       /* activation slot of (chunk, microbatch); -1 for once-per-step instructions */
    int group;      /* UPDATE: parameter group, of `update_groups`; else 0 */
};

/* Microbatches for which a boundary has room in each direction, beside the slots. Without spare room a slow link stalls
 * the pipeline: 361 instead of 264 ms a step were measured with 1. */
#define HAPT_TRANSFER_SLOTS 3

struct hapt_instruction_list {
    int count;
    struct hapt_instruction *instruction;
    int slots; /* activation slots of the submesh, each of one (chunk, microbatch) at a time */
};

struct hapt_schedule {
    enum hapt_schedule_kind kind;
    int microbatches; /* B */
    int chunk_count;
    int submesh_count;
    int update_groups;                  /* UPDATE instructions of a chunk */
    int *submesh_of;                    /* [chunk_count] numbered by their first chunks */
    int *launches;                      /* [chunk_count] N_i: microbatches of the chunk in flight at most */
    struct hapt_instruction_list *list; /* [submesh_count] */
    struct hapt_instruction_list idle;  /* of a rank without a chunk: NORM alone */
};

struct hapt_schedule_options {
    bool tied;             /* an EXCHANGE before the agreement */
    int update_groups;     /* UPDATE instructions per chunk; 0: one */
    const int *submesh_of; /* [chunks] numbered by their first chunks; NULL: each chunk has its own */
};

/* Does the boundary behind a chunk join two submeshes? Inside one, nothing is sent. False behind the last chunk and for
 * chunk -1. */
static inline bool hapt_schedule_crosses(const struct hapt_schedule *schedule, int chunk)
{
    return chunk >= 0 && chunk + 1 < schedule->chunk_count &&
           schedule->submesh_of[chunk] != schedule->submesh_of[chunk + 1];
}

/* a <= b for the planner and the schedules; the tolerance keeps rounding from deciding. */
static inline bool hapt_at_most(double a, double b)
{
    const double large = fabs(a) > fabs(b) ? fabs(a) : fabs(b);
    return a <= b || (isfinite(large) && a <= b + 1e-12 * large);
}

/* delta_i, the launches of a stage beyond its successor's, with c_i = comm_s. H-1F1B: HAPT (2); 1F1B: 1; eager: 2;
 * GPipe: 0. */
int hapt_schedule_delta(enum hapt_schedule_kind kind, double comm_s, double t_max_s, double hide_threshold);
/* Launch counts N_i of the stages. comm_s[i] is c_i behind stage i (last: 0). GPipe: B. 1F1B: S - i. Eager: 2 (S - i) -
 * 1 with i from 0, HAPT 2.3.1. H-1F1B: HAPT (1), (2) with epsilon = hide_threshold. All at most B. An H-1F1B step takes
 * at most (B - 1 + N_0) t_max (1 + 2 epsilon), even with unbalanced stages. This needs c_i <= t_max and at least two
 * transfer slots per boundary; argument: tests/unit/schedule_random.c. */
void hapt_schedule_warmup(enum hapt_schedule_kind kind, int stages, int microbatches, const double *comm_s,
                          double t_max_s, double hide_threshold, int *warmup);
/* One step of a pipeline. `options` NULL: nothing tied, one update, a submesh per chunk. A submesh with several chunks
 * runs their lists in turn: whatever is ready, gradients first (merge.c). HAPT_ERR_INPUT: launch counts outside [1,
 * microbatches] or rising along the pipeline. */
enum hapt_status hapt_schedule_build(enum hapt_schedule_kind kind, int chunks, int microbatches, const int *warmup,
                                     const struct hapt_schedule_options *options, struct hapt_arena *arena,
                                     struct hapt_schedule **schedule);
/* Checks order, completeness and slots: no deadlock, each microbatch once forward and once backward, launch counts
 * respected. Each list has one NORM, behind its last gradient, and every UPDATE is behind it. HAPT_ERR_INTERNAL
 * otherwise. */
enum hapt_status hapt_schedule_check(const struct hapt_schedule *schedule);

#endif
