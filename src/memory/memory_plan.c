/* The static memory plan of the chunks of a device: resident blocks, slots, workspace, transfer slots. The walk of
 * memory_ranges.c gives regions, the workspace and the totals. */
#include "memory_ranges.h"

struct planner {
    const struct hapt_program *program;
    const struct hapt_memory_options *options;
    struct hapt_memory_plan *plan;
    struct memory_walk walk;
    size_t *end, *host_end; /* first free byte of the two allocations so far; shared by the chunks */
};

static const struct hapt_tensor *whole_tensor(const struct hapt_program *program, int tensor)
{
    return &program->graph->tensor[program->tensor[tensor].tensor];
}

static size_t reserve(struct planner *planner, size_t bytes)
{
    const size_t offset = *planner->end;
    *planner->end += hapt_align(bytes);
    return offset;
}

/* Axes over which gradients are all-reduced in place, once a step: axes [tensor], of roots. */
static void find_axes(const struct hapt_program *program, unsigned *axes)
{
    for (int s = 0; s < program->step_count[HAPT_SECTION_REDUCE]; s++) {
        const struct hapt_program_step *step = &program->step[HAPT_SECTION_REDUCE][s];
        const struct hapt_op *op = &program->graph->op[step->op];
        const int from = program->tensor[program->local[op->input[0]]].root,
                  to = program->tensor[program->local[op->output[0]]].root;
        if (step->kind == HAPT_COLLECTIVE_ALL_REDUCE && from == to) axes[to] |= 1u << step->axis;
    }
}

/* The order of parameters in the blocks: by group, then by class. Frozen ones are last. */
enum { CLASSES = TENSOR_PARAMETER_CLASSES, ORDERS = (HAPT_PARAMETER_GROUPS + 1) * CLASSES };

static int order_of(const struct hapt_program *program, int parameter, const unsigned *axes)
{
    const struct hapt_tensor *tensor = whole_tensor(program, parameter);
    const int gradient = tensor->gradient >= 0 ? program->local[tensor->gradient] : -1;
    const unsigned group = !tensor->trainable ? HAPT_PARAMETER_GROUPS
                           : gradient >= 0    ? axes[program->tensor[gradient].root]
                                              : 0;
    return (int)group * CLASSES + (int)tensor_parameter_class(tensor);
}

/* Which weights have compute copies. */
struct copies {
    bool some, all_trained;
};

/* Sets first [ORDERS + 1] to the elements before each order. */
static void number_parameters(const struct hapt_program *program, const unsigned *axes, struct hapt_memory_plan *plan,
                              size_t *first, struct copies *copies)
{
    size_t next[ORDERS] = {0};
    for (int pass = 0; pass < 2; pass++) {
        for (int t = 0; t < program->tensor_count; t++) {
            const struct hapt_tensor *tensor = whole_tensor(program, t);
            if (tensor->kind != HAPT_TENSOR_PARAMETER) continue;
            size_t *mine = &next[order_of(program, t, axes)];
            plan->parameter_element[t] = *mine;
            *mine += tensor_pad(tensor_bytes(program, t) / hapt_dtype_bytes(tensor->dtype));
            copies->some = copies->some || tensor->dtype != HAPT_F32;
            copies->all_trained = copies->all_trained && (!tensor->trainable || tensor->dtype != HAPT_F32);
        }
        for (int k = 0; k < ORDERS && pass == 0; k++) {
            first[k + 1] = first[k] + next[k];
            next[k] = first[k];
        }
    }
}

static enum hapt_status group_parameters(const struct hapt_program *program, struct hapt_arena *scratch,
                                         struct hapt_memory_plan *plan, struct copies *copies)
{
    size_t first[ORDERS + 1] = {0};
    unsigned *axes;
    HAPT_NEW(axes, scratch, program->tensor_count);
    find_axes(program, axes);
    number_parameters(program, axes, plan, first, copies);
    for (int g = 0; g < HAPT_PARAMETER_GROUPS; g++) {
        const size_t *its = &first[g * CLASSES];
        plan->group[g] = (struct hapt_parameter_group){.axes = (unsigned)g,
                                                       .first = its[0],
                                                       .decayed_end = its[TENSOR_UNDECAYED],
                                                       .statistic_first = its[TENSOR_STATISTIC],
                                                       .end = its[CLASSES]};
    }
    plan->trained_elements = first[HAPT_PARAMETER_GROUPS * CLASSES];
    plan->elements = first[ORDERS];
    return HAPT_OK;
}

/* True for a sum over microbatches that is not yet a trained parameter's gradient. */
static bool is_sum(const struct hapt_program *program, int tensor)
{
    const int of = program->tensor[tensor].tensor;
    return program->tensor[tensor].root == tensor && hapt_graph_is_parameter_gradient(program->graph, of) &&
           program->graph->tensor[program->graph->tensor[of].primal].trainable &&
           !tensor_is_updating(program->graph, of);
}

/* Sets what this rank updates of every group, and the offset of its state. */
static void share_state(const struct planner *planner)
{
    struct hapt_memory_plan *plan = planner->plan;
    plan->sharded_state = planner->options->sharded_state;
    for (int g = 0; g < HAPT_PARAMETER_GROUPS; g++) {
        struct hapt_parameter_group *group = &plan->group[g];
        int index;
        group->slice_first = group->first;
        group->slice_end = group->end;
        if (plan->sharded_state && group->axes != 0) {
            hapt_parameter_group_ranks(planner->program->sharding, group->axes, &index);
            hapt_parameter_group_slice(planner->program->sharding, group, index, &group->slice_first,
                                       &group->slice_end);
        }
        group->state_first = plan->state_elements;
        plan->state_elements += group->slice_end - group->slice_first;
    }
}

static size_t reserve_on_host(struct planner *planner, size_t bytes)
{
    const size_t offset = *planner->host_end;
    *planner->host_end += hapt_align(bytes);
    return offset;
}

/* Decides what is on the host. */
static void choose_spaces(const struct planner *planner, const struct copies *copies)
{
    struct hapt_memory_plan *plan = planner->plan;
    const bool away = planner->options->host_state && plan->state_count > 0 && plan->trained_elements > 0;
    plan->state_space = away ? HAPT_SPACE_HOST : HAPT_SPACE_DEVICE;
    plan->masters_unread = plan->trained_elements > 0 && copies->some && copies->all_trained;
    plan->host_weights = planner->walk.host_weights;
    plan->host_gradients = planner->walk.host_gradients;
    plan->sharded_weights = planner->walk.sharded_weights;
    plan->masters_like_state = hapt_memory_has_places(plan) || (plan->masters_unread && (away || plan->sharded_state));
    plan->master_space = away && plan->masters_like_state ? HAPT_SPACE_HOST : HAPT_SPACE_DEVICE;
    plan->window_elements = away ? hapt_memory_window(plan->state_elements) : plan->state_elements;
    plan->host_update = away && planner->options->host_update;
}

/* Elements on the device of what may be on the host. */
static size_t elements_here(const struct hapt_memory_plan *plan)
{
    return plan->host_update ? 0 : plan->window_elements;
}

static void reserve_masters(struct planner *planner)
{
    struct hapt_memory_plan *plan = planner->plan;
    if (!plan->masters_like_state) {
        plan->master_offset = reserve(planner, plan->elements * sizeof(float));
        plan->frozen_offset = plan->master_offset + plan->trained_elements * sizeof(float);
        return;
    }
    plan->frozen_offset = reserve(planner, (plan->elements - plan->trained_elements) * sizeof(float));
    plan->master_offset = reserve(planner, elements_here(plan) * sizeof(float));
    if (plan->master_space == HAPT_SPACE_HOST)
        plan->host_master_offset = reserve_on_host(planner, plan->state_elements * sizeof(float));
}

static void reserve_state(struct planner *planner)
{
    struct hapt_memory_plan *plan = planner->plan;
    for (int s = 0; s < plan->state_count; s++) {
        plan->state_offset[s] = reserve(planner, elements_here(plan) * sizeof(float));
        if (plan->state_space == HAPT_SPACE_HOST)
            plan->host_state_offset[s] = reserve_on_host(planner, plan->state_elements * sizeof(float));
    }
    for (int w = HAPT_WINDOW_GRADIENTS; w <= HAPT_WINDOW_COPIES && plan->host_update; w++)
        plan->host_window_offset[w] =
            reserve_on_host(planner, hapt_host_window_bytes((enum hapt_host_window)w, plan->window_elements,
                                                            !plan->host_gradients, !plan->masters_like_state,
                                                            plan->copy_offset != (size_t)-1 && !plan->host_weights));
}

/* True if kernels of operators [first_op, end_op) read a parameter. */
static bool reads(const struct hapt_program *program, int parameter, int first_op, int end_op)
{
    for (int section = 0; section < HAPT_SECTION_REDUCE; section++)
        for (int s = 0; s < program->step_count[section]; s++) {
            const struct hapt_op *op = &program->graph->op[program->step[section][s].op];
            if (op->forward_op < first_op || op->forward_op >= end_op) continue;
            for (int i = 0; i < op->input_count; i++)
                if (op->input[i] >= 0 && program->local[op->input[i]] == parameter) return true;
        }
    return false;
}

/* Puts the weights of a unit into its place, in the order of the blocks, so that neighbours in both are gathered
 * together. Returns their elements. */
static size_t pack_unit(const struct hapt_program *program, const struct hapt_memory_plan *plan,
                        struct hapt_weight_unit *unit)
{
    size_t elements = 0;
    for (int k = 0; k < unit->count; k++) {
        int least = k;
        for (int other = k + 1; other < unit->count; other++)
            if (plan->parameter_element[unit->weight[other].parameter] <
                plan->parameter_element[unit->weight[least].parameter])
                least = other;
        const struct hapt_unit_weight weight = unit->weight[least];
        const int t = weight.parameter;
        unit->weight[least] = unit->weight[k];
        unit->weight[k] = (struct hapt_unit_weight){
            t, elements, tensor_pad(tensor_bytes(program, t) / hapt_dtype_bytes(whole_tensor(program, t)->dtype))};
        elements += unit->weight[k].padded;
    }
    return elements;
}

/* Packs the weights that each unit reads into its place, and their gradients alike. */
static enum hapt_status pack_units(struct planner *planner, struct hapt_arena *arena, size_t weight_bytes)
{
    size_t most = 0;
    const struct hapt_memory_options *options = planner->options;
    const struct hapt_program *program = planner->program;
    struct hapt_memory_plan *plan = planner->plan;
    HAPT_NEW(plan->unit, arena, options->weight_unit_count);
    for (int u = 0; u < options->weight_unit_count; u++) {
        const struct hapt_unit *whole = &options->weight_unit[u];
        if (whole->end_op <= program->first_op || whole->first_op >= program->end_op) continue;
        struct hapt_weight_unit *unit = &plan->unit[plan->unit_count++];
        *unit = (struct hapt_weight_unit){.first_op = whole->first_op, .end_op = whole->end_op};
        HAPT_NEW(unit->weight, arena, program->tensor_count);
        for (int t = 0; t < program->tensor_count; t++)
            if (plan->parameter_element[t] != (size_t)-1 && reads(program, t, whole->first_op, whole->end_op))
                unit->weight[unit->count++].parameter = t;
        const size_t elements = pack_unit(program, plan, unit);
        if (unit->count == 0) plan->unit_count--;
        if (elements > most) most = elements;
    }
    plan->place_bytes = hapt_align(most * weight_bytes);
    plan->place_offset = reserve(planner, HAPT_WEIGHT_PLACES * plan->place_bytes);
    plan->gradient_place_bytes = plan->host_gradients ? hapt_align(most * sizeof(float)) : 0;
    plan->gradient_place_offset = reserve(planner, HAPT_GRADIENT_PLACES * plan->gradient_place_bytes);
    return HAPT_OK;
}

/* The compute copies of weights: all, a window for those on the host, or a slice; and the places that kernels read. */
static enum hapt_status reserve_copies(struct planner *planner, bool some, struct hapt_arena *arena)
{
    struct hapt_memory_plan *plan = planner->plan;
    const size_t elements = plan->host_weights      ? elements_here(plan)
                            : plan->sharded_weights ? plan->state_elements
                                                    : plan->elements;
    plan->copy_offset = some ? reserve(planner, elements * sizeof(uint16_t)) : (size_t)-1;
    if (!hapt_memory_has_places(plan)) return HAPT_OK;
    plan->host_copy_offset =
        some && plan->host_weights ? reserve_on_host(planner, plan->elements * sizeof(uint16_t)) : (size_t)-1;
    return pack_units(planner, arena, some ? sizeof(uint16_t) : sizeof(float));
}

static void reserve_gradients(struct planner *planner)
{
    const struct hapt_program *program = planner->program;
    struct hapt_memory_plan *plan = planner->plan;
    if (plan->host_gradients) {
        plan->host_gradient_offset = reserve_on_host(planner, plan->trained_elements * sizeof(float));
        return;
    }
    plan->gradient_offset = reserve(planner, plan->trained_elements * sizeof(float));
    for (int t = 0; t < program->tensor_count; t++)
        if (is_sum(program, t)) plan->location[t].offset = reserve(planner, tensor_bytes(program, t));
    plan->zeroed_elements = (*planner->end - plan->gradient_offset) / sizeof(float);
}

static enum hapt_status reserve_parameters(struct planner *planner, struct hapt_arena *arena,
                                           struct hapt_arena *scratch)
{
    const struct hapt_program *program = planner->program;
    struct hapt_memory_plan *plan = planner->plan;
    struct copies copies = {.all_trained = true};
    HAPT_TRY(group_parameters(program, scratch, plan, &copies));
    share_state(planner);
    choose_spaces(planner, &copies);
    reserve_masters(planner);
    HAPT_TRY(reserve_copies(planner, copies.some, arena));
    reserve_gradients(planner);
    reserve_state(planner);
    return HAPT_OK;
}

/* The offset of a parameter that begins at this element: of its master, or of its compute copy if masters are laid out
 * like a state. */
static size_t weight_offset(const struct hapt_memory_plan *plan, size_t element)
{
    if (element >= plan->trained_elements)
        return plan->frozen_offset + (element - plan->trained_elements) * sizeof(float);
    return plan->masters_like_state ? plan->copy_offset + element * sizeof(uint16_t)
                                    : plan->master_offset + element * sizeof(float);
}

/* The same in the host allocation: of its compute copy, or in fp32 of its master. */
static size_t host_weight_offset(const struct hapt_memory_plan *plan, size_t element)
{
    return plan->host_copy_offset == (size_t)-1 ? plan->host_master_offset + element * sizeof(float)
                                                : plan->host_copy_offset + element * sizeof(uint16_t);
}

static enum hapt_status reserve_resident(struct planner *planner, struct hapt_arena *arena, struct hapt_arena *scratch)
{
    const struct hapt_program *program = planner->program;
    struct hapt_memory_plan *plan = planner->plan;
    HAPT_TRY(reserve_parameters(planner, arena, scratch));
    for (int t = 0; t < program->tensor_count; t++) {
        if (plan->location[t].region != HAPT_REGION_RESIDENT || program->tensor[t].root != t || is_sum(program, t))
            continue;
        const struct hapt_tensor *tensor = whole_tensor(program, t);
        if (tensor->kind == HAPT_TENSOR_PARAMETER && plan->host_weights) {
            plan->location[t].space = HAPT_SPACE_HOST;
            plan->location[t].offset = host_weight_offset(plan, plan->parameter_element[t]);
        } else if (tensor->kind == HAPT_TENSOR_PARAMETER && plan->sharded_weights) {
            plan->location[t].region = HAPT_REGION_NONE; /* no rank has all of it */
        } else if (tensor->kind == HAPT_TENSOR_PARAMETER) {
            plan->location[t].offset = weight_offset(plan, plan->parameter_element[t]);
        } else if (tensor_is_updating(program->graph, program->tensor[t].tensor)) {
            const size_t element = plan->parameter_element[program->local[tensor->primal]];
            if (plan->host_gradients) plan->location[t].space = HAPT_SPACE_HOST;
            plan->location[t].offset =
                (plan->host_gradients ? plan->host_gradient_offset : plan->gradient_offset) + element * sizeof(float);
        } else { /* the loss scale; a frozen weight's gradient, made by the same kernel as its bias's */
            plan->location[t].offset = reserve(planner, tensor_bytes(program, t));
        }
    }
    return HAPT_OK;
}

/* Sets the offsets of a chunk's tensors inside a slot or a weight slot; *bytes: their sum. */
static void lay_out_slot(struct planner *planner, enum hapt_region region, size_t *bytes)
{
    const struct hapt_program *program = planner->program;
    struct hapt_memory_plan *plan = planner->plan;
    for (int t = 0; t < program->tensor_count; t++) {
        if (plan->location[t].region != region || program->tensor[t].root != t) continue;
        plan->location[t].offset = *bytes;
        *bytes += hapt_align(tensor_bytes(program, t));
    }
}

/* One pool serves all chunks, so a slot is as large as the largest chunk's. */
static void reserve_slots(struct planner *planner, int chunks)
{
    size_t largest = 0, largest_weight = 0;
    for (int k = 0; k < chunks; k++) {
        struct hapt_memory_plan *plan = planner[k].plan;
        lay_out_slot(&planner[k], HAPT_REGION_SLOT, &plan->activation_bytes);
        lay_out_slot(&planner[k], HAPT_REGION_WEIGHT_SLOT, &plan->weight_slot_bytes);
        HAPT_ASSERT(plan->activation_bytes == planner[k].walk.activations.slot_bytes &&
                    plan->weight_slot_bytes == planner[k].walk.activations.weight_slot_bytes);
        if (plan->activation_bytes > largest) largest = plan->activation_bytes;
        if (plan->weight_slot_bytes > largest_weight) largest_weight = plan->weight_slot_bytes;
    }
    const size_t offset = *planner->end, weight_offset = offset + (size_t)planner->plan->slots * largest;
    *planner->end = weight_offset + (size_t)planner->plan->weight_slots * largest_weight;
    for (int k = 0; k < chunks; k++) {
        struct hapt_memory_plan *plan = planner[k].plan;
        plan->slot_offset = offset;
        plan->weight_slot_offset = weight_offset;
        plan->activation_bytes = largest;
        plan->weight_slot_bytes = largest_weight;
    }
}

static size_t scratch_bytes(const struct planner *planner)
{
    const struct hapt_memory_options *options = planner->options;
    if (!options->scratch) return 0;
    size_t bytes = options->scratch(options->scratch_context, planner->program, -1);
    for (int section = 0; section < HAPT_SECTION_COUNT; section++) {
        for (int s = 0; s < planner->program->step_count[section]; s++) {
            const struct hapt_program_step *step = &planner->program->step[section][s];
            if (step->kind != HAPT_COLLECTIVE_NONE) continue;
            const size_t need = options->scratch(options->scratch_context, planner->program, step->op);
            if (need > bytes) bytes = need;
        }
    }
    return hapt_align(bytes);
}

/* One instruction runs at a time, so the chunks share tensors' bytes and kernel scratch. */
static void reserve_workspace(struct planner *planner, int chunks)
{
    size_t tensors = 0, kernels = 0;
    for (int k = 0; k < chunks; k++) {
        const size_t workspace = memory_workspace_bytes(&planner[k].walk.activations);
        if (workspace > tensors) tensors = workspace;
        const size_t bytes = scratch_bytes(&planner[k]);
        if (bytes > kernels) kernels = bytes;
    }
    const size_t offset = reserve(planner, tensors + kernels);
    for (int k = 0; k < chunks; k++) {
        struct hapt_memory_plan *plan = planner[k].plan;
        plan->scratch_bytes = kernels;
        plan->workspace_bytes = tensors + kernels;
        plan->workspace_offset = offset;
        plan->scratch_offset = offset + tensors;
    }
}

static enum hapt_status reserve_staging(struct planner *planner, const struct hapt_boundary *boundary,
                                        struct hapt_arena *arena, struct hapt_staging *staging)
{
    HAPT_NEW(staging->tensor_offset, arena, boundary->count);
    for (int b = 0; b < boundary->count; b++) {
        const int tensor = planner->program->local[boundary->tensor[b]];
        staging->tensor_offset[b] = staging->stride;
        staging->stride += hapt_align(tensor_bytes(planner->program, tensor));
    }
    staging->slots = planner->options->transfer_slots > 0 ? planner->options->transfer_slots : HAPT_TRANSFER_SLOTS;
    staging->offset = reserve(planner, (size_t)staging->slots * staging->stride);
    return HAPT_OK;
}

/* Sets the regions of all tensors, and the offsets of those in the workspace. */
static enum hapt_status walk_chunk(struct planner *planner, struct hapt_arena *scratch)
{
    const struct hapt_program *program = planner->program;
    struct hapt_memory_options options = *planner->options;
    struct hapt_memory_ranges *ranges;
    struct hapt_memory_work *work;
    options.scratch = NULL; /* that of the program itself is added */
    HAPT_TRY(hapt_memory_ranges_create(program->sharding, &options, scratch, &ranges));
    HAPT_TRY(hapt_memory_work_create(ranges, scratch, &work));
    memory_walk(ranges, program->first_op, program->end_op, NULL, work, &planner->walk);
    for (int t = 0; t < program->tensor_count; t++) {
        struct hapt_memory_location *mine = &planner->plan->location[t];
        mine->space = HAPT_SPACE_DEVICE;
        mine->region =
            memory_walk_region(ranges, work, program->sharding->storage[program->tensor[t].tensor], &mine->offset);
    }
    return HAPT_OK;
}

static enum hapt_status begin_chunk(struct planner *planner, struct hapt_arena *arena, struct hapt_arena *scratch)
{
    const struct hapt_program *program = planner->program;
    struct hapt_memory_plan *plan = planner->plan;
    const size_t before = *planner->end;
    HAPT_NEW(plan->location, arena, program->tensor_count);
    HAPT_NEW(plan->parameter_element, arena, program->tensor_count);
    for (int t = 0; t < program->tensor_count; t++) plan->parameter_element[t] = (size_t)-1;
    HAPT_TRY(walk_chunk(planner, scratch));
    HAPT_TRY(reserve_resident(planner, arena, scratch));
    HAPT_ASSERT(*planner->end - before == planner->walk.resident_bytes);
    return HAPT_OK;
}

static enum hapt_status end_chunk(struct planner *planner, struct hapt_arena *arena)
{
    const struct hapt_program *program = planner->program;
    struct hapt_memory_plan *plan = planner->plan;
    for (int t = 0; t < program->tensor_count; t++) {
        plan->location[t].space = plan->location[program->tensor[t].root].space;
        plan->location[t].offset = plan->location[program->tensor[t].root].offset;
    }
    HAPT_TRY(reserve_staging(planner, &program->forward_in, arena, &plan->forward_in));
    HAPT_TRY(reserve_staging(planner, &program->backward_in, arena, &plan->backward_in));
    HAPT_TRY(reserve_staging(planner, &program->backward_out, arena, &plan->backward_out));
    HAPT_ASSERT(plan->forward_in.stride + plan->backward_in.stride + plan->backward_out.stride ==
                planner->walk.activations.transfer_bytes);
    return HAPT_OK;
}

static enum hapt_status plan_all(struct planner *planner, int chunks, struct hapt_arena *arena,
                                 struct hapt_arena *scratch)
{
    for (int k = 0; k < chunks; k++) HAPT_TRY(begin_chunk(&planner[k], arena, scratch));
    reserve_slots(planner, chunks);
    reserve_workspace(planner, chunks);
    for (int k = 0; k < chunks; k++) HAPT_TRY(end_chunk(&planner[k], arena));
    size_t resident = 0, sharded = 0, sharded_host = 0;
    for (int k = 0; k < chunks; k++) {
        resident += planner[k].walk.resident_bytes;
        sharded += planner[k].walk.sharded_bytes;
        sharded_host += planner[k].walk.sharded_host_bytes;
    }
    for (int k = 0; k < chunks; k++) {
        struct hapt_memory_plan *plan = planner[k].plan;
        plan->total_bytes = *planner->end;
        plan->host_bytes = *planner->host_end;
        plan->sharded_host_bytes = sharded_host;
        plan->parameter_bytes = *planner->end - (size_t)plan->slots * plan->activation_bytes -
                                (size_t)plan->weight_slots * plan->weight_slot_bytes;
        plan->sharded_bytes = plan->parameter_bytes - resident + sharded;
    }
    return HAPT_OK;
}

static enum hapt_status plan_chunks(const struct hapt_program *const *program, int chunks,
                                    const struct hapt_memory_options *options, struct hapt_arena *arena,
                                    struct hapt_arena *scratch, struct hapt_memory_plan **plan)
{
    struct planner *planner;
    struct hapt_memory_plan *made;
    size_t end = 0, host_end = 0, host_walked = 0;
    HAPT_NEW(planner, scratch, chunks);
    HAPT_NEW(made, arena, chunks);
    for (int k = 0; k < chunks; k++) {
        made[k].slots = options->slots;
        made[k].weight_slots = options->weight_slots > 0 ? options->weight_slots : 1;
        made[k].state_count = options->state_count;
        planner[k] = (struct planner){
            .program = program[k], .options = options, .plan = &made[k], .end = &end, .host_end = &host_end};
    }
    HAPT_TRY(plan_all(planner, chunks, arena, scratch));
    for (int k = 0; k < chunks; k++) host_walked += planner[k].walk.host_bytes;
    HAPT_ASSERT(host_walked == host_end);
    *plan = made;
    return HAPT_OK;
}

enum hapt_status hapt_memory_plan_chunks(const struct hapt_program *const *program, int chunks,
                                         const struct hapt_memory_options *options, struct hapt_arena *arena,
                                         struct hapt_memory_plan **plan)
{
    HAPT_ASSERT(chunks >= 1 && options->slots >= 1 && options->state_count >= 0 && options->state_count <= 2);
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    const enum hapt_status status = plan_chunks(program, chunks, options, arena, &scratch, plan);
    hapt_arena_release(&scratch);
    return status;
}
