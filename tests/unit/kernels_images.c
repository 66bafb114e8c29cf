/* Kernels of image models: convolution, pooling, batch norm, relu. Loops in double compute each forward. */
#include "kernels.h"

static enum hapt_dtype types[] = {HAPT_F32, HAPT_BF16}; /* the second: each half-precision type */

/* ---- Convolution ---- */

struct convolution_case {
    int64_t rows, in, height, width, out, kernel_height, kernel_width, stride, padding;
};

/* groups 0: the operator without groups */
struct grouping {
    int64_t groups, dilation;
};

static int64_t places(int64_t extent, int64_t kernel, int64_t stride, int64_t padding)
{
    return (extent + 2 * padding - kernel) / stride + 1;
}

/* input: x, w, bias or NULL; integer: stride, padding, groups, dilation */
static void convolution_reference(const struct problem *problem, double *out)
{
    const struct tensor *x = problem->input[0], *w = problem->input[1], *b = problem->input[2];
    const int64_t *xs = x->view.shape, *ws = w->view.shape, stride = problem->integer[0], padding = problem->integer[1];
    const int64_t groups = problem->integer[2], holes = problem->integer[3];
    const int64_t height = places(xs[2], holes * (ws[2] - 1) + 1, stride, padding),
                  width = places(xs[3], holes * (ws[3] - 1) + 1, stride, padding);
    for (int64_t r = 0; r < xs[0]; r++)
        for (int64_t o = 0; o < ws[0]; o++)
            for (int64_t p = 0; p < height; p++)
                for (int64_t q = 0; q < width; q++) {
                    double sum = b ? b->value[o] : 0;
                    for (int64_t c = 0; c < ws[1]; c++)
                        for (int64_t k = 0; k < ws[2]; k++)
                            for (int64_t l = 0; l < ws[3]; l++) {
                                const int64_t i = p * stride - padding + holes * k,
                                              j = q * stride - padding + holes * l;
                                if (i < 0 || i >= xs[2] || j < 0 || j >= xs[3]) continue;
                                const int64_t channel = o / (ws[0] / groups) * ws[1] + c;
                                sum += x->value[((r * xs[1] + channel) * xs[2] + i) * xs[3] + j] *
                                       w->value[((o * ws[1] + c) * ws[2] + k) * ws[3] + l];
                            }
                    out[((r * ws[0] + o) * height + p) * width + q] = sum;
                }
}

static void check_convolution(const struct convolution_case *c, struct grouping grouping, enum hapt_dtype dtype,
                              bool bias, int threads)
{
    if (is_seen(dtype)) return;
    const bool grouped = grouping.groups > 0;
    const int64_t groups = grouped ? grouping.groups : 1, holes = grouped ? grouping.dilation : 1;
    const int64_t height = places(c->height, holes * (c->kernel_height - 1) + 1, c->stride, c->padding),
                  width = places(c->width, holes * (c->kernel_width - 1) + 1, c->stride, c->padding);
    int64_t integer[HAPT_MAX_ATTRIBUTES] = {c->stride, c->padding};
    if (grouped) memcpy(integer, (int64_t[]){groups, c->stride, c->padding, holes}, 4 * sizeof *integer);
    struct tensor x = TENSOR(dtype, -1, 1, c->rows, c->in, c->height, c->width), b = TENSOR(dtype, -1, 1, c->out);
    struct tensor w = TENSOR(dtype, -1, 1, c->out, c->in / groups, c->kernel_height, c->kernel_width);
    struct tensor y = TENSOR(dtype, 0, 0, c->rows, c->out, height, width),
                  dy = TENSOR(dtype, -1, 1, c->rows, c->out, height, width);
    const struct problem problem = {.forward = convolution_reference,
                                    .input = {&x, &w, bias ? &b : NULL},
                                    .out_count = y.count,
                                    .dy = dy.value,
                                    .integer = {c->stride, c->padding, groups, holes}};
    const struct hapt_view absent = {0};
    double *expected = malloc((size_t)y.count * sizeof *expected);
    convolution_reference(&problem, expected);
    const double terms = (double)(c->in * c->kernel_height * c->kernel_width), rounding = 2e-7 * sqrt(terms);
    const double unit = dtype != HAPT_F32 ? HALF_UNIT(dtype) : 0;
    struct hapt_call call = {.input_count = 3,
                             .output_count = 1,
                             .input = {x.view, w.view, bias ? b.view : absent},
                             .output = {y.view},
                             .threads = threads};
    memcpy(call.integer, integer, sizeof integer);
    kernel_run(grouped ? "grouped_conv2d" : "conv2d", dtype, &call);
    const bool twice = bias && strcmp(test_backend->name, "cuda") == 0; /* cuDNN rounds the sum, then adds the bias */
    check_close(&y.view, expected, rounding + (twice ? 2 : 1) * unit, "conv2d");
    for (unsigned add = 0; add < 2; add++) { /* gradients overwrite, then add */
        struct tensor dx = TENSOR(dtype, -1, 1, c->rows, c->in, c->height, c->width);
        struct tensor dw = TENSOR(HAPT_F32, -1, 1, c->out, c->in / groups, c->kernel_height, c->kernel_width);
        struct tensor db = TENSOR(HAPT_F32, -1, 1, c->out);
        struct hapt_call to_x = {.input_count = 2,
                                 .output_count = 1,
                                 .input = {dy.view, w.view},
                                 .output = {dx.view},
                                 .accumulate = add,
                                 .threads = threads};
        memcpy(to_x.integer, integer, sizeof integer);
        kernel_run(grouped ? "grouped_conv2d_dx" : "conv2d_dx", dtype, &to_x);
        check_gradient(&problem, 0, &dx.view, add ? dx.value : NULL, 12, 1e-6 + 2 * unit, "conv2d's dx");
        struct hapt_call to_w = {.input_count = 2,
                                 .output_count = bias ? 2 : 1,
                                 .input = {x.view, dy.view},
                                 .output = {dw.view, db.view},
                                 .accumulate = add ? 3 : 0,
                                 .threads = threads};
        memcpy(to_w.integer, integer, sizeof integer);
        kernel_run(grouped ? "grouped_conv2d_dw" : "conv2d_dw", dtype, &to_w);
        const double sums = 1e-6 * sqrt((double)(c->rows * height * width));
        check_gradient(&problem, 1, &dw.view, add ? dw.value : NULL, 12, sums, "conv2d's dw");
        if (bias) check_gradient(&problem, 2, &db.view, add ? db.value : NULL, 12, 1e-6, "conv2d's db");
        tensor_free(&dx);
        tensor_free(&dw);
        tensor_free(&db);
    }
    free(expected);
    tensor_free(&x);
    tensor_free(&b);
    tensor_free(&w);
    tensor_free(&y);
    tensor_free(&dy);
}

static void convolutions(void)
{
    /* Strides with a remainder, kernels as large as the image, channels that fill no vector, windows that lie only in
     * the padding. */
    static const struct convolution_case cases[] = {
        {1, 1, 1, 1, 1, 1, 1, 1, 0},   {2, 3, 9, 7, 5, 3, 3, 1, 1},   {2, 3, 16, 16, 8, 7, 7, 2, 3},
        {1, 16, 6, 6, 32, 1, 1, 2, 0}, {2, 17, 5, 8, 16, 3, 2, 2, 1}, {3, 16, 8, 8, 16, 3, 3, 1, 1},
        {2, 4, 8, 8, 6, 4, 4, 4, 0},   {1, 2, 3, 3, 4, 5, 5, 1, 1},   {1, 2, 4, 4, 3, 3, 3, 1, 5},
        {2, 3, 4, 5, 4, 3, 3, 5, 4},   {1, 1, 2, 2, 1, 1, 1, 1, 3},   {2, 16, 6, 6, 16, 3, 3, 2, 9}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int v = 0; v < 8 && !is_repeat(v & 4); v++)
            check_convolution(&cases[i], (struct grouping){0}, types[v & 1], v & 2, v & 4 ? 2 : 1);
}

/* One group per channel, several results per channel, dilated kernels that reach into the padding. */
static void grouped_convolutions(void)
{
    static const struct {
        struct convolution_case sizes;
        struct grouping grouping;
    } cases[] = {{{2, 6, 7, 9, 6, 3, 3, 1, 1}, {6, 1}},   {{1, 32, 8, 8, 32, 5, 5, 2, 2}, {32, 1}},
                 {{2, 8, 6, 6, 12, 3, 3, 1, 1}, {4, 1}},  {{2, 3, 9, 9, 6, 3, 3, 1, 1}, {3, 1}},
                 {{1, 4, 11, 12, 4, 3, 3, 1, 2}, {2, 2}}, {{2, 5, 9, 8, 7, 3, 2, 2, 1}, {1, 3}},
                 {{3, 2, 4, 5, 4, 1, 1, 1, 0}, {2, 1}},   {{2, 48, 5, 5, 48, 3, 3, 1, 1}, {3, 1}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int v = 0; v < 8 && !is_repeat(v & 4); v++)
            check_convolution(&cases[i].sizes, cases[i].grouping, types[v & 1], v & 2, v & 4 ? 2 : 1);
}

/* A back end may cache what it learns about a shape. The second call must give the same result. */
static void convolutions_again(void)
{
    static const struct convolution_case cases[] = {{2, 3, 9, 7, 5, 3, 3, 1, 1}, {1, 16, 6, 6, 32, 1, 1, 2, 0}};
    for (int v = 0; v < 8 && !is_repeat(v & 4); v++)
        check_convolution(&cases[v >> 1 & 1], (struct grouping){0}, types[v & 1], true, 1);
}

/* Large images, of which a back end may take some at a time; the last part is smaller. A kernel of one element only
 * scales them. */
static void convolution_shares(void)
{
    struct tensor x = TENSOR(HAPT_F32, -1, 1, 3, 1, 704, 704), y = TENSOR(HAPT_F32, -1, 1, 3, 1, 704, 704);
    struct tensor w = TENSOR(HAPT_F32, 1, 2, 1, 1, 1, 1), b = TENSOR(HAPT_F32, -1, 1, 1);
    double *expected = calloc((size_t)x.count, sizeof *expected);
    struct hapt_call call = {.input_count = 3,
                             .output_count = 1,
                             .input = {x.view, w.view, b.view},
                             .output = {y.view},
                             .integer = {1, 0},
                             .threads = 2};
    for (int64_t i = 0; i < x.count; i++) expected[i] = b.value[0] + w.value[0] * x.value[i];
    kernel_run("conv2d", HAPT_F32, &call);
    check_close(&y.view, expected, 1e-6, "conv2d of large images");
    struct hapt_call back = {.input_count = 2,
                             .output_count = 1,
                             .input = {y.view, w.view},
                             .output = {x.view},
                             .integer = {1, 0},
                             .accumulate = 1,
                             .threads = 2};
    for (int64_t i = 0; i < x.count; i++) expected[i] = x.value[i] + w.value[0] * element_get(&y.view, i);
    kernel_run("conv2d_dx", HAPT_F32, &back);
    check_close(&x.view, expected, 1e-6, "conv2d's dx of large images");
    free(expected);
    tensor_free(&x);
    tensor_free(&y);
    tensor_free(&w);
    tensor_free(&b);
}

/* ---- Pooling ---- */

/* integer: kernel, stride, padding */
static void max_pool_reference(const struct problem *problem, double *out)
{
    const struct tensor *x = problem->input[0];
    const int64_t *s = x->view.shape, kernel = problem->integer[0], stride = problem->integer[1],
                  padding = problem->integer[2];
    const int64_t height = places(s[2], kernel, stride, padding), width = places(s[3], kernel, stride, padding);
    for (int64_t image = 0; image < s[0] * s[1]; image++)
        for (int64_t p = 0; p < height; p++)
            for (int64_t q = 0; q < width; q++) {
                double most = -INFINITY;
                for (int64_t i = p * stride - padding; i < p * stride - padding + kernel; i++)
                    for (int64_t j = q * stride - padding; j < q * stride - padding + kernel; j++)
                        if (i >= 0 && i < s[2] && j >= 0 && j < s[3])
                            most = fmax(most, x->value[(image * s[2] + i) * s[3] + j]);
                out[(image * height + p) * width + q] = most;
            }
}

static void mean_pool_reference(const struct problem *problem, double *out)
{
    const struct tensor *x = problem->input[0];
    const int64_t pixels = x->view.shape[2] * x->view.shape[3];
    for (int64_t image = 0; image < x->count / pixels; image++) {
        out[image] = 0;
        for (int64_t i = 0; i < pixels; i++) out[image] += x->value[image * pixels + i] / (double)pixels;
    }
}

/* integer: extent of the result. Each result is the mean of its window [floor(p H / P), ceil((p + 1) H / P)), computed
 * with real numbers. */
static void adaptive_pool_reference(const struct problem *problem, double *out)
{
    const struct tensor *x = problem->input[0];
    const int64_t *s = x->view.shape, n = problem->integer[0];
    for (int64_t image = 0; image < s[0] * s[1]; image++)
        for (int64_t p = 0; p < n; p++)
            for (int64_t q = 0; q < n; q++) {
                double sum = 0, count = 0;
                for (int64_t i = 0; i < s[2]; i++)
                    for (int64_t j = 0; j < s[3]; j++) {
                        if (i < floor((double)(p * s[2]) / (double)n) ||
                            i >= ceil((double)((p + 1) * s[2]) / (double)n))
                            continue;
                        if (j < floor((double)(q * s[3]) / (double)n) ||
                            j >= ceil((double)((q + 1) * s[3]) / (double)n))
                            continue;
                        sum += x->value[(image * s[2] + i) * s[3] + j];
                        count++;
                    }
                out[(image * n + p) * n + q] = sum / count;
            }
}

/* All elements differ, so that small steps change no maximum. Integers below 256 are exact in bf16. */
static void make_distinct(struct tensor *x)
{
    for (int64_t i = 0; i < x->count; i++) x->value[i] = (double)(i - x->count / 2);
    for (int64_t i = x->count - 1; i > 0; i--) {
        const int64_t other = (int64_t)(random_bits() % (uint64_t)(i + 1));
        const double kept = x->value[i];
        x->value[i] = x->value[other];
        x->value[other] = kept;
    }
    for (int64_t i = 0; i < x->count; i++) element_set(&x->view, i, x->value[i]);
}

/* A forward kernel and its gradient. reads_x: the gradient reads x before dy. */
static void check_pool(const char *op, bool reads_x, struct problem problem, struct tensor *x, struct tensor *y,
                       int threads)
{
    char name[32];
    const enum hapt_dtype dtype = x->view.dtype;
    int64_t shape[HAPT_MAX_DIMS + 1] = {0};
    memcpy(shape, y->view.shape, (size_t)y->view.dims * sizeof *shape);
    struct tensor dy = tensor_make(dtype, shape, -1, 1);
    double *expected = malloc((size_t)y->count * sizeof *expected);
    const double unit = dtype != HAPT_F32 ? HALF_UNIT(dtype) : 1e-6;
    problem.input[0] = x;
    problem.out_count = y->count;
    problem.dy = dy.value;
    problem.forward(&problem, expected);
    struct hapt_call call = {
        .input_count = 1, .output_count = 1, .input = {x->view}, .output = {y->view}, .threads = threads};
    memcpy(call.integer, problem.integer, sizeof problem.integer);
    kernel_run(op, dtype, &call);
    check_close(&y->view, expected, unit, op);
    snprintf(name, sizeof name, "%s_dx", op);
    for (unsigned add = 0; add < 2; add++) {
        struct tensor dx = TENSOR(dtype, -1, 1, x->view.shape[0], x->view.shape[1], x->view.shape[2], x->view.shape[3]);
        struct hapt_call back = {.input_count = reads_x ? 2 : 1,
                                 .output_count = 1,
                                 .input = {reads_x ? x->view : dy.view, dy.view},
                                 .output = {dx.view},
                                 .accumulate = add,
                                 .threads = threads};
        memcpy(back.integer, problem.integer, sizeof problem.integer);
        kernel_run(name, dtype, &back);
        check_gradient(&problem, 0, &dx.view, add ? dx.value : NULL, 60, 2 * unit, name);
        tensor_free(&dx);
    }
    free(expected);
    tensor_free(&dy);
}

static void pooling(void)
{
    static const int64_t windows[][3] = {{2, 2, 0}, {3, 2, 1}, {3, 1, 1}, {5, 3, 2}, {1, 1, 0}};
    for (int v = 0; v < 4; v++) {
        const enum hapt_dtype dtype = types[v & 1];
        const int threads = v & 2 ? 2 : 1;
        for (size_t i = 0; i < sizeof windows / sizeof *windows; i++) {
            const int64_t *w = windows[i];
            struct tensor x = TENSOR(dtype, 0, 0, 1, 4, 7, 9);
            struct tensor y = TENSOR(dtype, 0, 0, 1, 4, places(7, w[0], w[1], w[2]), places(9, w[0], w[1], w[2]));
            make_distinct(&x);
            check_pool("max_pool", true, (struct problem){.forward = max_pool_reference, .integer = {w[0], w[1], w[2]}},
                       &x, &y, threads);
            tensor_free(&x);
            tensor_free(&y);
        }
        struct tensor x = TENSOR(dtype, -1, 1, 2, 3, 5, 7), y = TENSOR(dtype, 0, 0, 2, 3);
        check_pool("mean_pool", false, (struct problem){.forward = mean_pool_reference}, &x, &y, threads);
        tensor_free(&x);
        tensor_free(&y);
        static const int64_t extents[][3] = {{1, 1, 7}, {5, 7, 3}, {6, 4, 2},
                                             {3, 2, 5}, {4, 4, 4}, {9, 7, 1}}; /* image, result */
        for (size_t i = 0; i < sizeof extents / sizeof *extents; i++) {
            const int64_t *e = extents[i];
            struct tensor image = TENSOR(dtype, -1, 1, 2, 3, e[0], e[1]), means = TENSOR(dtype, 0, 0, 2, 3, e[2], e[2]);
            check_pool("adaptive_pool", false, (struct problem){.forward = adaptive_pool_reference, .integer = {e[2]}},
                       &image, &means, threads);
            tensor_free(&image);
            tensor_free(&means);
        }
    }
}

/* If maxima are equal, the first gets the gradient. A NaN is the maximum of its window. */
static void pooling_corners(void)
{
    struct tensor x = TENSOR(HAPT_F32, 0, 0, 1, 1, 2, 4), y = TENSOR(HAPT_F32, 0, 0, 1, 1, 1, 2),
                  dy = TENSOR(HAPT_F32, 1, 2, 1, 1, 1, 2);
    struct tensor dx = TENSOR(HAPT_F32, 5, 5, 1, 1, 2, 4);
    struct hapt_call call = {
        .input_count = 1, .output_count = 1, .input = {x.view}, .output = {y.view}, .integer = {2, 2, 0}, .threads = 1};
    element_set(&x.view, 6, NAN);
    kernel_run("max_pool", HAPT_F32, &call);
    CHECK(element_get(&y.view, 0) == 0 && isnan(element_get(&y.view, 1)));
    struct hapt_call back = {.input_count = 2,
                             .output_count = 1,
                             .input = {x.view, dy.view},
                             .output = {dx.view},
                             .integer = {2, 2, 0},
                             .threads = 1};
    kernel_run("max_pool_dx", HAPT_F32, &back);
    for (int i = 0; i < 8; i++) CHECK(element_get(&dx.view, i) == (i == 0 ? dy.value[0] : i == 6 ? dy.value[1] : 0));
    tensor_free(&x);
    tensor_free(&y);
    tensor_free(&dy);
    tensor_free(&dx);
}

/* ---- Pointwise ---- */

static void relu_reference(const struct problem *problem, double *out)
{
    for (int64_t i = 0; i < problem->input[0]->count; i++) out[i] = fmax(problem->input[0]->value[i], 0);
}

static void pointwise(void)
{
    for (int v = 0; v < 4; v++) {
        const enum hapt_dtype dtype = types[v & 1];
        struct tensor x = TENSOR(dtype, -1, 1, 2, 3, 5, 7), y = TENSOR(dtype, 0, 0, 2, 3, 5, 7),
                      dy = TENSOR(dtype, -1, 1, 2, 3, 5, 7);
        struct problem problem = {.forward = relu_reference, .input = {&x}, .out_count = x.count, .dy = dy.value};
        double *expected = malloc((size_t)x.count * sizeof *expected);
        relu_reference(&problem, expected);
        struct hapt_call call = {
            .input_count = 1, .output_count = 1, .input = {x.view}, .output = {y.view}, .threads = 1 + v / 2};
        kernel_run("relu", dtype, &call);
        check_close(&y.view, expected, 0, "relu");
        for (unsigned add = 0; add < 2; add++) {
            struct tensor dx = TENSOR(dtype, -1, 1, 2, 3, 5, 7);
            struct hapt_call back = {.input_count = 2,
                                     .output_count = 1,
                                     .input = {y.view, dy.view},
                                     .output = {dx.view},
                                     .accumulate = add,
                                     .threads = 1 + v / 2};
            kernel_run("relu_dx", dtype, &back);
            check_gradient(&problem, 0, &dx.view, add ? dx.value : NULL, 60,
                           dtype != HAPT_F32 ? HALF_UNIT(dtype) : 1e-6, "relu's dx");
            tensor_free(&dx);
        }
        struct tensor flat = TENSOR(dtype, 0, 0, 2, 105), back = TENSOR(dtype, 0, 0, 2, 3, 5, 7);
        struct hapt_call to_flat = {
            .input_count = 1, .output_count = 1, .input = {x.view}, .output = {flat.view}, .threads = 1 + v / 2};
        kernel_run("flatten", dtype, &to_flat);
        check_close(&flat.view, x.value, 0, "flatten");
        struct hapt_call from_flat = {
            .input_count = 1, .output_count = 1, .input = {flat.view}, .output = {back.view}, .threads = 1 + v / 2};
        kernel_run("flatten_dx", dtype, &from_flat);
        check_close(&back.view, x.value, 0, "flatten_dx");
        free(expected);
        tensor_free(&flat);
        tensor_free(&back);
        tensor_free(&x);
        tensor_free(&y);
        tensor_free(&dy);
    }
}

/* ---- Batch norm ---- */

/* Batch norm as one function. input: x, gamma, beta; real: epsilon */
static void batch_norm_reference(const struct problem *problem, double *out)
{
    const struct tensor *x = problem->input[0];
    const int64_t *s = x->view.shape, pixels = s[2] * s[3];
    for (int64_t c = 0; c < s[1]; c++) {
        double mean = 0, variance = 0;
        for (int pass = 0; pass < 3; pass++)
            for (int64_t r = 0; r < s[0]; r++)
                for (int64_t i = 0; i < pixels; i++) {
                    const int64_t at = (r * s[1] + c) * pixels + i;
                    const double count = (double)(s[0] * pixels), apart = x->value[at] - mean;
                    if (pass == 0) mean += x->value[at] / count;
                    if (pass == 1) variance += apart * apart / count;
                    if (pass == 2)
                        out[at] = apart / sqrt(variance + problem->real[0]) * problem->input[1]->value[c] +
                                  problem->input[2]->value[c];
                }
    }
}

static void check_batch_norm(const int64_t *shape, enum hapt_dtype dtype, int threads)
{
    struct tensor x = tensor_make(dtype, shape, -1, 3), y = tensor_make(dtype, shape, 0, 0),
                  dy = tensor_make(dtype, shape, -1, 1);
    struct tensor gamma = TENSOR(dtype, -2, 2, shape[1]), beta = TENSOR(dtype, -1, 1, shape[1]);
    struct tensor mean = TENSOR(HAPT_F32, 0, 0, shape[1]), variance = TENSOR(HAPT_F32, 0, 0, shape[1]);
    struct tensor dmean = TENSOR(HAPT_F32, 0, 0, shape[1]), dvariance = TENSOR(HAPT_F32, 0, 0, shape[1]);
    const struct problem problem = {.forward = batch_norm_reference,
                                    .input = {&x, &gamma, &beta},
                                    .out_count = y.count,
                                    .dy = dy.value,
                                    .real = {1e-5}};
    const int64_t count = shape[0] * shape[2] * shape[3];
    const double unit = dtype != HAPT_F32 ? HALF_UNIT(dtype) : 0;
    double *expected = malloc((size_t)y.count * sizeof *expected);
    batch_norm_reference(&problem, expected);
    struct hapt_call call = {.input_count = 1,
                             .output_count = 1,
                             .input = {x.view, mean.view, variance.view, gamma.view, beta.view},
                             .output = {mean.view},
                             .integer = {count},
                             .real = {1e-5},
                             .threads = threads};
    kernel_run("batch_mean", dtype, &call);
    call.input_count = 2, call.output[0] = variance.view;
    kernel_run("batch_variance", dtype, &call);
    call.input_count = 5, call.output[0] = y.view;
    kernel_run("batch_norm", dtype, &call);
    check_close(&y.view, expected, 2e-6 + unit, "batch_norm");
    for (unsigned add = 0; add < 2; add++) {
        struct tensor dx = tensor_make(dtype, shape, -1, 1), dgamma = TENSOR(HAPT_F32, -1, 1, shape[1]),
                      dbeta = TENSOR(HAPT_F32, -1, 1, shape[1]);
        struct hapt_call sums = {.input_count = 5,
                                 .output_count = 4,
                                 .input = {x.view, mean.view, variance.view, gamma.view, dy.view},
                                 .output = {dmean.view, dvariance.view, dgamma.view, dbeta.view},
                                 .integer = {count},
                                 .real = {1e-5},
                                 .accumulate = add ? 12 : 0,
                                 .threads = threads};
        kernel_run("batch_norm_sums", dtype, &sums);
        check_gradient(&problem, 1, &dgamma.view, add ? dgamma.value : NULL, 20, 1e-5, "batch_norm's dgamma");
        check_gradient(&problem, 2, &dbeta.view, add ? dbeta.value : NULL, 20, 1e-5, "batch_norm's dbeta");
        struct hapt_call back = {
            .input_count = 7,
            .output_count = 1,
            .input = {x.view, mean.view, variance.view, gamma.view, dmean.view, dvariance.view, dy.view},
            .output = {dx.view},
            .integer = {count},
            .real = {1e-5},
            .accumulate = add,
            .threads = threads};
        kernel_run("batch_norm_dx", dtype, &back);
        check_gradient(&problem, 0, &dx.view, add ? dx.value : NULL, 40, 1e-5 + 2 * unit, "batch_norm's dx");
        tensor_free(&dx);
        tensor_free(&dgamma);
        tensor_free(&dbeta);
    }
    free(expected);
    struct tensor *made[] = {&x, &y, &dy, &gamma, &beta, &mean, &variance, &dmean, &dvariance};
    for (size_t i = 0; i < sizeof made / sizeof *made; i++) tensor_free(made[i]);
}

/* In training the bits are batch_norm's. Else x is normalised by the running statistics. */
static void check_batch_norm_running(const int64_t *shape, enum hapt_dtype dtype, int threads)
{
    struct tensor x = tensor_make(dtype, shape, -1, 3), y = tensor_make(dtype, shape, 0, 0),
                  same = tensor_make(dtype, shape, 0, 0);
    struct tensor gamma = TENSOR(dtype, -2, 2, shape[1]), beta = TENSOR(dtype, -1, 1, shape[1]);
    struct tensor mean = TENSOR(HAPT_F32, -1, 1, shape[1]), variance = TENSOR(HAPT_F32, 0.5, 2, shape[1]);
    struct tensor running_mean = TENSOR(dtype, -2, 2, shape[1]), running_variance = TENSOR(dtype, 0.5, 3, shape[1]);
    const int64_t one = 1, pixels = shape[2] * shape[3];
    struct tensor training = TENSOR(HAPT_F32, 1, 1, one);
    const double unit = dtype != HAPT_F32 ? HALF_UNIT(dtype) : 0;
    double *expected = malloc((size_t)y.count * sizeof *expected);
    struct hapt_call call = {.input_count = 5,
                             .output_count = 1,
                             .input = {x.view, mean.view, variance.view, gamma.view, beta.view, running_mean.view,
                                       running_variance.view, training.view},
                             .output = {same.view},
                             .integer = {shape[0] * pixels},
                             .real = {1e-3},
                             .threads = threads};
    kernel_run("batch_norm", dtype, &call);
    call.input_count = 8, call.output[0] = y.view;
    kernel_run("batch_norm_running", dtype, &call);
    CHECK(memcmp(y.view.data, same.view.data, (size_t)y.count * hapt_dtype_bytes(dtype)) == 0);
    *(float *)training.view.data = 0;
    kernel_run("batch_norm_running", dtype, &call);
    for (int64_t i = 0; i < y.count; i++) {
        const int64_t c = i / pixels % shape[1];
        expected[i] = (x.value[i] - running_mean.value[c]) / sqrt(running_variance.value[c] + 1e-3) * gamma.value[c] +
                      beta.value[c];
    }
    check_close(&y.view, expected, 2e-6 + unit, "batch_norm by running statistics");
    free(expected);
    struct tensor *made[] = {&x,       &y, &same, &gamma, &beta, &mean, &variance, &running_mean, &running_variance,
                             &training};
    for (size_t i = 0; i < sizeof made / sizeof *made; i++) tensor_free(made[i]);
}

/* The variance of a sample is larger by N / (N - 1), but not for N = 1. */
static void batch_norm_statistics(void)
{
    for (int64_t count = 1; count <= 7; count += 3)
        for (unsigned add = 0; add < 2; add++) {
            const int64_t channels = 37;
            const double factor = count == 1 ? 1 : (double)count / (double)(count - 1);
            struct tensor mean = TENSOR(HAPT_F32, -1, 1, channels), variance = TENSOR(HAPT_F32, 0, 2, channels),
                          sum = TENSOR(HAPT_F32, -1, 1, channels), square = TENSOR(HAPT_F32, 0, 3, channels);
            double expected[2][37];
            for (int c = 0; c < channels; c++) {
                expected[0][c] = mean.value[c] + (add ? sum.value[c] : 0);
                expected[1][c] = factor * variance.value[c] + (add ? square.value[c] : 0);
            }
            struct hapt_call call = {.input_count = 2,
                                     .output_count = 2,
                                     .input = {mean.view, variance.view},
                                     .output = {sum.view, square.view},
                                     .integer = {count},
                                     .accumulate = add * 3,
                                     .threads = 1};
            kernel_run("batch_norm_statistics", HAPT_F32, &call);
            check_close(&sum.view, expected[0], 1e-6, "statistics: mean");
            check_close(&square.view, expected[1], 1e-6, "statistics: variance");
            tensor_free(&mean);
            tensor_free(&variance);
            tensor_free(&sum);
            tensor_free(&square);
        }
}

static void batch_norms(void)
{
    static const int64_t shapes[][5] = {{4, 3, 2, 3, 0}, {2, 5, 7, 9, 0}, {3, 8, 4, 4, 0}, {6, 17, 1, 1, 0}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int v = 0; v < 4 && !is_repeat(v & 2); v++) {
            check_batch_norm(shapes[i], types[v & 1], v & 2 ? 2 : 1);
            check_batch_norm_running(shapes[i], types[v & 1], v & 2 ? 2 : 1);
        }
}

int main(int argc, char **argv)
{
    kernels_init(&argc, &argv);
    RUN(convolution_shares);
    RUN(batch_norm_statistics);
    for (HALF_TYPES(half)) {
        types[1] = half;
        RUN(convolutions);
        RUN(grouped_convolutions);
        RUN(convolutions_again);
        RUN(pooling);
        RUN(pooling_corners);
        RUN(pointwise);
        RUN(batch_norms);
    }
    return kernels_finish();
}
