/* Sharding rules: what an operator does to properties, read from its index signature (HAP Fig. 9). */
#ifndef HAPT_SPMD_RULES_H
#define HAPT_SPMD_RULES_H

#include "hapt/sharding.h"

/* One way to run an operator on one mesh axis: what it needs and what it makes. Entries of absent operands mean nothing. */
struct hapt_rule {
    char letter; /* the index that is sharded; 0: none */
    struct hapt_property input[HAPT_MAX_INPUTS], output[HAPT_MAX_OUTPUTS];
    unsigned once; /* bit i: input i is added by the first shard alone */
    bool exchange; /* the shards exchange while they run (hapt_op_type.exchanges) */
};

/* The operator with every operand that carries `letter` sharded on it, the letter's index standing in `blocks` blocks (1 unless an
 * operand says otherwise): outputs that carry it are sharded too, the others are partial sums, or whole where the operator
 * exchanges. HAPT_ERR_INFEASIBLE where the signature allows no such step. */
enum hapt_status hapt_rule_of_letter(const struct hapt_graph *graph, const struct hapt_op *op, char letter, int blocks, struct hapt_rule *rule);

/* The rule that fits given properties of the inputs. Where all are whole, an output that is `wanted` sharded (NULL: none) on an index
 * that no input has is made shard by shard: the gradient of a table. HAPT_ERR_INFEASIBLE when there is none. */
enum hapt_status hapt_rule_derive(const struct hapt_graph *graph, const struct hapt_op *op, const struct hapt_property *input,
                                  const struct hapt_property *wanted, struct hapt_rule *rule);

bool hapt_property_same(struct hapt_property a, struct hapt_property b);
/* "whole", "sharded(d)", "sharded(d/3)" or "partial". */
const char *hapt_property_text(struct hapt_property property, char buffer[32]);

#endif
