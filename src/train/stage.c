/* One stage on one rank: it interprets the instruction list that the simulator read. */
#include "stage.h"

#include <string.h>

int stage_size(const struct stage *stage, int chunk)
{
    return stage->plan->stage[chunk].nodes * stage->plan->stage[chunk].devices_per_node;
}

int stage_world_rank(const struct stage *stage, int chunk, int index)
{
    const struct hapt_subcluster *subcluster = &stage->cluster->subcluster[stage->plan->stage[chunk].subcluster];
    return subcluster->ranks[stage->first_device[chunk] + index];
}

int stage_owner(const struct stage *stage, int tensor)
{
    for (int c = 0; c < stage->plan->stage_count; c++)
        if (stage->program[c]->local[tensor] >= 0) return c;
    return -1;
}

static void find_place(struct stage *stage)
{
    stage->chunk = -1;
    for (int c = 0; c < stage->plan->stage_count; c++)
        for (int r = 0; r < stage_size(stage, c); r++)
            if (stage_world_rank(stage, c, r) == stage->env->world_rank) {
                stage->chunk = c;
                stage->rank = r;
                stage->size = stage_size(stage, c);
            }
}

static enum hapt_status build_programs(struct stage *stage)
{
    const struct hapt_plan *plan = stage->plan;
    int end = 0;
    HAPT_NEW(stage->program, stage->arena, plan->stage_count);
    for (int c = 0; c < plan->stage_count; c++) {
        const struct hapt_plan_stage *part = &plan->stage[c];
        if (part->first_op != end || part->end_op <= end || part->end_op > stage->graph->forward_count)
            return hapt_fail(HAPT_ERR_INPUT, "make the plan from this model",
                             "the plan's stages do not cover the model");
        if (part->tensor_parallel > 1)
            return hapt_fail(HAPT_ERR_INPUT, "plan with --tensor-parallel 1: this version trains data-parallel stages",
                             "stage %d of the plan is tensor-parallel over %d devices", c, part->tensor_parallel);
        end = part->end_op;
        HAPT_TRY(hapt_program_data_parallel(stage->graph, part->first_op, part->end_op, part->nodes,
                                            part->devices_per_node, stage->arena, &stage->program[c]));
    }
    if (end != stage->graph->forward_count)
        return hapt_fail(HAPT_ERR_INPUT, "make the plan from this model", "the plan's stages do not cover the model");
    HAPT_TRY(hapt_routes_build(stage->program, plan->stage_count, stage->arena, &stage->routes));
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

static enum hapt_status build_engine(struct stage *stage, const struct hapt_config *config, int state_count)
{
    const struct hapt_device_spec *spec =
        &stage->cluster->subcluster[stage->plan->stage[stage->chunk].subcluster].device;
    stage->backend = hapt_backend_find(spec->backend);
    if (!stage->backend)
        return hapt_fail(HAPT_ERR_INPUT, "see hapt doctor",
                         "device %s needs the back end %s, which is not in this build", spec->name, spec->backend);
    const char *reason = "";
    const int devices = stage->backend->device_count(&reason);
    if (devices < 1)
        return hapt_fail(HAPT_ERR_INPUT, "see hapt doctor", "no %s device: %s", stage->backend->name, reason);
    int threads = (int)hapt_config_int(config, "threads");
    if (threads == 0) threads = stage->plan->threads;
    threads = hapt_env_threads(stage->env, threads);
    const size_t cap = spec->memory_capped ? (size_t)spec->memory_bytes : 0;
    HAPT_TRY(stage->backend->open(stage->env->node_rank % devices, threads, cap, &stage->device));
    const struct hapt_engine_options options = {.backend = stage->backend,
                                                .device = stage->device,
                                                .threads = threads,
                                                .state_count = state_count,
                                                .slots = stage->list->slots};
    stage->slowdown = spec->slowdown;
    return hapt_engine_create(stage->program[stage->chunk], &options, &stage->engine);
}

static enum hapt_status find_inputs(struct stage *stage)
{
    const struct hapt_program *program = stage->program[stage->chunk];
    size_t largest_bytes = 0;
    HAPT_NEW(stage->input, stage->arena, program->tensor_count);
    HAPT_NEW(stage->counts, stage->arena, program->tensor_count);
    for (int t = 0; t < program->tensor_count; t++) {
        const int tensor = program->tensor[t].tensor;
        const enum hapt_tensor_kind kind = program->graph->tensor[tensor].kind;
        if (kind == HAPT_TENSOR_INPUT) {
            const size_t bytes = hapt_tensor_bytes(&stage->graph->tensor[tensor]); /* of all rows */
            if (bytes > largest_bytes) largest_bytes = bytes;
            stage->input[stage->input_count++] = tensor;
        }
        const int gradient = kind == HAPT_TENSOR_PARAMETER ? stage->graph->tensor[tensor].gradient : -1;
        const double counted = kind == HAPT_TENSOR_PARAMETER && stage_owner(stage, tensor) == stage->chunk;
        if (kind == HAPT_TENSOR_PARAMETER) stage->counts[t] = counted;
        if (gradient >= 0 && program->local[gradient] >= 0) stage->counts[program->local[gradient]] = counted;
    }
    stage->row_buffer = hapt_arena_alloc(stage->arena, largest_bytes, 1);
    return stage->row_buffer ? HAPT_OK : HAPT_ERR_MEMORY;
}

enum hapt_status stage_build(struct stage *stage, const struct hapt_config *config, int state_count)
{
    stage->comm = MPI_COMM_NULL;
    stage->graph = stage->model->graph;
    stage->chunk = -1;
    stage->timeout_s = hapt_config_real(config, "timeout");
    const int mixed = hapt_plan_first_mixed(stage->plan);
    if (mixed >= 0)
        return hapt_fail(HAPT_ERR_INPUT, "plan from a profile without mixed stages",
                         "stage %d of the plan runs on devices of several subclusters (%s), which training cannot do yet", mixed,
                         stage->plan->stage[mixed].subcluster_name);
    HAPT_NEW(stage->first_device, stage->arena, stage->plan->stage_count);
    HAPT_TRY(hapt_plan_place(stage->plan, stage->cluster, stage->first_device));
    HAPT_TRY(build_programs(stage));
    find_place(stage);
    HAPT_TRY(build_schedule(stage));
    if (stage->chunk < 0) return HAPT_OK;
    snprintf(stage->name, sizeof stage->name, "stage %d", stage->chunk);
    stage->rows = stage->model->microbatch / stage->size;
    stage->first_row = stage->rank * stage->rows;
    HAPT_TRY(build_engine(stage, config, state_count));
    return find_inputs(stage);
}

enum hapt_status stage_connect(struct stage *stage)
{
    const int color = stage->chunk < 0 ? MPI_UNDEFINED : stage->chunk;
    HAPT_MPI(MPI_Comm_split(stage->env->world, color, stage->rank, &stage->comm));
    enum hapt_status status = HAPT_OK;
    if (stage->chunk >= 0)
        status = hapt_collective_create(stage->comm, stage->name, stage->timeout_s, true, &stage->collective);
    HAPT_TRY(hapt_link_all_or_none(stage->env->world, "the stages' collectives", status));
    HAPT_TRY(hapt_courier_create(&hapt_transfer_mpi, stage->env->world, stage->timeout_s, &stage->courier));
    if (stage->chunk < 0) return HAPT_OK;
    HAPT_TRY(stage_add_flows(stage));
    return hapt_courier_start(stage->courier);
}

enum hapt_status stage_drain(struct stage *stage)
{
    return hapt_courier_drain(stage->courier);
}

void stage_release(struct stage *stage)
{
    hapt_courier_destroy(stage->courier);
    hapt_collective_destroy(stage->collective);
    if (stage->comm != MPI_COMM_NULL) MPI_Comm_free(&stage->comm);
    hapt_engine_destroy(stage->engine);
    if (stage->device) stage->backend->close(stage->device);
}

/* ---- One step ---- */

/* A device slowed down: an instruction ends no earlier than its start plus slowdown x the CPU time it took. */
struct stretch {
    double start_s, cpu_s;
};

static struct stretch stretch_begin(void)
{
    return (struct stretch){hapt_time_s(), hapt_time_thread_cpu_s()};
}

static void stretch_end(struct stage *stage, struct stretch begun)
{
    if (stage->slowdown > 1)
        hapt_time_sleep_until(begun.start_s + stage->slowdown * (hapt_time_thread_cpu_s() - begun.cpu_s));
    stage->busy_s += hapt_time_s() - begun.start_s;
}

static enum hapt_status put(struct stage *stage, int tensor, int slot, const void *value)
{
    struct hapt_queue *queue = stage->backend->queue(stage->device, 0);
    return stage->backend->copy(queue, hapt_engine_tensor(stage->engine, tensor, slot), value,
                                hapt_engine_tensor_bytes(stage->engine, tensor));
}

static enum hapt_status put_inputs(struct stage *stage, int microbatch, int slot)
{
    const int first = microbatch * stage->model->microbatch + stage->first_row;
    for (int i = 0; i < stage->input_count; i++) {
        const enum hapt_tensor_role role = stage->graph->tensor[stage->input[i]].role;
        if (role == HAPT_ROLE_LOSS_SCALE) continue;
        hapt_data_read(stage->data, role, stage->step, first, stage->rows, stage->row_buffer);
        HAPT_TRY(put(stage, stage->input[i], slot, stage->row_buffer));
        /* The buffer is filled again at once. */
        struct hapt_queue *queue = stage->backend->queue(stage->device, 0);
        HAPT_TRY(stage->backend->wait(stage->backend->record(queue)));
    }
    return HAPT_OK;
}

static enum hapt_status begin_step(struct stage *stage)
{
    const float scale = (float)(1.0 / (double)hapt_data_targets(stage->data, stage->step));
    HAPT_TRY(hapt_engine_begin_step(stage->engine));
    for (int i = 0; i < stage->input_count; i++)
        if (stage->graph->tensor[stage->input[i]].role == HAPT_ROLE_LOSS_SCALE)
            HAPT_TRY(put(stage, stage->input[i], 0, &scale));
    const struct stage_flows *incoming[] = {&stage->forward_in, &stage->backward_in};
    for (int k = 0; k < 2; k++)
        for (int f = 0; f < incoming[k]->count; f++)
            hapt_courier_expect(stage->courier, incoming[k]->flow[f], stage->plan->microbatches);
    return HAPT_OK;
}

static enum hapt_status wait_received(struct stage *stage, const struct stage_flows *flows, int microbatch)
{
    for (int f = 0; f < flows->count; f++)
        HAPT_TRY(hapt_courier_wait_received(stage->courier, flows->flow[f], stage->sequence + microbatch));
    return HAPT_OK;
}

static enum hapt_status wait_sent(struct stage *stage, const struct stage_flows *flows, int slot)
{
    for (int f = 0; f < flows->count; f++) HAPT_TRY(hapt_courier_wait_sent(stage->courier, flows->flow[f], slot));
    return HAPT_OK;
}

static void send(struct stage *stage, const struct stage_flows *flows, int slot)
{
    for (int f = 0; f < flows->count; f++) hapt_courier_send(stage->courier, flows->flow[f], slot);
}

static void free_received(struct stage *stage, const struct stage_flows *flows)
{
    for (int f = 0; f < flows->count; f++) hapt_courier_free(stage->courier, flows->flow[f]);
}

static int transfer_slot(const struct stage *stage, int microbatch)
{
    return (int)((stage->sequence + microbatch) % HAPT_TRANSFER_SLOTS);
}

static enum hapt_status forward(struct stage *stage, const struct hapt_instruction *instruction)
{
    const int slot = instruction->slot, microbatch = instruction->microbatch;
    HAPT_TRY(wait_sent(stage, &stage->forward_out, slot));
    const struct stretch begun = stretch_begin();
    HAPT_TRY(put_inputs(stage, microbatch, slot));
    HAPT_TRY(hapt_engine_forward(stage->engine, slot, stage->forward_in.count ? transfer_slot(stage, microbatch) : -1));
    const float *loss = hapt_engine_tensor(stage->engine, stage->graph->loss, slot);
    if (loss && stage->chunk == stage->plan->stage_count - 1) {
        float value;
        struct hapt_queue *queue = stage->backend->queue(stage->device, 0);
        HAPT_TRY(stage->backend->copy(queue, &value, loss, sizeof value));
        HAPT_TRY(stage->backend->wait(stage->backend->record(queue)));
        stage->loss += value;
    }
    stretch_end(stage, begun);
    free_received(stage, &stage->forward_in);
    return HAPT_OK;
}

static enum hapt_status backward(struct stage *stage, const struct hapt_instruction *instruction)
{
    const int transfer = transfer_slot(stage, instruction->microbatch);
    HAPT_TRY(wait_sent(stage, &stage->backward_out, transfer));
    const struct stretch begun = stretch_begin();
    HAPT_TRY(hapt_engine_backward(stage->engine, instruction->slot, stage->backward_in.count ? transfer : -1,
                                  stage->backward_out.count ? transfer : -1));
    stretch_end(stage, begun);
    free_received(stage, &stage->backward_in);
    return HAPT_OK;
}

static enum hapt_status reduce(struct stage *stage)
{
    if (stage->size == 1) return HAPT_OK;
    char what[64];
    size_t elements;
    float *gradients = hapt_engine_gradients(stage->engine, &elements);
    const double start_s = hapt_time_s();
    snprintf(what, sizeof what, "sum of the gradients of step %lld", (long long)stage->step);
    HAPT_TRY(hapt_collective_all_reduce(stage->collective, what, gradients, elements));
    stage->reduce_s += hapt_time_s() - start_s;
    return HAPT_OK;
}

static enum hapt_status execute(struct stage *stage, const struct hapt_instruction *instruction)
{
    switch (instruction->kind) {
    case HAPT_INSTRUCTION_RECEIVE_FORWARD:
        return wait_received(stage, &stage->forward_in, instruction->microbatch);
    case HAPT_INSTRUCTION_FORWARD:
        return forward(stage, instruction);
    case HAPT_INSTRUCTION_SEND_FORWARD:
        send(stage, &stage->forward_out, instruction->slot);
        return HAPT_OK;
    case HAPT_INSTRUCTION_RECEIVE_BACKWARD:
        return wait_received(stage, &stage->backward_in, instruction->microbatch);
    case HAPT_INSTRUCTION_BACKWARD:
        return backward(stage, instruction);
    case HAPT_INSTRUCTION_SEND_BACKWARD:
        send(stage, &stage->backward_out, transfer_slot(stage, instruction->microbatch));
        return HAPT_OK;
    case HAPT_INSTRUCTION_REDUCE:
        return reduce(stage);
    case HAPT_INSTRUCTION_EXCHANGE:
        return stage_exchange(stage);
    case HAPT_INSTRUCTION_UPDATE:
        break; /* after the agreement of all stages: stage_update */
    }
    return HAPT_OK;
}

enum hapt_status stage_run_step(struct stage *stage, const struct hapt_data *data, int64_t step, int64_t sequence)
{
    stage->data = data;
    stage->step = step;
    stage->sequence = sequence;
    stage->loss = 0;
    if (stage->chunk < 0) return HAPT_OK;
    HAPT_TRY(begin_step(stage));
    for (int i = 0; i < stage->list->count; i++) HAPT_TRY(execute(stage, &stage->list->instruction[i]));
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
    const struct stretch begun = stretch_begin();
    HAPT_TRY(hapt_engine_update(stage->engine, update));
    stretch_end(stage, begun);
    return HAPT_OK;
}

double stage_comm_s(const struct stage *stage)
{
    double longest = 0;
    for (int f = 0; f < stage->forward_out.count; f++) {
        const double active_s = hapt_courier_active_s(stage->courier, stage->forward_out.flow[f]);
        if (active_s > longest) longest = active_s;
    }
    return longest;
}
