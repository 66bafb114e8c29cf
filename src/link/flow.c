/* One look at a flow by the courier's thread: what came in, what may go out. Nothing here waits. */
#include <math.h>
#include <string.h>

#include "courier.h"

static size_t chunk_bytes(const struct hapt_piece *piece, size_t offset)
{
    const size_t left = piece->bytes - offset;
    return left < HAPT_LINK_CHUNK_BYTES ? left : HAPT_LINK_CHUNK_BYTES;
}

/* Moves past a chunk; true when the message is complete. */
static bool advance(struct cursor *cursor, const struct hapt_piece *piece, int piece_count, size_t bytes)
{
    cursor->offset += bytes;
    if (cursor->offset < piece[cursor->piece].bytes) return false;
    cursor->offset = 0;
    if (++cursor->piece < piece_count) return false;
    cursor->piece = 0;
    return true;
}

static int window_push(struct window *window)
{
    return (window->first + window->count++) % WINDOW;
}

/* Where message `sequence`, which stands in `slot`, has the piece's buffer: on the host. */
static char *base_of(const struct flow *flow, int64_t sequence, int slot, const struct hapt_piece *piece)
{
    if (flow->staging) return staging_base(flow, sequence, piece);
    return flow->options.base[(size_t)slot * (size_t)flow->options.buffer_count + (size_t)piece->buffer];
}

/* Where a chunk that starts at `offset` of a piece is sent from: runs are put together first. */
static const void *send_address(const struct flow *flow, const char *base, const struct hapt_piece *piece,
                                size_t offset, size_t bytes, int entry)
{
    if (piece->runs.count == 0) return base + piece->offset + offset;
    char *buffer = flow->window.buffer + (size_t)entry * HAPT_LINK_CHUNK_BYTES;
    hapt_strided_pack(&piece->runs, base, offset, bytes, buffer);
    return buffer;
}

/* Where a chunk is received: runs are taken apart when it is there. */
static void *receive_address(struct window *window, char *base, const struct hapt_piece *piece, size_t offset,
                             size_t bytes, int entry)
{
    window->piece[entry] = piece;
    window->offset[entry] = offset;
    window->bytes[entry] = bytes;
    window->unpacked[entry] = NULL;
    if (piece->runs.count == 0) return base + piece->offset + offset;
    window->unpacked[entry] = base;
    return window->buffer + (size_t)entry * HAPT_LINK_CHUNK_BYTES;
}

static void unpack(const struct window *window, int entry)
{
    if (!window->unpacked[entry]) return;
    hapt_strided_unpack(&window->piece[entry]->runs, window->unpacked[entry], window->offset[entry],
                        window->bytes[entry], window->buffer + (size_t)entry * HAPT_LINK_CHUNK_BYTES);
}

/* Takes the oldest chunk out when it is done: its entry, good until the next push; -1: it is not. */
static int window_pop(struct hapt_courier *courier, struct window *window, struct pass *pass)
{
    if (window->count == 0 || pass->status != HAPT_OK) return -1;
    const int entry = window->first;
    bool done = false;
    pass->status = courier->transfer->test(courier->context, &window->request[entry], &done);
    if (pass->status != HAPT_OK || !done) return -1;
    unpack(window, entry);
    window->first = (entry + 1) % WINDOW;
    window->count--;
    pass->progress = true;
    return entry;
}

/* A release is an empty message, or its time. */
static size_t credit_bytes(const struct flow *flow)
{
    return flow->options.stamped ? sizeof(double) : 0;
}

/* When the receivers released the slots that the next message will take; stamped flows. */
static double released_s(const struct flow *flow)
{
    double latest_s = 0;
    for (int c = 0; c < flow->channel_count && flow->started >= flow->options.peer_slots; c++)
        latest_s = fmax(latest_s, flow->channel[c].released_s[flow->started % flow->options.peer_slots]);
    return latest_s;
}

/* Hears which transfer slots the receivers released. */
void flow_hear_credits(struct hapt_courier *courier, struct flow *flow, struct pass *pass)
{
    for (int c = 0; c < flow->channel_count && pass->status == HAPT_OK; c++) {
        struct channel *channel = &flow->channel[c];
        if (!channel->credit_in_flight && channel->credits < flow->started) {
            pass->status = courier->transfer->receive(courier->context, &channel->credit_s, credit_bytes(flow),
                                                      channel->peer, 2 * flow->options.tag + 1, &channel->credit);
            channel->credit_in_flight = pass->status == HAPT_OK;
        }
        if (!channel->credit_in_flight) continue;
        bool done = false;
        pass->status = courier->transfer->test(courier->context, &channel->credit, &done);
        if (pass->status != HAPT_OK) return;
        if (done) {
            channel->credit_in_flight = false;
            channel->released_s[channel->credits % flow->options.peer_slots] = channel->credit_s;
            channel->credits++;
            pass->progress = true;
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
    if (flow->options.time_s) flow->options.time_s[sequence % flow->options.time_count] = time_s;
}

/* Between two messages. */
static void ask_network(struct hapt_courier *courier, struct flow *flow)
{
    for (int c = 0; c < flow->channel_count; c++) {
        struct channel *channel = &flow->channel[c];
        struct hapt_transfer_rate rate;
        if (!channel->counts || !courier->transfer->rate(courier->context, channel->peer, 2 * flow->options.tag, &rate))
            continue;
        pthread_mutex_lock(&courier->mutex);
        channel->counted = rate;
        pthread_mutex_unlock(&courier->mutex);
    }
}

bool flow_start_message(struct hapt_courier *courier, struct flow *flow, const struct pass *pass)
{
    if (flow->under_way) return true;
    if (flow->started >= atomic_load(&flow->queued)) return false;
    if (!has_credit(flow)) {
        flow->blocked = true;
        return false;
    }
    ask_network(courier, flow);
    const double ready_s = flow->queue_ready_s[flow->started % flow->options.slot_count];
    flow->start_s = fmax(ready_s, flow->port_free_s);
    if (flow->options.stamped)
        flow->start_s = fmax(flow->start_s, released_s(flow));
    else if (flow->blocked)
        flow->start_s = fmax(flow->start_s, pass->now_s);
    flow->blocked = false;
    flow->under_way = true;
    flow_keep_time(flow, flow->started, flow->start_s);
    flow->started++;
    flow->done_bytes = 0;
    if (flow->options.bandwidth > 0)
        flow->port_free_s = flow->start_s + (double)flow->message_bytes / flow->options.bandwidth;
    flow->due_s = (flow->options.bandwidth > 0 ? flow->port_free_s : flow->start_s) + flow->options.latency_s;
    return true;
}

/* A paced chunk goes when its last byte would have crossed the link: absolute times, so a late one delays no other. */
static bool chunk_is_due(const struct flow *flow, size_t bytes, struct pass *pass)
{
    if (flow->options.bandwidth <= 0) return true;
    const double due_s =
        flow->start_s + flow->options.latency_s + (double)(flow->done_bytes + bytes) / flow->options.bandwidth;
    if (due_s <= pass->now_s) return true;
    pass->wake_s = fmin(pass->wake_s, due_s);
    return false;
}

static void post_sends(struct hapt_courier *courier, struct flow *flow, struct pass *pass)
{
    while (pass->status == HAPT_OK && flow->window.count < WINDOW && flow_start_message(courier, flow, pass)) {
        const int p = flow->cursor.piece;
        const struct hapt_piece *piece = &flow->options.piece[p];
        const size_t bytes = chunk_bytes(piece, flow->cursor.offset);
        /* Nobody computes with a part of a message: what stands for a whole one comes when its last byte would. */
        const size_t paced = piece->modelled_bytes ? flow->message_bytes - flow->done_bytes : bytes;
        if (!chunk_is_due(flow, paced, pass)) return;
        if (flow->staging && !staging_has(flow, flow->started - 1, piece, flow->cursor.offset, bytes)) return;
        const int slot = flow->queue_slot[(flow->started - 1) % flow->options.slot_count];
        const int entry = window_push(&flow->window);
        char *base = base_of(flow, flow->started - 1, slot, piece);
        if (flow->options.stamped) memcpy(base + piece->offset, &flow->due_s, sizeof flow->due_s);
        flow->slot_due_s[slot] = flow->due_s;
        pass->status = courier->transfer->send(courier->context,
                                               send_address(flow, base, piece, flow->cursor.offset, bytes, entry),
                                               bytes, piece->peer, 2 * flow->options.tag, &flow->window.request[entry]);
        if (courier->bells) bells_ring(courier->bells, piece->peer);
        flow->done_bytes += piece->modelled_bytes ? 0 : bytes;
        flow->window.last[entry] = advance(&flow->cursor, flow->options.piece, flow->options.piece_count, bytes);
        flow->window.start_s[entry] = flow->start_s;
        flow->window.due_s[entry] = flow->due_s;
        if (flow->window.last[entry]) flow->under_way = false;
        pass->progress = true;
    }
}

/* The other side takes the value and leaves 0. */
static void keep_shortest(atomic_llong *shortest_ns, double time_s)
{
    const long long mine = (long long)(1e9 * fmax(time_s, 1e-9)), before = atomic_load(shortest_ns);
    if (before == 0 || mine < before) atomic_store(shortest_ns, mine);
}

void flow_count_sent(struct flow *flow, double start_s, double now_s, struct pass *pass)
{
    const double active_s = now_s - fmax(start_s, flow->finished_s);
    atomic_fetch_add(&flow->active_ns, (long long)(1e9 * active_s));
    keep_shortest(&flow->shortest_ns, active_s);
    flow->finished_s = now_s;
    atomic_fetch_add(&flow->sent, 1);
    pass->news = true;
}

void flow_judge_sender(struct flow *flow, struct pass *pass)
{
    const int64_t queued = atomic_load(&flow->queued);
    if (atomic_load(&flow->sent) < queued) pass->unfinished = true;
    for (int c = 0; c < flow->channel_count; c++) {
        if (flow->channel[c].credit_in_flight) pass->in_flight = true;
        if (flow->channel[c].credits < queued) pass->unfinished = true;
    }
}

void hapt_flow_advance_sender(struct hapt_courier *courier, struct flow *flow, struct pass *pass)
{
    int entry;
    while ((entry = window_pop(courier, &flow->window, pass)) >= 0)
        if (flow->window.last[entry])
            flow_count_sent(flow, flow->window.start_s[entry],
                            flow->options.stamped ? flow->window.due_s[entry] : hapt_time_s(), pass);
    flow_hear_credits(courier, flow, pass);
    if (flow->staging) staging_advance(courier, flow, pass);
    post_sends(courier, flow, pass);
    if (flow->window.count > 0) pass->in_flight = true;
    flow_judge_sender(flow, pass);
}

static void post_receives(struct hapt_courier *courier, const struct flow *flow, struct channel *channel,
                          struct pass *pass)
{
    const int64_t expected = atomic_load(&flow->expected);
    const int64_t allowed = atomic_load(&flow->freed) + flow->options.peer_slots;
    while (pass->status == HAPT_OK && channel->window.count < WINDOW && channel->posted < expected &&
           channel->posted < allowed) {
        const struct hapt_piece *piece = &channel->piece[channel->cursor.piece];
        const size_t bytes = chunk_bytes(piece, channel->cursor.offset);
        const int slot = (int)(channel->posted % flow->options.peer_slots);
        const int entry = window_push(&channel->window);
        pass->status =
            courier->transfer->receive(courier->context,
                                       receive_address(&channel->window, base_of(flow, channel->posted, slot, piece),
                                                       piece, channel->cursor.offset, bytes, entry),
                                       bytes, channel->peer, 2 * flow->options.tag, &channel->window.request[entry]);
        channel->window.last[entry] = advance(&channel->cursor, channel->piece, channel->piece_count, bytes);
        if (channel->window.last[entry]) channel->posted++;
        pass->progress = true;
    }
}

/* Tells the sender of released slots, one empty message each. */
void flow_tell_credits(struct hapt_courier *courier, const struct flow *flow, struct channel *channel,
                       struct pass *pass)
{
    while (pass->status == HAPT_OK) {
        if (channel->credit_in_flight) {
            bool done = false;
            pass->status = courier->transfer->test(courier->context, &channel->credit, &done);
            if (pass->status != HAPT_OK || !done) return;
            channel->credit_in_flight = false;
        }
        if (channel->credited >= atomic_load(&flow->freed)) return;
        channel->credit_s = flow->freed_s[channel->credited % flow->options.peer_slots];
        pass->status = courier->transfer->send(courier->context, &channel->credit_s, credit_bytes(flow), channel->peer,
                                               2 * flow->options.tag + 1, &channel->credit);
        channel->credit_in_flight = pass->status == HAPT_OK;
        channel->credited++;
        if (courier->bells) bells_ring(courier->bells, channel->peer);
        pass->progress = true;
    }
}

/* Between the first and the last of n chunks lie n - 1 of them. */
static void note_arrival(struct channel *channel, bool last)
{
    if (channel->chunks < 2) return;
    const double now_s = hapt_time_s();
    if (channel->arrived++ == 0) channel->first_s = now_s;
    if (!last) return;
    keep_shortest(&channel->shortest_ns, (now_s - channel->first_s) * channel->chunks / (channel->chunks - 1));
    channel->arrived = 0;
}

static void take_chunks(struct hapt_courier *courier, struct flow *flow, struct channel *channel, struct pass *pass)
{
    int entry;
    while ((entry = window_pop(courier, &channel->window, pass)) >= 0) {
        const struct window *window = &channel->window;
        const int64_t sequence = atomic_load(&channel->received);
        note_arrival(channel, window->last[entry]);
        if (flow->staging)
            staging_note(flow, sequence, window->piece[entry], window->offset[entry], window->bytes[entry]);
        if (!window->last[entry]) continue;
        if (!flow->staging) flow_keep_time(flow, sequence, hapt_time_s());
        atomic_fetch_add(&channel->received, 1);
        pass->news = true;
    }
}

/* Messages whose last part was copied to the device. */
static void land(struct hapt_courier *courier, struct flow *flow, struct pass *pass)
{
    staging_advance(courier, flow, pass);
    while (atomic_load(&flow->landed) < atomic_load(&flow->expected) && staging_lands(flow)) {
        flow_keep_time(flow, atomic_load(&flow->landed), hapt_time_s());
        atomic_fetch_add(&flow->landed, 1);
        pass->news = pass->progress = true;
    }
}

void hapt_flow_advance_receiver(struct hapt_courier *courier, struct flow *flow, struct pass *pass)
{
    const int64_t expected = atomic_load(&flow->expected);
    for (int c = 0; c < flow->channel_count && pass->status == HAPT_OK; c++)
        take_chunks(courier, flow, &flow->channel[c], pass);
    if (flow->staging && pass->status == HAPT_OK) land(courier, flow, pass);
    for (int c = 0; c < flow->channel_count && pass->status == HAPT_OK; c++) {
        struct channel *channel = &flow->channel[c];
        flow_tell_credits(courier, flow, channel, pass);
        post_receives(courier, flow, channel, pass);
        if (channel->window.count > 0 || channel->credit_in_flight) pass->in_flight = true;
        if (atomic_load(&channel->received) < expected || channel->credited < expected || channel->credit_in_flight)
            pass->unfinished = true;
    }
}
