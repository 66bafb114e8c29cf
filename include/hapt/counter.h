/*
 * Shares out numbered pieces of work among the ranks of a communicator by a shared counter (dynamic scheduling). On one
 * host a rank takes the next number as soon as it is free, so unequal pieces leave no rank idle. On several hosts the
 * numbers are dealt in a fixed order. Results must not depend on the rank that does a piece.
 */
#ifndef HAPT_COUNTER_H
#define HAPT_COUNTER_H

#include "hapt/env.h"

struct hapt_counter {
    int rank, size;
    struct hapt_shared *shared; /* NULL: numbers are dealt in a fixed order */
    int round;
    int64_t taken; /* the number that this rank does next; -1: it takes one when asked */
};

/* Collective over comm, which must live longer. Begin a round before the first number. */
enum hapt_status hapt_counter_create(MPI_Comm comm, struct hapt_counter *counter);
void hapt_counter_release(struct hapt_counter *counter);
/* Numbers start at 0 again. All ranks call it equally often, with a collective operation behind the last number of the
 * round before. Rank-local. */
void hapt_counter_begin(struct hapt_counter *counter);
/* True if this rank does piece `number`. Every rank asks for all numbers of a round in ascending order, and does a
 * piece before it asks for the next number. */
bool hapt_counter_is_mine(struct hapt_counter *counter, int64_t number);

#endif
