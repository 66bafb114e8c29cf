/*
 * The courier: one communication thread per rank that moves stage boundaries while the compute thread works.
 *
 * A thread, since polling between kernels measured worse where the processor computes: four slowed ranks on two cores,
 * a trunk of 150 Mbit/s, steps 1.36 times as long (1.20 to 1.80). Where polls cost the device nothing they gained 4 %
 * (0.94 to 0.99).
 *
 * Counters of messages are the only state both threads touch: the compute thread raises queued, expected and freed, the
 * courier raises sent and received. The mutex orders waiting and waking, not the data.
 */
#include "courier.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

/* Between tests that found nothing: a share of the time since something moved, within bounds. What arrives is seen late
 * by that share at most, and a courier that waits long hardly costs its core anything. */
#define POLL_SHARE 0.1
#define POLL_SHORTEST_S 50e-6
#define POLL_LONGEST_S 400e-6
/* Where peers ring, or the network wakes: only for what a full queue inside the library holds back. */
#define POLL_RUNG_S 20e-3
#define CONNECT_LEAST_S 10.0 /* connections are made in milliseconds; a crowded machine takes its time */

static struct timespec at_time(double time_s)
{
    struct timespec due = {.tv_sec = (time_t)time_s};
    due.tv_nsec = (long)((time_s - (double)due.tv_sec) * 1e9);
    return due;
}

enum hapt_status hapt_courier_create(const struct hapt_transfer *transfer, MPI_Comm world, const struct hapt_path *path,
                                     double timeout_s, struct hapt_courier **courier)
{
    struct hapt_courier *made = calloc(1, sizeof *made);
    enum hapt_status status = HAPT_OK;
    if (!made) status = hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for a courier");
    status = hapt_link_all_or_none(world, "a courier's making", status);
    if (status != HAPT_OK) {
        free(made);
        return status;
    }
    hapt_arena_init(&made->arena);
    made->transfer = transfer;
    made->kick = -1;
    made->timeout_s = timeout_s;
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&made->mutex, NULL);
    pthread_cond_init(&made->work, &attributes);
    pthread_cond_init(&made->news, &attributes);
    pthread_condattr_destroy(&attributes);
    status = transfer->open(world, path, &made->context);
    if (status != HAPT_OK) {
        hapt_arena_release(&made->arena);
        free(made);
        return status;
    }
    *courier = made;
    return HAPT_OK;
}

static enum hapt_status add_channels(struct hapt_courier *courier, struct flow *flow)
{
    HAPT_NEW(flow->channel, &courier->arena, flow->options.piece_count);
    HAPT_NEW(flow->piece_channel, &courier->arena, flow->options.piece_count);
    for (int i = 0; i < flow->options.piece_count; i++) {
        const int peer = flow->options.piece[i].peer;
        int c = 0;
        while (c < flow->channel_count && flow->channel[c].peer != peer) c++;
        if (c == flow->channel_count) {
            struct channel *channel = &flow->channel[flow->channel_count++];
            channel->peer = peer;
            HAPT_NEW(channel->piece, &courier->arena, flow->options.piece_count);
            HAPT_NEW(channel->released_s, &courier->arena, flow->options.peer_slots);
        }
        flow->channel[c].piece[flow->channel[c].piece_count++] = flow->options.piece[i];
        flow->channel[c].chunks +=
            (int)((flow->options.piece[i].bytes + HAPT_LINK_CHUNK_BYTES - 1) / HAPT_LINK_CHUNK_BYTES);
        flow->channel[c].bytes += flow->options.piece[i].bytes;
        flow->piece_channel[i] = c;
        flow->message_bytes += flow->options.piece[i].modelled_bytes ? flow->options.piece[i].modelled_bytes
                                                                     : flow->options.piece[i].bytes;
        struct window *window = flow->options.sends ? &flow->window : &flow->channel[c].window;
        if (flow->options.piece[i].runs.count > 0 && !window->buffer && !flow->options.pair)
            HAPT_NEW(window->buffer, &courier->arena, WINDOW * HAPT_LINK_CHUNK_BYTES);
    }
    return HAPT_OK;
}

/* Messages and what answers them. */
static enum hapt_status announce(const struct hapt_courier *courier, const struct flow *flow)
{
    const struct hapt_transfer *transfer = courier->transfer;
    for (int c = 0; c < flow->channel_count && transfer->announce; c++) {
        HAPT_TRY(
            transfer->announce(courier->context, flow->channel[c].peer, 2 * flow->options.tag, flow->options.sends));
        HAPT_TRY(transfer->announce(courier->context, flow->channel[c].peer, 2 * flow->options.tag + 1,
                                    !flow->options.sends));
    }
    return HAPT_OK;
}

void hapt_courier_use_device(struct hapt_courier *courier, const struct hapt_backend *backend,
                             struct hapt_device *device)
{
    courier->backend = backend;
    courier->device = device;
}

enum hapt_status hapt_courier_add(struct hapt_courier *courier, const struct hapt_flow_options *options, int *flow)
{
    HAPT_ASSERT(!courier->running && options->piece_count > 0 && options->slot_count > 0 && options->peer_slots > 0);
    HAPT_ASSERT(!options->on_device || (courier->backend && !options->stamped));
    HAPT_ASSERT(!options->pair || options->on_device);
    for (int i = 0; i < options->piece_count; i++) {
        const struct hapt_piece *piece = &options->piece[i];
        HAPT_ASSERT((piece->modelled_bytes > 0 || !options->stamped) &&
                    (piece->modelled_bytes == 0 || piece->bytes <= HAPT_LINK_CHUNK_BYTES));
        HAPT_ASSERT(!options->stamped || (piece->bytes >= sizeof(double) && piece->runs.count == 0));
    }
    if (courier->flow_count == courier->flow_capacity) {
        struct flow **grown;
        const int capacity = courier->flow_capacity ? 2 * courier->flow_capacity : 8;
        HAPT_NEW(grown, &courier->arena, capacity);
        if (courier->flow_count) memcpy(grown, courier->flow, (size_t)courier->flow_count * sizeof *grown);
        courier->flow = grown;
        courier->flow_capacity = capacity;
    }
    struct flow *made;
    HAPT_NEW(made, &courier->arena, 1);
    made->options = *options;
    struct hapt_piece *piece;
    void **base;
    const size_t addresses = (size_t)options->slot_count * (size_t)options->buffer_count;
    HAPT_NEW(piece, &courier->arena, options->piece_count);
    HAPT_NEW(base, &courier->arena, addresses);
    memcpy(piece, options->piece, (size_t)options->piece_count * sizeof *piece);
    memcpy(base, options->base, addresses * sizeof *base);
    made->options.piece = piece;
    made->options.base = base;
    if (options->pair) {
        struct hapt_pair *pair;
        HAPT_NEW(pair, &courier->arena, options->piece_count);
        memcpy(pair, options->pair, (size_t)options->piece_count * sizeof *pair);
        made->options.pair = pair;
    }
    HAPT_NEW(made->queue_slot, &courier->arena, options->slot_count);
    HAPT_NEW(made->queue_ready_s, &courier->arena, options->slot_count);
    HAPT_NEW(made->last_of_slot, &courier->arena, options->slot_count);
    HAPT_NEW(made->slot_due_s, &courier->arena, options->slot_count);
    HAPT_NEW(made->freed_s, &courier->arena, options->peer_slots);
    HAPT_TRY(add_channels(courier, made));
    HAPT_TRY(announce(courier, made));
    for (int c = 0;
         c < made->channel_count && courier->transfer->rate && made->options.bandwidth <= 0 && !options->pair; c++) {
        struct channel *channel = &made->channel[c];
        channel->counts = courier->transfer->rate(courier->context, channel->peer, 2 * options->tag, &channel->counted);
        channel->taken = channel->counted;
    }
    *flow = courier->flow_count;
    courier->flow[courier->flow_count++] = made;
    if (options->pair) return meeting_prepare(courier, made);
    return options->on_device ? staging_create(courier, made) : HAPT_OK;
}

static void wake_compute(struct hapt_courier *courier)
{
    pthread_mutex_lock(&courier->mutex);
    pthread_cond_broadcast(&courier->news);
    pthread_mutex_unlock(&courier->mutex);
}

/* Under the mutex. */
static void kick_courier(struct hapt_courier *courier)
{
    courier->kicks++;
    if (courier->kick >= 0)
        eventfd_write(courier->kick, 1);
    else if (courier->bells)
        bells_ring_own(courier->bells);
    else
        pthread_cond_signal(&courier->work);
}

static void wake_courier(struct hapt_courier *courier)
{
    pthread_mutex_lock(&courier->mutex);
    kick_courier(courier);
    pthread_mutex_unlock(&courier->mutex);
}

/* Sleeps until `until_s` (NAN: for ever), or until the compute thread brings work it brought since `kicks`. */
static void sleep_courier(struct hapt_courier *courier, uint64_t kicks, double until_s)
{
    pthread_mutex_lock(&courier->mutex);
    if (courier->kicks == kicks) {
        if (isnan(until_s)) {
            pthread_cond_wait(&courier->work, &courier->mutex);
        } else {
            const struct timespec due = at_time(until_s);
            pthread_cond_timedwait(&courier->work, &courier->mutex, &due);
        }
    }
    pthread_mutex_unlock(&courier->mutex);
}

/* Sleeps where the network wakes it, or the compute thread. */
static void sleep_on_network(const struct hapt_courier *courier, double until_s)
{
    eventfd_t kicks;
    courier->transfer->wait(courier->context, courier->kick, until_s);
    eventfd_read(courier->kick, &kicks); /* does not block: where nobody kicked there is nothing to take */
}

/* Whether the network wakes whom a message of any peer concerns. */
static bool all_wake(const struct hapt_courier *courier)
{
    if (!courier->transfer->wait || courier->bells || courier->backend) return false; /* copies wake nobody */
    for (int f = 0; f < courier->flow_count; f++)
        for (int c = 0; c < courier->flow[f]->channel_count; c++)
            if (!courier->transfer->wakes(courier->context, courier->flow[f]->channel[c].peer)) return false;
    return true;
}

/* Whether every peer rings when it sends something. */
static bool all_ring(const struct hapt_courier *courier)
{
    if (!courier->bells || courier->backend) return false; /* copies ring nobody */
    for (int f = 0; f < courier->flow_count; f++)
        for (int c = 0; c < courier->flow[f]->channel_count; c++)
            if (!bells_reach(courier->bells, courier->flow[f]->channel[c].peer)) return false;
    return true;
}

static void *run_courier(void *argument)
{
    struct hapt_courier *courier = argument;
    pthread_setname_np(pthread_self(), "hapt-comm");
    double moved_s = hapt_time_s();
    const bool woken = courier->kick >= 0 || all_ring(courier);
    const double longest_s = woken ? POLL_RUNG_S : POLL_LONGEST_S, shortest_s = woken ? POLL_RUNG_S : POLL_SHORTEST_S;
    hapt_link_sharpen_timers();
    /* The device becomes this thread's, too, for message libraries that use it. */
    if (courier->backend) courier->backend->record(courier->backend->queue(courier->device, HAPT_QUEUE_COPY_OUT));
    for (;;) {
        const unsigned rung = courier->bells ? bells_count(courier->bells) : 0;
        pthread_mutex_lock(&courier->mutex);
        const uint64_t kicks = courier->kicks;
        const bool stopping = courier->stopping;
        pthread_mutex_unlock(&courier->mutex);
        struct pass pass = {.now_s = hapt_time_s(), .wake_s = NAN};
        for (int f = 0; f < courier->flow_count && pass.status == HAPT_OK; f++) {
            struct flow *flow = courier->flow[f];
            if (flow->options.sends)
                (flow->options.pair ? meeting_advance_sender : hapt_flow_advance_sender)(courier, flow, &pass);
            else
                (flow->options.pair ? meeting_advance_receiver : hapt_flow_advance_receiver)(courier, flow, &pass);
        }
        if (pass.news) wake_compute(courier);
        if (pass.status != HAPT_OK) hapt_link_await_end(INFINITY); /* connections break when a peer dies */
        if (pass.status != HAPT_OK || (stopping && !pass.unfinished)) {
            pthread_mutex_lock(&courier->mutex);
            courier->status = pass.status;
            courier->finished = true;
            pthread_cond_broadcast(&courier->news);
            pthread_mutex_unlock(&courier->mutex);
            return NULL;
        }
        if (pass.progress) {
            moved_s = pass.now_s;
            continue;
        }
        const double poll_s = fmin(fmax(POLL_SHARE * (pass.now_s - moved_s), shortest_s), longest_s);
        double until_s = pass.wake_s;
        if (pass.in_flight) until_s = fmin(until_s, pass.now_s + poll_s); /* fmin ignores NAN */
        if (courier->kick >= 0)
            sleep_on_network(courier, until_s);
        else if (courier->bells)
            bells_wait(courier->bells, rung, until_s);
        else
            sleep_courier(courier, kicks, until_s);
    }
}

enum hapt_status hapt_courier_start(struct hapt_courier *courier)
{
    if (courier->transfer->connect)
        HAPT_TRY(courier->transfer->connect(courier->context, fmax(courier->timeout_s, CONNECT_LEAST_S)));
    if (courier->flow_count == 0) return HAPT_OK;
    if (all_wake(courier)) courier->kick = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    /* Signals belong to the compute thread. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = pthread_create(&courier->thread, NULL, run_courier, courier);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no communication thread: %s", strerror(error));
    courier->running = true;
    return HAPT_OK;
}

/* The peer whose part of message `sequence` is missing: for messages. */
static int lagging_peer(const struct flow *flow, int64_t sequence)
{
    for (int c = 0; c < flow->channel_count; c++)
        if (!flow->options.sends && atomic_load(&flow->channel[c].received) <= sequence) return flow->channel[c].peer;
    return flow->channel[0].peer;
}

static enum hapt_status timed_out(const struct hapt_courier *courier, const struct flow *flow, int64_t sequence)
{
    const struct hapt_flow_options *options = &flow->options;
    hapt_link_await_end(courier->timeout_s);
    const long step = (long)(options->first_step + sequence / options->per_step),
               microbatch = (long)(sequence % options->per_step);
    return hapt_fail(HAPT_ERR_COMM, "look for a rank that died or hangs; --timeout sets the limit",
                     "stage %d waited %.3g s for %s of step %ld, microbatch %ld, %s stage %d (rank %d on host %s)",
                     options->stage, courier->timeout_s, options->what, step, microbatch,
                     options->sends ? "to be taken by" : "from", options->peer_stage, lagging_peer(flow, sequence),
                     hapt_env_host(lagging_peer(flow, sequence)));
}

/* Waits until *counter > sequence. */
static enum hapt_status wait_counter(struct hapt_courier *courier, const struct flow *flow, const atomic_llong *counter,
                                     int64_t sequence)
{
    if (atomic_load(counter) > sequence) return HAPT_OK;
    HAPT_ASSERT(courier->running);
    const struct timespec deadline = at_time(hapt_time_s() + courier->timeout_s);
    enum hapt_status status = HAPT_OK;
    bool late = false;
    pthread_mutex_lock(&courier->mutex);
    while (atomic_load(counter) <= sequence && status == HAPT_OK && !late) {
        late = pthread_cond_timedwait(&courier->news, &courier->mutex, &deadline) == ETIMEDOUT;
        status = courier->status;
    }
    pthread_mutex_unlock(&courier->mutex);
    if (atomic_load(counter) > sequence) return HAPT_OK;
    return status != HAPT_OK ? status : timed_out(courier, flow, sequence);
}

void hapt_courier_expect(struct hapt_courier *courier, int flow, int64_t count)
{
    HAPT_ASSERT(!courier->flow[flow]->options.sends);
    atomic_fetch_add(&courier->flow[flow]->expected, count);
    wake_courier(courier);
}

static void hand_over(struct hapt_courier *courier, int flow, int slot, double ready_s)
{
    struct flow *sender = courier->flow[flow];
    const int64_t sequence = atomic_load(&sender->queued);
    HAPT_ASSERT(sender->options.sends && slot >= 0 && slot < sender->options.slot_count);
    /* At most one message a slot, so the queue never overflows. */
    HAPT_ASSERT(atomic_load(&sender->sent) >= sender->last_of_slot[slot]);
    const int place = (int)(sequence % sender->options.slot_count);
    HAPT_ASSERT(sequence - atomic_load(&sender->sent) < sender->options.slot_count);
    sender->queue_slot[place] = slot;
    sender->queue_ready_s[place] = ready_s;
    sender->last_of_slot[slot] = sequence + 1;
    atomic_store(&sender->queued, sequence + 1);
    wake_courier(courier);
}

void hapt_courier_send(struct hapt_courier *courier, int flow, int slot)
{
    hand_over(courier, flow, slot, hapt_time_s());
}

void hapt_courier_send_at(struct hapt_courier *courier, int flow, int slot, double ready_s)
{
    hand_over(courier, flow, slot, ready_s);
}

enum hapt_status hapt_courier_wait_sent(struct hapt_courier *courier, int flow, int slot)
{
    const struct flow *sender = courier->flow[flow];
    return wait_counter(courier, sender, &sender->sent, sender->last_of_slot[slot] - 1);
}

enum hapt_status hapt_courier_wait_received(struct hapt_courier *courier, int flow, int64_t sequence)
{
    struct flow *receiver = courier->flow[flow];
    for (int c = 0; c < receiver->channel_count; c++)
        HAPT_TRY(wait_counter(courier, receiver, &receiver->channel[c].received, sequence));
    return receiver->staging ? wait_counter(courier, receiver, &receiver->landed, sequence) : HAPT_OK;
}

double hapt_courier_due_s(struct hapt_courier *courier, int flow, int slot)
{
    return courier->flow[flow]->slot_due_s[slot];
}

void hapt_courier_free(struct hapt_courier *courier, int flow)
{
    hapt_courier_free_at(courier, flow, hapt_time_s());
}

void hapt_courier_free_at(struct hapt_courier *courier, int flow, double time_s)
{
    struct flow *receiver = courier->flow[flow];
    for (int c = 0; c < receiver->channel_count; c++)
        HAPT_ASSERT(atomic_load(&receiver->channel[c].received) > atomic_load(&receiver->freed));
    receiver->freed_s[atomic_load(&receiver->freed) % receiver->options.peer_slots] = time_s;
    atomic_fetch_add(&receiver->freed, 1);
    wake_courier(courier);
}

double hapt_courier_active_s(struct hapt_courier *courier, int flow)
{
    return 1e-9 * (double)atomic_load(&courier->flow[flow]->active_ns);
}

/* Once a message or more went since the compute thread was told last. */
static double take_counted(struct hapt_courier *courier, struct channel *channel)
{
    double time_s = 0;
    pthread_mutex_lock(&courier->mutex);
    const double bytes = channel->counted.bytes - channel->taken.bytes;
    if (bytes >= (double)channel->bytes) {
        time_s = (channel->counted.busy_s - channel->taken.busy_s) * (double)channel->bytes / bytes;
        channel->taken = channel->counted;
    }
    pthread_mutex_unlock(&courier->mutex);
    return time_s;
}

double hapt_courier_message_s(struct hapt_courier *courier, int number, bool *counted)
{
    struct flow *flow = courier->flow[number];
    long long longest_ns = 0;
    double longest_s = 0;
    *counted = false;
    for (int c = 0; c < flow->channel_count; c++) {
        *counted = *counted || flow->channel[c].counts;
        if (flow->channel[c].counts && flow->options.sends)
            longest_s = fmax(longest_s, take_counted(courier, &flow->channel[c]));
    }
    if (*counted) return longest_s;
    if (flow->options.sends) return 1e-9 * (double)atomic_exchange(&flow->shortest_ns, 0);
    for (int c = 0; c < flow->channel_count; c++) {
        const long long shortest_ns = atomic_exchange(&flow->channel[c].shortest_ns, 0);
        if (shortest_ns > longest_ns) longest_ns = shortest_ns;
    }
    return 1e-9 * (double)longest_ns;
}

enum hapt_status hapt_courier_drain(struct hapt_courier *courier)
{
    if (!courier->running) return HAPT_OK;
    const struct timespec deadline = at_time(hapt_time_s() + courier->timeout_s);
    bool late = false;
    pthread_mutex_lock(&courier->mutex);
    courier->stopping = true;
    kick_courier(courier);
    while (!courier->finished && !late)
        late = pthread_cond_timedwait(&courier->news, &courier->mutex, &deadline) == ETIMEDOUT;
    const enum hapt_status status = courier->status;
    const bool finished = courier->finished;
    pthread_mutex_unlock(&courier->mutex);
    if (!finished) hapt_link_await_end(courier->timeout_s);
    if (!finished)
        return hapt_fail(HAPT_ERR_COMM, "look for a rank that died or hangs; --timeout sets the limit",
                         "stage %d waited %.3g s for its peers to take its last messages",
                         courier->flow[0]->options.stage, courier->timeout_s);
    pthread_join(courier->thread, NULL);
    courier->running = false;
    return status;
}

void hapt_courier_destroy(struct hapt_courier *courier)
{
    if (!courier) return;
    HAPT_ASSERT(!courier->running);
    bells_destroy(courier->bells);
    for (int f = 0; f < courier->flow_count; f++) staging_destroy(courier, courier->flow[f]);
    courier->transfer->close(courier->context);
    if (courier->kick >= 0) close(courier->kick);
    pthread_cond_destroy(&courier->work);
    pthread_cond_destroy(&courier->news);
    pthread_mutex_destroy(&courier->mutex);
    hapt_arena_release(&courier->arena);
    free(courier);
}
