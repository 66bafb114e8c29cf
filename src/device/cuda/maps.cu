/* Functions of one element and their slopes, products and quotients of two, softmax. */
#include <math.h>

#include "maps.cuh"

#include "kernels.h"
#include "rows.cuh"

/* The attributes real[0] and real[1]. */
struct parameters {
    float first, second;
};

/* One function: its value and its slope at x. NaN is kept by every value. */
#define MAP_FUNCTION(name, value_at, slope_at)                                                              \
    struct name##_function {                                                                                \
        static __device__ __forceinline__ float value(float x, [[maybe_unused]] const struct parameters &p) \
        {                                                                                                   \
            return value_at;                                                                                \
        }                                                                                                   \
        static __device__ __forceinline__ float slope(float x, [[maybe_unused]] const struct parameters &p) \
        {                                                                                                   \
            return slope_at;                                                                                \
        }                                                                                                   \
    };

/* By e^-|x|, which neither overflows nor cancels. */
static __device__ __forceinline__ float sigmoid_at(float x)
{
    const float falling = expf(-fabsf(x)), share = 1.0f / (1.0f + falling);
    return x < 0.0f ? falling * share : share;
}

/* The slope of x sigmoid(rate x). */
static __device__ __forceinline__ float gated_slope(float x, float rate)
{
    const float gate = sigmoid_at(x * rate);
    return gate + x * rate * gate * sigmoid_at(x * -rate);
}

/* NaN is kept: comparisons with it are false. */
static __device__ __forceinline__ float between(float x, float low, float high)
{
    const float floor = x < low ? low : x;
    return floor > high ? high : floor;
}

static __device__ __forceinline__ float hardsigmoid_at(float x)
{
    return between(x * (1.0f / 6) + 0.5f, 0.0f, 1.0f);
}

static __device__ __forceinline__ float tanh_slope(float x)
{
    const float value = tanhf(x);
    return (1.0f - value) * (1.0f + value);
}

static __device__ __forceinline__ float power_at(float x, float exponent)
{
    return exponent == 0.5f ? sqrtf(x) : powf(x, exponent);
}

static __device__ __forceinline__ float power_slope(float x, float exponent)
{
    if (exponent == 0.0f) return 0.0f;
    return exponent == 2.0f ? 2.0f * x : exponent * power_at(x, exponent - 1.0f);
}

/* As in PyTorch, the slope of hardsigmoid at the ends of the middle part is 0. */
/* clang-format off */
MAP_FUNCTION(sigmoid, sigmoid_at(x), sigmoid_at(x) * sigmoid_at(-x))
MAP_FUNCTION(silu, x * sigmoid_at(x), gated_slope(x, 1.0f))
MAP_FUNCTION(quick_gelu, x * sigmoid_at(1.702f * x), gated_slope(x, 1.702f))
MAP_FUNCTION(tanh, tanhf(x), tanh_slope(x))
MAP_FUNCTION(hardsigmoid, hardsigmoid_at(x), x > -3.0f && x < 3.0f ? 1.0f / 6 : 0.0f)
MAP_FUNCTION(hardswish, x * hardsigmoid_at(x), x <= -3.0f ? 0.0f : x < 3.0f ? x * (1.0f / 3) + 0.5f : 1.0f)
MAP_FUNCTION(leaky_relu, x > 0.0f ? x : p.first * x, x > 0.0f ? 1.0f : p.first)
MAP_FUNCTION(elu, x > 0.0f ? x : p.first * expm1f(x), x > 0.0f ? 1.0f : p.first * expf(x))
MAP_FUNCTION(softplus, (x <= 0.0f ? 0.0f : x) + log1pf(expf(-fabsf(x))), sigmoid_at(x))
MAP_FUNCTION(clamp, between(x, p.first, p.second), x < p.first || x > p.second ? 0.0f : 1.0f)
MAP_FUNCTION(exp, expf(x), expf(x))
MAP_FUNCTION(log, logf(x), 1.0f / x)
MAP_FUNCTION(sin, sinf(x), cosf(x))
MAP_FUNCTION(cos, cosf(x), -sinf(x))
MAP_FUNCTION(power, p.first == 2.0f ? x * x : power_at(x, p.first), power_slope(x, p.first))

#define MAPS(of) \
    of(sigmoid) of(silu) of(quick_gelu) of(tanh) of(hardsigmoid) of(hardswish) of(leaky_relu) of(elu) of(softplus) \
    of(clamp) of(exp) of(log) of(sin) of(cos) of(power)
/* clang-format on */

template <class Function, bool BACKWARD> struct map_of {
    struct parameters p;
    __device__ float operator()(float x, float dy) const
    {
        return BACKWARD ? Function::slope(x, p) * dy : Function::value(x, p);
    }
};

/* input: x, and dy in the backward pass */
template <class Element, class Function, bool BACKWARD>
static enum hapt_status map_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct parameters p = {(float)call->real[0], (float)call->real[1]};
    return map<Element, Element>(call, queue, call->input[0].data, BACKWARD ? call->input[1].data : NULL,
                                 map_of<Function, BACKWARD>{p});
}

/* ---- two operands ---- */

struct product_of {
    __device__ float operator()(float a, float b) const
    {
        return a * b;
    }
};

struct difference_of {
    __device__ float operator()(float a, float b) const
    {
        return a - b;
    }
};

struct quotient_of {
    __device__ float operator()(float a, float b) const
    {
        return a / b;
    }
};

template <class Element, class Function>
static enum hapt_status two_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    return map<Element, Element>(call, queue, call->input[0].data, call->input[1].data, Function{});
}

/* db (+)= -dy y / b */
template <class Element>
static __global__ void div_db_kernel(const Element *y, const Element *b, const Element *dy, Element *db, int64_t count,
                                     bool packed, bool accumulate)
{
    const int64_t thread = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, threads = (int64_t)gridDim.x * blockDim.x;
    over<Element>(0, count, thread, threads, packed, [&](auto wide, int64_t i) {
        constexpr int N = decltype(wide)::COUNT;
        float quotient[N], divisor[N], value[N];
        load<N>(y + i, quotient);
        load<N>(b + i, divisor);
        load<N>(dy + i, value);
        for (int e = 0; e < N; e++) value[e] = -value[e] * quotient[e] / divisor[e];
        store<N>(db + i, value, accumulate);
    });
}

/* input: y, b, dy */
template <class Element> static enum hapt_status div_db_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const Element *y = (const Element *)call->input[0].data, *b = (const Element *)call->input[1].data,
                  *dy = (const Element *)call->input[2].data;
    Element *db = (Element *)call->output[0].data;
    const int64_t count = hapt_view_elements(&call->output[0]);
    return launch(div_db_kernel<Element>, blocks_for(count, MAP_THREADS * pack<Element>::COUNT), MAP_THREADS, 0, queue,
                  y, b, dy, db, count, packs_fit<Element>(0, y, b, dy, db), (bool)(call->accumulate & 1u));
}

/* ---- softmax ---- */

template <bool WARP> static __device__ __forceinline__ float row_largest(float value, float *shared)
{
    return WARP ? warp_largest(value) : block_largest(value, shared);
}

/* Rows are read three times; the second and third time they come from the cache. */
template <class Element, int N, bool WARP>
static __global__ void softmax_kernel(const Element *x, Element *y, int64_t rows, int64_t columns)
{
    __shared__ float shared[32];
    FOR_ROWS(row, rows)
    {
        float value[N], most = -INFINITY, sum = 0;
        FOR_COLUMNS(c, columns)
        {
            load<N>(x + row * columns + c, value);
            for (int e = 0; e < N; e++) most = fmaxf(most, value[e]);
        }
        most = row_largest<WARP>(most, shared);
        FOR_COLUMNS(c, columns)
        {
            load<N>(x + row * columns + c, value);
            for (int e = 0; e < N; e++) sum += expf(value[e] - most);
        }
        const float share = 1.0f / row_total<WARP>(sum, shared);
        FOR_COLUMNS(c, columns)
        {
            load<N>(x + row * columns + c, value);
            for (int e = 0; e < N; e++) value[e] = expf(value[e] - most) * share;
            store<N>(y + row * columns + c, value, false);
        }
    }
}

/* dx (+)= y (dy - sum of y dy) */
template <class Element, int N, bool WARP>
static __global__ void softmax_dx_kernel(const Element *y, const Element *dy, Element *dx, int64_t rows,
                                         int64_t columns, bool accumulate)
{
    __shared__ float shared[32];
    FOR_ROWS(row, rows)
    {
        float value[N], slope[N], sum = 0;
        FOR_COLUMNS(c, columns)
        {
            load<N>(y + row * columns + c, value);
            load<N>(dy + row * columns + c, slope);
            for (int e = 0; e < N; e++) sum += value[e] * slope[e];
        }
        const float mean = row_total<WARP>(sum, shared);
        FOR_COLUMNS(c, columns)
        {
            load<N>(y + row * columns + c, value);
            load<N>(dy + row * columns + c, slope);
            for (int e = 0; e < N; e++) value[e] *= slope[e] - mean;
            store<N>(dx + row * columns + c, value, accumulate);
        }
    }
}

template <class Element, int N, bool WARP>
static enum hapt_status softmax_launch(const struct hapt_call *call, struct hapt_queue *queue, bool backward)
{
    const int64_t rows = view_rows(&call->output[0]), columns = view_columns(&call->output[0]);
    const dim3 blocks = row_blocks(rows, WARP);
    const Element *in = (const Element *)call->input[0].data;
    Element *out = (Element *)call->output[0].data;
    if (!backward)
        return launch(softmax_kernel<Element, N, WARP>, blocks, ROW_THREADS, 0, queue, in, out, rows, columns);
    return launch(softmax_dx_kernel<Element, N, WARP>, blocks, ROW_THREADS, 0, queue, in,
                  (const Element *)call->input[1].data, out, rows, columns, (bool)(call->accumulate & 1u));
}

/* input: x; or y, dy in the backward pass */
template <class Element, bool BACKWARD>
static enum hapt_status softmax_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const int64_t columns = view_columns(&call->output[0]);
    const void *dy = BACKWARD ? call->input[1].data : NULL;
    const bool packed = packs_fit<Element>(columns, call->input[0].data, dy, call->output[0].data);
    constexpr int N = pack<Element>::COUNT;
    if (columns <= NARROW_ROW)
        return packed ? softmax_launch<Element, N, true>(call, queue, BACKWARD)
                      : softmax_launch<Element, 1, true>(call, queue, BACKWARD);
    return packed ? softmax_launch<Element, N, false>(call, queue, BACKWARD)
                  : softmax_launch<Element, 1, false>(call, queue, BACKWARD);
}

#define MAP_ROWS(op, Function, backward)                                                                    \
    CUDA_ROWS(op, NULL, (map_run<float, Function, backward>), (map_run<__nv_bfloat16, Function, backward>), \
              (map_run<__half, Function, backward>))
#define MAP_PAIR(name) MAP_ROWS(#name, name##_function, false), MAP_ROWS(#name "_dx", name##_function, true),

extern const struct cuda_kernel hapt_cuda_maps[] = {
    MAPS(MAP_PAIR) CUDA_KERNELS_WITH("mul", NULL, two_run, product_of),
    CUDA_KERNELS_WITH("sub", NULL, two_run, difference_of),
    CUDA_KERNELS_WITH("div", NULL, two_run, quotient_of),
    CUDA_KERNELS("div_db", NULL, div_db_run),
    CUDA_KERNELS_WITH("softmax", NULL, softmax_run, false),
    CUDA_KERNELS_WITH("softmax_dx", NULL, softmax_run, true),
    CUDA_KERNELS_END,
};
