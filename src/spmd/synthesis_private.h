/* The problem that synthesis searches: operators folded into steps, tensors as objects with few layouts. Private to
 * synthesis*.c. */
#ifndef HAPT_SPMD_SYNTHESIS_PRIVATE_H
#define HAPT_SPMD_SYNTHESIS_PRIVATE_H

#include "hapt/synthesis.h"
#include "rules.h"

/* Layouts of a tensor have small numbers; sets of them are bit masks. */
enum { WHOLE, PARTIAL, SHARDED, MOST_LAYOUTS = 16, MOST_CLASSES = 8 };
typedef uint16_t layout_set;

/* ---- cuts (synthesis_cuts.c) ---- */

/* An operator with a cut: what it needs of each input and makes of each output. */
struct hapt_cut_rule {
    struct hapt_cut cut;
    struct hapt_rule rule;
    int64_t units; /* that are shared out over the axis; 0: nothing is cut */
};
struct hapt_op_cuts {
    int count;
    struct hapt_cut_rule *rule;
};

/* Every cut of every operator that the axis can share out, in a fixed order: the whole one first. */
enum hapt_status hapt_cuts_enumerate(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis,
                                     const int *ratio_of, struct hapt_arena *arena, struct hapt_op_cuts *cuts);
/* One cut (blocks or unit 0 count as 1). HAPT_ERR_INFEASIBLE when the signature or the sizes forbid it. */
enum hapt_status hapt_cut_rule_make(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis,
                                    int op, struct hapt_cut cut, struct hapt_cut_rule *made);
/* How a dimension of so many units is shared out: first [axis size + 1]. */
bool hapt_axis_split(const struct hapt_axis *axis, int ratio, int64_t units, int64_t *first);

/* ---- what communications cost (synthesis_problem.c) ---- */

/* The cheapest collective from one layout to another and its seconds; HAPT_COLLECTIVE_NONE and INFINITY where there is
 * none. */
enum hapt_collective_kind hapt_conversion(const struct hapt_spmd_costs *costs, bool no_grouped_broadcast, double bytes,
                                          struct hapt_property from, double from_share, struct hapt_property to,
                                          double to_share, double *seconds);
static inline double hapt_whole_bytes(const struct hapt_spmd_costs *costs, const struct hapt_graph *graph, int tensor)
{
    return costs->tensor_bytes ? costs->tensor_bytes(costs->context, graph, tensor)
                               : (double)hapt_tensor_bytes(&graph->tensor[tensor]);
}
/* `costs` as the communications of one tensor see them. */
static inline struct hapt_spmd_costs hapt_costs_of_tensor(const struct hapt_spmd_costs *costs, bool parameter_gradient)
{
    struct hapt_spmd_costs its = *costs;
    if (parameter_gradient && costs->gradient_s) its.collective_s = costs->gradient_s;
    return its;
}
/* Seconds of an operator's own exchange among the shards (hapt_op_type.exchanges). */
double hapt_exchange_seconds(const struct hapt_spmd_costs *costs, const struct hapt_graph *graph, int op);

/* ---- the problem ---- */

struct layouts { /* of tensors that are alike */
    int count;
    struct hapt_property property[MOST_LAYOUTS];
    double convert_s[MOST_LAYOUTS][MOST_LAYOUTS];
    unsigned char convert_kind[MOST_LAYOUTS][MOST_LAYOUTS];
    double reach_s[MOST_LAYOUTS]
                  [MOST_LAYOUTS]; /* by the cheapest chain of conversions; 0: it is the same, or a slice */
    double bytes;
    bool parameter_gradient; /* priced as such */
    double share[MOST_LAYOUTS][MOST_CLASSES], largest[MOST_LAYOUTS];
    layout_set sharded; /* all shardings */
    layout_set missing; /* those that such a tensor cannot have */
};

/*
 * How the gradient of a parameter gets from the layout that the backward part wrote to that of the parameter, once a
 * step. On the inner axis the collectives of the outer one stand between (operators behind reduce_first): what they
 * read is converted before, what the last one makes behind. No other operator reads what they make, so the cheapest way
 * is known for every two layouts.
 */
struct ending {
    double seconds[MOST_LAYOUTS][MOST_LAYOUTS]; /* [written][of the parameter]; INFINITY: no way */
    double bytes[MOST_LAYOUTS][MOST_LAYOUTS]
                [MOST_CLASSES]; /* of all versions that take a place of their own, by kind of device */
};

enum object_kind { OBJECT_FORWARD, OBJECT_GRADIENT, OBJECT_PARAMETER, OBJECT_PARAMETER_GRADIENT };
/* What a state knows something of: an activation; the value of a gradient between two of its writes; a parameter; its
 * gradient. */
struct object {
    enum object_kind kind;
    int tensor;
    const struct layouts *layouts;
    int first, last;               /* steps that touch it first and last */
    int parameter;                 /* object of the parameter of a parameter's gradient, else -1 */
    const struct ending *ending;   /* of a parameter's gradient */
    layout_set makeable;           /* what the writer of a gradient value can make */
    bool is_read, partial_is_read; /* some cut of a reader takes partial sums */
    bool tracked;                  /* slices count for memory: they are remembered */
};

struct choice { /* a cut of a step's operator in layout numbers */
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
    unsigned last_reader; /* bit i: no step behind reads that input (of an activation: no one of the same forward
                             operator); bit HAPT_MAX_INPUTS + o: the same of previous[o] */
    int choice_count;
    struct choice *choice;
    int dying_count, *dying; /* objects that no step behind touches */
};

struct problem {
    const struct hapt_sharding *sharding; /* so far */
    int axis_index;
    const struct hapt_graph *graph; /* its graph */
    const struct hapt_axis *axis;
    const struct hapt_spmd_costs *costs;
    const struct hapt_synthesis_options *options;
    struct hapt_arena *arena;
    int classes, *class_of, representative[MOST_CLASSES];
    bool merged;  /* devices that differ count as one class: there were too many kinds */
    bool crowded; /* a tensor has more layouts than are told apart */
    int object_count;
    struct object *object;
    int step_count;
    struct step *step;
    const struct layouts *const *layouts; /* [tensor] */
    int reduce_count; /* operators behind reduce_first, in order: they are no part of a state, only of endings */
    struct step *reduce;
    int *reduced_by;  /* [tensor] the one of them that reads it, or -1 */
    int *written_by;  /* [tensor] how many operators write it */
    bool joins_parts; /* what is summed of one gradient in several parts is priced part by part */
    double microbatches, in_flight, state_bytes;
    bool counts_memory;              /* it has a price or is a resource: what is kept is remembered */
    bool memory_resource;            /* memory is a resource of states, else priced by `multiplier` */
    double multiplier[MOST_CLASSES]; /* seconds per byte */
};

enum hapt_status hapt_problem_build(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis,
                                    const struct hapt_spmd_costs *costs, const struct hapt_synthesis_options *options,
                                    struct hapt_arena *arena, struct problem *problem);

static inline layout_set closure_of(const struct layouts *layouts, layout_set made)
{
    return made & 1u << WHOLE ? (layout_set)(made | layouts->sharded) : made;
}
/* Bytes of a version on a device of a class. */
static inline double layout_bytes(const struct layouts *layouts, int layout, int class)
{
    return layouts->bytes * layouts->share[layout][class];
}

/* ---- what ends a step (synthesis_ending.c) ---- */

/* Fills every gradient's `ending`; equal ones are shared. */
enum hapt_status hapt_endings_build(struct problem *problem);
/* The way of gradient `object` between two layouts: in front of the k-th of the operators reduce[chain[k]] its input is
 * brought to need[k] (from arrive[k]), which it runs with choice[k]; behind all of them there is arrive[length]. */
enum { MOST_REDUCES = 8 };
struct ending_way {
    int length, chain[MOST_REDUCES], choice[MOST_REDUCES];
    int arrive[MOST_REDUCES + 1], need[MOST_REDUCES];
};
void hapt_ending_trace(const struct problem *problem, int object, int written, int wanted, struct ending_way *way);
/* The tensor that the k-th of them reads; behind the last one, the gradient as it ends. */
int hapt_ending_tensor(const struct problem *problem, int object, const struct ending_way *way, int k);

/* ---- the search of one segment (synthesis_search.c, synthesis_moves.c) ---- */

/* A communication in front of a step: of input `operand`, or of the previous value of output operand - HAPT_MAX_INPUTS;
 * from HAPT_MAX_INPUTS + HAPT_MAX_OUTPUTS on of an output, behind it: where it ends, then versions made of that. */
struct move {
    unsigned char operand, from, to;
};
enum { MOST_MOVES = 8 };
struct decision {
    unsigned char choice, move_count;
    struct move move[MOST_MOVES];
};
/* The same at the segment's end: of its local object. */
struct border_move {
    int object;
    unsigned char from, to;
};

struct outcome {
    uint32_t *word;            /* [end_count] by local object that crosses the end */
    double cost_s;             /* memory by its price */
    double *bytes;             /* [classes] of what is settled, where memory counts */
    struct decision *decision; /* [steps] */
    int border_count;
    struct border_move *border;
};
/* A stretch of steps with its objects numbered by first appearance. */
struct segment {
    int first, end;          /* steps */
    int local_count, *local; /* objects */
    int start_count, *start; /* local objects that are there before */
    int end_count, *at_end;  /* and behind */
};
struct search_tally {
    long expanded, generated;
    bool capped;
};

enum hapt_status hapt_segment_build(const struct problem *problem, int first, int end, struct segment *segment);
/* Cheapest ways through the segment from `start` [start_count] words to every layout at its end that no other way with
 * a conversion beats, none dearer than the limit. Empty when there is none. */
enum hapt_status hapt_segment_search(const struct problem *problem, const struct segment *segment,
                                     const uint32_t *start, double limit, struct hapt_arena *arena,
                                     struct outcome **outcome, int *outcome_count, struct search_tally *tally);

enum { MOST_CROSSING_OBJECTS = 64 };

/* May an object cross in that layout? */
bool hapt_border_allows(const struct problem *problem, const struct layouts *layouts, int layout);
/* What a crossing object costs in a layout, with the communications for it: of an activation behind the prefix, of a
 * gradient in front of the suffix. */
double hapt_border_cost(const struct object *object, uint32_t word, int layout, struct border_move *move, int *moves);
/* What conversions at the segment's end cost at most. */
double hapt_border_spread(const struct problem *problem, const struct segment *segment);
/* No way through the segment that costs more is of use beside these outcomes with conversions (of layouts of crossing
 * parameters: of those that the outcomes have). INFINITY without outcomes. */
double hapt_border_limit(const struct problem *problem, const struct segment *segment, const struct outcome *outcome,
                         int count);

/* A state's word on an object: what is made (low half), what is waited for (high half). Of a parameter and its
 * gradient: the layout plus 1, 0: not decided. */
static inline layout_set made_of(uint32_t word)
{
    return (layout_set)word;
}
static inline layout_set awaited_of(uint32_t word)
{
    return (layout_set)(word >> 16);
}
static inline uint32_t word_of(layout_set made, layout_set awaited)
{
    return made | (uint32_t)awaited << 16;
}

/* ---- memory (synthesis_memory.c) ---- */

/* What so many times a version's bytes cost by the price of memory. */
double hapt_priced_seconds(const struct problem *problem, const struct layouts *layouts, int layout, double times);
/* How often a parameter's bytes are held: itself and the state of its update. */
double hapt_parameter_copies(const struct problem *problem, const struct object *object);
/* The versions of an activation that are kept for the backward steps that wait for some: of a slice that is no version,
 * the whole. */
layout_set hapt_kept_versions(uint32_t word);
/* What those cost at least, when some that are waited for are still to be made. */
double hapt_kept_seconds(const struct problem *problem, const struct object *object, uint32_t word);

/* ---- the whole (synthesis_path.c, synthesis_emit.c) ---- */

struct chosen {                /* what was decided, by step, and at the ends of segments */
    struct decision *decision; /* [step_count] */
    int border_count;
    struct chosen_border {
        int step, object;
        unsigned char from, to;
    } * border; /* behind that step */
};
/* With `chain` what was found is added to it (see synthesis_chain.h). */
struct hapt_path_chain;
enum hapt_status hapt_path_search(struct problem *problem, struct hapt_arena *arena, struct hapt_path_chain *chain,
                                  struct chosen *chosen, double *cost_s, struct hapt_synthesis_report *report);
/* Ways that searches under several prices of memory found, to be put together anew. */
enum hapt_status hapt_path_chain_create(struct problem *problem, struct hapt_arena *arena,
                                        struct hapt_path_chain **chain);
/* The cheapest of all of them within limit [classes], and the bytes that it was counted to take. HAPT_ERR_INFEASIBLE:
 * none. */
enum hapt_status hapt_path_chain_search(const struct hapt_path_chain *chain, const double *limit,
                                        struct hapt_arena *arena, struct chosen *chosen, double *bytes);
enum hapt_status hapt_program_emit(const struct problem *problem, const struct chosen *chosen, struct hapt_arena *arena,
                                   struct hapt_axis_program *program);

#endif
