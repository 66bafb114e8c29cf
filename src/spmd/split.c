/* Rounds ratios to shards that add up exactly (HAP 5.1). */
#include <math.h>

#include "hapt/sharding.h"

static void split_evenly(int ranks, int64_t units, int64_t *first)
{
    const int64_t share = units / ranks, more = units % ranks;
    for (int j = 0; j <= ranks; j++) first[j] = j * share + (j < more ? j : more);
}

/* The shard that is nearest to its ratio after a change by `step`. Ties: the first one grows, the last one shrinks,
 * so that equal ratios put the larger shards first. */
static int pick(const double *ratio, double scale, int ranks, const int64_t *size, int step)
{
    int best = -1;
    double least = INFINITY;
    for (int j = 0; j < ranks; j++) {
        if (size[j] + step < 1) continue;
        const double error = fabs((double)(size[j] + step) - scale * ratio[j]);
        if (best >= 0 && (step > 0 ? error >= least : error > least)) continue;
        best = j;
        least = error;
    }
    return best;
}

bool hapt_split_exists(const double *ratio, int ranks, int64_t units)
{
    double sum = 0;
    if (ranks < 1 || units < ranks) return false;
    for (int j = 0; ratio && j < ranks; j++) {
        if (!(ratio[j] >= 0)) return false;
        sum += ratio[j];
    }
    return !ratio || (sum > 0 && isfinite(sum) && isfinite((double)units / sum));
}

bool hapt_split(const double *ratio, int ranks, int64_t units, int64_t *first)
{
    double sum = 0;
    if (!hapt_split_exists(ratio, ranks, units)) return false;
    if (!ratio) {
        split_evenly(ranks, units, first);
        return true;
    }
    for (int j = 0; j < ranks; j++) sum += ratio[j];
    const double scale = (double)units / sum;
    int64_t *size = first + 1, total = 0;
    for (int j = 0; j < ranks; j++) {
        const int64_t nearest = llround(scale * ratio[j]);
        size[j] = nearest < 1 ? 1 : nearest;
        total += size[j];
    }
    for (; total < units; total++) size[pick(ratio, scale, ranks, size, 1)]++;
    for (; total > units; total--) size[pick(ratio, scale, ranks, size, -1)]--;
    first[0] = 0;
    for (int j = 0; j < ranks; j++) first[j + 1] += first[j];
    return true;
}
