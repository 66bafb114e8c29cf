/* Plans with split backward passes: memory, slots by simulation, the choice between split and unsplit, files. */
#include "random_profile.h"

#include <unistd.h>

/* Weight times and the bytes of split programs for every candidate of a random profile. */
static void add_split(uint64_t *seed, struct hapt_profile *profile, struct hapt_arena *arena)
{
    for (int c = 0; c < profile->cluster_count; c++) {
        struct hapt_profile_cluster *cluster = &profile->cluster[c];
        CHECK_OK(hapt_profile_add_split(profile, c, arena));
        cluster->split_overhead = random_chance(seed, 0.5) ? 0.2 * hapt_random_unit(seed) : 0;
        for (size_t cell = 0; cell < hapt_profile_index(profile, cluster->submesh_count, 0, 0); cell++) {
            if (!isfinite(cluster->stage_time[cell])) continue;
            const double backward_s = cluster->stage_time[cell] - cluster->stage_forward_time[cell];
            cluster->weight_time[cell] = backward_s * 0.7 * hapt_random_unit(seed);
            cluster->split_parameter_bytes[cell] = cluster->parameter_bytes[cell];
            cluster->weight_slot_bytes[cell] = cluster->activation_bytes[cell] * hapt_random_unit(seed) + 0.01;
        }
    }
    profile->mixed_count = 0;
}

static bool search(const struct hapt_profile *profile, int microbatches, struct hapt_arena *arena,
                   struct hapt_plan **plan)
{
    const struct hapt_search_options options = {.objective = HAPT_OBJECTIVE_FORMULA,
                                                .microbatches = microbatches,
                                                .schedule = HAPT_SCHEDULE_H1F1B,
                                                .hide_threshold = 0.02,
                                                .may_fail = true};
    const enum hapt_status status = hapt_plan_search_formula(MPI_COMM_SELF, profile, &options, arena, plan);
    if (status != HAPT_OK) hapt_fail_reset();
    return status == HAPT_OK;
}

/* The simulated step of a split plan in which up to `wanted` passes of a stage may wait, with slots of their own if
 * `more`. Computed from the tables, not by the planner: costs and lists are made here. NAN: it does not fit. */
static double step_by_hand(const struct hapt_profile *profile, const struct hapt_plan *plan, int wanted, int more,
                           struct hapt_arena *arena)
{
    double forward[16], backward[16], weight[16], comm[16], step[16], total_s = -1;
    int warmup[16], pool[16], waits[16];
    struct hapt_schedule *schedule = NULL;
    struct hapt_simulation *simulation = NULL;
    for (int i = 0; i < plan->stage_count; i++) {
        const struct hapt_plan_stage *stage = &plan->stage[i];
        const struct hapt_profile_cluster *cluster = &profile->cluster[stage->submesh->subcluster[0]];
        size_t cell = 0;
        for (int s = 0; s < cluster->submesh_count; s++)
            if (cluster->submesh[s].n == stage->submesh->nodes &&
                cluster->submesh[s].m == stage->submesh->devices_per_node &&
                cluster->submesh[s].tp == stage->layout.tensor_parallel)
                cell = hapt_profile_index(profile, s, stage->first_layer, stage->end_layer - 1);
        forward[i] = cluster->stage_forward_time[cell];
        weight[i] = cluster->weight_time[cell] * (1 + cluster->split_overhead);
        backward[i] = (cluster->stage_time[cell] - forward[i]) * (1 + cluster->split_overhead) - weight[i];
        comm[i] = stage->comm_s;
        step[i] = stage->step_s - stage->tied_s;
        warmup[i] = stage->warmup;
        for (waits[i] = wanted; waits[i] > 0; waits[i]--) {
            pool[i] = more ? warmup[i] + waits[i] - 1 : warmup[i];
            if (pool[i] > plan->microbatches) pool[i] = plan->microbatches;
            if (cluster->split_parameter_bytes[cell] + pool[i] * cluster->activation_bytes[cell] +
                    waits[i] * cluster->weight_slot_bytes[cell] <=
                cluster->device_memory_bytes)
                break;
        }
        if (waits[i] == 0) return NAN;
    }
    const struct hapt_costs costs = {.forward_s = forward,
                                     .backward_s = backward,
                                     .weight_s = weight,
                                     .comm_s = comm,
                                     .step_s = step,
                                     .exchange_s = plan->exchange_s,
                                     .transfer_slots = HAPT_TRANSFER_SLOTS};
    const struct hapt_schedule_options options = {
        .tied = plan->exchange_s > 0, .split = true, .pool = pool, .weight_slots = waits, .costs = &costs};
    CHECK_OK(
        hapt_schedule_build(plan->schedule, plan->stage_count, plan->microbatches, warmup, &options, arena, &schedule));
    if (schedule) CHECK_OK(hapt_schedule_check(schedule));
    if (schedule) CHECK_OK(hapt_simulate(schedule, &costs, arena, &simulation));
    if (simulation) total_s = simulation->total_s;
    return total_s;
}

static int split_count, refused, shorter, longer, more_slots;

static void compare_once(uint64_t start_seed)
{
    struct hapt_arena arena;
    struct hapt_profile *profile;
    struct hapt_plan *plan = NULL, *other = NULL;
    uint64_t seed = start_seed;
    hapt_arena_init(&arena);
    profile = random_profile(&seed, &arena);
    add_split(&seed, profile, &arena);
    if (hapt_profile_check(profile) != HAPT_OK) { /* no candidates at all */
        hapt_fail_reset();
        hapt_arena_release(&arena);
        return;
    }
    const int B = 2 + random_below(&seed, 15);
    if (search(profile, B, &arena, &plan) && search(profile, B, &arena, &other) && plan->stage_count <= 16) {
        const double unsplit_s = plan->simulated_s;
        double best_s = step_by_hand(profile, plan, 1, 0, &arena);
        const enum hapt_status status = hapt_plan_split_backward(profile, plan);
        bool fits;
        CHECK_MESSAGE((status == HAPT_OK) == isfinite(best_s), "seed %llu: fits %d", (unsigned long long)start_seed,
                      isfinite(best_s));
        CHECK(status == HAPT_OK || status == HAPT_ERR_INFEASIBLE);
        CHECK_OK(hapt_plan_split_if_shorter(profile, other, &fits));
        CHECK(fits == (status == HAPT_OK));
        if (status == HAPT_OK) {
            for (int level = 2; level / 2 < B; level *= 2)
                for (int more = 0; more < 2; more++)
                    best_s = fmin(best_s, step_by_hand(profile, plan, level < B ? level : B, more, &arena));
            CHECK_MESSAGE(fabs(plan->simulated_s - best_s) <= 1e-9 * best_s, "seed %llu: %.12g s, by hand %.12g s",
                          (unsigned long long)start_seed, plan->simulated_s, best_s);
            CHECK_OK(hapt_plan_check(plan));
            CHECK(plan->bound_s == 0 && plan->split);
            struct hapt_schedule *schedule = NULL;
            CHECK_OK(hapt_plan_schedule(plan, plan->exchange_s > 0, &arena, &schedule));
            for (int i = 0; schedule && i < plan->stage_count; i++) /* no memory for slots that no list takes */
                CHECK(schedule->list[i].slots == plan->stage[i].slots &&
                      schedule->list[i].weight_slots == plan->stage[i].weight_slots);
            for (int i = 0; i < plan->stage_count; i++) more_slots += plan->stage[i].weight_slots > 1;
            shorter += plan->simulated_s < unsplit_s;
            longer += plan->simulated_s > unsplit_s;
            split_count++;
        } else {
            hapt_fail_reset();
            refused++;
        }
        /* The simulated step decides; the rejected plan leaves no trace. */
        CHECK(other->split == (status == HAPT_OK && plan->simulated_s < unsplit_s * (1 - 1e-12)));
        CHECK_NEAR(other->simulated_s, other->split ? plan->simulated_s : unsplit_s, 0);
        if (!other->split) {
            struct hapt_plan *again = NULL;
            CHECK(search(profile, B, &arena, &again));
            for (int i = 0; again && i < again->stage_count; i++) {
                CHECK(other->stage[i].memory_bytes == again->stage[i].memory_bytes);
                CHECK(other->stage[i].part_activation_bytes[0] == again->stage[i].part_activation_bytes[0]);
                CHECK(other->stage[i].slots == 0 && other->stage[i].weight_slots == 0);
            }
        }
    }
    hapt_arena_release(&arena);
}

static void simulation_decides(void)
{
    const int cases = test_long() ? 3000 : 300;
    for (int k = 0; k < cases; k++) compare_once((uint64_t)k + 1);
    CHECK_MESSAGE(split_count > cases / 4 && refused > 0 && shorter > split_count / 8 && more_slots > 0,
                  "%d plans are split, %d do not fit, %d are shorter, %d longer, %d stages hold more", split_count,
                  refused, shorter, longer, more_slots);
}

/* Searching with the memory of split programs finds a plan that can be split, if there is one of these stages. */
static void the_view_fits(void)
{
    int found = 0;
    for (int k = 0; k < 200; k++) {
        struct hapt_arena arena;
        struct hapt_profile *profile, *view = NULL;
        struct hapt_plan *plan = NULL;
        uint64_t seed = (uint64_t)k + 5000;
        hapt_arena_init(&arena);
        profile = random_profile(&seed, &arena);
        add_split(&seed, profile, &arena);
        CHECK_OK(hapt_profile_split_view(profile, &arena, &view));
        if (search(view, 8, &arena, &plan)) {
            CHECK_OK(hapt_plan_split_backward(profile, plan));
            found++;
        }
        hapt_arena_release(&arena);
    }
    CHECK_MESSAGE(found > 50, "%d plans", found);
}

static void files(void)
{
    struct hapt_arena arena;
    char path[64];
    hapt_arena_init(&arena);
    snprintf(path, sizeof path, "/tmp/hapt-split-%d.h5", (int)getpid());
    int saved = 0;
    for (int k = 0; k < 60 && saved < 5; k++) {
        uint64_t seed = (uint64_t)k + 900;
        struct hapt_profile *profile = random_profile(&seed, &arena), *read = NULL;
        struct hapt_plan *plan = NULL, *loaded = NULL;
        add_split(&seed, profile, &arena);
        CHECK_OK(hapt_profile_save(path, profile));
        CHECK_OK(hapt_profile_load(path, &arena, &read));
        for (int c = 0; read && c < profile->cluster_count; c++) {
            const size_t cells = hapt_profile_index(profile, profile->cluster[c].submesh_count, 0, 0);
            CHECK(read->cluster[c].weight_time &&
                  read->cluster[c].split_overhead == profile->cluster[c].split_overhead &&
                  !memcmp(read->cluster[c].weight_slot_bytes, profile->cluster[c].weight_slot_bytes,
                          cells * sizeof(double)));
        }
        unlink(path);
        if (!search(profile, 8, &arena, &plan) || hapt_plan_split_backward(profile, plan) != HAPT_OK) {
            hapt_fail_reset();
            continue;
        }
        CHECK_OK(hapt_plan_save(path, plan));
        CHECK_OK(hapt_plan_load(path, &arena, &loaded));
        unlink(path);
        if (!loaded) continue;
        CHECK(loaded->split && loaded->stage_count == plan->stage_count);
        for (int i = 0; i < plan->stage_count; i++)
            CHECK(loaded->stage[i].weight_s == plan->stage[i].weight_s &&
                  loaded->stage[i].slots == plan->stage[i].slots &&
                  loaded->stage[i].weight_slots == plan->stage[i].weight_slots &&
                  loaded->stage[i].memory_bytes == plan->stage[i].memory_bytes);
        struct hapt_simulation *simulation = NULL;
        CHECK_OK(hapt_plan_simulate(loaded, &arena, &simulation));
        if (simulation) CHECK_NEAR(simulation->total_s, plan->simulated_s, 0);
        saved++;
    }
    CHECK(saved == 5);
    hapt_arena_release(&arena);
}

/* Profiles without weight times, as earlier ones, give no split plan. */
static void unknown_times_are_refused(void)
{
    struct hapt_arena arena;
    int refusals = 0;
    hapt_arena_init(&arena);
    for (int k = 0; k < 20; k++) {
        uint64_t seed = (uint64_t)k + 70;
        struct hapt_profile *profile = random_profile(&seed, &arena), *view = NULL;
        struct hapt_plan *plan = NULL, *none = NULL;
        bool fits = false;
        profile->mixed_count = 0;
        CHECK_OK(hapt_profile_split_view(profile, &arena, &view));
        CHECK(!search(view, 8, &arena, &none));
        if (!search(profile, 8, &arena, &plan)) continue;
        CHECK_FAILS(hapt_plan_split_backward(profile, plan), HAPT_ERR_INPUT);
        CHECK_OK(hapt_plan_split_if_shorter(profile, plan, &fits));
        CHECK(!plan->split && fits);
        refusals++;
    }
    CHECK(refusals > 5);
    hapt_arena_release(&arena);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    RUN(simulation_decides);
    RUN(the_view_fits);
    RUN(files);
    RUN(unknown_times_are_refused);
    return test_finish();
}
