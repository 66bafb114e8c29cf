/* Smoothing of measured ranges: noise is removed, and effects that sums cannot explain stay. */
#include "test.h"

#include "../../src/measure/smooth.h"

enum { LAYERS = 20, POINTS = LAYERS * (LAYERS + 1) / 2 };

/* Layers of three kinds in turn. `bend`: a range takes this share more than its sum, in proportion to its length. */
static double truth(int first, int last, double bend)
{
    static const double part[3] = {1e-3, 4e-3, 0.5e-3};
    double sum = 0;
    for (int l = first; l <= last; l++) sum += part[l % 3];
    return sum * (1 + bend * ((last - first) % 5 - 2));
}

static void make(struct smooth_point *point, double bend, double noise, uint64_t seed)
{
    int count = 0;
    for (int i = 0; i < LAYERS; i++) {
        for (int j = i; j < LAYERS; j++) {
            /* Roughly normally distributed. */
            double normal = -6;
            for (int k = 0; k < 12; k++) normal += hapt_random_unit(&seed);
            point[count++] = (struct smooth_point){i, j, truth(i, j, bend) * (1 + noise * normal), 0};
        }
    }
}

static double error_of(const struct smooth_point *point, double bend, bool smoothed)
{
    double sum = 0;
    for (int p = 0; p < POINTS; p++) {
        const double expected = truth(point[p].first, point[p].last, bend);
        const double apart = (smoothed ? point[p].estimate_s : point[p].time_s) / expected - 1;
        sum += apart * apart;
    }
    return sqrt(sum / POINTS);
}

static void run(struct smooth_point *point, double noise)
{
    int variable[LAYERS];
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    for (int l = 0; l < LAYERS; l++) variable[l] = l % 3;
    CHECK_OK(smooth_times(variable, 3, noise, POINTS, point, &arena));
    hapt_arena_release(&arena);
}

static void noise_goes(void)
{
    struct smooth_point point[POINTS];
    for (uint64_t seed = 1; seed <= 20; seed++) {
        make(point, 0, 0.05, seed);
        run(point, 0.05);
        CHECK_MESSAGE(error_of(point, 0, true) < 0.4 * error_of(point, 0, false), "seed %d: %g from %g", (int)seed,
                      error_of(point, 0, true), error_of(point, 0, false));
    }
}

/* Without noise every measurement stays, additive or not. */
static void structure_stays(void)
{
    struct smooth_point point[POINTS];
    make(point, 0.04, 0, 1);
    run(point, 0);
    CHECK_NEAR(error_of(point, 0.04, true), 0, 1e-12);
    /* With a little noise most of the effect stays. */
    make(point, 0.04, 0.01, 2);
    run(point, 0.01);
    CHECK(error_of(point, 0.04, true) < 1.2 * 0.01);
}

/* Outliers and ranges without measurements get about their sum. */
static void gaps_are_filled(void)
{
    struct smooth_point point[POINTS];
    make(point, 0, 0.005, 3);
    int missing = 0;
    for (int p = 0; p < POINTS; p++) {
        const bool layer = point[p].first == point[p].last;
        if (!layer && p % 3 == 0) point[p].time_s = -1, missing++;
        if (!layer && p % 17 == 1 && point[p].time_s > 0) point[p].time_s *= 3;
    }
    run(point, 0.005);
    CHECK(missing > 50);
    for (int p = 0; p < POINTS; p++) {
        if (point[p].time_s >= 0) continue;
        const double expected = truth(point[p].first, point[p].last, 0);
        CHECK_NEAR(point[p].estimate_s / expected, 1, 0.02);
    }
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(noise_goes);
    RUN(structure_stays);
    RUN(gaps_are_filled);
    return test_finish();
}
