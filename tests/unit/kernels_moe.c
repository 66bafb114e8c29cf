/* Kernels of mixtures of experts, on all experts and on shards of them, compared with loops over tokens and with finite
 * differences. */
#include "kernels.h"

static enum hapt_dtype types[] = {HAPT_F32, HAPT_BF16}; /* the second: each half-precision type */

/* A shard holds experts [first, first + held) of `experts`. */
struct shape {
    int64_t rows, tokens, experts, choices, capacity, width, out, first, held;
};
static struct shape shape;
static int32_t expert[4096]; /* [rows][tokens][choices], possible choices of a gate */

static double unit(enum hapt_dtype dtype)
{
    return dtype == HAPT_F32 ? 1e-6 : HALF_UNIT(dtype);
}

/* Slot of choice j of token t of row r, counted from the start of the row. -1: not on this shard. */
static int64_t slot_of(int64_t r, int64_t t, int64_t j)
{
    const int32_t *row = expert + r * shape.tokens * shape.choices, own = row[t * shape.choices + j];
    int64_t before = 0;
    for (int64_t q = 0; q < t * shape.choices + j; q++) before += row[q] == own;
    if (own < shape.first || own >= shape.first + shape.held || before >= shape.capacity) return -1;
    return (r * shape.held + own - shape.first) * shape.capacity + before;
}

static void choose_experts(void)
{
    for (int64_t t = 0; t < shape.rows * shape.tokens; t++)
        for (int64_t j = 0; j < shape.choices; j++) {
            int32_t *choice = expert + t * shape.choices;
            bool again = true;
            while (again) {
                choice[j] = (int32_t)(random_bits() % (uint64_t)shape.experts);
                again = false;
                for (int64_t i = 0; i < j; i++) again = again || choice[i] == choice[j];
            }
        }
}

static struct hapt_view choices_view(void)
{
    return (struct hapt_view){
        .data = expert, .dtype = HAPT_I32, .dims = 3, .shape = {shape.rows, shape.tokens, shape.choices}};
}

static struct tensor slots_make(enum hapt_dtype dtype, int64_t columns)
{
    return TENSOR(dtype, -1, 1, shape.rows, shape.held, shape.capacity, columns);
}

/* ---- the gate ---- */

/* Softmax over all experts. Those in `expert` are kept, and scaled to sum 1 unless integer[0]. */
static void gate_reference(const struct problem *p, double *out)
{
    for (int64_t r = 0; r < shape.rows * shape.tokens; r++) {
        const double *x = p->input[0]->value + r * shape.experts;
        double all = 0, kept = 0;
        for (int64_t e = 0; e < shape.experts; e++) all += exp(x[e]);
        for (int64_t j = 0; j < shape.choices; j++) kept += exp(x[expert[r * shape.choices + j]]) / all;
        for (int64_t j = 0; j < shape.choices; j++)
            out[r * shape.choices + j] = exp(x[expert[r * shape.choices + j]]) / all / (p->integer[0] ? 1 : kept);
    }
}

static void check_gate(enum hapt_dtype dtype, bool over_all, int threads)
{
    struct tensor x = TENSOR(dtype, -3, 3, shape.rows, shape.tokens, shape.experts);
    struct tensor weight = TENSOR(HAPT_F32, 0, 0, shape.rows, shape.tokens, shape.choices);
    struct tensor index = TENSOR(HAPT_I32, 0, 0, shape.rows, shape.tokens, shape.choices);
    struct tensor dy = TENSOR(HAPT_F32, -1, 1, shape.rows, shape.tokens, shape.choices);
    struct tensor lse = TENSOR(HAPT_F32, 0, 0, shape.rows, shape.tokens);
    struct hapt_call call = {.input_count = 1,
                             .output_count = over_all ? 3 : 2,
                             .input = {x.view},
                             .output = {weight.view, index.view, lse.view},
                             .integer = {shape.choices},
                             .threads = threads};
    kernel_run(over_all ? "moe_gate_over_all" : "moe_gate", dtype, &call);
    memcpy(expert, index.view.data, (size_t)index.count * 4);
    for (int64_t r = 0; r < shape.rows * shape.tokens; r++)
        for (int64_t j = 0; j < shape.choices; j++) { /* number of experts that are larger, or equal and earlier */
            const int32_t own = expert[r * shape.choices + j];
            int64_t larger = 0;
            const double *row = x.value + r * shape.experts;
            if (!CHECK(own >= 0 && own < shape.experts)) return;
            for (int64_t e = 0; e < shape.experts; e++) larger += row[e] > row[own] || (row[e] == row[own] && e < own);
            CHECK_MESSAGE(larger == j, "choice %lld has %lld experts before it", (long long)j, (long long)larger);
        }
    struct problem problem = {
        .forward = gate_reference, .input = {&x}, .out_count = weight.count, .dy = dy.value, .integer = {over_all}};
    double *expected = malloc((size_t)weight.count * sizeof *expected);
    gate_reference(&problem, expected);
    check_close(&weight.view, expected, 1e-6, "weights of the gate");
    for (unsigned add = 0; add < 2; add++) {
        struct tensor dx = TENSOR(dtype, -1, 1, shape.rows, shape.tokens, shape.experts);
        struct hapt_call back = {.input_count = 3,
                                 .output_count = 1,
                                 .input = {weight.view, index.view, dy.view},
                                 .output = {dx.view},
                                 .accumulate = add,
                                 .threads = threads};
        struct hapt_call back_over_all = back;
        back_over_all.input_count = 5;
        memcpy(back_over_all.input, (struct hapt_view[]){x.view, weight.view, index.view, lse.view, dy.view},
               5 * sizeof(struct hapt_view));
        kernel_run(over_all ? "moe_gate_over_all_dx" : "moe_gate_dx", dtype, over_all ? &back_over_all : &back);
        check_gradient(&problem, 0, &dx.view, add ? dx.value : NULL, 40, 2 * unit(dtype), "moe_gate's dx");
        tensor_free(&dx);
    }
    free(expected);
    tensor_free(&lse);
    tensor_free(&x);
    tensor_free(&weight);
    tensor_free(&index);
    tensor_free(&dy);
}

/* ---- tokens and slots ---- */

/* input[0] [rows][tokens][width] into slots. */
static void dispatch_reference(const struct problem *p, double *out)
{
    memset(out, 0, (size_t)p->out_count * sizeof *out);
    for (int64_t r = 0; r < shape.rows; r++)
        for (int64_t t = 0; t < shape.tokens; t++)
            for (int64_t j = 0; j < shape.choices; j++)
                for (int64_t c = 0; c < shape.width && slot_of(r, t, j) >= 0; c++)
                    out[slot_of(r, t, j) * shape.width + c] =
                        p->input[0]->value[(r * shape.tokens + t) * shape.width + c];
}

/* input[0] slots, input[1] weights [rows][tokens][choices], into tokens. */
static void combine_reference(const struct problem *p, double *out)
{
    memset(out, 0, (size_t)p->out_count * sizeof *out);
    for (int64_t r = 0; r < shape.rows; r++)
        for (int64_t t = 0; t < shape.tokens; t++)
            for (int64_t j = 0; j < shape.choices; j++) {
                const int64_t slot = slot_of(r, t, j), token = r * shape.tokens + t;
                for (int64_t c = 0; c < shape.width && slot >= 0; c++)
                    out[token * shape.width + c] +=
                        p->input[1]->value[token * shape.choices + j] * p->input[0]->value[slot * shape.width + c];
            }
}

static void check_dispatch(enum hapt_dtype dtype, int threads)
{
    struct tensor x = TENSOR(dtype, -1, 1, shape.rows, shape.tokens, shape.width);
    struct tensor y = slots_make(dtype, shape.width), dy = slots_make(dtype, shape.width);
    struct tensor counts = TENSOR(HAPT_F32, 0, 0, shape.rows, shape.held);
    struct problem problem = {.forward = dispatch_reference, .input = {&x}, .out_count = y.count, .dy = dy.value};
    double *expected = malloc((size_t)y.count * sizeof *expected);
    dispatch_reference(&problem, expected);
    struct hapt_call call = {.input_count = 2,
                             .output_count = 1,
                             .input = {x.view, choices_view()},
                             .output = {y.view},
                             .first_value = shape.first,
                             .threads = threads};
    kernel_run("moe_dispatch", dtype, &call);
    check_close(&y.view, expected, 0, "moe_dispatch");
    call = (struct hapt_call){.input_count = 1,
                              .output_count = 1,
                              .input = {choices_view()},
                              .output = {counts.view},
                              .first_value = shape.first,
                              .threads = threads};
    kernel_run("moe_count", HAPT_F32, &call);
    double *named = calloc((size_t)counts.count, sizeof *named);
    for (int64_t q = 0; q < shape.rows * shape.tokens * shape.choices; q++) {
        const int64_t e = expert[q] - shape.first;
        if (e >= 0 && e < shape.held) named[q / (shape.tokens * shape.choices) * shape.held + e]++;
    }
    check_close(&counts.view, named, 0, "moe_count");
    for (unsigned add = 0; add < 2; add++) {
        struct tensor dx = TENSOR(dtype, -1, 1, shape.rows, shape.tokens, shape.width);
        call = (struct hapt_call){.input_count = 2,
                                  .output_count = 1,
                                  .input = {dy.view, choices_view()},
                                  .output = {dx.view},
                                  .first_value = shape.first,
                                  .accumulate = add,
                                  .threads = threads};
        kernel_run("moe_dispatch_dx", dtype, &call);
        check_gradient(&problem, 0, &dx.view, add ? dx.value : NULL, 40, 2 * unit(dtype), "moe_dispatch's dx");
        tensor_free(&dx);
    }
    free(expected);
    free(named);
    tensor_free(&x);
    tensor_free(&y);
    tensor_free(&dy);
    tensor_free(&counts);
}

static void check_combine(enum hapt_dtype dtype, int threads)
{
    struct tensor slots = slots_make(dtype, shape.width);
    struct tensor weight = TENSOR(HAPT_F32, 0, 1, shape.rows, shape.tokens, shape.choices);
    struct tensor y = TENSOR(dtype, 0, 0, shape.rows, shape.tokens, shape.width);
    struct tensor dy = TENSOR(dtype, -1, 1, shape.rows, shape.tokens, shape.width);
    struct problem problem = {
        .forward = combine_reference, .input = {&slots, &weight}, .out_count = y.count, .dy = dy.value};
    double *expected = malloc((size_t)y.count * sizeof *expected);
    combine_reference(&problem, expected);
    struct hapt_call call = {.input_count = 3,
                             .output_count = 1,
                             .input = {slots.view, weight.view, choices_view()},
                             .output = {y.view},
                             .first_value = shape.first,
                             .threads = threads};
    kernel_run("moe_combine", dtype, &call);
    check_close(&y.view, expected, unit(dtype), "moe_combine");
    for (unsigned add = 0; add < 2; add++) {
        struct tensor dslots = slots_make(dtype, shape.width);
        struct tensor dweight = TENSOR(HAPT_F32, -1, 1, shape.rows, shape.tokens, shape.choices);
        call = (struct hapt_call){.input_count = 3,
                                  .output_count = 1,
                                  .input = {dy.view, weight.view, choices_view()},
                                  .output = {dslots.view},
                                  .first_value = shape.first,
                                  .accumulate = add,
                                  .threads = threads};
        kernel_run("moe_combine_dslots", dtype, &call);
        check_gradient(&problem, 0, &dslots.view, add ? dslots.value : NULL, 60, 2 * unit(dtype),
                       "moe_combine's dslots");
        call.input[1] = slots.view;
        call.output[0] = dweight.view;
        kernel_run("moe_combine_dweights", dtype, &call);
        check_gradient(&problem, 1, &dweight.view, add ? dweight.value : NULL, 40, 4e-6, "moe_combine's dweights");
        tensor_free(&dslots);
        tensor_free(&dweight);
    }
    free(expected);
    tensor_free(&slots);
    tensor_free(&weight);
    tensor_free(&y);
    tensor_free(&dy);
}

/* ---- products ---- */

/* input: slots, weights [held][out][width], counts, bias (if present). */
static void product_reference(const struct problem *p, double *out)
{
    for (int64_t s = 0; s < shape.rows * shape.held * shape.capacity; s++) {
        const int64_t e = s / shape.capacity % shape.held;
        const bool full = s % shape.capacity < (int64_t)p->input[2]->value[s / shape.capacity];
        for (int64_t o = 0; o < shape.out; o++) {
            double sum = p->input[3] ? p->input[3]->value[e * shape.out + o] : 0;
            for (int64_t i = 0; i < shape.width; i++)
                sum +=
                    p->input[0]->value[s * shape.width + i] * p->input[1]->value[(e * shape.out + o) * shape.width + i];
            out[s * shape.out + o] = full ? sum : 0;
        }
    }
}

static void check_product_gradients(const struct problem *problem, struct hapt_view dy, enum hapt_dtype dtype,
                                    int threads)
{
    const struct tensor *x = problem->input[0], *w = problem->input[1], *counts = problem->input[2];
    for (unsigned add = 0; add < 2; add++) {
        struct tensor dx = slots_make(dtype, shape.width),
                      dw = TENSOR(HAPT_F32, -1, 1, shape.held, shape.out, shape.width);
        struct tensor db = TENSOR(HAPT_F32, -1, 1, shape.held, shape.out);
        struct hapt_call call = {.input_count = 3,
                                 .output_count = 1,
                                 .input = {dy, w->view, counts->view},
                                 .output = {dx.view},
                                 .accumulate = add,
                                 .threads = threads};
        kernel_run("expert_linear_dx", dtype, &call);
        check_gradient(problem, 0, &dx.view, add ? dx.value : NULL, 30, 4 * unit(dtype), "expert_linear's dx");
        call = (struct hapt_call){.input_count = 3,
                                  .output_count = problem->input[3] ? 2 : 1,
                                  .input = {x->view, counts->view, dy},
                                  .output = {dw.view, db.view},
                                  .accumulate = add ? 3 : 0,
                                  .threads = threads};
        kernel_run("expert_linear_dw", dtype, &call);
        check_gradient(problem, 1, &dw.view, add ? dw.value : NULL, 30, 1e-5, "expert_linear's dw");
        if (problem->input[3])
            check_gradient(problem, 3, &db.view, add ? db.value : NULL, 30, 4e-6, "expert_linear's db");
        tensor_free(&dx);
        tensor_free(&dw);
        tensor_free(&db);
    }
}

static void check_product(enum hapt_dtype dtype, bool bias, int threads)
{
    if (is_seen(dtype)) return;
    struct tensor x = slots_make(dtype, shape.width), y = slots_make(dtype, shape.out),
                  dy = slots_make(dtype, shape.out);
    struct tensor w = TENSOR(dtype, -1, 1, shape.held, shape.out, shape.width),
                  b = TENSOR(dtype, -1, 1, shape.held, shape.out);
    struct tensor counts = TENSOR(HAPT_F32, 0, 0, shape.rows, shape.held);
    for (int64_t k = 0; k < counts.count; k++) { /* also none, and all */
        const double count = (double)(random_bits() % (uint64_t)(shape.capacity + 1));
        counts.value[k] = k % shape.held == 1 ? 0 : k == 0 ? (double)shape.capacity : count;
        element_set(&counts.view, k, counts.value[k]);
    }
    struct problem problem = {.forward = product_reference,
                              .input = {&x, &w, &counts, bias ? &b : NULL},
                              .out_count = y.count,
                              .dy = dy.value};
    double *expected = malloc((size_t)y.count * sizeof *expected);
    product_reference(&problem, expected);
    struct hapt_call call = {.input_count = bias ? 4 : 3,
                             .output_count = 1,
                             .input = {x.view, w.view, counts.view, b.view},
                             .output = {y.view},
                             .threads = threads};
    kernel_run("expert_linear", dtype, &call);
    check_close(&y.view, expected, 2 * unit(dtype), "expert_linear");
    check_product_gradients(&problem, dy.view, dtype, threads);
    free(expected);
    tensor_free(&x);
    tensor_free(&y);
    tensor_free(&dy);
    tensor_free(&w);
    tensor_free(&b);
    tensor_free(&counts);
}

/* rows, tokens, experts, choices, capacity, width, out; then the experts on the shard. */
static const struct shape shapes[] = {
    {1, 1, 1, 1, 1, 1, 1, 0, 1},   {2, 5, 3, 2, 5, 7, 9, 0, 3},      {3, 8, 5, 2, 8, 33, 20, 2, 3},
    {2, 9, 4, 3, 9, 16, 64, 1, 1}, {1, 40, 16, 2, 40, 32, 32, 0, 8}, {2, 33, 3, 1, 33, 64, 96, 0, 3},
};

static void gates(void)
{
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int v = 0; v < 8; v++) {
            shape = shapes[i];
            if (!is_repeat(v & 2)) check_gate(types[v & 1], v & 4, v & 2 ? 2 : 1);
        }
}

static void slots(void)
{
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int v = 0; v < 4; v++) {
            shape = shapes[i];
            choose_experts();
            check_dispatch(types[v & 1], v & 2 ? 2 : 1);
            check_combine(types[v & 1], v & 2 ? 2 : 1);
        }
}

static void products(void)
{
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int v = 0; v < 8 && !is_repeat(v & 4); v++)
            shape = shapes[i], check_product(types[v & 1], v & 2, v & 4 ? 2 : 1);
}

/* A token without a slot is an error with a hint; it is never dropped. A shard reports its own experts only. */
static void no_room(void)
{
    shape = (struct shape){1, 6, 4, 1, 3, 8, 8, 0, 4};
    for (int t = 0; t < 6; t++) expert[t] = t == 0 ? 1 : 2; /* five tokens at expert 2 */
    struct tensor x = TENSOR(HAPT_F32, -1, 1, 1, 6, 8), y = slots_make(HAPT_F32, 8);
    struct hapt_call call = {
        .input_count = 2, .output_count = 1, .input = {x.view, choices_view()}, .output = {y.view}, .threads = 1};
    CHECK(kernel_run_on(0, "moe_dispatch", HAPT_F32, &call) == HAPT_ERR_INPUT);
    CHECK(strstr(hapt_fail_message(), "5 tokens of one row go to expert 2, which has room for 3") != NULL);
    hapt_fail_reset();
    call.output[0].shape[1] = 2;
    call.first_value = 1;
    CHECK(kernel_run_on(0, "moe_dispatch", HAPT_F32, &call) == HAPT_ERR_INPUT);
    CHECK(strstr(hapt_fail_message(), "expert 2,") != NULL);
    hapt_fail_reset();
    call.output[0].shape[1] = 1;
    CHECK_OK(kernel_run_on(0, "moe_dispatch", HAPT_F32, &call)); /* expert 1 has free slots */
    tensor_free(&x);
    tensor_free(&y);
}

int main(int argc, char **argv)
{
    kernels_init(&argc, &argv);
    for (HALF_TYPES(half)) {
        types[1] = half;
        RUN(gates);
        RUN(slots);
        RUN(products);
        RUN(no_room);
    }
    return kernels_finish();
}
