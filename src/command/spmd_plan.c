/* Saves the result of hapt spmd as a plan of one stage, for hapt train. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "hapt/memory.h"
#include "spmd.h"

struct device_bytes {
    double parameter, activation;
};

/* Refuses what a plan cannot hold: its program runs on devices, along one axis of the stage's mesh. */
static enum hapt_status check_shape(const struct spmd_outcome *outcome)
{
    const struct hapt_cluster *cluster = outcome->cluster;
    if (outcome->mesh->kind == HAPT_SPMD_MACHINES)
        return hapt_fail(HAPT_ERR_USAGE, "leave out --mesh machines",
                         "--output holds a program for devices, not for machines");
    if (cluster->count == 1 && cluster->subcluster[0].nodes > 1 && cluster->subcluster[0].devices_per_node > 1)
        return hapt_fail(HAPT_ERR_USAGE, "use `hapt plan --program synthesised`, whose programs have two axes",
                         "--output: one axis over %d nodes of %d devices cannot be a stage of a plan",
                         cluster->subcluster[0].nodes, cluster->subcluster[0].devices_per_node);
    return HAPT_OK;
}

static enum hapt_status make_layout(const struct spmd_outcome *outcome, int axis_index, struct hapt_arena *arena,
                                    struct hapt_stage_layout **layout)
{
    struct hapt_stage_layout *made;
    HAPT_NEW(made, arena, 1);
    made->axis[1 - axis_index].size = 1;
    made->axis[axis_index] = outcome->result.axis;
    made->program[axis_index] = &outcome->result.program;
    snprintf(made->name, sizeof made->name, "synthesised");
    *layout = made;
    return HAPT_OK;
}

enum { EXACT_AXIS_SIZE = 64 }; /* on longer axes, neighbours with equal ratios are computed once */

/* Memory need of the device at each coordinate of the axis. */
static enum hapt_status compute_memory(const struct spmd_outcome *outcome, const struct hapt_stage_layout *layout,
                                       int axis_index, int states, struct hapt_arena *arena, struct device_bytes *bytes)
{
    const struct hapt_axis *axis = &layout->axis[axis_index];
    const struct hapt_memory_options options = {.slots = 1, .state_count = states};
    struct hapt_sharding *first;
    HAPT_TRY(hapt_stage_layout_apply(layout, outcome->model->graph, arena, &first));
    for (int j = 0; j < axis->size; j++) {
        struct hapt_sharding *here;
        struct hapt_memory_ranges *ranges;
        struct hapt_memory_work *work;
        struct hapt_memory_bytes figures;
        int mesh_coordinate[HAPT_MESH_AXES] = {0, 0}, like = j - 1;
        for (int k = 0; like >= 0 && axis->ratio && k < axis->ratio_count; k++)
            if (axis->ratio[k * axis->size + like] != axis->ratio[k * axis->size + j]) like = -1;
        if (like >= 0 && axis->size > EXACT_AXIS_SIZE) {
            bytes[j] = bytes[like];
            continue;
        }
        mesh_coordinate[axis_index] = j;
        HAPT_TRY(hapt_sharding_at(first, mesh_coordinate, arena, &here));
        HAPT_TRY(hapt_memory_ranges_create(here, &options, arena, &ranges));
        HAPT_TRY(hapt_memory_work_create(ranges, arena, &work));
        HAPT_TRY(hapt_memory_ranges_of(ranges, 0, outcome->model->graph->forward_count, NULL, work, &figures));
        bytes[j] = (struct device_bytes){(double)figures.parameter_bytes, (double)figures.activation_bytes};
    }
    return HAPT_OK;
}

/* Fills the submesh, a part for each subcluster of the cluster; memory is that of a part's device with the largest
 * need. */
static enum hapt_status fill_devices(const struct spmd_outcome *outcome, const struct device_bytes *bytes,
                                     struct hapt_arena *arena, struct hapt_plan_stage *stage)
{
    const struct hapt_cluster *cluster = outcome->cluster;
    struct hapt_plan_submesh *submesh = stage->submesh;
    const bool mixed = cluster->count > 1;
    double *ratio;
    HAPT_TRY(hapt_plan_stage_parts(stage, cluster->count, arena));
    submesh->nodes = mixed ? 1 : cluster->subcluster[0].nodes;
    submesh->devices_per_node = mixed ? outcome->mesh->size : cluster->subcluster[0].devices_per_node;
    HAPT_NEW(ratio, arena, outcome->mesh->size);
    for (int j = 0; j < outcome->mesh->size; j++) {
        const int c = outcome->mesh->subcluster[j];
        double *parameter = &stage->part_parameter_bytes[c], *activation = &stage->part_activation_bytes[c];
        submesh->devices[c]++;
        if (mixed) ratio[j] = outcome->result.axis.ratio[j];
        if (bytes[j].parameter + bytes[j].activation < *parameter + *activation) continue;
        *parameter = bytes[j].parameter;
        *activation = bytes[j].activation;
    }
    if (mixed) stage->layout.ratio = ratio;
    for (int c = 0; c < cluster->count; c++) {
        const struct hapt_subcluster *own = &cluster->subcluster[c];
        submesh->subcluster[c] = c;
        submesh->part_name[c] = own->name;
        submesh->device_memory_bytes[c] = own->device.memory_bytes;
    }
    hapt_plan_submesh_set_name(submesh);
    hapt_plan_stage_tighten(stage);
    return HAPT_OK;
}

/* Costs in seconds per microbatch, with a share of the work done once per step. Forward time: by its share of FLOPs. */
static void set_costs(const struct spmd_outcome *outcome, struct hapt_plan *plan, struct hapt_plan_stage *stage)
{
    const struct hapt_graph *graph = outcome->model->graph;
    const struct hapt_program_price *price = &outcome->result.price;
    double forward = 0;
    for (int o = 0; o < graph->op_count; o++) {
        const double flops = hapt_op_flops(graph, &graph->op[o], 1);
        plan->flops += flops;
        forward += o < graph->forward_count ? flops : 0;
    }
    for (int j = 0; j < outcome->mesh->size; j++)
        plan->peak_flops +=
            outcome->cluster->subcluster[outcome->mesh->subcluster[j]].device.peak_flops[outcome->model->dtype];
    stage->compute_s = price->cost_s;
    stage->step_s = price->end_s * outcome->microbatches;
    stage->forward_s = (price->compute_s + price->communicate_s) * (plan->flops > 0 ? forward / plan->flops : 0);
    plan->t_max_s = stage->compute_s;
}

enum hapt_status spmd_save_plan(const struct spmd_outcome *outcome, int optimizer_states, const char *path,
                                struct hapt_arena *arena)
{
    const struct hapt_cluster *cluster = outcome->cluster;
    HAPT_TRY(check_shape(outcome));
    /* A mixed stage has all devices along axis 0. On one subcluster, axis 0 has the nodes, axis 1 a node's devices. */
    const int axis_index = cluster->count > 1 || cluster->subcluster[0].nodes > 1 ? 0 : 1;
    struct hapt_stage_layout *layout;
    struct device_bytes *bytes;
    struct hapt_plan plan = {.microbatches = outcome->microbatches,
                             .schedule = HAPT_SCHEDULE_H1F1B,
                             .replicas = 1,
                             .layer_count = outcome->layers->count,
                             .balance_eta = 1};
    HAPT_TRY(hapt_plan_allot(&plan, 1, arena));
    struct hapt_plan_stage *stage = plan.stage;
    stage->first_op = 0;
    stage->end_layer = outcome->layers->count;
    stage->end_op = outcome->model->graph->forward_count;
    stage->warmup = 1;
    HAPT_NEW(bytes, arena, outcome->mesh->size);
    HAPT_TRY(make_layout(outcome, axis_index, arena, &layout));
    HAPT_TRY(compute_memory(outcome, layout, axis_index, optimizer_states, arena, bytes));
    stage->layout =
        (struct hapt_layout){.kind = HAPT_LAYOUT_PROGRAM, .tensor_parallel = 1, .number = 1, .program = layout};
    set_costs(outcome, &plan, stage);
    HAPT_TRY(fill_devices(outcome, bytes, arena, stage));
    if (!hapt_at_most(stage->memory_bytes, stage->device_memory_bytes))
        return hapt_fail(HAPT_ERR_INFEASIBLE, "use a smaller microbatch or more devices",
                         "the plan needs %.1f MB of the %.1f MB of a device", 1e-6 * stage->memory_bytes,
                         1e-6 * stage->device_memory_bytes);
    HAPT_TRY(hapt_plan_change(&plan, plan.schedule, plan.microbatches, plan.hide_threshold));
    plan.precision = outcome->model->precision;
    plan.profile = HAPT_PROFILE_PREDICTED;
    HAPT_TRY(hapt_plan_check(&plan));
    return hapt_plan_save(path, &plan);
}
