/*
 * Looped plans beside a free schedule. They are tried if a step has few microbatches: filling and draining the pipeline
 * then take much of it. In: a good plan without loops, which gives rows of submeshes. Out: a looped plan with a step
 * below a limit, if one is found.
 *
 * Loops gained 0.6 to 1 times as much as was simulated, measured over a shaped trunk at equal speed of the cores. They
 * seldom gain anything if backward passes may be split and slow links join the subclusters.
 */
#include "loops.h"
#include "search.h"

/* Limit of each of the two searches: about half a second on a core. */
#define CHOICE_WORK 1e7
enum { MOST_MICROBATCHES = 16, MOST_LAYERS = 64 };

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

bool search_may_loop(const struct hapt_profile *profile, const struct hapt_search_options *options)
{
    return options->any_loops && options->any_schedule && options->split != HAPT_SPLIT_YES &&
           options->microbatches <= MOST_MICROBATCHES && profile->layer_count <= MOST_LAYERS;
}

enum hapt_status search_choose_loops(MPI_Comm comm, const struct hapt_profile *profile,
                                     const struct hapt_search_options *options, const struct hapt_plan *unlooped,
                                     double limit_s, struct hapt_arena *result, struct hapt_plan **plan)
{
    if (hapt_plan_first_mixed(unlooped) >= 0) return HAPT_OK;
    for (int v = 0; v < 2; v++) HAPT_TRY(try_placement(comm, profile, options, unlooped, v, &limit_s, result, plan));
    return HAPT_OK;
}
