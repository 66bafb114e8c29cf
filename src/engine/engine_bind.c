/* Binding: every operator of a program becomes one kernel call with final addresses, per slot. */
#include <string.h>

#include "engine_private.h"

#include "hapt/packing.h"

/* Kernels on flat arrays. */
static const char *const flat_kernels[] = {"zero", "square_sum", "adamw", "sgd", "convert"};
enum { FLAT_KERNELS = sizeof flat_kernels / sizeof flat_kernels[0] };

static enum hapt_dtype compute_type(const struct hapt_program *program, int op)
{
    const struct hapt_op *what = &program->graph->op[op];
    for (int k = 0; k < what->input_count + what->output_count; k++) {
        const int tensor = k < what->input_count ? what->input[k] : what->output[k - what->input_count];
        if (tensor < 0) continue;
        const enum hapt_dtype dtype = program->graph->tensor[tensor].dtype;
        if (dtype == HAPT_BF16 || dtype == HAPT_F16) return dtype;
    }
    return HAPT_F32;
}

const struct hapt_kernel *hapt_engine_find_kernel(const struct hapt_program *program,
                                                  const struct hapt_engine_options *options, int op)
{
    const char *name = hapt_op_type_at(program->graph->op[op].type)->name;
    return options->backend->find_kernel(options->device, name, compute_type(program, op));
}

static enum hapt_status need_kernel(const struct hapt_engine_options *options, const char *name, enum hapt_dtype dtype,
                                    bool found)
{
    if (found) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT,
                     dtype == HAPT_F16 ? "fp16 is for GPUs: make the model with `hapt model --dtype fp32` or bf16"
                                       : "make the model with another --dtype, or choose another device",
                     "the %s back end has no %s kernel for %s", options->backend->name, hapt_dtype_name(dtype), name);
}

enum hapt_status hapt_engine_check_kernels(const struct hapt_program *program,
                                           const struct hapt_engine_options *options)
{
    for (int section = 0; section < HAPT_SECTION_REDUCE; section++) {
        for (int s = 0; s < program->step_count[section]; s++) {
            const struct hapt_program_step *step = &program->step[section][s];
            if (step->kind != HAPT_COLLECTIVE_NONE) continue; /* not a kernel */
            HAPT_TRY(need_kernel(options, hapt_op_type_at(program->graph->op[step->op].type)->name,
                                 compute_type(program, step->op),
                                 hapt_engine_find_kernel(program, options, step->op) != NULL));
        }
    }
    for (int k = 0; k < FLAT_KERNELS; k++)
        HAPT_TRY(need_kernel(options, flat_kernels[k], HAPT_F32,
                             options->backend->find_kernel(options->device, flat_kernels[k], HAPT_F32) != NULL));
    return HAPT_OK;
}

struct hapt_view hapt_engine_flat_view(void *data, enum hapt_dtype dtype, size_t elements)
{
    return (struct hapt_view){.data = data, .dtype = dtype, .dims = 1, .shape = {(int64_t)elements}};
}

static struct hapt_view describe(const struct hapt_program *program, int tensor)
{
    const struct hapt_tensor *whole = &program->graph->tensor[tensor];
    struct hapt_view view = {.dtype = whole->dtype, .dims = whole->dims};
    memcpy(view.shape, program->tensor[program->local[tensor]].shape, sizeof view.shape);
    return view;
}

/* Extent, on all shards, of the index that integer operands select from; 0: the operator has none. */
static int64_t values_of(const struct hapt_program *program, int op)
{
    const struct hapt_op *whole = &program->graph->op[op];
    const struct hapt_signature *signature = hapt_op_signature_of(program->graph, whole);
    for (int j = 0; j < whole->input_count + whole->output_count; j++) {
        const bool input = j < whole->input_count;
        const int tensor = input ? whole->input[j] : whole->output[j - whole->input_count];
        const struct hapt_signature_operand *operand =
            input ? &signature->input[j] : &signature->output[j - whole->input_count];
        for (int d = 0; tensor >= 0 && d < operand->dims; d++)
            if (operand->indexed[d]) return program->graph->tensor[tensor].shape[d];
    }
    return 0;
}

/* True if only the first rank of an axis contributes this input (a term of a partial sum), and this is another rank. */
static bool is_other_ranks_term(const struct hapt_program *program, int op, int input)
{
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++)
        if (program->sharding->first_rank_inputs[op][axis] >> input & 1u &&
            program->sharding->mesh_coordinate[axis] > 0)
            return true;
    return false;
}

void hapt_engine_describe_call(const struct hapt_program *program, const struct hapt_engine_options *options, int op,
                               struct hapt_call *call)
{
    const struct hapt_op *what = &program->shard->op[op];
    const int exchange_axis = program->sharding->exchange[op];
    *call = (struct hapt_call){.input_count = what->input_count,
                               .output_count = what->output_count,
                               .accumulate = what->accumulate,
                               .threads = options->threads,
                               .first_value = program->sharding->first_value[op],
                               .value_count = values_of(program, op)};
    memcpy(call->integer, what->integer, sizeof call->integer);
    memcpy(call->real, what->real, sizeof call->real);
    for (int i = 0; i < what->input_count; i++)
        if (what->input[i] >= 0 && !is_other_ranks_term(program, op, i))
            call->input[i] = describe(program, what->input[i]);
    for (int o = 0; o < what->output_count; o++)
        if (what->output[o] >= 0) call->output[o] = describe(program, what->output[o]);
    if (exchange_axis < 0) return;
    call->shard_reduce = options->links.shard_reduce;
    call->shard_reduce_context = options->links.shard_reduce_context[exchange_axis];
}

static int trained_parameters(const struct hapt_program *program, size_t *elements)
{
    int count = 0;
    *elements = 0;
    for (int t = 0; t < program->tensor_count; t++) {
        const struct hapt_tensor *tensor = &program->graph->tensor[program->tensor[t].tensor];
        if (tensor->kind != HAPT_TENSOR_PARAMETER || !tensor->trainable) continue;
        count++;
        *elements += (size_t)hapt_tensor_elements(tensor) + 64; /* padding included */
    }
    return count;
}

/* Scratch of the kernels that run over the resident blocks: the square sums, one double each, then the kernels' own. */
static size_t flat_scratch(const struct hapt_engine_options *options, const struct hapt_program *program)
{
    size_t elements, most = 0;
    const int count = trained_parameters(program, &elements);
    struct hapt_call call = {.input_count = 1, .output_count = 4, .threads = options->threads};
    call.input[0] = hapt_engine_flat_view(NULL, HAPT_F32, elements);
    for (int o = 0; o < 4; o++) call.output[o] = hapt_engine_flat_view(NULL, HAPT_F32, elements);
    for (int k = 0; k < FLAT_KERNELS; k++) {
        const struct hapt_kernel *kernel = options->backend->find_kernel(options->device, flat_kernels[k], HAPT_F32);
        if (!kernel || !kernel->workspace_bytes) continue;
        const size_t need = kernel->workspace_bytes(&call);
        if (need > most) most = need;
    }
    return hapt_align((size_t)count * sizeof(double)) + most;
}

size_t hapt_engine_scratch(void *context, const struct hapt_program *program, int op)
{
    const struct hapt_engine_options *options = context;
    if (op < 0) return flat_scratch(options, program);
    const struct hapt_kernel *kernel = hapt_engine_find_kernel(program, options, op);
    if (!kernel || !kernel->workspace_bytes) return 0;
    struct hapt_call call;
    hapt_engine_describe_call(program, options, op, &call);
    return kernel->workspace_bytes(&call);
}

size_t hapt_engine_scratch_predicted(void *context, const struct hapt_program *program, int op)
{
    if (op < 0) return 0;
    const struct hapt_op_type *type = hapt_op_type_at(program->graph->op[op].type);
    if (!type->heavy || !(type->contracts || type->product)) return 0;
    struct hapt_call call;
    hapt_engine_describe_call(program, context, op, &call);
    const struct hapt_view *packed = &call.input[type->packed];
    const size_t unpacked = type->packed == 0 ? 0
                                              : (size_t)(packed->shape[0] * packed->shape[1] * HAPT_PACKING_COLUMNS) *
                                                    hapt_dtype_bytes(call.input[0].dtype);
    return hapt_align(unpacked) +
           hapt_product_workspace(hapt_view_elements(&call.output[0]), HAPT_PRODUCT_WORKSPACE_BYTES);
}

void *hapt_engine_operand(struct hapt_engine *engine, int tensor, int slot, int weight_slot)
{
    const struct hapt_memory_plan *plan = engine->plan;
    const struct hapt_tensor *whole = &engine->program->graph->tensor[tensor];
    if (whole->kind != HAPT_TENSOR_PARAMETER || whole->dtype == HAPT_F32)
        return hapt_engine_address(engine, tensor, slot, weight_slot);
    const size_t element = plan->parameter_element[engine->program->local[tensor]];
    return engine->memory + plan->copy_offset + element * hapt_dtype_bytes(whole->dtype);
}

static void *input_of(struct hapt_engine *engine, int op, int tensor, int slot, int weight_slot)
{
    const bool moves =
        hapt_memory_has_places(engine->plan) && engine->program->graph->tensor[tensor].kind == HAPT_TENSOR_PARAMETER;
    return moves ? hapt_engine_place_address(engine, op, tensor)
                 : hapt_engine_operand(engine, tensor, slot, weight_slot);
}

static void *output_of(struct hapt_engine *engine, int op, int tensor, int slot, int weight_slot)
{
    const struct hapt_graph *graph = engine->program->graph;
    const bool away = engine->plan->host_gradients && hapt_graph_is_parameter_gradient(graph, tensor);
    return away ? hapt_engine_gradient_address(engine, op, graph->tensor[tensor].primal)
                : hapt_engine_address(engine, tensor, slot, weight_slot);
}

static void bind_step(struct hapt_engine *engine, const struct hapt_program_step *step, int slot, int weight_slot,
                      struct bound_step *bound)
{
    const struct hapt_op *op = &engine->program->graph->op[step->op];
    const bool computes = step->kind == HAPT_COLLECTIVE_NONE;
    bound->kernel = computes ? hapt_engine_find_kernel(engine->program, &engine->options, step->op) : NULL;
    bound->op = step->op;
    bound->weight = step->weight;
    bound->forward_op = op->forward_op;
    hapt_engine_describe_call(engine->program, &engine->options, step->op, &bound->call);
    for (int i = 0; i < op->input_count; i++)
        if (op->input[i] >= 0 && !is_other_ranks_term(engine->program, step->op, i))
            bound->call.input[i].data = input_of(engine, step->op, op->input[i], slot, weight_slot);
    for (int o = 0; o < op->output_count; o++)
        if (op->output[o] >= 0)
            bound->call.output[o].data = output_of(engine, step->op, op->output[o], slot, weight_slot);
    bound->call.workspace = engine->memory + engine->plan->scratch_offset;
    bound->call.workspace_bytes = engine->plan->scratch_bytes;
}

/* The parameter group whose collective does this sum in place inside the gradient block, or -1. */
static int parameter_group_of(const struct hapt_engine *engine, const struct hapt_program_step *step,
                              const struct bound_step *bound)
{
    const char *block = engine->memory + engine->plan->gradient_offset, *at = bound->call.output[0].data;
    if (engine->plan->host_gradients || step->kind != HAPT_COLLECTIVE_ALL_REDUCE || bound->call.input[0].data != at)
        return -1;
    for (int g = 1; g < HAPT_PARAMETER_GROUPS; g++) {
        const struct hapt_parameter_group *group = &engine->plan->group[g];
        if (at >= block + group->first * sizeof(float) && at < block + group->end * sizeof(float)) return g;
    }
    return -1;
}

static bool touches(const struct bound_step *step, const void *address)
{
    return step->call.input[0].data == address || step->call.output[0].data == address;
}

/* Finds when a group's one collective may run: after the steps that touch its tensors before their sums, and before
 * those that touch them afterwards. If these overlap, its sums are done one by one. */
static void schedule_groups(struct hapt_engine *engine)
{
    const struct section_binding *binding = &engine->section[HAPT_SECTION_REDUCE];
    for (int g = 0; g < HAPT_PARAMETER_GROUPS; g++) {
        int after = 0, before = binding->step_count, sums = 0;
        for (int s = 0; s < binding->step_count; s++) {
            if (binding->step[s].parameter_group != g) continue;
            sums++;
            for (int other = 0; other < binding->step_count; other++) {
                const struct bound_step *step = &binding->step[other];
                if (step->parameter_group == g || !touches(step, binding->step[s].call.output[0].data)) continue;
                if (other < s && other + 1 > after) after = other + 1;
                if (other > s && other < before) before = other;
            }
        }
        engine->group_before[g] = sums > 0 && after <= before ? after : -1;
        for (int s = 0; s < binding->step_count && engine->group_before[g] < 0; s++)
            if (binding->step[s].parameter_group == g) binding->step[s].parameter_group = -1;
    }
}

/* The elements of a parameter in the resident blocks that this rank updates. */
static void updated_here(const struct hapt_memory_plan *plan, const struct hapt_program *program, int tensor,
                         size_t *first, size_t *count)
{
    size_t end = plan->parameter_element[tensor];
    size_t elements = 1;
    for (int d = 0; d < program->graph->tensor[program->tensor[tensor].tensor].dims; d++)
        elements *= (size_t)program->tensor[tensor].shape[d];
    *first = end;
    end += elements;
    for (int g = 0; g < HAPT_PARAMETER_GROUPS; g++) {
        const struct hapt_parameter_group *group = &plan->group[g];
        if (plan->parameter_element[tensor] < group->first || plan->parameter_element[tensor] >= group->end) continue;
        if (*first < group->slice_first) *first = group->slice_first;
        if (end > group->slice_end) end = group->slice_end;
    }
    *count = end > *first ? end - *first : 0;
}

static enum hapt_status bind_flat(struct hapt_engine *engine)
{
    const struct hapt_program *program = engine->program;
    const struct hapt_engine_options *options = &engine->options;
    const struct hapt_memory_plan *plan = engine->plan;
    size_t elements;
    engine->parameter_count = trained_parameters(program, &elements);
    HAPT_NEW(engine->parameter, &engine->arena, engine->parameter_count);
    HAPT_NEW(engine->square_sum, &engine->arena, engine->parameter_count);
    HAPT_NEW(engine->square, &engine->arena, engine->parameter_count);
    HAPT_NEW(engine->bound, &engine->arena, program->sharding->axis[0].size * program->sharding->axis[1].size + 1);
    char *scratch = engine->memory + plan->scratch_offset;
    const size_t sums_bytes = hapt_align((size_t)engine->parameter_count * sizeof(double));
    const struct hapt_kernel *square_sum = options->backend->find_kernel(options->device, "square_sum", HAPT_F32);
    for (int t = 0, p = 0; t < program->tensor_count; t++) {
        const struct hapt_tensor *tensor = &program->graph->tensor[program->tensor[t].tensor];
        if (tensor->kind != HAPT_TENSOR_PARAMETER || !tensor->trainable) continue;
        if (tensor->dtype != HAPT_F32) engine->copy_dtype = tensor->dtype; /* a model has one compute type */
        size_t first, count;
        updated_here(plan, program, t, &first, &count);
        float *gradient = plan->host_gradients /* in another place of the same size when it is summed */
                              ? (float *)(engine->memory + plan->gradient_place_offset)
                              : (float *)(engine->memory + plan->gradient_offset) + first;
        HAPT_ASSERT((char *)(gradient + count) <= engine->memory + plan->total_bytes);
        struct bound_step *bound = &engine->square_sum[p];
        bound->kernel = square_sum;
        bound->call = (struct hapt_call){.input_count = 1,
                                         .output_count = 1,
                                         .threads = options->threads,
                                         .workspace = scratch + sums_bytes,
                                         .workspace_bytes = plan->scratch_bytes - sums_bytes};
        bound->call.input[0] = hapt_engine_flat_view(gradient, HAPT_F32, count);
        bound->call.output[0] = hapt_engine_flat_view(scratch + (size_t)p * sizeof(double), HAPT_F32, 1);
        engine->parameter[p++] = t;
    }
    engine->zero.kernel = options->backend->find_kernel(options->device, "zero", HAPT_F32);
    engine->zero.call = (struct hapt_call){
        .output_count = 1, .threads = options->threads, .workspace = scratch, .workspace_bytes = plan->scratch_bytes};
    engine->zero.call.output[0] =
        hapt_engine_flat_view(engine->memory + plan->gradient_offset, HAPT_F32, plan->zeroed_elements);
    engine->convert = options->backend->find_kernel(options->device, "convert", HAPT_F32);
    for (enum update_kind kind = 0; kind < UPDATE_KINDS; kind++)
        engine->update[kind] = hapt_engine_find_update(options->backend, options->device, options->state_count, kind);
    return HAPT_OK;
}

static enum hapt_status bind_section(struct hapt_engine *engine, enum hapt_section section)
{
    const struct hapt_program *program = engine->program;
    struct section_binding *binding = &engine->section[section];
    const bool waits = section == HAPT_SECTION_BACKWARD || section == HAPT_SECTION_WEIGHT;
    const int slots = section == HAPT_SECTION_REDUCE ? 1 : engine->options.slots;
    binding->step_count = program->step_count[section];
    binding->weight_slots = waits && program->step_count[HAPT_SECTION_WEIGHT] > 0 ? engine->plan->weight_slots : 1;
    const int variants = slots * binding->weight_slots;
    HAPT_NEW(binding->step, &engine->arena, (size_t)binding->step_count * (size_t)variants);
    for (int v = 0; v < variants; v++)
        for (int s = 0; s < binding->step_count; s++) {
            struct bound_step *bound = &binding->step[v * binding->step_count + s];
            bind_step(engine, &program->step[section][s], v / binding->weight_slots, v % binding->weight_slots, bound);
            bound->parameter_group =
                section == HAPT_SECTION_REDUCE ? parameter_group_of(engine, &program->step[section][s], bound) : -1;
        }
    return HAPT_OK;
}

enum hapt_status hapt_engine_bind(struct hapt_engine *engine)
{
    for (int section = 0; section < HAPT_SECTION_COUNT; section++)
        HAPT_TRY(bind_section(engine, (enum hapt_section)section));
    schedule_groups(engine);
    return bind_flat(engine);
}
