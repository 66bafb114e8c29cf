/* Affinity: cores and network interfaces near a GPU, and how ranks that compute on cores share the NUMA nodes of their
 * host. */
#ifndef HAPT_CLUSTER_NEAR_H
#define HAPT_CLUSTER_NEAR_H

#include "hapt/host.h"

enum { NEAR_CPUS = 4096, NEAR_BUS_CHARS = 16 };

/* The device that a rank computes on. */
struct near_want {
    char bus[NEAR_BUS_CHARS]; /* PCI address of its GPU; "": none */
    bool on_cores;
};

struct near_place {
    unsigned char cpus[NEAR_CPUS / 8]; /* hardware threads of the rank (bits); none: it runs where the system likes */
    char cores[48], nics[48];          /* near its GPU, as in struct hapt_host_gpu */
};

/* For the ranks of this host, in their order. Ranks whose GPUs are near the same cores share these cores, or each takes
 * all of them where there are fewer than two for each. Ranks that compute on cores share the NUMA nodes (near_hwloc.h),
 * unless the host has ranks with GPUs, whose shares would overlap. *here: this machine was looked at, no fake one;
 * *allowed: hardware threads that its processes may use. False: hwloc knows nothing. */
bool near_look(int count, const struct near_want *want, struct near_place *place, bool *here, int *allowed);
/* Is the network interface one of `nics`, "ib0,mlx5_0"? */
bool near_has(const char *nics, const char *interface);

#endif
