/* The part of affinity.h that uses hwloc types. */
#ifndef HAPT_CLUSTER_AFFINITY_HWLOC_H
#define HAPT_CLUSTER_AFFINITY_HWLOC_H

#include <hwloc.h>

#include "affinity.h"

/* Loads hwloc's topology of this machine; free it with hwloc_topology_destroy. `with_devices`: with PCI devices and
 * network interfaces. False: hwloc failed. The components gl and opencl are disabled because either can hang: gl opens
 * the X display, over the network if ssh forwards it; opencl starts GPU drivers. The plug-ins of src/device look for
 * GPUs. */
bool affinity_load(bool with_devices, hwloc_topology_t *topology);

/* Cores near the PCI device (hardware threads, "0-15") and its nearest network interfaces; "" if hwloc does not know
 * it. */
void affinity_describe(hwloc_topology_t topology, const char *bus, char *cores, size_t cores_size, char *nics,
                       size_t nics_size);

/*
 * The hardware threads of CPU rank `rank` of `count` on a host: *set. False: ranks should not be bound. Pure.
 *
 * Consecutive ranks are in one NUMA node. With at least as many ranks as NUMA nodes, each node gets ranks in proportion
 * to its cores. Its ranks share its cores in order, or use all of them if there are fewer than two per rank. With fewer
 * ranks than NUMA nodes, each rank gets complete nodes.
 *
 * Ranks are not bound if there is only one NUMA node, if ranks outnumber cores, or if a rank would get fewer cores than
 * an even share of the host. NUMA nodes and ranks then do not match, and the system balances better. NUMA nodes without
 * cores are ignored. The smallest of nested nodes count (high-bandwidth memory beside the host's).
 */
bool affinity_numa_share(hwloc_topology_t topology, int rank, int count, hwloc_bitmap_t set);

#endif
