/* A counter of taken numbers for each round, in memory that all ranks map. */
#include <stdatomic.h>

#include "hapt/counter.h"

/* Counters in use; a round clears the one that is half of them ahead, which no rank reads any more or yet. */
enum { ROUNDS = 16 };

static _Atomic int64_t *count_of(const struct hapt_counter *counter, int round)
{
    return (_Atomic int64_t *)hapt_shared_memory(counter->shared) + round % ROUNDS;
}

enum hapt_status hapt_counter_create(MPI_Comm comm, struct hapt_counter *counter)
{
    *counter = (struct hapt_counter){.round = -1, .taken = -1};
    HAPT_MPI(MPI_Comm_rank(comm, &counter->rank));
    HAPT_MPI(MPI_Comm_size(comm, &counter->size));
    return counter->size > 1 ? hapt_shared_open(comm, ROUNDS * sizeof(int64_t), &counter->shared) : HAPT_OK;
}

void hapt_counter_release(struct hapt_counter *counter)
{
    hapt_shared_release(counter->shared);
    counter->shared = NULL;
}

void hapt_counter_begin(struct hapt_counter *counter)
{
    counter->round++;
    counter->taken = -1;
    if (counter->shared && counter->rank == 0) atomic_store(count_of(counter, counter->round + ROUNDS / 2), 0);
}

/* The direction alternates, because the largest pieces often come first. */
static bool is_dealt(const struct hapt_counter *counter, int64_t number)
{
    const int64_t owner = number % counter->size;
    return counter->rank == (number / counter->size % 2 ? counter->size - 1 - owner : owner);
}

bool hapt_counter_is_mine(struct hapt_counter *counter, int64_t number)
{
    if (!counter->shared) return is_dealt(counter, number);
    if (counter->taken < 0) counter->taken = atomic_fetch_add(count_of(counter, counter->round), 1);
    if (counter->taken != number) return false;
    counter->taken = -1;
    return true;
}
