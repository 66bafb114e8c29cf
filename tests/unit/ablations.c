/*
 * Ablations of the planner have the properties that they claim, and each row of a comparison equals a run of its own.
 */
#include "two_subclusters.h"

/* ---- ablations ---- */

/* Coarse boundaries are a subset of finer ones. So finer planning never has a worse objective. */
static void finer_is_never_worse(void)
{
    static const int granularity[] = {1, 2, 4, 8, 16, 48, 0};
    const int count = test_long() ? 60 : 6;
    for (int i = 0; i < count; i++) {
        struct hapt_arena arena;
        uint64_t seed = (uint64_t)i + 1;
        double before_s = INFINITY;
        bool *coarser = NULL, *cut;
        hapt_arena_init(&arena);
        struct hapt_profile *profile = random_profile_of(&seed, 2, 60 + random_below(&seed, 20), &arena);
        for (int c = 0; c < 2; c++) profile->cluster[c].device_memory_bytes = 1e6;
        struct hapt_strategy_options options = {
            .search = {.microbatches = 16, .hide_threshold = 0.02, .may_fail = true}};
        options.search.schedule = HAPT_SCHEDULE_H1F1B;
        for (int k = 0; k < 7; k++) {
            struct hapt_plan *plan;
            options.granularity = granularity[k];
            if (granularity[k]) {
                int cuts = 0;
                CHECK_OK(hapt_plan_grid(profile, granularity[k], NULL, &arena, &cut));
                for (int l = 0; l < profile->layer_count; l++) {
                    cuts += cut[l];
                    CHECK_MESSAGE(!coarser || !coarser[l] || cut[l],
                                  "seed %d: grid %d lacks a boundary of a coarser one", i + 1, granularity[k]);
                }
                CHECK(cuts < granularity[k] && !cut[profile->layer_count - 1]);
                coarser = cut;
            }
            const enum hapt_status status =
                hapt_plan_by_strategy(MPI_COMM_SELF, profile, HAPT_STRATEGY_HAPT, &options, &arena, &plan, NULL);
            if (status != HAPT_OK) {
                CHECK_MESSAGE(isinf(before_s), "seed %d: no plan at granularity %d", i + 1, granularity[k]);
                hapt_fail_reset();
                continue;
            }
            CHECK_MESSAGE(plan->latency_s <= before_s * (1 + 1e-12), "seed %d: granularity %d is worse: %.17g, %.17g",
                          i + 1, granularity[k], plan->latency_s, before_s);
            before_s = plan->latency_s;
        }
        CHECK_MESSAGE(isfinite(before_s), "seed %d: no plan at all", i + 1);
        hapt_arena_release(&arena);
    }
}

/* Equal layers are divided evenly. Each boundary moves to the narrowest boundary near it. Blocks are never divided. */
static void grid_is_even_and_narrow(void)
{
    struct hapt_arena arena;
    bool *cut, block_end[96] = {false};
    hapt_arena_init(&arena);
    struct hapt_profile *profile;
    CHECK_OK(hapt_profile_create(96, 1, &arena, &profile));
    CHECK_OK(random_profile_cluster(profile, 0, "one", 1, 1, 1, 1, &arena));
    for (int i = 0; i < 96; i++)
        for (int j = i; j < 96; j++)
            profile->cluster[0].stage_time[hapt_profile_index(profile, 0, i, j)] = 7 + (j - i + 1);
    for (int l = 0; l < 95; l++) profile->boundary_bytes[l] = 1;
    CHECK_OK(hapt_plan_grid(profile, 8, NULL, &arena, &cut));
    for (int l = 0; l < 96; l++) CHECK(cut[l] == ((l + 1) % 12 == 0 && l < 95));
    profile->boundary_bytes[11] = 3,
    profile->boundary_bytes[10] = 2; /* half a layer of 48 in both directions: layers 10 to 12 */
    CHECK_OK(hapt_plan_grid(profile, 8, NULL, &arena, &cut));
    CHECK(!cut[10] && !cut[11] && cut[12] && cut[23]);
    block_end[4] = block_end[50] = true;
    CHECK_OK(hapt_plan_grid(profile, 3, block_end, &arena, &cut));
    for (int l = 0; l < 96; l++) CHECK(cut[l] == block_end[l]);
    CHECK_OK(hapt_plan_grid(profile, 500, NULL, &arena, &cut));
    for (int l = 0; l < 96; l++) CHECK(cut[l] == (l < 95));
    hapt_arena_release(&arena);
}

/* Planned with free links, priced with the true ones. */
static void ignoring_communication_costs(void)
{
    const int count = test_long() ? 1000 : 50;
    long worse = 0;
    for (int i = 0; i < count; i++) {
        struct hapt_arena arena;
        uint64_t seed = (uint64_t)i + 1;
        hapt_arena_init(&arena);
        struct hapt_profile *profile = two_subclusters(&seed, 6, (double[2]){1, 2}, 100, &arena), *ideal;
        struct hapt_strategy_options options = {
            .search = {.microbatches = 32, .schedule = HAPT_SCHEDULE_H1F1B, .hide_threshold = 0.02}};
        struct hapt_plan *ours, *ignorant, *believed;
        for (int l = 0; l < 5; l++) profile->boundary_bytes[l] *= 6;
        CHECK_OK(hapt_plan_by_strategy(MPI_COMM_SELF, profile, HAPT_STRATEGY_HAPT, &options, &arena, &ours, NULL));
        options.ignore_communication = true;
        CHECK_OK(hapt_plan_by_strategy(MPI_COMM_SELF, profile, HAPT_STRATEGY_HAPT, &options, &arena, &ignorant, NULL));
        CHECK_OK(hapt_profile_copy(profile, &arena, &ideal));
        for (int l = 0; l < 5; l++) ideal->boundary_bytes[l] = 0;
        for (int link = 0; link < 4; link++) ideal->link_latency[link] = 0;
        CHECK_OK(hapt_plan_search(MPI_COMM_SELF, ideal, &options.search, &arena, &believed));
        char text[2][TEXT];
        describe(ignorant, text[0]);
        describe(believed, text[1]);
        CHECK_MESSAGE(strcmp(text[0], text[1]) == 0, "seed %d: %s, not %s", i + 1, text[0], text[1]);
        CHECK(priced_s(profile, &options.search, text[0], false, &arena) == ignorant->simulated_s);
        CHECK(ours->latency_s <= ignorant->latency_s * (1 + 1e-12));
        worse += ignorant->latency_s > ours->latency_s * 1.05;
        hapt_arena_release(&arena);
    }
    CHECK(worse > count / 4);
}

/* ---- the table ---- */

static void rows_equal_single_runs(void)
{
    const int count = test_long() ? 500 : 25;
    long plans = 0, reasons = 0;
    for (int i = 0; i < count; i++) {
        struct hapt_arena arena;
        uint64_t seed = (uint64_t)i + 1;
        struct hapt_compare_row *rows;
        int row_count;
        hapt_arena_init(&arena);
        struct hapt_profile *profile =
            i % 2 ? random_profile(&seed, &arena) : two_subclusters(&seed, 8, (double[2]){1, 2}, 4 + i, &arena);
        struct hapt_strategy_options options = {.search = random_options(&seed)};
        options.search.use_all_devices = false;
        CHECK_OK(hapt_plan_compare(MPI_COMM_SELF, profile, &options, &arena, &rows, &row_count));
        CHECK(row_count == 15 && strcmp(rows[0].name, "hapt") == 0);
        for (int r = 0; r < row_count; r++) {
            struct hapt_strategy_options single = options;
            struct hapt_plan *plan = NULL;
            single.search.schedule = rows[r].schedule;
            single.search.may_fail = true;
            single.granularity = rows[r].granularity;
            single.ignore_communication = rows[r].ignore_communication;
            const enum hapt_status status =
                hapt_plan_by_strategy(MPI_COMM_SELF, profile, rows[r].strategy, &single, &arena, &plan, NULL);
            if (rows[r].strategy != HAPT_STRATEGY_MEGATRON) /* it may choose the interleaved schedule */
                CHECK(hapt_strategy_schedule(rows[r].strategy, rows[r].schedule) == rows[r].schedule);
            CHECK_MESSAGE((status == HAPT_OK) == (rows[r].plan != NULL), "seed %d: row %s", i + 1, rows[r].name);
            CHECK((rows[r].plan == NULL) == (rows[r].reason != NULL));
            if (status != HAPT_OK) {
                CHECK(rows[r].reason && strcmp(rows[r].reason, hapt_fail_message()) == 0);
                hapt_fail_reset();
                reasons++;
                continue;
            }
            plans++;
            CHECK_MESSAGE(plan->simulated_s == rows[r].plan->simulated_s, "seed %d: row %s: %.17g, alone %.17g", i + 1,
                          rows[r].name, rows[r].plan->simulated_s, plan->simulated_s);
            CHECK_OK(hapt_plan_check(plan));
            if (rows[0].plan) CHECK(rows[r].ratio == hapt_compare_step_s(&rows[r]) / rows[0].plan->simulated_s);
            /* A plan that hapt could choose as well never has a better objective. Pfeife's launch counts are its own:
             * with tight memory the formula's do not fit (seeds 86 and 390 of the long round). */
            if (rows[0].plan && rows[r].strategy != HAPT_STRATEGY_EVEN && rows[r].strategy != HAPT_STRATEGY_PFEIFE &&
                rows[r].schedule == HAPT_SCHEDULE_H1F1B)
                CHECK(rows[0].plan->latency_s <= plan->latency_s * (1 + 1e-12));
        }
        hapt_arena_release(&arena);
    }
    printf("%ld rows with a plan, %ld with a reason\n", plans, reasons);
    CHECK(plans > 0 && reasons > 0);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    RUN(finer_is_never_worse);
    RUN(grid_is_even_and_narrow);
    RUN(ignoring_communication_costs);
    RUN(rows_equal_single_runs);
    return test_finish();
}
