/* One rank's part of a plan: places the plan, builds programs, schedule and engines, and connects the ranks. */
#include "runtime.h"

#include <math.h>
#include <string.h>

#include "hapt/deadline.h"
#include "watch.h"

/* Share of --timeout. Waits inside the phase have time-outs of their own, which report more. */
#define CONNECT_SHARE 1.5

static enum hapt_status find_ranks(struct worker *worker)
{
    const int chunks = worker->plan->stage_count;
    HAPT_NEW(worker->ranks, worker->arena, chunks);
    HAPT_NEW(worker->index, worker->arena, chunks);
    for (int c = 0; c < chunks; c++) {
        HAPT_NEW(worker->ranks[c], worker->arena, stage_size(worker, c));
        HAPT_TRY(hapt_plan_ranks(worker->plan, worker->cluster, c, worker->ranks[c]));
        for (int before = 0; before < c; before++) worker->index[c] += worker_shares(worker, before, c);
        if (worker->index[c] >= worker->most) worker->most = worker->index[c] + 1;
    }
    return HAPT_OK;
}

static enum hapt_status find_own_stages(struct worker *worker)
{
    HAPT_NEW(worker->stage, worker->arena, worker->most);
    for (int c = 0; c < worker->plan->stage_count; c++)
        for (int r = 0; r < stage_size(worker, c); r++) {
            if (stage_world_rank(worker, c, r) != worker->env->world_rank) continue;
            struct stage *stage = &worker->stage[worker->stage_count++];
            *stage = (struct stage){.worker = worker,
                                    .chunk = c,
                                    .rank = r,
                                    .size = stage_size(worker, c),
                                    .plan = &worker->plan->stage[c]};
            snprintf(stage->name, sizeof stage->name, "stage %d", c);
            HAPT_NEW(stage->slot, worker->arena, worker->plan->microbatches);
        }
    return HAPT_OK;
}

static enum hapt_status shard(const struct worker *worker, int chunk, struct hapt_sharding **sharding)
{
    const struct hapt_plan_stage *part = &worker->plan->stage[chunk];
    char name[32];
    snprintf(name, sizeof name, "stage %d", chunk);
    HAPT_TRY(hapt_layout_shard(&part->layout, worker->graph, part->submesh->nodes, part->submesh->devices_per_node,
                               worker->model->microbatch, name, worker->arena, sharding));
    return worker->plan->split ? hapt_sharding_split(*sharding, worker->arena, sharding) : HAPT_OK;
}

static enum hapt_status build_programs(struct worker *worker)
{
    const struct hapt_plan *plan = worker->plan;
    int end = 0;
    HAPT_NEW(worker->sharding, worker->arena, plan->stage_count);
    HAPT_NEW(worker->program, worker->arena, plan->stage_count);
    for (int c = 0; c < plan->stage_count; c++) {
        const struct hapt_plan_stage *part = &plan->stage[c];
        struct stage *own = worker_stage(worker, c);
        if (part->first_op != end || part->end_op <= end || part->end_op > worker->graph->forward_count)
            return hapt_fail(HAPT_ERR_INPUT, "create the plan from this model",
                             "the plan's stages do not cover the model");
        end = part->end_op;
        HAPT_TRY(shard(worker, c, &worker->sharding[c]));
        const struct hapt_sharding *made = worker->sharding[c];
        if (made->axis[0].size * made->axis[1].size != stage_size(worker, c))
            return hapt_fail(HAPT_ERR_INPUT, "create the plan again",
                             "stage %d of the plan has %d devices, its program is for %d", c, stage_size(worker, c),
                             made->axis[0].size * made->axis[1].size);
        if (own) {
            int mesh_coordinate[HAPT_MESH_AXES];
            stage_mesh_coordinate(worker, c, own->rank, mesh_coordinate);
            HAPT_TRY(hapt_sharding_at(made, mesh_coordinate, worker->arena, &worker->sharding[c]));
        }
        HAPT_TRY(
            hapt_program_build(worker->sharding[c], part->first_op, part->end_op, worker->arena, &worker->program[c]));
        if (own) own->sharding = worker->sharding[c], own->program = worker->program[c];
    }
    if (end != worker->graph->forward_count)
        return hapt_fail(HAPT_ERR_INPUT, "create the plan from this model", "the plan's stages do not cover the model");
    HAPT_TRY(hapt_edges_build(worker->program, plan->stage_count, plan, worker->arena, &worker->edges));
    return hapt_ties_find(worker->program, plan->stage_count, worker->arena, &worker->ties);
}

/* Stages of one submesh hand tensors over on their device, so each rank must hold the same part in both. */
static enum hapt_status check_same_part(const struct worker *worker, int from, int source, int to, int tensor)
{
    int count[2], index[2];
    struct hapt_box box[2];
    const int rank = worker->stage[0].rank;
    if (!worker_stage(worker, from) || !worker_stage(worker, to)) return HAPT_OK;
    stage_replica(worker, from, rank, source, &count[0], &index[0]);
    stage_replica(worker, to, rank, tensor, &count[1], &index[1]);
    stage_box(worker, from, rank, source, &box[0]);
    stage_box(worker, to, rank, tensor, &box[1]);
    if (count[0] == count[1] && index[0] == index[1] && hapt_reshard_same(&box[0], &box[1])) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, "give stages of one submesh the same layout",
                     "stages %d and %d share a submesh, but hold %s in different layouts", from, to,
                     worker->sharding[to]->graph->tensor[tensor].name);
}

/* The gradients of such an edge wait in a transfer slot of the sender until the receiver's backward pass. */
static enum hapt_status check_transfer_slots(const struct worker *worker, const struct hapt_edge *edge)
{
    const int slots = hapt_schedule_transfer_slots(worker->schedule);
    int taken = 0;
    for (int i = 0; i < worker->list->count; i++) {
        const struct hapt_instruction *at = &worker->list->instruction[i];
        if (at->kind != HAPT_INSTRUCTION_BACKWARD) continue;
        if (at->chunk == edge->to) taken++;
        if (at->chunk == edge->from && at->microbatch >= taken + slots)
            return hapt_fail(HAPT_ERR_INPUT, "give them submeshes of their own",
                             "stage %d computes gradients more than %d microbatches before stage %d of the same "
                             "submesh takes them",
                             edge->from, slots, edge->to);
    }
    return HAPT_OK;
}

static enum hapt_status check_shared_submesh(const struct worker *worker)
{
    for (int r = 0; r < worker->edges->count; r++) {
        const struct hapt_edge *edge = &worker->edges->edge[r];
        for (int i = 0; i < edge->count; i++)
            HAPT_TRY(check_same_part(worker, edge->from, edge->source[i], edge->to, edge->tensor[i]));
        if (edge->backward && worker_stage(worker, edge->from) && worker_stage(worker, edge->to))
            HAPT_TRY(check_transfer_slots(worker, edge));
    }
    for (int t = 0; t < worker->ties->count; t++) {
        const struct hapt_tie *tie = &worker->ties->tie[t];
        for (int k = 0; k < tie->chunk_count * tie->chunk_count; k++) {
            const int from = tie->chunk[k / tie->chunk_count], to = tie->chunk[k % tie->chunk_count];
            HAPT_TRY(check_same_part(worker, from, worker->program[from]->graph->tensor[tie->tensor].gradient, to,
                                     worker->program[to]->graph->tensor[tie->tensor].gradient));
        }
    }
    return HAPT_OK;
}

/* A forward-only stage of the plan has no gradients in this model either. */
static enum hapt_status check_forward_only(const struct worker *worker)
{
    for (int c = 0; c < worker->plan->stage_count; c++) {
        const struct hapt_program *program = worker->program[c];
        const int steps = program->step_count[HAPT_SECTION_BACKWARD] + program->step_count[HAPT_SECTION_REDUCE];
        if (worker->plan->stage[c].forward_only && steps > 0)
            return hapt_fail(HAPT_ERR_INPUT, "create the plan from this model",
                             "stage %d of the plan has no backward pass, but the model trains parameters in it", c);
    }
    return HAPT_OK;
}

/* Under a looped schedule messages past neighbours can deadlock, so the lists must know all of them. */
static enum hapt_status check_looped_edges(const struct worker *worker)
{
    const struct hapt_schedule_edges *made = &worker->schedule->edges;
    for (int r = 0; r < worker->edges->count; r++) {
        const struct hapt_edge *edge = &worker->edges->edge[r];
        bool known = worker_shares(worker, edge->from, edge->to);
        for (int e = 0; e < made->count && !known; e++)
            known = made->edge[e].from == edge->from && made->edge[e].to == edge->to;
        if (!known)
            return hapt_fail(HAPT_ERR_INPUT, "create the plan from this model",
                             "stage %d of the model sends %s to stage %d, but the plan has no such message", edge->from,
                             edge->backward ? "gradients" : "activations", edge->to);
    }
    return HAPT_OK;
}

static enum hapt_status build_schedule(struct worker *worker)
{
    const struct hapt_plan *plan = worker->plan;
    HAPT_TRY(check_forward_only(worker));
    HAPT_TRY(hapt_plan_schedule(plan, worker->ties->count > 0, worker->arena, &worker->schedule));
    HAPT_TRY(hapt_schedule_check(worker->schedule));
    if (hapt_schedule_loops(plan->schedule)) HAPT_TRY(check_looped_edges(worker));
    struct hapt_schedule *made = worker->schedule;
    worker->list = worker->stage_count > 0 ? &made->list[made->submesh_of[worker->stage[0].chunk]] : &made->idle;
    HAPT_NEW(worker->slot_owner, worker->arena, worker->list->slots);
    return HAPT_OK;
}

static const struct hapt_device_spec *device_of(const struct worker *worker, int world_rank)
{
    return &worker->cluster->subcluster[worker->cluster->subcluster_of_rank[world_rank]].device;
}

/* Limit of the device memory of a rank in bytes; 0: none. */
static size_t memory_cap(const struct worker *worker, int world_rank)
{
    const struct hapt_device_spec *spec = device_of(worker, world_rank); /* modelled devices are capped */
    return spec->memory_capped ? (size_t)spec->memory_bytes : 0;
}

/* Device memory of rank `index` of this submesh. */
static enum hapt_status memory_of(const struct worker *worker, int index, const struct hapt_engine_options *options,
                                  struct hapt_arena *scratch, size_t *bytes)
{
    struct hapt_program **its;
    struct hapt_memory_plan *plan;
    HAPT_NEW(its, scratch, worker->stage_count);
    for (int s = 0; s < worker->stage_count; s++) {
        const struct stage *stage = &worker->stage[s];
        int mesh_coordinate[HAPT_MESH_AXES];
        struct hapt_sharding *sharding;
        stage_mesh_coordinate(worker, stage->chunk, index, mesh_coordinate);
        HAPT_TRY(hapt_sharding_at(stage->sharding, mesh_coordinate, scratch, &sharding));
        HAPT_TRY(hapt_program_build(sharding, stage->program->first_op, stage->program->end_op, scratch, &its[s]));
    }
    HAPT_TRY(
        hapt_engine_plan_chunks((const struct hapt_program *const *)its, worker->stage_count, options, scratch, &plan));
    *bytes = plan->total_bytes;
    return HAPT_OK;
}

/* True if some chunk of this rank has sharded weights; then none has weights on the host. */
static bool shards_weights(const struct worker *worker)
{
    for (int s = 0; s < worker->stage_count; s++)
        if (worker->plan->stage[worker->stage[s].chunk].layout.weights_at == HAPT_WEIGHTS_SHARDED) return true;
    return false;
}

/* Decides whether the ranks of the submesh shard the optimizer state. Each rank checks all ranks, so all decide alike.
 */
static enum hapt_status choose_state(const struct worker *worker, const struct hapt_config *config,
                                     struct hapt_engine_options *options)
{
    const char *choice = hapt_config_text(config, "sharded-optimizer");
    const struct stage *stage = &worker->stage[0];
    options->sharded_state = !strcmp(choice, "yes") || shards_weights(worker);
    if (shards_weights(worker) && !strcmp(choice, "no"))
        return hapt_fail(HAPT_ERR_INPUT, "leave it out, or plan with it",
                         "--sharded-optimizer no: the plan has the weights of stage %d sharded, and so is their update",
                         stage->chunk);
    if (shards_weights(worker)) return HAPT_OK;
    if (options->weight_unit_count > 0 && options->state_count == 0)
        return hapt_fail(HAPT_ERR_INPUT, "plan again for this optimizer, or give --optimizer adamw or a --momentum",
                         "the plan has the weights of stage %d on the hosts, beside a state that this optimizer does "
                         "not have",
                         stage->chunk);
    if (options->weight_unit_count > 0 && options->sharded_state)
        return hapt_fail(HAPT_ERR_INPUT, "leave it out, or plan with it",
                         "--sharded-optimizer yes: the plan has the weights of stage %d on the hosts, which are not "
                         "sharded there",
                         stage->chunk);
    if (strcmp(choice, "auto") != 0 || stage->size == 1 || options->weight_unit_count > 0) return HAPT_OK;
    options->sharded_state = options->host_state; /* fewer bytes to copy, as planned (hapt_candidates_shards_state) */
    enum hapt_status status = HAPT_OK;
    for (int r = 0; r < stage->size && status == HAPT_OK && !options->sharded_state; r++) {
        const size_t cap = (size_t)device_of(worker, stage_world_rank(worker, stage->chunk, r))->memory_bytes;
        struct hapt_arena scratch;
        size_t bytes = 0;
        if (cap == 0) continue;
        hapt_arena_init(&scratch);
        status = memory_of(worker, r, options, &scratch, &bytes);
        hapt_arena_release(&scratch);
        options->sharded_state = bytes > cap;
    }
    return status;
}

static enum hapt_status open_device(struct worker *worker, const struct hapt_config *config)
{
    const struct hapt_device_spec *spec = device_of(worker, worker->env->world_rank);
    worker->backend = hapt_backend_find(hapt_device_backend(spec));
    if (!worker->backend)
        return hapt_fail(HAPT_ERR_INPUT, "see hapt doctor",
                         "device %s needs the back end %s, which is not in this build", spec->name, spec->backend);
    const char *reason = "";
    const int devices = worker->backend->device_count(&reason);
    if (devices < 1)
        return hapt_fail(HAPT_ERR_INPUT, "see hapt doctor", "no %s device: %s", worker->backend->name, reason);
    int threads = (int)hapt_config_int(config, "threads");
    if (threads == 0) threads = worker->plan->threads;
    worker->threads = hapt_env_threads(worker->env, threads);
    return worker->backend->open(hapt_env_device(worker->env, devices), worker->threads,
                                 memory_cap(worker, worker->env->world_rank), &worker->device);
}

/* Tied gradients are summed by parts, so every rank needs them whole. */
static bool is_tied(const struct stage *stage)
{
    const struct hapt_ties *ties = stage->worker->ties;
    for (int t = 0; t < ties->count; t++)
        for (int c = 0; c < ties->tie[t].chunk_count; c++)
            if (ties->tie[t].chunk[c] == stage->chunk) return true;
    return false;
}

/* The cluster file may limit the host memory. Each device has an equal part, as in planning. */
static enum hapt_status check_host_memory(const struct worker *worker, const struct hapt_program *const *program,
                                          const struct hapt_engine_options *options)
{
    const int world_rank = worker->env->world_rank;
    const struct hapt_subcluster *own = &worker->cluster->subcluster[worker->cluster->subcluster_of_rank[world_rank]];
    const double room = own->host_memory_bytes / own->devices_per_node;
    struct hapt_memory_plan *plan;
    struct hapt_arena scratch;
    char need[32], have[32];
    double bytes = 0;
    if (!worker->plan->host_state || room == 0) return HAPT_OK;
    hapt_arena_init(&scratch);
    const enum hapt_status status = hapt_engine_plan_chunks(program, worker->stage_count, options, &scratch, &plan);
    if (status == HAPT_OK) bytes = (double)plan->host_bytes;
    hapt_arena_release(&scratch);
    HAPT_TRY(status);
    if (bytes <= room) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INFEASIBLE, "plan again for this cluster file, or with --offload no",
                     "the optimizer state of rank %d takes %s of host memory, but its part of the host's memory is %s",
                     world_rank, hapt_units_bytes(bytes, need), hapt_units_bytes(room, have));
}

/* byte/s of copies between this rank's device and its host; 0: they are not slowed down. */
static double host_pace(const struct worker *worker)
{
    const int world_rank = worker->env->world_rank;
    const struct hapt_subcluster *own = &worker->cluster->subcluster[worker->cluster->subcluster_of_rank[world_rank]];
    return own->host_paced ? own->host_bandwidth : 0;
}

/* The units of all chunks of this rank whose weights move; gradients: of those whose gradients are on the host. A
 * module may be cut between two chunks. */
static enum hapt_status find_units(const struct worker *worker, bool gradients, const struct hapt_unit **units,
                                   int *count)
{
    struct hapt_unit *unit;
    *count = 0;
    for (int s = 0; s < worker->stage_count; s++)
        *count += worker->plan->stage[worker->stage[s].chunk].layout.weight_unit_count;
    HAPT_NEW(unit, worker->arena, *count);
    *units = unit;
    *count = 0;
    for (int s = 0; s < worker->stage_count; s++) {
        const struct hapt_program *program = worker->stage[s].program;
        const struct hapt_layout *layout = &worker->plan->stage[worker->stage[s].chunk].layout;
        if (gradients && layout->weights_at != HAPT_GRADIENTS_ON_HOST) continue;
        for (int u = 0; u < layout->weight_unit_count; u++) {
            struct hapt_unit *own = &unit[(*count)++];
            *own = layout->weight_unit[u];
            if (own->first_op < program->first_op) own->first_op = program->first_op;
            if (own->end_op > program->end_op) own->end_op = program->end_op;
        }
    }
    return HAPT_OK;
}

/* The memory plan decides whether gradients can leave, and weights be sharded. */
static enum hapt_status check_moves(const struct worker *worker)
{
    for (int s = 0; s < worker->stage_count; s++) {
        const struct stage *stage = &worker->stage[s];
        const int planned = worker->plan->stage[stage->chunk].layout.weights_at;
        if (hapt_engine_memory(stage->engine)->sharded_weights != (planned == HAPT_WEIGHTS_SHARDED))
            return hapt_fail(HAPT_ERR_INPUT, "plan again for this model",
                             "the plan has the weights of stage %d sharded, which cannot be", stage->chunk);
        if (hapt_engine_memory(stage->engine)->host_gradients != (planned == HAPT_GRADIENTS_ON_HOST))
            return hapt_fail(HAPT_ERR_INPUT, "plan again for this model",
                             "the plan has the gradients of stage %d on the hosts, which cannot leave their device",
                             stage->chunk);
    }
    return HAPT_OK;
}

static enum hapt_status build_engines(struct worker *worker, const struct hapt_config *config, int state_count)
{
    struct hapt_engine_options *options, common = {.backend = worker->backend,
                                                   .device = worker->device,
                                                   .threads = worker->threads,
                                                   .state_count = state_count,
                                                   .slots = worker->list->slots,
                                                   .weight_slots = worker->list->weight_slots,
                                                   .host_state = worker->plan->host_state,
                                                   .host_update = worker->plan->host_update,
                                                   .host_pace = host_pace(worker),
                                                   .host_timeout_s = hapt_config_real(config, "timeout"),
                                                   .transfer_slots = worker->schedule->transfer_slots};
    const struct hapt_program **program;
    struct hapt_engine **engine;
    HAPT_NEW(options, worker->arena, worker->stage_count);
    HAPT_NEW(program, worker->arena, worker->stage_count);
    HAPT_NEW(engine, worker->arena, worker->stage_count);
    HAPT_TRY(find_units(worker, false, &common.weight_unit, &common.weight_unit_count));
    HAPT_TRY(find_units(worker, true, &common.gradient_unit, &common.gradient_unit_count));
    HAPT_TRY(choose_state(worker, config, &common));
    for (int s = 0; s < worker->stage_count; s++) {
        struct stage *stage = &worker->stage[s];
        hapt_team_clock(&stage->team, worker->backend, worker->device);
        options[s] = common;
        worker->runtime->links(&stage->team, &options[s].links);
        options[s].all_reduce_gradients = is_tied(stage);
        program[s] = stage->program;
    }
    HAPT_TRY(check_host_memory(worker, program, options));
    HAPT_TRY(hapt_engine_create_chunks(program, worker->stage_count, options, engine));
    for (int s = 0; s < worker->stage_count; s++) worker->stage[s].engine = engine[s];
    HAPT_TRY(check_moves(worker));
    for (int s = 0; s < worker->stage_count; s++) HAPT_TRY(hapt_engine_warm_up(engine[s]));
    return HAPT_OK;
}

/* Finds the rows of a microbatch to fetch for an input, and the part of them that this rank reads. */
static enum hapt_status find_input(struct stage *stage, int tensor)
{
    const struct hapt_sharding *sharding = stage->sharding;
    const struct hapt_tensor *whole = &sharding->graph->tensor[tensor];
    struct stage_input *input = &stage->input[stage->input_count++];
    struct hapt_box box, rows;
    struct hapt_strided_list local;
    const int field = whole->role == HAPT_ROLE_FIELD ? hapt_model_find_field(stage->worker->model, whole->name) : -1;
    *input = (struct stage_input){.tensor = tensor, .role = whole->role, .field = field};
    if (hapt_role_is_scalar(whole->role)) return HAPT_OK;
    hapt_sharding_box(sharding, tensor, stage->team.mesh_coordinate, &box);
    const struct hapt_box_run *last = &box.run[0][box.runs[0] - 1];
    const int64_t per_row =
        whole->shape[0] / stage->worker->model->microbatch; /* entries of dimension 0 per row of data */
    input->first_row = (int)(box.run[0][0].start / per_row);
    input->rows = (int)((last->start + last->count + per_row - 1) / per_row) - input->first_row;
    hapt_reshard_full_box(whole, &rows);
    rows.extent[0] = rows.run[0][0].count = input->rows * per_row;
    rows.run[0][0].start = input->first_row * per_row;
    input->bytes = hapt_tensor_bytes(whole) / (size_t)stage->worker->model->microbatch * (size_t)input->rows;
    if (hapt_reshard_same(&rows, &box)) return HAPT_OK;
    HAPT_TRY(hapt_reshard_common(&rows, &box, NULL, hapt_dtype_bytes(whole->dtype), stage->worker->arena, &input->runs,
                                 &local));
    HAPT_ASSERT(local.count == 1); /* the rows are read in local order */
    return HAPT_OK;
}

/* Each parameter counts once in the global norm, at the lowest stage that holds it, where its gradient is. */
static enum hapt_status find_inputs(struct stage *stage)
{
    const struct hapt_program *program = stage->program;
    const struct hapt_graph *graph = program->graph;
    HAPT_NEW(stage->input, stage->worker->arena, program->tensor_count);
    HAPT_NEW(stage->counts, stage->worker->arena, program->tensor_count);
    for (int t = 0; t < program->tensor_count; t++) {
        const int tensor = program->tensor[t].tensor;
        if (graph->tensor[tensor].kind == HAPT_TENSOR_INPUT) HAPT_TRY(find_input(stage, tensor));
        if (graph->tensor[tensor].kind != HAPT_TENSOR_PARAMETER) continue;
        const int gradient = graph->tensor[tensor].gradient;
        stage->counts[t] = stage_owner(stage->worker, tensor) == stage->chunk && gradient >= 0 &&
                           stage_counts(stage, gradient, stage_sliced_axes(stage, t));
    }
    return HAPT_OK;
}

static enum hapt_status reserve_buffers(struct worker *worker)
{
    size_t largest_bytes = 1;
    for (int s = 0; s < worker->stage_count; s++)
        for (int i = 0; i < worker->stage[s].input_count; i++)
            if (worker->stage[s].input[i].bytes > largest_bytes) largest_bytes = worker->stage[s].input[i].bytes;
    worker->row_buffer = hapt_arena_alloc(worker->arena, largest_bytes, 1);
    worker->shard_buffer = hapt_arena_alloc(worker->arena, largest_bytes, 1);
    return worker->row_buffer && worker->shard_buffer ? HAPT_OK : HAPT_ERR_MEMORY;
}

struct worker worker_of(const struct hapt_env *env, const struct hapt_cluster *cluster, const struct hapt_model *model,
                        const struct hapt_plan *plan, struct hapt_arena *arena)
{
    return (struct worker){.env = env,
                           .cluster = cluster,
                           .runtime = runtime_of(cluster),
                           .model = model,
                           .plan = plan,
                           .arena = arena,
                           .comm = MPI_COMM_NULL};
}

enum hapt_status worker_build(struct worker *worker, const struct hapt_config *config, int state_count)
{
    worker->comm = MPI_COMM_NULL;
    worker->graph = worker->model->graph;
    worker->time_scale = worker->runtime->computes ? 1 : hapt_config_real(config, "time-scale");
    worker->timeout_s = fmax(1, worker->time_scale) * watch_timeout_s(config, worker->plan);
    HAPT_TRY(find_ranks(worker));
    HAPT_TRY(find_own_stages(worker));
    HAPT_TRY(build_programs(worker));
    HAPT_TRY(build_schedule(worker));
    if (worker->stage_count == 0) return HAPT_OK;
    worker->steady = device_of(worker, worker->env->world_rank)->steady;
    HAPT_TRY(check_shared_submesh(worker));
    for (int s = 0; s < worker->stage_count; s++) {
        struct stage *stage = &worker->stage[s];
        HAPT_TRY(hapt_team_prepare(&stage->team, stage->sharding, stage->program, stage->rank,
                                   device_of(worker, worker->env->world_rank)->slowdown, worker->arena));
    }
    HAPT_TRY(open_device(worker, config));
    HAPT_TRY(build_engines(worker, config, state_count));
    HAPT_TRY(worker->runtime->prepare(worker, state_count));
    for (int s = 0; s < worker->stage_count; s++) HAPT_TRY(find_inputs(&worker->stage[s]));
    return reserve_buffers(worker);
}

/* The collectives of the stages: first over hosts, then over devices. */
static enum hapt_status connect_teams(struct worker *worker)
{
    enum hapt_status status = HAPT_OK;
    for (int s = 0; s < worker->stage_count && status == HAPT_OK; s++)
        status = worker->runtime->connect_team(&worker->stage[s]);
    HAPT_TRY(hapt_link_all_or_none(worker->env->world, "the stages' communicators", status));
    status = worker_create_device_groups(worker);
    for (int s = 0; s < worker->stage_count && status == HAPT_OK; s++)
        status = worker->runtime->connect_devices(&worker->stage[s]);
    return hapt_link_all_or_none(worker->env->world, "the stages' collectives", status);
}

static enum hapt_status connect_worker(struct worker *worker)
{
    const struct stage *first = &worker->stage[0];
    const int color = worker->stage_count == 0 ? MPI_UNDEFINED : first->chunk;
    HAPT_MPI(MPI_Comm_split(worker->env->world, color, first->rank, &worker->comm));
    HAPT_TRY(connect_teams(worker));
    HAPT_TRY(worker->runtime->create_comm_thread(worker));
    if (worker->stage_count > 0 && worker->backend->pin)
        hapt_comm_thread_use_device(worker->comm_thread, worker->backend, worker->device);
    for (int s = 0; s < worker->stage_count; s++) {
        HAPT_TRY(stage_add_flows(&worker->stage[s]));
        HAPT_TRY(stage_add_ties(&worker->stage[s]));
    }
    return HAPT_OK; /* the caller agrees */
}

enum hapt_status worker_join(struct worker *worker, double timeout_s, bool *together)
{
    const MPI_Comm world = worker->env->world;
    if (worker->env->world_size > 1) /* MPI itself may wait for ever after a failure inside it */
        hapt_deadline_set("connecting all ranks", CONNECT_SHARE * timeout_s);
    const enum hapt_status connected = hapt_env_agree(world, connect_worker(worker));
    const enum hapt_status started =
        connected == HAPT_OK ? hapt_env_agree(world, hapt_comm_thread_start(worker->comm_thread)) : connected;
    hapt_deadline_clear();
    *together = connected == HAPT_OK && started != HAPT_OK;
    return started;
}

enum hapt_status worker_drain(struct worker *worker)
{
    for (int s = 0; s < worker->stage_count; s++)
        if (worker->stage[s].engine) HAPT_TRY(hapt_engine_settle(worker->stage[s].engine));
    return worker->comm_thread ? hapt_comm_thread_drain(worker->comm_thread) : HAPT_OK;
}

void worker_release(struct worker *worker)
{
    hapt_comm_thread_destroy(worker->comm_thread);
    for (int s = 0; s < worker->stage_count; s++) {
        stage_release_flows(&worker->stage[s]);
        stage_release_ties(&worker->stage[s]);
    }
    worker_destroy_device_groups(worker);
    for (int s = 0; s < worker->stage_count; s++) hapt_team_release(&worker->stage[s].team);
    if (worker->comm != MPI_COMM_NULL) MPI_Comm_free(&worker->comm);
    for (int s = 0; s < worker->stage_count; s++) hapt_engine_destroy(worker->stage[s].engine);
    if (worker->device) worker->backend->close(worker->device);
}
