/* Sharding rules derived from index signatures. */
#include "rules.h"

#include <stdio.h>

/* The dimension that is sharded when `letter` is, or -1. */
static int position(const struct hapt_signature_operand *operand, char letter)
{
    for (int d = 0; d < operand->dims; d++)
        if (operand->along[d] == letter) return d;
    return -1;
}

static enum hapt_status refuse(const struct hapt_op *op, const char *why)
{
    return hapt_fail(HAPT_ERR_INFEASIBLE, "use a submesh of one device for this stage", "operator %s (%s) %s", op->name,
                     hapt_op_type_at(op->type)->name, why);
}

bool hapt_property_same(struct hapt_property a, struct hapt_property b)
{
    if (a.kind != b.kind) return false;
    return a.kind != HAPT_PROPERTY_ALL_GATHER ||
           (a.dim == b.dim && (a.blocks > 1 ? a.blocks : 1) == (b.blocks > 1 ? b.blocks : 1));
}

static struct hapt_property sharded(const struct hapt_signature_operand *operand, int dim, int blocks)
{
    return (struct hapt_property){.kind = HAPT_PROPERTY_ALL_GATHER, .dim = dim, .blocks = operand->blocks[dim] * blocks};
}

/*
 * Optional inputs are terms: they stand beside the product that the letters describe. So where the outputs become partial
 * sums, a term that lacks the letter is added by one shard alone. Optional outputs are the gradients of such terms, made of
 * the last input: where that is whole, so are they.
 */
static enum hapt_status apply_outputs(const struct hapt_op *op, const struct hapt_signature *signature, char letter,
                                      int blocks, bool indexed, struct hapt_rule *rule)
{
    bool partial = false;
    for (int o = 0; o < op->output_count; o++) {
        const struct hapt_signature_operand *operand = &signature->output[o];
        const int dim = position(operand, letter);
        if (dim >= 0) {
            if (!operand->shardable[dim]) return refuse(op, "has an output that cannot be sharded");
            rule->output[o] = sharded(operand, dim, blocks);
        } else if (indexed && hapt_op_type_at(op->type)->exchanges > 0) {
            rule->exchange = true;
        } else if (!operand->optional || position(&signature->input[op->input_count - 1], letter) >= 0) {
            rule->output[o].kind = HAPT_PROPERTY_ALL_REDUCE;
            partial = true;
        }
    }
    for (int i = 0; partial && i < op->input_count; i++)
        if (op->input[i] >= 0 && signature->input[i].optional && position(&signature->input[i], letter) < 0)
            rule->once |= 1u << i;
    return HAPT_OK;
}

enum hapt_status hapt_rule_of_letter(const struct hapt_graph *graph, const struct hapt_op *op, char letter, int blocks, struct hapt_rule *rule)
{
    const struct hapt_signature *signature = hapt_op_signature_of(graph, op);
    struct hapt_rule made = {.letter = letter};
    bool found = letter == 0, indexed = false;
    for (int i = 0; letter && i < op->input_count; i++) {
        const struct hapt_signature_operand *operand = &signature->input[i];
        const int dim = position(operand, letter);
        if (op->input[i] < 0 || dim < 0) continue;
        if (!operand->shardable[dim]) return refuse(op, "cannot be sharded on that dimension");
        made.input[i] = sharded(operand, dim, blocks);
        found = true;
        indexed = indexed || operand->indexed[dim];
    }
    for (int o = 0; letter && o < op->output_count; o++) found = found || position(&signature->output[o], letter) >= 0;
    if (!found) return refuse(op, "has no such index");
    if (letter) HAPT_TRY(apply_outputs(op, signature, letter, blocks, indexed, &made));
    *rule = made;
    return HAPT_OK;
}

static int blocks_of(struct hapt_property property, const struct hapt_signature_operand *operand)
{
    const int blocks = (property.blocks > 1 ? property.blocks : 1) / operand->blocks[property.dim];
    return blocks > 1 ? blocks : 1;
}

/* The letter on which the sharded inputs are sharded; 0 when every input is whole. */
static enum hapt_status sharded_letter(const struct hapt_op *op, const struct hapt_signature *signature,
                                       const struct hapt_property *input, char *letter, int *blocks)
{
    *letter = 0;
    for (int i = 0; i < op->input_count; i++) {
        if (op->input[i] < 0 || input[i].kind == HAPT_PROPERTY_IDENTITY) continue;
        if (input[i].kind == HAPT_PROPERTY_ALL_REDUCE) return refuse(op, "would read partial sums");
        const struct hapt_signature_operand *operand = &signature->input[i];
        if (input[i].dim >= operand->dims) return refuse(op, "cannot be sharded on that dimension");
        const char its = operand->along[input[i].dim];
        if (*letter && its != *letter) return refuse(op, "has inputs sharded on different indices");
        *letter = its;
        *blocks = blocks_of(input[i], operand);
    }
    return HAPT_OK;
}

/* The letter of an output that is to be sharded, if no input has it. */
static void wanted_letter(const struct hapt_op *op, const struct hapt_signature *signature,
                          const struct hapt_property *wanted, char *letter, int *blocks)
{
    for (int o = 0; o < op->output_count; o++) {
        if (wanted[o].kind != HAPT_PROPERTY_ALL_GATHER || wanted[o].dim >= signature->output[o].dims) continue;
        const char its = signature->output[o].along[wanted[o].dim];
        bool of_input = false;
        for (int i = 0; i < op->input_count; i++)
            of_input = of_input || (op->input[i] >= 0 && position(&signature->input[i], its) >= 0);
        if (of_input) continue;
        *letter = its;
        *blocks = blocks_of(wanted[o], &signature->output[o]);
        return;
    }
}

enum hapt_status hapt_rule_derive(const struct hapt_graph *graph, const struct hapt_op *op, const struct hapt_property *input,
                                  const struct hapt_property *wanted, struct hapt_rule *rule)
{
    const struct hapt_signature *signature = hapt_op_signature_of(graph, op);
    char letter;
    int blocks = 1;
    HAPT_TRY(sharded_letter(op, signature, input, &letter, &blocks));
    if (!letter && wanted) wanted_letter(op, signature, wanted, &letter, &blocks);
    struct hapt_rule made;
    HAPT_TRY(hapt_rule_of_letter(graph, op, letter, blocks, &made));
    for (int i = 0; i < op->input_count; i++)
        if (op->input[i] >= 0 && !hapt_property_same(input[i], made.input[i]))
            return refuse(op, "has one input sharded on an index and another that is not");
    *rule = made;
    return HAPT_OK;
}

const char *hapt_property_text(struct hapt_property property, char buffer[32])
{
    if (property.kind == HAPT_PROPERTY_IDENTITY)
        snprintf(buffer, 32, "whole");
    else if (property.kind == HAPT_PROPERTY_ALL_REDUCE)
        snprintf(buffer, 32, "partial");
    else if (property.blocks > 1)
        snprintf(buffer, 32, "sharded(%d/%d)", property.dim, property.blocks);
    else
        snprintf(buffer, 32, "sharded(%d)", property.dim);
    return buffer;
}
