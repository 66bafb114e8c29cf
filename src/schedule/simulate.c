/*
 * The lists are played with clocks. Nothing is ever chosen: lists and links are served in order, so every start time is
 * a maximum over earlier ends and the order in which we find them does not matter.
 */
#include "hapt/simulate.h"

#include <math.h>
#include <stdlib.h>

enum direction { FORWARD, BACKWARD };

/* One direction of the boundary behind a chunk. Times are NaN until known. */
struct lane {
    double cost_s;
    double *ready_s;    /* [microbatch] the sender handed it over */
    double *arrived_s;  /* [microbatch] */
    double *consumed_s; /* [microbatch] the receiver has computed with it: its transfer slot is free */
    int next;           /* first microbatch whose transfer is not yet timed */
    double free_s;      /* end of the transfer before */
};

struct player {
    const struct hapt_schedule *schedule;
    const struct hapt_costs *costs;
    int slots;          /* of a lane; 0: unlimited, as without overlap, where the receiver takes what is sent */
    struct lane *lane;  /* [chunk][direction] */
    int *at;            /* [submesh] next instruction */
    double *clock_s;    /* [submesh] */
    double *exchange_s; /* [submesh] reached the exchange of tied parameters; NaN before */
    double *lane_times; /* storage of the lanes' arrays */
    struct hapt_simulation *result;
};

/* fmax without its care for NaN, which costs a library call. */
static inline double later(double a_s, double b_s)
{
    return a_s > b_s ? a_s : b_s;
}

static enum hapt_status create_result(struct player *player, struct hapt_arena *arena)
{
    const struct hapt_schedule *schedule = player->schedule;
    const int submeshes = schedule->submesh_count;
    struct hapt_simulation *result;
    HAPT_NEW(result, arena, 1);
    HAPT_NEW(result->busy_s, arena, submeshes);
    HAPT_NEW(result->comm_s, arena, submeshes);
    HAPT_NEW(result->idle_s, arena, submeshes);
    HAPT_NEW(result->peak_slots, arena, submeshes);
    HAPT_NEW(result->time, arena, submeshes);
    for (int s = 0; s < submeshes; s++) HAPT_NEW(result->time[s], arena, schedule->list[s].count);
    player->result = result;
    return HAPT_OK;
}

/* Sweeps call the simulator thousands of times on small pipelines: its own memory is four plain allocations, not an
 * arena's blocks. */
static enum hapt_status player_init(struct player *player)
{
    const struct hapt_schedule *schedule = player->schedule;
    const size_t lanes = 2 * (size_t)schedule->chunk_count, B = (size_t)schedule->microbatches;
    const size_t submeshes = (size_t)schedule->submesh_count;
    player->lane = calloc(lanes, sizeof *player->lane);
    player->at = calloc(submeshes, sizeof *player->at);
    player->clock_s = calloc(2 * submeshes, sizeof *player->clock_s);
    player->lane_times = malloc(lanes * 3 * B * sizeof *player->lane_times);
    if (!player->lane || !player->at || !player->clock_s || !player->lane_times)
        return hapt_fail(HAPT_ERR_MEMORY, "plan fewer microbatches",
                         "host memory exhausted by a simulation of %d stages, %d microbatches", schedule->chunk_count,
                         schedule->microbatches);
    player->exchange_s = player->clock_s + submeshes;
    for (size_t s = 0; s < submeshes; s++) player->exchange_s[s] = NAN;
    for (size_t i = 0; i < lanes * 3 * B; i++) player->lane_times[i] = NAN;
    for (size_t k = 0; k < lanes; k++) {
        struct lane *lane = &player->lane[k];
        lane->cost_s = k / 2 + 1 < lanes / 2 ? player->costs->comm_s[k / 2] : 0;
        lane->ready_s = player->lane_times + 3 * k * B;
        lane->arrived_s = lane->ready_s + B;
        lane->consumed_s = lane->arrived_s + B;
    }
    return HAPT_OK;
}

static void player_release(struct player *player)
{
    free(player->lane);
    free(player->at);
    free(player->clock_s);
    free(player->lane_times);
}

/* Times every transfer whose sender and whose transfer slot are known. */
static void advance_lane(const struct player *player, struct lane *lane)
{
    const int slots = player->slots, B = player->schedule->microbatches;
    for (; lane->next < B && !isnan(lane->ready_s[lane->next]); lane->next++) {
        double start_s = later(lane->ready_s[lane->next], lane->free_s);
        if (slots > 0 && lane->next >= slots) {
            if (isnan(lane->consumed_s[lane->next - slots])) break;
            start_s = later(start_s, lane->consumed_s[lane->next - slots]);
        }
        lane->free_s = lane->arrived_s[lane->next] = start_s + lane->cost_s;
    }
}

/* The receiver has computed with a microbatch: a transfer may have waited for its slot. */
static inline void consume(const struct player *player, struct lane *lane, int microbatch, double clock_s)
{
    lane->consumed_s[microbatch] = clock_s;
    if (lane->next == microbatch + player->slots) advance_lane(player, lane);
}

/* Without overlap the sender stands still while it sends, and the receiver for as long from when it asks. */
static inline bool receive(const struct player *player, const struct lane *lane, int microbatch, double *clock_s)
{
    const double arrived_s = lane->arrived_s[microbatch];
    if (isnan(arrived_s)) return false;
    if (player->costs->blocking)
        *clock_s = later(*clock_s, arrived_s - lane->cost_s) + lane->cost_s;
    else
        *clock_s = later(*clock_s, arrived_s);
    return true;
}

static inline void send(const struct player *player, struct lane *lane, int microbatch, double *clock_s)
{
    lane->ready_s[microbatch] = *clock_s;
    if (player->costs->blocking) *clock_s = later(*clock_s, lane->free_s) + lane->cost_s;
    advance_lane(player, lane);
}

/* The ends of the pipeline hold the tied parameters and meet here; the others pass by. */
static bool exchange(struct player *player, int submesh, double *clock_s)
{
    const int first = player->schedule->submesh_of[0];
    const int last = player->schedule->submesh_of[player->schedule->chunk_count - 1];
    if (submesh != first && submesh != last) return true;
    player->exchange_s[submesh] = *clock_s;
    const double other_s = player->exchange_s[submesh == first ? last : first];
    if (isnan(other_s)) return false;
    *clock_s = later(*clock_s, other_s) + player->costs->exchange_s;
    return true;
}

static inline void forward(const struct player *player, const struct hapt_instruction *at, double *clock_s)
{
    *clock_s += player->costs->forward_s[at->chunk];
    if (at->chunk > 0) consume(player, &player->lane[2 * (at->chunk - 1) + FORWARD], at->microbatch, *clock_s);
}

/* The gradient it makes needs a transfer slot of its own: the one whose transfer is over. */
static inline bool backward(const struct player *player, const struct hapt_instruction *at, double *start_s,
                            double *clock_s)
{
    const int before = at->microbatch - player->slots;
    if (at->chunk > 0 && player->slots > 0 && before >= 0) {
        const double sent_s = player->lane[2 * (at->chunk - 1) + BACKWARD].arrived_s[before];
        if (isnan(sent_s)) return false;
        *start_s = later(*start_s, sent_s);
    }
    *clock_s = *start_s + player->costs->backward_s[at->chunk];
    consume(player, &player->lane[2 * at->chunk + BACKWARD], at->microbatch, *clock_s);
    return true;
}

/* Executes one instruction on the submesh's clock; false when it must wait for another list. `busy_s` grows by what it
 * computes. */
static inline bool execute(struct player *player, int submesh, const struct hapt_instruction *at, double *start_s,
                           double *clock_s, double *busy_s)
{
    const int chunk = at->chunk;
    switch (at->kind) {
    case HAPT_INSTRUCTION_RECEIVE_FORWARD:
        return receive(player, &player->lane[2 * (chunk - 1) + FORWARD], at->microbatch, clock_s);
    case HAPT_INSTRUCTION_RECEIVE_BACKWARD:
        return receive(player, &player->lane[2 * chunk + BACKWARD], at->microbatch, clock_s);
    case HAPT_INSTRUCTION_SEND_FORWARD:
        send(player, &player->lane[2 * chunk + FORWARD], at->microbatch, clock_s);
        return true;
    case HAPT_INSTRUCTION_SEND_BACKWARD:
        send(player, &player->lane[2 * (chunk - 1) + BACKWARD], at->microbatch, clock_s);
        return true;
    case HAPT_INSTRUCTION_FORWARD: forward(player, at, clock_s); break;
    case HAPT_INSTRUCTION_BACKWARD:
        if (!backward(player, at, start_s, clock_s)) return false;
        break;
    case HAPT_INSTRUCTION_EXCHANGE: return exchange(player, submesh, clock_s);
    case HAPT_INSTRUCTION_UPDATE: *clock_s += player->costs->step_s ? player->costs->step_s[chunk] : 0; break;
    case HAPT_INSTRUCTION_REDUCE: /* its time is part of step_s */ break;
    }
    *busy_s += *clock_s - *start_s;
    return true;
}

static bool advance_submesh(struct player *player, int submesh)
{
    const struct hapt_instruction_list *list = &player->schedule->list[submesh];
    struct hapt_simulated_instruction *time = player->result->time[submesh];
    const int from = player->at[submesh];
    double clock_s = player->clock_s[submesh], busy_s = player->result->busy_s[submesh];
    int index = from;
    for (; index < list->count; index++) {
        double start_s = clock_s, end_s = clock_s;
        if (!execute(player, submesh, &list->instruction[index], &start_s, &end_s, &busy_s)) break;
        time[index] = (struct hapt_simulated_instruction){start_s, end_s};
        clock_s = end_s;
    }
    player->at[submesh] = index;
    player->clock_s[submesh] = clock_s;
    player->result->busy_s[submesh] = busy_s;
    return index > from;
}

/* Down and up the pipeline, as activations and gradients go. */
static enum hapt_status play(struct player *player)
{
    const struct hapt_schedule *schedule = player->schedule;
    for (bool moved = true; moved;) {
        moved = false;
        for (int s = 0; s < schedule->submesh_count; s++) moved |= advance_submesh(player, s);
        for (int s = schedule->submesh_count - 2; s >= 0; s--) moved |= advance_submesh(player, s);
    }
    for (int s = 0; s < schedule->submesh_count; s++)
        if (player->at[s] < schedule->list[s].count)
            return hapt_fail(HAPT_ERR_INTERNAL, NULL, "simulate: the instruction lists wait for each other");
    return HAPT_OK;
}

static int count_slots(const struct hapt_instruction_list *list)
{
    int open = 0, most = 0;
    for (int i = 0; i < list->count; i++) {
        if (list->instruction[i].kind == HAPT_INSTRUCTION_FORWARD && ++open > most) most = open;
        if (list->instruction[i].kind == HAPT_INSTRUCTION_BACKWARD) open--;
    }
    return most;
}

/* Seconds from one backward pass to the next on the first submesh while it still launches forwards, over whole rounds
 * of its launch count: its period repeats with them (HAPT Lemma 2). The first half is left to settle. */
static double steady_period(const struct player *player, double total_s)
{
    const struct hapt_schedule *schedule = player->schedule;
    const int first = schedule->submesh_of[0], B = schedule->microbatches;
    const struct hapt_instruction_list *list = &schedule->list[first];
    const int launches = list->slots, last = B - 1 - launches;
    const int from_least = B / 2 < last ? B / 2 : last;
    const int rounds = launches > 0 ? (last - from_least) / launches : 0;
    if (rounds < 1) return total_s / B;
    double from_s = 0, to_s = 0;
    for (int i = 0; i < list->count; i++) {
        if (list->instruction[i].kind != HAPT_INSTRUCTION_BACKWARD || list->instruction[i].chunk != 0) continue;
        if (list->instruction[i].microbatch == last - rounds * launches) from_s = player->result->time[first][i].end_s;
        if (list->instruction[i].microbatch == last) to_s = player->result->time[first][i].end_s;
    }
    return (to_s - from_s) / (rounds * launches);
}

static void summarize(const struct player *player)
{
    const struct hapt_schedule *schedule = player->schedule;
    struct hapt_simulation *result = player->result;
    for (int s = 0; s < schedule->submesh_count; s++) {
        result->total_s = later(result->total_s, player->clock_s[s]);
        result->peak_slots[s] = count_slots(&schedule->list[s]);
    }
    for (int chunk = 0; chunk < schedule->chunk_count - 1; chunk++)
        result->comm_s[schedule->submesh_of[chunk]] += schedule->microbatches * player->costs->comm_s[chunk];
    for (int s = 0; s < schedule->submesh_count; s++) result->idle_s[s] = result->total_s - result->busy_s[s];
    result->period_s = steady_period(player, result->total_s);
}

enum hapt_status hapt_simulate(const struct hapt_schedule *schedule, const struct hapt_costs *costs,
                               struct hapt_arena *arena, struct hapt_simulation **simulation)
{
    struct player player = {.schedule = schedule, .costs = costs, .slots = costs->blocking ? 0 : costs->transfer_slots};
    enum hapt_status status = create_result(&player, arena);
    if (status == HAPT_OK) status = player_init(&player);
    if (status == HAPT_OK) status = play(&player);
    if (status == HAPT_OK) {
        summarize(&player);
        *simulation = player.result;
    }
    player_release(&player);
    return status;
}

enum hapt_status hapt_simulate_period(const struct hapt_schedule *schedule, const struct hapt_costs *costs,
                                      struct hapt_arena *scratch, double *period_s)
{
    const int stages = schedule->chunk_count;
    struct hapt_costs passes = *costs;
    passes.step_s = NULL;
    for (int k = 0; k < stages; k++) HAPT_ASSERT(schedule->submesh_of[k] == k);
    int *warmup, microbatches = schedule->microbatches;
    HAPT_NEW(warmup, scratch, stages);
    for (int stage = 0; stage < stages; stage++) warmup[stage] = schedule->list[schedule->submesh_of[stage]].slots;
    if (schedule->kind != HAPT_SCHEDULE_GPIPE && microbatches < 32 * warmup[0]) microbatches = 32 * warmup[0];
    struct hapt_schedule *copy;
    struct hapt_simulation *simulation;
    HAPT_TRY(hapt_schedule_build(schedule->kind, stages, microbatches, warmup, false, scratch, &copy));
    HAPT_TRY(hapt_simulate(copy, &passes, scratch, &simulation));
    *period_s = simulation->period_s;
    if (schedule->kind == HAPT_SCHEDULE_GPIPE && microbatches > 1) {
        double alone_s = 0;
        for (int stage = 0; stage < stages; stage++)
            alone_s += costs->forward_s[stage] + costs->backward_s[stage] + 2 * costs->comm_s[stage];
        *period_s = (simulation->total_s - alone_s) / (microbatches - 1);
    }
    return HAPT_OK;
}

enum hapt_status hapt_simulate_overlap(const struct hapt_schedule *schedule, const struct hapt_costs *costs, int chunk,
                                       struct hapt_arena *arena, double *overlap)
{
    double *comm_s, with_s, without_s;
    struct hapt_costs changed = *costs;
    HAPT_TRY(hapt_simulate_period(schedule, &changed, arena, &with_s));
    HAPT_NEW(comm_s, arena, schedule->chunk_count);
    for (int k = 0; k < schedule->chunk_count; k++) comm_s[k] = k == chunk ? 0 : costs->comm_s[k];
    changed.comm_s = comm_s;
    HAPT_TRY(hapt_simulate_period(schedule, &changed, arena, &without_s));
    *overlap = costs->comm_s[chunk] > 0 ? 1 - (with_s - without_s) / costs->comm_s[chunk] : 1;
    return HAPT_OK;
}
