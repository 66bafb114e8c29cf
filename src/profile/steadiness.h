/*
 * How steady a device was while it was measured: what its rounds differ by, and whether later ones are slower than
 * earlier ones.
 *
 * A round's factor is the median over the items that it timed of time / the item's median time. Noise of single items
 * cancels out in it; what all items share stays: other work on the machine, clocks, caches. More items do not average
 * that away, so it counts as a whole.
 */
#ifndef HAPT_PROFILE_STEADINESS_H
#define HAPT_PROFILE_STEADINESS_H

enum { STEADINESS_ROUNDS = 64 };

struct steadiness {
    double spread; /* relative: from the median of the rounds to the farther end of its 95 % confidence interval (order
                      statistics, any distribution) */
    double drift;  /* relative: median of the last third of the rounds over that of the first third, less 1 */
};

/* factor[rounds] in order of time; rounds <= STEADINESS_ROUNDS. Fewer than 2: zeros. Fewer than 6: the interval is
 * their whole range. */
struct steadiness steadiness_of(const double *factor, int rounds);
/* Uncertainty of the median of the rounds: the larger of both. */
double steadiness_figure(struct steadiness steadiness);

#endif
