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

/* The time of REDUCE is part of UPDATE's, and NORM takes none: src/schedule/simulate.c. */
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

/* The channel of a chunk's incoming or outgoing messages; NULL: nothing crosses there. */
static const struct emit_channel *channel_of(const struct emit_step *step, int chunk, enum emit_direction direction,
                                             bool incoming)
{
    const int boundary = (direction == EMIT_FORWARD) == incoming ? chunk - 1 : chunk;
    if (!hapt_schedule_crosses(step->schedule, boundary)) return NULL;
    const struct emit_channel *channel = &step->channel[EMIT_DIRECTIONS * boundary + (int)direction];
    return channel->from < 0 ? NULL : channel; /* no gradients go to forward-only chunks */
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

static void compute(struct walk *walk, const struct action *action, const struct hapt_instruction *at)
{
    const struct emit_step *step = walk->trace->step;
    const int slots = step->costs.transfer_slots, B = step->schedule->microbatches;
    const struct emit_channel *gradient = channel_of(step, at->chunk, EMIT_BACKWARD, false);
    const struct emit_channel *activations = channel_of(step, at->chunk, EMIT_FORWARD, false);
    /* a forward-only chunk takes a slot again when its activations have left */
    if (step->schedule->forward_only[at->chunk] && activations && at->microbatch >= 0)
        wait_sent(walk, activations, at->microbatch - step->schedule->launches[at->chunk] + 1);
    if (action->gives_backward && activations) wait_sent(walk, activations, at->microbatch + 1);
    if (action->gives_backward && gradient && slots > 0) wait_sent(walk, gradient, at->microbatch - slots + 1);
    walk->functions->compute(walk->trace, action->name, at, action->time_s(step, at->chunk));
    for (int d = 0; d < EMIT_DIRECTIONS; d++) {
        const struct emit_channel *taken = channel_of(step, at->chunk, (enum emit_direction)d, true);
        if (action->takes[d] && taken && slots > 0 && at->microbatch + slots < B)
            walk->functions->post(walk->trace, taken, at->microbatch + slots);
    }
}

/* Only the ends of the pipeline hold tied parameters. Each sends its gradients to the other. */
static void exchange(struct walk *walk)
{
    const struct emit_step *step = walk->trace->step;
    const struct emit_channel *channel = &step->channel[EMIT_DIRECTIONS * step->schedule->chunk_count];
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
    const struct emit_step *step = walk->trace->step;
    switch (action->does) {
    case NOTHING: break;
    case RECEIVE:
        walk->functions->receive(walk->trace, channel_of(step, at->chunk, action->direction, true), at->microbatch);
        break;
    case COMPUTE: compute(walk, action, at); break;
    case SEND: send(walk, channel_of(step, at->chunk, action->direction, false), at->microbatch); break;
    case EXCHANGE: exchange(walk); break;
    }
}

/* Receives for which transfer slots are free at the start. */
static void post_first(struct walk *walk)
{
    const struct emit_step *step = walk->trace->step;
    const int slots = step->costs.transfer_slots, B = step->schedule->microbatches;
    for (int c = 0; c < EMIT_DIRECTIONS * step->schedule->chunk_count; c++)
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
