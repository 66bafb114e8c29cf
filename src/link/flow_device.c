/*
 * Messages that devices trade among themselves; the host's short messages tell that one is on its way, and of slots
 * released as ever.
 *
 * Devices wait for each other in their queues, so what is put there must meet: a rank has at most one message to send
 * in its queue and one to receive, in two queues; the receiver puts its end there when the sender has told of its own.
 * Then a message at the head of a queue waits for no message but such as are in the receiver's queue before it, whose
 * senders wait for nothing else: there is no circle, and no device waits for what a host has yet to compute.
 */
#include <stdio.h>

#include "courier.h"

enum { SENDS, RECEIVES };

enum hapt_status meeting_prepare(struct hapt_courier *courier, struct flow *flow)
{
    const char *reason = "";
    courier->groups = courier->backend->groups(&reason);
    HAPT_ASSERT(courier->groups && courier->groups->send);
    for (int i = 0; i < flow->options.piece_count; i++)
        flow->channel[flow->piece_channel[i]].pair = flow->options.pair[i];
    for (int c = 0; c < flow->channel_count; c++)
        HAPT_NEW(flow->channel[c].block, &courier->arena, flow->channel[c].piece_count);
    return HAPT_OK;
}

static struct hapt_queue *queue_of(const struct hapt_courier *courier, int direction)
{
    return courier->backend->queue(courier->device, direction == SENDS ? HAPT_QUEUE_SEND : HAPT_QUEUE_RECEIVE);
}

/* The blocks of a message in `slot`; runs in `dense`. */
static void list_blocks(const struct flow *flow, struct channel *channel, int slot)
{
    char *dense = channel->pair.dense;
    for (int p = 0; p < channel->piece_count; p++) {
        const struct hapt_piece *piece = &channel->piece[p];
        char *base = flow->options.base[(size_t)slot * (size_t)flow->options.buffer_count + (size_t)piece->buffer];
        channel->block[p] = (struct hapt_block){piece->runs.count > 0 ? dense : base + piece->offset, piece->bytes};
        if (piece->runs.count > 0) dense += piece->bytes;
    }
}

/* Runs to `dense`, or from there. */
static const char *move_runs(const struct hapt_courier *courier, const struct flow *flow, const struct channel *channel,
                             int slot)
{
    const struct hapt_groups *groups = courier->groups;
    const char *fault = NULL;
    for (int p = 0; p < channel->piece_count && !fault; p++) {
        const struct hapt_piece *piece = &channel->piece[p];
        char *base = flow->options.base[(size_t)slot * (size_t)flow->options.buffer_count + (size_t)piece->buffer];
        if (piece->runs.count == 0) continue;
        fault = flow->options.sends
                    ? groups->pack(queue_of(courier, SENDS), &piece->runs, base, channel->block[p].data)
                    : groups->unpack(queue_of(courier, RECEIVES), &piece->runs, base, channel->block[p].data);
    }
    return fault;
}

static enum hapt_status broken(struct hapt_courier *courier, const struct flow *flow, const struct channel *channel,
                               int64_t sequence, const char *fault)
{
    const struct hapt_flow_options *options = &flow->options;
    char text[160];
    snprintf(text, sizeof text, "%s", fault);
    courier->groups->abort(channel->pair.group);
    return hapt_fail(HAPT_ERR_COMM, "look for a rank that died or hangs; NCCL_DEBUG=INFO says more of devices",
                     "stage %d: %s in: %s of step %ld, microbatch %ld, %s stage %d (rank %d on host %s)",
                     options->stage, text, options->what, (long)(options->first_step + sequence / options->per_step),
                     (long)(sequence % options->per_step), options->sends ? "to" : "from", options->peer_stage,
                     channel->peer, hapt_env_host(channel->peer));
}

/* Number of the message under way. */
static int64_t number_of(const struct flow *flow, const struct channel *channel)
{
    return flow->options.sends ? flow->started - 1 : atomic_load(&channel->received);
}

static void begin(struct hapt_courier *courier, struct flow *flow, struct channel *channel, int slot, struct pass *pass)
{
    const int direction = flow->options.sends ? SENDS : RECEIVES;
    const char *fault = NULL;
    list_blocks(flow, channel, slot);
    if (direction == SENDS) {
        fault = move_runs(courier, flow, channel, slot);
        if (!fault)
            fault = courier->groups->send(channel->pair.group, queue_of(courier, SENDS), channel->piece_count,
                                          channel->block, 1);
    } else {
        fault = courier->groups->receive(channel->pair.group, queue_of(courier, RECEIVES), channel->piece_count,
                                         channel->block, 0);
    }
    if (fault) pass->status = broken(courier, flow, channel, number_of(flow, channel), fault);
    courier->meeting[direction] = (struct meeting){flow, channel, NULL};
    pass->progress = true;
}

/* Has the flow's message met its other end, if it has one under way? */
static bool end(struct hapt_courier *courier, struct flow *flow, struct pass *pass)
{
    struct meeting *meeting = &courier->meeting[flow->options.sends ? SENDS : RECEIVES];
    struct channel *channel = meeting->channel;
    bool settled = false;
    if (meeting->flow != flow || pass->status != HAPT_OK) return false;
    pass->in_flight = true;
    const char *fault = courier->groups->settled(channel->pair.group, &settled); /* also of what is in the queue */
    if (!fault && settled && !meeting->event) {
        const int slot = (int)(number_of(flow, channel) % flow->options.slot_count);
        if (!flow->options.sends) fault = move_runs(courier, flow, channel, slot);
        meeting->event = courier->backend->record(queue_of(courier, flow->options.sends ? SENDS : RECEIVES));
    }
    if (fault) pass->status = broken(courier, flow, channel, number_of(flow, channel), fault);
    if (fault || !meeting->event || !courier->backend->done(meeting->event)) return false;
    pass->status = courier->backend->wait(meeting->event); /* it is past: how it went */
    if (pass->status != HAPT_OK) return false;
    meeting->flow = NULL;
    pass->progress = true;
    return true;
}

/* The word of a message: true when none is under way. */
static bool test_word(struct hapt_courier *courier, struct channel *channel, struct pass *pass)
{
    bool done = false;
    if (!channel->word_in_flight || pass->status != HAPT_OK) return !channel->word_in_flight;
    pass->status = courier->transfer->test(courier->context, &channel->word, &done);
    channel->word_in_flight = !done;
    if (!done) pass->in_flight = true;
    return pass->status == HAPT_OK && done;
}

static int word_tag(const struct flow *flow)
{
    return 2 * flow->options.tag;
}

void meeting_advance_sender(struct hapt_courier *courier, struct flow *flow, struct pass *pass)
{
    if (end(courier, flow, pass) && ++flow->met == flow->channel_count) {
        flow->met = 0;
        flow->under_way = false;
        flow_count_sent(flow, flow->start_s, hapt_time_s(), pass);
    }
    flow_hear_credits(courier, flow, pass);
    if (pass->status == HAPT_OK && !courier->meeting[SENDS].flow && flow_start_message(courier, flow, pass)) {
        struct channel *channel = &flow->channel[flow->met];
        if (test_word(courier, channel, pass))
            begin(courier, flow, channel, flow->queue_slot[(flow->started - 1) % flow->options.slot_count], pass);
        if (pass->status == HAPT_OK && courier->meeting[SENDS].flow) {
            pass->status =
                courier->transfer->send(courier->context, NULL, 0, channel->peer, word_tag(flow), &channel->word);
            channel->word_in_flight = true;
        }
    }
    for (int c = 0; c < flow->channel_count; c++)
        if (!test_word(courier, &flow->channel[c], pass)) pass->unfinished = true;
    flow_judge_sender(flow, pass);
}

/* Hears of messages that are on their way, as long as there are slots for them. */
static void hear(struct hapt_courier *courier, const struct flow *flow, struct channel *channel, struct pass *pass)
{
    const int64_t expected = atomic_load(&flow->expected),
                  allowed = atomic_load(&flow->freed) + flow->options.peer_slots;
    if (channel->word_in_flight && test_word(courier, channel, pass)) {
        channel->heard++;
        pass->progress = true;
    }
    if (pass->status != HAPT_OK || channel->word_in_flight || channel->heard >= expected || channel->heard >= allowed)
        return;
    pass->status = courier->transfer->receive(courier->context, NULL, 0, channel->peer, word_tag(flow), &channel->word);
    channel->word_in_flight = pass->status == HAPT_OK;
    pass->in_flight = pass->progress = true;
}

void meeting_advance_receiver(struct hapt_courier *courier, struct flow *flow, struct pass *pass)
{
    const int64_t expected = atomic_load(&flow->expected);
    struct channel *met = courier->meeting[RECEIVES].channel;
    if (end(courier, flow, pass)) {
        flow_keep_time(flow, atomic_load(&met->received), hapt_time_s());
        atomic_fetch_add(&met->received, 1);
        pass->news = true;
    }
    for (int c = 0; c < flow->channel_count && pass->status == HAPT_OK; c++) {
        struct channel *channel = &flow->channel[c];
        const int64_t received = atomic_load(&channel->received);
        hear(courier, flow, channel, pass);
        if (pass->status == HAPT_OK && !courier->meeting[RECEIVES].flow && channel->heard > received)
            begin(courier, flow, channel, (int)(received % flow->options.peer_slots), pass);
        flow_tell_credits(courier, flow, channel, pass);
        if (channel->credit_in_flight) pass->in_flight = true;
        if (received < expected || channel->credited < expected || channel->credit_in_flight) pass->unfinished = true;
    }
}
