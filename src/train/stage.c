/* One stage on one rank: executes the same instruction list that the simulator reads. */
#include "emulate.h"

#include <math.h>
#include <string.h>

#include "hapt/heartbeat.h"
#include "trace.h"
#include "watch.h"

int stage_owner(const struct stage *stage, int tensor)
{
    for (int c = 0; c < stage->plan->stage_count; c++)
        if (stage->program[c]->local[tensor] >= 0) return c;
    return -1;
}

static enum hapt_status find_own_stage(struct stage *stage)
{
    stage->chunk = -1;
    HAPT_NEW(stage->ranks, stage->arena, stage->plan->stage_count);
    for (int c = 0; c < stage->plan->stage_count; c++) {
        HAPT_NEW(stage->ranks[c], stage->arena, stage_size(stage, c));
        HAPT_TRY(hapt_plan_ranks(stage->plan, stage->cluster, c, stage->ranks[c]));
    }
    for (int c = 0; c < stage->plan->stage_count; c++)
        for (int r = 0; r < stage_size(stage, c); r++)
            if (stage_world_rank(stage, c, r) == stage->env->world_rank) {
                stage->chunk = c;
                stage->rank = r;
                stage->size = stage_size(stage, c);
            }
    return HAPT_OK;
}

static enum hapt_status shard(const struct stage *stage, int chunk, struct hapt_sharding **sharding)
{
    const struct hapt_plan_stage *part = &stage->plan->stage[chunk];
    char name[32];
    snprintf(name, sizeof name, "stage %d", chunk);
    return hapt_layout_shard(&part->layout, stage->graph, part->submesh->nodes, part->submesh->devices_per_node,
                             stage->model->microbatch, name, stage->arena, sharding);
}

static enum hapt_status build_programs(struct stage *stage)
{
    const struct hapt_plan *plan = stage->plan;
    int end = 0;
    HAPT_NEW(stage->sharding, stage->arena, plan->stage_count);
    HAPT_NEW(stage->program, stage->arena, plan->stage_count);
    for (int c = 0; c < plan->stage_count; c++) {
        const struct hapt_plan_stage *part = &plan->stage[c];
        if (part->first_op != end || part->end_op <= end || part->end_op > stage->graph->forward_count)
            return hapt_fail(HAPT_ERR_INPUT, "create the plan from this model",
                             "the plan's stages do not cover the model");
        end = part->end_op;
        HAPT_TRY(shard(stage, c, &stage->sharding[c]));
        const struct hapt_sharding *made = stage->sharding[c];
        if (made->axis[0].size * made->axis[1].size != stage_size(stage, c))
            return hapt_fail(HAPT_ERR_INPUT, "create the plan again",
                             "stage %d of the plan has %d devices, its program is for %d", c, stage_size(stage, c),
                             made->axis[0].size * made->axis[1].size);
        if (c == stage->chunk) {
            int mesh_coordinate[HAPT_MESH_AXES];
            stage_mesh_coordinate(stage, c, stage->rank, mesh_coordinate);
            HAPT_TRY(hapt_sharding_at(made, mesh_coordinate, stage->arena, &stage->sharding[c]));
        }
        HAPT_TRY(
            hapt_program_build(stage->sharding[c], part->first_op, part->end_op, stage->arena, &stage->program[c]));
    }
    if (end != stage->graph->forward_count)
        return hapt_fail(HAPT_ERR_INPUT, "create the plan from this model", "the plan's stages do not cover the model");
    HAPT_TRY(hapt_edges_build(stage->program, plan->stage_count, stage->arena, &stage->edges));
    return hapt_ties_find(stage->program, plan->stage_count, stage->arena, &stage->ties);
}

static enum hapt_status build_schedule(struct stage *stage)
{
    const struct hapt_plan *plan = stage->plan;
    int *warmup;
    HAPT_NEW(warmup, stage->arena, plan->stage_count);
    for (int c = 0; c < plan->stage_count; c++) warmup[c] = plan->stage[c].warmup;
    HAPT_TRY(hapt_schedule_build(plan->schedule, plan->stage_count, plan->microbatches, warmup, stage->ties->count > 0,
                                 stage->arena, &stage->schedule));
    HAPT_TRY(hapt_schedule_check(stage->schedule));
    if (stage->chunk >= 0) stage->list = &stage->schedule->list[stage->schedule->submesh_of[stage->chunk]];
    return HAPT_OK;
}

static const struct hapt_device_spec *device_of(const struct stage *stage, int world_rank)
{
    return &stage->cluster->subcluster[stage->cluster->subcluster_of_rank[world_rank]].device;
}

/* Limit of the device memory of a rank in bytes; 0: none. */
static size_t memory_cap(const struct stage *stage, int world_rank)
{
    const struct hapt_device_spec *spec = device_of(stage, world_rank); /* emulated devices are capped */
    return spec->memory_capped ? (size_t)spec->memory_bytes : 0;
}

/* Decides whether the ranks of the stage shard the optimizer state. Each rank checks all ranks, so all decide alike. */
static enum hapt_status choose_state(const struct stage *stage, const struct hapt_config *config,
                                     struct hapt_engine_options *options)
{
    const char *choice = hapt_config_text(config, "sharded-optimizer");
    const struct hapt_program *program = stage->program[stage->chunk];
    options->sharded_state = !strcmp(choice, "yes");
    if (strcmp(choice, "auto") != 0 || stage->size == 1) return HAPT_OK;
    struct hapt_arena scratch;
    enum hapt_status status = HAPT_OK;
    hapt_arena_init(&scratch);
    for (int r = 0; r < stage->size && status == HAPT_OK && !options->sharded_state; r++) {
        int mesh_coordinate[HAPT_MESH_AXES];
        struct hapt_sharding *sharding;
        struct hapt_program *its;
        struct hapt_memory_plan *plan;
        const size_t cap = (size_t)device_of(stage, stage_world_rank(stage, stage->chunk, r))->memory_bytes;
        if (cap == 0) continue;
        stage_mesh_coordinate(stage, stage->chunk, r, mesh_coordinate);
        status = hapt_sharding_at(stage->sharding[stage->chunk], mesh_coordinate, &scratch, &sharding);
        if (status == HAPT_OK)
            status = hapt_program_build(sharding, program->first_op, program->end_op, &scratch, &its);
        if (status == HAPT_OK) status = hapt_engine_plan_memory(its, options, &scratch, &plan);
        if (status == HAPT_OK) options->sharded_state = plan->total_bytes > cap;
    }
    hapt_arena_release(&scratch);
    return status;
}

static enum hapt_status build_engine(struct stage *stage, const struct hapt_config *config, int state_count)
{
    const struct hapt_device_spec *spec = device_of(stage, stage->env->world_rank);
    stage->backend = hapt_backend_find(hapt_device_backend(spec));
    if (!stage->backend)
        return hapt_fail(HAPT_ERR_INPUT, "see hapt doctor",
                         "device %s needs the back end %s, which is not in this build", spec->name, spec->backend);
    const char *reason = "";
    const int devices = stage->backend->device_count(&reason);
    if (devices < 1)
        return hapt_fail(HAPT_ERR_INPUT, "see hapt doctor", "no %s device: %s", stage->backend->name, reason);
    int threads = (int)hapt_config_int(config, "threads");
    if (threads == 0) threads = stage->plan->threads;
    threads = stage->threads = hapt_env_threads(stage->env, threads);
    HAPT_TRY(stage->backend->open(hapt_env_device(stage->env, devices), threads,
                                  memory_cap(stage, stage->env->world_rank), &stage->device));
    hapt_team_clock(&stage->team, stage->backend, stage->device);
    struct hapt_engine_options options = {.backend = stage->backend,
                                          .device = stage->device,
                                          .threads = threads,
                                          .state_count = state_count,
                                          .slots = stage->list->slots};
    if (!stage->emulated) hapt_team_links(&stage->team, &options.links);
    HAPT_TRY(choose_state(stage, config, &options));
    for (int t = 0; t < stage->ties->count; t++)
        for (int c = 0; c < stage->ties->tie[t].chunk_count; c++)
            if (stage->ties->tie[t].chunk[c] == stage->chunk) options.all_reduce_gradients = true;
    HAPT_TRY(hapt_engine_create(stage->program[stage->chunk], &options, &stage->engine));
    return hapt_engine_warm_up(stage->engine);
}

/* Finds the rows of a microbatch to fetch for an input, and the part of them that this rank reads. */
static enum hapt_status find_input(struct stage *stage, int tensor, size_t *largest_bytes)
{
    const struct hapt_sharding *sharding = stage->sharding[stage->chunk];
    const struct hapt_tensor *whole = &sharding->graph->tensor[tensor];
    struct stage_input *input = &stage->input[stage->input_count++];
    struct hapt_box box, rows;
    struct hapt_strided_list local;
    *input = (struct stage_input){.tensor = tensor, .role = whole->role};
    if (whole->role == HAPT_ROLE_LOSS_SCALE) return HAPT_OK;
    hapt_sharding_box(sharding, tensor, stage->team.mesh_coordinate, &box);
    const struct hapt_box_run *last = &box.run[0][box.runs[0] - 1];
    const int64_t per_row = whole->shape[0] / stage->model->microbatch; /* entries of dimension 0 per row of data */
    input->first_row = (int)(box.run[0][0].start / per_row);
    input->rows = (int)((last->start + last->count + per_row - 1) / per_row) - input->first_row;
    hapt_reshard_full_box(whole, &rows);
    rows.extent[0] = rows.run[0][0].count = input->rows * per_row;
    rows.run[0][0].start = input->first_row * per_row;
    input->bytes = hapt_tensor_bytes(whole) / (size_t)stage->model->microbatch * (size_t)input->rows;
    if (input->bytes > *largest_bytes) *largest_bytes = input->bytes;
    if (hapt_reshard_same(&rows, &box)) return HAPT_OK;
    HAPT_TRY(
        hapt_reshard_common(&rows, &box, NULL, hapt_dtype_bytes(whole->dtype), stage->arena, &input->runs, &local));
    HAPT_ASSERT(local.count == 1); /* the rows are read in local order */
    return HAPT_OK;
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

/* Each parameter counts once in the global norm, at the lowest stage that holds it, where its gradient is. */
static enum hapt_status find_inputs(struct stage *stage)
{
    const struct hapt_program *program = stage->program[stage->chunk];
    const struct hapt_graph *graph = program->graph;
    size_t largest_bytes = 1;
    HAPT_NEW(stage->input, stage->arena, program->tensor_count);
    HAPT_NEW(stage->counts, stage->arena, program->tensor_count);
    for (int t = 0; t < program->tensor_count; t++) {
        const int tensor = program->tensor[t].tensor;
        if (graph->tensor[tensor].kind == HAPT_TENSOR_INPUT) HAPT_TRY(find_input(stage, tensor, &largest_bytes));
        if (graph->tensor[tensor].kind != HAPT_TENSOR_PARAMETER) continue;
        const int gradient = graph->tensor[tensor].gradient;
        stage->counts[t] = stage_owner(stage, tensor) == stage->chunk && gradient >= 0 &&
                           stage_counts(stage, gradient, stage_sliced_axes(stage, t));
    }
    stage->row_buffer = hapt_arena_alloc(stage->arena, largest_bytes, 1);
    stage->shard_buffer = hapt_arena_alloc(stage->arena, largest_bytes, 1);
    return stage->row_buffer && stage->shard_buffer ? HAPT_OK : HAPT_ERR_MEMORY;
}

enum hapt_status stage_build(struct stage *stage, const struct hapt_config *config, int state_count)
{
    stage->comm = MPI_COMM_NULL;
    stage->graph = stage->model->graph;
    stage->chunk = -1;
    stage->emulated = emulation_of(stage->cluster, config, &stage->time_scale);
    stage->timeout_s = fmax(1, stage->time_scale) * watch_timeout_s(config, stage->plan);
    HAPT_TRY(find_own_stage(stage));
    HAPT_TRY(build_programs(stage));
    HAPT_TRY(build_schedule(stage));
    if (stage->chunk < 0) return HAPT_OK;
    snprintf(stage->name, sizeof stage->name, "stage %d", stage->chunk);
    HAPT_TRY(hapt_team_prepare(&stage->team, stage->sharding[stage->chunk], stage->program[stage->chunk], stage->rank,
                               device_of(stage, stage->env->world_rank)->slowdown, stage->arena));
    HAPT_TRY(build_engine(stage, config, state_count));
    if (stage->emulated) HAPT_TRY(emulation_create(stage, state_count));
    return find_inputs(stage);
}

/* Throttles the collectives of a stage on several subclusters to the slow link between them. A mixed stage has one
 * axis. */
static enum hapt_status throttle_stage(struct stage *stage)
{
    int *world_rank;
    HAPT_NEW(world_rank, stage->arena, stage->size);
    for (int r = 0; r < stage->size; r++) world_rank[r] = stage_world_rank(stage, stage->chunk, r);
    hapt_cluster_pace(stage->cluster, stage->size, world_rank, stage->team.all_ranks);
    return HAPT_OK;
}

enum hapt_status stage_connect(struct stage *stage)
{
    const int color = stage->chunk < 0 ? MPI_UNDEFINED : stage->chunk;
    HAPT_MPI(MPI_Comm_split(stage->env->world, color, stage->rank, &stage->comm));
    enum hapt_status status = HAPT_OK;
    const bool computes = stage->chunk >= 0 && !stage->emulated;
    if (computes) status = hapt_team_connect(&stage->team, stage->comm, stage->name, stage->timeout_s);
    if (computes && status == HAPT_OK) status = throttle_stage(stage);
    HAPT_TRY(hapt_link_all_or_none(stage->env->world, "the stages' communicators", status));
    struct hapt_device_comm *stage_group = NULL;
    status = stage_create_device_groups(stage, &stage_group);
    if (computes && status == HAPT_OK)
        status = hapt_team_use_devices(&stage->team, stage->backend, stage->device, stage_group, stage->carrier);
    if (computes && status == HAPT_OK) status = hapt_engine_connect(stage->engine, stage->team.devices != NULL);
    HAPT_TRY(hapt_link_all_or_none(stage->env->world, "the stages' collectives", status));
    struct hapt_path *path = NULL; /* NULL: modelled messages are short, so MPI carries them */
    if (!stage->emulated) status = hapt_cluster_paths(stage->env, stage->cluster, stage->arena, &path);
    HAPT_TRY(hapt_link_all_or_none(stage->env->world, "the routes between hosts", status));
    HAPT_TRY(hapt_comm_thread_create(stage->emulated ? &hapt_transfer_mpi : &hapt_transfer_routed, stage->env->world,
                                     path, stage->timeout_s, &stage->comm_thread));
    if (stage->emulated)
        HAPT_TRY(hapt_comm_thread_use_wakeups(stage->comm_thread, stage->env->world, stage->env->node));
    if (stage->chunk >= 0 && stage->backend->pin)
        hapt_comm_thread_use_device(stage->comm_thread, stage->backend, stage->device);
    return stage->chunk >= 0 ? stage_add_flows(stage) : HAPT_OK; /* the caller agrees */
}

enum hapt_status stage_start(struct stage *stage)
{
    return hapt_comm_thread_start(stage->comm_thread);
}

enum hapt_status stage_drain(struct stage *stage)
{
    return stage->comm_thread ? hapt_comm_thread_drain(stage->comm_thread) : HAPT_OK;
}

void stage_release(struct stage *stage)
{
    hapt_comm_thread_destroy(stage->comm_thread);
    stage_release_flows(stage);
    stage_destroy_device_groups(stage);
    hapt_team_release(&stage->team);
    if (stage->comm != MPI_COMM_NULL) MPI_Comm_free(&stage->comm);
    hapt_engine_destroy(stage->engine);
    if (stage->device) stage->backend->close(stage->device);
}

/* ---- One step ---- */

static enum hapt_status put(struct stage *stage, int tensor, int slot, const void *value)
{
    struct hapt_queue *queue = stage->backend->queue(stage->device, 0);
    return stage->backend->copy(queue, hapt_engine_tensor(stage->engine, tensor, slot), value,
                                hapt_engine_tensor_bytes(stage->engine, tensor));
}

static enum hapt_status put_inputs(struct stage *stage, int microbatch, int slot)
{
    for (int i = 0; stage->data && i < stage->input_count; i++) {
        const struct stage_input *input = &stage->input[i];
        const int first = microbatch * stage->model->microbatch + input->first_row;
        const void *value = stage->row_buffer;
        if (input->role == HAPT_ROLE_LOSS_SCALE) continue;
        hapt_data_read(stage->data, input->role, stage->step, first, input->rows, stage->row_buffer);
        if (input->runs.count > 0) {
            hapt_strided_pack(&input->runs, stage->row_buffer, 0, hapt_strided_bytes(&input->runs),
                              stage->shard_buffer);
            value = stage->shard_buffer;
        }
        HAPT_TRY(put(stage, input->tensor, slot, value));
        /* the buffer is reused at once */
        struct hapt_queue *queue = stage->backend->queue(stage->device, 0);
        HAPT_TRY(stage->backend->wait(stage->backend->record(queue)));
    }
    return HAPT_OK;
}

static enum hapt_status begin_step(struct stage *stage)
{
    const float scale =
        stage->data ? (float)(stage->loss_scale / (double)hapt_data_targets(stage->data, stage->step)) : 0;
    HAPT_TRY(hapt_engine_begin_step(stage->engine));
    stage->team.free_s = hapt_time_s(); /* all stages have agreed on the previous step */
    for (int i = 0; i < stage->input_count; i++)
        if (stage->input[i].role == HAPT_ROLE_LOSS_SCALE) HAPT_TRY(put(stage, stage->input[i].tensor, 0, &scale));
    HAPT_TRY(stage->backend->wait(
        stage->backend->record(stage->backend->queue(stage->device, 0)))); /* `scale` is a local variable */
    const struct stage_flows *incoming[] = {&stage->forward_in, &stage->backward_in};
    for (int k = 0; k < 2; k++)
        for (int f = 0; f < incoming[k]->count; f++)
            hapt_comm_thread_expect(stage->comm_thread, incoming[k]->flow[f], stage->plan->microbatches);
    return HAPT_OK;
}

static enum hapt_status wait_received(struct stage *stage, const struct stage_flows *flows, int microbatch)
{
    for (int f = 0; f < flows->count; f++) {
        const int64_t sequence = stage->sequence + microbatch;
        HAPT_TRY(stage->emulation ? emulation_wait_received(stage, flows->flow[f], sequence)
                                  : hapt_comm_thread_wait_received(stage->comm_thread, flows->flow[f], sequence));
    }
    return HAPT_OK;
}

static enum hapt_status wait_sent(struct stage *stage, const struct stage_flows *flows, int slot)
{
    for (int f = 0; f < flows->count; f++)
        HAPT_TRY(stage->emulation ? emulation_wait_sent(stage, flows->flow[f], slot)
                                  : hapt_comm_thread_wait_sent(stage->comm_thread, flows->flow[f], slot));
    return HAPT_OK;
}

static void send(struct stage *stage, const struct stage_flows *flows, int slot)
{
    for (int f = 0; f < flows->count; f++) {
        if (stage->emulation)
            emulation_send(stage, flows->flow[f], slot);
        else
            hapt_comm_thread_send(stage->comm_thread, flows->flow[f], slot);
    }
}

static void free_received(struct stage *stage, const struct stage_flows *flows)
{
    for (int f = 0; f < flows->count; f++) {
        if (stage->emulation)
            emulation_free(stage, flows->flow[f]);
        else
            hapt_comm_thread_free(stage->comm_thread, flows->flow[f]);
    }
}

static int transfer_slot(const struct stage *stage, int microbatch)
{
    return (int)((stage->sequence + microbatch) % HAPT_TRANSFER_SLOTS);
}

/* Assembles incoming tensors from the parts that this rank and its replicas received. */
static enum hapt_status rebuild(struct stage *stage, const struct hapt_boundary *boundary, enum hapt_staging_kind kind,
                                const struct stage_replicas *replicas, int transfer)
{
    for (int i = 0; i < boundary->count; i++)
        HAPT_TRY(stage_rebuild_received(stage, &replicas[i], boundary->tensor[i],
                                        hapt_engine_staging(stage->engine, kind, transfer, i)));
    return HAPT_OK;
}

static const struct hapt_plan_stage *own_plan(const struct stage *stage)
{
    return &stage->plan->stage[stage->chunk];
}

/* The backward time of the plan, as the simulator computes it. */
static double backward_s(const struct stage *stage)
{
    const struct hapt_plan_stage *own = own_plan(stage);
    return fmax(0, own->compute_s - own->step_s / stage->plan->microbatches - own->forward_s);
}

static enum hapt_status forward(struct stage *stage, const struct hapt_instruction *instruction)
{
    const struct hapt_program *program = stage->program[stage->chunk];
    const int slot = instruction->slot, microbatch = instruction->microbatch;
    const int transfer = stage->forward_in.count ? transfer_slot(stage, microbatch) : -1;
    stage->team.microbatch = microbatch;
    HAPT_TRY(wait_sent(stage, &stage->forward_out, slot));
    stage->begun_s = hapt_time_s();
    HAPT_TRY(rebuild(stage, &program->forward_in, HAPT_STAGING_FORWARD_IN, stage->forward_replicas, transfer));
    if (stage->emulation) hapt_team_set_length(&stage->team, stage->time_scale * own_plan(stage)->forward_s);
    hapt_team_stretch_begin(&stage->team);
    HAPT_TRY(put_inputs(stage, microbatch, slot));
    HAPT_TRY(hapt_engine_forward(stage->engine, slot, transfer));
    const int loss = program->graph->loss;
    if (!stage->emulated && stage->chunk == stage->plan->stage_count - 1 && stage_counts(stage, loss, 0)) {
        float value;
        struct hapt_queue *queue = stage->backend->queue(stage->device, 0);
        HAPT_TRY(stage->backend->copy(queue, &value, hapt_engine_tensor(stage->engine, loss, slot), sizeof value));
        HAPT_TRY(stage->backend->wait(stage->backend->record(queue)));
        stage->loss += value;
    }
    hapt_team_stretch_end(&stage->team);
    free_received(stage, &stage->forward_in);
    return HAPT_OK;
}

static enum hapt_status backward(struct stage *stage, const struct hapt_instruction *instruction)
{
    const struct hapt_program *program = stage->program[stage->chunk];
    const int transfer = transfer_slot(stage, instruction->microbatch);
    stage->team.microbatch = instruction->microbatch;
    HAPT_TRY(wait_sent(stage, &stage->backward_out, transfer));
    stage->begun_s = hapt_time_s();
    HAPT_TRY(rebuild(stage, &program->backward_in, HAPT_STAGING_BACKWARD_IN, stage->backward_replicas, transfer));
    if (stage->emulation) hapt_team_set_length(&stage->team, stage->time_scale * backward_s(stage));
    hapt_team_stretch_begin(&stage->team);
    HAPT_TRY(hapt_engine_backward(stage->engine, instruction->slot, stage->backward_in.count ? transfer : -1,
                                  stage->backward_out.count ? transfer : -1));
    hapt_team_stretch_end(&stage->team);
    free_received(stage, &stage->backward_in);
    return HAPT_OK;
}

static enum hapt_status reduce(struct stage *stage)
{
    stage->team.microbatch = -1;
    if (stage->size == 1) return HAPT_OK;
    return stage->emulation ? emulation_barrier(stage) : hapt_engine_reduce(stage->engine);
}

/* Models the end of a step in one piece, including the sum of gradients, at the same position as the simulator. */
static void model_end_of_step(struct stage *stage)
{
    hapt_team_set_length(&stage->team, stage->time_scale * (own_plan(stage)->step_s - own_plan(stage)->tied_s));
    hapt_team_stretch_begin(&stage->team);
    hapt_team_stretch_end(&stage->team);
}

static enum hapt_status execute(struct stage *stage, const struct hapt_instruction *instruction)
{
    switch (instruction->kind) {
    case HAPT_INSTRUCTION_RECEIVE_FORWARD: return wait_received(stage, &stage->forward_in, instruction->microbatch);
    case HAPT_INSTRUCTION_FORWARD: return forward(stage, instruction);
    case HAPT_INSTRUCTION_SEND_FORWARD: send(stage, &stage->forward_out, instruction->slot); return HAPT_OK;
    case HAPT_INSTRUCTION_RECEIVE_BACKWARD: return wait_received(stage, &stage->backward_in, instruction->microbatch);
    case HAPT_INSTRUCTION_BACKWARD: return backward(stage, instruction);
    case HAPT_INSTRUCTION_SEND_BACKWARD:
        send(stage, &stage->backward_out, transfer_slot(stage, instruction->microbatch));
        return HAPT_OK;
    case HAPT_INSTRUCTION_REDUCE: return reduce(stage);
    case HAPT_INSTRUCTION_EXCHANGE: stage->team.microbatch = -1; return stage_exchange(stage);
    case HAPT_INSTRUCTION_UPDATE:
        if (stage->emulation) model_end_of_step(stage);
        break; /* stage_update, after the agreement of all stages */
    }
    return HAPT_OK;
}

/* Reports the current operation, for peers that wait for this rank. */
static void report_activity(const struct stage *stage, const struct hapt_instruction *instruction)
{
    static const char *const what[] = {[HAPT_INSTRUCTION_RECEIVE_FORWARD] = "waiting for activations",
                                       [HAPT_INSTRUCTION_FORWARD] = "forward",
                                       [HAPT_INSTRUCTION_SEND_FORWARD] = "sending activations",
                                       [HAPT_INSTRUCTION_RECEIVE_BACKWARD] = "waiting for gradients",
                                       [HAPT_INSTRUCTION_BACKWARD] = "backward",
                                       [HAPT_INSTRUCTION_SEND_BACKWARD] = "sending gradients",
                                       [HAPT_INSTRUCTION_REDUCE] = "sum of the gradients",
                                       [HAPT_INSTRUCTION_EXCHANGE] = "sum of tied gradients",
                                       [HAPT_INSTRUCTION_UPDATE] = "end"};
    const bool back =
        instruction->kind == HAPT_INSTRUCTION_RECEIVE_FORWARD || instruction->kind == HAPT_INSTRUCTION_SEND_BACKWARD;
    const bool ahead =
        instruction->kind == HAPT_INSTRUCTION_SEND_FORWARD || instruction->kind == HAPT_INSTRUCTION_RECEIVE_BACKWARD;
    const int peer = back ? stage->chunk - 1 : ahead ? stage->chunk + 1 : -1;
    hapt_heartbeat_note((struct hapt_activity){what[instruction->kind], stage->chunk,
                                               peer < stage->plan->stage_count ? peer : -1, stage->step,
                                               instruction->microbatch});
}

enum hapt_status stage_run_step(struct stage *stage, const struct hapt_data *data, int64_t step, int64_t sequence)
{
    stage->data = data;
    stage->step = stage->team.step = step;
    stage->sequence = sequence;
    stage->loss = 0;
    if (stage->chunk < 0) return HAPT_OK;
    HAPT_TRY(begin_step(stage));
    for (int i = 0; i < stage->list->count; i++) {
        stage->begun_s = hapt_time_s();
        report_activity(stage, &stage->list->instruction[i]);
        HAPT_TRY(execute(stage, &stage->list->instruction[i]));
        trace_note(stage, sequence / stage->plan->microbatches, i, stage->begun_s, hapt_time_s());
    }
    return HAPT_OK;
}

enum hapt_status stage_square_sum(struct stage *stage, double *sum)
{
    *sum = 0;
    if (stage->chunk < 0) return HAPT_OK;
    return hapt_engine_square_sum(stage->engine, stage->counts, sum);
}

enum hapt_status stage_update(struct stage *stage, const struct hapt_update *update)
{
    if (stage->chunk < 0) return HAPT_OK;
    if (stage->emulation) return emulation_update(stage, update);
    stage->team.microbatch = -1;
    hapt_team_stretch_begin(&stage->team);
    HAPT_TRY(hapt_engine_update(stage->engine, update));
    hapt_team_stretch_end(&stage->team);
    return HAPT_OK;
}

static struct stage_link_time longest_link(const struct stage *stage, const struct stage_flows *flows, int peer)
{
    struct stage_link_time longest = {0, false};
    for (int f = 0; f < flows->count; f++) {
        bool counted;
        const double time_s = hapt_comm_thread_message_s(stage->comm_thread, flows->flow[f], &counted);
        if (flows->peer[f] != peer) continue;
        longest.time_s = fmax(longest.time_s, time_s);
        longest.counted = longest.counted || counted;
    }
    return longest;
}

void stage_take_link_times(const struct stage *stage, struct stage_link_time link[STAGE_LINKS])
{
    memset(link, 0, STAGE_LINKS * sizeof *link);
    if (stage->chunk < 0) return;
    link[STAGE_LINK_FORWARD_OUT] = longest_link(stage, &stage->forward_out, stage->chunk + 1);
    link[STAGE_LINK_BACKWARD_OUT] = longest_link(stage, &stage->backward_out, stage->chunk - 1);
    link[STAGE_LINK_FORWARD_IN] = longest_link(stage, &stage->forward_in, stage->chunk - 1);
    link[STAGE_LINK_BACKWARD_IN] = longest_link(stage, &stage->backward_in, stage->chunk + 1);
}

double stage_comm_s(const struct stage *stage)
{
    double longest = 0;
    for (int f = 0; f < stage->forward_out.count; f++) {
        const double active_s = hapt_comm_thread_active_s(stage->comm_thread, stage->forward_out.flow[f]);
        if (active_s > longest) longest = active_s;
    }
    return longest;
}
