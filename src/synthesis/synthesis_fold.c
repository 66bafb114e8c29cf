/*
 * The problem's steps and objects, and how gradients of parameters end.
 *
 * Folding: forward operators in their order, each followed by the backward operators that belong to it or to earlier
 * ones, taken from the end of the list. So at any position the steps before it are a prefix of the forward part and a
 * suffix of the backward part.
 *
 * Ends: the collectives of an outer axis once a step, seen from the inner axis, with the conversions between them.
 */
#include "synthesis_private.h"

#define NONE (-1)

struct fold {
    struct problem *problem;
    int *value; /* [tensor] object of its current value; a parameter and its gradient have one object each */
    int (*input)[HAPT_MAX_INPUTS], (*output)[HAPT_MAX_OUTPUTS], (*previous)[HAPT_MAX_OUTPUTS]; /* [op] objects */
    bool *produced; /* [object] by an earlier step, or decided by its first reader */
};

static int object_add(struct fold *fold, enum object_kind kind, int tensor)
{
    struct problem *problem = fold->problem;
    problem->object[problem->object_count] = (struct object){.kind = kind,
                                                             .tensor = tensor,
                                                             .layouts = problem->layouts[tensor],
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
        for (int k = OPERANDS - 1; k >= 0; k--) {
            const int object = object_at(step, k);
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
        for (int k = 0; k < ALL_OPERANDS; k++) touch(problem, object_at(step, k), s);
        for (int i = 0; i < HAPT_MAX_INPUTS; i++)
            if (step->backward && step->input[i] >= 0 && problem->object[step->input[i]].kind == OBJECT_FORWARD)
                problem->object[step->input[i]].tracked = problem->memory_resource;
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
    struct fold fold = {.problem = problem};
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

/* ---- gradients of parameters at the end of a step ---- */

struct walk { /* the cheapest sequences from one written layout */
    int length, chain[MOST_REDUCES];
    double arrive_s[MOST_REDUCES + 1][MOST_LAYOUTS], need_s[MOST_REDUCES + 1][MOST_LAYOUTS];
    int source[MOST_REDUCES + 1][MOST_LAYOUTS]; /* by need: the layout that it arrived in */
    int choice[MOST_REDUCES][MOST_LAYOUTS];     /* by the next arrival */
};

static int tensor_at(const struct problem *problem, int tensor, const int *chain, int k)
{
    return k == 0 ? tensor : problem->graph->op[problem->reduce[chain[k - 1]].op].output[0];
}

int hapt_ending_tensor(const struct problem *problem, int object, const struct ending_sequence *sequence, int k)
{
    return tensor_at(problem, problem->object[object].tensor, sequence->chain, k);
}

/* Lists the operators that follow a gradient. */
static int list_chain(const struct problem *problem, int tensor, int *chain)
{
    int length = 0;
    for (int r = problem->reduced_by[tensor]; r != NONE; length++) {
        HAPT_ASSERT(length < MOST_REDUCES);
        chain[length] = r;
        r = problem->reduced_by[problem->graph->op[problem->reduce[r].op].output[0]];
    }
    return length;
}

static void convert(const struct layouts *layouts, struct walk *walk, int k)
{
    for (int to = 0; to < layouts->count; to++) {
        walk->need_s[k][to] = walk->arrive_s[k][to];
        walk->source[k][to] = to;
        for (int from = 0; from < layouts->count; from++) {
            const double seconds = walk->arrive_s[k][from] + layouts->convert_s[from][to];
            if (from == to || !(seconds < walk->need_s[k][to])) continue;
            walk->need_s[k][to] = seconds;
            walk->source[k][to] = from;
        }
    }
}

static void walk_from(const struct problem *problem, int tensor, int written, struct walk *walk)
{
    walk->length = list_chain(problem, tensor, walk->chain);
    for (int k = 0; k <= walk->length; k++)
        for (int l = 0; l < MOST_LAYOUTS; l++) walk->arrive_s[k][l] = INFINITY;
    walk->arrive_s[0][written] = 0;
    for (int k = 0; k <= walk->length; k++) {
        convert(problem->layouts[tensor_at(problem, tensor, walk->chain, k)], walk, k);
        if (k == walk->length) break;
        const struct step *step = &problem->reduce[walk->chain[k]];
        for (int c = 0; c < step->choice_count; c++) {
            const int to = step->choice[c].output[0];
            const double seconds =
                walk->need_s[k][step->choice[c].input[0]] + slowest(step->choice[c].compute_s, problem->classes);
            if (!(seconds < walk->arrive_s[k + 1][to])) continue;
            walk->arrive_s[k + 1][to] = seconds;
            walk->choice[k][to] = c;
        }
    }
}

static void trace(const struct problem *problem, const struct walk *walk, int wanted, struct ending_sequence *sequence)
{
    sequence->length = walk->length;
    int layout = walk->source[walk->length][wanted];
    sequence->arrive[walk->length] = layout;
    for (int k = walk->length - 1; k >= 0; k--) {
        sequence->chain[k] = walk->chain[k];
        sequence->choice[k] = walk->choice[k][layout];
        sequence->need[k] = problem->reduce[walk->chain[k]].choice[sequence->choice[k]].input[0];
        sequence->arrive[k] = layout = walk->source[k][sequence->need[k]];
    }
}

void hapt_ending_trace(const struct problem *problem, int object, int written, int wanted,
                       struct ending_sequence *sequence)
{
    struct walk walk;
    walk_from(problem, problem->object[object].tensor, written, &walk);
    trace(problem, &walk, wanted, sequence);
}

static void add_bytes(const struct problem *problem, int tensor, int layout, double *bytes)
{
    for (int j = 0; j < problem->classes; j++) bytes[j] += layout_bytes(problem->layouts[tensor], layout, j);
}

/* All-reduces of this axis and of the outer one work in place. */
static void count_bytes(const struct problem *problem, int tensor, int written, int wanted,
                        const struct ending_sequence *sequence, double *bytes)
{
    add_bytes(problem, tensor, written, bytes);
    for (int k = 0; k <= sequence->length; k++) {
        const int at = tensor_at(problem, tensor, sequence->chain, k),
                  need = k < sequence->length ? sequence->need[k] : wanted;
        if (need != sequence->arrive[k] && !(sequence->arrive[k] == PARTIAL && need == REPLICATED))
            add_bytes(problem, at, need, bytes);
        if (k == sequence->length) break;
        const struct hapt_op *op = &problem->graph->op[problem->reduce[sequence->chain[k]].op];
        const bool sums = hapt_op_type_at(op->type)->collective == HAPT_COLLECTIVE_ALL_REDUCE;
        if (!sums || problem->written_by[op->output[0]] > 1)
            add_bytes(problem, op->output[0], sequence->arrive[k + 1], bytes);
    }
}

static void fill(struct problem *problem, int tensor, struct ending *ending)
{
    const int count = problem->layouts[tensor]->count;
    for (int from = 0; from < MOST_LAYOUTS; from++)
        for (int to = 0; to < MOST_LAYOUTS; to++) ending->seconds[from][to] = INFINITY;
    for (int from = 0; from < count; from++) {
        struct walk walk;
        walk_from(problem, tensor, from, &walk);
        for (int k = 0; k < walk.length; k++)
            problem->joins_parts =
                problem->joins_parts ||
                hapt_op_type_at(problem->graph->op[problem->reduce[walk.chain[k]].op].type)->collective ==
                    HAPT_COLLECTIVE_NONE;
        for (int to = 0; to < count; to++) {
            struct ending_sequence sequence;
            ending->seconds[from][to] = walk.need_s[walk.length][to];
            if (!isfinite(ending->seconds[from][to])) continue;
            trace(problem, &walk, to, &sequence);
            count_bytes(problem, tensor, from, to, &sequence, ending->bytes[from][to]);
        }
    }
}

enum hapt_status hapt_endings_build(struct problem *problem)
{
    struct ending **unique, *made = NULL;
    int count = 0;
    HAPT_NEW(unique, problem->arena, problem->object_count);
    for (int k = 0; k < problem->object_count; k++) {
        struct object *object = &problem->object[k];
        if (object->kind != OBJECT_PARAMETER_GRADIENT) continue;
        if (!made) HAPT_NEW(made, problem->arena, 1);
        memset(made, 0, sizeof *made);
        fill(problem, object->tensor, made);
        for (int u = 0; u < count && !object->ending; u++)
            if (!memcmp(unique[u], made, sizeof *made)) object->ending = unique[u];
        if (object->ending) continue;
        object->ending = unique[count++] = made;
        made = NULL;
    }
    return HAPT_OK;
}
