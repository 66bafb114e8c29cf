/*
 * The search for the least simulated step, compared with all plans of small random profiles: every cut, submesh,
 * program and launch rule, priced one by one; also over several numbers of rows of a microbatch. Stages that the search
 * leaves out beside a known step are in none of the short plans. HAPT_LONG=1: more instances.
 */
#include "../../src/search/step.h"
#include "random_profile.h"

enum { MOST_STAGES = 8 };

struct brute {
    const struct hapt_profile *profile;
    struct hapt_search_options options;
    struct hapt_arena arena;
    int stages, end[MOST_STAGES], subcluster[MOST_STAGES], submesh[MOST_STAGES];
    int used[HAPT_MAX_SUBCLUSTERS];
    double best_s;
    long priced;
    const struct hapt_profile *trimmed; /* or NULL: then the plans up to limit_s have their stages in it */
    double limit_s;
    long kept; /* stages of such plans */
};

/* Each stage of a short plan is left. */
static void check_stages(struct brute *brute)
{
    for (int i = 0; i < brute->stages; i++) {
        const int first = i > 0 ? brute->end[i - 1] : 0, c = brute->subcluster[i];
        const size_t at = hapt_profile_index(brute->profile, brute->submesh[i], first, brute->end[i] - 1);
        CHECK_MESSAGE(isfinite(brute->trimmed->cluster[c].stage_time[at]),
                      "stage %d of a short plan, layers %d-%d on subcluster %d, is left out", i, first, brute->end[i],
                      c);
        brute->kept++;
    }
}

/* Prices the stages under every rule. */
static void price(struct brute *brute)
{
    static const struct {
        enum hapt_schedule_kind kind;
        double threshold;
    } rule[] = {{HAPT_SCHEDULE_H1F1B, 0},    {HAPT_SCHEDULE_H1F1B, 0.02}, {HAPT_SCHEDULE_H1F1B, 0.1},
                {HAPT_SCHEDULE_H1F1B, 0.25}, {HAPT_SCHEDULE_H1F1B, 0.5},  {HAPT_SCHEDULE_1F1B, 0.02},
                {HAPT_SCHEDULE_EAGER, 0.02}, {HAPT_SCHEDULE_GPIPE, 0.02}};
    for (int r = 0; r < 8; r++) {
        struct hapt_plan plan = hapt_search_plan(brute->profile, &brute->options);
        hapt_arena_reset(&brute->arena);
        plan.schedule = rule[r].kind;
        plan.hide_threshold = rule[r].threshold;
        CHECK_OK(hapt_plan_allot(&plan, brute->stages, &brute->arena));
        for (int i = 0; i < brute->stages; i++) {
            const struct hapt_profile_cluster *cluster = &brute->profile->cluster[brute->subcluster[i]];
            plan.stage[i].first_layer = i > 0 ? brute->end[i - 1] : 0;
            plan.stage[i].end_layer = brute->end[i];
            hapt_plan_stage_run(brute->profile, brute->subcluster[i], &cluster->submesh[brute->submesh[i]],
                                &plan.stage[i]);
        }
        if (hapt_plan_price(brute->profile, &plan) == HAPT_OK) {
            brute->best_s = fmin(brute->best_s, plan.simulated_s);
            if (brute->trimmed && plan.simulated_s <= brute->limit_s) check_stages(brute);
        }
        hapt_fail_reset();
        brute->priced++;
    }
}

static void extend(struct brute *brute, int layer)
{
    const struct hapt_profile *profile = brute->profile;
    if (layer == profile->layer_count) {
        price(brute);
        return;
    }
    for (int c = 0; c < profile->cluster_count && brute->stages < MOST_STAGES; c++) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[c];
        if (brute->used[c] > 0 && brute->subcluster[brute->stages - 1] != c) continue;
        for (int s = 0; s < cluster->submesh_count; s++) {
            const int devices = cluster->submesh[s].n * cluster->submesh[s].m;
            if (brute->used[c] + devices > cluster->nodes * cluster->devices_per_node) continue;
            for (int end = layer + 1; end <= profile->layer_count; end++) {
                if (!isfinite(cluster->stage_time[hapt_profile_index(profile, s, layer, end - 1)])) continue;
                brute->end[brute->stages] = end;
                brute->subcluster[brute->stages] = c;
                brute->submesh[brute->stages++] = s;
                brute->used[c] += devices;
                extend(brute, end);
                brute->used[c] -= devices;
                brute->stages--;
            }
        }
    }
}

static double brute_step_s(const struct hapt_profile *profile, const struct hapt_search_options *options)
{
    struct brute brute = {.profile = profile, .options = *options, .best_s = INFINITY};
    hapt_arena_init(&brute.arena);
    extend(&brute, 0);
    hapt_arena_release(&brute.arena);
    return brute.best_s;
}

/* The simulated step that the search finds; INFINITY: no plan. */
static double search_step_s(const struct hapt_profile *profile, const struct hapt_search_options *options,
                            struct hapt_arena *arena, double *bound_s)
{
    struct hapt_plan *plan;
    struct hapt_search_options quiet = *options;
    quiet.may_fail = true;
    const enum hapt_status status = hapt_plan_search_step(MPI_COMM_SELF, profile, &quiet, arena, &plan);
    hapt_fail_reset();
    CHECK(status == HAPT_OK || status == HAPT_ERR_INFEASIBLE);
    if (status != HAPT_OK) return INFINITY;
    CHECK_OK(hapt_plan_check(plan));
    *bound_s = plan->bound_s;
    return plan->simulated_s;
}

/* A tensor that layer `from` makes and later layers read, one of them `to`; its gradient, if it has one, goes back
 * through all of them. */
static void add_tensor(struct hapt_crossings *crossings, struct hapt_profile *profile, int from, int to, uint64_t *seed)
{
    const double bytes = random_chance(seed, 0.1) ? 0 : 4 * hapt_random_unit(seed);
    int layer[16], count = 0, *start = &crossings->start[crossings->count];
    layer[count++] = from;
    for (int l = from + 1; l <= to; l++)
        if (l == to || random_chance(seed, 0.3)) layer[count++] = l;
    for (int l = from; l < to; l++) profile->boundary_bytes[l] += bytes;
    for (int d = 0; d < (random_chance(seed, 0.9) ? 2 : 1); d++, start++) {
        for (int k = 0; k < count; k++) {
            crossings->layer[*start + k] = layer[d ? count - 1 - k : k];
            crossings->writes[*start + k] = k == 0 || (d && random_chance(seed, 0.8));
        }
        crossings->bytes[crossings->count++] = bytes;
        start[1] = *start + count;
    }
}

/* Replaces the profile's boundaries by tensors that go to the next layer and further. */
static void add_crossings(struct hapt_profile *profile, uint64_t *seed, struct hapt_arena *arena)
{
    const int L = profile->layer_count, most = 4 * L + 8;
    struct hapt_crossings *crossings = hapt_arena_alloc(arena, 1, sizeof *crossings);
    crossings->bytes = hapt_arena_alloc(arena, (size_t)most, sizeof *crossings->bytes);
    crossings->start = hapt_arena_alloc(arena, (size_t)most + 1, sizeof *crossings->start);
    crossings->layer = hapt_arena_alloc(arena, 16 * (size_t)most, sizeof *crossings->layer);
    crossings->writes = hapt_arena_alloc(arena, 16 * (size_t)most, sizeof *crossings->writes);
    for (int l = 0; l < L; l++) profile->boundary_bytes[l] = 0;
    for (int l = 0; l + 1 < L; l++)
        if (random_chance(seed, 0.9)) add_tensor(crossings, profile, l, l + 1, seed);
    for (int k = 0; k < 3 && L > 2; k++) {
        const int from = random_below(seed, L - 2);
        add_tensor(crossings, profile, from, from + 2 + random_below(seed, L - from - 2), seed);
    }
    profile->crossings = crossings;
    CHECK_OK(hapt_crossings_check(crossings, L));
}

/* A random profile without mixed stages. */
static struct hapt_profile *draw_profile(uint64_t *seed, struct hapt_arena *arena)
{
    struct hapt_profile *profile = random_profile(seed, arena);
    profile->host_state = hapt_random_next(seed) % 3 == 0; /* then all stages agree before they update */
    profile->mixed_count = 0;
    return profile;
}

/* One whose devices defer long updates. */
static struct hapt_profile *draw_deferring(uint64_t *seed, struct hapt_arena *arena)
{
    struct hapt_profile *profile = draw_profile(seed, arena);
    while (!profile->cluster[0].step_time) profile = draw_profile(seed, arena);
    profile->host_state = true;
    for (int c = 0; c < profile->cluster_count; c++) {
        struct hapt_profile_cluster *cluster = &profile->cluster[c];
        const double factor = 1 + 4 * hapt_random_unit(seed);
        cluster->deferrable = hapt_random_unit(seed);
        for (size_t k = 0; cluster->step_time && k < hapt_profile_index(profile, cluster->submesh_count, 0, 0); k++)
            cluster->step_time[k] *= factor;
    }
    return profile;
}

/* The search chooses all that it can. */
static struct hapt_search_options free_options(int microbatches)
{
    return (struct hapt_search_options){.objective = HAPT_OBJECTIVE_STEP,
                                        .any_schedule = true,
                                        .any_threshold = true,
                                        .microbatches = microbatches,
                                        .schedule = HAPT_SCHEDULE_H1F1B,
                                        .hide_threshold = 0.02};
}

static void optimum_of_small_instances(void)
{
    const int instances = test_long() ? 2000 : 300;
    int compared = 0, optimal[2] = {0, 0}, far = 0;
    double worst[2] = {0, 0}, gap = 0;
    for (uint64_t start = 1; compared < instances; start++) {
        uint64_t seed = 1000 + start;
        struct hapt_arena arena;
        hapt_arena_init(&arena);
        struct hapt_profile *profile = start % 4 ? draw_profile(&seed, &arena) : draw_deferring(&seed, &arena);
        struct hapt_search_options options = free_options(1 + random_below(&seed, start % 4 ? 24 : 4));
        if (start % 2) add_crossings(profile, &seed, &arena);
        const double least_s = brute_step_s(profile, &options);
        for (int way = 0; way < 2; way++) {
            double bound_s = 0;
            options.no_enumeration = way == 1;
            const double step_s = search_step_s(profile, &options, &arena, &bound_s);
            CHECK_MESSAGE(isfinite(step_s) == isfinite(least_s), "seed %d: a plan %s", (int)start,
                          isfinite(least_s) ? "is missed" : "does not exist");
            if (!isfinite(step_s) || !isfinite(least_s)) continue;
            CHECK_MESSAGE(bound_s <= least_s * (1 + 1e-9) && bound_s <= step_s * (1 + 1e-9),
                          "seed %d: bound %.9g above the least step %.9g, found %.9g", (int)start, bound_s, least_s,
                          step_s);
            const double excess = step_s / least_s - 1;
            compared += way == 0;
            far += way == 0 && profile->crossings;
            optimal[way] += excess <= 1e-9;
            worst[way] = fmax(worst[way], excess);
            if (way == 1) gap = fmax(gap, 1 - bound_s / step_s);
            if (way == 0)
                CHECK_MESSAGE(excess <= 1e-9, "seed %d: %.9g found, %.9g is possible", (int)start, step_s, least_s);
        }
        hapt_arena_release(&arena);
    }
    printf("  %d instances; optimum with enumeration in %.1f %%; by refinement alone in %.1f %%, worst %.2f %% off; "
           "largest gap of a bound %.0f %%\n",
           compared, 100.0 * optimal[0] / compared, 100.0 * optimal[1] / compared, 100 * worst[1], 100 * gap);
    CHECK(optimal[1] >= 0.95 * compared && far > compared / 4);
}

/* The same profile for microbatches with `share` of the rows: what does not depend on the rows is drawn anew. */
static struct hapt_profile *rebatched(const struct hapt_profile *from, double share, uint64_t *seed,
                                      struct hapt_arena *arena)
{
    struct hapt_profile *copy = NULL;
    CHECK_OK(hapt_profile_copy(from, arena, &copy));
    for (int l = 0; l < copy->layer_count; l++) copy->boundary_bytes[l] *= share;
    for (int c = 0; c < copy->cluster_count; c++) {
        const struct hapt_profile_cluster *cluster = &copy->cluster[c];
        const double fixed = hapt_random_unit(seed) * 0.3;
        const size_t cells = hapt_profile_index(copy, cluster->submesh_count, 0, 0);
        for (size_t k = 0; k < cells; k++) {
            cluster->stage_time[k] *= share + fixed * (1 - share);
            cluster->stage_forward_time[k] *= share + fixed * (1 - share);
            cluster->activation_bytes[k] *= share;
        }
    }
    return copy;
}

/* Several numbers of rows: the best over all of them, and one bound. */
static void optimum_over_rows(void)
{
    enum { ROWS = 3 };
    const int instances = test_long() ? 1000 : 100;
    int compared = 0, chosen_not_first = 0, optimal = 0;
    for (uint64_t start = 1; compared < instances; start++) {
        uint64_t seed = 50000 + start;
        struct hapt_arena arena;
        hapt_arena_init(&arena);
        struct hapt_profile *profile = draw_profile(&seed, &arena);
        struct hapt_search_options options = free_options(0);
        options.may_fail = true;
        struct hapt_search_batching batching[ROWS];
        double least_s = INFINITY, found_s[2] = {INFINITY, INFINITY};
        const int B = 1 + random_below(&seed, 8);
        for (int k = 0; k < ROWS; k++) {
            batching[k] = (struct hapt_search_batching){.microbatches = B << k,
                                                        .profile = rebatched(profile, 1.0 / (1 << k), &seed, &arena)};
            options.microbatches = batching[k].microbatches;
            least_s = fmin(least_s, brute_step_s(batching[k].profile, &options));
        }
        for (int way = 0; way < 2; way++) {
            struct hapt_plan *plan = NULL;
            int chosen = -1;
            options.no_enumeration = way == 1;
            const enum hapt_status status =
                hapt_plan_search_batchings(MPI_COMM_SELF, batching, ROWS, &options, &arena, &plan, &chosen);
            hapt_fail_reset();
            CHECK_MESSAGE((status == HAPT_OK) == isfinite(least_s), "seed %d: %s", (int)start,
                          hapt_status_name(status));
            if (status != HAPT_OK || !isfinite(least_s)) continue;
            found_s[way] = plan->simulated_s;
            CHECK_OK(hapt_plan_check(plan));
            CHECK(plan->microbatches == batching[chosen].microbatches);
            CHECK_MESSAGE(plan->bound_s <= least_s * (1 + 1e-9), "seed %d: bound %.9g above the least step %.9g",
                          (int)start, plan->bound_s, least_s);
            if (way == 0) chosen_not_first += chosen > 0;
        }
        if (isfinite(least_s)) {
            compared++;
            CHECK_MESSAGE(found_s[0] <= least_s * (1 + 1e-9), "seed %d: %.9g found, %.9g is possible", (int)start,
                          found_s[0], least_s);
            optimal += found_s[1] <= least_s * (1 + 1e-9);
        }
        hapt_arena_release(&arena);
    }
    printf("  %d instances of %d numbers of rows: the optimum by refinement alone in %.1f %%; in %d the first rows are "
           "not "
           "the best\n",
           compared, (int)ROWS, 100.0 * optimal / compared, chosen_not_first);
    CHECK(optimal >= 0.88 * compared && chosen_not_first >= compared / 10);
}

/* Stages that are left out beside a known step. */
static void short_plans_keep_their_stages(void)
{
    const int instances = test_long() ? 1500 : 200;
    long kept = 0, all = 0, left = 0;
    int compared = 0;
    for (uint64_t start = 1; compared < instances; start++) {
        uint64_t seed = 90000 + start;
        struct hapt_arena arena;
        struct step_search search;
        hapt_arena_init(&arena);
        struct hapt_profile *profile = start % 4 ? draw_profile(&seed, &arena) : draw_deferring(&seed, &arena);
        struct hapt_search_options options = free_options(1 + random_below(&seed, 24));
        if (start % 2) add_crossings(profile, &seed, &arena);
        const double least_s = brute_step_s(profile, &options);
        if (isfinite(least_s)) {
            compared++;
            options.known_s = least_s;
            CHECK_OK(step_begin(&search, MPI_COMM_SELF, profile, &options));
            CHECK_OK(step_prepare(&search));
            CHECK_OK(step_trim(&search));
            struct brute brute = {.profile = profile,
                                  .options = options,
                                  .best_s = INFINITY,
                                  .trimmed = &search.useful,
                                  .limit_s = 1.05 * least_s};
            hapt_arena_init(&brute.arena);
            extend(&brute, 0);
            hapt_arena_release(&brute.arena);
            kept += brute.kept;
            for (int c = 0; c < profile->cluster_count; c++)
                for (size_t k = 0; k < hapt_profile_index(profile, profile->cluster[c].submesh_count, 0, 0); k++) {
                    all += isfinite(profile->cluster[c].stage_time[k]);
                    left += isfinite(search.useful.cluster[c].stage_time[k]);
                }
            step_release(&search);
        }
        hapt_arena_release(&arena);
    }
    printf("  %d instances: %.0f %% of the stages are left, and all %ld of short plans\n", compared,
           100.0 * (double)left / (double)all, kept);
    CHECK(kept > 10 * instances && left < 0.9 * (double)all);
}

/* No candidate has another end, and both ends of every range belong to candidates. */
static void ends_of_candidates(void)
{
    uint64_t seed = 77;
    int rows = 0, none = 0;
    for (int i = 0; i < 50; i++) {
        struct hapt_arena arena;
        hapt_arena_init(&arena);
        const struct hapt_profile *profile = draw_profile(&seed, &arena);
        const int L = profile->layer_count;
        for (int c = 0; c < profile->cluster_count; c++) {
            struct hapt_profile_cluster cluster = profile->cluster[c];
            CHECK_OK(hapt_profile_find_ends(L, cluster.submesh_count, cluster.stage_time, &arena, &cluster.ends));
            for (int row = 0; row < cluster.submesh_count * L; row++) {
                const struct hapt_profile_ends ends = hapt_profile_ends_of(profile, &cluster, row / L, row % L);
                const double *time_s = &cluster.stage_time[(size_t)row * (size_t)L];
                int candidates = 0, inside = 0;
                for (int end = row % L + 1; end <= L; end++) {
                    candidates += isfinite(time_s[end - 1]);
                    inside += isfinite(time_s[end - 1]) && end >= ends.least && end <= ends.most;
                }
                CHECK(inside == candidates);
                CHECK(candidates > 0 ? isfinite(time_s[ends.least - 1]) && isfinite(time_s[ends.most - 1])
                                     : ends.least > ends.most);
                rows++;
                none += candidates == 0;
            }
        }
        hapt_arena_release(&arena);
    }
    CHECK(none > 0 && none < rows);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    RUN(optimum_of_small_instances);
    RUN(optimum_over_rows);
    RUN(short_plans_keep_their_stages);
    RUN(ends_of_candidates);
    return test_finish();
}
