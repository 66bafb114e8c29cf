/* Programs that synthesis finds for the meshes of a cluster, and what their collectives cost. */
#include "synthesised.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "calibrate.h"
#include "hapt/synthesis.h"
#include "reduce.h"

enum { MOST_STATES = 1000 }; /* more gain under 1 % and cost seconds on models of thousands of operators */

/* What the costs of one axis are asked of. */
struct asked {
    const struct candidates *candidates;
    int subcluster, axis;
    struct mesh mesh;
    struct roofline roofline;
    const struct hapt_graph *local; /* shapes that the axis shares out */
};

/* ---- costs ---- */

double synthesised_collective_s(const struct candidates *candidates, int subcluster, const struct mesh *mesh, int axis,
                                enum hapt_collective_kind kind, double bytes, double largest_share)
{
    const struct hapt_subcluster *where = &candidates->cluster->subcluster[subcluster];
    const int ranks = axis == 0 ? mesh->n : mesh->m;
    const double bandwidth = axis == 0 ? where->inter_node_bandwidth : where->intra_node_bandwidth;
    const double latency = axis == 0 ? where->inter_node_latency : where->intra_node_latency;
    return reduce_collective_s(kind, ranks, bytes, largest_share, bandwidth, latency) *
           calibrate_sum_factor(candidates->efficiency, &where->device, candidates->model->dtype, bytes);
}

static double tensor_bytes(const void *context, const struct hapt_graph *graph, int tensor)
{
    const struct asked *asked = context;
    (void)graph;
    return (double)hapt_tensor_bytes(&asked->local->tensor[tensor]);
}

/* Axis 0 shares out whole nodes: what it sends between them each device of a node sends a part of. */
static double collective_s(const void *context, enum hapt_collective_kind kind, double bytes, double largest_share)
{
    const struct asked *asked = context;
    return synthesised_collective_s(asked->candidates, asked->subcluster, &asked->mesh, asked->axis, kind, bytes, largest_share);
}

static double operand_bytes(const struct asked *asked, const struct hapt_spmd_work *work)
{
    const struct hapt_op *op = &asked->local->op[work->op];
    double bytes = 0;
    for (int i = 0; i < op->input_count; i++)
        if (op->input[i] >= 0)
            bytes += (double)hapt_tensor_bytes(&asked->local->tensor[op->input[i]]) * (work->sharded_input >> i & 1u ? work->share : 1);
    for (int o = 0; o < op->output_count; o++)
        if (op->output[o] >= 0)
            bytes += (double)hapt_tensor_bytes(&asked->local->tensor[op->output[o]]) *
                     (work->sharded_output >> o & 1u ? work->share : 1) * (op->accumulate >> o & 1u ? 2 : 1);
    return bytes;
}

/* The outer axis's collective on the shard that an inner device has: all devices of a node send theirs at once. */
static double outer_collective_s(const struct asked *asked, const struct hapt_spmd_work *work, enum hapt_collective_kind kind)
{
    const struct hapt_op *op = &asked->local->op[work->op];
    const double in = (double)hapt_tensor_bytes(&asked->local->tensor[op->input[0]]);
    const double out = (double)hapt_tensor_bytes(&asked->local->tensor[op->output[0]]);
    const double part = work->sharded_output & 1u ? work->share : 1;
    return synthesised_collective_s(asked->candidates, asked->subcluster, &asked->mesh, 0, kind,
                                    part * asked->mesh.m * fmax(in, out), 0);
}

static double compute_s(const void *context, const struct hapt_spmd_work *work, int device)
{
    const struct asked *asked = context;
    const struct hapt_op *op = &asked->local->op[work->op];
    const struct hapt_op_type *type = hapt_op_type_at(op->type);
    const double inner = asked->axis == 0 ? asked->mesh.m : 1; /* axis 1 shares out what a node gets */
    (void)device;
    if (type->collective) return outer_collective_s(asked, work, type->collective);
    const double all = hapt_op_bytes(asked->local, op, 1);
    const double bytes = fmax(work->share * all, fmin(operand_bytes(asked, work), all));
    return roofline_operator_s(&asked->roofline, efficiency_class_of(type), work->share * hapt_op_flops(asked->local, op, 1) / inner,
                               bytes / inner);
}

/* ---- synthesis of both axes ---- */

static enum hapt_status synthesise_axis(struct asked *asked, const struct hapt_sharding *sharding, double memory_bytes, double in_flight,
                                        struct hapt_arena *arena, struct hapt_stage_layout *layout, double *needed,
                                        struct hapt_sharding **expanded)
{
    const struct hapt_axis *axis = &layout->axis[asked->axis];
    const struct hapt_spmd_costs costs = {
        .context = asked, .compute_s = compute_s, .collective_s = collective_s, .tensor_bytes = tensor_bytes};
    struct hapt_synthesis_report report;
    struct hapt_axis_program *program;
    double *limit = NULL;
    asked->local = sharding->shard;
    if (memory_bytes > 0) {
        HAPT_NEW(limit, arena, axis->size);
        for (int rank = 0; rank < axis->size; rank++) limit[rank] = memory_bytes;
    }
    const struct hapt_synthesis_options options = {.microbatches = asked->candidates->microbatches,
                                                   .memory_bytes = limit,
                                                   .in_flight = in_flight,
                                                   .most_states = MOST_STATES,
                                                   .optimizer_bytes_per_element = asked->candidates->state_count > 0
                                                                                      ? 4.0 * asked->candidates->state_count
                                                                                      : -1};
    HAPT_NEW(program, arena, 1);
    HAPT_TRY(hapt_synthesise(sharding, asked->axis, axis, &costs, &options, arena, program, &report));
    layout->program[asked->axis] = program;
    *needed = report.memory_bytes;
    return hapt_sharding_apply(sharding, asked->axis, axis, program, arena, expanded);
}

/* memory_bytes 0: as fast as can be. *needed: bytes a device would hold of the whole model. */
static enum hapt_status synthesise(const struct candidates *candidates, int subcluster, struct mesh mesh, double memory_bytes,
                                   double in_flight, struct hapt_arena *arena, struct hapt_stage_layout **layout,
                                   struct hapt_sharding **sharding, double *needed)
{
    struct asked asked = {.candidates = candidates,
                          .subcluster = subcluster,
                          .mesh = mesh,
                          .roofline = calibrate_roofline(candidates->efficiency, &candidates->cluster->subcluster[subcluster].device,
                                                         candidates->model->dtype)};
    struct hapt_stage_layout *made;
    struct hapt_sharding *now;
    HAPT_NEW(made, arena, 1);
    made->axis[0].size = mesh.n;
    made->axis[1].size = mesh.m;
    HAPT_TRY(hapt_sharding_trivial(candidates->model->graph, arena, &now));
    for (asked.axis = 0; asked.axis < HAPT_MESH_AXES; asked.axis++) {
        /* What a device may hold binds on the last axis; before that a node's devices share it. */
        const bool last = asked.axis == 1 || mesh.m == 1;
        if (made->axis[asked.axis].size == 1)
            HAPT_TRY(hapt_sharding_apply(now, asked.axis, &made->axis[asked.axis], NULL, arena, &now));
        else
            HAPT_TRY(synthesise_axis(&asked, now, memory_bytes * (last ? 1 : mesh.m), in_flight, arena, made, needed, &now));
    }
    *layout = made;
    *sharding = now;
    return HAPT_OK;
}

/* ---- which meshes ---- */

/* Subclusters whose devices and links take equal seconds. */
static bool alike(const struct candidates *candidates, int a, int b)
{
    const struct hapt_subcluster *x = &candidates->cluster->subcluster[a], *y = &candidates->cluster->subcluster[b];
    return strcmp(x->device.name, y->device.name) == 0 && strcmp(x->device.backend, y->device.backend) == 0 &&
           x->device.slowdown == y->device.slowdown && x->device.memory_bytes == y->device.memory_bytes &&
           candidates_device_speed(candidates, a) == candidates_device_speed(candidates, b) &&
           x->intra_node_bandwidth == y->intra_node_bandwidth && x->intra_node_latency == y->intra_node_latency &&
           x->inter_node_bandwidth == y->inter_node_bandwidth && x->inter_node_latency == y->inter_node_latency;
}

/* One axis: synthesis cuts no sums of another axis. Of many nodes powers of two are enough: a program is made for each. */
static bool is_tried(const struct hapt_subcluster *subcluster, struct hapt_submesh submesh)
{
    if (submesh.n > 1 && submesh.m > 1) return false;
    return submesh.m > 1 || (submesh.n > 1 && ((submesh.n & (submesh.n - 1)) == 0 || submesh.n == subcluster->nodes));
}

int synthesised_room(const struct candidates *candidates)
{
    int count = 0;
    for (int c = 0; c < candidates->cluster->count; c++) count += candidates_submeshes(&candidates->cluster->subcluster[c], NULL);
    return 2 * count;
}

/* Shardings that lay out every operator alike. */
static enum hapt_status find_equal(const struct candidates *candidates, const struct mesh *mesh, const struct hapt_sharding *sharding,
                                   struct hapt_arena *scratch, int *equal)
{
    const int ops = candidates->model->graph->op_count, ranks = mesh->n * mesh->m;
    uint64_t *mine, *its;
    HAPT_NEW(mine, scratch, ops);
    HAPT_NEW(its, scratch, ops);
    hapt_sharding_mark(sharding, mine);
    *equal = -1;
    for (int d = 0; d < candidates->degree_count && *equal < 0; d++) {
        const struct mesh *other = &candidates->degree[d];
        if (other->program > 0 ? other->n != mesh->n || other->m != mesh->m : other->dp * other->tp != ranks) continue;
        memset(its, 0, (size_t)ops * sizeof *its);
        hapt_sharding_mark(candidates->sharding[d], its);
        if (memcmp(mine, its, (size_t)ops * sizeof *its) == 0) *equal = d;
    }
    return HAPT_OK;
}

static enum hapt_status add(struct candidates *candidates, int subcluster, struct mesh mesh, struct hapt_stage_layout *layout,
                            struct hapt_sharding *sharding, const char *kind, struct hapt_arena *arena, struct hapt_arena *scratch)
{
    int equal;
    HAPT_TRY(find_equal(candidates, &mesh, sharding, scratch, &equal));
    /* Plain programs are not listed twice. */
    const unsigned plain = equal < 0 || candidates->degree[equal].tp == 1 ? PROGRAM_DATA : PROGRAM_TENSOR;
    if (equal >= 0 && candidates->degree[equal].program == 0 && (candidates->programs & plain)) return HAPT_OK;
    if (equal >= 0 && candidates->degree[equal].program > 0) {
        candidates->degree[equal].subclusters |= 1u << subcluster;
        return HAPT_OK;
    }
    snprintf(layout->name, sizeof layout->name, "%s %dx%d %.40s", kind, mesh.n, mesh.m,
             candidates->cluster->subcluster[subcluster].name);
    const struct hapt_stage_layout **list;
    HAPT_NEW(list, arena, candidates->layout_count + 1);
    if (candidates->layout_count > 0) memcpy(list, candidates->layout, (size_t)candidates->layout_count * sizeof *list);
    list[candidates->layout_count++] = layout;
    candidates->layout = list;
    mesh.program = candidates->layout_count;
    mesh.subclusters = 1u << subcluster;
    candidates->degree[candidates->degree_count] = mesh;
    candidates->sharding[candidates->degree_count++] = sharding;
    return HAPT_OK;
}

/* A fast program, and for whole nodes where a stage of this mesh's share of the cluster would not fit with it, one that does. */
static enum hapt_status add_mesh(struct candidates *candidates, int subcluster, struct mesh mesh, struct hapt_arena *arena,
                                 struct hapt_arena *scratch)
{
    const double speed = candidates_device_speed(candidates, subcluster) * mesh.n * mesh.m;
    const double share = candidates->speed > 0 && speed < candidates->speed ? speed / candidates->speed : 1;
    const double limit = candidates->cluster->subcluster[subcluster].device.memory_bytes / share;
    const double in_flight = fmin(candidates->microbatches, ceil(1 / share));
    struct hapt_stage_layout *layout;
    struct hapt_sharding *sharding;
    double needed = 0, lean = 0;
    enum hapt_status status = synthesise(candidates, subcluster, mesh, 0, in_flight, arena, &layout, &sharding, &needed);
    if (status == HAPT_OK) status = add(candidates, subcluster, mesh, layout, sharding, "synthesised", arena, scratch);
    const struct hapt_subcluster *own = &candidates->cluster->subcluster[subcluster];
    if (status == HAPT_OK && needed > limit && limit > 0 && mesh.m == own->devices_per_node) { /* it takes seconds: whole nodes alone */
        status = synthesise(candidates, subcluster, mesh, limit, in_flight, arena, &layout, &sharding, &lean);
        if (status == HAPT_OK) status = add(candidates, subcluster, mesh, layout, sharding, "lean", arena, scratch);
    }
    if (status != HAPT_ERR_INFEASIBLE) return status;
    hapt_fail_reset(); /* such a mesh has no program, or none that is so small */
    return HAPT_OK;
}

enum hapt_status synthesised_add(struct candidates *candidates, int room, struct hapt_arena *arena)
{
    const struct hapt_cluster *cluster = candidates->cluster;
    const int most = candidates->degree_count + room;
    for (int c = 0; c < cluster->count; c++) {
        const struct hapt_subcluster *own = &cluster->subcluster[c];
        const int count = candidates_submeshes(own, NULL);
        struct hapt_arena scratch;
        struct hapt_submesh *submesh;
        hapt_arena_init(&scratch);
        enum hapt_status status = HAPT_OK;
        submesh = hapt_arena_alloc(&scratch, (size_t)count, sizeof *submesh);
        if (!submesh) status = HAPT_ERR_MEMORY;
        if (status == HAPT_OK) candidates_submeshes(own, submesh);
        for (int s = 0; s < count && status == HAPT_OK; s++) {
            const struct mesh mesh = {.tp = 1, .n = submesh[s].n, .m = submesh[s].m};
            int like = -1;
            if (!is_tried(own, submesh[s])) continue;
            for (int d = 0; d < candidates->degree_count; d++) {
                struct mesh *other = &candidates->degree[d];
                if (other->program == 0 || other->n != mesh.n || other->m != mesh.m) continue;
                for (int before = 0; before < c; before++)
                    if ((other->subclusters >> before & 1u) && alike(candidates, before, c)) other->subclusters |= 1u << c, like = d;
            }
            HAPT_ASSERT(candidates->degree_count + 2 <= most);
            if (like < 0) status = add_mesh(candidates, c, mesh, arena, &scratch);
        }
        hapt_arena_release(&scratch);
        HAPT_TRY(status);
    }
    return HAPT_OK;
}

/* ---- once a step ---- */

/* Sums of gradients are one call for every set of axes. */
struct synthesised_reduce {
    const struct candidates *candidates;
    int subcluster;
    struct mesh mesh;
    double *bytes[3]; /* [L] summed over axis 0, axis 1, both */
    double *other_s;  /* [L] of all other collectives */
};

enum hapt_status synthesised_reduce_create(const struct candidates *candidates, int subcluster, int degree, struct hapt_arena *arena,
                                           struct synthesised_reduce **reduce)
{
    const struct hapt_sharding *sharding = candidates->sharding[degree];
    const struct hapt_graph *shard = sharding->shard;
    const struct mesh *mesh = &candidates->degree[degree];
    struct synthesised_reduce *made;
    int *layer_of, *outer; /* [tensor] bytes of a place that axis 0 sums were noted for this layer + 1 */
    HAPT_NEW(made, arena, 1);
    *made = (struct synthesised_reduce){.candidates = candidates, .subcluster = subcluster, .mesh = *mesh};
    for (int k = 0; k < 3; k++) HAPT_NEW(made->bytes[k], arena, candidates->layer_count);
    HAPT_NEW(made->other_s, arena, candidates->layer_count);
    HAPT_NEW(layer_of, arena, sharding->source->forward_count);
    HAPT_NEW(outer, arena, shard->tensor_count);
    for (int l = 0, op = 0; l < candidates->layer_count; l++)
        for (; op < candidates->layers->end_op[l]; op++) layer_of[op] = l;
    for (int o = sharding->reduce_first; o < shard->op_count; o++) {
        const struct hapt_op *op = &shard->op[o];
        const enum hapt_collective_kind kind = hapt_op_type_at(op->type)->collective;
        if (kind == HAPT_COLLECTIVE_NONE || kind == HAPT_COLLECTIVE_SLICE) continue;
        const int axis = (int)op->integer[0], layer = layer_of[op->forward_op], place = sharding->storage[op->output[0]];
        const double in = (double)hapt_tensor_bytes(&shard->tensor[op->input[0]]);
        const double bytes = fmax(in, (double)hapt_tensor_bytes(&shard->tensor[op->output[0]]));
        if (kind != HAPT_COLLECTIVE_ALL_REDUCE) {
            made->other_s[layer] += synthesised_collective_s(candidates, subcluster, mesh, axis, kind,
                                                             bytes * (axis == 0 ? mesh->m : 1), 0);
        } else if (axis == 1 && outer[place] == layer + 1) { /* both axes: inside the nodes first */
            made->bytes[0][layer] -= bytes;
            made->bytes[2][layer] += bytes;
        } else {
            made->bytes[axis][layer] += bytes;
            if (axis == 0) outer[place] = layer + 1;
        }
    }
    *reduce = made;
    return HAPT_OK;
}

double synthesised_reduce_s(const struct synthesised_reduce *reduce, int first, int last)
{
    double bytes[3] = {0}, seconds = 0;
    for (int l = first; l <= last; l++) {
        for (int k = 0; k < 3; k++) bytes[k] += reduce->bytes[k][l];
        seconds += reduce->other_s[l];
    }
    const struct mesh *mesh = &reduce->mesh;
    const double outer = bytes[0] * mesh->m + bytes[2], inner = bytes[1] + bytes[2];
    return seconds +
           synthesised_collective_s(reduce->candidates, reduce->subcluster, mesh, 0, HAPT_COLLECTIVE_ALL_REDUCE, outer, 0) +
           synthesised_collective_s(reduce->candidates, reduce->subcluster, mesh, 1, HAPT_COLLECTIVE_ALL_REDUCE, inner, 0);
}
