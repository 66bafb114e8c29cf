/* The noise that a profile reports covers the differences between repeated profiles. Rounds are of machines that are
 * steady, drift, or change their speed. */
#include "test.h"

#include "../../src/measure/steadiness.h"

enum { PROFILES = 2000, SPREAD_ROUNDS = 15 };

static uint64_t seed = 1;

static double normal(void)
{
    const double u = 1 - hapt_random_unit(&seed), v = hapt_random_unit(&seed);
    return sqrt(-2 * log(u)) * cos(2 * 3.14159265358979 * v);
}

enum machine { STEADY, DRIFTING, BIMODAL, PHASES, MACHINES };
static const char *const name[MACHINES] = {"steady", "drifting", "bimodal", "phases"};

/* Rounds of one profile. The machine's own time is 1. */
static void measure(enum machine machine, double *factor, int rounds)
{
    const double slope = hapt_random_unit(&seed) - 0.5;
    bool slow = hapt_random_unit(&seed) < 0.35;
    for (int r = 0; r < rounds; r++) {
        double at = 1;
        if (machine == DRIFTING) at += slope * ((double)r / (rounds - 1) - 0.5);
        if (machine == BIMODAL) slow = hapt_random_unit(&seed) < 0.35;
        if (machine == PHASES && hapt_random_unit(&seed) < 0.5)
            slow = hapt_random_unit(&seed) < 0.35; /* two rounds long */
        if (machine >= BIMODAL && slow) at *= 2.5;
        factor[r] = at * (1 + 0.02 * normal());
    }
}

static double median_of(double *value, int count)
{
    for (int i = 1; i < count; i++)
        for (int k = i; k > 0 && value[k - 1] > value[k]; k--) {
            const double swap = value[k];
            value[k] = value[k - 1], value[k - 1] = swap;
        }
    return 0.5 * (value[(count - 1) / 2] + value[count / 2]);
}

/* The reported interval of most profiles contains the machine's time, and the intervals of two profiles overlap. If
 * phases of a machine last several rounds, its rounds are not independent samples, so the bound is weaker. */
static void covers(void)
{
    const double wanted[MACHINES] = {0.93, 0.93, 0.93, 0.82}, pairs_wanted[MACHINES] = {0.95, 0.95, 0.95, 0.88};
    const int counts[] = {7, 11, SPREAD_ROUNDS};
    for (int machine = 0; machine < MACHINES; machine++)
        for (int c = 0; c < 3; c++) {
            int held = 0, pairs = 0;
            double before = 0, claimed_before = 0;
            for (int p = 0; p < PROFILES; p++) {
                double factor[SPREAD_ROUNDS];
                measure((enum machine)machine, factor, counts[c]);
                const double claimed = steadiness_figure(steadiness_of(factor, counts[c])),
                             found = median_of(factor, counts[c]);
                held += fabs(1 / found - 1) <= claimed;
                pairs += p % 2 && fabs(before / found - 1) <= claimed + claimed_before;
                before = found, claimed_before = claimed;
            }
            CHECK_MESSAGE(held >= wanted[machine] * PROFILES, "%s, %d rounds: %d of %d claims hold", name[machine],
                          counts[c], held, PROFILES);
            CHECK_MESSAGE(pairs >= pairs_wanted[machine] * PROFILES / 2, "%s, %d rounds: %d of %d pairs", name[machine],
                          counts[c], pairs, PROFILES / 2);
        }
}

/* The interval is not too wide: it is small for a steady machine, large for a bimodal one, and a drift has its size and
 * sign. */
static void tells_apart(void)
{
    double figure[MACHINES][PROFILES];
    for (int machine = 0; machine < MACHINES; machine++)
        for (int p = 0; p < PROFILES; p++) {
            double factor[SPREAD_ROUNDS];
            measure((enum machine)machine, factor, SPREAD_ROUNDS);
            figure[machine][p] = steadiness_figure(steadiness_of(factor, SPREAD_ROUNDS));
        }
    const double steady = median_of(figure[STEADY], PROFILES), bimodal = median_of(figure[BIMODAL], PROFILES);
    CHECK_MESSAGE(steady > 0.005 && steady < 0.035, "2 %% of noise a round: %g", steady);
    CHECK_MESSAGE(bimodal > 0.5, "two speeds: %g", bimodal);
    double rising[SPREAD_ROUNDS], falling[SPREAD_ROUNDS];
    for (int r = 0; r < SPREAD_ROUNDS; r++) {
        rising[r] = 1 + 0.3 * r / (SPREAD_ROUNDS - 1);
        falling[r] = 1 / rising[r];
    }
    const struct steadiness up = steadiness_of(rising, SPREAD_ROUNDS), down = steadiness_of(falling, SPREAD_ROUNDS);
    CHECK_NEAR(up.drift, (1 + 0.3 * 12 / 14) / (1 + 0.3 * 2 / 14) - 1, 1e-12);
    CHECK_NEAR(down.drift, 1 / (1 + up.drift) - 1, 1e-12);
    CHECK(steadiness_figure(up) >= up.drift);
}

/* The k-th smallest and largest sample enclose the median with 95 %: tables of the sign test (n: k). */
static void interval(void)
{
    const struct {
        int rounds, k;
    } table[] = {{2, 1}, {6, 1}, {8, 1}, {9, 2}, {11, 2}, {12, 3}, {15, 4}, {20, 6}, {25, 8}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        const int n = table[i].rounds;
        double factor[STEADINESS_ROUNDS];
        for (int r = 0; r < n; r++) factor[r] = 100 + (r * 7) % n + (n % 7 == 0 ? (double)r / n : 0);
        double sorted[STEADINESS_ROUNDS];
        memcpy(sorted, factor, (size_t)n * sizeof *sorted);
        const double middle = median_of(sorted, n);
        const double wanted = fmax(sorted[n - table[i].k] / middle - 1, 1 - sorted[table[i].k - 1] / middle);
        CHECK_NEAR(steadiness_of(factor, n).spread, wanted, 1e-12);
    }
    CHECK(steadiness_of((double[]){1}, 1).spread == 0 && steadiness_of(NULL, 0).drift == 0);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(interval);
    RUN(covers);
    RUN(tells_apart);
    return test_finish();
}
