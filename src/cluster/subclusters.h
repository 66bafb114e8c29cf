/* Groups ranks into homogeneous subclusters. */
#ifndef HAPT_CLUSTER_SUBCLUSTERS_H
#define HAPT_CLUSTER_SUBCLUSTERS_H

#include "hapt/cluster.h"
#include "hapt/host.h"

/* Hosts with equal devices, memory (within 2 %) and rank count form one class. Each class and kind of device is one
 * subcluster, so a host whose ranks drive two kinds of GPUs is part of two. Subclusters and their hosts are ordered by
 * lowest world rank. The cluster is bound; its link values are unknown. HAPT_ERR_INPUT: more than HAPT_MAX_SUBCLUSTERS,
 * or a GPU that is not in the database. Pure. */
enum hapt_status hapt_cluster_form_subclusters(const struct hapt_hosts *hosts, int world_size, struct hapt_arena *arena,
                                               struct hapt_cluster **cluster);
/* The GPU of rank `host_rank` of a host; ranks take its GPUs in turn (hapt_env_device). NULL: it has no usable GPU. */
const struct hapt_host_gpu *hapt_host_gpu_of(const struct hapt_host *host, int host_rank);
/* Are the GPUs of one kind: same memory and same database entry (same name if there is no entry)? */
bool hapt_host_gpus_alike(const struct hapt_host_gpu *a, const struct hapt_host_gpu *b);
/* Device name of a GPU: its database entry or the driver's name, with blanks replaced as cluster files require. */
void hapt_host_gpu_kind(const struct hapt_host_gpu *gpu, char name[64]);
/* Bytes that are left of a GPU's memory beside CUDA's context, library code and the buffers of NCCL. */
double hapt_host_gpu_usable_bytes(double memory_bytes);
/* Describes a rank of this host as a CPU device: its share of cores and memory. */
void hapt_host_cpu_device(const struct hapt_host *host, struct hapt_device_spec *device);

#endif
