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

/* last[tensor]: the last forward operator that reads it, itself or in its backward operators. */
static enum hapt_status last_readers(const struct hapt_graph *graph, struct hapt_arena *arena, int **last)
{
    HAPT_NEW(*last, arena, graph->tensor_count);
    for (int index = 0; index < graph->op_count; index++) {
        const struct hapt_op *op = &graph->op[index];
        for (int i = 0; i < op->input_count; i++) {
            if (op->input[i] >= 0 && (*last)[op->input[i]] < op->forward_op) (*last)[op->input[i]] = op->forward_op;
        }
    }
    return HAPT_OK;
}

enum hapt_status hapt_structure_whole(const struct hapt_graph *graph, struct hapt_arena *arena, bool *whole)
{
    int *last, *opened; /* [cut] how many begin to cross, less how many end */
    HAPT_TRY(last_readers(graph, arena, &last));
    HAPT_NEW(opened, arena, graph->forward_count + 2);
    for (int t = 0; t < graph->tensor_count; t++) {
        const struct hapt_tensor *tensor = &graph->tensor[t];
        if (tensor->kind != HAPT_TENSOR_ACTIVATION || tensor->dtype != HAPT_I32 || last[t] <= tensor->producer)
            continue;
        opened[tensor->producer + 1]++;
        opened[last[t] + 1]--;
    }
    for (int cut = 0, crossing = 0; cut <= graph->forward_count; cut++) {
        crossing += opened[cut];
        whole[cut] = crossing > 0;
    }
    return HAPT_OK;
}

enum hapt_status hapt_structure_cut_bytes(const struct hapt_graph *graph, struct hapt_arena *arena, double *cut_bytes)
{
    int *last;
    HAPT_TRY(last_readers(graph, arena, &last));
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

/* Does a tensor cross the boundaries of a range of forward operators? Activations enter when written before and leave
 * when read behind; gradients enter when written behind and leave when read or added to before. */
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

/* A tensor by its number in order of first appearance in the range; at that first time with all that matters of it. Use
 * of a parameter elsewhere does not change the program here. */
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

/*
 * The same for all ranges, by their common beginnings. A range's operators are mixed place by place: a forward operator
 * and, at once, its backward operators, which adds nothing and leaves nothing out since backward operators run in
 * reverse order of places. So from one first layer on, the hash grows with the last one; only what crosses the range's
 * end is mixed apart.
 */
struct all_ranges {
    const struct hapt_graph *graph;
    int *backward_start, *backward; /* [forward_count + 1] backward operators of each place, in their order */
    int *lowest;                    /* [tensor] first place that touches it */
    int *highest_read;              /* [tensor] last place that reads it, */
    int *highest_write;             /* ... that writes it */
    uint64_t *kind, *facts;         /* [op], [tensor] what does not depend on the range */
    int *number, *stamp;            /* [tensor] its number in the ranges from layer stamp - 1 on */
    int numbers, first_op, mark;
};

static const struct hapt_tensor *primal_of(const struct hapt_graph *graph, int tensor)
{
    const struct hapt_tensor *of = &graph->tensor[tensor];
    return of->primal >= 0 ? &graph->tensor[of->primal] : of;
}

static enum hapt_status all_ranges_init(const struct hapt_graph *graph, const uint64_t *mark,
                                        struct hapt_arena *scratch, struct all_ranges *all)
{
    *all = (struct all_ranges){.graph = graph};
    HAPT_NEW(all->backward_start, scratch, graph->forward_count + 2);
    HAPT_NEW(all->backward, scratch, graph->op_count);
    HAPT_NEW(all->lowest, scratch, graph->tensor_count);
    HAPT_NEW(all->highest_read, scratch, graph->tensor_count);
    HAPT_NEW(all->highest_write, scratch, graph->tensor_count);
    HAPT_NEW(all->kind, scratch, graph->op_count);
    HAPT_NEW(all->facts, scratch, graph->tensor_count);
    HAPT_NEW(all->number, scratch, graph->tensor_count);
    HAPT_NEW(all->stamp, scratch, graph->tensor_count);
    for (int t = 0; t < graph->tensor_count; t++) {
        all->lowest[t] = graph->forward_count;
        all->highest_read[t] = all->highest_write[t] = -1;
        all->facts[t] = mix_tensor((uint64_t)primal_of(graph, t)->kind, &graph->tensor[t]);
    }
    for (int o = 0; o < graph->op_count; o++) {
        const struct hapt_op *op = &graph->op[o];
        const int place = op->forward_op;
        all->kind[o] = mix_kind(mark ? mark[o] : 1, op);
        if (o >= graph->forward_count) all->backward_start[place + 2]++;
        for (int k = 0; k < op->input_count + op->output_count; k++) {
            const bool reads = k < op->input_count;
            const int tensor = reads ? op->input[k] : op->output[k - op->input_count];
            int *highest = reads ? all->highest_read : all->highest_write;
            if (tensor < 0) continue;
            if (place < all->lowest[tensor]) all->lowest[tensor] = place;
            if (place > highest[tensor]) highest[tensor] = place;
        }
    }
    for (int p = 0; p <= graph->forward_count; p++) all->backward_start[p + 1] += all->backward_start[p];
    for (int o = graph->forward_count; o < graph->op_count; o++)
        all->backward[all->backward_start[graph->op[o].forward_op + 1]++] = o;
    return HAPT_OK;
}

static uint64_t mix_numbered(uint64_t hash, struct all_ranges *all, int tensor)
{
    if (tensor < 0) return mix(hash, -1);
    if (all->stamp[tensor] != all->mark) {
        all->stamp[tensor] = all->mark;
        all->number[tensor] = ++all->numbers;
        hash = mix(hash, (int64_t)all->facts[tensor]);
        /* From before: an activation made there comes in, a gradient that is touched there goes out. */
        if (primal_of(all->graph, tensor)->kind == HAPT_TENSOR_ACTIVATION)
            hash = mix(hash, all->lowest[tensor] < all->first_op);
    }
    return mix(hash, all->number[tensor]);
}

static uint64_t mix_place(uint64_t hash, struct all_ranges *all, int place)
{
    for (int k = all->backward_start[place] - 1; k < all->backward_start[place + 1]; k++) {
        const int index = k < all->backward_start[place] ? place : all->backward[k];
        const struct hapt_op *op = &all->graph->op[index];
        hash = mix(mix(hash, (int64_t)all->kind[index]), place - all->first_op);
        for (int i = 0; i < op->input_count; i++) hash = mix_numbered(hash, all, op->input[i]);
        for (int o = 0; o < op->output_count; o++) hash = mix_numbered(hash, all, op->output[o]);
    }
    return hash;
}

/* Is a tensor needed from behind a cut: an activation read there, a gradient written there? */
static bool crosses(const struct all_ranges *all, int tensor, int cut)
{
    if (primal_of(all->graph, tensor)->kind != HAPT_TENSOR_ACTIVATION || all->lowest[tensor] >= cut) return false;
    const bool gradient = all->graph->tensor[tensor].kind == HAPT_TENSOR_GRADIENT;
    return (gradient ? all->highest_write : all->highest_read)[tensor] >= cut;
}

static enum hapt_status list_crossings(const struct hapt_layers *layers, const struct all_ranges *all,
                                       struct hapt_arena *scratch, int **start, int **list)
{
    int *from, *crossing = NULL, count = 0;
    HAPT_NEW(from, scratch, layers->count + 1);
    for (int pass = 0; pass < 2; pass++, count = 0) {
        for (int l = 0; l < layers->count; l++) {
            from[l] = count;
            for (int t = 0; t < all->graph->tensor_count; t++) {
                if (!crosses(all, t, layers->end_op[l])) continue;
                if (pass == 1) crossing[count] = t;
                count++;
            }
        }
        from[layers->count] = count;
        if (pass == 0) HAPT_NEW(crossing, scratch, count);
    }
    *start = from;
    *list = crossing;
    return HAPT_OK;
}

static enum hapt_status hash_ranges(const struct hapt_layers *layers, const struct hapt_graph *graph,
                                    const uint64_t *mark, struct hapt_arena *scratch, uint64_t *structure)
{
    struct all_ranges all;
    int *start, *crossing;
    const int L = layers->count;
    HAPT_TRY(all_ranges_init(graph, mark, scratch, &all));
    HAPT_TRY(list_crossings(layers, &all, scratch, &start, &crossing));
    for (int i = 0; i < L; i++) {
        uint64_t hash = 2;
        all.first_op = hapt_layers_first_op(layers, i);
        all.mark = i + 1;
        all.numbers = 0;
        for (int j = i; j < L; j++) {
            uint64_t ends = 0; /* a sum: the order of the list is not that of the numbers */
            for (int place = hapt_layers_first_op(layers, j); place < layers->end_op[j]; place++)
                hash = mix_place(hash, &all, place);
            for (int c = start[j]; c < start[j + 1]; c++)
                if (all.stamp[crossing[c]] == all.mark) ends += mix(3, all.number[crossing[c]]);
            structure[(size_t)i * (size_t)L + (size_t)j] = hapt_hash(hash, &ends, sizeof ends);
        }
    }
    return HAPT_OK;
}

enum hapt_status hapt_layers_structures(const struct hapt_layers *layers, const struct hapt_graph *graph,
                                        const uint64_t *mark, uint64_t *structure)
{
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    const enum hapt_status status = hash_ranges(layers, graph, mark, &scratch, structure);
    hapt_arena_release(&scratch);
    return status;
}
