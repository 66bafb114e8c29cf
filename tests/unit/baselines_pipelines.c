/* Independent pipelines of Megatron and HexiScale, against steps that this test computes on its own. */
#include "hapt/baselines.h"
#include "random_profile.h"

enum { SUBCLUSTERS = 2, LAYERS = 9, STAGES = 3, MICROBATCHES = 10 };

/* Costs of each layer on a device. */
struct instance {
    double layer_s[SUBCLUSTERS][LAYERS], layer_bytes[LAYERS], layer_step_s;
    double link_bytes_per_s, link_latency_s;
};

static struct instance random_instance(uint64_t *seed)
{
    struct instance instance = {.layer_step_s = hapt_random_unit(seed),
                                .link_bytes_per_s = 0.01 + hapt_random_unit(seed),
                                .link_latency_s = 0.1 * hapt_random_unit(seed)};
    const double slow = 1 + 2 * hapt_random_unit(seed);
    for (int l = 0; l < LAYERS; l++) {
        instance.layer_s[0][l] = 0.5 + hapt_random_unit(seed);
        instance.layer_s[1][l] = slow * instance.layer_s[0][l];
        instance.layer_bytes[l] = 9 * hapt_random_unit(seed);
    }
    return instance;
}

static double sum(const double *value, int first, int end)
{
    double total = 0;
    for (int l = first; l < end; l++) total += value[l];
    return total;
}

/* Two subclusters of one node with `devices` devices; stages run on single devices only. */
static struct hapt_profile *make_profile(const struct instance *instance, int devices, struct hapt_arena *arena)
{
    struct hapt_profile *profile;
    CHECK_OK(hapt_profile_create(LAYERS, SUBCLUSTERS, arena, &profile));
    for (int c = 0; c < SUBCLUSTERS; c++) {
        CHECK_OK(random_profile_cluster(profile, c, c ? "slow" : "fast", 1, devices, 1e6, 1.0 / (c + 1), arena));
        struct hapt_profile_cluster *cluster = &profile->cluster[c];
        for (int s = 0; s < cluster->submesh_count; s++)
            for (int i = 0; i < LAYERS; i++)
                for (int j = i; j < LAYERS; j++) {
                    const size_t cell = hapt_profile_index(profile, s, i, j);
                    const double time_s = sum(instance->layer_s[c], i, j + 1);
                    cluster->stage_time[cell] = cluster->submesh[s].m == 1 ? time_s : NAN;
                    cluster->stage_forward_time[cell] = time_s / 3;
                    cluster->parameter_bytes[cell] = sum(instance->layer_bytes, i, j + 1) + 5;
                    cluster->activation_bytes[cell] = 1;
                    cluster->step_time[cell] = (j - i + 1) * instance->layer_step_s;
                }
    }
    for (int l = 0; l < LAYERS; l++) profile->boundary_bytes[l] = 0;
    for (int link = 0; link < SUBCLUSTERS * SUBCLUSTERS; link++) {
        const bool inside = link % (SUBCLUSTERS + 1) == 0;
        profile->link_bandwidth[link] = inside ? 1e12 : instance->link_bytes_per_s;
        profile->link_latency[link] = inside ? 0 : instance->link_latency_s;
    }
    return profile;
}

/* 16-bit messages of AdamW's 18 resident bytes, once over the link between two subclusters. */
static double ring_s(const struct instance *instance, int first, int end)
{
    return sum(instance->layer_bytes, first, end) / 9 / instance->link_bytes_per_s + 2 * instance->link_latency_s;
}

/* ---- Megatron ---- */

/* 1F1B with free transfers: ended_s[i] is the end of the last backward pass of stage i. */
static void play_1f1b(const double *stage_s, int microbatches, double *ended_s)
{
    double forward[STAGES][MICROBATCHES] = {{0}}, backward[STAGES][MICROBATCHES] = {{0}};
    for (int round = 0; round < 2 * STAGES * microbatches; round++) /* until nothing changes */
        for (int i = 0; i < STAGES; i++) {
            const int first = STAGES - i < microbatches ? STAGES - i : microbatches;
            double now_s = 0;
            for (int k = 0; k < 2 * microbatches; k++) {
                const int turn = k < first ? 0 : (k - first) % 2; /* after the first forwards: backward, forward, ... */
                const int forwards = k < first ? k : first + (k - first) / 2;
                const bool is_forward = k < first || (turn == 1 && forwards < microbatches);
                const int b = is_forward ? forwards : forwards < microbatches ? (k - first) / 2 : k - microbatches;
                if (is_forward) {
                    if (i > 0) now_s = fmax(now_s, forward[i - 1][b]);
                    now_s = forward[i][b] = now_s + stage_s[i] / 3;
                } else {
                    if (i < STAGES - 1) now_s = fmax(now_s, backward[i + 1][b]);
                    now_s = backward[i][b] = now_s + stage_s[i] * 2 / 3;
                }
            }
            ended_s[i] = backward[i][microbatches - 1];
        }
}

/* Two pipelines of three stages, one on each subcluster: with 10 microbatches and 6 devices Megatron has no others. */
static void megatron_once(uint64_t start)
{
    uint64_t seed = start;
    struct hapt_arena arena;
    struct hapt_pipelines *pipelines;
    bool block_end[LAYERS], done[STAGES] = {false};
    double ended_s[SUBCLUSTERS][STAGES], stage_s[STAGES], link_s = 0, step_s = 0;
    const struct instance instance = random_instance(&seed);
    hapt_arena_init(&arena);
    for (int l = 0; l < LAYERS; l++) block_end[l] = true;
    struct hapt_profile *profile = make_profile(&instance, STAGES, &arena);
    const struct hapt_strategy_options options = {.search = {.microbatches = MICROBATCHES, .hide_threshold = 0.02},
                                                  .block_end = block_end};
    CHECK_OK(hapt_plan_pipelines(MPI_COMM_SELF, profile, HAPT_STRATEGY_MEGATRON, &options, &arena, &pipelines));
    if (!CHECK(pipelines && pipelines->count == 2 && pipelines->microbatches == MICROBATCHES)) return;
    const double update_s = LAYERS / STAGES * instance.layer_step_s;
    for (int c = 0; c < SUBCLUSTERS; c++) {
        for (int i = 0; i < STAGES; i++)
            stage_s[i] = sum(instance.layer_s[c], i * LAYERS / STAGES, (i + 1) * LAYERS / STAGES);
        play_1f1b(stage_s, MICROBATCHES / 2, ended_s[c]);
    }
    for (int count = 0; count < STAGES; count++) { /* the gradients that are ready first are reduced first */
        int next = -1;
        for (int i = 0; i < STAGES; i++)
            if (!done[i] && (next < 0 || fmax(ended_s[0][i], ended_s[1][i]) < fmax(ended_s[0][next], ended_s[1][next])))
                next = i;
        done[next] = true;
        link_s = fmax(link_s, fmax(ended_s[0][next], ended_s[1][next])) +
                 ring_s(&instance, next * LAYERS / STAGES, (next + 1) * LAYERS / STAGES);
        step_s = fmax(step_s, link_s + update_s);
    }
    CHECK_MESSAGE(fabs(pipelines->simulated_s / step_s - 1) < 1e-9, "seed %llu: %.12g s, not %.12g",
                  (unsigned long long)start, pipelines->simulated_s, step_s);
    CHECK(pipelines->reduce_s > 0);
    hapt_arena_release(&arena);
}

static void megatron_against_recurrence(void)
{
    const int count = test_long() ? 5000 : 300;
    for (int i = 0; i < count; i++) megatron_once((uint64_t)i + 1);
}

/* `count` pipelines of one stage on `wide` nodes each, in one subcluster: reduced over the nodes' network. */
static void inside_once(uint64_t start, int count, int wide)
{
    enum { B = 30 };
    uint64_t seed = start;
    struct hapt_arena arena;
    struct hapt_profile *profile;
    struct hapt_pipelines *pipelines;
    const double layer_s = 0.5 + hapt_random_unit(&seed), bytes = 9 * hapt_random_unit(&seed);
    const double bandwidth = 0.01 + hapt_random_unit(&seed), latency_s = hapt_random_unit(&seed);
    hapt_arena_init(&arena);
    CHECK_OK(hapt_profile_create(2, 1, &arena, &profile));
    CHECK_OK(random_profile_cluster(profile, 0, "gpu", count * wide, 1, 1e6, 1, &arena));
    struct hapt_profile_cluster *cluster = &profile->cluster[0];
    profile->precision = HAPT_PRECISION_FP32;
    for (int s = 0; s < cluster->submesh_count; s++)
        for (int i = 0; i < 2; i++)
            for (int j = i; j < 2; j++) {
                const size_t cell = hapt_profile_index(profile, s, i, j);
                const int n = cluster->submesh[s].n;
                const double time_s = (j - i + 1) * layer_s * (n == wide ? 1 : 1e6); /* other submeshes are of no use */
                cluster->stage_time[cell] = n == 1 || n == wide ? time_s : NAN;
                cluster->stage_forward_time[cell] = time_s / 3;
                cluster->parameter_bytes[cell] = (j - i + 1) * bytes;
                cluster->activation_bytes[cell] = 1;
                cluster->step_time[cell] = 0.25;
            }
    profile->link_bandwidth[0] = bandwidth;
    profile->link_latency[0] = latency_s;
    const struct hapt_strategy_options options = {.search = {.microbatches = B, .hide_threshold = 0.02}};
    CHECK_OK(hapt_plan_pipelines(MPI_COMM_SELF, profile, HAPT_STRATEGY_MEGATRON, &options, &arena, &pipelines));
    if (!CHECK(pipelines && pipelines->count == count)) return;
    /* fp32: messages of 4 of 16 resident bytes; a ring sends (count - 1) parts twice, each node its own share */
    const double ring_s = 2 * (count - 1) * (2 * bytes / 4 / wide / count / bandwidth + latency_s);
    CHECK_NEAR(pipelines->simulated_s, B / count * 2 * layer_s + ring_s + 0.25, 1e-9 * pipelines->simulated_s);
    hapt_arena_release(&arena);
}

static void megatron_inside_a_subcluster(void)
{
    for (uint64_t start = 1; start <= 50; start++) {
        inside_once(start, 3, 1);
        inside_once(start, 3, 2);
        inside_once(start, 2, 3);
    }
}

/* ---- HexiScale ---- */

/* Two devices, a pipeline of one stage on each: the best division of the microbatches by trying all. */
static void hexiscale_divides_microbatches(void)
{
    const int count = test_long() ? 2000 : 200, B = 24;
    int best_found = 0, faster_than_halves = 0;
    for (int start = 1; start <= count; start++) {
        uint64_t seed = (uint64_t)start;
        struct hapt_arena arena;
        struct hapt_pipelines *pipelines;
        double least_s = INFINITY, halves_s = 0, pass_s[SUBCLUSTERS];
        const struct instance instance = random_instance(&seed);
        hapt_arena_init(&arena);
        struct hapt_profile *profile = make_profile(&instance, 1, &arena);
        const struct hapt_strategy_options options = {
            .search = {.microbatches = B, .hide_threshold = 0.02, .may_fail = true}};
        CHECK_OK(hapt_plan_pipelines(MPI_COMM_SELF, profile, HAPT_STRATEGY_HEXISCALE, &options, &arena, &pipelines));
        for (int c = 0; c < SUBCLUSTERS; c++) pass_s[c] = sum(instance.layer_s[c], 0, LAYERS);
        const double once_s = ring_s(&instance, 0, LAYERS) + LAYERS * instance.layer_step_s;
        for (int b = 1; b < B; b++) {
            const double step_s = fmax(b * pass_s[0], (B - b) * pass_s[1]) + once_s;
            least_s = fmin(least_s, step_s);
            if (b == B / 2) halves_s = step_s;
        }
        if (!CHECK(pipelines && pipelines->count == 2 && pipelines->microbatches == B)) return;
        CHECK_MESSAGE(pipelines->simulated_s >= least_s * (1 - 1e-9) && pipelines->simulated_s <= least_s + pass_s[1],
                      "seed %d: %g s, the best division takes %g", start, pipelines->simulated_s, least_s);
        best_found += pipelines->simulated_s <= least_s * (1 + 1e-9);
        faster_than_halves += pipelines->simulated_s < halves_s * (1 - 1e-9);
        hapt_arena_release(&arena);
    }
    printf("the best division in %d of %d cases, faster than halves in %d\n", best_found, count, faster_than_halves);
    CHECK(best_found > count * 8 / 10 && faster_than_halves > count / 2);
}

/* Two pipelines that cross the link between subclusters in step share it: each has half of its bandwidth. A device
 * holds one layer of two, and the gradients of pipelines that do not cross it would take longer. */
static void hexiscale_shares_the_link(void)
{
    struct hapt_arena arena;
    struct hapt_profile *profile;
    struct hapt_pipelines *pipelines;
    hapt_arena_init(&arena);
    CHECK_OK(hapt_profile_create(2, 2, &arena, &profile));
    for (int c = 0; c < 2; c++) {
        CHECK_OK(random_profile_cluster(profile, c, c ? "b" : "a", 2, 1, 1000, 1, &arena));
        struct hapt_profile_cluster *cluster = &profile->cluster[c];
        for (int s = 0; s < cluster->submesh_count; s++)
            for (int i = 0; i < 2; i++)
                for (int j = i; j < 2; j++) {
                    const size_t cell = hapt_profile_index(profile, s, i, j);
                    cluster->stage_time[cell] = cluster->submesh[s].n == 1 ? j - i + 1 : NAN;
                    cluster->stage_forward_time[cell] = cluster->stage_time[cell] / 3;
                    cluster->parameter_bytes[cell] = 900 * (j - i + 1);
                    cluster->activation_bytes[cell] = 1;
                    cluster->step_time[cell] = 0;
                }
    }
    profile->boundary_bytes[0] = 0.1;
    for (int link = 0; link < 4; link++) {
        profile->link_bandwidth[link] = link % 3 == 0 ? 1e12 : 1;
        profile->link_latency[link] = 0;
    }
    const struct hapt_strategy_options options = {
        .search = {.microbatches = 8, .hide_threshold = 0.02, .may_fail = true}};
    CHECK_OK(hapt_plan_pipelines(MPI_COMM_SELF, profile, HAPT_STRATEGY_HEXISCALE, &options, &arena, &pipelines));
    if (!CHECK(pipelines && pipelines->count == 2)) return;
    for (int p = 0; p < 2; p++) {
        const struct hapt_plan *plan = pipelines->plan[p];
        if (!CHECK(plan->stage_count == 2 && plan->microbatches == 4)) continue;
        CHECK(plan->stage[0].submesh->subcluster[0] != plan->stage[1].submesh->subcluster[0]);
        CHECK_NEAR(plan->stage[0].comm_s, 0.2, 1e-12);
    }
    hapt_arena_release(&arena);
}

/* Two pipelines of one device each. AdamW's 12 of 18 bytes are sharded over both: of 1800 bytes 1200 stay. */
static void hexiscale_shards_state(void)
{
    for (int memory = 1199; memory <= 1210; memory += 11) {
        struct hapt_arena arena;
        struct hapt_pipelines *pipelines;
        struct instance instance = {.link_bytes_per_s = 1};
        hapt_arena_init(&arena);
        for (int l = 0; l < LAYERS; l++) {
            instance.layer_s[0][l] = instance.layer_s[1][l] = 1;
            instance.layer_bytes[l] = 1800.0 / LAYERS;
        }
        struct hapt_profile *profile = make_profile(&instance, 1, &arena);
        for (int c = 0; c < SUBCLUSTERS; c++) profile->cluster[c].device_memory_bytes = memory;
        const struct hapt_strategy_options options = {
            .search = {.microbatches = 4, .hide_threshold = 0.02, .may_fail = true}};
        CHECK_OK(hapt_plan_pipelines(MPI_COMM_SELF, profile, HAPT_STRATEGY_HEXISCALE, &options, &arena, &pipelines));
        if (memory < 1200)
            CHECK(!pipelines);
        else if (CHECK(pipelines && pipelines->count == 2)) /* 5 bytes beside the layers, 1 of activations */
            CHECK_NEAR(pipelines->plan[0]->stage[0].memory_bytes, 1206, 1e-9);
        hapt_arena_release(&arena);
    }
}

/* On random profiles: devices are used once, microbatches are complete, and unequal tensor-parallel degrees and unequal
 * pipelines occur. */
static void hexiscale_pipelines_are_sound(void)
{
    const int count = test_long() ? 2000 : 150;
    int found = 0, unequal_degrees = 0, unequal_pipelines = 0;
    for (int start = 1; start <= count; start++) {
        uint64_t seed = (uint64_t)start;
        struct hapt_arena arena;
        struct hapt_pipelines *pipelines;
        hapt_arena_init(&arena);
        struct hapt_profile *profile =
            random_profile_of(&seed, 1 + random_below(&seed, 3), 3 + random_below(&seed, 5), &arena);
        struct hapt_strategy_options options = {.search = random_options(&seed)};
        options.search.may_fail = true;
        CHECK_OK(hapt_plan_pipelines(MPI_COMM_SELF, profile, HAPT_STRATEGY_HEXISCALE, &options, &arena, &pipelines));
        for (int p = 0, used[HAPT_MAX_SUBCLUSTERS] = {0}, all = 0; pipelines && p < pipelines->count; p++) {
            const struct hapt_plan *plan = pipelines->plan[p];
            all += plan->microbatches;
            CHECK(plan->blocking && plan->simulated_s <= pipelines->simulated_s);
            CHECK(plan->stage[plan->stage_count - 1].end_layer == profile->layer_count);
            for (int i = 0; i < plan->stage_count; i++) {
                const struct hapt_plan_submesh *submesh = plan->stage[i].submesh;
                const int c = submesh->subcluster[0];
                CHECK(strcmp(submesh->name, profile->cluster[c].name) == 0);
                used[c] += hapt_plan_submesh_size(submesh);
                unequal_degrees += plan->stage[i].layout.tensor_parallel != plan->stage[0].layout.tensor_parallel;
            }
            for (int c = 0; c < profile->cluster_count; c++)
                CHECK(used[c] <= profile->cluster[c].nodes * profile->cluster[c].devices_per_node);
            unequal_pipelines += plan->microbatches != pipelines->plan[0]->microbatches;
            if (p == pipelines->count - 1) CHECK(all == options.search.microbatches && ++found > 0);
        }
        hapt_arena_release(&arena);
    }
    printf("%d of %d profiles have pipelines; %d stages of other degrees, %d pipelines of other microbatches\n", found,
           count, unequal_degrees, unequal_pipelines);
    CHECK(found > count / 10 && unequal_degrees > 0 && unequal_pipelines > 0);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    RUN(megatron_against_recurrence);
    RUN(megatron_inside_a_subcluster);
    RUN(hexiscale_divides_microbatches);
    RUN(hexiscale_shares_the_link);
    RUN(hexiscale_shards_state);
    RUN(hexiscale_pipelines_are_sound);
    return test_finish();
}
