/*
 * What-if analysis: the best plan as a link, a network inside a subcluster, a number of nodes, a memory size, the link
 * to a host's memory or the microbatches vary. The knee is the value beyond which more gains almost nothing.
 */
#ifndef HAPT_SWEEP_H
#define HAPT_SWEEP_H

#include "hapt/search.h"

enum hapt_sweep_kind {
    HAPT_SWEEP_LINK,
    HAPT_SWEEP_NODES,
    HAPT_SWEEP_MEMORY,
    HAPT_SWEEP_MICROBATCHES,
    HAPT_SWEEP_HOST_MEMORY,    /* of a node */
    HAPT_SWEEP_HOST_BANDWIDTH, /* between a device and its node's memory, in each direction */
    HAPT_SWEEP_INTER_NODE,     /* between nodes of a subcluster, in each direction */
    HAPT_SWEEP_INTRA_NODE,     /* between devices of a node, in each direction */
    HAPT_SWEEP_KINDS
};
static inline bool hapt_sweep_is_inside(enum hapt_sweep_kind kind)
{
    return kind == HAPT_SWEEP_INTER_NODE || kind == HAPT_SWEEP_INTRA_NODE;
}
/* True for values that the profile does not hold: every point is predicted again. */
static inline bool hapt_sweep_is_predicted(enum hapt_sweep_kind kind)
{
    return kind == HAPT_SWEEP_HOST_MEMORY || kind == HAPT_SWEEP_HOST_BANDWIDTH || hapt_sweep_is_inside(kind);
}

struct hapt_sweep_range {
    enum hapt_sweep_kind kind;
    const char *text;    /* as given by the user */
    const char *subject; /* "a100-v100", "v100"; "": every link between subclusters, or every subcluster */
    double low, high;    /* byte/s, nodes, bytes, microbatches */
    int points;          /* 0: chosen automatically */
};

/* "link=1..25Gbit/s", "link=a100-v100:1..25Gbit/s:9", "nodes.v100=1..8", "memory=16..80GB",
 * "memory.v100=16..80GB", "microbatches=32..512", "host-memory=64..512GB", "host-bandwidth=4..50GB/s",
 * "inter-node.v100=10..100Gbit/s", "intra-node=16..300GB/s". Several are separated by commas; a single value may
 * replace a range. HAPT_ERR_USAGE shows valid examples. */
enum hapt_status hapt_sweep_parse(const char *text, struct hapt_arena *arena, struct hapt_sweep_range **range,
                                  int *count);

/* A value of a sweep in its unit: "10 Gbit/s". Returns `text`. */
const char *hapt_sweep_value_text(enum hapt_sweep_kind kind, double value, char text[32]);

/* The profile of a cluster with `value` nodes, bytes of memory or byte/s in `subcluster` (-1: in all), if it can be
 * recomputed.
 * Failures are agreed on quietly; HAPT_ERR_INFEASIBLE is a valid answer. Collective. */
typedef enum hapt_status hapt_sweep_source(void *context, enum hapt_sweep_kind kind, int subcluster, double value,
                                           struct hapt_arena *arena, struct hapt_profile **profile);

struct hapt_sweep_question {
    const struct hapt_profile *profile;
    const struct hapt_search_options *options;
    const char *stages;        /* given stages (hapt_plan_force) instead of a search, or NULL */
    hapt_sweep_source *source; /* NULL: nodes and memory are changed in the profile, which then limits the nodes; hosts
                                  and networks inside subclusters cannot be swept */
    void *context;
};

struct hapt_sweep_point {
    double value;
    struct hapt_plan *plan; /* NULL: no plan */
    const char *obstacle;   /* why there is no plan */
    double link_s;          /* the longest transfer over the swept links; without any, between any subclusters */
    double link_bytes;
};

struct hapt_sweep {
    const struct hapt_sweep_range *range;
    enum hapt_objective objective; /* decides what a step is: the formula's or the simulated one */
    int count;
    struct hapt_sweep_point *point; /* by ascending value */
    /* Link, memory, host: the least value at which the step is within 1 % of that at the largest. Nodes: the
     * value from which one more node gains less than 2 %. Microbatches: the value from which a microbatch costs at most
     * 2 % more than at the largest. All but nodes are bisected between points (to 0.1 %). NAN: outside
     * the range (nodes still gain, the link still limits), or no plan at the largest value. */
    double knee;
    /* Links: the bandwidth at which the transfer takes as long as the slowest stage. Just below it the link sets t_max,
     * above it never. NAN: outside the range. */
    double balance_bandwidth;
};

/* HAPT_ERR_USAGE: unknown subject, or more nodes than the profile holds. Rank-local. */
enum hapt_status hapt_sweep_check(const struct hapt_sweep_question *question, const struct hapt_sweep_range *range);
/* Makes these checks first. Collective over env->world, the same for every number of ranks. */
enum hapt_status hapt_sweep_run(const struct hapt_env *env, const struct hapt_sweep_question *question,
                                const struct hapt_sweep_range *range, struct hapt_arena *arena,
                                struct hapt_sweep **sweep);

#endif
