/*
 * Synthesis of the program of one axis: how the files work together, and the problem that they solve.
 *
 *  sharding, axis, costs, options
 *      |
 *      |  <-- cuts of operators, collectives between layouts, their seconds          synthesis_price.c
 *      v
 *  problem: layouts of tensors, choices (cuts) of operators                         synthesis_problem.c
 *      |  <-- operators folded into steps, tensors as objects, ends of gradients    synthesis_fold.c
 *      v
 *  segments: split where few tensors cross, each searched once per start            synthesis_search.c      <-+
 *      |                                                                                                      |
 *      |      state --> cut, communications, memory: a state after the next step    synthesis_transitions.c   |
 *      |        ^              |                                                                              |
 *      |        |              v                                                                              |
 *      |        |       lower bound of the rest                                     synthesis_bound.c         |
 *      |        |              |                                                                              |
 *      |        |              v                                                                              |
 *      |        +------ kept unless another state dominates it                      synthesis_states.c        |
 *      v                                                                                                      |
 *  outcomes: the cheapest path of a segment for each layout of what crosses its end                           |
 *      |                                                                                                      |
 *      v                                                                                                      |
 *  path through all segments: the shortest one, or the shortest within memory       synthesis_path.c          |
 *      |                                                                                                      |
 *      v                                                                                                      |
 *  program: decisions as instructions, checked and priced                           synthesis.c               |
 *      |                                                                                                      |
 *      +--- does not fit: search again at a higher price of memory -------------------------------------------+
 *
 * Above it: synthesis_mesh.c (both axes of a mesh), alternate.c and alternate_ratios.c (programs and ratios in turn).
 */
#ifndef HAPT_SYNTHESIS_SYNTHESIS_PRIVATE_H
#define HAPT_SYNTHESIS_SYNTHESIS_PRIVATE_H

#include <math.h>
#include <string.h>

#include "hapt/rules.h"
#include "hapt/synthesis.h"

/* Layouts of a tensor have small numbers; their sets are bit masks. */
enum { REPLICATED, PARTIAL, SHARDED, MOST_LAYOUTS = 16, MOST_CLASSES = 8 };
typedef uint16_t layout_set;

/* Makes room for one more element of an array in an arena. */
#define MAKE_ROOM(array, count, capacity, least, arena)                                  \
    do {                                                                                 \
        if ((count) < (capacity)) break;                                                 \
        const int wider_ = (capacity) ? 2 * (capacity) : (least);                        \
        void *const grown_ = hapt_arena_alloc((arena), (size_t)wider_, sizeof *(array)); \
        if (!grown_) return HAPT_ERR_MEMORY;                                             \
        if ((count) > 0) memcpy(grown_, (array), (size_t)(count) * sizeof *(array));     \
        (array) = grown_;                                                                \
        (capacity) = wider_;                                                             \
    } while (0)

/* The time of the slowest kind of device; 0 without any. */
static inline double slowest(const double *seconds, int count)
{
    double most = 0;
    for (int j = 0; j < count; j++) most = fmax(most, seconds[j]);
    return most;
}

/* ---- cuts and costs (synthesis_price.c) ---- */

/* An operator with a cut: the properties that it needs of each input and makes of each output. */
struct hapt_cut_rule {
    struct hapt_cut cut;
    struct hapt_rule rule;
    int64_t units; /* units shared out over the axis; 0: nothing is cut */
};
struct hapt_op_cuts {
    int count;
    struct hapt_cut_rule *rule;
};

/* Every cut of every operator that the axis can share out, in a fixed order: HAPT_CUT_REPLICATED first. */
enum hapt_status hapt_cuts_enumerate(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis,
                                     const int *ratio_of, struct hapt_arena *arena, struct hapt_op_cuts *cuts);
/* One cut (blocks or unit 0 count as 1). HAPT_ERR_INFEASIBLE if the signature or the sizes forbid it. */
enum hapt_status hapt_cut_rule_make(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis,
                                    int op, struct hapt_cut cut, struct hapt_cut_rule *made);
/* Shares of a dimension of `units` units: first [axis size + 1]. */
bool hapt_axis_split(const struct hapt_axis *axis, int ratio, int64_t units, int64_t *first);

/* An operator's work under a rule, on all of the cut index. */
struct hapt_spmd_work hapt_work_of_rule(const struct hapt_graph *graph, int op, const struct hapt_cut_rule *rule);
/* The cheapest collective from one layout to another and its seconds; HAPT_COLLECTIVE_NONE and INFINITY if there is
 * none. */
enum hapt_collective_kind hapt_conversion(const struct hapt_spmd_costs *costs, double bytes, struct hapt_property from,
                                          double from_share, struct hapt_property to, double to_share, double *seconds);
static inline double hapt_full_bytes(const struct hapt_spmd_costs *costs, const struct hapt_graph *graph, int tensor)
{
    return costs->tensor_bytes ? costs->tensor_bytes(costs->context, graph, tensor)
                               : (double)hapt_tensor_bytes(&graph->tensor[tensor]);
}
/* `costs` for the communications of one tensor. */
static inline struct hapt_spmd_costs hapt_costs_of_tensor(const struct hapt_spmd_costs *costs, bool parameter_gradient)
{
    struct hapt_spmd_costs its = *costs;
    if (parameter_gradient && costs->gradient_s) its.collective_s = costs->gradient_s;
    return its;
}
/* Copies of a parameter's bytes: itself, and its optimizer state of `state_bytes` per element. */
static inline double hapt_parameter_copies(const struct hapt_tensor *parameter, double state_bytes)
{
    const double state = state_bytes + (parameter->dtype == HAPT_F32 ? 0 : 4); /* fp32 master weights */
    return 1 + (parameter->trainable ? state / (double)hapt_dtype_bytes(parameter->dtype) : 0);
}
/* hapt_synthesis_options with its defaults filled in. */
static inline double hapt_microbatches(const struct hapt_synthesis_options *options)
{
    return options->microbatches > 0 ? options->microbatches : 1;
}
static inline double hapt_in_flight(const struct hapt_synthesis_options *options)
{
    return options->in_flight > 0 ? options->in_flight : 1;
}
static inline double hapt_state_bytes(const struct hapt_synthesis_options *options)
{
    const double bytes = options->optimizer_bytes_per_element;
    return bytes < 0 ? 0 : bytes > 0 ? bytes : 8;
}
/* Seconds of an operator's own communication among the shards (hapt_op_type.inner_all_reduces). */
double hapt_exchange_seconds(const struct hapt_spmd_costs *costs, const struct hapt_graph *graph, int op);

/* ---- the problem ---- */

struct layouts { /* of equal tensors */
    int count;
    struct hapt_property property[MOST_LAYOUTS];
    double convert_s[MOST_LAYOUTS][MOST_LAYOUTS];
    unsigned char convert_kind[MOST_LAYOUTS][MOST_LAYOUTS];
    double reach_s[MOST_LAYOUTS]
                  [MOST_LAYOUTS]; /* by the cheapest chain of conversions; 0: the same layout, or a slice */
    double bytes;
    bool parameter_gradient; /* gradient_s is its cost function */
    double share[MOST_LAYOUTS][MOST_CLASSES], largest[MOST_LAYOUTS];
    layout_set sharded; /* all shardings */
    layout_set missing; /* layouts that this tensor cannot have */
};

/*
 * How a parameter's gradient gets from the layout written by the backward part to the parameter's layout, once a step.
 * On the inner axis, the collectives of the outer axis (operators from reduce_first on) come in between. Their inputs
 * are converted before, and the output of the last one after. No other operator reads these outputs, so the cheapest
 * sequence is known for every pair of layouts.
 */
struct ending {
    double seconds[MOST_LAYOUTS][MOST_LAYOUTS]; /* [written][of the parameter]; INFINITY: impossible */
    double bytes[MOST_LAYOUTS][MOST_LAYOUTS]
                [MOST_CLASSES]; /* of all versions with storage of their own, by kind of device */
};

enum object_kind { OBJECT_FORWARD, OBJECT_GRADIENT, OBJECT_PARAMETER, OBJECT_PARAMETER_GRADIENT };
/* An item that a state tracks: an activation; the value of a gradient between two writes; a parameter; its gradient. */
struct object {
    enum object_kind kind;
    int tensor;
    const struct layouts *layouts;
    int first, last;               /* steps that touch it first and last */
    int parameter;                 /* of a parameter's gradient: object of the parameter; else -1 */
    const struct ending *ending;   /* of a parameter's gradient */
    layout_set makeable;           /* gradient value: layouts that its writer can make */
    bool is_read, partial_is_read; /* partial_is_read: some cut of a reader takes partial sums */
    bool tracked;                  /* slices count for memory, so they are recorded */
};

struct choice { /* a cut of a step's operator, in layout numbers */
    const struct hapt_cut_rule *rule;
    unsigned char input[HAPT_MAX_INPUTS], output[HAPT_MAX_OUTPUTS];
    double exchange_s;       /* 0: none */
    const double *compute_s; /* [classes] */
};
struct step {
    int op;
    bool backward;
    int input[HAPT_MAX_INPUTS], output[HAPT_MAX_OUTPUTS]; /* objects, -1: none */
    int previous[HAPT_MAX_OUTPUTS];                       /* the value that an output adds to, or -1 */
    unsigned last_reader; /* bit i: no later step reads that input (an activation: none of the same forward operator);
                             bit HAPT_MAX_INPUTS + o: the same for previous[o] */
    int choice_count;
    struct choice *choice;
    int dying_count, *dying; /* objects that no later step touches */
};

/* Operands of a step as in struct conversion: inputs, previous values of outputs, outputs. */
enum { OPERANDS = HAPT_MAX_INPUTS + HAPT_MAX_OUTPUTS, ALL_OPERANDS = OPERANDS + HAPT_MAX_OUTPUTS };
static inline int object_at(const struct step *step, int operand)
{
    return operand < HAPT_MAX_INPUTS ? step->input[operand]
           : operand < OPERANDS      ? step->previous[operand - HAPT_MAX_INPUTS]
                                     : step->output[operand - OPERANDS];
}

struct problem {
    const struct hapt_sharding *sharding; /* so far */
    int axis_index;
    const struct hapt_graph *graph; /* its graph */
    const struct hapt_axis *axis;
    const struct hapt_spmd_costs *costs;
    const struct hapt_synthesis_options *options;
    struct hapt_arena *arena;
    int classes, *class_of, representative[MOST_CLASSES];
    bool merged;  /* different devices count as one class, because there were too many kinds */
    bool crowded; /* a tensor has more layouts than the search distinguishes */
    int object_count;
    struct object *object;
    int step_count;
    struct step *step;
    const struct layouts **layouts; /* [tensor] */
    int reduce_count;               /* operators from reduce_first on, in order: part of endings, not of states */
    struct step *reduce;
    int *reduced_by;  /* [tensor] the reduce operator that reads it, or -1 */
    int *written_by;  /* [tensor] number of operators that write it */
    bool joins_parts; /* the parts of one gradient's sum are priced separately */
    double microbatches, in_flight, state_bytes;
    bool counts_memory;              /* memory has a price or is a resource, so kept versions are recorded */
    bool memory_resource;            /* memory is a resource of states, else priced by `multiplier` */
    double multiplier[MOST_CLASSES]; /* seconds per byte */
};

enum hapt_status hapt_problem_build(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis,
                                    const struct hapt_spmd_costs *costs, const struct hapt_synthesis_options *options,
                                    struct hapt_arena *arena, struct problem *problem);

static inline layout_set closure_of(const struct layouts *layouts, layout_set made)
{
    return made & 1u << REPLICATED ? (layout_set)(made | layouts->sharded) : made;
}
static inline int lowest_layout(layout_set set)
{
    int layout = 0;
    while (!(set >> layout & 1u)) layout++;
    return layout;
}
/* Bytes of a version on a device of a class. */
static inline double layout_bytes(const struct layouts *layouts, int layout, int class)
{
    return layouts->bytes * layouts->share[layout][class];
}

/* ---- steps (synthesis_fold.c) ---- */

/* Fills the operators in folded order, and the objects with their lifetimes. */
enum hapt_status hapt_fold(struct problem *problem);

/* Fills every gradient's `ending`; equal ones are shared. */
enum hapt_status hapt_endings_build(struct problem *problem);
/* The sequence of gradient `object` between two layouts. Before operator reduce[chain[k]], its input is converted
 * from arrive[k] to need[k]; the operator runs with choice[k]. After the last one it is in arrive[length]. */
enum { MOST_REDUCES = 8 };
struct ending_sequence {
    int length, chain[MOST_REDUCES], choice[MOST_REDUCES];
    int arrive[MOST_REDUCES + 1], need[MOST_REDUCES];
};
void hapt_ending_trace(const struct problem *problem, int object, int written, int wanted,
                       struct ending_sequence *sequence);
/* The tensor that the k-th operator reads; k = length: the gradient at its end. */
int hapt_ending_tensor(const struct problem *problem, int object, const struct ending_sequence *sequence, int k);

/* ---- decisions ---- */

/* A communication before a step: of input `operand`, or of the previous value of output operand - HAPT_MAX_INPUTS.
 * From OPERANDS on: of an output, after the step. First its conversion to its final layout; from ALL_OPERANDS on,
 * versions made from that. */
struct conversion {
    unsigned char operand, from, to;
};
enum { MOST_CONVERSIONS = 8 };
struct decision {
    unsigned char choice, conversion_count;
    struct conversion conversion[MOST_CONVERSIONS];
};
struct chosen {                /* decisions by step, and conversions at the ends of segments */
    struct decision *decision; /* [step_count] */
    int border_count;
    struct chosen_border {
        int step, object;
        unsigned char from, to;
    } * border; /* after that step */
};

/* ---- paths (synthesis_path.c) ---- */

/* If `chain` is given, the paths found are added to it. */
struct hapt_path_chain;
enum hapt_status hapt_path_search(struct problem *problem, struct hapt_arena *arena, struct hapt_path_chain *chain,
                                  struct chosen *chosen, double *cost_s, struct hapt_synthesis_report *report);
/* Paths found by searches at several prices of memory, to be combined. */
enum hapt_status hapt_path_chain_create(struct problem *problem, struct hapt_arena *arena,
                                        struct hapt_path_chain **chain);
/* The cheapest combination within limit [classes], and its bytes by the search's count. HAPT_ERR_INFEASIBLE: none. */
enum hapt_status hapt_path_chain_search(const struct hapt_path_chain *chain, const double *limit,
                                        struct hapt_arena *arena, struct chosen *chosen, double *bytes);

#endif
