/*
 * Folding: forward operators in their order, each followed by the backward operators that belong to it or to earlier
 * ones, taken from the end of the list. So at any position the steps before it are a prefix of the forward part and a
 * suffix of the backward part.
 */
#include <math.h>
#include <string.h>

#include "synthesis_fold.h"

#define NONE (-1)

struct fold {
    struct problem *problem;
    const struct layouts *const *layouts;
    int *value; /* [tensor] object of its current value; a parameter and its gradient have one object each */
    int (*input)[HAPT_MAX_INPUTS], (*output)[HAPT_MAX_OUTPUTS], (*previous)[HAPT_MAX_OUTPUTS]; /* [op] objects */
    bool *produced; /* [object] by an earlier step, or decided by its first reader */
};

static int object_add(struct fold *fold, enum object_kind kind, int tensor)
{
    struct problem *problem = fold->problem;
    problem->object[problem->object_count] = (struct object){.kind = kind,
                                                             .tensor = tensor,
                                                             .layouts = fold->layouts[tensor],
                                                             .first = NONE,
                                                             .last = NONE,
                                                             .parameter = NONE};
    return problem->object_count++;
}

static int object_of_input(struct fold *fold, int tensor)
{
    if (tensor < 0 || fold->problem->graph->tensor[tensor].kind == HAPT_TENSOR_INPUT) return NONE;
    if (fold->value[tensor] == NONE && fold->problem->graph->tensor[tensor].kind == HAPT_TENSOR_PARAMETER)
        fold->value[tensor] = object_add(fold, OBJECT_PARAMETER, tensor);
    return fold->value[tensor];
}

/* Names values in the order of execution: every write of a gradient makes a new one. */
static void name_values(struct fold *fold)
{
    const struct hapt_graph *graph = fold->problem->graph;
    for (int o = 0; o < fold->problem->sharding->reduce_first; o++) {
        const struct hapt_op *op = &graph->op[o];
        for (int i = 0; i < HAPT_MAX_INPUTS; i++)
            fold->input[o][i] = i < op->input_count ? object_of_input(fold, op->input[i]) : NONE;
        for (int i = 0; i < HAPT_MAX_OUTPUTS; i++) {
            const int tensor = i < op->output_count ? op->output[i] : NONE;
            fold->output[o][i] = fold->previous[o][i] = NONE;
            if (tensor < 0) continue;
            if (hapt_graph_is_parameter_gradient(graph, tensor)) {
                if (fold->value[tensor] == NONE) {
                    const int parameter = object_of_input(fold, graph->tensor[tensor].primal);
                    fold->value[tensor] = object_add(fold, OBJECT_PARAMETER_GRADIENT, tensor);
                    fold->problem->object[fold->value[tensor]].parameter = parameter;
                }
            } else {
                if (op->accumulate >> i & 1u) fold->previous[o][i] = fold->value[tensor];
                fold->value[tensor] =
                    object_add(fold, o < graph->forward_count ? OBJECT_FORWARD : OBJECT_GRADIENT, tensor);
            }
            fold->output[o][i] = fold->value[tensor];
        }
    }
}

static void append(struct fold *fold, int op, bool backward)
{
    struct step *step = &fold->problem->step[fold->problem->step_count++];
    *step = (struct step){.op = op, .backward = backward};
    memcpy(step->input, fold->input[op], sizeof step->input);
    memcpy(step->output, fold->output[op], sizeof step->output);
    memcpy(step->previous, fold->previous[op], sizeof step->previous);
    for (int i = 0; i < HAPT_MAX_INPUTS; i++)
        if (step->input[i] >= 0) fold->produced[step->input[i]] = true;
    for (int o = 0; o < HAPT_MAX_OUTPUTS; o++)
        if (step->output[o] >= 0) fold->produced[step->output[o]] = true;
}

/* A backward operator is ready if the activations and parameters it reads are known. */
static bool is_ready(const struct fold *fold, int op, int unit)
{
    const struct problem *problem = fold->problem;
    if (problem->graph->op[op].forward_op > unit) return false;
    for (int i = 0; i < HAPT_MAX_INPUTS; i++) {
        const int object = fold->input[op][i];
        if (object < 0 || problem->object[object].kind == OBJECT_GRADIENT) continue;
        if (!fold->produced[object]) return false;
    }
    return true;
}

static void order_steps(struct fold *fold)
{
    const struct hapt_graph *graph = fold->problem->graph;
    int tail = fold->problem->sharding->reduce_first;
    for (int o = 0; o < graph->forward_count; o++) {
        append(fold, o, false);
        if (o + 1 < graph->forward_count && graph->op[o + 1].forward_op == graph->op[o].forward_op) continue;
        while (tail > graph->forward_count && is_ready(fold, tail - 1, graph->op[o].forward_op))
            append(fold, --tail, true);
    }
    while (tail > graph->forward_count) append(fold, --tail, true);
}

static void touch(struct problem *problem, int object, int step)
{
    if (object < 0) return;
    if (problem->object[object].first == NONE) problem->object[object].first = step;
    problem->object[object].last = step;
}

/* From the last step backward, marks the last reader of each value: for a gradient among all steps, for an
 * activation among the backward operators of one forward operator. */
static void note_last_readers(struct problem *problem, int *read)
{
    for (int s = problem->step_count - 1; s >= 0; s--) {
        struct step *step = &problem->step[s];
        const int unit = problem->graph->op[step->op].forward_op + 1;
        for (int k = HAPT_MAX_INPUTS + HAPT_MAX_OUTPUTS - 1; k >= 0; k--) {
            const int object = k < HAPT_MAX_INPUTS ? step->input[k] : step->previous[k - HAPT_MAX_INPUTS];
            if (object < 0) continue;
            const bool activation = problem->object[object].kind == OBJECT_FORWARD;
            if (activation ? read[object] != unit : read[object] == 0) step->last_reader |= 1u << k;
            if (step->backward || !activation) read[object] = unit;
            problem->object[object].is_read = true;
        }
    }
}

static enum hapt_status note_lives(struct problem *problem)
{
    int *read, *dying;
    HAPT_NEW(read, problem->arena, problem->object_count);
    HAPT_NEW(dying, problem->arena, problem->object_count);
    for (int s = 0; s < problem->step_count; s++) {
        const struct step *step = &problem->step[s];
        for (int i = 0; i < HAPT_MAX_INPUTS; i++) {
            touch(problem, step->input[i], s);
            if (step->backward && step->input[i] >= 0 && problem->object[step->input[i]].kind == OBJECT_FORWARD)
                problem->object[step->input[i]].tracked = problem->memory_resource;
        }
        for (int o = 0; o < HAPT_MAX_OUTPUTS; o++) {
            touch(problem, step->output[o], s);
            touch(problem, step->previous[o], s);
        }
    }
    for (int k = 0; k < problem->object_count; k++) { /* a parameter's layout is needed when its gradient ends */
        const struct object *gradient = &problem->object[k];
        if (gradient->kind == OBJECT_PARAMETER_GRADIENT && problem->object[gradient->parameter].last < gradient->last)
            problem->object[gradient->parameter].last = gradient->last;
    }
    for (int k = 0; k < problem->object_count; k++)
        if (problem->object[k].last >= 0) problem->step[problem->object[k].last].dying_count++;
    for (int s = 0; s < problem->step_count; s++) {
        problem->step[s].dying = dying;
        dying += problem->step[s].dying_count;
        problem->step[s].dying_count = 0;
    }
    for (int k = 0; k < problem->object_count; k++) {
        if (problem->object[k].last < 0) continue;
        struct step *step = &problem->step[problem->object[k].last];
        step->dying[step->dying_count++] = k;
    }
    note_last_readers(problem, read);
    return HAPT_OK;
}

/* Lists the end-of-step operators, which run after all steps. */
static enum hapt_status list_reduces(struct problem *problem)
{
    const struct hapt_graph *graph = problem->graph;
    const int first = problem->sharding->reduce_first;
    HAPT_NEW(problem->reduce, problem->arena, graph->op_count - first);
    HAPT_NEW(problem->reduced_by, problem->arena, graph->tensor_count);
    HAPT_NEW(problem->written_by, problem->arena, graph->tensor_count);
    for (int t = 0; t < graph->tensor_count; t++) problem->reduced_by[t] = NONE;
    for (int o = 0; o < graph->op_count; o++)
        for (int k = 0; k < graph->op[o].output_count; k++)
            if (graph->op[o].output[k] >= 0) problem->written_by[graph->op[o].output[k]]++;
    for (int o = first; o < graph->op_count; o++) {
        HAPT_ASSERT(graph->op[o].input_count == 1 && graph->op[o].output_count == 1);
        problem->reduced_by[graph->op[o].input[0]] = problem->reduce_count;
        problem->reduce[problem->reduce_count++] = (struct step){.op = o, .backward = true};
    }
    return HAPT_OK;
}

enum hapt_status hapt_fold(struct problem *problem)
{
    const struct hapt_graph *graph = problem->graph;
    struct fold fold = {.problem = problem, .layouts = problem->layouts};
    HAPT_NEW(fold.value, problem->arena, graph->tensor_count);
    HAPT_NEW(fold.input, problem->arena, graph->op_count);
    HAPT_NEW(fold.output, problem->arena, graph->op_count);
    HAPT_NEW(fold.previous, problem->arena, graph->op_count);
    HAPT_NEW(problem->object, problem->arena, graph->tensor_count + graph->op_count * HAPT_MAX_OUTPUTS);
    HAPT_NEW(problem->step, problem->arena, graph->op_count);
    HAPT_NEW(fold.produced, problem->arena, graph->tensor_count + graph->op_count * HAPT_MAX_OUTPUTS);
    for (int t = 0; t < graph->tensor_count; t++) fold.value[t] = NONE;
    name_values(&fold);
    order_steps(&fold);
    HAPT_TRY(list_reduces(problem));
    return note_lives(problem);
}
