/* Bytes that an operator with a cut reads and writes. */
#include <math.h>

#include "hapt/ops.h"
#include "hapt/synthesis.h"

static bool has_rows(const struct hapt_graph *graph, int tensor)
{
    const struct hapt_tensor *of = &graph->tensor[tensor];
    if (of->primal >= 0) of = &graph->tensor[of->primal];
    return of->kind != HAPT_TENSOR_PARAMETER && of->role != HAPT_ROLE_LOSS_SCALE && tensor != graph->loss;
}

double hapt_spmd_tensor_bytes(const struct hapt_graph *graph, int tensor, int sharers)
{
    return (double)hapt_tensor_bytes(&graph->tensor[tensor]) / (has_rows(graph, tensor) ? sharers : 1);
}

static double operand_bytes(const struct hapt_spmd_work *work, int tensor, bool sharded, int sharers)
{
    return hapt_spmd_tensor_bytes(work->graph, tensor, sharers) * (sharded ? work->share : 1);
}

double hapt_spmd_work_bytes(const struct hapt_spmd_work *work, int sharers)
{
    const struct hapt_op *op = &work->graph->op[work->op];
    const struct hapt_op_type *type = hapt_op_type_at(op->type);
    /* Only the indexed rows of a table are touched. */
    const double limit =
        type->operand_bytes_limit ? type->operand_bytes_limit(work->graph, op, work->share / sharers) : INFINITY;
    double bytes = 0;
    for (int i = 0; i < op->input_count; i++)
        if (op->input[i] >= 0)
            bytes += fmin(limit, operand_bytes(work, op->input[i], work->sharded_input >> i & 1u, sharers));
    for (int o = 0; o < op->output_count; o++)
        if (op->output[o] >= 0)
            bytes += fmin(limit, operand_bytes(work, op->output[o], work->sharded_output >> o & 1u, sharers)) *
                     (op->accumulate >> o & 1u ? 2 : 1);
    return bytes;
}
