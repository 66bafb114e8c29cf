/* Splits the backward passes of a plan (zero bubble). Input: a priced plan and the profile. Output: the same stages and
 * launch counts with WEIGHT instructions, the memory of split programs, and a number of slots for each stage. */
#include <math.h>
#include <string.h>

#include "hapt/plan.h"

static enum hapt_status check_known(const struct hapt_profile *profile, const struct hapt_plan *plan)
{
    for (int i = 0; i < plan->stage_count; i++) {
        const struct hapt_plan_stage *stage = &plan->stage[i];
        char title[HAPT_PLAN_STAGE_TITLE];
        if (hapt_plan_is_mixed(stage))
            return hapt_fail(HAPT_ERR_INPUT, "leave out --split-backward, or plan with --mixed no",
                             "%s: backward passes of mixed stages cannot be split",
                             hapt_plan_stage_title(plan, i, title));
        const struct hapt_profile_cluster *cluster = &profile->cluster[stage->submesh->subcluster[0]];
        if (!cluster->weight_time || !isfinite(stage->weight_s))
            return hapt_fail(HAPT_ERR_INPUT, "make the profile again, or leave out --split-backward",
                             "%s: the profile has no weight_time, which split backward passes need",
                             hapt_plan_stage_title(plan, i, title));
    }
    return HAPT_OK;
}

/* The most microbatches whose activations fit the devices of a stage, of at most `most`. */
static int fitting_slots(const struct hapt_plan_stage *stage, int most)
{
    int slots = most;
    for (int k = 0; k < stage->submesh->part_count; k++) {
        const double room = stage->submesh->device_memory_bytes[k] - stage->part_parameter_bytes[k],
                     each = stage->part_activation_bytes[k];
        if (each * slots > room) slots = (int)fmax(0, floor(room / each));
    }
    return slots;
}

static bool is_alone(const struct hapt_plan *plan, int i)
{
    for (int other = 0; other < plan->stage_count; other++)
        if (other != i && plan->stage[other].submesh == plan->stage[i].submesh) return false;
    return true;
}

/* Gives each stage `wanted` slots, or as many as fit. Stages that share a submesh keep those of their launches. True:
 * some stage has more than before. */
static bool grant_slots(struct hapt_plan *plan, int wanted)
{
    bool more = false;
    for (int i = 0; i < plan->stage_count; i++) {
        struct hapt_plan_stage *stage = &plan->stage[i];
        const int slots = is_alone(plan, i) ? fitting_slots(stage, wanted) : 0;
        if (slots <= hapt_plan_stage_slots(stage)) continue;
        stage->slots = slots;
        more = true;
    }
    return more;
}

static enum hapt_status simulate(const struct hapt_plan *plan, double *step_s)
{
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    const enum hapt_status status = hapt_plan_estimate(plan, plan->microbatches, &scratch, step_s);
    hapt_arena_release(&scratch);
    return status;
}

/* More slots let more WEIGHT passes wait for an idle time. N_0 slots everywhere often do; B never wait for a slot. */
static enum hapt_status choose_slots(struct hapt_plan *plan, struct hapt_arena *scratch)
{
    const int S = plan->stage_count, B = plan->microbatches;
    int *best;
    HAPT_NEW(best, scratch, S);
    for (int i = 0; i < S; i++) best[i] = plan->stage[i].slots;
    for (int wanted = plan->stage[0].warmup, last = 0; !last; wanted = wanted < B / 2 ? 2 * wanted : B) {
        double step_s;
        last = wanted >= B;
        if (!grant_slots(plan, wanted)) continue;
        HAPT_TRY(simulate(plan, &step_s));
        if (hapt_at_most(plan->simulated_s, step_s)) continue;
        plan->simulated_s = step_s;
        for (int i = 0; i < S; i++) best[i] = plan->stage[i].slots;
    }
    for (int i = 0; i < S; i++) plan->stage[i].slots = best[i];
    hapt_plan_tighten(plan);
    return HAPT_OK;
}

static enum hapt_status split(const struct hapt_profile *profile, struct hapt_plan *plan, struct hapt_arena *scratch)
{
    const double t_max_s = plan->t_max_s, latency_s = plan->latency_s;
    const char *const limit = plan->limit;
    HAPT_TRY(check_known(profile, plan));
    plan->split = true;
    HAPT_TRY(hapt_plan_price_launches(profile, plan));
    plan->t_max_s = t_max_s; /* the formula does not know splits */
    plan->latency_s = latency_s;
    plan->limit = limit;
    plan->bound_s = 0;
    return choose_slots(plan, scratch);
}

/* What a plan's split may overwrite. */
struct backup {
    struct hapt_plan plan;
    struct hapt_plan_stage *stage;
    double *bytes; /* of the parts of all stages: parameters, then activations */
};

static enum hapt_status back_up(const struct hapt_plan *plan, struct hapt_arena *scratch, struct backup *backup)
{
    size_t parts = 0;
    for (int i = 0; i < plan->stage_count; i++) parts += (size_t)plan->stage[i].submesh->part_count;
    backup->plan = *plan;
    HAPT_NEW(backup->stage, scratch, plan->stage_count);
    HAPT_NEW(backup->bytes, scratch, 2 * parts);
    memcpy(backup->stage, plan->stage, (size_t)plan->stage_count * sizeof *backup->stage);
    for (int i = 0, at = 0; i < plan->stage_count; i++)
        for (int k = 0; k < plan->stage[i].submesh->part_count; k++) {
            backup->bytes[at++] = plan->stage[i].part_parameter_bytes[k];
            backup->bytes[at++] = plan->stage[i].part_activation_bytes[k];
        }
    return HAPT_OK;
}

static void restore(const struct backup *backup, struct hapt_plan *plan)
{
    *plan = backup->plan;
    memcpy(plan->stage, backup->stage, (size_t)plan->stage_count * sizeof *backup->stage);
    for (int i = 0, at = 0; i < plan->stage_count; i++)
        for (int k = 0; k < plan->stage[i].submesh->part_count; k++) {
            plan->stage[i].part_parameter_bytes[k] = backup->bytes[at++];
            plan->stage[i].part_activation_bytes[k] = backup->bytes[at++];
        }
}

/* `shorter`: only if the simulated step is then shorter. */
static enum hapt_status try_split(const struct hapt_profile *profile, bool shorter, struct hapt_plan *plan)
{
    struct hapt_arena scratch;
    struct backup backup;
    HAPT_ASSERT(!plan->split);
    hapt_arena_init(&scratch);
    enum hapt_status status = back_up(plan, &scratch, &backup);
    if (status == HAPT_OK) {
        status = split(profile, plan, &scratch);
        if (status != HAPT_OK || (shorter && hapt_at_most(backup.plan.simulated_s, plan->simulated_s)))
            restore(&backup, plan);
    }
    hapt_arena_release(&scratch);
    return status;
}

enum hapt_status hapt_plan_split_backward(const struct hapt_profile *profile, struct hapt_plan *plan)
{
    return try_split(profile, false, plan);
}

enum hapt_status hapt_plan_split_if_shorter(const struct hapt_profile *profile, struct hapt_plan *plan, bool *fits)
{
    *fits = true;
    const enum hapt_status status = try_split(profile, true, plan);
    if (status != HAPT_ERR_INFEASIBLE && status != HAPT_ERR_INPUT) return status;
    hapt_fail_reset();
    *fits = status != HAPT_ERR_INFEASIBLE;
    return HAPT_OK;
}
