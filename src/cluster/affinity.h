/* Affinity: cores and network interfaces near a GPU, and how CPU ranks share the NUMA nodes of their host. */
#ifndef HAPT_CLUSTER_AFFINITY_H
#define HAPT_CLUSTER_AFFINITY_H

#include "hapt/host.h"

enum { AFFINITY_CPUS = 4096, AFFINITY_BUS_CHARS = 16 };

/* The device that a rank computes on. */
struct affinity_request {
    char bus[AFFINITY_BUS_CHARS]; /* PCI address of its GPU; "": none */
    bool on_cores;
};

struct affinity {
    unsigned char cpus[AFFINITY_CPUS / 8]; /* hardware threads of the rank (bits); none: not bound */
    char local_cores[48], local_nics[48];  /* near its GPU, as in struct hapt_host_gpu */
};

/* Finds the affinity of each of this host's `count` ranks, in order. Ranks whose GPUs are near the same cores share
 * these cores, or each takes all of them if there are fewer than two per rank. CPU ranks share the NUMA nodes
 * (affinity_hwloc.h), unless the host has ranks with GPUs, whose shares would overlap. *here: the topology is this
 * machine's, not a fake; *allowed: hardware threads that its processes may use. False: hwloc failed. */
bool affinity_find(int count, const struct affinity_request *request, struct affinity *affinity, bool *here,
                   int *allowed);
/* Is the network interface in the list `nics`, "ib0,mlx5_0"? */
bool affinity_has(const char *nics, const char *interface);

#endif
