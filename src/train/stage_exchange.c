/*
 * Tied parameters: chunks that hold copies of a parameter sum its gradient part by part, each in the order of the
 * chunks.
 *
 * A 16-bit exchange rounds every term to nearest even, the chunk's own term as well. The sum is taken in fp32. So all
 * chunks get the same bits. The type is fp16 in fp16 training, where the loss scale keeps gradients in range: an
 * overflow becomes infinite and skips the update. Otherwise it is bf16, which has the range of fp32.
 */
#include "runtime.h"

static bool is_narrow(const struct worker *worker)
{
    return worker->plan->exchange == HAPT_TIED_EXCHANGE_16BIT;
}

static uint16_t to_narrow(const struct worker *worker, float value)
{
    return worker->model->dtype == HAPT_F16 ? hapt_f16_from_f32(value) : hapt_bf16_from_f32(value);
}

static float from_narrow(const struct worker *worker, uint16_t bits)
{
    return worker->model->dtype == HAPT_F16 ? hapt_f16_to_f32(bits) : hapt_bf16_to_f32(bits);
}

/* The same elements in an array of half the element size. */
static enum hapt_status halve_piece(struct hapt_piece *piece, struct hapt_arena *arena)
{
    struct hapt_strided *part;
    HAPT_NEW(part, arena, piece->runs.count + 1);
    for (int k = 0; k < piece->runs.count; k++) {
        const struct hapt_strided *from = &piece->runs.part[k];
        part[k] = (struct hapt_strided){from->offset / 2, from->count, from->run / 2, from->stride / 2};
    }
    piece->runs.part = part;
    piece->offset /= 2;
    piece->bytes /= 2;
    return HAPT_OK;
}

/* Remembers the elements of a piece, to round them before it is sent. */
static enum hapt_status note_sent(struct stage_tie *tie, const struct hapt_piece *piece, struct hapt_arena *arena)
{
    struct hapt_strided_list *list = &tie->sent[tie->sent_count++];
    struct hapt_strided *whole;
    *list = piece->runs;
    if (list->count > 0) return HAPT_OK;
    HAPT_NEW(whole, arena, 1);
    *whole = (struct hapt_strided){piece->offset, 1, piece->bytes, piece->bytes};
    *list = (struct hapt_strided_list){1, whole};
    return HAPT_OK;
}

/* Rounds the elements that this rank sends. */
static void fill_narrow(const struct stage *stage, const struct stage_tie *tie)
{
    for (int s = 0; s < tie->sent_count; s++)
        for (int p = 0; p < tie->sent[s].count; p++) {
            const struct hapt_strided *part = &tie->sent[s].part[p];
            for (size_t k = 0; k < part->count; k++) {
                const size_t first = (part->offset + k * part->stride) / sizeof(uint16_t);
                for (size_t i = first; i < first + part->run / sizeof(uint16_t); i++)
                    tie->narrow[i] = to_narrow(stage->worker, tie->gradient[i]);
            }
        }
}

static int tie_tag(const struct stage *stage, int tie, int from, int to)
{
    const int chunks = stage->worker->plan->stage_count;
    return stage->worker->edges->count + (tie * chunks + from) * chunks + to;
}

/* `mine`: receives the elements that are sent, if they must be rounded first. */
static enum hapt_status add_tie_flow(struct stage *stage, int tie, const struct stage_crossing *crossing, bool sends,
                                     void *address, struct stage_tie *mine, int *flow)
{
    const int other = sends ? crossing->to : crossing->from;
    struct hapt_piece *piece;
    int pieces = 0;
    void *base[1] = {address};
    *flow = -1;
    HAPT_NEW(piece, stage->worker->arena, stage_size(stage->worker, other));
    HAPT_TRY(stage_add_pieces(stage, crossing, sends, 0, piece, &pieces));
    if (pieces == 0) return HAPT_OK;
    for (int p = 0; p < pieces && is_narrow(stage->worker); p++) {
        HAPT_TRY(halve_piece(&piece[p], stage->worker->arena));
        if (sends && mine->narrow) HAPT_TRY(note_sent(mine, &piece[p], stage->worker->arena));
    }
    struct hapt_flow_options options = {.what = "gradients of tied parameters",
                                        .stage = stage->chunk,
                                        .peer_stage = other,
                                        .sends = sends,
                                        .tag = sends ? tie_tag(stage, tie, stage->chunk, other)
                                                     : tie_tag(stage, tie, other, stage->chunk),
                                        .per_step = 1,
                                        .first_step = stage->worker->first_step,
                                        .peer_slots = 1,
                                        .slot_count = 1,
                                        .buffer_count = 1,
                                        .base = base,
                                        .piece_count = pieces,
                                        .piece = piece};
    if (sends) HAPT_TRY(stage_set_throttle(stage, crossing, 1, &options));
    return stage->worker->runtime->add_flow(stage, &options, false,
                                            flow); /* modelled: its time counts in end_exchange */
}

/* The gradient of a parameter that a chunk's update reads. */
static int gradient_in(const struct stage *stage, int chunk, int parameter)
{
    return stage->worker->program[chunk]->graph->tensor[parameter].gradient;
}

/* Buffers of a 16-bit exchange. */
static enum hapt_status add_narrow(struct stage *stage, const struct hapt_tie *tie, int gradient,
                                   struct stage_tie *mine)
{
    size_t pieces = 0;
    HAPT_NEW(mine->arrived, stage->worker->arena, tie->chunk_count);
    if (!is_narrow(stage->worker) || !stage->worker->runtime->computes) return HAPT_OK;
    for (int c = 0; c < tie->chunk_count; c++) pieces += (size_t)stage_size(stage->worker, tie->chunk[c]);
    HAPT_NEW(mine->narrow, stage->worker->arena, hapt_engine_tensor_bytes(stage->engine, gradient) / sizeof(float));
    HAPT_NEW(mine->sent, stage->worker->arena, pieces);
    return HAPT_OK;
}

static enum hapt_status add_tie(struct stage *stage, int index, const struct hapt_tie *tie)
{
    struct stage_tie *mine = &stage->tie[stage->tie_count++];
    const int gradient = gradient_in(stage, stage->chunk, tie->tensor);
    mine->tie = tie;
    mine->gradient = hapt_engine_tensor(stage->engine, gradient, 0);
    if (stage->worker->backend->pin) {
        void *host;
        HAPT_TRY(hapt_backend_pin(stage->worker->backend, hapt_engine_tensor_bytes(stage->engine, gradient), &host));
        mine->on_device = mine->gradient;
        mine->gradient = host;
    }
    HAPT_TRY(stage_prepare_replicas(stage, gradient, &mine->replicas));
    mine->mine = mine->replicas.part[mine->replicas.index];
    HAPT_NEW(mine->received, stage->worker->arena, tie->chunk_count);
    HAPT_NEW(mine->receive_flow, stage->worker->arena, tie->chunk_count);
    HAPT_TRY(add_narrow(stage, tie, gradient, mine));
    for (int c = 0; c < tie->chunk_count; c++) {
        const int other = tie->chunk[c];
        int flow;
        mine->receive_flow[c] = -1;
        if (other == stage->chunk) continue;
        if (stage->worker->runtime->computes)
            HAPT_NEW(mine->received[c], stage->worker->arena, mine->mine.count * mine->mine.run / sizeof(float));
        if (worker_shares(stage->worker, stage->chunk, other)) continue; /* copied (take_local_parts) */
        const int its = gradient_in(stage, other, tie->tensor);
        const struct stage_crossing out = {stage->chunk, other, gradient, its, true};
        const struct stage_crossing in = {other, stage->chunk, its, gradient, true};
        if (mine->narrow)
            HAPT_NEW(mine->arrived[c], stage->worker->arena, mine->mine.count * mine->mine.run / sizeof(float));
        void *from = mine->narrow ? (void *)mine->narrow : mine->gradient;
        void *to = mine->narrow ? (void *)mine->arrived[c] : mine->received[c];
        HAPT_TRY(add_tie_flow(stage, index, &out, true, from, mine, &flow));
        HAPT_ASSERT(mine->send.count < MAX_STAGE_FLOWS);
        if (flow >= 0) mine->send.flow[mine->send.count++] = flow;
        HAPT_TRY(add_tie_flow(stage, index, &in, false, to, mine, &mine->receive_flow[c]));
    }
    return HAPT_OK;
}

enum hapt_status stage_add_ties(struct stage *stage)
{
    const struct hapt_ties *ties = stage->worker->ties;
    HAPT_NEW(stage->tie, stage->worker->arena, ties->count);
    for (int t = 0; t < ties->count; t++)
        for (int c = 0; c < ties->tie[t].chunk_count; c++)
            if (ties->tie[t].chunk[c] == stage->chunk) HAPT_TRY(add_tie(stage, t, &ties->tie[t]));
    return HAPT_OK;
}

void stage_release_ties(struct stage *stage)
{
    for (int t = 0; t < stage->tie_count; t++)
        if (stage->tie[t].on_device) stage->worker->backend->unpin(stage->tie[t].gradient);
    stage->tie_count = 0;
}

/* Sums this rank's part in the order of the chunks, so every chunk gets the same bits. */
static void sum_part(const struct stage *stage, const struct stage_tie *tie)
{
    const bool narrow = is_narrow(stage->worker);
    const size_t row = tie->mine.run / sizeof(float), stride = tie->mine.stride / sizeof(float);
    for (size_t k = 0; k < tie->mine.count; k++) {
        float *own = tie->gradient + tie->mine.offset / sizeof(float) + k * stride;
        for (size_t i = 0; i < row; i++) {
            float sum = 0;
            for (int c = 0; c < tie->tie->chunk_count; c++) {
                float term = tie->tie->chunk[c] == stage->chunk ? own[i] : tie->received[c][k * row + i];
                if (narrow) term = from_narrow(stage->worker, to_narrow(stage->worker, term));
                sum = c == 0 ? term : sum + term;
            }
            own[i] = sum;
        }
    }
}

/* Sends this stage's gradients to the other workers that hold them. */
static enum hapt_status start(struct stage *stage)
{
    struct worker *worker = stage->worker;
    for (int t = 0; t < stage->tie_count; t++) {
        struct stage_tie *tie = &stage->tie[t];
        const int gradient = gradient_in(stage, stage->chunk, tie->tie->tensor);
        if (tie->on_device)
            HAPT_TRY(
                worker_copy(worker, tie->gradient, tie->on_device, hapt_engine_tensor_bytes(stage->engine, gradient)));
        if (tie->narrow) fill_narrow(stage, tie);
        for (int f = 0; f < tie->send.count; f++) worker->runtime->send(stage, tie->send.flow[f], 0);
        for (int c = 0; c < tie->tie->chunk_count; c++)
            if (tie->receive_flow[c] >= 0) hapt_comm_thread_expect(worker->comm_thread, tie->receive_flow[c], 1);
    }
    return HAPT_OK;
}

static const struct stage_tie *find_tie(const struct stage *stage, const struct hapt_tie *tie)
{
    for (int t = 0; t < stage->tie_count; t++)
        if (stage->tie[t].tie == tie) return &stage->tie[t];
    return NULL;
}

/* Takes the parts of the chunks on this worker, in the same layout (worker_build), before any sum replaces them. */
static void take_local_parts(struct stage *stage)
{
    for (int t = 0; t < stage->tie_count; t++) {
        struct stage_tie *mine = &stage->tie[t];
        for (int c = 0; c < mine->tie->chunk_count; c++) {
            const struct stage *other = worker_stage(stage->worker, mine->tie->chunk[c]);
            if (!other || other == stage) continue;
            const struct hapt_strided_list part = {1, &mine->mine};
            hapt_strided_pack(&part, find_tie(other, mine->tie)->gradient, 0, hapt_strided_bytes(&part),
                              mine->received[c]);
        }
    }
}

static void widen_arrived(const struct stage *stage, const struct stage_tie *tie)
{
    const size_t elements = tie->mine.count * tie->mine.run / sizeof(float);
    for (int c = 0; c < tie->tie->chunk_count; c++)
        for (size_t i = 0; tie->arrived[c] && i < elements; i++)
            tie->received[c][i] = from_narrow(stage->worker, tie->arrived[c][i]);
}

/* Waits for the parts of the other workers and sums. */
static enum hapt_status finish(struct stage *stage)
{
    struct worker *worker = stage->worker;
    for (int t = 0; t < stage->tie_count; t++) {
        struct stage_tie *tie = &stage->tie[t];
        for (int f = 0; f < tie->send.count; f++)
            HAPT_TRY(hapt_comm_thread_wait_sent(worker->comm_thread, tie->send.flow[f], 0));
        /* one exchange per step: sequence number = steps before */
        const int64_t exchanges = worker->step - worker->first_step;
        for (int c = 0; c < tie->tie->chunk_count; c++) {
            if (tie->receive_flow[c] < 0) continue;
            HAPT_TRY(worker->runtime->wait_received(stage, tie->receive_flow[c], exchanges));
        }
        widen_arrived(stage, tie);
        if (worker->runtime->computes) sum_part(stage, tie);
        for (int c = 0; c < tie->tie->chunk_count; c++)
            if (tie->receive_flow[c] >= 0) hapt_comm_thread_free(worker->comm_thread, tie->receive_flow[c]);
        const int gradient = gradient_in(stage, stage->chunk, tie->tie->tensor);
        HAPT_TRY(stage_rebuild(stage, &tie->replicas, gradient, tie->gradient));
        if (tie->on_device)
            HAPT_TRY(
                worker_copy(worker, tie->on_device, tie->gradient, hapt_engine_tensor_bytes(stage->engine, gradient)));
    }
    return HAPT_OK;
}

enum hapt_status worker_exchange(struct worker *worker)
{
    const double start_s = hapt_time_s();
    for (int s = 0; s < worker->stage_count; s++) HAPT_TRY(start(&worker->stage[s]));
    for (int s = 0; s < worker->stage_count && worker->runtime->computes; s++) take_local_parts(&worker->stage[s]);
    for (int s = 0; s < worker->stage_count; s++) HAPT_TRY(finish(&worker->stage[s]));
    worker->runtime->end_exchange(worker, start_s);
    return HAPT_OK;
}
