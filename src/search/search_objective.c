/* The search of the objective and schedule that the options ask for. */
#include "hapt/search.h"

enum hapt_status hapt_plan_search(MPI_Comm comm, const struct hapt_profile *profile,
                                  const struct hapt_search_options *options, struct hapt_arena *result,
                                  struct hapt_plan **plan)
{
    if (hapt_schedule_loops(options->schedule)) return hapt_plan_search_loops(comm, profile, options, result, plan);
    return options->objective == HAPT_OBJECTIVE_STEP ? hapt_plan_search_step(comm, profile, options, result, plan)
                                                     : hapt_plan_search_formula(comm, profile, options, result, plan);
}
