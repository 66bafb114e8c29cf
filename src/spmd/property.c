/* Properties: the elements that a rank holds, and the canonical form, in which equal shares have equal properties. */
#include "hapt/rules.h"

#include <stdio.h>

#include "hapt/sharding.h"

enum { MOST_UNEVEN = 1024 }; /* largest axis with ratios, ranks */

static int64_t blocks_of(struct hapt_property property)
{
    return property.blocks > 1 ? property.blocks : 1;
}

static int64_t grain_of(struct hapt_property property)
{
    return blocks_of(property) * (property.unit > 1 ? property.unit : 1);
}

bool hapt_property_same(struct hapt_property a, struct hapt_property b)
{
    if (a.kind != b.kind) return false;
    if (a.kind != HAPT_PROPERTY_SHARDED) return true;
    return a.dim == b.dim && a.ratio == b.ratio && blocks_of(a) == blocks_of(b) && grain_of(a) == grain_of(b);
}

const char *hapt_property_text(struct hapt_property property, char buffer[HAPT_PROPERTY_TEXT])
{
    if (property.kind != HAPT_PROPERTY_SHARDED) {
        snprintf(buffer, HAPT_PROPERTY_TEXT, property.kind == HAPT_PROPERTY_REPLICATED ? "replicated" : "partial");
        return buffer;
    }
    int length = snprintf(buffer, HAPT_PROPERTY_TEXT, "sharded(%d)", property.dim);
    if (property.blocks > 1)
        length += snprintf(buffer + length, HAPT_PROPERTY_TEXT - (size_t)length, " in %d blocks", property.blocks);
    if (property.unit > 1)
        length += snprintf(buffer + length, HAPT_PROPERTY_TEXT - (size_t)length, " by units of %lld",
                           (long long)property.unit);
    if (property.ratio > 0) snprintf(buffer + length, HAPT_PROPERTY_TEXT - (size_t)length, " ratio %d", property.ratio);
    return buffer;
}

static const double *ratio_of(struct hapt_property property, const struct hapt_axis *axis)
{
    return axis->ratio ? axis->ratio + (size_t)property.ratio * (size_t)axis->size : NULL;
}

/* Shares in units: first[rank] of all ranks, and the end. */
static bool split(struct hapt_property property, const struct hapt_axis *axis, int64_t extent,
                  int64_t first[MOST_UNEVEN + 1])
{
    const int64_t grain = grain_of(property);
    if (extent % grain != 0 || axis->size > MOST_UNEVEN || property.ratio < 0 ||
        (property.ratio > 0 && property.ratio >= axis->ratio_count))
        return false;
    return hapt_split(ratio_of(property, axis), axis->size, extent / grain, first);
}

bool hapt_property_share(struct hapt_property property, const struct hapt_axis *axis, int64_t extent, int rank,
                         int64_t *first, int64_t *count)
{
    const int64_t grain = grain_of(property), unit = grain / blocks_of(property);
    if (!axis->ratio) { /* no loop over the ranks */
        const int64_t units = extent / grain, share = units / axis->size, more = units % axis->size;
        if (extent % grain != 0 || share < 1) return false;
        *first = unit * (rank * share + (rank < more ? rank : more));
        *count = unit * (share + (rank < more));
        return true;
    }
    int64_t bound[MOST_UNEVEN + 1];
    if (!split(property, axis, extent, bound)) return false;
    *first = unit * bound[rank];
    *count = unit * (bound[rank + 1] - bound[rank]);
    return true;
}

/* True if two properties of one dimension give every rank the same elements. */
static bool same_split(struct hapt_property a, struct hapt_property b, const struct hapt_axis *axis, int64_t extent)
{
    int64_t first[2][MOST_UNEVEN + 1];
    const int64_t unit[2] = {grain_of(a) / blocks_of(a), grain_of(b) / blocks_of(b)};
    if (!split(a, axis, extent, first[0]) || !split(b, axis, extent, first[1])) return false;
    for (int r = 1; r < axis->size; r++)
        if (unit[0] * first[0][r] != unit[1] * first[1][r]) return false;
    return true;
}

/* Elements of a dimension that the outer axis leaves to `axis_index`, at outer mesh coordinate `coordinate`. */
static int64_t extent_inside(const struct hapt_sharding *sharding, int axis_index, int tensor, int dim, int coordinate)
{
    const int64_t extent = sharding->graph->tensor[tensor].shape[dim];
    if (axis_index == 0) return extent;
    const struct hapt_property outer = sharding->property[tensor][0];
    int64_t first, count;
    if (outer.kind != HAPT_PROPERTY_SHARDED || outer.dim != dim) return extent;
    HAPT_ASSERT(hapt_property_share(outer, &sharding->axis[0], extent, coordinate, &first, &count));
    return blocks_of(outer) * count;
}

static int outer_coordinates(const struct hapt_sharding *sharding, int axis_index, int tensor, int dim)
{
    if (axis_index == 0) return 1;
    const struct hapt_property outer = sharding->property[tensor][0];
    return outer.kind == HAPT_PROPERTY_SHARDED && outer.dim == dim ? sharding->axis[0].size : 1;
}

bool hapt_property_fits(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis, int tensor,
                        struct hapt_property property)
{
    if (property.kind != HAPT_PROPERTY_SHARDED) return true;
    const struct hapt_tensor *of = &sharding->graph->tensor[tensor];
    if (property.dim < 0 || property.dim >= of->dims || property.ratio < 0) return false;
    if (property.ratio > 0 && property.ratio >= axis->ratio_count) return false;
    if (axis->ratio && axis->size > MOST_UNEVEN) return false;
    const int64_t grain = grain_of(property);
    int64_t before = -1;
    for (int coordinate = 0; coordinate < outer_coordinates(sharding, axis_index, tensor, property.dim); coordinate++) {
        const int64_t extent = extent_inside(sharding, axis_index, tensor, property.dim, coordinate);
        if (extent % grain != 0) return false;
        if (extent != before && !hapt_split_exists(ratio_of(property, axis), axis->size, extent / grain)) return false;
        before = extent;
    }
    return true;
}

static bool same_everywhere(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis,
                            int tensor, struct hapt_property a, struct hapt_property b)
{
    int64_t before = -1;
    for (int coordinate = 0; coordinate < outer_coordinates(sharding, axis_index, tensor, a.dim); coordinate++) {
        const int64_t extent = extent_inside(sharding, axis_index, tensor, a.dim, coordinate);
        if (extent != before && !same_split(a, b, axis, extent)) return false;
        before = extent;
    }
    return true;
}

struct hapt_property hapt_property_canonical(const struct hapt_sharding *sharding, int axis_index,
                                             const struct hapt_axis *axis, int tensor, struct hapt_property property)
{
    if (property.kind != HAPT_PROPERTY_SHARDED) return (struct hapt_property){.kind = property.kind};
    if (property.blocks < 1) property.blocks = 1;
    if (property.unit < 1) property.unit = 1;
    if (!axis->ratio) property.ratio = 0;
    if (property.unit == 1 && property.ratio == 0) return property;
    const int64_t extent = sharding->graph->tensor[tensor].shape[property.dim];
    for (int ratio = 0; ratio <= property.ratio; ratio++) {
        for (int64_t unit = 1; unit <= property.unit; unit++) {
            struct hapt_property simpler = property;
            simpler.unit = unit, simpler.ratio = ratio;
            if (extent % grain_of(simpler) != 0) continue;
            if (same_everywhere(sharding, axis_index, axis, tensor, simpler, property)) return simpler;
        }
    }
    return property;
}

/* Appends to `made` the local elements [begin, begin + count) of a dimension whose global elements `run` lists. */
static int clip_runs(const struct hapt_box_run *run, int runs, int64_t begin, int64_t count, struct hapt_box_run *made,
                     int made_count)
{
    int64_t at = 0; /* local offset of the run */
    for (int r = 0; r < runs; at += run[r++].count) {
        const int64_t from = begin > at ? begin : at;
        const int64_t end = begin + count < at + run[r].count ? begin + count : at + run[r].count;
        if (from >= end) continue;
        HAPT_ASSERT(made_count < HAPT_MAX_RUNS);
        made[made_count++] = (struct hapt_box_run){run[r].start + from - at, end - from};
    }
    return made_count;
}

void hapt_sharding_box(const struct hapt_sharding *sharding, int tensor, const int *mesh_coordinate,
                       struct hapt_box *box)
{
    const struct hapt_tensor *whole = &sharding->graph->tensor[tensor];
    box->dims = whole->dims;
    for (int d = 0; d < whole->dims; d++) {
        box->runs[d] = 1;
        box->extent[d] = whole->shape[d];
        box->run[d][0] = (struct hapt_box_run){0, whole->shape[d]};
    }
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++) {
        const struct hapt_property property = sharding->property[tensor][axis];
        if (property.kind != HAPT_PROPERTY_SHARDED) continue;
        const int d = property.dim, blocks = (int)blocks_of(property);
        const int64_t block = box->extent[d] / blocks;
        struct hapt_box_run made[HAPT_MAX_RUNS];
        int64_t first, count;
        int runs = 0;
        HAPT_ASSERT(hapt_property_share(property, &sharding->axis[axis], box->extent[d], mesh_coordinate[axis], &first,
                                        &count));
        for (int b = 0; b < blocks; b++)
            runs = clip_runs(box->run[d], box->runs[d], b * block + first, count, made, runs);
        /* Merge adjacent runs. */
        box->runs[d] = 0;
        for (int r = 0; r < runs; r++) {
            struct hapt_box_run *last = box->runs[d] > 0 ? &box->run[d][box->runs[d] - 1] : NULL;
            if (last && last->start + last->count == made[r].start)
                last->count += made[r].count;
            else
                box->run[d][box->runs[d]++] = made[r];
        }
        box->extent[d] = blocks * count;
    }
}
