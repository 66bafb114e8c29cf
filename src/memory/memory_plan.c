/* The static memory plan of the chunks of a device: resident blocks, slots, workspace by liveness, transfer slots. */
#include <stdlib.h>

#include "gaps.h"
#include "lifetime.h"

struct planner {
    const struct hapt_program *program;
    const struct hapt_memory_options *options;
    struct hapt_memory_plan *plan;
    struct hapt_lifetime *lifetime[HAPT_SECTION_COUNT];
    size_t *end; /* first free byte of the allocation so far; shared by the chunks */
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

/* Axes over which a gradient is all-reduced in place, once a step. */
static unsigned axes_of(const struct hapt_program *program, int gradient)
{
    unsigned axes = 0;
    if (gradient < 0) return axes;
    for (int s = 0; s < program->step_count[HAPT_SECTION_REDUCE]; s++) {
        const struct hapt_program_step *step = &program->step[HAPT_SECTION_REDUCE][s];
        const struct hapt_op *op = &program->graph->op[step->op];
        const int from = program->tensor[program->local[op->input[0]]].root,
                  to = program->tensor[program->local[op->output[0]]].root;
        if (step->kind == HAPT_COLLECTIVE_ALL_REDUCE && from == to && to == program->tensor[gradient].root)
            axes |= 1u << step->axis;
    }
    return axes;
}

/* The parameter group of every parameter; HAPT_PARAMETER_GROUPS: frozen. */
static void sort_parameters(const struct hapt_program *program, unsigned *group)
{
    for (int t = 0; t < program->tensor_count; t++) {
        const struct hapt_tensor *tensor = whole_tensor(program, t);
        if (tensor->kind != HAPT_TENSOR_PARAMETER) continue;
        const int gradient = tensor->gradient >= 0 ? program->local[tensor->gradient] : -1;
        group[t] = tensor->trainable ? axes_of(program, gradient) : HAPT_PARAMETER_GROUPS;
    }
}

static void number_parameters(const struct hapt_program *program, const unsigned *group, struct hapt_memory_plan *plan,
                              bool *copies)
{
    size_t elements = 0;
    for (unsigned g = 0; g <= HAPT_PARAMETER_GROUPS; g++) {
        size_t decayed_end = elements;
        const size_t first = elements;
        for (int class = 0; class < 3; class ++) {
            for (int t = 0; t < program->tensor_count; t++) {
                const struct hapt_tensor *tensor = whole_tensor(program, t);
                if (tensor->kind != HAPT_TENSOR_PARAMETER || group[t] != g) continue;
                if (hapt_lifetime_parameter_class(tensor) != class) continue;
                plan->parameter_element[t] = elements;
                elements += hapt_lifetime_pad(hapt_lifetime_bytes(program, t) / hapt_dtype_bytes(tensor->dtype));
                *copies = *copies || tensor->dtype != HAPT_F32;
            }
            if (class == 0) decayed_end = elements;
        }
        if (g < HAPT_PARAMETER_GROUPS)
            plan->group[g] =
                (struct hapt_parameter_group){.axes = g, .first = first, .decayed_end = decayed_end, .end = elements};
    }
    plan->trained_elements = plan->group[HAPT_PARAMETER_GROUPS - 1].end;
    plan->elements = elements;
}

/* True for a sum over microbatches that is not yet a trained parameter's gradient. */
static bool is_sum(const struct hapt_program *program, int tensor)
{
    const int of = program->tensor[tensor].tensor;
    return program->tensor[tensor].root == tensor && hapt_lifetime_parameter_gradient(program->graph, of) &&
           program->graph->tensor[program->graph->tensor[of].primal].trainable &&
           !hapt_lifetime_updates(program->graph, of);
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

static enum hapt_status reserve_parameters(struct planner *planner, struct hapt_arena *scratch)
{
    const struct hapt_program *program = planner->program;
    struct hapt_memory_plan *plan = planner->plan;
    bool copies = false;
    unsigned *group;
    HAPT_NEW(group, scratch, program->tensor_count);
    sort_parameters(program, group);
    number_parameters(program, group, plan, &copies);
    plan->master_offset = reserve(planner, plan->elements * sizeof(float));
    plan->copy_offset = copies ? reserve(planner, plan->elements * sizeof(uint16_t)) : (size_t)-1;
    plan->gradient_offset = reserve(planner, plan->trained_elements * sizeof(float));
    for (int t = 0; t < program->tensor_count; t++)
        if (is_sum(program, t)) plan->location[t].offset = reserve(planner, hapt_lifetime_bytes(program, t));
    plan->zeroed_elements = (*planner->end - plan->gradient_offset) / sizeof(float);
    share_state(planner);
    for (int s = 0; s < plan->state_count; s++)
        plan->state_offset[s] = reserve(planner, plan->state_elements * sizeof(float));
    return HAPT_OK;
}

static enum hapt_status reserve_resident(struct planner *planner, struct hapt_arena *scratch)
{
    const struct hapt_program *program = planner->program;
    struct hapt_memory_plan *plan = planner->plan;
    HAPT_TRY(reserve_parameters(planner, scratch));
    for (int t = 0; t < program->tensor_count; t++) {
        if (plan->location[t].region != HAPT_REGION_RESIDENT || program->tensor[t].root != t || is_sum(program, t))
            continue;
        const struct hapt_tensor *tensor = whole_tensor(program, t);
        if (tensor->kind == HAPT_TENSOR_PARAMETER) {
            plan->location[t].offset = plan->master_offset + plan->parameter_element[t] * sizeof(float);
        } else if (hapt_lifetime_updates(program->graph, program->tensor[t].tensor)) {
            const int primal = program->local[tensor->primal];
            plan->location[t].offset = plan->gradient_offset + plan->parameter_element[primal] * sizeof(float);
        } else { /* the loss scale; a frozen weight's gradient, made by the same kernel as its bias's */
            plan->location[t].offset = reserve(planner, hapt_lifetime_bytes(program, t));
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
        *bytes += hapt_align(hapt_lifetime_bytes(program, t));
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

struct event {
    int step;
    int key; /* hapt_sharding.storage: gives tensors the same order in every range */
    int tensor;
};

static int compare_events(const void *a, const void *b)
{
    const struct event *x = a, *y = b;
    if (x->step != y->step) return x->step < y->step ? -1 : 1;
    return x->key < y->key ? -1 : x->key > y->key;
}

/* Sets the offsets of one instruction's workspace tensors, in order of birth; *bytes: the peak. */
static enum hapt_status plan_section(struct planner *planner, enum hapt_section section, struct hapt_arena *scratch,
                                     size_t *bytes)
{
    const struct hapt_program *program = planner->program;
    const struct hapt_lifetime *lifetime = planner->lifetime[section];
    struct event *birth, *death;
    struct hapt_gaps gaps = {0};
    int count = 0, dead = 0;
    HAPT_NEW(birth, scratch, program->tensor_count);
    HAPT_NEW(death, scratch, program->tensor_count);
    HAPT_NEW(gaps.gap, scratch, program->tensor_count + 1);
    for (int t = 0; t < program->tensor_count; t++) {
        if (planner->plan->location[t].region != HAPT_REGION_WORKSPACE || program->tensor[t].root != t) continue;
        if (lifetime[t].last < lifetime[t].first) continue;
        const int key = program->sharding->storage[program->tensor[t].tensor];
        birth[count] = (struct event){lifetime[t].first, key, t};
        death[count++] = (struct event){lifetime[t].last, key, t};
    }
    qsort(birth, (size_t)count, sizeof *birth, compare_events);
    qsort(death, (size_t)count, sizeof *death, compare_events);
    for (int b = 0; b < count; b++) {
        for (; dead < count && death[dead].step < birth[b].step; dead++)
            hapt_gaps_give(&gaps, planner->plan->location[death[dead].tensor].offset,
                           hapt_align(hapt_lifetime_bytes(program, death[dead].tensor)));
        const int tensor = birth[b].tensor;
        planner->plan->location[tensor].offset =
            hapt_gaps_take(&gaps, hapt_align(hapt_lifetime_bytes(program, tensor)));
    }
    *bytes = gaps.end;
    return HAPT_OK;
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
static enum hapt_status reserve_workspace(struct planner *planner, int chunks, struct hapt_arena *scratch)
{
    size_t tensors = 0, kernels = 0;
    for (int k = 0; k < chunks; k++) {
        for (int section = 0; section < HAPT_SECTION_REDUCE; section++) {
            size_t bytes;
            HAPT_TRY(plan_section(&planner[k], section, scratch, &bytes));
            if (bytes > tensors) tensors = bytes;
        }
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
    return HAPT_OK;
}

static enum hapt_status reserve_staging(struct planner *planner, const struct hapt_boundary *boundary,
                                        struct hapt_arena *arena, struct hapt_staging *staging)
{
    HAPT_NEW(staging->tensor_offset, arena, boundary->count);
    for (int b = 0; b < boundary->count; b++) {
        const int tensor = planner->program->local[boundary->tensor[b]];
        staging->tensor_offset[b] = staging->stride;
        staging->stride += hapt_align(hapt_lifetime_bytes(planner->program, tensor));
    }
    staging->slots = planner->options->transfer_slots > 0 ? planner->options->transfer_slots : HAPT_TRANSFER_SLOTS;
    staging->offset = reserve(planner, (size_t)staging->slots * staging->stride);
    return HAPT_OK;
}

static enum hapt_status begin_chunk(struct planner *planner, struct hapt_arena *arena, struct hapt_arena *scratch)
{
    const struct hapt_program *program = planner->program;
    struct hapt_memory_plan *plan = planner->plan;
    enum hapt_region *region;
    HAPT_NEW(region, scratch, program->tensor_count);
    HAPT_NEW(plan->location, arena, program->tensor_count);
    HAPT_NEW(plan->parameter_element, arena, program->tensor_count);
    for (int t = 0; t < program->tensor_count; t++) plan->parameter_element[t] = (size_t)-1;
    HAPT_TRY(hapt_lifetime_derive(program, scratch, region, planner->lifetime));
    plan->state_space = HAPT_SPACE_DEVICE;
    for (int t = 0; t < program->tensor_count; t++)
        plan->location[t] = (struct hapt_memory_location){.space = HAPT_SPACE_DEVICE, .region = region[t]};
    return reserve_resident(planner, scratch);
}

static enum hapt_status end_chunk(struct planner *planner, struct hapt_arena *arena)
{
    const struct hapt_program *program = planner->program;
    struct hapt_memory_plan *plan = planner->plan;
    for (int t = 0; t < program->tensor_count; t++)
        plan->location[t].offset = plan->location[program->tensor[t].root].offset;
    HAPT_TRY(reserve_staging(planner, &program->forward_in, arena, &plan->forward_in));
    HAPT_TRY(reserve_staging(planner, &program->backward_in, arena, &plan->backward_in));
    return reserve_staging(planner, &program->backward_out, arena, &plan->backward_out);
}

static enum hapt_status plan_all(struct planner *planner, int chunks, struct hapt_arena *arena,
                                 struct hapt_arena *scratch)
{
    for (int k = 0; k < chunks; k++) HAPT_TRY(begin_chunk(&planner[k], arena, scratch));
    reserve_slots(planner, chunks);
    HAPT_TRY(reserve_workspace(planner, chunks, scratch));
    for (int k = 0; k < chunks; k++) HAPT_TRY(end_chunk(&planner[k], arena));
    for (int k = 0; k < chunks; k++) {
        struct hapt_memory_plan *plan = planner[k].plan;
        plan->total_bytes = *planner->end;
        plan->parameter_bytes = *planner->end - (size_t)plan->slots * plan->activation_bytes -
                                (size_t)plan->weight_slots * plan->weight_slot_bytes;
    }
    return HAPT_OK;
}

static enum hapt_status plan_chunks(const struct hapt_program *const *program, int chunks,
                                    const struct hapt_memory_options *options, struct hapt_arena *arena,
                                    struct hapt_arena *scratch, struct hapt_memory_plan **plan)
{
    struct planner *planner;
    struct hapt_memory_plan *made;
    size_t end = 0;
    HAPT_NEW(planner, scratch, chunks);
    HAPT_NEW(made, arena, chunks);
    for (int k = 0; k < chunks; k++) {
        made[k].slots = options->slots;
        made[k].weight_slots = options->weight_slots > 0 ? options->weight_slots : 1;
        made[k].state_count = options->state_count;
        planner[k] = (struct planner){.program = program[k], .options = options, .plan = &made[k], .end = &end};
    }
    HAPT_TRY(plan_all(planner, chunks, arena, scratch));
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
