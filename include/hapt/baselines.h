/*
 * How other systems would plan (HAPT 6.1), and ablations of ours (HAPT 6.4, 6.5). All are priced under the same profile
 * and played by the same simulator, each at its best settings: what differs is what a system can choose and what it
 * knows.
 */
#ifndef HAPT_BASELINES_H
#define HAPT_BASELINES_H

#include "hapt/plan.h"

enum hapt_strategy {
    HAPT_STRATEGY_HAPT,      /* the exact optimum (hapt_plan_search) */
    HAPT_STRATEGY_EVEN,      /* its submeshes, layers split evenly (hapt_plan_even) */
    HAPT_STRATEGY_MEGATRON,  /* even blocks, one submesh shape and program everywhere, every device used; 1F1B beside
                                transfers */
    HAPT_STRATEGY_ALPA,      /* 8 or 16 coarse layers, devices taken for identical, links for free; eager 1F1B */
    HAPT_STRATEGY_HEXISCALE, /* 48 coarse layers, devices' speeds known; 1F1B that stands still while it sends and
                                receives */
    HAPT_STRATEGY_COUNT
};
const char *hapt_strategy_name(enum hapt_strategy strategy);
bool hapt_strategy_parse(const char *name, enum hapt_strategy *strategy);
/* The schedule that a strategy runs; `asked` for those that take any. */
enum hapt_schedule_kind hapt_strategy_schedule(enum hapt_strategy strategy, enum hapt_schedule_kind asked);

struct hapt_strategy_options {
    struct hapt_search_options search;
    int granularity;           /* hapt: plan on about so many coarse layers; 0: the profile's own */
    bool ignore_communication; /* hapt: plan as if C(i) = 0, then pay the true links (HAPT 6.5) */
    const bool *block_end;     /* [L - 1] the boundary behind layer l lies between two blocks; NULL: unknown */
};

/* The plan of a strategy, a pure function of profile and options; `note` (may be NULL) says what a reader should know,
 * NULL for nothing. Collective; the same plan on every rank. HAPT_ERR_INFEASIBLE: the system has no plan here, with its
 * reason. */
enum hapt_status hapt_plan_by_strategy(MPI_Comm comm, const struct hapt_profile *profile, enum hapt_strategy strategy,
                                       const struct hapt_strategy_options *options, struct hapt_arena *result,
                                       struct hapt_plan **plan, const char **note);

/* Where `coarse` layers of about equal work end: cut[l], [L], says whether the boundary behind layer l is one (the last
 * is none). Blocks where they are as many as asked for, so that what stands before the first and behind the last joins
 * them; else the narrowest boundary near each equal share. The cuts of a divisor of `coarse` are among them, up to 48.
 */
enum hapt_status hapt_plan_grid(const struct hapt_profile *profile, int coarse, const bool *block_end,
                                struct hapt_arena *arena, bool **cut);
/* Boundaries between repeated modules of the model, in the form of hapt_strategy_options.block_end; NULL when there are
 * none. */
enum hapt_status hapt_plan_blocks(const struct hapt_layers *layers, struct hapt_arena *arena, const bool **block_end);

/* One line of `hapt plan --compare`. */
struct hapt_compare_row {
    const char *name;
    enum hapt_strategy strategy;
    enum hapt_schedule_kind schedule;
    int granularity;
    bool ignore_communication;
    const struct hapt_plan *plan; /* NULL: the system has none */
    const char *reason;           /* why not; NULL where there is a plan */
    const char *note;             /* NULL: none */
    double ratio;                 /* of the simulated step to hapt's; NaN without */
    int boundary;                 /* stage before the slowest link between subclusters; -1: it crosses none */
    double comm_s, overlap;       /* there: c, and the hidden share; NaN without such a boundary */
};
/* Every strategy and ablation; a row that fails is a row. Collective; the same rows on every rank and for any number of
 * ranks. `options`: the search's microbatches, epsilon and use of devices, and block_end; the rest is each row's own.
 */
enum hapt_status hapt_plan_compare(MPI_Comm comm, const struct hapt_profile *profile,
                                   const struct hapt_strategy_options *options, struct hapt_arena *result,
                                   struct hapt_compare_row **rows, int *count);

#endif
