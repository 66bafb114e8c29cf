/* Costs of collectives: what a fit finds again in noisy samples, rings over links, and the devices of a submesh. */
#include "test.h"

#include "hapt/collective_cost.h"

enum { SAMPLES = 60 };

static double normal(uint64_t *seed)
{
    double sum = -6;
    for (int k = 0; k < 12; k++) sum += hapt_random_unit(seed);
    return sum;
}

static double cost(const struct hapt_collective_term *term, int ranks, double bytes, double share)
{
    return term->latency_s + bytes * (term->byte_s + term->skew_s * (ranks * share - 1));
}

/* Sizes from 1 KiB to 64 MiB, and shares from even to nearly all on one rank. */
static int draw(const struct hapt_collective_term *truth, int ranks, double noise, bool skews, uint64_t *seed,
                struct hapt_collective_sample *sample)
{
    for (int i = 0; i < SAMPLES; i++) {
        const double bytes = exp2(10 + 16.0 * i / (SAMPLES - 1)), even = 1.0 / ranks;
        const double share = skews && i % 3 ? even + (0.95 - even) * hapt_random_unit(seed) : even;
        sample[i] = (struct hapt_collective_sample){bytes, share,
                                                    cost(truth, ranks, bytes, share) * (1 + noise * normal(seed))};
    }
    return SAMPLES;
}

static void fit_recovers(void)
{
    const int cases = test_long() ? 5000 : 300;
    for (int c = 0; c < cases; c++) {
        uint64_t seed = (uint64_t)c + 1;
        struct hapt_collective_sample sample[SAMPLES];
        const int ranks = 2 + (int)(hapt_random_next(&seed) % 31), kind = c % 3;
        const double byte_s = pow(10, -11 + 4 * hapt_random_unit(&seed));
        /* The size at which latency and bytes take equally long is within the sizes. */
        struct hapt_collective_term found, truth = {exp2(13 + 8 * hapt_random_unit(&seed)) * byte_s, byte_s, 0};
        if (kind == 0) truth.skew_s = byte_s;
        if (kind == 1) truth.skew_s = byte_s * hapt_random_unit(&seed);
        const int count = draw(&truth, ranks, 0.03, true, &seed, sample);
        sample[7].time_s *= 5; /* an outlier */
        CHECK(hapt_collective_fit(HAPT_COLLECTIVE_ALL_GATHER, ranks, count, sample, &found));
        /* 60 samples with 3 % noise determine each coefficient to about 2 %; the tolerance is 5 sigma. Noise limits a
         * skew's precision to a part of the bytes' cost. */
        CHECK_MESSAGE(fabs(found.latency_s / truth.latency_s - 1) < 0.1, "seed %d: latency %g, true %g", c + 1,
                      found.latency_s, truth.latency_s);
        CHECK_MESSAGE(fabs(found.byte_s / truth.byte_s - 1) < 0.1, "seed %d: %g s a byte, true %g", c + 1, found.byte_s,
                      truth.byte_s);
        CHECK_MESSAGE(fabs(found.skew_s - truth.skew_s) < 0.1 * truth.byte_s, "seed %d: skew %g, true %g", c + 1,
                      found.skew_s, truth.skew_s);
    }
}

static void fit_without_skew(void)
{
    const struct hapt_collective_term truth = {2e-5, 1e-10, 0};
    struct hapt_collective_sample sample[SAMPLES];
    struct hapt_collective_term found;
    uint64_t seed = 3;
    const int count = draw(&truth, 4, 0, false, &seed, sample);
    CHECK(hapt_collective_fit(HAPT_COLLECTIVE_ALL_GATHER, 4, count, sample, &found));
    CHECK_NEAR(found.latency_s, 2e-5, 1e-11);
    CHECK_NEAR(found.byte_s, 1e-10, 1e-16);
    CHECK(found.skew_s == found.byte_s);
    CHECK(hapt_collective_fit(HAPT_COLLECTIVE_GROUPED_BROADCAST, 4, count, sample, &found));
    CHECK(found.skew_s == 0);
    /* Times that fall with size give no bandwidth. Then no coefficient is negative, and bytes still have a cost. */
    for (int i = 0; i < count; i++) sample[i].time_s = 1e-3 / (1 + i);
    CHECK(hapt_collective_fit(HAPT_COLLECTIVE_ALL_GATHER, 4, count, sample, &found));
    CHECK(found.latency_s >= 0 && found.byte_s > 0 && found.skew_s >= 0);
    /* A single size gives no bandwidth. */
    for (int i = 0; i < count; i++) sample[i].bytes = 4096;
    CHECK(!hapt_collective_fit(HAPT_COLLECTIVE_ALL_GATHER, 4, count, sample, &found));
    CHECK(!hapt_collective_fit(HAPT_COLLECTIVE_ALL_GATHER, 4, 0, sample, &found));
    sample[0] = (struct hapt_collective_sample){8192, 0.25, NAN};
    CHECK(!hapt_collective_fit(HAPT_COLLECTIVE_ALL_GATHER, 4, count, sample, &found));
}

/* A ring of messages, step by step. In each round every rank passes on one shard, padded to the largest. */
static double ring_s(const struct hapt_collective_links *links, double shard_bytes, int rounds)
{
    double time_s = 0;
    for (int round = 0; round < rounds; round++) time_s += links->latency_s + shard_bytes / links->bandwidth;
    return time_s;
}

static void rings(void)
{
    struct hapt_collective_model model;
    const struct hapt_collective_links one = {.ranks = 1, .bandwidth = INFINITY};
    hapt_collective_model_links(&one, &model);
    for (int k = 0; k < HAPT_COLLECTIVE_COUNT; k++)
        CHECK(hapt_collective_cost_s(&model, (enum hapt_collective_kind)k, 1e9, 1) == 0);
    for (int ranks = 2; ranks <= 16; ranks++) {
        const struct hapt_collective_links links = {ranks, 1e-5, 10e9};
        hapt_collective_model_links(&links, &model);
        for (double bytes = 1e3; bytes < 1e9; bytes *= 30) {
            for (double share = 1.0 / ranks; share < 1; share += 0.1) {
                const double gather = hapt_collective_cost_s(&model, HAPT_COLLECTIVE_ALL_GATHER, bytes, share);
                const double reduce = hapt_collective_cost_s(&model, HAPT_COLLECTIVE_ALL_REDUCE, bytes, share);
                CHECK_NEAR(gather, ring_s(&links, share * bytes, ranks - 1), 1e-9 * gather);
                CHECK_NEAR(hapt_collective_cost_s(&model, HAPT_COLLECTIVE_REDUCE_SCATTER, bytes, share), gather,
                           1e-9 * gather);
                CHECK_NEAR(reduce, ring_s(&links, bytes / ranks, 2 * (ranks - 1)), 1e-9 * reduce);
                for (int k = 0; k < HAPT_COLLECTIVE_COUNT; k++) { /* linear in the largest share (ratios.h) */
                    const enum hapt_collective_kind kind = (enum hapt_collective_kind)k;
                    const double even_s = hapt_collective_cost_s(&model, kind, bytes, 1.0 / ranks),
                                 slope = (hapt_collective_cost_s(&model, kind, bytes, 1) - even_s) / (1 - 1.0 / ranks),
                                 expected = hapt_collective_cost_s(&model, kind, bytes, share);
                    CHECK(even_s >= 0 && slope >= 0);
                    CHECK_NEAR(even_s + slope * (share - 1.0 / ranks), expected, 1e-12 + 1e-9 * expected);
                }
            }
            /* HAP Fig. 4: padding is faster for even shards, broadcasts for skewed ones. */
            if (ranks < 3 || bytes < 1e6) continue;
            CHECK(hapt_collective_cost_s(&model, HAPT_COLLECTIVE_ALL_GATHER, bytes, 0) <
                  hapt_collective_cost_s(&model, HAPT_COLLECTIVE_GROUPED_BROADCAST, bytes, 0));
            CHECK(hapt_collective_cost_s(&model, HAPT_COLLECTIVE_ALL_GATHER, bytes, 0.9) >
                  hapt_collective_cost_s(&model, HAPT_COLLECTIVE_GROUPED_BROADCAST, bytes, 0.9));
        }
        CHECK(hapt_collective_cost_s(&model, HAPT_COLLECTIVE_SLICE, 1e9, 1) == 0);
    }
}

/* Along each axis of a submesh, and along both: data parallelism as a synthesised program costs what the plain one
 * does. */
static void spans(void)
{
    const struct hapt_subcluster own = {.nodes = 8,
                                        .devices_per_node = 8,
                                        .intra_node_bandwidth = 300e9,
                                        .inter_node_bandwidth = 25e9,
                                        .intra_node_latency = 1e-6,
                                        .inter_node_latency = 5e-6};
    const enum hapt_collective_kind sum = HAPT_COLLECTIVE_ALL_REDUCE, gather = HAPT_COLLECTIVE_ALL_GATHER;
    for (int n = 1; n <= 8; n++) {
        for (int m = 1; m <= 8; m *= 2) {
            for (double bytes = 1e3; bytes < 1e10; bytes *= 30) {
                const struct hapt_collective_span
                    plain = hapt_collective_span_of(&own, (struct hapt_submesh){n, m, 1, 0, 0, 0}, 0),
                    nodes = hapt_collective_span_of(&own, (struct hapt_submesh){n, m, 1, 1, 0, 0}, 0),
                    inner = hapt_collective_span_of(&own, (struct hapt_submesh){n, m, 1, 1, 0, 0}, 1),
                    tensor = hapt_collective_span_of(&own, (struct hapt_submesh){n, m, m, 0, 0, 0}, 1);
                const double plain_s = hapt_collective_span_s(&plain, sum, bytes, 0);
                /* Inside the nodes, then each device's piece between them. */
                CHECK(plain_s == hapt_collective_span_s(&inner, sum, bytes, 0) +
                                     hapt_collective_span_s(&nodes, sum, bytes / m, 0));
                CHECK(hapt_collective_span_s(&tensor, sum, bytes, 0) == hapt_collective_span_s(&inner, sum, bytes, 0));
                CHECK(hapt_collective_span_s(&plain, gather, bytes, 0) == 0.5 * plain_s);
                CHECK(hapt_collective_corrected_s(&plain, NULL, HAPT_F32, sum, bytes, 0) == plain_s);
                if (n == 1) continue;
                const double rate = 0.8 * own.inter_node_bandwidth, hop_s = own.inter_node_latency,
                             trees_s = 2 * (ceil(log2(n)) * hop_s + m * bytes / rate);
                const struct hapt_collective_links links = {n, hop_s, rate};
                const double nodes_s = hapt_collective_span_s(&nodes, sum, bytes, 0);
                CHECK_NEAR(nodes_s, fmin(ring_s(&links, m * bytes / n, 2 * (n - 1)), trees_s), 1e-9 * nodes_s);
                CHECK_NEAR(hapt_collective_span_s(&nodes, HAPT_COLLECTIVE_REDUCE_SCATTER, bytes, 2.0 / n), nodes_s,
                           1e-9 * nodes_s);
                CHECK(hapt_collective_span_s(&nodes, HAPT_COLLECTIVE_SLICE, bytes, 0) == 0);
            }
        }
    }
}

static void slowest_links(void)
{
    struct hapt_subcluster own[2] = {{.nodes = 2,
                                      .devices_per_node = 4,
                                      .intra_node_bandwidth = 300e9,
                                      .inter_node_bandwidth = 25e9,
                                      .intra_node_latency = 1e-6,
                                      .inter_node_latency = 5e-6},
                                     {.nodes = 4,
                                      .devices_per_node = 1,
                                      .intra_node_bandwidth = 0,
                                      .inter_node_bandwidth = 10e9,
                                      .intra_node_latency = -1,
                                      .inter_node_latency = 2e-5}};
    struct hapt_link link[4] = {[1] = {1e9, 5e-5, false}, [2] = {1e9, 5e-5, false}};
    const struct hapt_cluster cluster = {.count = 2, .subcluster = own, .link = link};
    const struct {
        int devices[2];
        double bandwidth, latency_s;
    } expected[] = {
        {{4, 0}, 300e9, 1e-6}, {{5, 0}, 25e9, 5e-6}, {{0, 4}, 10e9, 2e-5}, {{8, 4}, 1e9, 5e-5}, {{1, 1}, 1e9, 5e-5}};
    struct hapt_collective_links links;
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++) {
        CHECK_OK(hapt_collective_links_slowest(&cluster, expected[i].devices, &links));
        CHECK(links.ranks == expected[i].devices[0] + expected[i].devices[1]);
        CHECK(links.bandwidth == expected[i].bandwidth && links.latency_s == expected[i].latency_s);
    }
    CHECK_OK(hapt_collective_links_slowest(&cluster, (int[2]){1, 0}, &links));
    CHECK(links.ranks == 1);
    own[1].inter_node_bandwidth = 0;
    CHECK_FAILS(hapt_collective_links_slowest(&cluster, (int[2]){0, 2}, &links), HAPT_ERR_INPUT);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(fit_recovers);
    RUN(fit_without_skew);
    RUN(rings);
    RUN(spans);
    RUN(slowest_links);
    return test_finish();
}
