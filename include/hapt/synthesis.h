/*
 * Synthesis of the SPMD program of one mesh axis (HAP 4): which cut every operator runs with and which communications
 * stand between them, so that a step takes least by HAP's cost model (HAP 3.2).
 *
 * The model. Every communication synchronises the devices of the axis; between two such points a device computes on its
 * own. A program costs the sum over these stages of the communication and of the slowest device's computation.
 * Communications of parameters' gradients, once a step at its end and straight from one layout to the next, cost 1/B of
 * their time per microbatch. Partial sums are removed behind their writer; other communications stand just before the
 * first operator that needs what they make (in long models, of gradients: just behind their writer). A tensor is laid
 * out as some cut of an operator has it; where the search is exact sums may stop over in plain shards of any other
 * dimension, too. Slices of whole tensors move nothing and are free. Devices of one kind and of equal ratios are
 * counted as one, with the largest of their shards.
 *
 * The search. The operators are folded: a forward operator is decided together with its backward operators, so that
 * what lives between the two is no part of the state. A state is a forward prefix and a backward suffix of the program;
 * it keeps which versions of the living tensors the prefix has made (HAP's properties), which ones the suffix waits
 * for, and how far each kind of device is since the last, and until the next, synchronisation. A* over these states
 * (HAP Fig. 10) with HAP's three reductions (4.5): inputs and parameters are fused with their readers and never
 * communicated, a version is made once, properties that no operator left can read are dropped. A state falls when
 * another one at the same place costs no more on any kind of device and has made more and waits for less; where all
 * devices are alike also when it costs no more with the missing versions bought. The heuristic is the remaining
 * computation at the best share each operator allows, with the sums that its cuts leave to be done and the gradient
 * communication that no layout of a parameter avoids, and the conversions without which what lives here meets no cut of
 * the operators it goes to next, a forward operator's with those of its backward ones.
 *
 * Long models are cut into segments where few tensors cross. Each structure of a segment is searched once for every
 * layout of the crossing tensors it is met with, and the segments are joined by a shortest path, so a long model costs
 * little more than its unique segments. At such a cut devices count as synchronised (HAP 5.2), and a tensor crosses in
 * one layout that is no partial sum. Where memory is short the segments are searched under several prices of memory
 * (Lagrange multipliers), and the ways found are joined by a shortest path with memory as a resource.
 */
#ifndef HAPT_SYNTHESIS_H
#define HAPT_SYNTHESIS_H

#include "hapt/sharding.h"

/* One operator run with a cut, as a cost sees it. */
struct hapt_spmd_work {
    const struct hapt_graph *graph;
    int op;
    struct hapt_cut cut;
    unsigned sharded_input, sharded_output; /* bit i: that operand is sharded by the cut */
    double share;                           /* of the cut index; 1 where nothing is cut */
};
/* Bytes that it reads and writes on a device, or on one of `sharers` that share out its rows evenly: sharded operands
 * by their share. */
double hapt_spmd_work_bytes(const struct hapt_spmd_work *work, int sharers);
/* Of a whole tensor, on one of `sharers` that share out its rows evenly. */
double hapt_spmd_tensor_bytes(const struct hapt_graph *graph, int tensor, int sharers);

struct hapt_spmd_costs {
    const void *context;
    /* [axis size] devices of equal kind compute equally fast; NULL: all do. */
    const int *kind;
    /* Seconds of that work on device `device` of the axis, for one microbatch. */
    double (*compute_s)(const void *context, const struct hapt_spmd_work *work, int device);
    /* Seconds of a collective on a tensor of `bytes` (all shards together) whose largest shard is that part of it. */
    double (*collective_s)(const void *context, enum hapt_collective_kind kind, double bytes, double largest_share);
    /* The same for what brings the gradient of a parameter to its layout, once a step: where gradients of many
     * parameters go in one call, they share its latency. NULL: as all others. */
    double (*gradient_s)(const void *context, enum hapt_collective_kind kind, double bytes, double largest_share);
    /* Bytes of a whole tensor as this axis sees it; NULL: hapt_tensor_bytes. */
    double (*tensor_bytes)(const void *context, const struct hapt_graph *graph, int tensor);
};

/* A simple cost structure: rates alone. */
struct hapt_spmd_rates {
    int size;
    const double *flops_per_s, *bytes_per_s; /* [size] of each device */
    double launch_s;                         /* of every operator */
    double latency_s, bandwidth_bytes_per_s; /* of the axis' links, per rank and direction; rings */
};
/* Fills `costs` (kinds NULL: every device its own kind where rates differ, found by comparing) to ask `rates`, which
 * must outlive it; `kind` [size] is the caller's. */
void hapt_spmd_rates_costs(const struct hapt_spmd_rates *rates, int *kind, struct hapt_spmd_costs *costs);

struct hapt_synthesis_options {
    int microbatches;                   /* B; 0 counts as 1 */
    const double *memory_bytes;         /* [axis size] limit of each device, or NULL: none */
    double in_flight;                   /* activations are kept of so many microbatches; 0 counts as 1 */
    double optimizer_bytes_per_element; /* of a parameter's local elements; 0 counts as 8 (Adam's two moments), < 0:
                                           none */
    const struct hapt_cut *const
        *forced;                  /* [op_count] the one cut an operator may have (blocks and unit 0: any), or NULL */
    const int *ratio_of;          /* [forward_count] which ratio vector of the axis an operator uses; NULL: the first */
    unsigned boundary_layouts;    /* tensors between segments: bit 0 whole, bit 1 + d sharded on dimension d; 0: all */
    bool no_replicated_gradients; /* no sufficient factor broadcasting: gradients of parameters from shards where a cut
                                     exists */
    bool no_grouped_broadcast;
    bool exact;          /* the whole graph as one segment, memory as a resource, nothing left out: for small graphs */
    int segment_minimum; /* forward operators a segment has at least; 0: 4 */
    long most_states; /* of one search of a segment; beyond it the cheapest states alone go on, of every layout of what
                       * segments share; 0: 1,000, exact 200,000 */
    int most_prices;  /* of memory, between one that is too low and one at which a program fits; 0: 3 */
    /* Called with every program that is found on the way to one that fits the memory, from the fastest on (NULL: not):
     * what each costs and what its fullest device needs. The programs live in the arena of the result. */
    void (*found)(void *context, const struct hapt_axis_program *program, double cost_s, double memory_bytes);
    void *found_context;
};

struct hapt_synthesis_report {
    double cost_s;                          /* per microbatch, of the program as hapt_axis_program_price prices it */
    double compute_s, communicate_s, end_s; /* its parts; end_s is already 1/B */
    int stages;                             /* between synchronisations, the first included */
    double memory_bytes;                    /* of the device that needs most of its limit (or most, without limits) */
    int segments, unique_segments;
    long expanded, generated; /* states */
    double seconds;           /* of synthesis */
    bool optimal;             /* proven: no program of this space costs less */
    const char *because;      /* why not, else "" */
};

/* The best program of `axis` over the graph of a sharding so far (differentiated or not; hapt_sharding_trivial).
 * HAPT_ERR_INFEASIBLE when memory or forced cuts allow none. `report` may be NULL. Rank-local and deterministic. The
 * program lives in `arena`. */
enum hapt_status hapt_synthesise(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis,
                                 const struct hapt_spmd_costs *costs, const struct hapt_synthesis_options *options,
                                 struct hapt_arena *arena, struct hapt_axis_program *program,
                                 struct hapt_synthesis_report *report);

/*
 * Both axes of a mesh (n, m) of equal devices. The axes are synthesised one after the other, either first, and the one
 * that comes second exactly, over what the first one made of the graph: its collectives are operators then, so the
 * price of the inner axis' program is that of the whole. Which layout the other axis will give is not known to the
 * first one: it counts on an even share, or on what the other would do alone. Beside that each axis is completed with
 * plain data and tensor parallelism, and the cheapest of all is kept.
 */
struct hapt_mesh_costs {
    const void *context;
    /* Seconds of that work on one device for one microbatch: work->graph has the shapes that the other axis leaves it,
     * work->share is of the cut index, `beside` the part of all that that the other axis is expected to leave (1 where
     * the shapes say it). */
    double (*compute_s)(const void *context, const struct hapt_spmd_work *work, double beside);
    /* Seconds of a collective on a tensor of `bytes` (all shards along the axis together) whose largest shard is that
     * part (0: even ones). Every group of ranks along the axis has one at the same time. */
    double (*collective_s)(const void *context, int axis, enum hapt_collective_kind kind, double bytes,
                           double largest_share);
};

/* Ways to come to a program of both axes; plain programs of both are always looked at. */
enum {
    HAPT_MESH_OUTER_FIRST = 1, /* the outer axis as if the inner one halved, ... everything; then the inner one */
    HAPT_MESH_INNER_FIRST = 2, /* the inner axis alone, the outer one for what that leaves, then the inner one again */
    HAPT_MESH_PLAIN_OUTER = 4, /* rows over the outer axis, then the inner one */
    HAPT_MESH_PLAIN_INNER = 8, /* plain programs of the inner axis on synthesised outer ones */
    HAPT_MESH_LEAN_FIRST =
        16, /* where nothing fits the memory, the first two with the axis that comes first within it, as is expected */
    HAPT_MESH_ALL = 31
};
struct hapt_mesh_options {
    int microbatches;    /* as in hapt_synthesis_options, like what follows */
    double memory_bytes; /* limit of every device; 0: none */
    double in_flight, optimizer_bytes_per_element;
    long most_states;
    int most_prices;
    bool exact;
    unsigned ways; /* 0: all */
    /* Called with every program of both axes that is priced, those of hapt_synthesis_options.found among them (NULL:
     * not). They are gone when the call is over. */
    void (*found)(void *context, const struct hapt_axis_program *const program[HAPT_MESH_AXES], double cost_s,
                  double memory_bytes);
    void *found_context;
};
struct hapt_mesh_report {
    struct hapt_synthesis_report
        inner; /* cost_s, its parts and memory are of the whole; counts and seconds of its axis' last search */
    const char *outer_by, *inner_by; /* "synthesised", "synthesised for the inner axis", "rows", "tensor parallel" */
    double plain_s;                  /* the cheapest whole without synthesis, INFINITY: none */
    int tried;                       /* wholes that were priced */
    long expanded;                   /* states of all searches */
    double seconds;
};
/* program[axis] (NULL for an axis of one device) and the sharding by both, in `arena`. HAPT_ERR_INFEASIBLE when no way
 * gives a program within the memory. Rank-local and deterministic. `report` may be NULL. */
enum hapt_status hapt_synthesise_mesh(const struct hapt_graph *graph, const struct hapt_axis axis[HAPT_MESH_AXES],
                                      const struct hapt_mesh_costs *costs, const struct hapt_mesh_options *options,
                                      struct hapt_arena *arena, const struct hapt_axis_program *program[HAPT_MESH_AXES],
                                      struct hapt_sharding **sharding, struct hapt_mesh_report *report);

struct hapt_program_price {
    double cost_s, compute_s, communicate_s, end_s;
    int stages;
    double *memory_bytes; /* [axis size]: weights, gradients, optimizer state, activations kept for the backward pass */
};
/* Checks a program instruction by instruction (HAP 4.2) and prices it, device by device; who sees a version across
 * ranges is for hapt_sharding_apply to say. HAPT_ERR_INFEASIBLE names the instruction whose precondition does not hold,
 * or what is missing at the end. */
enum hapt_status hapt_axis_program_price(const struct hapt_sharding *sharding, int axis_index,
                                         const struct hapt_axis *axis, const struct hapt_spmd_costs *costs,
                                         const struct hapt_synthesis_options *options,
                                         const struct hapt_axis_program *program, struct hapt_arena *arena,
                                         struct hapt_program_price *price);

#endif
