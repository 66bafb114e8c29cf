/*
 * THE operator table: joins its row groups (ops_*.c), and computes FLOPs and bytes of any operator. To add an operator:
 * add a row to the right group, and kernels of its name to the back ends.
 */
#include <pthread.h>
#include <stdatomic.h>

#include "hapt/env.h"
#include "ops_rows.h"

/* All row groups; type numbers count through them in this order. */
static const struct hapt_op_type *const row_groups[] = {
    hapt_ops_transformer, hapt_ops_llama,   hapt_ops_patches, hapt_ops_moe,       hapt_ops_image,
    hapt_ops_collective,  hapt_ops_decoder, hapt_ops_running, hapt_ops_documents, hapt_ops_shape,
    hapt_ops_maps,        hapt_ops_grouped, hapt_ops_losses,  hapt_ops_group_norm};
enum { MAX_TYPES = 256 };
static const struct hapt_op_type *table[MAX_TYPES];
static int table_count;
static pthread_once_t table_once = PTHREAD_ONCE_INIT;
static atomic_bool is_joined; /* most calls need no more */

static void join_row_groups(void)
{
    for (size_t g = 0; g < sizeof row_groups / sizeof row_groups[0]; g++) {
        for (const struct hapt_op_type *row = row_groups[g]; row->name; row++) {
            HAPT_ASSERT(table_count < MAX_TYPES);
            table[table_count++] = row;
        }
    }
    atomic_store_explicit(&is_joined, true, memory_order_release);
}

int hapt_op_type_count(void)
{
    if (!atomic_load_explicit(&is_joined, memory_order_acquire)) pthread_once(&table_once, join_row_groups);
    return table_count;
}

const struct hapt_op_type *hapt_op_type_at(int type)
{
    HAPT_ASSERT(type >= 0 && type < hapt_op_type_count());
    return table[type];
}

int hapt_op_type_find(const char *name)
{
    for (int type = 0; type < hapt_op_type_count(); type++)
        if (strcmp(table[type]->name, name) == 0) return type;
    return -1;
}

uint64_t hapt_op_hash_integers(uint64_t hash, const struct hapt_op *op)
{
    const size_t own = hapt_op_type_at(op->type)->numbered; /* 1: integer[0] is left out */
    return hapt_hash(hash, &op->integer[own], sizeof op->integer - own * sizeof op->integer[0]);
}

enum hapt_status hapt_op_bad_attribute(const struct hapt_op *op, const char *what)
{
    return hapt_fail(HAPT_ERR_INPUT, "see the attributes in the operator table", "operator %s (%s): %s", op->name,
                     hapt_op_type_at(op->type)->name, what);
}

double hapt_op_flops(const struct hapt_graph *graph, const struct hapt_op *op, double fraction)
{
    const struct hapt_op_type *type = hapt_op_type_at(op->type);
    double flops = type->flops ? type->flops(graph, op, fraction) : 0;
    if (type->contracts) {
        struct hapt_letter_sizes sizes;
        enum hapt_dtype compute;
        if (hapt_signature_bind(graph, op, true, &sizes, &compute) != HAPT_OK) return flops;
        double product = 2 * fraction;
        for (int letter = 0; letter < 26; letter++)
            if (sizes.size[letter] > 0) product *= (double)sizes.size[letter];
        return flops + product;
    }
    double largest = 0;
    for (int i = 0; i < op->input_count; i++) {
        if (op->input[i] < 0) continue;
        const double elements = (double)hapt_tensor_elements(&graph->tensor[op->input[i]]);
        if (elements > largest) largest = elements;
    }
    return flops + fraction * type->flops_per_element * largest;
}

/* Bytes that one operand moves: all of a parameter or its gradient; `fraction` of any other tensor. */
static double operand_bytes(const struct hapt_graph *graph, int tensor, double fraction)
{
    const struct hapt_tensor *operand = &graph->tensor[tensor];
    const struct hapt_tensor *of = operand->primal >= 0 ? &graph->tensor[operand->primal] : operand;
    const bool counts_fully = of->kind == HAPT_TENSOR_PARAMETER;
    return (double)hapt_tensor_bytes(operand) * (counts_fully ? 1.0 : fraction);
}

double hapt_op_pass_bytes(const struct hapt_graph *graph, const struct hapt_op *op)
{
    const struct hapt_op_type *type = hapt_op_type_at(op->type);
    return type->pass_bytes ? type->pass_bytes(graph, op) : 0;
}

double hapt_op_bytes(const struct hapt_graph *graph, const struct hapt_op *op, double fraction)
{
    double bytes = 0, limit = INFINITY;
    const struct hapt_op_type *type = hapt_op_type_at(op->type);
    if (type->operand_bytes_limit) limit = type->operand_bytes_limit(graph, op, fraction);
    for (int i = 0; i < op->input_count; i++)
        if (op->input[i] >= 0) bytes += fmin(limit, operand_bytes(graph, op->input[i], fraction));
    for (int o = 0; o < op->output_count; o++) {
        const double once = fmin(limit, operand_bytes(graph, op->output[o], fraction));
        bytes += once * (op->accumulate >> o & 1u ? 2.0 : 1.0);
    }
    return bytes;
}
