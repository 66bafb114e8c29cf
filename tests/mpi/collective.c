/* ranks: 1 2 3 4
 * All-reduce and all-gather against sums in order of rank, by shared memory and by messages: equal bits everywhere. */
#include "test.h"

#include "hapt/link.h"

/* What rank `rank` holds at `i`: values whose float sum depends on the order. */
static float value(int round, int rank, size_t i)
{
    uint64_t state = hapt_hash((uint64_t)round * 131 + (uint64_t)rank, &i, sizeof i);
    return (float)((hapt_random_unit(&state) - 0.5) * pow(10, (double)(rank * 3 % 7)));
}

static void reduce_and_gather(bool shared_memory)
{
    struct hapt_collective *collective = NULL;
    CHECK_OK(hapt_collective_create(test_env.world, "test", 60, shared_memory, &collective));
    const size_t sizes[] = {1, 2, 3, 7, 1000, 262144, 262145, 700001};
    for (int round = 0; round < 16; round++) {
        const size_t n = sizes[round % 8];
        float *data = malloc((n + 1) * sizeof *data);
        for (size_t i = 0; i < n; i++) data[i] = value(round, test_env.world_rank, i);
        data[n] = -7;
        CHECK_OK(hapt_collective_all_reduce(collective, "sum", data, n));
        long wrong = 0;
        for (size_t i = 0; i < n; i++) {
            float sum = value(round, 0, i);
            for (int r = 1; r < test_env.world_size; r++) sum += value(round, r, i);
            wrong += memcmp(&sum, &data[i], sizeof sum) != 0;
        }
        CHECK_MESSAGE(wrong == 0, "round %d: %ld of %zu sums differ", round, wrong, n);
        CHECK(data[n] == -7);
        for (size_t i = 0; i < n; i++) data[i] = -1;
        const size_t first = hapt_collective_slice(n, test_env.world_size, test_env.world_rank);
        const size_t end = hapt_collective_slice(n, test_env.world_size, test_env.world_rank + 1);
        for (size_t i = first; i < end; i++) data[i] = value(round, 9, i);
        CHECK_OK(hapt_collective_all_gather(collective, "gather", data, n));
        for (size_t i = 0; i < n; i++) wrong += data[i] != value(round, 9, i);
        CHECK_MESSAGE(wrong == 0, "round %d: %ld of %zu gathered values differ", round, wrong, n);
        free(data);
    }
    hapt_collective_destroy(collective);
}

static void shared_memory(void)
{
    reduce_and_gather(true);
}

static void messages(void)
{
    reduce_and_gather(false);
}

static void slices(void)
{
    for (size_t n = 0; n < 50; n++)
        for (int p = 1; p < 9; p++) {
            CHECK(hapt_collective_slice(n, p, 0) == 0 && hapt_collective_slice(n, p, p) == n);
            for (int r = 0; r < p; r++) {
                const size_t size = hapt_collective_slice(n, p, r + 1) - hapt_collective_slice(n, p, r);
                CHECK(size == n / (size_t)p || size == n / (size_t)p + 1);
            }
        }
}

static void gather_all(void)
{
    int all[64];
    const int mine = 100 + test_env.world_rank;
    CHECK_OK(hapt_link_all_gather(test_env.world, "agreement", 60, &mine, sizeof mine, all));
    for (int r = 0; r < test_env.world_size; r++) CHECK(all[r] == 100 + r);
}

/* A peer that never comes: the wait ends, and says who waited for what. */
static void absent_peer(void)
{
    for (int shared = 0; shared < 2 && test_env.world_size > 1; shared++) {
        struct hapt_collective *collective = NULL;
        CHECK_OK(hapt_collective_create(test_env.world, "stage 7", 0.2, shared, &collective));
        float data[4] = {0};
        if (test_env.world_rank == 0) {
            const enum hapt_status status = hapt_collective_all_reduce(collective, "gradients of step 3", data, 4);
            CHECK(status == HAPT_ERR_COMM);
            CHECK(strstr(hapt_fail_message(), "stage 7") && strstr(hapt_fail_message(), "gradients of step 3"));
            hapt_fail_reset();
        }
        /* Left alone on purpose: an operation is still pending in it. */
    }
    MPI_Barrier(test_env.world);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    RUN(slices);
    RUN(shared_memory);
    RUN(messages);
    RUN(gather_all);
    if (test_env.world_size == 2) RUN(absent_peer);
    return test_finish();
}
