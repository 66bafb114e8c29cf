/* The parts that the ranks of a stage hold of its tensors, and the assembly of replicated tensors from parts. */
#include "runtime.h"

/* ---- mesh coordinates and boxes ---- */

void stage_mesh_coordinate(const struct worker *worker, int chunk, int index, int mesh_coordinate[HAPT_MESH_AXES])
{
    hapt_team_mesh_coordinate(worker->sharding[chunk], index, mesh_coordinate);
}

void stage_box(const struct worker *worker, int chunk, int index, int tensor, struct hapt_box *box)
{
    int mesh_coordinate[HAPT_MESH_AXES];
    stage_mesh_coordinate(worker, chunk, index, mesh_coordinate);
    hapt_sharding_box(worker->sharding[chunk], tensor, mesh_coordinate, box);
}

void stage_replica(const struct worker *worker, int chunk, int index, int tensor, int *count, int *replica)
{
    const struct hapt_sharding *sharding = worker->sharding[chunk];
    int mesh_coordinate[HAPT_MESH_AXES];
    stage_mesh_coordinate(worker, chunk, index, mesh_coordinate);
    *count = 1;
    *replica = 0;
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++) {
        if (sharding->property[tensor][axis].kind != HAPT_PROPERTY_REPLICATED) continue;
        *count *= sharding->axis[axis].size;
        *replica = *replica * sharding->axis[axis].size + mesh_coordinate[axis];
    }
}

/* Axes over which the holders of a parameter update one slice each. */
unsigned stage_sliced_axes(const struct stage *stage, int parameter)
{
    const struct hapt_memory_plan *plan = hapt_engine_memory(stage->engine);
    for (int g = 0; g < HAPT_PARAMETER_GROUPS && plan->sharded_state; g++)
        if (plan->parameter_element[parameter] >= plan->group[g].first &&
            plan->parameter_element[parameter] < plan->group[g].end)
            return plan->group[g].axes;
    return 0;
}

bool stage_counts(const struct stage *stage, int tensor, unsigned sliced)
{
    const struct hapt_sharding *sharding = stage->sharding;
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++)
        if (!(sliced >> axis & 1u) && sharding->property[tensor][axis].kind == HAPT_PROPERTY_REPLICATED &&
            stage->team.mesh_coordinate[axis] > 0)
            return false;
    return true;
}

/* ---- replicas ---- */

enum hapt_status worker_copy(struct worker *worker, void *to, const void *from, size_t bytes)
{
    struct hapt_queue *queue = worker->backend->queue(worker->device, HAPT_QUEUE_COMPUTE);
    HAPT_TRY(worker->backend->copy(queue, to, from, bytes));
    return worker->backend->wait(worker->backend->record(queue));
}

enum hapt_status stage_prepare_replicas(struct stage *stage, int tensor, struct stage_replicas *replicas)
{
    const struct hapt_sharding *sharding = stage->sharding;
    const size_t width = hapt_dtype_bytes(sharding->graph->tensor[tensor].dtype);
    struct hapt_box box;
    *replicas = (struct stage_replicas){.count = 1};
    stage_replica(stage->worker, stage->chunk, stage->rank, tensor, &replicas->count, &replicas->index);
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++) {
        if (sharding->property[tensor][axis].kind != HAPT_PROPERTY_REPLICATED || sharding->axis[axis].size == 1)
            continue;
        if (stage->worker->runtime->computes) replicas->axes |= 1u << axis;
    }
    stage_box(stage->worker, stage->chunk, stage->rank, tensor, &box);
    replicas->mine = hapt_reshard_slice(&box, replicas->count, replicas->index);
    HAPT_NEW(replicas->part, stage->worker->arena, replicas->count);
    for (int r = 0; r < replicas->count; r++) {
        const struct hapt_reshard_part part = hapt_reshard_slice(&box, replicas->count, r);
        replicas->part[r] = hapt_reshard_part_runs(&box, &part, width);
    }
    return HAPT_OK;
}

/* All-gathers the parts: on the devices if `on_device`, else on the host. */
static enum hapt_status gather_parts(struct stage *stage, const struct stage_replicas *replicas, int tensor,
                                     bool on_device, void *data)
{
    char what[160];
    const double start_s = hapt_time_s();
    hapt_team_describe(&stage->team, stage->sharding->graph->tensor[tensor].name, what, sizeof what);
    const enum hapt_status status = on_device
                                        ? hapt_team_rebuild(&stage->team, replicas->axes, what, replicas->part, data)
                                        : hapt_collective_gather_shards(hapt_team_comm(&stage->team, replicas->axes),
                                                                        what, false, replicas->part, NULL, data);
    stage->team.reduce_s += hapt_time_s() - start_s;
    return status;
}

enum hapt_status stage_rebuild(struct stage *stage, const struct stage_replicas *replicas, int tensor, void *data)
{
    return replicas->axes == 0 ? HAPT_OK : gather_parts(stage, replicas, tensor, false, data);
}

enum hapt_status stage_rebuild_received(struct stage *stage, const struct stage_replicas *replicas, int tensor,
                                        void *data)
{
    const size_t bytes = hapt_engine_tensor_bytes(stage->engine, tensor);
    if (replicas->axes == 0) return HAPT_OK;
    if (!stage->bounce) return gather_parts(stage, replicas, tensor, true, data);
    HAPT_TRY(worker_copy(stage->worker, stage->bounce, data, bytes));
    HAPT_TRY(gather_parts(stage, replicas, tensor, false, stage->bounce));
    return worker_copy(stage->worker, data, stage->bounce, bytes);
}
