/* RMS norm, rotary positions and SwiGLU against double references and central differences. */
#include "kernels.h"

static enum hapt_dtype types[] = {HAPT_F32, HAPT_BF16}; /* the second: each half-precision type */

/* input: x [rows][d], gamma [d]. Returns y, then rstd [rows]. */
static void rms_norm_reference(const struct problem *p, double *out)
{
    const int64_t d = p->input[1]->count, rows = p->input[0]->count / d;
    for (int64_t r = 0; r < rows; r++) {
        const double *x = p->input[0]->value + r * d;
        double square = 0;
        for (int64_t c = 0; c < d; c++) square += x[c] * x[c];
        const double rstd = 1 / sqrt(square / (double)d + p->real[0]);
        for (int64_t c = 0; c < d; c++) out[r * d + c] = x[c] * rstd * p->input[1]->value[c];
        out[rows * d + r] = rstd;
    }
}

static void check_rms_norm(int64_t batch, int64_t length, int64_t d, enum hapt_dtype dtype, bool add, int threads)
{
    /* The mean is far from 0, so that a subtracted mean would be noticed. */
    struct tensor x = TENSOR(dtype, -1, 3, batch, length, d), gamma = TENSOR(dtype, -2, 2, d);
    struct tensor y = TENSOR(dtype, 0, 0, batch, length, d), rstd = TENSOR(HAPT_F32, 0, 0, batch, length);
    struct tensor dy = TENSOR(dtype, -1, 1, batch, length, d), dx = TENSOR(dtype, -1, 1, batch, length, d);
    struct tensor dgamma = TENSOR(HAPT_F32, -1, 1, d);
    double *expected = calloc((size_t)(y.count + rstd.count), sizeof *expected);
    double *weight = calloc((size_t)(y.count + rstd.count), sizeof *weight);
    memcpy(weight, dy.value, (size_t)y.count * sizeof *weight);
    struct problem problem = {.forward = rms_norm_reference,
                              .input = {&x, &gamma},
                              .out_count = y.count + rstd.count,
                              .dy = weight,
                              .real = {1e-2}};
    rms_norm_reference(&problem, expected);
    struct hapt_call call = {.input_count = 2,
                             .output_count = 2,
                             .input = {x.view, gamma.view},
                             .output = {y.view, rstd.view},
                             .real = {1e-2},
                             .threads = threads};
    kernel_run("rms_norm", dtype, &call);
    check_close(&y.view, expected, dtype == HAPT_F32 ? 1e-6 : HALF_UNIT(dtype), "rms norm");
    check_close(&rstd.view, expected + y.count, 1e-6, "rms norm's rstd");
    struct hapt_call back = {.input_count = 4,
                             .output_count = 2,
                             .input = {x.view, gamma.view, rstd.view, dy.view},
                             .output = {dx.view, dgamma.view},
                             .accumulate = add ? 3 : 0,
                             .threads = threads};
    kernel_run("rms_norm_backward", dtype, &back);
    check_gradient(&problem, 0, &dx.view, add ? dx.value : NULL, 30, dtype == HAPT_F32 ? 2e-6 : 2 * HALF_UNIT(dtype),
                   "rms norm's dx");
    check_gradient(&problem, 1, &dgamma.view, add ? dgamma.value : NULL, 30, 2e-6, "rms norm's dgamma");
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
    static const int64_t shapes[][3] = {{1, 1, 3},    {2, 3, 5},    {1, 7, 33},  {2, 20, 64},
                                        {1, 150, 17}, {1, 2, 1000}, {1, 3, 1032}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int v = 0; v < 8; v++)
            check_rms_norm(shapes[i][0], shapes[i][1], shapes[i][2], types[v & 1], v & 2, v & 4 ? 2 : 1);
}

/* input: x [b][t][heads x head]; integer: heads; real: base. Computed with complex numbers, from the definition. */
static void rope_reference(const struct problem *p, double *out)
{
    const int64_t *shape = p->input[0]->view.shape, head = shape[2] / p->integer[0], half = head / 2;
    for (int64_t i = 0; i < p->input[0]->count; i++) {
        const int64_t t = i / shape[2] % shape[1], c = i % head, pair = c % half;
        const double angle = (double)t * pow(p->real[0], -2.0 * (double)pair / (double)head);
        const double *x = p->input[0]->value + i - c + pair;
        out[i] = c < half ? x[0] * cos(angle) - x[half] * sin(angle) : x[half] * cos(angle) + x[0] * sin(angle);
    }
}

static void check_rope(const int64_t *s, double base, enum hapt_dtype dtype, bool add, int threads)
{
    if (is_seen(dtype)) return;
    const int64_t width = s[2] * s[3];
    struct tensor x = TENSOR(dtype, -1, 1, s[0], s[1], width), y = TENSOR(dtype, 0, 0, s[0], s[1], width);
    struct tensor dy = TENSOR(dtype, -1, 1, s[0], s[1], width), dx = TENSOR(dtype, -1, 1, s[0], s[1], width);
    double *expected = malloc((size_t)y.count * sizeof *expected);
    struct problem problem = {.forward = rope_reference,
                              .input = {&x},
                              .out_count = y.count,
                              .dy = dy.value,
                              .integer = {s[2]},
                              .real = {base}};
    rope_reference(&problem, expected);
    struct hapt_call call = {.input_count = 1,
                             .output_count = 1,
                             .input = {x.view},
                             .output = {y.view},
                             .integer = {s[2]},
                             .real = {base},
                             .threads = threads};
    kernel_run("rope", dtype, &call);
    /* Sine and cosine are rounded once to fp32. The error is relative to the length of the pair. */
    check_close(&y.view, expected, dtype == HAPT_F32 ? 4e-7 : HALF_UNIT(dtype), "rope");
    call.input[0] = dy.view;
    call.output[0] = dx.view;
    call.accumulate = add;
    kernel_run("rope_dx", dtype, &call);
    check_gradient(&problem, 0, &dx.view, add ? dx.value : NULL, s[1] > 100 ? 10 : 60,
                   dtype == HAPT_F32 ? 1e-6 : 2 * HALF_UNIT(dtype), "rope's dx");
    free(expected);
    tensor_free(&x);
    tensor_free(&y);
    tensor_free(&dy);
    tensor_free(&dx);
}

static void ropes(void)
{
    /* batch, length, heads, head size */
    static const int64_t shapes[][4] = {{1, 1, 1, 2}, {2, 7, 3, 6}, {1, 40, 2, 34}, {2, 33, 1, 64}, {1, 2100, 1, 16}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int v = 0; v < 8; v++) check_rope(shapes[i], v & 4 ? 500000 : 10000, types[v & 1], v & 2, v & 4 ? 2 : 1);
}

static void swiglu_reference(const struct problem *p, double *out)
{
    for (int64_t i = 0; i < p->out_count; i++) {
        const double gate = p->input[0]->value[i];
        out[i] = gate / (1 + exp(-gate)) * p->input[1]->value[i];
    }
}

static void check_swiglu(int64_t count, double range, enum hapt_dtype dtype, bool add, int threads)
{
    struct tensor gate = TENSOR(dtype, -range, range, count), up = TENSOR(dtype, -2, 2, count),
                  y = TENSOR(dtype, 0, 0, count);
    struct tensor dy = TENSOR(dtype, -1, 1, count), dgate = TENSOR(dtype, -1, 1, count),
                  dup = TENSOR(dtype, -1, 1, count);
    double *expected = malloc((size_t)count * sizeof *expected);
    struct problem problem = {.forward = swiglu_reference, .input = {&gate, &up}, .out_count = count, .dy = dy.value};
    swiglu_reference(&problem, expected);
    struct hapt_call call = {
        .input_count = 2, .output_count = 1, .input = {gate.view, up.view}, .output = {y.view}, .threads = threads};
    kernel_run("swiglu", dtype, &call);
    check_close(&y.view, expected, dtype == HAPT_F32 ? 1e-6 : HALF_UNIT(dtype), "swiglu");
    struct hapt_call back = {.input_count = 3,
                             .output_count = 2,
                             .input = {gate.view, up.view, dy.view},
                             .output = {dgate.view, dup.view},
                             .accumulate = add ? 3 : 0,
                             .threads = threads};
    kernel_run("swiglu_backward", dtype, &back);
    const double tolerance = dtype == HAPT_F32 ? 1e-6 : HALF_UNIT(dtype);
    check_gradient(&problem, 0, &dgate.view, add ? dgate.value : NULL, 40, tolerance, "swiglu's dgate");
    check_gradient(&problem, 1, &dup.view, add ? dup.value : NULL, 40, tolerance, "swiglu's dup");
    free(expected);
    tensor_free(&gate);
    tensor_free(&up);
    tensor_free(&y);
    tensor_free(&dy);
    tensor_free(&dgate);
    tensor_free(&dup);
}

static void swiglus(void)
{
    static const int64_t counts[] = {1, 17, 400, 20000};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        for (int v = 0; v < 8; v++) check_swiglu(counts[i], v & 4 ? 4 : 120, types[v & 1], v & 2, v & 4 ? 2 : 1);
}

int main(int argc, char **argv)
{
    kernels_init(&argc, &argv);
    for (HALF_TYPES(half)) {
        types[1] = half;
        RUN(rms_norms);
        RUN(ropes);
        RUN(swiglus);
    }
    return kernels_finish();
}
