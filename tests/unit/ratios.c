/* Sharding ratios: rounding to shards. */
#include "test.h"

#include "hapt/ratios.h"

enum { MAX_RANKS = 40 };

static void even_shards(void)
{
    for (int ranks = 1; ranks <= MAX_RANKS; ranks++) {
        const double third = 1.0 / 3;
        double equal[MAX_RANKS];
        for (int j = 0; j < ranks; j++) equal[j] = third;
        for (int64_t units = ranks; units <= 300; units++) {
            int64_t even[MAX_RANKS + 1], same[MAX_RANKS + 1];
            CHECK(hapt_split(NULL, ranks, units, even));
            CHECK(hapt_split(equal, ranks, units, same));
            CHECK(even[0] == 0 && even[ranks] == units);
            for (int j = 0; j < ranks; j++) CHECK(even[j + 1] - even[j] == units / ranks + (j < units % ranks));
            CHECK_MESSAGE(memcmp(even, same, (size_t)(ranks + 1) * sizeof *even) == 0,
                          "%d equal ratios of %d units are not the even split", ranks, (int)units);
        }
    }
}

/* The least sum of absolute errors over all shards of at least one unit, by dynamic programming. */
static double least_error(const double *ideal, int ranks, int units)
{
    double best[2][64];
    for (int u = 0; u <= units; u++) best[0][u] = u == 0 ? 0 : INFINITY;
    for (int j = 0; j < ranks; j++) {
        const double *before = best[j % 2];
        double *after = best[(j + 1) % 2];
        for (int u = 0; u <= units; u++) {
            after[u] = INFINITY;
            for (int size = 1; size <= u; size++) after[u] = fmin(after[u], before[u - size] + fabs(size - ideal[j]));
        }
    }
    return best[ranks % 2][units];
}

static void rounding_properties(void)
{
    const int cases = test_long() ? 400000 : 20000;
    int bound = 0, compared = 0;
    for (int c = 0; c < cases; c++) {
        uint64_t seed = (uint64_t)c + 1;
        const int ranks = 1 + (int)(hapt_random_next(&seed) % MAX_RANKS);
        const int64_t units = ranks + (int64_t)pow(10, 9 * hapt_random_unit(&seed) * hapt_random_unit(&seed));
        double ratio[MAX_RANKS], ideal[MAX_RANKS], sum = 0, error = 0;
        int64_t first[MAX_RANKS + 1];
        const double skew = 6 * hapt_random_unit(&seed);
        for (int j = 0; j < ranks; j++) {
            ratio[j] = hapt_random_next(&seed) % 8 == 0 ? 0 : pow(hapt_random_unit(&seed), skew);
            sum += ratio[j];
        }
        if (sum == 0) sum = ratio[0] = 1;
        bool binds = false;
        if (!CHECK_MESSAGE(hapt_split(ratio, ranks, units, first), "seed %d: no split", c + 1)) continue;
        for (int j = 0; j < ranks; j++) {
            ideal[j] = (double)units * ratio[j] / sum;
            binds = binds || ideal[j] < 1;
            error += fabs((double)(first[j + 1] - first[j]) - ideal[j]);
            CHECK_MESSAGE(first[j + 1] - first[j] >= 1, "seed %d: shard %d of %d units is empty", c + 1, j, (int)units);
        }
        CHECK_MESSAGE(first[0] == 0 && first[ranks] == units, "seed %d: shards do not add up", c + 1);
        for (int j = 0; j < ranks && !binds; j++)
            CHECK_MESSAGE(fabs((double)(first[j + 1] - first[j]) - ideal[j]) < 1 + 1e-12 * (double)units,
                          "seed %d: shard %d is %lld units instead of %g", c + 1, j, (long long)(first[j + 1] - first[j]), ideal[j]);
        bound += binds;
        if (units >= 64) continue;
        const double least = least_error(ideal, ranks, (int)units);
        CHECK_MESSAGE(error <= least + 1e-9, "seed %d: errors add up to %g, possible are %g", c + 1, error, least);
        compared++;
    }
    CHECK(bound > cases / 20 && bound < cases - cases / 20);
    CHECK(compared > cases / 20);
}

static void impossible_splits(void)
{
    const double none[2] = {0, 0}, negative[2] = {1, -1}, undefined[2] = {1, NAN}, endless[2] = {1, INFINITY}, fine[2] = {1, 3};
    int64_t first[3] = {7, 7, 7};
    CHECK(!hapt_split(NULL, 2, 1, first));
    CHECK(!hapt_split(fine, 2, 1, first));
    CHECK(!hapt_split(NULL, 0, 1, first));
    CHECK(!hapt_split(none, 2, 10, first));
    CHECK(!hapt_split(negative, 2, 10, first));
    CHECK(!hapt_split(undefined, 2, 10, first));
    CHECK(!hapt_split(endless, 2, 10, first));
    CHECK(first[0] == 7 && first[1] == 7 && first[2] == 7);
    CHECK(hapt_split(fine, 2, 2, first) && first[1] == 1 && first[2] == 2);
    CHECK(hapt_split(fine, 2, 12, first) && first[1] == 3 && first[2] == 12);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(even_shards);
    RUN(rounding_properties);
    RUN(impossible_splits);
    return test_finish();
}
