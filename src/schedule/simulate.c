/*
 * Executes the instruction lists with clocks. Nothing is ever chosen: lists and links are served in order. So every
 * start time is a maximum over earlier ends, and the order of evaluation does not matter.
 */
#include "hapt/simulate.h"

#include <math.h>
#include <stdlib.h>

enum direction { FORWARD, BACKWARD };

/* One direction of the boundary behind a chunk. Times are NaN until known. */
struct transfer_queue {
    double cost_s;
    double *ready_s;    /* [microbatch] when the sender handed it over */
    double *arrived_s;  /* [microbatch] */
    double *consumed_s; /* [microbatch] when the receiver has computed with it: its transfer slot is free */
    int next;           /* first microbatch whose transfer is not yet timed */
    double free_s;      /* end of the previous transfer */
};

struct simulator {
    const struct hapt_schedule *schedule;
    const struct hapt_costs *costs;
    int slots;                    /* transfer slots of a queue; 0: unlimited, also without overlap */
    struct transfer_queue *queue; /* [chunk][direction] */
    int *at;                      /* [submesh] next instruction */
    double *clock_s;              /* [submesh] */
    double *exchange_s;           /* [submesh] when it reached the exchange of tied parameters; NaN before */
    double *queue_times;          /* storage of the queues' arrays */
    struct hapt_simulation *result;
};

/* fmax without its NaN handling, which costs a library call. */
static inline double later(double a_s, double b_s)
{
    return a_s > b_s ? a_s : b_s;
}

static enum hapt_status create_result(struct simulator *simulator, struct hapt_arena *arena)
{
    const struct hapt_schedule *schedule = simulator->schedule;
    const int submeshes = schedule->submesh_count;
    struct hapt_simulation *result;
    HAPT_NEW(result, arena, 1);
    HAPT_NEW(result->busy_s, arena, schedule->chunk_count);
    HAPT_NEW(result->comm_s, arena, schedule->chunk_count);
    HAPT_NEW(result->idle_s, arena, schedule->chunk_count);
    HAPT_NEW(result->peak_slots, arena, submeshes);
    HAPT_NEW(result->time, arena, submeshes);
    for (int s = 0; s < submeshes; s++) HAPT_NEW(result->time[s], arena, schedule->list[s].count);
    simulator->result = result;
    return HAPT_OK;
}

/* Four plain allocations, not an arena's blocks: sweeps call the simulator thousands of times on small pipelines. */
static enum hapt_status simulator_init(struct simulator *simulator)
{
    const struct hapt_schedule *schedule = simulator->schedule;
    const size_t queues = 2 * (size_t)schedule->chunk_count, B = (size_t)schedule->microbatches;
    const size_t submeshes = (size_t)schedule->submesh_count;
    simulator->queue = calloc(queues, sizeof *simulator->queue);
    simulator->at = calloc(submeshes, sizeof *simulator->at);
    simulator->clock_s = calloc(2 * submeshes, sizeof *simulator->clock_s);
    simulator->queue_times = malloc(queues * 3 * B * sizeof *simulator->queue_times);
    if (!simulator->queue || !simulator->at || !simulator->clock_s || !simulator->queue_times)
        return hapt_fail(HAPT_ERR_MEMORY, "plan fewer microbatches",
                         "host memory exhausted by a simulation of %d stages, %d microbatches", schedule->chunk_count,
                         schedule->microbatches);
    simulator->exchange_s = simulator->clock_s + submeshes;
    for (size_t s = 0; s < submeshes; s++) simulator->exchange_s[s] = NAN;
    for (size_t i = 0; i < queues * 3 * B; i++) simulator->queue_times[i] = NAN;
    for (size_t k = 0; k < queues; k++) {
        struct transfer_queue *queue = &simulator->queue[k];
        queue->cost_s = k / 2 + 1 < queues / 2 ? simulator->costs->comm_s[k / 2] : 0;
        queue->ready_s = simulator->queue_times + 3 * k * B;
        queue->arrived_s = queue->ready_s + B;
        queue->consumed_s = queue->arrived_s + B;
    }
    return HAPT_OK;
}

static void simulator_release(struct simulator *simulator)
{
    free(simulator->queue);
    free(simulator->at);
    free(simulator->clock_s);
    free(simulator->queue_times);
}

/* Times every transfer whose sender and transfer slot are known. */
static void advance_queue(const struct simulator *simulator, struct transfer_queue *queue)
{
    const int slots = simulator->slots, B = simulator->schedule->microbatches;
    for (; queue->next < B && !isnan(queue->ready_s[queue->next]); queue->next++) {
        double start_s = later(queue->ready_s[queue->next], queue->free_s);
        if (slots > 0 && queue->next >= slots) {
            if (isnan(queue->consumed_s[queue->next - slots])) break;
            start_s = later(start_s, queue->consumed_s[queue->next - slots]);
        }
        queue->free_s = queue->arrived_s[queue->next] = start_s + queue->cost_s;
    }
}

/* The receiver has computed with a microbatch: starts the transfer that may wait for its slot. */
static inline void consume(const struct simulator *simulator, struct transfer_queue *queue, int microbatch,
                           double clock_s)
{
    queue->consumed_s[microbatch] = clock_s;
    if (queue->next == microbatch + simulator->slots) advance_queue(simulator, queue);
}

/* Without overlap, sending blocks the sender, and blocks the receiver for as long from its request on. */
static inline bool receive(const struct simulator *simulator, const struct transfer_queue *queue, int microbatch,
                           double *clock_s)
{
    const double arrived_s = queue->arrived_s[microbatch];
    if (isnan(arrived_s)) return false;
    if (simulator->costs->blocking)
        *clock_s = later(*clock_s, arrived_s - queue->cost_s) + queue->cost_s;
    else
        *clock_s = later(*clock_s, arrived_s);
    return true;
}

static inline void send(const struct simulator *simulator, struct transfer_queue *queue, int microbatch,
                        double *clock_s)
{
    queue->ready_s[microbatch] = *clock_s;
    if (simulator->costs->blocking) *clock_s = later(*clock_s, queue->free_s) + queue->cost_s;
    advance_queue(simulator, queue);
}

/* Only the ends of the pipeline hold tied parameters: they meet here. */
static bool exchange(struct simulator *simulator, int submesh, double *clock_s)
{
    const int first = simulator->schedule->submesh_of[0];
    const int last = simulator->schedule->submesh_of[simulator->schedule->chunk_count - 1];
    if ((submesh != first && submesh != last) || first == last) return true;
    simulator->exchange_s[submesh] = *clock_s;
    const double other_s = simulator->exchange_s[submesh == first ? last : first];
    if (isnan(other_s)) return false;
    *clock_s = later(*clock_s, other_s) + simulator->costs->exchange_s;
    return true;
}

static inline void forward(const struct simulator *simulator, const struct hapt_instruction *at, double *clock_s)
{
    *clock_s += simulator->costs->forward_s[at->chunk];
    if (hapt_schedule_crosses(simulator->schedule, at->chunk - 1))
        consume(simulator, &simulator->queue[2 * (at->chunk - 1) + FORWARD], at->microbatch, *clock_s);
}

/* The gradient to be sent needs a transfer slot: the transfer `slots` microbatches before must have ended. */
static inline bool backward(const struct simulator *simulator, const struct hapt_instruction *at, double *start_s,
                            double *clock_s)
{
    const int before = at->microbatch - simulator->slots;
    if (simulator->slots > 0 && before >= 0 && hapt_schedule_crosses(simulator->schedule, at->chunk - 1)) {
        const double sent_s = simulator->queue[2 * (at->chunk - 1) + BACKWARD].arrived_s[before];
        if (isnan(sent_s)) return false;
        *start_s = later(*start_s, sent_s);
    }
    *clock_s = *start_s + simulator->costs->backward_s[at->chunk];
    if (hapt_schedule_crosses(simulator->schedule, at->chunk))
        consume(simulator, &simulator->queue[2 * at->chunk + BACKWARD], at->microbatch, *clock_s);
    return true;
}

/* Executes one instruction on the submesh's clock; false: it must wait for another list. */
static inline bool execute(struct simulator *simulator, int submesh, const struct hapt_instruction *at, double *start_s,
                           double *clock_s)
{
    const int chunk = at->chunk;
    switch (at->kind) {
    case HAPT_INSTRUCTION_RECEIVE_FORWARD:
        return receive(simulator, &simulator->queue[2 * (chunk - 1) + FORWARD], at->microbatch, clock_s);
    case HAPT_INSTRUCTION_RECEIVE_BACKWARD:
        return receive(simulator, &simulator->queue[2 * chunk + BACKWARD], at->microbatch, clock_s);
    case HAPT_INSTRUCTION_SEND_FORWARD:
        send(simulator, &simulator->queue[2 * chunk + FORWARD], at->microbatch, clock_s);
        return true;
    case HAPT_INSTRUCTION_SEND_BACKWARD:
        send(simulator, &simulator->queue[2 * (chunk - 1) + BACKWARD], at->microbatch, clock_s);
        return true;
    case HAPT_INSTRUCTION_FORWARD: forward(simulator, at, clock_s); break;
    case HAPT_INSTRUCTION_BACKWARD:
        if (!backward(simulator, at, start_s, clock_s)) return false;
        break;
    case HAPT_INSTRUCTION_EXCHANGE: return exchange(simulator, submesh, clock_s);
    case HAPT_INSTRUCTION_NORM: return true; /* the step ends when the last list ends: waiting would change nothing */
    case HAPT_INSTRUCTION_UPDATE:            /* step_s is the time of all groups */
        *clock_s += simulator->costs->step_s ? simulator->costs->step_s[chunk] / simulator->schedule->update_groups : 0;
        break;
    case HAPT_INSTRUCTION_REDUCE: break; /* its time is part of step_s */
    }
    simulator->result->busy_s[chunk] += *clock_s - *start_s;
    return true;
}

static bool advance_submesh(struct simulator *simulator, int submesh)
{
    const struct hapt_instruction_list *list = &simulator->schedule->list[submesh];
    struct hapt_simulated_instruction *time = simulator->result->time[submesh];
    const int from = simulator->at[submesh];
    double clock_s = simulator->clock_s[submesh];
    int index = from;
    for (; index < list->count; index++) {
        double start_s = clock_s, end_s = clock_s;
        if (!execute(simulator, submesh, &list->instruction[index], &start_s, &end_s)) break;
        time[index] = (struct hapt_simulated_instruction){start_s, end_s};
        clock_s = end_s;
    }
    simulator->at[submesh] = index;
    simulator->clock_s[submesh] = clock_s;
    return index > from;
}

/* Goes down and up the pipeline, as activations and gradients do. */
static enum hapt_status run(struct simulator *simulator)
{
    const struct hapt_schedule *schedule = simulator->schedule;
    for (bool moved = true; moved;) {
        moved = false;
        for (int s = 0; s < schedule->submesh_count; s++) moved |= advance_submesh(simulator, s);
        for (int s = schedule->submesh_count - 2; s >= 0; s--) moved |= advance_submesh(simulator, s);
    }
    for (int s = 0; s < schedule->submesh_count; s++)
        if (simulator->at[s] < schedule->list[s].count)
            return hapt_fail(HAPT_ERR_INTERNAL, NULL, "simulate: the instruction lists deadlock");
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

/* Seconds from one backward to the next on the first submesh while it still launches forwards. Measured over whole
 * rounds of its launch count, with which its period repeats (HAPT Lemma 2). The first half is a transient and not
 * counted. */
static double steady_period(const struct simulator *simulator, double total_s)
{
    const struct hapt_schedule *schedule = simulator->schedule;
    const int first = schedule->submesh_of[0], B = schedule->microbatches;
    const struct hapt_instruction_list *list = &schedule->list[first];
    const int launches = schedule->launches[0], last = B - 1 - launches;
    const int from_least = B / 2 < last ? B / 2 : last;
    const bool plain = schedule->submesh_count == schedule->chunk_count;
    const int rounds = plain && launches > 0 ? (last - from_least) / launches : 0;
    if (rounds < 1) return total_s / B;
    double from_s = 0, to_s = 0;
    for (int i = 0; i < list->count; i++) {
        if (list->instruction[i].kind != HAPT_INSTRUCTION_BACKWARD || list->instruction[i].chunk != 0) continue;
        if (list->instruction[i].microbatch == last - rounds * launches)
            from_s = simulator->result->time[first][i].end_s;
        if (list->instruction[i].microbatch == last) to_s = simulator->result->time[first][i].end_s;
    }
    return (to_s - from_s) / (rounds * launches);
}

static void summarize(const struct simulator *simulator)
{
    const struct hapt_schedule *schedule = simulator->schedule;
    struct hapt_simulation *result = simulator->result;
    for (int s = 0; s < schedule->submesh_count; s++) {
        result->total_s = later(result->total_s, simulator->clock_s[s]);
        result->peak_slots[s] = count_slots(&schedule->list[s]);
    }
    for (int chunk = 0; chunk < schedule->chunk_count; chunk++)
        if (hapt_schedule_crosses(schedule, chunk))
            result->comm_s[chunk] = schedule->microbatches * simulator->costs->comm_s[chunk];
    for (int chunk = 0; chunk < schedule->chunk_count; chunk++) {
        double busy_s = 0;
        for (int other = 0; other < schedule->chunk_count; other++)
            if (schedule->submesh_of[other] == schedule->submesh_of[chunk]) busy_s += result->busy_s[other];
        result->idle_s[chunk] = result->total_s - busy_s;
    }
    result->period_s = steady_period(simulator, result->total_s);
}

enum hapt_status hapt_simulate(const struct hapt_schedule *schedule, const struct hapt_costs *costs,
                               struct hapt_arena *arena, struct hapt_simulation **simulation)
{
    struct simulator simulator = {
        .schedule = schedule, .costs = costs, .slots = costs->blocking ? 0 : costs->transfer_slots};
    enum hapt_status status = create_result(&simulator, arena);
    if (status == HAPT_OK) status = simulator_init(&simulator);
    if (status == HAPT_OK) status = run(&simulator);
    if (status == HAPT_OK) {
        summarize(&simulator);
        *simulation = simulator.result;
    }
    simulator_release(&simulator);
    return status;
}

enum hapt_status hapt_simulate_period(const struct hapt_schedule *schedule, const struct hapt_costs *costs,
                                      struct hapt_arena *scratch, double *period_s)
{
    const int stages = schedule->chunk_count;
    const struct hapt_schedule_options options = {.submesh_of = schedule->submesh_of};
    struct hapt_costs passes = *costs;
    passes.step_s = NULL;
    int microbatches = schedule->microbatches;
    if (schedule->kind != HAPT_SCHEDULE_GPIPE && microbatches < 32 * schedule->launches[0])
        microbatches = 32 * schedule->launches[0];
    struct hapt_schedule *copy;
    struct hapt_simulation *simulation;
    HAPT_TRY(hapt_schedule_build(schedule->kind, stages, microbatches, schedule->launches, &options, scratch, &copy));
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
