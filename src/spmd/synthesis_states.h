/* States of one segment's search, what they are worth and what falls behind another. Private to synthesis*.c. */
#ifndef HAPT_SPMD_SYNTHESIS_STATES_H
#define HAPT_SPMD_SYNTHESIS_STATES_H

#include <math.h>

#include "synthesis_bound.h"
#include "synthesis_moves.h"

enum { NO_STATE = -1, MOST_SLOTS = 512 };

struct state {
    double base;    /* s: closed stages, communications, gradients that are done */
    double bound;   /* with the least that is left */
    double *vector; /* [classes] since the last synchronisation, [classes] until the next, [classes] bytes settled */
    uint32_t *word; /* by slot of its place */
    uint64_t hash, decided,
        shared; /* of all words; of those of parameters and their gradients; of those that cross the segment's end */
    int place, parent, next; /* next in the hash chain */
    bool dead, expanded;
    struct decision decision;
};

struct place { /* between two steps */
    int decided_count, shared_count,
        *decided; /* slots of parameters and their gradients, those that cross the segment's end first */
    int compared_count, *compared; /* the cheapest states there, of A* */
    int bucket_count, used, *bucket;
};

struct search {
    const struct problem *problem;
    const struct segment *segment;
    struct hapt_arena *arena; /* scratch */
    int steps, classes;
    bool vectors;           /* false: one class, stages do not matter */
    bool meets;             /* behind the last step the prefix and the suffix are one stage */
    struct place *place;    /* [steps + 1] */
    struct bound_at *bound; /* [steps + 1] */
    struct state *state;
    int state_count, state_capacity;
    int *heap, heap_count, heap_capacity;
    uint32_t *word;   /* [object] */
    double limit;     /* states above it are no use */
    double spread;    /* what conversions at the segment's end cost at most */
    bool depth_first; /* too many states */
    int width;        /* of the search step by step: states of a place that go on; 0: A* */
    bool trimmed;     /* there were more */
    int parent;       /* being expanded */
    enum hapt_status status;
    struct search_tally *tally;
    struct outcome *outcome;
    int outcome_count, outcome_capacity;
    int *outcome_state;
    struct hapt_arena *result;
};

/* Costs that differ by rounding alone count as equal, so that the order of sums never decides. */
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

/* Places, their slots and bounds. */
enum hapt_status hapt_states_prepare(struct search *search);
/* Whatever b may become, a becomes something no worse. */
bool hapt_state_dominates(const struct search *search, const struct state *a, const struct state *b);
/* Keeps a state that is worth it: `word` and `vector` are copied. *index NO_STATE: it was not. Of equal words the best
 * are kept; with A* the cheapest states of a place are compared with one another, too. */
enum hapt_status hapt_state_keep(struct search *search, struct state *made, int *index);
/* With the least that is left. */
void hapt_state_set_bound(const struct search *search, struct state *state);
/* The words of a state by object. */
void hapt_state_load(struct search *search, const struct state *state);

/* The segment's end: every layout that its crossing objects may have there, from a state of the last place
 * (synthesis_ends.c). */
enum hapt_status hapt_end_reach(struct search *search, int state);
/* The outcomes that are within the limit, with their decisions. */
enum hapt_status hapt_end_hand_over(struct search *search, struct outcome **outcome, int *count);

#endif
