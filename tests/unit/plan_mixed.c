/* Plans with mixed stages: forced, priced, placed on ranks, saved and loaded, compared; and the search on a hand-made
 * case. */
#include "random_profile.h"

#include <unistd.h>

#include "hapt/search.h"
#include "hapt/diff.h"

static const char *path_of(const char *name)
{
    static char path[80];
    snprintf(path, sizeof path, "/tmp/hapt-mixed-%d-%s", (int)getpid(), name);
    return path;
}

/* Two subclusters, near 1 x 3 and far 1 x 3, with 110 bytes of memory; five layers. A layer takes 4 s on one device of
 * near and 8 s of far; the middle layer takes 80 s. Mixed stages: 2 + 1 devices take 2 s per layer but only run inner
 * layers; 1 + 1 devices take 3 s for any layer. */
static struct hapt_profile *three_and_three(struct hapt_arena *arena)
{
    static const char *const name[2] = {"near", "far"};
    static const int cluster[2] = {0, 1}, devices[2][2] = {{2, 1}, {1, 1}};
    static const struct hapt_submesh one[1] = {{1, 1, 1, 0, 0, 0}};
    struct hapt_profile *profile;
    CHECK_OK(hapt_profile_create(5, 2, arena, &profile));
    for (int c = 0; c < 2; c++) {
        CHECK_OK(hapt_profile_add_cluster(profile, c, name[c], 1, 3, 110, 1 + c, one, 1, arena));
        for (int i = 0; i < 5; i++) {
            const size_t cell = hapt_profile_index(profile, 0, i, i);
            profile->cluster[c].stage_time[cell] = i == 2 ? 80 : 4 * (c + 1);
            profile->cluster[c].stage_forward_time[cell] = 1;
            profile->cluster[c].parameter_bytes[cell] = 10;
            profile->cluster[c].activation_bytes[cell] = 1;
        }
    }
    for (int k = 0; k < 2; k++) {
        struct hapt_profile_mixed *mixed;
        CHECK_OK(hapt_profile_add_mixed(profile, 2, cluster, devices[k], arena, &mixed));
        for (int i = 1 - k; i < 4 + k; i++) {
            for (int j = i; j < 4 + k; j++) {
                for (int row = 0; row < 2; row++) {
                    const size_t at = hapt_profile_index(profile, row, i, j);
                    mixed->parameter_bytes[at] = (j - i + 1) * (row ? 20 : 10);
                    mixed->activation_bytes[at] = row ? 1 : 4;
                }
                mixed->stage_time[hapt_profile_index(profile, 0, i, j)] = (j - i + 1) * (2.0 + k);
                mixed->stage_forward_time[hapt_profile_index(profile, 0, i, j)] = 1;
            }
        }
    }
    profile->mixed[0].ratio = hapt_arena_alloc(arena, 3, sizeof(double));
    for (int d = 0; d < 3; d++) profile->mixed[0].ratio[d] = d < 2 ? 0.4 : 0.2;
    for (int layer = 0; layer < 4; layer++) profile->boundary_bytes[layer] = 10;
    for (int k = 0; k < 4; k++) profile->link_bandwidth[k] = k == 0 || k == 3 ? 100 : 20;
    return profile;
}

static const struct hapt_search_options options = {
    .microbatches = 10, .schedule = HAPT_SCHEDULE_H1F1B, .hide_threshold = 0.02};

static void prices(void)
{
    struct hapt_arena arena;
    struct hapt_plan *plan;
    hapt_arena_init(&arena);
    const struct hapt_profile *profile = three_and_three(&arena);
    CHECK_OK(hapt_plan_force(profile, &options, "0-1@near:1x1,1-4@near:2+far:1,4-5@far:1x1", &arena, &plan));
    const struct hapt_plan_stage *stage = plan->stage;
    CHECK(hapt_plan_is_mixed(&stage[1]) && !hapt_plan_is_mixed(&stage[0]) && hapt_plan_first_mixed(plan) == 1);
    CHECK(stage[1].submesh->nodes == 1 && stage[1].submesh->devices_per_node == 3 &&
          strcmp(stage[1].submesh->name, "near+far") == 0);
    CHECK(hapt_plan_stage_devices(&stage[1], 0) == 2 && hapt_plan_stage_devices(&stage[1], 1) == 1);
    CHECK(hapt_plan_stage_devices(&stage[0], 0) == 1 && hapt_plan_stage_devices(&stage[0], 1) == 0);
    CHECK_NEAR(stage[1].compute_s, 6, 1e-12);
    /* a device of each boundary is reached over the link between the subclusters: 10 / 20 s */
    CHECK_NEAR(stage[0].comm_s, 0.5, 1e-12);
    CHECK_NEAR(stage[1].comm_s, 0.5, 1e-12);
    CHECK_NEAR(plan->t_max_s, 8, 1e-12);
    CHECK_NEAR(plan->latency_s, (4 + 6 + 8) + 4 * 0.5 + 9 * 8, 1e-12);
    CHECK(stage[1].warmup == 3);
    /* near needs 30 + 3 * 4 bytes and far 60 + 3 bytes, of 110 each */
    CHECK_NEAR(stage[1].memory_bytes, 63, 1e-12);
    CHECK_NEAR(stage[1].parameter_bytes, 60, 1e-12);
    /* near is the limit if it has less memory */
    profile->cluster[0].device_memory_bytes = 50;
    CHECK_OK(hapt_plan_force(profile, &options, "0-1@near:1x1,1-4@near:2+far:1,4-5@far:1x1", &arena, &plan));
    CHECK_NEAR(plan->stage[1].memory_bytes, 42, 1e-12);
    CHECK_NEAR(plan->stage[1].device_memory_bytes, 50, 1e-12);
    CHECK_OK(hapt_plan_change(plan, HAPT_SCHEDULE_1F1B, 10, 0.02)); /* two launches: 38 of 50 bytes, 62 of 110 bytes */
    CHECK_NEAR(plan->stage[1].memory_bytes, 38, 1e-12);
    profile->cluster[0].device_memory_bytes = 33; /* too little for one launch */
    CHECK_FAILS(hapt_plan_force(profile, &options, "0-1@near:1x1,1-4@near:2+far:1,4-5@far:1x1", &arena, &plan),
                HAPT_ERR_INFEASIBLE);
    hapt_arena_release(&arena);
}

static void forced_stages(void)
{
    struct hapt_arena arena;
    struct hapt_plan *plan, *again;
    char text[HAPT_PLAN_STAGE_CHARS];
    hapt_arena_init(&arena);
    struct hapt_profile *profile = three_and_three(&arena);
    static const char *const good[] = {"0-5@near:1+far:1", "0-5@far:1+near:1",
                                       "0-3@near:1+far:1,3-4@far:1x1,4-5@far:1x1",
                                       "0-1@far:1x1,1-4@far:1+near:2,4-5@near:1x1", "0-1@near:1x1,1-5@near:1+far:1"};
    for (size_t k = 0; k < sizeof good / sizeof *good; k++)
        CHECK_OK(hapt_plan_force(profile, &options, good[k], &arena, &plan));
    static const char *const bad[] = {
        "0-5@near:1+far:2", /* no such mixed stage */
        "0-5@near:1",
        "0-5@near:1+far",
        "0-5@near:1+far:1+far:1",
        "0-5@near:0+far:1",
        "0-5@near:1+quick:1",
        "0-5@near:1+far:1,",
        "0-5@near:1+far:1x1",
        "0-5@near:1 + far:1",
        "0-5@+near:1",
        "0-5@near:1+",
        "0-5@near:2+far:1",                                       /* no candidate */
        "0-1@near:1x1,1-4@near:1+far:1,4-5@near:1x1",             /* near before and behind the mixed stage */
        "0-2@near:1+far:1,2-4@near:2+far:1,4-5@far:1x1",          /* both subclusters are shared */
        "0-1@near:1x1,1-2@far:1x1,2-4@near:1+far:1,4-5@far:1x1",  /* far before and behind the mixed stage */
        "0-1@near:1x1,1-2@near:1x1,2-4@near:2+far:1,4-5@far:1x1", /* four devices of near */
    };
    for (size_t k = 0; k < sizeof bad / sizeof *bad; k++)
        CHECK_FAILS(hapt_plan_force(profile, &options, bad[k], &arena, &plan), HAPT_ERR_INPUT);
    /* names may have any characters */
    strcpy(profile->cluster[0].name, "near:1+far");
    strcpy(profile->cluster[1].name, "a+b:2");
    CHECK_OK(hapt_plan_force(profile, &options, "0-5@near:1+far:1+a+b:2:1", &arena, &plan));
    CHECK_OK(hapt_plan_force(profile, &options, hapt_plan_stage_text(plan->stage, text), &arena, &again));
    CHECK(hapt_plan_same_devices(plan->stage, again->stage) && plan->latency_s == again->latency_s);
    hapt_arena_release(&arena);
}

/* The search on this case. A mixed stage must hold the middle layer. A mixed stage that joins both sides leaves one
 * stage at each end. */
static void searched(void)
{
    struct hapt_arena arena;
    struct hapt_plan *plan;
    hapt_arena_init(&arena);
    struct hapt_profile *profile = three_and_three(&arena);
    struct hapt_search_options many = options;
    many.microbatches = 100;
    CHECK_OK(hapt_plan_search(MPI_COMM_SELF, profile, &many, &arena, &plan));
    CHECK(hapt_plan_first_mixed(plan) >= 0);
    CHECK_OK(hapt_plan_check(plan));
    /* near, mixed 2 + 1, far: t_max is one layer of far. In the other order t_max is near's two devices. All orders are
     * tried. */
    double best_s = INFINITY;
    static const char *const all[] = {"0-1@near:1x1,1-4@near:2+far:1,4-5@far:1x1",
                                      "0-1@far:1x1,1-4@near:2+far:1,4-5@near:1x1",
                                      "0-5@near:1+far:1",
                                      "0-1@near:1x1,1-5@near:1+far:1",
                                      "0-1@near:1x1,1-2@near:1x1,2-5@near:1+far:1",
                                      "0-4@near:1+far:1,4-5@near:1x1",
                                      "0-3@near:1+far:1,3-4@near:1x1,4-5@near:1x1",
                                      "0-3@near:1+far:1,3-4@far:1x1,4-5@far:1x1",
                                      "0-1@near:1x1,1-4@near:1+far:1,4-5@far:1x1",
                                      "0-1@far:1x1,1-4@near:1+far:1,4-5@near:1x1",
                                      "0-1@near:1x1,1-2@near:1x1,2-4@near:1+far:1,4-5@far:1x1",
                                      "0-1@near:1x1,1-2@near:1x1,2-3@near:1+far:1,3-4@far:1x1,4-5@far:1x1",
                                      "0-1@far:1x1,1-3@near:1+far:1,3-4@near:1x1,4-5@near:1x1",
                                      "0-1@far:1x1,1-2@far:1x1,2-3@near:1+far:1,3-4@near:1x1,4-5@near:1x1"};
    for (size_t k = 0; k < sizeof all / sizeof *all; k++) {
        struct hapt_plan *forced;
        CHECK_OK(hapt_plan_force(profile, &many, all[k], &arena, &forced));
        best_s = fmin(best_s, forced->latency_s);
    }
    CHECK_NEAR(plan->latency_s, best_s, 1e-9);
    /* without mixed stages the middle layer is slow */
    profile->cluster[1].devices_per_node = 2;
    profile->mixed[1].devices[1] = 3; /* more devices than there are: the mixed stage cannot run */
    profile->mixed[0].devices[1] = 3;
    CHECK_OK(hapt_plan_search(MPI_COMM_SELF, profile, &many, &arena, &plan));
    CHECK(hapt_plan_first_mixed(plan) < 0 && plan->t_max_s == 80);
    hapt_arena_release(&arena);
}

static bool same_mix(const struct hapt_plan_stage *a, const struct hapt_plan_stage *b)
{
    if (!hapt_plan_same_devices(a, b) || strcmp(a->submesh->name, b->submesh->name) != 0) return false;
    for (int k = 0; hapt_plan_is_mixed(a) && k < a->submesh->part_count; k++)
        if (strcmp(a->submesh->part_name[k], b->submesh->part_name[k]) != 0 ||
            a->part_parameter_bytes[k] != b->part_parameter_bytes[k] ||
            a->part_activation_bytes[k] != b->part_activation_bytes[k] ||
            a->submesh->device_memory_bytes[k] != b->submesh->device_memory_bytes[k])
            return false;
    if (hapt_plan_is_mixed(a) && !a->layout.ratio != !b->layout.ratio) return false;
    for (int d = 0; hapt_plan_is_mixed(a) && a->layout.ratio && d < a->submesh->devices_per_node; d++)
        if (a->layout.ratio[d] != b->layout.ratio[d]) return false;
    return true;
}

static void files(void)
{
    long mixed_plans = 0;
    for (uint64_t start = 1; start <= 150; start++) {
        uint64_t seed = start;
        struct hapt_arena arena;
        struct hapt_plan *plan, *loaded;
        struct hapt_diff *diff;
        hapt_arena_init(&arena);
        const struct hapt_profile *profile = random_mixed_profile(&seed, &arena);
        const struct hapt_search_options some = random_options(&seed);
        if (hapt_plan_search(MPI_COMM_SELF, profile, &some, &arena, &plan) == HAPT_OK) {
            CHECK_OK(hapt_plan_save(path_of("plan.h5"), plan));
            CHECK_OK(hapt_plan_load(path_of("plan.h5"), &arena, &loaded));
            if (CHECK(loaded->stage_count == plan->stage_count))
                for (int i = 0; i < plan->stage_count; i++) CHECK(same_mix(&plan->stage[i], &loaded->stage[i]));
            CHECK_OK(hapt_plan_diff(plan, loaded, &arena, &diff));
            CHECK(diff->equal && diff->relocation_count == 0);
            struct hapt_arena scratch;
            hapt_arena_init(&scratch);
            CHECK_OK(hapt_plan_price(profile, loaded)); /* a plan that was read can be priced again */
            CHECK_NEAR(loaded->latency_s, plan->latency_s, 1e-11 * plan->latency_s);
            CHECK_NEAR(loaded->t_max_s, plan->t_max_s,
                       1e-11 * plan->t_max_s); /* one of several values of t_max with equal objective */
            hapt_arena_release(&scratch);
            mixed_plans += hapt_plan_first_mixed(plan) >= 0;
        }
        hapt_fail_reset();
        hapt_arena_release(&arena);
    }
    CHECK_MESSAGE(mixed_plans > 20, "%ld plans with mixed stages", mixed_plans);
    unlink(path_of("plan.h5"));
}

static void bad_plans_fail(void)
{
    struct hapt_arena arena;
    struct hapt_plan *plan;
    hapt_arena_init(&arena);
    const struct hapt_profile *profile = three_and_three(&arena);
    CHECK_OK(hapt_plan_force(profile, &options, "0-1@near:1x1,1-4@near:2+far:1,4-5@far:1x1", &arena, &plan));
    CHECK_OK(hapt_plan_check(plan));
    struct hapt_plan_stage *stage = &plan->stage[1];
    int *const counts[] = {&stage->submesh->part_count,       &stage->submesh->subcluster[0],
                           &stage->submesh->subcluster[1],    &stage->submesh->devices[0],
                           &stage->submesh->devices_per_node, &stage->submesh->nodes,
                           &stage->layout.tensor_parallel};
    for (size_t k = 0; k < sizeof counts / sizeof *counts; k++) {
        const int kept = *counts[k];
        static const int wrong[] = {-1, 7, 1000};
        for (int w = 0; w < 3; w++) {
            *counts[k] = wrong[w];
            if (wrong[w] != 7 ||
                counts[k] != &stage->submesh->subcluster[1]) /* any larger index may be another cluster's */
                CHECK_FAILS(hapt_plan_check(plan), HAPT_ERR_INPUT);
        }
        *counts[k] = kept;
    }
    double *const values[] = {(double *)&stage->layout.ratio[0], &stage->part_parameter_bytes[0],
                              &stage->part_activation_bytes[1], &stage->submesh->device_memory_bytes[0]};
    for (size_t k = 0; k < sizeof values / sizeof *values; k++) {
        const double kept = *values[k];
        *values[k] = -1;
        CHECK_FAILS(hapt_plan_check(plan), HAPT_ERR_INPUT);
        *values[k] = NAN;
        CHECK_FAILS(hapt_plan_check(plan), HAPT_ERR_INPUT);
        *values[k] = kept;
    }
    CHECK_OK(hapt_plan_check(plan));
    plan->stage[2].submesh->subcluster[0] = 0; /* near in front of the mixed stage and behind it */
    CHECK_FAILS(hapt_plan_check(plan), HAPT_ERR_INPUT);
    hapt_arena_release(&arena);
}

/* Every device has at most one stage, submeshes stay on their nodes, and mixed stages get their devices of each
 * subcluster. */
static void placing(void)
{
    long mixed_plans = 0;
    for (uint64_t start = 1; start <= 400; start++) {
        uint64_t seed = start;
        struct hapt_arena arena;
        struct hapt_plan *plan;
        hapt_arena_init(&arena);
        const struct hapt_profile *profile = random_mixed_profile(&seed, &arena);
        const struct hapt_search_options some = random_options(&seed);
        struct hapt_subcluster subcluster[3] = {{.nodes = 0}};
        const struct hapt_cluster cluster = {.count = profile->cluster_count, .subcluster = subcluster};
        int ranks[3][8], world = 0, owner[24];
        for (int c = 0; c < cluster.count; c++) {
            const int devices = profile->cluster[c].nodes * profile->cluster[c].devices_per_node;
            subcluster[c] = (struct hapt_subcluster){.nodes = profile->cluster[c].nodes,
                                                     .devices_per_node = profile->cluster[c].devices_per_node,
                                                     .ranks = ranks[c]};
            strcpy(subcluster[c].name, profile->cluster[c].name);
            for (int d = devices - 1; d >= 0; d--) { /* in descending order: ranks are not indices */
                owner[world] = c;
                ranks[c][d] = world++;
            }
        }
        if (hapt_plan_search(MPI_COMM_SELF, profile, &some, &arena, &plan) == HAPT_OK) {
            bool taken[24] = {false};
            int rank[24];
            for (int i = 0; i < plan->stage_count; i++) {
                int count[3] = {0};
                CHECK_OK(hapt_plan_ranks(plan, &cluster, i, rank));
                CHECK(owner[rank[0]] == plan->stage[i].submesh->subcluster[0]);
                for (int d = 0; d < plan->stage[i].submesh->nodes * plan->stage[i].submesh->devices_per_node; d++) {
                    CHECK(!taken[rank[d]]);
                    taken[rank[d]] = true;
                    count[owner[rank[d]]]++;
                }
                for (int c = 0; c < cluster.count; c++) CHECK(count[c] == hapt_plan_stage_devices(&plan->stage[i], c));
            }
            const int mixed = hapt_plan_first_mixed(plan);
            mixed_plans += mixed >= 0;
            if (mixed >= 0) {
                strcpy(subcluster[plan->stage[mixed].submesh->subcluster[1]].name, "other");
                CHECK_FAILS(hapt_plan_ranks(plan, &cluster, 0, rank), HAPT_ERR_INPUT);
            }
        }
        hapt_fail_reset();
        hapt_arena_release(&arena);
    }
    CHECK_MESSAGE(mixed_plans > 50, "%ld plans with mixed stages", mixed_plans);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    RUN(prices);
    RUN(forced_stages);
    RUN(searched);
    RUN(files);
    RUN(bad_plans_fail);
    RUN(placing);
    return test_finish();
}
