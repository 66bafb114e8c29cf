/* One pass over a flow by the communication thread: what has arrived, what may be sent. No function here waits. */
#include <math.h>
#include <string.h>

#include "comm_thread.h"

static size_t chunk_bytes(const struct hapt_piece *piece, size_t offset)
{
    const size_t left = piece->bytes - offset;
    return left < HAPT_LINK_CHUNK_BYTES ? left : HAPT_LINK_CHUNK_BYTES;
}

/* Moves past a chunk; true if the message is complete. */
static bool advance(struct cursor *cursor, const struct hapt_piece *piece, int piece_count, size_t bytes)
{
    cursor->offset += bytes;
    if (cursor->offset < piece[cursor->piece].bytes) return false;
    cursor->offset = 0;
    if (++cursor->piece < piece_count) return false;
    cursor->piece = 0;
    return true;
}

static int chunk_queue_push(struct chunk_queue *queue)
{
    return (queue->first + queue->count++) % MAX_CHUNKS_IN_FLIGHT;
}

/* Address of the piece's buffer of message `sequence`, which is in `slot`. */
static char *base_of(const struct flow *flow, int64_t sequence, int slot, const struct hapt_piece *piece)
{
    if (flow->staging) return staging_base(flow, sequence, piece);
    return flow->options.base[(size_t)slot * (size_t)flow->options.buffer_count + (size_t)piece->buffer];
}

/* Address from which the chunk at `offset` of a piece is sent; runs are packed first. */
static const void *send_address(const struct flow *flow, const char *base, const struct hapt_piece *piece,
                                size_t offset, size_t bytes, int entry)
{
    if (piece->runs.count == 0) return base + piece->offset + offset;
    char *buffer = flow->chunk_queue.buffer + (size_t)entry * HAPT_LINK_CHUNK_BYTES;
    hapt_strided_pack(&piece->runs, base, offset, bytes, buffer);
    return buffer;
}

/* Address to which a chunk is received; runs are unpacked after it arrives. */
static void *receive_address(struct chunk_queue *queue, char *base, const struct hapt_piece *piece, size_t offset,
                             size_t bytes, int entry)
{
    queue->piece[entry] = piece;
    queue->offset[entry] = offset;
    queue->bytes[entry] = bytes;
    queue->unpacked[entry] = NULL;
    if (piece->runs.count == 0) return base + piece->offset + offset;
    queue->unpacked[entry] = base;
    return queue->buffer + (size_t)entry * HAPT_LINK_CHUNK_BYTES;
}

static void unpack(const struct chunk_queue *queue, int entry)
{
    if (!queue->unpacked[entry]) return;
    hapt_strided_unpack(&queue->piece[entry]->runs, queue->unpacked[entry], queue->offset[entry], queue->bytes[entry],
                        queue->buffer + (size_t)entry * HAPT_LINK_CHUNK_BYTES);
}

/* Removes the oldest chunk if it is complete. Returns its entry, valid until the next push; -1: not complete. */
static int chunk_queue_pop(struct hapt_comm_thread *comm_thread, struct chunk_queue *queue, struct poll_result *result)
{
    if (queue->count == 0 || result->status != HAPT_OK) return -1;
    const int entry = queue->first;
    bool done = false;
    result->status = comm_thread->transfer->test(comm_thread->context, &queue->request[entry], &done);
    if (result->status != HAPT_OK || !done) return -1;
    unpack(queue, entry);
    queue->first = (entry + 1) % MAX_CHUNKS_IN_FLIGHT;
    queue->count--;
    result->progress = true;
    return entry;
}

/* A release is an empty message; in stamped flows it contains its time. */
static size_t credit_bytes(const struct flow *flow)
{
    return flow->options.stamped ? sizeof(double) : 0;
}

/* Stamped flows: when the receivers released the slots that the next message will use. */
static double released_s(const struct flow *flow)
{
    double latest_s = 0;
    for (int c = 0; c < flow->channel_count && flow->started >= flow->options.peer_slots; c++)
        latest_s = fmax(latest_s, flow->channel[c].released_s[flow->started % flow->options.peer_slots]);
    return latest_s;
}

/* Receives the receivers' releases of transfer slots. */
void flow_receive_credits(struct hapt_comm_thread *comm_thread, struct flow *flow, struct poll_result *result)
{
    for (int c = 0; c < flow->channel_count && result->status == HAPT_OK; c++) {
        struct channel *channel = &flow->channel[c];
        if (!channel->credit_in_flight && channel->credits < flow->started) {
            result->status =
                comm_thread->transfer->receive(comm_thread->context, &channel->credit_s, credit_bytes(flow),
                                               channel->peer, 2 * flow->options.tag + 1, &channel->credit);
            channel->credit_in_flight = result->status == HAPT_OK;
        }
        if (!channel->credit_in_flight) continue;
        bool done = false;
        result->status = comm_thread->transfer->test(comm_thread->context, &channel->credit, &done);
        if (result->status != HAPT_OK) return;
        if (done) {
            channel->credit_in_flight = false;
            channel->released_s[channel->credits % flow->options.peer_slots] = channel->credit_s;
            channel->credits++;
            result->progress = true;
        }
    }
}

static bool has_credit(const struct flow *flow)
{
    for (int c = 0; c < flow->channel_count; c++)
        if (flow->started >= flow->channel[c].credits + flow->options.peer_slots) return false;
    return true;
}

void flow_keep_time(const struct flow *flow, int64_t sequence, double time_s)
{
    const int64_t first = atomic_load(&flow->untimed_first), end = atomic_load(&flow->untimed_end);
    if (!flow->options.time_s || (sequence >= first && sequence < end)) return;
    sequence -= atomic_load(&flow->untimed_before) + (sequence >= end ? end - first : 0);
    flow->options.time_s[sequence % flow->options.time_count] = time_s;
}

/* Call between two messages. */
static void ask_network(struct hapt_comm_thread *comm_thread, struct flow *flow)
{
    for (int c = 0; c < flow->channel_count; c++) {
        struct channel *channel = &flow->channel[c];
        struct hapt_transfer_rate rate;
        if (!channel->counts ||
            !comm_thread->transfer->rate(comm_thread->context, channel->peer, 2 * flow->options.tag, &rate))
            continue;
        pthread_mutex_lock(&comm_thread->mutex);
        channel->counted = rate;
        pthread_mutex_unlock(&comm_thread->mutex);
    }
}

bool flow_start_message(struct hapt_comm_thread *comm_thread, struct flow *flow, const struct poll_result *result)
{
    if (flow->under_way) return true;
    if (flow->started >= atomic_load(&flow->queued)) return false;
    const int index = (int)(flow->started % flow->options.slot_count);
    if (!port_is_turn(flow->port, flow->queue_turn[index])) return false;
    if (!has_credit(flow)) {
        flow->blocked = true;
        return false;
    }
    ask_network(comm_thread, flow);
    flow->start_s = fmax(flow->queue_ready_s[index], flow->port ? flow->port->free_s : 0);
    if (flow->options.stamped)
        flow->start_s = fmax(flow->start_s, released_s(flow));
    else if (flow->blocked)
        flow->start_s = fmax(flow->start_s, result->now_s);
    flow->blocked = false;
    flow->under_way = true;
    flow_keep_time(flow, flow->started, flow->start_s);
    flow->started++;
    flow->done_bytes = 0;
    if (flow->port) flow->port->free_s = flow->start_s + (double)flow->message_bytes / flow->options.bandwidth;
    flow->due_s = (flow->port ? flow->port->free_s : flow->start_s) + flow->options.latency_s;
    return true;
}

void flow_end_message(struct flow *flow)
{
    flow->under_way = false;
    port_end_turn(flow->port);
}

/* A paced chunk is sent when its last byte would have crossed the link. Times are absolute, so a late chunk does not
 * delay others. */
static bool chunk_is_due(const struct flow *flow, size_t bytes, struct poll_result *result)
{
    if (flow->options.bandwidth <= 0) return true;
    const double due_s =
        flow->start_s + flow->options.latency_s + (double)(flow->done_bytes + bytes) / flow->options.bandwidth;
    if (due_s <= result->now_s) return true;
    result->wake_s = fmin(result->wake_s, due_s);
    return false;
}

static void post_sends(struct hapt_comm_thread *comm_thread, struct flow *flow, struct poll_result *result)
{
    while (result->status == HAPT_OK && flow->chunk_queue.count < MAX_CHUNKS_IN_FLIGHT &&
           flow_start_message(comm_thread, flow, result)) {
        const int p = flow->cursor.piece;
        const struct hapt_piece *piece = &flow->options.piece[p];
        const size_t bytes = chunk_bytes(piece, flow->cursor.offset);
        /* The receiver needs the complete message, so a modelled one is sent when its last byte would have arrived. */
        const size_t paced = piece->modelled_bytes ? flow->message_bytes - flow->done_bytes : bytes;
        if (!chunk_is_due(flow, paced, result)) return;
        if (flow->staging && !staging_is_copied(flow, flow->started - 1, piece, flow->cursor.offset, bytes)) return;
        const int slot = flow->queue_slot[(flow->started - 1) % flow->options.slot_count];
        const int entry = chunk_queue_push(&flow->chunk_queue);
        char *base = base_of(flow, flow->started - 1, slot, piece);
        if (flow->options.stamped) memcpy(base + piece->offset, &flow->due_s, sizeof flow->due_s);
        flow->slot_due_s[slot] = flow->due_s;
        result->status = comm_thread->transfer->send(
            comm_thread->context, send_address(flow, base, piece, flow->cursor.offset, bytes, entry), bytes,
            piece->peer, 2 * flow->options.tag, &flow->chunk_queue.request[entry]);
        if (comm_thread->wakeups) wakeups_signal(comm_thread->wakeups, piece->peer);
        flow->done_bytes += piece->modelled_bytes ? 0 : bytes;
        flow->chunk_queue.last[entry] = advance(&flow->cursor, flow->options.piece, flow->options.piece_count, bytes);
        flow->chunk_queue.start_s[entry] = flow->start_s;
        flow->chunk_queue.due_s[entry] = flow->due_s;
        if (flow->chunk_queue.last[entry]) flow_end_message(flow);
        result->progress = true;
    }
}

/* The compute thread takes the value and resets it to 0. */
static void keep_shortest(atomic_llong *shortest_ns, double time_s)
{
    const long long mine = (long long)(1e9 * fmax(time_s, 1e-9)), before = atomic_load(shortest_ns);
    if (before == 0 || mine < before) atomic_store(shortest_ns, mine);
}

void flow_count_sent(struct flow *flow, double start_s, double now_s, struct poll_result *result)
{
    const double active_s = now_s - fmax(start_s, flow->finished_s);
    atomic_fetch_add(&flow->active_ns, (long long)(1e9 * active_s));
    keep_shortest(&flow->shortest_ns, active_s);
    flow->finished_s = now_s;
    atomic_fetch_add(&flow->sent, 1);
    result->completion = true;
}

void flow_update_sender_state(struct flow *flow, struct poll_result *result)
{
    const int64_t queued = atomic_load(&flow->queued);
    if (atomic_load(&flow->sent) < queued) result->unfinished = true;
    for (int c = 0; c < flow->channel_count; c++) {
        if (flow->channel[c].credit_in_flight) result->in_flight = true;
        if (flow->channel[c].credits < queued) result->unfinished = true;
    }
}

void hapt_flow_advance_sender(struct hapt_comm_thread *comm_thread, struct flow *flow, struct poll_result *result)
{
    int entry;
    while ((entry = chunk_queue_pop(comm_thread, &flow->chunk_queue, result)) >= 0)
        if (flow->chunk_queue.last[entry])
            flow_count_sent(flow, flow->chunk_queue.start_s[entry],
                            flow->options.stamped ? flow->chunk_queue.due_s[entry] : hapt_time_s(), result);
    flow_receive_credits(comm_thread, flow, result);
    if (flow->staging) staging_advance(comm_thread, flow, result);
    post_sends(comm_thread, flow, result);
    if (flow->chunk_queue.count > 0) result->in_flight = true;
    flow_update_sender_state(flow, result);
}

int64_t flow_released(const struct flow *flow)
{
    int64_t released = atomic_load(&flow->freed);
    for (int k = 0; k < flow->next_count; k++) {
        const int64_t sent = atomic_load(&flow->next[k]->sent);
        if (sent < released) released = sent;
    }
    return released;
}

/* Stamped flows: when the slot of a message was released. */
static double release_s(const struct flow *flow, int64_t sequence)
{
    double time_s = flow->freed_s[sequence % flow->options.peer_slots];
    for (int k = 0; k < flow->next_count && flow->options.stamped; k++)
        time_s = fmax(time_s, flow->next[k]->slot_due_s[sequence % flow->next[k]->options.slot_count]);
    return time_s;
}

static void post_receives(struct hapt_comm_thread *comm_thread, const struct flow *flow, struct channel *channel,
                          struct poll_result *result)
{
    const int64_t expected = atomic_load(&flow->expected);
    const int64_t allowed = flow_released(flow) + flow->options.peer_slots;
    while (result->status == HAPT_OK && channel->chunk_queue.count < MAX_CHUNKS_IN_FLIGHT &&
           channel->posted < expected && channel->posted < allowed) {
        const struct hapt_piece *piece = &channel->piece[channel->cursor.piece];
        const size_t bytes = chunk_bytes(piece, channel->cursor.offset);
        const int slot = (int)(channel->posted % flow->options.peer_slots);
        const int entry = chunk_queue_push(&channel->chunk_queue);
        result->status = comm_thread->transfer->receive(
            comm_thread->context,
            receive_address(&channel->chunk_queue, base_of(flow, channel->posted, slot, piece), piece,
                            channel->cursor.offset, bytes, entry),
            bytes, channel->peer, 2 * flow->options.tag, &channel->chunk_queue.request[entry]);
        channel->chunk_queue.last[entry] = advance(&channel->cursor, channel->piece, channel->piece_count, bytes);
        if (channel->chunk_queue.last[entry]) channel->posted++;
        result->progress = true;
    }
}

/* Tells the sender of released slots, one message each. */
void flow_send_credits(struct hapt_comm_thread *comm_thread, const struct flow *flow, struct channel *channel,
                       struct poll_result *result)
{
    while (result->status == HAPT_OK) {
        if (channel->credit_in_flight) {
            bool done = false;
            result->status = comm_thread->transfer->test(comm_thread->context, &channel->credit, &done);
            if (result->status != HAPT_OK || !done) return;
            channel->credit_in_flight = false;
        }
        if (channel->credited >= flow_released(flow)) return;
        channel->credit_s = release_s(flow, channel->credited);
        result->status = comm_thread->transfer->send(comm_thread->context, &channel->credit_s, credit_bytes(flow),
                                                     channel->peer, 2 * flow->options.tag + 1, &channel->credit);
        channel->credit_in_flight = result->status == HAPT_OK;
        channel->credited++;
        if (comm_thread->wakeups) wakeups_signal(comm_thread->wakeups, channel->peer);
        result->progress = true;
    }
}

/* Between the first and the last of n chunks are n - 1 chunks. */
static void note_arrival(struct channel *channel, bool last)
{
    if (channel->chunks < 2) return;
    const double now_s = hapt_time_s();
    if (channel->arrived++ == 0) channel->first_s = now_s;
    if (!last) return;
    keep_shortest(&channel->shortest_ns, (now_s - channel->first_s) * channel->chunks / (channel->chunks - 1));
    channel->arrived = 0;
}

static void take_chunks(struct hapt_comm_thread *comm_thread, struct flow *flow, struct channel *channel,
                        struct poll_result *result)
{
    int entry;
    while ((entry = chunk_queue_pop(comm_thread, &channel->chunk_queue, result)) >= 0) {
        const struct chunk_queue *queue = &channel->chunk_queue;
        const int64_t sequence = atomic_load(&channel->received);
        note_arrival(channel, queue->last[entry]);
        if (flow->staging)
            staging_add_arrived(flow, sequence, queue->piece[entry], queue->offset[entry], queue->bytes[entry]);
        if (!queue->last[entry]) continue;
        if (!flow->staging) flow_keep_time(flow, sequence, hapt_time_s());
        atomic_fetch_add(&channel->received, 1);
        result->completion = true;
    }
}

/* Counts messages whose last part was copied to the device. */
static void count_on_device(struct hapt_comm_thread *comm_thread, struct flow *flow, struct poll_result *result)
{
    staging_advance(comm_thread, flow, result);
    while (atomic_load(&flow->on_device_count) < atomic_load(&flow->expected) && staging_finish_message(flow)) {
        flow_keep_time(flow, atomic_load(&flow->on_device_count), hapt_time_s());
        atomic_fetch_add(&flow->on_device_count, 1);
        result->completion = result->progress = true;
    }
}

void hapt_flow_advance_receiver(struct hapt_comm_thread *comm_thread, struct flow *flow, struct poll_result *result)
{
    const int64_t expected = atomic_load(&flow->expected);
    for (int c = 0; c < flow->channel_count && result->status == HAPT_OK; c++)
        take_chunks(comm_thread, flow, &flow->channel[c], result);
    if (flow->staging && result->status == HAPT_OK) count_on_device(comm_thread, flow, result);
    for (int c = 0; c < flow->channel_count && result->status == HAPT_OK; c++) {
        struct channel *channel = &flow->channel[c];
        flow_send_credits(comm_thread, flow, channel, result);
        post_receives(comm_thread, flow, channel, result);
        if (channel->chunk_queue.count > 0 || channel->credit_in_flight) result->in_flight = true;
        if (atomic_load(&channel->received) < expected || channel->credited < expected || channel->credit_in_flight)
            result->unfinished = true;
    }
}
