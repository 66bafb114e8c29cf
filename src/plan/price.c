/* Prices given stages with the objective, HAPT (13), without a search. */
#include "plan_private.h"

#include "hapt/memory.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Index of a stage's submesh in the profile. Among several programs: the fastest that holds one microbatch, else the
 * fastest. -1: no such submesh. */
static int find_submesh(const struct hapt_profile *profile, const struct hapt_plan_stage *stage)
{
    const struct hapt_profile_cluster *cluster = &profile->cluster[stage->submesh->subcluster[0]];
    const struct hapt_layout *layout = &stage->layout;
    int best = -1;
    bool best_fits = false;
    double best_s = INFINITY;
    for (int s = 0; s < cluster->submesh_count; s++) {
        const struct hapt_submesh *submesh = &cluster->submesh[s];
        if (submesh->n != stage->submesh->nodes || submesh->m != stage->submesh->devices_per_node) continue;
        if (layout->tensor_parallel > 0 && !hapt_plan_stage_runs(stage, submesh)) continue;
        const size_t cell = hapt_profile_index(profile, s, stage->first_layer, stage->end_layer - 1);
        const double time_s = isfinite(cluster->stage_time[cell]) ? cluster->stage_time[cell] : INFINITY;
        const bool fits =
            isfinite(time_s) && hapt_at_most(cluster->parameter_bytes[cell] + cluster->activation_bytes[cell],
                                             cluster->device_memory_bytes);
        if (best >= 0 && (best_fits > fits || (best_fits == fits && best_s <= time_s))) continue;
        best = s;
        best_fits = fits;
        best_s = time_s;
    }
    return best;
}

static enum hapt_status no_candidate(const struct hapt_plan_stage *stage, const char *why)
{
    char submesh[64];
    return hapt_fail(HAPT_ERR_INPUT,
                     "stages must be candidates of the profile; a larger --imbalance leaves more of them in",
                     "layers %d-%d cannot be a stage on %s:%s: %s", stage->first_layer, stage->end_layer,
                     stage->submesh->name, hapt_plan_stage_short(stage, "x", submesh), why);
}

/* Times of a stage in the profile, and memory of each part. */
struct cells {
    const double *stage_s, *forward_s, *step_s;
    const double *weight_s, *weight_slot_bytes; /* NULL: unknown */
    const double *parameter_bytes, *activation_bytes;
    size_t time, memory, next_memory; /* cell of the times, of the first part's memory, and from part to part */
};

static enum hapt_status find_mixed(const struct hapt_profile *profile, const struct hapt_plan_stage *stage,
                                   struct cells *cells)
{
    const int group = hapt_plan_stage_mixed_group(profile, stage);
    if (group < 0) return no_candidate(stage, "the profile has no mixed stages on these devices");
    const struct hapt_profile_mixed *mixed = &profile->mixed[group];
    const size_t table = (size_t)profile->layer_count * (size_t)profile->layer_count;
    *cells = (struct cells){.stage_s = mixed->stage_time,
                            .forward_s = mixed->stage_forward_time,
                            .step_s = mixed->step_time,
                            .parameter_bytes = mixed->parameter_bytes,
                            .activation_bytes = mixed->activation_bytes,
                            .next_memory = mixed->memory_rows > 1 ? table : 0};
    cells->time = cells->memory = hapt_profile_index(profile, 0, stage->first_layer, stage->end_layer - 1);
    return HAPT_OK;
}

static enum hapt_status find_alone(const struct hapt_profile *profile, bool split, struct hapt_plan_stage *stage,
                                   struct cells *cells)
{
    const struct hapt_profile_cluster *cluster = &profile->cluster[stage->submesh->subcluster[0]];
    snprintf(stage->submesh->name, sizeof stage->submesh->name, "%s", cluster->name);
    stage->submesh->part_name[0] = stage->submesh->name;
    const int s = find_submesh(profile, stage);
    if (s < 0) return no_candidate(stage, "the profile has no such submesh");
    hapt_plan_stage_run(profile, stage->submesh->subcluster[0], &cluster->submesh[s], stage);
    *cells = (struct cells){.stage_s = cluster->stage_time,
                            .forward_s = cluster->stage_forward_time,
                            .step_s = cluster->step_time,
                            .weight_s = cluster->weight_time,
                            .weight_slot_bytes = cluster->weight_slot_bytes,
                            .parameter_bytes = split ? cluster->split_parameter_bytes : cluster->parameter_bytes,
                            .activation_bytes = cluster->activation_bytes};
    cells->time = cells->memory = hapt_profile_index(profile, s, stage->first_layer, stage->end_layer - 1);
    return HAPT_OK;
}

/* Bytes of the transfer slots beyond those that the profile counts, per device: activations and gradients received,
 * gradients sent. A device of a data-parallel stage holds its rows of a boundary, others at most all of it. */
static double more_transfer_bytes(const struct hapt_profile *profile, const struct hapt_plan *plan,
                                  const struct hapt_plan_stage *stage)
{
    if (plan->transfer_slots <= HAPT_TRANSFER_SLOTS) return 0;
    const double in_bytes = stage->first_layer > 0 ? profile->boundary_bytes[stage->first_layer - 1] : 0;
    const double out_bytes =
        stage->end_layer < profile->layer_count ? profile->boundary_bytes[stage->end_layer - 1] : 0;
    const int shares = stage->layout.kind == HAPT_LAYOUT_PROGRAM || hapt_plan_is_mixed(stage)
                           ? 1
                           : hapt_plan_submesh_size(stage->submesh) / stage->layout.tensor_parallel;
    return (plan->transfer_slots - HAPT_TRANSFER_SLOTS) * (2 * in_bytes + out_bytes) / shares;
}

/* Fills all values that do not depend on t_max. */
static enum hapt_status price_layers(const struct hapt_profile *profile, const struct hapt_plan *plan,
                                     struct hapt_plan_stage *stage)
{
    struct cells cells = {0};
    HAPT_TRY(hapt_plan_is_mixed(stage) ? find_mixed(profile, stage, &cells)
                                       : find_alone(profile, plan->split, stage, &cells));
    if (!isfinite(cells.stage_s[cells.time])) return no_candidate(stage, "the profile has no time for it");
    stage->step_s = cells.step_s ? cells.step_s[cells.time] : 0;
    stage->compute_s = cells.stage_s[cells.time] + stage->step_s / plan->microbatches;
    stage->forward_s = fmin(cells.forward_s[cells.time], cells.stage_s[cells.time]);
    stage->weight_s = cells.weight_s ? cells.weight_s[cells.time] : NAN;
    if (plan->split) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[stage->submesh->subcluster[0]];
        stage->compute_s += hapt_profile_split_time_s(cluster, cells.time) - cells.stage_s[cells.time];
        stage->weight_s = hapt_profile_split_weight_s(cluster, cells.time);
    }
    stage->weight_slot_bytes = plan->split ? cells.weight_slot_bytes[cells.time] : 0;
    stage->weight_slots = !plan->split ? 0 : stage->weight_slots > 1 ? stage->weight_slots : 1;
    for (int k = 0; k < stage->submesh->part_count; k++) {
        const size_t at = cells.memory + (size_t)k * cells.next_memory;
        stage->part_parameter_bytes[k] = cells.parameter_bytes[at] + more_transfer_bytes(profile, plan, stage);
        stage->part_activation_bytes[k] = cells.activation_bytes[at];
        stage->submesh->device_memory_bytes[k] = profile->cluster[stage->submesh->subcluster[k]].device_memory_bytes;
    }
    return HAPT_OK;
}

static enum hapt_status price_stage(const struct hapt_profile *profile, const struct hapt_plan *plan, int index)
{
    struct hapt_plan_stage *stage = &plan->stage[index];
    HAPT_TRY(price_layers(profile, plan, stage));
    stage->comm_s = 0;
    if (index < plan->stage_count - 1)
        stage->comm_s = hapt_profile_boundary_s(profile, stage->end_layer - 1, hapt_plan_stage_subclusters(stage),
                                                hapt_plan_stage_subclusters(&stage[1]), NULL);
    return HAPT_OK;
}

static enum hapt_status check_devices(const struct hapt_profile *profile, const struct hapt_plan *plan)
{
    int used[HAPT_MAX_SUBCLUSTERS] = {0};
    for (int i = 0; i < plan->submesh_count; i++) {
        const struct hapt_plan_submesh *submesh = &plan->submesh[i];
        for (int k = 0; k < submesh->part_count; k++) {
            const int c = submesh->subcluster[k];
            const struct hapt_profile_cluster *cluster = &profile->cluster[c];
            used[c] += submesh->devices[k];
            if (used[c] > cluster->nodes * cluster->devices_per_node)
                return hapt_fail(HAPT_ERR_INPUT, "use smaller submeshes or fewer stages",
                                 "the stages need more than the %d x %d devices of subcluster %s", cluster->nodes,
                                 cluster->devices_per_node, cluster->name);
        }
    }
    return hapt_plan_check_mixed_order(plan);
}

/* A device that holds its parameters alone updates them without others, so the update may be deferred. */
static void price_deferral(const struct hapt_profile *profile, struct hapt_plan_stage *stage)
{
    const bool alone = hapt_plan_submesh_size(stage->submesh) == 1 && !hapt_plan_is_mixed(stage) &&
                       !hapt_weights_move(stage->layout.weights_at);
    const double share = profile->host_state && alone ? profile->cluster[stage->submesh->subcluster[0]].deferrable : 0;
    stage->deferred_s = share > 0 ? stage->step_s - stage->tied_s : 0;
    stage->deferred_work_s = (1 - share) * stage->deferred_s;
}

/* The exchange of tied parameters, and its part in the step-end time of the two stages. */
static void price_exchange(const struct hapt_profile *profile, struct hapt_plan *plan)
{
    const int S = plan->stage_count;
    struct hapt_plan_stage *end[2] = {&plan->stage[0], &plan->stage[S - 1]};
    plan->exchange_s = plan->exchange_bytes = 0;
    plan->exchange = profile->exchange;
    for (int i = 0; i < S; i++) plan->stage[i].tied_s = 0;
    if (S > 1) /* stages of one submesh exchange nothing: the simulator leaves this out */
        plan->exchange_s = hapt_profile_tied_s(profile, end[1]->first_layer, hapt_plan_stage_subclusters(end[0]),
                                               hapt_plan_stage_subclusters(end[1]));
    if (plan->exchange_s > 0) plan->exchange_bytes = profile->tied_bytes[end[1]->first_layer];
    for (int e = 0; e < 2 && plan->exchange_s > 0; e++) {
        const struct hapt_subclusters own = hapt_plan_stage_subclusters(end[e]);
        for (int k = 0; k < own.count; k++)
            end[e]->tied_s = fmax(end[e]->tied_s, hapt_profile_tied_share_s(profile, own.index[k], end[e]->first_layer,
                                                                            end[e]->end_layer - 1));
        end[e]->tied_s = fmin(end[e]->tied_s, end[e]->step_s);
    }
}

enum hapt_status hapt_plan_price_tables(const struct hapt_profile *profile, struct hapt_plan *plan)
{
    int layer = 0;
    if (plan->stage_count < 1) return hapt_fail(HAPT_ERR_INPUT, "name at least one stage", "a plan without stages");
    for (int i = 0; i < plan->stage_count; i++) {
        const struct hapt_plan_stage *stage = &plan->stage[i];
        if (stage->first_layer != layer || stage->end_layer <= layer || stage->end_layer > profile->layer_count)
            return hapt_fail(HAPT_ERR_INPUT, "stages are half-open layer ranges that follow each other without gaps",
                             "stage %d has layers %d-%d, but layer %d of %d comes next", i, stage->first_layer,
                             stage->end_layer, layer, profile->layer_count);
        layer = stage->end_layer;
        if (stage->submesh->subcluster[0] < 0 || stage->submesh->subcluster[0] >= profile->cluster_count)
            return hapt_fail(HAPT_ERR_INPUT, NULL, "stage %d has subcluster %d of %d", i, stage->submesh->subcluster[0],
                             profile->cluster_count);
    }
    if (layer != profile->layer_count)
        return hapt_fail(HAPT_ERR_INPUT, "stages are half-open layer ranges that follow each other without gaps",
                         "the stages end at layer %d of %d", layer, profile->layer_count);
    for (int i = 0; i < plan->stage_count; i++) HAPT_TRY(price_stage(profile, plan, i));
    plan->host_state = profile->host_state;
    plan->host_update = profile->host_update;
    price_exchange(profile, plan);
    for (int i = 0; i < plan->stage_count; i++) price_deferral(profile, &plan->stage[i]);
    HAPT_TRY(check_devices(profile, plan));
    return hapt_plan_find_edges(profile, plan);
}

/* Computes launch counts and memory for t_max. Returns the first stage that does not fit, or -1. */
static int launch(struct hapt_plan *plan, double t_max_s)
{
    const int S = plan->stage_count;
    HAPT_ASSERT(!hapt_schedule_loops(plan->schedule)); /* hapt_plan_launch_loops */
    for (int i = S - 1; i >= 0; i--) {
        struct hapt_plan_stage *stage = &plan->stage[i];
        if (stage->forward_only) {
            stage->warmup = hapt_schedule_forward_only_launches(plan->schedule, plan->microbatches, stage->comm_s,
                                                                t_max_s, plan->hide_threshold);
        } else if (i == S - 1) {
            stage->warmup = plan->schedule == HAPT_SCHEDULE_GPIPE ? plan->microbatches : 1;
        } else {
            const int delta = hapt_schedule_delta(plan->schedule, stage->comm_s, t_max_s, plan->hide_threshold);
            stage->warmup = stage[1].warmup + delta < plan->microbatches ? stage[1].warmup + delta : plan->microbatches;
        }
        if (stage->slots > plan->microbatches) stage->slots = plan->microbatches;
        if (stage->weight_slots > plan->microbatches) stage->weight_slots = plan->microbatches;
    }
    return hapt_plan_tighten(plan);
}

/* HAPT (25); idle devices count with time 0. */
static double balance(const struct hapt_profile *profile, const struct hapt_plan *plan)
{
    double longest_s = 0, busy = 0, all = 0;
    bool known = true;
    for (int c = 0; c < profile->cluster_count; c++) known = known && profile->cluster[c].peak_flops > 0;
    hapt_plan_busiest_s(plan, &longest_s);
    for (int c = 0; c < profile->cluster_count; c++) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[c];
        const double weight = known ? cluster->peak_flops : 1;
        all += weight * cluster->nodes * cluster->devices_per_node;
        for (int i = 0; i < plan->stage_count; i++) {
            const int devices = hapt_plan_stage_devices(&plan->stage[i], c);
            if (devices > 0) busy += weight * devices * plan->stage[i].compute_s;
        }
    }
    return longest_s > 0 ? busy / (longest_s * all) : 1;
}

static const char *limit_of(const struct hapt_plan *plan)
{
    double compute_s;
    const double busiest_s = hapt_plan_busiest_s(plan, &compute_s);
    if (hapt_at_most(plan->t_max_s, compute_s)) return "compute";
    return hapt_at_most(plan->t_max_s, busiest_s) ? "link" : "memory";
}

enum hapt_status hapt_plan_lay_out(const struct hapt_plan *plan, struct hapt_arena *arena,
                                   struct hapt_schedule **schedule, struct hapt_costs *costs)
{
    HAPT_TRY(hapt_plan_costs(plan, arena, costs));
    return hapt_plan_schedule(plan, plan->exchange_s > 0, arena, schedule);
}

enum hapt_status hapt_plan_simulate(const struct hapt_plan *plan, struct hapt_arena *arena,
                                    struct hapt_simulation **simulation)
{
    struct hapt_schedule *schedule;
    struct hapt_costs costs;
    HAPT_TRY(hapt_plan_lay_out(plan, arena, &schedule, &costs));
    return hapt_simulate(schedule, &costs, arena, simulation);
}

enum hapt_status hapt_plan_overlap(const struct hapt_plan *plan, int stage, double *overlap)
{
    struct hapt_arena scratch;
    struct hapt_schedule *schedule;
    struct hapt_costs costs;
    hapt_arena_init(&scratch);
    enum hapt_status status = hapt_plan_lay_out(plan, &scratch, &schedule, &costs);
    if (status == HAPT_OK) status = hapt_simulate_overlap(schedule, &costs, stage, &scratch, overlap);
    hapt_arena_release(&scratch);
    return status;
}

enum hapt_status hapt_plan_period(const struct hapt_plan *plan, double *period_s)
{
    struct hapt_arena scratch;
    struct hapt_schedule *schedule;
    struct hapt_costs costs;
    hapt_arena_init(&scratch);
    enum hapt_status status = hapt_plan_lay_out(plan, &scratch, &schedule, &costs);
    if (status == HAPT_OK) status = hapt_simulate_period(schedule, &costs, &scratch, period_s);
    hapt_arena_release(&scratch);
    return status;
}

static void note_slots(const struct hapt_schedule *schedule, int stages, struct plan_slots *used)
{
    for (int i = 0; i < stages; i++) {
        const struct hapt_instruction_list *list = &schedule->list[schedule->submesh_of[i]];
        if (list->slots > used[i].slots) used[i].slots = list->slots;
        if (list->weight_slots > used[i].weight_slots) used[i].weight_slots = list->weight_slots;
    }
}

/* True if hapt_simulate_chain gives the step of the plan's lists. */
static bool is_chain(const struct hapt_plan *plan)
{
    if (plan->split || plan->blocking || plan->edge_count > 0 || hapt_schedule_loops(plan->schedule)) return false;
    for (int i = 0; i < plan->stage_count; i++) {
        const struct hapt_plan_stage *stage = &plan->stage[i];
        if (stage->submesh != &plan->submesh[i] || stage->forward_only) return false;
        if (stage->warmup < 1 || stage->warmup > (i > 0 ? stage[-1].warmup : plan->microbatches)) return false;
    }
    return true;
}

enum hapt_status hapt_plan_simulate_chain(const struct hapt_plan *plan, double most_s, struct hapt_arena *scratch,
                                          struct hapt_simulate_work *work, double *step_s)
{
    struct hapt_costs costs;
    struct hapt_chain chain = {plan->stage_count, plan->microbatches, NULL, plan->exchange_s > 0};
    int *launches;
    HAPT_NEW(launches, scratch, plan->stage_count);
    for (int i = 0; i < plan->stage_count; i++) launches[i] = plan->stage[i].warmup;
    chain.launches = launches;
    HAPT_TRY(hapt_plan_costs(plan, scratch, &costs));
    return hapt_simulate_chain(&chain, &costs, most_s, work, step_s);
}

/* Simulates all microbatches. used NULL: the slots of the lists are not asked for. */
static enum hapt_status step_in_full(const struct hapt_plan *plan, struct hapt_arena *scratch, struct plan_slots *used,
                                     double *step_s)
{
    struct hapt_simulate_work work = {0};
    struct hapt_schedule *schedule;
    struct hapt_costs costs;
    enum hapt_status status;
    if (!used && is_chain(plan)) {
        status = hapt_plan_simulate_chain(plan, INFINITY, scratch, &work, step_s);
    } else {
        HAPT_TRY(hapt_plan_lay_out(plan, scratch, &schedule, &costs));
        if (used) note_slots(schedule, plan->stage_count, used);
        status = hapt_simulate_step(schedule, &costs, &work, step_s);
    }
    hapt_simulate_work_release(&work);
    return status;
}

/* more microbatches than this are not simulated in full */
enum { LONG_STEP = 1 << 16 };

/* Extrapolates a long step from two shorter ones of `half` and 2 `half` microbatches, because it is periodic. `half`
 * is a multiple of a launch round. */
static enum hapt_status extrapolate(const struct hapt_plan *plan, int half, struct hapt_arena *scratch,
                                    struct plan_slots *used, double *step_s)
{
    struct hapt_plan part = *plan;
    double part_s[2];
    HAPT_NEW(part.stage, scratch, plan->stage_count);
    for (int k = 0; k < 2; k++) {
        part.microbatches = (k + 1) * half;
        for (int i = 0; i < plan->stage_count; i++) {
            part.stage[i] = plan->stage[i];
            part.stage[i].compute_s +=
                plan->stage[i].step_s / part.microbatches - plan->stage[i].step_s / plan->microbatches;
            if (plan->schedule == HAPT_SCHEDULE_GPIPE) part.stage[i].warmup = part.microbatches;
        }
        HAPT_TRY(step_in_full(&part, scratch, used, &part_s[k]));
    }
    *step_s = part_s[1] + (plan->microbatches - 2.0 * half) * (part_s[1] - part_s[0]) / half;
    return HAPT_OK;
}

static int launch_round(const struct hapt_plan *plan)
{
    if (hapt_schedule_loops(plan->schedule)) /* the groups of microbatches repeat */
        return hapt_schedule_loop_batch(plan->schedule, plan->microbatches, plan->submesh_count, plan->loop_batch);
    return plan->schedule == HAPT_SCHEDULE_GPIPE ? 1 : plan->stage[0].warmup;
}

enum hapt_status plan_simulate_slots(const struct hapt_plan *plan, struct hapt_arena *scratch, struct plan_slots *used,
                                     double *step_s)
{
    if (used) memset(used, 0, (size_t)plan->stage_count * sizeof *used);
    const int round = launch_round(plan);
    if (plan->microbatches > LONG_STEP && round <= LONG_STEP / 64)
        return extrapolate(plan, LONG_STEP / 16 / round * round, scratch, used, step_s);
    return step_in_full(plan, scratch, used, step_s);
}

static enum hapt_status simulated_step(const struct hapt_plan *plan, struct hapt_arena *scratch, double *step_s)
{
    return plan_simulate_slots(plan, scratch, NULL, step_s);
}

/* The step with the work once a step, and without, apart from the exchange of tied gradients. */
static enum hapt_status with_and_without(const struct hapt_plan *plan, struct hapt_arena *scratch, double *with_s,
                                         double *without_s)
{
    struct hapt_plan light = *plan;
    HAPT_NEW(light.stage, scratch, plan->stage_count);
    for (int i = 0; i < plan->stage_count; i++) {
        struct hapt_plan_stage *stage = &light.stage[i];
        *stage = plan->stage[i];
        stage->compute_s -= (stage->step_s - stage->tied_s) / plan->microbatches;
        stage->step_s = stage->tied_s;
        stage->deferred_s = stage->deferred_work_s = 0;
    }
    HAPT_TRY(simulated_step(plan, scratch, with_s));
    return simulated_step(&light, scratch, without_s);
}

enum hapt_status hapt_plan_exposed(const struct hapt_plan *plan, double *exposed_s)
{
    struct hapt_arena scratch;
    double with_s, without_s;
    hapt_arena_init(&scratch);
    const enum hapt_status status = with_and_without(plan, &scratch, &with_s, &without_s);
    if (status == HAPT_OK) *exposed_s = fmax(0, with_s - without_s);
    hapt_arena_release(&scratch);
    return status;
}

enum hapt_status hapt_plan_estimate(const struct hapt_plan *plan, int microbatches, struct hapt_arena *scratch,
                                    double *step_s)
{
    const int round = launch_round(plan), half = (microbatches + round - 1) / round * round;
    return 4 * half < plan->microbatches ? extrapolate(plan, half, scratch, NULL, step_s)
                                         : simulated_step(plan, scratch, step_s);
}

/* Computes all values that follow from stages and t_max alone. */
static enum hapt_status finish_times(struct hapt_plan *plan, struct hapt_arena *scratch)
{
    double latency_s = 0;
    for (int i = plan->stage_count - 1; i >= 0; i--)
        latency_s = (plan->stage[i].compute_s + 2 * plan->stage[i].comm_s) + latency_s;
    plan->latency_s = latency_s + (plan->microbatches - 1) * plan->t_max_s;
    plan->limit = limit_of(plan);
    return simulated_step(plan, scratch, &plan->simulated_s);
}

double hapt_plan_mfu(const struct hapt_plan *plan)
{
    if (plan->flops <= 0 || plan->peak_flops <= 0 || plan->simulated_s <= 0) return 0;
    return plan->microbatches * plan->flops / (plan->simulated_s * plan->peak_flops);
}

/* Computes all values that follow from the chosen t_max. */
static enum hapt_status finish(const struct hapt_profile *profile, struct hapt_plan *plan, struct hapt_arena *scratch)
{
    plan->balance_eta = balance(profile, plan);
    plan->flops = profile->flops;
    plan->peak_flops = 0;
    bool known = true;
    for (int c = 0; c < profile->cluster_count; c++) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[c];
        plan->peak_flops += cluster->peak_flops * cluster->nodes * cluster->devices_per_node;
        known = known && cluster->peak_flops > 0;
    }
    if (!known) plan->peak_flops = 0;
    return finish_times(plan, scratch);
}

enum hapt_status hapt_plan_change(struct hapt_plan *plan, enum hapt_schedule_kind schedule, int microbatches,
                                  double hide_threshold)
{
    struct hapt_arena scratch;
    const bool computes = strcmp(limit_of(plan), "compute") == 0, looped = hapt_schedule_loops(plan->schedule);
    for (int i = 0; i < plan->stage_count; i++) {
        struct hapt_plan_stage *stage = &plan->stage[i];
        stage->compute_s += stage->step_s / microbatches - stage->step_s / plan->microbatches;
    }
    double compute_s;
    const double least_s = hapt_plan_busiest_s(plan, &compute_s);
    if (microbatches != plan->microbatches) plan->t_max_s = computes ? least_s : fmax(plan->t_max_s, least_s);
    plan->schedule = schedule;
    plan->microbatches = microbatches;
    plan->hide_threshold = hide_threshold;
    if (hapt_schedule_loops(schedule)) {
        int misfit;
        HAPT_TRY(hapt_plan_choose_transfer_slots(plan));
        HAPT_TRY(hapt_plan_launch_loops(plan, &misfit));
        plan->t_max_s = hapt_plan_busiest_s(plan, &compute_s);
    } else {
        for (int s = 0; s < plan->submesh_count; s++) plan->submesh[s].ahead = plan->submesh[s].slots = 0;
        plan->loop_batch = plan->prefetch = 0;
        if (looped) plan->transfer_slots = 0;
        launch(plan, plan->t_max_s);
    }
    hapt_arena_init(&scratch);
    const enum hapt_status status = finish_times(plan, &scratch);
    hapt_arena_release(&scratch);
    return status;
}

int hapt_plan_relaunch(struct hapt_plan *plan, enum hapt_schedule_kind schedule, double hide_threshold, double t_max_s)
{
    plan->schedule = schedule;
    plan->hide_threshold = hide_threshold;
    plan->t_max_s = t_max_s;
    return launch(plan, t_max_s);
}

enum hapt_status hapt_plan_launch(const struct hapt_profile *profile, double t_max_s, struct hapt_plan *plan,
                                  int *misfit)
{
    HAPT_TRY(hapt_plan_price_tables(profile, plan));
    plan->t_max_s = t_max_s;
    *misfit = launch(plan, t_max_s);
    return HAPT_OK;
}

enum hapt_status hapt_plan_price_at(const struct hapt_profile *profile, double t_max_s, struct hapt_plan *plan)
{
    struct hapt_arena scratch;
    int misfit;
    HAPT_TRY(hapt_plan_launch(profile, t_max_s, plan, &misfit));
    HAPT_ASSERT(misfit < 0);
    hapt_arena_init(&scratch);
    const enum hapt_status status = finish(profile, plan, &scratch);
    hapt_arena_release(&scratch);
    return status;
}

static enum hapt_status exceeds_memory(const struct hapt_plan *plan, int misfit)
{
    char need[32], have[32], submesh[64];
    const struct hapt_plan_stage *stage = &plan->stage[misfit];
    if (hapt_schedule_loops(plan->schedule)) {
        double have_bytes;
        const double bytes = hapt_plan_submesh_bytes(plan, stage->submesh, &have_bytes);
        return hapt_fail(HAPT_ERR_INFEASIBLE, "use fewer loops, a smaller loop batch or prefetch, or larger submeshes",
                         "the stages on %s:%s need %s of %s per device for %d passes in flight", stage->submesh->name,
                         hapt_plan_stage_short(stage, "x", submesh), hapt_units_bytes(bytes, need),
                         hapt_units_bytes(have_bytes, have), stage->submesh->slots);
    }
    return hapt_fail(HAPT_ERR_INFEASIBLE, "use a larger submesh, fewer layers or fewer microbatches in flight",
                     "stage %d (layers %d-%d on %s:%s) needs %s of %s per device for %d microbatches in flight", misfit,
                     stage->first_layer, stage->end_layer, stage->submesh->name,
                     hapt_plan_stage_short(stage, "x", submesh), hapt_units_bytes(stage->memory_bytes, need),
                     hapt_units_bytes(stage->device_memory_bytes, have), stage->warmup);
}

enum hapt_status hapt_plan_price_launches(const struct hapt_profile *profile, struct hapt_plan *plan)
{
    struct hapt_arena scratch;
    double compute_s;
    int misfit = -1;
    HAPT_TRY(hapt_plan_price_tables(profile, plan));
    if (hapt_schedule_loops(plan->schedule))
        HAPT_TRY(hapt_plan_launch_loops(plan, &misfit));
    else
        misfit = hapt_plan_tighten(plan);
    if (misfit >= 0) return exceeds_memory(plan, misfit);
    plan->t_max_s = hapt_plan_busiest_s(plan, &compute_s);
    hapt_arena_init(&scratch);
    const enum hapt_status status = finish(profile, plan, &scratch);
    hapt_arena_release(&scratch);
    return status;
}

/* Finds the smallest t_max at which everything fits: a t, c, 2c or c / epsilon of these stages. */
static enum hapt_status choose_t_max(struct hapt_plan *plan, struct hapt_arena *scratch)
{
    double *t_max;
    double compute_s;
    const double least_s = hapt_plan_busiest_s(plan, &compute_s);
    int count = 0, misfit = -1;
    HAPT_NEW(t_max, scratch, 4 * (size_t)plan->stage_count);
    for (int i = 0; i < plan->stage_count; i++) {
        const double comm_s = plan->stage[i].comm_s, lone_s = comm_s / plan->hide_threshold;
        t_max[count++] = plan->stage[i].compute_s;
        t_max[count++] = comm_s;
        t_max[count++] = 2 * comm_s;
        if (isfinite(lone_s)) t_max[count++] = lone_s;
    }
    qsort(t_max, (size_t)count, sizeof *t_max, hapt_compare_doubles);
    for (int k = 0; k < count; k++) {
        if (!hapt_at_most(least_s, t_max[k])) continue;
        plan->t_max_s = t_max[k];
        misfit = launch(plan, t_max[k]);
        if (misfit < 0) return HAPT_OK;
    }
    if (misfit < 0)
        return hapt_fail(HAPT_ERR_INFEASIBLE, "check link_bandwidth and boundary_bytes",
                         "a boundary between stages never finishes its transfer");
    return exceeds_memory(plan, misfit);
}

enum hapt_status hapt_plan_price(const struct hapt_profile *profile, struct hapt_plan *plan)
{
    struct hapt_arena scratch;
    if (hapt_schedule_loops(plan->schedule)) return hapt_plan_price_launches(profile, plan);
    HAPT_TRY(hapt_plan_price_tables(profile, plan));
    hapt_arena_init(&scratch);
    enum hapt_status status = choose_t_max(plan, &scratch);
    if (status == HAPT_OK) status = finish(profile, plan, &scratch);
    hapt_arena_release(&scratch);
    return status;
}
