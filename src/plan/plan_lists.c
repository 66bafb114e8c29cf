/* The instruction lists and the memory of a plan, from its launch counts and settings. */
#include "hapt/plan.h"

#include <math.h>

enum hapt_status hapt_plan_schedule_edges(const struct hapt_plan *plan, bool tied, int edge_count,
                                          const struct hapt_schedule_edge *edge, struct hapt_arena *arena,
                                          struct hapt_schedule **schedule)
{
    const int S = plan->stage_count;
    int *warmup, *submesh_of, *ahead, submeshes = 0;
    bool *forward_only, given = true;
    HAPT_NEW(warmup, arena, S);
    HAPT_NEW(submesh_of, arena, S);
    HAPT_NEW(ahead, arena, S);
    HAPT_NEW(forward_only, arena, S);
    for (int i = 0; i < S; i++) {
        int same = 0;
        while (plan->stage[same].submesh != plan->stage[i].submesh) same++;
        submesh_of[i] = same < i ? submesh_of[same] : submeshes++;
        ahead[submesh_of[i]] = plan->stage[i].submesh->ahead;
        given = given && plan->stage[i].submesh->ahead > 0;
        warmup[i] = plan->stage[i].warmup;
        forward_only[i] = plan->stage[i].forward_only != 0;
    }
    const struct hapt_schedule_options options = {.tied = tied,
                                                  .submesh_of = submesh_of,
                                                  .edge_count = edge_count,
                                                  .edge = edge,
                                                  .forward_only = forward_only,
                                                  .loop_batch = plan->loop_batch,
                                                  .prefetch = plan->prefetch,
                                                  .transfer_slots = plan->transfer_slots,
                                                  .ahead = given ? ahead : NULL};
    return hapt_schedule_build(plan->schedule, S, plan->microbatches, warmup, &options, arena, schedule);
}

enum hapt_status hapt_plan_schedule(const struct hapt_plan *plan, bool tied, struct hapt_arena *arena,
                                    struct hapt_schedule **schedule)
{
    return hapt_plan_schedule_edges(plan, tied, 0, NULL, arena, schedule);
}

void hapt_plan_stage_tighten(struct hapt_plan_stage *stage)
{
    double fullest = -1;
    for (int k = 0; k < stage->submesh->part_count; k++) {
        const double bytes = stage->part_parameter_bytes[k] + stage->warmup * stage->part_activation_bytes[k];
        const double room = stage->submesh->device_memory_bytes[k], full = bytes > 0 ? bytes / room : 0;
        if (full <= fullest) continue;
        fullest = full;
        stage->parameter_bytes = stage->part_parameter_bytes[k];
        stage->activation_bytes = stage->part_activation_bytes[k];
        stage->device_memory_bytes = room;
    }
    stage->memory_bytes = stage->parameter_bytes + stage->warmup * stage->activation_bytes;
}

int hapt_plan_tighten(struct hapt_plan *plan)
{
    int misfit = -1;
    for (int i = plan->stage_count - 1; i >= 0; i--) {
        struct hapt_plan_stage *stage = &plan->stage[i];
        hapt_plan_stage_tighten(stage);
        if (!hapt_at_most(stage->memory_bytes, stage->device_memory_bytes)) misfit = i;
    }
    return misfit;
}
