/* ranks: 1 2 4; HAPT_LONG: 3
 * Measured costs of collectives: all ranks have the same model, and it reproduces the measurements about as well as a
 * linear fit can. */
#include "test.h"

#include "hapt/collective_cost.h"
#include "hapt/link.h"

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void measured(bool shared_memory)
{
    static struct hapt_collective_sample sample[HAPT_COLLECTIVE_COUNT][HAPT_COLLECTIVE_SAMPLES];
    struct hapt_collective *collective;
    struct hapt_collective_model model, first;
    int count[HAPT_COLLECTIVE_COUNT], errors = 0;
    double error[HAPT_COLLECTIVE_COUNT * HAPT_COLLECTIVE_SAMPLES];
    CHECK_OK(hapt_collective_create(test_env.world, "test", 120, shared_memory, &collective));
    CHECK_OK(hapt_collective_measure(collective, 1, &model, sample, count));
    CHECK(model.ranks == test_env.world_size && model.measured);
    first = model;
    MPI_Bcast(&first, (int)sizeof first, MPI_BYTE, 0, test_env.world);
    CHECK(memcmp(&first, &model, sizeof model) == 0);
    for (int k = HAPT_COLLECTIVE_ALL_REDUCE; k <= HAPT_COLLECTIVE_ALL_TO_ALL; k++) {
        const enum hapt_collective_kind kind = (enum hapt_collective_kind)k;
        if (test_env.world_size == 1) {
            CHECK(hapt_collective_cost_s(&model, kind, 1e6, 0) == 0);
            continue;
        }
        CHECK_MESSAGE(count[k] >= 3 && count[k] <= HAPT_COLLECTIVE_SAMPLES, "kind %d: %d samples", k, count[k]);
        CHECK(model.term[k].latency_s >= 0 && model.term[k].skew_s >= 0 && isfinite(model.term[k].skew_s));
        CHECK(hapt_collective_cost_s(&model, kind, 1e9, 0) > hapt_collective_cost_s(&model, kind, 1e3, 0));
        for (int i = 0; i < count[k]; i++)
            error[errors++] =
                fabs(log(hapt_collective_cost_s(&model, kind, sample[k][i].bytes, sample[k][i].largest_share) /
                         sample[k][i].time_s));
    }
    /* Caches bend the curve and other processes disturb it. So only half of the points must lie within a factor of
     * three. */
    if (errors > 0) {
        qsort(error, (size_t)errors, sizeof *error, compare);
        CHECK_MESSAGE(error[errors / 2] < log(3), "median error: a factor of %.2f", exp(error[errors / 2]));
        if (test_env.world_rank == 0)
            fprintf(stderr, "  %d samples, median error %.0f %%\n", errors, 100 * (exp(error[errors / 2]) - 1));
    }
    hapt_collective_destroy(collective);
}

static void over_shared_memory(void)
{
    measured(true);
}

static void over_messages(void)
{
    measured(false);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    RUN(over_shared_memory);
    RUN(over_messages);
    return test_finish();
}
