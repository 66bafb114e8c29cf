/* What stands near a GPU in its host: cores, network interfaces. */
#ifndef HAPT_CLUSTER_NEAR_H
#define HAPT_CLUSTER_NEAR_H

#include "hapt/host.h"

enum { NEAR_CPUS = 4096, NEAR_BUS_CHARS = 16 };

/* Of the GPU that a rank drives. */
struct near_place {
    unsigned char cpus[NEAR_CPUS / 8]; /* hardware threads of the rank (bits): its share of the cores near its GPU; none: unknown */
    char cores[48], nics[48];          /* as in struct hapt_host_gpu */
};

/* For ranks of this host whose GPUs stand at bus[count] ("": it has none): ranks whose GPUs are near the same cores share them in their order,
 * or take all of them where there are fewer than two for each. *here: it is this machine that was looked at, no fake one; *allowed: hardware
 * threads that its processes may use. False: hwloc knows nothing. */
bool near_look(int count, const char (*bus)[NEAR_BUS_CHARS], struct near_place *place, bool *here, int *allowed);
/* Is the network interface one of `nics`, "ib0,mlx5_0"? */
bool near_has(const char *nics, const char *interface);

#endif
