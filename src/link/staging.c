/*
 * Messages in device memory that the host cannot read: page-locked host copies, which the device's copy queues fill
 * and empty.
 *
 * A flow's range of a buffer, from its first to its last byte, is divided into parts. A part is copied out when its
 * message was handed over and a slot for copies is free. It is copied in when all its bytes have arrived. Meanwhile
 * the network transfers other parts of the message. There are as many copies as transfer slots at the receivers; a
 * slot is released when the computation that reads it is done. Buffers that the message library reads and writes in
 * device memory are not copied.
 */
#include <string.h>

#include "comm_thread.h"

#define PART_BYTES ((size_t)512 << 10)
#define MAX_BATCHES 8        /* limit of batches of copies in flight per flow */
#define MAX_QUEUE_BATCHES 48 /* limit per queue: back ends reuse its events in turn */

struct staging_buffer {
    size_t at;         /* its offset in a slot */
    size_t first, end; /* range that the flow uses */
    bool runs;         /* some pieces are runs; then the buffer is one part */
    bool direct;       /* the message library accepts its device memory */
    int part;          /* index of its first part */
};

struct staging_part {
    int buffer;
    size_t first, bytes;
    size_t needed; /* bytes of it that pieces use; 0: it is never copied */
};

struct staging {
    int slots; /* message k is in slot k % slots */
    size_t slot_bytes;
    char *memory; /* [slots][slot_bytes] page-locked */
    struct staging_buffer *buffer;
    int part_count;
    struct staging_part *part;
    int64_t begun, copied; /* sending: parts, counted over all messages */
    size_t *arrived;       /* [slots][part_count] receiving: bytes */
    int *parts_on_device;  /* [slots] receiving: parts on the device, including those that are never copied */
    int unneeded;
    int ready_first, ready_count, *ready; /* [slots * part_count] receiving: indices in `arrived` of complete parts */
    int first, count;                     /* batches of copies in flight, oldest first */
    struct batch {
        struct hapt_event *event;
        int slot, parts;
    } batch[MAX_BATCHES];
};

/* ---- create and destroy ---- */

static void grow_range(struct staging_buffer *buffer, size_t first, size_t end)
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
        if (piece->runs.count == 0) grow_range(its, piece->offset, piece->offset + piece->bytes);
        for (int r = 0; r < piece->runs.count; r++) {
            const struct hapt_strided *run = &piece->runs.part[r];
            if (run->count > 0) grow_range(its, run->offset, run->offset + (run->count - 1) * run->stride + run->run);
        }
        its->runs = its->runs || piece->runs.count > 0;
    }
}

static void find_direct(struct hapt_comm_thread *comm_thread, const struct hapt_flow_options *options,
                        struct staging_buffer *buffer)
{
    for (int b = 0; b < options->buffer_count; b++) buffer[b].direct = !buffer[b].runs;
    for (int p = 0; p < options->piece_count; p++) {
        const struct hapt_piece *piece = &options->piece[p];
        if (!comm_thread->transfer->takes_device ||
            !comm_thread->transfer->takes_device(comm_thread->context, piece->peer))
            buffer[piece->buffer].direct = false;
    }
}

static int parts_of(const struct staging_buffer *buffer)
{
    if (buffer->end == 0 || buffer->direct) return 0;
    return buffer->runs ? 1 : (int)((buffer->end - buffer->first + PART_BYTES - 1) / PART_BYTES);
}

/* Bytes of [first, end) of a buffer that are in the part. */
static size_t within(const struct staging_part *part, size_t first, size_t end)
{
    const size_t from = first > part->first ? first : part->first, part_end = part->first + part->bytes;
    const size_t to = end < part_end ? end : part_end;
    return from < to ? to - from : 0;
}

static void divide_into_parts(const struct hapt_flow_options *options, struct staging *staging)
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

enum hapt_status staging_create(struct hapt_comm_thread *comm_thread, struct flow *flow)
{
    const struct hapt_flow_options *options = &flow->options;
    struct staging *made;
    void *memory;
    HAPT_NEW(made, &comm_thread->arena, 1);
    HAPT_NEW(made->buffer, &comm_thread->arena, options->buffer_count);
    made->slots = options->slot_count < options->peer_slots ? options->slot_count : options->peer_slots;
    measure(options, made->buffer);
    find_direct(comm_thread, options, made->buffer);
    for (int b = 0; b < options->buffer_count; b++) {
        made->buffer[b].at = made->slot_bytes;
        made->buffer[b].part = made->part_count;
        made->slot_bytes += made->buffer[b].direct ? 0 : hapt_align(made->buffer[b].end);
        made->part_count += parts_of(&made->buffer[b]);
    }
    const size_t entries = (size_t)made->slots * (size_t)made->part_count;
    HAPT_NEW(made->part, &comm_thread->arena, made->part_count);
    HAPT_NEW(made->arrived, &comm_thread->arena, entries);
    HAPT_NEW(made->ready, &comm_thread->arena, entries);
    HAPT_NEW(made->parts_on_device, &comm_thread->arena, made->slots);
    divide_into_parts(options, made);
    for (int s = 0; s < made->slots; s++) made->parts_on_device[s] = made->unneeded;
    flow->staging = made;
    if (made->slot_bytes == 0) return HAPT_OK;
    HAPT_TRY(hapt_backend_pin(comm_thread->backend, (size_t)made->slots * made->slot_bytes, &memory));
    made->memory = memset(memory, 0, (size_t)made->slots * made->slot_bytes);
    return HAPT_OK;
}

void staging_destroy(struct hapt_comm_thread *comm_thread, struct flow *flow)
{
    if (flow->staging && flow->staging->memory) comm_thread->backend->unpin(flow->staging->memory);
    flow->staging = NULL;
}

bool hapt_comm_thread_copies(const struct hapt_comm_thread *comm_thread, int flow)
{
    const struct staging *staging = comm_thread->flow[flow]->staging;
    return staging && staging->memory;
}

/* ---- addresses and arrivals ---- */

static char *device_base(const struct flow *flow, int slot, int buffer)
{
    return flow->options.base[(size_t)slot * (size_t)flow->options.buffer_count + (size_t)buffer];
}

/* Slot of message `sequence` on the device. */
static int device_slot(const struct flow *flow, int64_t sequence)
{
    const int index = (int)(sequence % flow->options.slot_count);
    return flow->options.sends ? flow->queue_slot[index] : index;
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

/* The part that contains a byte of the piece. */
static int part_at(const struct staging *staging, const struct hapt_piece *piece, size_t offset)
{
    const struct staging_buffer *buffer = &staging->buffer[piece->buffer];
    return buffer->runs ? buffer->part : buffer->part + (int)((piece->offset + offset - buffer->first) / PART_BYTES);
}

bool staging_is_copied(const struct flow *flow, int64_t sequence, const struct hapt_piece *piece, size_t offset,
                       size_t bytes)
{
    const struct staging *staging = flow->staging;
    return staging->buffer[piece->buffer].direct || bytes == 0 ||
           staging->copied > sequence * staging->part_count + part_at(staging, piece, offset + bytes - 1);
}

void staging_add_arrived(struct flow *flow, int64_t sequence, const struct hapt_piece *piece, size_t offset,
                         size_t bytes)
{
    struct staging *staging = flow->staging;
    const int entries = staging->slots * staging->part_count, slot = (int)(sequence % staging->slots);
    if (bytes == 0 || staging->buffer[piece->buffer].direct) return;
    for (int p = part_at(staging, piece, offset); p <= part_at(staging, piece, offset + bytes - 1); p++) {
        const struct staging_part *part = &staging->part[p];
        const int index = slot * staging->part_count + p;
        staging->arrived[index] += staging->buffer[part->buffer].runs
                                       ? bytes
                                       : within(part, piece->offset + offset, piece->offset + offset + bytes);
        if (staging->arrived[index] == part->needed)
            staging->ready[(staging->ready_first + staging->ready_count++) % entries] = index;
    }
}

bool staging_finish_message(struct flow *flow)
{
    struct staging *staging = flow->staging;
    const int64_t sequence = atomic_load(&flow->on_device_count);
    const int slot = (int)(sequence % staging->slots);
    for (int c = 0; c < flow->channel_count; c++)
        if (atomic_load(&flow->channel[c].received) <= sequence) return false;
    if (staging->parts_on_device[slot] < staging->part_count) return false;
    staging->parts_on_device[slot] = staging->unneeded;
    if (staging->part_count > 0)
        memset(staging->arrived + slot * staging->part_count, 0,
               (size_t)staging->part_count * sizeof *staging->arrived);
    return true;
}

/* ---- copies ---- */

/* A copy that can start: a part, its host slot and its device buffer. */
struct copy_task {
    int part, slot;
    char *device;
};

static bool next_out(const struct flow *flow, struct copy_task *task)
{
    const struct staging *staging = flow->staging;
    if (staging->part_count == 0) return false;
    const int64_t message = staging->begun / staging->part_count;
    if (message >= atomic_load(&flow->queued) || message >= atomic_load(&flow->sent) + staging->slots) return false;
    *task = (struct copy_task){.part = (int)(staging->begun % staging->part_count),
                               .slot = (int)(message % staging->slots)};
    task->device = device_base(flow, device_slot(flow, message), staging->part[task->part].buffer);
    return true;
}

static bool next_in(const struct flow *flow, struct copy_task *task)
{
    const struct staging *staging = flow->staging;
    if (staging->ready_count == 0) return false;
    const int index = staging->ready[staging->ready_first];
    *task = (struct copy_task){.part = index % staging->part_count, .slot = index / staging->part_count};
    task->device = device_base(flow, task->slot, staging->part[task->part].buffer);
    return true;
}

static bool next(const struct flow *flow, struct copy_task *task)
{
    return flow->options.sends ? next_out(flow, task) : next_in(flow, task);
}

static enum hapt_status begin(const struct hapt_comm_thread *comm_thread, struct flow *flow, struct hapt_queue *queue,
                              const struct copy_task *task)
{
    struct staging *staging = flow->staging;
    const struct staging_part *part = &staging->part[task->part];
    char *host = slot_base(staging, task->slot, part->buffer) + part->first, *device = task->device + part->first;
    if (flow->options.sends) {
        staging->begun++;
        return part->needed == 0 ? HAPT_OK : comm_thread->backend->copy(queue, host, device, part->bytes);
    }
    staging->ready_first = (staging->ready_first + 1) % (staging->slots * staging->part_count);
    staging->ready_count--;
    return comm_thread->backend->copy(queue, device, host, part->bytes);
}

/* Starts copies of parts of one slot, about PART_BYTES in total, and records an event after them. */
static void begin_batch(struct hapt_comm_thread *comm_thread, struct flow *flow, struct poll_result *result,
                        struct copy_task *task)
{
    struct staging *staging = flow->staging;
    struct hapt_queue *queue = comm_thread->backend->queue(
        comm_thread->device, flow->options.sends ? HAPT_QUEUE_COPY_OUT : HAPT_QUEUE_COPY_IN);
    struct batch made = {.slot = task->slot};
    size_t bytes = 0;
    do {
        result->status = begin(comm_thread, flow, queue, task);
        bytes += staging->part[task->part].bytes;
        made.parts++;
    } while (result->status == HAPT_OK && bytes < PART_BYTES && next(flow, task) && task->slot == made.slot);
    if (result->status != HAPT_OK) return;
    made.event = comm_thread->backend->record(queue);
    staging->batch[(staging->first + staging->count++) % MAX_BATCHES] = made;
    comm_thread->copies[!flow->options.sends]++;
    result->progress = true;
}

static void end_batches(struct hapt_comm_thread *comm_thread, struct flow *flow, struct poll_result *result)
{
    struct staging *staging = flow->staging;
    while (staging->count > 0 && result->status == HAPT_OK) {
        const struct batch *batch = &staging->batch[staging->first];
        if (!comm_thread->backend->done(batch->event)) return;
        result->status = comm_thread->backend->wait(batch->event); /* complete already: returns its status */
        if (flow->options.sends)
            staging->copied += batch->parts;
        else
            staging->parts_on_device[batch->slot] += batch->parts;
        staging->first = (staging->first + 1) % MAX_BATCHES;
        staging->count--;
        comm_thread->copies[!flow->options.sends]--;
        result->progress = true;
    }
}

void staging_advance(struct hapt_comm_thread *comm_thread, struct flow *flow, struct poll_result *result)
{
    struct staging *staging = flow->staging;
    struct copy_task task;
    end_batches(comm_thread, flow, result);
    while (result->status == HAPT_OK && staging->count < MAX_BATCHES &&
           comm_thread->copies[!flow->options.sends] < MAX_QUEUE_BATCHES && next(flow, &task))
        begin_batch(comm_thread, flow, result, &task);
    if (staging->count > 0) result->in_flight = true;
    if (!flow->options.sends && atomic_load(&flow->on_device_count) < atomic_load(&flow->expected))
        result->unfinished = true;
}
