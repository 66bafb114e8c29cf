/* Ranks into homogeneous subclusters. */
#ifndef HAPT_CLUSTER_GROUP_H
#define HAPT_CLUSTER_GROUP_H

#include "hapt/cluster.h"
#include "hapt/host.h"

/* Hosts with equal devices, memory (within 2 %) and rank count form one class; each class and kind of device is one
 * subcluster, so that a host whose ranks drive two kinds of GPUs is part of two. Subclusters and their hosts in order
 * of the lowest world rank. The cluster is bound; its link values are absent. HAPT_ERR_INPUT for more than
 * HAPT_MAX_SUBCLUSTERS or for a GPU model that the database lacks. Pure. */
enum hapt_status hapt_cluster_group(const struct hapt_hosts *hosts, int world_size, struct hapt_arena *arena,
                                    struct hapt_cluster **cluster);
/* The GPU of rank number `host_rank` of a host, whose ranks take its GPUs in turn (hapt_env_device); NULL: it offers
 * none. */
const struct hapt_host_gpu *hapt_host_gpu_of(const struct hapt_host *host, int host_rank);
/* Are the two of one kind: entry of the database, or name where it has none, and memory? */
bool hapt_host_gpus_alike(const struct hapt_host_gpu *a, const struct hapt_host_gpu *b);
/* The name of a GPU's device: its entry of the database, or what its driver calls it, without blanks as cluster files
 * want names. */
void hapt_host_gpu_kind(const struct hapt_host_gpu *gpu, char name[64]);
/* A rank of this host as a CPU device: its share of cores and memory. */
void hapt_host_cpu_device(const struct hapt_host *host, struct hapt_device_spec *device);

#endif
