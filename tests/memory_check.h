/* Brute-force check of a memory plan: compares all pairs of pieces that are alive together. */
#ifndef HAPT_TEST_MEMORY_CHECK_H
#define HAPT_TEST_MEMORY_CHECK_H

#include "memory_lifetime.h"

struct piece {
    const char *name;
    size_t begin, end; /* offsets in the allocation; of a slot's pieces: in slot 0 */
    enum hapt_region region;
    struct lifetime lifetime[HAPT_SECTION_REDUCE]; /* workspace tensors */
};

struct pieces {
    int count;
    struct piece *piece;
};

static enum hapt_status memory_broken(const struct hapt_program *program, const char *what, const char *a,
                                      const char *b)
{
    return hapt_fail(HAPT_ERR_INTERNAL, NULL, "memory plan of operators [%d, %d): %s: %s %s", program->first_op,
                     program->end_op, what, a, b);
}

static void memory_add(struct pieces *pieces, const char *name, size_t begin, size_t bytes, enum hapt_region region)
{
    if (bytes > 0)
        pieces->piece[pieces->count++] =
            (struct piece){.name = name, .begin = begin, .end = begin + bytes, .region = region};
}

static size_t memory_parameter_bytes(const struct hapt_program *program, int tensor)
{
    const struct hapt_tensor *whole = &program->graph->tensor[program->tensor[tensor].tensor];
    return tensor_bytes(program, tensor) / hapt_dtype_bytes(whole->dtype) * sizeof(float);
}

/* True if each rank has the masters of what it updates alone: the state is sharded or on the host, and kernels read
 * compute copies of all trained parameters. */
static bool memory_masters_like_state(const struct hapt_memory_plan *plan, const struct hapt_program *program)
{
    bool trained = false;
    if (hapt_memory_has_places(plan)) return true;
    if (!plan->sharded_state && plan->state_space != HAPT_SPACE_HOST) return false;
    for (int t = 0; t < program->tensor_count; t++) {
        const struct hapt_tensor *whole = &program->graph->tensor[program->tensor[t].tensor];
        if (whole->kind != HAPT_TENSOR_PARAMETER || !whole->trainable) continue;
        if (whole->dtype == HAPT_F32) return false;
        trained = true;
    }
    return trained;
}

/* Adds what a parameter occupies besides its own memory: compute copy, optimizer state, a master that is like one. */
static void memory_add_parameter(const struct hapt_memory_plan *plan, const struct hapt_program *program, int tensor,
                                 struct pieces *pieces)
{
    const struct hapt_tensor *whole = &program->graph->tensor[program->tensor[tensor].tensor];
    const size_t element = plan->parameter_element[tensor], bytes = memory_parameter_bytes(program, tensor);
    const bool copies = plan->copy_offset != (size_t)-1;
    if (copies && !hapt_memory_has_places(plan))
        memory_add(pieces, whole->name, plan->copy_offset + element * sizeof(uint16_t), bytes / 2,
                   HAPT_REGION_RESIDENT);
    if (!whole->trainable) return;
    for (int g = 0; g < HAPT_PARAMETER_GROUPS; g++) {
        const struct hapt_parameter_group *group = &plan->group[g];
        const size_t from = element > group->slice_first ? element : group->slice_first,
                     last = element + bytes / sizeof(float);
        const size_t end = last < group->slice_end ? last : group->slice_end;
        if (element < group->first || element >= group->end || from >= end) continue;
        const int first = memory_masters_like_state(plan, program) ? -1 : 0;
        for (int s = first; s < plan->state_count && plan->state_space == HAPT_SPACE_DEVICE; s++)
            memory_add(pieces, whole->name,
                       (s < 0 ? plan->master_offset : plan->state_offset[s]) +
                           (group->state_first + from - group->slice_first) * sizeof(float),
                       (end - from) * sizeof(float), HAPT_REGION_RESIDENT);
        if (copies && plan->sharded_weights)
            memory_add(pieces, whole->name,
                       plan->copy_offset + (group->state_first + from - group->slice_first) * sizeof(uint16_t),
                       (end - from) * sizeof(uint16_t), HAPT_REGION_RESIDENT);
    }
}

static void memory_add_tensor(const struct hapt_memory_plan *plan, const struct hapt_program *program, int tensor,
                              struct lifetime *const *lifetime, struct pieces *pieces)
{
    const struct hapt_tensor *whole = &program->graph->tensor[program->tensor[tensor].tensor];
    size_t bytes = tensor_bytes(program, tensor), begin = plan->location[tensor].offset;
    const enum hapt_region region = plan->location[tensor].region;
    if (whole->kind == HAPT_TENSOR_PARAMETER) bytes = memory_parameter_bytes(program, tensor);
    if (region == HAPT_REGION_SLOT) begin += plan->slot_offset;
    if (region == HAPT_REGION_WEIGHT_SLOT) begin += plan->weight_slot_offset;
    if (region == HAPT_REGION_WORKSPACE) begin += plan->workspace_offset;
    const int before = pieces->count;
    const bool copy = whole->kind == HAPT_TENSOR_PARAMETER && whole->trainable &&
                      memory_masters_like_state(plan, program); /* the program's parameter is added as a compute copy */
    const bool away =
        plan->host_gradients && hapt_graph_is_parameter_gradient(program->graph, program->tensor[tensor].tensor);
    if (!copy && !away) memory_add(pieces, whole->name, begin, bytes, region);
    if (region == HAPT_REGION_WORKSPACE && pieces->count > before)
        for (int section = 0; section < HAPT_SECTION_REDUCE; section++)
            pieces->piece[before].lifetime[section] = lifetime[section][tensor];
    if (whole->kind == HAPT_TENSOR_PARAMETER) memory_add_parameter(plan, program, tensor, pieces);
}

static void memory_add_staging(const struct hapt_program *program, const struct hapt_boundary *boundary,
                               const struct hapt_staging *staging, struct pieces *pieces)
{
    for (int k = 0; k < staging->slots; k++)
        for (int b = 0; b < boundary->count; b++)
            memory_add(pieces, "transfer slot",
                       staging->offset + (size_t)k * staging->stride + staging->tensor_offset[b],
                       tensor_bytes(program, program->local[boundary->tensor[b]]), HAPT_REGION_NONE);
}

static bool memory_together(const struct piece *a, const struct piece *b)
{
    if (a->region != HAPT_REGION_WORKSPACE || b->region != HAPT_REGION_WORKSPACE) return true;
    for (int section = 0; section < HAPT_SECTION_REDUCE; section++) {
        const struct lifetime x = a->lifetime[section], y = b->lifetime[section];
        if (x.first <= x.last && y.first <= y.last && x.first <= y.last && y.first <= x.last) return true;
    }
    return false;
}

static bool memory_inside(const struct hapt_memory_plan *plan, const struct piece *piece)
{
    if (piece->begin % 64 != 0 || piece->end > plan->total_bytes) return false;
    if (piece->region == HAPT_REGION_SLOT)
        return piece->begin >= plan->slot_offset && piece->end <= plan->slot_offset + plan->activation_bytes;
    if (piece->region == HAPT_REGION_WEIGHT_SLOT)
        return piece->begin >= plan->weight_slot_offset &&
               piece->end <= plan->weight_slot_offset + plan->weight_slot_bytes;
    if (piece->region == HAPT_REGION_WORKSPACE)
        return piece->begin >= plan->workspace_offset && piece->end <= plan->scratch_offset;
    if (piece->region == HAPT_REGION_RESIDENT) return piece->end <= plan->slot_offset;
    const size_t slots_end = plan->slot_offset + (size_t)plan->slots * plan->activation_bytes;
    return piece->begin >= slots_end + (size_t)plan->weight_slots * plan->weight_slot_bytes;
}

/* Regions and offsets against those that follow from the program's steps: the workspace is laid out by best fit, in
 * order of birth. *peak: of the largest section. */
static enum hapt_status memory_compare_tensors(const struct hapt_memory_plan *plan, const struct hapt_program *program,
                                               struct hapt_arena *scratch, struct lifetime **lifetime, size_t *peak)
{
    enum hapt_region *region;
    size_t *offset;
    HAPT_NEW(region, scratch, program->tensor_count);
    HAPT_NEW(offset, scratch, program->tensor_count);
    HAPT_TRY(lifetime_derive(program, scratch, region, lifetime));
    *peak = 0;
    for (int section = 0; section < HAPT_SECTION_REDUCE; section++) {
        size_t bytes;
        HAPT_TRY(lifetime_lay_out(program, region, lifetime[section], scratch, offset, &bytes));
        if (bytes > *peak) *peak = bytes;
    }
    for (int t = 0; t < program->tensor_count; t++) {
        const char *name = program->graph->tensor[program->tensor[t].tensor].name;
        const int root = program->tensor[t].root;
        const bool weight = program->graph->tensor[program->tensor[t].tensor].kind == HAPT_TENSOR_PARAMETER;
        const bool gradient = hapt_graph_is_parameter_gradient(program->graph, program->tensor[t].tensor);
        if ((plan->location[t].space == HAPT_SPACE_HOST) !=
            ((weight && plan->host_weights) || (gradient && plan->host_gradients)))
            return memory_broken(program, "in the wrong memory", name, "");
        if (weight && plan->sharded_weights) region[t] = HAPT_REGION_NONE;
        if (plan->location[t].region != region[t]) return memory_broken(program, "wrong region", name, "");
        if (plan->location[t].offset != plan->location[root].offset)
            return memory_broken(program, "its offset differs from its root's", name, "");
        if (region[t] == HAPT_REGION_WORKSPACE && plan->location[t].offset != offset[root])
            return memory_broken(program, "wrong offset", name, "");
    }
    if (plan->workspace_bytes - plan->scratch_bytes < *peak)
        return memory_broken(program, "too little workspace", "", "");
    return HAPT_OK;
}

/* Weights on the host, or sharded: each unit's place has all that its operators read, and no more than the largest
 * needs. */
static enum hapt_status memory_compare_units(const struct hapt_memory_plan *plan, const struct hapt_program *program,
                                             struct pieces *pieces)
{
    size_t most = 0;
    int behind = program->first_op;
    if (!hapt_memory_has_places(plan)) return HAPT_OK;
    for (int section = 0; section < HAPT_SECTION_REDUCE; section++)
        for (int s = 0; s < program->step_count[section]; s++) {
            const struct hapt_op *op = &program->graph->op[program->step[section][s].op];
            bool reads = false, covered = false;
            for (int i = 0; i < op->input_count; i++)
                reads |= op->input[i] >= 0 && program->graph->tensor[op->input[i]].kind == HAPT_TENSOR_PARAMETER;
            for (int u = 0; u < plan->unit_count; u++)
                covered |= op->forward_op >= plan->unit[u].first_op && op->forward_op < plan->unit[u].end_op;
            if (reads && !covered) return memory_broken(program, "no unit has the weights of", op->name, "");
        }
    const size_t size = plan->copy_offset == (size_t)-1 ? sizeof(float) : sizeof(uint16_t);
    for (int u = 0; u < plan->unit_count; u++) {
        const struct hapt_weight_unit *unit = &plan->unit[u];
        int found = 0;
        size_t end = 0;
        if (unit->end_op <= behind || unit->count == 0) return memory_broken(program, "units", "not in order", "");
        behind = unit->end_op;
        for (int k = 0; k < unit->count; k++) {
            const struct hapt_unit_weight *weight = &unit->weight[k];
            const struct hapt_tensor *whole = &program->graph->tensor[program->tensor[weight->parameter].tensor];
            if (weight->element < end || weight->element * size % 64 != 0)
                return memory_broken(program, "weights overlap in a place", whole->name, "");
            end = weight->element + (memory_parameter_bytes(program, weight->parameter) / sizeof(float) + 31) / 32 * 32;
        }
        if (end * size > plan->place_bytes) return memory_broken(program, "a unit is larger than its place", "", "");
        if (end * size > most) most = end * size;
        for (int t = 0; t < program->tensor_count; t++) {
            bool reads = false, there = false;
            for (int section = 0; section < HAPT_SECTION_REDUCE; section++)
                for (int s = 0; s < program->step_count[section]; s++) {
                    const struct hapt_op *op = &program->graph->op[program->step[section][s].op];
                    for (int i = 0; i < op->input_count; i++)
                        reads |= op->input[i] == program->tensor[t].tensor && op->forward_op >= unit->first_op &&
                                 op->forward_op < unit->end_op;
                }
            if (program->graph->tensor[program->tensor[t].tensor].kind != HAPT_TENSOR_PARAMETER) continue;
            for (int k = 0; k < unit->count; k++) there |= unit->weight[k].parameter == t;
            if (reads != there) return memory_broken(program, "a unit lacks a weight, or has one too many", "", "");
            found += there;
        }
        if (found != unit->count) return memory_broken(program, "a weight is twice in a unit", "", "");
    }
    if (plan->place_bytes != hapt_align(most)) return memory_broken(program, "places of the wrong size", "", "");
    if (plan->gradient_place_bytes != (plan->host_gradients ? hapt_align(most / size * sizeof(float)) : 0))
        return memory_broken(program, "places for gradients of the wrong size", "", "");
    memory_add(pieces, "gradient places", plan->gradient_place_offset,
               HAPT_GRADIENT_PLACES * plan->gradient_place_bytes, HAPT_REGION_RESIDENT);
    memory_add(pieces, "weight places", plan->place_offset, HAPT_WEIGHT_PLACES * plan->place_bytes,
               HAPT_REGION_RESIDENT);
    if (size == sizeof(uint16_t) && plan->host_weights)
        memory_add(pieces, "window of copies", plan->copy_offset,
                   (plan->host_update ? 0 : plan->window_elements) * size, HAPT_REGION_RESIDENT);
    return HAPT_OK;
}

/* Optimizer state on the host: windows on the device, and blocks on the host that do not overlap. */
static enum hapt_status memory_compare_state(const struct hapt_memory_plan *plan, const struct hapt_program *program,
                                             struct pieces *pieces)
{
    const bool copies = plan->host_weights && plan->copy_offset != (size_t)-1;
    if (plan->state_space == HAPT_SPACE_DEVICE)
        return plan->host_bytes == 0 ? HAPT_OK : memory_broken(program, "host memory for nothing", "", "");
    if ((plan->window_elements == 0) != (plan->state_elements == 0) || plan->window_elements > plan->state_elements)
        return memory_broken(program, "an impossible window", "", "");
    size_t place[8], size[8];
    int blocks = 0;
    if (plan->host_gradients) {
        if (!plan->host_weights || !plan->host_update || plan->zeroed_elements > 0)
            return memory_broken(program, "gradients on the host alone", "", "");
        size[blocks] = hapt_align(plan->trained_elements * sizeof(float));
        place[blocks++] = plan->host_gradient_offset;
    }
    for (int w = 0; w < 3 && plan->host_update; w++) {
        const bool there = w == 0 ? !plan->host_gradients
                                  : (w == 1 ? plan->master_space == HAPT_SPACE_DEVICE
                                            : plan->copy_offset != (size_t)-1 && !plan->host_weights);
        size[blocks] = there ? hapt_align(plan->window_elements * (w == 2 ? sizeof(uint16_t) : sizeof(float))) : 0;
        place[blocks++] = plan->host_window_offset[w];
    }
    for (int s = copies ? -2 : plan->master_space == HAPT_SPACE_HOST ? -1 : 0; s < plan->state_count; s++) {
        if (s > -2)
            memory_add(pieces, "state window", s < 0 ? plan->master_offset : plan->state_offset[s],
                       (plan->host_update ? 0 : plan->window_elements) * sizeof(float), HAPT_REGION_RESIDENT);
        size[blocks] = hapt_align(plan->state_elements * (s == -2 ? sizeof(uint16_t) : sizeof(float)));
        place[blocks] = s == -2   ? plan->host_copy_offset
                        : s == -1 ? plan->host_master_offset
                                  : plan->host_state_offset[s];
        blocks++;
    }
    for (int a = 0; a < blocks; a++) {
        if (place[a] % 64 != 0 || place[a] + size[a] > plan->host_bytes)
            return memory_broken(program, "state outside the host's memory", "", "");
        for (int b = 0; b < a; b++)
            if (size[a] > 0 && size[b] > 0 && place[b] + size[b] > place[a] && place[a] + size[a] > place[b])
                return memory_broken(program, "states overlap on the host", "", "");
    }
    return HAPT_OK;
}

static enum hapt_status memory_compare(const struct hapt_memory_plan *plan, const struct hapt_program *program,
                                       struct hapt_arena *scratch)
{
    struct lifetime *lifetime[HAPT_SECTION_COUNT] = {NULL};
    struct pieces pieces = {0};
    size_t peak;
    const int boundaries = program->forward_in.count + program->backward_in.count + program->backward_out.count;
    HAPT_NEW(pieces.piece, scratch, 4 * program->tensor_count + plan->forward_in.slots * boundaries + 7);
    HAPT_TRY(memory_compare_tensors(plan, program, scratch, lifetime, &peak));
    for (int t = 0; t < program->tensor_count; t++)
        if (program->tensor[t].root == t) memory_add_tensor(plan, program, t, lifetime, &pieces);
    memory_add_staging(program, &program->forward_in, &plan->forward_in, &pieces);
    memory_add_staging(program, &program->backward_in, &plan->backward_in, &pieces);
    memory_add_staging(program, &program->backward_out, &plan->backward_out, &pieces);
    HAPT_TRY(memory_compare_state(plan, program, &pieces));
    HAPT_TRY(memory_compare_units(plan, program, &pieces));
    memory_add(&pieces, "kernel scratch", plan->scratch_offset, plan->scratch_bytes, HAPT_REGION_NONE);
    for (int a = 0; a < pieces.count; a++) {
        if (!memory_inside(plan, &pieces.piece[a]))
            return memory_broken(program, "outside its region", pieces.piece[a].name, "");
        for (int b = 0; b < a; b++)
            if (pieces.piece[a].begin < pieces.piece[b].end && pieces.piece[b].begin < pieces.piece[a].end &&
                memory_together(&pieces.piece[a], &pieces.piece[b]))
                return memory_broken(program, "overlap", pieces.piece[a].name, pieces.piece[b].name);
    }
    if (plan->total_bytes != plan->parameter_bytes + (size_t)plan->slots * plan->activation_bytes +
                                 (size_t)plan->weight_slots * plan->weight_slot_bytes)
        return memory_broken(program, "the total differs from the sum of its parts", "", "");
    return HAPT_OK;
}

/* HAPT_ERR_INTERNAL if two live tensors overlap, or a tensor lies outside its region or not on the device. */
static enum hapt_status memory_check(const struct hapt_memory_plan *plan, const struct hapt_program *program)
{
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    const enum hapt_status status = memory_compare(plan, program, &scratch);
    hapt_arena_release(&scratch);
    return status;
}

#endif
