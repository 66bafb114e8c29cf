/*
 * Boundaries of the chunks of a schedule, by a beam under the simulator (Pfeife 3.4, Algorithm 1).
 *
 * The caller gives the instruction lists and the costs of each chunk for each range of layers. Any schedule works, also
 * a looped one with several chunks on a submesh. A layer is whatever the boundaries may separate: a planner's layer, or
 * one operator. Pure functions; rank-local, the same result on every rank.
 */
#ifndef HAPT_CHUNK_CUTS_H
#define HAPT_CHUNK_CUTS_H

#include <stdint.h>

#include "hapt/simulate.h"

/* A chunk with some layers. */
struct hapt_chunk_costs {
    double forward_s, backward_s; /* per microbatch; infinite: the chunk cannot hold these layers */
    double weight_s;              /* split schedules: the gradients of parameters */
    double step_s;                /* once per step: reduction, update */
    double comm_s;                /* one transfer over the boundary behind the chunk; not read behind the last */
    double parameter_bytes;       /* per device, resident */
    double activation_bytes;      /* per device and slot */
};

struct hapt_chunk_cuts {
    int layer_count; /* L, at least the number of chunks */
    /* The lists. They stay the same for all boundaries; those of a split schedule too, though the generator would place
     * its WEIGHT instructions anew. */
    const struct hapt_schedule *schedule;
    /* Costs of a chunk that holds layers [first, end). Called many times for the same range, so it should be a table.
     */
    void (*chunk)(const void *context, int chunk, int first, int end, struct hapt_chunk_costs *costs);
    const void *context;
    /* [submesh] of a device; NULL: unlimited. A submesh needs the parameter bytes of its chunks, and for each slot of
     * its list the largest activation bytes of its chunks (hapt_plan_submesh_fits). */
    const double *memory_bytes;
    double exchange_s; /* as in struct hapt_costs */
    bool blocking;
    int transfer_slots;
    int width;                /* entries of the beam, L_K; 0: 16 */
    int reach;                /* layers that a boundary moves at most; 0: 10 */
    int64_t most_simulations; /* the beam ends there; 0: no limit */
};

struct hapt_chunk_cuts_found {
    int *end;          /* [chunk] half-open: chunk c holds [end[c - 1], end[c]); the last is L */
    double step_s;     /* simulated step */
    int64_t simulated; /* steps that were simulated: the work */
    int64_t looked;    /* boundaries that were looked at, most of them without a simulation */
};

/*
 * The beam. It starts from `start` [chunk] (ends), or if NULL from chunks of about equal time. Each entry moves each
 * boundary by up to `reach` layers, alone and with the others in proportion (hapt_chunk_cuts_move). It ends when no
 * move improves on the slowest of `width` entries. Until an entry fits the memory, the beam minimises the missing
 * bytes. HAPT_ERR_INFEASIBLE: no boundaries were found that fit, with the least excess in the message.
 */
enum hapt_status hapt_chunk_cuts_beam(const struct hapt_chunk_cuts *problem, const int *start,
                                      struct hapt_arena *result, struct hapt_chunk_cuts_found *found);
/* The step of given boundaries by the same rules. INFINITY: they do not fit the memory or a chunk is impossible. */
enum hapt_status hapt_chunk_cuts_price(const struct hapt_chunk_cuts *problem, const int *end,
                                       struct hapt_simulate_work *work, double *step_s);
/* Ends [chunk] of chunks of about equal time: the least longest chunk. The time of a chunk must not fall with more
 * layers. If no chunks are possible, the ends have no meaning, but each chunk still has a layer. */
enum hapt_status hapt_chunk_cuts_even(const struct hapt_chunk_cuts *problem, struct hapt_arena *scratch, int *end);
/*
 * Moves the boundary behind chunk `at` by `by` layers. In proportion: the boundaries before it stretch with the layers
 * in front of it, those behind it shrink with the layers behind it. (The paper's formula for these gives lengths of
 * segments; its authors' code moves boundaries as here.) False: a chunk would be empty.
 */
bool hapt_chunk_cuts_move(const int *from, int chunks, int layers, int at, int by, bool in_proportion, int *to);

#endif
