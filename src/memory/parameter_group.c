/* Parameter groups: which rank updates which slice of the parameters whose gradients are summed together. */
#include "hapt/memory.h"
#include "hapt/ratios.h"
#include "hapt/sharding.h"

#define GRAIN ((size_t)32) /* elements: slices start on 64 bytes in the fp32 and the bf16 block */

enum { MOST_UNEVEN = 1024 };
/* A window is a small share of the state, and large enough that its copies reach the bandwidth of the bus. */
enum { WINDOWS = 16, LEAST_WINDOW = 1 << 12, MOST_WINDOW = 1 << 22 };

int hapt_parameter_group_ranks(const struct hapt_sharding *sharding, unsigned axes, int *index)
{
    int ranks = 1;
    *index = 0;
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++) {
        if (!(axes >> axis & 1u)) continue;
        ranks *= sharding->axis[axis].size;
        *index = *index * sharding->axis[axis].size + sharding->mesh_coordinate[axis];
    }
    return ranks;
}

size_t hapt_memory_window(size_t state_elements)
{
    const size_t part = (state_elements / WINDOWS + 2 * GRAIN - 1) / (2 * GRAIN) * (2 * GRAIN);
    if (state_elements <= LEAST_WINDOW) return state_elements;
    return part < LEAST_WINDOW ? LEAST_WINDOW : part > MOST_WINDOW ? MOST_WINDOW : part;
}

void hapt_parameter_group_slice(const struct hapt_sharding *sharding, const struct hapt_parameter_group *group,
                                int index, size_t *first, size_t *end)
{
    int own;
    const int ranks = hapt_parameter_group_ranks(sharding, group->axes, &own);
    const size_t units = (group->end - group->first) / GRAIN;
    const struct hapt_axis *axis = &sharding->axis[group->axes == 2];
    int64_t bound[MOST_UNEVEN + 1];
    if (group->axes != 3 && axis->ratio && ranks <= MOST_UNEVEN &&
        hapt_split(axis->ratio, ranks, (int64_t)units, bound)) {
        *first = group->first + (size_t)bound[index] * GRAIN;
        *end = group->first + (size_t)bound[index + 1] * GRAIN;
        return;
    }
    const size_t each = units / (size_t)ranks, rest = units % (size_t)ranks, i = (size_t)index;
    *first = group->first + GRAIN * (i * each + (i < rest ? i : rest));
    *end = *first + GRAIN * (each + (i < rest));
}
