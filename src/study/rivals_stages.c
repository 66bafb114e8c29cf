/* Rivals with one stage more or less: all ways to split a stage's devices in two, or to join two stages of a
 * subcluster. */
#include "rivals.h"
#include "hapt/search.h"

#include <math.h>

#include "hapt/recut.h"

/* A row may be this much slower by the formula than the best one, and still faster when simulated. */
#define NEAR 1.02

struct shapes {
    const struct hapt_profile *profile;
    const struct hapt_search_options *options;
    const struct hapt_plan *plan;
    int count;                    /* of the row that is tried */
    struct hapt_recut_slot *slot; /* [stage_count + 1] */
    int idle[HAPT_MAX_SUBCLUSTERS];
    struct hapt_arena *arena;
    struct hapt_plan *best;
};

static void copy_slots(const struct shapes *shapes, int from, int end, struct hapt_recut_slot *slot)
{
    for (int i = from; i < end; i++) {
        const struct hapt_plan_stage *stage = &shapes->plan->stage[i];
        *slot++ = (struct hapt_recut_slot){stage->submesh->subcluster[0], stage->submesh->nodes,
                                           stage->submesh->devices_per_node};
    }
}

static enum hapt_status try_shape(void *context)
{
    struct shapes *shapes = context;
    struct hapt_plan *found;
    const enum hapt_objective objective = shapes->options->objective;
    /* rows that are slower by the formula may have a shorter simulated step */
    const double most_s = !shapes->best                         ? INFINITY
                          : objective == HAPT_OBJECTIVE_FORMULA ? shapes->best->latency_s
                                                                : NEAR * shapes->best->latency_s;
    HAPT_TRY(
        hapt_plan_recut(shapes->profile, shapes->options, shapes->slot, shapes->count, most_s, shapes->arena, &found));
    if (!found) return HAPT_OK;
    if (objective == HAPT_OBJECTIVE_STEP) HAPT_TRY(hapt_plan_price_stages(shapes->profile, shapes->options, found));
    if (!shapes->best || hapt_search_value_s(objective, found) < hapt_search_value_s(objective, shapes->best))
        shapes->best = found;
    return HAPT_OK;
}

static enum hapt_status prepare(struct shapes *shapes, struct hapt_arena *scratch)
{
    const struct hapt_plan *plan = shapes->plan;
    HAPT_NEW(shapes->slot, scratch, plan->stage_count + 1);
    for (int c = 0; c < shapes->profile->cluster_count; c++)
        shapes->idle[c] = shapes->profile->cluster[c].nodes * shapes->profile->cluster[c].devices_per_node;
    for (int i = 0; i < plan->stage_count; i++)
        shapes->idle[plan->stage[i].submesh->subcluster[0]] -= hapt_plan_submesh_size(plan->stage[i].submesh);
    return HAPT_OK;
}

static enum hapt_status try_all(struct shapes *shapes, int more, struct hapt_arena *scratch)
{
    const struct hapt_plan *plan = shapes->plan;
    const int S = plan->stage_count;
    HAPT_TRY(prepare(shapes, scratch));
    for (int i = 0; i + (more < 0) < S; i++) {
        const struct hapt_plan_stage *stage = &plan->stage[i];
        int devices = shapes->idle[stage->submesh->subcluster[0]] + hapt_plan_submesh_size(stage->submesh);
        const int taken = more < 0 ? 2 : 1;
        if (more < 0) {
            if (stage[1].submesh->subcluster[0] != stage->submesh->subcluster[0]) continue;
            devices += hapt_plan_submesh_size(stage[1].submesh);
        }
        copy_slots(shapes, 0, i, shapes->slot);
        copy_slots(shapes, i + taken, S, shapes->slot + i + taken + more);
        shapes->count = S + more;
        HAPT_TRY(hapt_recut_share(shapes->profile, stage->submesh->subcluster[0], devices, more > 0,
                                  shapes->options->use_all_devices, &shapes->slot[i], try_shape, shapes));
    }
    return HAPT_OK;
}

enum hapt_status rivals_stages(const struct hapt_profile *profile, const struct hapt_search_options *options,
                               const struct hapt_plan *plan, int more, struct hapt_arena *arena,
                               struct hapt_plan **found)
{
    struct shapes shapes = {.profile = profile, .options = options, .plan = plan, .arena = arena};
    struct hapt_arena scratch;
    *found = NULL;
    if (hapt_plan_first_mixed(plan) >= 0) return HAPT_OK; /* slots are submeshes of one subcluster */
    hapt_arena_init(&scratch);
    const enum hapt_status status = try_all(&shapes, more, &scratch);
    hapt_arena_release(&scratch);
    *found = status == HAPT_OK ? shapes.best : NULL;
    return status;
}
