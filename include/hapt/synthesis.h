/*
 * Synthesis of the SPMD program of one mesh axis (HAP 4). Input: a sharding so far, the axis and its costs. Output: a
 * cut for every operator and the communications between them, with the least step time by HAP's cost model (HAP 3.2).
 *
 * Cost model. Every communication synchronises the devices of the axis; between two of them a device computes
 * independently. A program costs the sum, over these stages, of the communication and the slowest device's computation.
 * Communications of parameter gradients run once a step, at its end, straight from one layout to the next. They cost
 * 1/B of their time per microbatch. Partial sums are removed right after their writer. Other communications run just
 * before the first operator that needs their result (in long models, those of gradients right after their writer). The
 * layouts of a tensor are those that some operator's cut gives it. In an exact search, sums may also pass through plain
 * shards of any other dimension. Slices of replicated tensors move nothing and are free. Devices of one kind with equal
 * ratios count as one device, with the largest of their shards.
 *
 * Search. Operators are folded: a forward operator is decided together with its backward operators, so what lives only
 * between them is not part of the state. A state is a forward prefix and a backward suffix of the program. It records
 * the versions of live tensors that the prefix has made (HAP's properties) and those that the suffix waits for. It also
 * records, for each kind of device, the time since the last and until the next synchronisation. A* over these states
 * (HAP Fig. 10) uses HAP's three reductions (4.5): inputs and parameters are fused with their readers and never
 * communicated; a version is made once; properties that no remaining operator can read are dropped. A state is
 * dominated if another one at the same step costs no more on any kind of device, has made at least as much and waits
 * for no more. If all devices are alike, it is also dominated if the other costs no more after buying the missing
 * versions. The heuristic is the sum of three terms:
 * - the remaining computation at the best share each operator allows, with the sums that its cuts leave;
 * - the gradient communication that no layout of a parameter avoids;
 * - the conversions without which a live tensor fits no cut of its next operators (a forward operator counts together
 *   with its backward operators).
 *
 * Segments. Long models are split into segments where few tensors cross. Each segment structure is searched once for
 * every layout of the crossing tensors. A shortest path joins the segments, so a long model costs little more than its
 * unique segments. Devices count as synchronised between segments (HAP 5.2), and a tensor crosses in one layout that is
 * not a partial sum. If memory is short, segments are searched at several prices of memory (Lagrange multipliers). A
 * shortest path with memory as a resource then joins the paths found.
 */
#ifndef HAPT_SYNTHESIS_H
#define HAPT_SYNTHESIS_H

#include "hapt/sharding.h"

/* One operator run with a cut, as the cost functions see it. */
struct hapt_spmd_work {
    const struct hapt_graph *graph;
    int op;
    struct hapt_cut cut;
    unsigned sharded_input, sharded_output; /* bit i: that operand is sharded by the cut */
    double share;                           /* of the cut index; 1 if nothing is sharded */
};
/* Bytes read and written on one device, or on one of `sharers` that split its rows evenly. A sharded operand counts
 * by its share. */
double hapt_spmd_work_bytes(const struct hapt_spmd_work *work, int sharers);
/* Bytes of a replicated tensor on one of `sharers` that split its rows evenly. */
double hapt_spmd_tensor_bytes(const struct hapt_graph *graph, int tensor, int sharers);

struct hapt_spmd_costs {
    const void *context;
    /* [axis size] devices of equal kind compute equally fast; NULL: all are equal. */
    const int *kind;
    /* Seconds of that work on device `device` of the axis, per microbatch. */
    double (*compute_s)(const void *context, const struct hapt_spmd_work *work, int device);
    /* Seconds of a collective on a tensor of `bytes` (all shards together); `largest_share`: the part in its
     * largest shard. */
    double (*collective_s)(const void *context, enum hapt_collective_kind kind, double bytes, double largest_share);
    /* The same for the collectives that bring a parameter's gradient to its layout, once a step. One call may serve
     * many gradients, which then share its latency. NULL: use collective_s. */
    double (*gradient_s)(const void *context, enum hapt_collective_kind kind, double bytes, double largest_share);
    /* Bytes of the full tensor as this axis sees it; NULL: hapt_tensor_bytes. */
    double (*tensor_bytes)(const void *context, const struct hapt_graph *graph, int tensor);
};

struct hapt_synthesis_options {
    int microbatches;                   /* B; 0 counts as 1 */
    const double *memory_bytes;         /* [axis size] limit of each device; NULL: no limits */
    double in_flight;                   /* number of microbatches whose activations are kept; 0 counts as 1 */
    double optimizer_bytes_per_element; /* per local element of a parameter; 0 counts as 8 (Adam's two moments), < 0:
                                           none */
    const struct hapt_cut *const
        *forced;         /* [op_count] the one cut an operator may have (blocks and unit 0: any), or NULL */
    const int *ratio_of; /* [forward_count] index of the axis' ratio vector that an operator uses; NULL: the first */
    bool no_replicated_gradients; /* no sufficient factor broadcasting: parameter gradients are computed from shards if
                                     such a cut exists */
    bool exact;       /* the full graph as one segment, memory as a resource, nothing pruned: for small graphs */
    long most_states; /* of one search of a segment; beyond it only the cheapest states go on, for every layout of what
                         segments share; 0: 1,000, or 200,000 if exact */
    int most_prices;  /* prices of memory tried between one that is too low and one at which a program fits; 0: 3 */
    /* Called with every program found during the search for one that fits the memory, from the fastest on (NULL:
     * not called): its cost and the bytes that its fullest device needs. The programs live in the result's arena. */
    void (*found)(void *context, const struct hapt_axis_program *program, double cost_s, double memory_bytes);
    void *found_context;
};

struct hapt_synthesis_report {
    double cost_s;                          /* per microbatch, as computed by hapt_axis_program_price */
    double compute_s, communicate_s, end_s; /* its parts; end_s is already 1/B */
    int stages;                             /* between synchronisations, including the first */
    double memory_bytes; /* of the device closest to its limit (without limits: of the one that needs most) */
    int segments, unique_segments;
    long expanded, generated; /* states */
    double seconds;           /* of synthesis */
    bool optimal;             /* proven: no program of this search space costs less */
    const char *because;      /* why not optimal, else "" */
};

/* The best program of `axis` over the graph of a sharding so far (differentiated or not; hapt_sharding_trivial).
 * HAPT_ERR_INFEASIBLE if memory or forced cuts allow none. `report` may be NULL. Rank-local and deterministic. The
 * program lives in `arena`. */
enum hapt_status hapt_synthesise(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis,
                                 const struct hapt_spmd_costs *costs, const struct hapt_synthesis_options *options,
                                 struct hapt_arena *arena, struct hapt_axis_program *program,
                                 struct hapt_synthesis_report *report);

/*
 * Both axes of a mesh (n, m) of equal devices. The axes are synthesised one after the other, in either order. The
 * second one is exact: it works on the graph that the first one made. The outer axis' collectives are then operators,
 * so the price of the inner axis' program is the price of both. The first one cannot know the other axis' layouts. It
 * assumes even shares, or what the other axis would do alone. Each axis is also combined with plain data and tensor
 * parallelism on the other, and the cheapest program of all is kept.
 */
struct hapt_mesh_costs {
    const void *context;
    /* Seconds of that work on one device per microbatch. work->graph has the shapes that the other axis leaves;
     * work->share is of the cut index. `beside`: the part of all this that the other axis is expected to leave (1 if
     * the shapes include it). */
    double (*compute_s)(const void *context, const struct hapt_spmd_work *work, double beside);
    /* Seconds of a collective on a tensor of `bytes` (all shards along the axis together); `largest_share`: the
     * part in its largest shard (0: even shards). All communicators along the axis run one at the same time. */
    double (*collective_s)(const void *context, int axis, enum hapt_collective_kind kind, double bytes,
                           double largest_share);
};

/* Methods to find a program of both axes; plain programs of both are always tried. */
enum {
    HAPT_MESH_METHOD_OUTER_FIRST = 1, /* the outer axis, with even shares on the inner one; then the inner one */
    HAPT_MESH_METHOD_INNER_FIRST = 2, /* the inner axis; the outer one for what that leaves; the inner one again */
    HAPT_MESH_METHOD_PLAIN_OUTER = 4, /* rows over the outer axis, then the inner one */
    HAPT_MESH_METHOD_PLAIN_INNER = 8, /* plain programs of the inner axis on synthesised outer ones */
    HAPT_MESH_METHOD_LEAN_FIRST = 16, /* if nothing fits: the first two, with limited memory on the first axis */
    HAPT_MESH_METHOD_ALL = 31
};
struct hapt_mesh_options {
    int microbatches;    /* from here on as in hapt_synthesis_options */
    double memory_bytes; /* limit of every device; 0: none */
    double in_flight, optimizer_bytes_per_element;
    long most_states;
    int most_prices;
    bool exact;
    unsigned methods; /* 0: all */
    /* Called with every program of both axes that is priced, including those of hapt_synthesis_options.found (NULL:
     * not called). The programs are valid only during the call. */
    void (*found)(void *context, const struct hapt_axis_program *const program[HAPT_MESH_AXES], double cost_s,
                  double memory_bytes);
    void *found_context;
};
struct hapt_mesh_report {
    struct hapt_synthesis_report
        inner; /* cost_s, its parts and memory are of both axes; counts and seconds of this axis' last search */
    const char *outer_by, *inner_by; /* "synthesised", "synthesised for the inner axis", "rows", "tensor parallel" */
    double plain_s;                  /* the cheapest program of both axes without synthesis; INFINITY: none */
    int priced_count;                /* programs of both axes that were priced */
    long expanded;                   /* states of all searches */
    double seconds;
};
/* program[axis] (NULL for an axis of one device) and the sharding by both, in `arena`. HAPT_ERR_INFEASIBLE if no
 * method finds a program that fits the memory. Rank-local and deterministic. `report` may be NULL. */
enum hapt_status hapt_synthesise_mesh(const struct hapt_graph *graph, const struct hapt_axis axis[HAPT_MESH_AXES],
                                      const struct hapt_mesh_costs *costs, const struct hapt_mesh_options *options,
                                      struct hapt_arena *arena, const struct hapt_axis_program *program[HAPT_MESH_AXES],
                                      struct hapt_sharding **sharding, struct hapt_mesh_report *report);

struct hapt_program_price {
    double cost_s, compute_s, communicate_s, end_s;
    int stages;
    double *memory_bytes; /* [axis size]: weights, gradients, optimizer state, activations kept for the backward pass */
};
/* Checks a program instruction by instruction (HAP 4.2) and computes its cost, device by device.
 * hapt_sharding_apply checks the visibility of versions across ranges. HAPT_ERR_INFEASIBLE names the instruction whose
 * precondition does not hold, or what is missing at the end. */
enum hapt_status hapt_axis_program_price(const struct hapt_sharding *sharding, int axis_index,
                                         const struct hapt_axis *axis, const struct hapt_spmd_costs *costs,
                                         const struct hapt_synthesis_options *options,
                                         const struct hapt_axis_program *program, struct hapt_arena *arena,
                                         struct hapt_program_price *price);

#endif
