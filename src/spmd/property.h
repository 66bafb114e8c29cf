/* Properties against the extents they split. Private to the room. */
#ifndef HAPT_SPMD_PROPERTY_H
#define HAPT_SPMD_PROPERTY_H

#include "hapt/sharding.h"

/* Can the dimension be shared out so, inside whatever an outer axis leaves? */
bool property_fits(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis, int tensor,
                   struct hapt_property property);
/* The same shares in canonical form: the first ratio and then the smallest unit that give every rank the same. */
struct hapt_property property_canonical(const struct hapt_sharding *sharding, int axis_index,
                                        const struct hapt_axis *axis, int tensor, struct hapt_property property);

#endif
