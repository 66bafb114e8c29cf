/*
 * The communication thread: one per rank, it transfers stage boundary tensors while the compute thread works.
 *
 * It is a separate thread, because polling between kernels was slower if the CPU computes: with four slowed ranks on
 * two cores and a trunk of 150 Mbit/s, steps took 1.36 times as long (1.20 to 1.80). If polling costs the device
 * nothing, polling between kernels was 4 % faster (0.94 to 0.99).
 *
 * Message counters are the only state that both threads write: the compute thread raises queued, expected and freed,
 * the communication thread raises sent and received. The mutex orders waiting and waking, not the data.
 */
#include "comm_thread.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

/* Pause between polls without progress: a share of the time since the last progress, within bounds. So a message is
 * seen late by at most that share, and a long wait costs hardly any CPU time. */
#define POLL_SHARE 0.1
#define MIN_POLL_S 50e-6
#define MAX_POLL_S 400e-6
/* With wakeups from peers or the network: polling is then needed only for data in a full queue of the library. */
#define POLL_WITH_WAKEUPS_S 20e-3
#define MIN_CONNECT_S 10.0 /* connecting takes milliseconds; this allows for an overloaded machine */

enum hapt_status hapt_comm_thread_create(const struct hapt_transfer *transfer, MPI_Comm world,
                                         const struct hapt_path *path, double timeout_s,
                                         struct hapt_comm_thread **comm_thread)
{
    struct hapt_comm_thread *made = calloc(1, sizeof *made);
    enum hapt_status status = HAPT_OK;
    if (!made) status = hapt_fail(HAPT_ERR_MEMORY, NULL, "host memory exhausted: a communication thread");
    status = hapt_link_all_or_none(world, "creating a communication thread", status);
    if (status != HAPT_OK) {
        free(made);
        return status;
    }
    hapt_arena_init(&made->arena);
    made->transfer = transfer;
    made->event_fd = -1;
    made->timeout_s = timeout_s;
    pthread_mutex_init(&made->mutex, NULL);
    hapt_time_condition_init(&made->work);
    hapt_time_condition_init(&made->completion);
    status = transfer->open(world, path, &made->context);
    if (status != HAPT_OK) {
        hapt_arena_release(&made->arena);
        free(made);
        return status;
    }
    *comm_thread = made;
    return HAPT_OK;
}

static enum hapt_status add_channels(struct hapt_comm_thread *comm_thread, struct flow *flow)
{
    HAPT_NEW(flow->channel, &comm_thread->arena, flow->options.piece_count);
    HAPT_NEW(flow->piece_channel, &comm_thread->arena, flow->options.piece_count);
    for (int i = 0; i < flow->options.piece_count; i++) {
        const int peer = flow->options.piece[i].peer;
        int c = 0;
        while (c < flow->channel_count && flow->channel[c].peer != peer) c++;
        if (c == flow->channel_count) {
            struct channel *channel = &flow->channel[flow->channel_count++];
            channel->peer = peer;
            HAPT_NEW(channel->piece, &comm_thread->arena, flow->options.piece_count);
            HAPT_NEW(channel->released_s, &comm_thread->arena, flow->options.peer_slots);
        }
        flow->channel[c].piece[flow->channel[c].piece_count++] = flow->options.piece[i];
        flow->channel[c].chunks +=
            (int)((flow->options.piece[i].bytes + HAPT_LINK_CHUNK_BYTES - 1) / HAPT_LINK_CHUNK_BYTES);
        flow->channel[c].bytes += flow->options.piece[i].bytes;
        flow->piece_channel[i] = c;
        flow->message_bytes += flow->options.piece[i].modelled_bytes ? flow->options.piece[i].modelled_bytes
                                                                     : flow->options.piece[i].bytes;
        struct chunk_queue *queue = flow->options.sends ? &flow->chunk_queue : &flow->channel[c].chunk_queue;
        if (flow->options.piece[i].runs.count > 0 && !queue->buffer && !flow->options.pair)
            HAPT_NEW(queue->buffer, &comm_thread->arena, MAX_CHUNKS_IN_FLIGHT * HAPT_LINK_CHUNK_BYTES);
    }
    return HAPT_OK;
}

/* Announces the messages of a flow and their credits. */
static enum hapt_status announce(const struct hapt_comm_thread *comm_thread, const struct flow *flow)
{
    const struct hapt_transfer *transfer = comm_thread->transfer;
    for (int c = 0; c < flow->channel_count && transfer->announce; c++) {
        HAPT_TRY(transfer->announce(comm_thread->context, flow->channel[c].peer, 2 * flow->options.tag,
                                    flow->options.sends));
        HAPT_TRY(transfer->announce(comm_thread->context, flow->channel[c].peer, 2 * flow->options.tag + 1,
                                    !flow->options.sends));
    }
    return HAPT_OK;
}

void hapt_comm_thread_use_device(struct hapt_comm_thread *comm_thread, const struct hapt_backend *backend,
                                 struct hapt_device *device)
{
    comm_thread->backend = backend;
    comm_thread->device = device;
}

enum hapt_status hapt_comm_thread_add(struct hapt_comm_thread *comm_thread, const struct hapt_flow_options *options,
                                      int *flow)
{
    HAPT_ASSERT(!comm_thread->running && options->piece_count > 0 && options->slot_count > 0 &&
                options->peer_slots > 0);
    HAPT_ASSERT(!options->on_device || (comm_thread->backend && !options->stamped));
    HAPT_ASSERT(!options->pair || options->on_device);
    for (int i = 0; i < options->piece_count; i++) {
        const struct hapt_piece *piece = &options->piece[i];
        HAPT_ASSERT((piece->modelled_bytes > 0 || !options->stamped) &&
                    (piece->modelled_bytes == 0 || piece->bytes <= HAPT_LINK_CHUNK_BYTES));
        HAPT_ASSERT(!options->stamped || (piece->bytes >= sizeof(double) && piece->runs.count == 0));
    }
    if (comm_thread->flow_count == comm_thread->flow_capacity) {
        struct flow **grown;
        const int capacity = comm_thread->flow_capacity ? 2 * comm_thread->flow_capacity : 8;
        HAPT_NEW(grown, &comm_thread->arena, capacity);
        if (comm_thread->flow_count) memcpy(grown, comm_thread->flow, (size_t)comm_thread->flow_count * sizeof *grown);
        comm_thread->flow = grown;
        comm_thread->flow_capacity = capacity;
    }
    struct flow *made;
    HAPT_NEW(made, &comm_thread->arena, 1);
    made->options = *options;
    struct hapt_piece *piece;
    void **base;
    const size_t addresses = (size_t)options->slot_count * (size_t)options->buffer_count;
    HAPT_NEW(piece, &comm_thread->arena, options->piece_count);
    HAPT_NEW(base, &comm_thread->arena, addresses);
    memcpy(piece, options->piece, (size_t)options->piece_count * sizeof *piece);
    memcpy(base, options->base, addresses * sizeof *base);
    made->options.piece = piece;
    made->options.base = base;
    if (options->pair) {
        struct hapt_pair *pair;
        HAPT_NEW(pair, &comm_thread->arena, options->piece_count);
        memcpy(pair, options->pair, (size_t)options->piece_count * sizeof *pair);
        made->options.pair = pair;
    }
    HAPT_NEW(made->queue_slot, &comm_thread->arena, options->slot_count);
    HAPT_NEW(made->queue_ready_s, &comm_thread->arena, options->slot_count);
    HAPT_NEW(made->queue_turn, &comm_thread->arena, options->slot_count);
    if (options->sends && options->bandwidth > 0) HAPT_TRY(port_open(comm_thread, options->port, &made->port));
    HAPT_NEW(made->last_of_slot, &comm_thread->arena, options->slot_count);
    HAPT_NEW(made->slot_due_s, &comm_thread->arena, options->slot_count);
    HAPT_NEW(made->freed_s, &comm_thread->arena, options->peer_slots);
    HAPT_TRY(add_channels(comm_thread, made));
    HAPT_TRY(announce(comm_thread, made));
    for (int c = 0;
         c < made->channel_count && comm_thread->transfer->rate && made->options.bandwidth <= 0 && !options->pair;
         c++) {
        struct channel *channel = &made->channel[c];
        channel->counts =
            comm_thread->transfer->rate(comm_thread->context, channel->peer, 2 * options->tag, &channel->counted);
        channel->taken = channel->counted;
    }
    *flow = comm_thread->flow_count;
    comm_thread->flow[comm_thread->flow_count++] = made;
    if (options->pair) return device_flow_prepare(comm_thread, made);
    return options->on_device ? staging_create(comm_thread, made) : HAPT_OK;
}

enum hapt_status hapt_comm_thread_pass_on(struct hapt_comm_thread *comm_thread, int received, int sending)
{
    struct flow *flow = comm_thread->flow[received];
    const struct flow **next = flow->next;
    HAPT_ASSERT(!comm_thread->running && !flow->options.sends && comm_thread->flow[sending]->options.sends);
    HAPT_ASSERT(comm_thread->flow[sending]->options.slot_count == flow->options.peer_slots);
    if (flow->next_count == flow->next_capacity) {
        flow->next_capacity = flow->next_capacity ? 2 * flow->next_capacity : 2;
        HAPT_NEW(flow->next, &comm_thread->arena, flow->next_capacity);
        for (int k = 0; k < flow->next_count; k++) flow->next[k] = next[k];
    }
    flow->next[flow->next_count++] = comm_thread->flow[sending];
    return HAPT_OK;
}

static void wake_compute(struct hapt_comm_thread *comm_thread)
{
    pthread_mutex_lock(&comm_thread->mutex);
    pthread_cond_broadcast(&comm_thread->completion);
    pthread_mutex_unlock(&comm_thread->mutex);
}

/* Call with the mutex held. */
static void signal_comm_thread(struct hapt_comm_thread *comm_thread)
{
    comm_thread->wake_count++;
    if (comm_thread->event_fd >= 0)
        eventfd_write(comm_thread->event_fd, 1);
    else if (comm_thread->wakeups)
        wakeups_signal_own(comm_thread->wakeups);
    else
        pthread_cond_signal(&comm_thread->work);
}

static void wake_comm_thread(struct hapt_comm_thread *comm_thread)
{
    pthread_mutex_lock(&comm_thread->mutex);
    signal_comm_thread(comm_thread);
    pthread_mutex_unlock(&comm_thread->mutex);
}

/* Sleeps until `until_s` (NAN: no limit) or until the compute thread has given new work since `wake_count` was read. */
static void sleep_comm_thread(struct hapt_comm_thread *comm_thread, uint64_t wake_count, double until_s)
{
    pthread_mutex_lock(&comm_thread->mutex);
    if (comm_thread->wake_count == wake_count) {
        if (isnan(until_s)) {
            pthread_cond_wait(&comm_thread->work, &comm_thread->mutex);
        } else {
            const struct timespec due = hapt_time_spec(until_s);
            pthread_cond_timedwait(&comm_thread->work, &comm_thread->mutex, &due);
        }
    }
    pthread_mutex_unlock(&comm_thread->mutex);
}

/* Sleeps until the network or the compute thread wakes it. */
static void sleep_on_network(const struct hapt_comm_thread *comm_thread, double until_s)
{
    eventfd_t count;
    comm_thread->transfer->wait(comm_thread->context, comm_thread->event_fd, until_s);
    eventfd_read(comm_thread->event_fd, &count); /* non-blocking: empty if the compute thread did not signal */
}

/* True if the network wakes this thread for messages of every peer. */
static bool all_wake(const struct hapt_comm_thread *comm_thread)
{
    if (!comm_thread->transfer->wait || comm_thread->wakeups || comm_thread->backend)
        return false; /* device copies wake no thread */
    for (int f = 0; f < comm_thread->flow_count; f++)
        for (int c = 0; c < comm_thread->flow[f]->channel_count; c++)
            if (!comm_thread->transfer->wakes(comm_thread->context, comm_thread->flow[f]->channel[c].peer))
                return false;
    return true;
}

/* True if every peer sends a wakeup with each message. */
static bool all_send_wakeups(const struct hapt_comm_thread *comm_thread)
{
    if (!comm_thread->wakeups || comm_thread->backend) return false; /* device copies send no wakeup */
    for (int f = 0; f < comm_thread->flow_count; f++)
        for (int c = 0; c < comm_thread->flow[f]->channel_count; c++)
            if (!wakeups_reach(comm_thread->wakeups, comm_thread->flow[f]->channel[c].peer)) return false;
    return true;
}

static void *run_comm_thread(void *argument)
{
    struct hapt_comm_thread *comm_thread = argument;
    pthread_setname_np(pthread_self(), "hapt-comm");
    double moved_s = hapt_time_s();
    const bool woken = comm_thread->event_fd >= 0 || all_send_wakeups(comm_thread);
    const double longest_s = woken ? POLL_WITH_WAKEUPS_S : MAX_POLL_S,
                 shortest_s = woken ? POLL_WITH_WAKEUPS_S : MIN_POLL_S;
    hapt_link_sharpen_timers();
    /* Make the device current in this thread, for message libraries that use it. */
    if (comm_thread->backend)
        comm_thread->backend->record(comm_thread->backend->queue(comm_thread->device, HAPT_QUEUE_COPY_OUT));
    for (;;) {
        const unsigned wakeup_count = comm_thread->wakeups ? wakeups_count(comm_thread->wakeups) : 0;
        pthread_mutex_lock(&comm_thread->mutex);
        const uint64_t wake_count = comm_thread->wake_count;
        const bool stopping = comm_thread->stopping;
        pthread_mutex_unlock(&comm_thread->mutex);
        struct poll_result result = {.now_s = hapt_time_s(), .wake_s = NAN};
        for (int f = 0; f < comm_thread->flow_count && result.status == HAPT_OK; f++) {
            struct flow *flow = comm_thread->flow[f];
            if (flow->options.sends)
                (flow->options.pair ? device_flow_advance_sender : hapt_flow_advance_sender)(comm_thread, flow,
                                                                                             &result);
            else
                (flow->options.pair ? device_flow_advance_receiver : hapt_flow_advance_receiver)(comm_thread, flow,
                                                                                                 &result);
        }
        if (result.completion) wake_compute(comm_thread);
        if (result.status != HAPT_OK)
            hapt_link_wait_for_job_end(
                INFINITY); /* connections break when a peer dies: another rank may report the cause */
        if (result.status != HAPT_OK || (stopping && !result.unfinished)) {
            pthread_mutex_lock(&comm_thread->mutex);
            comm_thread->status = result.status;
            comm_thread->finished = true;
            pthread_cond_broadcast(&comm_thread->completion);
            pthread_mutex_unlock(&comm_thread->mutex);
            return NULL;
        }
        if (result.progress) {
            moved_s = result.now_s;
            continue;
        }
        const double poll_s = fmin(fmax(POLL_SHARE * (result.now_s - moved_s), shortest_s), longest_s);
        double until_s = result.wake_s;
        if (result.in_flight) until_s = fmin(until_s, result.now_s + poll_s); /* fmin ignores NAN */
        if (comm_thread->event_fd >= 0)
            sleep_on_network(comm_thread, until_s);
        else if (comm_thread->wakeups)
            wakeups_wait(comm_thread->wakeups, wakeup_count, until_s);
        else
            sleep_comm_thread(comm_thread, wake_count, until_s);
    }
}

enum hapt_status hapt_comm_thread_start(struct hapt_comm_thread *comm_thread)
{
    if (comm_thread->transfer->connect)
        HAPT_TRY(comm_thread->transfer->connect(comm_thread->context, fmax(comm_thread->timeout_s, MIN_CONNECT_S)));
    if (comm_thread->flow_count == 0) return HAPT_OK;
    if (all_wake(comm_thread)) comm_thread->event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    const int error = hapt_thread_start(&comm_thread->thread, run_comm_thread, comm_thread);
    if (error) return hapt_fail(HAPT_ERR_MEMORY, NULL, "cannot start the communication thread: %s", strerror(error));
    comm_thread->running = true;
    return HAPT_OK;
}

/* The peer whose part of message `sequence` is missing, for error messages. */
static int lagging_peer(const struct flow *flow, int64_t sequence)
{
    for (int c = 0; c < flow->channel_count; c++)
        if (!flow->options.sends && atomic_load(&flow->channel[c].received) <= sequence) return flow->channel[c].peer;
    return flow->channel[0].peer;
}

static enum hapt_status timed_out(const struct hapt_comm_thread *comm_thread, const struct flow *flow, int64_t sequence)
{
    const struct hapt_flow_options *options = &flow->options;
    hapt_link_wait_for_job_end(comm_thread->timeout_s);
    const long step = (long)(options->first_step + sequence / options->per_step),
               microbatch = (long)(sequence % options->per_step);
    return hapt_fail(HAPT_ERR_COMM, "look for a rank that died or hangs; --timeout sets the limit",
                     "stage %d waited %.3g s for %s of step %ld, microbatch %ld, %s stage %d (rank %d on host %s)",
                     options->stage, comm_thread->timeout_s, options->what, step, microbatch,
                     options->sends ? "to be taken by" : "from", options->peer_stage, lagging_peer(flow, sequence),
                     hapt_env_host(lagging_peer(flow, sequence)));
}

/* Waits until *counter > sequence. */
static enum hapt_status wait_counter(struct hapt_comm_thread *comm_thread, const struct flow *flow,
                                     const atomic_llong *counter, int64_t sequence)
{
    if (atomic_load(counter) > sequence) return HAPT_OK;
    HAPT_ASSERT(comm_thread->running);
    const struct timespec deadline = hapt_time_spec(hapt_time_s() + comm_thread->timeout_s);
    enum hapt_status status = HAPT_OK;
    bool late = false;
    pthread_mutex_lock(&comm_thread->mutex);
    while (atomic_load(counter) <= sequence && status == HAPT_OK && !late) {
        late = pthread_cond_timedwait(&comm_thread->completion, &comm_thread->mutex, &deadline) == ETIMEDOUT;
        status = comm_thread->status;
    }
    pthread_mutex_unlock(&comm_thread->mutex);
    if (atomic_load(counter) > sequence) return HAPT_OK;
    return status != HAPT_OK ? status : timed_out(comm_thread, flow, sequence);
}

void hapt_comm_thread_expect(struct hapt_comm_thread *comm_thread, int flow, int64_t count)
{
    HAPT_ASSERT(!comm_thread->flow[flow]->options.sends);
    atomic_fetch_add(&comm_thread->flow[flow]->expected, count);
    wake_comm_thread(comm_thread);
}

void hapt_comm_thread_leave_untimed(struct hapt_comm_thread *comm_thread, int flow, int64_t first, int64_t count)
{
    struct flow *its = comm_thread->flow[flow];
    const int64_t end = atomic_load(&its->untimed_end);
    if (first != end) { /* a new range */
        atomic_fetch_add(&its->untimed_before, end - atomic_load(&its->untimed_first));
        atomic_store(&its->untimed_first, first);
    }
    atomic_store(&its->untimed_end, first + count);
}

static void hand_over(struct hapt_comm_thread *comm_thread, int flow, int slot, double ready_s)
{
    struct flow *sender = comm_thread->flow[flow];
    const int64_t sequence = atomic_load(&sender->queued);
    HAPT_ASSERT(sender->options.sends && slot >= 0 && slot < sender->options.slot_count);
    /* At most one message per slot, so the queue never overflows. */
    HAPT_ASSERT(atomic_load(&sender->sent) >= sender->last_of_slot[slot]);
    const int index = (int)(sequence % sender->options.slot_count);
    HAPT_ASSERT(sequence - atomic_load(&sender->sent) < sender->options.slot_count);
    sender->queue_slot[index] = slot;
    sender->queue_ready_s[index] = ready_s;
    sender->queue_turn[index] = port_hand_over(sender->port);
    sender->last_of_slot[slot] = sequence + 1;
    atomic_store(&sender->queued, sequence + 1);
    wake_comm_thread(comm_thread);
}

void hapt_comm_thread_send(struct hapt_comm_thread *comm_thread, int flow, int slot)
{
    hand_over(comm_thread, flow, slot, hapt_time_s());
}

void hapt_comm_thread_send_at(struct hapt_comm_thread *comm_thread, int flow, int slot, double ready_s)
{
    hand_over(comm_thread, flow, slot, ready_s);
}

enum hapt_status hapt_comm_thread_wait_sent(struct hapt_comm_thread *comm_thread, int flow, int slot)
{
    const struct flow *sender = comm_thread->flow[flow];
    return wait_counter(comm_thread, sender, &sender->sent, sender->last_of_slot[slot] - 1);
}

enum hapt_status hapt_comm_thread_wait_received(struct hapt_comm_thread *comm_thread, int flow, int64_t sequence)
{
    struct flow *receiver = comm_thread->flow[flow];
    for (int c = 0; c < receiver->channel_count; c++)
        HAPT_TRY(wait_counter(comm_thread, receiver, &receiver->channel[c].received, sequence));
    return receiver->staging ? wait_counter(comm_thread, receiver, &receiver->on_device_count, sequence) : HAPT_OK;
}

bool hapt_comm_thread_has_received(const struct hapt_comm_thread *comm_thread, int flow, int64_t sequence)
{
    struct flow *receiver = comm_thread->flow[flow];
    for (int c = 0; c < receiver->channel_count; c++)
        if (atomic_load(&receiver->channel[c].received) <= sequence) return false;
    return !receiver->staging || atomic_load(&receiver->on_device_count) > sequence;
}

double hapt_comm_thread_due_s(struct hapt_comm_thread *comm_thread, int flow, int slot)
{
    return comm_thread->flow[flow]->slot_due_s[slot];
}

void hapt_comm_thread_free(struct hapt_comm_thread *comm_thread, int flow)
{
    hapt_comm_thread_free_at(comm_thread, flow, hapt_time_s());
}

void hapt_comm_thread_free_at(struct hapt_comm_thread *comm_thread, int flow, double time_s)
{
    struct flow *receiver = comm_thread->flow[flow];
    for (int c = 0; c < receiver->channel_count; c++)
        HAPT_ASSERT(atomic_load(&receiver->channel[c].received) > atomic_load(&receiver->freed));
    receiver->freed_s[atomic_load(&receiver->freed) % receiver->options.peer_slots] = time_s;
    atomic_fetch_add(&receiver->freed, 1);
    wake_comm_thread(comm_thread);
}

double hapt_comm_thread_active_s(struct hapt_comm_thread *comm_thread, int flow)
{
    return 1e-9 * (double)atomic_load(&comm_thread->flow[flow]->active_ns);
}

/* The time per message, if at least one message was sent since the compute thread last asked; else 0. */
static double take_counted(struct hapt_comm_thread *comm_thread, struct channel *channel)
{
    double time_s = 0;
    pthread_mutex_lock(&comm_thread->mutex);
    const double bytes = channel->counted.bytes - channel->taken.bytes;
    if (bytes >= (double)channel->bytes) {
        time_s = (channel->counted.busy_s - channel->taken.busy_s) * (double)channel->bytes / bytes;
        channel->taken = channel->counted;
    }
    pthread_mutex_unlock(&comm_thread->mutex);
    return time_s;
}

double hapt_comm_thread_message_s(struct hapt_comm_thread *comm_thread, int number, bool *counted)
{
    struct flow *flow = comm_thread->flow[number];
    long long longest_ns = 0;
    double longest_s = 0;
    *counted = false;
    for (int c = 0; c < flow->channel_count; c++) {
        *counted = *counted || flow->channel[c].counts;
        if (flow->channel[c].counts && flow->options.sends)
            longest_s = fmax(longest_s, take_counted(comm_thread, &flow->channel[c]));
    }
    if (*counted) return longest_s;
    if (flow->options.sends) return 1e-9 * (double)atomic_exchange(&flow->shortest_ns, 0);
    for (int c = 0; c < flow->channel_count; c++) {
        const long long shortest_ns = atomic_exchange(&flow->channel[c].shortest_ns, 0);
        if (shortest_ns > longest_ns) longest_ns = shortest_ns;
    }
    return 1e-9 * (double)longest_ns;
}

enum hapt_status hapt_comm_thread_drain(struct hapt_comm_thread *comm_thread)
{
    if (!comm_thread->running) return HAPT_OK;
    const struct timespec deadline = hapt_time_spec(hapt_time_s() + comm_thread->timeout_s);
    bool late = false;
    pthread_mutex_lock(&comm_thread->mutex);
    comm_thread->stopping = true;
    signal_comm_thread(comm_thread);
    while (!comm_thread->finished && !late)
        late = pthread_cond_timedwait(&comm_thread->completion, &comm_thread->mutex, &deadline) == ETIMEDOUT;
    const enum hapt_status status = comm_thread->status;
    const bool finished = comm_thread->finished;
    pthread_mutex_unlock(&comm_thread->mutex);
    if (!finished) hapt_link_wait_for_job_end(comm_thread->timeout_s);
    if (!finished)
        return hapt_fail(HAPT_ERR_COMM, "look for a rank that died or hangs; --timeout sets the limit",
                         "stage %d waited %.3g s for its peers to take its last messages",
                         comm_thread->flow[0]->options.stage, comm_thread->timeout_s);
    pthread_join(comm_thread->thread, NULL);
    comm_thread->running = false;
    return status;
}

void hapt_comm_thread_destroy(struct hapt_comm_thread *comm_thread)
{
    if (!comm_thread) return;
    HAPT_ASSERT(!comm_thread->running);
    wakeups_destroy(comm_thread->wakeups);
    for (int f = 0; f < comm_thread->flow_count; f++) staging_destroy(comm_thread, comm_thread->flow[f]);
    comm_thread->transfer->close(comm_thread->context);
    if (comm_thread->event_fd >= 0) close(comm_thread->event_fd);
    pthread_cond_destroy(&comm_thread->work);
    pthread_cond_destroy(&comm_thread->completion);
    pthread_mutex_destroy(&comm_thread->mutex);
    hapt_arena_release(&comm_thread->arena);
    free(comm_thread);
}
