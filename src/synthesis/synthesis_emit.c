/* Turns decisions into instructions, in the order of execution; slices of replicated tensors are inserted at their
 * first read. */
#include <string.h>

#include "synthesis_private.h"

/* The versions of a tensor and their visibility. Versions of the forward part are visible to the operators of their
 * maker and of later forward operators. Backward versions of an activation, and slices of parameters, are visible to
 * the operators of one forward operator. After a border that converts the tensor, the forward part continues from the
 * version made at the border, as in the search. A version read there is made before its first reader, where that
 * reader's backward operators see it too. */
struct versions {
    layout_set made, local;
    int maker[MOST_LAYOUTS], local_unit; /* first forward operator that makes it */
    bool converted;                      /* at a border */
    layout_set since, waiting;           /* made after the last such border; made at it and not read so far */
};

struct emission {
    const struct problem *problem;
    const struct chosen *chosen;
    struct hapt_axis_program *program;
    int capacity;
    struct versions *made; /* [tensor] */
    int unit;              /* forward operator of the current step */
    bool backward;
    int *written;   /* [object] layout in which a parameter's gradient was written + 1 */
    int *border_of; /* [step] first border communication after it */
    struct hapt_arena *arena;
};

static enum hapt_status put(struct emission *emission, struct hapt_axis_instruction instruction)
{
    struct hapt_axis_program *program = emission->program;
    if (program->count == emission->capacity) {
        struct hapt_axis_instruction *grown;
        const int capacity = emission->capacity ? 2 * emission->capacity : 256;
        HAPT_NEW(grown, emission->arena, capacity);
        if (program->count) memcpy(grown, program->instruction, (size_t)program->count * sizeof *grown);
        program->instruction = grown;
        emission->capacity = capacity;
    }
    program->instruction[program->count++] = instruction;
    return HAPT_OK;
}

static layout_set seen(struct emission *emission, int tensor)
{
    struct versions *versions = &emission->made[tensor];
    const enum hapt_tensor_kind kind = emission->problem->graph->tensor[tensor].kind;
    layout_set set = versions->made;
    if (kind == HAPT_TENSOR_GRADIENT) return set;
    if (versions->converted && !emission->backward) return versions->since | versions->waiting;
    if (versions->local_unit != emission->unit) versions->local = 0;
    for (int l = 0; l < MOST_LAYOUTS; l++)
        if (versions->maker[l] > emission->unit) set &= (layout_set) ~(1u << l);
    return set | versions->local | versions->waiting;
}

static void note_version(struct emission *emission, int tensor, int layout)
{
    struct versions *versions = &emission->made[tensor];
    const enum hapt_tensor_kind kind = emission->problem->graph->tensor[tensor].kind;
    if (kind == HAPT_TENSOR_GRADIENT || (kind == HAPT_TENSOR_ACTIVATION && !emission->backward)) {
        if (!(versions->made >> layout & 1u)) versions->maker[layout] = emission->unit;
        versions->made |= (layout_set)(1u << layout);
        versions->since |= (layout_set)(1u << layout);
        return;
    }
    if (versions->local_unit != emission->unit) versions->local = 0;
    versions->local_unit = emission->unit;
    versions->local |= (layout_set)(1u << layout);
}

static void set_version(struct emission *emission, int tensor, int layout)
{
    emission->made[tensor] = (struct versions){.made = (layout_set)(1u << layout), .local_unit = -1};
    emission->made[tensor].maker[layout] =
        emission->problem->graph->tensor[tensor].kind == HAPT_TENSOR_PARAMETER ? 0 : emission->unit;
}

static enum hapt_status put_conversion(struct emission *emission, int tensor, int from, int to)
{
    const struct layouts *layouts = emission->problem->layouts[tensor];
    note_version(emission, tensor, to);
    return put(emission, (struct hapt_axis_instruction){.op = -1,
                                                        .tensor = tensor,
                                                        .kind = layouts->convert_kind[from][to],
                                                        .from = layouts->property[from],
                                                        .to = layouts->property[to]});
}

static void read_version(struct emission *emission, int tensor, int layout)
{
    struct versions *versions = &emission->made[tensor];
    if (!(versions->waiting >> layout & 1u)) return;
    versions->waiting &= (layout_set) ~(1u << layout);
    note_version(emission, tensor, layout);
}

/* Ensures that a version exists if the replicated tensor does. */
static enum hapt_status put_slice(struct emission *emission, int tensor, int layout)
{
    const layout_set set = seen(emission, tensor);
    read_version(emission, tensor, layout);
    if (set >> layout & 1u) return HAPT_OK;
    if (!(set >> REPLICATED & 1u))
        return hapt_fail(HAPT_ERR_INTERNAL, NULL, "synthesis lost a version of %s",
                         emission->problem->graph->tensor[tensor].name);
    read_version(emission, tensor, REPLICATED);
    return put_conversion(emission, tensor, REPLICATED, layout);
}

static enum hapt_status put_converted(struct emission *emission, int tensor, int from, int to)
{
    const bool there = seen(emission, tensor) >> to & 1u; /* a segment's end may have made it already */
    HAPT_TRY(put_slice(emission, tensor, there ? to : from));
    return there ? HAPT_OK : put_conversion(emission, tensor, from, to);
}

/* Communications after the operator: an output is converted from the layout it is made in to the wanted one. */
static enum hapt_status put_after(struct emission *emission, const struct step *step, const struct decision *decision)
{
    for (int m = 0; m < decision->conversion_count; m++) {
        const struct conversion *conversion = &decision->conversion[m];
        const int o = conversion->operand - HAPT_MAX_INPUTS - HAPT_MAX_OUTPUTS;
        if (o < 0) continue;
        const int tensor = emission->problem->object[step->output[o % HAPT_MAX_OUTPUTS]].tensor;
        HAPT_TRY(put_conversion(emission, tensor, conversion->from, conversion->to));
        if (o < HAPT_MAX_OUTPUTS)
            set_version(emission, tensor, conversion->to); /* the partial sums are not read again */
    }
    return HAPT_OK;
}

static enum hapt_status put_step(struct emission *emission, int index)
{
    const struct problem *problem = emission->problem;
    const struct step *step = &problem->step[index];
    const struct decision *decision = &emission->chosen->decision[index];
    const struct choice *choice = &step->choice[decision->choice];
    int output_layout[HAPT_MAX_OUTPUTS];
    emission->unit = problem->graph->op[step->op].forward_op;
    emission->backward = step->backward;
    for (int o = 0; o < HAPT_MAX_OUTPUTS; o++) output_layout[o] = choice->output[o];
    for (int m = 0; m < decision->conversion_count; m++) {
        const struct conversion *conversion = &decision->conversion[m];
        if (conversion->operand >= HAPT_MAX_INPUTS + HAPT_MAX_OUTPUTS) {
            if (conversion->operand < HAPT_MAX_INPUTS + 2 * HAPT_MAX_OUTPUTS)
                output_layout[conversion->operand - HAPT_MAX_INPUTS - HAPT_MAX_OUTPUTS] = conversion->to;
            continue;
        }
        const int object = conversion->operand < HAPT_MAX_INPUTS
                               ? step->input[conversion->operand]
                               : step->previous[conversion->operand - HAPT_MAX_INPUTS];
        HAPT_TRY(put_converted(emission, problem->object[object].tensor, conversion->from, conversion->to));
    }
    for (int i = 0; i < HAPT_MAX_INPUTS; i++) {
        if (step->input[i] < 0) continue;
        const struct object *object = &problem->object[step->input[i]];
        if (object->kind == OBJECT_PARAMETER && !emission->made[object->tensor].made)
            set_version(emission, object->tensor, choice->input[i]);
        HAPT_TRY(put_slice(emission, object->tensor, choice->input[i]));
    }
    for (int o = 0; o < HAPT_MAX_OUTPUTS; o++) {
        if (step->output[o] < 0) continue;
        const struct object *object = &problem->object[step->output[o]];
        if (step->previous[o] >= 0) HAPT_TRY(put_slice(emission, object->tensor, output_layout[o]));
        if (object->kind == OBJECT_PARAMETER_GRADIENT) emission->written[step->output[o]] = choice->output[o] + 1;
        set_version(emission, object->tensor, choice->output[o]);
    }
    HAPT_TRY(put(emission, (struct hapt_axis_instruction){.op = step->op, .cut = choice->rule->cut, .tensor = -1}));
    return put_after(emission, step, decision);
}

/* Border communications after a step: of activations in the forward part, of gradients in the backward part. */
static enum hapt_status put_borders(struct emission *emission, int step, bool backward)
{
    const struct chosen *chosen = emission->chosen;
    for (int b = emission->border_of[step]; b < chosen->border_count && chosen->border[b].step == step; b++) {
        const struct object *object = &emission->problem->object[chosen->border[b].object];
        if ((object->kind == OBJECT_GRADIENT) != backward) continue;
        struct versions *versions = &emission->made[object->tensor];
        const struct layouts *layouts = emission->problem->layouts[object->tensor];
        const int from = chosen->border[b].from, to = chosen->border[b].to;
        if (backward) HAPT_TRY(put_converted(emission, object->tensor, from, to));
        if (backward || seen(emission, object->tensor) >> to & 1u) continue;
        if (!(versions->waiting >> from & 1u)) HAPT_TRY(put_slice(emission, object->tensor, from));
        HAPT_TRY(put(emission, (struct hapt_axis_instruction){.op = -1,
                                                              .tensor = object->tensor,
                                                              .kind = layouts->convert_kind[from][to],
                                                              .from = layouts->property[from],
                                                              .to = layouts->property[to]}));
        versions->converted = true;
        versions->since = 0;
        versions->waiting = (layout_set)(1u << to);
    }
    return HAPT_OK;
}

/* ---- once a step ---- */

static int layout_of_parameter(const struct emission *emission, int gradient)
{
    const struct problem *problem = emission->problem;
    const layout_set made = emission->made[problem->object[problem->object[gradient].parameter].tensor].made;
    int layout = 0;
    while (!(made >> layout & 1u)) layout++;
    return layout;
}

/* An operator of an outer axis at the end of a step, with the conversions of its input. */
struct reduction {
    int object, position;
};

static enum hapt_status put_reduction(struct emission *emission, int index, const struct reduction *reduction)
{
    const struct problem *problem = emission->problem;
    const struct step *step = &problem->reduce[index];
    const int written = emission->written[reduction->object] - 1, k = reduction->position;
    struct ending_sequence sequence;
    hapt_ending_trace(problem, reduction->object, written, layout_of_parameter(emission, reduction->object), &sequence);
    if (sequence.arrive[k] != sequence.need[k])
        HAPT_TRY(put_conversion(emission, hapt_ending_tensor(problem, reduction->object, &sequence, k),
                                sequence.arrive[k], sequence.need[k]));
    return put(emission, (struct hapt_axis_instruction){
                             .op = step->op, .cut = step->choice[sequence.choice[k]].rule->cut, .tensor = -1});
}

/* All of them in order; then every gradient to its parameter's layout, once for all parts in one layout. */
static enum hapt_status put_end(struct emission *emission)
{
    const struct problem *problem = emission->problem;
    struct reduction *reduction;
    layout_set *ended; /* [tensor] */
    struct ending_sequence sequence;
    HAPT_NEW(reduction, problem->arena, problem->reduce_count);
    HAPT_NEW(ended, problem->arena, problem->graph->tensor_count);
    for (int r = 0; r < problem->reduce_count; r++) reduction[r].object = -1;
    for (int k = 0; k < problem->object_count; k++) {
        if (problem->object[k].kind != OBJECT_PARAMETER_GRADIENT || !emission->written[k]) continue;
        hapt_ending_trace(problem, k, emission->written[k] - 1, layout_of_parameter(emission, k), &sequence);
        for (int c = 0; c < sequence.length; c++) reduction[sequence.chain[c]] = (struct reduction){k, c};
    }
    for (int r = 0; r < problem->reduce_count; r++) {
        HAPT_ASSERT(reduction[r].object >= 0);
        HAPT_TRY(put_reduction(emission, r, &reduction[r]));
    }
    for (int k = 0; k < problem->object_count; k++) {
        if (problem->object[k].kind != OBJECT_PARAMETER_GRADIENT || !emission->written[k]) continue;
        const int layout = layout_of_parameter(emission, k);
        hapt_ending_trace(problem, k, emission->written[k] - 1, layout, &sequence);
        const int tensor = hapt_ending_tensor(problem, k, &sequence, sequence.length),
                  from = sequence.arrive[sequence.length];
        if (from != layout && !(ended[tensor] >> from & 1u)) HAPT_TRY(put_conversion(emission, tensor, from, layout));
        ended[tensor] |= (layout_set)(1u << from);
    }
    return HAPT_OK;
}

enum hapt_status hapt_program_emit(const struct problem *problem, const struct chosen *chosen, struct hapt_arena *arena,
                                   struct hapt_axis_program *program)
{
    struct emission emission = {.problem = problem, .chosen = chosen, .program = program, .arena = arena};
    *program = (struct hapt_axis_program){0};
    HAPT_NEW(emission.made, problem->arena, problem->graph->tensor_count);
    HAPT_NEW(emission.written, problem->arena, problem->object_count);
    HAPT_NEW(emission.border_of, problem->arena, problem->step_count);
    for (int s = 0; s < problem->step_count; s++) emission.border_of[s] = chosen->border_count;
    for (int t = 0; t < problem->graph->tensor_count; t++) emission.made[t].local_unit = -1;
    for (int b = chosen->border_count - 1; b >= 0; b--) emission.border_of[chosen->border[b].step] = b;
    for (int s = 0; s < problem->step_count; s++) {
        if (!problem->step[s].backward) HAPT_TRY(put_step(&emission, s));
        HAPT_TRY(put_borders(&emission, s, false));
    }
    for (int s = problem->step_count - 1; s >= 0; s--) {
        HAPT_TRY(put_borders(&emission, s, true));
        if (problem->step[s].backward) HAPT_TRY(put_step(&emission, s));
    }
    return put_end(&emission);
}
