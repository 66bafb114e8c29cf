/* Transfer slots of a plan without loops whose tensors go past the next stage. In: a priced plan and its profile. Out:
 * the number of transfer slots, the memory that they take, and the simulated step. */
#include "hapt/plan.h"

#include <stdlib.h>

/* A number of slots is enough if the step is within this share of that with a slot for each microbatch: less is not
 * worth memory. */
static const double ENOUGH = 1e-3;

static bool has_far_edge(const struct hapt_plan *plan)
{
    for (int e = 0; e < plan->edge_count; e++)
        if (abs(plan->edge[e].edge.to - plan->edge[e].edge.from) > HAPT_TRANSFER_SLOTS) return true;
    return false;
}

static enum hapt_status step_with(const struct hapt_plan *plan, int slots, double *step_s)
{
    struct hapt_plan other = *plan;
    struct hapt_arena scratch;
    other.transfer_slots = slots;
    hapt_arena_init(&scratch);
    const enum hapt_status status = hapt_plan_estimate(&other, plan->microbatches, &scratch, step_s);
    hapt_arena_release(&scratch);
    return status;
}

/* The least number that is enough. A list is not slower with more slots. */
static enum hapt_status find_enough(const struct hapt_plan *plan, int *slots)
{
    double now_s, least_s, step_s;
    int fails = HAPT_TRANSFER_SLOTS, works = plan->microbatches;
    *slots = fails;
    if (works <= fails) return HAPT_OK;
    HAPT_TRY(step_with(plan, fails, &now_s));
    HAPT_TRY(step_with(plan, works, &least_s));
    if (now_s <= least_s * (1 + ENOUGH)) return HAPT_OK;
    while (works - fails > 1) {
        const int middle = fails + (works - fails) / 2;
        HAPT_TRY(step_with(plan, middle, &step_s));
        *(step_s <= least_s * (1 + ENOUGH) ? &works : &fails) = middle;
    }
    *slots = works;
    return HAPT_OK;
}

/* Prices the plan with this number of slots. The launches, t_max and the formula's value stay. */
static enum hapt_status price_with(const struct hapt_profile *profile, struct hapt_plan *plan, int slots)
{
    const double t_max_s = plan->t_max_s, latency_s = plan->latency_s;
    const char *const limit = plan->limit;
    plan->transfer_slots = slots > HAPT_TRANSFER_SLOTS ? slots : 0;
    const enum hapt_status status = hapt_plan_price_launches(profile, plan);
    plan->t_max_s = t_max_s;
    plan->latency_s = latency_s;
    plan->limit = limit;
    plan->bound_s = 0; /* of plans with the usual slots */
    return status;
}

enum hapt_status hapt_plan_widen_skips(const struct hapt_profile *profile, struct hapt_plan *plan)
{
    int slots;
    enum hapt_status status = HAPT_OK;
    if (hapt_schedule_loops(plan->schedule) || plan->blocking || !has_far_edge(plan)) return HAPT_OK;
    HAPT_TRY(find_enough(plan, &slots));
    if (slots == HAPT_TRANSFER_SLOTS) return HAPT_OK;
    for (; slots >= HAPT_TRANSFER_SLOTS; slots--) {
        status = price_with(profile, plan, slots);
        if (status != HAPT_ERR_INFEASIBLE) return status;
        if (slots > HAPT_TRANSFER_SLOTS) hapt_fail_reset();
    }
    return status;
}
