/* Losses that compare real numbers. Cross-entropy is in ops_transformer.c. */
#include "ops_rows.h"

/* clang-format off */
const struct hapt_op_type hapt_ops_losses[] = {
    {.name = "mse", .signature = "...,...->", .dtypes = "cf->f", .flops_per_element = 3, .backward = "mse_dx",
     .backward_operands = "01d>0",
     .attributes = "x, targets (NaN: ignored) -> loss: the SUM over targets of (x - target)^2"},
    {.name = "mse_dx", .signature = "...,...,->...", .dtypes = "cff->c", .flops_per_element = 3,
     .attributes = "x, targets, scale -> dx"},
    {.name = "bce", .signature = "...,...->", .dtypes = "cf->f", .flops_per_element = 12, .backward = "bce_dx",
     .backward_operands = "01d>0",
     .attributes = "logits x, targets t from 0 to 1 (NaN: ignored) -> loss: the SUM over targets of -t log s(x) - (1 - t) log(1 - s(x)), s: sigmoid"},
    {.name = "bce_dx", .signature = "...,...,->...", .dtypes = "cff->c", .flops_per_element = 8,
     .attributes = "x, targets, scale -> dx"},
    {.name = NULL},
};
/* clang-format on */
