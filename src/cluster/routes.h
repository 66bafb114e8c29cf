/* Internal part of the route choice. */
#ifndef HAPT_CLUSTER_ROUTES_H
#define HAPT_CLUSTER_ROUTES_H

#include "hapt/cluster.h"

/* Best route of a link. MPI, the first, if it is clearly faster than all others. Else the route with the most ends near
 * GPUs (local_ends [count]) among those as fast as the fastest, within measuring accuracy. A route without bandwidth is
 * unreachable. */
int routes_best(int count, const struct hapt_cluster_route *route, const int *local_ends);

#endif
