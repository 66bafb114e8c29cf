/* The part of near.h that speaks hwloc. */
#ifndef HAPT_CLUSTER_NEAR_HWLOC_H
#define HAPT_CLUSTER_NEAR_HWLOC_H

#include <hwloc.h>

#include "near.h"

/* Cores near the PCI device ("0-15", hardware threads) and the network interfaces nearest to it; "" where hwloc does
 * not know it. */
void near_describe(hwloc_topology_t topology, const char *bus, char *cores, size_t cores_size, char *nics,
                   size_t nics_size);

/*
 * The hardware threads of rank `rank` of `count` that compute on a host's cores: *set; false: ranks run where the
 * system likes. Pure.
 *
 * Neighbours in the order of ranks lie in one NUMA node. With as many ranks as NUMA nodes or more, each NUMA node gets
 * ranks in proportion to its cores, and these share its cores in their order, or all of them where there are fewer than
 * two for each. Fewer ranks get whole NUMA nodes. Nothing is bound on one NUMA node, when ranks outnumber cores, or
 * where a rank would get fewer cores than an even share of the host: then NUMA nodes and ranks do not match, and the
 * system balances better. NUMA nodes without cores do not count; of nested ones (high-bandwidth memory beside a host's)
 * the smallest do.
 */
bool near_numa_share(hwloc_topology_t topology, int rank, int count, hwloc_bitmap_t set);

#endif
