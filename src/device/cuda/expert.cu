/*
 * Products of experts with their filled slots: y = x w' + bias for each expert, and the gradients. Slots are
 * [rows][experts][capacity][columns]. counts [rows][experts], known on the device only, gives the filled slots, from
 * the front. So products run over all slots, and results of empty slots are ignored.
 */
#include "kernels.h"
#include "product.h"
#include "rows.cuh"

enum { THREADS = 256 };

struct experts {
    const float *counts;
    int64_t rows, experts, capacity;
};

/* `slots`: any operand with slots. */
static struct experts experts_of(const struct hapt_view *slots, const struct hapt_view *counts)
{
    return {(const float *)counts->data, slots->shape[0], slots->shape[1], slots->shape[2]};
}

static int64_t slot_count(const struct experts &of)
{
    return of.rows * of.experts * of.capacity;
}

__device__ __forceinline__ bool filled(const struct experts &of, int64_t slot)
{
    return (float)(slot % of.capacity + 1) <= of.counts[slot / of.capacity];
}

/* Sets empty slots to 0. With `from`: adds it to filled slots and leaves empty ones. */
template <class Element, int N>
__global__ void finish_slots_kernel(struct experts of, const Element *from, int64_t columns, Element *slots)
{
    const int64_t parts = columns / N;
    for (GRID_STRIDE(i, of.rows * of.experts * of.capacity * parts)) {
        const int64_t s = i / parts, at = s * columns + i % parts * N;
        float value[N] = {};
        if (filled(of, s) != (from != NULL)) continue;
        if (from) load<N>(from + at, value);
        store<N>(slots + at, value, from != NULL);
    }
}

/* Copies slots to [experts][rows][capacity][columns], with 0 in empty ones. */
template <class Element, int N>
__global__ void gather_kernel(struct experts of, const Element *slots, int64_t columns, Element *to)
{
    const int64_t parts = columns / N;
    for (GRID_STRIDE(i, of.rows * of.experts * of.capacity * parts)) {
        const int64_t s = i / parts, c = i % parts * N, row = s / of.capacity / of.experts,
                      expert = s / of.capacity % of.experts;
        float value[N] = {};
        if (filled(of, s)) load<N>(slots + s * columns + c, value);
        store<N>(to + ((expert * of.rows + row) * of.capacity + s % of.capacity) * columns + c, value, false);
    }
}

/* A matrix whose rows are the slots of all rows, and whose columns are those of all experts side by side. Reads slots
 * by expert. */
template <class Element> struct expert_matrix {
    const Element *x;
    int64_t rows, columns; /* of each expert */
    template <int N> __device__ void operator()(struct width<N>, int64_t row, int64_t column, float (*value)[N]) const
    {
        load<N>(x + (column / columns * rows + row) * columns + column % columns, value[0]);
    }
};

static size_t slots_bytes(const struct hapt_view *slots)
{
    return ((size_t)hapt_view_elements(slots) * (slots->dtype == HAPT_F32 ? 4 : 2) + 255) / 256 * 256;
}

/* Forward and the gradient of x: input slots, weights, counts (, bias); output slots. One batched product covers all
 * experts of a row, or all rows of an expert. */
template <class Element, bool TRANSPOSED>
static enum hapt_status slots_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct hapt_view *from = &call->input[0], *to = &call->output[0];
    const struct experts of = experts_of(from, &call->input[2]);
    const int64_t in = view_columns(from), out = view_columns(to);
    const bool accumulate = call->accumulate & 1u, by_row = of.rows <= of.experts;
    const Element *bias = call->input_count > 3 ? (const Element *)call->input[3].data : NULL;
    const size_t kept =
        accumulate ? slots_bytes(to) : 0; /* when adding, the product is separate: first in the workspace */
    Element *product = (Element *)(accumulate ? call->workspace : to->data), *y = (Element *)to->data;
    for (int64_t i = 0; i < (by_row ? of.rows : of.experts); i++) {
        const int64_t first = (by_row ? i * of.experts : i) * of.capacity,
                      apart = (by_row ? 1 : of.experts) * of.capacity;
        struct product p = {};
        p.m = of.capacity;
        p.n = out;
        p.k = in;
        p.transpose_b = TRANSPOSED;
        p.in = p.out = from->dtype;
        p.a = (const Element *)from->data + first * in;
        p.b = (const Element *)call->input[1].data + (by_row ? 0 : i * in * out);
        p.c = product + first * out;
        p.bias = bias ? bias + (by_row ? 0 : i * out) : NULL;
        p.batches = by_row ? of.experts : of.rows;
        p.stride_a = apart * in;
        p.stride_b = by_row ? in * out : 0;
        p.stride_c = apart * out;
        p.stride_bias = by_row ? out : 0;
        HAPT_TRY(product_run(&p, (char *)call->workspace + kept, call->workspace_bytes - kept, queue));
    }
    const bool packed = packs_fit<Element>(out, y, product);
    return launch(packed ? finish_slots_kernel<Element, pack<Element>::COUNT> : finish_slots_kernel<Element, 1>,
                  blocks_for(slot_count(of) * out / (packed ? pack<Element>::COUNT : 1), THREADS), THREADS, 0, queue,
                  of, accumulate ? (const Element *)product : (const Element *)NULL, out, y);
}

template <class Element>
static enum hapt_status by_expert(const struct experts &of, const struct hapt_view *slots, Element *to,
                                  struct hapt_queue *queue)
{
    const int64_t columns = view_columns(slots);
    const bool packed = packs_fit<Element>(columns, slots->data, to);
    return launch(packed ? gather_kernel<Element, pack<Element>::COUNT> : gather_kernel<Element, 1>,
                  blocks_for(slot_count(of) * columns / (packed ? pack<Element>::COUNT : 1), THREADS), THREADS, 0,
                  queue, of, (const Element *)slots->data, columns, to);
}

/* Gradients of weights and biases: input x, counts, dy; output dw, db. */
template <class Element> static enum hapt_status weights_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct hapt_view *x = &call->input[0], *dy = &call->input[2];
    const struct experts of = experts_of(x, &call->input[1]);
    const int64_t in = view_columns(x), out = view_columns(dy), slots = of.rows * of.capacity;
    float *db = call->output_count > 1 ? (float *)call->output[1].data : NULL;
    Element *own_x = (Element *)call->workspace, *own_dy = (Element *)((char *)own_x + slots_bytes(x));
    char *rest = (char *)own_dy + slots_bytes(dy);
    struct product p = {};
    HAPT_TRY(by_expert(of, x, own_x, queue));
    HAPT_TRY(by_expert(of, dy, own_dy, queue));
    if (db) {
        const struct expert_matrix<Element> matrix = {
            own_dy, slots, out
        };
        const bool accumulate = call->accumulate >> 1 & 1u;
        if (packs_fit<Element>(out, own_dy))
            HAPT_TRY(
                (column_sums<1, pack<Element>::COUNT>(matrix, slots, of.experts * out, &db, &accumulate, rest, queue)));
        else
            HAPT_TRY((column_sums<1, 1>(matrix, slots, of.experts * out, &db, &accumulate, rest, queue)));
    }
    p.m = out;
    p.n = in;
    p.k = slots;
    p.transpose_a = true;
    p.in = x->dtype;
    p.out = HAPT_F32;
    p.a = own_dy;
    p.b = own_x;
    p.c = call->output[0].data;
    p.batches = of.experts;
    p.stride_a = slots * out;
    p.stride_b = slots * in;
    p.stride_c = in * out;
    p.accumulate = call->accumulate & 1u;
    return product_run(&p, rest, call->workspace_bytes - (size_t)(rest - (char *)call->workspace), queue);
}

static size_t slots_workspace(const struct hapt_call *call)
{
    const struct hapt_view *to = &call->output[0];
    const int64_t products = to->shape[0] <= to->shape[1] ? to->shape[0] : to->shape[1];
    return product_workspace(products > 0 ? hapt_view_elements(to) / products : 0) +
           (call->accumulate & 1u ? slots_bytes(to) : 0);
}

static size_t weights_workspace(const struct hapt_call *call)
{
    const struct hapt_view *x = &call->input[0], *dy = &call->input[2];
    const size_t product = product_workspace(hapt_view_elements(&call->output[0]));
    const size_t sums = column_sums_workspace(x->shape[0] * x->shape[2], x->shape[1] * view_columns(dy), 1);
    return slots_bytes(x) + slots_bytes(dy) + (product > sums ? product : sums);
}

extern const struct cuda_kernel hapt_cuda_expert[] = {
    CUDA_KERNELS_WITH("expert_linear", slots_workspace, slots_run, true),
    CUDA_KERNELS_WITH("expert_linear_dx", slots_workspace, slots_run, false),
    CUDA_KERNELS("expert_linear_dw", weights_workspace, weights_run),
    CUDA_KERNELS_END,
};
