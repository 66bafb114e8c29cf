/*
 * Rows of the operator table: attention over rows that hold several documents. A token sees the tokens of its own
 * document up to itself. The input `positions` tells how far it stands from the first of them (HAPT_ROLE_POSITIONS),
 * and kernels take any other number as the nearest possible one.
 */
#include "ops_rows.h"

static enum hapt_status check_positions(const struct hapt_graph *graph, const struct hapt_op *op, int input)
{
    if (graph->tensor[op->input[input]].role != HAPT_ROLE_POSITIONS)
        return hapt_op_bad_attribute(op, "its last input is not the one with the role positions");
    return op->integer[1] == 1 ? HAPT_OK : hapt_op_bad_attribute(op, "it is not causal");
}

static enum hapt_status infer_documents(const struct hapt_graph *graph, const struct hapt_op *op,
                                        struct hapt_tensor *output)
{
    HAPT_TRY(check_positions(graph, op, 1));
    return hapt_op_infer_attention(graph, op, output);
}

static enum hapt_status infer_grouped_documents(const struct hapt_graph *graph, const struct hapt_op *op,
                                                struct hapt_tensor *output)
{
    HAPT_TRY(check_positions(graph, op, 3));
    return hapt_op_infer_grouped_attention(graph, op, output);
}

/* clang-format off */
const struct hapt_op_type hapt_ops_documents[] = {
    {.name = "document_attention", .signature = "bt!e/3h,bt!->bt!d/h,bht!", .dtypes = "ci->cf", .heavy = true, .sized_letters = "h",
     .flops = hapt_op_flops_attention, .infer = infer_documents, .backward = "document_attention_backward", .backward_operands = "01ABd>0",
     .attributes = "qkv, positions -> out, logsumexp; as attention"},
    {.name = "document_attention_backward", .signature = "bt!e/3h,bt!,bt!d/h,bht!,bt!d/h->bt!e/3h", .dtypes = "cicfc->c",
     .heavy = true, .sized_letters = "h", .flops = hapt_op_flops_attention_backward,
     .attributes = "qkv, positions, out, logsumexp, dout -> dqkv"},
    {.name = "grouped_document_attention", .signature = "bt!q/g,bt!k/g,bt!k/g,bt!->bt!q/g,bn/gt!", .dtypes = "ccci->cf", .heavy = true,
     .sized_letters = "g", .flops = hapt_op_flops_grouped_attention, .infer = infer_grouped_documents,
     .backward = "grouped_document_attention_backward", .backward_operands = "0123ABd>012",
     .attributes = "q, k, v, positions -> out, logsumexp; as grouped_attention"},
    {.name = "grouped_document_attention_backward",
     .signature = "bt!q/g,bt!k/g,bt!k/g,bt!,bt!q/g,bn/gt!,bt!q/g->bt!q/g,bt!k/g,bt!k/g", .dtypes = "cccicfc->ccc",
     .heavy = true, .sized_letters = "g", .flops = hapt_op_flops_grouped_attention_backward,
     .attributes = "q, k, v, positions, out, logsumexp, dout -> dq, dk, dv; attributes of grouped_attention"},
    {.name = NULL},
};
/* clang-format on */
