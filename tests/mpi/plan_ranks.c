/* ranks: 1 2 3 4
 * The plan does not depend on the number of ranks, nor on which rank looks at it. */
#include "random_profile.h"

static bool same_real(double a, double b)
{
    return memcmp(&a, &b, sizeof a) == 0;
}

static bool same_stage(const struct hapt_plan_stage *a, const struct hapt_plan_stage *b)
{
    return a->first_layer == b->first_layer && a->end_layer == b->end_layer && a->subcluster == b->subcluster &&
           a->nodes == b->nodes && a->devices_per_node == b->devices_per_node && a->warmup == b->warmup && a->tensor_parallel == b->tensor_parallel &&
           same_real(a->compute_s, b->compute_s) && same_real(a->comm_s, b->comm_s) &&
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

static void small_profiles(void)
{
    const int count = test_long() ? 2000 : 150;
    for (uint64_t start = 1; start <= (uint64_t)count; start++) {
        uint64_t seed = start;
        struct hapt_arena arena;
        hapt_arena_init(&arena);
        const struct hapt_profile *profile = random_profile(&seed, &arena);
        struct hapt_search_options options = random_options(&seed);
        compare(profile, &options, start, &arena);
        options.gap = start % 2 ? 0.02 : 0.2;
        compare(profile, &options, start, &arena);
        hapt_arena_release(&arena);
    }
}

/* Every cost unique, so that there are many t_max to share. */
static void larger_profile(void)
{
    uint64_t seed = 7;
    struct hapt_arena arena;
    struct hapt_profile *profile;
    const int L = 24;
    hapt_arena_init(&arena);
    CHECK_OK(hapt_profile_create(L, 2, &arena, &profile));
    for (int c = 0; c < 2; c++) {
        CHECK_OK(hapt_profile_add_cluster(profile, c, c ? "slow" : "fast", 2, 4, 60, 2 - c, &arena));
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
    struct hapt_search_options options = {.microbatches = 32, .schedule = HAPT_SCHEDULE_H1F1B, .hide_threshold = 0.02};
    compare(profile, &options, seed, &arena);
    options.gap = 0.01;
    compare(profile, &options, seed, &arena);
    hapt_arena_release(&arena);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    RUN(small_profiles);
    RUN(larger_profile);
    return test_finish();
}
