/*
 * Why this plan: what limits it, what the next best plans lose by, and whether joining the subclusters is worth it.
 *
 * Rivals are optima of restricted searches, so each is the best of its kind: none of those that fit beats the optimum.
 */
#ifndef HAPT_RIVALS_H
#define HAPT_RIVALS_H

#include "hapt/plan.h"

/* What a plan's pace comes from, and how close the other resources are. Stages count from 0; -1: none. */
struct hapt_limit {
    int compute_stage;     /* that computes longest */
    double compute_s;      /* its t_i */
    int link_stage;        /* whose boundary behind it takes longest */
    double link_s;         /* its c_i; where it exceeds compute_s the steady state is paced by the link */
    double link_bytes;     /* per microbatch */
    double link_bandwidth; /* byte/s that the link has */
    double knee_bandwidth; /* byte/s at which c_i = compute_s: 0 when there is no boundary, INFINITY when latency alone
                              is longer */
    int memory_stage;      /* with the least share of its devices' memory left */
    double memory_left_bytes;
    int waiting_stage;    /* where memory sets the pace: would exceed its memory at the next faster pace */
    double missing_bytes; /* by so much */
    int devices, idle_devices;
};

void hapt_plan_limit(const struct hapt_profile *profile, const struct hapt_plan *plan, struct hapt_limit *limit);

struct hapt_rival {
    const char *what;   /* how it differs: "v100 before a100"; several restrictions that lead to one plan are joined */
    const char *reason; /* what it loses by, in words and numbers; why there is none */
    struct hapt_plan *plan; /* NULL: there is none */
    bool fits;              /* no: exceeds the devices' memory (warm-up and memory are those of its own pace) */
    double loss;            /* latency_s / plan->latency_s - 1 */
    /* its latency_s less the plan's comes from: (B - 1) t_max, the sum of t_i, the sum of 2 c_i */
    double pace_s, fill_s, transfer_s;
    int short_stage;    /* where it does not fit: the stage with the largest excess */
    double short_bytes; /* over its devices' memory */
};

struct hapt_rivals {
    int count;
    struct hapt_rival *rival; /* by rising latency; those that do not exist last */
};

/* Is joining the subclusters worth it? Throughputs by simulated steps. */
struct hapt_worth {
    int subclusters;
    struct hapt_plan **alone; /* [subclusters] best plan on each alone, same microbatches; NULL: none fits */
    const char **obstacle;    /* [subclusters] why there is none */
    int best;                 /* fastest alone; -1: none */
    double together_per_s;    /* microbatches per second */
    double alone_per_s;       /* of the best alone; 0: none */
    double apart_per_s;       /* of separate jobs side by side, a copy of the model on each subcluster that holds one */
    int copies;               /* so many */
};

/* Collective over env->world. */
enum hapt_status hapt_plan_worth(const struct hapt_env *env, const struct hapt_profile *profile,
                                 const struct hapt_search_options *options, const struct hapt_plan *plan,
                                 struct hapt_arena *arena, struct hapt_worth **worth);

/* The plan's rivals under the options that it was searched with: other orders of its subclusters, without each of them,
 * each alone (from `worth`), with each that it leaves out, the cuts between subclusters one layer earlier and later,
 * and where other bytes cross, with a stage split in two or two joined, with memory lifted, with idle devices used or
 * left. Plans that several of these lead to stand once. `given`: the plan was not searched but given; the best plan is
 * then a rival too. Collective over env->world, the same for every number of ranks. */
enum hapt_status hapt_plan_rivals(const struct hapt_env *env, const struct hapt_profile *profile,
                                  const struct hapt_search_options *options, const struct hapt_plan *plan,
                                  const struct hapt_worth *worth, bool given, struct hapt_arena *arena,
                                  struct hapt_rivals **rivals);

#endif
