/*
 * Transfer slots of plans without loops whose tensors go to a stage far behind: the number, against all numbers;
 * memory, files, other schedules.
 */
#include "even_profile.h"

#include <unistd.h>

enum { STAGES = 16, MICROBATCHES = 40 };

static struct hapt_arena arena;

/* The share of layer `reader` in the gradient of layer 0's output waits for layer 1. */
static const struct hapt_crossings *crossings_to(int reader)
{
    struct hapt_crossings *made = hapt_arena_alloc(&arena, 1, sizeof *made);
    made->bytes = hapt_arena_alloc(&arena, 2 * STAGES, sizeof *made->bytes);
    made->start = hapt_arena_alloc(&arena, 2 * STAGES + 1, sizeof *made->start);
    made->layer = hapt_arena_alloc(&arena, 6 * STAGES, sizeof *made->layer);
    made->writes = hapt_arena_alloc(&arena, 6 * STAGES, sizeof *made->writes);
    for (int backward = 0; backward < 2; backward++)
        for (int l = 0; l + 1 < STAGES; l++) {
            int at = made->start[made->count];
            const int use[] = {l, l + 1, reader}, uses = l == 0 ? 3 : 2;
            for (int k = 0; k < uses; k++, at++) {
                made->layer[at] = use[backward ? uses - 1 - k : k];
                made->writes[at] = k == 0 || (backward && k + 1 < uses);
            }
            made->bytes[made->count++] = 1;
            made->start[made->count] = at;
        }
    return made;
}

/* An even profile. Layer 0's output is also read by `reader`. */
static struct hapt_profile *profile_with(int reader, double memory_bytes)
{
    struct hapt_profile *profile = even_profile(STAGES, STAGES, memory_bytes, &arena);
    for (int l = 0; l < reader && l < STAGES - 1; l++) profile->boundary_bytes[l] = 2;
    profile->crossings = crossings_to(reader);
    return profile;
}

static struct hapt_plan *plan_on(const struct hapt_profile *profile, enum hapt_schedule_kind kind)
{
    const struct hapt_search_options options = {.objective = HAPT_OBJECTIVE_STEP,
                                                .microbatches = MICROBATCHES,
                                                .schedule = kind,
                                                .loops = {.prefetch = -1},
                                                .hide_threshold = 0.02};
    char stages[STAGES * 24] = "";
    struct hapt_plan *plan = NULL;
    for (int s = 0, at = 0; s < STAGES; s++)
        at += snprintf(stages + at, sizeof stages - (size_t)at, "%s%d-%d@even:1x1", s ? "," : "", s, s + 1);
    CHECK_OK(hapt_plan_force(profile, &options, stages, &arena, &plan));
    return plan;
}

static double step_with(const struct hapt_plan *plan, int slots)
{
    struct hapt_plan other = *plan;
    struct hapt_simulation *simulation = NULL;
    other.transfer_slots = slots;
    CHECK_OK(hapt_plan_simulate(&other, &arena, &simulation));
    return simulation ? simulation->total_s : NAN;
}

/* The least number with which the step is within a thousandth of that with a slot for each microbatch. */
static void the_least_number_that_is_enough(void)
{
    int widened = 0;
    for (int reader = 2; reader < STAGES; reader++)
        for (int k = 0; k < 4; k++) {
            const enum hapt_schedule_kind kind = (enum hapt_schedule_kind)k;
            struct hapt_profile *profile = profile_with(reader, 1e6);
            struct hapt_plan *plan = plan_on(profile, kind);
            if (!plan) return;
            const double before_s = plan->simulated_s, unlimited_s = step_with(plan, MICROBATCHES);
            int least = HAPT_TRANSFER_SLOTS;
            while (step_with(plan, least) > unlimited_s * 1.001) least++;
            CHECK_OK(hapt_plan_widen_skips(profile, plan));
            CHECK_MESSAGE(hapt_plan_transfer_slots(plan) == least, "%s, skip to stage %d: %d slots, not %d",
                          hapt_schedule_kind_name(kind), reader, hapt_plan_transfer_slots(plan), least);
            CHECK_NEAR(plan->simulated_s, step_with(plan, least), 0);
            CHECK(plan->simulated_s <= before_s && plan->simulated_s <= 1.001 * unlimited_s);
            if (least == HAPT_TRANSFER_SLOTS) continue;
            CHECK(plan->transfer_slots == least && plan->bound_s == 0);
            widened++;
        }
    CHECK_MESSAGE(widened >= 8, "only %d plans needed more slots", widened);
}

/* A stage counts two boundaries in front (received, sent) and one behind. Numbers that do not fit are left out. */
static void memory_counts(void)
{
    const int reader = STAGES - 1;
    struct hapt_profile *profile = profile_with(reader, 1e6);
    struct hapt_plan *plan = plan_on(profile, HAPT_SCHEDULE_1F1B), *wide = plan_on(profile, HAPT_SCHEDULE_1F1B);
    double fullest = 0;
    if (!plan || !wide) return;
    CHECK_OK(hapt_plan_widen_skips(profile, wide));
    const int more = wide->transfer_slots - HAPT_TRANSFER_SLOTS;
    CHECK(more > 1);
    CHECK_NEAR(wide->stage[0].parameter_bytes, 100 + 2 * more, 0);
    CHECK_NEAR(wide->stage[1].parameter_bytes, 100 + 6 * more, 0);
    CHECK_NEAR(wide->stage[STAGES - 1].parameter_bytes, 100 + 4 * more, 0);
    for (int s = 0; s < STAGES; s++) {
        CHECK(wide->stage[s].warmup == plan->stage[s].warmup);
        fullest = fmax(fullest, plan->stage[s].memory_bytes);
    }
    CHECK_NEAR(fullest, 100 + 10 * STAGES, 0); /* stage 0; stage 1 needs 10 less */
    for (int room = 0; room <= 2 * more; room++) {
        struct hapt_profile *tight = profile_with(reader, fullest + room);
        struct hapt_plan *fits = plan_on(tight, HAPT_SCHEDULE_1F1B);
        if (!fits) return;
        CHECK_OK(hapt_plan_widen_skips(tight, fits));
        const int stage_0 = room / 2, stage_1 = (room + 10) / 6, extra = stage_0 < stage_1 ? stage_0 : stage_1;
        CHECK(hapt_plan_transfer_slots(fits) == HAPT_TRANSFER_SLOTS + extra);
        CHECK((fits->transfer_slots > 0) == (extra > 0));
        CHECK_NEAR(fits->simulated_s, step_with(plan, HAPT_TRANSFER_SLOTS + extra), 0);
    }
}

static void files_and_changes_keep_it(void)
{
    char path[] = "/tmp/hapt-skip-slots-XXXXXX";
    struct hapt_profile *profile = profile_with(12, 1e6);
    struct hapt_plan *plan = plan_on(profile, HAPT_SCHEDULE_H1F1B), *read = NULL;
    struct hapt_schedule *schedule = NULL;
    const int file = mkstemp(path);
    if (!plan || !CHECK(file >= 0)) return;
    close(file);
    CHECK_OK(hapt_plan_widen_skips(profile, plan));
    CHECK(plan->transfer_slots > HAPT_TRANSFER_SLOTS);
    CHECK_OK(hapt_plan_save(path, plan));
    CHECK_OK(hapt_plan_load(path, &arena, &read));
    unlink(path);
    if (!read) return;
    CHECK(read->transfer_slots == plan->transfer_slots);
    CHECK_NEAR(step_with(read, read->transfer_slots), plan->simulated_s, 0);
    CHECK_OK(hapt_plan_schedule(read, false, &arena, &schedule));
    CHECK(schedule && hapt_schedule_transfer_slots(schedule) == plan->transfer_slots);
    if (schedule) CHECK_OK(hapt_schedule_check(schedule));
    CHECK_OK(hapt_plan_change(read, HAPT_SCHEDULE_1F1B, MICROBATCHES, 0.02));
    CHECK(read->transfer_slots == plan->transfer_slots);
    /* messages between neighbours alone need no more slots */
    plan->edge_count = 0;
    CHECK_FAILS(hapt_plan_check(plan), HAPT_ERR_INPUT);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    hapt_arena_init(&arena);
    RUN(the_least_number_that_is_enough);
    RUN(memory_counts);
    RUN(files_and_changes_keep_it);
    hapt_arena_release(&arena);
    return test_finish();
}
