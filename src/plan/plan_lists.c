/* The instruction lists of a plan, the costs of their instructions, and the memory of its stages. */
#include "hapt/plan.h"

#include <math.h>

bool hapt_plan_defers(const struct hapt_plan *plan)
{
    bool some = false;
    if (!plan->host_state || hapt_schedule_loops(plan->schedule) || plan->submesh_count < plan->stage_count)
        return false;
    for (int i = 0; i < plan->stage_count; i++) some = some || plan->stage[i].deferred_s > 0;
    return some;
}

enum hapt_status hapt_plan_costs(const struct hapt_plan *plan, struct hapt_arena *arena, struct hapt_costs *costs)
{
    const int S = plan->stage_count;
    double *cost[7];
    const bool defers = hapt_plan_defers(plan);
    for (int k = 0; k < 7; k++) HAPT_NEW(cost[k], arena, S);
    for (int i = 0; i < S; i++) {
        const struct hapt_plan_stage *stage = &plan->stage[i];
        cost[0][i] = stage->forward_s;
        cost[1][i] = fmax(0, stage->compute_s - stage->step_s / plan->microbatches - stage->forward_s);
        cost[2][i] = stage->comm_s;
        cost[3][i] = stage->step_s - stage->tied_s;
        cost[5][i] = fmin(stage->deferred_s, cost[3][i]);
        cost[6][i] = fmin(stage->deferred_work_s, cost[5][i]);
        if (!plan->split) continue;
        cost[4][i] = fmin(stage->weight_s, cost[1][i]);
        cost[1][i] -= cost[4][i];
    }
    double *edge_s = NULL;
    if (plan->edge_count > 0) HAPT_NEW(edge_s, arena, plan->edge_count);
    for (int e = 0, sent = 0; e < plan->edge_count; e++)
        if (!hapt_plan_drops_edge(plan, &plan->edge[e])) edge_s[sent++] = plan->edge[e].time_s;
    *costs = (struct hapt_costs){.forward_s = cost[0],
                                 .backward_s = cost[1],
                                 .weight_s = plan->split ? cost[4] : NULL,
                                 .comm_s = cost[2],
                                 .edge_s = edge_s,
                                 .step_s = cost[3],
                                 .deferred_s = defers ? cost[5] : NULL,
                                 .deferred_work_s = defers ? cost[6] : NULL,
                                 .exchange_s = plan->exchange_s,
                                 .blocking = plan->blocking,
                                 .agrees = plan->host_state, /* else updates are short */
                                 .steady = plan->host_state,
                                 .transfer_slots = hapt_plan_transfer_slots(plan)};
    return HAPT_OK;
}

/* Figures of the plan that the lists read, by submesh and by stage. */
struct inputs {
    int *warmup, *submesh_of; /* [stage] */
    bool *forward_only;
    int *ahead, *pool, *weight_slots; /* [submesh] */
    bool has_ahead;
};

static enum hapt_status read_inputs(const struct hapt_plan *plan, struct hapt_arena *arena, struct inputs *inputs)
{
    const int S = plan->stage_count;
    int submeshes = 0;
    *inputs = (struct inputs){.has_ahead = true};
    HAPT_NEW(inputs->warmup, arena, S);
    HAPT_NEW(inputs->submesh_of, arena, S);
    HAPT_NEW(inputs->forward_only, arena, S);
    HAPT_NEW(inputs->ahead, arena, S);
    HAPT_NEW(inputs->pool, arena, S);
    HAPT_NEW(inputs->weight_slots, arena, S);
    for (int i = 0; i < S; i++) {
        const struct hapt_plan_stage *stage = &plan->stage[i];
        int same = 0;
        while (plan->stage[same].submesh != stage->submesh) same++;
        const int at = inputs->submesh_of[i] = same < i ? inputs->submesh_of[same] : submeshes++;
        inputs->ahead[at] = stage->submesh->ahead;
        inputs->has_ahead = inputs->has_ahead && stage->submesh->ahead > 0;
        inputs->warmup[i] = stage->warmup;
        inputs->forward_only[i] = stage->forward_only != 0;
        inputs->pool[at] += hapt_plan_stage_slots(stage);
        inputs->weight_slots[at] += stage->weight_slots;
    }
    return HAPT_OK;
}

enum hapt_status hapt_plan_schedule(const struct hapt_plan *plan, bool tied, struct hapt_arena *arena,
                                    struct hapt_schedule **schedule)
{
    struct inputs inputs;
    struct hapt_costs costs;
    HAPT_TRY(read_inputs(plan, arena, &inputs));
    struct hapt_schedule_options options = {.tied = tied,
                                            .submesh_of = inputs.submesh_of,
                                            .forward_only = inputs.forward_only,
                                            .loop_batch = plan->loop_batch,
                                            .prefetch = plan->prefetch,
                                            .transfer_slots = plan->transfer_slots,
                                            .ahead = inputs.has_ahead ? inputs.ahead : NULL};
    HAPT_TRY(hapt_plan_add_edges(plan, arena, &options));
    if (plan->split) { /* the costs place the WEIGHT instructions, alike on all ranks */
        HAPT_TRY(hapt_plan_costs(plan, arena, &costs));
        options.split = true;
        options.pool = hapt_schedule_loops(plan->schedule) ? NULL : inputs.pool; /* loops: launches follow from lists */
        options.weight_slots = inputs.weight_slots;
        options.costs = &costs;
    }
    return hapt_schedule_build(plan->schedule, plan->stage_count, plan->microbatches, inputs.warmup, &options, arena,
                               schedule);
}

void hapt_plan_stage_tighten(struct hapt_plan_stage *stage)
{
    double fullest = -1;
    for (int k = 0; k < stage->submesh->part_count; k++) {
        const double bytes = hapt_plan_stage_bytes(stage, k);
        const double room = stage->submesh->device_memory_bytes[k], full = bytes > 0 ? bytes / room : 0;
        if (full <= fullest) continue;
        fullest = full;
        stage->parameter_bytes = stage->part_parameter_bytes[k];
        stage->activation_bytes = stage->part_activation_bytes[k];
        stage->device_memory_bytes = room;
    }
    stage->memory_bytes = stage->parameter_bytes + hapt_plan_stage_slots(stage) * stage->activation_bytes +
                          stage->weight_slots * stage->weight_slot_bytes;
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
