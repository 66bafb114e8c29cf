/* Agreement: ranks: 1 2 3 4 */
#include "test.h"

static void agreement_takes_the_lowest_failing_rank(void)
{
    const int rank = test_env.world_rank, size = test_env.world_size;
    CHECK(hapt_env_agree(test_env.world, HAPT_OK) == HAPT_OK);
    for (int bad = 0; bad < size; bad++) {
        enum hapt_status status = HAPT_OK;
        if (rank >= bad) status = hapt_fail(rank == bad ? HAPT_ERR_INPUT : HAPT_ERR_MEMORY, NULL, "wanted by the test");
        CHECK(hapt_env_agree(test_env.world, status) == HAPT_ERR_INPUT);
        hapt_fail_reset();
    }
    CHECK(test_env.node_count == 1 && test_env.node_size == size && test_env.node_index == 0);
    CHECK(test_env.cores >= 1);
}

static void agreement_waits_for_the_last_rank(void)
{
    hapt_env_set_agree_timeout(30);
    const double start_s = hapt_time_s(), cpu_s = hapt_time_thread_cpu_s();
    if (test_env.world_rank == 0) hapt_time_sleep_until(start_s + 0.5);
    CHECK(hapt_env_agree(test_env.world, HAPT_OK) == HAPT_OK);
    CHECK(hapt_time_s() - start_s > 0.4);
    /* A waiting rank must leave the core to the late rank. */
    CHECK(hapt_time_thread_cpu_s() - cpu_s < 0.2);
    hapt_env_set_agree_timeout(0);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    RUN(agreement_takes_the_lowest_failing_rank);
    RUN(agreement_waits_for_the_last_rank);
    return test_finish();
}
