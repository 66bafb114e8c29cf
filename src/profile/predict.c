/*
 * Predicted profiles: times from a device's description alone, by a roofline per operator; memory by the same planner
 * that the engine uses, without kernel scratch.
 *
 * An operator takes the longer of FLOPs / (peak * efficiency) and bytes / (bandwidth * efficiency), and a launch.
 * Matrix products reach most of the peak when they are long enough to fill the device, attention less; all others are
 * bound by memory on any device there is. Calibrating against measured runs is the user's: `hapt profile` on the
 * hardware.
 */
#include <math.h>
#include <string.h>

#include "reduce.h"

/* Shares of the data sheet's rates that well-tuned libraries reach on large operators. */
#define PRODUCT_EFFICIENCY 0.75
#define ATTENTION_EFFICIENCY 0.45
#define VECTOR_EFFICIENCY 0.3 /* of the fp32 rate: element-wise arithmetic */
#define BANDWIDTH_EFFICIENCY 0.8

struct roofline {
    double peak_flops, vector_flops; /* FLOP/s: matrix products in the model's type, element-wise arithmetic */
    double bandwidth;                /* byte/s */
    double launch_s;                 /* of one kernel */
    double fill_s;                   /* an operator of this length at full rate reaches half of it */
};

static struct roofline describe(const struct candidates *candidates, int subcluster)
{
    const struct hapt_device_spec *device = &candidates->cluster->subcluster[subcluster].device;
    const bool cpu = device->backend[0] == 'c' && device->backend[1] == 'p';
    const double peak = candidates_device_speed(candidates, subcluster) * fmax(device->slowdown, 1);
    return (struct roofline){.peak_flops = peak,
                             .vector_flops = device->peak_flops[HAPT_F32] > 0 ? device->peak_flops[HAPT_F32] : peak,
                             .bandwidth = device->memory_bandwidth,
                             .launch_s = cpu ? 0.5e-6 : 4e-6,
                             .fill_s = cpu ? 0.5e-6 : 6e-6};
}

static double operator_s(const struct roofline *roofline, const struct hapt_graph *graph, const struct hapt_op *op,
                         double fraction)
{
    const struct hapt_op_type *type = hapt_op_type_at(op->type);
    const double flops = hapt_op_flops(graph, op, fraction), bytes = hapt_op_bytes(graph, op, fraction);
    double compute_s = 0, memory_s = 0;
    if (!type->heavy && roofline->vector_flops > 0) {
        compute_s = flops / (roofline->vector_flops * VECTOR_EFFICIENCY);
    } else if (roofline->peak_flops > 0) {
        /* ideal / (efficiency * filling), filling = ideal / (ideal + fill) */
        compute_s = (flops / roofline->peak_flops + roofline->fill_s) /
                    (type->contracts ? PRODUCT_EFFICIENCY : ATTENTION_EFFICIENCY);
    }
    if (roofline->bandwidth > 0) memory_s = bytes / (roofline->bandwidth * BANDWIDTH_EFFICIENCY);
    return roofline->launch_s + fmax(compute_s, memory_s);
}

/* Seconds of every layer on one device of a subcluster: forward [L], backward [L]. */
static enum hapt_status time_layers(const struct candidates *candidates, int subcluster, int devices,
                                    struct hapt_arena *scratch, double *forward_s, double *backward_s)
{
    const struct hapt_graph *graph = candidates->model->graph;
    const struct roofline roofline = describe(candidates, subcluster);
    const double slowdown = fmax(candidates->cluster->subcluster[subcluster].device.slowdown, 1);
    int *layer_of;
    HAPT_NEW(layer_of, scratch, graph->forward_count);
    for (int l = 0, op = 0; l < candidates->layer_count; l++) {
        forward_s[l] = backward_s[l] = 0;
        for (; op < candidates->layers->end_op[l]; op++) layer_of[op] = l;
    }
    for (int o = 0; o < graph->op_count; o++) {
        const double seconds = slowdown * operator_s(&roofline, graph, &graph->op[o], 1.0 / devices);
        (o < graph->forward_count ? forward_s : backward_s)[layer_of[graph->op[o].forward_op]] += seconds;
    }
    return HAPT_OK;
}

static enum hapt_status time_items(const struct candidates *candidates, int subcluster,
                                   const struct item_memory *memory, struct hapt_arena *scratch, struct item_time *time)
{
    const struct hapt_device_spec *device = &candidates->cluster->subcluster[subcluster].device;
    const int L = candidates->layer_count;
    double *forward_s, *backward_s;
    HAPT_NEW(forward_s, scratch, L);
    HAPT_NEW(backward_s, scratch, L);
    for (int d = 0; d < candidates->degree_count; d++) {
        HAPT_TRY(time_layers(candidates, subcluster, candidates->degree[d], scratch, forward_s, backward_s));
        for (int k = 0; k < candidates->structure_count; k++) {
            const int item = k * candidates->degree_count + d;
            struct item_time mine = {0};
            for (int l = candidates->first[k]; l <= candidates->last[k]; l++) {
                mine.forward_s += forward_s[l];
                mine.backward_s += backward_s[l];
            }
            if (device->memory_bandwidth > 0)
                mine.update_s = fmax(device->slowdown, 1) * memory[item].update_bytes /
                                (device->memory_bandwidth * BANDWIDTH_EFFICIENCY);
            time[item] = mine;
        }
    }
    return HAPT_OK;
}

static double all_reduce(const void *context, int subcluster, int index, struct hapt_submesh submesh, double bytes)
{
    (void)index;
    const struct hapt_cluster *cluster = context;
    return reduce_predicted_s(&cluster->subcluster[subcluster], submesh, bytes);
}

/* Memory of every item as the engine would plan it, kernel scratch included where the back end is at hand. Subclusters of one
 * back end share the figures. */
static enum hapt_status plan_memory(const struct candidates *candidates, int subcluster, struct item_memory **memory,
                                    struct hapt_arena *scratch)
{
    const struct hapt_subcluster *all = candidates->cluster->subcluster;
    for (int c = 0; c < subcluster; c++) {
        if (strcmp(all[c].device.backend, all[subcluster].device.backend) != 0) continue;
        memory[subcluster] = memory[c];
        return HAPT_OK;
    }
    HAPT_NEW(memory[subcluster], scratch, candidates->item_count);
    const char *reason = NULL;
    struct hapt_engine_options engine = {.backend = hapt_backend_find(all[subcluster].device.backend), .threads = 1};
    if (engine.backend && engine.backend->device_count(&reason) > 0)
        HAPT_TRY(engine.backend->open(0, engine.threads, 0, &engine.device));
    enum hapt_status status = HAPT_OK;
    for (int item = 0; status == HAPT_OK && item < candidates->item_count; item++)
        status = candidates_plan_memory(candidates, item, engine.device ? &engine : NULL, &memory[subcluster][item]);
    if (engine.device) engine.backend->close(engine.device);
    return status;
}

static enum hapt_status predict(const struct candidates *candidates, struct hapt_arena *scratch,
                                struct hapt_arena *result, struct hapt_profile **profile)
{
    const struct hapt_cluster *cluster = candidates->cluster;
    struct item_memory **memory;
    struct item_time **time;
    HAPT_NEW(memory, scratch, cluster->count);
    HAPT_NEW(time, scratch, cluster->count);
    for (int c = 0; c < cluster->count; c++) {
        HAPT_TRY(plan_memory(candidates, c, memory, scratch));
        HAPT_NEW(time[c], scratch, candidates->item_count);
        HAPT_TRY(time_items(candidates, c, memory[c], scratch, time[c]));
    }
    return candidates_fill(candidates, memory, time, all_reduce, cluster, result, profile);
}

enum hapt_status hapt_profile_predict(const struct hapt_cluster *cluster, const struct hapt_model *model,
                                      const struct hapt_layers *layers, const struct hapt_config *config,
                                      struct hapt_arena *result, struct hapt_profile **profile)
{
    struct candidates candidates;
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    enum hapt_status status = candidates_build(cluster, model, layers, config, &scratch, &candidates);
    if (status == HAPT_OK) status = predict(&candidates, &scratch, result, profile);
    hapt_arena_release(&scratch);
    return status;
}
