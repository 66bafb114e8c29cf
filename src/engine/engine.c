/* The engine: creation, tensor addresses, and the sections of a step. */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "engine_private.h"

enum hapt_status hapt_engine_plan_chunks(const struct hapt_program *const *program, int chunks,
                                         const struct hapt_engine_options *options, struct hapt_arena *arena,
                                         struct hapt_memory_plan **plan)
{
    for (int k = 0; k < chunks; k++) HAPT_TRY(hapt_engine_check_kernels(program[k], options));
    struct hapt_engine_options context = *options;
    const struct hapt_memory_options memory = {.slots = options->slots,
                                               .weight_slots = options->weight_slots,
                                               .transfer_slots = options->transfer_slots,
                                               .state_count = options->state_count,
                                               .sharded_state = options->sharded_state,
                                               .host_state = options->host_state,
                                               .host_update = options->host_update,
                                               .weight_unit_count = options->weight_unit_count,
                                               .weight_unit = options->weight_unit,
                                               .gradient_unit_count = options->gradient_unit_count,
                                               .gradient_unit = options->gradient_unit,
                                               .scratch = hapt_engine_scratch,
                                               .scratch_context = &context};
    return hapt_memory_plan_chunks(program, chunks, &memory, arena, plan);
}

/* Modelled devices hold no values, so their state needs no host memory. */
static bool is_modelled(const struct hapt_engine_options *options)
{
    return strcmp(options->backend->name, "emulated") == 0;
}

/* True if all tensors are on the device, but for weights and gradients that are fetched. */
static bool is_on_device(const struct hapt_memory_plan *plan, const struct hapt_program *program)
{
    for (int t = 0; t < program->tensor_count; t++) {
        const int tensor = program->tensor[t].tensor;
        const bool weight = program->graph->tensor[tensor].kind == HAPT_TENSOR_PARAMETER,
                   gradient = hapt_graph_is_parameter_gradient(program->graph, tensor);
        if (plan->location[t].space != HAPT_SPACE_DEVICE && !(weight && plan->host_weights) &&
            !(gradient && plan->host_gradients))
            return false;
    }
    return true;
}

static void release(struct engine_memory *shared, const struct hapt_engine_options *options)
{
    if (!shared || --shared->users > 0) return;
    state_copies_destroy(shared->copies); /* some may be under way */
    if (shared->address) options->backend->free(options->device, shared->address);
    hapt_engine_release_state(options->backend, shared->host);
    hapt_arena_release(&shared->arena);
    free(shared);
}

static enum hapt_status set_memory(struct hapt_engine *engine, struct hapt_memory_plan *plan)
{
    HAPT_ASSERT(is_on_device(plan, engine->program));
    HAPT_ASSERT(plan->host_bytes == 0 || engine->shared->host || is_modelled(&engine->options));
    engine->plan = plan;
    engine->memory = engine->shared->address;
    engine->queue = engine->options.backend->queue(engine->options.device, 0);
    HAPT_TRY(hapt_engine_bind(engine));
    HAPT_TRY(hapt_engine_bind_away(engine));
    HAPT_TRY(hapt_engine_bind_weights(engine));
    HAPT_TRY(hapt_engine_bind_gradients(engine));
    return hapt_engine_find_replay_ranges(engine);
}

static struct hapt_engine *create(const struct hapt_program *program, const struct hapt_engine_options *options,
                                  struct engine_memory *shared)
{
    struct hapt_engine *made = calloc(1, sizeof *made);
    if (!made) return NULL;
    hapt_arena_init(&made->arena);
    made->program = program;
    made->options = *options;
    made->shared = shared;
    shared->users++;
    return made;
}

static enum hapt_status set_up(const struct hapt_program *const *program, int chunks,
                               const struct hapt_engine_options *options, struct engine_memory *shared,
                               struct hapt_engine **engine)
{
    struct hapt_memory_plan *plan;
    void *memory;
    HAPT_TRY(hapt_engine_plan_chunks(program, chunks, options, &shared->arena, &plan));
    HAPT_TRY(options->backend->allocate(options->device, plan->total_bytes, &memory));
    shared->address = memory;
    if (!is_modelled(options)) HAPT_TRY(hapt_engine_reserve_state(options->backend, plan->host_bytes, &shared->host));
    if (shared->host && options->host_pace > 0 && !options->backend->pin)
        HAPT_TRY(state_copies_create(options->host_pace, options->host_timeout_s, &shared->copies));
    for (int k = 0; k < chunks; k++) {
        engine[k] = create(program[k], &options[k], shared);
        if (!engine[k]) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no host memory for an engine");
        HAPT_TRY(set_memory(engine[k], &plan[k]));
    }
    return HAPT_OK;
}

enum hapt_status hapt_engine_create_chunks(const struct hapt_program *const *program, int chunks,
                                           const struct hapt_engine_options *options, struct hapt_engine **engine)
{
    struct engine_memory *shared = calloc(1, sizeof *shared);
    if (!shared) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no host memory for an engine");
    hapt_arena_init(&shared->arena);
    shared->users = 1; /* until all exist */
    for (int k = 0; k < chunks; k++) engine[k] = NULL;
    const enum hapt_status status = set_up(program, chunks, options, shared, engine);
    for (int k = 0; k < chunks && status != HAPT_OK; k++) {
        hapt_engine_destroy(engine[k]);
        engine[k] = NULL;
    }
    release(shared, options);
    return status;
}

enum hapt_status hapt_engine_create(const struct hapt_program *program, const struct hapt_engine_options *options,
                                    struct hapt_engine **engine)
{
    struct hapt_engine *made;
    HAPT_TRY(hapt_engine_create_chunks(&program, 1, options, &made));
    *engine = made;
    return HAPT_OK;
}

void hapt_engine_destroy(struct hapt_engine *engine)
{
    if (!engine) return;
    hapt_engine_disable_replays(engine);
    hapt_engine_end_host_updates(engine);
    hapt_engine_release_host(engine);
    release(engine->shared, &engine->options);
    hapt_arena_release(&engine->arena);
    free(engine);
}

const struct hapt_memory_plan *hapt_engine_memory(const struct hapt_engine *engine)
{
    return engine->plan;
}

void *hapt_engine_tensor(struct hapt_engine *engine, int tensor, int slot)
{
    const int local = engine->program->local[tensor];
    if (local >= 0 && engine->plan->host_gradients && engine->shared->host &&
        hapt_graph_is_parameter_gradient(engine->program->graph, tensor))
        return engine->shared->host + engine->plan->location[local].offset;
    return hapt_engine_address(engine, tensor, slot, 0);
}

void *hapt_engine_address(struct hapt_engine *engine, int tensor, int slot, int weight_slot)
{
    const struct hapt_memory_plan *plan = engine->plan;
    const int local = engine->program->local[tensor];
    if (local < 0 || plan->location[local].space == HAPT_SPACE_HOST) return NULL;
    switch (plan->location[local].region) {
    case HAPT_REGION_RESIDENT: return engine->memory + plan->location[local].offset;
    case HAPT_REGION_WORKSPACE: return engine->memory + plan->workspace_offset + plan->location[local].offset;
    case HAPT_REGION_SLOT:
        HAPT_ASSERT(slot >= 0 && slot < plan->slots);
        return engine->memory + plan->slot_offset + (size_t)slot * plan->activation_bytes +
               plan->location[local].offset;
    case HAPT_REGION_WEIGHT_SLOT:
        HAPT_ASSERT(weight_slot >= 0 && weight_slot < plan->weight_slots);
        return engine->memory + plan->weight_slot_offset + (size_t)weight_slot * plan->weight_slot_bytes +
               plan->location[local].offset;
    case HAPT_REGION_NONE: break;
    }
    return NULL;
}

size_t hapt_engine_elements(const struct hapt_engine *engine, int tensor)
{
    const int local = engine->program->local[tensor];
    if (local < 0) return 0;
    size_t count = 1;
    for (int d = 0; d < engine->program->graph->tensor[tensor].dims; d++)
        count *= (size_t)engine->program->tensor[local].shape[d];
    return count;
}

size_t hapt_engine_tensor_bytes(const struct hapt_engine *engine, int tensor)
{
    const struct hapt_tensor *whole = &engine->program->graph->tensor[tensor];
    const enum hapt_dtype dtype = whole->kind == HAPT_TENSOR_PARAMETER ? HAPT_F32 : whole->dtype;
    return hapt_engine_elements(engine, tensor) * hapt_dtype_bytes(dtype);
}

static const struct hapt_staging *staging_of(const struct hapt_engine *engine, enum hapt_staging_kind kind)
{
    if (kind == HAPT_STAGING_FORWARD_IN) return &engine->plan->forward_in;
    return kind == HAPT_STAGING_BACKWARD_IN ? &engine->plan->backward_in : &engine->plan->backward_out;
}

void *hapt_engine_staging(struct hapt_engine *engine, enum hapt_staging_kind kind, int slot, int index)
{
    const struct hapt_staging *staging = staging_of(engine, kind);
    HAPT_ASSERT(slot >= 0 && slot < staging->slots);
    return engine->memory + staging->offset + (size_t)slot * staging->stride + staging->tensor_offset[index];
}

enum hapt_status hapt_engine_finish(struct hapt_engine *engine)
{
    const struct hapt_backend *backend = engine->options.backend;
    HAPT_TRY(backend->wait(backend->record(engine->queue)));
    hapt_engine_judge_trial(engine);
    return HAPT_OK;
}

enum hapt_status hapt_engine_run(struct hapt_engine *engine, const struct bound_step *bound)
{
    const struct hapt_engine_links *links = &engine->options.links;
    if (bound->kernel && !bound->call.shard_reduce) return bound->kernel->run(&bound->call, engine->queue);
    if (!bound->kernel && !links->collective) return HAPT_OK;
    HAPT_TRY(hapt_engine_finish(engine)); /* collectives read device memory */
    if (bound->kernel) return bound->kernel->run(&bound->call, engine->queue);
    return hapt_engine_run_collective(engine, bound);
}

/* Copies a boundary between its transfer slot and the memory that its operators use. */
static enum hapt_status copy_boundary(struct hapt_engine *engine, const struct hapt_boundary *boundary,
                                      enum hapt_staging_kind kind, int slot, int weight_slot, int staged)
{
    for (int b = 0; b < boundary->count; b++) {
        void *address = hapt_engine_address(engine, boundary->tensor[b], slot, weight_slot);
        void *transfer = hapt_engine_staging(engine, kind, staged, b);
        const bool out = kind == HAPT_STAGING_BACKWARD_OUT;
        HAPT_TRY(engine->options.backend->copy(engine->queue, out ? transfer : address, out ? address : transfer,
                                               hapt_engine_tensor_bytes(engine, boundary->tensor[b])));
    }
    return HAPT_OK;
}

/* Weights and gradients of a step's unit come to their places. */
static enum hapt_status units_need(struct hapt_engine *engine, enum hapt_section section, int step)
{
    HAPT_TRY(hapt_engine_weights_need(engine, section, step));
    return hapt_engine_gradients_need(engine, section, step);
}

enum hapt_status hapt_engine_start_part(struct hapt_engine *engine, enum hapt_section section, int slot, int first_op,
                                        int end_op)
{
    const bool deferrable = section == HAPT_SECTION_WEIGHT && engine->section[section].step_count == 0;
    const struct section_binding *binding = &engine->section[deferrable ? HAPT_SECTION_BACKWARD : section];
    HAPT_ASSERT(section != HAPT_SECTION_REDUCE && slot >= 0 && slot < engine->options.slots);
    const struct bound_step *step = &binding->step[slot * binding->weight_slots * binding->step_count];
    for (int s = 0; s < binding->step_count; s++) {
        if (step[s].forward_op < first_op || step[s].forward_op >= end_op || (deferrable && !step[s].weight)) continue;
        HAPT_TRY(units_need(engine, deferrable ? HAPT_SECTION_BACKWARD : section, s));
        HAPT_TRY(hapt_engine_run(engine, &step[s]));
    }
    return hapt_engine_gradients_leave(engine);
}

/* A section that reads no weight slot is bound once for all of them. */
static enum hapt_status run_section(struct hapt_engine *engine, enum hapt_section section, int slot, int weight_slot)
{
    const struct section_binding *binding = &engine->section[section];
    HAPT_ASSERT(slot >= 0 && slot < engine->options.slots && weight_slot >= 0 &&
                weight_slot < engine->plan->weight_slots);
    const int variant = slot * binding->weight_slots + (binding->weight_slots > 1 ? weight_slot : 0);
    const struct bound_step *step = &binding->step[variant * binding->step_count];
    for (int s = 0, c = 0; s < binding->step_count;) {
        const bool is_range = c < binding->range_count && s == binding->range[c].first;
        if (section == HAPT_SECTION_FORWARD)
            HAPT_TRY(hapt_engine_update_needed(engine, s, is_range ? binding->range[c].end - 1 : s));
        HAPT_TRY(units_need(engine, section, s)); /* of the whole range: hapt_engine_begins_unit */
        if (is_range) {
            HAPT_TRY(hapt_engine_run_range(engine, &binding->range[c], step, variant));
            s = binding->range[c++].end;
        } else {
            HAPT_TRY(hapt_engine_run(engine, &step[s++]));
        }
    }
    return hapt_engine_gradients_leave(engine);
}

enum hapt_status hapt_engine_forward(struct hapt_engine *engine, int slot, int staged)
{
    const struct hapt_program *program = engine->program;
    if (staged >= 0) HAPT_TRY(copy_boundary(engine, &program->forward_in, HAPT_STAGING_FORWARD_IN, slot, 0, staged));
    HAPT_TRY(run_section(engine, HAPT_SECTION_FORWARD, slot, 0));
    HAPT_TRY(hapt_engine_update_needed(engine, program->step_count[HAPT_SECTION_FORWARD], INT_MAX));
    return hapt_engine_finish(engine);
}

enum hapt_status hapt_engine_backward_split(struct hapt_engine *engine, int slot, int weight_slot, int staged,
                                            int staged_out)
{
    const struct hapt_program *program = engine->program;
    if (staged >= 0)
        HAPT_TRY(copy_boundary(engine, &program->backward_in, HAPT_STAGING_BACKWARD_IN, slot, weight_slot, staged));
    HAPT_TRY(run_section(engine, HAPT_SECTION_BACKWARD, slot, weight_slot));
    if (staged_out >= 0)
        HAPT_TRY(
            copy_boundary(engine, &program->backward_out, HAPT_STAGING_BACKWARD_OUT, slot, weight_slot, staged_out));
    return hapt_engine_finish(engine);
}

enum hapt_status hapt_engine_backward(struct hapt_engine *engine, int slot, int staged, int staged_out)
{
    return hapt_engine_backward_split(engine, slot, 0, staged, staged_out);
}

enum hapt_status hapt_engine_weight(struct hapt_engine *engine, int slot, int weight_slot)
{
    HAPT_TRY(run_section(engine, HAPT_SECTION_WEIGHT, slot, weight_slot));
    return hapt_engine_finish(engine);
}

enum hapt_status hapt_engine_run_part(struct hapt_engine *engine, enum hapt_section section, int slot, int first_op,
                                      int end_op)
{
    HAPT_TRY(hapt_engine_start_part(engine, section, slot, first_op, end_op));
    return hapt_engine_finish(engine);
}

enum hapt_status hapt_engine_begin_step(struct hapt_engine *engine)
{
    hapt_engine_forget_gradients(engine);
    engine->away.zeroes = hapt_engine_is_updating(engine);
    if (engine->away.zeroes) return HAPT_OK; /* when the gradients have been used */
    if (engine->plan->zeroed_elements > 0) HAPT_TRY(hapt_engine_run(engine, &engine->zero));
    return hapt_engine_finish(engine);
}

static enum hapt_status reduce_nothing(void *context, float *data, size_t elements, bool largest)
{
    (void)context, (void)data, (void)elements, (void)largest;
    return HAPT_OK;
}

/* Runs every kernel once with its final arguments, without communication. */
static enum hapt_status run_kernels(struct hapt_engine *engine)
{
    for (enum hapt_section section = HAPT_SECTION_FORWARD; section < HAPT_SECTION_REDUCE; section++)
        for (int s = 0; s < engine->section[section].step_count; s++) {
            const struct bound_step *step = &engine->section[section].step[s];
            struct hapt_call call = step->call;
            if (call.shard_reduce) call.shard_reduce = reduce_nothing;
            if (step->kernel) HAPT_TRY(step->kernel->run(&call, engine->queue));
        }
    for (int p = 0; p < engine->parameter_count; p++) HAPT_TRY(hapt_engine_run(engine, &engine->square_sum[p]));
    return hapt_engine_run_update_kernels(engine);
}

enum hapt_status hapt_engine_warm_up(struct hapt_engine *engine)
{
    const size_t bytes = engine->plan->total_bytes;
    struct bound_step clear = engine->zero;
    if (!engine->options.backend->pin) return HAPT_OK;
    HAPT_ASSERT(bytes % sizeof(float) == 0);
    clear.call.output[0] = hapt_engine_flat_view(engine->memory, HAPT_F32, bytes / sizeof(float));
    HAPT_TRY(run_kernels(engine));
    HAPT_TRY(hapt_engine_run(engine, &clear));
    HAPT_TRY(hapt_engine_finish(engine));
    if (engine->shared->host) memset(engine->shared->host, 0, engine->plan->host_bytes);
    return HAPT_OK;
}
