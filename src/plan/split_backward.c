/* Splits the backward passes of a plan (zero bubble). Input: a priced plan and the profile. Output: the same stages and
 * launch counts with WEIGHT instructions, the memory of split programs, and a number of slots for each stage. */
#include <math.h>
#include <string.h>

#include "plan_private.h"

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

/* True if the stage fits with these slots. */
static bool fits(const struct hapt_plan_stage *stage, int slots, int weight_slots)
{
    struct hapt_plan_stage with = *stage;
    with.slots = slots;
    with.weight_slots = weight_slots;
    for (int k = 0; k < stage->submesh->part_count; k++)
        if (!hapt_at_most(hapt_plan_stage_bytes(&with, k), stage->submesh->device_memory_bytes[k])) return false;
    return true;
}

static bool is_alone(const struct hapt_plan *plan, int i)
{
    for (int other = 0; other < plan->stage_count; other++)
        if (other != i && plan->stage[other].submesh == plan->stage[i].submesh) return false;
    return true;
}

/* A microbatch that waits keeps its slot. With more slots than launches, it does not delay the next forward. Otherwise
 * it waits only while no forward needs the slot, so mostly behind the last forward. */
static int slots_for(const struct hapt_plan_stage *stage, int weight_slots, bool more, int microbatches)
{
    const int slots = more ? stage->warmup + weight_slots - 1 : stage->warmup;
    return slots < microbatches ? slots : microbatches;
}

/* Looped lists hold as many slots as unsplit ones. Gives each stage of a submesh `wanted` weight slots, or as many as
 * fit. */
static void grant_looped_slots(struct hapt_plan *plan, int wanted)
{
    for (int s = 0; s < plan->submesh_count; s++) {
        double have_bytes = 0;
        bool fits = false;
        for (int waits = wanted; waits > 0 && !fits; waits--) {
            for (int i = 0; i < plan->stage_count; i++)
                if (plan->stage[i].submesh == &plan->submesh[s]) plan->stage[i].weight_slots = waits;
            fits = hapt_at_most(hapt_plan_submesh_bytes(plan, &plan->submesh[s], &have_bytes), have_bytes);
        }
    }
}

/* Gives each stage `wanted` weight slots, or as many as fit, and the slots for them. Stages that share a submesh keep
 * one each. */
static void grant_slots(struct hapt_plan *plan, int wanted, bool more)
{
    if (hapt_schedule_loops(plan->schedule)) {
        grant_looped_slots(plan, wanted);
        return;
    }
    for (int i = 0; i < plan->stage_count; i++) {
        struct hapt_plan_stage *stage = &plan->stage[i];
        int waits = is_alone(plan, i) ? wanted : 1;
        while (waits > 1 && !fits(stage, slots_for(stage, waits, more, plan->microbatches), waits)) waits--;
        stage->weight_slots = waits;
        stage->slots = slots_for(stage, waits, more, plan->microbatches);
    }
}

static enum hapt_status simulate(const struct hapt_plan *plan, struct plan_slots *used, double *step_s)
{
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    const enum hapt_status status = plan_simulate_slots(plan, &scratch, used, step_s);
    hapt_arena_release(&scratch);
    return status;
}

/* Reduces the slots of each stage to those that its list uses. The lists stay the same. */
static enum hapt_status drop_unused_slots(struct hapt_plan *plan, struct hapt_arena *scratch)
{
    struct hapt_schedule *schedule;
    HAPT_TRY(hapt_plan_schedule(plan, plan->exchange_s > 0, scratch, &schedule));
    for (int i = 0; i < plan->stage_count; i++) {
        const struct hapt_instruction_list *list = &schedule->list[schedule->submesh_of[i]];
        if (!is_alone(plan, i)) continue;
        plan->stage[i].slots = list->slots;
        plan->stage[i].weight_slots = list->weight_slots;
    }
    return HAPT_OK;
}

/* Sets of slots that were tried. */
struct grants {
    int count, stages;
    bool alone;                        /* every stage has a submesh of its own */
    struct plan_slots *granted, *used; /* [MOST_GRANTS + 1][stages] */
};
enum { MOST_GRANTS = 64 }; /* two for each power of two up to the most microbatches */

/* True if lists with this number of slots are those with `before`, of which they used `used`. */
static bool is_like(int now, int before, int used)
{
    return now == before || (now > before && before > used);
}

static bool gives_same_lists(const struct grants *grants, const struct plan_slots *own, int k)
{
    const struct plan_slots *granted = &grants->granted[k * grants->stages], *used = &grants->used[k * grants->stages];
    bool same = true;
    for (int i = 0; i < grants->stages && same; i++)
        same = grants->alone ? is_like(own[i].slots, granted[i].slots, used[i].slots) &&
                                   is_like(own[i].weight_slots, granted[i].weight_slots, used[i].weight_slots)
                             : own[i].slots == granted[i].slots && own[i].weight_slots == granted[i].weight_slots;
    return same;
}

/* Notes the plan's slots; *used: room for those of its lists. False: lists with these slots were tried before. */
static bool note_grant(struct grants *grants, const struct hapt_plan *plan, struct plan_slots **used)
{
    struct plan_slots *const own = &grants->granted[grants->count * grants->stages];
    *used = &grants->used[grants->count * grants->stages];
    for (int i = 0; i < grants->stages; i++)
        own[i] = (struct plan_slots){plan->stage[i].slots, plan->stage[i].weight_slots};
    for (int k = 0; k < grants->count; k++)
        if (gives_same_lists(grants, own, k)) return false;
    grants->count++;
    return true;
}

/* Tries 1, 2, 4, ... and B passes that may wait, each with slots of their own and without. More do not always help: a
 * pass that waits for an idle time may end the step. Lists that use fewer slots than they may are those of any larger
 * number, and are not made again. */
static enum hapt_status choose_slots(struct hapt_plan *plan, struct hapt_arena *scratch)
{
    const int S = plan->stage_count, B = plan->microbatches;
    struct hapt_plan_stage *best;
    struct grants grants = {.stages = S, .alone = plan->submesh_count == S};
    HAPT_NEW(best, scratch, S);
    HAPT_NEW(grants.granted, scratch, (MOST_GRANTS + 1) * S);
    HAPT_NEW(grants.used, scratch, (MOST_GRANTS + 1) * S);
    memcpy(best, plan->stage, (size_t)S * sizeof *best);
    for (int wanted = 2, last = B < 2; !last; wanted = 2 * wanted < B ? 2 * wanted : B) {
        last = wanted >= B;
        for (int more = 0; more < (hapt_schedule_loops(plan->schedule) ? 1 : 2); more++) {
            struct plan_slots *used;
            double step_s;
            grant_slots(plan, wanted < B ? wanted : B, more);
            if (!note_grant(&grants, plan, &used)) continue;
            HAPT_TRY(simulate(plan, used, &step_s));
            if (hapt_at_most(plan->simulated_s, step_s)) continue;
            plan->simulated_s = step_s;
            memcpy(best, plan->stage, (size_t)S * sizeof *best);
        }
    }
    memcpy(plan->stage, best, (size_t)S * sizeof *best);
    HAPT_TRY(drop_unused_slots(plan, scratch));
    hapt_plan_tighten(plan);
    return HAPT_OK;
}

static enum hapt_status split(const struct hapt_profile *profile, struct hapt_plan *plan, struct hapt_arena *scratch)
{
    const double t_max_s = plan->t_max_s, latency_s = plan->latency_s;
    const char *const limit = plan->limit;
    HAPT_TRY(check_known(profile, plan));
    plan->split = true;
    for (int i = 0; i < plan->stage_count; i++) plan->stage[i].slots = plan->stage[i].warmup;
    HAPT_TRY(hapt_plan_price_launches(profile, plan));
    if (plan->t_max_s <= t_max_s) { /* the formula does not know splits; their stages may take longer */
        plan->t_max_s = t_max_s;
        plan->latency_s = latency_s;
        plan->limit = limit;
    }
    plan->bound_s = 0;
    return choose_slots(plan, scratch);
}

/* Figures of a plan that its split may overwrite. */
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

double hapt_plan_split_worth(const struct hapt_profile *profile)
{
    return profile->origin == HAPT_PROFILE_MEASURED ? 0.99 : 1;
}

/* `shorter`: splits the plan only if the simulated step is then shorter. */
static enum hapt_status try_split(const struct hapt_profile *profile, bool shorter, struct hapt_plan *plan)
{
    struct hapt_arena scratch;
    struct backup backup;
    HAPT_ASSERT(!plan->split);
    hapt_arena_init(&scratch);
    enum hapt_status status = back_up(plan, &scratch, &backup);
    if (status == HAPT_OK) {
        status = split(profile, plan, &scratch);
        const double worth_s = hapt_plan_split_worth(profile) * backup.plan.simulated_s;
        if (status != HAPT_OK || (shorter && hapt_at_most(worth_s, plan->simulated_s))) restore(&backup, plan);
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
