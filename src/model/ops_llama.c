/* Rows of the operator table: llama's additions to those of transformers. */
#include "ops_rows.h"

static enum hapt_status infer_rms_norm(const struct hapt_graph *graph, const struct hapt_op *op,
                                       struct hapt_tensor *output)
{
    (void)graph, (void)output;
    return op->real[0] >= 0 && op->real[0] < 1 ? HAPT_OK : hapt_op_bad_attribute(op, "epsilon is not in [0, 1)");
}

static enum hapt_status infer_rope(const struct hapt_graph *graph, const struct hapt_op *op, struct hapt_tensor *output)
{
    const int64_t heads = op->integer[0], width = graph->tensor[op->input[0]].shape[2];
    (void)output;
    if (heads < 1 || width % heads != 0 || width / heads % 2 != 0)
        return hapt_op_bad_attribute(op, "the width of its input is not heads x an even head size");
    return op->real[0] > 0 && isfinite(op->real[0]) ? HAPT_OK : hapt_op_bad_attribute(op, "its base is not positive");
}

/* clang-format off */
const struct hapt_op_type hapt_ops_llama[] = {
    {.name = "rms_norm", .signature = "...d!,d!->...d!,...", .dtypes = "cc->cf", .flops_per_element = 4,
     .infer = infer_rms_norm, .backward = "rms_norm_backward", .backward_operands = "01Bd>01", .attributes = "x, gamma -> y, rstd; real[0] epsilon"},
    {.name = "rms_norm_backward", .signature = "...d!,d!,...,...d!->...d!,d!", .dtypes = "ccfc->cf",
     .flops_per_element = 11, .attributes = "x, gamma, rstd, dy -> dx, dgamma"},
    {.name = "rope", .signature = "bt!e/h->bt!e/h", .dtypes = "c->c", .flops_per_element = 3, .sized_letters = "h",
     .infer = infer_rope, .backward = "rope_dx", .backward_operands = "d>0",
     .attributes = "x -> y: columns i and i + half of each head rotated by t base^(-i / half); integer[0] heads, real[0] base"},
    {.name = "rope_dx", .signature = "bt!e/h->bt!e/h", .dtypes = "c->c", .flops_per_element = 3, .sized_letters = "h",
     .attributes = "dy -> dx; integer[0] heads, real[0] base"},
    {.name = "swiglu", .signature = "...,...->...", .dtypes = "cc->c", .flops_per_element = 6, .backward = "swiglu_backward", .backward_operands = "01d>01",
     .attributes = "gate, up -> silu(gate) up"},
    {.name = "swiglu_backward", .signature = "...,...,...->...,...", .dtypes = "ccc->cc", .flops_per_element = 13,
     .attributes = "gate, up, dy -> dgate, dup"},
    {.name = NULL},
};
/* clang-format on */
