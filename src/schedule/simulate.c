/*
 * Executes the instruction lists with clocks. Nothing is ever chosen: lists and channels are served in order. So every
 * start time is a maximum over earlier ends, and the order of evaluation does not matter.
 */
#include "hapt/simulate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "play.h"

/* The last microbatch that used a slot. */
struct owner {
    int chunk, microbatch;
};

/* One submesh's progress. */
struct player {
    int at, step; /* next instruction */
    double clock_s;
    struct owner *owner; /* [slots] chunk -1: none yet */
    bool meets, agrees;  /* waits in the EXCHANGE or NORM of its step */
};

/* The instructions that end each step. */
struct step_end {
    double total_s;
    int met, agreed; /* submeshes that reached EXCHANGE and NORM, of the two and of all */
    double met_s, agreed_s;
};

struct simulator {
    struct play play;
    struct player *player;                    /* [submesh] */
    struct step_end *end;                     /* [steps] */
    int steps, first, last;                   /* first, last: the submeshes that hold tied parameters */
    double begin_s;                           /* end of the step before: 0, or that of its updates */
    double *busy_s;                           /* [chunk] */
    double *update_s;                         /* [chunk] end of its deferred update, if nothing delays it */
    struct hapt_simulated_instruction **time; /* [submesh][instruction] of the first step; NULL: not kept */
};

/* Places everything in one block. Returns its bytes; without a block it only counts them. */
static size_t place(struct simulator *simulator, char *block, size_t *zeroed)
{
    const struct hapt_schedule *schedule = simulator->play.schedule;
    const size_t submeshes = (size_t)schedule->submesh_count;
    size_t used = 0, owners = 0;
    for (size_t s = 0; s < submeshes; s++) owners += (size_t)schedule->list[s].slots;
    simulator->player = play_carve(block, &used, submeshes * sizeof *simulator->player);
    simulator->end = play_carve(block, &used, (size_t)simulator->steps * sizeof *simulator->end);
    simulator->busy_s = play_carve(block, &used, (size_t)schedule->chunk_count * sizeof *simulator->busy_s);
    simulator->update_s = play_carve(block, &used, (size_t)schedule->chunk_count * sizeof *simulator->update_s);
    play_place(&simulator->play, block, &used);
    *zeroed = used;
    struct owner *owner = play_carve(block, &used, owners * sizeof *owner);
    play_place_rest(&simulator->play, block, &used);
    for (size_t s = 0; block && s < submeshes; s++) {
        simulator->player[s].owner = owner;
        owner += schedule->list[s].slots;
    }
    return used;
}

/* An update that ends at clock_s, apart from what is deferred. */
static inline void defer(struct simulator *simulator, int chunk, double clock_s)
{
    const double *deferred_s = simulator->play.costs->deferred_s;
    simulator->update_s[chunk] = clock_s + (deferred_s ? deferred_s[chunk] : 0);
}

/* hapt_costs.steady */
static void begin_with_updates(struct simulator *simulator)
{
    const struct hapt_schedule *schedule = simulator->play.schedule;
    const struct hapt_costs *costs = simulator->play.costs;
    HAPT_ASSERT(!costs->steady || (costs->agrees && simulator->steps == 1));
    for (int k = 0; costs->steady && costs->step_s && k < schedule->chunk_count; k++) {
        double *clock_s = &simulator->player[schedule->submesh_of[k]].clock_s;
        *clock_s += play_update_s(costs, k);
        defer(simulator, k, *clock_s);
        simulator->begin_s = later(simulator->begin_s, simulator->update_s[k]);
    }
}

static enum hapt_status begin(struct simulator *simulator, struct hapt_simulate_work *work)
{
    const struct hapt_schedule *schedule = simulator->play.schedule;
    size_t zeroed;
    const size_t bytes = place(simulator, NULL, &zeroed);
    if (bytes > work->bytes) {
        hapt_simulate_work_release(work);
        work->block = malloc(bytes);
        if (!work->block)
            return hapt_fail(HAPT_ERR_MEMORY, "plan fewer microbatches",
                             "host memory exhausted by a simulation of %d stages, %d microbatches",
                             schedule->chunk_count, schedule->microbatches);
        work->bytes = bytes;
    }
    memset(work->block, 0, zeroed);
    place(simulator, work->block, &zeroed);
    for (int s = 0; s < schedule->submesh_count; s++)
        for (int slot = 0; slot < schedule->list[s].slots; slot++) simulator->player[s].owner[slot].chunk = -1;
    for (int e = 0; e < schedule->edges.count; e++)
        simulator->play.edge_s[e] = play_edge_s(schedule, simulator->play.costs, e);
    begin_with_updates(simulator);
    return HAPT_OK;
}

void hapt_simulate_work_release(struct hapt_simulate_work *work)
{
    free(work->block);
    *work = (struct hapt_simulate_work){0};
}

/* Only the ends of the pipeline hold tied parameters: they meet here. */
static bool exchange(struct simulator *simulator, int submesh, double *clock_s)
{
    struct player *player = &simulator->player[submesh];
    struct step_end *end = &simulator->end[player->step];
    if ((submesh != simulator->first && submesh != simulator->last) || simulator->first == simulator->last) return true;
    if (!player->meets) {
        end->met++;
        end->met_s = later(end->met_s, *clock_s);
    }
    player->meets = end->met < 2;
    if (player->meets) return false;
    *clock_s = end->met_s + simulator->play.costs->exchange_s;
    return true;
}

static bool agree(struct simulator *simulator, int submesh, double *clock_s)
{
    struct player *player = &simulator->player[submesh];
    struct step_end *end = &simulator->end[player->step];
    if (!simulator->play.costs->agrees) return true;
    if (!player->agrees) {
        end->agreed++;
        end->agreed_s = later(end->agreed_s, *clock_s);
    }
    player->agrees = end->agreed < simulator->play.schedule->submesh_count;
    if (player->agrees) return false;
    *clock_s = end->agreed_s;
    return true;
}

/* A slot is free when the messages of the microbatch before have left it. */
static inline bool take_slot(const struct simulator *simulator, int submesh, const struct hapt_instruction *at,
                             int microbatch, double *start_s)
{
    struct owner *owner = &simulator->player[submesh].owner[at->slot];
    if (owner->chunk >= 0 && !play_sent(&simulator->play, owner->chunk, 0, owner->microbatch, start_s)) return false;
    *owner = (struct owner){at->chunk, microbatch};
    return true;
}

/* Executes one instruction on the submesh's clock; false: it must wait for another list. */
static inline bool execute(struct simulator *simulator, int submesh, const struct hapt_instruction *at, double *start_s,
                           double *clock_s)
{
    const struct play *play = &simulator->play;
    const struct hapt_costs *costs = play->costs;
    const int chunk = at->chunk;
    const int microbatch = at->microbatch + simulator->player[submesh].step * play->schedule->microbatches;
    switch (at->kind) {
    case HAPT_INSTRUCTION_RECEIVE_FORWARD: return play_receive(play, chunk, 0, microbatch, clock_s);
    case HAPT_INSTRUCTION_RECEIVE_BACKWARD: return play_receive(play, chunk, 1, microbatch, clock_s);
    case HAPT_INSTRUCTION_SEND_FORWARD: play_send(play, chunk, 0, microbatch, clock_s); return true;
    case HAPT_INSTRUCTION_SEND_BACKWARD: play_send(play, chunk, 1, microbatch, clock_s); return true;
    case HAPT_INSTRUCTION_FORWARD:
        if (!take_slot(simulator, submesh, at, microbatch, start_s)) return false;
        *clock_s = at->microbatch == 0 ? play_first_forward_end(costs, chunk, *start_s, simulator->update_s[chunk])
                                       : *start_s + costs->forward_s[chunk];
        play_consume(play, chunk, 0, microbatch, *clock_s);
        break;
    case HAPT_INSTRUCTION_BACKWARD:
        if (!play_backward_start(play, chunk, microbatch, start_s)) return false;
        *clock_s = *start_s + costs->backward_s[chunk];
        play_consume(play, chunk, 1, microbatch, *clock_s);
        break;
    case HAPT_INSTRUCTION_WEIGHT: *clock_s += costs->weight_s ? costs->weight_s[chunk] : 0; break;
    case HAPT_INSTRUCTION_EXCHANGE: return exchange(simulator, submesh, clock_s);
    case HAPT_INSTRUCTION_NORM: return agree(simulator, submesh, clock_s);
    case HAPT_INSTRUCTION_UPDATE: /* step_s is the time of all groups */
        *clock_s += play_update_s(costs, chunk) / play->schedule->update_groups;
        defer(simulator, chunk, *clock_s);
        struct step_end *end = &simulator->end[simulator->player[submesh].step];
        end->total_s = later(end->total_s, simulator->update_s[chunk]);
        break;
    case HAPT_INSTRUCTION_REDUCE: break; /* its time is part of step_s */
    }
    simulator->busy_s[chunk] += *clock_s - *start_s;
    return true;
}

static bool advance_submesh(struct simulator *simulator, int submesh)
{
    const struct hapt_instruction_list *list = &simulator->play.schedule->list[submesh];
    struct player *player = &simulator->player[submesh];
    bool moved = false;
    for (; player->step < simulator->steps; player->step++, player->at = 0) {
        struct hapt_simulated_instruction *time =
            simulator->time && player->step == 0 ? simulator->time[submesh] : NULL;
        double clock_s = player->clock_s;
        int index = player->at;
        for (; index < list->count; index++) {
            double start_s = clock_s, end_s = clock_s;
            if (!execute(simulator, submesh, &list->instruction[index], &start_s, &end_s)) break;
            if (time) time[index] = (struct hapt_simulated_instruction){start_s, end_s};
            clock_s = end_s;
        }
        moved = moved || index > player->at;
        player->at = index;
        player->clock_s = clock_s;
        if (index < list->count) break;
        simulator->end[player->step].total_s = later(simulator->end[player->step].total_s, clock_s);
    }
    return moved;
}

/* Goes down and up the pipeline, as activations and gradients do. */
static enum hapt_status run(struct simulator *simulator)
{
    const int submeshes = simulator->play.schedule->submesh_count;
    for (bool moved = true; moved;) {
        moved = false;
        for (int s = 0; s < submeshes; s++) moved |= advance_submesh(simulator, s);
        for (int s = submeshes - 2; s >= 0; s--) moved |= advance_submesh(simulator, s);
    }
    for (int s = 0; s < submeshes; s++)
        if (simulator->player[s].step < simulator->steps)
            return hapt_fail(HAPT_ERR_INTERNAL, NULL, "simulate: the instruction lists deadlock");
    return HAPT_OK;
}

static struct simulator simulator_of(const struct hapt_schedule *schedule, const struct hapt_costs *costs)
{
    const int steps = costs->steps > 0 ? costs->steps : 1;
    HAPT_ASSERT(steps <= HAPT_SIMULATE_STEPS);
    return (struct simulator){.play = {.schedule = schedule,
                                       .costs = costs,
                                       .slots = costs->blocking ? 0 : costs->transfer_slots,
                                       .count = steps * schedule->microbatches},
                              .steps = steps,
                              .first = schedule->submesh_of[0],
                              .last = schedule->submesh_of[schedule->chunk_count - 1]};
}

static double step_s_of(const struct simulator *simulator)
{
    const struct step_end *end = &simulator->end[simulator->steps - 1];
    return end->total_s - (simulator->steps > 1 ? end[-1].total_s : simulator->begin_s);
}

enum hapt_status hapt_simulate_step(const struct hapt_schedule *schedule, const struct hapt_costs *costs,
                                    struct hapt_simulate_work *work, double *step_s)
{
    struct simulator simulator = simulator_of(schedule, costs);
    HAPT_TRY(begin(&simulator, work));
    HAPT_TRY(run(&simulator));
    *step_s = step_s_of(&simulator);
    return HAPT_OK;
}

/* ---- The full result ---- */

static enum hapt_status create_result(const struct simulator *simulator, struct hapt_arena *arena,
                                      struct hapt_simulation **simulation)
{
    const struct hapt_schedule *schedule = simulator->play.schedule;
    const int submeshes = schedule->submesh_count;
    struct hapt_simulation *result;
    HAPT_NEW(result, arena, 1);
    HAPT_NEW(result->busy_s, arena, schedule->chunk_count);
    HAPT_NEW(result->comm_s, arena, schedule->chunk_count);
    HAPT_NEW(result->idle_s, arena, schedule->chunk_count);
    HAPT_NEW(result->peak_slots, arena, submeshes);
    HAPT_NEW(result->time, arena, submeshes);
    HAPT_NEW(result->arrived_s, arena, schedule->edges.count);
    for (int s = 0; s < submeshes; s++) HAPT_NEW(result->time[s], arena, schedule->list[s].count);
    for (int e = 0; e < schedule->edges.count; e++)
        if (schedule->edges.channel_of[e] >= 0) HAPT_NEW(result->arrived_s[e], arena, schedule->microbatches);
    *simulation = result;
    return HAPT_OK;
}

static int count_slots(const struct hapt_schedule *schedule, int submesh)
{
    const struct hapt_instruction_list *list = &schedule->list[submesh];
    const enum hapt_instruction_kind closes = schedule->split ? HAPT_INSTRUCTION_WEIGHT : HAPT_INSTRUCTION_BACKWARD;
    int open = 0, most = 0;
    for (int i = 0; i < list->count; i++) {
        const struct hapt_instruction *at = &list->instruction[i];
        if (at->chunk >= 0 && schedule->forward_only[at->chunk]) return list->slots; /* it holds them in turn */
        if (at->kind == HAPT_INSTRUCTION_FORWARD && ++open > most) most = open;
        if (at->kind == closes) open--;
    }
    return most;
}

/* The first chunk that has backward passes. */
static int first_trained(const struct hapt_schedule *schedule)
{
    int chunk = 0;
    while (schedule->forward_only[chunk]) chunk++;
    return chunk;
}

/* Seconds from one backward to the next on the first submesh while it still launches forwards. Measured over whole
 * rounds of its launch count, with which its period repeats (HAPT Lemma 2). The first half is a transient and not
 * counted. */
static double steady_period(const struct hapt_schedule *schedule, const struct hapt_simulation *result)
{
    const int chunk = first_trained(schedule), first = schedule->submesh_of[chunk], B = schedule->microbatches;
    const struct hapt_instruction_list *list = &schedule->list[first];
    const int launches = schedule->launches[chunk], last = B - 1 - launches;
    const int from_least = B / 2 < last ? B / 2 : last;
    const bool plain = schedule->submesh_count == schedule->chunk_count;
    const int rounds = plain && launches > 0 ? (last - from_least) / launches : 0;
    if (rounds < 1) return result->total_s / B;
    double from_s = 0, to_s = 0;
    for (int i = 0; i < list->count; i++) {
        if (list->instruction[i].kind != HAPT_INSTRUCTION_BACKWARD || list->instruction[i].chunk != chunk) continue;
        if (list->instruction[i].microbatch == last - rounds * launches) from_s = result->time[first][i].end_s;
        if (list->instruction[i].microbatch == last) to_s = result->time[first][i].end_s;
    }
    return (to_s - from_s) / (rounds * launches);
}

static void summarize(const struct simulator *simulator, struct hapt_simulation *result)
{
    const struct hapt_schedule *schedule = simulator->play.schedule;
    const int chunks = schedule->chunk_count;
    const size_t row = (size_t)simulator->play.count;
    result->total_s = simulator->end[0].total_s;
    result->step_s = step_s_of(simulator);
    for (int s = 0; s < schedule->submesh_count; s++) result->peak_slots[s] = count_slots(schedule, s);
    for (int chunk = 0; chunk < chunks; chunk++) {
        result->busy_s[chunk] = simulator->busy_s[chunk] / simulator->steps;
        if (hapt_schedule_crosses(schedule, chunk))
            result->comm_s[chunk] = schedule->microbatches * simulator->play.costs->comm_s[chunk];
    }
    for (int chunk = 0; chunk < chunks; chunk++) {
        double busy_s = 0;
        for (int other = 0; other < chunks; other++)
            if (schedule->submesh_of[other] == schedule->submesh_of[chunk]) busy_s += result->busy_s[other];
        result->idle_s[chunk] = result->step_s - busy_s;
    }
    for (int e = 0; e < schedule->edges.count; e++)
        if (result->arrived_s[e])
            memcpy(result->arrived_s[e], simulator->play.arrived_s + (size_t)e * row,
                   (size_t)schedule->microbatches * sizeof(double));
    result->period_s = steady_period(schedule, result);
}

enum hapt_status hapt_simulate(const struct hapt_schedule *schedule, const struct hapt_costs *costs,
                               struct hapt_arena *arena, struct hapt_simulation **simulation)
{
    struct simulator simulator = simulator_of(schedule, costs);
    struct hapt_simulate_work work = {0};
    struct hapt_simulation *result;
    HAPT_TRY(create_result(&simulator, arena, &result));
    simulator.time = result->time;
    enum hapt_status status = begin(&simulator, &work);
    if (status == HAPT_OK) status = run(&simulator);
    if (status == HAPT_OK) {
        summarize(&simulator, result);
        *simulation = result;
    }
    hapt_simulate_work_release(&work);
    return status;
}

/* ---- Many microbatches ---- */

/* The time of a step of `microbatches`, without what is done once per step. */
static enum hapt_status passes_s(const struct hapt_schedule *schedule, const struct hapt_costs *costs, int microbatches,
                                 struct hapt_arena *scratch, struct hapt_simulation **simulation)
{
    struct hapt_costs passes = *costs;
    struct hapt_schedule *copy;
    passes.step_s = passes.deferred_s = NULL;
    passes.steps = 1;
    passes.steady = false;
    HAPT_TRY(hapt_schedule_resize(schedule, microbatches, &passes, scratch, &copy));
    return hapt_simulate(copy, &passes, scratch, simulation);
}

enum hapt_status hapt_simulate_period(const struct hapt_schedule *schedule, const struct hapt_costs *costs,
                                      struct hapt_arena *scratch, double *period_s)
{
    const int B = schedule->microbatches, launches = schedule->launches[first_trained(schedule)];
    const int loop_batch =
        hapt_schedule_loop_batch(schedule->kind, B, schedule->submesh_count, schedule->options.loop_batch);
    const bool loops = hapt_schedule_loops(schedule->kind) && loop_batch < B;
    const bool all = loop_batch == B && (schedule->kind == HAPT_SCHEDULE_GPIPE || hapt_schedule_loops(schedule->kind));
    struct hapt_simulation *simulation, *longer;
    if (loops) { /* whole groups, behind the transient */
        const int half = (32 + loop_batch - 1) / loop_batch * loop_batch;
        HAPT_TRY(passes_s(schedule, costs, half, scratch, &simulation));
        HAPT_TRY(passes_s(schedule, costs, 2 * half, scratch, &longer));
        *period_s = (longer->total_s - simulation->total_s) / half;
        return HAPT_OK;
    }
    HAPT_TRY(passes_s(schedule, costs, !all && B < 32 * launches ? 32 * launches : B, scratch, &simulation));
    *period_s = simulation->period_s;
    if (all && B > 1) {
        double alone_s = 0;
        for (int chunk = 0; chunk < schedule->chunk_count; chunk++)
            alone_s += costs->forward_s[chunk] + costs->backward_s[chunk] + 2 * costs->comm_s[chunk];
        *period_s = (simulation->total_s - alone_s) / (B - 1);
    }
    return HAPT_OK;
}

/* Costs without the transfers over the boundary behind a chunk. */
static enum hapt_status without_boundary(const struct hapt_schedule *schedule, const struct hapt_costs *costs,
                                         int chunk, struct hapt_arena *arena, struct hapt_costs *changed)
{
    const struct hapt_schedule_edge *edge = schedule->edges.edge;
    double *comm_s, *edge_s = NULL;
    HAPT_NEW(comm_s, arena, schedule->chunk_count);
    for (int k = 0; k < schedule->chunk_count; k++) comm_s[k] = k == chunk ? 0 : costs->comm_s[k];
    if (costs->edge_s) HAPT_NEW(edge_s, arena, schedule->edges.count);
    for (int e = 0; edge_s && e < schedule->edges.count; e++)
        edge_s[e] =
            edge[e].from + edge[e].to == 2 * chunk + 1 && abs(edge[e].from - edge[e].to) == 1 ? 0 : costs->edge_s[e];
    *changed = *costs;
    changed->comm_s = comm_s;
    changed->edge_s = edge_s;
    return HAPT_OK;
}

enum hapt_status hapt_simulate_overlap(const struct hapt_schedule *schedule, const struct hapt_costs *costs, int chunk,
                                       struct hapt_arena *arena, double *overlap)
{
    double with_s, without_s;
    struct hapt_costs changed;
    HAPT_TRY(hapt_simulate_period(schedule, costs, arena, &with_s));
    HAPT_TRY(without_boundary(schedule, costs, chunk, arena, &changed));
    HAPT_TRY(hapt_simulate_period(schedule, &changed, arena, &without_s));
    *overlap = costs->comm_s[chunk] > 0 ? 1 - (with_s - without_s) / costs->comm_s[chunk] : 1;
    return HAPT_OK;
}
