/*
 * Split backward passes of plans that were searched without (hapt_search_options.split). Input: the best plan without a
 * split; for YES, of those whose launches fit with the memory of split programs. Output: the plan, split, with other
 * stage boundaries where that is shorter; or the same plan.
 */
#include "search.h"

#include "hapt/recut.h"

enum hapt_status hapt_plan_split_view(const struct hapt_profile *profile, struct hapt_arena *arena,
                                      const struct hapt_profile **view)
{
    struct hapt_profile *made;
    bool known = false;
    for (int c = 0; c < profile->cluster_count; c++) known = known || profile->cluster[c].weight_time;
    if (!known)
        return hapt_fail(HAPT_ERR_INPUT, "make the profile again, or leave out --split-backward",
                         "the profile has no weight_time, which split backward passes need");
    HAPT_TRY(hapt_profile_split_view(profile, arena, &made));
    *view = made;
    return HAPT_OK;
}

/* Other boundaries shorten a step by less than this factor. */
#define BOUNDARIES_WORTH 0.995

/* Better boundaries, where they are free, and where that may lead to the shortest known step. */
static enum hapt_status move_boundaries(MPI_Comm comm, const struct hapt_profile *profile,
                                        const struct hapt_search_options *options, struct hapt_arena *result,
                                        struct hapt_plan **plan)
{
    if (options->objective != HAPT_OBJECTIVE_STEP || hapt_schedule_loops(options->schedule)) return HAPT_OK;
    if (options->known_s > 0 && BOUNDARIES_WORTH * (*plan)->simulated_s > options->known_s) return HAPT_OK;
    return hapt_plan_search_split(comm, profile, options, result, plan);
}

enum hapt_status hapt_plan_choose_split(MPI_Comm comm, const struct hapt_profile *profile,
                                        const struct hapt_search_options *options, struct hapt_arena *result,
                                        struct hapt_plan **plan, bool *fits)
{
    *fits = true;
    if (options->split == HAPT_SPLIT_NO) return HAPT_OK;
    if (options->split == HAPT_SPLIT_YES)
        HAPT_TRY(hapt_search_agree(comm, options, hapt_plan_split_backward(profile, *plan)));
    else
        HAPT_TRY(hapt_env_agree(comm, hapt_plan_split_if_shorter(profile, *plan, fits)));
    return *fits ? move_boundaries(comm, profile, options, result, plan) : HAPT_OK;
}

struct hapt_search_options search_split_again(const struct hapt_search_options *options)
{
    struct hapt_search_options again = *options;
    again.split = HAPT_SPLIT_YES;
    again.may_fail = true;
    return again;
}

enum hapt_status search_take_split(const struct hapt_profile *profile, enum hapt_status status, struct hapt_plan *split,
                                   struct hapt_plan **plan)
{
    if (status == HAPT_OK && split->simulated_s < hapt_plan_split_worth(profile) * (*plan)->simulated_s) *plan = split;
    if (status != HAPT_ERR_INFEASIBLE) return status;
    hapt_fail_reset();
    return HAPT_OK;
}
