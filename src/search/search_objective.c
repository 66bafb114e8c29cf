/* The search of the objective, schedule and backward passes that the options ask for. */
#include "search.h"

static enum hapt_status search(MPI_Comm comm, const struct hapt_profile *profile,
                               const struct hapt_search_options *options, struct hapt_arena *result,
                               struct hapt_plan **plan)
{
    return hapt_schedule_loops(options->schedule) ? hapt_plan_search_loops(comm, profile, options, result, plan)
                                                  : hapt_plan_search_formula(comm, profile, options, result, plan);
}

/* Searches with the memory of split programs, then splits. */
static enum hapt_status search_split(MPI_Comm comm, const struct hapt_profile *profile,
                                     const struct hapt_search_options *options, struct hapt_arena *result,
                                     struct hapt_plan **plan)
{
    struct hapt_arena scratch;
    const struct hapt_profile *view;
    bool fits;
    hapt_arena_init(&scratch);
    enum hapt_status status = hapt_env_agree(comm, hapt_plan_split_view(profile, &scratch, &view));
    if (status == HAPT_OK) status = search(comm, view, options, result, plan);
    if (status == HAPT_OK) status = hapt_plan_choose_split(comm, profile, options, result, plan, &fits);
    hapt_arena_release(&scratch);
    return status;
}

enum hapt_status hapt_plan_search(MPI_Comm comm, const struct hapt_profile *profile,
                                  const struct hapt_search_options *options, struct hapt_arena *result,
                                  struct hapt_plan **plan)
{
    struct hapt_plan *split = NULL;
    bool fits;
    if (options->objective == HAPT_OBJECTIVE_STEP && !hapt_schedule_loops(options->schedule)) {
        const struct hapt_search_batching only = {options->microbatches, profile};
        int chosen;
        return hapt_plan_search_batchings(comm, &only, 1, options, result, plan, &chosen);
    }
    if (options->split == HAPT_SPLIT_YES) return search_split(comm, profile, options, result, plan);
    HAPT_TRY(search(comm, profile, options, result, plan));
    HAPT_TRY(hapt_plan_choose_split(comm, profile, options, result, plan, &fits));
    if (fits) return HAPT_OK;
    const struct hapt_search_options again = search_split_again(options);
    const enum hapt_status status = search_split(comm, profile, &again, result, &split);
    return search_take_split(profile, status, split, plan);
}
