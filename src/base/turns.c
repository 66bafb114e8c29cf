/* A counter of taken numbers for each round, in memory that all ranks map. */
#include <stdatomic.h>

#include "hapt/turns.h"

/* Counters in use; a round clears the one that is half of them ahead, which no rank reads any more or yet. */
enum { ROUNDS = 16 };

static _Atomic int64_t *counter_of(const struct hapt_turns *turns, int round)
{
    return (_Atomic int64_t *)hapt_shared_memory(turns->shared) + round % ROUNDS;
}

enum hapt_status hapt_turns_create(MPI_Comm comm, struct hapt_turns *turns)
{
    *turns = (struct hapt_turns){.round = -1, .ticket = -1};
    HAPT_MPI(MPI_Comm_rank(comm, &turns->rank));
    HAPT_MPI(MPI_Comm_size(comm, &turns->size));
    return turns->size > 1 ? hapt_shared_open(comm, ROUNDS * sizeof(int64_t), &turns->shared) : HAPT_OK;
}

void hapt_turns_release(struct hapt_turns *turns)
{
    hapt_shared_release(turns->shared);
    turns->shared = NULL;
}

void hapt_turns_begin(struct hapt_turns *turns)
{
    turns->round++;
    turns->ticket = -1;
    if (turns->shared && turns->rank == 0) atomic_store(counter_of(turns, turns->round + ROUNDS / 2), 0);
}

bool hapt_turns_mine(struct hapt_turns *turns, int64_t number)
{
    if (!turns->shared) return number % turns->size == turns->rank;
    if (turns->ticket < 0) turns->ticket = atomic_fetch_add(counter_of(turns, turns->round), 1);
    if (turns->ticket != number) return false;
    turns->ticket = -1;
    return true;
}
