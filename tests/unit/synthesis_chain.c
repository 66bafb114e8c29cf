/* The cheapest path through a chain of segments within a memory limit, compared with every path. */
#include <math.h>

#include "test.h"

#include "../src/synthesis/synthesis_search.h"

enum { SEGMENTS = 6, NODES = 3, CLASSES = 2 };

/* The least cost of all paths from a node of segment s to the end. */
static double every_path_s(const struct chain *chain, int s, int node, const double *left)
{
    double least = s == chain->segment_count ? 0 : INFINITY;
    for (int a = 0; s < chain->segment_count && a < chain->layer[s].arc_count; a++) {
        const struct chain_arc *arc = &chain->layer[s].arc[a];
        double rest[CLASSES];
        bool fits = arc->from == node;
        for (int j = 0; j < chain->classes; j++) fits = fits && (rest[j] = left[j] - arc->bytes[j]) >= 0;
        if (fits) least = fmin(least, arc->cost_s + every_path_s(chain, s + 1, arc->to, rest));
    }
    return least;
}

static void compare(uint64_t seed, int *feasible, int *scarce)
{
    struct hapt_arena arena;
    struct chain chain;
    const struct chain_arc *path[SEGMENTS];
    uint64_t random = seed;
    double limit[CLASSES], free_limit[CLASSES], cost_s, sum_s = 0, bytes[CLASSES] = {0};
    bool exact;
    hapt_arena_init(&arena);
    const int classes = 1 + (int)(hapt_random_next(&random) % CLASSES),
              segments = 1 + (int)(hapt_random_next(&random) % SEGMENTS);
    CHECK_OK(hapt_chain_init(&chain, classes, segments, &arena));
    for (int k = 0; k < 3; k++) {
        double price[CLASSES] = {0.3 * k + hapt_random_unit(&random), 0.3 * k};
        CHECK_OK(hapt_chain_add_price(&chain, price));
    }
    for (int s = 0; s < segments; s++) {
        const int count = 1 + (int)(hapt_random_next(&random) % 8);
        for (int a = 0; a < count; a++) {
            double *its = hapt_arena_alloc(&arena, CLASSES, sizeof *its);
            for (int j = 0; j < CLASSES; j++) its[j] = (double)(hapt_random_next(&random) % 10); /* sums are exact */
            const struct chain_arc arc = {.from = s ? (int)(hapt_random_next(&random) % NODES) : 0,
                                          .to = s + 1 < segments ? (int)(hapt_random_next(&random) % NODES) : 0,
                                          .cost_s = (double)(hapt_random_next(&random) % 100),
                                          .bytes = its};
            CHECK_OK(hapt_chain_add_arc(&chain, s, arc));
        }
    }
    for (int j = 0; j < CLASSES; j++)
        limit[j] = (double)segments * (2 + (double)(hapt_random_next(&random) % 5)), free_limit[j] = 1e9;
    const double least = every_path_s(&chain, 0, 0, limit);
    CHECK_OK(hapt_chain_search(&chain, limit, 0, path, &cost_s, &exact));
    CHECK_MESSAGE(exact && (cost_s == least || fabs(cost_s - least) < 1e-9), "seed %llu: %g s, every path %g s",
                  (unsigned long long)seed, cost_s, least);
    if (isfinite(cost_s)) {
        int node = 0;
        for (int s = 0; s < segments; s++) {
            CHECK(path[s]->from == node);
            node = path[s]->to;
            sum_s += path[s]->cost_s;
            for (int j = 0; j < classes; j++) bytes[j] += path[s]->bytes[j];
        }
        CHECK_NEAR(sum_s, cost_s, 1e-9);
        for (int j = 0; j < classes; j++) CHECK(bytes[j] <= limit[j]);
        ++*feasible;
        *scarce += every_path_s(&chain, 0, 0, free_limit) < cost_s;
    }
    hapt_arena_release(&arena);
}

static void agrees_with_every_way(void)
{
    int feasible = 0, scarce = 0;
    for (int seed = 1; seed <= (test_long() ? 50000 : 3000); seed++) compare((uint64_t)seed, &feasible, &scarce);
    CHECK(feasible > 500 && scarce > 100);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(agrees_with_every_way);
    return test_finish();
}
