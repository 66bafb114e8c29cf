/* What the ranks of a stage hold of its tensors, and how copies that several of them hold alike are put together. */
#include "stage.h"

/* ---- places and boxes ---- */

void stage_place(const struct stage *stage, int chunk, int index, int place[HAPT_MESH_AXES])
{
    hapt_team_place(stage->sharding[chunk], index, place);
}

void stage_box(const struct stage *stage, int chunk, int index, int tensor, struct hapt_box *box)
{
    int place[HAPT_MESH_AXES];
    stage_place(stage, chunk, index, place);
    hapt_sharding_box(stage->sharding[chunk], tensor, place, box);
}

void stage_replica(const struct stage *stage, int chunk, int index, int tensor, int *count, int *replica)
{
    const struct hapt_sharding *sharding = stage->sharding[chunk];
    int place[HAPT_MESH_AXES];
    stage_place(stage, chunk, index, place);
    *count = 1;
    *replica = 0;
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++) {
        if (sharding->property[tensor][axis].kind != HAPT_PROPERTY_IDENTITY) continue;
        *count *= sharding->axis[axis].size;
        *replica = *replica * sharding->axis[axis].size + place[axis];
    }
}

bool stage_counts(const struct stage *stage, int tensor, unsigned sliced)
{
    const struct hapt_sharding *sharding = stage->sharding[stage->chunk];
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++)
        if (!(sliced >> axis & 1u) && sharding->property[tensor][axis].kind == HAPT_PROPERTY_IDENTITY && stage->team.place[axis] > 0) return false;
    return true;
}

/* ---- replicas ---- */

enum hapt_status stage_prepare_replicas(struct stage *stage, int tensor, struct stage_replicas *replicas)
{
    const struct hapt_sharding *sharding = stage->sharding[stage->chunk];
    const size_t width = hapt_dtype_bytes(sharding->graph->tensor[tensor].dtype);
    struct hapt_box box;
    int whole = 0, last = 0;
    *replicas = (struct stage_replicas){.count = 1};
    stage_replica(stage, stage->chunk, stage->rank, tensor, &replicas->count, &replicas->index);
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++) {
        if (sharding->property[tensor][axis].kind != HAPT_PROPERTY_IDENTITY || sharding->axis[axis].size == 1) continue;
        whole++;
        last = axis;
    }
    stage_box(stage, stage->chunk, stage->rank, tensor, &box);
    replicas->mine = hapt_reshard_slice(&box, replicas->count, replicas->index);
    replicas->collective = whole == 0 ? NULL : whole == 1 ? stage->team.along[last] : stage->team.whole;
    HAPT_NEW(replicas->part, stage->arena, replicas->count);
    for (int r = 0; r < replicas->count; r++) {
        const struct hapt_reshard_part part = hapt_reshard_slice(&box, replicas->count, r);
        replicas->part[r] = hapt_reshard_part_runs(&box, &part, width);
    }
    return HAPT_OK;
}

enum hapt_status stage_rebuild(struct stage *stage, const struct stage_replicas *replicas, int tensor, void *data)
{
    char what[160];
    if (!replicas->collective) return HAPT_OK;
    const double start_s = hapt_time_s();
    hapt_team_describe(&stage->team, stage->sharding[stage->chunk]->graph->tensor[tensor].name, what, sizeof what);
    const enum hapt_status status =
        hapt_collective_gather_shards(replicas->collective, what, false, replicas->part, NULL, data);
    stage->team.reduce_s += hapt_time_s() - start_s;
    return status;
}
