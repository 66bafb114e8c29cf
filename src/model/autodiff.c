/*
 * Reverse-mode differentiation on the graph.
 *
 * Forward operators are visited last to first; each appends its backward operators (rules in ops_*.c). So backward
 * operators are in reverse forward order. For any boundaries between stages, the backward lists of stages n-1, ..., 0
 * one after the other have this same order. When a forward operator is visited, all readers of its outputs have been
 * visited: their gradients are complete.
 *
 * Sharing. For y = a + b the gradients of a and b both start as G, the gradient of y. Sharing the tensor G saves a
 * copy, and one gradient serves an entire residual stream. Readers of a before the addition then add their part of a's
 * gradient to G, and the operator that produced b reads G as b's gradient. This is safe if each such addition comes
 * after every read of G as another activation's gradient. A gradient of v is read only by the backward operators of v's
 * producer, and written only by those of v's readers. Backward order is reversed forward order. So the condition is,
 * for every two different activations u, v that share G and whose producers are not visited yet:
 *
 *     every reader of u that is not visited yet stands strictly before the producer of v.
 *
 * Strictly: a producer of v that also reads u would add to the tensor that it is reading. Activations whose producers
 * are visited no longer matter, because their gradient has been read (an addition reads its gradient by sharing it,
 * when it is visited). The condition depends only on the operator order, so it holds for every split of the graph into
 * stages: operators run in the same order, and each stage works on its own copy of G and sends it to the next stage
 * that uses it.
 */
#include "autodiff.h"

#include <string.h>

#include "graph_parts.h"

bool hapt_gradient_needed(const struct hapt_graph *graph, int tensor)
{
    return tensor >= 0 && graph->tensor[tensor].gradient != -1;
}

int hapt_gradient_incoming(const struct hapt_graph *graph, int op)
{
    return graph->tensor[graph->op[op].output[0]].gradient;
}

static enum hapt_status gradient_create(struct hapt_graph *graph, int primal, int writer, int *index)
{
    const struct hapt_tensor *of = &graph->tensor[primal];
    struct hapt_tensor gradient = {.kind = HAPT_TENSOR_GRADIENT,
                                   .dtype = of->dtype,
                                   .dims = of->dims,
                                   .producer = writer,
                                   .gradient = -1,
                                   .primal = primal};
    memcpy(gradient.shape, of->shape, sizeof gradient.shape);
    if (of->kind == HAPT_TENSOR_PARAMETER) gradient.dtype = HAPT_F32;
    gradient.name = hapt_arena_printf(graph->arena, "%s.grad", of->name);
    if (!gradient.name) return HAPT_ERR_MEMORY;
    HAPT_TRY(hapt_graph_append_tensor(graph, &gradient, index));
    graph->tensor[primal].gradient = *index;
    return HAPT_OK;
}

enum hapt_status hapt_gradient_append(struct hapt_graph *graph, int op, const char *type, const int *input,
                                      int input_count, const int *primal, int primal_count)
{
    const struct hapt_op *forward = &graph->op[op];
    struct hapt_op backward = {.type = hapt_op_type_find(type), .output_count = primal_count, .forward_op = op};
    HAPT_ASSERT(backward.type >= 0);
    memcpy(backward.integer, forward->integer, sizeof backward.integer);
    memcpy(backward.real, forward->real, sizeof backward.real);
    backward.name = hapt_arena_printf(graph->arena, "%s.%s", forward->name, type);
    if (!backward.name) return HAPT_ERR_MEMORY;
    hapt_graph_set_inputs(&backward, input, input_count);
    for (int o = 0; o < primal_count; o++) {
        const struct hapt_tensor *of = &graph->tensor[primal[o]];
        int gradient = of->gradient;
        if (gradient >= 0 || of->kind == HAPT_TENSOR_PARAMETER) backward.accumulate |= 1u << o;
        if (gradient < 0) HAPT_TRY(gradient_create(graph, primal[o], graph->op_count, &gradient));
        for (int p = 0; p < o; p++) {
            if (backward.output[p] != gradient) continue;
            return hapt_fail(HAPT_ERR_INPUT, "give each input its own tensor", "operator %s reads tensor %s twice",
                             graph->op[op].name, graph->tensor[primal[o]].name);
        }
        backward.output[o] = gradient;
    }
    return hapt_graph_append_op(graph, &backward);
}

/* Does an operator in [first, end) read `tensor`? */
static bool read_between(const struct hapt_graph *graph, int tensor, int first, int end)
{
    for (int op = first < 0 ? 0 : first; op < end; op++) {
        for (int i = 0; i < graph->op[op].input_count; i++)
            if (graph->op[op].input[i] == tensor) return true;
    }
    return false;
}

/* May `tensor` join the activations that share the gradient `shared`? See the condition at the top of this file. */
static bool share_is_safe(const struct hapt_graph *graph, int op, int shared, int tensor)
{
    const struct hapt_tensor *u = &graph->tensor[tensor];
    const struct hapt_op *add = &graph->op[op];
    if (u->kind != HAPT_TENSOR_ACTIVATION || graph->tensor[shared].kind != HAPT_TENSOR_GRADIENT) return false;
    if (add->input[0] == add->input[1]) return false;
    for (int other = 0; other < op; other++) {
        for (int o = 0; o < graph->op[other].output_count; o++) {
            const int v = graph->op[other].output[o];
            if (v == tensor || graph->tensor[v].gradient != shared) continue;
            if (read_between(graph, tensor, other, op) || read_between(graph, v, u->producer, op)) return false;
        }
    }
    return true;
}

enum hapt_status hapt_gradient_share(struct hapt_graph *graph, int op, int tensor)
{
    const int incoming = hapt_gradient_incoming(graph, op);
    if (!hapt_gradient_needed(graph, tensor)) return HAPT_OK;
    if (graph->tensor[tensor].gradient == HAPT_GRADIENT_NEEDED && share_is_safe(graph, op, incoming, tensor)) {
        graph->tensor[tensor].gradient = incoming;
        return HAPT_OK;
    }
    return hapt_gradient_append(graph, op, "copy", &incoming, 1, &tensor, 1);
}

/* Marks the parameters that operators use as running statistics. */
static void mark_statistics(struct hapt_graph *graph)
{
    for (int op = 0; op < graph->forward_count; op++)
        for (int i = 0; i < graph->op[op].input_count; i++)
            if (hapt_op_type_at(graph->op[op].type)->statistics >> i & 1u)
                graph->tensor[graph->op[op].input[i]].statistic = true;
}

static bool is_differentiated(const struct hapt_graph *graph, int tensor)
{
    return hapt_gradient_needed(graph, tensor) && !graph->tensor[tensor].statistic;
}

/* Marks every tensor that depends on a trainable parameter. The loss of a training step depends on no running
 * statistic. */
static void mark_needed(struct hapt_graph *graph)
{
    for (int t = 0; t < graph->tensor_count; t++) {
        struct hapt_tensor *tensor = &graph->tensor[t];
        tensor->gradient = tensor->kind == HAPT_TENSOR_PARAMETER && tensor->trainable ? HAPT_GRADIENT_NEEDED : -1;
    }
    for (int op = 0; op < graph->forward_count; op++) {
        bool depends = false;
        for (int i = 0; i < graph->op[op].input_count; i++)
            depends = depends || is_differentiated(graph, graph->op[op].input[i]);
        for (int o = 0; depends && o < graph->op[op].output_count; o++)
            graph->tensor[graph->op[op].output[o]].gradient = HAPT_GRADIENT_NEEDED;
    }
}

/* Creates the backward pass's seed, 1 / number of targets of the step: gradients are then those of the mean loss. */
static enum hapt_status seed_create(struct hapt_graph *graph, int *index)
{
    for (*index = 0; *index < graph->tensor_count; (*index)++)
        if (graph->tensor[*index].role == HAPT_ROLE_LOSS_SCALE) return HAPT_OK;
    const struct hapt_tensor scale = {.name = "loss_scale",
                                      .kind = HAPT_TENSOR_INPUT,
                                      .role = HAPT_ROLE_LOSS_SCALE,
                                      .dtype = HAPT_F32,
                                      .dims = 1,
                                      .shape = {1},
                                      .producer = -1,
                                      .gradient = -1,
                                      .primal = -1};
    return hapt_graph_append_tensor(graph, &scale, index);
}

/* The backward operator of the row's `backward_operands`. */
static enum hapt_status append_of_row(struct hapt_graph *graph, int op, const struct hapt_op_type *type)
{
    const struct hapt_op *forward = &graph->op[op];
    int operand[2][HAPT_MAX_INPUTS], count[2] = {0}, side = 0; /* reads, inputs */
    bool frozen = type->backward_frozen != NULL;
    for (const char *c = type->backward_operands; *c; c++) {
        const int tensor = *c == '>'   ? -1
                           : *c == 'd' ? hapt_gradient_incoming(graph, op)
                           : *c >= 'A' ? forward->output[*c - 'A']
                                       : forward->input[*c - '0'];
        if (*c == '>')
            side = 1;
        else if (side == 0 || tensor >= 0)
            operand[side][count[side]++] = tensor;
    }
    for (int i = 1; i < count[1]; i++) frozen = frozen && !hapt_gradient_needed(graph, operand[1][i]);
    return hapt_gradient_append(graph, op, frozen ? type->backward_frozen : type->backward, operand[0], count[0],
                                operand[1], frozen ? 1 : count[1]);
}

static enum hapt_status differentiate_op(struct hapt_graph *graph, int op)
{
    const struct hapt_op *forward = &graph->op[op];
    const struct hapt_op_type *type = hapt_op_type_at(forward->type);
    bool needed = false;
    for (int i = 0; i < forward->input_count; i++) needed = needed || is_differentiated(graph, forward->input[i]);
    for (int o = 1; needed && o < forward->output_count; o++) {
        if (graph->tensor[forward->output[o]].gradient < 0) continue;
        return hapt_fail(HAPT_ERR_INPUT, "only the first output of an operator passes gradients on",
                         "operator %s (%s): no gradient through output %d", forward->name, type->name, o);
    }
    if (!needed || hapt_gradient_incoming(graph, op) < 0) return HAPT_OK;
    if (type->backward) return append_of_row(graph, op, type);
    if (!type->gradient)
        return hapt_fail(HAPT_ERR_INPUT, "write only the forward part: hapt derives the backward part",
                         "operator %s: %s has no gradient", forward->name, type->name);
    return type->gradient(graph, op);
}

static enum hapt_status no_trainable(void)
{
    return hapt_fail(HAPT_ERR_INPUT, "mark a parameter as trainable", "the loss depends on no trainable parameter");
}

enum hapt_status hapt_graph_differentiate(struct hapt_graph *graph)
{
    if (graph->op_count > graph->forward_count) return HAPT_OK;
    if (graph->loss < 0) return hapt_fail(HAPT_ERR_INPUT, NULL, "the graph has no loss to differentiate");
    int seed;
    mark_statistics(graph);
    mark_needed(graph);
    HAPT_TRY(seed_create(graph, &seed));
    if (!hapt_gradient_needed(graph, graph->loss)) return no_trainable();
    graph->tensor[graph->loss].gradient = seed;
    for (int op = graph->forward_count - 1; op >= 0; op--) HAPT_TRY(differentiate_op(graph, op));
    bool some = false;
    for (int t = 0; t < graph->tensor_count; t++) {
        struct hapt_tensor *tensor = &graph->tensor[t];
        if (tensor->gradient == HAPT_GRADIENT_NEEDED) tensor->gradient = -1;
        /* a parameter that changes no loss is not updated, as in PyTorch */
        if (tensor->kind == HAPT_TENSOR_PARAMETER && tensor->gradient < 0) tensor->trainable = false;
        some = some || (tensor->kind == HAPT_TENSOR_PARAMETER && tensor->trainable);
    }
    return some ? HAPT_OK : no_trainable();
}
