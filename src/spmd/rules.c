/* Sharding rules derived from index signatures. */
#include "rules.h"

#include <stdio.h>

static int letter_position(const struct hapt_signature_operand *operand, char letter)
{
    for (int d = 0; d < operand->dims; d++)
        if (operand->letter[d] == letter) return d;
    return -1;
}

static enum hapt_status refuse(const struct hapt_op *op, const char *why)
{
    return hapt_fail(HAPT_ERR_INFEASIBLE, "use a submesh of one device for this stage", "operator %s (%s) %s", op->name,
                     hapt_op_type_at(op->type)->name, why);
}

/* The letter on which the sharded inputs are sharded; 0 when every input is whole. */
static enum hapt_status sharded_letter(const struct hapt_op *op, const struct hapt_signature *signature,
                                       const struct hapt_property *input, char *letter)
{
    char found = 0;
    for (int i = 0; i < op->input_count; i++) {
        if (op->input[i] < 0 || input[i].kind == HAPT_PROPERTY_IDENTITY) continue;
        if (input[i].kind == HAPT_PROPERTY_ALL_REDUCE) return refuse(op, "would read partial sums");
        const struct hapt_signature_operand *operand = &signature->input[i];
        const int dim = input[i].dim;
        if (dim >= operand->dims || !operand->shardable[dim]) return refuse(op, "cannot be sharded on that dimension");
        if (found && operand->letter[dim] != found) return refuse(op, "has inputs sharded on different indices");
        found = operand->letter[dim];
    }
    *letter = found;
    return HAPT_OK;
}

/*
 * Optional operands stand beside the product that the letters describe: a bias is added to it, a bias' gradient does
 * not use x. So where an input lacks the letter, optional operands forbid partial sums: they would be added, or
 * counted, once per shard.
 */
enum hapt_status hapt_rule_derive(const struct hapt_op *op, const struct hapt_property *input,
                                  struct hapt_property *output)
{
    const struct hapt_signature *signature = hapt_op_signature(op->type);
    char letter = 0;
    HAPT_TRY(sharded_letter(op, signature, input, &letter));
    if (!letter) {
        for (int o = 0; o < op->output_count; o++) output[o] = (struct hapt_property){.kind = HAPT_PROPERTY_IDENTITY};
        return HAPT_OK;
    }
    bool lacking = false, optional_lacking = false; /* inputs without the letter */
    for (int i = 0; i < op->input_count; i++) {
        if (op->input[i] < 0) continue;
        const int dim = letter_position(&signature->input[i], letter);
        if (dim >= 0 && (input[i].kind != HAPT_PROPERTY_ALL_GATHER || input[i].dim != dim))
            return refuse(op, "has one input sharded on an index and another that is not");
        lacking = lacking || dim < 0;
        optional_lacking = optional_lacking || (dim < 0 && signature->input[i].optional);
    }
    for (int o = 0; o < op->output_count; o++) {
        const int dim = letter_position(&signature->output[o], letter);
        if (dim >= 0 && !signature->output[o].shardable[dim]) return refuse(op, "has an output that cannot be sharded");
        if (dim < 0 && (optional_lacking || (lacking && signature->output[o].optional)))
            return refuse(op, "would count an optional operand once per shard");
        output[o] = dim >= 0 ? (struct hapt_property){HAPT_PROPERTY_ALL_GATHER, dim}
                             : (struct hapt_property){.kind = HAPT_PROPERTY_ALL_REDUCE};
    }
    return HAPT_OK;
}

const char *hapt_property_text(struct hapt_property property, char buffer[24])
{
    if (property.kind == HAPT_PROPERTY_IDENTITY)
        snprintf(buffer, 24, "whole");
    else if (property.kind == HAPT_PROPERTY_ALL_REDUCE)
        snprintf(buffer, 24, "partial");
    else
        snprintf(buffer, 24, "sharded(%d)", property.dim);
    return buffer;
}
