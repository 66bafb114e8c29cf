#include "structure.h"

#include <string.h>

#include "hapt/env.h"
#include "hapt/layers.h"
#include "hapt/ops.h"

static uint64_t mix(uint64_t hash, int64_t value)
{
    return hapt_hash_word(hash, value);
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
    hash = hapt_op_hash_integers(hash, op);
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
        for (int o = 0; o < graph->op[tensor->producer].output_count; o++)
            if (graph->op[tensor->producer].output[o] == of->input[i]) hash = mix(hash, o);
    }
    return hash;
}

/* last[tensor]: last forward operator that reads it, directly or through its backward operators. */
static enum hapt_status last_readers(const struct hapt_graph *graph, struct hapt_arena *arena, int **last)
{
    HAPT_NEW(*last, arena, graph->tensor_count);
    for (int index = 0; index < graph->op_count; index++) {
        const struct hapt_op *op = &graph->op[index];
        for (int i = 0; i < op->input_count; i++)
            if (op->input[i] >= 0 && (*last)[op->input[i]] < op->forward_op) (*last)[op->input[i]] = op->forward_op;
    }
    return HAPT_OK;
}

enum hapt_status hapt_structure_unsplittable(const struct hapt_graph *graph, struct hapt_arena *arena,
                                             bool *unsplittable)
{
    int *last, *opened; /* [boundary] tensors that start to cross it, minus those that end */
    HAPT_TRY(last_readers(graph, arena, &last));
    HAPT_NEW(opened, arena, graph->forward_count + 2);
    for (int t = 0; t < graph->tensor_count; t++) {
        const struct hapt_tensor *tensor = &graph->tensor[t];
        if (tensor->kind != HAPT_TENSOR_ACTIVATION || tensor->dtype != HAPT_I32 || last[t] <= tensor->producer)
            continue;
        opened[tensor->producer + 1]++;
        opened[last[t] + 1]--;
    }
    for (int boundary = 0, crossing = 0; boundary <= graph->forward_count; boundary++) {
        crossing += opened[boundary];
        unsplittable[boundary] = crossing > 0;
    }
    return HAPT_OK;
}

enum hapt_status hapt_structure_boundary_bytes(const struct hapt_graph *graph, struct hapt_arena *arena,
                                               double *boundary_bytes)
{
    int *last;
    HAPT_TRY(last_readers(graph, arena, &last));
    memset(boundary_bytes, 0, (size_t)(graph->forward_count + 1) * sizeof *boundary_bytes);
    for (int t = 0; t < graph->tensor_count; t++) {
        const struct hapt_tensor *tensor = &graph->tensor[t];
        if (tensor->kind != HAPT_TENSOR_ACTIVATION || last[t] <= tensor->producer) continue;
        boundary_bytes[tensor->producer + 1] += (double)hapt_tensor_bytes(tensor);
        boundary_bytes[last[t] + 1] -= (double)hapt_tensor_bytes(tensor); /* integers below 2^53: exact */
    }
    for (int boundary = 1; boundary <= graph->forward_count; boundary++)
        boundary_bytes[boundary] += boundary_bytes[boundary - 1];
    return HAPT_OK;
}

void hapt_structure_flops(const struct hapt_graph *graph, double *flops)
{
    memset(flops, 0, (size_t)graph->forward_count * sizeof *flops);
    for (int op = 0; op < graph->op_count; op++)
        flops[graph->op[op].forward_op] += hapt_op_flops(graph, &graph->op[op], 1);
}

/*
 * Hashes of all ranges at once; ranges with the same first layer share their prefix. Operators are mixed by position:
 * each forward operator is followed at once by its backward operators. This tells the same ranges apart as the order of
 * the program, because backward operators run in reverse order of positions. So for one first layer, the hash is
 * extended layer by layer; only the tensors that cross the range's end are mixed separately.
 */
struct all_ranges {
    const struct hapt_graph *graph;
    int *backward_start, *backward; /* [forward_count + 1] backward operators of each position, in order */
    int *first_use;                 /* [tensor] first position that uses it */
    int *last_read;                 /* [tensor] last position that reads it */
    int *last_write;                /* [tensor] last position that writes it */
    uint64_t *kind, *facts;         /* [op], [tensor] hash of the properties that do not depend on the range */
    int *number, *stamp;            /* [tensor] its number in the ranges that start at layer stamp - 1 */
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
    HAPT_NEW(all->first_use, scratch, graph->tensor_count);
    HAPT_NEW(all->last_read, scratch, graph->tensor_count);
    HAPT_NEW(all->last_write, scratch, graph->tensor_count);
    HAPT_NEW(all->kind, scratch, graph->op_count);
    HAPT_NEW(all->facts, scratch, graph->tensor_count);
    HAPT_NEW(all->number, scratch, graph->tensor_count);
    HAPT_NEW(all->stamp, scratch, graph->tensor_count);
    for (int t = 0; t < graph->tensor_count; t++) {
        all->first_use[t] = graph->forward_count;
        all->last_read[t] = all->last_write[t] = -1;
        all->facts[t] = mix_tensor((uint64_t)primal_of(graph, t)->kind, &graph->tensor[t]);
    }
    for (int o = 0; o < graph->op_count; o++) {
        const struct hapt_op *op = &graph->op[o];
        const int position = op->forward_op;
        all->kind[o] = mix_kind(mark ? mark[o] : 1, op);
        if (o >= graph->forward_count) all->backward_start[position + 2]++;
        for (int k = 0; k < op->input_count + op->output_count; k++) {
            const bool reads = k < op->input_count;
            const int tensor = reads ? op->input[k] : op->output[k - op->input_count];
            int *last = reads ? all->last_read : all->last_write;
            if (tensor < 0) continue;
            if (position < all->first_use[tensor]) all->first_use[tensor] = position;
            if (position > last[tensor]) last[tensor] = position;
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
        /* Used before the range: an activation made there enters, a gradient used there leaves. */
        if (primal_of(all->graph, tensor)->kind == HAPT_TENSOR_ACTIVATION)
            hash = mix(hash, all->first_use[tensor] < all->first_op);
    }
    return mix(hash, all->number[tensor]);
}

static uint64_t mix_position(uint64_t hash, struct all_ranges *all, int position)
{
    for (int k = all->backward_start[position] - 1; k < all->backward_start[position + 1]; k++) {
        const int index = k < all->backward_start[position] ? position : all->backward[k];
        const struct hapt_op *op = &all->graph->op[index];
        hash = mix(mix(hash, (int64_t)all->kind[index]), position - all->first_op);
        for (int i = 0; i < op->input_count; i++) hash = mix_numbered(hash, all, op->input[i]);
        for (int o = 0; o < op->output_count; o++) hash = mix_numbered(hash, all, op->output[o]);
    }
    return hash;
}

/* Is a tensor used on both sides of a boundary: an activation read after it, or a gradient written after it? */
static bool crosses(const struct all_ranges *all, int tensor, int boundary)
{
    if (primal_of(all->graph, tensor)->kind != HAPT_TENSOR_ACTIVATION || all->first_use[tensor] >= boundary)
        return false;
    const bool gradient = all->graph->tensor[tensor].kind == HAPT_TENSOR_GRADIENT;
    return (gradient ? all->last_write : all->last_read)[tensor] >= boundary;
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
            uint64_t ends = 0; /* a sum, because the list's order differs from that of the numbers */
            for (int position = hapt_layers_first_op(layers, j); position < layers->end_op[j]; position++)
                hash = mix_position(hash, &all, position);
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
