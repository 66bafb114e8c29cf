/* Rows of the operator table: collectives over a mesh axis. Only sharded graphs have them (sharding.h); the link room
 * executes them. */
#include "ops_rows.h"

#define COLLECTIVE_ATTRIBUTES \
    "x -> x; integer[0] mesh axis, [1] old sharded dimension, [2] new sharded dimension (-1: none)"
#define ROW(text, what)                                                                              \
    {                                                                                                \
        .name = text, .signature = "...->...", .dtypes = "c->c", .linear = true, .collective = what, \
        .attributes = COLLECTIVE_ATTRIBUTES                                                          \
    }

const struct hapt_op_type hapt_ops_collective[] = {
    ROW("all_reduce", HAPT_COLLECTIVE_ALL_REDUCE),
    ROW("reduce_scatter", HAPT_COLLECTIVE_REDUCE_SCATTER),
    ROW("all_gather", HAPT_COLLECTIVE_ALL_GATHER),
    ROW("grouped_broadcast", HAPT_COLLECTIVE_GROUPED_BROADCAST),
    ROW("all_to_all", HAPT_COLLECTIVE_ALL_TO_ALL),
    ROW("slice", HAPT_COLLECTIVE_SLICE),
    {.name = NULL},
};
