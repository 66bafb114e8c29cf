/*
 * What if: the best plan as a link, a number of nodes, a memory or the microbatches change, and the knee behind which
 * more of it gains next to nothing.
 */
#ifndef HAPT_SWEEP_H
#define HAPT_SWEEP_H

#include "hapt/plan.h"

enum hapt_sweep_kind { HAPT_SWEEP_LINK, HAPT_SWEEP_NODES, HAPT_SWEEP_MEMORY, HAPT_SWEEP_MICROBATCHES };

struct hapt_sweep_range {
    enum hapt_sweep_kind kind;
    const char *text;    /* as it was asked */
    const char *subject; /* "a100-v100", "v100"; "" : every link between subclusters */
    double low, high;    /* byte/s, nodes, bytes, microbatches */
    int points;          /* 0: as many as serve */
};

/* "link=1..25Gbit/s", "link=a100-v100:1..25Gbit/s:9", "nodes.v100=1..8", "memory.v100=16..80GB",
 * "microbatches=32..512"; several with commas between; one value instead of a range. HAPT_ERR_USAGE shows right ones.
 */
enum hapt_status hapt_sweep_parse(const char *text, struct hapt_arena *arena, struct hapt_sweep_range **range,
                                  int *count);

/* The profile of a cluster with `value` nodes or bytes of memory in `subcluster`, where it can be made anew. Agrees on
 * failures quietly; HAPT_ERR_INFEASIBLE is an answer. Collective. */
typedef enum hapt_status hapt_sweep_source(void *context, enum hapt_sweep_kind kind, int subcluster, double value,
                                           struct hapt_arena *arena, struct hapt_profile **profile);

struct hapt_sweep_question {
    const struct hapt_profile *profile;
    const struct hapt_search_options *options;
    const char *stages;        /* given stages (hapt_plan_force) instead of a search; NULL */
    hapt_sweep_source *source; /* NULL: nodes and memory change in the profile, which then bounds the nodes */
    void *context;
};

struct hapt_sweep_point {
    double value;
    struct hapt_plan *plan; /* NULL: there is none */
    const char *obstacle;   /* then says why */
    double link_s;          /* the longest transfer over the swept links, else between any subclusters */
    double link_bytes;
};

struct hapt_sweep {
    const struct hapt_sweep_range *range;
    int count;
    struct hapt_sweep_point *point; /* by rising value */
    /* Link, memory: the least value from which the step (latency_s) stays within 1 % of that at the largest. Nodes:
     * from which no further node gains 2 %. Microbatches: from which a microbatch costs at most 2 % more than at the
     * largest. Links, memory and microbatches by bisection between points (to 0.1 %). NAN: not in this range (nodes
     * still gain, the link is still the limit), or no plan at the largest value. */
    double knee;
    /* Links: the bandwidth at which the transfer takes as long as the slowest stage: just below, the link sets the
     * pace, above it never does. NAN: not in this range. */
    double meeting;
};

/* HAPT_ERR_USAGE where the subject is unknown or the nodes exceed what the profile holds. Rank-local. */
enum hapt_status hapt_sweep_check(const struct hapt_sweep_question *question, const struct hapt_sweep_range *range);
/* Checks, too. Collective over env->world, the same for every number of ranks. */
enum hapt_status hapt_sweep_run(const struct hapt_env *env, const struct hapt_sweep_question *question,
                                const struct hapt_sweep_range *range, struct hapt_arena *arena,
                                struct hapt_sweep **sweep);

#endif
