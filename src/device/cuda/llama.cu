/* Rotary position embedding and SwiGLU, forward and backward. */
#include <string.h>

#include "kernels.h"
#include "rows.cuh"

#define HAPT_ROPE_FUNCTION static __host__ __device__ __forceinline__
#include "hapt/rope.h"

enum { THREADS = 256, POSITIONS = 8 };

/* Attributes of a call: hapt/rope.h. */
struct angles {
    int64_t integer[HAPT_MAX_ATTRIBUTES];
    double real[HAPT_MAX_ATTRIBUTES];
};

/* Sine and cosine of position t times the rate of pair i, each rounded once; the backward negates the angle. A thread
 * computes one i at POSITIONS positions, since powers in double are slow. */
static __global__ void angle_kernel(float *sine, float *cosine, int64_t length, int64_t half, struct angles angles,
                                    bool backward)
{
    const double magnitude = hapt_rope_magnitude(angles.real);
    for (GRID_STRIDE(thread, (length + POSITIONS - 1) / POSITIONS * half)) {
        const int64_t i = thread % half, first = thread / half * POSITIONS,
                      end = first + POSITIONS < length ? first + POSITIONS : length;
        const double rate = hapt_rope_rate(angles.integer, angles.real, i, half);
        for (int64_t t = first; t < end; t++) {
            const double turned = magnitude * sin((double)t * rate);
            sine[t * half + i] = (float)(backward ? -turned : turned);
            cosine[t * half + i] = (float)(magnitude * cos((double)t * rate));
        }
    }
}

/* Rotates (x[i], x[i + half]) of every head of every row by angle i. The other columns of a head stay. */
template <class Element, int N>
static __global__ void rope_kernel(const Element *x, Element *y, const float *sine, const float *cosine, int64_t rows,
                                   int64_t length, int heads, int head, int half, bool accumulate)
{
    const int pairs = heads * half, rest = head - 2 * half, first = threadIdx.x * N;
    for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
        const int64_t row = r * heads * head;
        for (int p = first; p < pairs; p += THREADS * N) {
            const int i = p % half;
            const int64_t low = row + p / half * head + i, angle = r % length * half + i;
            float a[N], b[N], s[N], c[N], turned_a[N], turned_b[N];
            load<N>(x + low, a);
            load<N>(x + low + half, b);
            load<N>(sine + angle, s);
            load<N>(cosine + angle, c);
            for (int e = 0; e < N; e++) {
                turned_a[e] = a[e] * c[e] - b[e] * s[e];
                turned_b[e] = b[e] * c[e] + a[e] * s[e];
            }
            store<N>(y + low, turned_a, accumulate);
            store<N>(y + low + half, turned_b, accumulate);
        }
        for (int c = first; c < heads * rest; c += THREADS * N) {
            const int64_t at = row + c / rest * head + 2 * half + c % rest;
            float kept[N];
            load<N>(x + at, kept);
            store<N>(y + at, kept, accumulate);
        }
    }
}

/* Bytes for sines, then cosines. */
static size_t rope_workspace(const struct hapt_call *call)
{
    const struct hapt_view *view = &call->input[0]; /* [batch][length][width] */
    const int64_t half = hapt_rope_columns(call->integer, view->shape[2] / call->integer[0]) / 2;
    return (size_t)(view->shape[1] * half * 2) * sizeof(float);
}

/* Attributes: hapt/rope.h. */
template <class Element, bool BACKWARD>
static enum hapt_status rope_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct hapt_view *view = &call->input[0];
    const int64_t length = view->shape[1], heads = call->integer[0], head = view->shape[2] / heads,
                  half = hapt_rope_columns(call->integer, head) / 2, rows = view->shape[0] * length;
    const Element *x = (const Element *)view->data;
    Element *y = (Element *)call->output[0].data;
    float *sine = (float *)call->workspace, *cosine = sine + length * half;
    const bool packed = packs_fit<Element>(half, x, y, sine) && packs_fit<Element>(head);
    struct angles angles;
    memcpy(angles.integer, call->integer, sizeof angles.integer);
    memcpy(angles.real, call->real, sizeof angles.real);
    HAPT_TRY(launch(angle_kernel, blocks_for((length + POSITIONS - 1) / POSITIONS * half, THREADS), THREADS, 0, queue,
                    sine, cosine, length, half, angles, BACKWARD));
    return launch(packed ? rope_kernel<Element, pack<Element>::COUNT> : rope_kernel<Element, 1>, blocks_for(rows, 1),
                  THREADS, 0, queue, x, y, (const float *)sine, (const float *)cosine, rows, length, (int)heads,
                  (int)head, (int)half, (call->accumulate & 1u) != 0);
}

/* silu(g) = g s with s = 1 / (1 + e^-g); its slope is s (1 + g (1 - s)). */
static __device__ __forceinline__ float sigmoid(float g, float *rest)
{
    const float falling = expf(-g), s = 1.0f / (1.0f + falling);
    *rest = isinf(falling) ? 1.0f : falling * s; /* 1 - s, without cancellation */
    return s;
}

template <class Element>
static __global__ void swiglu_kernel(const Element *gate, const Element *up, Element *y, int64_t count, bool packed)
{
    const int64_t thread = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, threads = (int64_t)gridDim.x * blockDim.x;
    over<Element>(0, count, thread, threads, packed, [&](auto wide, int64_t i) {
        constexpr int N = decltype(wide)::COUNT;
        float g[N], u[N], rest;
        load<N>(gate + i, g);
        load<N>(up + i, u);
        for (int e = 0; e < N; e++) u[e] *= g[e] * sigmoid(g[e], &rest);
        store<N>(y + i, u, false);
    });
}

template <class Element> static enum hapt_status swiglu_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const int64_t count = hapt_view_elements(&call->output[0]);
    const Element *gate = (const Element *)call->input[0].data, *up = (const Element *)call->input[1].data;
    Element *y = (Element *)call->output[0].data;
    return launch(swiglu_kernel<Element>, blocks_for(count, THREADS * pack<Element>::COUNT), THREADS, 0, queue, gate,
                  up, y, count, packs_fit<Element>(0, gate, up, y));
}

template <class Element> struct swiglu_backward {
    const Element *gate, *up, *dy;
    Element *dgate, *dup;
    int64_t count;
    bool packed, add_gate, add_up;
};

template <class Element> static __global__ void swiglu_backward_kernel(struct swiglu_backward<Element> job)
{
    const int64_t thread = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, threads = (int64_t)gridDim.x * blockDim.x;
    over<Element>(0, job.count, thread, threads, job.packed, [&](auto wide, int64_t i) {
        constexpr int N = decltype(wide)::COUNT;
        float g[N], u[N], d[N];
        load<N>(job.gate + i, g);
        load<N>(job.up + i, u);
        load<N>(job.dy + i, d);
        for (int e = 0; e < N; e++) {
            float rest;
            const float s = sigmoid(g[e], &rest), to_gate = d[e] * u[e] * (s + g[e] * (s * rest));
            u[e] = d[e] * (g[e] * s);
            g[e] = to_gate;
        }
        store<N>(job.dgate + i, g, job.add_gate);
        store<N>(job.dup + i, u, job.add_up);
    });
}

/* input: gate, up, dy; output: dgate, dup */
template <class Element>
static enum hapt_status swiglu_backward_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    struct swiglu_backward<Element> job;
    job.gate = (const Element *)call->input[0].data;
    job.up = (const Element *)call->input[1].data;
    job.dy = (const Element *)call->input[2].data;
    job.dgate = (Element *)call->output[0].data;
    job.dup = (Element *)call->output[1].data;
    job.count = hapt_view_elements(&call->input[0]);
    job.packed = packs_fit<Element>(0, job.gate, job.up, job.dy, job.dgate, job.dup);
    job.add_gate = call->accumulate & 1u;
    job.add_up = call->accumulate >> 1 & 1u;
    return launch(swiglu_backward_kernel<Element>, blocks_for(job.count, THREADS * pack<Element>::COUNT), THREADS, 0,
                  queue, job);
}

extern const struct cuda_kernel hapt_cuda_llama[] = {
    CUDA_KERNELS_WITH("rope", rope_workspace, rope_run, false),
    CUDA_KERNELS_WITH("rope_dx", rope_workspace, rope_run, true),
    CUDA_KERNELS("swiglu", NULL, swiglu_run),
    CUDA_KERNELS("swiglu_backward", NULL, swiglu_backward_run),
    CUDA_KERNELS_END,
};
