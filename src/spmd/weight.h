/* Operators of the weight section of split backward passes. */
#ifndef HAPT_SPMD_WEIGHT_H
#define HAPT_SPMD_WEIGHT_H

#include "hapt/sharding.h"

/* Sets sharding->weight; the graph, storage and reduce_first must be set. */
enum hapt_status find_weight_operators(struct hapt_sharding *sharding, struct hapt_arena *arena);

#endif
