/*
 * Rows of the operator table: batch norm with running statistics (Ioffe and Szegedy 2015, algorithm 2). Training
 * normalises by the statistics of the microbatch, passes over held-out rows by the running ones. Those are parameters
 * [channels] without a gradient of their own: the backward pass adds up the statistics of the microbatches instead, and
 * the update moves them towards their mean (struct hapt_update). The running variance is that of a sample: N / (N - 1)
 * times the batch's, as in PyTorch.
 */
#include "ops_rows.h"

enum { RUNNING_MEAN = 5, RUNNING_VARIANCE, TRAINING };

static enum hapt_status infer_running(const struct hapt_graph *graph, const struct hapt_op *op,
                                      struct hapt_tensor *output)
{
    for (int i = RUNNING_MEAN; i <= RUNNING_VARIANCE; i++)
        if (graph->tensor[op->input[i]].kind != HAPT_TENSOR_PARAMETER)
            return hapt_op_bad_attribute(op, "its running statistics are not parameters");
    if (graph->tensor[op->input[TRAINING]].role != HAPT_ROLE_TRAINING)
        return hapt_op_bad_attribute(op, "its last input is not the one with the role training");
    return hapt_op_infer_statistics(graph, op, output);
}

static enum hapt_status gradient_running(struct hapt_graph *graph, int op)
{
    const int *in = graph->op[op].input, batch[] = {in[1], in[2]}, running[] = {in[RUNNING_MEAN], in[RUNNING_VARIANCE]};
    for (int i = 0; i < 2; i++)
        if (hapt_op_forward_readers(graph, running[i]) != 1)
            return hapt_fail(HAPT_ERR_INPUT, "give each batch norm its own running mean and variance",
                             "a running statistic of operator %s has other readers", graph->op[op].name);
    HAPT_TRY(hapt_gradient_batch_norm(graph, op));
    if (!hapt_gradient_needed(graph, running[0]) && !hapt_gradient_needed(graph, running[1])) return HAPT_OK;
    return hapt_gradient_append(graph, op, "batch_norm_statistics", batch, 2, running, 2);
}

/* clang-format off */
const struct hapt_op_type hapt_ops_running[] = {
    {.name = "batch_norm_running", .counts_batch = true, .signature = "bcx!y!,c,c,c,c,c,c,->bcx!y!", .dtypes = "cffccccf->c",
     .flops_per_element = 2, .statistics = 1u << RUNNING_MEAN | 1u << RUNNING_VARIANCE, .infer = infer_running, .gradient = gradient_running,
     .attributes = "x, mean, variance, gamma, beta, running mean, running variance, training -> y; as batch_norm"},
    {.name = "batch_norm_statistics", .signature = "c,c->c,c", .dtypes = "ff->ff", .flops_per_element = 1, .linear = true,
     .attributes = "mean, variance -> mean, N / (N - 1) variance (N > 1); integer[0] N, of the full batch"},
    {.name = NULL},
};
/* clang-format on */
