/* Sums of gradients over ranks and the update, which follow the passes of a step. Access to parameters from outside. */
#include <string.h>

#include "engine_private.h"

const size_t *hapt_engine_slice_bounds(struct hapt_engine *engine, const struct hapt_parameter_group *group)
{
    const struct hapt_sharding *sharding = engine->program->sharding;
    int own;
    const int ranks = hapt_parameter_group_ranks(sharding, group->axes, &own);
    for (int r = 0; r < ranks; r++) {
        size_t first, end;
        hapt_parameter_group_slice(sharding, group, r, &first, &end);
        engine->bound[r] = first - group->first;
        engine->bound[r + 1] = end - group->first;
    }
    return engine->bound;
}

static enum hapt_status reduce_group(struct hapt_engine *engine, const struct hapt_parameter_group *group)
{
    const struct hapt_engine_links *links = &engine->options.links;
    float *gradients = (float *)(engine->memory + engine->plan->gradient_offset) + group->first, *block = gradients;
    const size_t elements = group->end - group->first;
    HAPT_TRY(hapt_engine_finish(engine));
    HAPT_TRY(hapt_engine_to_host(engine, &block, elements));
    if (engine->plan->sharded_state && !engine->options.all_reduce_gradients)
        HAPT_TRY(links->reduce_scatter(links->context, group->axes, block, hapt_engine_slice_bounds(engine, group)));
    else
        HAPT_TRY(links->all_reduce(links->context, group->axes, block, elements));
    return hapt_engine_from_host(engine, gradients, block, elements);
}

/* Sums in place: one collective per parameter group. Sums that change their layout: step by step, from their memory
 * outside the gradient block. */
enum hapt_status hapt_engine_reduce(struct hapt_engine *engine)
{
    const struct section_binding *binding = &engine->section[HAPT_SECTION_REDUCE];
    HAPT_TRY(hapt_engine_gradients_arrive(engine));
    if (!engine->options.links.collective) return HAPT_OK;
    for (int s = 0; s <= binding->step_count; s++) {
        for (int g = 0; g < HAPT_PARAMETER_GROUPS; g++)
            if (engine->group_before[g] == s) HAPT_TRY(reduce_group(engine, &engine->plan->group[g]));
        if (s < binding->step_count && binding->step[s].parameter_group < 0)
            HAPT_TRY(hapt_engine_run(engine, &binding->step[s]));
    }
    return hapt_engine_finish(engine);
}

static enum hapt_status sum_squares(struct hapt_engine *engine)
{
    if (engine->norm.end > 0)
        HAPT_TRY(hapt_engine_run_range(engine, &engine->norm, engine->square_sum, 0));
    else
        for (int p = 0; p < engine->parameter_count; p++) HAPT_TRY(hapt_engine_run(engine, &engine->square_sum[p]));
    HAPT_TRY(engine->options.backend->copy(engine->queue, engine->square, engine->square_sum[0].call.output[0].data,
                                           (size_t)engine->parameter_count * sizeof *engine->square));
    return hapt_engine_finish(engine);
}

static bool is_statistic(const struct hapt_engine *engine, int parameter)
{
    const struct hapt_program *program = engine->program;
    return program->graph->tensor[program->tensor[parameter].tensor].statistic;
}

enum hapt_status hapt_engine_square_sum(struct hapt_engine *engine, const double *weight, double *sum)
{
    if (engine->parameter_count == 0) {
        *sum = 0;
        return HAPT_OK;
    }
    if (!engine->plan->host_gradients) HAPT_TRY(sum_squares(engine));
    double total = 0;
    for (int p = 0; p < engine->parameter_count; p++)
        if (!is_statistic(engine, engine->parameter[p]))
            total += (weight ? weight[engine->parameter[p]] : 1.0) * engine->square[p];
    *sum = total;
    return HAPT_OK;
}

static struct hapt_view resident(struct hapt_engine *engine, size_t offset, size_t first, size_t count)
{
    return hapt_engine_flat_view((float *)(engine->memory + offset) + first, HAPT_F32, count);
}

float *hapt_engine_state_address(struct hapt_engine *engine, int state, size_t first)
{
    const struct hapt_memory_plan *plan = engine->plan;
    const bool away = plan->state_space == HAPT_SPACE_HOST;
    char *memory = away ? engine->shared->host : engine->memory;
    if (state < 0) return (float *)(memory + (away ? plan->host_master_offset : plan->master_offset)) + first;
    return (float *)(memory + (away ? plan->host_state_offset : plan->state_offset)[state]) + first;
}

/* The sharded block of the state, and so that of sharded weights, begins with the slice of the first group. */
static size_t element_in_slices(const struct hapt_memory_plan *plan, size_t element)
{
    for (int g = 0; g < HAPT_PARAMETER_GROUPS; g++) {
        const struct hapt_parameter_group *group = &plan->group[g];
        if (element >= group->slice_first && element < group->slice_end)
            return group->state_first + element - group->slice_first;
    }
    HAPT_ASSERT(!"the element is in this rank's slices");
    return 0;
}

uint16_t *hapt_engine_copy(const struct hapt_engine *engine, size_t element)
{
    const struct hapt_memory_plan *plan = engine->plan;
    return (uint16_t *)(engine->memory + plan->copy_offset) +
           (plan->sharded_weights ? element_in_slices(plan, element) : element);
}

void *hapt_engine_own_weight(struct hapt_engine *engine, size_t element)
{
    const struct hapt_memory_plan *plan = engine->plan;
    return plan->copy_offset == (size_t)-1
               ? (void *)hapt_engine_state_address(engine, -1, element_in_slices(plan, element))
               : hapt_engine_copy(engine, element);
}

const struct hapt_kernel *hapt_engine_find_update(const struct hapt_backend *backend, struct hapt_device *device,
                                                  int state_count, enum update_kind kind)
{
    return backend->find_kernel(device, state_count == 2 && kind != UPDATE_STATISTIC ? "adamw" : "sgd", HAPT_F32);
}

/* Statistics: SGD without momentum computes w - decay w - rate gradient; here both factors are the rate, and the
 * gradient is minus the mean over the microbatches. */
static void describe_statistics(const struct hapt_update *update, struct hapt_call *call)
{
    HAPT_ASSERT(update->microbatches > 0);
    const double sgd[] = {update->statistic_rate, 0, 0, 0, 1, -1.0 / update->microbatches};
    call->input_count = 1;
    call->output_count = 3;
    memcpy(call->real, sgd, sizeof sgd);
}

void hapt_engine_describe_update(const struct hapt_update *update, enum update_kind kind, struct hapt_call *call)
{
    const double decay = kind == UPDATE_DECAYED ? update->weight_decay : 0;
    if (kind == UPDATE_STATISTIC) {
        describe_statistics(update, call);
        return;
    }
    const double adamw[] = {update->learning_rate, update->beta1, update->beta2,
                            update->epsilon,       decay,         update->gradient_scale};
    const double sgd[] = {update->learning_rate, update->momentum, 0, 0, decay, update->gradient_scale};
    call->input_count = 1;
    call->output_count = update->optimizer == HAPT_OPTIMIZER_ADAMW ? 4 : 3;
    memcpy(call->real, update->optimizer == HAPT_OPTIMIZER_ADAMW ? adamw : sgd, sizeof adamw);
    call->integer[0] = update->step;
}

enum hapt_status hapt_engine_update_run(struct hapt_engine *engine, const struct hapt_update *update, size_t first,
                                        size_t end, size_t state_first, enum update_kind kind)
{
    const struct hapt_memory_plan *plan = engine->plan;
    struct hapt_call call = {.threads = engine->options.threads,
                             .workspace = engine->memory + plan->scratch_offset,
                             .workspace_bytes = plan->scratch_bytes};
    hapt_engine_describe_update(update, kind, &call);
    call.input[0] = resident(engine, plan->gradient_offset, first, end - first);
    int output = 0;
    call.output[output++] =
        resident(engine, plan->master_offset, plan->masters_like_state ? state_first : first, end - first);
    const int states = kind == UPDATE_STATISTIC ? 0 : plan->state_count;
    for (int s = 0; s < states; s++)
        call.output[output++] = resident(engine, plan->state_offset[s], state_first, end - first);
    if (states == 0) output++; /* no momentum buffer */
    if (plan->copy_offset != (size_t)-1)
        call.output[output] =
            hapt_engine_flat_view(plan->host_weights ? (uint16_t *)(engine->memory + plan->copy_offset) + state_first
                                                     : hapt_engine_copy(engine, first),
                                  engine->copy_dtype, end - first);
    return engine->update[kind]->run(&call, engine->queue);
}

/* Updates the elements of that kind in a group's slice, whose state is on the device. */
static enum hapt_status update_block(struct hapt_engine *engine, const struct hapt_update *update,
                                     const struct hapt_parameter_group *group, enum update_kind kind)
{
    size_t first = update_first(group, kind), end = update_end(group, kind);
    if (first < group->slice_first) first = group->slice_first;
    if (end > group->slice_end) end = group->slice_end;
    if (first >= end) return HAPT_OK;
    return hapt_engine_update_run(engine, update, first, end, group->state_first + first - group->slice_first, kind);
}

static enum hapt_status convert(struct hapt_engine *engine, const float *from, void *to, enum hapt_dtype dtype,
                                size_t elements)
{
    struct hapt_call call = {.input_count = 1,
                             .output_count = 1,
                             .threads = engine->options.threads,
                             .workspace = engine->memory + engine->plan->scratch_offset,
                             .workspace_bytes = engine->plan->scratch_bytes};
    call.input[0] = hapt_engine_flat_view((void *)from, HAPT_F32, elements);
    call.output[0] = hapt_engine_flat_view(to, dtype, elements);
    return engine->convert->run(&call, engine->queue);
}

/* Updates the compute copies of a group's weights from their masters, of which the device has all. */
static enum hapt_status convert_group(struct hapt_engine *engine, const struct hapt_parameter_group *group)
{
    const struct hapt_memory_plan *plan = engine->plan;
    if (plan->copy_offset == (size_t)-1 || group->end == group->first) return HAPT_OK;
    return convert(engine, (float *)(engine->memory + plan->master_offset) + group->first,
                   (uint16_t *)(engine->memory + plan->copy_offset) + group->first, engine->copy_dtype,
                   group->end - group->first);
}

/* All-gathers a group's weights from the ranks that updated them: masters, then updates their compute copies; or the
 * copies, in pairs, if each rank has only its own masters. Slices start at even elements. */
static enum hapt_status gather_weights(struct hapt_engine *engine, const struct hapt_parameter_group *group)
{
    const struct hapt_engine_links *links = &engine->options.links;
    const struct hapt_memory_plan *plan = engine->plan;
    const bool copies = plan->masters_like_state;
    const size_t in_one = copies ? sizeof(float) / sizeof(uint16_t) : 1,
                 elements = (group->end - group->first) / in_one;
    float *weights =
              (float *)(engine->memory + (copies ? plan->copy_offset : plan->master_offset)) + group->first / in_one,
          *block = weights;
    int own;
    if (!plan->sharded_state || plan->sharded_weights || group->axes == 0 || elements == 0 || !links->all_gather)
        return HAPT_OK;
    HAPT_TRY(hapt_engine_finish(engine));
    HAPT_TRY(hapt_engine_to_host(engine, &block, elements));
    const size_t *bound = hapt_engine_slice_bounds(engine, group);
    for (int r = hapt_parameter_group_ranks(engine->program->sharding, group->axes, &own); r >= 0; r--)
        engine->bound[r] /= in_one;
    HAPT_TRY(links->all_gather(links->context, group->axes, block, bound));
    HAPT_TRY(hapt_engine_from_host(engine, weights, block, elements));
    return copies ? HAPT_OK : convert_group(engine, group);
}

static enum hapt_status update_on_device(struct hapt_engine *engine, unsigned groups, const struct hapt_update *update)
{
    for (int g = 0; g < HAPT_PARAMETER_GROUPS; g++) {
        const struct hapt_parameter_group *group = &engine->plan->group[g];
        if (!(groups >> g & 1u)) continue;
        for (enum update_kind kind = 0; kind < UPDATE_KINDS; kind++)
            HAPT_TRY(update_block(engine, update, group, kind));
    }
    return HAPT_OK;
}

enum hapt_status hapt_engine_update_groups(struct hapt_engine *engine, unsigned groups,
                                           const struct hapt_update *update)
{
    const struct hapt_memory_plan *plan = engine->plan;
    HAPT_ASSERT((update->optimizer == HAPT_OPTIMIZER_ADAMW) == (plan->state_count == 2));
    HAPT_TRY(hapt_engine_weights_changed(engine));
    if (plan->state_space == HAPT_SPACE_HOST) {
        HAPT_TRY(hapt_engine_away_begin(engine, groups, update));
        HAPT_TRY(hapt_engine_settle(engine));
    } else {
        HAPT_TRY(update_on_device(engine, groups, update));
    }
    for (int g = 0; g < HAPT_PARAMETER_GROUPS; g++)
        if (groups >> g & 1u) HAPT_TRY(gather_weights(engine, &plan->group[g]));
    return hapt_engine_finish(engine);
}

enum hapt_status hapt_engine_update(struct hapt_engine *engine, int part, int parts, const struct hapt_update *update)
{
    unsigned groups = 0;
    for (int g = part; g < HAPT_PARAMETER_GROUPS; g += parts) groups |= 1u << g;
    return hapt_engine_update_groups(engine, groups, update);
}

/* Address of a parameter's weight or state. Elements [*first, *first + *count) of it are on this rank; a frozen
 * parameter has no state. */
static float *parameter_address(struct hapt_engine *engine, int tensor, int state, size_t *first, size_t *count)
{
    const struct hapt_memory_plan *plan = engine->plan;
    const int local = engine->program->local[tensor];
    HAPT_ASSERT(local >= 0 && engine->program->graph->tensor[tensor].kind == HAPT_TENSOR_PARAMETER);
    HAPT_ASSERT(state >= -1 && state < plan->state_count);
    const size_t element = plan->parameter_element[local], end = element + hapt_engine_elements(engine, tensor);
    *first = *count = 0;
    if (element >= plan->trained_elements || (state < 0 && !plan->masters_like_state)) {
        const bool frozen = element >= plan->trained_elements;
        if (state >= 0) return NULL;
        *count = end - element;
        return frozen ? (float *)(engine->memory + plan->frozen_offset) + element - plan->trained_elements
                      : (float *)(engine->memory + plan->master_offset) + element;
    }
    for (int g = 0; g < HAPT_PARAMETER_GROUPS; g++) {
        const struct hapt_parameter_group *group = &plan->group[g];
        const size_t from = element > group->slice_first ? element : group->slice_first;
        const size_t to = end < group->slice_end ? end : group->slice_end;
        if (element < group->first || element >= group->end || from >= to) continue;
        *first = from - element;
        *count = to - from;
        return hapt_engine_state_address(engine, state, group->state_first + from - group->slice_first);
    }
    return NULL;
}

/* True for a trained parameter whose master is laid out like a state. */
static bool is_like_state(const struct hapt_engine *engine, int tensor)
{
    return engine->plan->masters_like_state && engine->program->graph->tensor[tensor].trainable;
}

/* fp32 memory on the device for the values of a parameter, between steps: its gradient, which the next step zeroes, or
 * a place for one. */
static float *room_for(struct hapt_engine *engine, size_t element)
{
    const struct hapt_memory_plan *plan = engine->plan;
    return plan->host_gradients ? (float *)(engine->memory + plan->gradient_place_offset)
                                : (float *)(engine->memory + plan->gradient_offset) + element;
}

/* Sets elements [first, first + count) of its compute copy from host memory. */
static enum hapt_status convert_from_host(struct hapt_engine *engine, int tensor, const float *value, size_t first,
                                          size_t count)
{
    const struct hapt_memory_plan *plan = engine->plan;
    const size_t element = plan->parameter_element[engine->program->local[tensor]] + first;
    float *block = room_for(engine, element);
    if (count == 0) return HAPT_OK;
    HAPT_TRY(engine->options.backend->copy(engine->queue, block, value, count * sizeof *value));
    if (!plan->host_weights)
        return convert(engine, block, hapt_engine_copy(engine, element), engine->copy_dtype, count);
    void *place = engine->memory + plan->place_offset;
    HAPT_TRY(convert(engine, block, place, engine->copy_dtype, count));
    return engine->options.backend->copy(engine->queue, hapt_engine_host_weight(engine, element), place,
                                         count * sizeof(uint16_t));
}

/* Updates elements [first, first + count) of its compute copy, if it has one, from the master on the device. */
static enum hapt_status convert_parameter(struct hapt_engine *engine, int tensor, size_t first, size_t count)
{
    size_t held_first, held_count;
    float *address = parameter_address(engine, tensor, -1, &held_first, &held_count);
    const enum hapt_dtype dtype = engine->program->graph->tensor[tensor].dtype;
    if (held_count == 0 || count == 0 || dtype == HAPT_F32) return HAPT_OK;
    HAPT_ASSERT(held_first == 0); /* such a master is whole */
    char *copy = hapt_engine_operand(engine, tensor, 0, 0);
    return convert(engine, address + first, copy + first * hapt_dtype_bytes(dtype), dtype, count);
}

/* The part of elements [first, first + count) of a weight or state that this rank holds: `*held` elements from `*from`
 * on. Returns its address. */
static float *held_part(struct hapt_engine *engine, int tensor, int state, size_t first, size_t count, size_t *from,
                        size_t *held)
{
    size_t all_first, all_count;
    float *address = parameter_address(engine, tensor, state, &all_first, &all_count);
    const size_t all_end = all_first + all_count, end = first + count < all_end ? first + count : all_end;
    HAPT_ASSERT(first + count <= hapt_engine_elements(engine, tensor));
    *from = first > all_first ? first : all_first;
    *held = end > *from ? end - *from : 0;
    return *held > 0 ? address + *from - all_first : NULL;
}

enum hapt_status hapt_engine_set_part(struct hapt_engine *engine, int tensor, int state, size_t first, size_t count,
                                      const float *value)
{
    size_t from, held;
    HAPT_TRY(hapt_engine_settle(engine));
    float *address = held_part(engine, tensor, state, first, count, &from, &held);
    if (held > 0)
        HAPT_TRY(engine->options.backend->copy(engine->queue, address, value + from - first, held * sizeof *value));
    if (state < 0) HAPT_TRY(hapt_engine_weights_changed(engine));
    if (state < 0 && engine->plan->copy_offset != (size_t)-1) {
        if (!is_like_state(engine, tensor))
            HAPT_TRY(convert_parameter(engine, tensor, first, count));
        else if (engine->plan->sharded_weights)
            HAPT_TRY(convert_from_host(engine, tensor, value + from - first, from, held));
        else
            HAPT_TRY(convert_from_host(engine, tensor, value, first, count));
    }
    return hapt_engine_finish(engine);
}

enum hapt_status hapt_engine_set(struct hapt_engine *engine, int tensor, int state, const float *value)
{
    return hapt_engine_set_part(engine, tensor, state, 0, hapt_engine_elements(engine, tensor), value);
}

bool hapt_engine_shards_weights(const struct hapt_engine *engine)
{
    return engine->plan->sharded_weights;
}

bool hapt_engine_is_sliced(const struct hapt_engine *engine, int tensor, int state)
{
    return engine->plan->sharded_state && (state >= 0 || is_like_state(engine, tensor));
}

enum hapt_status hapt_engine_get_weight(struct hapt_engine *engine, int tensor, void *value, size_t *bytes)
{
    HAPT_ASSERT(!engine->plan->sharded_weights);
    *bytes = hapt_engine_elements(engine, tensor) * hapt_dtype_bytes(engine->program->graph->tensor[tensor].dtype);
    HAPT_TRY(hapt_engine_settle(engine));
    const size_t element = engine->plan->parameter_element[engine->program->local[tensor]];
    const void *weight = engine->plan->host_weights ? hapt_engine_host_weight(engine, element)
                                                    : hapt_engine_operand(engine, tensor, 0, 0);
    HAPT_TRY(engine->options.backend->copy(engine->queue, value, weight, *bytes));
    return hapt_engine_finish(engine);
}

const float *hapt_engine_master(struct hapt_engine *engine, int tensor, size_t *count)
{
    size_t first;
    HAPT_ASSERT(!hapt_engine_is_updating(engine));
    return parameter_address(engine, tensor, -1, &first, count);
}

enum hapt_status hapt_engine_get_part(struct hapt_engine *engine, int tensor, int state, size_t first, size_t count,
                                      float *value)
{
    size_t from, held;
    HAPT_TRY(hapt_engine_settle(engine));
    const float *address = held_part(engine, tensor, state, first, count, &from, &held);
    /* -0 in other ranks' slices: a sum over the ranks then keeps each bit, also those of -0. */
    const bool sliced =
        engine->program->graph->tensor[tensor].trainable && hapt_engine_is_sliced(engine, tensor, state);
    for (size_t i = 0; i < count; i++) value[i] = sliced ? -0.0f : 0;
    if (held == 0) return HAPT_OK;
    HAPT_TRY(engine->options.backend->copy(engine->queue, value + from - first, address, held * sizeof *value));
    return hapt_engine_finish(engine);
}

enum hapt_status hapt_engine_get(struct hapt_engine *engine, int tensor, int state, float *value)
{
    return hapt_engine_get_part(engine, tensor, state, 0, hapt_engine_elements(engine, tensor), value);
}

enum hapt_status hapt_engine_run_update_kernels(struct hapt_engine *engine)
{
    const struct hapt_update nothing = {.optimizer =
                                            engine->plan->state_count == 2 ? HAPT_OPTIMIZER_ADAMW : HAPT_OPTIMIZER_SGD,
                                        .epsilon = 1,
                                        .step = 1,
                                        .microbatches = 1};
    if (engine->plan->state_space == HAPT_SPACE_HOST) {
        HAPT_TRY(hapt_engine_away_begin(engine, (1u << HAPT_PARAMETER_GROUPS) - 1, &nothing));
        HAPT_TRY(hapt_engine_settle(engine));
    }
    for (int g = 0; g < HAPT_PARAMETER_GROUPS; g++) {
        const struct hapt_parameter_group *group = &engine->plan->group[g];
        if (engine->plan->state_space != HAPT_SPACE_HOST)
            for (enum update_kind kind = 0; kind < UPDATE_KINDS; kind++)
                HAPT_TRY(update_block(engine, &nothing, group, kind));
        if (!engine->plan->masters_like_state) HAPT_TRY(convert_group(engine, group));
    }
    for (int t = 0; t < engine->program->tensor_count; t++) {
        const int tensor = engine->program->tensor[t].tensor;
        if (engine->program->graph->tensor[tensor].kind != HAPT_TENSOR_PARAMETER) continue;
        if (!is_like_state(engine, tensor))
            HAPT_TRY(convert_parameter(engine, tensor, 0, hapt_engine_elements(engine, tensor)));
        else if (engine->plan->copy_offset != (size_t)-1)
            HAPT_TRY(convert(engine, room_for(engine, 0),
                             hapt_memory_has_places(engine->plan) ? engine->memory + engine->plan->place_offset
                                                                  : hapt_engine_operand(engine, tensor, 0, 0),
                             engine->copy_dtype, 1));
    }
    return HAPT_OK;
}
