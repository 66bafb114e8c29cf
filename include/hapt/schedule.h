/*
 * Pipeline schedules as data: one instruction list per submesh, used by the simulator, the memory planner and the
 * trainer.
 *
 * Pure functions. Papers: HAPT 2.1 (1F1B), 2.3 (eager 1F1B), 4.1 (H-1F1B); GPipe; Pfeife 3.4 (looped schedules, of
 * which Megatron's interleaved and the breadth-first one are cases); zero bubble (split backward).
 */
#ifndef HAPT_SCHEDULE_H
#define HAPT_SCHEDULE_H

#include <math.h>

#include "hapt/arena.h"

enum hapt_schedule_kind {
    HAPT_SCHEDULE_GPIPE,
    HAPT_SCHEDULE_1F1B,
    HAPT_SCHEDULE_EAGER,
    HAPT_SCHEDULE_H1F1B,
    HAPT_SCHEDULE_INTERLEAVED,   /* Megatron: B_l = submeshes, prefetch as for eager 1F1B */
    HAPT_SCHEDULE_BREADTH_FIRST, /* B_l = B, all forwards first */
    HAPT_SCHEDULE_LOOPED,        /* Pfeife: any B_l and prefetch */
    HAPT_SCHEDULE_KINDS
};
/* "gpipe", "1f1b", "eager1f1b", "h1f1b", "interleaved", "breadth-first", "looped". */
const char *hapt_schedule_kind_name(enum hapt_schedule_kind kind);
bool hapt_schedule_kind_parse(const char *name, enum hapt_schedule_kind *kind);
/* True for the kinds whose order is looped: microbatches in groups of B_l. Launch counts of chunks do not apply. */
static inline bool hapt_schedule_loops(enum hapt_schedule_kind kind)
{
    return kind >= HAPT_SCHEDULE_INTERLEAVED;
}

enum hapt_instruction_kind {
    HAPT_INSTRUCTION_RECEIVE_FORWARD, /* wait until all incoming activations of the microbatch are in transfer slots */
    HAPT_INSTRUCTION_FORWARD,
    HAPT_INSTRUCTION_SEND_FORWARD, /* hand outgoing activations to the communication thread */
    HAPT_INSTRUCTION_RECEIVE_BACKWARD,
    HAPT_INSTRUCTION_BACKWARD,
    HAPT_INSTRUCTION_SEND_BACKWARD,
    HAPT_INSTRUCTION_WEIGHT,   /* split backward: gradients of parameters; BACKWARD then makes those of activations */
    HAPT_INSTRUCTION_REDUCE,   /* gradients across the submesh */
    HAPT_INSTRUCTION_EXCHANGE, /* gradients of tied parameters across chunks; no chunk */
    HAPT_INSTRUCTION_NORM,     /* all ranks agree on loss, gradient norm, and whether the step updates; no chunk */
    HAPT_INSTRUCTION_UPDATE    /* one parameter group of a chunk; nothing if the step was refused or skipped */
};

struct hapt_instruction {
    enum hapt_instruction_kind kind;
    int step;        /* relative to the list's first step */
    int chunk;       /* part of the graph; chunks ascend along it, a submesh may run several; -1: for all of them */
    int microbatch;  /* -1 for once-per-step instructions */
    int slot;        /* activation slot of (chunk, microbatch); -1 for once-per-step instructions */
    int group;       /* UPDATE: parameter group, of `update_groups`; else 0 */
    int weight_slot; /* BACKWARD and WEIGHT of a split pass: slot of what BACKWARD leaves for WEIGHT; else 0 */
};

/* Microbatches for which a boundary has room in each direction, beside the slots, unless a schedule needs more. Without
 * spare room a slow link stalls the pipeline: 361 instead of 264 ms a step were measured with 1. */
#define HAPT_TRANSFER_SLOTS 3

struct hapt_instruction_list {
    int count;
    struct hapt_instruction *instruction;
    int slots;        /* activation slots of the submesh, each of one (chunk, microbatch) at a time */
    int weight_slots; /* split: the most (chunk, microbatch)es between BACKWARD and WEIGHT; else 0 */
};

/* Chunks between which tensors go: activations, or their gradients. */
struct hapt_schedule_edge {
    int from, to;
    bool backward;
    int link; /* edges of one submesh with the same link above 0 share a channel; 0: the channel to the other submesh */
};
/* Tensors that chunk `via` gets from chunk `from` and sends on to chunk `to`, from the transfer slot in which they
 * arrived: forward only. */
struct hapt_schedule_relay {
    int from, via, to;
};

/* The edges of a schedule, sorted by (backward, from, to), and their indices. Direction d: 0 forward, 1 backward. */
struct hapt_schedule_edges {
    int count;
    struct hapt_schedule_edge *edge;
    int *out_start; /* [2 chunk_count + 1] edges from chunk c in direction d: out_start[d chunk_count + c] .. + 1 */
    int *in_start;  /* [2 chunk_count + 1] the same for edges to chunk c, through `in` */
    int *in;        /* [count] */
    bool given;     /* by the options */
    /* One channel for each pair of submeshes in each direction, and one for each link of a submesh. Its messages cross
     * one at a time, in the order in which they were sent. */
    int channel_count;
    int *channel_of; /* [count] -1: inside one submesh */
    bool *sends;     /* [2 chunk_count] chunk c has an edge in direction d to another submesh */
    bool *receives;  /* [2 chunk_count] or from one */
    /* Relays; NULL: none. A transfer slot of edge e is free when the receiver has computed and has sent the microbatch
     * over the edges next[next_start[e]] .. + 1. before: the same from the edge that sends on to those that bring. */
    int *next_start, *next, *before_start, *before;
};

struct hapt_costs; /* simulate.h */

struct hapt_schedule_options {
    bool tied;                             /* an EXCHANGE before the agreement */
    int update_groups;                     /* UPDATE instructions per chunk; 0: one */
    const int *submesh_of;                 /* [chunks] numbered by their first chunks; NULL: each has its own */
    int edge_count;                        /* NULL: between neighbours, no gradients to forward-only chunks */
    const struct hapt_schedule_edge *edge; /* any order, each once */
    int relay_count;
    const struct hapt_schedule_relay *relay; /* of `edge`; those inside a submesh have no effect */
    const bool *forward_only;                /* [chunks] a frozen prefix; NULL: none */
    int loop_batch;                          /* B_l of looped kinds; 0: the kind's, else B */
    int prefetch;                            /* b of Pfeife's B_f, HAPT_SCHEDULE_LOOPED only */
    int transfer_slots;                      /* of each edge; 0: HAPT_TRANSFER_SLOTS */
    const int *ahead;               /* [submeshes] looped: forwards before the first backward; NULL: the kind's */
    bool split;                     /* backward passes are split; `costs` place the WEIGHT instructions */
    const int *pool;                /* [submeshes] split: slots that the device holds; NULL: as unsplit */
    const int *weight_slots;        /* [submeshes] split: the most passes that may wait; NULL: any number */
    const struct hapt_costs *costs; /* split */
};

struct hapt_schedule {
    enum hapt_schedule_kind kind;
    int microbatches; /* B */
    int chunk_count;
    int submesh_count;
    int update_groups;  /* UPDATE instructions of a chunk */
    int transfer_slots; /* of each edge; 0: HAPT_TRANSFER_SLOTS */
    bool split;
    bool *forward_only; /* [chunk_count] no BACKWARD, WEIGHT, REDUCE, UPDATE; only a prefix of the chunks */
    int *submesh_of;    /* [chunk_count] numbered by their first chunks */
    int *launches;      /* [chunk_count] N_i: microbatches of the chunk in flight at most */
    struct hapt_schedule_edges edges;
    struct hapt_instruction_list *list;   /* [submesh_count] */
    struct hapt_instruction_list idle;    /* of a rank without a chunk: NORM alone */
    struct hapt_schedule_options options; /* copies, for another number of microbatches */
};

static inline int hapt_schedule_transfer_slots(const struct hapt_schedule *schedule)
{
    return schedule->transfer_slots > 0 ? schedule->transfer_slots : HAPT_TRANSFER_SLOTS;
}

/* Does the boundary behind a chunk join two submeshes? Inside one, nothing is sent. False behind the last chunk and for
 * chunk -1. */
static inline bool hapt_schedule_crosses(const struct hapt_schedule *schedule, int chunk)
{
    return chunk >= 0 && chunk + 1 < schedule->chunk_count &&
           schedule->submesh_of[chunk] != schedule->submesh_of[chunk + 1];
}

/* Direction 0: activations, 1: gradients. Has the chunk RECEIVE or SEND instructions? */
static inline bool hapt_schedule_receives(const struct hapt_schedule *schedule, int chunk, int direction)
{
    return schedule->edges.receives[direction * schedule->chunk_count + chunk];
}
static inline bool hapt_schedule_sends(const struct hapt_schedule *schedule, int chunk, int direction)
{
    return schedule->edges.sends[direction * schedule->chunk_count + chunk];
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
/* Launches of a forward-only chunk, at most B: its slots are free when its activations have left. H-1F1B: the delta of
 * HAPT (2). Others: 2, so that one microbatch is computed while another leaves. */
int hapt_schedule_forward_only_launches(enum hapt_schedule_kind kind, int microbatches, double comm_s, double t_max_s,
                                        double hide_threshold);
/*
 * One step of a pipeline. `options` NULL: nothing tied, one update, a submesh per chunk.
 *
 * The order of a submesh. Neighbouring chunks on one submesh are a visit. Forwards: microbatches in groups of B_l; in a
 * group the own visits ascend; a visit computes all its chunks for one microbatch after another. Backwards: the same
 * with visits and chunks descending. The list: `ahead` forwards, then a backward and a forward in turn, then the other
 * backwards. A forward-only chunk's pass goes with the next forward of a chunk that is trained. Kinds are presets of
 * B_l and `ahead`, with n chunks on the submesh, l in its last visit, and r visits of any submesh from that to the end
 * of the pipeline (in Pfeife 3.4 n = N_l, l = 1, r = D - d): ahead = min(n B, (n - l) B_l + l (r + min(b, r - 1)))
 * GPipe: ahead = B. 1F1B, eager, H-1F1B with a chunk per submesh: ahead = warmup. Interleaved: B_l = submeshes, b = B.
 * Breadth-first: B_l = B, ahead = n B. If the lists of a looped kind deadlock, submeshes that wait for gradients get
 * one forward more until they end; loops around all submeshes need none, a V does. Behind a
 * frozen prefix, a submesh with fewer trained chunks than another starts with at most n B_l forwards.
 *
 * Under GPipe, 1F1B, eager and H-1F1B a submesh with several chunks runs the chunks' own lists in turn: the first pass
 * that is ready, backward before forward (merge.c). This works for any placement, where the order above may deadlock.
 * If messages past the next chunk then need more transfer slots than there are, the largest launch counts are lowered
 * until the lists end.
 *
 * `warmup` [chunks]: N_i. Looped kinds read it for forward-only chunks alone; NULL: 2.
 *
 * Split: a submesh that waits runs its oldest WEIGHT if half of it fits into the wait (hapt_costs.weight_s); it runs
 * one before a forward that has no slot, and before a backward that has no weight slot; the others at the end. Slots
 * are held until WEIGHT, weight slots from BACKWARD to WEIGHT.
 *
 * HAPT_ERR_INPUT: launch counts outside [1, microbatches] or rising along the pipeline; microbatches no multiple of
 * B_l. HAPT_ERR_USAGE: the lists of a looped kind deadlock. HAPT_ERR_INTERNAL: the lists of another kind deadlock.
 */
enum hapt_status hapt_schedule_build(enum hapt_schedule_kind kind, int chunks, int microbatches, const int *warmup,
                                     const struct hapt_schedule_options *options, struct hapt_arena *arena,
                                     struct hapt_schedule **schedule);
/* B_l of a kind; `asked`: that of the options, 0: none. */
int hapt_schedule_loop_batch(enum hapt_schedule_kind kind, int microbatches, int submeshes, int asked);
/* The same schedule with another number of microbatches, a multiple of B_l. Launch counts are those of `schedule`, at
 * most `microbatches`; nothing is tied, and there is one update. `costs`: of a split schedule. */
enum hapt_status hapt_schedule_resize(const struct hapt_schedule *schedule, int microbatches,
                                      const struct hapt_costs *costs, struct hapt_arena *arena,
                                      struct hapt_schedule **resized);
/* The order of edges: forward before backward, then by chunks. */
int hapt_schedule_compare_edges(const struct hapt_schedule_edge *a, const struct hapt_schedule_edge *b);
/* Edges of a schedule whose chunk_count, submesh_of and forward_only are set. Reads edges and relays of `options`; no
 * edges: between neighbours. */
enum hapt_status hapt_schedule_connect(struct hapt_schedule *schedule, const struct hapt_schedule_options *options,
                                       struct hapt_arena *arena);
/*
 * Checks order, completeness and slots, and plays the lists with as many credits per edge as it has transfer slots:
 *   - Each (chunk, microbatch) has one forward; unless forward-only, one backward, and one WEIGHT if split.
 * Microbatches ascend in each of them, so that all schedules of the same chunks give the same bits.
 *   - A weight slot belongs to one (chunk, microbatch) from BACKWARD to WEIGHT.
 *   - A slot belongs to one (chunk, microbatch): until BACKWARD, if split until WEIGHT. That of a forward-only chunk is
 *     free when its sends have ended and its readers on the submesh have computed.
 *   - Each list has one NORM, behind its last gradient, and every UPDATE is behind it.
 *   - The lists end: no deadlock.
 * HAPT_ERR_INTERNAL otherwise; HAPT_ERR_USAGE for a deadlock of a looped kind, and for too small a given `ahead`, since
 * these options come from the user.
 */
enum hapt_status hapt_schedule_check(const struct hapt_schedule *schedule);

#endif
