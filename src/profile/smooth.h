/*
 * Estimates from noisy measurements of layer ranges.
 *
 * A search picks the smallest of thousands of numbers, so it prefers those that are small by accident. Ranges overlap,
 * hence their times support each other: they are nearly sums over layers. A robust least-squares fit gives each layer
 * its part. Long ranges find less of their weights in the caches than short ones, so the sums are bent by a factor that
 * depends on their length: the median of measured over fitted, by octaves of time. A range's estimate lies between this
 * fit and its own median, the nearer to its own the smaller the noise is against what the fit cannot explain (empirical
 * Bayes). Without noise the measurement stands; ranges without one get the fit.
 */
#ifndef HAPT_PROFILE_SMOOTH_H
#define HAPT_PROFILE_SMOOTH_H

#include "hapt/arena.h"

struct smooth_point {
    int first, last;   /* layers, both included */
    double time_s;     /* median of its rounds; negative: not measured */
    double estimate_s; /* out */
};

/* `variable` [layers]: layers of equal number have equal parts, numbers are below `variable_count`; every layer must be
 * measured in some range on its own. `noise`: relative standard error of a measured time. */
enum hapt_status smooth_times(const int *variable, int variable_count, double noise, int point_count,
                              struct smooth_point *point, struct hapt_arena *scratch);

#endif
