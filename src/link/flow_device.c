/*
 * Messages exchanged directly between devices. Short host messages announce each one and, as in other flows, release
 * slots.
 *
 * Devices wait for each other inside their queues, so queued operations must match. A rank queues at most one message
 * to send and one to receive, in two queues. The receiver queues its end after the sender has announced its own. Then
 * the first message of a queue waits only for messages ahead of it in the receiver's queue, whose senders wait for
 * nothing else. So there is no cycle, and no device waits for work that a host has not queued yet.
 */
#include <stdio.h>

#include "comm_thread.h"

enum { SENDS, RECEIVES };

enum hapt_status device_flow_prepare(struct hapt_comm_thread *comm_thread, struct flow *flow)
{
    const char *reason = "";
    comm_thread->groups = comm_thread->backend->device_comms(&reason);
    HAPT_ASSERT(comm_thread->groups && comm_thread->groups->send);
    for (int i = 0; i < flow->options.piece_count; i++)
        flow->channel[flow->piece_channel[i]].pair = flow->options.pair[i];
    for (int c = 0; c < flow->channel_count; c++)
        HAPT_NEW(flow->channel[c].block, &comm_thread->arena, flow->channel[c].piece_count);
    return HAPT_OK;
}

static struct hapt_queue *queue_of(const struct hapt_comm_thread *comm_thread, int direction)
{
    return comm_thread->backend->queue(comm_thread->device, direction == SENDS ? HAPT_QUEUE_SEND : HAPT_QUEUE_RECEIVE);
}

/* Lists the blocks of a message in `slot`; runs are in `dense`. */
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

/* Packs runs to `dense`, or unpacks them. */
static const char *move_runs(const struct hapt_comm_thread *comm_thread, const struct flow *flow,
                             const struct channel *channel, int slot)
{
    const struct hapt_device_comm_ops *groups = comm_thread->groups;
    const char *fault = NULL;
    for (int p = 0; p < channel->piece_count && !fault; p++) {
        const struct hapt_piece *piece = &channel->piece[p];
        char *base = flow->options.base[(size_t)slot * (size_t)flow->options.buffer_count + (size_t)piece->buffer];
        if (piece->runs.count == 0) continue;
        fault = flow->options.sends
                    ? groups->pack(queue_of(comm_thread, SENDS), &piece->runs, base, channel->block[p].data)
                    : groups->unpack(queue_of(comm_thread, RECEIVES), &piece->runs, base, channel->block[p].data);
    }
    return fault;
}

static enum hapt_status broken(struct hapt_comm_thread *comm_thread, const struct flow *flow,
                               const struct channel *channel, int64_t sequence, const char *fault)
{
    const struct hapt_flow_options *options = &flow->options;
    char text[160];
    snprintf(text, sizeof text, "%s", fault);
    comm_thread->groups->abort(channel->pair.group);
    return hapt_fail(HAPT_ERR_COMM, "look for a rank that died or hangs; NCCL_DEBUG=INFO shows what the devices do",
                     "stage %d: %s in: %s of step %ld, microbatch %ld, %s stage %d (rank %d on host %s)",
                     options->stage, text, options->what, (long)(options->first_step + sequence / options->per_step),
                     (long)(sequence % options->per_step), options->sends ? "to" : "from", options->peer_stage,
                     channel->peer, hapt_env_host(channel->peer));
}

/* Sequence of the current message. */
static int64_t number_of(const struct flow *flow, const struct channel *channel)
{
    return flow->options.sends ? flow->started - 1 : atomic_load(&channel->received);
}

static void begin(struct hapt_comm_thread *comm_thread, struct flow *flow, struct channel *channel, int slot,
                  struct poll_result *result)
{
    const int direction = flow->options.sends ? SENDS : RECEIVES;
    const char *fault = NULL;
    list_blocks(flow, channel, slot);
    if (direction == SENDS) {
        fault = move_runs(comm_thread, flow, channel, slot);
        if (!fault)
            fault = comm_thread->groups->send(channel->pair.group, queue_of(comm_thread, SENDS), channel->piece_count,
                                              channel->block, 1);
    } else {
        fault = comm_thread->groups->receive(channel->pair.group, queue_of(comm_thread, RECEIVES), channel->piece_count,
                                             channel->block, 0);
    }
    if (fault) result->status = broken(comm_thread, flow, channel, number_of(flow, channel), fault);
    comm_thread->device_transfer[direction] = (struct device_transfer){flow, channel, NULL};
    result->progress = true;
}

/* True if the flow's current message has completed its transfer. */
static bool end(struct hapt_comm_thread *comm_thread, struct flow *flow, struct poll_result *result)
{
    struct device_transfer *transfer = &comm_thread->device_transfer[flow->options.sends ? SENDS : RECEIVES];
    struct channel *channel = transfer->channel;
    bool settled = false;
    if (transfer->flow != flow || result->status != HAPT_OK) return false;
    result->in_flight = true;
    const char *fault = comm_thread->groups->poll(channel->pair.group, &settled); /* includes the operation itself */
    if (!fault && settled && !transfer->event) {
        const int slot = (int)(number_of(flow, channel) % flow->options.slot_count);
        if (!flow->options.sends) fault = move_runs(comm_thread, flow, channel, slot);
        transfer->event = comm_thread->backend->record(queue_of(comm_thread, flow->options.sends ? SENDS : RECEIVES));
    }
    if (fault) result->status = broken(comm_thread, flow, channel, number_of(flow, channel), fault);
    if (fault || !transfer->event || !comm_thread->backend->done(transfer->event)) return false;
    result->status = comm_thread->backend->wait(transfer->event); /* complete already: returns its status */
    if (result->status != HAPT_OK) return false;
    transfer->flow = NULL;
    result->progress = true;
    return true;
}

/* Polls the notice of a message; true if none is in flight. */
static bool test_notice(struct hapt_comm_thread *comm_thread, struct channel *channel, struct poll_result *result)
{
    bool done = false;
    if (!channel->notice_in_flight || result->status != HAPT_OK) return !channel->notice_in_flight;
    result->status = comm_thread->transfer->test(comm_thread->context, &channel->notice, &done);
    channel->notice_in_flight = !done;
    if (!done) result->in_flight = true;
    return result->status == HAPT_OK && done;
}

static int notice_tag(const struct flow *flow)
{
    return 2 * flow->options.tag;
}

void device_flow_advance_sender(struct hapt_comm_thread *comm_thread, struct flow *flow, struct poll_result *result)
{
    if (end(comm_thread, flow, result) && ++flow->peers_done == flow->channel_count) {
        flow->peers_done = 0;
        flow_end_message(flow);
        flow_count_sent(flow, flow->start_s, hapt_time_s(), result);
    }
    flow_receive_credits(comm_thread, flow, result);
    if (result->status == HAPT_OK && !comm_thread->device_transfer[SENDS].flow &&
        flow_start_message(comm_thread, flow, result)) {
        struct channel *channel = &flow->channel[flow->peers_done];
        if (test_notice(comm_thread, channel, result))
            begin(comm_thread, flow, channel, flow->queue_slot[(flow->started - 1) % flow->options.slot_count], result);
        if (result->status == HAPT_OK && comm_thread->device_transfer[SENDS].flow) {
            result->status = comm_thread->transfer->send(comm_thread->context, NULL, 0, channel->peer, notice_tag(flow),
                                                         &channel->notice);
            channel->notice_in_flight = true;
        }
    }
    for (int c = 0; c < flow->channel_count; c++)
        if (!test_notice(comm_thread, &flow->channel[c], result)) result->unfinished = true;
    flow_update_sender_state(flow, result);
}

/* Receives notices of messages, as long as slots are free. */
static void receive_notice(struct hapt_comm_thread *comm_thread, const struct flow *flow, struct channel *channel,
                           struct poll_result *result)
{
    const int64_t expected = atomic_load(&flow->expected), allowed = flow_released(flow) + flow->options.peer_slots;
    if (channel->notice_in_flight && test_notice(comm_thread, channel, result)) {
        channel->notices_received++;
        result->progress = true;
    }
    if (result->status != HAPT_OK || channel->notice_in_flight || channel->notices_received >= expected ||
        channel->notices_received >= allowed)
        return;
    result->status = comm_thread->transfer->receive(comm_thread->context, NULL, 0, channel->peer, notice_tag(flow),
                                                    &channel->notice);
    channel->notice_in_flight = result->status == HAPT_OK;
    result->in_flight = result->progress = true;
}

void device_flow_advance_receiver(struct hapt_comm_thread *comm_thread, struct flow *flow, struct poll_result *result)
{
    const int64_t expected = atomic_load(&flow->expected);
    struct channel *completed = comm_thread->device_transfer[RECEIVES].channel;
    if (end(comm_thread, flow, result)) {
        flow_keep_time(flow, atomic_load(&completed->received), hapt_time_s());
        atomic_fetch_add(&completed->received, 1);
        result->completion = true;
    }
    for (int c = 0; c < flow->channel_count && result->status == HAPT_OK; c++) {
        struct channel *channel = &flow->channel[c];
        const int64_t received = atomic_load(&channel->received);
        receive_notice(comm_thread, flow, channel, result);
        if (result->status == HAPT_OK && !comm_thread->device_transfer[RECEIVES].flow &&
            channel->notices_received > received)
            begin(comm_thread, flow, channel, (int)(received % flow->options.peer_slots), result);
        flow_send_credits(comm_thread, flow, channel, result);
        if (channel->credit_in_flight) result->in_flight = true;
        if (received < expected || channel->credited < expected || channel->credit_in_flight) result->unfinished = true;
    }
}
