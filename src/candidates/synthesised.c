/* Programs that synthesis finds for the meshes of a cluster, and the costs of their collectives. */
#include "hapt/synthesised.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/calibration.h"
#include "hapt/collective_cost.h"
#include "hapt/progress.h"
#include "hapt/synthesis.h"

enum {
    MOST_STATES = 300, /* more would gain under 1 % and take seconds on models of thousands of operators */
    MOST_PRICES = 3,
    MOST_PROGRAMS = 6 /* per mesh, from the fastest to the one that needs least memory */
};

/* Context of a mesh's costs. */
struct asked {
    const struct hapt_candidates *candidates;
    int subcluster;
    struct hapt_candidate_mesh mesh;
    struct hapt_roofline roofline;
};

/* ---- costs ---- */

double hapt_synthesised_collective_s(const struct hapt_candidates *candidates, int subcluster,
                                     const struct hapt_candidate_mesh *mesh, int axis, enum hapt_collective_kind kind,
                                     double bytes, double largest_share)
{
    struct hapt_collective_span span =
        hapt_collective_span_of(&candidates->cluster->subcluster[subcluster],
                                (struct hapt_submesh){.n = mesh->n, .m = mesh->m, .tp = 1, .program = 1}, axis);
    span.beside = 1; /* `bytes` counts all devices of a node already, also for the correction by measured sums */
    return hapt_collective_corrected_s(&span, candidates->efficiency, candidates->model->dtype, kind, bytes,
                                       largest_share);
}

/* The devices of a node share its link to others, and all use it at once. */
static double collective_s(const void *context, int axis, enum hapt_collective_kind kind, double bytes,
                           double largest_share)
{
    const struct asked *asked = context;
    return hapt_synthesised_collective_s(asked->candidates, asked->subcluster, &asked->mesh, axis, kind,
                                         bytes * (axis == 0 ? asked->mesh.m : 1), largest_share);
}

static double compute_s(const void *context, const struct hapt_spmd_work *work, double beside)
{
    const struct asked *asked = context;
    const struct hapt_op *op = &work->graph->op[work->op];
    return hapt_roofline_operator_s(&asked->roofline, hapt_efficiency_class_of(hapt_op_type_at(op->type)),
                                    work->share * hapt_op_flops(work->graph, op, 1) * beside,
                                    hapt_spmd_work_bytes(work, 1) * beside) +
           hapt_roofline_stream_s(&asked->roofline, work->share * hapt_op_pass_bytes(work->graph, op) * beside);
}

/* ---- programs of a mesh ---- */

/* Programs found, except those that another one beats in both time and memory. */
struct kept {
    double cost_s, memory_bytes;
    struct hapt_axis_program program[HAPT_MESH_AXES];
};
struct keeping {
    struct hapt_arena *arena;
    int count, capacity;
    struct kept *kept;
    enum hapt_status status;
};

static enum hapt_status keep(struct keeping *keeping, const struct hapt_axis_program *const program[HAPT_MESH_AXES],
                             double cost_s, double memory_bytes)
{
    int left = 0;
    for (int k = 0; k < keeping->count; k++) /* not worth a table: hardly faster and hardly smaller */
        if (keeping->kept[k].cost_s <= cost_s * 1.002 && keeping->kept[k].memory_bytes <= memory_bytes * 1.01)
            return HAPT_OK;
    for (int k = 0; k < keeping->count; k++)
        if (!(cost_s <= keeping->kept[k].cost_s && memory_bytes <= keeping->kept[k].memory_bytes))
            keeping->kept[left++] = keeping->kept[k];
    keeping->count = left;
    if (keeping->count == keeping->capacity) {
        struct kept *grown;
        const int capacity = keeping->capacity ? 2 * keeping->capacity : 16;
        HAPT_NEW(grown, keeping->arena, capacity);
        if (keeping->count) memcpy(grown, keeping->kept, (size_t)keeping->count * sizeof *grown);
        keeping->kept = grown;
        keeping->capacity = capacity;
    }
    struct kept *made = &keeping->kept[keeping->count++];
    *made = (struct kept){.cost_s = cost_s, .memory_bytes = memory_bytes};
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++)
        if (program[axis]) HAPT_TRY(hapt_axis_program_copy(program[axis], keeping->arena, &made->program[axis]));
    return HAPT_OK;
}

static void found(void *context, const struct hapt_axis_program *const program[HAPT_MESH_AXES], double cost_s,
                  double memory_bytes)
{
    struct keeping *keeping = context;
    if (keeping->status == HAPT_OK) keeping->status = keep(keeping, program, cost_s, memory_bytes);
}

/* Programs from the fastest to one that needs at most `memory_bytes` per device with the full model on the mesh. */
static enum hapt_status synthesise(const struct hapt_candidates *candidates, int subcluster,
                                   struct hapt_candidate_mesh mesh, double memory_bytes, double in_flight,
                                   struct hapt_arena *scratch, struct keeping *keeping)
{
    const struct asked asked = {
        .candidates = candidates,
        .subcluster = subcluster,
        .mesh = mesh,
        .roofline = hapt_calibration_roofline(
            candidates->efficiency, &candidates->cluster->subcluster[subcluster].device, candidates->model->dtype)};
    const struct hapt_mesh_costs costs = {.context = &asked, .compute_s = compute_s, .collective_s = collective_s};
    const struct hapt_mesh_options options = {.microbatches = candidates->microbatches,
                                              .memory_bytes = memory_bytes,
                                              .in_flight = in_flight,
                                              .most_states = MOST_STATES,
                                              .most_prices = MOST_PRICES,
                                              .optimizer_bytes_per_element = hapt_candidates_state_bytes(candidates),
                                              .methods = HAPT_MESH_METHOD_OUTER_FIRST,
                                              .found = found,
                                              .found_context = keeping};
    const struct hapt_axis axis[HAPT_MESH_AXES] = {{.size = mesh.n}, {.size = mesh.m}};
    const struct hapt_axis_program *program[HAPT_MESH_AXES];
    struct hapt_sharding *sharding;
    *keeping = (struct keeping){.arena = scratch};
    const enum hapt_status status =
        hapt_synthesise_mesh(candidates->model->graph, axis, &costs, &options, scratch, program, &sharding, NULL);
    if (status != HAPT_OK && status != HAPT_ERR_INFEASIBLE) return status;
    if (status == HAPT_ERR_INFEASIBLE) hapt_fail_reset(); /* this mesh has no program, or none that small */
    return keeping->status;
}

/* ---- which meshes ---- */

/* True for subclusters whose devices and links take equal times. */
static bool alike(const struct hapt_candidates *candidates, int a, int b)
{
    const struct hapt_subcluster *x = &candidates->cluster->subcluster[a], *y = &candidates->cluster->subcluster[b];
    return strcmp(x->device.name, y->device.name) == 0 && strcmp(x->device.backend, y->device.backend) == 0 &&
           x->device.slowdown == y->device.slowdown && x->device.memory_bytes == y->device.memory_bytes &&
           hapt_candidates_device_speed(candidates, a) == hapt_candidates_device_speed(candidates, b) &&
           x->intra_node_bandwidth == y->intra_node_bandwidth && x->intra_node_latency == y->intra_node_latency &&
           x->inter_node_bandwidth == y->inter_node_bandwidth && x->inter_node_latency == y->inter_node_latency;
}

/* Only powers of two and all nodes are tried on many nodes, since a program is synthesised for each. */
static bool is_tried(const struct hapt_subcluster *subcluster, struct hapt_submesh submesh)
{
    const bool nodes = (submesh.n & (submesh.n - 1)) == 0 || submesh.n == subcluster->nodes;
    return submesh.n * submesh.m > 1 && nodes;
}

int hapt_synthesised_room(const struct hapt_candidates *candidates)
{
    int count = 0;
    for (int c = 0; c < candidates->cluster->count; c++)
        count += hapt_candidates_submeshes(&candidates->cluster->subcluster[c], NULL);
    return MOST_PROGRAMS * count;
}

/* Finds a mesh whose sharding lays out every operator alike; *equal -1: none. */
static enum hapt_status find_equal(const struct hapt_candidates *candidates, const struct hapt_candidate_mesh *mesh,
                                   const struct hapt_sharding *sharding, struct hapt_arena *scratch, int *equal)
{
    const int ops = candidates->model->graph->op_count, ranks = mesh->n * mesh->m;
    uint64_t *mine, *its;
    HAPT_NEW(mine, scratch, ops);
    HAPT_NEW(its, scratch, ops);
    hapt_sharding_hash(sharding, mine);
    *equal = -1;
    for (int d = 0; d < candidates->mesh_count && *equal < 0; d++) {
        const struct hapt_candidate_mesh *other = &candidates->mesh[d];
        if (other->program > 0 ? other->n != mesh->n || other->m != mesh->m : other->dp * other->tp != ranks) continue;
        memset(its, 0, (size_t)ops * sizeof *its);
        hapt_sharding_hash(candidates->sharding[d], its);
        if (memcmp(mine, its, (size_t)ops * sizeof *its) == 0) *equal = d;
    }
    return HAPT_OK;
}

/* Subclusters (bits) that have such a submesh: a program may also run on other devices. */
static unsigned with_submesh(const struct hapt_candidates *candidates, struct hapt_submesh submesh)
{
    unsigned bits = 0;
    for (int c = 0; c < candidates->cluster->count; c++) {
        const struct hapt_subcluster *own = &candidates->cluster->subcluster[c];
        const bool nodes = submesh.m == own->devices_per_node ? submesh.n <= own->nodes : submesh.n == 1;
        if (nodes && own->devices_per_node % submesh.m == 0) bits |= 1u << c;
    }
    return bits;
}

static enum hapt_status append(struct hapt_candidates *candidates, struct hapt_candidate_mesh mesh,
                               const struct hapt_stage_layout *layout, struct hapt_sharding *sharding,
                               struct hapt_arena *arena)
{
    const struct hapt_stage_layout **list;
    HAPT_NEW(list, arena, candidates->layout_count + 1);
    if (candidates->layout_count > 0) memcpy(list, candidates->layout, (size_t)candidates->layout_count * sizeof *list);
    list[candidates->layout_count++] = layout;
    candidates->layout = list;
    mesh.program = candidates->layout_count;
    candidates->mesh[candidates->mesh_count] = mesh;
    candidates->sharding[candidates->mesh_count++] = sharding;
    return HAPT_OK;
}

enum hapt_status hapt_synthesised_add_layout(struct hapt_candidates *candidates, const struct hapt_candidate_mesh *like,
                                             const struct hapt_stage_layout *layout, struct hapt_arena *arena)
{
    struct hapt_sharding *sharding;
    HAPT_TRY(hapt_stage_layout_apply(layout, candidates->model->graph, arena, &sharding));
    return append(candidates, *like, layout, sharding, arena);
}

static enum hapt_status add(struct hapt_candidates *candidates, int subcluster, struct hapt_candidate_mesh mesh,
                            struct hapt_stage_layout *layout, struct hapt_sharding *sharding, struct hapt_arena *arena,
                            struct hapt_arena *scratch)
{
    int equal;
    HAPT_TRY(find_equal(candidates, &mesh, sharding, scratch, &equal));
    /* Plain programs are not listed twice. */
    const unsigned plain = equal < 0 || candidates->mesh[equal].tp == 1 ? PROGRAM_DATA : PROGRAM_TENSOR;
    if (equal >= 0 && candidates->mesh[equal].program == 0 && (candidates->programs & plain)) return HAPT_OK;
    if (equal >= 0 && candidates->mesh[equal].program > 0) {
        candidates->mesh[equal].subclusters |= 1u << subcluster;
        return HAPT_OK;
    }
    snprintf(layout->name, sizeof layout->name, "synthesised %dx%d %.40s", mesh.n, mesh.m,
             candidates->cluster->subcluster[subcluster].name);
    mesh.subclusters = with_submesh(candidates, (struct hapt_submesh){.n = mesh.n, .m = mesh.m});
    return append(candidates, mesh, layout, sharding, arena);
}

static int compare_kept(const void *a, const void *b)
{
    const struct kept *x = a, *y = b;
    return (x->cost_s > y->cost_s) - (x->cost_s < y->cost_s);
}

static enum hapt_status add_kept(struct hapt_candidates *candidates, int subcluster, struct hapt_candidate_mesh mesh,
                                 const struct kept *kept, struct hapt_arena *arena, struct hapt_arena *scratch)
{
    struct hapt_stage_layout *layout;
    struct hapt_sharding *sharding;
    HAPT_NEW(layout, arena, 1);
    layout->axis[0].size = mesh.n;
    layout->axis[1].size = mesh.m;
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++) {
        struct hapt_axis_program *program;
        if (layout->axis[axis].size == 1) continue;
        HAPT_NEW(program, arena, 1);
        HAPT_TRY(hapt_axis_program_copy(&kept->program[axis], arena, program));
        layout->program[axis] = program;
    }
    HAPT_TRY(hapt_stage_layout_apply(layout, candidates->model->graph, arena, &sharding));
    return add(candidates, subcluster, mesh, layout, sharding, arena, scratch);
}

/* Adds the fastest program. If a stage of this mesh's share of the model would not fit with it, adds slower
 * programs that need less memory, until one fits. Only meshes of entire nodes get those, since the search takes
 * seconds. */
static enum hapt_status add_mesh(struct hapt_candidates *candidates, int subcluster, struct hapt_candidate_mesh mesh,
                                 struct hapt_arena *arena, struct hapt_arena *scratch)
{
    const struct hapt_subcluster *own = &candidates->cluster->subcluster[subcluster];
    const double speed = hapt_candidates_device_speed(candidates, subcluster) * mesh.n * mesh.m;
    const double share = candidates->speed > 0 && speed < candidates->speed ? speed / candidates->speed : 1;
    const double limit = mesh.m == own->devices_per_node ? own->device.memory_bytes / share : 0;
    const double in_flight = fmin(candidates->microbatches, ceil(1 / share));
    struct keeping keeping;
    HAPT_TRY(synthesise(candidates, subcluster, mesh, limit, in_flight, scratch, &keeping));
    qsort(keeping.kept, (size_t)keeping.count, sizeof *keeping.kept, compare_kept);
    for (int k = 0; k < keeping.count; k++) {
        if (k >= MOST_PROGRAMS - 1 && k < keeping.count - 1) continue; /* always add the last one */
        HAPT_TRY(add_kept(candidates, subcluster, mesh, &keeping.kept[k], arena, scratch));
        if (limit <= 0 || keeping.kept[k].memory_bytes <= limit) break;
    }
    return HAPT_OK;
}

enum hapt_status hapt_synthesised_add(struct hapt_candidates *candidates, int room, struct hapt_arena *arena)
{
    const struct hapt_cluster *cluster = candidates->cluster;
    const int most = candidates->mesh_count + room;
    struct hapt_progress progress;
    enum hapt_status status = HAPT_OK;
    long looked = 0;
    hapt_progress_init(&progress, NULL, "synthesising programs", room / MOST_PROGRAMS);
    for (int c = 0; c < cluster->count && status == HAPT_OK; c++) {
        const struct hapt_subcluster *own = &cluster->subcluster[c];
        const int count = hapt_candidates_submeshes(own, NULL);
        struct hapt_arena scratch;
        struct hapt_submesh *submesh;
        hapt_arena_init(&scratch);
        submesh = hapt_arena_alloc(&scratch, (size_t)count, sizeof *submesh);
        if (!submesh) status = HAPT_ERR_MEMORY;
        if (status == HAPT_OK) hapt_candidates_submeshes(own, submesh);
        for (int s = 0; s < count && status == HAPT_OK; s++) {
            const struct hapt_candidate_mesh mesh = {.tp = 1, .n = submesh[s].n, .m = submesh[s].m};
            int like = -1;
            hapt_progress_update(&progress, looked++, NULL);
            if (!is_tried(own, submesh[s])) continue;
            for (int d = 0; d < candidates->mesh_count; d++) {
                struct hapt_candidate_mesh *other = &candidates->mesh[d];
                if (other->program == 0 || other->n != mesh.n || other->m != mesh.m) continue;
                for (int before = 0; before < c; before++)
                    if ((other->subclusters >> before & 1u) && alike(candidates, before, c))
                        other->subclusters |= 1u << c, like = d;
            }
            HAPT_ASSERT(candidates->mesh_count + MOST_PROGRAMS <= most);
            if (like < 0) status = add_mesh(candidates, c, mesh, arena, &scratch);
        }
        hapt_arena_release(&scratch);
    }
    hapt_progress_release(&progress);
    return status;
}

/* ---- once a step ---- */

/* Sums of gradients are one call per set of axes. */
struct hapt_synthesised_reduce {
    const struct hapt_candidates *candidates;
    int subcluster;
    struct hapt_candidate_mesh mesh;
    double *bytes[3]; /* [L] summed over axis 0, axis 1, both */
    double *other_s;  /* [L] all other collectives */
};

enum hapt_status hapt_synthesised_reduce_create(const struct hapt_candidates *candidates, int subcluster,
                                                int mesh_index, struct hapt_arena *arena,
                                                struct hapt_synthesised_reduce **reduce)
{
    const struct hapt_sharding *sharding = candidates->sharding[mesh_index];
    const struct hapt_graph *shard = sharding->shard;
    const struct hapt_candidate_mesh *mesh = &candidates->mesh[mesh_index];
    struct hapt_synthesised_reduce *made;
    int *layer_of, *outer; /* outer [tensor]: layer + 1 whose axis-0 sum of this storage is included in `bytes` */
    HAPT_NEW(made, arena, 1);
    *made = (struct hapt_synthesised_reduce){.candidates = candidates, .subcluster = subcluster, .mesh = *mesh};
    for (int k = 0; k < 3; k++) HAPT_NEW(made->bytes[k], arena, candidates->layer_count);
    HAPT_NEW(made->other_s, arena, candidates->layer_count);
    HAPT_TRY(hapt_layers_of_operators(candidates->layers, arena, &layer_of));
    HAPT_NEW(outer, arena, shard->tensor_count);
    for (int o = sharding->reduce_first; o < shard->op_count; o++) {
        const struct hapt_op *op = &shard->op[o];
        const enum hapt_collective_kind kind = hapt_op_type_at(op->type)->collective;
        if (kind == HAPT_COLLECTIVE_NONE || kind == HAPT_COLLECTIVE_SLICE) continue;
        const int axis = (int)op->integer[0], layer = layer_of[op->forward_op],
                  place = sharding->storage[op->output[0]];
        const double in = (double)hapt_tensor_bytes(&shard->tensor[op->input[0]]);
        const double bytes = fmax(in, (double)hapt_tensor_bytes(&shard->tensor[op->output[0]]));
        if (kind != HAPT_COLLECTIVE_ALL_REDUCE) {
            made->other_s[layer] += hapt_synthesised_collective_s(candidates, subcluster, mesh, axis, kind,
                                                                  bytes * (axis == 0 ? mesh->m : 1), 0);
        } else if (axis == 1 && outer[place] == layer + 1) { /* both axes: first inside the nodes */
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

double hapt_synthesised_reduce_s(const struct hapt_synthesised_reduce *reduce, int first, int last)
{
    double bytes[3] = {0}, seconds = 0;
    for (int l = first; l <= last; l++) {
        for (int k = 0; k < 3; k++) bytes[k] += reduce->bytes[k][l];
        seconds += reduce->other_s[l];
    }
    const struct hapt_candidate_mesh *mesh = &reduce->mesh;
    const double outer = bytes[0] * mesh->m + bytes[2], inner = bytes[1] + bytes[2];
    return seconds +
           hapt_synthesised_collective_s(reduce->candidates, reduce->subcluster, mesh, 0, HAPT_COLLECTIVE_ALL_REDUCE,
                                         outer, 0) +
           hapt_synthesised_collective_s(reduce->candidates, reduce->subcluster, mesh, 1, HAPT_COLLECTIVE_ALL_REDUCE,
                                         inner, 0);
}
