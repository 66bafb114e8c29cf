/*
 * Steadiness of a device while it was measured: the spread of its rounds, and the drift from earlier to later ones.
 *
 * A round's factor is the median, over the items that it timed, of time / the item's median time. The noise of single
 * items cancels out. The influences that all items share remain: other work on the machine, clocks, caches. More items
 * do not average that out, so it counts in full.
 */
#ifndef HAPT_MEASURE_STEADINESS_H
#define HAPT_MEASURE_STEADINESS_H

enum { STEADINESS_ROUNDS = 64 };

struct steadiness {
    double spread; /* relative: from the median of the rounds to the farther end of its 95 % confidence interval (order
                      statistics, any distribution) */
    double drift;  /* relative: median of the last third of the rounds over that of the first third, minus 1 */
};

/* factor[rounds] in order of time; rounds <= STEADINESS_ROUNDS. Fewer than 2 rounds give zeros. With fewer than 6,
 * the interval is their full range. */
struct steadiness steadiness_of(const double *factor, int rounds);
/* Uncertainty of the median of the rounds: the larger of spread and drift. */
double steadiness_figure(struct steadiness steadiness);

#endif
