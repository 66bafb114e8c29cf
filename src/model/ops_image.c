/*
 * Rows of the operator table: images. Letters: b rows, c and o channels, x and y height and width, k and l height and
 * width of the kernel, p and q those of the result.
 *
 * Batch norm with statistics of the full batch is three operators: the mean, the variance around it, and the
 * normalisation by both. The first two sum x / N over their rows, where N counts the full batch. So shards of a batch
 * produce partial sums. The gradients of mean and variance, computed by batch_norm_sums, are partial sums, too.
 */
#include "ops_rows.h"

enum { MAX_KERNEL = 1 << 15 }; /* limit of kernels, strides and paddings: sizes cannot overflow */

/* Number of window positions along a dimension; 0: none. */
static int64_t window_positions(int64_t extent, int64_t kernel, int64_t stride, int64_t padding)
{
    const int64_t room = extent + 2 * padding - kernel;
    return room < 0 ? 0 : room / stride + 1;
}

enum hapt_status hapt_op_infer_window(const struct hapt_op *op, const int64_t *image, const int64_t *kernel,
                                      int64_t stride, int64_t padding, struct hapt_tensor *output)
{
    if (stride < 1 || stride > MAX_KERNEL) return hapt_op_bad_attribute(op, "its stride is not between 1 and 32768");
    if (padding < 0 || padding > MAX_KERNEL) return hapt_op_bad_attribute(op, "its padding is not between 0 and 32768");
    for (int d = 0; d < 2; d++) {
        if (kernel[d] < 1 || kernel[d] > MAX_KERNEL)
            return hapt_op_bad_attribute(op, "its kernel is not between 1 and 32768 wide");
        output->shape[2 + d] = window_positions(image[d], kernel[d], stride, padding);
        if (output->shape[2 + d] < 1) return hapt_op_bad_attribute(op, "its kernel is larger than the image");
    }
    return HAPT_OK;
}

static enum hapt_status infer_conv2d(const struct hapt_graph *graph, const struct hapt_op *op,
                                     struct hapt_tensor *output)
{
    const int64_t *x = graph->tensor[op->input[0]].shape, *w = graph->tensor[op->input[1]].shape;
    return hapt_op_infer_window(op, x + 2, w + 2, op->integer[0], op->integer[1], &output[0]);
}

static enum hapt_status infer_max_pool(const struct hapt_graph *graph, const struct hapt_op *op,
                                       struct hapt_tensor *output)
{
    const int64_t kernel[2] = {op->integer[0], op->integer[0]};
    if (op->integer[2] > kernel[0] / 2) return hapt_op_bad_attribute(op, "its padding exceeds half its kernel");
    return hapt_op_infer_window(op, graph->tensor[op->input[0]].shape + 2, kernel, op->integer[1], op->integer[2],
                                &output[0]);
}

static enum hapt_status infer_adaptive_pool(const struct hapt_graph *graph, const struct hapt_op *op,
                                            struct hapt_tensor *output)
{
    (void)graph;
    if (op->integer[0] < 1 || op->integer[0] > MAX_KERNEL)
        return hapt_op_bad_attribute(op, "its result is not between 1 and 32768 wide");
    output[0].shape[2] = output[0].shape[3] = op->integer[0];
    return HAPT_OK;
}

static enum hapt_status infer_flatten(const struct hapt_graph *graph, const struct hapt_op *op,
                                      struct hapt_tensor *output)
{
    const int64_t *x = graph->tensor[op->input[0]].shape;
    output[0].shape[1] = x[1] * x[2] * x[3];
    return HAPT_OK;
}

/* N must be at least the number of rows and pixels in this tensor. */
enum hapt_status hapt_op_infer_statistics(const struct hapt_graph *graph, const struct hapt_op *op,
                                          struct hapt_tensor *output)
{
    const int64_t *x = graph->tensor[op->input[0]].shape;
    (void)output;
    if (op->real[0] < 0 || op->real[0] >= 1) return hapt_op_bad_attribute(op, "epsilon is not in [0, 1)");
    return op->integer[0] >= x[0] * x[2] * x[3] ? HAPT_OK
                                                : hapt_op_bad_attribute(op, "N is less than its rows and pixels");
}

static enum hapt_status infer_cast(const struct hapt_graph *graph, const struct hapt_op *op, struct hapt_tensor *output)
{
    (void)graph;
    static const enum hapt_dtype types[] = {HAPT_F32, HAPT_BF16, HAPT_F16};
    if (op->integer[0] < 0 || op->integer[0] > 2)
        return hapt_op_bad_attribute(op, "its type is none of fp32, bf16 and fp16");
    output[0].dtype = types[op->integer[0]];
    return HAPT_OK;
}

/* Pixels are data and need no gradient. */
static enum hapt_status gradient_cast(struct hapt_graph *graph, int op)
{
    return hapt_fail(HAPT_ERR_INPUT, "cast only the model's images", "operator %s passes no gradient on",
                     graph->op[op].name);
}

/* One multiplication and one addition per element of the result, per kernel element and per channel read. */
static double flops_products(const struct hapt_tensor *y, const struct hapt_tensor *w, double rows_fraction)
{
    return 2 * rows_fraction * (double)hapt_tensor_elements(y) * (double)(w->shape[1] * w->shape[2] * w->shape[3]);
}

static double flops_conv2d(const struct hapt_graph *graph, const struct hapt_op *op, double rows_fraction)
{
    return flops_products(&graph->tensor[op->output[0]], &graph->tensor[op->input[1]], rows_fraction);
}

static double flops_conv2d_dx(const struct hapt_graph *graph, const struct hapt_op *op, double rows_fraction)
{
    return flops_products(&graph->tensor[op->input[0]], &graph->tensor[op->input[1]], rows_fraction);
}

static double flops_conv2d_dw(const struct hapt_graph *graph, const struct hapt_op *op, double rows_fraction)
{
    return flops_products(&graph->tensor[op->input[1]], &graph->tensor[op->output[0]], rows_fraction);
}

static enum hapt_status gradient_conv2d(struct hapt_graph *graph, int op)
{
    return hapt_gradient_product(graph, op, "conv2d_dx", "conv2d_dw");
}

/* Is `tensor` the statistic `type` of x (around `mean`), over as many rows and pixels as operator `norm` has? */
static bool made_of(const struct hapt_graph *graph, int norm, int tensor, const char *type, int x, int mean)
{
    const int producer = graph->tensor[tensor].producer;
    if (producer < 0 || producer >= graph->forward_count) return false;
    const struct hapt_op *op = &graph->op[producer];
    return op->type == hapt_op_type_find(type) && op->integer[0] == graph->op[norm].integer[0] && op->input[0] == x &&
           (mean < 0 || op->input[1] == mean);
}

int hapt_op_forward_readers(const struct hapt_graph *graph, int tensor)
{
    int count = 0;
    for (int op = 0; op < graph->forward_count; op++)
        for (int i = 0; i < graph->op[op].input_count; i++) count += graph->op[op].input[i] == tensor;
    return count;
}

/* batch_norm_dx computes the complete gradient of x, including the parts through mean and variance. (The variance does
 * not depend on the mean it is taken around: the deviations from it sum to 0.) So batch_mean and batch_variance add
 * nothing. They must not have other readers than the variance and this operator. */
enum hapt_status hapt_gradient_batch_norm(struct hapt_graph *graph, int op)
{
    const int *in = graph->op[op].input;
    const int x = in[0], mean = in[1], variance = in[2], gamma = in[3], beta = in[4];
    const int incoming = hapt_gradient_incoming(graph, op);
    if (!made_of(graph, op, mean, "batch_mean", x, -1) || !made_of(graph, op, variance, "batch_variance", x, mean))
        return hapt_fail(HAPT_ERR_INPUT, "give each its own batch_mean and batch_variance of its input",
                         "operator %s does not normalise by the statistics of its own input", graph->op[op].name);
    if (hapt_op_forward_readers(graph, mean) != 2 || hapt_op_forward_readers(graph, variance) != 1)
        return hapt_fail(HAPT_ERR_INPUT, "give each its own batch_mean and batch_variance of its input",
                         "statistics of operator %s have other readers, whose gradients would be lost",
                         graph->op[op].name);
    const int sums[] = {x, mean, variance, gamma, incoming}, parts[] = {mean, variance, gamma, beta};
    if (!hapt_gradient_needed(graph, x))
        return hapt_fail(HAPT_ERR_INPUT, "put a layer with parameters before it",
                         "operator %s normalises an input of the model", graph->op[op].name);
    HAPT_TRY(hapt_gradient_append(graph, op, "batch_norm_sums", sums, 5, parts, 4));
    const int dx[] = {x,       mean, variance, gamma, graph->tensor[mean].gradient, graph->tensor[variance].gradient,
                      incoming};
    return hapt_gradient_append(graph, op, "batch_norm_dx", dx, 7, &x, 1);
}

static enum hapt_status gradient_statistics(struct hapt_graph *graph, int op)
{
    (void)graph, (void)op; /* part of batch_norm_dx */
    return HAPT_OK;
}

/* clang-format off */
const struct hapt_op_type hapt_ops_image[] = {
    {.name = "conv2d", .signature = "bcx!y!,ock!l!,o?->bop!q!", .dtypes = "ccc->c", .heavy = true, .product = true,
     .flops = flops_conv2d, .infer = infer_conv2d, .gradient = gradient_conv2d,
     .attributes = "x, w, bias -> y; integer[0] stride, integer[1] padding (zeros) on each side"},
    {.name = "conv2d_dx", .signature = "bop!q!,ock!l!->bcx!y!", .dtypes = "cc->c", .heavy = true, .product = true,
     .flops = flops_conv2d_dx, .attributes = "dy, w -> dx; as conv2d"},
    {.name = "conv2d_dw", .signature = "bcx!y!,bop!q!->ock!l!,o?", .dtypes = "cc->ff", .heavy = true, .product = true,
     .flops = flops_conv2d_dw, .attributes = "x, dy -> dw, dbias; as conv2d"},
    {.name = "cast", .signature = "...->...", .dtypes = "f->c", .infer = infer_cast, .gradient = gradient_cast,
     .attributes = "x (data, fp32) -> y; integer[0] 0 fp32, 1 bf16, 2 fp16"},
    /* The backward reads the output, which is positive exactly where the input is. So the input need not be kept. */
    {.name = "relu", .signature = "...->...", .dtypes = "c->c", .flops_per_element = 1, .backward = "relu_dx", .backward_operands = "Ad>0",
     .attributes = "x -> y"},
    {.name = "relu_dx", .signature = "...,...->...", .dtypes = "cc->c", .flops_per_element = 1, .attributes = "y, dy -> dx"},
    /* The backward finds the position of each maximum again: storing it would cost more memory than the time is worth. */
    {.name = "max_pool", .signature = "bcx!y!->bcp!q!", .dtypes = "c->c", .flops_per_element = 2, .infer = infer_max_pool,
     .backward = "max_pool_dx", .backward_operands = "0d>0", .attributes = "x -> y; integer[0] kernel, integer[1] stride, integer[2] padding"},
    {.name = "max_pool_dx", .signature = "bcx!y!,bcp!q!->bcx!y!", .dtypes = "cc->c", .flops_per_element = 3,
     .attributes = "x, dy -> dx; of equal maxima the first gets the gradient; as max_pool"},
    {.name = "mean_pool", .signature = "bcx!y!->bc", .dtypes = "c->c", .flops_per_element = 1, .backward = "mean_pool_dx", .backward_operands = "d>0",
     .attributes = "x -> mean over the image"},
    {.name = "mean_pool_dx", .signature = "bc->bcx!y!", .dtypes = "c->c", .flops_per_element = 1, .attributes = "dy -> dx"},
    {.name = "adaptive_pool", .signature = "bcx!y!->bcp!q!", .dtypes = "c->c", .flops_per_element = 1, .infer = infer_adaptive_pool,
     .backward = "adaptive_pool_dx", .backward_operands = "d>0",
     .attributes = "x -> means over integer[0] x integer[0] windows that cover the image; they overlap if its size is no multiple"},
    {.name = "adaptive_pool_dx", .signature = "bcp!q!->bcx!y!", .dtypes = "c->c", .flops_per_element = 1,
     .attributes = "dy -> dx; as adaptive_pool"},
    {.name = "flatten", .signature = "bcx!y!->bf/c", .dtypes = "c->c", .infer = infer_flatten, .backward = "flatten_dx", .backward_operands = "d>0",
     .attributes = "x -> rows with the pixels of all channels"},
    {.name = "flatten_dx", .signature = "bf/c->bcx!y!", .dtypes = "c->c", .attributes = "dy -> dx"},
    {.name = "batch_mean", .counts_batch = true, .signature = "bcx!y!->c", .dtypes = "c->f", .flops_per_element = 1, .infer = hapt_op_infer_statistics,
     .gradient = gradient_statistics, .attributes = "x -> sum of x / N; integer[0] N, of the full batch"},
    {.name = "batch_variance", .counts_batch = true, .signature = "bcx!y!,c->c", .dtypes = "cf->f", .flops_per_element = 3,
     .infer = hapt_op_infer_statistics, .gradient = gradient_statistics,
     .attributes = "x, mean -> sum of (x - mean)^2 / N; integer[0] N, of the full batch"},
    {.name = "batch_norm", .counts_batch = true, .signature = "bcx!y!,c,c,c,c->bcx!y!", .dtypes = "cffcc->c", .flops_per_element = 2,
     .infer = hapt_op_infer_statistics, .gradient = hapt_gradient_batch_norm,
     .attributes = "x, mean, variance, gamma, beta -> y; integer[0] N, of the full batch, real[0] epsilon"},
    {.name = "batch_norm_sums", .signature = "bcx!y!,c,c,c,bcx!y!->c,c,c,c", .dtypes = "cffcc->ffff", .flops_per_element = 5,
     .attributes = "x, mean, variance, gamma, dy -> dmean, dvariance, dgamma, dbeta; as batch_norm"},
    {.name = "batch_norm_dx", .signature = "bcx!y!,c,c,c,c,c,bcx!y!->bcx!y!", .dtypes = "cffcffc->c", .flops_per_element = 6,
     .attributes = "x, mean, variance, gamma, dmean, dvariance, dy -> dx, through the statistics, too; as batch_norm"},
    {.name = NULL},
};
/* clang-format on */
