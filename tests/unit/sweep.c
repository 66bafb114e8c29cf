/* Sweeps compared with single searches on changed profiles; knees in closed form; invalid arguments. */
#include "hapt/search.h"
#include "hapt/sweep.h"
#include "random_profile.h"

static struct hapt_sweep *sweep_of(const struct hapt_profile *profile, const struct hapt_search_options *options,
                                   const char *text, struct hapt_arena *arena)
{
    struct hapt_sweep_range *range;
    struct hapt_sweep *sweep = NULL;
    int count;
    const struct hapt_sweep_question question = {.profile = profile, .options = options};
    CHECK_OK(hapt_sweep_parse(text, arena, &range, &count));
    CHECK(count == 1);
    CHECK_OK(hapt_sweep_run(&test_env, &question, range, arena, &sweep));
    return sweep;
}

/* One search on a copy of the profile, changed as a user would change the file. */
static double single(const struct hapt_profile *profile, struct hapt_search_options options, enum hapt_sweep_kind kind,
                     double value, struct hapt_arena *arena)
{
    struct hapt_profile *copy;
    struct hapt_plan *plan;
    CHECK_OK(hapt_profile_copy(profile, arena, &copy));
    const int C = copy->cluster_count;
    for (int link = 0; kind == HAPT_SWEEP_LINK && link < C * C; link++)
        if (link / C != link % C) copy->link_bandwidth[link] = value;
    if (kind == HAPT_SWEEP_MEMORY) copy->cluster[0].device_memory_bytes = value;
    if (kind == HAPT_SWEEP_MICROBATCHES) options.microbatches = (int)value;
    if (kind == HAPT_SWEEP_NODES) {
        copy->cluster[0].nodes = (int)value;
        while (copy->cluster[0].submesh[copy->cluster[0].submesh_count - 1].n > (int)value)
            copy->cluster[0].submesh_count--;
    }
    options.may_fail = true;
    const enum hapt_status status = hapt_plan_search(MPI_COMM_SELF, copy, &options, arena, &plan);
    hapt_fail_reset();
    return status == HAPT_OK ? plan->latency_s : INFINITY;
}

static bool has_candidates(const struct hapt_profile *profile)
{
    const enum hapt_status status = hapt_profile_check(profile);
    hapt_fail_reset();
    return status == HAPT_OK;
}

static void points_equal_single_searches(void)
{
    const int count = test_long() ? 2000 : 120;
    long points[4] = {0};
    for (uint64_t start = 1; start <= (uint64_t)count; start++) {
        uint64_t seed = start;
        struct hapt_arena arena;
        hapt_arena_init(&arena);
        struct hapt_profile *profile = random_profile(&seed, &arena);
        const struct hapt_search_options options = random_options(&seed);
        char nodes[64];
        snprintf(nodes, sizeof nodes, "nodes.sub0=1..%d", profile->cluster[0].nodes);
        const char *const texts[4] = {"link=0.5..50B/s:5", nodes, "memory.sub0=2..20B:5", "microbatches=1..40:5"};
        for (int k = 0; k < 4; k++) {
            if (!has_candidates(profile) || (k == HAPT_SWEEP_LINK && profile->cluster_count < 2)) continue;
            const struct hapt_sweep *sweep = sweep_of(profile, &options, texts[k], &arena);
            if (!sweep) continue;
            for (int i = 0; i < sweep->count; i++) {
                const struct hapt_sweep_point *point = &sweep->point[i];
                const double alone_s = single(profile, options, (enum hapt_sweep_kind)k, point->value, &arena);
                CHECK_MESSAGE(alone_s == (point->plan ? point->plan->latency_s : INFINITY),
                              "seed %llu: %s at %g takes %.17g alone", (unsigned long long)start, texts[k],
                              point->value, alone_s);
                CHECK(point->plan || point->obstacle[0]);
                points[k]++;
            }
            CHECK(sweep->point[0].value == sweep->range->low &&
                  sweep->point[sweep->count - 1].value == sweep->range->high);
        }
        hapt_arena_release(&arena);
    }
    for (int k = 0; k < 4; k++) CHECK(points[k] > count / 4);
}

/* Subclusters of `nodes` devices and two layers, one per stage. One device takes `seconds` per layer; n devices take
 * 1/n of it. */
static struct hapt_profile *pair_of(int nodes, double seconds, double bytes, double latency_s, struct hapt_arena *arena)
{
    struct hapt_profile *profile;
    CHECK_OK(hapt_profile_create(2, 2, arena, &profile));
    for (int c = 0; c < 2; c++) {
        CHECK_OK(random_profile_cluster(profile, c, c ? "b" : "a", nodes, 1, 1000, 1, arena));
        struct hapt_profile_cluster *cluster = &profile->cluster[c];
        for (int s = 0; s < cluster->submesh_count; s++) {
            for (int layer = 0; layer < 2; layer++) {
                const size_t cell = hapt_profile_index(profile, s, layer, layer);
                cluster->stage_time[cell] = seconds / cluster->submesh[s].n;
                cluster->stage_forward_time[cell] = cluster->stage_time[cell] / 3;
                cluster->parameter_bytes[cell] = 10;
                cluster->activation_bytes[cell] = 1;
            }
        }
    }
    profile->boundary_bytes[0] = bytes;
    for (int link = 0; link < 4; link++) {
        profile->link_bandwidth[link] =
            link == 0 || link == 3 ? 1e-3 : 1e6; /* inside a subcluster communication would take too long */
        profile->link_latency[link] = latency_s;
    }
    return profile;
}

static void knees_in_closed_form(void)
{
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const double latency_s = 0.125, bytes = 1e6, B = 64;
    const struct hapt_search_options options = {
        .microbatches = (int)B, .schedule = HAPT_SCHEDULE_H1F1B, .hide_threshold = 0.02};
    struct hapt_profile *profile = pair_of(1, 1, bytes, latency_s, &arena);
    const struct hapt_sweep *sweep = sweep_of(profile, &options, "link=0.5..25MB/s", &arena);
    /* c = latency + bytes / w equals the stages' 1 s */
    CHECK_NEAR(sweep->balance_bandwidth, bytes / (1 - latency_s), 1e-6);
    /* T(w) = 2 + 2 c + (B - 1) = 1.01 T(25 MB/s) */
    const double high_s = 2 + 2 * (latency_s + bytes / 25e6) + B - 1;
    const double comm_s = (1.01 * high_s - (B + 1)) / 2;
    CHECK(comm_s < 1);
    CHECK_NEAR(sweep->knee / (bytes / (comm_s - latency_s)), 1, 1.001e-3);
    for (int i = 0; i < sweep->count; i++) {
        const struct hapt_sweep_point *point = &sweep->point[i];
        const double c = latency_s + bytes / point->value, t_max_s = fmax(1, c);
        CHECK_NEAR(point->plan->latency_s, 2 + 2 * c + (B - 1) * t_max_s, 1e-9);
        CHECK(strcmp(point->plan->limit, c > 1 ? "link" : "compute") == 0);
        CHECK_NEAR(point->link_s, c, 1e-12);
    }
    CHECK(isnan(sweep_of(profile, &options, "link=0.1..0.5MB/s", &arena)->knee)); /* still the limit */
    CHECK(isnan(sweep_of(profile, &options, "link=0.1..0.5MB/s", &arena)->balance_bandwidth));
    CHECK_NEAR(sweep_of(profile, &options, "link=20..25MB/s", &arena)->knee, 20e6, 1e-6); /* flat throughout */
    CHECK(sweep_of(profile, &options, "link=b-a:7MB/s", &arena)->count == 1);
    hapt_arena_reset(&arena);
    /* n nodes of b take 1 / n of the time; a's one node stays at 1, so the second node of b gains little */
    profile = pair_of(4, 1, bytes, 0, &arena);
    for (int s = 1; s < 4; s++)
        for (int layer = 0; layer < 2; layer++)
            profile->cluster[0].stage_time[hapt_profile_index(profile, s, layer, layer)] = NAN;
    sweep = sweep_of(profile, &options, "nodes.b=1..4", &arena);
    CHECK(sweep->count == 4 && sweep->knee == 1);
    /* the stages take 1 s and 1 / n s: T = 1 + 1 / n + 2 c + (B - 1) */
    for (int i = 0; i < 4; i++) CHECK_NEAR(sweep->point[i].plan->latency_s, 1 + 1.0 / (i + 1) + 2 + B - 1, 1e-9);
    hapt_arena_reset(&arena);
    /* the last stage has 10 bytes and one launch of 1 byte: b before a is the best plan from 11 bytes on, and no plan
     * exists below */
    profile = pair_of(1, 1, 0.8e6, 0, &arena);
    sweep = sweep_of(profile, &options, "memory.a=10..30B:3", &arena);
    CHECK(!sweep->point[0].plan && strstr(sweep->point[0].obstacle, "memory"));
    CHECK_NEAR(sweep->point[1].plan->latency_s, 2 + 1.6 + B - 1, 1e-9);
    CHECK(sweep->knee >= 11 - 1e-9 && sweep->knee <= 11 * 1.001);
    hapt_arena_reset(&arena);
    /* a microbatch costs t + (2 t + 2 c - t) / B */
    profile = pair_of(1, 1, 0, 0, &arena);
    sweep = sweep_of(profile, &options, "microbatches=1..1000", &arena);
    int least = 1;
    while (1 + 1.0 / least > 1.02 * (1 + 1.0 / 1000)) least++;
    CHECK(sweep->knee == least);
    hapt_arena_release(&arena);
}

static void words(void)
{
    static const char *const bad[] = {"",
                                      "link=1..25",
                                      "link=25",
                                      "link=1Gbit/s..25",
                                      "memory.a=1..2",
                                      "link",
                                      "link=",
                                      "link=fast",
                                      "link=1..Gbit/s",
                                      "link=..25Gbit/s",
                                      "link=25..1Gbit/s",
                                      "link=0..1Gbit/s",
                                      "link=-1..1Gbit/s",
                                      "link=1..25Gb/s",
                                      "link=1..25Gbit/s:1",
                                      "link=1..25Gbit/s:many",
                                      "link=1..25Gbit/s:5000",
                                      "link=:1..25Gbit/s",
                                      "link=1..25GB",
                                      "nodes=1..8",
                                      "nodes.=1..8",
                                      "nodes.a=0..8",
                                      "nodes.a=1.5..8",
                                      "nodes.a=1..8x",
                                      "memory.a=1..8Gbit/s",
                                      "microbatches=0..8",
                                      "microbatches.a=1..8",
                                      "bandwidth=1..8",
                                      "link=1..2GB/s,",
                                      ",link=1..2GB/s",
                                      "link=1..2GB/s;nodes.a=1..8"};
    struct hapt_arena arena;
    struct hapt_sweep_range *range;
    struct hapt_sweep *sweep;
    int count;
    hapt_arena_init(&arena);
    for (size_t k = 0; k < sizeof bad / sizeof bad[0]; k++) {
        const enum hapt_status status = hapt_sweep_parse(bad[k], &arena, &range, &count);
        CHECK_MESSAGE(status == HAPT_ERR_USAGE && strstr(hapt_fail_hint(), "link=1..25Gbit/s"), "\"%s\" is read",
                      bad[k]);
        hapt_fail_reset();
    }
    CHECK_OK(hapt_sweep_parse("host-memory=64..512GB,host-bandwidth.v=4GB/s", &arena, &range, &count));
    CHECK(count == 2 && range[0].kind == HAPT_SWEEP_HOST_MEMORY && !*range[0].subject && range[0].high == 512e9);
    CHECK(range[1].kind == HAPT_SWEEP_HOST_BANDWIDTH && strcmp(range[1].subject, "v") == 0 && range[1].low == 4e9);
    CHECK_OK(hapt_sweep_parse("inter-node.v=1..25Gbit/s:3,intra-node=8..64GB/s", &arena, &range, &count));
    CHECK(count == 2 && range[0].kind == HAPT_SWEEP_INTER_NODE && strcmp(range[0].subject, "v") == 0);
    CHECK(range[1].kind == HAPT_SWEEP_INTRA_NODE && !*range[1].subject && range[1].low == 8e9);
    CHECK_OK(hapt_sweep_parse("link=x:y-z:500Mbit/s..25Gbit/s:7,memory.v:100=1..2GiB", &arena, &range, &count));
    CHECK(count == 2 && range[0].points == 7 && strcmp(range[0].subject, "x:y-z") == 0 && range[0].low == 62.5e6);
    CHECK(strcmp(range[1].subject, "v:100") == 0 && range[1].low == 0x1p30 && range[1].high == 0x1p31);
    const struct hapt_profile *profile = pair_of(2, 1, 1, 0, &arena);
    const struct hapt_search_options options = {
        .microbatches = 4, .schedule = HAPT_SCHEDULE_H1F1B, .hide_threshold = 0.02};
    const struct hapt_sweep_question question = {.profile = profile, .options = &options};
    static const char *const unknown[] = {"link=a-c:1..2GB/s",         "link=a-a:1..2GB/s",   "nodes.c=1..2",
                                          "memory.ab=1..2GB",          "nodes.a=1..3",        "host-memory=1..2GB",
                                          "host-bandwidth.a=1..2GB/s", "inter-node=1..2GB/s", "intra-node.a=1..2GB/s"};
    for (size_t k = 0; k < sizeof unknown / sizeof unknown[0]; k++) {
        CHECK_OK(hapt_sweep_parse(unknown[k], &arena, &range, &count));
        CHECK_FAILS(hapt_sweep_run(&test_env, &question, range, &arena, &sweep), HAPT_ERR_USAGE);
    }
    hapt_arena_release(&arena);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    RUN(points_equal_single_searches);
    RUN(knees_in_closed_form);
    RUN(words);
    return test_finish();
}
