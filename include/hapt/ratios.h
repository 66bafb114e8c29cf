/*
 * Sharding ratios: the share of every sharded dimension that each device of a mesh gets (HAP 5).
 */
#ifndef HAPT_RATIOS_H
#define HAPT_RATIOS_H

#include <stdint.h>

#include "hapt/arena.h"

/* The work between two synchronisations of a program (HAP 3.2, Fig. 6): a communication, then computation on every
 * device. */
struct hapt_ratio_stage {
    /* Communication takes fixed_s + largest_s * max_j B_j (hapt_collective_cost_s); fixed_s may be negative. */
    double fixed_s, largest_s;
    const double *replicated_s; /* [devices] computation on device j takes replicated_s[j] + sharded_s[j] * B_j */
    const double *sharded_s;
    double times; /* weight of this stage: 1 / B for what runs once a step; 0 counts as 1 */
};
/* Stages whose tensors are sharded by the same ratio vector (HAP 5.2). */
struct hapt_ratio_segment {
    int stage_count;
    const struct hapt_ratio_stage *stage;
};
struct hapt_ratio_problem {
    int devices, segment_count;
    const struct hapt_ratio_segment *segment;
    /* Device j holds resident_bytes[j] + sum over segments k of sharded_bytes[k][j] * B[k][j]. NULL: no limits. */
    const double *limit_bytes, *resident_bytes; /* [devices] */
    const double *sharded_bytes;                /* [segments][devices] */
    /* [devices] computational power, for the proportional ratios; NULL: derived from sharded_s of all stages */
    const double *power;
};
struct hapt_ratio_result {
    double *ratio;      /* [segments][devices], each row adding up to one */
    double cost_s;      /* HAP (3) at these ratios */
    const char *solver; /* of the last linear program: "tao" or "pivot"; NULL: none was needed */
    /* The same at even ratios, and at ratios proportional to power; INFINITY: out of memory. */
    double even_s, proportional_s;
};

/* The ratios of least cost: one linear program per segment, or one for all if memory limits couple them. Exact,
 * since HAP (3) is linear; among ratios of equal cost, the nearest to even. HAPT_ERR_INFEASIBLE if no ratios fit the
 * devices' memory; HAPT_ERR_INPUT on undefined numbers. Rank-local, deterministic for one build; the result lives in
 * `arena`. */
enum hapt_status hapt_ratios_solve(const struct hapt_ratio_problem *problem, struct hapt_arena *arena,
                                   struct hapt_ratio_result *result);
/* HAP (3): the time of all stages at ratio [segments][devices]. */
double hapt_ratios_cost(const struct hapt_ratio_problem *problem, const double *ratio);
/* True if these ratios fit the devices' memory. */
bool hapt_ratios_fit(const struct hapt_ratio_problem *problem, const double *ratio);

#endif
