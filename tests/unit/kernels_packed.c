/* Packed weights (packing.h): round trips, the bound of the rounding error, and products with unpacked weights in
 * double, their gradient by central differences. */
#include "kernels.h"

#include "hapt/graph.h"
#include "hapt/packing.h"

static enum hapt_dtype types[] = {HAPT_F32, HAPT_BF16}; /* the second: each half-precision type */
static double *weight;                                  /* [out][in] unpacked */

/* y = x w' + bias. input: x [rows][in], -, bias */
static void product(const struct problem *p, double *out)
{
    const int64_t in = p->input[0]->view.shape[1], rows = p->input[0]->view.shape[0], columns = p->out_count / rows;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t o = 0; o < columns; o++) {
            double sum = p->input[2] ? p->input[2]->value[o] : 0;
            for (int64_t i = 0; i < in; i++) sum += p->input[0]->value[r * in + i] * weight[o * in + i];
            out[r * columns + o] = sum;
        }
}

static void check_product(int64_t rows, int64_t out, int64_t blocks, enum hapt_packing packing, enum hapt_dtype dtype,
                          bool bias, bool add, int threads)
{
    const int64_t in = blocks * HAPT_PACKING_COLUMNS;
    struct tensor x = TENSOR(dtype, -1, 1, rows, in), b = TENSOR(dtype, -1, 1, out), y = TENSOR(dtype, 0, 0, rows, out);
    struct tensor dy = TENSOR(dtype, -1, 1, rows, out), dx = TENSOR(dtype, -1, 1, rows, in);
    struct tensor w = TENSOR(HAPT_F32, 0, 0, out, blocks, hapt_packing_words(packing));
    const struct hapt_tensor parameter = {.packed = true, .dims = 3, .shape = {out, blocks, w.view.shape[2]}};
    float *value = malloc((size_t)(out * in) * sizeof *value);
    for (int64_t i = 0; i < out * in; i++) value[i] = (float)random_uniform(-1, 1);
    hapt_parameter_pack(&parameter, out, value);
    memcpy(w.view.data, value, (size_t)w.count * sizeof(float));
    hapt_parameter_unpack(&parameter, out, value);
    for (int64_t i = 0; i < out * in; i++) { /* kernels round the unpacked weight to their type */
        uint32_t bits;
        struct hapt_view rounded = {.data = &bits, .dtype = dtype};
        element_set(&rounded, 0, value[i]);
        weight[i] = element_get(&rounded, 0);
    }
    double *expected = malloc((size_t)y.count * sizeof *expected);
    struct problem problem = {
        .forward = product, .input = {&x, NULL, bias ? &b : NULL}, .out_count = y.count, .dy = dy.value};
    product(&problem, expected);
    struct hapt_call call = {
        .input_count = 3, .output_count = 1, .input = {x.view, w.view, b.view}, .output = {y.view}, .threads = threads};
    if (!bias) call.input[2] = (struct hapt_view){0};
    kernel_run("linear_packed", dtype, &call);
    check_close(&y.view, expected, dtype == HAPT_F32 ? 1e-6 * sqrt((double)in) : HALF_UNIT(dtype), "packed product");
    struct hapt_call back = {.input_count = 2,
                             .output_count = 1,
                             .input = {dy.view, w.view},
                             .output = {dx.view},
                             .accumulate = add,
                             .threads = threads};
    kernel_run("linear_packed_dx", dtype, &back);
    check_gradient(&problem, 0, &dx.view, add ? dx.value : NULL, 10,
                   dtype == HAPT_F32 ? 1e-6 * sqrt((double)out) : HALF_UNIT(dtype), "packed product's dx");
    free(expected);
    free(value);
    tensor_free(&x);
    tensor_free(&b);
    tensor_free(&y);
    tensor_free(&dy);
    tensor_free(&dx);
    tensor_free(&w);
}

static void products(void)
{
    static const int64_t cases[][3] = {{1, 1, 1}, {3, 5, 2}, {17, 33, 1}, {8, 64, 3}, {40, 100, 4}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int v = 0; v < 16 && !is_repeat(v & 8); v++)
            for (int packing = HAPT_PACKING_NONE + 1; packing < HAPT_PACKINGS && !is_seen(types[v & 1]); packing++)
                check_product(cases[i][0], cases[i][1], cases[i][2], (enum hapt_packing)packing, types[v & 1], v & 2,
                              v & 4, v & 8 ? 2 : 1);
}

/* Packing in place, with extreme values; what was unpacked packs to the same bits. */
static void round_trips(void)
{
    enum { OUT = 7, BLOCKS = 5, COUNT = OUT * BLOCKS * HAPT_PACKING_COLUMNS };
    static float value[COUNT], first[COUNT], again[COUNT], packed[COUNT];
    enum { KINDS = HAPT_PACKINGS - 1, MANY = 20 };
    for (int round = 0; round < MANY * KINDS; round++) {
        const enum hapt_packing packing = (enum hapt_packing)(round % KINDS + 1);
        const int turn = round / KINDS;
        const struct hapt_tensor parameter = {
            .packed = true, .dims = 3, .shape = {OUT, BLOCKS, hapt_packing_words(packing)}};
        const struct hapt_tensor published = hapt_tensor_published(&parameter);
        CHECK(published.dims == 2 && published.shape[0] == OUT && published.shape[1] == 32 * BLOCKS);
        for (int i = 0; i < COUNT; i++)
            value[i] = (float)(random_uniform(-1, 1) * pow(10, turn < MANY / 2 ? 0 : random_uniform(-30, 30)));
        if (turn < 2) memset(value, 0, sizeof value);
        if (turn == 2) value[40] = 3e38f;
        if (turn == 3)
            for (int i = 0; i < COUNT; i++) value[i] *= 1e-38f; /* many are denormal */
        memcpy(first, value, sizeof value);
        hapt_parameter_pack(&parameter, OUT, first);
        memcpy(packed, first, (size_t)hapt_tensor_elements(&parameter) * sizeof *packed);
        hapt_parameter_unpack(&parameter, OUT, first);
        for (int b = 0; b < COUNT; b += HAPT_PACKING_COLUMNS) {
            float most = 0;
            for (int c = 0; c < HAPT_PACKING_COLUMNS; c++) most = fmaxf(most, fabsf(value[b + c]));
            for (int c = 0; c < HAPT_PACKING_COLUMNS; c++) {
                const double error = fabs((double)first[b + c] - (double)value[b + c]);
                /* nf4: half of the widest distance between levels, from -1 to -0.696 */
                const double bound = packing == HAPT_PACKING_INT8   ? most / 253.9
                                     : packing == HAPT_PACKING_BF16 ? fabs(value[b + c]) / 256
                                                                    : most * 0.152;
                if (!CHECK_MESSAGE(error <= bound + 1.2e-38, "%g became %g", value[b + c], first[b + c])) break;
            }
        }
        memcpy(again, first, sizeof first);
        hapt_parameter_pack(&parameter, OUT, again);
        CHECK(!memcmp(packed, again, (size_t)hapt_tensor_elements(&parameter) * sizeof *packed));
    }
}

int main(int argc, char **argv)
{
    kernels_init(&argc, &argv);
    weight = malloc(1000000 * sizeof *weight);
    for (HALF_TYPES(half)) {
        types[1] = half;
        RUN(products);
    }
    RUN(round_trips);
    free(weight);
    return kernels_finish();
}
