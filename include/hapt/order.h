/* Orders for qsort. */
#ifndef HAPT_ORDER_H
#define HAPT_ORDER_H

static inline int hapt_compare_doubles(const void *a, const void *b)
{
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

#endif
