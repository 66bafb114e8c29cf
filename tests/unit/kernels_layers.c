/* Linear, layer norm, GELU, embedding and cross-entropy kernels against double references and central differences. */
#include "kernels.h"

static enum hapt_dtype types[] = {HAPT_F32, HAPT_BF16}; /* the second: each half-precision type */

/* out [rows][n] = x [rows][k] w (+ bias); integer: rows, k, n, transposed, has bias. */
static void linear_reference(const struct problem *p, double *out)
{
    const int64_t rows = p->integer[0], k = p->integer[1], n = p->integer[2];
    const double *x = p->input[0]->value, *w = p->input[1]->value;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < n; j++) {
            double sum = p->input[2] ? p->input[2]->value[j] : 0;
            for (int64_t i = 0; i < k; i++) sum += x[r * k + i] * (p->integer[3] ? w[j * k + i] : w[i * n + j]);
            out[r * n + j] = sum;
        }
}

struct linear_case {
    int64_t batch, length, in, out;
};

static void check_linear(const struct linear_case *c, enum hapt_dtype dtype, bool transposed, bool bias, int threads)
{
    if (is_seen(dtype)) return;
    const int64_t rows = c->batch * c->length;
    const double tolerance = dtype == HAPT_F32 ? 1e-6 * sqrt((double)c->in) : HALF_UNIT(dtype);
    struct tensor x = TENSOR(dtype, -1, 1, c->batch, c->length, c->in), b = TENSOR(dtype, -1, 1, c->out);
    struct tensor w = transposed ? TENSOR(dtype, -1, 1, c->out, c->in) : TENSOR(dtype, -1, 1, c->in, c->out);
    struct tensor y = TENSOR(dtype, 0, 0, c->batch, c->length, c->out);
    struct tensor dy = TENSOR(dtype, -1, 1, c->batch, c->length, c->out);
    struct problem problem = {.forward = linear_reference,
                              .input = {&x, &w, bias ? &b : NULL},
                              .out_count = y.count,
                              .dy = dy.value,
                              .integer = {rows, c->in, c->out, transposed}};
    double *expected = malloc((size_t)y.count * sizeof *expected);
    linear_reference(&problem, expected);
    struct hapt_call call = {.input_count = bias ? 3 : 2,
                             .output_count = 1,
                             .input = {x.view, w.view, b.view},
                             .output = {y.view},
                             .threads = threads};
    kernel_run(transposed ? "linear_t" : "linear", dtype, &call);
    check_close(&y.view, expected, tolerance, "linear");
    for (unsigned add = 0; add < 2; add++) { /* gradients overwrite, then add */
        struct tensor dx = TENSOR(dtype, -1, 1, c->batch, c->length, c->in);
        struct tensor dw = TENSOR(HAPT_F32, -1, 1, w.view.shape[0], w.view.shape[1]);
        struct tensor db = TENSOR(HAPT_F32, -1, 1, c->out);
        struct hapt_call to_x = {.input_count = 2,
                                 .output_count = 1,
                                 .input = {dy.view, w.view},
                                 .output = {dx.view},
                                 .accumulate = add,
                                 .threads = threads};
        kernel_run(transposed ? "linear_t_dx" : "linear_dx", dtype, &to_x);
        check_gradient(&problem, 0, &dx.view, add ? dx.value : NULL, 10, 2 * tolerance, "linear's dx");
        struct hapt_call to_w = {.input_count = 2,
                                 .output_count = bias ? 2 : 1,
                                 .input = {x.view, dy.view},
                                 .output = {dw.view, db.view},
                                 .accumulate = add ? 3 : 0,
                                 .threads = threads};
        kernel_run(transposed ? "linear_t_dw" : "linear_dw", dtype, &to_w);
        check_gradient(&problem, 1, &dw.view, add ? dw.value : NULL, 10, 1e-6 * sqrt((double)rows), "linear's dw");
        if (bias) check_gradient(&problem, 2, &db.view, add ? db.value : NULL, 10, 1e-6, "linear's db");
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

static void linear_layers(void)
{
    static const struct linear_case cases[] = {
        {1, 1, 1, 1}, {2, 3, 5, 7}, {1, 19, 33, 17}, {2, 16, 64, 48}, {1, 65, 40, 96}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int v = 0; v < 16 && !is_repeat(v & 8); v++)
            check_linear(&cases[i], types[v & 1], v & 2, v & 4, v & 8 ? 2 : 1);
}

/* Every element of the three products of larger layers, with 1 and with 2 threads. The sizes cross all blocks of the
 * kernels. */
static void check_large(int64_t rows, int64_t in, int64_t out, enum hapt_dtype dtype, bool transposed)
{
    if (is_seen(dtype)) return;
    struct tensor x = TENSOR(dtype, -1, 1, 1, rows, in), dy = TENSOR(dtype, -1, 1, 1, rows, out);
    struct tensor w = transposed ? TENSOR(dtype, -1, 1, out, in) : TENSOR(dtype, -1, 1, in, out);
    struct tensor b = TENSOR(dtype, -1, 1, out);
    double *y = calloc((size_t)(rows * out), sizeof *y), *dx = calloc((size_t)(rows * in), sizeof *dx);
    double *dw = calloc((size_t)(in * out), sizeof *dw), *db = calloc((size_t)out, sizeof *db);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t o = 0; o < out; o++) y[r * out + o] = b.value[o], db[o] += dy.value[r * out + o];
        for (int64_t i = 0; i < in; i++)
            for (int64_t o = 0; o < out; o++) {
                const int64_t at = transposed ? o * in + i : i * out + o;
                y[r * out + o] += x.value[r * in + i] * w.value[at];
                dx[r * in + i] += dy.value[r * out + o] * w.value[at];
                dw[at] += x.value[r * in + i] * dy.value[r * out + o];
            }
    }
    /* fp32: rounding grows with the root of the number of terms. bf16 results are rounded once more. */
    const double unit = dtype == HAPT_F32 ? 0 : HALF_UNIT(dtype);
    for (int run = 0; run < 3 && !is_repeat(run > 0); run++) {
        struct tensor got_y = TENSOR(dtype, 0, 0, 1, rows, out), got_dx = TENSOR(dtype, 0, 0, 1, rows, in);
        struct tensor got_dw = TENSOR(HAPT_F32, 0, 0, w.view.shape[0], w.view.shape[1]),
                      got_db = TENSOR(HAPT_F32, 0, 0, out);
        struct hapt_call call = {.input_count = 3,
                                 .output_count = 1,
                                 .input = {x.view, w.view, b.view},
                                 .output = {got_y.view},
                                 .threads = 1 + run % 2};
        kernel_run(transposed ? "linear_t" : "linear", dtype, &call);
        check_close(&got_y.view, y, unit + 1e-7 * sqrt((double)in), "y");
        struct hapt_call to_x = {.input_count = 2,
                                 .output_count = 1,
                                 .input = {dy.view, w.view},
                                 .output = {got_dx.view},
                                 .threads = 1 + run % 2};
        kernel_run(transposed ? "linear_t_dx" : "linear_dx", dtype, &to_x);
        check_close(&got_dx.view, dx, unit + 1e-7 * sqrt((double)out), "dx");
        struct hapt_call to_w = {.input_count = 2,
                                 .output_count = 2,
                                 .input = {x.view, dy.view},
                                 .output = {got_dw.view, got_db.view},
                                 .threads = 1 + run % 2};
        kernel_run(transposed ? "linear_t_dw" : "linear_dw", dtype, &to_w);
        check_close(&got_dw.view, dw, 1e-7 * sqrt((double)rows), "dw");
        check_close(&got_db.view, db, 1e-7 * sqrt((double)rows), "db");
        to_w.accumulate = 3; /* added once more: twice the gradient */
        kernel_run(transposed ? "linear_t_dw" : "linear_dw", dtype, &to_w);
        for (int64_t i = 0; i < in * out; i++) got_dw.value[i] = 2 * dw[i];
        check_close(&got_dw.view, got_dw.value, 1e-7 * sqrt((double)rows), "dw, twice");
        tensor_free(&got_y);
        tensor_free(&got_dx);
        tensor_free(&got_dw);
        tensor_free(&got_db);
    }
    free(y);
    free(dx);
    free(dw);
    free(db);
    tensor_free(&x);
    tensor_free(&dy);
    tensor_free(&w);
    tensor_free(&b);
}

static void large_linear_layers(void)
{
    static const int64_t cases[][3] = {{32, 32, 32},    {64, 96, 160},   {1088, 64, 32},
                                       {32, 2048, 160}, {96, 160, 2080}, {70, 100, 130}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int v = 0; v < 4; v++)
            if (i < 2 || v & 1 || test_long()) check_large(cases[i][0], cases[i][1], cases[i][2], types[v & 1], v & 2);
}

/* real[0]: epsilon; integer: rows, columns. */
static void norm_reference(const struct problem *p, double *out)
{
    const int64_t rows = p->integer[0], columns = p->integer[1];
    for (int64_t r = 0; r < rows; r++) {
        const double *x = p->input[0]->value + r * columns;
        double mean = 0, variance = 0;
        for (int64_t c = 0; c < columns; c++) mean += x[c];
        mean /= (double)columns;
        for (int64_t c = 0; c < columns; c++) variance += (x[c] - mean) * (x[c] - mean);
        const double scale = 1 / sqrt(variance / (double)columns + p->real[0]);
        for (int64_t c = 0; c < columns; c++)
            out[r * columns + c] = (x[c] - mean) * scale * p->input[1]->value[c] + p->input[2]->value[c];
    }
}

static void check_norm(int64_t batch, int64_t length, int64_t columns, enum hapt_dtype dtype, int threads,
                       double offset)
{
    if (is_seen(dtype)) return;
    struct tensor x = TENSOR(dtype, offset - 2, offset + 2, batch, length, columns);
    struct tensor gamma = TENSOR(dtype, 0.5, 1.5, columns), beta = TENSOR(dtype, -1, 1, columns);
    struct tensor y = TENSOR(dtype, 0, 0, batch, length, columns), dy = TENSOR(dtype, -1, 1, batch, length, columns);
    struct tensor mean = TENSOR(HAPT_F32, 0, 0, batch, length), rstd = TENSOR(HAPT_F32, 0, 0, batch, length);
    struct problem problem = {.forward = norm_reference,
                              .input = {&x, &gamma, &beta},
                              .out_count = y.count,
                              .dy = dy.value,
                              .integer = {batch * length, columns},
                              .real = {1e-5}};
    double *expected = malloc((size_t)y.count * sizeof *expected);
    norm_reference(&problem, expected);
    struct hapt_call call = {.input_count = 3,
                             .output_count = 3,
                             .input = {x.view, gamma.view, beta.view},
                             .output = {y.view, mean.view, rstd.view},
                             .real = {1e-5},
                             .threads = threads};
    kernel_run("layer_norm", dtype, &call);
    const double tolerance = (dtype == HAPT_F32 ? 1e-6 : HALF_UNIT(dtype)) * (1 + fabs(offset) * (dtype == HAPT_F32));
    check_close(&y.view, expected, tolerance, "layer_norm");
    for (unsigned add = 0; add < 2; add++) {
        struct tensor dx = TENSOR(dtype, -1, 1, batch, length, columns);
        struct tensor dgamma = TENSOR(HAPT_F32, -1, 1, columns), dbeta = TENSOR(HAPT_F32, -1, 1, columns);
        struct hapt_call back = {.input_count = 5,
                                 .output_count = 3,
                                 .input = {x.view, gamma.view, mean.view, rstd.view, dy.view},
                                 .output = {dx.view, dgamma.view, dbeta.view},
                                 .accumulate = add ? 7 : 0,
                                 .threads = threads};
        kernel_run("layer_norm_backward", dtype, &back);
        check_gradient(&problem, 0, &dx.view, add ? dx.value : NULL, 40, 4 * tolerance, "layer_norm's dx");
        check_gradient(&problem, 1, &dgamma.view, add ? dgamma.value : NULL, 40, 4e-6 * (1 + fabs(offset)), "dgamma");
        check_gradient(&problem, 2, &dbeta.view, add ? dbeta.value : NULL, 40, 2e-6, "dbeta");
        for (int64_t i = 0; i < dx.count; i++) element_set(&dx.view, i, dx.value[i]);
        back.output_count = 1; /* frozen parameters */
        kernel_run("layer_norm_dx", dtype, &back);
        check_gradient(&problem, 0, &dx.view, add ? dx.value : NULL, 5, 4 * tolerance, "layer_norm_dx");
        tensor_free(&dx);
        tensor_free(&dgamma);
        tensor_free(&dbeta);
    }
    free(expected);
    tensor_free(&x);
    tensor_free(&gamma);
    tensor_free(&beta);
    tensor_free(&y);
    tensor_free(&dy);
    tensor_free(&mean);
    tensor_free(&rstd);
}

static void layer_norms(void)
{
    static const int64_t
        cases[][3] = {{1, 1, 3},    {2, 3, 16},   {1, 37, 5},   {1, 40, 33}, {2, 50, 64}, {1, 3, 300},
                      {1, 2, 1057}, {1, 3, 2064}, {3, 3000, 8}, {1, 5, 264}, {1, 9, 760}, {1, 3, 1000},
                      {1, 3, 4104}, {1, 2, 8200}, {3, 1500, 40}}; /* GPUs keep up to four parts of a row in registers */
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int v = 0; v < 4 && shape_wanted(3, cases[i]) && !is_repeat(v & 2); v++) {
            random_state =
                RANDOM_SEED +
                i; /* the same numbers for any selection of cases, because dx of three columns may cancel to zero */
            check_norm(cases[i][0], cases[i][1], cases[i][2], types[v & 1], v & 2 ? 2 : 1, 0);
        }
    check_norm(1, 20, 37, HAPT_F32, 1, 30); /* a mean far from 0, and a tail: unused lanes must not count */
}

static void gelu_reference(const struct problem *p, double *out)
{
    for (int64_t i = 0; i < p->out_count; i++) {
        const double x = p->input[0]->value[i];
        out[i] = p->integer[0] ? 0.5 * x * erfc(-x / sqrt(2))
                               : x / (1 + exp(-2 * sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    }
}

static void gelus(void)
{
    static const int64_t counts[] = {1, 15, 64, 301, 5003};
    for (int v = 0; v < 40; v++) {
        const enum hapt_dtype dtype = types[v & 1];
        if (is_repeat(v & 4)) continue;
        struct tensor x = TENSOR(dtype, -9, 9, 1, 1, counts[v / 8]), y = TENSOR(dtype, 0, 0, 1, 1, counts[v / 8]);
        struct tensor dy = TENSOR(dtype, 0.5, 1, 1, 1, counts[v / 8]), dx = TENSOR(dtype, 0, 0, 1, 1, counts[v / 8]);
        struct problem problem = {
            .forward = gelu_reference, .input = {&x}, .out_count = x.count, .dy = dy.value, .integer = {v >> 1 & 1}};
        double *expected = malloc((size_t)x.count * sizeof *expected);
        gelu_reference(&problem, expected);
        struct hapt_call call = {.input_count = 1,
                                 .output_count = 1,
                                 .input = {x.view},
                                 .output = {y.view},
                                 .integer = {v >> 1 & 1},
                                 .threads = v & 4 ? 2 : 1};
        kernel_run("gelu", dtype, &call);
        for (int64_t i = 0; i < x.count; i++) { /* relative, including tails */
            const double apart = fabs(element_get(&y.view, i) - expected[i]);
            const double ulps =
                dtype == HAPT_F32 ? 0x1p-24 * (6 + x.value[i] * x.value[i] * 3) : 1.01 * HALF_UNIT(dtype);
            if (!CHECK_MESSAGE(apart <= ulps * fabs(expected[i]) + tiny_unit(dtype) + 1e-37,
                               "gelu(%.9g) = %.9g, not %.9g", x.value[i], element_get(&y.view, i), expected[i]))
                break;
        }
        struct hapt_call back = {.input_count = 2,
                                 .output_count = 1,
                                 .input = {x.view, dy.view},
                                 .output = {dx.view},
                                 .integer = {v >> 1 & 1},
                                 .threads = call.threads};
        kernel_run("gelu_dx", dtype, &back);
        check_gradient(&problem, 0, &dx.view, NULL, 20, dtype == HAPT_F32 ? 1e-6 : HALF_UNIT(dtype), "gelu's dx");
        free(expected);
        tensor_free(&x);
        tensor_free(&y);
        tensor_free(&dy);
        tensor_free(&dx);
    }
}

/* For each row of the table its value in double after one-hot products: table [v][d], position [t][d] or none. */
static void embedding_reference(const struct problem *p, double *out)
{
    const int64_t length = p->input[0]->view.shape[1], columns = p->input[1]->view.shape[1];
    for (int64_t r = 0; r < p->input[0]->count; r++)
        for (int64_t c = 0; c < columns; c++)
            out[r * columns + c] = p->input[1]->value[(int64_t)p->input[0]->value[r] * columns + c] +
                                   (p->input[2] ? p->input[2]->value[r % length * columns + c] : 0);
}

static void embeddings(void)
{
    static const int64_t cases[][4] = {
        {1, 1, 2, 1}, {2, 9, 5, 17}, {3, 20, 11, 64}, {2, 40, 300, 130}, {2, 600, 40, 24}};
    for (int v = 0; v < 40; v++) {
        const int64_t *c = cases[v / 8], batch = c[0], length = c[1], words = c[2], columns = c[3];
        const enum hapt_dtype dtype = types[v & 1];
        const bool position = v & 2;
        struct tensor token = TENSOR(HAPT_I32, 0, (double)words - 1e-9, batch, length);
        struct tensor table = TENSOR(dtype, -1, 1, words, columns), place = TENSOR(dtype, -1, 1, length + 2, columns);
        struct tensor x = TENSOR(dtype, 0, 0, batch, length, columns),
                      dy = TENSOR(dtype, -1, 1, batch, length, columns);
        struct tensor dtable = TENSOR(HAPT_F32, -1, 1, words, columns);
        struct tensor dplace = TENSOR(HAPT_F32, -1, 1, length + 2, columns);
        struct problem problem = {.forward = embedding_reference,
                                  .input = {&token, &table, position ? &place : NULL},
                                  .out_count = x.count,
                                  .dy = dy.value};
        double *expected = malloc((size_t)x.count * sizeof *expected);
        embedding_reference(&problem, expected);
        struct hapt_view none = {0};
        struct hapt_call call = {.input_count = 3,
                                 .output_count = 1,
                                 .input = {token.view, table.view, position ? place.view : none},
                                 .output = {x.view},
                                 .threads = v & 4 ? 2 : 1};
        kernel_run("embedding", dtype, &call);
        check_close(&x.view, expected, dtype == HAPT_F32 ? 1e-7 : HALF_UNIT(dtype), "embedding");
        struct hapt_call back = {.input_count = 2,
                                 .output_count = position ? 2 : 1,
                                 .input = {token.view, dy.view},
                                 .output = {dtable.view, dplace.view},
                                 .accumulate = 3,
                                 .threads = call.threads};
        kernel_run("embedding_dw", dtype, &back);
        check_gradient(&problem, 1, &dtable.view, dtable.value, 40, 1e-6, "dtable");
        if (position) check_gradient(&problem, 2, &dplace.view, dplace.value, 40, 1e-6, "dposition");
        free(expected);
        tensor_free(&token);
        tensor_free(&table);
        tensor_free(&place);
        tensor_free(&x);
        tensor_free(&dy);
        tensor_free(&dtable);
        tensor_free(&dplace);
    }
}

static double smoothing; /* of labels: this share of each target is spread over all classes */

static void loss_reference(const struct problem *p, double *out)
{
    const int64_t columns = p->input[0]->view.shape[2];
    out[0] = 0;
    for (int64_t r = 0; r < p->input[1]->count; r++) {
        const double *logit = p->input[0]->value + r * columns;
        const int64_t target = (int64_t)p->input[1]->value[r];
        double top = logit[0], total = 0, mean = 0;
        for (int64_t c = 0; c < columns; c++) mean += logit[c] / (double)columns;
        for (int64_t c = 0; c < columns; c++) top = fmax(top, logit[c]);
        for (int64_t c = 0; c < columns; c++) total += exp(logit[c] - top);
        if (target != -100) out[0] += top + log(total) - (1 - smoothing) * logit[target] - smoothing * mean;
    }
}

static void losses(void)
{
    static const int64_t cases[][3] = {{1, 4, 2}, {2, 5, 7}, {1, 40, 33}, {2, 16, 512}, {1, 6, 1003}, {1, 5, 4999}};
    for (int v = 0; v < 24; v++) {
        const int64_t *c = cases[v / 4], rows = c[0] * c[1];
        if (!shape_wanted(3, c) || is_repeat(v & 2)) continue;
        const enum hapt_dtype dtype = types[v & 1];
        const double range = v / 4 == 4 ? 40 : 3;
        struct tensor logits = TENSOR(dtype, -range, range, c[0], c[1], c[2]);
        struct tensor dlogits = TENSOR(dtype, 0, 0, c[0], c[1], c[2]);
        struct tensor target = TENSOR(HAPT_I32, 0, (double)c[2] - 1e-9, c[0], c[1]);
        for (int64_t r = 1; r < rows; r += 3) element_set(&target.view, r, target.value[r] = -100);
        struct tensor loss = TENSOR(HAPT_F32, 0, 0, 1), lse = TENSOR(HAPT_F32, 0, 0, c[0], c[1]);
        struct tensor scale = TENSOR(HAPT_F32, 0.3, 0.7, 1);
        struct problem problem = {
            .forward = loss_reference, .input = {&logits, &target}, .out_count = 1, .dy = scale.value};
        double expected = 0;
        loss_reference(&problem, &expected);
        struct hapt_call call = {.input_count = 2,
                                 .output_count = 2,
                                 .input = {logits.view, target.view},
                                 .output = {loss.view, lse.view},
                                 .threads = v & 2 ? 2 : 1};
        kernel_run("cross_entropy", dtype, &call);
        CHECK_NEAR(element_get(&loss.view, 0), expected, 3e-7 * expected);
        struct hapt_call back = {.input_count = 4,
                                 .output_count = 1,
                                 .input = {logits.view, target.view, lse.view, scale.view},
                                 .output = {dlogits.view},
                                 .threads = call.threads};
        kernel_run("cross_entropy_dx", dtype, &back);
        check_gradient(&problem, 0, &dlogits.view, NULL, 30, dtype == HAPT_F32 ? 2e-6 : HALF_UNIT(dtype), "dlogits");
        back.real[0] = smoothing = 0.25;
        kernel_run("cross_entropy_dx", dtype, &back);
        check_gradient(&problem, 0, &dlogits.view, NULL, 30, dtype == HAPT_F32 ? 2e-6 : HALF_UNIT(dtype), "smoothed");
        smoothing = 0;
        for (int64_t r = 1; r < rows; r += 3)
            for (int64_t k = 0; k < c[2]; k++) CHECK(element_get(&dlogits.view, r * c[2] + k) == 0);
        element_set(&target.view, 0, (double)c[2]); /* one past the last class */
        CHECK_FAILS(kernel_run_on(0, "cross_entropy", dtype, &call), HAPT_ERR_INPUT);
        tensor_free(&logits);
        tensor_free(&dlogits);
        tensor_free(&target);
        tensor_free(&loss);
        tensor_free(&lse);
        tensor_free(&scale);
    }
}

/* integer: 0 the squared error, 1 the binary cross entropy of logits */
static void errors_reference(const struct problem *p, double *out)
{
    out[0] = 0;
    for (int64_t i = 0; i < p->input[0]->count; i++) {
        const double x = p->input[0]->value[i], target = p->input[1]->value[i], share = 1 / (1 + exp(-x));
        if (isnan(target)) continue;
        out[0] += p->integer[0] ? -target * log(share) - (1 - target) * log(1 - share) : (x - target) * (x - target);
    }
}

/* Targets that are NaN are ignored; a NaN in x is kept. */
static void check_errors(bool logistic)
{
    const char *const name[] = {logistic ? "bce" : "mse", logistic ? "bce_dx" : "mse_dx"};
    static const int64_t cases[][3] = {{1, 4, 2}, {2, 5, 7}, {3, 1, 1}, {2, 16, 513}, {1, 1, 5003}};
    for (int v = 0; v < 20; v++) {
        const int64_t *c = cases[v / 4], count = c[0] * c[1] * c[2];
        if (!shape_wanted(3, c) || is_repeat(v & 2)) continue;
        const enum hapt_dtype dtype = types[v & 1];
        struct tensor x = TENSOR(dtype, -3, 3, c[0], c[1], c[2]), dx = TENSOR(dtype, 0, 0, c[0], c[1], c[2]);
        struct tensor target = TENSOR(HAPT_F32, logistic ? 0 : -3, logistic ? 1 : 3, c[0], c[1], c[2]);
        struct tensor loss = TENSOR(HAPT_F32, 0, 0, 1), scale = TENSOR(HAPT_F32, 0.3, 0.7, 1);
        for (int64_t i = 1; i < count; i += 3) element_set(&target.view, i, target.value[i] = NAN);
        struct problem problem = {.forward = errors_reference,
                                  .input = {&x, &target},
                                  .out_count = 1,
                                  .dy = scale.value,
                                  .integer = {logistic}};
        double expected;
        errors_reference(&problem, &expected);
        struct hapt_call call = {.input_count = 2,
                                 .output_count = 1,
                                 .input = {x.view, target.view},
                                 .output = {loss.view},
                                 .threads = v & 2 ? 2 : 1};
        kernel_run(name[0], dtype, &call);
        CHECK_NEAR(element_get(&loss.view, 0), expected, 3e-7 * expected);
        call.accumulate = 1;
        kernel_run(name[0], dtype, &call);
        CHECK_NEAR(element_get(&loss.view, 0), 2 * expected, 6e-7 * expected);
        struct hapt_call back = {.input_count = 3,
                                 .output_count = 1,
                                 .input = {x.view, target.view, scale.view},
                                 .output = {dx.view},
                                 .threads = call.threads};
        kernel_run(name[1], dtype, &back);
        check_gradient(&problem, 0, &dx.view, NULL, 30, dtype == HAPT_F32 ? 2e-6 : HALF_UNIT(dtype), "dx");
        for (int64_t i = 1; i < count; i += 3) CHECK(element_get(&dx.view, i) == 0);
        element_set(&x.view, 0, NAN);
        call.accumulate = 0;
        kernel_run(name[0], dtype, &call);
        CHECK(dtype == HAPT_F16 || isnan(element_get(&loss.view, 0))); /* f16_set knows no NaN */
        tensor_free(&x);
        tensor_free(&dx);
        tensor_free(&target);
        tensor_free(&loss);
        tensor_free(&scale);
    }
}

static void errors(void)
{
    check_errors(false);
    check_errors(true);
}

/* A NaN must reach the loss, because training stops on it. */
static void nan_is_kept(void)
{
    struct tensor x = TENSOR(HAPT_F32, -1, 1, 1, 2, 40), gamma = TENSOR(HAPT_F32, 1, 1, 40),
                  y = TENSOR(HAPT_F32, 0, 0, 1, 2, 40);
    struct tensor mean = TENSOR(HAPT_F32, 0, 0, 1, 2), rstd = TENSOR(HAPT_F32, 0, 0, 1, 2),
                  loss = TENSOR(HAPT_F32, 0, 0, 1);
    struct tensor target = TENSOR(HAPT_I32, 0, 39, 1, 2);
    for (int64_t at = 0; at < 40; at += 39) {
        element_set(&x.view, at, NAN);
        struct hapt_call norm = {.input_count = 3,
                                 .output_count = 3,
                                 .input = {x.view, gamma.view, gamma.view},
                                 .output = {y.view, mean.view, rstd.view},
                                 .real = {1e-5},
                                 .threads = 1};
        kernel_run("layer_norm", HAPT_F32, &norm);
        CHECK(isnan(element_get(&y.view, 3)) && !isnan(element_get(&y.view, 43)));
        struct hapt_call gelu = {
            .input_count = 1, .output_count = 1, .input = {x.view}, .output = {y.view}, .threads = 1};
        for (gelu.integer[0] = 0; gelu.integer[0] < 2; gelu.integer[0]++) {
            kernel_run("gelu", HAPT_F32, &gelu);
            CHECK(isnan(element_get(&y.view, at)) && !isnan(element_get(&y.view, 20)));
        }
        struct hapt_call entropy = {.input_count = 2,
                                    .output_count = 2,
                                    .input = {x.view, target.view},
                                    .output = {loss.view, mean.view},
                                    .threads = 1};
        kernel_run("cross_entropy", HAPT_F32, &entropy);
        CHECK(isnan(element_get(&loss.view, 0)));
        element_set(&x.view, at, 0);
    }
    tensor_free(&x);
    tensor_free(&gamma);
    tensor_free(&y);
    tensor_free(&mean);
    tensor_free(&rstd);
    tensor_free(&loss);
    tensor_free(&target);
}

int main(int argc, char **argv)
{
    kernels_init(&argc, &argv);
    for (HALF_TYPES(half)) {
        types[1] = half;
        RUN(linear_layers);
        RUN(large_linear_layers);
        RUN(layer_norms);
        RUN(gelus);
        RUN(embeddings);
        RUN(losses);
        RUN(errors);
        RUN(nan_is_kept);
    }
    return kernels_finish();
}
