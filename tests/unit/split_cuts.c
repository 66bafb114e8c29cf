/*
 * Plans with split backward passes: boundaries, against all boundaries of small random profiles on the same submeshes;
 * and the search that decides whether to split, against all plans, split and not.
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
        cluster->split_overhead = random_chance(seed, 0.3) ? 0.1 * hapt_random_unit(seed) : 0;
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
    CHECK_OK(hapt_plan_search_split(MPI_COMM_SELF, profile, &options, &arena, &plan));
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

/* The simulated step of given stages; INFINITY: they do not fit. */
static double forced_step(const struct hapt_profile *profile, const struct hapt_profile *view,
                          const struct hapt_search_options *options, const char *stages, bool split)
{
    struct hapt_plan *plan = NULL;
    enum hapt_status status = hapt_plan_force(split ? view : profile, options, stages, &arena, &plan);
    if (status == HAPT_OK && split) status = hapt_plan_split_backward(profile, plan);
    hapt_fail_reset();
    return status == HAPT_OK ? plan->simulated_s : INFINITY;
}

struct all_plans {
    const struct hapt_profile *profile, *view;
    const struct hapt_search_options *options;
    double least_s[2]; /* unsplit, split */
};

/* Adds stages from layer `first` on, on subclusters that are not in `used`. */
static void try_all(struct all_plans *all, int first, unsigned used, const char *stages)
{
    for (int split = 0; first == LAYERS && split < 2; split++)
        all->least_s[split] =
            fmin(all->least_s[split], forced_step(all->profile, all->view, all->options, stages, split));
    for (int c = 0; first < LAYERS && c < all->profile->cluster_count; c++)
        for (int end = first + 1; end <= LAYERS && !(used >> c & 1u); end++) {
            char longer[128];
            snprintf(longer, sizeof longer, "%s%s%d-%d@s%d:1x1", stages, first ? "," : "", first, end, c);
            try_all(all, end, used | 1u << c, longer);
        }
}

static int chosen, best, splits;
static double most_off, widest;

static void choose_once(uint64_t start)
{
    uint64_t seed = start;
    const int clusters = 1 + random_below(&seed, 3), microbatches = 1 + random_below(&seed, 12);
    struct hapt_profile *profile = make_profile(&seed, clusters, random_chance(&seed, 0.5) ? 130 : 1e6), *view;
    struct hapt_search_options options = options_of(microbatches);
    struct hapt_plan *plan = NULL;
    options.any_schedule = options.any_threshold = true;
    options.use_all_devices = false;
    options.split = HAPT_SPLIT_AUTO;
    CHECK_OK(hapt_profile_split_view(profile, &arena, &view));
    struct all_plans all = {profile, view, &options, {INFINITY, INFINITY}};
    const enum hapt_status status = hapt_plan_search(MPI_COMM_SELF, profile, &options, &arena, &plan);
    hapt_fail_reset();
    try_all(&all, 0, 0, "");
    const double least_s = fmin(all.least_s[0], all.least_s[1]);
    CHECK((status == HAPT_OK) == isfinite(least_s));
    if (status != HAPT_OK) return;
    CHECK_OK(hapt_plan_check(plan));
    CHECK_MESSAGE(plan->bound_s <= least_s * (1 + 1e-9), "seed %llu: bound %g, but a plan takes %g",
                  (unsigned long long)start, plan->bound_s, least_s);
    CHECK(plan->bound_s > 0.4 * least_s && plan->bound_s <= plan->simulated_s);
    CHECK(plan->simulated_s <= all.least_s[0] * (1 + 1e-9)); /* enumerated without a split */
    const double off = plan->simulated_s / least_s - 1;
    chosen++;
    best += off < 1e-9;
    splits += plan->split;
    most_off = fmax(most_off, off);
    widest = fmax(widest, plan->simulated_s / plan->bound_s - 1);
}

static void against_all_plans(void)
{
    const int count = test_long() ? 300 : 40;
    for (int k = 0; k < count; k++) {
        choose_once((uint64_t)k + 1);
        hapt_arena_reset(&arena);
    }
    printf("%d searches: %d find the best of all plans, %d split; at most %.2f %% from it, gaps up to %.0f %%\n",
           chosen, best, splits, 100 * most_off, 100 * widest);
    CHECK(chosen > count / 2 && splits * 4 > chosen && best * 10 >= chosen * 9 && most_off < 0.05);
}

/* Measured times: a split that gains less than 1 % is not made. */
static void small_gains(void)
{
    int kept = 0, split = 0;
    for (uint64_t start = 1; start <= 40; start++) {
        uint64_t seed = start;
        struct hapt_profile *profile = make_profile(&seed, 2, 1e6);
        struct hapt_search_options options = options_of(40);
        struct hapt_plan *plain, *predicted, *measured;
        CHECK_OK(hapt_plan_search(MPI_COMM_SELF, profile, &options, &arena, &plain));
        options.split = HAPT_SPLIT_AUTO;
        CHECK_OK(hapt_plan_search(MPI_COMM_SELF, profile, &options, &arena, &predicted));
        profile->origin = HAPT_PROFILE_MEASURED;
        CHECK_OK(hapt_plan_search(MPI_COMM_SELF, profile, &options, &arena, &measured));
        CHECK(predicted->simulated_s <= plain->simulated_s);
        CHECK(measured->split ? measured->simulated_s < 0.99 * plain->simulated_s
                              : measured->simulated_s == plain->simulated_s);
        kept += predicted->split && !measured->split;
        split += measured->split;
        hapt_arena_reset(&arena);
    }
    CHECK_MESSAGE(kept > 0 && split > 0, "%d kept, %d split", kept, split);
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
    CHECK_OK(hapt_plan_search_split(MPI_COMM_SELF, profile, &options, &arena, &plan));
    CHECK(plan == before && !plan->split);
    struct hapt_search_options choice = options;
    choice.split = HAPT_SPLIT_AUTO;
    CHECK_OK(hapt_plan_search(MPI_COMM_SELF, profile, &choice, &arena, &plan));
    CHECK(!plan->split && plan->simulated_s == before->simulated_s);
    choice.split = HAPT_SPLIT_YES;
    CHECK_FAILS(hapt_plan_search(MPI_COMM_SELF, profile, &choice, &arena, &plan), HAPT_ERR_INPUT);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    hapt_arena_init(&arena);
    RUN(near_the_best_boundaries);
    RUN(against_all_plans);
    RUN(small_gains);
    RUN(unknown_times);
    hapt_arena_release(&arena);
    return test_finish();
}
