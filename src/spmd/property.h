/* Properties and the extents that they split. Private to the room. */
#ifndef HAPT_SPMD_PROPERTY_H
#define HAPT_SPMD_PROPERTY_H

#include "hapt/sharding.h"

/* True if the dimension can be shared out so, inside every shard of an outer axis. */
bool property_fits(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis, int tensor,
                   struct hapt_property property);
/* The same shares in canonical form: the first ratio vector, then the smallest unit, that give every rank the same. */
struct hapt_property property_canonical(const struct hapt_sharding *sharding, int axis_index,
                                        const struct hapt_axis *axis, int tensor, struct hapt_property property);

#endif
