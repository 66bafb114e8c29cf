/* States of one segment's search, their bounds and dominance. Private to synthesis*.c. */
#ifndef HAPT_SYNTHESIS_SYNTHESIS_STATES_H
#define HAPT_SYNTHESIS_SYNTHESIS_STATES_H

#include <math.h>

#include "synthesis_bound.h"
#include "synthesis_transitions.h"

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
    int *outcome_state;
    struct hapt_arena *result;
};

/* Costs that differ only by rounding count as equal, so that the order of summation never decides. */
#define ROUNDING 1e-12
static inline bool at_most(double a, double b)
{
    return a <= b + ROUNDING * (fabs(a) + fabs(b));
}

static inline double slowest(const double *seconds, int count)
{
    double most = 0;
    for (int j = 0; j < count; j++) most = fmax(most, seconds[j]);
    return most;
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
 * position (synthesis_ends.c). */
enum hapt_status hapt_end_reach(struct search *search, int state);
/* Returns the outcomes within the limit, with their decisions. */
enum hapt_status hapt_end_hand_over(struct search *search, struct outcome **outcome, int *count);

#endif
