/*
 * Finds the operators of a split backward pass that can wait: they make nothing but gradients of parameters. Input: an
 * expanded graph. Output: hapt_sharding.weight. Whether an operator can wait does not depend on the range, so that
 * memory_ranges.c knows it without the programs.
 */
#include "weight.h"

struct finding {
    const struct hapt_sharding *sharding;
    bool *weight; /* [graph->op_count] */
    /* [graph->tensor_count] by storage, of operators that cannot wait: the first and the last that touches the tensor,
     * the last that writes it; -1: none */
    int *first_touch, *last_touch, *last_write;
    /* The range of forward operators, first and last, whose operators touch the tensor. */
    int *least, *most;
};

static int operand_count(const struct hapt_op *op)
{
    return op->input_count + op->output_count;
}

/* The storage of operand k: inputs, then outputs; -1: absent. */
static int storage_of(const struct finding *finding, const struct hapt_op *op, int k)
{
    const int tensor = k < op->input_count ? op->input[k] : op->output[k - op->input_count];
    return tensor < 0 ? -1 : finding->sharding->storage[tensor];
}

static bool is_collective(const struct hapt_op *op)
{
    return hapt_op_type_at(op->type)->collective != HAPT_COLLECTIVE_NONE;
}

static bool makes_parameter_gradients_only(const struct hapt_graph *graph, const struct hapt_op *op)
{
    for (int k = 0; k < op->output_count; k++)
        if (op->output[k] >= 0 && !hapt_graph_is_parameter_gradient(graph, op->output[k])) return false;
    return true;
}

/* Notes what the operators that cannot wait do. */
static void note_touches(const struct finding *finding)
{
    const struct hapt_graph *graph = finding->sharding->graph;
    for (int t = 0; t < graph->tensor_count; t++)
        finding->first_touch[t] = finding->last_touch[t] = finding->last_write[t] = -1;
    for (int o = graph->forward_count; o < finding->sharding->reduce_first; o++) {
        if (finding->weight[o]) continue;
        for (int k = 0; k < operand_count(&graph->op[o]); k++) {
            const int tensor = storage_of(finding, &graph->op[o], k);
            if (tensor < 0) continue;
            if (finding->first_touch[tensor] < 0) finding->first_touch[tensor] = o;
            finding->last_touch[tensor] = o;
            if (k >= graph->op[o].input_count) finding->last_write[tensor] = o;
        }
    }
}

/* Notes which forward operators a tensor belongs to: a boundary between two of them may separate its readers. */
static void note_spans(const struct finding *finding)
{
    const struct hapt_graph *graph = finding->sharding->graph;
    for (int t = 0; t < graph->tensor_count; t++) finding->least[t] = finding->most[t] = -1;
    for (int o = graph->forward_count; o < finding->sharding->reduce_first; o++)
        for (int k = 0; k < operand_count(&graph->op[o]); k++) {
            const int tensor = storage_of(finding, &graph->op[o], k), at = graph->op[o].forward_op;
            if (tensor < 0) continue;
            if (finding->least[tensor] < 0 || at < finding->least[tensor]) finding->least[tensor] = at;
            if (at > finding->most[tensor]) finding->most[tensor] = at;
        }
}

/* True if an operator can run behind all operators that cannot wait. Gradients of parameters must have no other
 * writers, which would change the order of their sums. The input of a collective must keep its value, and its output
 * must have no other readers. It may not leave a range either, which ends its backward pass with what leaves it. */
static bool can_wait(const struct finding *finding, int o)
{
    const struct hapt_op *op = &finding->sharding->graph->op[o];
    for (int k = 0; k < operand_count(op); k++) {
        const int tensor = storage_of(finding, op, k);
        if (tensor < 0) continue;
        if (is_collective(op) && finding->last_write[tensor] > o) return false;
        if (k < op->input_count) continue;
        if (!is_collective(op) && finding->first_touch[tensor] >= 0) return false;
        if (is_collective(op) && (finding->last_touch[tensor] > o || finding->least[tensor] != finding->most[tensor]))
            return false;
    }
    return true;
}

static enum hapt_status find(struct finding *finding, struct hapt_arena *scratch)
{
    const struct hapt_sharding *sharding = finding->sharding;
    const struct hapt_graph *graph = sharding->graph;
    int **const list[] = {&finding->first_touch, &finding->last_touch, &finding->last_write, &finding->least,
                          &finding->most};
    for (int k = 0; k < 5; k++) HAPT_NEW(*list[k], scratch, graph->tensor_count);
    for (int o = graph->forward_count; o < sharding->reduce_first; o++)
        finding->weight[o] = is_collective(&graph->op[o]) || makes_parameter_gradients_only(graph, &graph->op[o]);
    note_spans(finding);
    for (bool changed = true; changed;) { /* an operator that cannot wait may keep others from waiting */
        changed = false;
        note_touches(finding);
        for (int o = graph->forward_count; o < sharding->reduce_first; o++) {
            if (!finding->weight[o] || can_wait(finding, o)) continue;
            finding->weight[o] = false;
            changed = true;
        }
    }
    return HAPT_OK;
}

enum hapt_status find_weight_operators(struct hapt_sharding *sharding, struct hapt_arena *arena)
{
    struct hapt_arena scratch;
    HAPT_NEW(sharding->weight, arena, sharding->graph->op_count);
    struct finding finding = {.sharding = sharding, .weight = sharding->weight};
    hapt_arena_init(&scratch);
    const enum hapt_status status = find(&finding, &scratch);
    hapt_arena_release(&scratch);
    return status;
}
