/* One stage on one rank: places the plan, builds programs, schedule and engine, and connects the ranks. */
#include "runtime.h"

#include <math.h>
#include <string.h>

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
    const struct hapt_schedule_options options = {.tied = stage->ties->count > 0};
    HAPT_TRY(hapt_schedule_build(plan->schedule, plan->stage_count, plan->microbatches, warmup, &options, stage->arena,
                                 &stage->schedule));
    HAPT_TRY(hapt_schedule_check(stage->schedule));
    struct hapt_schedule *made = stage->schedule;
    stage->list = stage->chunk >= 0 ? &made->list[made->submesh_of[stage->chunk]] : &made->idle;
    return HAPT_OK;
}

static const struct hapt_device_spec *device_of(const struct stage *stage, int world_rank)
{
    return &stage->cluster->subcluster[stage->cluster->subcluster_of_rank[world_rank]].device;
}

/* Limit of the device memory of a rank in bytes; 0: none. */
static size_t memory_cap(const struct stage *stage, int world_rank)
{
    const struct hapt_device_spec *spec = device_of(stage, world_rank); /* modelled devices are capped */
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
    stage->runtime->links(&stage->team, &options.links);
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
    stage->time_scale = stage->runtime->computes ? 1 : hapt_config_real(config, "time-scale");
    stage->timeout_s = fmax(1, stage->time_scale) * watch_timeout_s(config, stage->plan);
    HAPT_TRY(find_own_stage(stage));
    HAPT_TRY(build_programs(stage));
    HAPT_TRY(build_schedule(stage));
    if (stage->chunk < 0) return HAPT_OK;
    snprintf(stage->name, sizeof stage->name, "stage %d", stage->chunk);
    HAPT_TRY(hapt_team_prepare(&stage->team, stage->sharding[stage->chunk], stage->program[stage->chunk], stage->rank,
                               device_of(stage, stage->env->world_rank)->slowdown, stage->arena));
    HAPT_TRY(build_engine(stage, config, state_count));
    HAPT_TRY(stage->runtime->prepare(stage, state_count));
    return find_inputs(stage);
}

enum hapt_status stage_connect(struct stage *stage)
{
    const int color = stage->chunk < 0 ? MPI_UNDEFINED : stage->chunk;
    HAPT_MPI(MPI_Comm_split(stage->env->world, color, stage->rank, &stage->comm));
    enum hapt_status status = stage->chunk >= 0 ? stage->runtime->connect_team(stage) : HAPT_OK;
    HAPT_TRY(hapt_link_all_or_none(stage->env->world, "the stages' communicators", status));
    struct hapt_device_comm *group = NULL;
    status = stage_create_device_groups(stage, &group);
    if (stage->chunk >= 0 && status == HAPT_OK) status = stage->runtime->connect_devices(stage, group);
    HAPT_TRY(hapt_link_all_or_none(stage->env->world, "the stages' collectives", status));
    HAPT_TRY(stage->runtime->create_comm_thread(stage));
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
