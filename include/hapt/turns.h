/*
 * Shares out numbered pieces of work among the ranks of a communicator. On one host a rank takes the next number as
 * soon as it is free, so unequal pieces leave no rank idle. On several hosts the numbers are dealt cyclically. Results
 * must not depend on the rank that does a piece.
 */
#ifndef HAPT_TURNS_H
#define HAPT_TURNS_H

#include "hapt/env.h"

struct hapt_turns {
    int rank, size;
    struct hapt_shared *shared; /* NULL: dealt cyclically */
    int round;
    int64_t ticket; /* the number that this rank does next; -1: it takes one when asked */
};

/* Collective over comm, which must live longer. Begin a round before the first number. */
enum hapt_status hapt_turns_create(MPI_Comm comm, struct hapt_turns *turns);
void hapt_turns_release(struct hapt_turns *turns);
/* Numbers start at 0 again. All ranks call it equally often, with a collective operation behind the last number of the
 * round before. Rank-local. */
void hapt_turns_begin(struct hapt_turns *turns);
/* True if this rank does piece `number`. Every rank asks for all numbers of a round in ascending order, and does a
 * piece before it asks for the next number. */
bool hapt_turns_mine(struct hapt_turns *turns, int64_t number);

#endif
