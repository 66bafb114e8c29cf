/*
 * Mixtures of experts: the gate, tokens into the slots of their experts and back, and the gradients. Products:
 * expert.cu.
 *
 * Slots are [rows][experts][capacity][columns]. A row's slots at an expert are filled from the front, in the order of
 * its tokens, then of a token's choices. A call may hold a shard of the experts, from first_value on; the other slots
 * are on other shards.
 */
#include "kernels.h"
#include "rows.cuh"

enum { THREADS = 256 };

/* Sizes of a call's slots and choices. */
struct slots {
    const int *expert; /* [rows][tokens][choices] */
    int64_t rows, tokens, choices, experts, capacity, first_value;
};

static struct slots slots_of(const struct hapt_call *call, const struct hapt_view *choices,
                             const struct hapt_view *slots)
{
    struct slots of = {};
    of.expert = (const int *)choices->data;
    of.rows = choices->shape[0];
    of.tokens = choices->shape[1];
    of.choices = choices->shape[2];
    of.experts = slots->shape[1];
    of.capacity = slots->shape[2];
    of.first_value = call->first_value;
    return of;
}

static int64_t choice_count(const struct slots &slots)
{
    return slots.rows * slots.tokens * slots.choices;
}

static int64_t slot_count(const struct slots &slots)
{
    return slots.rows * slots.experts * slots.capacity;
}

/*
 * A block takes one row at one expert and scans the row's choices. It writes what is requested: the slot of every
 * choice of its expert (if there is room), the choice in every slot (-1: empty), the number of choices.
 */
__global__ void slot_kernel(struct slots slots, int64_t *slot, int64_t *choice, float *counts, struct cuda_fault *fault)
{
    __shared__ int before[THREADS / 32];
    const int64_t row = blockIdx.x / slots.experts, expert = blockIdx.x % slots.experts,
                  count = slots.tokens * slots.choices;
    const int64_t first = row * count, base = blockIdx.x * slots.capacity;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int64_t filled = 0;
    for (int64_t at = 0; at < count; at += THREADS) {
        const int64_t q = first + at + threadIdx.x;
        const bool here = at + threadIdx.x < count && slots.expert[q] - slots.first_value == expert;
        const unsigned together = __ballot_sync(0xffffffffu, here);
        int64_t own = filled + __popc(together & ((1u << lane) - 1));
        if (lane == 0) before[warp] = __popc(together);
        __syncthreads();
        for (int w = 0; w < THREADS / 32; w++) {
            if (w < warp) own += before[w];
            filled += before[w];
        }
        __syncthreads();
        if (!here || own >= slots.capacity) continue;
        if (slot) slot[q] = base + own;
        if (choice) choice[base + own] = q;
    }
    for (int64_t s = filled + threadIdx.x; choice && s < slots.capacity; s += THREADS) choice[base + s] = -1;
    if (counts && threadIdx.x == 0) counts[blockIdx.x] = (float)filled;
    if (fault && threadIdx.x == 0 && filled > slots.capacity)
        fault_set(fault, CUDA_FAULT_ROOM, filled, slots.first_value + expert, slots.capacity);
}

/* Finds the slot of every choice; -1: on another shard, or no room. */
static enum hapt_status find_slots(const struct slots &slots, int64_t *slot, struct hapt_queue *queue)
{
    HAPT_TRY(
        cuda_check(cudaMemsetAsync(slot, 0xff, (size_t)choice_count(slots) * sizeof *slot, queue->stream), "zeroing"));
    return launch(slot_kernel, dim3((unsigned)(slots.rows * slots.experts)), THREADS, 0, queue, slots, slot,
                  (int64_t *)NULL, (float *)NULL, (struct cuda_fault *)NULL);
}

static enum hapt_status count_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    struct hapt_view view = {};
    view.shape[1] = call->output[0].shape[1]; /* [rows][experts] */
    view.shape[2] = INT64_MAX / 2;            /* room for all */
    const struct slots slots = slots_of(call, &call->input[0], &view);
    return launch(slot_kernel, dim3((unsigned)(slots.rows * slots.experts)), THREADS, 0, queue, slots, (int64_t *)NULL,
                  (int64_t *)NULL, (float *)call->output[0].data, (struct cuda_fault *)NULL);
}

/* ---- The gate ---- */

/* Softmax over all experts; the largest are kept and scaled to sum 1. This equals the softmax of the largest logits
 * alone. With `logsumexp` they are not scaled. One thread per token. */
template <class Element>
__global__ void gate_kernel(const Element *logits, int64_t rows, int64_t experts, int64_t choices, float *weights,
                            int *chosen, float *logsumexp)
{
    for (GRID_STRIDE(r, rows)) {
        const Element *logit = logits + r * experts;
        float *weight = weights + r * choices, sum = 0, top = 0;
        int *expert = chosen + r * choices;
        for (int64_t j = 0; j < choices; j++) {
            float most = 0;
            int best = -1;
            for (int e = 0; e < experts; e++) {
                const float value = to_float(logit[e]);
                if (best >= 0 && !(value > most)) continue; /* of equal logits, the first */
                bool taken = false;
                for (int64_t i = 0; i < j; i++) taken = taken || expert[i] == e;
                if (taken) continue;
                most = value;
                best = e;
            }
            if (j == 0) top = most;
            expert[j] = best;
            weight[j] = expf(most - top);
            sum += weight[j];
        }
        if (logsumexp) {
            sum = 0;
            for (int64_t e = 0; e < experts; e++) sum += expf(to_float(logit[e]) - top);
            logsumexp[r] = top + logf(sum);
        }
        for (int64_t j = 0; j < choices; j++) weight[j] /= sum;
    }
}

/* Gradient of a softmax at the chosen logits; 0 at the others. One thread per expert of a token. */
template <class Element>
__global__ void gate_dx_kernel(const float *weights, const int *chosen, const float *dweights, int64_t rows,
                               int64_t experts, int64_t choices, int64_t first_value, Element *dlogits, bool accumulate)
{
    for (GRID_STRIDE(i, rows * experts)) {
        const int64_t r = i / experts, e = first_value + i % experts;
        const float *weight = weights + r * choices, *dweight = dweights + r * choices;
        float mean = 0, sum = accumulate ? to_float(dlogits[i]) : 0;
        for (int64_t j = 0; j < choices; j++) mean += weight[j] * dweight[j];
        for (int64_t j = 0; j < choices; j++)
            if (chosen[r * choices + j] == e) sum += weight[j] * (dweight[j] - mean);
        dlogits[i] = from_float<Element>(sum);
    }
}

/* Gradient of the softmax over all experts: p_e ([e chosen] dw_e - sum of w dw). One thread per expert of a token. */
template <class Element>
__global__ void gate_over_all_dx_kernel(const Element *logits, const float *weights, const int *chosen,
                                        const float *logsumexp, const float *dweights, int64_t rows, int64_t experts,
                                        int64_t choices, Element *dlogits, bool accumulate)
{
    for (GRID_STRIDE(i, rows * experts)) {
        const int64_t r = i / experts, e = i % experts;
        const float *weight = weights + r * choices, *dweight = dweights + r * choices;
        float mean = 0, own = 0;
        for (int64_t j = 0; j < choices; j++) {
            mean += weight[j] * dweight[j];
            if (chosen[r * choices + j] == e) own += dweight[j];
        }
        const float dlogit = expf(to_float(logits[i]) - logsumexp[r]) * (own - mean);
        dlogits[i] = from_float<Element>(accumulate ? to_float(dlogits[i]) + dlogit : dlogit);
    }
}

/* Output: weights, experts; a third, the logsumexp, if weights are those of the softmax over all experts. */
template <class Element> static enum hapt_status gate_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct hapt_view *logits = &call->input[0]; /* [rows][tokens][experts] */
    const int64_t rows = view_rows(logits);
    return launch(gate_kernel<Element>, blocks_for(rows, 64), 64, 0, queue, (const Element *)logits->data, rows,
                  view_columns(logits), view_columns(&call->output[0]), (float *)call->output[0].data,
                  (int *)call->output[1].data, (float *)(call->output_count > 2 ? call->output[2].data : NULL));
}

template <class Element> static enum hapt_status gate_dx_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct hapt_view *dlogits = &call->output[0];
    return launch(gate_dx_kernel<Element>, blocks_for(hapt_view_elements(dlogits), THREADS), THREADS, 0, queue,
                  (const float *)call->input[0].data, (const int *)call->input[1].data,
                  (const float *)call->input[2].data, view_rows(dlogits), view_columns(dlogits),
                  view_columns(&call->input[0]), call->first_value, (Element *)dlogits->data,
                  (bool)(call->accumulate & 1u));
}

/* input: logits, weights, experts, logsumexp, dweights */
template <class Element>
static enum hapt_status gate_over_all_dx_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct hapt_view *dlogits = &call->output[0];
    return launch(gate_over_all_dx_kernel<Element>, blocks_for(hapt_view_elements(dlogits), THREADS), THREADS, 0, queue,
                  (const Element *)call->input[0].data, (const float *)call->input[1].data,
                  (const int *)call->input[2].data, (const float *)call->input[3].data,
                  (const float *)call->input[4].data, view_rows(dlogits), view_columns(dlogits),
                  view_columns(&call->input[1]), (Element *)dlogits->data, (bool)(call->accumulate & 1u));
}

/* ---- Tokens and slots ---- */

/* Every slot: its token, times its weight if there are weights; empty slots 0. N elements per thread. */
template <class Element, int N>
__global__ void fill_kernel(struct slots slots, const int64_t *choice, const float *weight, const Element *x,
                            int64_t columns, Element *y, bool accumulate)
{
    const int64_t parts = columns / N, count = slots.rows * slots.experts * slots.capacity;
    for (GRID_STRIDE(i, count * parts)) {
        const int64_t s = i / parts, c = i % parts * N, q = choice[s];
        float value[N] = {};
        if (q < 0 && accumulate) continue;
        if (q >= 0) load<N>(x + q / slots.choices * columns + c, value);
        for (int e = 0; q >= 0 && weight && e < N; e++) value[e] *= weight[q];
        store<N>(y + s * columns + c, value, accumulate);
    }
}

/* Every token: the sum of its slots, weighted if there are weights. */
template <class Element, int N>
__global__ void gather_kernel(struct slots slots, const int64_t *slot, const float *weight, const Element *x,
                              int64_t columns, Element *y, bool accumulate)
{
    const int64_t parts = columns / N;
    for (GRID_STRIDE(i, slots.rows * slots.tokens * parts)) {
        const int64_t r = i / parts, c = i % parts * N;
        float sum[N] = {};
        for (int64_t q = r * slots.choices; q < (r + 1) * slots.choices; q++) {
            if (slot[q] < 0) continue;
            const float by = weight ? weight[q] : 1.0f;
            float value[N];
            load<N>(x + slot[q] * columns + c, value);
            for (int e = 0; e < N; e++) sum[e] += value[e] * by;
        }
        store<N>(y + r * columns + c, sum, accumulate);
    }
}

/* Every choice: the dot product of its slot with the gradient of its token. One warp per choice. */
template <class Element, int N>
__global__ void weigh_kernel(struct slots slots, const int64_t *slot, const Element *dy, const Element *x,
                             int64_t columns, float *dweight, bool accumulate)
{
    const int64_t count = slots.rows * slots.tokens * slots.choices, warps = (int64_t)gridDim.x * (blockDim.x / 32);
    for (int64_t q = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; q < count; q += warps) {
        float sum = 0;
        for (int64_t c = threadIdx.x % 32 * N; slot[q] >= 0 && c < columns; c += 32 * N) {
            float a[N], b[N];
            load<N>(dy + q / slots.choices * columns + c, a);
            load<N>(x + slot[q] * columns + c, b);
            for (int e = 0; e < N; e++) sum += a[e] * b[e];
        }
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) dweight[q] = accumulate ? dweight[q] + sum : sum;
    }
}

/* input: x, (weights,) choices; output: slots */
template <class Element>
static enum hapt_status fill(const struct hapt_call *call, const float *weight, bool strict, struct hapt_queue *queue)
{
    const struct hapt_view *y = &call->output[0];
    const struct slots slots = slots_of(call, &call->input[call->input_count - 1], y);
    const int64_t columns = view_columns(y);
    const Element *x = (const Element *)call->input[0].data;
    const bool accumulate = call->accumulate & 1u;
    int64_t *choice = (int64_t *)call->workspace; /* [slots] */
    HAPT_TRY(launch(slot_kernel, dim3((unsigned)(slots.rows * slots.experts)), THREADS, 0, queue, slots,
                    (int64_t *)NULL, choice, (float *)NULL, strict ? queue->fault : (struct cuda_fault *)NULL));
    const bool packed = packs_fit<Element>(columns, x, y->data);
    return launch(packed ? fill_kernel<Element, pack<Element>::COUNT> : fill_kernel<Element, 1>,
                  blocks_for(slot_count(slots) * columns / (packed ? pack<Element>::COUNT : 1), THREADS), THREADS, 0,
                  queue, slots, choice, weight, x, columns, (Element *)y->data, accumulate);
}

/* input: slots, (weights,) choices; output: tokens */
template <class Element>
static enum hapt_status gather(const struct hapt_call *call, const float *weight, struct hapt_queue *queue)
{
    const struct hapt_view *y = &call->output[0];
    const struct slots slots = slots_of(call, &call->input[call->input_count - 1], &call->input[0]);
    const int64_t columns = view_columns(y);
    const Element *x = (const Element *)call->input[0].data;
    const bool packed = packs_fit<Element>(columns, x, y->data);
    int64_t *slot = (int64_t *)call->workspace; /* [choices] */
    HAPT_TRY(find_slots(slots, slot, queue));
    return launch(packed ? gather_kernel<Element, pack<Element>::COUNT> : gather_kernel<Element, 1>,
                  blocks_for(hapt_view_elements(y) / (packed ? pack<Element>::COUNT : 1), THREADS), THREADS, 0, queue,
                  slots, slot, weight, x, columns, (Element *)y->data, (bool)(call->accumulate & 1u));
}

template <class Element> static enum hapt_status dispatch_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    return fill<Element>(call, NULL, true, queue);
}

template <class Element> static enum hapt_status dispatch_dx_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    return gather<Element>(call, NULL, queue);
}

template <class Element> static enum hapt_status combine_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    return gather<Element>(call, (const float *)call->input[1].data, queue);
}

template <class Element>
static enum hapt_status combine_dslots_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    return fill<Element>(call, (const float *)call->input[1].data, false, queue);
}

/* input: dy, slots, choices */
template <class Element>
static enum hapt_status combine_dweights_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct slots slots = slots_of(call, &call->input[2], &call->input[1]);
    const Element *dy = (const Element *)call->input[0].data, *x = (const Element *)call->input[1].data;
    const int64_t columns = view_columns(&call->input[0]);
    int64_t *slot = (int64_t *)call->workspace; /* [choices] */
    HAPT_TRY(find_slots(slots, slot, queue));
    return launch(packs_fit<Element>(columns, dy, x) ? weigh_kernel<Element, pack<Element>::COUNT>
                                                     : weigh_kernel<Element, 1>,
                  blocks_for(choice_count(slots), THREADS / 32), THREADS, 0, queue, slots, slot, dy, x, columns,
                  (float *)call->output[0].data, (bool)(call->accumulate & 1u));
}

/* An index for every slot, or for every choice. */
static size_t fill_workspace(const struct hapt_call *call)
{
    return (size_t)slot_count(slots_of(call, &call->input[call->input_count - 1], &call->output[0])) * sizeof(int64_t);
}

static size_t choice_workspace(const struct hapt_call *call)
{
    return (size_t)hapt_view_elements(&call->input[call->input_count - 1]) * sizeof(int64_t);
}

extern const struct cuda_kernel hapt_cuda_moe[] = {
    CUDA_KERNELS("moe_gate", NULL, gate_run),
    CUDA_KERNELS("moe_gate_dx", NULL, gate_dx_run),
    CUDA_KERNELS("moe_gate_over_all", NULL, gate_run),
    CUDA_KERNELS("moe_gate_over_all_dx", NULL, gate_over_all_dx_run),
    {HAPT_F32, {"moe_count", NULL, count_run}},
    CUDA_KERNELS("moe_dispatch", fill_workspace, dispatch_run),
    CUDA_KERNELS("moe_dispatch_dx", choice_workspace, dispatch_dx_run),
    CUDA_KERNELS("moe_combine", choice_workspace, combine_run),
    CUDA_KERNELS("moe_combine_dslots", fill_workspace, combine_dslots_run),
    CUDA_KERNELS("moe_combine_dweights", choice_workspace, combine_dweights_run),
    CUDA_KERNELS_END,
};
