/* Ranks into homogeneous subclusters. */
#ifndef HAPT_CLUSTER_GROUP_H
#define HAPT_CLUSTER_GROUP_H

#include "hapt/cluster.h"
#include "hapt/host.h"

/* Hosts with equal devices, memory (within 2 %) and rank count form one subcluster; subclusters and their hosts in order of the
 * lowest world rank. The cluster is bound; its link values are absent. HAPT_ERR_INPUT for more than HAPT_MAX_SUBCLUSTERS or
 * for a GPU model that the database lacks. Pure. */
enum hapt_status hapt_cluster_group(const struct hapt_hosts *hosts, int world_size, struct hapt_arena *arena,
                                    struct hapt_cluster **cluster);
/* A rank of this host as a CPU device: its share of cores and memory. */
void hapt_host_cpu_device(const struct hapt_host *host, struct hapt_device_spec *device);

#endif
