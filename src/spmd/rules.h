/* Sharding rules: what an operator does to properties, read from its index signature (HAP Fig. 9). */
#ifndef HAPT_SPMD_RULES_H
#define HAPT_SPMD_RULES_H

#include "hapt/program.h"

/* Properties of an operator's outputs on one mesh axis, given those of its inputs (entries of absent inputs are
 * ignored). Inputs are all whole, or all operands that carry one letter are sharded on it; then outputs that carry it
 * are sharded too and the others are partial sums. HAPT_ERR_INFEASIBLE where the signature allows no such step. */
enum hapt_status hapt_rule_derive(const struct hapt_op *op, const struct hapt_property *input,
                                  struct hapt_property *output);

/* "whole", "sharded(d)" or "partial". */
const char *hapt_property_text(struct hapt_property property, char buffer[24]);

#endif
