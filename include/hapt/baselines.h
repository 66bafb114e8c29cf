/*
 * Plans of other systems (HAPT 6.1), and ablations of HAPT (HAPT 6.4, 6.5). All use the same profile and the same
 * simulator, each with its best settings. They differ in what a system can choose and what it knows.
 */
#ifndef HAPT_BASELINES_H
#define HAPT_BASELINES_H

#include "hapt/search.h"

enum hapt_strategy {
    HAPT_STRATEGY_HAPT,      /* the exact optimum (hapt_plan_search) */
    HAPT_STRATEGY_EVEN,      /* the optimum's submeshes, layers split evenly (hapt_plan_even) */
    HAPT_STRATEGY_MEGATRON,  /* even blocks, one submesh shape and program everywhere, all devices used; 1F1B or
                                interleaved, with overlapped transfers */
    HAPT_STRATEGY_ALPA,      /* 8 or 16 coarse layers, assumes identical devices and free links; eager 1F1B */
    HAPT_STRATEGY_HEXISCALE, /* 48 coarse layers, knows device speeds; 1F1B, computation stops during transfers */
    HAPT_STRATEGY_PFEIFE, /* assumes identical devices, knows links; data parallelism, prefetch, boundaries by a beam */
    HAPT_STRATEGY_DEEPSPEED, /* stages of equal parameter bytes, data parallelism; 1F1B */
    HAPT_STRATEGY_COLOSSAL,  /* stages of equal time on identical devices; 1F1B */
    HAPT_STRATEGY_COUNT
};
const char *hapt_strategy_name(enum hapt_strategy strategy);
bool hapt_strategy_parse(const char *name, enum hapt_strategy *strategy);
/* The schedule of a strategy, Megatron's without loops; `asked` if the strategy takes any. */
enum hapt_schedule_kind hapt_strategy_schedule(enum hapt_strategy strategy, enum hapt_schedule_kind asked);

struct hapt_strategy_options {
    struct hapt_search_options search;
    int granularity;           /* hapt: plan on about this many coarse layers; 0: the profile's own */
    bool ignore_communication; /* hapt: plan with C(i) = 0, then price with the true links (HAPT 6.5) */
    const bool *block_end;     /* [L - 1] true: the boundary behind layer l lies between two blocks; NULL: unknown */
};

/* The plan of a strategy, a pure function of profile and options. `note` (may be NULL) receives a remark for the
 * reader, or NULL. Collective; the same plan on every rank. HAPT_ERR_INFEASIBLE: the system has no plan here; the error
 * gives the reason. */
enum hapt_status hapt_plan_by_strategy(MPI_Comm comm, const struct hapt_profile *profile, enum hapt_strategy strategy,
                                       const struct hapt_strategy_options *options, struct hapt_arena *result,
                                       struct hapt_plan **plan, const char **note);

/*
 * Independent data-parallel pipelines: each holds the whole model on devices of its own and takes its own microbatches;
 * gradients are reduced over all of them once a step. hapt prices them for comparison. It cannot run them.
 */
struct hapt_pipelines {
    int count;
    const struct hapt_plan **plan; /* [count] each of its own microbatches */
    int microbatches;              /* of all */
    double simulated_s;            /* one step of all */
    double reduce_s;               /* its part behind the step of the slowest pipeline: gradients over the pipelines */
};
/* The fastest pipelines of a strategy: Megatron's are equal, HexiScale's are not. *pipelines NULL: it has none here.
 * Collective; the same on every rank. */
enum hapt_status hapt_plan_pipelines(MPI_Comm comm, const struct hapt_profile *profile, enum hapt_strategy strategy,
                                     const struct hapt_strategy_options *options, struct hapt_arena *result,
                                     struct hapt_pipelines **pipelines);

/* Ends of `coarse` layers of about equal work: boundary[l], [L], is true if a coarse layer ends behind layer l (false
 * for the last). If the model has `coarse` blocks, these are used; layers before the first and behind the last join
 * them. Otherwise the narrowest boundary near each equal share. Up to 48, the boundaries of a divisor of `coarse` are a
 * subset. */
enum hapt_status hapt_plan_grid(const struct hapt_profile *profile, int coarse, const bool *block_end,
                                struct hapt_arena *arena, bool **boundary);
/* Boundaries between repeated modules of the model, as in hapt_strategy_options.block_end; NULL if there are none. */
enum hapt_status hapt_plan_blocks(const struct hapt_layers *layers, struct hapt_arena *arena, const bool **block_end);

/* One line of `hapt plan --compare`. */
struct hapt_compare_row {
    const char *name;
    enum hapt_strategy strategy;
    enum hapt_schedule_kind schedule;
    int granularity;
    bool ignore_communication;
    const struct hapt_plan *plan;           /* NULL: the system has no plan */
    const char *reason;                     /* why there is no plan; NULL if there is one */
    const char *note;                       /* NULL: none */
    const struct hapt_pipelines *pipelines; /* the same system with independent pipelines; NULL: none */
    double ratio;           /* simulated step of the faster of both / that of hapt; NaN without either */
    int boundary;           /* stage in front of the slowest link between subclusters; -1: none is crossed */
    double comm_s, overlap; /* at that boundary: c, and its hidden share; NaN without one */
};
/* The simulated step of the faster of plan and pipelines; infinite without either. */
double hapt_compare_step_s(const struct hapt_compare_row *row);
/* All strategies and ablations; a failed one still gets a row. Collective; the same rows on every rank and for any
 * number of ranks. `options`: microbatches, epsilon, use of devices, block_end; each row sets the rest itself. */
enum hapt_status hapt_plan_compare(MPI_Comm comm, const struct hapt_profile *profile,
                                   const struct hapt_strategy_options *options, struct hapt_arena *result,
                                   struct hapt_compare_row **rows, int *count);

#endif
