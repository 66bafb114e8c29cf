/*
 * Sharding ratios: how much of every sharded dimension each device of a mesh gets (HAP 5).
 */
#ifndef HAPT_RATIOS_H
#define HAPT_RATIOS_H

#include <stdint.h>

#include "hapt/arena.h"

/* Cuts `units` of a dimension into one shard a rank: shard j is [first[j], first[j + 1]), the shards add up exactly,
 * and each has at least one unit. `ratio` [ranks] >= 0 need not add up to one; NULL: even, where the first (units mod
 * ranks) shards get one more; equal ratios give the same. Otherwise sizes are rounded to nearest, then the shard whose
 * error stays smallest changes by one until the sum fits (HAP 5.1): each is less than one unit off its ratio wherever
 * no shard had to be raised to one unit. False, and `first` [ranks + 1] untouched, when there are fewer units than
 * ranks or the ratios are no ratios (negative, not finite, all zero). Pure: every rank computes the same. */
bool hapt_split(const double *ratio, int ranks, int64_t units, int64_t *first);
/* Would that be true? */
bool hapt_split_exists(const double *ratio, int ranks, int64_t units);

/* What stands between two synchronisations of a program (HAP 3.2, Fig. 6): a communication, then computation on every
 * device. */
struct hapt_ratio_stage {
    /* Communication takes fixed_s + largest_s * max_j B_j (hapt_collective_cost_line); the first may be negative. */
    double fixed_s, largest_s;
    const double *replicated_s; /* [devices] computation on device j takes replicated_s[j] + sharded_s[j] * B_j */
    const double *sharded_s;
    double times; /* how often it counts: 1 / B for what runs once a step; 0 counts as 1 */
};
/* Stages whose tensors are sharded by one ratio vector (HAP 5.2). */
struct hapt_ratio_segment {
    int stage_count;
    const struct hapt_ratio_stage *stage;
};
struct hapt_ratio_problem {
    int devices, segment_count;
    const struct hapt_ratio_segment *segment;
    /* Device j holds resident_bytes[j] + sum over segments k of sharded_bytes[k][j] * B[k][j]; NULL limits: no matter
     * how much. */
    const double *limit_bytes, *resident_bytes; /* [devices] */
    const double *sharded_bytes;                /* [segments][devices] */
    /* [devices] computational power, for the proportional ratios; NULL: by what is sharded of all stages. */
    const double *power;
};
struct hapt_ratio_result {
    double *ratio; /* [segments][devices], each row adding up to one */
    double cost_s; /* HAP (3) at these ratios */
    /* The same at even ratios, and at ratios in proportion to power; INFINITY: out of memory. */
    double even_s, proportional_s;
    const char *solver; /* of the linear programs (solve.h) */
};

/* The ratios of least cost: one linear program a segment, or one for all where memory limits join them. Exact (HAP (3)
 * is linear), and nearest to even where several cost the same. HAPT_ERR_INFEASIBLE when no ratios fit into the devices'
 * memory; HAPT_ERR_INPUT on undefined numbers. Rank-local, deterministic for one build; the result lives in `arena`. */
enum hapt_status hapt_ratios_solve(const struct hapt_ratio_problem *problem, struct hapt_arena *arena,
                                   struct hapt_ratio_result *result);
/* HAP (3): the time of all stages at ratio [segments][devices]. */
double hapt_ratios_cost(const struct hapt_ratio_problem *problem, const double *ratio);
/* Whether these ratios fit into the devices' memory. */
bool hapt_ratios_fit(const struct hapt_ratio_problem *problem, const double *ratio);

#endif
