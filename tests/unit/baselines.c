/*
 * Baselines compared with enumeration on small profiles: every plan that a system could choose is written as --stages
 * text and priced on its own.
 */
#include "two_subclusters.h"

/* ---- Megatron ---- */

struct even_search {
    const struct hapt_profile *profile;
    struct hapt_search_options options;
    const bool *block_end;
    struct hapt_submesh shape;
    int order[4], placed;
    double least_s;
    bool interleaved; /* that of least_s */
    struct hapt_arena *arena;
};

/* The stages of one shape and order, with even numbers of blocks. `row`: the subcluster of each submesh. */
static double price_chunks(struct even_search *even, const int *row, int submeshes, const int *ends, int blocks,
                           int loops)
{
    const struct hapt_profile *profile = even->profile;
    struct hapt_search_options options = even->options;
    const int chunks = submeshes * loops;
    int at = 0, before = 0;
    char text[TEXT];
    for (int i = 0; i < chunks; i++) {
        const int end = ends[(i + 1) * blocks / chunks - 1];
        at += snprintf(text + at, (size_t)(TEXT - at), "%s%d-%d@%s:%dx%dt%d", i ? "," : "", before, end,
                       profile->cluster[row[i % submeshes]].name, even->shape.n, even->shape.m, even->shape.tp);
        before = end;
    }
    if (loops > 1) options.schedule = HAPT_SCHEDULE_INTERLEAVED;
    options.loops.loops = loops;
    return priced_s(profile, &options, text, false, even->arena);
}

static void price_even(struct even_search *even)
{
    const struct hapt_profile *profile = even->profile;
    int ends[16], row[64], blocks = 0, S = 0;
    for (int l = 0; l < profile->layer_count; l++)
        if (l == profile->layer_count - 1 || even->block_end[l]) ends[blocks++] = l + 1;
    for (int k = 0; k < profile->cluster_count; k++) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[even->order[k]];
        const int own = cluster->nodes * cluster->devices_per_node / (even->shape.n * even->shape.m);
        for (int i = 0; i < own; i++) row[S++] = even->order[k];
    }
    for (int loops = 1; S * loops <= blocks && loops <= 8; loops++) {
        if (loops > 1 && (S == 1 || even->options.microbatches % S != 0)) break;
        const double step_s = price_chunks(even, row, S, ends, blocks, loops);
        if (step_s < even->least_s) even->interleaved = loops > 1;
        even->least_s = fmin(even->least_s, step_s);
    }
}

static void all_orders(struct even_search *even, unsigned used)
{
    if (even->placed == even->profile->cluster_count) {
        price_even(even);
        return;
    }
    for (int c = 0; c < even->profile->cluster_count; c++) {
        if (used >> c & 1u) continue;
        even->order[even->placed++] = c;
        all_orders(even, used | 1u << c);
        even->placed--;
    }
}

static bool shape_fills(const struct hapt_profile *profile, struct hapt_submesh shape)
{
    for (int c = 0; c < profile->cluster_count; c++) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[c];
        if (shape.n > cluster->nodes || cluster->nodes % shape.n || cluster->devices_per_node % shape.m) return false;
    }
    return true;
}

static bool equal_nodes(const struct hapt_profile *profile)
{
    for (int c = 1; c < profile->cluster_count; c++)
        if (profile->cluster[c].devices_per_node != profile->cluster[0].devices_per_node) return false;
    return true;
}

static long megatron_plans, megatron_loops, megatron_refusals;

static void megatron_once(uint64_t start_seed)
{
    uint64_t seed = start_seed;
    struct hapt_arena arena;
    bool block_end[16] = {false};
    hapt_arena_init(&arena);
    struct hapt_profile *profile =
        random_profile_of(&seed, 1 + random_below(&seed, 3), 3 + random_below(&seed, 6), &arena);
    struct even_search even = {.profile = profile,
                               .options = random_options(&seed),
                               .block_end = block_end,
                               .least_s = INFINITY,
                               .arena = &arena};
    for (int l = 0; l < profile->layer_count - 1; l++) block_end[l] = random_chance(&seed, 0.8);
    even.options.schedule = HAPT_SCHEDULE_1F1B;
    for (int s = 0; s < profile->cluster[0].submesh_count && equal_nodes(profile); s++) {
        even.shape = profile->cluster[0].submesh[s];
        if (shape_fills(profile, even.shape)) all_orders(&even, 0);
    }
    struct hapt_strategy_options options = {.search = even.options, .block_end = block_end};
    struct hapt_plan *plan;
    options.search.may_fail = true;
    const enum hapt_status status =
        hapt_plan_by_strategy(MPI_COMM_SELF, profile, HAPT_STRATEGY_MEGATRON, &options, &arena, &plan, NULL);
    if (isinf(even.least_s)) {
        CHECK_MESSAGE(status == HAPT_ERR_INFEASIBLE && hapt_fail_message()[0],
                      "seed %llu: megatron should have no plan: %s", (unsigned long long)start_seed,
                      hapt_status_name(status));
        hapt_fail_reset();
        megatron_refusals++;
    } else if (CHECK_MESSAGE(status == HAPT_OK, "seed %llu: megatron fails: %s", (unsigned long long)start_seed,
                             hapt_fail_message())) {
        CHECK_MESSAGE(plan->simulated_s == even.least_s, "seed %llu: megatron %.17g, enumeration %.17g",
                      (unsigned long long)start_seed, plan->simulated_s, even.least_s);
        CHECK(plan->schedule == (even.interleaved ? HAPT_SCHEDULE_INTERLEAVED : HAPT_SCHEDULE_1F1B));
        CHECK(!plan->blocking);
        megatron_loops += even.interleaved;
        megatron_plans++;
    }
    hapt_arena_release(&arena);
}

static void megatron_equals_enumeration(void)
{
    const char *wanted = getenv("HAPT_TEST_SEED");
    const int count = wanted ? 1 : test_long() ? 20000 : 2000;
    for (int i = 0; i < count; i++) megatron_once(wanted ? strtoull(wanted, NULL, 10) : (uint64_t)i + 1);
    printf("%ld megatron plans, %ld of them interleaved, %ld refusals\n", megatron_plans, megatron_loops,
           megatron_refusals);
    if (!wanted) CHECK(megatron_plans > count / 20 && megatron_refusals > count / 20 && megatron_loops > 0);
}

/* Without blocks: at least as good as even numbers of layers, and still one shape on all devices. */
static void megatron_without_blocks(void)
{
    struct hapt_arena arena;
    uint64_t seed = 5;
    hapt_arena_init(&arena);
    struct hapt_profile *profile = two_subclusters(&seed, 12, (double[2]){1, 2}, 100, &arena);
    struct hapt_strategy_options options = {.search = {.microbatches = 16, .hide_threshold = 0.02}};
    struct hapt_plan *plan;
    CHECK_OK(hapt_plan_by_strategy(MPI_COMM_SELF, profile, HAPT_STRATEGY_MEGATRON, &options, &arena, &plan, NULL));
    options.search.schedule = HAPT_SCHEDULE_1F1B;
    CHECK(plan->simulated_s <= priced_s(profile, &options.search, "0-6@fast:2x2,6-12@slow:2x2", false, &arena));
    CHECK(plan->simulated_s <=
          priced_s(profile, &options.search, "0-3@slow:1x2,3-6@slow:1x2,6-9@fast:1x2,9-12@fast:1x2", false, &arena));
    int devices = 0;
    for (int i = 0; i < plan->stage_count; i++) {
        devices += plan->stage[i].submesh->nodes * plan->stage[i].submesh->devices_per_node;
        CHECK(plan->stage[i].submesh->nodes == plan->stage[0].submesh->nodes &&
              plan->stage[i].submesh->devices_per_node == plan->stage[0].submesh->devices_per_node);
    }
    CHECK(devices == 8);
    hapt_arena_release(&arena);
}

/* ---- DeepSpeed, Colossal-AI, Pfeife ---- */

/* The largest weight of the stages [from, S) of a row of like submeshes, if the first of them begins at `layer`: the
 * least over all cuts. */
static double least_largest(const struct hapt_profile *profile, int s, bool by_bytes, int stages, int layer)
{
    const int L = profile->layer_count;
    double least = INFINITY;
    for (int end = layer + 1; end <= L - (stages - 1); end++) {
        const size_t cell = hapt_profile_index(profile, s, layer, end - 1);
        double weight = 0;
        if (stages == 1 && end < L) continue;
        for (int c = 0; c < 2; c++)
            weight += (by_bytes ? profile->cluster[c].parameter_bytes : profile->cluster[c].stage_time)[cell] / 2;
        least = fmin(least, fmax(weight, stages > 1 ? least_largest(profile, s, by_bytes, stages - 1, end) : 0));
    }
    return least;
}

/* Stages of one shape on all devices. The largest weight, by the mean over the subclusters, is the least possible one,
 * and no shape and order with such stages is faster. */
static void equal_weights(void)
{
    for (uint64_t start = 1; start <= 40; start++)
        for (int which = 0; which < 2; which++) {
            struct hapt_arena arena;
            uint64_t seed = start;
            hapt_arena_init(&arena);
            const double speed[2] = {1, 1 + 2 * hapt_random_unit(&seed)};
            const int L = 8 + (int)(start % 3);
            struct hapt_profile *profile = two_subclusters(&seed, L, speed, 100, &arena);
            struct hapt_strategy_options options = {.search = {.microbatches = 12, .hide_threshold = 0.02}};
            struct hapt_plan *plan;
            const enum hapt_strategy strategy = which ? HAPT_STRATEGY_DEEPSPEED : HAPT_STRATEGY_COLOSSAL;
            CHECK_OK(hapt_plan_by_strategy(MPI_COMM_SELF, profile, strategy, &options, &arena, &plan, NULL));
            CHECK(plan->schedule == HAPT_SCHEDULE_1F1B && !plan->blocking);
            const int n = plan->stage[0].submesh->nodes, m = plan->stage[0].submesh->devices_per_node;
            int s = 0, devices = 0;
            double largest = 0;
            while (profile->cluster[0].submesh[s].n != n || profile->cluster[0].submesh[s].m != m) s++;
            for (int i = 0; i < plan->stage_count; i++) {
                const size_t cell =
                    hapt_profile_index(profile, s, plan->stage[i].first_layer, plan->stage[i].end_layer - 1);
                double weight = 0;
                for (int c = 0; c < 2; c++)
                    weight += (which ? profile->cluster[c].parameter_bytes : profile->cluster[c].stage_time)[cell] / 2;
                largest = fmax(largest, weight);
                devices += hapt_plan_submesh_size(plan->stage[i].submesh);
                CHECK(plan->stage[i].submesh->nodes == n && plan->stage[i].submesh->devices_per_node == m);
            }
            CHECK(devices == 8);
            CHECK_NEAR(largest, least_largest(profile, s, which, plan->stage_count, 0), 1e-9);
            char text[TEXT];
            describe(plan, text);
            options.search.schedule = HAPT_SCHEDULE_1F1B;
            CHECK(priced_s(profile, &options.search, text, false, &arena) == plan->simulated_s);
            hapt_arena_release(&arena);
        }
}

/* Pfeife Fig. 4: 15 equal operators on three devices, four microbatches. */
static void pfeife_cuts_figure_4(void)
{
    struct hapt_arena arena;
    struct hapt_profile *profile;
    struct hapt_plan *plan;
    const int L = 15;
    hapt_arena_init(&arena);
    CHECK_OK(hapt_profile_create(L, 1, &arena, &profile));
    CHECK_OK(random_profile_cluster(profile, 0, "gpu", 3, 1, 1000, 1, &arena));
    profile->cluster[0].step_time = NULL;
    for (int s = 0; s < profile->cluster[0].submesh_count; s++)
        for (int i = 0; i < L; i++)
            for (int j = i; j < L; j++) {
                const size_t cell = hapt_profile_index(profile, s, i, j);
                const double forward_s = j - i + 1.0;
                /* more devices on a stage do not help here, so that the figure's row of three is the best */
                profile->cluster[0].stage_time[cell] = s == 0 ? 3 * forward_s : NAN;
                profile->cluster[0].stage_forward_time[cell] = forward_s;
                profile->cluster[0].parameter_bytes[cell] = profile->cluster[0].activation_bytes[cell] = 1;
            }
    for (int l = 0; l < L - 1; l++) profile->boundary_bytes[l] = 0;
    profile->link_bandwidth[0] = 1;
    const struct hapt_strategy_options options = {.search = {.microbatches = 4, .hide_threshold = 0.02}};
    CHECK_OK(hapt_plan_by_strategy(MPI_COMM_SELF, profile, HAPT_STRATEGY_PFEIFE, &options, &arena, &plan, NULL));
    CHECK(plan->stage_count == 3 && plan->stage[0].end_layer == 6 && plan->stage[1].end_layer == 11);
    CHECK(plan->simulated_s == 84 && plan->stage[0].warmup > 3); /* prefetched; 90 with equal stages */
    hapt_arena_release(&arena);
}

/* On devices that are equal it is at least as fast as the others: their cuts are among those of its beam, or slower. On
 * unlike devices it keeps taking them for equal. */
static void pfeife_on_equal_devices(void)
{
    int better = 0, worse = 0;
    for (uint64_t start = 1; start <= 30; start++) {
        struct hapt_arena arena;
        uint64_t seed = 100 + start;
        struct hapt_plan *plan[3];
        hapt_arena_init(&arena);
        struct hapt_profile *profile = two_subclusters(&seed, 12, (double[2]){1, 1}, 100, &arena);
        for (int link = 0; link < 4; link++) profile->link_bandwidth[link] = 100;
        const struct hapt_strategy_options options = {.search = {.microbatches = 8, .hide_threshold = 0.02}};
        static const enum hapt_strategy strategy[] = {HAPT_STRATEGY_PFEIFE, HAPT_STRATEGY_DEEPSPEED,
                                                      HAPT_STRATEGY_COLOSSAL};
        for (int k = 0; k < 3; k++)
            CHECK_OK(hapt_plan_by_strategy(MPI_COMM_SELF, profile, strategy[k], &options, &arena, &plan[k], NULL));
        for (int k = 1; k < 3; k++) {
            better += plan[0]->simulated_s < plan[k]->simulated_s;
            worse += plan[0]->simulated_s > plan[k]->simulated_s * (1 + 1e-9);
        }
        hapt_arena_release(&arena);
    }
    CHECK_MESSAGE(worse == 0 && better > 30, "Pfeife is faster in %d of 60 comparisons, slower in %d", better, worse);
}

/* ---- Alpa ---- */

/* Alpa's objective: every device is the mean device, and links are free. */
static double believed_s(const struct hapt_profile *profile, const struct hapt_plan *plan)
{
    double sum_s = 0, longest_s = 0;
    for (int i = 0; i < plan->stage_count; i++) {
        const struct hapt_plan_stage *stage = &plan->stage[i];
        double mean_s = 0;
        for (int c = 0; c < 2; c++) {
            int s = 0;
            while (profile->cluster[c].submesh[s].n != stage->submesh->nodes ||
                   profile->cluster[c].submesh[s].m != stage->submesh->devices_per_node)
                s++;
            mean_s += profile->cluster[c]
                          .stage_time[hapt_profile_index(profile, s, stage->first_layer, stage->end_layer - 1)] /
                      2;
        }
        sum_s += mean_s;
        longest_s = fmax(longest_s, mean_s);
    }
    return sum_s + (plan->microbatches - 1) * longest_s;
}

/* The stages do not depend on differences between devices with the same mean. They are the best for the assumed
 * profile, and are priced with the true one. */
static void alpa_takes_devices_for_identical(void)
{
    const int count = test_long() ? 2000 : 60;
    for (int i = 0; i < count; i++) {
        char first[TEXT] = "";
        double optimum_s = 0;
        for (int spread = 0; spread < 3; spread++) {
            struct hapt_arena arena;
            uint64_t seed = (uint64_t)i + 1;
            hapt_arena_init(&arena);
            const double speed[2] = {1 - 0.3 * spread, 1 + 0.3 * spread};
            struct hapt_profile *profile = two_subclusters(&seed, 3 + i % 5, speed, 100, &arena);
            struct hapt_strategy_options options = {.search = {.microbatches = 1 << i % 7, .hide_threshold = 0.02}};
            struct hapt_plan *plan, *ideal;
            const char *note;
            CHECK_OK(hapt_plan_by_strategy(MPI_COMM_SELF, profile, HAPT_STRATEGY_ALPA, &options, &arena, &plan, &note));
            CHECK(!note && plan->schedule == HAPT_SCHEDULE_EAGER && !plan->blocking);
            if (spread == 0) { /* the assumed profile itself, except for its links */
                for (int link = 0; link < 4; link++)
                    profile->link_bandwidth[link] = INFINITY, profile->link_latency[link] = 0;
                options.search.schedule = HAPT_SCHEDULE_EAGER;
                CHECK_OK(hapt_plan_search(MPI_COMM_SELF, profile, &options.search, &arena, &ideal));
                optimum_s = ideal->latency_s;
            }
            CHECK_NEAR(believed_s(profile, plan), optimum_s, 1e-12 * optimum_s);
            char text[TEXT], shape[TEXT];
            describe(plan, text);
            options.search.schedule = HAPT_SCHEDULE_EAGER;
            if (spread) CHECK(priced_s(profile, &options.search, text, false, &arena) == plan->simulated_s);
            for (int k = 0; k < plan->stage_count; k++) memcpy(plan->stage[k].submesh->name, "any", 4);
            describe(plan, shape);
            if (spread == 0) memcpy(first, shape, sizeof first);
            CHECK_MESSAGE(strcmp(first, shape) == 0, "seed %d: alpa plans %s, and %s", i + 1, first, shape);
            hapt_arena_release(&arena);
        }
    }
}

/* If its choice does not fit on the true devices, it takes another one that fits, with a message. */
static void alpa_meets_memory(void)
{
    struct hapt_arena arena;
    uint64_t seed = 9;
    const char *note;
    hapt_arena_init(&arena);
    struct hapt_profile *profile = two_subclusters(&seed, 8, (double[2]){1, 1}, 0, &arena);
    struct hapt_strategy_options options = {.search = {.microbatches = 8, .hide_threshold = 0.02, .may_fail = true}};
    struct hapt_plan *plan;
    profile->cluster[0].device_memory_bytes = 8;
    profile->cluster[1].device_memory_bytes = 1;
    CHECK_OK(hapt_plan_by_strategy(MPI_COMM_SELF, profile, HAPT_STRATEGY_ALPA, &options, &arena, &plan, &note));
    CHECK(note && strstr(note, "memory"));
    for (int i = 0; i < plan->stage_count; i++)
        CHECK(plan->stage[i].memory_bytes <= plan->stage[i].device_memory_bytes);
    profile->cluster[0].device_memory_bytes = 0.5;
    CHECK(hapt_plan_by_strategy(MPI_COMM_SELF, profile, HAPT_STRATEGY_ALPA, &options, &arena, &plan, &note) ==
          HAPT_ERR_INFEASIBLE);
    CHECK(strstr(hapt_fail_message(), "alpa") && strstr(hapt_fail_message(), "needs"));
    hapt_fail_reset();
    hapt_arena_release(&arena);
}

/* ---- HexiScale ---- */

struct blocking_search {
    const struct hapt_profile *profile;
    struct hapt_search_options options;
    struct {
        int first, end, c, s;
    } stage[MOST_STAGES];
    int stages, used[2];
    double least_s; /* by HexiScale's own cost */
    char best[TEXT];
};

/* Sum and t_max of the computation and all transfers for which a stage waits. */
static void price_blocking(struct blocking_search *at)
{
    const struct hapt_profile *profile = at->profile;
    double sum_s = 0, longest_s = 0;
    for (int i = 0; i < at->stages; i++) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[at->stage[i].c];
        const size_t cell = hapt_profile_index(profile, at->stage[i].s, at->stage[i].first, at->stage[i].end - 1);
        double stage_s = cluster->stage_time[cell];
        if (i > 0)
            stage_s += 2 * hapt_profile_comm_s(profile, at->stage[i].first - 1, at->stage[i - 1].c, at->stage[i].c);
        if (i < at->stages - 1)
            stage_s += 2 * hapt_profile_comm_s(profile, at->stage[i].end - 1, at->stage[i].c, at->stage[i + 1].c);
        const int launches = at->stages - i < at->options.microbatches ? at->stages - i : at->options.microbatches;
        if (cluster->parameter_bytes[cell] + launches * cluster->activation_bytes[cell] > cluster->device_memory_bytes)
            return;
        sum_s += stage_s;
        longest_s = fmax(longest_s, stage_s);
    }
    sum_s += (at->options.microbatches - 1) * longest_s;
    if (sum_s >= at->least_s) return;
    at->least_s = sum_s;
    int length = 0;
    for (int i = 0; i < at->stages; i++) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[at->stage[i].c];
        length += snprintf(at->best + length, (size_t)(TEXT - length), "%s%d-%d@%s:%dx%d", i ? "," : "",
                           at->stage[i].first, at->stage[i].end, cluster->name, cluster->submesh[at->stage[i].s].n,
                           cluster->submesh[at->stage[i].s].m);
    }
}

static void extend_blocking(struct blocking_search *at, int layer, int current)
{
    if (layer == at->profile->layer_count) {
        price_blocking(at);
        return;
    }
    for (int c = 0; c < 2; c++) {
        const struct hapt_profile_cluster *cluster = &at->profile->cluster[c];
        if (c != current && at->used[c] > 0) continue;
        for (int s = 0; s < cluster->submesh_count; s++) {
            const int devices = cluster->submesh[s].n * cluster->submesh[s].m;
            if (at->used[c] + devices > 4) continue;
            for (int end = layer + 1; end <= at->profile->layer_count; end++) {
                at->stage[at->stages].first = layer, at->stage[at->stages].end = end;
                at->stage[at->stages].c = c, at->stage[at->stages].s = s;
                at->stages++;
                at->used[c] += devices;
                extend_blocking(at, end, c);
                at->used[c] -= devices;
                at->stages--;
            }
        }
    }
}

/* No plan that is optimal by HexiScale's cost is simulated faster than its choice. */
static void hexiscale_minimises_its_own_cost(void)
{
    const int count = test_long() ? 5000 : 300;
    long crossings = 0;
    for (int i = 0; i < count; i++) {
        struct hapt_arena arena;
        uint64_t seed = (uint64_t)i + 1;
        hapt_arena_init(&arena);
        struct hapt_profile *profile =
            two_subclusters(&seed, 2 + i % 5, (double[2]){1, 1 + 0.25 * (i % 9)}, i % 3 ? 100 : 3, &arena);
        for (int l = 0; l < profile->layer_count - 1; l++) profile->boundary_bytes[l] *= i % 2 ? 0.3 : 1;
        struct blocking_search best = {
            .profile = profile,
            .options = {.microbatches = 1 << i % 7, .schedule = HAPT_SCHEDULE_1F1B, .hide_threshold = 0.02},
            .least_s = INFINITY};
        struct hapt_strategy_options options = {.search = best.options};
        struct hapt_plan *plan;
        extend_blocking(&best, 0, -1);
        CHECK_OK(hapt_plan_by_strategy(MPI_COMM_SELF, profile, HAPT_STRATEGY_HEXISCALE, &options, &arena, &plan, NULL));
        CHECK(plan->schedule == HAPT_SCHEDULE_1F1B && plan->blocking);
        char text[TEXT];
        describe(plan, text);
        const double enumerated_s = priced_s(profile, &best.options, best.best, true, &arena);
        CHECK_MESSAGE(plan->simulated_s <= enumerated_s * (1 + 1e-12),
                      "seed %d: hexiscale takes %s: %.17g, not %s: %.17g", i + 1, text, plan->simulated_s, best.best,
                      enumerated_s);
        CHECK(plan->simulated_s == priced_s(profile, &best.options, text, true, &arena));
        CHECK(plan->simulated_s >= priced_s(profile, &best.options, text, false, &arena) * (1 - 1e-12));
        crossings += plan->stage[0].submesh->subcluster[0] != plan->stage[plan->stage_count - 1].submesh->subcluster[0];
        hapt_arena_release(&arena);
    }
    printf("%ld of %d hexiscale plans use both subclusters\n", crossings, count);
    CHECK(crossings > 0 && crossings < count);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    RUN(megatron_equals_enumeration);
    RUN(megatron_without_blocks);
    RUN(equal_weights);
    RUN(pfeife_cuts_figure_4);
    RUN(pfeife_on_equal_devices);
    RUN(alpa_takes_devices_for_identical);
    RUN(alpa_meets_memory);
    RUN(hexiscale_minimises_its_own_cost);
    return test_finish();
}
