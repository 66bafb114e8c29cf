/* Walks the instruction list of a submesh. In: the list and the costs. Out: calls of a format's functions. */
#include "emit.h"

/* The role of an instruction in a trace. A new kind of computation is one more row with its time. */
struct action {
    enum { NOTHING, RECEIVE, COMPUTE, SEND, EXCHANGE } does;
    enum emit_direction direction; /* of RECEIVE and SEND */
    const char *name;              /* of COMPUTE */
    double (*time_s)(const struct emit_step *step, int chunk);
    bool takes[EMIT_DIRECTIONS]; /* messages whose transfer slots are free when it has ended */
    bool gives_backward; /* it fills the transfer slot of an outgoing gradient, from the activations of a slot */
};

static double forward_s(const struct emit_step *step, int chunk)
{
    return step->costs.forward_s[chunk];
}

static double backward_s(const struct emit_step *step, int chunk)
{
    return step->costs.backward_s[chunk];
}

static double weight_s(const struct emit_step *step, int chunk)
{
    return step->costs.weight_s ? step->costs.weight_s[chunk] : 0;
}

static double update_s(const struct emit_step *step, int chunk)
{
    return step->costs.step_s ? step->costs.step_s[chunk] / step->schedule->update_groups : 0;
}

/* The time of REDUCE is part of UPDATE's, and NORM takes none: src/schedule/simulate.c. A trace does not contain the
 * agreement of plans with the optimizer state on hosts (hapt_costs.agrees), and has their updates in order. */
static const struct action action_of[] = {
    [HAPT_INSTRUCTION_RECEIVE_FORWARD] = {.does = RECEIVE, .direction = EMIT_FORWARD},
    [HAPT_INSTRUCTION_FORWARD] = {.does = COMPUTE,
                                  .name = "forward",
                                  .time_s = forward_s,
                                  .takes = {[EMIT_FORWARD] = true}},
    [HAPT_INSTRUCTION_SEND_FORWARD] = {.does = SEND, .direction = EMIT_FORWARD},
    [HAPT_INSTRUCTION_RECEIVE_BACKWARD] = {.does = RECEIVE, .direction = EMIT_BACKWARD},
    [HAPT_INSTRUCTION_BACKWARD] = {.does = COMPUTE,
                                   .name = "backward",
                                   .time_s = backward_s,
                                   .takes = {[EMIT_BACKWARD] = true},
                                   .gives_backward = true},
    [HAPT_INSTRUCTION_SEND_BACKWARD] = {.does = SEND, .direction = EMIT_BACKWARD},
    [HAPT_INSTRUCTION_WEIGHT] = {.does = COMPUTE, .name = "weight", .time_s = weight_s},
    [HAPT_INSTRUCTION_REDUCE] = {.does = NOTHING},
    [HAPT_INSTRUCTION_EXCHANGE] = {.does = EXCHANGE},
    [HAPT_INSTRUCTION_NORM] = {.does = NOTHING},
    [HAPT_INSTRUCTION_UPDATE] = {.does = COMPUTE, .name = "update", .time_s = update_s},
};

struct walk {
    const struct emit_functions *functions;
    struct emit_trace *trace;
    int *waited; /* [channel_count] sends that were waited for */
    int *sent;   /* [channel_count] */
};

/* The k-th channel of a chunk's incoming or outgoing messages; NULL: it has fewer. One that stays on a submesh has
 * from = -1. */
static const struct emit_channel *channel_of(const struct emit_step *step, int chunk, enum emit_direction direction,
                                             bool incoming, int k)
{
    const struct hapt_schedule_edges *edges = &step->schedule->edges;
    const int row = (int)direction * step->schedule->chunk_count + chunk;
    const int *const start = incoming ? edges->in_start : edges->out_start;
    const int at = start[row] + k;
    if (at >= start[row + 1]) return NULL;
    return &step->channel[incoming ? edges->in[at] : at];
}

/* Waits for the sends of a channel up to `end`. */
static void wait_sent(struct walk *walk, const struct emit_channel *channel, int end)
{
    for (int *at = &walk->waited[channel->index]; *at < end; (*at)++) walk->functions->sent(walk->trace, channel, *at);
}

static void send(struct walk *walk, const struct emit_channel *channel, int at)
{
    walk->functions->send(walk->trace, channel, at);
    walk->sent[channel->index]++;
}

static void wait_all_sent(struct walk *walk, int chunk, enum emit_direction direction, int end)
{
    const struct emit_channel *channel;
    for (int k = 0; (channel = channel_of(walk->trace->step, chunk, direction, false, k)); k++)
        if (channel->from >= 0) wait_sent(walk, channel, end);
}

/* Is a message passed on? Then its slot is free when that has been sent. */
static bool is_passed_on(const struct emit_step *step, const struct emit_channel *channel)
{
    const struct hapt_schedule_edges *edges = &step->schedule->edges;
    return edges->next_start && edges->next_start[channel->index] < edges->next_start[channel->index + 1];
}

/* Behind the sends of a microbatch: receives in the slots from which it was passed on. */
static void post_behind_sends(struct walk *walk, int chunk, int microbatch)
{
    const struct emit_step *step = walk->trace->step;
    const struct hapt_schedule_edges *edges = &step->schedule->edges;
    const int at = microbatch + step->costs.transfer_slots;
    const struct emit_channel *taken;
    if (step->costs.transfer_slots == 0 || at >= step->schedule->microbatches) return;
    for (int k = 0; (taken = channel_of(step, chunk, EMIT_FORWARD, true, k)); k++) {
        if (taken->from < 0 || !is_passed_on(step, taken)) continue;
        for (int e = edges->next_start[taken->index]; e < edges->next_start[taken->index + 1]; e++)
            if (walk->functions->passes_on)
                walk->functions->passes_on(walk->trace, &step->channel[edges->next[e]], microbatch);
        walk->functions->post(walk->trace, taken, at);
    }
}

static void compute(struct walk *walk, const struct action *action, const struct hapt_instruction *at)
{
    const struct emit_step *step = walk->trace->step;
    const int slots = step->costs.transfer_slots, B = step->schedule->microbatches;
    const struct emit_channel *taken;
    /* a forward-only chunk takes a slot again when its activations have left */
    if (step->schedule->forward_only[at->chunk] && at->microbatch >= 0)
        wait_all_sent(walk, at->chunk, EMIT_FORWARD, at->microbatch - step->schedule->launches[at->chunk] + 1);
    if (action->gives_backward) wait_all_sent(walk, at->chunk, EMIT_FORWARD, at->microbatch + 1);
    if (action->gives_backward && slots > 0) wait_all_sent(walk, at->chunk, EMIT_BACKWARD, at->microbatch - slots + 1);
    walk->functions->compute(walk->trace, action->name, at, action->time_s(step, at->chunk));
    for (int d = 0; d < EMIT_DIRECTIONS; d++)
        for (int k = 0; (taken = channel_of(step, at->chunk, (enum emit_direction)d, true, k)); k++)
            if (action->takes[d] && taken->from >= 0 && !is_passed_on(step, taken) && slots > 0 &&
                at->microbatch + slots < B)
                walk->functions->post(walk->trace, taken, at->microbatch + slots);
}

/* Only the ends of the pipeline hold tied parameters. Each sends its gradients to the other. */
static void exchange(struct walk *walk)
{
    const struct emit_step *step = walk->trace->step;
    const struct emit_channel *channel = &step->channel[step->schedule->edges.count];
    const int submesh = walk->trace->submesh;
    if (channel->from < 0 || (submesh != channel->from && submesh != channel->to)) return;
    const struct emit_channel *out = submesh == channel->from ? channel : channel + 1;
    const struct emit_channel *in = submesh == channel->from ? channel + 1 : channel;
    walk->functions->post(walk->trace, in, 0);
    send(walk, out, 0);
    walk->functions->receive(walk->trace, in, 0);
    wait_sent(walk, out, 1);
}

static void take(struct walk *walk, const struct hapt_instruction *at)
{
    HAPT_ASSERT((size_t)at->kind < sizeof action_of / sizeof *action_of);
    const struct action *action = &action_of[at->kind];
    const bool receives = action->does == RECEIVE;
    const struct emit_channel *channel;
    switch (action->does) {
    case NOTHING: break;
    case COMPUTE: compute(walk, action, at); break;
    case EXCHANGE: exchange(walk); break;
    case RECEIVE:
    case SEND:
        for (int k = 0; (channel = channel_of(walk->trace->step, at->chunk, action->direction, receives, k)); k++) {
            if (channel->from < 0) continue;
            if (receives)
                walk->functions->receive(walk->trace, channel, at->microbatch);
            else
                send(walk, channel, at->microbatch);
        }
        if (action->does == SEND && action->direction == EMIT_FORWARD)
            post_behind_sends(walk, at->chunk, at->microbatch);
        break;
    }
}

/* Receives for which transfer slots are free at the start. */
static void post_first(struct walk *walk)
{
    const struct emit_step *step = walk->trace->step;
    const int slots = step->costs.transfer_slots, B = step->schedule->microbatches;
    for (int c = 0; c < step->schedule->edges.count; c++)
        for (int at = 0; step->channel[c].from >= 0 && step->channel[c].to == walk->trace->submesh &&
                         at < (slots > 0 && slots < B ? slots : B);
             at++)
            walk->functions->post(walk->trace, &step->channel[c], at);
}

enum hapt_status emit_walk(const struct emit_functions *functions, struct emit_trace *trace, struct hapt_arena *arena)
{
    const struct emit_step *step = trace->step;
    const struct hapt_instruction_list *list = &step->schedule->list[trace->submesh];
    struct walk walk = {.functions = functions, .trace = trace};
    HAPT_NEW(walk.waited, arena, step->channel_count);
    HAPT_NEW(walk.sent, arena, step->channel_count);
    HAPT_TRY(functions->begin(trace, arena));
    post_first(&walk);
    for (int i = 0; i < list->count; i++) take(&walk, &list->instruction[i]);
    for (int c = 0; functions->waits_at_end && c < step->channel_count; c++)
        if (walk.sent[c] > 0) wait_sent(&walk, &step->channel[c], walk.sent[c]);
    functions->end(trace);
    return HAPT_OK;
}
