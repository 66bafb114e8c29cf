/* The part of near.h that speaks hwloc. */
#ifndef HAPT_CLUSTER_NEAR_HWLOC_H
#define HAPT_CLUSTER_NEAR_HWLOC_H

#include <hwloc.h>

#include "near.h"

/* Cores near the PCI device ("0-15", hardware threads) and the network interfaces nearest to it; "" where hwloc does not know it. */
void near_describe(hwloc_topology_t topology, const char *bus, char *cores, size_t cores_size, char *nics, size_t nics_size);

#endif
