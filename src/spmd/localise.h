/* The graph of one rank. Private to the room. */
#ifndef HAPT_SPMD_LOCALISE_H
#define HAPT_SPMD_LOCALISE_H

#include "hapt/sharding.h"

/* Fills shard and first_value of a sharding whose mesh_coordinate is set. */
enum hapt_status localise(struct hapt_sharding *sharding, struct hapt_arena *arena);

#endif
