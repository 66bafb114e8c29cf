/* Spread and drift of rounds. */
#include "steadiness.h"

#include <math.h>
#include <string.h>

#include "hapt/env.h"

#define OUTSIDE 0.05 /* probability that the true median is outside the interval */

static double median_of(const double *value, int count)
{
    double sorted[STEADINESS_ROUNDS];
    memcpy(sorted, value, (size_t)count * sizeof *sorted);
    return hapt_median(sorted, count);
}

/* Largest k (at least 1) such that the k-th least and the k-th largest of n values enclose the median with 95 %:
 * the probability of fewer than k heads in n fair coin tosses is at most OUTSIDE / 2. */
static int interval_end(int n)
{
    double chance = pow(0.5, n), sum = chance;
    int k = 0;
    while (sum <= 0.5 * OUTSIDE && k < n / 2) {
        k++;
        chance *= (double)(n - k + 1) / k;
        sum += chance;
    }
    return k > 1 ? k : 1;
}

struct steadiness steadiness_of(const double *factor, int rounds)
{
    struct steadiness found = {0, 0};
    double sorted[STEADINESS_ROUNDS];
    if (rounds < 2) return found;
    memcpy(sorted, factor, (size_t)rounds * sizeof *sorted);
    const double middle = hapt_median(sorted, rounds);
    const int k = interval_end(rounds), third = rounds >= 3 ? rounds / 3 : 1;
    if (!(middle > 0)) return found;
    found.spread = fmax(sorted[rounds - k] / middle - 1, 1 - sorted[k - 1] / middle);
    const double first = median_of(factor, third), last = median_of(factor + rounds - third, third);
    if (first > 0) found.drift = last / first - 1;
    return found;
}

double steadiness_figure(struct steadiness steadiness)
{
    return fmax(steadiness.spread, fabs(steadiness.drift));
}
