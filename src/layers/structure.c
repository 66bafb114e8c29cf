#include "structure.h"

#include <stdlib.h>
#include <string.h>

#include "hapt/env.h"
#include "hapt/layers.h"
#include "hapt/ops.h"

static uint64_t mix(uint64_t hash, int64_t value)
{
    return hapt_hash(hash, &value, sizeof value);
}

static uint64_t mix_tensor(uint64_t hash, const struct hapt_tensor *tensor)
{
    const int64_t facts[] = {tensor->kind, tensor->role, tensor->dtype, tensor->dims, tensor->trainable};
    hash = hapt_hash(hash, facts, sizeof facts);
    return hapt_hash(hash, tensor->shape, (size_t)tensor->dims * sizeof tensor->shape[0]);
}

static uint64_t mix_kind(uint64_t hash, const struct hapt_op *op)
{
    const int64_t facts[] = {op->type, op->input_count, op->output_count, op->accumulate};
    hash = hapt_hash(hash, facts, sizeof facts);
    hash = hapt_hash(hash, op->integer, sizeof op->integer);
    return hapt_hash(hash, op->real, sizeof op->real);
}

uint64_t hapt_structure_of_op(const struct hapt_graph *graph, int op)
{
    const struct hapt_op *of = &graph->op[op];
    uint64_t hash = mix_kind(1, of);
    for (int i = 0; i < of->input_count; i++) {
        hash = mix(hash, of->input[i] >= 0);
        if (of->input[i] < 0) continue;
        const struct hapt_tensor *tensor = &graph->tensor[of->input[i]];
        hash = mix_tensor(hash, tensor);
        if (tensor->producer < 0) continue;
        hash = mix(hash, op - tensor->producer);
        for (int o = 0; o < graph->op[tensor->producer].output_count; o++) {
            if (graph->op[tensor->producer].output[o] == of->input[i]) hash = mix(hash, o);
        }
    }
    return hash;
}

enum hapt_status hapt_structure_cut_bytes(const struct hapt_graph *graph, struct hapt_arena *arena, double *cut_bytes)
{
    int *last; /* [tensor] the last forward operator that reads it, itself or in its backward operators */
    HAPT_NEW(last, arena, graph->tensor_count);
    for (int index = 0; index < graph->op_count; index++) {
        const struct hapt_op *op = &graph->op[index];
        for (int i = 0; i < op->input_count; i++) {
            if (op->input[i] >= 0 && last[op->input[i]] < op->forward_op) last[op->input[i]] = op->forward_op;
        }
    }
    memset(cut_bytes, 0, (size_t)(graph->forward_count + 1) * sizeof *cut_bytes);
    for (int t = 0; t < graph->tensor_count; t++) {
        const struct hapt_tensor *tensor = &graph->tensor[t];
        if (tensor->kind != HAPT_TENSOR_ACTIVATION || last[t] <= tensor->producer) continue;
        cut_bytes[tensor->producer + 1] += (double)hapt_tensor_bytes(tensor);
        cut_bytes[last[t] + 1] -= (double)hapt_tensor_bytes(tensor); /* whole numbers below 2^53: exact */
    }
    for (int cut = 1; cut <= graph->forward_count; cut++) cut_bytes[cut] += cut_bytes[cut - 1];
    return HAPT_OK;
}

void hapt_structure_flops(const struct hapt_graph *graph, double *flops)
{
    memset(flops, 0, (size_t)graph->forward_count * sizeof *flops);
    for (int op = 0; op < graph->op_count; op++) {
        flops[graph->op[op].forward_op] += hapt_op_flops(graph, &graph->op[op], 1);
    }
}

/* Does a tensor cross the boundaries of a range of forward operators? Activations enter when written before and leave when read
 * behind; gradients enter when written behind and leave when read or added to before. */
enum { ENTERS = 1, LEAVES = 2 };

static void note_crossings(const struct hapt_graph *graph, int first_op, int end_op, unsigned char *crossing)
{
    for (int index = 0; index < graph->op_count; index++) {
        const struct hapt_op *op = &graph->op[index];
        if (op->forward_op >= first_op && op->forward_op < end_op) continue;
        const bool before = op->forward_op < first_op;
        for (int i = 0; i < op->input_count; i++) {
            if (op->input[i] < 0) continue;
            const bool gradient = graph->tensor[op->input[i]].kind == HAPT_TENSOR_GRADIENT;
            if (before == gradient) crossing[op->input[i]] |= LEAVES;
        }
        for (int o = 0; o < op->output_count; o++) {
            const bool gradient = graph->tensor[op->output[o]].kind == HAPT_TENSOR_GRADIENT;
            crossing[op->output[o]] |= before == gradient ? LEAVES : ENTERS;
        }
    }
}

/* A tensor by its number in order of first appearance in the range; at that first time with all that matters of it. Use of a
 * parameter elsewhere does not change the program here. */
static uint64_t mix_operand(uint64_t hash, const struct hapt_graph *graph, int tensor, const unsigned char *crossing,
                            int *number, int *numbers)
{
    if (tensor < 0) return mix(hash, -1);
    if (number[tensor] == 0) {
        const struct hapt_tensor *of = &graph->tensor[tensor];
        const struct hapt_tensor *primal = of->primal >= 0 ? &graph->tensor[of->primal] : of;
        number[tensor] = ++*numbers;
        hash = mix(mix_tensor(hash, of), primal->kind);
        if (primal->kind == HAPT_TENSOR_ACTIVATION) hash = mix(hash, crossing[tensor]);
    }
    return mix(hash, number[tensor]);
}

uint64_t hapt_layers_structure(const struct hapt_layers *layers, const struct hapt_graph *graph, int first, int end)
{
    const int first_op = hapt_layers_first_op(layers, first), end_op = layers->end_op[end - 1];
    unsigned char *crossing = calloc((size_t)graph->tensor_count, 1);
    int *number = calloc((size_t)graph->tensor_count, sizeof *number), numbers = 0;
    const int64_t range[] = {first, end};
    uint64_t hash = 2;
    if (!crossing || !number) {
        hash = hapt_hash(3, range, sizeof range); /* without memory no two ranges are taken as equal */
    } else {
        note_crossings(graph, first_op, end_op, crossing);
        for (int index = 0; index < graph->op_count; index++) {
            const struct hapt_op *op = &graph->op[index];
            if (op->forward_op < first_op || op->forward_op >= end_op) continue;
            hash = mix(mix_kind(hash, op), op->forward_op - first_op);
            for (int i = 0; i < op->input_count; i++) {
                hash = mix_operand(hash, graph, op->input[i], crossing, number, &numbers);
            }
            for (int o = 0; o < op->output_count; o++) {
                hash = mix_operand(hash, graph, op->output[o], crossing, number, &numbers);
            }
        }
    }
    free(crossing);
    free(number);
    return hash;
}
