/* Sharding rules, derived from an operator's index signature: the properties of its inputs and outputs (HAP Fig. 9). */
#ifndef HAPT_RULES_H
#define HAPT_RULES_H

#include "hapt/sharding.h"

/* One way to run an operator on one mesh axis: the properties that it needs and makes. Entries of absent operands
 * are unused. */
struct hapt_rule {
    struct hapt_cut cut;
    struct hapt_property input[HAPT_MAX_INPUTS], output[HAPT_MAX_OUTPUTS];
    unsigned first_rank_inputs; /* bit i: only the first shard adds input i */
    bool exchange;              /* the shards communicate while they run (hapt_op_type.inner_all_reduces) */
};

/*
 * The rule of an operator for a cut. Every operand with the letter is sharded on it. Outputs without it are partial
 * sums, or replicated if the operator exchanges. HAPT_CUT_PARTIAL: a linear operator maps partial sums to partial sums.
 * A collective of an outer axis is cut like any operator, but not on the dimensions that it moves. HAPT_ERR_INFEASIBLE
 * if the signature forbids the cut. Properties are as the signature gives them; extents are not checked.
 */
enum hapt_status hapt_rule_of_signature(const struct hapt_graph *graph, const struct hapt_op *op, int axis_index,
                                        struct hapt_cut cut, struct hapt_rule *rule);
/* The same for operator `op` of a sharding's graph and an axis to be added, with canonical properties.
 * HAPT_ERR_INFEASIBLE also if an operand cannot be shared out over the axis, or if a model input or a parameter would
 * be partial sums. */
enum hapt_status hapt_rule_of_cut(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis,
                                  int op, struct hapt_cut cut, struct hapt_rule *rule);
/* The rule that fits given (canonical) properties of the inputs. If all are replicated and an output is `wanted`
 * sharded (NULL: none) on an index that no input has, the output is made shard by shard: the gradient of a table.
 * HAPT_ERR_INFEASIBLE if there is no rule. */
enum hapt_status hapt_rule_derive(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis,
                                  int op, const struct hapt_property *input, const struct hapt_property *wanted,
                                  struct hapt_rule *rule);

/* The collective that converts `from` into `to`; HAPT_COLLECTIVE_NONE: there is none, or nothing to do. For sharded
 * to replicated it is the all-gather. */
enum hapt_collective_kind hapt_rule_collective(struct hapt_property from, struct hapt_property to);
/* True if a collective of that kind converts `from` into `to`. */
bool hapt_rule_moves(enum hapt_collective_kind kind, struct hapt_property from, struct hapt_property to);

/*
 * The blocks and units worth trying in each dimension of a graph's tensors. They come from indices inside widths
 * ("/3h"), and are passed on to all dimensions that share a letter in some operator. (1, 1) is first in every
 * dimension.
 */
struct hapt_grain {
    int blocks;
    int64_t unit;
};
#define HAPT_MAX_GRAINS 4
struct hapt_grains {
    int (*count)[HAPT_MAX_DIMS]; /* [graph->tensor_count] */
    struct hapt_grain (*grain)[HAPT_MAX_DIMS][HAPT_MAX_GRAINS];
};
enum hapt_status hapt_grains_find(const struct hapt_graph *graph, struct hapt_arena *arena,
                                  struct hapt_grains **grains);
/* Lists the cuts that an operator's signature allows, HAPT_CUT_REPLICATED first: every letter, with every grain of its
 * dimensions (`grains` NULL: one block, unit 1) and every ratio. hapt_rule_of_cut checks extents. Returns their
 * number; writes at most `room` of them to cut[]. */
int hapt_rule_cuts(const struct hapt_graph *graph, int op, int axis_index, const struct hapt_axis *axis,
                   const struct hapt_grains *grains, struct hapt_cut *cut, int room);

/* True if the dimension can be shared out so, inside every shard of an outer axis. */
bool hapt_property_fits(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis, int tensor,
                        struct hapt_property property);
/* The same shares in canonical form: the first ratio vector, then the smallest unit, that give every rank the same. */
struct hapt_property hapt_property_canonical(const struct hapt_sharding *sharding, int axis_index,
                                             const struct hapt_axis *axis, int tensor, struct hapt_property property);

#endif
