/* Plans whose pipeline visits a submesh several times: placement, launch counts and memory under a looped schedule
 * (Pfeife 3.4), and the check of its lists with the skips of a model. */
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

/* The work per microbatch of the messages from submesh `from` to submesh `to`: activations and gradients. */
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

double hapt_plan_busiest_s(const struct hapt_plan *plan, double *compute_s)
{
    double busiest_s = 0;
    *compute_s = 0;
    if (!hapt_schedule_loops(plan->schedule)) {
        for (int i = 0; i < plan->stage_count; i++) {
            *compute_s = fmax(*compute_s, plan->stage[i].compute_s);
            busiest_s = fmax(busiest_s, fmax(plan->stage[i].compute_s, plan->stage[i].comm_s));
        }
        return busiest_s;
    }
    for (int s = 0; s < plan->submesh_count; s++) {
        double sum_s = 0;
        for (int i = 0; i < plan->stage_count; i++)
            if (index_of(plan, i) == s) sum_s += plan->stage[i].compute_s;
        *compute_s = fmax(*compute_s, sum_s);
    }
    for (int i = 0; i + 1 < plan->stage_count; i++) {
        const int from = index_of(plan, i), to = index_of(plan, i + 1);
        busiest_s = fmax(busiest_s, plan->stage[i].comm_s);
        if (from != to) busiest_s = fmax(busiest_s, fmax(messages_s(plan, from, to), messages_s(plan, to, from)));
    }
    return fmax(busiest_s, *compute_s);
}

/* ---- Launch counts and memory ---- */

double hapt_plan_submesh_bytes(const struct hapt_plan *plan, const struct hapt_plan_submesh *submesh,
                               double *have_bytes)
{
    double fullest = -1, need_bytes = 0;
    *have_bytes = 0;
    for (int k = 0; k < submesh->part_count; k++) {
        double bytes = 0, largest_bytes = 0;
        int launches = 0;
        for (int i = 0; i < plan->stage_count; i++) {
            const struct hapt_plan_stage *stage = &plan->stage[i];
            if (stage->submesh != submesh) continue;
            bytes += stage->part_parameter_bytes[k];
            largest_bytes = fmax(largest_bytes, stage->part_activation_bytes[k]);
            launches += stage->warmup;
        }
        bytes += (submesh->slots > 0 ? submesh->slots : launches) * largest_bytes;
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
        plan->stage[i].submesh->slots = schedule->list[schedule->submesh_of[i]].slots;
    }
    return HAPT_OK;
}

/* The edges between the stages of a plan; NULL: between neighbours. */
struct skips {
    int count;
    const struct hapt_schedule_edge *edge;
};

/* Do the lists run with these settings? */
static bool runs(const struct hapt_plan *plan, const struct skips *skips, int microbatches, int loop_batch,
                 int transfer_slots)
{
    struct hapt_plan other = *plan;
    struct hapt_schedule *schedule;
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    other.microbatches = microbatches;
    other.loop_batch = loop_batch;
    other.transfer_slots = transfer_slots;
    enum hapt_status status =
        hapt_plan_schedule_edges(&other, plan->exchange_s > 0, skips->count, skips->edge, &scratch, &schedule);
    if (status == HAPT_OK) status = hapt_schedule_check(schedule);
    hapt_arena_release(&scratch);
    if (status != HAPT_OK) hapt_fail_reset();
    return status == HAPT_OK;
}

/* The failure of a looped schedule, with the nearest setting that works. */
static enum hapt_status cannot_loop(const struct hapt_plan *plan, const struct skips *skips)
{
    const int B = plan->microbatches, D = plan->submesh_count;
    const int batch = hapt_schedule_loop_batch(plan->schedule, B, D, plan->loop_batch);
    char why[512], hint[96] = "choose a schedule that is not looped";
    snprintf(why, sizeof why, "%s", hapt_fail_message());
    hapt_fail_reset();
    int best = 0;
    for (int d = 1; d <= B && plan->schedule != HAPT_SCHEDULE_BREADTH_FIRST; d++) {
        const bool nearer = best == 0 || abs(d - batch) < abs(best - batch);
        if (B % d == 0 && d != batch && nearer &&
            runs(plan, skips, B, d, d < plan->transfer_slots ? plan->transfer_slots : d))
            best = d;
    }
    for (int more = batch; best == 0 && more <= B + 4 * batch; more += batch) {
        if (more == B || !runs(plan, skips, more, plan->loop_batch, more)) continue;
        snprintf(hint, sizeof hint, "give --microbatches %d", more);
        break;
    }
    if (best > 0) snprintf(hint, sizeof hint, "give --loop-batch %d", best);
    return hapt_fail(HAPT_ERR_USAGE, hint, "schedule %s of %d microbatches on %d submeshes: %s",
                     hapt_schedule_kind_name(plan->schedule), B, D, why);
}

/* Makes and checks the lists. HAPT_ERR_USAGE: cannot_loop reports the failure. */
static enum hapt_status try_lists(const struct hapt_plan *plan, const struct skips *skips)
{
    struct hapt_schedule *schedule;
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    enum hapt_status status =
        hapt_plan_schedule_edges(plan, plan->exchange_s > 0, skips->count, skips->edge, &scratch, &schedule);
    if (status == HAPT_OK) status = hapt_schedule_check(schedule);
    hapt_arena_release(&scratch);
    return status == HAPT_ERR_INPUT ? HAPT_ERR_USAGE : status;
}

enum hapt_status hapt_plan_choose_transfer_slots(struct hapt_plan *plan, int edge_count,
                                                 const struct hapt_schedule_edge *edge)
{
    const struct skips skips = {edge_count, edge};
    const int B = plan->microbatches, least = plan->transfer_slots > 0 ? plan->transfer_slots : HAPT_TRANSFER_SLOTS;
    HAPT_ASSERT(hapt_schedule_loops(plan->schedule));
    const enum hapt_status status = try_lists(plan, &skips);
    if (status != HAPT_ERR_USAGE) return status;
    const int batch = hapt_schedule_loop_batch(plan->schedule, B, plan->submesh_count, plan->loop_batch);
    char message[512], hint[256];
    snprintf(message, sizeof message, "%s", hapt_fail_message());
    snprintf(hint, sizeof hint, "%s", hapt_fail_hint());
    hapt_fail_reset();
    if (B % batch != 0 ||
        !runs(plan, &skips, B, plan->loop_batch, B)) { /* more slots than microbatches are of no use */
        hapt_fail(HAPT_ERR_USAGE, hint, "%s", message);
        return cannot_loop(plan, &skips);
    }
    int fails = least, works = B;
    while (works - fails > 1) { /* lists that run also run with more slots */
        const int middle = fails + (works - fails) / 2;
        *(runs(plan, &skips, B, plan->loop_batch, middle) ? &works : &fails) = middle;
    }
    plan->transfer_slots = works;
    return HAPT_OK;
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
    for (int i = 0; i < plan->stage_count; i++)
        if (!plan->stage[i].forward_only) plan->stage[i].warmup = 1; /* the lists decide */
    launch_frozen(plan);
    hapt_arena_init(&scratch);
    const enum hapt_status status = find_launches(plan, &scratch);
    hapt_arena_release(&scratch);
    if (status == HAPT_ERR_INPUT || status == HAPT_ERR_USAGE) return cannot_loop(plan, &(struct skips){0, NULL});
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

/* ---- Skips ---- */

static int stage_of(const struct hapt_plan *plan, int op)
{
    int stage = 0;
    while (op >= plan->stage[stage].end_op) stage++;
    return stage;
}

/* reads [stage]: it reads an activation of a stage before. An activation goes from its producer to each reader; its
 * gradient from each reader to the one before, and to the producer. */
static void add_edges(const struct hapt_plan *plan, int producer, const bool *reads, bool *has)
{
    const int S = plan->stage_count;
    int before = producer;
    for (int c = producer + 1; c < S; c++) {
        if (!reads[c]) continue;
        has[producer * S + c] = true;
        if (!plan->stage[before].forward_only) has[c * S + before] = true;
        before = c;
    }
}

/* The edges of a model between the stages of its plan. */
static enum hapt_status find_edges(const struct hapt_plan *plan, const struct hapt_graph *graph,
                                   struct hapt_arena *arena, struct skips *skips)
{
    const int S = plan->stage_count;
    bool *has, *reads; /* has [from][to], reads [tensor][stage] */
    int *producer;
    HAPT_NEW(has, arena, S * S);
    HAPT_NEW(reads, arena, graph->tensor_count * S);
    HAPT_NEW(producer, arena, graph->tensor_count);
    for (int t = 0; t < graph->tensor_count; t++) producer[t] = -1;
    for (int op = 0; op < graph->forward_count; op++) {
        const struct hapt_op *at = &graph->op[op];
        const int stage = stage_of(plan, op);
        for (int k = 0; k < at->output_count; k++)
            if (at->output[k] >= 0) producer[at->output[k]] = stage;
        for (int k = 0; k < at->input_count; k++)
            if (at->input[k] >= 0) reads[at->input[k] * S + stage] = true;
    }
    for (int t = 0; t < graph->tensor_count; t++)
        if (producer[t] >= 0) add_edges(plan, producer[t], &reads[t * S], has);
    struct hapt_schedule_edge *edge;
    HAPT_NEW(edge, arena, S * S);
    for (int from = 0; from < S; from++)
        for (int to = 0; to < S; to++)
            if (has[from * S + to]) edge[skips->count++] = (struct hapt_schedule_edge){from, to, to < from};
    skips->edge = edge;
    return HAPT_OK;
}

enum hapt_status hapt_plan_choose_skip_slots(struct hapt_plan *plan, const struct hapt_graph *graph)
{
    struct hapt_arena scratch;
    struct skips skips = {0};
    if (!hapt_schedule_loops(plan->schedule)) return HAPT_OK;
    hapt_arena_init(&scratch);
    enum hapt_status status = find_edges(plan, graph, &scratch, &skips);
    if (status == HAPT_OK) status = hapt_plan_choose_transfer_slots(plan, skips.count, skips.edge);
    hapt_arena_release(&scratch);
    return status;
}
