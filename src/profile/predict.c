/*
 * Predicted profiles: times from a device's description alone, by a roofline per operator (efficiency.h); memory by the
 * same planner that the engine uses, without kernel scratch.
 */
#include <string.h>

#include "calibrate.h"
#include "reduce.h"

static struct roofline describe(const struct candidates *candidates, int subcluster)
{
    return calibrate_roofline(candidates->efficiency, &candidates->cluster->subcluster[subcluster].device,
                              candidates->model->dtype);
}

static double operator_s(const struct roofline *roofline, const struct hapt_graph *graph, const struct hapt_op *op,
                         double fraction)
{
    return roofline_operator_s(roofline, efficiency_class_of(hapt_op_type_at(op->type)),
                               hapt_op_flops(graph, op, fraction), hapt_op_bytes(graph, op, fraction));
}

/* Seconds of every layer on one device of a subcluster: forward [L], backward [L]. */
static enum hapt_status time_layers(const struct candidates *candidates, int subcluster, int devices,
                                    struct hapt_arena *scratch, double *forward_s, double *backward_s)
{
    const struct hapt_graph *graph = candidates->model->graph;
    const struct roofline roofline = describe(candidates, subcluster);
    int *layer_of;
    HAPT_NEW(layer_of, scratch, graph->forward_count);
    for (int l = 0, op = 0; l < candidates->layer_count; l++) {
        forward_s[l] = backward_s[l] = 0;
        for (; op < candidates->layers->end_op[l]; op++) layer_of[op] = l;
    }
    for (int o = 0; o < graph->op_count; o++) {
        const double seconds = operator_s(&roofline, graph, &graph->op[o], 1.0 / devices);
        (o < graph->forward_count ? forward_s : backward_s)[layer_of[graph->op[o].forward_op]] += seconds;
    }
    return HAPT_OK;
}

static enum hapt_status time_items(const struct candidates *candidates, int subcluster,
                                   const struct item_memory *memory, struct hapt_arena *scratch, struct item_time *time)
{
    const struct roofline roofline = describe(candidates, subcluster);
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
            mine.update_s = roofline_stream_s(&roofline, memory[item].update_bytes);
            time[item] = mine;
        }
    }
    return HAPT_OK;
}

static double all_reduce(const void *context, int subcluster, int index, struct hapt_submesh submesh, double bytes)
{
    (void)index;
    const struct candidates *candidates = context;
    const struct hapt_subcluster *where = &candidates->cluster->subcluster[subcluster];
    return reduce_predicted_s(where, submesh, bytes) *
           calibrate_sum_factor(candidates->efficiency, &where->device, candidates->model->dtype, bytes);
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
    return candidates_fill(candidates, memory, time, all_reduce, candidates, result, profile);
}

enum hapt_status hapt_profile_predict_with(const struct hapt_cluster *cluster, const struct hapt_model *model,
                                           const struct hapt_layers *layers, const struct hapt_config *config,
                                           const struct hapt_efficiency *efficiency, struct hapt_arena *result,
                                           struct hapt_profile **profile)
{
    struct candidates candidates;
    struct hapt_arena scratch;
    const double start_s = hapt_time_s();
    hapt_arena_init(&scratch);
    enum hapt_status status = candidates_build(cluster, model, layers, config, &scratch, &candidates);
    candidates.efficiency = efficiency;
    if (status == HAPT_OK) status = predict(&candidates, &scratch, result, profile);
    if (status == HAPT_OK) (*profile)->effort.seconds = hapt_time_s() - start_s;
    hapt_arena_release(&scratch);
    return status;
}

enum hapt_status hapt_profile_predict(const struct hapt_cluster *cluster, const struct hapt_model *model,
                                      const struct hapt_layers *layers, const struct hapt_config *config,
                                      struct hapt_arena *result, struct hapt_profile **profile)
{
    return hapt_profile_predict_with(cluster, model, layers, config, NULL, result, profile);
}
