/*
 * Updates on the CPU of the host (AutoHete, section 4; ZeRO-Offload). A thread of each engine updates the pieces of
 * engine_away.c in turn, in two halves of a window on the host:
 *
 *     gradients to the host  -->  optimizer of the cpu back end, on the state there  -->  weights to the device
 *
 * While it updates the piece in one half, the gradients of the next one are copied to the other half, and the weights
 * of the one before from it. Masters that the device has are copied both ways, through one window, so those of the next
 * piece wait for those of the one before. Weights and gradients that the host has stay there. The kernel is that of CPU
 * devices, so their weights have the same bits wherever they are updated.
 */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "engine_private.h"
#include "hapt/env.h"

struct host_updater {
    struct hapt_engine *engine;
    const struct hapt_kernel *kernel[UPDATE_KINDS];
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* asked, ends or reached; on CLOCK_MONOTONIC */
    bool asked, ends;       /* asked: an update has begun, and the thread has not ended it */
    int reached;            /* the pieces before this one have been updated, and copies of their weights have begun */
    enum hapt_status status;
    struct state_move gradients[2];  /* by half; of the thread alone */
    pthread_mutex_t weights_lock;    /* held while one thread waits for a copy, which ends it for both */
    struct state_move weights[2];    /* by half */
    int weights_of[2];               /* the piece */
    enum hapt_status weights_status; /* of these copies */
};

static char *window(const struct hapt_engine *engine, enum hapt_host_window which, size_t element)
{
    const size_t size = which == HAPT_WINDOW_COPIES ? sizeof(uint16_t) : sizeof(float);
    return engine->shared->host + engine->plan->host_window_offset[which] + element * size;
}

/* Waits for the copies of a piece from this half; piece -1: of any piece. Both threads learn of a failure. */
static enum hapt_status wait_weights(struct host_updater *host, int half, int piece)
{
    pthread_mutex_lock(&host->weights_lock);
    if ((piece < 0 || host->weights_of[half] == piece) && host->weights_status == HAPT_OK)
        host->weights_status = hapt_engine_wait_copies(host->engine, STATE_IN, &host->weights[half]);
    const enum hapt_status status = host->weights_status;
    pthread_mutex_unlock(&host->weights_lock);
    return status;
}

/* Starts to copy what the update of a piece reads to its half. Masters share their window with those that are copied
 * back, which must have left it. */
static enum hapt_status fetch(struct host_updater *host, int index, int half)
{
    struct hapt_engine *engine = host->engine;
    const struct hapt_memory_plan *plan = engine->plan;
    if (index == engine->away.piece_count) return HAPT_OK;
    const struct update_piece *piece = &engine->away.piece[index];
    const size_t bytes = (piece->end - piece->first) * sizeof(float), at = hapt_engine_window_of(engine, piece, half);
    if (!plan->masters_like_state) HAPT_TRY(wait_weights(host, half, -1));
    if (!plan->host_gradients)
        HAPT_TRY(hapt_engine_start_copy(engine, STATE_OUT, piece->name, window(engine, HAPT_WINDOW_GRADIENTS, at),
                                        (float *)(engine->memory + plan->gradient_offset) + piece->first, bytes));
    if (!plan->masters_like_state)
        HAPT_TRY(hapt_engine_start_copy(engine, STATE_OUT, piece->name, window(engine, HAPT_WINDOW_MASTERS, at),
                                        (float *)(engine->memory + plan->master_offset) + piece->first, bytes));
    hapt_engine_end_copies(engine, STATE_OUT, &host->gradients[half]);
    return HAPT_OK;
}

/* Starts to copy the weights of a piece to the device. */
static enum hapt_status return_weights(struct host_updater *host, int index, int half)
{
    struct hapt_engine *engine = host->engine;
    const struct hapt_memory_plan *plan = engine->plan;
    const struct update_piece *piece = &engine->away.piece[index];
    const size_t elements = piece->end - piece->first, at = hapt_engine_window_of(engine, piece, half);
    pthread_mutex_lock(&host->weights_lock);
    enum hapt_status status = HAPT_OK;
    if (!plan->masters_like_state)
        status = hapt_engine_start_copy(engine, STATE_IN, piece->name,
                                        (float *)(engine->memory + plan->master_offset) + piece->first,
                                        window(engine, HAPT_WINDOW_MASTERS, at), elements * sizeof(float));
    if (plan->copy_offset != (size_t)-1 && !plan->host_weights && status == HAPT_OK)
        status = hapt_engine_start_copy(engine, STATE_IN, piece->name, hapt_engine_copy(engine, piece->first),
                                        window(engine, HAPT_WINDOW_COPIES, at), elements * sizeof(uint16_t));
    hapt_engine_end_copies(engine, STATE_IN, &host->weights[half]);
    host->weights_of[half] = index;
    pthread_mutex_unlock(&host->weights_lock);
    return status;
}

static enum hapt_status update_piece(struct host_updater *host, int index, int half)
{
    struct hapt_engine *engine = host->engine;
    const struct hapt_memory_plan *plan = engine->plan;
    const struct update_piece *piece = &engine->away.piece[index];
    const size_t elements = piece->end - piece->first, at = hapt_engine_window_of(engine, piece, half);
    float *master = plan->masters_like_state ? hapt_engine_state_address(engine, -1, piece->state_first)
                                             : (float *)window(engine, HAPT_WINDOW_MASTERS, at);
    void *gradients = plan->host_gradients ? (void *)hapt_engine_host_gradient(engine, piece->first)
                                           : window(engine, HAPT_WINDOW_GRADIENTS, at);
    uint16_t *copy = plan->copy_offset == (size_t)-1 ? NULL
                     : plan->host_weights            ? hapt_engine_host_weight(engine, piece->first)
                                                     : (uint16_t *)window(engine, HAPT_WINDOW_COPIES, at);
    struct hapt_call call = {.threads = engine->options.threads};
    const int states = piece->kind == UPDATE_STATISTIC ? 0 : plan->state_count;
    hapt_engine_describe_update(&engine->away.update, piece->kind, &call);
    call.input[0] = hapt_engine_flat_view(gradients, HAPT_F32, elements);
    call.output[0] = hapt_engine_flat_view(master, HAPT_F32, elements);
    for (int s = 0; s < states; s++)
        call.output[1 + s] =
            hapt_engine_flat_view(hapt_engine_state_address(engine, s, piece->state_first), HAPT_F32, elements);
    if (copy) call.output[call.output_count - 1] = hapt_engine_flat_view(copy, engine->copy_dtype, elements);
    const double begin_s = hapt_time_s();
    HAPT_TRY(host->kernel[piece->kind]->run(&call, NULL));
    hapt_span_log_add(engine->shared->log, HAPT_SPAN_HOST_UPDATE, begin_s, hapt_time_s());
    return HAPT_OK;
}

/* False: the engine is being destroyed. */
static bool reach(struct host_updater *host, int piece, enum hapt_status status)
{
    pthread_mutex_lock(&host->lock);
    host->reached = piece;
    host->status = status;
    const bool ends = host->ends;
    pthread_cond_broadcast(&host->changed);
    pthread_mutex_unlock(&host->lock);
    return !ends;
}

/* Waits for all copies: their memory will be freed. */
static enum hapt_status drain(struct host_updater *host)
{
    for (int half = 0; half < 2; half++) {
        HAPT_TRY(hapt_engine_wait_copies(host->engine, STATE_OUT, &host->gradients[half]));
        HAPT_TRY(wait_weights(host, half, -1));
    }
    return HAPT_OK;
}

static enum hapt_status update(struct host_updater *host)
{
    const struct away_update *away = &host->engine->away;
    int index = hapt_engine_next_piece(host->engine, 0);
    HAPT_TRY(fetch(host, index, 0));
    for (int half = 0; index < away->piece_count; half = !half) {
        const int next = hapt_engine_next_piece(host->engine, index + 1);
        HAPT_TRY(fetch(host, next, !half));
        HAPT_TRY(hapt_engine_wait_copies(host->engine, STATE_OUT, &host->gradients[half]));
        HAPT_TRY(wait_weights(host, half, -1));
        HAPT_TRY(update_piece(host, index, half));
        HAPT_TRY(return_weights(host, index, half));
        if (!reach(host, index + 1, HAPT_OK)) return drain(host);
        index = next;
    }
    return HAPT_OK;
}

static void *run(void *argument)
{
    struct host_updater *host = argument;
    pthread_setname_np(pthread_self(), "hapt-update");
    pthread_mutex_lock(&host->lock);
    for (;;) {
        while (!host->asked && !host->ends) pthread_cond_wait(&host->changed, &host->lock);
        if (host->ends) break;
        pthread_mutex_unlock(&host->lock);
        const enum hapt_status status = update(host);
        if (status != HAPT_OK) reach(host, 0, status);
        pthread_mutex_lock(&host->lock);
        host->asked = false;
        pthread_cond_broadcast(&host->changed);
    }
    pthread_mutex_unlock(&host->lock);
    return NULL;
}

void hapt_engine_begin_host_update(struct hapt_engine *engine)
{
    struct host_updater *host = engine->away.host;
    pthread_mutex_lock(&host->lock);
    HAPT_ASSERT(!host->asked);
    host->asked = true;
    host->reached = 0;
    host->status = HAPT_OK;
    pthread_cond_broadcast(&host->changed);
    pthread_mutex_unlock(&host->lock);
}

/* Waits for the thread's end of an update, too, if the piece is the last one. Then a next update may begin. */
enum hapt_status hapt_engine_wait_host_update(struct hapt_engine *engine, int piece, int half, double most_s,
                                              bool *done)
{
    struct host_updater *host = engine->away.host;
    const bool last = hapt_engine_next_piece(engine, piece + 1) == engine->away.piece_count;
    const struct timespec until = hapt_time_spec(hapt_time_s() + (isfinite(most_s) ? most_s : 0));
    bool late = false;
    pthread_mutex_lock(&host->lock);
    while (host->status == HAPT_OK && (host->reached <= piece || (last && host->asked)) && !late) {
        if (isfinite(most_s))
            late = pthread_cond_timedwait(&host->changed, &host->lock, &until) != 0;
        else
            pthread_cond_wait(&host->changed, &host->lock);
    }
    const enum hapt_status status = host->status;
    *done = host->reached > piece && !(last && host->asked);
    pthread_mutex_unlock(&host->lock);
    if (status != HAPT_OK || !*done) return status;
    return wait_weights(host, half, piece);
}

enum hapt_status hapt_engine_bind_host_updates(struct hapt_engine *engine)
{
    struct host_updater *made = calloc(1, sizeof *made);
    if (!made) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no host memory for an engine");
    made->engine = engine;
    for (enum update_kind kind = 0; kind < UPDATE_KINDS; kind++) {
        made->kernel[kind] = hapt_engine_find_update(hapt_backend_find("cpu"), NULL, engine->plan->state_count, kind);
        HAPT_ASSERT(made->kernel[kind]);
    }
    pthread_mutex_init(&made->lock, NULL);
    pthread_mutex_init(&made->weights_lock, NULL);
    hapt_time_condition_init(&made->changed);
    engine->away.host = made;
    const int error = hapt_thread_start(&made->thread, run, made);
    if (!error) return HAPT_OK;
    made->ends = true; /* no thread to join */
    return hapt_fail(HAPT_ERR_MEMORY, NULL, "cannot start the thread that updates parameters on the host: %s",
                     strerror(error));
}

void hapt_engine_end_host_updates(struct hapt_engine *engine)
{
    struct host_updater *host = engine->away.host;
    if (!host) return;
    pthread_mutex_lock(&host->lock);
    const bool runs = !host->ends;
    host->ends = true;
    pthread_cond_broadcast(&host->changed);
    pthread_mutex_unlock(&host->lock);
    if (runs) pthread_join(host->thread, NULL);
    pthread_cond_destroy(&host->changed);
    pthread_mutex_destroy(&host->lock);
    pthread_mutex_destroy(&host->weights_lock);
    free(host);
    engine->away.host = NULL;
}
