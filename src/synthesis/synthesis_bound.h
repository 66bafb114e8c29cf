/* Lower bound of a segment's remaining cost at a position. Private to synthesis*.c. */
#ifndef HAPT_SYNTHESIS_SYNTHESIS_BOUND_H
#define HAPT_SYNTHESIS_SYNTHESIS_BOUND_H

#include "synthesis_private.h"

/*
 * A remaining step that reads objects alive at a position, or writes gradients that the suffix waits for. A forward
 * operator and its backward operators are one unit. An activation's next use is the unit that reads it next: the
 * forward step and, `again`, the backward steps, which count only what the forward step does not.
 */
enum { USE_CACHE_SIZE = 32 };
struct use_cache {
    bool known[USE_CACHE_SIZE];
    double all_s[USE_CACHE_SIZE], own_s[USE_CACHE_SIZE];
    uint32_t *word; /* [USE_CACHE_SIZE][count] */
};
struct next_use {
    struct use_cache *use_cache; /* cache by its objects' words; positions share it */
    int step;                    /* the segment's end: the writer comes later */
    int count;
    bool follows; /* belongs to the same unit as the previous one */
    struct next_use_object {
        unsigned char slot, operand;
        bool again;
        double removed_s;
    } * object; /* operands numbered as in struct conversion */
};

/* A parameter whose layout is decided at this position and has remaining steps: their extra cost over their least,
 * by layout and class. */
struct pending {
    int slot;
    const double *more_s; /* [MOST_LAYOUTS][classes] */
};

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

#endif
