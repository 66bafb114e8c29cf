/* Sharding rules: what an operator does to properties, read from its index signature (HAP Fig. 9). */
#ifndef HAPT_SPMD_RULES_H
#define HAPT_SPMD_RULES_H

#include "hapt/sharding.h"

/* One way to run an operator on one mesh axis: what it needs and what it makes. Entries of absent operands mean
 * nothing. */
struct hapt_rule {
    struct hapt_cut cut;
    struct hapt_property input[HAPT_MAX_INPUTS], output[HAPT_MAX_OUTPUTS];
    unsigned once; /* bit i: input i is added by the first shard alone */
    bool exchange; /* the shards exchange while they run (hapt_op_type.exchanges) */
};

/*
 * The operator by a cut: every operand that carries the letter is sharded on it; outputs that carry it are sharded too,
 * the others are partial sums, or whole where the operator exchanges. By HAPT_CUT_PARTIAL a linear operator makes
 * partial sums of partial sums. A collective of an outer axis is cut like any operator of its signature, but not on
 * what it moves. HAPT_ERR_INFEASIBLE where the signature allows no such step. Properties are as the signature gives
 * them: whether they fit the extents is not looked at.
 */
enum hapt_status hapt_rule_of_signature(const struct hapt_graph *graph, const struct hapt_op *op, int axis_index,
                                        struct hapt_cut cut, struct hapt_rule *rule);
/* The same of operator `op` of a sharding's graph for an axis to be added: canonical properties. HAPT_ERR_INFEASIBLE
 * also where an operand cannot be shared out over the axis so, or where an input of the model or a parameter would be
 * partial sums. */
enum hapt_status hapt_rule_of_cut(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis,
                                  int op, struct hapt_cut cut, struct hapt_rule *rule);
/* The rule that fits given (canonical) properties of the inputs. Where all are whole, an output that is `wanted`
 * sharded (NULL: none) on an index that no input has is made shard by shard: the gradient of a table.
 * HAPT_ERR_INFEASIBLE when there is none. */
enum hapt_status hapt_rule_derive(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis,
                                  int op, const struct hapt_property *input, const struct hapt_property *wanted,
                                  struct hapt_rule *rule);

/* The collective that makes `to` of `from`; HAPT_COLLECTIVE_NONE: there is none, or nothing to do. Of sharded -> whole
 * the all-gather. */
enum hapt_collective_kind hapt_rule_collective(struct hapt_property from, struct hapt_property to);
/* Does that kind make `to` of `from`? */
bool hapt_rule_moves(enum hapt_collective_kind kind, struct hapt_property from, struct hapt_property to);

/*
 * Which blocks and units matter in the dimensions of a graph's tensors: those of indices inside widths ("/3h"), passed
 * on to all dimensions with which they share a letter in some operator. Every dimension has (1, 1) first.
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
/* All cuts of an operator that a signature allows, HAPT_CUT_WHOLE first: every letter, for it every grain of its
 * dimensions (`grains` NULL: one element in one block), for that every ratio. Whether extents fit is hapt_rule_of_cut's
 * to say. Returns their number, at most `room` of them in cut[]. */
int hapt_rule_cuts(const struct hapt_graph *graph, int op, int axis_index, const struct hapt_axis *axis,
                   const struct hapt_grains *grains, struct hapt_cut *cut, int room);

#endif
