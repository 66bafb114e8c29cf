/*
 * Rows of the operator table: what published models add, and backward passes of norms with frozen parameters. New
 * groups follow the older ones: numbers of the other types, and so the order of layers' structures, do not change.
 */
#include "hapt/packing.h"
#include "ops_rows.h"

static enum hapt_status infer_head_rms_norm(const struct hapt_graph *graph, const struct hapt_op *op,
                                            struct hapt_tensor *output)
{
    const int64_t heads = op->integer[0], head = graph->tensor[op->input[1]].shape[0];
    HAPT_TRY(hapt_op_infer_rms_norm(graph, op, output));
    if (heads < 1 || graph->tensor[op->input[0]].shape[2] / head != heads ||
        graph->tensor[op->input[0]].shape[2] % head != 0)
        return hapt_op_bad_attribute(op, "the width of its input is not heads x the elements of gamma");
    output[1].shape[2] = heads;
    return HAPT_OK;
}

static enum hapt_status infer_geglu(const struct hapt_graph *graph, const struct hapt_op *op,
                                    struct hapt_tensor *output)
{
    (void)graph, (void)output;
    return op->integer[0] == 0 || op->integer[0] == 1 ? HAPT_OK
                                                      : hapt_op_bad_attribute(op, "its kind is neither tanh nor erf");
}

static enum hapt_status infer_scale(const struct hapt_graph *graph, const struct hapt_op *op,
                                    struct hapt_tensor *output)
{
    (void)graph, (void)output;
    return isfinite(op->real[0]) ? HAPT_OK : hapt_op_bad_attribute(op, "its factor is not finite");
}

static enum hapt_status infer_softcap(const struct hapt_graph *graph, const struct hapt_op *op,
                                      struct hapt_tensor *output)
{
    (void)graph, (void)output;
    return op->real[0] > 0 && isfinite(op->real[0]) ? HAPT_OK : hapt_op_bad_attribute(op, "its limit is not positive");
}

static enum hapt_status infer_dropout(const struct hapt_graph *graph, const struct hapt_op *op,
                                      struct hapt_tensor *output)
{
    (void)output;
    if (graph->tensor[op->input[1]].role != HAPT_ROLE_ROW_KEYS)
        return hapt_op_bad_attribute(op, "its keys are not the input with the role row_keys");
    if (op->integer[0] < 0 || op->integer[0] > UINT32_MAX)
        return hapt_op_bad_attribute(op, "its number does not fit in 32 bits");
    return op->real[0] >= 0 && op->real[0] < 1
               ? HAPT_OK
               : hapt_op_bad_attribute(op, "the share that it drops is not between 0 and 1");
}

static enum hapt_status infer_class_and_mean(const struct hapt_graph *graph, const struct hapt_op *op,
                                             struct hapt_tensor *output)
{
    const int64_t *shape = graph->tensor[op->input[0]].shape;
    if (shape[1] < 2) return hapt_op_bad_attribute(op, "it needs a class token and at least one patch");
    output[0].shape[1] = 2 * shape[2];
    return HAPT_OK;
}

static enum hapt_status infer_linear_packed(const struct hapt_graph *graph, const struct hapt_op *op,
                                            struct hapt_tensor *output)
{
    const struct hapt_tensor *x = &graph->tensor[op->input[0]], *weight = &graph->tensor[op->input[1]];
    (void)output;
    if (hapt_packing_of(weight->shape[2]) == HAPT_PACKING_NONE)
        return hapt_op_bad_attribute(op, "its weight's blocks do not have 5, 9 or 16 words");
    if (weight->kind != HAPT_TENSOR_PARAMETER || weight->trainable)
        return hapt_op_bad_attribute(op, "its weight is no frozen parameter");
    if (op->input[2] >= 0 && graph->tensor[op->input[2]].trainable)
        return hapt_op_bad_attribute(op, "its bias trains (another operator may add it)");
    return x->shape[x->dims - 1] == weight->shape[1] * HAPT_PACKING_COLUMNS
               ? HAPT_OK
               : hapt_op_bad_attribute(op, "the width of its input is not 32 x the blocks of its weight");
}

/* As of the product with the unpacked weight. Input 0 is x or dy, the weight another one. */
static double flops_linear_packed(const struct hapt_graph *graph, const struct hapt_op *op, double rows_fraction)
{
    const struct hapt_tensor *x = &graph->tensor[op->input[0]], *weight = &graph->tensor[op->input[1]];
    const int64_t columns = weight->shape[1] * HAPT_PACKING_COLUMNS, width = x->shape[x->dims - 1],
                  rows = hapt_tensor_elements(x) / (width > 0 ? width : 1);
    return 2 * rows_fraction * (double)rows * (double)columns * (double)weight->shape[0];
}

/* The weight is unpacked to memory and read from there. */
static double bytes_linear_packed(const struct hapt_graph *graph, const struct hapt_op *op)
{
    const struct hapt_tensor *x = &graph->tensor[op->input[0]];
    const struct hapt_tensor unpacked = hapt_tensor_published(&graph->tensor[op->input[1]]);
    return 2 * (double)hapt_tensor_elements(&unpacked) * (double)hapt_dtype_bytes(x->dtype);
}

/* clang-format off */
const struct hapt_op_type hapt_ops_decoder[] = {
    {.name = "layer_norm_dx", .signature = "...d!,d!,...,...,...d!->...d!", .dtypes = "ccffc->c", .flops_per_element = 11,
     .attributes = "x, gamma, mean, rstd, dy -> dx"},
    {.name = "rms_norm_dx", .signature = "...d!,d!,...,...d!->...d!", .dtypes = "ccfc->c", .flops_per_element = 9,
     .attributes = "x, gamma, rstd, dy -> dx; real[1] added to gamma"},
    {.name = "head_rms_norm", .signature = "bte/h,n!->bte/h,bth", .dtypes = "cc->cf", .flops_per_element = 4, .sized_letters = "h",
     .infer = infer_head_rms_norm, .backward = "head_rms_norm_backward", .backward_operands = "01Bd>01", .backward_frozen = "head_rms_norm_dx",
     .attributes = "x, gamma -> y, rstd: rms_norm of each head; integer[0] heads, real[0] epsilon, real[1] added to gamma"},
    {.name = "head_rms_norm_backward", .signature = "bte/h,n!,bth,bte/h->bte/h,n!", .dtypes = "ccfc->cf", .sized_letters = "h",
     .flops_per_element = 11, .attributes = "x, gamma, rstd, dy -> dx, dgamma; integer[0] heads, real[1] added to gamma"},
    {.name = "head_rms_norm_dx", .signature = "bte/h,n!,bth,bte/h->bte/h", .dtypes = "ccfc->c", .sized_letters = "h",
     .flops_per_element = 9, .attributes = "x, gamma, rstd, dy -> dx; integer[0] heads, real[1] added to gamma"},
    {.name = "geglu", .signature = "...,...->...", .dtypes = "cc->c", .flops_per_element = 11, .infer = infer_geglu,
     .backward = "geglu_backward", .backward_operands = "01d>01", .attributes = "gate, up -> gelu(gate) up; integer[0] 0 tanh, 1 erf"},
    {.name = "geglu_backward", .signature = "...,...,...->...,...", .dtypes = "ccc->cc", .flops_per_element = 20,
     .attributes = "gate, up, dy -> dgate, dup; integer[0] 0 tanh, 1 erf"},
    {.name = "scale", .signature = "...->...", .dtypes = "c->c", .flops_per_element = 1, .linear = true, .infer = infer_scale,
     .backward = "scale", .backward_operands = "d>0", .attributes = "x -> real[0] x"},
    {.name = "softcap", .signature = "...->...", .dtypes = "c->c", .flops_per_element = 8, .infer = infer_softcap,
     .backward = "softcap_dx", .backward_operands = "Ad>0", .attributes = "x -> c tanh(x / c); real[0] c (Gemma 2)"},
    {.name = "softcap_dx", .signature = "...,...->...", .dtypes = "cc->c", .flops_per_element = 4,
     .attributes = "y, dy -> dx; real[0] c"},
    {.name = "moe_gate_over_all", .signature = "bte!->btk!,btk!,bt", .dtypes = "c->fif", .flops_per_element = 4, .infer = hapt_op_infer_gate,
     .backward = "moe_gate_over_all_dx", .backward_operands = "0ABCd>0",
     .attributes = "logits -> weights (of the chosen, in the softmax over all), experts, logsumexp; integer[0] experts per token"},
    {.name = "moe_gate_over_all_dx", .signature = "bte!,btk!,btk!,bt,btk!->bte!", .dtypes = "cfiff->c", .flops_per_element = 4,
     .attributes = "logits, weights, experts, logsumexp, dweights -> dlogits"},
    {.name = "add_row", .signature = "...d,r!d->...d", .dtypes = "cc->c", .flops_per_element = 1, .backward = "add_row_backward",
     .backward_operands = "1d>01", .attributes = "x, table -> x + the first row of the table (BERT's token types)"},
    {.name = "add_row_backward", .signature = "r!d,...d->...d,r!d", .dtypes = "cc->cf", .flops_per_element = 1,
     .attributes = "table, dy -> dx, dtable: the sum of dy in the first row, zero in the others"},
    {.name = "layer_scale", .signature = "...d,d->...d", .dtypes = "cc->c", .flops_per_element = 1, .backward = "layer_scale_backward",
     .backward_operands = "01d>01", .attributes = "x, gamma -> gamma x, column by column (DINOv2)"},
    {.name = "layer_scale_backward", .signature = "...d,d,...d->...d,d", .dtypes = "ccc->cf", .flops_per_element = 3,
     .attributes = "x, gamma, dy -> dx, dgamma"},
    {.name = "class_and_mean", .signature = "bt!d!->be!", .dtypes = "c->c", .flops_per_element = 1, .infer = infer_class_and_mean,
     .backward = "class_and_mean_dx", .backward_operands = "d>0",
     .attributes = "x -> y [b][2 d]: the first token, then the mean of the others (DINOv2's classifier)"},
    {.name = "class_and_mean_dx", .signature = "be!->bt!d!", .dtypes = "c->c", .flops_per_element = 1, .attributes = "dy -> dx"},
    {.name = "linear_packed", .signature = "...i/g,ogw!,o?->...o", .dtypes = "cfc->c", .heavy = true, .product = true, .packed = 1,
     .flops = flops_linear_packed, .pass_bytes = bytes_linear_packed, .infer = infer_linear_packed, .backward = "linear_packed_dx", .backward_operands = "d1>0",
     .attributes = "x, w, bias -> y = x w' + bias; w is frozen and packed (packing.h): blocks of 32 columns"},
    {.name = "linear_packed_dx", .signature = "...o,ogw!->...i/g", .dtypes = "cf->c", .heavy = true, .product = true, .packed = 1,
     .flops = flops_linear_packed, .pass_bytes = bytes_linear_packed, .attributes = "dy, w -> dx"},
    {.name = "dropout", .signature = "bt!d!,bk!->bt!d!", .dtypes = "ci->c", .flops_per_element = 25, .numbered = true,
     .infer = infer_dropout, .backward = "dropout", .backward_operands = "d1>0",
     .attributes = "x, keys [b][2] -> x / (1 - p) where it is kept, else 0, as random numbers of the key say (philox.h); "
                   "the key 0 0: x. integer[0] a number of its own in the model, real[0] p"},
    {.name = NULL},
};
/* clang-format on */
