/*
 * Explains a plan: what limits it, how much worse the next best plans are, and whether joining the subclusters pays.
 *
 * A rival is the best plan of a restricted search. Of the formula it is the optimum, so no rival that fits the memory
 * beats the plan. Of the simulated step it is refined less than the plan, so it may be slower than possible.
 */
#ifndef HAPT_RIVALS_H
#define HAPT_RIVALS_H

#include "hapt/search.h"

/* The cause of a plan's t_max, and the distance of the other resources from it. Stages count from 0; -1: none. */
struct hapt_limit {
    int compute_stage;     /* the stage that computes longest */
    double compute_s;      /* its t_i */
    int link_stage;        /* the stage with the slowest boundary behind it */
    double link_s;         /* its c_i; if larger than compute_s, the link limits the steady state */
    double link_bytes;     /* per microbatch */
    double link_bandwidth; /* byte/s of the link */
    double knee_bandwidth; /* byte/s at which c_i = compute_s; 0: no boundary; INFINITY: the latency alone is longer */
    int memory_stage;      /* the stage with the smallest share of free device memory */
    double memory_left_bytes;
    int memory_limiting_stage; /* if memory sets t_max: this stage has too little memory for the next smaller t_max */
    double missing_bytes;      /* by this much */
    int devices, idle_devices;
};

void hapt_plan_limit(const struct hapt_profile *profile, const struct hapt_plan *plan, struct hapt_limit *limit);

/* Time and memory of a stage if it kept all activations, or all weights on each device, with as many microbatches in
 * flight. NaN: it would not fit with one. */
enum hapt_kept_kind { HAPT_KEPT_ACTIVATIONS, HAPT_KEPT_WEIGHTS };
struct hapt_kept {
    double more_s;       /* per microbatch, that it takes longer now */
    double memory_bytes; /* per device, that it would need */
};
/* False: the stage keeps them, or the profile has no such stages that do (--recompute all, --offload weights). */
bool hapt_plan_kept(const struct hapt_profile *profile, const struct hapt_plan *plan, int stage,
                    enum hapt_kept_kind kind, struct hapt_kept *kept);

struct hapt_rival {
    const char *what;       /* the difference: "v100 before a100"; restrictions that lead to the same plan are joined */
    const char *reason;     /* why it is worse, in words and numbers, or why there is no plan */
    struct hapt_plan *plan; /* NULL: no plan */
    bool fits;              /* false: exceeds the devices' memory (warm-up and memory at its own t_max) */
    double loss;            /* value / value of the plan - 1, by the objective of the search */
    /* parts of latency_s minus the plan's: (B - 1) t_max, sum of t_i, sum of 2 c_i */
    double steady_s, fill_s, transfer_s;
    int short_stage;    /* if it does not fit: the stage with the largest excess */
    double short_bytes; /* excess over its devices' memory */
};

struct hapt_rivals {
    int count;
    struct hapt_rival *rival; /* by ascending loss; rivals without a plan last */
};

/* Whether joining the subclusters pays. Throughputs are those of simulated steps. */
struct hapt_join_benefit {
    int subclusters;
    struct hapt_plan **alone; /* [subclusters] best plan on each alone, same microbatches; NULL: none fits */
    const char **obstacle;    /* [subclusters] why there is no plan */
    int best;                 /* fastest alone; -1: none */
    double together_per_s;    /* microbatches per second */
    double alone_per_s;       /* of the best one alone; 0: none */
    double apart_per_s;       /* of separate jobs, one model copy on each subcluster that holds it */
    int copies;               /* number of these jobs */
};

/* Collective over env->world. */
enum hapt_status hapt_plan_join_benefit(const struct hapt_env *env, const struct hapt_profile *profile,
                                        const struct hapt_search_options *options, const struct hapt_plan *plan,
                                        struct hapt_arena *arena, struct hapt_join_benefit **benefit);

/* The plan's rivals under the options of its search. They are: other orders of its subclusters; without one of them;
 * each alone (from `benefit`); with one that it leaves out. Then: boundaries between subclusters one layer earlier or
 * later, and where the bytes that cross differ; one stage split in two; two stages joined; memory unlimited; idle
 * devices used or left. Equal plans are listed once. `given`: the plan was given, not searched; the best plan is then a
 * rival too. Collective over env->world, the same for every number of ranks. */
enum hapt_status hapt_plan_rivals(const struct hapt_env *env, const struct hapt_profile *profile,
                                  const struct hapt_search_options *options, const struct hapt_plan *plan,
                                  const struct hapt_join_benefit *benefit, bool given, struct hapt_arena *arena,
                                  struct hapt_rivals **rivals);

#endif
