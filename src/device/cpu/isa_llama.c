/* Rotary position embedding, SwiGLU and soft caps, forward and backward; scaling by a constant. */
#include <math.h>

#include "hapt/rope.h"
#include "isa.h"

#define POSITIONS \
    32 /* positions per thread and turn; sine and cosine are computed for the first only, the others by rotation */

/* Angles of one position: t times the rate of pair i < half, and the rotation to the next position. In double, so that
 * repeated rotations keep precision. */
struct angles {
    int64_t half;
    double magnitude;                                       /* of sines and cosines */
    double *sine, *cosine, *step_sine, *step_cosine, *rate; /* [half] */
    float *sine_f32, *cosine_f32;                           /* of this position, for the kernels */
};

/* Doubles of one thread's angles, a multiple of 64 bytes. */
static int64_t angle_doubles(int64_t half)
{
    return 6 * ((half + 15) / 16 * 16);
}

static struct angles angles_init(const struct hapt_call *call, int64_t half, double *scratch)
{
    const int64_t padded = (half + 15) / 16 * 16;
    struct angles at = {half,
                        hapt_rope_magnitude(call->real),
                        scratch,
                        scratch + padded,
                        scratch + 2 * padded,
                        scratch + 3 * padded,
                        scratch + 4 * padded,
                        (float *)(scratch + 5 * padded),
                        (float *)(scratch + 5 * padded) + padded};
    for (int64_t i = 0; i < half; i++) {
        at.rate[i] = hapt_rope_rate(call->integer, call->real, i, half);
        at.step_sine[i] = sin(at.rate[i]);
        at.step_cosine[i] = cos(at.rate[i]);
    }
    return at;
}

static void angles_at(const struct angles *at, int64_t position)
{
    for (int64_t i = 0; i < at->half; i++) {
        at->sine[i] = sin((double)position * at->rate[i]);
        at->cosine[i] = cos((double)position * at->rate[i]);
    }
}

static void angles_next(const struct angles *at)
{
    for (int64_t i = 0; i < at->half; i++) {
        const double sine = at->sine[i], cosine = at->cosine[i];
        at->sine[i] = sine * at->step_cosine[i] + cosine * at->step_sine[i];
        at->cosine[i] = cosine * at->step_cosine[i] - sine * at->step_sine[i];
    }
}

/* The backward rotates in the other direction. */
static void angles_round(const struct angles *at, bool backward)
{
    for (int64_t i = 0; i < at->half; i++) {
        at->sine_f32[i] = (float)(at->magnitude * (backward ? -at->sine[i] : at->sine[i]));
        at->cosine_f32[i] = (float)(at->magnitude * at->cosine[i]);
    }
}

/* One head of one row: rotates (x[i], x[i + half]) by angle i. */
INLINE void rotate(const struct angles *at, const void *x, void *y, int64_t first, bool half_type, bool accumulate)
{
    for (int64_t i = 0; i < at->half; i += LANES) {
        const int64_t left = at->half - i, low = first + i, high = low + at->half;
        const vector sine = load(at->sine_f32, i, left, false), cosine = load(at->cosine_f32, i, left, false);
        const vector a = load(x, low, left, half_type), b = load(x, high, left, half_type);
        vector turned_a = a * cosine - b * sine, turned_b = b * cosine + a * sine;
        if (accumulate) {
            turned_a += load(y, low, left, half_type);
            turned_b += load(y, high, left, half_type);
        }
        store(y, low, left, half_type, turned_a);
        store(y, high, left, half_type, turned_b);
    }
}

/* The columns of a head that do not rotate. */
INLINE void keep(const void *x, void *y, int64_t first, int64_t columns, bool half_type, bool accumulate)
{
    for (int64_t i = 0; i < columns; i += LANES) {
        const int64_t left = columns - i;
        vector value = load(x, first + i, left, half_type);
        if (accumulate) value += load(y, first + i, left, half_type);
        store(y, first + i, left, half_type, value);
    }
}

static size_t rope_workspace(const struct hapt_call *call)
{
    const int64_t half = hapt_rope_columns(call->integer, view_columns(&call->input[0]) / call->integer[0]) / 2;
    const int threads = threads_for(call, 2 * hapt_view_elements(&call->input[0]));
    return (size_t)(threads * angle_doubles(half)) * sizeof(double);
}

/* Attributes: hapt/rope.h. */
INLINE void rope_run(const struct hapt_call *call, bool backward, bool half_type)
{
    const struct hapt_view *view = &call->input[0]; /* [batch][length][width] */
    const int64_t batch = view->shape[0], length = view->shape[1], width = view->shape[2];
    const int64_t head = width / call->integer[0], chunks = (length + POSITIONS - 1) / POSITIONS;
    const int64_t turned = hapt_rope_columns(call->integer, head);
    const void *x = view->data;
    void *y = call->output[0].data;
    const bool accumulate = call->accumulate & 1u;
#pragma omp parallel num_threads(threads_for(call, 2 * hapt_view_elements(view)))
    {
        double *scratch = (double *)call->workspace + omp_get_thread_num() * angle_doubles(turned / 2);
        const struct angles at = angles_init(call, turned / 2, scratch);
#pragma omp for schedule(static)
        for (int64_t k = 0; k < chunks; k++) {
            angles_at(&at, k * POSITIONS);
            for (int64_t t = k * POSITIONS; t < smaller(length, (k + 1) * POSITIONS); t++) {
                angles_round(&at, backward);
                for (int64_t b = 0; b < batch; b++)
                    for (int64_t c = 0; c < width; c += head) {
                        const int64_t first = (b * length + t) * width + c;
                        rotate(&at, x, y, first, half_type, accumulate);
                        keep(x, y, first + turned, head - turned, half_type, accumulate);
                    }
                angles_next(&at);
            }
        }
    }
}

/* silu(g) = g s with s = 1 / (1 + e^-g); its slope is s (1 + g (1 - s)). */
INLINE vector sigmoid(vector g, vector *rest)
{
    const vector falling = vector_exp(-g), s = vector_reciprocal(1.0f + falling);
    *rest = falling * s; /* 1 - s, without cancellation */
    return s;
}

INLINE void swiglu_run(const struct hapt_call *call, bool half)
{
    const int64_t elements = hapt_view_elements(&call->output[0]);
    const void *gate = call->input[0].data, *up = call->input[1].data;
    void *y = call->output[0].data;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, elements * 4))
    for (int64_t first = 0; first < elements; first += CHUNK) {
        const int64_t end = smaller(elements, first + CHUNK);
        for (int64_t i = first; i < end; i += LANES) {
            vector rest;
            const vector g = load(gate, i, end - i, half);
            store(y, i, end - i, half, g * sigmoid(g, &rest) * load(up, i, end - i, half));
        }
    }
}

/* input: gate, up, dy; output: dgate, dup */
INLINE void swiglu_backward_run(const struct hapt_call *call, bool half)
{
    const int64_t elements = hapt_view_elements(&call->input[0]);
    const void *gate = call->input[0].data, *up = call->input[1].data, *dy = call->input[2].data;
    void *dgate = call->output[0].data, *dup = call->output[1].data;
    const bool add_gate = call->accumulate & 1u, add_up = call->accumulate >> 1 & 1u;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, elements * 4))
    for (int64_t first = 0; first < elements; first += CHUNK) {
        const int64_t end = smaller(elements, first + CHUNK);
        for (int64_t i = first; i < end; i += LANES) {
            const int64_t left = end - i;
            vector rest;
            const vector g = load(gate, i, left, half), d = load(dy, i, left, half), s = sigmoid(g, &rest);
            vector to_gate = d * load(up, i, left, half) * (s + g * (s * rest)), to_up = d * (g * s);
            if (add_gate) to_gate += load(dgate, i, left, half);
            if (add_up) to_up += load(dup, i, left, half);
            store(dgate, i, left, half, to_gate);
            store(dup, i, left, half, to_up);
        }
    }
}

/* real[0] x; also its gradient. */
INLINE void scale_run(const struct hapt_call *call, bool half)
{
    const int64_t elements = hapt_view_elements(&call->input[0]);
    const float factor = (float)call->real[0];
    const void *x = call->input[0].data;
    void *y = call->output[0].data;
    const bool accumulate = call->accumulate & 1u;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, elements))
    for (int64_t first = 0; first < elements; first += CHUNK) {
        const int64_t end = smaller(elements, first + CHUNK);
        for (int64_t i = first; i < end; i += LANES) {
            vector value = load(x, i, end - i, half) * factor;
            if (accumulate) value += load(y, i, end - i, half);
            store(y, i, end - i, half, value);
        }
    }
}

/* y = c tanh(x / c). The slope is 1 - (y / c)^2. */
INLINE void softcap_run(const struct hapt_call *call, bool backward, bool half)
{
    const int64_t elements = hapt_view_elements(&call->input[0]);
    const float cap = (float)call->real[0], share = (float)(1 / call->real[0]);
    const void *x = call->input[0].data, *dy = backward ? call->input[1].data : NULL; /* backward: y, dy */
    void *out = call->output[0].data;
    const bool accumulate = backward && (call->accumulate & 1u);
#pragma omp parallel for schedule(static) num_threads(threads_for(call, elements * 4))
    for (int64_t first = 0; first < elements; first += CHUNK) {
        const int64_t end = smaller(elements, first + CHUNK);
        for (int64_t i = first; i < end; i += LANES) {
            const vector part = load(x, i, end - i, half) * share;
            vector value = backward ? load(dy, i, end - i, half) * (1.0f - part * part) : vector_tanh(part) * cap;
            if (accumulate) value += load(out, i, end - i, half);
            store(out, i, end - i, half, value);
        }
    }
}

KERNELS(rope, rope_run(call, false, half))
KERNELS(rope_dx, rope_run(call, true, half))
KERNELS(swiglu, swiglu_run(call, half))
KERNELS(swiglu_backward, swiglu_backward_run(call, half))
KERNELS(scale, scale_run(call, half))
KERNELS(softcap, softcap_run(call, false, half))
KERNELS(softcap_dx, softcap_run(call, true, half))

const struct cpu_kernel ISA_NAME(hapt_cpu_llama)[] = {
    KERNEL_ROWS("rope", rope_workspace, rope),   KERNEL_ROWS("rope_dx", rope_workspace, rope_dx),
    KERNEL_ROWS("swiglu", NULL, swiglu),         KERNEL_ROWS("swiglu_backward", NULL, swiglu_backward),
    KERNEL_ROWS("scale", NULL, scale),           KERNEL_ROWS("softcap", NULL, softcap),
    KERNEL_ROWS("softcap_dx", NULL, softcap_dx), {HAPT_F32, {NULL, NULL, NULL}},
};
