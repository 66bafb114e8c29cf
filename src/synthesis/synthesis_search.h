/* The search of one segment: its objects at borders, transitions, bounds and states; and the chain of all segments. */
#ifndef HAPT_SYNTHESIS_SYNTHESIS_SEARCH_H
#define HAPT_SYNTHESIS_SYNTHESIS_SEARCH_H

#include "synthesis_private.h"

/* ---- segments (synthesis_search.c) ---- */

/* A range of steps with its objects, numbered by first appearance. */
struct segment {
    int first, end;          /* steps */
    int local_count, *local; /* objects */
    int start_count, *start; /* local objects that exist before it */
    int end_count, *at_end;  /* local objects that exist after it */
    uint64_t structure;      /* equal for segments whose searches are the same */
};
/* A communication at the segment's end; object: local. */
struct border_conversion {
    int object;
    unsigned char from, to;
};

struct outcome {
    uint32_t *word;            /* [end_count] words of the local objects that cross the end */
    double cost_s;             /* includes memory at its price */
    double *bytes;             /* [classes] bytes charged, if memory counts */
    struct decision *decision; /* [steps] */
    int border_count;
    struct border_conversion *border;
    int state; /* the last one, during the search */
};
struct search_tally {
    long expanded, generated;
    bool capped;
};

struct searched { /* outcomes of segments, by structure and start words */
    int count, capacity;
    struct searched_segment *entry;
};

/* Splits the steps where few tensors cross. */
enum hapt_status hapt_segments_find(const struct problem *problem, struct hapt_arena *arena, struct segment **segments,
                                    int *count);
/* Cheapest paths through the segment from `start` [start_count] words, one for every layout at its end that no
 * other path plus a conversion beats. None costs more than `limit`; may be empty. A segment that `searched` has is not
 * searched again. */
enum hapt_status hapt_segment_search(const struct problem *problem, const struct segment *segment,
                                     const uint32_t *start, double limit, struct hapt_arena *arena,
                                     struct searched *searched, struct search_tally *tally, struct outcome **outcome,
                                     int *outcome_count);

/* ---- words and borders (synthesis_transitions.c) ---- */

enum { MOST_CROSSING_OBJECTS = 64 };

/* A state's word for an object: versions made (low half), versions waited for (high half). For a parameter and its
 * gradient: the layout plus 1; 0: not decided. */
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
static inline bool is_parameter(const struct object *object)
{
    return object->kind == OBJECT_PARAMETER || object->kind == OBJECT_PARAMETER_GRADIENT;
}
/* At a border: the layout in which an activation or a gradient crosses. */
static inline int crossing_layout(const struct object *object, uint32_t word)
{
    return lowest_layout(object->kind == OBJECT_FORWARD ? made_of(word) : awaited_of(word));
}
/* From one such layout to another: an activation is converted after the border, a gradient before it. */
static inline double crossing_seconds(const struct object *object, int from, int to)
{
    return object->kind == OBJECT_FORWARD ? object->layouts->convert_s[from][to] : object->layouts->convert_s[to][from];
}
/* The layout of a set that converts to another one at the least cost, or -1. Partial sums are no source. */
int hapt_cheapest_source(const struct layouts *layouts, layout_set from, int to);

/* Cost of a crossing object's layout (no partial sums), with its communications: of an activation after the prefix, of
 * a gradient before the suffix. */
double hapt_border_cost(const struct object *object, uint32_t word, int layout, struct border_conversion *conversion,
                        int *conversion_count);
/* Largest possible cost of conversions at the segment's end. */
double hapt_border_spread(const struct problem *problem, const struct segment *segment);
/* Paths through the segment that cost more are useless, given these outcomes and conversions (crossing parameters
 * keep the outcomes' layouts). INFINITY without outcomes. */
double hapt_border_limit(const struct problem *problem, const struct segment *segment, const struct outcome *outcome,
                         int count);

/* Cost of `times` copies of a version at the price of memory. */
double hapt_priced_seconds(const struct problem *problem, const struct layouts *layouts, int layout, double times);
/* The versions of an activation that are kept for waiting backward steps: for a slice that is not a version, the
 * replicated one. */
layout_set hapt_kept_versions(uint32_t word);
/* Their least cost, if some awaited versions are not made yet. */
double hapt_kept_seconds(const struct problem *problem, const struct object *object, uint32_t word);

/* ---- transitions (synthesis_transitions.c) ---- */

/* The result of a step on a state, besides the objects' words. */
struct advance {
    const struct problem *problem;
    const struct step *step;
    const struct choice *choice;
    uint32_t *word; /* [object] words after the step */
    struct decision decision;
    double moved_s, after_s; /* communications before and after the operator */
    bool synchronises, synchronises_after;
    int output_layout[HAPT_MAX_OUTPUTS]; /* layouts of outputs after it */
    double later_s;                      /* ends of parameter gradients, and memory at its price */
    double memory[MOST_CLASSES];         /* bytes charged */
    void (*found)(struct advance *advance, void *context);
    void *context;
};
/* Calls found() for every choice and every set of communications; restores `word`. */
void hapt_advance_all(struct advance *advance);

/* ---- bounds (synthesis_bound.c) ---- */

struct bound_at { /* a position */
    int slot_count;
    const int *slot;    /* local objects alive there */
    int next_use_count; /* every object is in next uses of at most one unit */
    struct next_use *next_use;
    int pending_count;
    struct pending *pending;
    /* [classes] of the remaining steps: least computation of the forward and of the backward steps, and of both
     * with the communication that no cut avoids. */
    double *forward_s, *backward_s, *left_s;
};

/* Bounds of all positions of a segment; slot and slot_count are inputs. */
enum hapt_status hapt_bounds_prepare(const struct problem *problem, const struct segment *segment,
                                     struct hapt_arena *arena, struct bound_at *bound);
/* The least communication between live objects at a position and the steps that use them next. Operands of one step
 * share its cut. */
double hapt_bound_conversions(const struct problem *problem, const struct segment *segment,
                              const struct bound_at *bound, const uint32_t *word);
/* The least remaining computation and communication at a position, on a class: left_s, corrected for decided
 * parameters and, if memory has a price, for kept activations. */
double hapt_bound_left(const struct problem *problem, const struct segment *segment, const struct bound_at *bound,
                       const uint32_t *word, int class);

/* ---- states (synthesis_states.c) ---- */

enum { NO_STATE = -1, MOST_SLOTS = 512 };

struct state {
    double base;    /* s: closed stages, communications, ended gradients */
    double bound;   /* base plus the lower bound of the rest */
    double *vector; /* [classes] since the last synchronisation, [classes] until the next, [classes] bytes charged */
    uint32_t *word; /* by slot of its position */
    uint64_t hash, decided,
        shared; /* of all words; of those of parameters and their gradients; of those that cross the segment's end */
    int position, parent, next; /* next in the hash chain */
    bool dead, expanded;
    struct decision decision;
};

struct position { /* a position between two steps */
    int decided_count, shared_count,
        *decided; /* slots of parameters and their gradients; those that cross the segment's end come first */
    int compared_count, *compared; /* A*: the cheapest states of this position */
    int bucket_count, used, *bucket;
};

struct search {
    const struct problem *problem;
    const struct segment *segment;
    struct hapt_arena *arena; /* scratch */
    int steps, classes;
    bool vectors;              /* false: one class, stages do not matter */
    bool stages_join;          /* after the last step, prefix and suffix form one stage */
    struct position *position; /* [steps + 1] */
    struct bound_at *bound;    /* [steps + 1] */
    struct state *state;
    int state_count, state_capacity;
    int *heap, heap_count, heap_capacity;
    uint32_t *word;   /* [object] */
    double limit;     /* states above it are useless */
    double spread;    /* largest possible cost of conversions at the segment's end */
    bool depth_first; /* set if there are too many states */
    int width;        /* of the beam search: states that go on per position; 0: A* */
    bool trimmed;     /* states were dropped */
    int parent;       /* the state being expanded */
    enum hapt_status status;
    struct search_tally *tally;
    struct outcome *outcome;
    int outcome_count, outcome_capacity;
    struct hapt_arena *result;
};

/* Costs that differ only by rounding count as equal, so that the order of summation never decides. */
#define ROUNDING 1e-12
static inline bool at_most(double a, double b)
{
    return a <= b + ROUNDING * (fabs(a) + fabs(b));
}

/* Creates positions, their slots and bounds. */
enum hapt_status hapt_states_prepare(struct search *search);
/* True if a can always reach a state no worse than any that b reaches. */
bool hapt_state_dominates(const struct search *search, const struct state *a, const struct state *b);
/* Stores a state if it is useful, copying `word` and `vector`; *index NO_STATE: not stored. The best states of
 * equal words are kept; A* also compares the cheapest states of a position with each other. */
enum hapt_status hapt_state_keep(struct search *search, struct state *made, int *index);
/* Sets bound: base plus the lower bound of the rest. */
void hapt_state_set_bound(const struct search *search, struct state *state);
/* Expands a state's words into search->word, by object. */
void hapt_state_load(struct search *search, const struct state *state);

/* At the segment's end: makes an outcome for every layout of the crossing objects, from a state of the last
 * position. */
enum hapt_status hapt_end_reach(struct search *search, int state);
/* Returns the outcomes within the limit, with their decisions. */
enum hapt_status hapt_end_hand_over(struct search *search, struct outcome **outcome, int *count);

/* ---- the chain of segments (synthesis_path.c) ---- */

struct chain_arc {       /* a path through one segment */
    int from, to;        /* nodes of the borders before and after it */
    double cost_s;       /* without the price of memory */
    const double *bytes; /* [classes] */
    const void *outcome; /* the caller's */
};
struct chain_layer {
    int node_count, arc_count, arc_capacity;
    struct chain_arc *arc;
};
struct chain {
    struct hapt_arena *arena;
    int classes, segment_count;
    struct chain_layer
        *layer; /* [segment_count + 1] a border and the segment after it; the last one has one node and no arcs */
    int price_count, price_capacity;
    double (*price)[MOST_CLASSES]; /* prices of memory that give good bounds; always includes 0 */
};

enum hapt_status hapt_chain_init(struct chain *chain, int classes, int segment_count, struct hapt_arena *arena);
enum hapt_status hapt_chain_add_price(struct chain *chain, const double *price);
enum hapt_status hapt_chain_add_arc(struct chain *chain, int segment, struct chain_arc arc);
/*
 * The cheapest path from the first border's first node to the last border, within limit [classes]: its arcs
 * [segment_count]. A label (cost, bytes) is dropped if another of its node dominates it, or if its bound by some price
 * (Lagrange) exceeds a known path. A path may cost more than the best by a fraction of up to `tolerance`. *exact: no
 * label was dropped because there were too many. INFINITY: there is no path.
 */
enum hapt_status hapt_chain_search(const struct chain *chain, const double *limit, double tolerance,
                                   const struct chain_arc **path, double *cost_s, bool *exact);

#endif
