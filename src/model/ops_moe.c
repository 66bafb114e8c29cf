/*
 * Rows of the operator table: mixtures of experts, laid out as in GShard (Lepikhin et al. 2021) so that expert
 * parallelism is an all-to-all between operators.
 *
 * The gate chooses experts and weights for every token. Tokens are then copied into slots [b][e][c][d]: row b has c
 * slots at expert e, filled from the front in token order. Slots after the filled ones are 0, and products skip them. A
 * slot's position depends only on the row's expert numbers. So every operator computes it itself, and a rank that holds
 * some of the experts builds only their slots (index e is indexed by integer operands). Counts of filled slots are
 * fp32, so that every collective can move them.
 */
#include "ops_rows.h"

enum hapt_status hapt_op_infer_gate(const struct hapt_graph *graph, const struct hapt_op *op,
                                    struct hapt_tensor *output)
{
    const int64_t chosen = op->integer[0];
    if (chosen < 1 || chosen > graph->tensor[op->input[0]].shape[2])
        return hapt_op_bad_attribute(op, "the number of experts per token is not between 1 and all of them");
    output[0].shape[2] = output[1].shape[2] = chosen;
    return HAPT_OK;
}

static enum hapt_status infer_dispatch(const struct hapt_graph *graph, const struct hapt_op *op,
                                       struct hapt_tensor *output)
{
    (void)graph;
    if (op->integer[0] < 1 || op->integer[1] < 1)
        return hapt_op_bad_attribute(op, "experts and capacity are at least 1");
    output[0].shape[1] = op->integer[0];
    output[0].shape[2] = op->integer[1];
    return HAPT_OK;
}

static enum hapt_status infer_count(const struct hapt_graph *graph, const struct hapt_op *op,
                                    struct hapt_tensor *output)
{
    (void)graph;
    if (op->integer[0] < 1) return hapt_op_bad_attribute(op, "experts are at least 1");
    output[0].shape[1] = op->integer[0];
    return HAPT_OK;
}

static enum hapt_status infer_expert(const struct hapt_graph *graph, const struct hapt_op *op,
                                     struct hapt_tensor *output)
{
    (void)graph, (void)output;
    return op->real[0] > 0 && op->real[0] <= 1 ? HAPT_OK
                                               : hapt_op_bad_attribute(op, "the filled share is not in (0, 1]");
}

/* The product of the letters counts every slot: subtract the empty ones, which are skipped. */
static double flops_expert(const struct hapt_graph *graph, const struct hapt_op *op, double rows_fraction)
{
    const bool dw = graph->tensor[op->output[0]].dims == 3;
    const struct hapt_tensor *slots = &graph->tensor[op->input[0]],
                             *w = &graph->tensor[dw ? op->output[0] : op->input[1]];
    const double all = 2 * (double)hapt_tensor_elements(slots) * (double)(hapt_tensor_elements(w) / w->shape[0]) /
                       (double)slots->shape[3];
    return -rows_fraction * (1 - op->real[0]) * all;
}

/* Only the k slots of each token are read, so the cost depends on the number of tokens. */
static double flops_by_choice(const struct hapt_graph *graph, int tokens, int choices, double rows_fraction)
{
    const struct hapt_tensor *x = &graph->tensor[tokens]; /* [b][t][d] */
    return rows_fraction * 2 * (double)hapt_tensor_elements(x) * (double)graph->tensor[choices].shape[2];
}

static double flops_combine(const struct hapt_graph *graph, const struct hapt_op *op, double rows_fraction)
{
    return flops_by_choice(graph, op->output[0], op->input[1], rows_fraction);
}

static double flops_combine_backward(const struct hapt_graph *graph, const struct hapt_op *op, double rows_fraction)
{
    return flops_by_choice(graph, op->input[0], op->input[2], rows_fraction);
}

static enum hapt_status gradient_dispatch(struct hapt_graph *graph, int op)
{
    const int *in = graph->op[op].input;
    const int input[] = {hapt_gradient_incoming(graph, op), in[1]};
    if (!hapt_gradient_needed(graph, in[0])) return HAPT_OK;
    return hapt_gradient_append(graph, op, "moe_dispatch_dx", input, 2, in, 1);
}

static enum hapt_status gradient_count(struct hapt_graph *graph, int op)
{
    return hapt_fail(HAPT_ERR_INPUT, "counts are for products of experts", "operator %s passes no gradient on",
                     graph->op[op].name);
}

static enum hapt_status gradient_expert(struct hapt_graph *graph, int op)
{
    const int *in = graph->op[op].input; /* x, w, counts, bias */
    const int incoming = hapt_gradient_incoming(graph, op);
    const int for_x[] = {incoming, in[1], in[2]}, for_w[] = {in[0], in[2], incoming}, x = in[0];
    const int weights[] = {in[1], in[3]};
    if (hapt_gradient_needed(graph, x)) HAPT_TRY(hapt_gradient_append(graph, op, "expert_linear_dx", for_x, 3, &x, 1));
    if (!hapt_gradient_needed(graph, weights[0]) && !hapt_gradient_needed(graph, weights[1])) return HAPT_OK;
    return hapt_gradient_append(graph, op, "expert_linear_dw", for_w, 3, weights, weights[1] < 0 ? 1 : 2);
}

static enum hapt_status gradient_combine(struct hapt_graph *graph, int op)
{
    const int *in = graph->op[op].input; /* slots, weights, experts */
    const int incoming = hapt_gradient_incoming(graph, op), slots = in[0], weights = in[1];
    const int for_slots[] = {incoming, in[1], in[2]}, for_weights[] = {incoming, in[0], in[2]};
    if (hapt_gradient_needed(graph, slots))
        HAPT_TRY(hapt_gradient_append(graph, op, "moe_combine_dslots", for_slots, 3, &slots, 1));
    if (!hapt_gradient_needed(graph, weights)) return HAPT_OK;
    return hapt_gradient_append(graph, op, "moe_combine_dweights", for_weights, 3, &weights, 1);
}

#define SLOTS "integer[0] experts, [1] capacity: slots per row and expert"
#define FILLED "real[0] average filled share of the slots, for cost estimates"

/* clang-format off */
const struct hapt_op_type hapt_ops_moe[] = {
    {.name = "moe_gate", .signature = "bte!->btk!,btk!", .dtypes = "c->fi", .flops_per_element = 4, .infer = hapt_op_infer_gate,
     .backward = "moe_gate_dx", .backward_operands = "ABd>0",
     .attributes = "logits -> weights (softmax over the chosen), experts (the largest first); integer[0] experts per token"},
    {.name = "moe_gate_dx", .signature = "btk!,btk!,btk!->bte~", .dtypes = "fif->c", .flops_per_element = 4,
     .attributes = "weights, experts, dweights -> dlogits"},
    {.name = "moe_dispatch", .signature = "bt!d,bt!k!->be~c!d", .dtypes = "ci->c", .flops_per_element = 0,
     .sized_letters = "e", .infer = infer_dispatch, .gradient = gradient_dispatch, .attributes = "x, experts -> slots; " SLOTS},
    {.name = "moe_dispatch_dx", .signature = "be~c!d,bt!k!->bt!d", .dtypes = "ci->c", .flops_per_element = 1,
     .attributes = "dslots, experts -> dx"},
    {.name = "moe_count", .signature = "bt!k!->be~", .dtypes = "i->f", .flops_per_element = 1, .sized_letters = "e",
     .infer = infer_count, .gradient = gradient_count, .attributes = "experts -> number of filled slots; integer[0] experts"},
    {.name = "expert_linear", .signature = "bec!i,eoi,be,eo?->bec!o", .dtypes = "ccfc->c", .heavy = true, .contracts = true,
     .flops = flops_expert, .infer = infer_expert, .gradient = gradient_expert,
     .attributes = "x, w, counts, bias -> y; " FILLED},
    {.name = "expert_linear_dx", .signature = "bec!o,eoi,be->bec!i", .dtypes = "ccf->c", .heavy = true, .contracts = true,
     .flops = flops_expert, .attributes = "dy, w, counts -> dx; " FILLED},
    {.name = "expert_linear_dw", .signature = "bec!i,be,bec!o->eoi,eo?", .dtypes = "cfc->ff", .heavy = true, .contracts = true,
     .flops = flops_expert, .attributes = "x, counts, dy -> dw, dbias; " FILLED},
    {.name = "moe_combine", .signature = "be~c!d,bt!k!,bt!k!->bt!d", .dtypes = "cfi->c", .flops = flops_combine,
     .gradient = gradient_combine, .attributes = "slots, weights, experts -> y"},
    {.name = "moe_combine_dslots", .signature = "bt!d,bt!k!,bt!k!->be~c!d", .dtypes = "cfi->c",
     .flops = flops_combine_backward, .attributes = "dy, weights, experts -> dslots"},
    {.name = "moe_combine_dweights", .signature = "bt!d,be~c!d,bt!k!->bt!k!", .dtypes = "cci->f",
     .flops = flops_combine_backward, .attributes = "dy, slots, experts -> dweights"},
    {.name = NULL},
};
/* clang-format on */
