/*
 * Boundaries of plans with split backward passes, against all boundaries of small random profiles on the same
 * submeshes.
 */
#include "random_profile.h"

enum { LAYERS = 10, MOST_STAGES = 3 };

static struct hapt_arena arena;

/* One device in each subcluster. Layers of unlike times and bytes; ranges are sums of layers. */
static struct hapt_profile *make_profile(uint64_t *seed, int clusters, double memory_bytes)
{
    double forward_s[LAYERS];
    struct hapt_profile *profile;
    for (int l = 0; l < LAYERS; l++) forward_s[l] = 0.5 + hapt_random_unit(seed);
    CHECK_OK(hapt_profile_create(LAYERS, clusters, &arena, &profile));
    for (int c = 0; c < clusters; c++) {
        const char *name = hapt_arena_printf(&arena, "s%d", c);
        const double slowness = 0.7 + 0.8 * hapt_random_unit(seed);
        CHECK_OK(random_profile_cluster(profile, c, name, 1, 1, memory_bytes, 1, &arena));
        CHECK_OK(hapt_profile_add_split(profile, c, &arena));
        struct hapt_profile_cluster *cluster = &profile->cluster[c];
        for (int i = 0; i < LAYERS; i++)
            for (int j = i; j < LAYERS; j++) {
                const size_t cell = hapt_profile_index(profile, 0, i, j);
                double time_s = 0;
                for (int l = i; l <= j; l++) time_s += slowness * forward_s[l];
                cluster->stage_forward_time[cell] = time_s;
                cluster->stage_time[cell] = 3 * time_s;
                cluster->weight_time[cell] = time_s;
                cluster->parameter_bytes[cell] = cluster->split_parameter_bytes[cell] = 10 * (j - i + 1);
                cluster->activation_bytes[cell] = cluster->weight_slot_bytes[cell] = j - i + 1;
            }
        cluster->step_time = NULL;
    }
    profile->mixed_count = 0;
    for (int l = 0; l < LAYERS - 1; l++) profile->boundary_bytes[l] = 1 + (l % 3 == 0);
    for (int k = 0; k < clusters * clusters; k++) {
        profile->link_bandwidth[k] = 0.2 + 10 * hapt_random_unit(seed);
        profile->link_latency[k] = 0.01;
    }
    for (int k = 0; k < clusters * clusters; k++) /* both directions alike */
        profile->link_bandwidth[k] = profile->link_bandwidth[k % clusters * clusters + k / clusters];
    return profile;
}

static struct hapt_search_options options_of(int microbatches)
{
    return (struct hapt_search_options){.objective = HAPT_OBJECTIVE_STEP,
                                        .microbatches = microbatches,
                                        .schedule = HAPT_SCHEDULE_H1F1B,
                                        .hide_threshold = 0.02,
                                        .use_all_devices = true,
                                        .may_fail = true};
}

/* The simulated step of split stages on subclusters 0, 1, ...; INFINITY: they do not fit. */
static double step_at(const struct hapt_profile *profile, const struct hapt_plan *like, const int *end)
{
    const struct hapt_search_options options = options_of(like->microbatches);
    struct hapt_profile *view;
    struct hapt_plan *plan = NULL;
    char stages[128] = "";
    double step_s = INFINITY;
    for (int i = 0, at = 0; i < like->stage_count; i++)
        at += snprintf(stages + at, sizeof stages - (size_t)at, "%s%d-%d@s%d:1x1", i ? "," : "", i ? end[i - 1] : 0,
                       end[i], like->stage[i].submesh->subcluster[0]);
    CHECK_OK(hapt_profile_split_view(profile, &arena, &view));
    enum hapt_status status = hapt_plan_force(view, &options, stages, &arena, &plan);
    if (status == HAPT_OK) status = hapt_plan_split_backward(profile, plan);
    if (status == HAPT_OK) step_s = plan->simulated_s;
    hapt_fail_reset();
    return step_s;
}

static double least_step(const struct hapt_profile *profile, const struct hapt_plan *like)
{
    const int S = like->stage_count;
    double least_s = INFINITY;
    for (int first = 1; first <= LAYERS - S + 1; first++)
        for (int second = S == 3 ? first + 1 : LAYERS; second < (S == 3 ? LAYERS : LAYERS + 1); second++) {
            const int end[MOST_STAGES] = {first, second, LAYERS};
            least_s = fmin(least_s, step_at(profile, like, end));
        }
    return least_s;
}

static int compared, optimal, better;
static double farthest;

static void compare_once(uint64_t start)
{
    uint64_t seed = start;
    const int clusters = 2 + random_below(&seed, 2), microbatches = 4 + random_below(&seed, 16);
    struct hapt_profile *profile = make_profile(&seed, clusters, random_chance(&seed, 0.3) ? 160 : 1e6);
    const struct hapt_search_options options = options_of(microbatches);
    struct hapt_plan *plan = NULL;
    if (hapt_plan_search(MPI_COMM_SELF, profile, &options, &arena, &plan) != HAPT_OK ||
        hapt_plan_split_backward(profile, plan) != HAPT_OK || plan->stage_count < 2) {
        hapt_fail_reset();
        return;
    }
    struct hapt_plan *const base = plan;
    const double before_s = plan->simulated_s, least_s = least_step(profile, plan);
    CHECK_OK(hapt_plan_search_split(profile, &options, &arena, &plan));
    CHECK(plan->split && plan->simulated_s <= before_s && (plan == base) == (plan->simulated_s == before_s));
    CHECK_OK(hapt_plan_check(plan));
    /* a plan that the search without a split made may have other launch counts than the rule's */
    const double far = plan->simulated_s / least_s - 1;
    CHECK_MESSAGE(far < 0.05, "seed %llu: %g instead of %g", (unsigned long long)start, plan->simulated_s, least_s);
    compared++;
    optimal += far < 1e-9;
    better += plan != base;
    farthest = fmax(farthest, far);
}

static void near_the_best_boundaries(void)
{
    const int count = test_long() ? 600 : 60;
    for (int k = 0; k < count; k++) {
        compare_once((uint64_t)k + 1);
        hapt_arena_reset(&arena);
    }
    printf("%d plans: %d are optimal, %d have other boundaries; at most %.2f %% from the best\n", compared, optimal,
           better, 100 * farthest);
    CHECK(compared > count / 2 && optimal * 20 >= compared * 19 && better * 20 > compared);
}

/* Without the times of weights nothing changes, and nothing fails. */
static void unknown_times(void)
{
    uint64_t seed = 3;
    struct hapt_profile *profile = make_profile(&seed, 2, 1e6);
    const struct hapt_search_options options = options_of(8);
    struct hapt_plan *plan = NULL, *before;
    for (int c = 0; c < 2; c++) profile->cluster[c].weight_time = NULL;
    CHECK_OK(hapt_plan_search(MPI_COMM_SELF, profile, &options, &arena, &plan));
    before = plan;
    CHECK_OK(hapt_plan_search_split(profile, &options, &arena, &plan));
    CHECK(plan == before && !plan->split);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    hapt_arena_init(&arena);
    RUN(near_the_best_boundaries);
    RUN(unknown_times);
    hapt_arena_release(&arena);
    return test_finish();
}
