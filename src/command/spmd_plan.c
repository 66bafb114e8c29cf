/* What hapt spmd found as a plan of one stage, which hapt train runs. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "hapt/memory.h"
#include "spmd.h"

struct need { /* of a device, bytes */
    double parameter, activation;
};

/* The devices' subclusters in order; a plan has its program on devices, along one axis of the stage's mesh. */
static enum hapt_status check_shape(const struct spmd_outcome *outcome)
{
    const struct hapt_cluster *cluster = outcome->cluster;
    if (outcome->mesh->kind == HAPT_SPMD_MACHINES)
        return hapt_fail(HAPT_ERR_USAGE, "leave out --mesh machines",
                         "--output holds a program of devices, not of machines");
    if (cluster->count == 1 && cluster->subcluster[0].nodes > 1 && cluster->subcluster[0].devices_per_node > 1)
        return hapt_fail(HAPT_ERR_USAGE, "use `hapt plan --program synthesised`, whose programs have two axes",
                         "--output: one axis over %d nodes of %d devices is no stage of a plan",
                         cluster->subcluster[0].nodes, cluster->subcluster[0].devices_per_node);
    return HAPT_OK;
}

static enum hapt_status lay_out(const struct spmd_outcome *outcome, int axis, struct hapt_arena *arena,
                                struct hapt_stage_layout **layout)
{
    struct hapt_stage_layout *made;
    HAPT_NEW(made, arena, 1);
    made->axis[1 - axis].size = 1;
    made->axis[axis] = outcome->result.axis;
    made->program[axis] = &outcome->result.program;
    snprintf(made->name, sizeof made->name, "synthesised");
    *layout = made;
    return HAPT_OK;
}

enum { LOOKED_AT = 64 }; /* axes with more devices: one of each run of equal ratios stands for it */

/* Of the device at each place of the axis. */
static enum hapt_status find_needs(const struct spmd_outcome *outcome, const struct hapt_stage_layout *layout, int axis,
                                   int states, struct hapt_arena *arena, struct need *need)
{
    const struct hapt_axis *its = &layout->axis[axis];
    const struct hapt_memory_options options = {.slots = 1, .state_count = states};
    struct hapt_sharding *first;
    HAPT_TRY(hapt_stage_layout_apply(layout, outcome->model->graph, arena, &first));
    for (int j = 0; j < its->size; j++) {
        struct hapt_sharding *here;
        struct hapt_memory_ranges *ranges;
        struct hapt_memory_work *work;
        struct hapt_memory_figures figures;
        int place[HAPT_MESH_AXES] = {0, 0}, like = j - 1;
        for (int k = 0; like >= 0 && its->ratio && k < its->ratio_count; k++)
            if (its->ratio[k * its->size + like] != its->ratio[k * its->size + j]) like = -1;
        if (like >= 0 && its->size > LOOKED_AT) {
            need[j] = need[like];
            continue;
        }
        place[axis] = j;
        HAPT_TRY(hapt_sharding_at(first, place, arena, &here));
        HAPT_TRY(hapt_memory_ranges_create(here, &options, arena, &ranges));
        HAPT_TRY(hapt_memory_work_create(ranges, arena, &work));
        HAPT_TRY(hapt_memory_ranges_of(ranges, 0, outcome->model->graph->forward_count, work, &figures));
        need[j] = (struct need){(double)figures.parameter_bytes, (double)figures.activation_bytes};
    }
    return HAPT_OK;
}

/* A row for each subcluster, by the device of it that needs most; the stage's own figures are those of the tightest. */
static enum hapt_status mix(const struct spmd_outcome *outcome, const struct need *need, struct hapt_arena *arena,
                            struct hapt_plan_stage *stage)
{
    const struct hapt_cluster *cluster = outcome->cluster;
    struct hapt_plan_mixed *mixed;
    size_t length = 0;
    HAPT_NEW(mixed, arena, 1);
    mixed->count = cluster->count;
    HAPT_NEW(mixed->cluster, arena, cluster->count);
    HAPT_NEW(mixed->devices, arena, cluster->count);
    HAPT_NEW(mixed->name, arena, cluster->count);
    HAPT_NEW(mixed->ratio, arena, outcome->mesh->size);
    HAPT_NEW(mixed->parameter_bytes, arena, cluster->count);
    HAPT_NEW(mixed->activation_bytes, arena, cluster->count);
    HAPT_NEW(mixed->device_memory_bytes, arena, cluster->count);
    for (int j = 0; j < outcome->mesh->size; j++) {
        const int c = outcome->mesh->subcluster[j];
        mixed->devices[c]++;
        mixed->ratio[j] = outcome->result.axis.ratio[j];
        if (need[j].parameter + need[j].activation < mixed->parameter_bytes[c] + mixed->activation_bytes[c]) continue;
        mixed->parameter_bytes[c] = need[j].parameter;
        mixed->activation_bytes[c] = need[j].activation;
    }
    double tightest = 0;
    for (int c = 0; c < cluster->count; c++) {
        const struct hapt_subcluster *own = &cluster->subcluster[c];
        const double needed = mixed->parameter_bytes[c] + mixed->activation_bytes[c];
        mixed->cluster[c] = c;
        mixed->name[c] = own->name;
        mixed->device_memory_bytes[c] = own->device.memory_bytes;
        length += (size_t)snprintf(stage->subcluster_name + length, sizeof stage->subcluster_name - length, "%s%s",
                                   c ? "+" : "", own->name);
        if (length >= sizeof stage->subcluster_name) length = sizeof stage->subcluster_name - 1;
        if (needed / own->device.memory_bytes < tightest) continue;
        tightest = needed / own->device.memory_bytes;
        stage->parameter_bytes = mixed->parameter_bytes[c];
        stage->activation_bytes = mixed->activation_bytes[c];
        stage->device_memory_bytes = own->device.memory_bytes;
    }
    stage->mixed = mixed;
    stage->nodes = 1;
    stage->devices_per_node = outcome->mesh->size;
    return HAPT_OK;
}

static void place_alone(const struct spmd_outcome *outcome, const struct need *need, struct hapt_plan_stage *stage)
{
    const struct hapt_subcluster *own = &outcome->cluster->subcluster[0];
    snprintf(stage->subcluster_name, sizeof stage->subcluster_name, "%s", own->name);
    stage->nodes = own->nodes;
    stage->devices_per_node = own->devices_per_node;
    stage->device_memory_bytes = own->device.memory_bytes;
    for (int j = 0; j < outcome->mesh->size; j++) {
        if (need[j].parameter + need[j].activation < stage->parameter_bytes + stage->activation_bytes) continue;
        stage->parameter_bytes = need[j].parameter;
        stage->activation_bytes = need[j].activation;
    }
}

/* Seconds per microbatch; what runs once a step counts by its part. The forward part goes by FLOPs. */
static void price(const struct spmd_outcome *outcome, struct hapt_plan *plan, struct hapt_plan_stage *stage)
{
    const struct hapt_graph *graph = outcome->model->graph;
    const struct hapt_program_price *its = &outcome->result.price;
    double forward = 0;
    for (int o = 0; o < graph->op_count; o++) {
        const double flops = hapt_op_flops(graph, &graph->op[o], 1);
        plan->flops += flops;
        forward += o < graph->forward_count ? flops : 0;
    }
    for (int j = 0; j < outcome->mesh->size; j++)
        plan->peak_flops +=
            outcome->cluster->subcluster[outcome->mesh->subcluster[j]].device.peak_flops[outcome->model->dtype];
    stage->compute_s = its->cost_s;
    stage->step_s = its->end_s * outcome->microbatches;
    stage->forward_s = (its->compute_s + its->communicate_s) * (plan->flops > 0 ? forward / plan->flops : 0);
    plan->t_max_s = stage->compute_s;
}

enum hapt_status spmd_save_plan(const struct spmd_outcome *outcome, int optimizer_states, const char *path,
                                struct hapt_arena *arena)
{
    const struct hapt_cluster *cluster = outcome->cluster;
    HAPT_TRY(check_shape(outcome));
    /* A mixed stage has all devices along axis 0, a subcluster its nodes along axis 0 and the devices of a node along
     * axis 1. */
    const int axis = cluster->count > 1 || cluster->subcluster[0].nodes > 1 ? 0 : 1;
    struct hapt_stage_layout *layout;
    struct need *need;
    struct hapt_plan_stage stage = {.end_layer = outcome->layers->count,
                                    .end_op = outcome->model->graph->forward_count,
                                    .tensor_parallel = 1,
                                    .program = 1,
                                    .warmup = 1};
    struct hapt_plan plan = {.microbatches = outcome->microbatches,
                             .schedule = HAPT_SCHEDULE_H1F1B,
                             .replicas = 1,
                             .layer_count = outcome->layers->count,
                             .stage_count = 1,
                             .stage = &stage,
                             .balance_eta = 1};
    HAPT_NEW(need, arena, outcome->mesh->size);
    HAPT_TRY(lay_out(outcome, axis, arena, &layout));
    HAPT_TRY(find_needs(outcome, layout, axis, optimizer_states, arena, need));
    stage.layout = layout;
    price(outcome, &plan, &stage);
    if (cluster->count > 1)
        HAPT_TRY(mix(outcome, need, arena, &stage));
    else
        place_alone(outcome, need, &stage);
    stage.memory_bytes = stage.parameter_bytes + stage.activation_bytes;
    if (!hapt_at_most(stage.memory_bytes, stage.device_memory_bytes))
        return hapt_fail(HAPT_ERR_INFEASIBLE, "use a smaller microbatch or more devices",
                         "the plan needs %.1f MB of the %.1f MB of a device", 1e-6 * stage.memory_bytes,
                         1e-6 * stage.device_memory_bytes);
    HAPT_TRY(hapt_plan_change(&plan, plan.schedule, plan.microbatches, plan.hide_threshold));
    plan.precision = outcome->model->precision;
    plan.profile = HAPT_PROFILE_PREDICTED;
    HAPT_TRY(hapt_plan_check(&plan));
    return hapt_plan_save(path, &plan);
}
