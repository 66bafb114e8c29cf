/* Rows of the operator table: group norm (arXiv 1803.08494). Groups of channels shard like heads. */
#include "ops_rows.h"

static enum hapt_status infer_group_norm(const struct hapt_graph *graph, const struct hapt_op *op,
                                         struct hapt_tensor *output)
{
    const int64_t channels = graph->tensor[op->input[0]].shape[1], groups = op->integer[0];
    if (groups < 1 || channels % groups != 0)
        return hapt_op_bad_attribute(op, "the number of channels is not a multiple of the groups");
    output[1].shape[1] = output[2].shape[1] = groups;
    return hapt_op_infer_layer_norm(graph, op, output);
}

/* clang-format off */
const struct hapt_op_type hapt_ops_group_norm[] = {
    {.name = "group_norm", .signature = "bc/gx!y!,c/g,c/g->bc/gx!y!,bg,bg", .dtypes = "ccc->cff", .flops_per_element = 7, .sized_letters = "g",
     .infer = infer_group_norm, .backward = "group_norm_backward", .backward_operands = "01BCd>012", .backward_frozen = "group_norm_dx",
     .attributes = "x, gamma, beta -> y, mean, rstd: statistics of each row's groups of channels; integer[0] groups, real[0] epsilon"},
    {.name = "group_norm_backward", .signature = "bc/gx!y!,c/g,bg,bg,bc/gx!y!->bc/gx!y!,c/g,c/g", .dtypes = "ccffc->cff", .sized_letters = "g",
     .flops_per_element = 14, .attributes = "x, gamma, mean, rstd, dy -> dx, dgamma, dbeta; integer[0] groups"},
    {.name = "group_norm_dx", .signature = "bc/gx!y!,c/g,bg,bg,bc/gx!y!->bc/gx!y!", .dtypes = "ccffc->c", .sized_letters = "g",
     .flops_per_element = 11, .attributes = "x, gamma, mean, rstd, dy -> dx; integer[0] groups"},
    {.name = NULL},
};
/* clang-format on */
