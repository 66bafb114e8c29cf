/*
 * Estimates times from noisy measurements of layer ranges.
 *
 * A search picks the smallest of thousands of numbers, so it prefers those that are small by accident. Ranges overlap,
 * so their times support each other: they are nearly sums over layers. A robust least-squares fit gives each layer its
 * part. Long ranges find less of their weights in the caches than short ones. So the sums are multiplied by a factor
 * that depends on length: the median of measured over fitted time, by octaves of time. The estimate of a range lies
 * between this fit and the range's own median. It is closer to the median if the noise is small against the error of
 * the fit (empirical Bayes). Without noise it is the measurement; for ranges without a measurement it is the fit.
 */
#ifndef HAPT_MEASURE_SMOOTH_H
#define HAPT_MEASURE_SMOOTH_H

#include "hapt/arena.h"

struct smooth_point {
    int first, last;   /* layers, both included */
    double time_s;     /* median over its rounds; negative: not measured */
    double estimate_s; /* output */
};

/* `variable` [layers]: layers of equal number have equal parts; numbers are below `variable_count`. Every layer
 * must be measured alone in some range. `noise`: relative standard error of a measured time. */
enum hapt_status smooth_times(const int *variable, int variable_count, double noise, int point_count,
                              struct smooth_point *point, struct hapt_arena *scratch);

#endif
