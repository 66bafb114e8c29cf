/*
 * Loops are tried if the schedule is free and a step has few microbatches: filling and draining the pipeline then take
 * much of it. In: a good plan without loops, which gives rows of submeshes. Out: a looped plan, if one is clearly
 * shorter.
 *
 * Measured over a shaped trunk, loops gain 0.6 to 1 times as much as is simulated. They seldom gain anything where
 * backward passes may be split and subclusters are joined by slow links.
 */
#include "loops.h"
#include "search.h"

#include "hapt/env.h"

/* A looped plan has to be shorter by this factor. */
#define LOOPS_WORTH 0.98
/* Limit of each of the two searches: about half a second on a core. */
#define CHOICE_WORK 1e7
enum { MOST_MICROBATCHES = 16, MOST_LAYERS = 64 };

static bool may_pay(const struct hapt_search_options *options, const struct hapt_plan *plan)
{
    return options->any_loops && options->any_schedule && options->split != HAPT_SPLIT_YES &&
           plan->microbatches <= MOST_MICROBATCHES && plan->layer_count <= MOST_LAYERS &&
           hapt_plan_first_mixed(plan) < 0;
}

/* The best looped plan becomes *plan if it is shorter. `v`: the pipeline goes back and forth. */
static enum hapt_status try_placement(MPI_Comm comm, const struct hapt_profile *profile,
                                      const struct hapt_search_options *options, const struct hapt_plan *unlooped,
                                      bool v, double *least_s, struct hapt_arena *result, struct hapt_plan **plan)
{
    struct hapt_search_options own = *options;
    struct hapt_plan *looped;
    bool fits;
    own.schedule = HAPT_SCHEDULE_LOOPED;
    own.any_schedule = false;
    own.loops = (struct hapt_search_loops){.prefetch = -1, .v = v};
    own.work = CHOICE_WORK;
    own.may_fail = true;
    const enum hapt_status status = search_loops(comm, profile, &own, unlooped, result, &looped);
    if (status == HAPT_ERR_INFEASIBLE || status == HAPT_ERR_USAGE) {
        hapt_fail_reset();
        return HAPT_OK;
    }
    HAPT_TRY(status);
    HAPT_TRY(hapt_plan_choose_split(comm, profile, &own, result, &looped, &fits));
    if (!(looped->simulated_s < *least_s)) return HAPT_OK;
    *least_s = looped->simulated_s;
    *plan = looped;
    return HAPT_OK;
}

/* The best looped plan of all batchings becomes *plan, if it is worth it. each [count]: plans without loops. */
static enum hapt_status choose(MPI_Comm comm, const struct hapt_search_batching *batching, int count,
                               const struct hapt_search_options *options, struct hapt_plan *const *each,
                               struct hapt_arena *result, struct hapt_plan **plan, int *chosen)
{
    const struct hapt_plan *unlooped = *plan;
    double least_s = LOOPS_WORTH * unlooped->simulated_s;
    for (int k = 0; k < count; k++) {
        struct hapt_search_options own = *options;
        struct hapt_plan *const before = *plan;
        own.microbatches = batching[k].microbatches;
        if (!each[k] || !may_pay(&own, each[k])) continue;
        for (int v = 0; v < 2; v++)
            HAPT_TRY(try_placement(comm, batching[k].profile, &own, each[k], v, &least_s, result, plan));
        if (*plan == before) continue;
        (*plan)->search = unlooped->search;
        *chosen = k;
    }
    return HAPT_OK;
}

enum hapt_status hapt_plan_search_batchings(MPI_Comm comm, const struct hapt_search_batching *batching, int count,
                                            const struct hapt_search_options *options, struct hapt_arena *result,
                                            struct hapt_plan **plan, int *chosen)
{
    struct hapt_plan **each = hapt_arena_alloc(result, (size_t)count, sizeof *each);
    HAPT_TRY(hapt_env_agree(comm, each ? HAPT_OK : HAPT_ERR_MEMORY));
    HAPT_TRY(search_batchings(comm, batching, count, options, result, plan, chosen, each));
    return choose(comm, batching, count, options, each, result, plan, chosen);
}
