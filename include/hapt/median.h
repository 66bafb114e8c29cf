/* Medians. */
#ifndef HAPT_MEDIAN_H
#define HAPT_MEDIAN_H

#include <stdlib.h>

#include "hapt/order.h"

/* Sorts the values; of an even number of them the mean of the middle two; of none 0. */
static inline double hapt_median(double *value, int count)
{
    if (count == 0) return 0;
    qsort(value, (size_t)count, sizeof *value, hapt_compare_doubles);
    return count % 2 ? value[count / 2] : 0.5 * (value[count / 2 - 1] + value[count / 2]);
}

#endif
