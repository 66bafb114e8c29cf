/* Rows of the operator table: transformers, with their attribute checks, extra FLOPs and gradient rules. */
#include "ops_rows.h"

enum hapt_status hapt_op_infer_layer_norm(const struct hapt_graph *graph, const struct hapt_op *op,
                                          struct hapt_tensor *output)
{
    (void)graph, (void)output;
    return op->real[0] >= 0 && op->real[0] < 1 ? HAPT_OK : hapt_op_bad_attribute(op, "epsilon is not in [0, 1)");
}

static enum hapt_status infer_gelu(const struct hapt_graph *graph, const struct hapt_op *op, struct hapt_tensor *output)
{
    (void)graph, (void)output;
    return op->integer[0] == 0 || op->integer[0] == 1 ? HAPT_OK
                                                      : hapt_op_bad_attribute(op, "its kind is neither tanh nor erf");
}

enum hapt_status hapt_op_infer_attention(const struct hapt_graph *graph, const struct hapt_op *op,
                                         struct hapt_tensor *output)
{
    const int64_t heads = op->integer[0], width = graph->tensor[op->input[0]].shape[2];
    if (heads < 1 || width % 3 != 0 || width / 3 % heads != 0)
        return hapt_op_bad_attribute(op, "the width of its input is not 3 x heads x a head size");
    if (op->integer[1] != 0 && op->integer[1] != 1) return hapt_op_bad_attribute(op, "causal is neither 0 nor 1");
    output[0].shape[2] = width / 3;
    output[1].shape[1] = heads;
    return HAPT_OK;
}

/* Per head, two products of [T][head size] and [head size][T] size, and about 5 softmax operations per score; half of
 * it if causal. */
double hapt_op_flops_attention(const struct hapt_graph *graph, const struct hapt_op *op, double rows_fraction)
{
    const int64_t *shape = graph->tensor[op->input[0]].shape; /* [b][t][3d] */
    const double scores = rows_fraction * (double)shape[0] * (double)shape[1] * (double)shape[1];
    return (4.0 * (double)shape[2] / 3.0 + 5.0 * (double)op->integer[0]) * scores * (op->integer[1] ? 0.5 : 1.0);
}

/* Five products: the scores again, and the gradients of q, k, v and the scores. */
double hapt_op_flops_attention_backward(const struct hapt_graph *graph, const struct hapt_op *op, double rows_fraction)
{
    return 2.5 * hapt_op_flops_attention(graph, op, rows_fraction);
}

/* The width of k and v is kv heads x head size. The width of q is a multiple of it: that many query heads share one
 * head of k and v. */
enum hapt_status hapt_op_infer_grouped_attention(const struct hapt_graph *graph, const struct hapt_op *op,
                                                 struct hapt_tensor *output)
{
    const int64_t heads = op->integer[0], q = graph->tensor[op->input[0]].shape[2],
                  k = graph->tensor[op->input[1]].shape[2];
    if (heads < 1 || k % heads != 0) return hapt_op_bad_attribute(op, "the width of k is not its heads x a head size");
    if (q % k != 0) return hapt_op_bad_attribute(op, "the width of q is not a multiple of that of k");
    if (op->integer[1] != 0 && op->integer[1] != 1) return hapt_op_bad_attribute(op, "causal is neither 0 nor 1");
    if (op->integer[2] < 0 || (op->integer[2] > 0 && op->integer[1] == 0))
        return hapt_op_bad_attribute(op, "its window is negative, or attention is not causal");
    if (op->integer[1] == 1 && graph->tensor[op->input[0]].shape[1] != graph->tensor[op->input[1]].shape[1])
        return hapt_op_bad_attribute(op, "it is causal, but q and k have different lengths");
    if (!(op->real[0] >= 0 && isfinite(op->real[0])) || !(op->real[1] >= 0 && isfinite(op->real[1])))
        return hapt_op_bad_attribute(op, "the scale or the limit of its scores is negative");
    output[1].shape[1] = q / (k / heads);
    return HAPT_OK;
}

/* Positions that a query sees on average, as a share of the length; the diagonal counts half. */
static double visible_share(const struct hapt_op *op, int64_t length)
{
    if (op->integer[1] == 0) return 1;
    const double window = op->integer[2] > 0 ? fmin(1, (double)op->integer[2] / (double)length) : 1;
    return window * (1 - 0.5 * window);
}

double hapt_op_flops_grouped_attention(const struct hapt_graph *graph, const struct hapt_op *op, double rows_fraction)
{
    const int64_t *q = graph->tensor[op->input[0]].shape, *k = graph->tensor[op->input[1]].shape; /* [b][t][width] */
    const double scores = rows_fraction * (double)q[0] * (double)q[1] * (double)k[1];
    const double heads = (double)op->integer[0] * (double)q[2] / (double)k[2];
    return (4.0 * (double)q[2] + 5.0 * heads) * scores * visible_share(op, q[1]);
}

double hapt_op_flops_grouped_attention_backward(const struct hapt_graph *graph, const struct hapt_op *op,
                                                double rows_fraction)
{
    return 2.5 * hapt_op_flops_grouped_attention(graph, op, rows_fraction);
}

/* One addition per element of the looked-up rows, not of the table. */
static double flops_embedding(const struct hapt_graph *graph, const struct hapt_op *op, double rows_fraction)
{
    return rows_fraction * (double)hapt_tensor_elements(&graph->tensor[op->output[0]]);
}

static double flops_embedding_dw(const struct hapt_graph *graph, const struct hapt_op *op, double rows_fraction)
{
    return rows_fraction * op->output_count * (double)hapt_tensor_elements(&graph->tensor[op->input[1]]);
}

static double bytes_embedding(const struct hapt_graph *graph, const struct hapt_op *op, double rows_fraction)
{
    return rows_fraction * (double)hapt_tensor_bytes(&graph->tensor[op->output[0]]);
}

/* Gradients are fp32. */
static double bytes_embedding_dw(const struct hapt_graph *graph, const struct hapt_op *op, double rows_fraction)
{
    return rows_fraction * 4 * (double)hapt_tensor_elements(&graph->tensor[op->input[1]]);
}

enum hapt_status hapt_gradient_product(struct hapt_graph *graph, int op, const char *dx, const char *dw)
{
    const int *in = graph->op[op].input;
    const int incoming = hapt_gradient_incoming(graph, op);
    const int for_x[] = {incoming, in[1]}, for_w[] = {in[0], incoming};
    const int weights[] = {in[1], in[2]};
    if (hapt_gradient_needed(graph, in[0])) HAPT_TRY(hapt_gradient_append(graph, op, dx, for_x, 2, &for_w[0], 1));
    if (!hapt_gradient_needed(graph, weights[0]) && !hapt_gradient_needed(graph, weights[1])) return HAPT_OK;
    return hapt_gradient_append(graph, op, dw, for_w, 2, weights, weights[1] < 0 ? 1 : 2);
}

static enum hapt_status gradient_linear(struct hapt_graph *graph, int op)
{
    return hapt_gradient_product(graph, op, "linear_dx", "linear_dw");
}

static enum hapt_status gradient_linear_t(struct hapt_graph *graph, int op)
{
    return hapt_gradient_product(graph, op, "linear_t_dx", "linear_t_dw");
}

static enum hapt_status gradient_add(struct hapt_graph *graph, int op)
{
    const int first = graph->op[op].input[0], second = graph->op[op].input[1];
    HAPT_TRY(hapt_gradient_share(graph, op, first));
    return hapt_gradient_share(graph, op, second);
}

static enum hapt_status infer_cross_entropy(const struct hapt_graph *graph, const struct hapt_op *op,
                                            struct hapt_tensor *output)
{
    (void)graph, (void)output;
    return op->real[0] >= 0 && op->real[0] < 1
               ? HAPT_OK
               : hapt_op_bad_attribute(op, "its label smoothing is not between 0 and 1");
}

/* clang-format off */
const struct hapt_op_type hapt_ops_transformer[] = {
    {.name = "embedding", .signature = "bt,v~d,t!+d?->btd", .dtypes = "icc->c", .flops = flops_embedding,
     .operand_bytes_limit = bytes_embedding, .backward = "embedding_dw", .backward_operands = "0d>12", .attributes = "tokens, table, position -> x; the table of positions may be longer than the sequence"},
    {.name = "embedding_dw", .signature = "bt,btd->v~d,t!+d?", .dtypes = "ic->ff", .flops = flops_embedding_dw,
     .operand_bytes_limit = bytes_embedding_dw, .attributes = "tokens, dy -> dtable, dposition"},
    {.name = "layer_norm", .signature = "...d!,d!,d!->...d!,...,...", .dtypes = "ccc->cff", .flops_per_element = 7,
     .infer = hapt_op_infer_layer_norm, .backward = "layer_norm_backward", .backward_operands = "01BCd>012", .backward_frozen = "layer_norm_dx",
     .attributes = "x, gamma, beta -> y, mean, rstd; real[0] epsilon"},
    {.name = "layer_norm_backward", .signature = "...d!,d!,...,...,...d!->...d!,d!,d!", .dtypes = "ccffc->cff",
     .flops_per_element = 14, .attributes = "x, gamma, mean, rstd, dy -> dx, dgamma, dbeta"},
    {.name = "linear", .signature = "...i,io,o?->...o", .dtypes = "ccc->c", .heavy = true, .contracts = true,
     .gradient = gradient_linear, .attributes = "x, w, bias -> y"},
    {.name = "linear_dx", .signature = "...o,io->...i", .dtypes = "cc->c", .heavy = true, .contracts = true,
     .attributes = "dy, w -> dx"},
    {.name = "linear_dw", .signature = "...i,...o->io,o?", .dtypes = "cc->ff", .heavy = true, .contracts = true,
     .attributes = "x, dy -> dw, dbias"},
    {.name = "linear_t", .signature = "...i,oi,o?->...o", .dtypes = "ccc->c", .heavy = true, .contracts = true,
     .gradient = gradient_linear_t, .attributes = "x, w, bias -> y"},
    {.name = "linear_t_dx", .signature = "...o,oi->...i", .dtypes = "cc->c", .heavy = true, .contracts = true,
     .attributes = "dy, w -> dx"},
    {.name = "linear_t_dw", .signature = "...i,...o->oi,o?", .dtypes = "cc->ff", .heavy = true, .contracts = true,
     .attributes = "x, dy -> dw, dbias"},
    {.name = "attention", .signature = "bt!e/3h->bt!d/h,bht!", .dtypes = "c->cf", .heavy = true, .sized_letters = "h",
     .flops = hapt_op_flops_attention, .infer = hapt_op_infer_attention, .backward = "attention_backward", .backward_operands = "0ABd>0",
     .attributes = "qkv (q, k, v in order, heads inside each) -> out, logsumexp of the scaled scores; "
                   "integer[0] heads, integer[1] causal"},
    {.name = "attention_backward", .signature = "bt!e/3h,bt!d/h,bht!,bt!d/h->bt!e/3h", .dtypes = "ccfc->c",
     .heavy = true, .sized_letters = "h", .flops = hapt_op_flops_attention_backward,
     .attributes = "qkv, out, logsumexp, dout -> dqkv"},
    {.name = "grouped_attention", .signature = "bt!q/g,bu!k/g,bu!k/g->bt!q/g,bn/gt!", .dtypes = "ccc->cf", .heavy = true,
     .sized_letters = "g", .flops = hapt_op_flops_grouped_attention, .infer = hapt_op_infer_grouped_attention,
     .backward = "grouped_attention_backward", .backward_operands = "012ABd>012",
     .attributes = "q, k, v -> out, logsumexp of the scaled scores of all query heads; a head of k and v serves "
                   "(width of q / width of k) consecutive heads of q; k and v may have another length than q; integer[0] heads of k and v, integer[1] causal, "
                   "integer[2] window: a position sees itself and those before it, so many in all; 0: all. "
                   "real[0] scale of the scores; 0: 1 / sqrt(head size). real[1] limit c of scores, c tanh(s / c); 0: none"},
    {.name = "grouped_attention_backward",
     .signature = "bt!q/g,bu!k/g,bu!k/g,bt!q/g,bn/gt!,bt!q/g->bt!q/g,bu!k/g,bu!k/g", .dtypes = "ccccfc->ccc",
     .heavy = true, .sized_letters = "g", .flops = hapt_op_flops_grouped_attention_backward,
     .attributes = "q, k, v, out, logsumexp, dout -> dq, dk, dv; attributes of grouped_attention"},
    {.name = "gelu", .signature = "...->...", .dtypes = "c->c", .flops_per_element = 10, .infer = infer_gelu,
     .backward = "gelu_dx", .backward_operands = "0d>0", .attributes = "x -> y; integer[0] 0 tanh, 1 erf"},
    {.name = "gelu_dx", .signature = "...,...->...", .dtypes = "cc->c", .flops_per_element = 18,
     .attributes = "x, dy -> dx; integer[0] 0 tanh, 1 erf"},
    {.name = "add", .signature = "...,...->...", .dtypes = "cc->c", .flops_per_element = 1, .linear = true,
     .gradient = gradient_add, .attributes = "a, b -> y"},
    {.name = "copy", .signature = "...->...", .dtypes = "c->c", .flops_per_element = 0, .linear = true,
     .backward = "copy", .backward_operands = "d>0", .attributes = "x -> y"},
    {.name = "cross_entropy", .signature = "...v~,...->,...", .dtypes = "ci->ff", .flops_per_element = 4,
     .inner_all_reduces = 3 /* maximum, sum of exponentials, the target's logit */, .backward = "cross_entropy_dx", .backward_operands = "01Bd>0",
     .infer = infer_cross_entropy,
     .attributes = "logits, targets (-100: ignored) -> loss (SUM over targets), logsumexp; real[0] label smoothing of the gradient"},
    {.name = "cross_entropy_dx", .signature = "...v~,...,...,->...v~", .dtypes = "ciff->c", .flops_per_element = 4,
     .attributes = "logits, targets, logsumexp, scale -> dlogits; real[0] label smoothing"},
    {.name = NULL},
};
/* clang-format on */
