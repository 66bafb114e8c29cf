/* Patch embedding, class token and the selection of a token, compared with double references and central
 * differences. */
#include "kernels.h"

static enum hapt_dtype types[] = {HAPT_F32, HAPT_BF16}; /* the second: each half-precision type */

/* A convolution from its definition. input: images [b][c][y][x], w [o][c][h][w], bias; out [b][patches][o]. */
static void patch_reference(const struct problem *p, double *out)
{
    const int64_t *image = p->input[0]->view.shape, *kernel = p->input[1]->view.shape;
    const int64_t down = image[2] / kernel[2], across = image[3] / kernel[3];
    for (int64_t b = 0; b < image[0]; b++)
        for (int64_t patch = 0; patch < down * across; patch++)
            for (int64_t o = 0; o < kernel[0]; o++) {
                double sum = p->input[2] ? p->input[2]->value[o] : 0;
                for (int64_t c = 0; c < kernel[1]; c++)
                    for (int64_t h = 0; h < kernel[2]; h++)
                        for (int64_t w = 0; w < kernel[3]; w++) {
                            const int64_t y = patch / across * kernel[2] + h, x = patch % across * kernel[3] + w;
                            sum += p->input[0]->value[((b * image[1] + c) * image[2] + y) * image[3] + x] *
                                   p->input[1]->value[((o * kernel[1] + c) * kernel[2] + h) * kernel[3] + w];
                        }
                out[(b * down * across + patch) * kernel[0] + o] = sum;
            }
}

struct patch_case {
    int64_t batch, channels, down, across, height, width, out;
};

static void check_patches(const struct patch_case *s, enum hapt_dtype dtype, bool bias, bool add, int threads)
{
    const int64_t rows = s->batch * s->down * s->across, depth = s->channels * s->height * s->width;
    struct tensor images = TENSOR(HAPT_F32, -1, 1, s->batch, s->channels, s->down * s->height, s->across * s->width);
    struct tensor w = TENSOR(dtype, -1, 1, s->out, s->channels, s->height, s->width), b = TENSOR(dtype, -1, 1, s->out);
    struct tensor y = TENSOR(dtype, 0, 0, s->batch, s->down * s->across, s->out);
    struct tensor dy = TENSOR(dtype, -1, 1, s->batch, s->down * s->across, s->out);
    struct tensor dw = TENSOR(HAPT_F32, -1, 1, s->out, s->channels, s->height, s->width),
                  db = TENSOR(HAPT_F32, -1, 1, s->out);
    double *expected = malloc((size_t)y.count * sizeof *expected);
    /* Half-precision products read rounded pixels. */
    for (int64_t i = 0; dtype != HAPT_F32 && i < images.count; i++) {
        uint32_t bits;
        struct hapt_view rounded = {.data = &bits, .dtype = dtype};
        element_set(&rounded, 0, images.value[i]);
        images.value[i] = element_get(&rounded, 0);
    }
    struct problem problem = {
        .forward = patch_reference, .input = {&images, &w, bias ? &b : NULL}, .out_count = y.count, .dy = dy.value};
    patch_reference(&problem, expected);
    struct hapt_call call = {.input_count = 3,
                             .output_count = 1,
                             .input = {images.view, w.view, b.view},
                             .output = {y.view},
                             .threads = threads};
    if (!bias) call.input[2] = (struct hapt_view){0};
    kernel_run("patch_embedding", dtype, &call);
    check_close(&y.view, expected, dtype == HAPT_F32 ? 1e-6 * sqrt((double)depth) : HALF_UNIT(dtype),
                "patch embedding");
    struct hapt_call back = {.input_count = 2,
                             .output_count = bias ? 2 : 1,
                             .input = {images.view, dy.view},
                             .output = {dw.view, db.view},
                             .accumulate = add ? 3 : 0,
                             .threads = threads};
    kernel_run("patch_embedding_dw", dtype, &back);
    const double tolerance = 1e-6 * sqrt((double)rows);
    check_gradient(&problem, 1, &dw.view, add ? dw.value : NULL, 30, tolerance, "patch embedding's dw");
    if (bias) check_gradient(&problem, 2, &db.view, add ? db.value : NULL, 10, tolerance, "patch embedding's db");
    free(expected);
    tensor_free(&images);
    tensor_free(&w);
    tensor_free(&b);
    tensor_free(&y);
    tensor_free(&dy);
    tensor_free(&dw);
    tensor_free(&db);
}

static void patch_embeddings(void)
{
    static const struct patch_case cases[] = {{1, 1, 1, 1, 1, 1, 1},
                                              {2, 3, 2, 3, 4, 2, 5},
                                              {1, 3, 2, 2, 5, 19, 32},
                                              {3, 2, 4, 4, 4, 4, 33},
                                              {2, 1, 8, 4, 4, 8, 64}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int v = 0; v < 16 && !is_repeat(v & 8); v++)
            check_patches(&cases[i], types[v & 1], v & 2, v & 4, v & 8 ? 2 : 1);
}

/* input: x [b][p][d], class [1][1][d], positions [1][p + 1][d] */
static void class_reference(const struct problem *p, double *out)
{
    const int64_t d = p->input[1]->count, length = p->input[2]->count / d;
    for (int64_t i = 0; i < p->out_count; i++) {
        const int64_t b = i / d / length, t = i / d % length, c = i % d;
        const double token = t ? p->input[0]->value[(b * (length - 1) + t - 1) * d + c] : p->input[1]->value[c];
        out[i] = token + p->input[2]->value[t * d + c];
    }
}

static void check_class(int64_t batch, int64_t patches, int64_t d, enum hapt_dtype dtype, unsigned add, int threads)
{
    struct tensor x = TENSOR(dtype, -1, 1, batch, patches, d), class = TENSOR(dtype, -1, 1, 1, 1, d);
    struct tensor position = TENSOR(dtype, -1, 1, 1, patches + 1, d), y = TENSOR(dtype, 0, 0, batch, patches + 1, d);
    struct tensor dy = TENSOR(dtype, -1, 1, batch, patches + 1, d), dx = TENSOR(dtype, -1, 1, batch, patches, d);
    struct tensor dclass = TENSOR(HAPT_F32, -1, 1, 1, 1, d), dposition = TENSOR(HAPT_F32, -1, 1, 1, patches + 1, d);
    double *expected = malloc((size_t)y.count * sizeof *expected);
    struct problem problem = {
        .forward = class_reference, .input = {&x, &class, &position}, .out_count = y.count, .dy = dy.value};
    class_reference(&problem, expected);
    struct hapt_call call = {.input_count = 3,
                             .output_count = 1,
                             .input = {x.view, class.view, position.view},
                             .output = {y.view},
                             .threads = threads};
    kernel_run("class_token", dtype, &call);
    check_close(&y.view, expected, dtype == HAPT_F32 ? 2e-7 : HALF_UNIT(dtype), "class token");
    struct hapt_call back = {.input_count = 1,
                             .output_count = 3,
                             .input = {dy.view},
                             .output = {dx.view, dclass.view, dposition.view},
                             .accumulate = add,
                             .threads = threads};
    kernel_run("class_token_backward", dtype, &back);
    check_gradient(&problem, 0, &dx.view, add & 1u ? dx.value : NULL, 40, dtype == HAPT_F32 ? 1e-6 : HALF_UNIT(dtype),
                   "dx");
    check_gradient(&problem, 1, &dclass.view, add & 2u ? dclass.value : NULL, 40, 1e-6, "dclass");
    check_gradient(&problem, 2, &dposition.view, add & 4u ? dposition.value : NULL, 40, 1e-6, "dposition");
    free(expected);
    tensor_free(&x);
    tensor_free(&class);
    tensor_free(&position);
    tensor_free(&y);
    tensor_free(&dy);
    tensor_free(&dx);
    tensor_free(&dclass);
    tensor_free(&dposition);
}

static void class_tokens(void)
{
    static const int64_t shapes[][3] = {{1, 1, 1}, {3, 4, 17}, {2, 16, 48}, {1, 9, 130}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int v = 0; v < 32; v++)
            check_class(shapes[i][0], shapes[i][1], shapes[i][2], types[v & 1], (unsigned)v >> 1 & 7u, v & 16 ? 2 : 1);
}

static void taken_tokens(void)
{
    for (int v = 0; v < 16; v++) {
        const enum hapt_dtype dtype = types[v & 1];
        const int64_t batch = 3, length = 5, d = v & 4 ? 21 : 16, which = v & 8 ? 4 : 0;
        const bool add = v & 2;
        struct tensor x = TENSOR(dtype, -1, 1, batch, length, d), y = TENSOR(dtype, 0, 0, batch, d);
        struct tensor dy = TENSOR(dtype, -1, 1, batch, d), dx = TENSOR(dtype, -1, 1, batch, length, d);
        struct hapt_call call = {.input_count = 1,
                                 .output_count = 1,
                                 .input = {x.view},
                                 .output = {y.view},
                                 .integer = {which},
                                 .threads = 1};
        kernel_run("take_token", dtype, &call);
        for (int64_t i = 0; i < batch * d; i++)
            CHECK(element_get(&y.view, i) == x.value[(i / d * length + which) * d + i % d]);
        call.input[0] = dy.view;
        call.output[0] = dx.view;
        call.accumulate = add;
        kernel_run("take_token_dx", dtype, &call);
        for (int64_t i = 0; i < batch * length * d; i++) {
            const double given = i / d % length == which ? dy.value[i / d / length * d + i % d] : 0;
            const double expected = given + (add ? dx.value[i] : 0);
            CHECK(fabs(element_get(&dx.view, i) - expected) <= (dtype == HAPT_F32 ? 2e-7 : 2 * HALF_UNIT(dtype)));
        }
        tensor_free(&x);
        tensor_free(&y);
        tensor_free(&dy);
        tensor_free(&dx);
    }
}

static void row_reference(const struct problem *problem, double *y)
{
    const struct tensor *x = problem->input[0], *table = problem->input[1];
    const int64_t d = table->view.shape[1];
    for (int64_t i = 0; i < x->count; i++) y[i] = x->value[i] + table->value[i % d];
}

static void check_row(int64_t rows, int64_t d, enum hapt_dtype dtype, unsigned add, int threads)
{
    struct tensor x = TENSOR(dtype, -1, 1, 2, rows, d), table = TENSOR(dtype, -1, 1, 3, d);
    struct tensor y = TENSOR(dtype, 0, 0, 2, rows, d), dy = TENSOR(dtype, -1, 1, 2, rows, d);
    struct tensor dx = TENSOR(dtype, -1, 1, 2, rows, d), dtable = TENSOR(HAPT_F32, -1, 1, 3, d);
    double *expected = malloc((size_t)y.count * sizeof *expected);
    struct problem problem = {.forward = row_reference, .input = {&x, &table}, .out_count = y.count, .dy = dy.value};
    row_reference(&problem, expected);
    struct hapt_call call = {
        .input_count = 2, .output_count = 1, .input = {x.view, table.view}, .output = {y.view}, .threads = threads};
    kernel_run("add_row", dtype, &call);
    check_close(&y.view, expected, dtype == HAPT_F32 ? 2e-7 : HALF_UNIT(dtype), "row");
    struct hapt_call back = {.input_count = 2,
                             .output_count = 2,
                             .input = {table.view, dy.view},
                             .output = {dx.view, dtable.view},
                             .accumulate = add,
                             .threads = threads};
    kernel_run("add_row_backward", dtype, &back);
    check_gradient(&problem, 0, &dx.view, add & 1u ? dx.value : NULL, 40, dtype == HAPT_F32 ? 1e-6 : HALF_UNIT(dtype),
                   "dx");
    check_gradient(&problem, 1, &dtable.view, add & 2u ? dtable.value : NULL, 40, 2e-6, "dtable");
    free(expected);
    tensor_free(&x);
    tensor_free(&table);
    tensor_free(&y);
    tensor_free(&dy);
    tensor_free(&dx);
    tensor_free(&dtable);
}

static void scale_reference(const struct problem *problem, double *y)
{
    const struct tensor *x = problem->input[0], *gamma = problem->input[1];
    for (int64_t i = 0; i < x->count; i++) y[i] = x->value[i] * gamma->value[i % gamma->count];
}

static void check_scale(int64_t rows, int64_t d, enum hapt_dtype dtype, unsigned add, int threads)
{
    struct tensor x = TENSOR(dtype, -1, 1, 2, rows, d), gamma = TENSOR(dtype, -1, 1, d);
    struct tensor y = TENSOR(dtype, 0, 0, 2, rows, d), dy = TENSOR(dtype, -1, 1, 2, rows, d);
    struct tensor dx = TENSOR(dtype, -1, 1, 2, rows, d), dgamma = TENSOR(HAPT_F32, -1, 1, d);
    double *expected = malloc((size_t)y.count * sizeof *expected);
    struct problem problem = {.forward = scale_reference, .input = {&x, &gamma}, .out_count = y.count, .dy = dy.value};
    scale_reference(&problem, expected);
    struct hapt_call call = {
        .input_count = 2, .output_count = 1, .input = {x.view, gamma.view}, .output = {y.view}, .threads = threads};
    kernel_run("layer_scale", dtype, &call);
    check_close(&y.view, expected, dtype == HAPT_F32 ? 2e-7 : HALF_UNIT(dtype), "layer scale");
    struct hapt_call back = {.input_count = 3,
                             .output_count = 2,
                             .input = {x.view, gamma.view, dy.view},
                             .output = {dx.view, dgamma.view},
                             .accumulate = add,
                             .threads = threads};
    kernel_run("layer_scale_backward", dtype, &back);
    check_gradient(&problem, 0, &dx.view, add & 1u ? dx.value : NULL, 40, dtype == HAPT_F32 ? 1e-6 : HALF_UNIT(dtype),
                   "dx");
    check_gradient(&problem, 1, &dgamma.view, add & 2u ? dgamma.value : NULL, 40, 2e-6, "dgamma");
    free(expected);
    tensor_free(&x);
    tensor_free(&gamma);
    tensor_free(&y);
    tensor_free(&dy);
    tensor_free(&dx);
    tensor_free(&dgamma);
}

static void scaled_layers(void)
{
    static const int64_t shapes[][2] = {{1, 1}, {5, 17}, {33, 48}, {9, 130}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int v = 0; v < 16; v++)
            check_scale(shapes[i][0], shapes[i][1], types[v & 1], (unsigned)v >> 1 & 3u, v & 8 ? 2 : 1);
}

static void mean_reference(const struct problem *problem, double *y)
{
    const struct tensor *x = problem->input[0];
    const int64_t batch = x->view.shape[0], length = x->view.shape[1], d = x->view.shape[2];
    for (int64_t i = 0; i < batch * d; i++) {
        const double *first = &x->value[i / d * length * d + i % d];
        double sum = 0;
        for (int64_t t = 1; t < length; t++) sum += first[t * d];
        y[2 * (i / d) * d + i % d] = first[0];
        y[(2 * (i / d) + 1) * d + i % d] = sum / (double)(length - 1);
    }
}

static void check_mean(int64_t batch, int64_t length, int64_t d, enum hapt_dtype dtype, bool add, int threads)
{
    struct tensor x = TENSOR(dtype, -1, 1, batch, length, d), y = TENSOR(dtype, 0, 0, batch, 2 * d);
    struct tensor dy = TENSOR(dtype, -1, 1, batch, 2 * d), dx = TENSOR(dtype, -1, 1, batch, length, d);
    double *expected = malloc((size_t)y.count * sizeof *expected);
    struct problem problem = {.forward = mean_reference, .input = {&x}, .out_count = y.count, .dy = dy.value};
    mean_reference(&problem, expected);
    struct hapt_call call = {
        .input_count = 1, .output_count = 1, .input = {x.view}, .output = {y.view}, .threads = threads};
    kernel_run("class_and_mean", dtype, &call);
    check_close(&y.view, expected, dtype == HAPT_F32 ? 5e-7 : HALF_UNIT(dtype), "class token and mean");
    struct hapt_call back = {.input_count = 1,
                             .output_count = 1,
                             .input = {dy.view},
                             .output = {dx.view},
                             .accumulate = add,
                             .threads = threads};
    kernel_run("class_and_mean_dx", dtype, &back);
    check_gradient(&problem, 0, &dx.view, add ? dx.value : NULL, 60, dtype == HAPT_F32 ? 1e-6 : HALF_UNIT(dtype), "dx");
    free(expected);
    tensor_free(&x);
    tensor_free(&y);
    tensor_free(&dy);
    tensor_free(&dx);
}

static void classes_and_means(void)
{
    static const int64_t shapes[][3] = {{1, 2, 1}, {3, 5, 17}, {2, 17, 48}, {1, 10, 130}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int v = 0; v < 8; v++)
            check_mean(shapes[i][0], shapes[i][1], shapes[i][2], types[v & 1], v & 2, v & 4 ? 2 : 1);
}

static void added_rows(void)
{
    static const int64_t shapes[][2] = {{1, 1}, {5, 17}, {33, 48}, {9, 130}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int v = 0; v < 16; v++)
            check_row(shapes[i][0], shapes[i][1], types[v & 1], (unsigned)v >> 1 & 3u, v & 8 ? 2 : 1);
}

int main(int argc, char **argv)
{
    kernels_init(&argc, &argv);
    for (HALF_TYPES(half)) {
        types[1] = half;
        RUN(patch_embeddings);
        RUN(class_tokens);
        RUN(taken_tokens);
        RUN(added_rows);
        RUN(scaled_layers);
        RUN(classes_and_means);
    }
    return kernels_finish();
}
