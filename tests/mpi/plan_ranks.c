/* ranks: 1 4; HAPT_LONG: 2 3
 * Runs beside others: it measures no time.
 * The plan depends neither on the number of ranks nor on the rank that reads it. */
#include "random_profile.h"
#include "hapt/search.h"

#include <math.h>
#include <sys/resource.h>
#include <unistd.h>

static bool same_real(double a, double b)
{
    return memcmp(&a, &b, sizeof a) == 0;
}

static bool same_stage(const struct hapt_plan_stage *a, const struct hapt_plan_stage *b)
{
    return a->first_layer == b->first_layer && a->end_layer == b->end_layer && hapt_plan_same_devices(a, b) &&
           a->warmup == b->warmup && same_real(a->compute_s, b->compute_s) && same_real(a->comm_s, b->comm_s) &&
           same_real(a->memory_bytes, b->memory_bytes);
}

static bool same_plan(const struct hapt_plan *a, const struct hapt_plan *b)
{
    bool same = a->stage_count == b->stage_count && same_real(a->latency_s, b->latency_s) &&
                same_real(a->t_max_s, b->t_max_s) && same_real(a->simulated_s, b->simulated_s) &&
                same_real(a->balance_eta, b->balance_eta) && strcmp(a->limit, b->limit) == 0 &&
                a->search.candidates == b->search.candidates && a->search.evaluated == b->search.evaluated &&
                same_real(a->search.gap, b->search.gap);
    for (int i = 0; same && i < a->stage_count; i++) same = same_stage(&a->stage[i], &b->stage[i]);
    return same;
}

static void compare(const struct hapt_profile *profile, const struct hapt_search_options *options, uint64_t seed,
                    struct hapt_arena *arena)
{
    struct hapt_plan *together = NULL, *alone = NULL;
    const enum hapt_status all = hapt_plan_search(test_env.world, profile, options, arena, &together);
    hapt_fail_reset();
    const enum hapt_status one = hapt_plan_search(MPI_COMM_SELF, profile, options, arena, &alone);
    hapt_fail_reset();
    CHECK_MESSAGE(all == one, "seed %llu: %s together, %s alone", (unsigned long long)seed, hapt_status_name(all),
                  hapt_status_name(one));
    if (together && alone)
        CHECK_MESSAGE(same_plan(together, alone), "seed %llu: another plan together", (unsigned long long)seed);
}

/* The search for the simulated step: by enumeration, and by the beam, whose moves the ranks share. */
static void compare_steps(const struct hapt_profile *profile, struct hapt_search_options options, uint64_t seed,
                          struct hapt_arena *arena)
{
    options.objective = HAPT_OBJECTIVE_STEP;
    options.any_schedule = options.any_threshold = seed % 3 > 0;
    options.gap = 0;
    for (int k = 0; k < 2; k++) {
        options.no_enumeration = k > 0;
        compare(profile, &options, seed, arena);
    }
}

/* Split plans of compare_batchings. */
static int several;

/* The profile for microbatches of half as many rows, `times` halved. A third of the work of a microbatch can wait. */
static struct hapt_profile *halve(const struct hapt_profile *profile, int times, struct hapt_arena *arena)
{
    struct hapt_profile *made = NULL;
    const double time = pow(0.55, times), bytes = pow(0.5, times);
    CHECK_OK(hapt_profile_copy(profile, arena, &made));
    for (int c = 0; c < made->cluster_count; c++) {
        struct hapt_profile_cluster *cluster = &made->cluster[c];
        const size_t cells = hapt_profile_index(made, cluster->submesh_count, 0, 0);
        CHECK_OK(hapt_profile_add_split(made, c, arena));
        for (size_t k = 0; k < cells; k++) {
            cluster->stage_time[k] *= time;
            cluster->stage_forward_time[k] *= time;
            cluster->activation_bytes[k] *= bytes;
            cluster->weight_time[k] = cluster->stage_time[k] / 3;
            cluster->split_parameter_bytes[k] = cluster->parameter_bytes[k];
            cluster->weight_slot_bytes[k] = cluster->activation_bytes[k] / 2;
        }
    }
    return made;
}

/* Several numbers of microbatches, fewer and more than two for each rank: the ranks choose the same one. */
static void compare_batchings(const struct hapt_profile *profile, struct hapt_search_options options, uint64_t seed,
                              struct hapt_arena *arena)
{
    enum { MOST = 9 };
    const int count = seed % 4 < 2 ? MOST : 2;
    struct hapt_plan *together = NULL, *alone = NULL;
    struct hapt_search_batching batching[MOST];
    int chosen[2] = {-1, -1};
    for (int k = 0; k < count; k++)
        batching[k] = (struct hapt_search_batching){.microbatches = (options.microbatches << k % 3) + k / 3,
                                                    .profile = halve(profile, k % 3, arena)};
    options.objective = HAPT_OBJECTIVE_STEP;
    options.any_schedule = options.any_threshold = true;
    options.no_enumeration = seed % 2;
    options.split = seed % 3 ? HAPT_SPLIT_AUTO : HAPT_SPLIT_NO;
    options.may_fail = true;
    const enum hapt_status all =
        hapt_plan_search_batchings(test_env.world, batching, count, &options, arena, &together, &chosen[0]);
    hapt_fail_reset();
    const enum hapt_status one =
        hapt_plan_search_batchings(MPI_COMM_SELF, batching, count, &options, arena, &alone, &chosen[1]);
    hapt_fail_reset();
    CHECK_MESSAGE(all == one && chosen[0] == chosen[1], "seed %llu: batching %d together, %d alone",
                  (unsigned long long)seed, chosen[0], chosen[1]);
    if (!together || !alone) return;
    CHECK_MESSAGE(same_plan(together, alone) && same_real(together->bound_s, alone->bound_s),
                  "seed %llu: another plan together", (unsigned long long)seed);
    several += count == MOST && together->split;
}

static void small_profiles(void)
{
    const int count = test_long() ? 2000 : 75;
    for (uint64_t start = 1; start <= (uint64_t)count; start++) {
        uint64_t seed = start;
        struct hapt_arena arena;
        hapt_arena_init(&arena);
        const struct hapt_profile *profile = random_profile(&seed, &arena);
        struct hapt_search_options options = random_options(&seed);
        compare(profile, &options, start, &arena);
        options.gap = start % 2 ? 0.02 : 0.2;
        compare(profile, &options, start, &arena);
        compare_steps(profile, options, start, &arena);
        compare_batchings(profile, options, start, &arena);
        hapt_arena_release(&arena);
    }
    CHECK_MESSAGE(several > count / 40, "%d split plans", several);
}

static void mixed_profiles(void)
{
    const int count = test_long() ? 2000 : 75;
    for (uint64_t start = 1; start <= (uint64_t)count; start++) {
        uint64_t seed = start;
        struct hapt_arena arena;
        hapt_arena_init(&arena);
        const struct hapt_profile *profile = random_mixed_profile(&seed, &arena);
        struct hapt_search_options options = random_options(&seed);
        compare(profile, &options, start, &arena);
        options.gap = start % 2 ? 0 : 0.1;
        options.use_all_devices = !options.use_all_devices;
        compare(profile, &options, start, &arena);
        compare_steps(profile, options, start, &arena);
        hapt_arena_release(&arena);
    }
}

/* Every cost is unique, so that there are many values of t_max to share. */
static struct hapt_profile *unique_profile(uint64_t seed, int L, struct hapt_arena *arena)
{
    struct hapt_profile *profile;
    CHECK_OK(hapt_profile_create(L, 2, arena, &profile));
    for (int c = 0; c < 2; c++) {
        CHECK_OK(random_profile_cluster(profile, c, c ? "slow" : "fast", 2, 4, 2.5 * L, 2 - c, arena));
        struct hapt_profile_cluster *cluster = &profile->cluster[c];
        for (int s = 0; s < cluster->submesh_count; s++) {
            for (int i = 0; i < L; i++) {
                for (int j = i; j < L; j++) {
                    const size_t cell = hapt_profile_index(profile, s, i, j);
                    const double share = (double)(j - i + 1) / (cluster->submesh[s].n * cluster->submesh[s].m);
                    cluster->stage_time[cell] = share * (1 + c) * (1 + 0.2 * hapt_random_unit(&seed));
                    cluster->stage_forward_time[cell] = cluster->stage_time[cell] / 3;
                    cluster->parameter_bytes[cell] = 10 * share;
                    cluster->activation_bytes[cell] = share;
                }
            }
        }
    }
    for (int layer = 0; layer < L - 1; layer++) profile->boundary_bytes[layer] = 0.2 + hapt_random_unit(&seed);
    for (int k = 0; k < 4; k++) profile->link_bandwidth[k] = k == 0 || k == 3 ? 20 : 1;
    return profile;
}

static void larger_profile(void)
{
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const uint64_t seed = 7;
    const struct hapt_profile *profile = unique_profile(seed, 24, &arena);
    struct hapt_search_options options = {.microbatches = 32, .schedule = HAPT_SCHEDULE_H1F1B, .hide_threshold = 0.02};
    compare(profile, &options, seed, &arena);
    options.gap = 0.01;
    compare(profile, &options, seed, &arena);
    hapt_arena_release(&arena);
}

static size_t address_space_bytes(void)
{
    long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%ld", &pages) != 1) pages = 0;
    if (file) fclose(file);
    return (size_t)pages * (size_t)sysconf(_SC_PAGESIZE);
}

/* One rank runs out of memory: all ranks fail, and none hangs. */
static void run_short_of_memory(enum hapt_objective objective)
{
    const struct hapt_search_options options = {.objective = objective,
                                                .any_threshold = true,
                                                .microbatches = 32,
                                                .schedule = HAPT_SCHEDULE_H1F1B,
                                                .hide_threshold = 0.02,
                                                .work = 1e5};
    for (int extra = 0; extra < 6; extra++) { /* each round fails at another reservation */
        struct hapt_arena arena;
        struct hapt_plan *plan = NULL;
        struct rlimit before, limit;
        hapt_arena_init(&arena);
        const struct hapt_profile *profile = unique_profile(11, 100, &arena);
        const bool poor = test_env.world_rank == test_env.world_size - 1;
        MPI_Barrier(test_env.world);
        CHECK(getrlimit(RLIMIT_AS, &before) == 0);
        limit = before;
        limit.rlim_cur = address_space_bytes() + ((size_t)256 << (2 * extra)) * 1024;
        if (poor) CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
        const enum hapt_status status = hapt_plan_search(test_env.world, profile, &options, &arena, &plan);
        if (poor) CHECK(setrlimit(RLIMIT_AS, &before) == 0);
        hapt_fail_reset();
        CHECK_MESSAGE(extra == 0 ? status == HAPT_ERR_MEMORY : status == HAPT_OK || status == HAPT_ERR_MEMORY,
                      "%zu KiB: %s", (size_t)256 << (2 * extra), hapt_status_name(status));
        int least = (int)status, most = (int)status;
        MPI_Allreduce(MPI_IN_PLACE, &least, 1, MPI_INT, MPI_MIN, test_env.world);
        MPI_Allreduce(MPI_IN_PLACE, &most, 1, MPI_INT, MPI_MAX, test_env.world);
        CHECK(least == most);
        if (extra == 5) CHECK(status == HAPT_OK);
        hapt_arena_release(&arena);
    }
}

static void short_of_memory(void)
{
    run_short_of_memory(HAPT_OBJECTIVE_FORMULA);
    run_short_of_memory(HAPT_OBJECTIVE_STEP);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    RUN(short_of_memory);
    RUN(small_profiles);
    RUN(mixed_profiles);
    RUN(larger_profile);
    return test_finish();
}
