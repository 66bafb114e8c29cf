/* The least that is left of a segment behind a place. Private to synthesis*.c. */
#ifndef HAPT_SPMD_SYNTHESIS_BOUND_H
#define HAPT_SPMD_SYNTHESIS_BOUND_H

#include "synthesis_private.h"

/*
 * A step behind that reads what lives at a place, or writes the gradients that the suffix waits for there. A forward
 * operator and its backward ones are one unit. An activation meets the unit that reads it next: the forward step and,
 * `again`, the backward ones, which count what the forward step does not.
 */
enum { REMEMBERED = 32 };
struct remembered {
    bool known[REMEMBERED];
    double all_s[REMEMBERED], own_s[REMEMBERED];
    uint32_t *word; /* [REMEMBERED][count] */
};
struct meeting {
    struct remembered *remembered; /* by the words of its objects; places share it */
    int step;                      /* the segment's end: the writer comes behind it */
    int count;
    bool follows; /* is of the unit of the one before */
    struct meeting_object {
        unsigned char slot, operand;
        bool again;
        double removed_s;
    } * object; /* operands as of a move */
};

/* A parameter whose layout is decided there, with steps behind: what those take more than their least, by layout and
 * class. */
struct pending {
    int slot;
    const double *more_s; /* [MOST_LAYOUTS][classes] */
};

struct bound_at { /* a place */
    int slot_count;
    const int *slot;   /* local objects that live there */
    int meeting_count; /* every object is in those of one unit at most */
    struct meeting *meeting;
    int pending_count;
    struct pending *pending;
    /* [classes] of the steps behind: least computation of the forward and of the backward ones, and of both with the
     * communication that none of their cuts avoids. */
    double *forward_s, *backward_s, *left_s;
};

/* Bounds of all places of a segment; slot and slot_count are filled in. */
enum hapt_status hapt_bounds_prepare(const struct problem *problem, const struct segment *segment,
                                     struct hapt_arena *arena, struct bound_at *bound);
/* The least communication between what lives at a place and the steps that it meets next: operands that go together
 * meet one cut. */
double hapt_bound_meetings(const struct problem *problem, const struct segment *segment, const struct bound_at *bound,
                           const uint32_t *word);
/* The least computation and communication behind a place, on a class: left_s with what decided parameters make of it,
 * and with what is kept of activations where memory has a price. */
double hapt_bound_left(const struct problem *problem, const struct segment *segment, const struct bound_at *bound,
                       const uint32_t *word, int class);

#endif
