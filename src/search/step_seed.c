/* Seeds of the search for the least simulated step: optima of the formula, priced by simulation. */
#include "step.h"

#include <math.h>

enum hapt_status step_add_seed(struct step_search *search, const struct hapt_profile *profile,
                               const struct hapt_search_options *rule, struct step_candidate *trial)
{
    struct hapt_plan *plan;
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    enum hapt_status status = hapt_plan_search_formula(search->comm, profile, rule, &scratch, &plan);
    if (status == HAPT_OK) {
        status = step_candidate_from(search, plan, trial);
        search->figures.candidates += plan->search.candidates;
        search->figures.evaluated += plan->search.evaluated;
        if (status == HAPT_OK) status = step_price_launches(search, INFINITY, trial);
        if (status == HAPT_OK && trial->step_s < search->best.step_s) step_candidate_copy(&search->best, trial);
        status = hapt_env_agree(search->comm, status);
    }
    hapt_arena_release(&scratch);
    return status;
}

enum hapt_status step_improve_seed(struct step_search *search, struct step_candidate *seed)
{
    HAPT_TRY(step_refine(search, seed));
    if (seed->step_s < search->best.step_s) step_candidate_copy(&search->best, seed);
    return HAPT_OK;
}

enum hapt_status step_may_lack(enum hapt_status status)
{
    if (status != HAPT_ERR_INFEASIBLE) return status;
    hapt_fail_reset();
    return HAPT_OK;
}
