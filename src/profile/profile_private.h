/* Inside src/profile only. */
#ifndef HAPT_PROFILE_PRIVATE_H
#define HAPT_PROFILE_PRIVATE_H

#include "hapt/profile.h"

/* Bounds for what a file may claim. */
#define HAPT_PROFILE_MAX_DEVICES 65536 /* of one subcluster */
#define HAPT_PROFILE_MAX_LAYERS 8192
#define HAPT_PROFILE_SMALL_BYTES (64 * 1048576.0) /* of all tables: nobody looks whether the host has them */
#define HAPT_PROFILE_MAX_CELLS ((int64_t)1 << 27) /* of one table: 1 GiB */

/* The submeshes of a subcluster in the profile's order; counts them, and writes them where `submesh` is given. */
int hapt_profile_submeshes(int nodes, int devices_per_node, struct hapt_submesh *submesh);

#endif
