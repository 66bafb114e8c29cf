/*
 * Messages on a device whose memory the host cannot read: page-locked copies of them, which the device's copy queues
 * fill and empty.
 *
 * What a flow has of a buffer, from its first to its last byte, is cut into parts. A part goes out as soon as its
 * message was handed over and a copy's place is free, and comes in as soon as all its bytes are here; the network has
 * other parts of the same message meanwhile. A slot's release is told as ever, when what was computed from it is done:
 * copies here and transfer slots there are as many. Buffers that the message library takes where they stand are not
 * copied.
 */
#include <string.h>

#include "courier.h"

#define PART_BYTES ((size_t)512 << 10)
#define BATCHES 8       /* of copies, under way of one flow */
#define MOST_BATCHES 48 /* of one queue: back ends use its events in turn */

struct staging_buffer {
    size_t at;         /* where it begins in a slot */
    size_t first, end; /* what the flow has of it */
    bool runs;         /* some pieces are runs: it is one part */
    bool direct;       /* the message library takes it on the device */
    int part;          /* its first one */
};

struct staging_part {
    int buffer;
    size_t first, bytes;
    size_t needed; /* of its bytes, by pieces; 0: it is never copied */
};

struct staging {
    int slots; /* message k stands in slot k % slots */
    size_t slot_bytes;
    char *memory; /* [slots][slot_bytes] page-locked */
    struct staging_buffer *buffer;
    int part_count;
    struct staging_part *part;
    int64_t begun, copied; /* sending: parts, of all messages one behind the other */
    size_t *arrived;       /* [slots][part_count] receiving: bytes */
    int *landed;           /* [slots] receiving: parts on the device, those that are never copied among them */
    int unneeded;
    int ready_first, ready_count,
        *ready;       /* [slots * part_count] receiving: places in `arrived` of parts that are all here */
    int first, count; /* batches of copies under way, oldest first */
    struct batch {
        struct hapt_event *event;
        int slot, parts;
    } batch[BATCHES];
};

/* ---- life ---- */

static void extend(struct staging_buffer *buffer, size_t first, size_t end)
{
    if (first >= end) return;
    if (buffer->end == 0 || first < buffer->first) buffer->first = first;
    if (end > buffer->end) buffer->end = end;
}

static void measure(const struct hapt_flow_options *options, struct staging_buffer *buffer)
{
    for (int p = 0; p < options->piece_count; p++) {
        const struct hapt_piece *piece = &options->piece[p];
        struct staging_buffer *its = &buffer[piece->buffer];
        if (piece->runs.count == 0) extend(its, piece->offset, piece->offset + piece->bytes);
        for (int r = 0; r < piece->runs.count; r++) {
            const struct hapt_strided *run = &piece->runs.part[r];
            if (run->count > 0) extend(its, run->offset, run->offset + (run->count - 1) * run->stride + run->run);
        }
        its->runs = its->runs || piece->runs.count > 0;
    }
}

static void find_direct(struct hapt_courier *courier, const struct hapt_flow_options *options,
                        struct staging_buffer *buffer)
{
    for (int b = 0; b < options->buffer_count; b++) buffer[b].direct = !buffer[b].runs;
    for (int p = 0; p < options->piece_count; p++) {
        const struct hapt_piece *piece = &options->piece[p];
        if (!courier->transfer->takes_device || !courier->transfer->takes_device(courier->context, piece->peer))
            buffer[piece->buffer].direct = false;
    }
}

static int parts_of(const struct staging_buffer *buffer)
{
    if (buffer->end == 0 || buffer->direct) return 0;
    return buffer->runs ? 1 : (int)((buffer->end - buffer->first + PART_BYTES - 1) / PART_BYTES);
}

/* Bytes [first, end) of a buffer that lie in the part. */
static size_t within(const struct staging_part *part, size_t first, size_t end)
{
    const size_t from = first > part->first ? first : part->first, part_end = part->first + part->bytes;
    const size_t to = end < part_end ? end : part_end;
    return from < to ? to - from : 0;
}

static void cut(const struct hapt_flow_options *options, struct staging *staging)
{
    for (int b = 0; b < options->buffer_count; b++) {
        const struct staging_buffer *buffer = &staging->buffer[b];
        const int parts = parts_of(buffer);
        for (int p = 0; p < parts; p++) {
            const size_t first = buffer->first + (size_t)p * PART_BYTES,
                         end = p < parts - 1 ? first + PART_BYTES : buffer->end;
            staging->part[buffer->part + p] = (struct staging_part){b, first, end - first, 0};
        }
    }
    for (int i = 0; i < options->piece_count; i++) {
        const struct hapt_piece *piece = &options->piece[i];
        const struct staging_buffer *buffer = &staging->buffer[piece->buffer];
        for (int p = buffer->part; p < buffer->part + parts_of(buffer); p++)
            staging->part[p].needed +=
                buffer->runs ? piece->bytes : within(&staging->part[p], piece->offset, piece->offset + piece->bytes);
    }
    for (int p = 0; p < staging->part_count; p++) staging->unneeded += staging->part[p].needed == 0;
}

enum hapt_status staging_create(struct hapt_courier *courier, struct flow *flow)
{
    const struct hapt_flow_options *options = &flow->options;
    struct staging *made;
    void *memory;
    HAPT_NEW(made, &courier->arena, 1);
    HAPT_NEW(made->buffer, &courier->arena, options->buffer_count);
    made->slots = options->slot_count < options->peer_slots ? options->slot_count : options->peer_slots;
    measure(options, made->buffer);
    find_direct(courier, options, made->buffer);
    for (int b = 0; b < options->buffer_count; b++) {
        made->buffer[b].at = made->slot_bytes;
        made->buffer[b].part = made->part_count;
        made->slot_bytes += made->buffer[b].direct ? 0 : (made->buffer[b].end + 63) / 64 * 64;
        made->part_count += parts_of(&made->buffer[b]);
    }
    const size_t places = (size_t)made->slots * (size_t)made->part_count;
    HAPT_NEW(made->part, &courier->arena, made->part_count);
    HAPT_NEW(made->arrived, &courier->arena, places);
    HAPT_NEW(made->ready, &courier->arena, places);
    HAPT_NEW(made->landed, &courier->arena, made->slots);
    cut(options, made);
    for (int s = 0; s < made->slots; s++) made->landed[s] = made->unneeded;
    flow->staging = made;
    if (made->slot_bytes == 0) return HAPT_OK;
    HAPT_TRY(hapt_backend_pin(courier->backend, (size_t)made->slots * made->slot_bytes, &memory));
    made->memory = memset(memory, 0, (size_t)made->slots * made->slot_bytes);
    return HAPT_OK;
}

void staging_destroy(struct hapt_courier *courier, struct flow *flow)
{
    if (flow->staging && flow->staging->memory) courier->backend->unpin(flow->staging->memory);
    flow->staging = NULL;
}

bool hapt_courier_copies(const struct hapt_courier *courier, int flow)
{
    const struct staging *staging = courier->flow[flow]->staging;
    return staging && staging->memory;
}

/* ---- bytes of a message ---- */

static char *device_base(const struct flow *flow, int slot, int buffer)
{
    return flow->options.base[(size_t)slot * (size_t)flow->options.buffer_count + (size_t)buffer];
}

/* Where message `sequence` stands on the device. */
static int device_slot(const struct flow *flow, int64_t sequence)
{
    const int place = (int)(sequence % flow->options.slot_count);
    return flow->options.sends ? flow->queue_slot[place] : place;
}

static char *slot_base(const struct staging *staging, int slot, int buffer)
{
    return staging->memory + (size_t)slot * staging->slot_bytes + staging->buffer[buffer].at;
}

char *staging_base(const struct flow *flow, int64_t sequence, const struct hapt_piece *piece)
{
    if (flow->staging->buffer[piece->buffer].direct)
        return device_base(flow, device_slot(flow, sequence), piece->buffer);
    return slot_base(flow->staging, (int)(sequence % flow->staging->slots), piece->buffer);
}

/* The part that holds a byte of the piece. */
static int part_at(const struct staging *staging, const struct hapt_piece *piece, size_t offset)
{
    const struct staging_buffer *buffer = &staging->buffer[piece->buffer];
    return buffer->runs ? buffer->part : buffer->part + (int)((piece->offset + offset - buffer->first) / PART_BYTES);
}

bool staging_has(const struct flow *flow, int64_t sequence, const struct hapt_piece *piece, size_t offset, size_t bytes)
{
    const struct staging *staging = flow->staging;
    return staging->buffer[piece->buffer].direct || bytes == 0 ||
           staging->copied > sequence * staging->part_count + part_at(staging, piece, offset + bytes - 1);
}

void staging_note(struct flow *flow, int64_t sequence, const struct hapt_piece *piece, size_t offset, size_t bytes)
{
    struct staging *staging = flow->staging;
    const int places = staging->slots * staging->part_count, slot = (int)(sequence % staging->slots);
    if (bytes == 0 || staging->buffer[piece->buffer].direct) return;
    for (int p = part_at(staging, piece, offset); p <= part_at(staging, piece, offset + bytes - 1); p++) {
        const struct staging_part *part = &staging->part[p];
        const int place = slot * staging->part_count + p;
        staging->arrived[place] += staging->buffer[part->buffer].runs
                                       ? bytes
                                       : within(part, piece->offset + offset, piece->offset + offset + bytes);
        if (staging->arrived[place] == part->needed)
            staging->ready[(staging->ready_first + staging->ready_count++) % places] = place;
    }
}

bool staging_lands(struct flow *flow)
{
    struct staging *staging = flow->staging;
    const int64_t sequence = atomic_load(&flow->landed);
    const int slot = (int)(sequence % staging->slots);
    for (int c = 0; c < flow->channel_count; c++)
        if (atomic_load(&flow->channel[c].received) <= sequence) return false;
    if (staging->landed[slot] < staging->part_count) return false;
    staging->landed[slot] = staging->unneeded;
    if (staging->part_count > 0)
        memset(staging->arrived + slot * staging->part_count, 0,
               (size_t)staging->part_count * sizeof *staging->arrived);
    return true;
}

/* ---- copies ---- */

/* What may be copied next: a part, its slot on the host and its place on the device. */
struct move {
    int part, slot;
    char *device;
};

static bool next_out(const struct flow *flow, struct move *move)
{
    const struct staging *staging = flow->staging;
    if (staging->part_count == 0) return false;
    const int64_t message = staging->begun / staging->part_count;
    if (message >= atomic_load(&flow->queued) || message >= atomic_load(&flow->sent) + staging->slots) return false;
    *move = (struct move){.part = (int)(staging->begun % staging->part_count), .slot = (int)(message % staging->slots)};
    move->device = device_base(flow, device_slot(flow, message), staging->part[move->part].buffer);
    return true;
}

static bool next_in(const struct flow *flow, struct move *move)
{
    const struct staging *staging = flow->staging;
    if (staging->ready_count == 0) return false;
    const int place = staging->ready[staging->ready_first];
    *move = (struct move){.part = place % staging->part_count, .slot = place / staging->part_count};
    move->device = device_base(flow, move->slot, staging->part[move->part].buffer);
    return true;
}

static bool next(const struct flow *flow, struct move *move)
{
    return flow->options.sends ? next_out(flow, move) : next_in(flow, move);
}

static enum hapt_status begin(const struct hapt_courier *courier, struct flow *flow, struct hapt_queue *queue,
                              const struct move *move)
{
    struct staging *staging = flow->staging;
    const struct staging_part *part = &staging->part[move->part];
    char *host = slot_base(staging, move->slot, part->buffer) + part->first, *device = move->device + part->first;
    if (flow->options.sends) {
        staging->begun++;
        return part->needed == 0 ? HAPT_OK : courier->backend->copy(queue, host, device, part->bytes);
    }
    staging->ready_first = (staging->ready_first + 1) % (staging->slots * staging->part_count);
    staging->ready_count--;
    return courier->backend->copy(queue, device, host, part->bytes);
}

/* Parts of one slot, about PART_BYTES, and an event behind them. */
static void begin_batch(struct hapt_courier *courier, struct flow *flow, struct pass *pass, struct move *move)
{
    struct staging *staging = flow->staging;
    struct hapt_queue *queue =
        courier->backend->queue(courier->device, flow->options.sends ? HAPT_QUEUE_COPY_OUT : HAPT_QUEUE_COPY_IN);
    struct batch made = {.slot = move->slot};
    size_t bytes = 0;
    do {
        pass->status = begin(courier, flow, queue, move);
        bytes += staging->part[move->part].bytes;
        made.parts++;
    } while (pass->status == HAPT_OK && bytes < PART_BYTES && next(flow, move) && move->slot == made.slot);
    if (pass->status != HAPT_OK) return;
    made.event = courier->backend->record(queue);
    staging->batch[(staging->first + staging->count++) % BATCHES] = made;
    courier->copies[!flow->options.sends]++;
    pass->progress = true;
}

static void end_batches(struct hapt_courier *courier, struct flow *flow, struct pass *pass)
{
    struct staging *staging = flow->staging;
    while (staging->count > 0 && pass->status == HAPT_OK) {
        const struct batch *batch = &staging->batch[staging->first];
        if (!courier->backend->done(batch->event)) return;
        pass->status = courier->backend->wait(batch->event); /* it is past: how it went */
        if (flow->options.sends)
            staging->copied += batch->parts;
        else
            staging->landed[batch->slot] += batch->parts;
        staging->first = (staging->first + 1) % BATCHES;
        staging->count--;
        courier->copies[!flow->options.sends]--;
        pass->progress = true;
    }
}

void staging_advance(struct hapt_courier *courier, struct flow *flow, struct pass *pass)
{
    struct staging *staging = flow->staging;
    struct move move;
    end_batches(courier, flow, pass);
    while (pass->status == HAPT_OK && staging->count < BATCHES &&
           courier->copies[!flow->options.sends] < MOST_BATCHES && next(flow, &move))
        begin_batch(courier, flow, pass, &move);
    if (staging->count > 0) pass->in_flight = true;
    if (!flow->options.sends && atomic_load(&flow->landed) < atomic_load(&flow->expected)) pass->unfinished = true;
}
