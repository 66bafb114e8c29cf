/* Assigns world ranks to the devices of a cluster file. */
#ifndef HAPT_CLUSTER_BIND_H
#define HAPT_CLUSTER_BIND_H

#include "hapt/cluster.h"
#include "hapt/host.h"

/* Rank-local part of hapt_cluster_bind. Its result depends on the arguments alone, so all ranks get the same result.
 * Ranks fill subclusters in order. If hosts have GPUs of several kinds, a subcluster first takes the ranks that drive
 * GPUs of its device's name. */
enum hapt_status hapt_cluster_assign(const struct hapt_hosts *hosts, int world_size, struct hapt_arena *arena,
                                     struct hapt_cluster *cluster);

#endif
