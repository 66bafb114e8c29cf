/* The critical path of the simulated step, by stage. */
#include "hapt/plan.h"
#include "hapt/simulate.h"

/* The part of a forward pass that a deferred update adds. */
static double update_s(const struct hapt_costs *costs, const struct hapt_instruction *at, double seconds)
{
    const bool first = at->kind == HAPT_INSTRUCTION_FORWARD && at->microbatch == 0 && costs->deferred_s;
    return first && seconds > costs->forward_s[at->chunk] ? seconds - costs->forward_s[at->chunk] : 0;
}

static void add_part(const struct hapt_schedule *schedule, const struct hapt_costs *costs,
                     const struct hapt_critical_part *part, struct hapt_plan_path *path)
{
    const double seconds = part->end_s - part->start_s;
    if (part->submesh < 0) {
        const struct hapt_schedule_edge *edge = &schedule->edges.edge[part->edge];
        path->transfer_s[edge->from < edge->to ? edge->from : edge->to] += seconds;
        return;
    }
    const struct hapt_instruction *at = &schedule->list[part->submesh].instruction[part->instruction];
    switch (at->kind) {
    case HAPT_INSTRUCTION_FORWARD:
    case HAPT_INSTRUCTION_BACKWARD:
    case HAPT_INSTRUCTION_WEIGHT:
        path->update_s[at->chunk] += update_s(costs, at, seconds);
        path->compute_s[at->chunk] += seconds - update_s(costs, at, seconds);
        break;
    case HAPT_INSTRUCTION_UPDATE: path->update_s[at->chunk] += seconds; break;
    case HAPT_INSTRUCTION_EXCHANGE: path->exchange_s += seconds; break;
    case HAPT_INSTRUCTION_SEND_FORWARD: /* without overlap */
    case HAPT_INSTRUCTION_RECEIVE_BACKWARD: path->transfer_s[at->chunk] += seconds; break;
    case HAPT_INSTRUCTION_SEND_BACKWARD:
    case HAPT_INSTRUCTION_RECEIVE_FORWARD: path->transfer_s[at->chunk > 0 ? at->chunk - 1 : 0] += seconds; break;
    case HAPT_INSTRUCTION_REDUCE:
    case HAPT_INSTRUCTION_NORM: break; /* they take no time of their own */
    }
}

enum hapt_status hapt_plan_path(const struct hapt_plan *plan, struct hapt_arena *arena, struct hapt_plan_path *path)
{
    struct hapt_schedule *schedule;
    struct hapt_costs costs;
    struct hapt_simulation *simulation;
    struct hapt_critical_path critical;
    *path = (struct hapt_plan_path){0};
    HAPT_NEW(path->compute_s, arena, plan->stage_count);
    HAPT_NEW(path->transfer_s, arena, plan->stage_count);
    HAPT_NEW(path->update_s, arena, plan->stage_count);
    HAPT_TRY(hapt_plan_lay_out(plan, arena, &schedule, &costs));
    HAPT_TRY(hapt_simulate(schedule, &costs, arena, &simulation));
    HAPT_TRY(hapt_simulate_critical_path(schedule, &costs, simulation, arena, &critical));
    for (int k = 0; k < critical.count; k++) add_part(schedule, &costs, &critical.part[k], path);
    return HAPT_OK;
}
