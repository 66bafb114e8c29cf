/*
 * Operators on shards, by the cpu kernels. These kernels know no ranges of an index (of a table that is sharded by the
 * values that index it). So a shard with such an index gets one more entry, and every value outside its range points to
 * it.
 */
#ifndef HAPT_TEST_SHARDS_H
#define HAPT_TEST_SHARDS_H

#include "hapt/device.h"
#include "hapt/ops.h"
#include "test.h"

static int64_t shards_outer(const struct hapt_view *view, int dim)
{
    int64_t count = 1;
    for (int d = 0; d < dim; d++) count *= view->shape[d];
    return count;
}

/* Copies a 4-byte tensor between extents `from` and `to` of a dimension. */
static void shards_copy(const struct hapt_view *from, const struct hapt_view *to, int dim)
{
    const int64_t outer = shards_outer(from, dim), inner = hapt_view_elements(from) / outer / from->shape[dim];
    const int64_t rows = from->shape[dim] < to->shape[dim] ? from->shape[dim] : to->shape[dim];
    for (int64_t o = 0; o < outer; o++)
        memcpy((float *)to->data + o * to->shape[dim] * inner, (float *)from->data + o * from->shape[dim] * inner,
               (size_t)(rows * inner) * 4);
}

/* The same tensor with one more entry at the end of `dim`. That entry and the padding behind `valid` entries are filled
 * with `empty`. */
static struct hapt_view shards_extend(const struct hapt_view *view, int dim, int64_t valid, float empty)
{
    struct hapt_view wide = *view;
    wide.shape[dim]++;
    const int64_t outer = shards_outer(&wide, dim), inner = hapt_view_elements(&wide) / outer / wide.shape[dim];
    wide.data = aligned_alloc(64, ((size_t)hapt_view_elements(&wide) * 4 + 127) / 64 * 64);
    shards_copy(view, &wide, dim);
    for (int64_t o = 0; o < outer; o++)
        for (int64_t k = valid; k < wide.shape[dim]; k++)
            for (int64_t i = 0; i < inner; i++) ((float *)wide.data)[(o * wide.shape[dim] + k) * inner + i] = empty;
    return wide;
}

/* The signature of the operator, from the dimensions of its present operands. */
static const struct hapt_signature *shards_signature(const struct hapt_op *op, const struct hapt_call *given)
{
    struct hapt_tensor tensor[HAPT_MAX_INPUTS] = {{0}};
    if (hapt_op_type_at(op->type)->sign)
        return hapt_op_signature(op->type); /* its dimensions are indexed by no values */
    const struct hapt_graph graph = {.tensor = tensor, .tensor_count = HAPT_MAX_INPUTS};
    struct hapt_op local = *op;
    for (int i = 0; i < op->input_count; i++) {
        tensor[i].dims = given->input[i].dims;
        local.input[i] = op->input[i] >= 0 && given->input[i].dims > 0 ? i : -1;
    }
    return hapt_op_signature_of(&graph, &local);
}

/* Runs the kernel of a local operator. `indexed`: it works on the shard of an index that begins at `first` and has
 * `valid` entries without padding. The local extent is that of its operands. */
__attribute__((unused)) static void shards_run(const struct hapt_op *op, const struct hapt_call *given, bool indexed,
                                               int64_t first, int64_t valid)
{
    const struct hapt_op_type *type = hapt_op_type_at(op->type);
    const struct hapt_signature *signature = shards_signature(op, given);
    const struct hapt_kernel *kernel = hapt_backend_find("cpu")->find_kernel(NULL, type->name, HAPT_F32);
    CHECK_MESSAGE(kernel != NULL, "no kernel for %s", type->name);
    if (!kernel) return;
    struct hapt_call call = *given;
    if (strncmp(type->name, "moe_", 4) == 0) { /* these kernels know ranges */
        call.first_value = indexed ? first : 0;
        indexed = false;
    }
    const bool logits = strstr(type->name, "cross_entropy") != NULL;
    void *made[HAPT_MAX_INPUTS + HAPT_MAX_OUTPUTS];
    int made_count = 0, dim_of[HAPT_MAX_OUTPUTS];
    int64_t extent = 0;
    for (int k = 0; indexed && k < call.input_count + call.output_count; k++) {
        const bool input = k < call.input_count;
        const int o = k - call.input_count;
        const struct hapt_signature_operand *operand = input ? &signature->input[k] : &signature->output[o];
        struct hapt_view *view = input ? &call.input[k] : &call.output[o];
        if (!input) dim_of[o] = -1;
        for (int d = 0; d < operand->dims; d++) {
            if (!operand->indexed[d]) continue;
            extent = view->shape[d];
            *view = shards_extend(view, d, valid, logits ? -1e30f : 0);
            made[made_count++] = view->data;
            if (!input) dim_of[o] = d;
        }
    }
    for (int i = 0; indexed && i < call.input_count; i++) {
        if (call.input[i].dtype != HAPT_I32) continue;
        const int64_t count = hapt_view_elements(&call.input[i]);
        int32_t *shifted = malloc((size_t)count * 4);
        for (int64_t k = 0; k < count; k++) {
            const int32_t value = ((int32_t *)given->input[i].data)[k];
            shifted[k] = (int32_t)(value - first);
            if (value - first < 0 || value - first >= valid)
                shifted[k] = value == -100 || strcmp(type->name, "cross_entropy") == 0 ? -100 : (int32_t)extent;
        }
        call.input[i].data = made[made_count++] = shifted;
    }
    call.workspace_bytes = kernel->workspace_bytes ? kernel->workspace_bytes(&call) : 0;
    call.workspace = aligned_alloc(64, (call.workspace_bytes + 127) / 64 * 64);
    CHECK_OK(kernel->run(&call, NULL));
    for (int o = 0; indexed && o < call.output_count; o++)
        if (dim_of[o] >= 0) shards_copy(&call.output[o], &given->output[o], dim_of[o]);
    free(call.workspace);
    for (int k = 0; k < made_count; k++) free(made[k]);
}

/* Index in the whole tensor of element k of the shard of `rank` among `ranks`. The whole has `blocks` blocks of
 * `extent` in dimension `dim`. Returns -1 for padding. Without sharding (dim < 0) both indices are equal. */
__attribute__((unused)) static int64_t shards_whole_index(const int64_t *local, int dims, int dim, int blocks, int rank,
                                                          int64_t extent, int64_t k)
{
    int64_t index = 0, stride = 1;
    for (int d = dims - 1; d >= 0; d--) {
        int64_t at = k % local[d], whole = local[d];
        if (d == dim) {
            const int64_t shard = local[d] / blocks, block = extent / blocks;
            at = at / shard * block + rank * shard + at % shard;
            whole = extent;
            if (at >= extent) return -1;
        }
        index += at * stride;
        stride *= whole;
        k /= local[d];
    }
    return index;
}

#endif
