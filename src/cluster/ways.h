/* Inside the choice of ways. */
#ifndef HAPT_CLUSTER_WAYS_H
#define HAPT_CLUSTER_WAYS_H

#include "hapt/cluster.h"

/* The way of a link to take: MPI's, the first, where it is clearly faster than all others; else of those that are as
 * fast as the fastest, as far as can be measured, the one with most ends near the GPUs (near [count]). A way without
 * bandwidth leads nowhere. */
int ways_best(int count, const struct hapt_cluster_way *way, const int *near);

#endif
