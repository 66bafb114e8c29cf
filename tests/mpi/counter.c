/* ranks: 1 2 3 4
 * Runs beside others: it measures no time.
 * Numbered work: each number of a round is done once, whoever is slow. */
#include "hapt/counter.h"

#include <string.h>
#include <unistd.h>

#include "test.h"

enum { MOST = 200 };

/* Does the numbers of a round; done[k] counts number k. */
static void do_round(struct hapt_counter *counter, int count, uint64_t *seed, int *done)
{
    const int slow = (int)(hapt_random_next(seed) % (uint64_t)counter->size);
    memset(done, 0, MOST * sizeof *done);
    hapt_counter_begin(counter);
    for (int k = 0; k < count; k++) {
        const unsigned wait_us = (unsigned)(hapt_random_next(seed) % 20);
        if (!hapt_counter_is_mine(counter, k)) continue;
        if (counter->rank == slow) usleep(wait_us);
        done[k]++;
    }
    MPI_Allreduce(MPI_IN_PLACE, done, count, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
}

static void each_once(bool cyclic)
{
    uint64_t seed = 5;
    struct hapt_counter counter;
    int done[MOST];
    CHECK_OK(hapt_counter_create(MPI_COMM_WORLD, &counter));
    struct hapt_shared *const shared = counter.shared;
    CHECK(counter.size == 1 || shared != NULL);
    if (cyclic) counter.shared = NULL; /* as on several hosts */
    for (int round = 0; round < 100; round++) {
        const int count = round % 7 == 0 ? 0 : (int)(hapt_random_next(&seed) % MOST);
        do_round(&counter, count, &seed, done);
        for (int k = 0; k < count; k++)
            CHECK_MESSAGE(done[k] == 1, "round %d: number %d of %d was done %d times", round, k, count, done[k]);
    }
    counter.shared = shared;
    hapt_counter_release(&counter);
}

static void taken_or_dealt(void)
{
    each_once(false);
    each_once(true);
}

/* While one rank is busy with one piece, the other one does all others. */
static void others_go_on(void)
{
    enum { COUNT = 40 };
    struct hapt_counter counter;
    int own = 0, its = 0;
    CHECK_OK(hapt_counter_create(MPI_COMM_WORLD, &counter));
    hapt_counter_begin(&counter);
    bool busy = false;
    for (int k = 0; k < COUNT && counter.size == 2 && counter.shared; k++) {
        if (!hapt_counter_is_mine(&counter, k)) continue;
        own++;
        busy = busy || k == 0;
        if (k == 0) MPI_Recv(&its, 1, MPI_INT, 1 - counter.rank, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }
    if (counter.size == 2 && !busy) MPI_Send(&own, 1, MPI_INT, 1 - counter.rank, 0, MPI_COMM_WORLD);
    if (busy) CHECK_MESSAGE(own == 1 && its == COUNT - 1, "%d pieces, the free rank did %d", own, its);
    MPI_Barrier(MPI_COMM_WORLD);
    hapt_counter_release(&counter);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    RUN(taken_or_dealt);
    RUN(others_go_on);
    return test_finish();
}
