/* RMS norm, rotary positions, gated units, scaling and soft caps against double references and central differences. */
#include "kernels.h"

static enum hapt_dtype types[] = {HAPT_F32, HAPT_BF16}; /* the second: each half-precision type */

/* input: x [rows][d], gamma [d]; real: epsilon, added to gamma. Returns y, then rstd [rows]. */
static void rms_norm_reference(const struct problem *p, double *out)
{
    const int64_t d = p->input[1]->count, rows = p->input[0]->count / d;
    for (int64_t r = 0; r < rows; r++) {
        const double *x = p->input[0]->value + r * d;
        double square = 0;
        for (int64_t c = 0; c < d; c++) square += x[c] * x[c];
        const double rstd = 1 / sqrt(square / (double)d + p->real[0]);
        for (int64_t c = 0; c < d; c++) out[r * d + c] = x[c] * rstd * (p->real[1] + p->input[1]->value[c]);
        out[rows * d + r] = rstd;
    }
}

/* heads > 0: head_rms_norm of so many heads of `d` columns. */
static void check_rms_norm(const int64_t *s, enum hapt_dtype dtype, bool add, int threads)
{
    const int64_t batch = s[0], length = s[1], d = s[2], heads = s[3], offset = s[4], width = heads ? heads * d : d;
    /* The mean is far from 0, so that a subtracted mean would be noticed. */
    struct tensor x = TENSOR(dtype, -1, 3, batch, length, width), gamma = TENSOR(dtype, -2, 2, d);
    struct tensor y = TENSOR(dtype, 0, 0, batch, length, width),
                  rstd = TENSOR(HAPT_F32, 0, 0, batch, length, width / d);
    struct tensor dy = TENSOR(dtype, -1, 1, batch, length, width), dx = TENSOR(dtype, -1, 1, batch, length, width);
    struct tensor dgamma = TENSOR(HAPT_F32, -1, 1, d);
    double *expected = calloc((size_t)(y.count + rstd.count), sizeof *expected);
    double *weight = calloc((size_t)(y.count + rstd.count), sizeof *weight);
    memcpy(weight, dy.value, (size_t)y.count * sizeof *weight);
    struct problem problem = {.forward = rms_norm_reference,
                              .input = {&x, &gamma},
                              .out_count = y.count + rstd.count,
                              .dy = weight,
                              .real = {1e-2, (double)offset}};
    rms_norm_reference(&problem, expected);
    struct hapt_call call = {.input_count = 2,
                             .output_count = 2,
                             .input = {x.view, gamma.view},
                             .output = {y.view, rstd.view},
                             .integer = {heads},
                             .real = {1e-2, (double)offset},
                             .threads = threads};
    kernel_run(heads ? "head_rms_norm" : "rms_norm", dtype, &call);
    check_close(&y.view, expected, dtype == HAPT_F32 ? 1e-6 : HALF_UNIT(dtype), "rms norm");
    check_close(&rstd.view, expected + y.count, 1e-6, "rms norm's rstd");
    struct hapt_call back = {.input_count = 4,
                             .output_count = 2,
                             .input = {x.view, gamma.view, rstd.view, dy.view},
                             .output = {dx.view, dgamma.view},
                             .integer = {heads},
                             .real = {1e-2, (double)offset},
                             .accumulate = add ? 3 : 0,
                             .threads = threads};
    kernel_run(heads ? "head_rms_norm_backward" : "rms_norm_backward", dtype, &back);
    check_gradient(&problem, 0, &dx.view, add ? dx.value : NULL, 30, dtype == HAPT_F32 ? 2e-6 : 2 * HALF_UNIT(dtype),
                   "rms norm's dx");
    check_gradient(&problem, 1, &dgamma.view, add ? dgamma.value : NULL, 30, 2e-6, "rms norm's dgamma");
    for (int64_t i = 0; i < dx.count; i++) element_set(&dx.view, i, dx.value[i]);
    back.output_count = 1; /* frozen parameters */
    kernel_run(heads ? "head_rms_norm_dx" : "rms_norm_dx", dtype, &back);
    check_gradient(&problem, 0, &dx.view, add ? dx.value : NULL, 5, dtype == HAPT_F32 ? 2e-6 : 2 * HALF_UNIT(dtype),
                   "rms_norm_dx");
    free(expected);
    free(weight);
    tensor_free(&x);
    tensor_free(&gamma);
    tensor_free(&y);
    tensor_free(&rstd);
    tensor_free(&dy);
    tensor_free(&dx);
    tensor_free(&dgamma);
}

static void rms_norms(void)
{
    /* batch, length, columns, heads, added to gamma */
    static const int64_t shapes[][5] = {{1, 1, 3, 0, 0},    {2, 3, 5, 0, 1},    {1, 7, 33, 0, 0},   {2, 20, 64, 0, 1},
                                        {1, 150, 17, 0, 0}, {1, 2, 1000, 0, 0}, {1, 3, 1032, 0, 1}, {1, 3, 5, 1, 0},
                                        {2, 20, 16, 4, 1},  {1, 33, 24, 3, 0},  {1, 5, 136, 2, 1}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int v = 0; v < 8; v++) check_rms_norm(shapes[i], types[v & 1], v & 2, v & 4 ? 2 : 1);
}

/* Radians per position of a pair, from the formulas of the papers: linear, Llama 3.1's, YaRN's. */
static double reference_rate(const struct problem *p, int64_t pair, int64_t columns)
{
    const double pi = 3.141592653589793, *real = p->real;
    const double rate = pow(real[0], -2.0 * (double)pair / (double)columns), wavelength = 2 * pi / rate;
    if (p->integer[2] == 1) return rate / real[1];
    if (p->integer[2] == 2) {
        if (wavelength < real[4] / real[3]) return rate;
        if (wavelength > real[4] / real[2]) return rate / real[1];
        const double smooth = (real[4] / wavelength - real[2]) / (real[3] - real[2]);
        return (1 - smooth) * rate / real[1] + smooth * rate;
    }
    if (p->integer[2] == 3) {
        double low = (double)columns * log(real[4] / (real[3] * 2 * pi)) / (2 * log(real[0]));
        double high = (double)columns * log(real[4] / (real[2] * 2 * pi)) / (2 * log(real[0]));
        if (!p->integer[3]) low = floor(low), high = ceil(high);
        low = fmax(low, 0);
        high = fmin(high, (double)columns - 1);
        if (low == high) high += 0.001;
        const double ramp = fmin(1, fmax(0, ((double)pair - low) / (high - low)));
        return rate / real[1] * ramp + rate * (1 - ramp);
    }
    return rate;
}

/* input: x [b][t][heads x head]; attributes: of rope. Computed with complex numbers, from the definition. */
static void rope_reference(const struct problem *p, double *out)
{
    const int64_t *shape = p->input[0]->view.shape, head = shape[2] / p->integer[0];
    const int64_t columns = p->integer[1] ? p->integer[1] : head, half = columns / 2;
    const double magnitude = p->real[5] > 0 ? p->real[5] : 1;
    for (int64_t i = 0; i < p->input[0]->count; i++) {
        const int64_t t = i / shape[2] % shape[1], c = i % head, pair = c % half;
        const double *x = p->input[0]->value + i - c + pair;
        if (c >= columns) {
            out[i] = p->input[0]->value[i];
            continue;
        }
        const double angle = (double)t * reference_rate(p, pair, columns);
        const double cosine = magnitude * cos(angle), sine = magnitude * sin(angle);
        out[i] = c < half ? x[0] * cosine - x[half] * sine : x[half] * cosine + x[0] * sine;
    }
}

struct rope {
    int64_t batch, length, heads, head;
    int64_t integer[HAPT_MAX_ATTRIBUTES]; /* [0] is heads */
    double real[HAPT_MAX_ATTRIBUTES];     /* base 0: 10000 and 500000 in turns */
};

static void check_rope(const struct rope *s, double base, enum hapt_dtype dtype, bool add, int threads)
{
    if (is_seen(dtype)) return;
    const int64_t width = s->heads * s->head;
    struct tensor x = TENSOR(dtype, -1, 1, s->batch, s->length, width);
    struct tensor y = TENSOR(dtype, 0, 0, s->batch, s->length, width);
    struct tensor dy = TENSOR(dtype, -1, 1, s->batch, s->length, width);
    struct tensor dx = TENSOR(dtype, -1, 1, s->batch, s->length, width);
    double *expected = malloc((size_t)y.count * sizeof *expected);
    struct problem problem = {.forward = rope_reference, .input = {&x}, .out_count = y.count, .dy = dy.value};
    memcpy(problem.integer, s->integer, sizeof problem.integer);
    memcpy(problem.real, s->real, sizeof problem.real);
    problem.integer[0] = s->heads;
    if (base > 0) problem.real[0] = base;
    rope_reference(&problem, expected);
    struct hapt_call call = {
        .input_count = 1, .output_count = 1, .input = {x.view}, .output = {y.view}, .threads = threads};
    memcpy(call.integer, problem.integer, sizeof call.integer);
    memcpy(call.real, problem.real, sizeof call.real);
    kernel_run("rope", dtype, &call);
    /* Sine and cosine are rounded once to fp32. The error is relative to the length of the pair. */
    check_close(&y.view, expected, dtype == HAPT_F32 ? 4e-7 : HALF_UNIT(dtype), "rope");
    call.input[0] = dy.view;
    call.output[0] = dx.view;
    call.accumulate = add;
    kernel_run("rope_dx", dtype, &call);
    check_gradient(&problem, 0, &dx.view, add ? dx.value : NULL, s->length > 100 ? 10 : 60,
                   dtype == HAPT_F32 ? 1e-6 : 2 * HALF_UNIT(dtype), "rope's dx");
    free(expected);
    tensor_free(&x);
    tensor_free(&y);
    tensor_free(&dy);
    tensor_free(&dx);
}

static void ropes(void)
{
    static const struct rope shapes[] = {
        {1, 1, 1, 2, {0}, {0}},
        {2, 7, 3, 6, {0}, {0}},
        {1, 40, 2, 34, {0}, {0}},
        {2, 33, 1, 64, {0}, {0}},
        {1, 2100, 1, 16, {0}, {0}},
        {2, 33, 3, 24, {0, 6}, {0}},                                                /* the rest of a head stays */
        {1, 40, 2, 48, {0, 0, 1}, {1e6, 8}},                                        /* Gemma 3 */
        {1, 70, 2, 64, {0, 0, 2}, {500000, 8, 1, 4, 16}},                           /* Llama 3.1, all three cases */
        {1, 70, 2, 64, {0, 0, 3}, {10000, 4, 1, 32, 64, 1.1386294361119891}},       /* YaRN */
        {1, 70, 1, 64, {0, 32, 3, 1}, {10000, 16, 1, 32, 4096, 1.2772588722239782}} /* ends of the ramp not rounded */
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int v = 0; v < 8; v++) {
            const double base = shapes[i].real[0] > 0 ? 0 : v & 4 ? 500000 : 10000;
            check_rope(&shapes[i], base, types[v & 1], v & 2, v & 4 ? 2 : 1);
        }
}

/* integer: 0 silu, 1 gelu by tanh, 2 gelu by the error function. */
static void gated_reference(const struct problem *p, double *out)
{
    for (int64_t i = 0; i < p->out_count; i++) {
        const double g = p->input[0]->value[i];
        const double tanh_form = 0.5 * g * (1 + tanh(0.7978845608028654 * (g + 0.044715 * g * g * g)));
        const double unit = p->integer[0] == 0   ? g / (1 + exp(-g))
                            : p->integer[0] == 1 ? tanh_form
                                                 : 0.5 * g * erfc(-g / sqrt(2));
        out[i] = unit * p->input[1]->value[i];
    }
}

static void check_gated(int kind, int64_t count, double range, enum hapt_dtype dtype, bool add, int threads)
{
    struct tensor gate = TENSOR(dtype, -range, range, count), up = TENSOR(dtype, -2, 2, count),
                  y = TENSOR(dtype, 0, 0, count);
    struct tensor dy = TENSOR(dtype, -1, 1, count), dgate = TENSOR(dtype, -1, 1, count),
                  dup = TENSOR(dtype, -1, 1, count);
    double *expected = malloc((size_t)count * sizeof *expected);
    struct problem problem = {
        .forward = gated_reference, .input = {&gate, &up}, .out_count = count, .dy = dy.value, .integer = {kind}};
    gated_reference(&problem, expected);
    struct hapt_call call = {.input_count = 2,
                             .output_count = 1,
                             .input = {gate.view, up.view},
                             .output = {y.view},
                             .integer = {kind == 2},
                             .threads = threads};
    kernel_run(kind == 0 ? "swiglu" : "geglu", dtype, &call);
    check_close(&y.view, expected, dtype == HAPT_F32 ? 1e-6 : HALF_UNIT(dtype), "gated unit");
    struct hapt_call back = {.input_count = 3,
                             .output_count = 2,
                             .input = {gate.view, up.view, dy.view},
                             .output = {dgate.view, dup.view},
                             .integer = {kind == 2},
                             .accumulate = add ? 3 : 0,
                             .threads = threads};
    kernel_run(kind == 0 ? "swiglu_backward" : "geglu_backward", dtype, &back);
    const double tolerance = dtype == HAPT_F32 ? 1e-6 : HALF_UNIT(dtype);
    check_gradient(&problem, 0, &dgate.view, add ? dgate.value : NULL, 40, tolerance, "gated unit's dgate");
    check_gradient(&problem, 1, &dup.view, add ? dup.value : NULL, 40, tolerance, "gated unit's dup");
    free(expected);
    tensor_free(&gate);
    tensor_free(&up);
    tensor_free(&y);
    tensor_free(&dy);
    tensor_free(&dgate);
    tensor_free(&dup);
}

static void gated_units(void)
{
    static const int64_t counts[] = {1, 17, 400, 20000};
    for (int kind = 0; kind < 3; kind++)
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
            for (int v = 0; v < 8; v += kind && getenv("HAPT_TEST_QUICK") ? 3 : 1)
                check_gated(kind, counts[i], v & 4 ? 4 : kind ? 6 : 120, types[v & 1], v & 2, v & 4 ? 2 : 1);
}

/* real: factor, or the limit of a soft cap (integer 1). */
static void pointwise_reference(const struct problem *p, double *out)
{
    for (int64_t i = 0; i < p->out_count; i++) {
        const double x = p->input[0]->value[i], number = p->real[0];
        out[i] = p->integer[0] ? number * tanh(x / number) : number * x;
    }
}

static void check_pointwise(bool cap, double number, int64_t count, enum hapt_dtype dtype, bool add, int threads)
{
    struct tensor x = TENSOR(dtype, -4, 4, count), y = TENSOR(dtype, 0, 0, count), dy = TENSOR(dtype, -1, 1, count);
    struct tensor dx = TENSOR(dtype, -1, 1, count);
    double *expected = malloc((size_t)count * sizeof *expected);
    struct problem problem = {.forward = pointwise_reference,
                              .input = {&x},
                              .out_count = count,
                              .dy = dy.value,
                              .integer = {cap},
                              .real = {number}};
    pointwise_reference(&problem, expected);
    struct hapt_call call = {.input_count = 1,
                             .output_count = 1,
                             .input = {x.view},
                             .output = {y.view},
                             .real = {number},
                             .threads = threads};
    kernel_run(cap ? "softcap" : "scale", dtype, &call);
    check_close(&y.view, expected, dtype == HAPT_F32 ? 1e-6 : HALF_UNIT(dtype), cap ? "soft cap" : "scale");
    struct hapt_call back = {.input_count = cap ? 2 : 1,
                             .output_count = 1,
                             .input = {cap ? y.view : dy.view, dy.view},
                             .output = {dx.view},
                             .real = {number},
                             .accumulate = add,
                             .threads = threads};
    kernel_run(cap ? "softcap_dx" : "scale", dtype, &back);
    /* The backward of a soft cap reads y, which is rounded. */
    check_gradient(&problem, 0, &dx.view, add ? dx.value : NULL, 40, dtype == HAPT_F32 ? 2e-6 : 3 * HALF_UNIT(dtype),
                   cap ? "soft cap's dx" : "scale's dx");
    free(expected);
    tensor_free(&x);
    tensor_free(&y);
    tensor_free(&dy);
    tensor_free(&dx);
}

static void scales_and_caps(void)
{
    static const int64_t counts[] = {1, 17, 400, 20000};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        for (int v = 0; v < 16; v += getenv("HAPT_TEST_QUICK") ? 3 : 1)
            check_pointwise(v & 8, v & 4 ? 30 : 6, counts[i], types[v & 1], v & 2, v & 4 ? 2 : 1);
}

int main(int argc, char **argv)
{
    kernels_init(&argc, &argv);
    for (HALF_TYPES(half)) {
        types[1] = half;
        RUN(rms_norms);
        RUN(ropes);
        RUN(gated_units);
        RUN(scales_and_caps);
    }
    return kernels_finish();
}
