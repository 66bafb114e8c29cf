/* Costs of a cluster for synthesis: rooflines for operators, rings for collectives. */
#include "hapt/spmd_mesh.h"

#include <math.h>
#include <string.h>

#include "hapt/calibration.h"

struct mesh { /* context of the costs */
    struct hapt_spmd_mesh shown;
    struct hapt_roofline *roofline;            /* [size] */
    double *inner_bandwidth, *inner_latency_s; /* [size] inside a machine */
    double microbatches;
};

/* Rings inside a machine of m devices. */
static double inner_rounds_s(const struct mesh *mesh, int device, double rounds, double bytes)
{
    const int m = mesh->shown.devices[device];
    return m == 1 ? 0
                  : rounds *
                        ((m - 1) * mesh->inner_latency_s[device] + bytes * (m - 1) / m / mesh->inner_bandwidth[device]);
}

static double compute_s(const void *context, const struct hapt_spmd_work *work, int device)
{
    const struct mesh *mesh = context;
    const struct hapt_op *op = &work->graph->op[work->op];
    const struct hapt_op_type *type = hapt_op_type_at(op->type);
    const int m = mesh->shown.devices[device];
    double seconds =
        hapt_roofline_operator_s(&mesh->roofline[device], hapt_efficiency_class_of(type),
                                 hapt_op_flops(work->graph, op, 1) * work->share / m, hapt_spmd_work_bytes(work, m)) +
        hapt_roofline_stream_s(&mesh->roofline[device], work->share * hapt_op_pass_bytes(work->graph, op));
    if (m == 1 && !mesh->shown.update_s) return seconds;
    for (int o = 0; o < op->output_count; o++) {
        if (op->output[o] < 0) continue;
        const int primal = work->graph->tensor[op->output[o]].primal;
        const bool sharded = work->sharded_output >> o & 1u;
        if (primal < 0 || work->graph->tensor[primal].kind != HAPT_TENSOR_PARAMETER) continue;
        const bool trained = work->graph->tensor[primal].trainable;
        /* Once a step, on the part of the parameter that the gradient covers. Partial sums are mostly all-reduced,
         * so they count in full. */
        if (mesh->shown.update_s && trained)
            seconds += mesh->shown.update_s[device] * (double)hapt_tensor_elements(&work->graph->tensor[primal]) *
                       (sharded ? work->share : 1) / mesh->microbatches;
        /* Inner sums of parameter gradients that no collective between machines sums. Partial gradients do have one
         * (HAP 3.2). */
        if (m == 1 || (!sharded && work->cut.letter != HAPT_CUT_REPLICATED)) continue;
        const double bytes =
            (double)hapt_tensor_bytes(&work->graph->tensor[op->output[o]]) * (sharded ? work->share : 1);
        seconds += inner_rounds_s(mesh, device, 2, bytes) / mesh->microbatches;
    }
    return seconds;
}

static double between_s(const struct mesh *mesh, enum hapt_collective_kind kind, double bytes, double largest_share)
{
    return hapt_collective_cost_s(&mesh->shown.collectives, kind, bytes, largest_share);
}

/* Three steps (HAP 6): gather or reduce to the first device, the collective between machines, scatter or broadcast.
 * In each inner step all its data pass the first device's link once. */
static double collective_s(const void *context, enum hapt_collective_kind kind, double bytes, double largest_share)
{
    const struct mesh *mesh = context;
    const double outer_s = between_s(mesh, kind, bytes, largest_share);
    if (mesh->shown.kind == HAPT_SPMD_DEVICES || kind == HAPT_COLLECTIVE_SLICE || kind == HAPT_COLLECTIVE_NONE)
        return outer_s;
    const bool sums = kind == HAPT_COLLECTIVE_ALL_REDUCE || kind == HAPT_COLLECTIVE_REDUCE_SCATTER;
    const bool whole = kind != HAPT_COLLECTIVE_REDUCE_SCATTER && kind != HAPT_COLLECTIVE_ALL_TO_ALL;
    double inner_s = 0;
    for (int j = 0; j < mesh->shown.size; j++) {
        const double in = sums ? bytes : bytes * largest_share, out = whole ? bytes : bytes * largest_share;
        inner_s = fmax(inner_s, inner_rounds_s(mesh, j, 1, in) + inner_rounds_s(mesh, j, 1, out));
    }
    return outer_s + inner_s;
}

/* The engine sums gradients in one call, so a single sum does not pay its latency. */
static double gradient_s(const void *context, enum hapt_collective_kind kind, double bytes, double largest_share)
{
    const double seconds = collective_s(context, kind, bytes, largest_share);
    return kind == HAPT_COLLECTIVE_ALL_REDUCE ? seconds - collective_s(context, kind, 0, largest_share) : seconds;
}

static double device_bytes(const void *context, const struct hapt_graph *graph, int tensor)
{
    const struct mesh *mesh = context;
    int fewest = mesh->shown.devices[0];
    for (int j = 1; j < mesh->shown.size; j++)
        fewest = mesh->shown.devices[j] < fewest ? mesh->shown.devices[j] : fewest;
    return hapt_spmd_tensor_bytes(graph, tensor, fewest);
}

static enum hapt_status list_devices(const struct hapt_cluster *cluster, enum hapt_dtype dtype,
                                     const struct hapt_efficiency *efficiency, struct hapt_arena *arena,
                                     struct mesh *mesh)
{
    struct hapt_spmd_mesh *shown = &mesh->shown;
    int *kind, at = 0;
    for (int c = 0; c < cluster->count; c++)
        shown->size += cluster->subcluster[c].nodes *
                       (shown->kind == HAPT_SPMD_MACHINES ? 1 : cluster->subcluster[c].devices_per_node);
    if (shown->size < 2)
        return hapt_fail(
            HAPT_ERR_INPUT, "give a cluster file with more devices, or --mesh devices for one machine of several",
            "a mesh of one %s has nothing to share out", shown->kind == HAPT_SPMD_MACHINES ? "machine" : "device");
    HAPT_NEW(shown->subcluster, arena, shown->size);
    HAPT_NEW(shown->devices, arena, shown->size);
    HAPT_NEW(shown->power, arena, shown->size);
    HAPT_NEW(shown->memory_bytes, arena, shown->size);
    HAPT_NEW(mesh->roofline, arena, shown->size);
    HAPT_NEW(mesh->inner_bandwidth, arena, shown->size);
    HAPT_NEW(mesh->inner_latency_s, arena, shown->size);
    HAPT_NEW(kind, arena, shown->size);
    for (int c = 0; c < cluster->count; c++) {
        const struct hapt_subcluster *own = &cluster->subcluster[c];
        const bool machines = shown->kind == HAPT_SPMD_MACHINES;
        for (int k = 0; k < own->nodes * (machines ? 1 : own->devices_per_node); k++, at++) {
            shown->subcluster[at] = kind[at] = c;
            shown->devices[at] = machines ? own->devices_per_node : 1;
            shown->memory_bytes[at] = own->device.memory_bytes;
            mesh->roofline[at] = hapt_calibration_roofline(efficiency, &own->device, dtype);
            mesh->inner_bandwidth[at] = own->intra_node_bandwidth;
            mesh->inner_latency_s[at] = own->intra_node_latency;
            if (shown->devices[at] > 1 && (!(own->intra_node_bandwidth > 0) || !(own->intra_node_latency >= 0)))
                return hapt_fail(HAPT_ERR_INPUT, "give it in the cluster file",
                                 "the bandwidth or latency of the links inside %s is unknown", own->name);
        }
    }
    shown->costs.kind = kind;
    return HAPT_OK;
}

/*
 * A ring passes a machine's network card once in each direction, so its devices need not share it. In an all-to-all,
 * all m devices of a machine send through one card to all outside devices.
 */
static void share_cards(const struct hapt_cluster *cluster, struct mesh *mesh)
{
    const int n = mesh->shown.size;
    struct hapt_collective_term *term = &mesh->shown.collectives.term[HAPT_COLLECTIVE_ALL_TO_ALL];
    double factor = 1;
    for (int c = 0; c < cluster->count; c++) {
        const double m = cluster->subcluster[c].devices_per_node;
        factor = fmax(factor, m * (n - m) / (n - 1));
    }
    if (mesh->shown.kind == HAPT_SPMD_MACHINES) return;
    term->byte_s *= factor;
    term->skew_s *= factor;
}

static enum hapt_status join_devices(const struct hapt_cluster *cluster, struct mesh *mesh)
{
    struct hapt_collective_links links;
    struct hapt_subcluster machine[HAPT_MAX_SUBCLUSTERS];
    struct hapt_cluster seen = *cluster; /* with a machine as one device */
    int devices[HAPT_MAX_SUBCLUSTERS];
    seen.subcluster = machine;
    for (int c = 0; c < cluster->count; c++) {
        machine[c] = cluster->subcluster[c];
        if (mesh->shown.kind == HAPT_SPMD_MACHINES) machine[c].devices_per_node = 1;
        devices[c] = machine[c].nodes * machine[c].devices_per_node;
    }
    const struct hapt_collective_model *measured = hapt_collective_model_measured(cluster, mesh->shown.size);
    if (measured && mesh->shown.kind == HAPT_SPMD_DEVICES) { /* measured between devices, not machines */
        mesh->shown.collectives = *measured;
        return HAPT_OK;
    }
    HAPT_TRY(hapt_collective_links_slowest(&seen, devices, &links));
    hapt_collective_model_links(&links, &mesh->shown.collectives);
    share_cards(cluster, mesh);
    return HAPT_OK;
}

/* Speed on the full model, computed on one device of the axis. */
static void find_power(const struct hapt_graph *graph, struct mesh *mesh)
{
    for (int j = 0; j < mesh->shown.size; j++) {
        if (j > 0 && mesh->shown.costs.kind[j] == mesh->shown.costs.kind[j - 1]) {
            mesh->shown.power[j] = mesh->shown.power[j - 1];
            continue;
        }
        double seconds = 0;
        for (int o = 0; o < graph->op_count; o++) {
            const struct hapt_spmd_work work = {
                .graph = graph, .op = o, .cut = {.letter = HAPT_CUT_REPLICATED}, .share = 1};
            const struct hapt_op *op = &graph->op[o];
            seconds += hapt_roofline_operator_s(&mesh->roofline[j], hapt_efficiency_class_of(hapt_op_type_at(op->type)),
                                                hapt_op_flops(graph, op, 1) / mesh->shown.devices[j],
                                                hapt_spmd_work_bytes(&work, mesh->shown.devices[j]));
        }
        mesh->shown.power[j] = 1 / seconds;
    }
}

enum hapt_status hapt_spmd_mesh_build(const struct hapt_cluster *cluster, const struct hapt_graph *graph,
                                      enum hapt_dtype dtype, enum hapt_spmd_mesh_kind kind,
                                      const struct hapt_efficiency *efficiency, int microbatches,
                                      struct hapt_arena *arena, struct hapt_spmd_mesh **result)
{
    struct mesh *mesh;
    HAPT_NEW(mesh, arena, 1);
    mesh->shown.kind = kind;
    mesh->microbatches = microbatches > 0 ? microbatches : 1;
    HAPT_TRY(list_devices(cluster, dtype, efficiency, arena, mesh));
    HAPT_TRY(join_devices(cluster, mesh));
    find_power(graph, mesh);
    mesh->shown.costs.context = mesh;
    mesh->shown.costs.compute_s = compute_s;
    mesh->shown.costs.collective_s = collective_s;
    mesh->shown.costs.gradient_s = gradient_s;
    mesh->shown.memory_costs = mesh->shown.costs;
    mesh->shown.memory_costs.tensor_bytes = device_bytes;
    *result = &mesh->shown;
    return HAPT_OK;
}
