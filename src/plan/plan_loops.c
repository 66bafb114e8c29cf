/* Plans whose pipeline visits a submesh several times: placement, launch counts and memory under a looped schedule
 * (Pfeife 3.4). */
#include "hapt/plan.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Placement ---- */

int hapt_plan_loops(const struct hapt_plan *plan)
{
    int visits = 0;
    for (int i = 0; i < plan->stage_count; i++) {
        const bool own = plan->stage[i].submesh == plan->stage[0].submesh;
        visits += own && (i == 0 || plan->stage[i - 1].submesh != plan->stage[0].submesh);
    }
    return visits > 1 || plan->stage_count == plan->submesh_count
               ? visits
               : (plan->stage_count + plan->submesh_count - 1) / plan->submesh_count;
}

int hapt_plan_place(int chunk, int submeshes, bool v)
{
    const int at = chunk % submeshes;
    return v && chunk / submeshes % 2 == 1 ? submeshes - 1 - at : at;
}

static int index_of(const struct hapt_plan *plan, int stage)
{
    return (int)(plan->stage[stage].submesh - plan->submesh);
}

bool hapt_plan_is_v(const struct hapt_plan *plan)
{
    if (plan->submesh_count < 2 || plan->stage_count < 2 * plan->submesh_count) return false;
    for (int i = 0; i < plan->stage_count; i++)
        if (index_of(plan, i) != hapt_plan_place(i, plan->submesh_count, true)) return false;
    return true;
}

enum hapt_status hapt_plan_fold(struct hapt_plan *plan, int submeshes, bool v)
{
    if (submeshes < 1 || plan->stage_count % submeshes != 0)
        return hapt_fail(HAPT_ERR_INPUT, "give each submesh as many stages as there are loops",
                         "%d stages cannot run on %d submeshes", plan->stage_count, submeshes);
    for (int i = 0; i < plan->stage_count; i++) {
        struct hapt_plan_stage *stage = &plan->stage[i], *first = &plan->stage[hapt_plan_place(i, submeshes, v)];
        if (i >= submeshes && !hapt_plan_same_devices(stage, first))
            return hapt_fail(HAPT_ERR_INPUT, "give all stages of a submesh the same devices and program",
                             "stages %d and %d share a submesh, but run on other devices", (int)(first - plan->stage),
                             i);
        stage->submesh = &plan->submesh[hapt_plan_place(i, submeshes, v)];
    }
    plan->submesh_count = submeshes;
    return HAPT_OK;
}

/* ---- Work ---- */

/* The work per microbatch of the channel of an edge. */
static double channel_s(const struct hapt_plan *plan, const struct hapt_plan_edge *edge)
{
    double sum_s = 0;
    for (int e = 0; e < plan->edge_count; e++) {
        const struct hapt_plan_edge *other = &plan->edge[e];
        if (index_of(plan, other->edge.from) != index_of(plan, edge->edge.from)) continue;
        if (other->edge.link != edge->edge.link || hapt_plan_drops_edge(plan, other)) continue;
        if (edge->edge.link > 0 || index_of(plan, other->edge.to) == index_of(plan, edge->edge.to))
            sum_s += other->time_s;
    }
    return sum_s;
}

/* The same for the messages between neighbours from submesh `from` to submesh `to`: activations and gradients. */
static double messages_s(const struct hapt_plan *plan, int from, int to)
{
    double sum_s = 0;
    for (int i = 0; i + 1 < plan->stage_count; i++) {
        const int at = index_of(plan, i), next = index_of(plan, i + 1);
        if (at == from && next == to) sum_s += plan->stage[i].comm_s;
        if (at == to && next == from && !plan->stage[i].forward_only) sum_s += plan->stage[i].comm_s;
    }
    return sum_s;
}

double hapt_plan_looped_work_s(const struct hapt_plan *plan, double *compute_s)
{
    double busiest_s = 0;
    *compute_s = 0;
    for (int s = 0; s < plan->submesh_count; s++) {
        double sum_s = 0;
        for (int i = 0; i < plan->stage_count; i++)
            if (index_of(plan, i) == s) sum_s += plan->stage[i].compute_s;
        *compute_s = fmax(*compute_s, sum_s);
    }
    for (int i = 0; i + 1 < plan->stage_count && plan->edge_count == 0; i++) {
        const int from = index_of(plan, i), to = index_of(plan, i + 1);
        if (from != to) busiest_s = fmax(busiest_s, fmax(messages_s(plan, from, to), messages_s(plan, to, from)));
    }
    for (int e = 0; e < plan->edge_count; e++)
        if (index_of(plan, plan->edge[e].edge.from) != index_of(plan, plan->edge[e].edge.to))
            busiest_s = fmax(busiest_s, channel_s(plan, &plan->edge[e]));
    return fmax(busiest_s, *compute_s);
}

double hapt_plan_busiest_s(const struct hapt_plan *plan, double *compute_s)
{
    double busiest_s = 0, slowest_s = 0;
    for (int i = 0; i < plan->stage_count; i++) {
        busiest_s = fmax(busiest_s, fmax(plan->stage[i].compute_s, plan->stage[i].comm_s));
        slowest_s = fmax(slowest_s, plan->stage[i].compute_s);
    }
    *compute_s = slowest_s;
    return hapt_schedule_loops(plan->schedule) ? fmax(busiest_s, hapt_plan_looped_work_s(plan, compute_s)) : busiest_s;
}

/* ---- Launch counts and memory ---- */

double hapt_plan_submesh_bytes(const struct hapt_plan *plan, const struct hapt_plan_submesh *submesh,
                               double *have_bytes)
{
    double fullest = -1, need_bytes = 0;
    *have_bytes = 0;
    for (int k = 0; k < submesh->part_count; k++) {
        double bytes = 0, largest_bytes = 0, largest_weight_bytes = 0;
        int launches = 0, weight_slots = 0;
        for (int i = 0; i < plan->stage_count; i++) {
            const struct hapt_plan_stage *stage = &plan->stage[i];
            if (stage->submesh != submesh) continue;
            bytes += stage->part_parameter_bytes[k];
            largest_bytes = fmax(largest_bytes, stage->part_activation_bytes[k]);
            largest_weight_bytes = fmax(largest_weight_bytes, stage->weight_slot_bytes);
            launches += hapt_plan_stage_slots(stage);
            weight_slots += stage->weight_slots;
        }
        bytes += (submesh->slots > 0 ? submesh->slots : launches) * largest_bytes + weight_slots * largest_weight_bytes;
        const double room = submesh->device_memory_bytes[k], full = bytes > 0 ? bytes / room : 0;
        if (full <= fullest) continue;
        fullest = full;
        need_bytes = bytes;
        *have_bytes = room;
    }
    return need_bytes;
}

static enum hapt_status find_launches(struct hapt_plan *plan, struct hapt_arena *scratch)
{
    struct hapt_schedule *schedule;
    HAPT_TRY(hapt_plan_schedule(plan, plan->exchange_s > 0, scratch, &schedule));
    HAPT_TRY(hapt_schedule_check(schedule));
    for (int i = 0; i < plan->stage_count; i++) {
        plan->stage[i].warmup = schedule->launches[i];
        if (plan->split) plan->stage[i].slots = plan->stage[i].warmup; /* the lists hold as many as unsplit ones */
        plan->stage[i].submesh->slots = schedule->list[schedule->submesh_of[i]].slots;
    }
    return HAPT_OK;
}

/* True if the lists run with these settings. */
static bool runs(const struct hapt_plan *plan, int microbatches, int loop_batch, int transfer_slots)
{
    struct hapt_plan other = *plan;
    struct hapt_schedule *schedule;
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    other.microbatches = microbatches;
    other.loop_batch = loop_batch;
    other.transfer_slots = transfer_slots;
    enum hapt_status status = hapt_plan_schedule(&other, plan->exchange_s > 0, &scratch, &schedule);
    if (status == HAPT_OK) status = hapt_schedule_check(schedule);
    hapt_arena_release(&scratch);
    if (status != HAPT_OK) hapt_fail_reset();
    return status == HAPT_OK;
}

/* The failure of a looped schedule, with the nearest setting that works. */
static enum hapt_status cannot_loop(const struct hapt_plan *plan)
{
    const int B = plan->microbatches, D = plan->submesh_count;
    const int batch = hapt_schedule_loop_batch(plan->schedule, B, D, plan->loop_batch);
    char why[512], hint[96] = "choose a schedule that is not looped";
    snprintf(why, sizeof why, "%s", hapt_fail_message());
    hapt_fail_reset();
    int best = 0;
    for (int d = 1; d <= B && plan->schedule != HAPT_SCHEDULE_BREADTH_FIRST; d++) {
        const bool nearer = best == 0 || abs(d - batch) < abs(best - batch);
        if (B % d == 0 && d != batch && nearer && runs(plan, B, d, d < plan->transfer_slots ? plan->transfer_slots : d))
            best = d;
    }
    for (int more = batch; best == 0 && more <= B + 4 * batch; more += batch) {
        if (more == B || !runs(plan, more, plan->loop_batch, more)) continue;
        snprintf(hint, sizeof hint, "give --microbatches %d", more);
        break;
    }
    if (best > 0) snprintf(hint, sizeof hint, "give --loop-batch %d", best);
    return hapt_fail(HAPT_ERR_USAGE, hint, "schedule %s of %d microbatches on %d submeshes: %s",
                     hapt_schedule_kind_name(plan->schedule), B, D, why);
}

/* Makes and checks the lists. HAPT_ERR_USAGE: they do not work. */
static enum hapt_status make_lists(const struct hapt_plan *plan, struct hapt_arena *arena,
                                   struct hapt_schedule **schedule)
{
    enum hapt_status status = hapt_plan_schedule(plan, plan->exchange_s > 0, arena, schedule);
    if (status == HAPT_OK) status = hapt_schedule_check(*schedule);
    return status == HAPT_ERR_INPUT ? HAPT_ERR_USAGE : status;
}

enum hapt_status hapt_plan_find_lists(struct hapt_plan *plan, struct hapt_arena *arena, struct hapt_schedule **schedule)
{
    const int B = plan->microbatches, least = hapt_plan_transfer_slots(plan);
    HAPT_ASSERT(hapt_schedule_loops(plan->schedule));
    const enum hapt_status status = make_lists(plan, arena, schedule);
    if (status != HAPT_ERR_USAGE) return status;
    hapt_fail_reset();
    *schedule = NULL;
    const int batch = hapt_schedule_loop_batch(plan->schedule, B, plan->submesh_count, plan->loop_batch);
    if (B % batch != 0 || !runs(plan, B, plan->loop_batch, B)) return HAPT_OK; /* more slots are of no use */
    int fails = least, works = B;
    while (works - fails > 1) { /* lists that run also run with more slots */
        const int middle = fails + (works - fails) / 2;
        *(runs(plan, B, plan->loop_batch, middle) ? &works : &fails) = middle;
    }
    plan->transfer_slots = works;
    return make_lists(plan, arena, schedule);
}

/* Plan files with more passes are refused, so no plan may have them. */
static enum hapt_status check_passes(const struct hapt_plan *plan)
{
    char hint[96];
    const int most = HAPT_PLAN_MOST_LOOPED_PASSES / plan->stage_count;
    if (plan->microbatches <= most) return HAPT_OK;
    snprintf(hint, sizeof hint, "use at most %d microbatches, with more rows each", most);
    return hapt_fail(HAPT_ERR_USAGE, hint, "%d stages with %d microbatches are too many for a looped schedule",
                     plan->stage_count, plan->microbatches);
}

static enum hapt_status choose_transfer_slots(struct hapt_plan *plan, struct hapt_arena *scratch)
{
    struct hapt_schedule *schedule;
    HAPT_TRY(check_passes(plan));
    HAPT_TRY(hapt_plan_find_lists(plan, scratch, &schedule));
    if (schedule) return HAPT_OK;
    const enum hapt_status status = make_lists(plan, scratch, &schedule); /* again, for its failure */
    return status == HAPT_ERR_USAGE ? cannot_loop(plan) : status;
}

enum hapt_status hapt_plan_choose_transfer_slots(struct hapt_plan *plan)
{
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    const enum hapt_status status = choose_transfer_slots(plan, &scratch);
    hapt_arena_release(&scratch);
    return status;
}

/* Forward-only stages of a looped plan have the launches of the kind's rule, before the lists are made. */
static void launch_frozen(struct hapt_plan *plan)
{
    for (int i = 0; i < plan->stage_count && plan->stage[i].forward_only; i++)
        plan->stage[i].warmup = hapt_schedule_forward_only_launches(
            plan->schedule, plan->microbatches, plan->stage[i].comm_s, plan->t_max_s, plan->hide_threshold);
}

enum hapt_status hapt_plan_launch_loops(struct hapt_plan *plan, int *misfit)
{
    struct hapt_arena scratch;
    HAPT_ASSERT(hapt_schedule_loops(plan->schedule));
    HAPT_TRY(check_passes(plan));
    for (int i = 0; i < plan->stage_count; i++)
        if (!plan->stage[i].forward_only) plan->stage[i].warmup = 1; /* the lists decide */
    launch_frozen(plan);
    hapt_arena_init(&scratch);
    const enum hapt_status status = find_launches(plan, &scratch);
    hapt_arena_release(&scratch);
    if (status == HAPT_ERR_INPUT || status == HAPT_ERR_USAGE) return cannot_loop(plan);
    HAPT_TRY(status);
    hapt_plan_tighten(plan);
    *misfit = -1;
    for (int i = plan->stage_count - 1; i >= 0; i--) {
        double have_bytes;
        const double bytes = hapt_plan_submesh_bytes(plan, plan->stage[i].submesh, &have_bytes);
        if (!hapt_at_most(bytes, have_bytes)) *misfit = i;
    }
    return HAPT_OK;
}

enum hapt_status hapt_plan_choose_skip_slots(struct hapt_plan *plan, const struct hapt_graph *graph)
{
    if (!hapt_schedule_loops(plan->schedule)) return HAPT_OK;
    if (plan->edge_count == 0) HAPT_TRY(hapt_plan_find_model_edges(graph, plan));
    return hapt_plan_choose_transfer_slots(plan);
}
