/*
 * Rows of the operator table: convolutions whose channels are in groups. Each group of output channels reads the input
 * channels of its own group, so groups shard like heads. One group per channel is a depthwise convolution.
 */
#include "ops_rows.h"

enum { GROUPS, STRIDE, PADDING, DILATION, MOST_DILATION = 1 << 10 };

static enum hapt_status infer_grouped(const struct hapt_graph *graph, const struct hapt_op *op,
                                      struct hapt_tensor *output)
{
    const int64_t *x = graph->tensor[op->input[0]].shape, *w = graph->tensor[op->input[1]].shape;
    const int64_t groups = op->integer[GROUPS], dilation = op->integer[DILATION] == 0 ? 1 : op->integer[DILATION];
    if (groups < 1 || x[1] % groups != 0 || w[0] % groups != 0 || x[1] / groups != w[1])
        return hapt_op_bad_attribute(op, "its channels are not groups of the weight's channels");
    if (dilation < 1 || dilation > MOST_DILATION)
        return hapt_op_bad_attribute(op, "its dilation is not between 1 and 1024");
    const int64_t kernel[2] = {dilation * (w[2] - 1) + 1, dilation * (w[3] - 1) + 1};
    return hapt_op_infer_window(op, x + 2, kernel, op->integer[STRIDE], op->integer[PADDING], &output[0]);
}

/* Each element of the result is a sum over one group's channels. */
static double flops_of(const struct hapt_tensor *y, const struct hapt_tensor *w, double rows_fraction)
{
    return 2 * rows_fraction * (double)hapt_tensor_elements(y) * (double)(w->shape[1] * w->shape[2] * w->shape[3]);
}

static double flops_grouped(const struct hapt_graph *graph, const struct hapt_op *op, double rows_fraction)
{
    return flops_of(&graph->tensor[op->output[0]], &graph->tensor[op->input[1]], rows_fraction);
}

static double flops_grouped_dx(const struct hapt_graph *graph, const struct hapt_op *op, double rows_fraction)
{
    return flops_of(&graph->tensor[op->input[0]], &graph->tensor[op->input[1]], rows_fraction);
}

static double flops_grouped_dw(const struct hapt_graph *graph, const struct hapt_op *op, double rows_fraction)
{
    return flops_of(&graph->tensor[op->input[1]], &graph->tensor[op->output[0]], rows_fraction);
}

static enum hapt_status gradient_grouped(struct hapt_graph *graph, int op)
{
    return hapt_gradient_product(graph, op, "grouped_conv2d_dx", "grouped_conv2d_dw");
}

/* clang-format off */
const struct hapt_op_type hapt_ops_grouped[] = {
    {.name = "grouped_conv2d", .signature = "bc/gx!y!,o/gi!k!l!,o/g?->bo/gp!q!", .dtypes = "ccc->c", .heavy = true, .product = true,
     .sized_letters = "g", .flops = flops_grouped, .infer = infer_grouped, .gradient = gradient_grouped,
     .attributes = "x, w [out][in / groups][height][width], bias -> y; integer[0] groups, integer[1] stride, integer[2] padding (zeros) "
                   "on each side, integer[3] dilation (0: 1)"},
    {.name = "grouped_conv2d_dx", .signature = "bo/gp!q!,o/gi!k!l!->bc/gx!y!", .dtypes = "cc->c", .heavy = true, .product = true,
     .sized_letters = "g", .flops = flops_grouped_dx, .attributes = "dy, w -> dx; as grouped_conv2d"},
    {.name = "grouped_conv2d_dw", .signature = "bc/gx!y!,bo/gp!q!->o/gi!k!l!,o/g?", .dtypes = "cc->ff", .heavy = true, .product = true,
     .sized_letters = "g", .flops = flops_grouped_dw, .attributes = "x, dy -> dw, dbias; as grouped_conv2d"},
    {.name = NULL},
};
/* clang-format on */
