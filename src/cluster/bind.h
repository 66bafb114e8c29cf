/* World ranks onto the devices of a cluster file. */
#ifndef HAPT_CLUSTER_BIND_H
#define HAPT_CLUSTER_BIND_H

#include "hapt/cluster.h"
#include "hapt/host.h"

/* The rank-local part of hapt_cluster_bind: deterministic in its arguments, so that all ranks come to the same result.
 * Ranks fill subclusters in their order; where hosts have GPUs of several kinds, a subcluster first takes the ranks
 * that drive GPUs of its device's name. */
enum hapt_status hapt_cluster_assign(const struct hapt_hosts *hosts, int world_size, struct hapt_arena *arena,
                                     struct hapt_cluster *cluster);

#endif
