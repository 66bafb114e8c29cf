/* Attention, forward and backward: odd lengths, several blocks of keys, head sizes 16..136, causal and full. */
#include "kernels.h"

struct shape {
    int64_t batch, length, heads, head;
};

static enum hapt_dtype half_type; /* each half-precision type */

static const struct shape shapes[] = {{1, 1, 1, 16},   {2, 7, 3, 16},    {1, 37, 2, 24},
                                      {1, 33, 1, 17},  {2, 64, 2, 32},   {1, 129, 1, 64},
                                      {1, 161, 2, 80}, {1, 270, 1, 128}, {1, 21, 2, 136}};

/* integer: batch, length, heads, causal. Returns out [b][t][d], then logsumexp [b][h][t]. */
static void attention_reference(const struct problem *problem, double *out)
{
    const int64_t batch = problem->integer[0], length = problem->integer[1], heads = problem->integer[2];
    const int64_t width = problem->input[0]->view.shape[2] / 3, head = width / heads;
    const double *qkv = problem->input[0]->value;
    double *weight = malloc((size_t)length * sizeof *weight), *lse = out + batch * length * width;
    memset(out, 0, (size_t)(batch * length * width) * sizeof *out);
    for (int64_t b = 0; b < batch; b++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t i = 0; i < length; i++) {
                const int64_t end = problem->integer[3] ? i + 1 : length;
                double total = 0;
                for (int64_t j = 0; j < end; j++) {
                    double dot = 0;
                    for (int64_t c = 0; c < head; c++)
                        dot += qkv[(b * length + i) * 3 * width + h * head + c] *
                               qkv[(b * length + j) * 3 * width + width + h * head + c];
                    weight[j] = exp(dot / sqrt((double)head)); /* small inputs: no overflow in double */
                    total += weight[j];
                }
                for (int64_t j = 0; j < end; j++) {
                    const double share = weight[j] / total;
                    for (int64_t c = 0; c < head; c++)
                        out[(b * length + i) * width + h * head + c] +=
                            share * qkv[(b * length + j) * 3 * width + 2 * width + h * head + c];
                }
                lse[(b * heads + h) * length + i] = log(total);
            }
    free(weight);
}

static void check_shape(const struct shape *s, enum hapt_dtype dtype, bool causal, int threads)
{
    if (is_seen(dtype)) return;
    const int64_t width = s->heads * s->head;
    struct tensor qkv = TENSOR(dtype, -2, 2, s->batch, s->length, 3 * width);
    struct tensor out = TENSOR(dtype, 0, 0, s->batch, s->length, width);
    struct tensor lse = TENSOR(HAPT_F32, 0, 0, s->batch, s->heads, s->length);
    struct tensor dout = TENSOR(dtype, -1, 1, s->batch, s->length, width);
    struct tensor dqkv = TENSOR(dtype, 0, 0, s->batch, s->length, 3 * width);
    double *expected = calloc((size_t)(out.count + lse.count), sizeof *expected);
    double *dy = calloc((size_t)(out.count + lse.count), sizeof *dy); /* the logsumexp behind `out` has weight 0 */
    memcpy(dy, dout.value, (size_t)out.count * sizeof *dy);
    struct problem problem = {.forward = attention_reference,
                              .input = {&qkv},
                              .out_count = out.count + lse.count,
                              .dy = dy,
                              .integer = {s->batch, s->length, s->heads, causal}};
    attention_reference(&problem, expected);
    struct hapt_call call = {.input_count = 1,
                             .output_count = 2,
                             .input = {qkv.view},
                             .output = {out.view, lse.view},
                             .integer = {s->heads, causal},
                             .threads = threads};
    kernel_run("attention", dtype, &call);
    /* Scores are sums over a head's columns: each doubling of the columns raises the fp32 error by half. */
    check_close(&out.view, expected, dtype == HAPT_F32 ? (s->head > 128 ? 4e-6 : 2e-6) : HALF_UNIT(dtype), "attention");
    check_close(&lse.view, expected + out.count, 2e-6, "attention's logsumexp");
    /* The backward reads rounded results of the forward, so in bf16 a few roundings are allowed. */
    struct hapt_call back = {.input_count = 4,
                             .output_count = 1,
                             .input = {qkv.view, out.view, lse.view, dout.view},
                             .output = {dqkv.view},
                             .integer = {s->heads, causal},
                             .threads = threads};
    kernel_run("attention_backward", dtype, &back);
    const int samples = s->length <= 40 ? 60 : 5;
    check_gradient(&problem, 0, &dqkv.view, NULL, samples, dtype == HAPT_F32 ? 5e-6 : 4 * HALF_UNIT(dtype), "dqkv");
    free(dy);
    free(expected);
    tensor_free(&qkv);
    tensor_free(&out);
    tensor_free(&lse);
    tensor_free(&dout);
    tensor_free(&dqkv);
}

static void agrees_with_the_reference(void)
{
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int variant = 0; variant < 8; variant++) {
            if (!shape_wanted(4, (const int64_t[]){shapes[i].batch, shapes[i].length, shapes[i].heads, shapes[i].head}))
                continue;
            if (shapes[i].length > 100 ? variant != 1 && variant != 6 : is_repeat(variant & 4))
                continue; /* the reference is slow */
            check_shape(&shapes[i], variant & 1 ? half_type : HAPT_F32, variant & 2, variant & 4 ? 2 : 1);
        }
}

/* Every element of the gradient, for a length that crosses a block of queries. */
static void whole_gradient(void)
{
    struct tensor qkv = TENSOR(HAPT_F32, -2, 2, 1, 35, 3 * 2 * 16);
    struct tensor out = TENSOR(HAPT_F32, 0, 0, 1, 35, 32), lse = TENSOR(HAPT_F32, 0, 0, 1, 2, 35);
    struct tensor dqkv = TENSOR(HAPT_F32, 0, 0, 1, 35, 96);
    double *dy = calloc((size_t)(out.count + lse.count), sizeof *dy);
    struct tensor dout = TENSOR(HAPT_F32, -1, 1, 1, 35, 32);
    memcpy(dy, dout.value, (size_t)out.count * sizeof *dy);
    struct problem problem = {.forward = attention_reference,
                              .input = {&qkv},
                              .out_count = out.count + lse.count,
                              .dy = dy,
                              .integer = {1, 35, 2, 1}};
    struct hapt_call call = {.input_count = 1,
                             .output_count = 2,
                             .input = {qkv.view},
                             .output = {out.view, lse.view},
                             .integer = {2, 1},
                             .threads = 1};
    kernel_run("attention", HAPT_F32, &call);
    struct hapt_call back = {.input_count = 4,
                             .output_count = 1,
                             .input = {qkv.view, out.view, lse.view, dout.view},
                             .output = {dqkv.view},
                             .integer = {2, 1},
                             .threads = 1};
    kernel_run("attention_backward", HAPT_F32, &back);
    check_gradient(&problem, 0, &dqkv.view, NULL, 1 << 30, 5e-6, "dqkv");
    free(dy);
    tensor_free(&qkv);
    tensor_free(&out);
    tensor_free(&lse);
    tensor_free(&dout);
    tensor_free(&dqkv);
}

/* Scores of +-1000: the running maximum must keep every exponential finite, over several blocks of keys. */
static void survives_large_scores(void)
{
    const int64_t length = 300;
    struct tensor qkv = TENSOR(HAPT_F32, -1, 1, 1, length, 48);
    for (int64_t t = 0; t < length; t++)
        for (int64_t c = 0; c < 16; c++) {
            element_set(&qkv.view, t * 48 + c, c == 0 ? 40 : 0);
            element_set(&qkv.view, t * 48 + 16 + c, c == 0 ? (t % 2 ? -100.0 : 0.1 * (double)t) : 0);
        }
    struct tensor out = TENSOR(HAPT_F32, 0, 0, 1, length, 16), lse = TENSOR(HAPT_F32, 0, 0, 1, 1, length);
    struct hapt_call call = {.input_count = 1,
                             .output_count = 2,
                             .input = {qkv.view},
                             .output = {out.view, lse.view},
                             .integer = {1, 1},
                             .threads = 2};
    kernel_run("attention", HAPT_F32, &call);
    for (int64_t t = 0; t < length; t++) {
        double total = 0, top = 0.1 * (double)(t - t % 2) * 10;
        for (int64_t j = 0; j <= t; j++) total += exp((j % 2 ? -1000.0 : (double)(float)(0.1 * (double)j) * 10) - top);
        CHECK_NEAR(element_get(&lse.view, t), top + log(total), 1e-4);
        CHECK(isfinite(element_get(&out.view, t * 16)));
    }
    tensor_free(&qkv);
    tensor_free(&out);
    tensor_free(&lse);
}

/* Each run has the same bits, with 1 and with 2 threads, because a head is computed by one thread. */
static void same_bits(void)
{
    struct tensor qkv = TENSOR(half_type, -2, 2, 3, 50, 96), dout = TENSOR(half_type, -1, 1, 3, 50, 32);
    uint16_t *first = malloc(3 * 50 * 96 * sizeof *first);
    for (int run = 0; run < 3; run++) {
        struct tensor out = TENSOR(half_type, 0, 0, 3, 50, 32), lse = TENSOR(HAPT_F32, 0, 0, 3, 2, 50);
        struct tensor dqkv = TENSOR(half_type, 0, 0, 3, 50, 96);
        struct hapt_call call = {.input_count = 1,
                                 .output_count = 2,
                                 .input = {qkv.view},
                                 .output = {out.view, lse.view},
                                 .integer = {2, 1},
                                 .threads = run == 0 ? 1 : 2};
        kernel_run("attention", half_type, &call);
        struct hapt_call back = {.input_count = 4,
                                 .output_count = 1,
                                 .input = {qkv.view, out.view, lse.view, dout.view},
                                 .output = {dqkv.view},
                                 .integer = {2, 1},
                                 .threads = call.threads};
        kernel_run("attention_backward", half_type, &back);
        if (run == 0) memcpy(first, dqkv.view.data, 3 * 50 * 96 * sizeof *first);
        CHECK(!memcmp(first, dqkv.view.data, 3 * 50 * 96 * sizeof *first));
        tensor_free(&out);
        tensor_free(&lse);
        tensor_free(&dqkv);
    }
    free(first);
    tensor_free(&qkv);
    tensor_free(&dout);
}

/* ---- separate q, k and v: query heads share heads of keys and values ---- */

struct grouped {
    int64_t batch, length, heads, kv_heads, head, window;
    double scale, cap;
};

static const struct grouped groupings[] = {
    {1, 5, 1, 1, 8, 0, 0, 0},   {2, 7, 4, 2, 16, 0, 0, 0},   {1, 35, 6, 2, 17, 0, 0, 0},  {2, 33, 3, 3, 24, 0, 0, 0},
    {1, 64, 8, 1, 32, 0, 0, 0}, {1, 161, 4, 2, 80, 0, 0, 0}, {1, 130, 2, 2, 64, 0, 0, 0},
};

/* Other numbers of keys than of queries: fewer and more, and at the borders of tiles. */
static const struct {
    struct grouped grouped;
    int64_t keys;
} unequal[] = {
    {{2, 7, 4, 2, 16, 0, 0, 0}, 35},   {{2, 40, 2, 2, 24, 0, 0, 0}, 5},    {{1, 9, 2, 1, 17, 0, 0.3, 0}, 2},
    {{1, 1, 3, 3, 8, 0, 0, 0}, 33},    {{2, 33, 4, 2, 32, 0, 0.2, 3}, 64}, {{1, 161, 2, 1, 64, 0, 0, 0}, 77},
    {{2, 70, 2, 2, 40, 0, 0, 0}, 257},
};

/* Causal: windows, also of two positions, with whole blocks of keys behind them; scales and limits of the scores. */
static const struct grouped windowed[] = {
    {1, 5, 1, 1, 8, 3, 0, 0},         {2, 35, 4, 2, 16, 2, 0, 0},     {1, 161, 4, 2, 24, 20, 0.3, 0},
    {1, 300, 2, 1, 16, 130, 0.2, 2},  {2, 40, 2, 2, 17, 0, 0.5, 0.7}, {1, 150, 2, 1, 136, 129, 0.05, 3},
    {1, 70, 2, 1, 32, 1000, 0.1, 50},
};

/* input: q, k, v; integer: heads, kv heads, causal, window; real: scale, limit. Returns out [b][t][heads x head], then
 * logsumexp [b][heads][t]. */
static void grouped_reference(const struct problem *problem, double *out)
{
    const int64_t batch = problem->input[0]->view.shape[0], length = problem->input[0]->view.shape[1];
    const int64_t heads = problem->integer[0], kv_heads = problem->integer[1];
    const int64_t q_width = problem->input[0]->view.shape[2], kv_width = problem->input[1]->view.shape[2];
    const int64_t head = q_width / heads, shared = heads / kv_heads, keys = problem->input[1]->view.shape[1];
    double *weight = malloc((size_t)keys * sizeof *weight), *lse = out + batch * length * q_width;
    memset(out, 0, (size_t)(batch * length * q_width) * sizeof *out);
    for (int64_t b = 0; b < batch; b++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t i = 0; i < length; i++) {
                const int64_t end = problem->integer[2] ? i + 1 : keys, own = h / shared * head;
                const int64_t window = problem->integer[3], start = window > 0 && i >= window ? i + 1 - window : 0;
                const double scale = problem->real[0] > 0 ? problem->real[0] : 1 / sqrt((double)head);
                const double cap = problem->real[1];
                const double *q = problem->input[0]->value + (b * length + i) * q_width + h * head;
                double total = 0;
                for (int64_t j = start; j < end; j++) {
                    const double *k = problem->input[1]->value + (b * keys + j) * kv_width + own;
                    double dot = 0;
                    for (int64_t c = 0; c < head; c++) dot += q[c] * k[c];
                    weight[j] = exp(cap > 0 ? cap * tanh(dot * scale / cap) : dot * scale);
                    total += weight[j];
                }
                for (int64_t j = start; j < end; j++) {
                    const double *v = problem->input[2]->value + (b * keys + j) * kv_width + own;
                    const double share = weight[j] / total;
                    for (int64_t c = 0; c < head; c++) out[(b * length + i) * q_width + h * head + c] += share * v[c];
                }
                lse[(b * heads + h) * length + i] = log(total);
            }
    free(weight);
}

static void check_grouped(const struct grouped *s, int64_t keys, enum hapt_dtype dtype, bool causal, bool accumulate,
                          int threads)
{
    if (is_seen(dtype)) return;
    const int64_t width = s->heads * s->head, kv_width = s->kv_heads * s->head;
    struct tensor in[3], out = TENSOR(dtype, 0, 0, s->batch, s->length, width);
    struct tensor lse = TENSOR(HAPT_F32, 0, 0, s->batch, s->heads, s->length);
    struct tensor dout = TENSOR(dtype, -1, 1, s->batch, s->length, width), gradient[3];
    for (int k = 0; k < 3; k++) {
        in[k] = TENSOR(dtype, -2, 2, s->batch, k ? keys : s->length, k ? kv_width : width);
        gradient[k] = TENSOR(dtype, -1, 1, s->batch, k ? keys : s->length, k ? kv_width : width);
    }
    double *expected = calloc((size_t)(out.count + lse.count), sizeof *expected);
    double *dy = calloc((size_t)(out.count + lse.count), sizeof *dy);
    memcpy(dy, dout.value, (size_t)out.count * sizeof *dy);
    struct problem problem = {.forward = grouped_reference,
                              .input = {&in[0], &in[1], &in[2]},
                              .out_count = out.count + lse.count,
                              .dy = dy,
                              .integer = {s->heads, s->kv_heads, causal, s->window},
                              .real = {s->scale, s->cap}};
    grouped_reference(&problem, expected);
    struct hapt_call call = {.input_count = 3,
                             .output_count = 2,
                             .input = {in[0].view, in[1].view, in[2].view},
                             .output = {out.view, lse.view},
                             .integer = {s->kv_heads, causal, s->window},
                             .real = {s->scale, s->cap},
                             .threads = threads};
    kernel_run("grouped_attention", dtype, &call);
    check_close(&out.view, expected, dtype == HAPT_F32 ? 2e-6 : HALF_UNIT(dtype), "grouped attention");
    check_close(&lse.view, expected + out.count, 2e-6, "grouped attention's logsumexp");
    struct hapt_call back = {.input_count = 6,
                             .output_count = 3,
                             .input = {in[0].view, in[1].view, in[2].view, out.view, lse.view, dout.view},
                             .output = {gradient[0].view, gradient[1].view, gradient[2].view},
                             .integer = {s->kv_heads, causal, s->window},
                             .real = {s->scale, s->cap},
                             .accumulate = accumulate ? 7 : 0,
                             .threads = threads};
    kernel_run("grouped_attention_backward", dtype, &back);
    for (int k = 0; k < 3; k++) {
        static const char *const name[] = {"dq", "dk", "dv"};
        check_gradient(&problem, k, &gradient[k].view, accumulate ? gradient[k].value : NULL, s->length <= 40 ? 40 : 4,
                       dtype == HAPT_F32 ? 5e-6 : 4 * HALF_UNIT(dtype), name[k]);
    }
    for (int k = 0; k < 3; k++) tensor_free(&in[k]), tensor_free(&gradient[k]);
    free(dy);
    free(expected);
    tensor_free(&out);
    tensor_free(&lse);
    tensor_free(&dout);
}

static void grouped_agrees_with_the_reference(void)
{
    for (size_t i = 0; i < sizeof groupings / sizeof *groupings; i++)
        for (int variant = 0; variant < 16; variant++) {
            const struct grouped *g = &groupings[i];
            if (!shape_wanted(5, (const int64_t[]){g->batch, g->length, g->heads, g->kv_heads, g->head})) continue;
            if (g->length > 60 ? variant % 5 != 0 : is_repeat(variant & 8)) continue; /* the reference is slow */
            check_grouped(g, g->length, variant & 1 ? half_type : HAPT_F32, variant & 2, variant & 4,
                          variant & 8 ? 2 : 1);
        }
}

static void unequal_lengths(void)
{
    for (size_t i = 0; i < sizeof unequal / sizeof *unequal; i++)
        for (int variant = 0; variant < 8; variant++) {
            const struct grouped *g = &unequal[i].grouped;
            if (!shape_wanted(6,
                              (const int64_t[]){g->batch, g->length, g->heads, g->kv_heads, g->head, unequal[i].keys}))
                continue;
            if (g->length > 60 ? variant % 5 > 1 : is_repeat(variant & 4)) continue; /* the reference is slow */
            if (getenv("HAPT_TEST_QUICK") && (g->length > 60 ? variant > 0 : variant % 4 != (int)i % 4)) continue;
            check_grouped(g, unequal[i].keys, variant & 1 ? half_type : HAPT_F32, false, variant & 2,
                          variant & 4 ? 2 : 1);
        }
}

static void windows_and_limits(void)
{
    for (size_t i = 0; i < sizeof windowed / sizeof *windowed; i++)
        for (int variant = 0; variant < 8; variant++) {
            const struct grouped *g = &windowed[i];
            if (!shape_wanted(5, (const int64_t[]){g->batch, g->length, g->heads, g->kv_heads, g->head})) continue;
            if (g->length > 60 ? variant % 5 != 0 : is_repeat(variant & 4)) continue; /* the reference is slow */
            if (getenv("HAPT_TEST_QUICK") && variant % 4 != (int)i % 4) continue;
            check_grouped(g, g->length, variant & 1 ? half_type : HAPT_F32, true, variant & 2, variant & 4 ? 2 : 1);
        }
}

/* Every element at the borders of tiles. Queries are 0, so that a query weighs the keys that it sees alike: out is the
 * mean of their values, and dv the sum of dout / keys over the queries that see the key. */
static void check_window(int64_t length, int64_t window, enum hapt_dtype dtype)
{
    const int64_t head = 8;
    struct tensor q = TENSOR(dtype, 0, 0, 1, length, head), k = TENSOR(dtype, -1, 1, 1, length, head),
                  v = TENSOR(dtype, -1, 1, 1, length, head), dout = TENSOR(dtype, -1, 1, 1, length, head);
    struct tensor out = TENSOR(dtype, 0, 0, 1, length, head), lse = TENSOR(HAPT_F32, 0, 0, 1, 1, length), gradient[3];
    for (int g = 0; g < 3; g++) gradient[g] = TENSOR(dtype, 0, 0, 1, length, head);
    double *mean = calloc((size_t)out.count, sizeof *mean), *dv = calloc((size_t)out.count, sizeof *dv);
    for (int64_t i = 0; i < length; i++)
        for (int64_t j = i + 1 > window ? i + 1 - window : 0; j <= i; j++)
            for (int64_t c = 0; c < head; c++) {
                const double keys = (double)(i + 1 < window ? i + 1 : window);
                mean[i * head + c] += v.value[j * head + c] / keys;
                dv[j * head + c] += dout.value[i * head + c] / keys;
            }
    struct hapt_call call = {.input_count = 3,
                             .output_count = 2,
                             .input = {q.view, k.view, v.view},
                             .output = {out.view, lse.view},
                             .integer = {1, 1, window},
                             .threads = 1};
    kernel_run("grouped_attention", dtype, &call);
    check_close(&out.view, mean, dtype == HAPT_F32 ? 2e-6 : HALF_UNIT(dtype), "means of windows");
    struct hapt_call back = {.input_count = 6,
                             .output_count = 3,
                             .input = {q.view, k.view, v.view, out.view, lse.view, dout.view},
                             .output = {gradient[0].view, gradient[1].view, gradient[2].view},
                             .integer = {1, 1, window},
                             .threads = 1};
    kernel_run("grouped_attention_backward", dtype, &back);
    /* Weights are rounded to the type, then their sums. */
    check_close(&gradient[2].view, dv, dtype == HAPT_F32 ? 2e-6 : 2 * HALF_UNIT(dtype), "dv of windows");
    for (int g = 0; g < 3; g++) tensor_free(&gradient[g]);
    free(mean);
    free(dv);
    tensor_free(&q);
    tensor_free(&k);
    tensor_free(&v);
    tensor_free(&dout);
    tensor_free(&out);
    tensor_free(&lse);
}

static void windows_end_in_tiles(void)
{
    static const int64_t windows[] = {1, 2, 3, 17, 33, 34, 63, 64, 65, 66, 130};
    for (size_t i = 0; i < sizeof windows / sizeof *windows; i += test_long() ? 1 : 3)
        for (int t = 0; t < 2; t++) {
            if (t == 0 && is_seen(HAPT_F32)) continue;
            check_window(30, windows[i], t ? half_type : HAPT_F32);
            check_window(200, windows[i], t ? half_type : HAPT_F32);
        }
}

/* With equally many heads of keys and queries the bits are those of attention. */
static void grouped_is_attention(void)
{
    const int64_t length = 45, width = 32;
    struct tensor qkv = TENSOR(HAPT_F32, -2, 2, 2, length, 3 * width), part[3], out[2], lse[2];
    for (int k = 0; k < 3; k++) {
        part[k] = TENSOR(HAPT_F32, 0, 0, 2, length, width);
        for (int64_t r = 0; r < 2 * length; r++)
            memcpy((float *)part[k].view.data + r * width, (float *)qkv.view.data + (r * 3 + k) * width, width * 4);
    }
    for (int k = 0; k < 2; k++) {
        out[k] = TENSOR(HAPT_F32, 0, 0, 2, length, width);
        lse[k] = TENSOR(HAPT_F32, 0, 0, 2, 2, length);
        struct hapt_call call = {.input_count = k ? 3 : 1,
                                 .output_count = 2,
                                 .input = {k ? part[0].view : qkv.view, part[1].view, part[2].view},
                                 .output = {out[k].view, lse[k].view},
                                 .integer = {2, 1},
                                 .threads = 2};
        kernel_run(k ? "grouped_attention" : "attention", HAPT_F32, &call);
    }
    CHECK(!memcmp(out[0].view.data, out[1].view.data, (size_t)out[0].count * 4));
    CHECK(!memcmp(lse[0].view.data, lse[1].view.data, (size_t)lse[0].count * 4));
    for (int k = 0; k < 3; k++) tensor_free(&part[k]);
    for (int k = 0; k < 2; k++) tensor_free(&out[k]), tensor_free(&lse[k]);
    tensor_free(&qkv);
}

int main(int argc, char **argv)
{
    kernels_init(&argc, &argv);
    for (HALF_TYPES(half)) {
        half_type = half;
        RUN(agrees_with_the_reference);
        RUN(whole_gradient);
        RUN(survives_large_scores);
        RUN(same_bits);
        RUN(grouped_agrees_with_the_reference);
        RUN(unequal_lengths);
        RUN(windows_and_limits);
        RUN(windows_end_in_tiles);
        RUN(grouped_is_attention);
    }
    return kernels_finish();
}
