/* Rows of the operator table: images as token sequences (vision transformers). */
#include "ops_rows.h"

/* Shape of the patches of images [b][c][y][x], with a kernel [o][c][h][w]. */
static enum hapt_status infer_patch_embedding(const struct hapt_graph *graph, const struct hapt_op *op,
                                              struct hapt_tensor *output)
{
    const int64_t *image = graph->tensor[op->input[0]].shape, *kernel = graph->tensor[op->input[1]].shape;
    if (image[2] % kernel[2] != 0 || image[3] % kernel[3] != 0)
        return hapt_op_bad_attribute(op, "its images are not a multiple of the weight's patch size");
    output[0].shape[1] = image[2] / kernel[2] * (image[3] / kernel[3]);
    return HAPT_OK;
}

static enum hapt_status infer_class_token(const struct hapt_graph *graph, const struct hapt_op *op,
                                          struct hapt_tensor *output)
{
    const int64_t patches = graph->tensor[op->input[0]].shape[1];
    const int64_t *class = graph->tensor[op->input[1]].shape, *position = graph->tensor[op->input[2]].shape;
    (void)output;
    if (class[0] == 1 && class[1] == 1 && position[1] == patches + 1) return HAPT_OK;
    return hapt_op_bad_attribute(op, "it needs a class token [1][1][d] and positions [1][patches + 1][d]");
}

static enum hapt_status infer_take_token(const struct hapt_graph *graph, const struct hapt_op *op,
                                         struct hapt_tensor *output)
{
    (void)output;
    if (op->integer[0] >= 0 && op->integer[0] < graph->tensor[op->input[0]].shape[1]) return HAPT_OK;
    return hapt_op_bad_attribute(op, "it has no token with that index");
}

/* Every pixel contributes once to every output channel. */
static double flops_patch_embedding(const struct hapt_graph *graph, const struct hapt_op *op, double rows_fraction)
{
    const int64_t outputs = graph->tensor[op->input[1]].shape[0];
    return 2 * rows_fraction * (double)outputs * (double)hapt_tensor_elements(&graph->tensor[op->input[0]]);
}

static double flops_patch_embedding_dw(const struct hapt_graph *graph, const struct hapt_op *op, double rows_fraction)
{
    const int64_t outputs = graph->tensor[op->input[1]].shape[2]; /* dy [b][p][o] */
    return 2 * rows_fraction * (double)outputs * (double)hapt_tensor_elements(&graph->tensor[op->input[0]]);
}

static enum hapt_status gradient_patch_embedding(struct hapt_graph *graph, int op)
{
    const int *in = graph->op[op].input;
    const int input[] = {in[0], hapt_gradient_incoming(graph, op)};
    if (hapt_gradient_needed(graph, in[0]))
        return hapt_fail(HAPT_ERR_INPUT, "take the patches from the model's images",
                         "operator %s passes no gradient to %s", graph->op[op].name, graph->tensor[in[0]].name);
    return hapt_gradient_append(graph, op, "patch_embedding_dw", input, 2, &in[1], in[2] < 0 ? 1 : 2);
}

/* clang-format off */
const struct hapt_op_type hapt_ops_patches[] = {
    {.name = "patch_embedding", .signature = "bcy!x!,och!w!,o?->bp!o", .dtypes = "fcc->c", .heavy = true,
     .product = true, .flops = flops_patch_embedding, .infer = infer_patch_embedding, .gradient = gradient_patch_embedding,
     .attributes = "images, w, bias -> one token per patch of the size of w, row by row"},
    {.name = "patch_embedding_dw", .signature = "bcy!x!,bp!o->och!w!,o?", .dtypes = "fc->ff", .heavy = true,
     .product = true, .flops = flops_patch_embedding_dw, .attributes = "images, dy -> dw, dbias"},
    {.name = "class_token", .signature = "bp!d,u!w!d,u!t!d,m!d?->bt!d", .dtypes = "cccc->c", .flops_per_element = 1,
     .infer = infer_class_token, .backward = "class_token_backward", .backward_operands = "d>012",
     .attributes = "patches, class token [1][1][d], positions [1][p + 1][d], and a mask token that is not used (DINOv2) -> "
                   "class token and patches, with positions added"},
    {.name = "class_token_backward", .signature = "bt!d->bp!d,u!w!d,u!t!d", .dtypes = "c->cff", .flops_per_element = 1,
     .attributes = "dy -> dpatches, dclass, dpositions"},
    {.name = "take_token", .signature = "bt!d->bd", .dtypes = "c->c", .flops_per_element = 0, .infer = infer_take_token,
     .backward = "take_token_dx", .backward_operands = "d>0", .attributes = "x -> y; integer[0] token index"},
    {.name = "take_token_dx", .signature = "bd->bt!d", .dtypes = "c->c", .flops_per_element = 0,
     .attributes = "dy -> dx; integer[0] token index"},
    {.name = NULL},
};
/* clang-format on */
