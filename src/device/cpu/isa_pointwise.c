/* Element-wise kernels: add, copy, gelu, convert, zero. */
#include "isa.h"

/* gelu(x) = x P(x); P and the derivative g'(x) share one exponential. */
struct gelu {
    vector value, slope;
};

/* P(x) = sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3): the tanh form without its cancellation. */
INLINE struct gelu gelu_tanh(vector x)
{
    const vector square = x * x;
    const vector twice = x * (square * 0.0713548162726f + 1.59576912161f); /* 2u */
    const vector falling = vector_exp(-twice);
    const vector p = vector_reciprocal(1.0f + falling);
    const vector q = falling * p;                                   /* 1 - P, without cancellation */
    const vector rate = square * 0.2140644488178f + 1.59576912161f; /* d(2u)/dx */
    return (struct gelu){x * p, p + x * p * (q * rate)};
}

/* P(-t) = exp(-t^2/2) R(t) for t >= 0; R(t)(1 + t) is a polynomial in (t - 4)/(t + 4), fitted for this file to 2e-9. */
INLINE struct gelu gelu_erf(vector x)
{
    static const float fit[11] = {0.47205320685801f,   -0.096703466931007f,  0.013999596142965f,  0.028599980736764f,
                                  -0.032197269495053f, 0.017940202883261f,   -0.005004382414028f, -0.000303759907218f,
                                  0.000692859266652f,  -0.0000605571815036f, -0.0000716115931604f};
    vector t = (vector)((ivector)x & 0x7fffffff);
    t = vector_select(t > 13.2f, vector_set(13.2f), t);
    const vector z = (t - 4.0f) * vector_reciprocal(t + 4.0f);
    vector r = vector_set(fit[10]);
    for (int i = 9; i >= 0; i--) r = r * z + fit[i];
    const vector wakeup = vector_exp(t * t * -0.5f);
    const vector tail = wakeup * r * vector_reciprocal(1.0f + t);
    const vector p = vector_select(x < 0.0f, tail, 1.0f - tail);
    const vector bounded = vector_select(x != x, x, p);
    return (struct gelu){x * bounded, bounded + x * wakeup * 0.398942280401f};
}

INLINE struct gelu gelu_at(vector x, bool erf)
{
    return erf ? gelu_erf(x) : gelu_tanh(x);
}

INLINE void gelu_run(const struct hapt_call *call, bool half, bool erf, bool backward)
{
    const int64_t elements = hapt_view_elements(&call->input[0]);
    const void *x = call->input[0].data, *dy = call->input[1].data;
    void *out = call->output[0].data;
    const bool accumulate = backward && (call->accumulate & 1u);
#pragma omp parallel for schedule(static) num_threads(threads_for(call, elements * 4))
    for (int64_t first = 0; first < elements; first += CHUNK) {
        const int64_t end = smaller(elements, first + CHUNK);
        for (int64_t i = first; i < end; i += LANES) {
            const struct gelu gelu = gelu_at(load(x, i, end - i, half), erf);
            vector result = backward ? gelu.slope * load(dy, i, end - i, half) : gelu.value;
            if (accumulate) result += load(out, i, end - i, half);
            store(out, i, end - i, half, result);
        }
    }
}

INLINE void gelu_of_kind(const struct hapt_call *call, bool half, bool backward)
{
    if (call->integer[0])
        gelu_run(call, half, true, backward);
    else
        gelu_run(call, half, false, backward);
}

/* gate, up -> gelu(gate) up; backward: gate, up, dy -> dgate, dup. */
INLINE void geglu_run(const struct hapt_call *call, bool half, bool erf, bool backward)
{
    const int64_t elements = hapt_view_elements(&call->input[0]);
    const void *gate = call->input[0].data, *up = call->input[1].data, *dy = backward ? call->input[2].data : NULL;
    void *out = call->output[0].data, *dup = backward ? call->output[1].data : NULL;
    const bool add_gate = backward && (call->accumulate & 1u), add_up = backward && (call->accumulate >> 1 & 1u);
#pragma omp parallel for schedule(static) num_threads(threads_for(call, elements * 4))
    for (int64_t first = 0; first < elements; first += CHUNK) {
        const int64_t end = smaller(elements, first + CHUNK);
        for (int64_t i = first; i < end; i += LANES) {
            const int64_t left = end - i;
            const struct gelu gelu = gelu_at(load(gate, i, left, half), erf);
            const vector factor = backward ? load(dy, i, left, half) : gelu.value;
            vector to_gate = factor * load(up, i, left, half), to_up = factor * gelu.value;
            if (backward) to_gate *= gelu.slope;
            if (add_gate) to_gate += load(out, i, left, half);
            store(out, i, left, half, to_gate);
            if (!backward) continue;
            if (add_up) to_up += load(dup, i, left, half);
            store(dup, i, left, half, to_up);
        }
    }
}

INLINE void geglu_of_kind(const struct hapt_call *call, bool half, bool backward)
{
    if (call->integer[0])
        geglu_run(call, half, true, backward);
    else
        geglu_run(call, half, false, backward);
}

KERNELS(gelu, gelu_of_kind(call, half, false))
KERNELS(gelu_dx, gelu_of_kind(call, half, true))
KERNELS(geglu, geglu_of_kind(call, half, false))
KERNELS(geglu_backward, geglu_of_kind(call, half, true))

/* y = a (+ b) (+ y); b NULL: a copy. Also converts between the types of the views. */
INLINE void sum_run(const struct hapt_call *call, const void *a, bool a_half, const void *b, bool b_half, bool y_half)
{
    const int64_t elements = hapt_view_elements(&call->output[0]);
    void *y = call->output[0].data;
    const bool accumulate = call->accumulate & 1u;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, elements))
    for (int64_t first = 0; first < elements; first += CHUNK) {
        const int64_t end = smaller(elements, first + CHUNK);
        for (int64_t i = first; i < end; i += LANES) {
            vector value = load(a, i, end - i, a_half);
            if (b) value += load(b, i, end - i, b_half);
            if (accumulate) value += load(y, i, end - i, y_half);
            store(y, i, end - i, y_half, value);
        }
    }
}

KERNELS(add, sum_run(call, call->input[0].data, half, call->input[1].data, half, half))

/* Copy and convert alike: the types of the views decide. */
static enum hapt_status copy_any(const struct hapt_call *call, struct hapt_queue *queue)
{
    (void)queue;
    const void *x = call->input[0].data;
    const enum hapt_dtype from = call->input[0].dtype, to = call->output[0].dtype;
    if (from == HAPT_F32 && to == HAPT_F32)
        sum_run(call, x, false, NULL, false, false);
    else if (from == HAPT_F32 && to == HAPT_BF16)
        sum_run(call, x, false, NULL, false, true);
    else if (from == HAPT_BF16 && to == HAPT_F32)
        sum_run(call, x, true, NULL, false, false);
    else if (from == HAPT_BF16 && to == HAPT_BF16)
        sum_run(call, x, true, NULL, false, true);
    else if (from == to && !call->accumulate)
        memcpy(call->output[0].data, x, (size_t)hapt_view_elements(&call->output[0]) * hapt_dtype_bytes(to));
    else
        return hapt_fail(HAPT_ERR_INTERNAL, NULL, "the cpu back end cannot copy %s to %s", hapt_dtype_name(from),
                         hapt_dtype_name(to));
    return HAPT_OK;
}

/* max(x, 0); NaN is kept. The backward uses y, which is positive where x was. */
INLINE void relu_run(const struct hapt_call *call, bool half, bool backward)
{
    const int64_t elements = hapt_view_elements(&call->input[0]);
    const void *x = call->input[0].data, *dy = call->input[1].data;
    void *out = call->output[0].data;
    const bool accumulate = call->accumulate & 1u;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, elements))
    for (int64_t first = 0; first < elements; first += CHUNK) {
        const int64_t end = smaller(elements, first + CHUNK);
        for (int64_t i = first; i < end; i += LANES) {
            const vector value = load(x, i, end - i, half), zero = {0};
            vector result = vector_select(value <= 0.0f, zero, backward ? load(dy, i, end - i, half) : value);
            if (accumulate) result += load(out, i, end - i, half);
            store(out, i, end - i, half, result);
        }
    }
}

KERNELS(relu, relu_run(call, half, false))
KERNELS(relu_dx, relu_run(call, half, true))

static enum hapt_status zero_any(const struct hapt_call *call, struct hapt_queue *queue)
{
    (void)queue;
    for (int o = 0; o < call->output_count; o++) {
        const struct hapt_view *view = &call->output[o];
        const int64_t bytes = hapt_view_elements(view) * (int64_t)hapt_dtype_bytes(view->dtype), block = 1 << 16;
        char *to = view->data;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, bytes / 8))
        for (int64_t at = 0; at < bytes; at += block) memset(to + at, 0, (size_t)smaller(block, bytes - at));
    }
    return HAPT_OK;
}

const struct cpu_kernel ISA_NAME(hapt_cpu_pointwise)[] = {
    KERNEL_ROWS("gelu", NULL, gelu),         KERNEL_ROWS("gelu_dx", NULL, gelu_dx),
    KERNEL_ROWS("geglu", NULL, geglu),       KERNEL_ROWS("geglu_backward", NULL, geglu_backward),
    KERNEL_ROWS("relu", NULL, relu),         KERNEL_ROWS("relu_dx", NULL, relu_dx),
    {HAPT_F32, {"cast", NULL, copy_any}},    {HAPT_BF16, {"cast", NULL, copy_any}},
    KERNEL_ROWS("add", NULL, add),           {HAPT_F32, {"copy", NULL, copy_any}},
    {HAPT_BF16, {"copy", NULL, copy_any}},   {HAPT_I32, {"copy", NULL, copy_any}},
    {HAPT_F32, {"convert", NULL, copy_any}}, {HAPT_BF16, {"convert", NULL, copy_any}},
    {HAPT_F32, {"zero", NULL, zero_any}},    {HAPT_BF16, {"zero", NULL, zero_any}},
    {HAPT_I32, {"zero", NULL, zero_any}},    {HAPT_F32, {NULL, NULL, NULL}},
};
