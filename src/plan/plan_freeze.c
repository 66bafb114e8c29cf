/* The frozen prefix of a model: stages without backward passes. */
#include "hapt/plan.h"

/* The simulated step after launch counts have changed; a bound that was proven for other lists is dropped. */
static enum hapt_status simulate_anew(struct hapt_plan *plan)
{
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    const enum hapt_status status = hapt_plan_estimate(plan, plan->microbatches, &scratch, &plan->simulated_s);
    hapt_arena_release(&scratch);
    plan->bound_s = 0;
    return status;
}

/* Loops whose submeshes have unequal numbers of trained stages stall, or deadlock: then empty backward passes take less
 * time. */
static enum hapt_status freeze_loops(struct hapt_plan *plan)
{
    const double before_s = plan->simulated_s;
    plan->bound_s = 0;
    const enum hapt_status status = hapt_plan_change(plan, plan->schedule, plan->microbatches, plan->hide_threshold);
    if (status != HAPT_OK && status != HAPT_ERR_USAGE) return status;
    if (status == HAPT_OK && plan->simulated_s <= before_s) return HAPT_OK;
    hapt_fail_reset();
    for (int i = 0; i < plan->stage_count; i++) plan->stage[i].forward_only = 0;
    return hapt_plan_change(plan, plan->schedule, plan->microbatches, plan->hide_threshold);
}

enum hapt_status hapt_plan_freeze(struct hapt_plan *plan, int first_trained_op)
{
    bool froze = false, thawed = false;
    for (int i = 0; i < plan->stage_count; i++) {
        struct hapt_plan_stage *stage = &plan->stage[i];
        HAPT_ASSERT(stage->first_op >= 0);
        const int frozen = i + 1 < plan->stage_count && stage->end_op <= first_trained_op;
        froze = froze || frozen > stage->forward_only;
        thawed = thawed || frozen < stage->forward_only;
        stage->forward_only = frozen;
    }
    if (thawed) return hapt_plan_change(plan, plan->schedule, plan->microbatches, plan->hide_threshold);
    if (!froze) return HAPT_OK;
    if (hapt_schedule_loops(plan->schedule)) return freeze_loops(plan);
    for (int i = 0; i < plan->stage_count && plan->stage[i].forward_only; i++) {
        struct hapt_plan_stage *stage = &plan->stage[i];
        const int launches = hapt_schedule_forward_only_launches(plan->schedule, plan->microbatches, stage->comm_s,
                                                                 plan->t_max_s, plan->hide_threshold);
        if (launches < stage->warmup) stage->warmup = launches;
        if (plan->split) stage->slots = stage->warmup; /* nothing waits in them for gradients of parameters */
    }
    hapt_plan_tighten(plan);
    return simulate_anew(plan);
}
