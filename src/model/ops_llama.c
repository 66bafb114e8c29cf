/* Rows of the operator table: llama's additions to those of transformers. */
#include "hapt/rope.h"

#include "ops_rows.h"

enum hapt_status hapt_op_infer_rms_norm(const struct hapt_graph *graph, const struct hapt_op *op,
                                        struct hapt_tensor *output)
{
    (void)graph, (void)output;
    if (!(op->real[0] >= 0 && op->real[0] < 1)) return hapt_op_bad_attribute(op, "epsilon is not in [0, 1)");
    return op->real[1] == 0 || op->real[1] == 1 ? HAPT_OK : hapt_op_bad_attribute(op, "its offset is neither 0 nor 1");
}

/* Scalings of the angles read more attributes: include/hapt/rope.h. */
static enum hapt_status check_rope_scaling(const struct hapt_op *op)
{
    const double *real = op->real;
    if (op->integer[2] < 0 || op->integer[2] >= HAPT_ROPE_SCALINGS)
        return hapt_op_bad_attribute(op, "its kind of scaling is unknown");
    if (!(real[5] >= 0 && isfinite(real[5]))) return hapt_op_bad_attribute(op, "its factor of sines is negative");
    if (op->integer[2] == HAPT_ROPE_PLAIN) return HAPT_OK;
    if (!(real[1] > 0 && isfinite(real[1]))) return hapt_op_bad_attribute(op, "its factor is not positive");
    if (op->integer[2] == HAPT_ROPE_LINEAR) return HAPT_OK;
    if (!(real[2] > 0 && real[3] > real[2] && isfinite(real[3])))
        return hapt_op_bad_attribute(op, "its limits of turns are not positive and rising");
    if (op->integer[2] == HAPT_ROPE_YARN && !(real[0] > 1))
        return hapt_op_bad_attribute(op, "YaRN needs a base above 1");
    return real[4] >= 1 && isfinite(real[4]) ? HAPT_OK
                                             : hapt_op_bad_attribute(op, "its original context is not positive");
}

static enum hapt_status infer_rope(const struct hapt_graph *graph, const struct hapt_op *op, struct hapt_tensor *output)
{
    const int64_t heads = op->integer[0], width = graph->tensor[op->input[0]].shape[2];
    (void)output;
    if (heads < 1 || width % heads != 0 || width / heads % 2 != 0)
        return hapt_op_bad_attribute(op, "the width of its input is not heads x an even head size");
    if (op->integer[1] < 0 || op->integer[1] > width / heads || op->integer[1] % 2 != 0)
        return hapt_op_bad_attribute(op, "its rotated columns are odd in number, or more than a head has");
    if (!(op->real[0] > 0 && isfinite(op->real[0]))) return hapt_op_bad_attribute(op, "its base is not positive");
    return check_rope_scaling(op);
}

/* clang-format off */
const struct hapt_op_type hapt_ops_llama[] = {
    {.name = "rms_norm", .signature = "...d!,d!->...d!,...", .dtypes = "cc->cf", .flops_per_element = 4,
     .infer = hapt_op_infer_rms_norm, .backward = "rms_norm_backward", .backward_operands = "01Bd>01", .backward_frozen = "rms_norm_dx", .attributes = "x, gamma -> y, rstd; real[0] epsilon, real[1] added to gamma: 0, or 1 (Gemma)"},
    {.name = "rms_norm_backward", .signature = "...d!,d!,...,...d!->...d!,d!", .dtypes = "ccfc->cf",
     .flops_per_element = 11, .attributes = "x, gamma, rstd, dy -> dx, dgamma; real[1] added to gamma"},
    {.name = "rope", .signature = "bt!e/h->bt!e/h", .dtypes = "c->c", .flops_per_element = 3, .sized_letters = "h",
     .infer = infer_rope, .backward = "rope_dx", .backward_operands = "d>0",
     .attributes = "x -> y: columns i and i + half of each head rotated by t base^(-i / half); integer[0] heads, real[0] base; "
                   "columns that rotate, scalings of the angles: include/hapt/rope.h"},
    {.name = "rope_dx", .signature = "bt!e/h->bt!e/h", .dtypes = "c->c", .flops_per_element = 3, .sized_letters = "h",
     .attributes = "dy -> dx; attributes of rope"},
    {.name = "swiglu", .signature = "...,...->...", .dtypes = "cc->c", .flops_per_element = 6, .backward = "swiglu_backward", .backward_operands = "01d>01",
     .attributes = "gate, up -> silu(gate) up"},
    {.name = "swiglu_backward", .signature = "...,...,...->...,...", .dtypes = "ccc->cc", .flops_per_element = 13,
     .attributes = "gate, up, dy -> dgate, dup"},
    {.name = NULL},
};
/* clang-format on */
