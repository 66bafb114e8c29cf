#include "hapt/layers.h"
#include "hapt/plan.h"

#include <math.h>

#define BAD(...) hapt_fail(HAPT_ERR_INPUT, "create the plan again with `hapt plan`", "plan: " __VA_ARGS__)

static bool is_amount(double value)
{
    return isfinite(value) && value >= 0;
}

/* The parts of a mixed stage. */
static enum hapt_status check_parts(const struct hapt_plan *plan, int i)
{
    const struct hapt_plan_stage *stage = &plan->stage[i];
    const struct hapt_plan_submesh *submesh = stage->submesh;
    const double *ratio = stage->layout.ratio;
    int devices = 0;
    double sum = 0;
    if (submesh->part_count > HAPT_MAX_SUBCLUSTERS) return BAD("stage %d mixes %d subclusters", i, submesh->part_count);
    for (int k = 0; k < submesh->part_count; k++) {
        const double parameter = stage->part_parameter_bytes[k], activation = stage->part_activation_bytes[k],
                     room = submesh->device_memory_bytes[k], need = hapt_plan_stage_bytes(stage, k);
        if (submesh->subcluster[k] < 0 || submesh->subcluster[k] >= HAPT_MAX_SUBCLUSTERS ||
            (k > 0 && submesh->subcluster[k] <= submesh->subcluster[k - 1]))
            return BAD("stage %d mixes subcluster %d, out of range or order", i, submesh->subcluster[k]);
        if (submesh->devices[k] < 1 || submesh->devices[k] > 65536)
            return BAD("stage %d takes %d devices of subcluster %s", i, submesh->devices[k], submesh->part_name[k]);
        if (!is_amount(parameter) || !is_amount(activation) || !is_amount(room) || !hapt_at_most(need, room))
            return BAD("stage %d needs %g of %g bytes in subcluster %s", i, need, room, submesh->part_name[k]);
        devices += submesh->devices[k];
    }
    if (submesh->nodes != 1 || submesh->devices_per_node != devices || stage->layout.tensor_parallel != 1)
        return BAD("stage %d runs on %d x %d devices of subcluster %d, but mixes %d devices", i, submesh->nodes,
                   submesh->devices_per_node, submesh->subcluster[0], devices);
    const bool program = stage->layout.program != NULL; /* its devices may have a share of 0: some work is replicated */
    for (int d = 0; ratio && d < devices; d++) {
        if (!(ratio[d] > 0 || (program && ratio[d] == 0))) return BAD("stage %d has a ratio of %g", i, ratio[d]);
        sum += ratio[d];
    }
    return ratio && !(fabs(sum - 1) <= 1e-4) ? BAD("the ratios of stage %d add up to %g", i, sum) : HAPT_OK;
}

static enum hapt_status check_submesh(const struct hapt_plan *plan, int i)
{
    const struct hapt_plan_submesh *submesh = plan->stage[i].submesh;
    const struct hapt_layout *layout = &plan->stage[i].layout;
    const int n = submesh->nodes, m = submesh->devices_per_node;
    if (submesh->part_count < 1 || submesh->subcluster[0] < 0 || submesh->subcluster[0] >= HAPT_MAX_SUBCLUSTERS)
        return BAD("stage %d has invalid subcluster %d", i, submesh->subcluster[0]);
    if (n < 1 || m < 1 || n > 65536 / m) return BAD("stage %d has an invalid submesh of %d x %d devices", i, n, m);
    if (layout->tensor_parallel < 1 || m % layout->tensor_parallel != 0)
        return BAD("stage %d is tensor-parallel over %d of %d devices per node", i, layout->tensor_parallel, m);
    if (layout->number < 0 || !layout->program != (layout->number == 0))
        return BAD("stage %d runs program %d, which is missing", i, layout->number);
    /* The program of a mixed stage has all devices along axis 0. */
    const bool mixed = submesh->part_count > 1;
    const struct hapt_stage_layout *program = layout->program;
    if (program && (program->axis[0].size != (mixed ? m : n) || program->axis[1].size != (mixed ? 1 : m) ||
                    layout->tensor_parallel != 1))
        return BAD("stage %d runs program %d for %d x %d devices on %d x %d", i, layout->number, program->axis[0].size,
                   program->axis[1].size, n, m);
    return HAPT_OK;
}

static enum hapt_status check_units(const struct hapt_plan_stage *stage, int i)
{
    const struct hapt_layout *layout = &stage->layout;
    int end = stage->first_op;
    if (!hapt_recompute_is_valid(layout->recompute) || (layout->unit_count > 0 && layout->recompute == 0))
        return BAD("stage %d recomputes %d, which is not 0 to %d parts, plus a multiple of %d below %d", i,
                   layout->recompute, HAPT_RECOMPUTE_PARTS, HAPT_RECOMPUTE_SELECTIVE, 2 * HAPT_RECOMPUTE_BY_BYTES);
    for (int u = 0; u < layout->unit_count; u++) {
        const struct hapt_unit *unit = &layout->unit[u];
        if (unit->first_op < end || unit->end_op <= unit->first_op || unit->end_op > stage->end_op)
            return BAD("stage %d recomputes operators [%d, %d), which are not its own, or not in order", i,
                       unit->first_op, unit->end_op);
        end = unit->end_op;
    }
    return HAPT_OK;
}

/* True if the weights of such a stage can be where the plan has them. */
static bool may_have_weights(const struct hapt_plan *plan, const struct hapt_plan_stage *stage)
{
    const struct hapt_layout *layout = &stage->layout;
    const int devices = hapt_plan_submesh_size(stage->submesh);
    if (layout->kind == HAPT_LAYOUT_PROGRAM || hapt_plan_is_mixed(stage) || stage->deferred_s > 0) return false;
    switch (layout->weights_at) {
    case HAPT_WEIGHTS_ON_HOST: return plan->host_state;
    case HAPT_GRADIENTS_ON_HOST: return plan->host_state && plan->host_update && devices == 1;
    case HAPT_WEIGHTS_SHARDED: return devices > layout->tensor_parallel;
    default: return false;
    }
}

/* Units of weights that move cover the stage's operators in order. Stages of a submesh have one way to move them. */
static enum hapt_status check_weight_units(const struct hapt_plan *plan, int i)
{
    const struct hapt_plan_stage *stage = &plan->stage[i];
    const struct hapt_layout *layout = &stage->layout;
    int end = stage->first_op;
    if (!hapt_weights_move(layout->weights_at) && layout->weight_unit_count == 0) return HAPT_OK;
    if (!may_have_weights(plan, stage))
        return BAD("stage %d cannot have its weights %s", i,
                   layout->weights_at == HAPT_WEIGHTS_SHARDED ? "sharded" : "on the host");
    for (int k = 0; k < i; k++)
        if (plan->stage[k].submesh == stage->submesh && hapt_weights_move(plan->stage[k].layout.weights_at) &&
            (plan->stage[k].layout.weights_at == HAPT_WEIGHTS_SHARDED) != (layout->weights_at == HAPT_WEIGHTS_SHARDED))
            return BAD("stages %d and %d, of the same devices, have weights on the host and sharded", k, i);
    for (int u = 0; u < layout->weight_unit_count; u++) {
        const struct hapt_unit *unit = &layout->weight_unit[u];
        if (unit->first_op < 0 || (u > 0 ? unit->first_op != end : unit->first_op > end) || unit->end_op <= end)
            return BAD("stage %d fetches the weights of operators [%d, %d), which overlap or leave a gap", i,
                       unit->first_op, unit->end_op);
        end = unit->end_op;
    }
    if (stage->first_op >= 0 && end < stage->end_op)
        return BAD("stage %d does not fetch the weights of operators [%d, %d)", i, end, stage->end_op);
    return HAPT_OK;
}

static enum hapt_status check_stage(const struct hapt_plan *plan, int i)
{
    const struct hapt_plan_stage *stage = &plan->stage[i];
    const double amounts[] = {stage->compute_s,    stage->forward_s,           stage->step_s,
                              stage->comm_s,       stage->parameter_bytes,     stage->activation_bytes,
                              stage->memory_bytes, stage->device_memory_bytes, stage->tied_s};
    const int before = i == 0 ? 0 : plan->stage[i - 1].end_layer;
    const bool last = i == plan->stage_count - 1;
    if (stage->first_layer != before || stage->end_layer <= before || stage->end_layer > plan->layer_count)
        return BAD("stage %d has layers %d-%d, but layer %d of %d comes next", i, stage->first_layer, stage->end_layer,
                   before, plan->layer_count);
    const bool bound = stage->first_op >= 0 && stage->end_op > stage->first_op;
    if (!bound && (stage->first_op != -1 || stage->end_op != -1))
        return BAD("stage %d has invalid operators %d-%d", i, stage->first_op, stage->end_op);
    if (bound && stage->first_op != (i == 0 ? 0 : stage[-1].end_op))
        return BAD("stage %d starts at operator %d, not at the end of the stage before it", i, stage->first_op);
    HAPT_TRY(check_submesh(plan, i));
    HAPT_TRY(check_units(stage, i));
    HAPT_TRY(check_weight_units(plan, i));
    const bool falls = last || stage->forward_only || hapt_schedule_loops(plan->schedule);
    if (stage->warmup < 1 || stage->warmup > plan->microbatches || (!falls && stage->warmup < stage[1].warmup))
        return BAD("stage %d launches %d of %d microbatches, which no schedule does", i, stage->warmup,
                   plan->microbatches);
    for (int k = 0; k < (int)(sizeof amounts / sizeof amounts[0]); k++)
        if (!is_amount(amounts[k])) return BAD("stage %d has an invalid time or size of %g", i, amounts[k]);
    if (plan->split && !is_amount(stage->weight_s))
        return BAD("stage %d has an invalid time of %g s for the gradients of its parameters", i, stage->weight_s);
    if (stage->slots < 0 || stage->slots > plan->microbatches || (stage->slots > 0 && !plan->split))
        return BAD("stage %d holds %d of %d microbatches", i, stage->slots, plan->microbatches);
    if (stage->weight_slots < plan->split || stage->weight_slots > plan->split * plan->microbatches ||
        !is_amount(stage->weight_slot_bytes))
        return BAD("stage %d has %d weight slots of %g bytes for %d microbatches", i, stage->weight_slots,
                   stage->weight_slot_bytes, plan->microbatches);
    if (!(stage->deferred_s >= 0 && stage->deferred_s <= stage->step_s && stage->deferred_work_s >= 0 &&
          stage->deferred_work_s <= stage->deferred_s) ||
        (stage->deferred_s > 0 && !plan->host_state))
        return BAD("stage %d defers %g s of %g s at the end of its step, of which %g s compute", i, stage->deferred_s,
                   stage->step_s, stage->deferred_work_s);
    if (stage->tied_s > stage->step_s)
        return BAD("stage %d: the exchange of tied parameters is longer than the work at the end of its step", i);
    if (hapt_plan_is_mixed(stage)) HAPT_TRY(check_parts(plan, i));
    if (stage->forward_only != 0 && (stage->forward_only != 1 || last || (i > 0 && !stage[-1].forward_only)))
        return BAD("stage %d has no backward pass, but is not in front of all stages that have one", i);
    if (!hapt_at_most(stage->memory_bytes, stage->device_memory_bytes))
        return BAD("stage %d needs %g of %g bytes", i, stage->memory_bytes, stage->device_memory_bytes);
    const bool knows_slots =
        !hapt_schedule_loops(plan->schedule) || stage->submesh->slots > 0; /* else read_lists does */
    if (knows_slots && !hapt_plan_submesh_fits(plan, stage->submesh))
        return BAD("stage %d and others need more than the memory of their submesh, %g bytes", i,
                   stage->device_memory_bytes);
    if (!hapt_at_most(stage->compute_s, plan->t_max_s) || !hapt_at_most(stage->comm_s, plan->t_max_s))
        return BAD("stage %d is slower than t_max, %g s", i, plan->t_max_s);
    return HAPT_OK;
}

/* The settings of a looped schedule. hapt_plan_read builds the lists. */
static enum hapt_status check_loops(const struct hapt_plan *plan)
{
    const bool loops = hapt_schedule_loops(plan->schedule);
    const int first = plan->submesh[0].ahead;
    if (!loops && (plan->loop_batch != 0 || plan->prefetch != 0))
        return BAD("a loop batch of %d and a prefetch of %d under schedule %s", plan->loop_batch, plan->prefetch,
                   hapt_schedule_kind_name(plan->schedule));
    if (!loops && plan->transfer_slots != 0 && plan->edge_count == 0)
        return BAD("%d transfer slots under schedule %s, without messages past the next stage", plan->transfer_slots,
                   hapt_schedule_kind_name(plan->schedule));
    if (plan->transfer_slots != 0 && plan->transfer_slots < HAPT_TRANSFER_SLOTS)
        return BAD("%d transfer slots", plan->transfer_slots);
    if (plan->prefetch < 0 || (plan->prefetch > 0 && plan->schedule != HAPT_SCHEDULE_LOOPED))
        return BAD("a prefetch of %d under schedule %s", plan->prefetch, hapt_schedule_kind_name(plan->schedule));
    if (plan->loop_batch < 0 || (plan->loop_batch > 0 && plan->microbatches % plan->loop_batch != 0))
        return BAD("%d microbatches in groups of %d", plan->microbatches, plan->loop_batch);
    for (int s = 0; s < plan->submesh_count; s++) {
        const int ahead = plan->submesh[s].ahead;
        if (ahead < 0 || (ahead > 0) != (first > 0) || (ahead > 0 && !loops))
            return BAD("submesh %d has %d forwards before its first backward under schedule %s", s, ahead,
                       hapt_schedule_kind_name(plan->schedule));
    }
    if (loops && (int64_t)plan->stage_count * plan->microbatches > HAPT_PLAN_MOST_LOOPED_PASSES)
        return BAD("%d stages with %d microbatches are too many for a looped schedule", plan->stage_count,
                   plan->microbatches);
    return HAPT_OK;
}

enum hapt_status hapt_plan_check(const struct hapt_plan *plan)
{
    if (plan->microbatches < 1) return BAD("%d microbatches", plan->microbatches);
    if (plan->stage_count < 1 || plan->layer_count < plan->stage_count)
        return BAD("%d stages for %d layers", plan->stage_count, plan->layer_count);
    if (!is_amount(plan->latency_s) || !is_amount(plan->simulated_s) || !is_amount(plan->t_max_s) ||
        !is_amount(plan->hide_threshold) || !is_amount(plan->balance_eta) || !is_amount(plan->flops) ||
        !is_amount(plan->peak_flops) || !is_amount(plan->exchange_s) || !is_amount(plan->exchange_bytes) ||
        !is_amount(plan->search.gap))
        return BAD("invalid times: predicted step %g s, simulated %g s, t_max %g s", plan->latency_s, plan->simulated_s,
                   plan->t_max_s);
    HAPT_TRY(check_loops(plan));
    for (int i = 0; i < plan->stage_count; i++) HAPT_TRY(check_stage(plan, i));
    if (plan->stage[plan->stage_count - 1].end_layer != plan->layer_count)
        return BAD("its stages end at layer %d of %d", plan->stage[plan->stage_count - 1].end_layer, plan->layer_count);
    HAPT_TRY(hapt_plan_check_edges(plan));
    return hapt_plan_check_mixed_order(plan);
}
