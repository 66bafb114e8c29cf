/* Functions of one element and their slopes, products and quotients of two, softmax. */
#include <math.h>

#include "isa.h"

struct map {
    vector value, slope;
};

/* libm's function for each lane: for functions that few models use. */
#define EACH_LANE(name, function)                              \
    INLINE vector name(vector x)                               \
    {                                                          \
        for (int i = 0; i < LANES; i++) x[i] = function(x[i]); \
        return x;                                              \
    }
EACH_LANE(lanes_log, logf)
EACH_LANE(lanes_log1p, log1pf)
EACH_LANE(lanes_expm1, expm1f)
EACH_LANE(lanes_sin, sinf)
EACH_LANE(lanes_cos, cosf)
EACH_LANE(lanes_exp, expf)

INLINE vector lanes_power(vector x, float exponent)
{
    for (int i = 0; i < LANES; i++) x[i] = exponent == 0.5f ? sqrtf(x[i]) : powf(x[i], exponent);
    return x;
}

INLINE vector size_of(vector x)
{
    return (vector)((ivector)x & 0x7fffffff);
}

/* By e^-|x|, which neither overflows nor cancels. NaN is kept. */
INLINE vector sigmoid(vector x)
{
    const vector falling = vector_exp(-size_of(x)), share = vector_reciprocal(1.0f + falling);
    return vector_select(x != x, x, vector_select(x < 0.0f, falling * share, share));
}

INLINE struct map sigmoid_at(vector x, const struct hapt_call *call)
{
    (void)call;
    const vector value = sigmoid(x);
    return (struct map){value, value * sigmoid(-x)};
}

/* x sigmoid(rate x) */
INLINE struct map gated(vector x, float rate)
{
    const vector gate = sigmoid(x * rate);
    return (struct map){x * gate, gate + x * rate * gate * sigmoid(x * -rate)};
}

INLINE struct map silu_at(vector x, const struct hapt_call *call)
{
    (void)call;
    return gated(x, 1.0f);
}

INLINE struct map quick_gelu_at(vector x, const struct hapt_call *call)
{
    (void)call;
    return gated(x, 1.702f);
}

INLINE struct map tanh_at(vector x, const struct hapt_call *call)
{
    (void)call;
    const vector value = vector_select(x != x, x, vector_tanh(x));
    return (struct map){value, (1.0f - value) * (1.0f + value)};
}

/* NaN is kept: comparisons with it are false. */
INLINE vector between(vector x, float low, float high)
{
    const vector floor = vector_select(x < low, vector_set(low), x);
    return vector_select(floor > high, vector_set(high), floor);
}

INLINE vector one_inside(vector x, float low, float high)
{
    return vector_select((x < low) | (x > high), (vector){0}, vector_set(1.0f));
}

/* As in PyTorch, the slope at the ends of the middle part is 0. */
INLINE struct map hardsigmoid_at(vector x, const struct hapt_call *call)
{
    (void)call;
    const vector value = between(x * (1.0f / 6) + 0.5f, 0.0f, 1.0f);
    return (struct map){value, vector_select((x > -3.0f) & (x < 3.0f), vector_set(1.0f / 6), (vector){0})};
}

INLINE struct map hardswish_at(vector x, const struct hapt_call *call)
{
    (void)call;
    const vector gate = between(x * (1.0f / 6) + 0.5f, 0.0f, 1.0f);
    const vector slope = vector_select(x < 3.0f, x * (1.0f / 3) + 0.5f, vector_set(1.0f));
    return (struct map){x * gate, vector_select(x <= -3.0f, (vector){0}, slope)};
}

INLINE struct map leaky_relu_at(vector x, const struct hapt_call *call)
{
    const float below = (float)call->real[0];
    const vector slope = vector_select(x > 0.0f, vector_set(1.0f), vector_set(below));
    return (struct map){x * slope, slope};
}

INLINE struct map elu_at(vector x, const struct hapt_call *call)
{
    const float below = (float)call->real[0];
    const vector bounded = vector_select(x > 0.0f, (vector){0}, x);
    return (struct map){vector_select(x > 0.0f, x, below * lanes_expm1(bounded)),
                        vector_select(x > 0.0f, vector_set(1.0f), below * vector_exp(bounded))};
}

INLINE struct map softplus_at(vector x, const struct hapt_call *call)
{
    (void)call;
    const vector rest = lanes_log1p(vector_exp(-size_of(x)));
    return (struct map){vector_select(x <= 0.0f, (vector){0}, x) + rest, sigmoid(x)};
}

INLINE struct map clamp_at(vector x, const struct hapt_call *call)
{
    const float low = (float)call->real[0], high = (float)call->real[1];
    return (struct map){between(x, low, high), one_inside(x, low, high)};
}

INLINE struct map exp_at(vector x, const struct hapt_call *call)
{
    (void)call;
    const vector value = lanes_exp(x);
    return (struct map){value, value};
}

INLINE struct map log_at(vector x, const struct hapt_call *call)
{
    (void)call;
    return (struct map){lanes_log(x), 1.0f / x};
}

INLINE struct map sin_at(vector x, const struct hapt_call *call)
{
    (void)call;
    return (struct map){lanes_sin(x), lanes_cos(x)};
}

INLINE struct map cos_at(vector x, const struct hapt_call *call)
{
    (void)call;
    return (struct map){lanes_cos(x), -lanes_sin(x)};
}

INLINE struct map power_at(vector x, const struct hapt_call *call)
{
    const float exponent = (float)call->real[0];
    if (exponent == 0.0f) return (struct map){vector_set(1.0f), (vector){0}};
    if (exponent == 2.0f) return (struct map){x * x, 2.0f * x};
    return (struct map){lanes_power(x, exponent), exponent * lanes_power(x, exponent - 1.0f)};
}

/* The other one of value and slope is not computed: its code is dead in each kernel. */
#define MAP_KERNELS(name)                                                                                             \
    INLINE void name##_run(const struct hapt_call *call, bool half, bool backward)                                    \
    {                                                                                                                 \
        const int64_t elements = hapt_view_elements(&call->input[0]);                                                 \
        const void *x = call->input[0].data, *dy = call->input[1].data;                                               \
        void *out = call->output[0].data;                                                                             \
        const bool accumulate = call->accumulate & 1u;                                                                \
        _Pragma(                                                                                                      \
            "omp parallel for schedule(static) num_threads(threads_for(call, elements * 4))") for (int64_t first = 0; \
                                                                                                   first < elements;  \
                                                                                                   first += CHUNK)    \
        {                                                                                                             \
            const int64_t end = smaller(elements, first + CHUNK);                                                     \
            for (int64_t i = first; i < end; i += LANES) {                                                            \
                const struct map map = name##_at(load(x, i, end - i, half), call);                                    \
                vector result = backward ? map.slope * load(dy, i, end - i, half) : map.value;                        \
                if (accumulate) result += load(out, i, end - i, half);                                                \
                store(out, i, end - i, half, result);                                                                 \
            }                                                                                                         \
        }                                                                                                             \
    }                                                                                                                 \
    KERNELS(name##_forward, name##_run(call, half, false))                                                            \
    KERNELS(name##_backward, name##_run(call, half, true))

/* clang-format off */
#define MAPS(of) \
    of(sigmoid) of(silu) of(quick_gelu) of(tanh) of(hardsigmoid) of(hardswish) of(leaky_relu) of(elu) of(softplus) \
    of(clamp) of(exp) of(log) of(sin) of(cos) of(power)
/* clang-format on */
MAPS(MAP_KERNELS)

/* ---- two operands ---- */

enum two { MUL, SUB, DIV, DIV_DB };

/* DIV_DB: y, b, dy -> -dy y / b */
INLINE vector two_at(enum two kind, vector a, vector b, vector dy)
{
    return kind == MUL ? a * b : kind == SUB ? a - b : kind == DIV ? a / b : -dy * a / b;
}

INLINE void two_run(const struct hapt_call *call, bool half, enum two kind)
{
    const int64_t elements = hapt_view_elements(&call->input[0]);
    const void *a = call->input[0].data, *b = call->input[1].data, *dy = call->input[2].data;
    void *out = call->output[0].data;
    const bool accumulate = call->accumulate & 1u;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, elements))
    for (int64_t first = 0; first < elements; first += CHUNK) {
        const int64_t end = smaller(elements, first + CHUNK);
        for (int64_t i = first; i < end; i += LANES) {
            const int64_t left = end - i;
            const vector incoming = kind == DIV_DB ? load(dy, i, left, half) : (vector){0};
            vector result = two_at(kind, load(a, i, left, half), load(b, i, left, half), incoming);
            if (accumulate) result += load(out, i, left, half);
            store(out, i, left, half, result);
        }
    }
}

KERNELS(mul, two_run(call, half, MUL))
KERNELS(sub, two_run(call, half, SUB))
KERNELS(div, two_run(call, half, DIV))
KERNELS(div_db, two_run(call, half, DIV_DB))

/* ---- softmax ---- */

INLINE void softmax_row(const void *x, void *y, int64_t first, int64_t columns, bool half)
{
    vector most = vector_set(-INFINITY);
    struct sum sum = {0};
    for (int64_t c = 0; c < columns; c += LANES) {
        const vector value = load(x, first + c, columns - c, half);
        most = vector_select(lanes_below(columns - c), vector_max(most, value), most);
    }
    const float shift = vector_maximum(most);
    for (int64_t c = 0; c < columns; c += LANES) {
        const vector value = vector_exp(load(x, first + c, columns - c, half) - shift);
        sum_add(&sum, vector_select(lanes_below(columns - c), value, (vector){0}));
    }
    const float share = (float)(1 / sum_total(&sum));
    for (int64_t c = 0; c < columns; c += LANES) {
        const int64_t left = columns - c;
        store(y, first + c, left, half, vector_exp(load(x, first + c, left, half) - shift) * share);
    }
}

/* dx = y (dy - sum of y dy) */
INLINE void softmax_row_backward(const void *y, const void *dy, void *dx, int64_t first, int64_t columns, bool half,
                                 bool accumulate)
{
    struct sum sum = {0};
    for (int64_t c = 0; c < columns; c += LANES)
        sum_add(&sum, load(y, first + c, columns - c, half) * load(dy, first + c, columns - c, half));
    const float mean = (float)sum_total(&sum);
    for (int64_t c = 0; c < columns; c += LANES) {
        const int64_t left = columns - c;
        vector result = load(y, first + c, left, half) * (load(dy, first + c, left, half) - mean);
        if (accumulate) result += load(dx, first + c, left, half);
        store(dx, first + c, left, half, result);
    }
}

INLINE void softmax_run(const struct hapt_call *call, bool half, bool backward)
{
    const int64_t rows = view_rows(&call->input[0]), columns = view_columns(&call->input[0]);
    void *out = call->output[0].data;
    const bool accumulate = call->accumulate & 1u;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, rows *columns * 4))
    for (int64_t r = 0; r < rows; r++) {
        if (backward)
            softmax_row_backward(call->input[0].data, call->input[1].data, out, r * columns, columns, half, accumulate);
        else
            softmax_row(call->input[0].data, out, r * columns, columns, half);
    }
}

KERNELS(softmax, softmax_run(call, half, false))
KERNELS(softmax_dx, softmax_run(call, half, true))

#define MAP_ROWS(name) KERNEL_ROWS(#name, NULL, name##_forward), KERNEL_ROWS(#name "_dx", NULL, name##_backward),

const struct cpu_kernel ISA_NAME(hapt_cpu_maps)[] = {
    MAPS(MAP_ROWS) KERNEL_ROWS("mul", NULL, mul),
    KERNEL_ROWS("sub", NULL, sub),
    KERNEL_ROWS("div", NULL, div),
    KERNEL_ROWS("div_db", NULL, div_db),
    KERNEL_ROWS("softmax", NULL, softmax),
    KERNEL_ROWS("softmax_dx", NULL, softmax_dx),
    {HAPT_F32, {NULL, NULL, NULL}},
};
