/* Plans on disk, forced, even and placed; profiles on disk, and the checks of both. */
#include <unistd.h>
#include "hapt/search.h"

#include "random_profile.h"

static char folder[64] = "/tmp/hapt-plan-XXXXXX";

static const char *path_of(const char *name)
{
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static bool same_tables(const double *a, const double *b, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (!(a[i] == b[i] || (isnan(a[i]) && isnan(b[i])))) return false;
    return true;
}

/* fast: 2 devices; slow: 2 devices at half the speed; 6 layers of 1 s. */
static struct hapt_profile *two_subclusters(struct hapt_arena *arena)
{
    struct hapt_profile *profile;
    CHECK_OK(hapt_profile_create(6, 2, arena, &profile));
    for (int c = 0; c < 2; c++) {
        CHECK_OK(random_profile_cluster(profile, c, c ? "slow" : "fast", 1, 2, 100, 2 - c, arena));
        struct hapt_profile_cluster *cluster = &profile->cluster[c];
        for (int s = 0; s < 2; s++) {
            for (int i = 0; i < 6; i++) {
                for (int j = i; j < 6; j++) {
                    const size_t cell = hapt_profile_index(profile, s, i, j);
                    cluster->stage_time[cell] = (j - i + 1) * (1.0 + c) / (s + 1);
                    cluster->stage_forward_time[cell] = cluster->stage_time[cell] / 3;
                    cluster->parameter_bytes[cell] = 10 * (j - i + 1);
                    cluster->activation_bytes[cell] = j - i + 1;
                    cluster->step_time[cell] = 0.5;
                }
            }
        }
    }
    for (int layer = 0; layer < 5; layer++) profile->boundary_bytes[layer] = 10;
    for (int k = 0; k < 4; k++) profile->link_bandwidth[k] = k == 0 || k == 3 ? 1000 : 20;
    return profile;
}

static void profiles_round_trip(void)
{
    for (uint64_t start = 1; start <= 60; start++) {
        uint64_t seed = start;
        struct hapt_arena arena;
        struct hapt_profile *loaded;
        hapt_arena_init(&arena);
        const struct hapt_profile *profile = random_profile(&seed, &arena);
        if (hapt_profile_check(profile) != HAPT_OK) { /* no candidate at all */
            hapt_fail_reset();
            hapt_arena_release(&arena);
            continue;
        }
        CHECK_OK(hapt_profile_save(path_of("profile.h5"), profile));
        CHECK_OK(hapt_profile_load(path_of("profile.h5"), &arena, &loaded));
        CHECK(loaded->layer_count == profile->layer_count && loaded->cluster_count == profile->cluster_count);
        CHECK(same_tables(loaded->boundary_bytes, profile->boundary_bytes, (size_t)profile->layer_count));
        for (int c = 0; c < profile->cluster_count; c++) {
            const struct hapt_profile_cluster *a = &profile->cluster[c], *b = &loaded->cluster[c];
            CHECK(strcmp(a->name, b->name) == 0 && a->nodes == b->nodes && a->devices_per_node == b->devices_per_node);
            CHECK(a->submesh_count == b->submesh_count);
            const size_t cells = hapt_profile_index(profile, a->submesh_count, 0, 0);
            CHECK(same_tables(a->stage_time, b->stage_time, cells));
            CHECK(same_tables(a->activation_bytes, b->activation_bytes, cells));
            CHECK((a->step_time == NULL) == (b->step_time == NULL));
            if (a->step_time) CHECK(same_tables(a->step_time, b->step_time, cells));
        }
        hapt_arena_release(&arena);
    }
}

static bool same_ints(const int *a, const int *b, size_t count)
{
    return memcmp(a, b, count * sizeof *a) == 0;
}

static void compare_mixed(const struct hapt_profile *profile, const struct hapt_profile_mixed *a,
                          const struct hapt_profile_mixed *b)
{
    const size_t cells = hapt_profile_index(profile, 1, 0, 0), rows = (size_t)a->memory_rows;
    size_t devices = 0;
    if (!CHECK(a->count == b->count && a->memory_rows == b->memory_rows)) return;
    CHECK(same_ints(a->cluster, b->cluster, (size_t)a->count) && same_ints(a->devices, b->devices, (size_t)a->count));
    for (int i = 0; i < a->count; i++) devices += (size_t)a->devices[i];
    CHECK((a->ratio == NULL) == (b->ratio == NULL) && (!a->ratio || same_tables(a->ratio, b->ratio, devices)));
    CHECK(same_tables(a->stage_time, b->stage_time, cells));
    CHECK(same_tables(a->stage_forward_time, b->stage_forward_time, cells));
    CHECK((a->step_time == NULL) == (b->step_time == NULL) &&
          (!a->step_time || same_tables(a->step_time, b->step_time, cells)));
    CHECK(same_tables(a->parameter_bytes, b->parameter_bytes, rows * cells));
    CHECK(same_tables(a->activation_bytes, b->activation_bytes, rows * cells));
}

/* Files and copies contain mixed stages. */
static void mixed_round_trip(void)
{
    long groups = 0;
    for (uint64_t start = 1; start <= 60; start++) {
        uint64_t seed = start;
        struct hapt_arena arena;
        struct hapt_profile *loaded, *copy;
        hapt_arena_init(&arena);
        const struct hapt_profile *profile = random_mixed_profile(&seed, &arena);
        CHECK_OK(hapt_profile_copy(profile, &arena, &copy));
        CHECK_OK(hapt_profile_save(path_of("profile.h5"), profile));
        CHECK_OK(hapt_profile_load(path_of("profile.h5"), &arena, &loaded));
        if (CHECK(loaded->mixed_count == profile->mixed_count && copy->mixed_count == profile->mixed_count)) {
            for (int k = 0; k < profile->mixed_count; k++) {
                compare_mixed(profile, &profile->mixed[k], &loaded->mixed[k]);
                compare_mixed(profile, &profile->mixed[k], &copy->mixed[k]);
            }
        }
        groups += profile->mixed_count;
        hapt_profile_keep_subclusters(copy, 1);
        for (int k = 0; k < copy->mixed_count; k++) /* each needs a second subcluster */
            for (size_t cell = 0; cell < hapt_profile_index(copy, 1, 0, 0); cell++)
                CHECK(isnan(copy->mixed[k].stage_time[cell]));
        hapt_arena_release(&arena);
    }
    CHECK(groups > 60);
}

/* The link that determines the cost of a boundary: every subcluster communicates with its nearest one on the other
 * side. Subclusters 0 and 1 are near each other; 2 is far from both. */
static void mixed_boundaries(void)
{
    struct hapt_arena arena;
    struct hapt_profile *profile;
    hapt_arena_init(&arena);
    CHECK_OK(hapt_profile_create(2, 3, &arena, &profile));
    static const double bandwidth[9] = {100, 50, 4, 50, 200, 5, 4, 5, 1000};
    for (int i = 0; i < 9; i++) profile->link_bandwidth[i] = bandwidth[i];
    profile->link_latency[1] = profile->link_latency[3] = 1;
    profile->boundary_bytes[0] = 1000;
    static const struct {
        int from_count, from[2], to_count, to[2];
        double seconds;
        int link[2];
    } cases[] = {{1, {0}, 1, {1}, 21, {0, 1}},       {1, {0}, 2, {0, 1}, 21, {0, 1}},
                 {2, {0, 1}, 1, {1}, 21, {0, 1}},    {2, {0, 1}, 1, {2}, 250, {0, 2}},
                 {1, {2}, 2, {0, 1}, 250, {2, 0}},   {2, {0, 1}, 2, {0, 1}, 10, {0, 0}},
                 {2, {0, 1}, 2, {1, 2}, 200, {1, 2}}};
    for (int i = 0; i < 7; i++) {
        int link[2];
        const double seconds =
            hapt_profile_boundary_s(profile, 0, (struct hapt_subclusters){cases[i].from_count, cases[i].from},
                                    (struct hapt_subclusters){cases[i].to_count, cases[i].to}, link);
        CHECK_NEAR(seconds, cases[i].seconds, 1e-12);
        CHECK_MESSAGE(link[0] == cases[i].link[0] && link[1] == cases[i].link[1], "case %d: link %d-%d", i, link[0],
                      link[1]);
        CHECK(hapt_profile_boundary_s(profile, 1, (struct hapt_subclusters){1, cases[i].from},
                                      (struct hapt_subclusters){1, cases[i].to}, NULL) == 0);
    }
    hapt_arena_release(&arena);
}

static void submeshes(void)
{
    struct hapt_arena arena;
    struct hapt_profile *profile;
    hapt_arena_init(&arena);
    CHECK_OK(hapt_profile_create(1, 1, &arena, &profile));
    CHECK_OK(random_profile_cluster(profile, 0, "a", 3, 12, 1, 1, &arena));
    static const int expected[6][2] = {{1, 1}, {1, 2}, {1, 4}, {1, 12}, {2, 12}, {3, 12}};
    CHECK(profile->cluster[0].submesh_count == 6);
    for (int s = 0; s < 6; s++)
        CHECK(profile->cluster[0].submesh[s].n == expected[s][0] && profile->cluster[0].submesh[s].m == expected[s][1]);
    hapt_arena_release(&arena);
}

static void bad_profiles_fail(void)
{
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    struct hapt_profile *profile = two_subclusters(&arena);
    struct hapt_profile_cluster *cluster = &profile->cluster[1];
    const size_t cell = hapt_profile_index(profile, 0, 2, 3);
    CHECK_OK(hapt_profile_check(profile));
    double *const values[] = {
        &cluster->stage_time[cell],  &cluster->parameter_bytes[cell],    &cluster->activation_bytes[cell],
        &cluster->step_time[cell],   &cluster->stage_forward_time[cell], &profile->boundary_bytes[1],
        &profile->link_bandwidth[0], &profile->link_latency[3],          &cluster->device_memory_bytes};
    for (int k = 0; k < 9; k++) {
        const double kept = *values[k];
        *values[k] = -1;
        CHECK_FAILS(hapt_profile_check(profile), HAPT_ERR_INPUT);
        if (k > 0) { /* a NaN time means no candidate */
            *values[k] = NAN;
            CHECK_FAILS(hapt_profile_check(profile), HAPT_ERR_INPUT);
        }
        *values[k] = kept;
    }
    profile->link_bandwidth[1] *= 2;
    CHECK_FAILS(hapt_profile_check(profile), HAPT_ERR_INPUT);
    profile->link_bandwidth[1] /= 2;
    cluster->submesh[0].m = 3;
    CHECK_FAILS(hapt_profile_check(profile), HAPT_ERR_INPUT);
    cluster->submesh[0].m = 1;
    for (int c = 0; c < 2; c++)
        for (size_t i = 0; i < hapt_profile_index(profile, 2, 0, 0); i++) profile->cluster[c].stage_time[i] = NAN;
    CHECK_FAILS(hapt_profile_check(profile), HAPT_ERR_INPUT);
    hapt_arena_release(&arena);
}

static void plans_round_trip(void)
{
    for (uint64_t start = 1; start <= 60; start++) {
        uint64_t seed = start;
        struct hapt_arena arena;
        struct hapt_plan *plan, *loaded;
        hapt_arena_init(&arena);
        const struct hapt_profile *profile = random_profile(&seed, &arena);
        const struct hapt_search_options options = random_options(&seed);
        if (hapt_plan_search(MPI_COMM_SELF, profile, &options, &arena, &plan) == HAPT_OK) {
            CHECK_OK(hapt_plan_save(path_of("plan.h5"), plan));
            CHECK_OK(hapt_plan_load(path_of("plan.h5"), &arena, &loaded));
            CHECK(loaded->stage_count == plan->stage_count && loaded->schedule == plan->schedule);
            CHECK(loaded->submesh_count == plan->submesh_count);
            CHECK(loaded->latency_s == plan->latency_s && loaded->t_max_s == plan->t_max_s);
            CHECK(loaded->search.evaluated == plan->search.evaluated && strcmp(loaded->limit, plan->limit) == 0);
            for (int i = 0; i < plan->stage_count; i++) {
                CHECK(memcmp(&loaded->stage[i].submesh->nodes, &plan->stage[i].submesh->nodes, 2 * sizeof(int)) == 0);
                CHECK(loaded->stage[i].compute_s == plan->stage[i].compute_s);
                CHECK(loaded->stage[i].memory_bytes == plan->stage[i].memory_bytes);
                CHECK(loaded->stage[i].warmup == plan->stage[i].warmup);
                CHECK(strcmp(loaded->stage[i].submesh->name, plan->stage[i].submesh->name) == 0);
            }
            for (int i = 0; i < plan->stage_count; i++)
                CHECK(loaded->stage[i].submesh - loaded->submesh == plan->stage[i].submesh - plan->submesh);
            /* priced again it is what the search said */
            CHECK_OK(hapt_plan_price(profile, loaded));
            CHECK_NEAR(loaded->latency_s, plan->latency_s, 1e-12 * plan->latency_s);
            CHECK(loaded->simulated_s == plan->simulated_s || loaded->t_max_s != plan->t_max_s);
        }
        hapt_fail_reset();
        hapt_arena_release(&arena);
    }
}

/* Two tables in one file, as in a run file. */
static void groups_of_a_run_file(void)
{
    struct hapt_arena arena;
    struct hapt_h5 *file;
    struct hapt_plan *plan, *plan_read;
    struct hapt_profile *profile_read;
    hapt_arena_init(&arena);
    const struct hapt_profile *profile = two_subclusters(&arena);
    const struct hapt_search_options options = {
        .microbatches = 8, .schedule = HAPT_SCHEDULE_EAGER, .hide_threshold = 0.02};
    CHECK_OK(hapt_plan_search(MPI_COMM_SELF, profile, &options, &arena, &plan));
    CHECK_OK(hapt_h5_create(path_of("plan.h5"), "hapt-run", 1, &file));
    CHECK_OK(hapt_profile_write(file, "/profile", profile));
    CHECK_OK(hapt_plan_write(file, "/plan", plan));
    CHECK_OK(hapt_h5_commit(file));
    CHECK_OK(hapt_h5_open(path_of("plan.h5"), "hapt-run", 1, false, &file));
    CHECK_OK(hapt_profile_read(file, "/profile", &arena, &profile_read));
    CHECK_OK(hapt_plan_read(file, "/plan", &arena, &plan_read));
    hapt_h5_close(file);
    CHECK(profile_read->cluster[1].device_memory_bytes == profile->cluster[1].device_memory_bytes);
    CHECK(plan_read->latency_s == plan->latency_s && plan_read->schedule == HAPT_SCHEDULE_EAGER);
    hapt_arena_release(&arena);
}

/* A step of very many microbatches is extrapolated from shorter steps. */
static void long_steps(void)
{
    struct hapt_arena arena;
    struct hapt_plan *plan;
    struct hapt_simulation *simulation;
    hapt_arena_init(&arena);
    const struct hapt_profile *profile = two_subclusters(&arena);
    for (int k = 0; k < 4; k++) {
        struct hapt_search_options options = {
            .microbatches = 300000, .schedule = (enum hapt_schedule_kind)k, .hide_threshold = 0.02};
        if (options.schedule == HAPT_SCHEDULE_GPIPE) profile->cluster[0].device_memory_bytes = 1e9;
        if (options.schedule == HAPT_SCHEDULE_GPIPE) profile->cluster[1].device_memory_bytes = 1e9;
        CHECK_OK(hapt_plan_force(profile, &options, "0-2@fast:1x1,2-4@fast:1x1,4-6@slow:1x2", &arena, &plan));
        CHECK_OK(hapt_plan_simulate(plan, &arena, &simulation));
        CHECK_NEAR(plan->simulated_s, simulation->total_s, 1e-3 * simulation->total_s);
        hapt_arena_reset(&arena);
        profile = two_subclusters(&arena);
    }
    hapt_arena_release(&arena);
}

static void forced_stages(void)
{
    struct hapt_arena arena;
    struct hapt_plan *plan;
    hapt_arena_init(&arena);
    struct hapt_profile *profile = two_subclusters(&arena);
    struct hapt_search_options options = {.microbatches = 10, .schedule = HAPT_SCHEDULE_H1F1B, .hide_threshold = 0.02};
    CHECK_OK(hapt_plan_force(profile, &options, "0-2@fast:1x1,2-4@fast:1x1,4-6@slow:1x2", &arena, &plan));
    CHECK(plan->stage_count == 3);
    /* t = 2 + 0.5 / 10 each; c = 0.01 inside a subcluster, 0.5 over the slow link */
    CHECK_NEAR(plan->t_max_s, 2.05, 1e-12);
    CHECK_NEAR(plan->latency_s, 3 * 2.05 + 2 * 0.51 + 9 * 2.05, 1e-12);
    CHECK(plan->stage[0].warmup == 4 && plan->stage[1].warmup == 3 && plan->stage[2].warmup == 1);
    CHECK_NEAR(plan->stage[0].memory_bytes, 20 + 4 * 2, 1e-12);
    CHECK_NEAR(plan->balance_eta, 1, 1e-12);
    CHECK(strcmp(plan->limit, "compute") == 0);
    CHECK(plan->simulated_s > 10 * 2 && plan->simulated_s < 1.3 * plan->latency_s);
    /* memory for one launch less: t_max rises until c is at most half of it */
    profile->boundary_bytes[3] = 30; /* c = 1.5 > t / 2 */
    profile->cluster[0].device_memory_bytes = 20 + 2 * 3;
    CHECK_FAILS(hapt_plan_force(profile, &options, "0-4@fast:1x2,4-6@slow:1x2", &arena, &plan), HAPT_ERR_INFEASIBLE);
    profile->cluster[0].device_memory_bytes = 40 + 4 * 3;
    CHECK_OK(hapt_plan_force(profile, &options, "0-4@fast:1x2,4-6@slow:1x2", &arena, &plan));
    CHECK_NEAR(plan->t_max_s, 3, 1e-12);
    CHECK(strcmp(plan->limit, "memory") == 0 && plan->stage[0].warmup == 3);
    profile->cluster[0].device_memory_bytes = 40 + 4;
    CHECK_FAILS(hapt_plan_force(profile, &options, "0-4@fast:1x2,4-6@slow:1x2", &arena, &plan), HAPT_ERR_INFEASIBLE);
    static const char *const bad[] = {"",
                                      "0-6",
                                      "0-6@fast",
                                      "0-6@fast:1x2,",
                                      "0-3@fast:1x2",
                                      "0-3@fast:1x2,4-6@slow:1x2",
                                      "0-6@quick:1x2",
                                      "0-6@fast:1x3",
                                      "0-7@fast:1x2",
                                      "0-3@fast:1x2,3-6@fast:1x2",
                                      "0-99999999999999999999@fast:1x2",
                                      "0-0@fast:1x2,0-6@slow:1x2",
                                      "0-6@fast:1x2 "};
    for (size_t k = 0; k < sizeof bad / sizeof bad[0]; k++)
        CHECK_FAILS(hapt_plan_force(profile, &options, bad[k], &arena, &plan), HAPT_ERR_INPUT);
    hapt_arena_release(&arena);
}

/* The cost of the exchange of tied parameters. It begins when the first stage, which ends last, has finished its
 * passes. The last stage's share of it is in step_time and is not counted twice. */
static void tied_parameters(void)
{
    struct hapt_arena arena;
    struct hapt_plan *untied, *tied, *loaded;
    struct hapt_profile *profile, *read;
    const struct hapt_search_options options = {
        .microbatches = 4, .schedule = HAPT_SCHEDULE_H1F1B, .hide_threshold = 0.02};
    static const char *const stages = "0-4@fast:1x2,4-6@slow:1x2";
    hapt_arena_init(&arena);
    profile = two_subclusters(&arena);
    CHECK_OK(hapt_plan_force(profile, &options, stages, &arena, &untied));
    CHECK(untied->exchange_s == 0);
    HAPT_ASSERT((profile->tied_bytes = calloc(6, sizeof *profile->tied_bytes)));
    for (int layer = 1; layer < 6; layer++) profile->tied_bytes[layer] = 30; /* 1.5 s over 20 byte/s */
    CHECK_NEAR(hapt_profile_tied_share_s(profile, 0, 0, 3) + hapt_profile_tied_share_s(profile, 1, 4, 5), 1.5, 1e-12);
    CHECK(hapt_profile_tied_share_s(profile, 1, 2, 4) == 0 && hapt_profile_tied_share_s(profile, 1, 0, 5) == 0);
    profile->cluster[1].step_time[hapt_profile_index(profile, 1, 4, 5)] += 1.5;
    CHECK_OK(hapt_profile_save(path_of("tied.h5"), profile));
    CHECK_OK(hapt_profile_load(path_of("tied.h5"), &arena, &read));
    CHECK(read->tied_bytes && same_tables(read->tied_bytes, profile->tied_bytes, 6));
    CHECK_OK(hapt_plan_force(read, &options, stages, &arena, &tied));
    CHECK_NEAR(tied->exchange_s, 1.5, 1e-12);
    CHECK(tied->stage[0].tied_s == 0);
    CHECK_NEAR(tied->stage[1].tied_s, 1.5, 1e-12);
    CHECK_NEAR(tied->simulated_s, untied->simulated_s + 1.5, 1e-12);
    CHECK_NEAR(tied->latency_s - untied->latency_s, (1 + 3) * 1.5 / 4, 1e-12); /* t_i of the objective is unchanged */
    CHECK_OK(hapt_plan_save(path_of("plan.h5"), tied));
    CHECK_OK(hapt_plan_load(path_of("plan.h5"), &arena, &loaded));
    CHECK(loaded->exchange_s == tied->exchange_s && loaded->stage[1].tied_s == tied->stage[1].tied_s);
    struct hapt_simulation *simulation;
    CHECK_OK(hapt_plan_simulate(loaded, &arena, &simulation));
    CHECK(simulation->total_s == tied->simulated_s);
    loaded->stage[1].tied_s = loaded->stage[1].step_s + 1;
    CHECK_FAILS(hapt_plan_check(loaded), HAPT_ERR_INPUT);
    profile->tied_bytes[2] = -1;
    CHECK_FAILS(hapt_profile_check(profile), HAPT_ERR_INPUT);
    free(profile->tied_bytes);
    hapt_arena_release(&arena);
}

/* A changed plan equals the plan that would have been priced so from the start, while its t_max stays valid. */
static void changed_plans(void)
{
    static const char stages[] = "0-2@fast:1x1,2-4@fast:1x1,4-6@slow:1x2";
    struct hapt_arena arena;
    struct hapt_plan *plan, *fresh;
    hapt_arena_init(&arena);
    struct hapt_profile *profile = two_subclusters(&arena);
    profile->cluster[0].device_memory_bytes = profile->cluster[1].device_memory_bytes = 1000;
    for (int k = 0; k < 16; k++) {
        struct hapt_search_options options = {
            .microbatches = 10, .schedule = (enum hapt_schedule_kind)(k % 4), .hide_threshold = 0.02};
        CHECK_OK(hapt_plan_force(profile, &options, stages, &arena, &plan));
        options.schedule = (enum hapt_schedule_kind)(k / 4);
        options.microbatches = k % 3 ? 10 : 4;
        options.hide_threshold = k % 5 ? 0.02 : 0.5;
        CHECK_OK(hapt_plan_change(plan, options.schedule, options.microbatches, options.hide_threshold));
        CHECK_OK(hapt_plan_check(plan));
        CHECK_OK(hapt_plan_force(profile, &options, stages, &arena, &fresh));
        CHECK(plan->schedule == fresh->schedule && plan->microbatches == fresh->microbatches);
        CHECK_NEAR(plan->t_max_s, fresh->t_max_s, 1e-12);
        CHECK_NEAR(plan->latency_s, fresh->latency_s, 1e-10);
        CHECK_NEAR(plan->simulated_s, fresh->simulated_s, 1e-10);
        CHECK(strcmp(plan->limit, fresh->limit) == 0);
        for (int i = 0; i < plan->stage_count; i++) {
            CHECK_NEAR(plan->stage[i].compute_s, fresh->stage[i].compute_s, 1e-12);
            CHECK(plan->stage[i].warmup == fresh->stage[i].warmup);
            CHECK_NEAR(plan->stage[i].memory_bytes, fresh->stage[i].memory_bytes, 1e-9);
        }
    }
    hapt_arena_release(&arena);
}

static void even_split(void)
{
    struct hapt_arena arena;
    struct hapt_plan *best, *even;
    hapt_arena_init(&arena);
    struct hapt_profile *profile = two_subclusters(&arena);
    struct hapt_search_options options = {.microbatches = 32, .schedule = HAPT_SCHEDULE_H1F1B, .hide_threshold = 0.02};
    CHECK_OK(hapt_plan_search(MPI_COMM_SELF, profile, &options, &arena, &best));
    options.schedule = HAPT_SCHEDULE_1F1B;
    CHECK_OK(hapt_plan_even(MPI_COMM_SELF, profile, &options, &arena, &even));
    CHECK(even->stage_count == best->stage_count && even->schedule == HAPT_SCHEDULE_1F1B);
    for (int i = 0; i < even->stage_count; i++) {
        CHECK(even->stage[i].submesh->subcluster[0] == best->stage[i].submesh->subcluster[0] &&
              even->stage[i].submesh->nodes == best->stage[i].submesh->nodes);
        CHECK(even->stage[i].submesh->devices_per_node == best->stage[i].submesh->devices_per_node);
        CHECK(even->stage[i].first_layer == i * 6 / even->stage_count);
        CHECK(even->stage[i].warmup == even->stage_count - i);
    }
    CHECK(even->latency_s >= best->latency_s);
    hapt_arena_release(&arena);
}

/* Random sets of submeshes that the search may choose always fit on the nodes. */
static void placing(void)
{
    uint64_t seed = 3;
    for (int round = 0; round < 500; round++) {
        struct hapt_arena arena;
        struct hapt_plan plan = {0};
        hapt_arena_init(&arena);
        CHECK_OK(hapt_plan_allot(&plan, 64, &arena));
        struct hapt_plan_stage *stage = plan.stage;
        plan.stage_count = 0;
        int ranks[64], rank[64];
        for (int d = 0; d < 64; d++) ranks[d] = d;
        struct hapt_subcluster subcluster = {.name = "a", .nodes = 1 + random_below(&seed, 4), .ranks = ranks};
        static const int sizes[] = {1, 2, 4, 6, 8, 12};
        subcluster.devices_per_node = sizes[random_below(&seed, 6)];
        const struct hapt_cluster cluster = {.count = 1, .subcluster = &subcluster};
        const int M = subcluster.devices_per_node;
        int left = subcluster.nodes * M;
        while (left > 0 && plan.stage_count < 64) {
            struct hapt_plan_stage *next = &stage[plan.stage_count];
            next->submesh->nodes = 1;
            next->submesh->devices_per_node = 1 << random_below(&seed, 4);
            if (random_chance(&seed, 0.3))
                next->submesh->nodes = 1 + random_below(&seed, subcluster.nodes), next->submesh->devices_per_node = M;
            if (next->submesh->devices_per_node > M || M % next->submesh->devices_per_node ||
                next->submesh->nodes * next->submesh->devices_per_node > left)
                continue;
            strcpy(next->submesh->name, "a");
            left -= next->submesh->nodes * next->submesh->devices_per_node;
            plan.stage_count++;
        }
        plan.submesh_count = plan.stage_count;
        char taken[64] = {0};
        for (int i = 0; i < plan.stage_count; i++) {
            const int m = stage[i].submesh->devices_per_node, count = stage[i].submesh->nodes * m;
            CHECK_OK(hapt_plan_ranks(&plan, &cluster, i, rank));
            const int first = rank[0];
            CHECK_MESSAGE(first / M == (first + m - 1) / M, "a part of a node crosses nodes");
            if (m == M) CHECK(first % M == 0);
            for (int k = 0; k < count; k++) {
                const int d = rank[k];
                CHECK(d == first + k);
                if (!CHECK_MESSAGE(d >= 0 && d < subcluster.nodes * M && !taken[d], "device %d twice", d)) break;
                taken[d] = 1;
            }
        }
        strcpy(stage[0].submesh->name, "b");
        CHECK_FAILS(hapt_plan_ranks(&plan, &cluster, 0, rank), HAPT_ERR_INPUT);
        hapt_arena_release(&arena);
    }
}

static void obstacles_are_named(void)
{
    struct hapt_arena arena;
    struct hapt_plan *plan;
    hapt_arena_init(&arena);
    struct hapt_search_options options = {.microbatches = 8, .schedule = HAPT_SCHEDULE_H1F1B, .hide_threshold = 0.02};
    struct hapt_profile *profile = two_subclusters(&arena);
    profile->cluster[0].device_memory_bytes = profile->cluster[1].device_memory_bytes = 12;
    CHECK(hapt_plan_search(MPI_COMM_SELF, profile, &options, &arena, &plan) == HAPT_ERR_INFEASIBLE);
    CHECK(strstr(hapt_fail_message(), "memory") != NULL);
    hapt_fail_reset();
    profile = two_subclusters(&arena);
    for (int c = 0; c < 2; c++)
        for (int s = 0; s < 2; s++)
            for (int i = 0; i <= 3; i++)
                for (int j = 3; j < 6; j++) profile->cluster[c].stage_time[hapt_profile_index(profile, s, i, j)] = NAN;
    CHECK(hapt_plan_search(MPI_COMM_SELF, profile, &options, &arena, &plan) == HAPT_ERR_INFEASIBLE);
    CHECK(strstr(hapt_fail_message(), "layer 3") != NULL);
    hapt_fail_reset();
    profile = two_subclusters(&arena);
    for (int c = 0; c < 2; c++)
        for (int s = 0; s < 2; s++)
            for (int i = 0; i < 6; i++)
                for (int j = i + 1; j < 6; j++)
                    profile->cluster[c].stage_time[hapt_profile_index(profile, s, i, j)] = NAN;
    CHECK(hapt_plan_search(MPI_COMM_SELF, profile, &options, &arena, &plan) == HAPT_ERR_INFEASIBLE);
    CHECK(strstr(hapt_fail_message(), "devices") != NULL);
    hapt_fail_reset();
    profile = two_subclusters(&arena);
    for (size_t i = 0; i < hapt_profile_index(profile, 2, 0, 0); i++) profile->cluster[1].stage_time[i] = NAN;
    options.use_all_devices = true;
    CHECK(hapt_plan_search(MPI_COMM_SELF, profile, &options, &arena, &plan) == HAPT_ERR_INFEASIBLE);
    CHECK(strstr(hapt_fail_message(), "every device") != NULL);
    hapt_fail_reset();
    hapt_arena_release(&arena);
}

/* Plan files with flipped or missing bytes are refused or read to the same plan. */
static void damaged_plans_fail(void)
{
    struct hapt_arena arena;
    struct hapt_plan *plan, *loaded;
    hapt_arena_init(&arena);
    const struct hapt_profile *profile = two_subclusters(&arena);
    const struct hapt_search_options options = {
        .microbatches = 8, .schedule = HAPT_SCHEDULE_H1F1B, .hide_threshold = 0.02};
    CHECK_OK(hapt_plan_search(MPI_COMM_SELF, profile, &options, &arena, &plan));
    plan->stage[0].warmup = 9;
    CHECK_FAILS(hapt_plan_check(plan), HAPT_ERR_INPUT);
    CHECK_OK(hapt_plan_save(path_of("bad.h5"), plan));
    CHECK_FAILS(hapt_plan_load(path_of("bad.h5"), &arena, &loaded), HAPT_ERR_INPUT);
    CHECK_FAILS(hapt_plan_load(path_of("absent.h5"), &arena, &loaded), HAPT_ERR_INPUT);
    CHECK_FAILS(hapt_plan_load(path_of("profile.h5"), &arena, &loaded), HAPT_ERR_INPUT);
    plan->stage[0].warmup = 2;
    plan->stage[1].submesh = plan->stage[0].submesh;
    CHECK_OK(hapt_plan_save(path_of("bad.h5"), plan));
    CHECK_OK(hapt_plan_load(path_of("bad.h5"), &arena, &loaded));
    CHECK(loaded->submesh_count == plan->stage_count - 1 && loaded->stage[0].submesh == loaded->stage[1].submesh);
    plan->stage[1].parameter_bytes = plan->stage[0].parameter_bytes = 0.6 * plan->stage[0].device_memory_bytes;
    plan->stage[1].activation_bytes = plan->stage[0].activation_bytes = 0;
    CHECK(hapt_plan_check(plan) == HAPT_ERR_INPUT);
    CHECK_MESSAGE(strstr(hapt_fail_message(), "memory of their submesh") != NULL, "%s", hapt_fail_message());
    hapt_fail_reset();
    CHECK(truncate(path_of("bad.h5"), 3000) == 0);
    CHECK_FAILS(hapt_plan_load(path_of("bad.h5"), &arena, &loaded), HAPT_ERR_INPUT);
    hapt_arena_release(&arena);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    CHECK(mkdtemp(folder) != NULL);
    RUN(submeshes);
    RUN(profiles_round_trip);
    RUN(mixed_round_trip);
    RUN(mixed_boundaries);
    RUN(bad_profiles_fail);
    RUN(plans_round_trip);
    RUN(groups_of_a_run_file);
    RUN(long_steps);
    RUN(forced_stages);
    RUN(tied_parameters);
    RUN(changed_plans);
    RUN(even_split);
    RUN(placing);
    RUN(obstacles_are_named);
    RUN(damaged_plans_fail);
    static const char *const files[] = {"profile.h5", "plan.h5", "bad.h5"};
    for (int k = 0; k < 3; k++) unlink(path_of(files[k]));
    rmdir(folder);
    return test_finish();
}
