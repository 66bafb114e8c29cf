/* Attention over rows of several documents gives what attention gives for each document alone, forward and backward. */
#include "kernels.h"

struct shape {
    int64_t length, heads, kv_heads, head, window; /* kv_heads 0: queries, keys and values in one tensor */
    double cap;
};

static const struct shape shapes[] = {{9, 2, 0, 16, 0, 0},     {70, 3, 0, 24, 0, 0},  {200, 1, 0, 32, 0, 0},
                                      {40, 4, 2, 16, 0, 0},    {150, 2, 1, 40, 0, 0}, {270, 4, 2, 16, 50, 0},
                                      {130, 2, 2, 32, 7, 20.0}};
enum { BATCH = 2, PARTS = 3 };
static enum hapt_dtype half_type;

/* A tensor with rows [first, first + rows) of sequence b of [BATCH][length][width]. */
static struct tensor rows_of(const struct tensor *from, int64_t b, int64_t first, int64_t rows)
{
    const int64_t width = from->view.shape[2], start = (b * from->view.shape[1] + first) * width;
    struct tensor tensor = TENSOR(from->view.dtype, 0, 0, 1, rows, width);
    for (int64_t i = 0; i < tensor.count; i++) {
        tensor.value[i] = element_get(&from->view, start + i);
        element_set(&tensor.view, i, tensor.value[i]);
    }
    return tensor;
}

static void run(const char *kind, const char *end, enum hapt_dtype dtype, struct hapt_call *call)
{
    char name[80];
    snprintf(name, sizeof name, "%s%s", kind, end);
    kernel_run(name, dtype, call);
}

/* Ends of documents: at random, also documents of one token, and of whole rows. */
static void place(int64_t length, int32_t *position, uint64_t *random)
{
    const uint64_t most = 1 + hapt_random_next(random) % (uint64_t)(length + 1);
    for (int64_t i = 0, left = 0, next = 0; i < length; i++, left--) {
        if (left == 0) left = 1 + (int64_t)(hapt_random_next(random) % most), next = i;
        position[i] = (int32_t)(i - next);
    }
}

struct operands {
    int count; /* of inputs: 1 or 3 */
    struct tensor in[PARTS], out, lse, dout, gradient[PARTS];
};

/* Forward and backward; position NULL: one document. */
static void attend(const struct shape *s, const struct operands *of, const struct tensor *position)
{
    const enum hapt_dtype dtype = of->out.view.dtype;
    const char *kind = position ? (s->kv_heads ? "grouped_document_attention" : "document_attention")
                                : (s->kv_heads ? "grouped_attention" : "attention");
    struct hapt_call call = {.output_count = 2,
                             .output = {of->out.view, of->lse.view},
                             .integer = {s->kv_heads ? s->kv_heads : s->heads, 1, s->window},
                             .real = {0, s->cap},
                             .threads = 2};
    for (int k = 0; k < of->count; k++) call.input[call.input_count++] = of->in[k].view;
    if (position) call.input[call.input_count++] = position->view;
    run(kind, "", dtype, &call);
    call.input[call.input_count++] = of->out.view;
    call.input[call.input_count++] = of->lse.view;
    call.input[call.input_count++] = of->dout.view;
    call.output_count = of->count;
    for (int k = 0; k < of->count; k++) call.output[k] = of->gradient[k].view;
    run(kind, "_backward", dtype, &call);
}

static void release(struct operands *of)
{
    for (int k = 0; k < of->count; k++) tensor_free(&of->in[k]), tensor_free(&of->gradient[k]);
    tensor_free(&of->out);
    tensor_free(&of->lse);
    tensor_free(&of->dout);
}

/* Compares rows [first, ...) of sequence b with those of a document alone, which has `rows` rows. */
static void check_rows(const struct tensor *packed, const struct tensor *alone, int64_t b, int64_t first,
                       const char *what)
{
    struct tensor part = rows_of(packed, b, first, alone->view.shape[1]);
    double *expected = malloc((size_t)alone->count * sizeof *expected);
    const double unit = part.view.dtype == HAPT_F32 ? 0 : HALF_UNIT(part.view.dtype);
    for (int64_t i = 0; i < alone->count; i++) expected[i] = element_get(&alone->view, i);
    check_close(&part.view, expected, 4e-6 + 4 * unit,
                what); /* sums in another order; rounded results are read again */
    free(expected);
    tensor_free(&part);
}

static void check_document(const struct shape *s, const struct operands *packed, int64_t b, int64_t first, int64_t rows)
{
    struct operands alone = {.count = packed->count,
                             .out = rows_of(&packed->out, b, first, rows),
                             .dout = rows_of(&packed->dout, b, first, rows),
                             .lse = TENSOR(HAPT_F32, 0, 0, 1, s->heads, rows)};
    for (int k = 0; k < packed->count; k++) {
        alone.in[k] = rows_of(&packed->in[k], b, first, rows);
        alone.gradient[k] = rows_of(&packed->gradient[k], b, first, rows);
    }
    attend(s, &alone, NULL);
    for (int64_t i = 0; i < s->heads * rows; i++)
        CHECK_NEAR(element_get(&packed->lse.view, (b * s->heads + i / rows) * s->length + first + i % rows),
                   element_get(&alone.lse.view, i), 4e-6);
    check_rows(&packed->out, &alone.out, b, first, "attention of a document");
    for (int k = 0; k < packed->count; k++)
        check_rows(&packed->gradient[k], &alone.gradient[k], b, first, "gradients of a document");
    release(&alone);
}

static void check_shape(const struct shape *s, enum hapt_dtype dtype, uint64_t seed)
{
    if (is_seen(dtype)) return;
    const int64_t width = s->heads * s->head, kv_width = s->kv_heads * s->head;
    struct tensor position = TENSOR(HAPT_I32, 0, 0, BATCH, s->length);
    struct operands packed = {.count = s->kv_heads ? PARTS : 1,
                              .out = TENSOR(dtype, 0, 0, BATCH, s->length, width),
                              .lse = TENSOR(HAPT_F32, 0, 0, BATCH, s->heads, s->length),
                              .dout = TENSOR(dtype, -1, 1, BATCH, s->length, width)};
    int32_t *where = position.view.data;
    for (int64_t b = 0; b < BATCH; b++) place(s->length, where + b * s->length, &seed);
    for (int k = 0; k < packed.count; k++) {
        const int64_t wide = s->kv_heads == 0 ? 3 * width : k ? kv_width : width;
        packed.in[k] = TENSOR(dtype, -2, 2, BATCH, s->length, wide);
        packed.gradient[k] = TENSOR(dtype, 0, 0, BATCH, s->length, wide);
    }
    attend(s, &packed, &position);
    for (int64_t b = 0; b < BATCH; b++)
        for (int64_t first = 0, rows; first < s->length; first += rows) {
            for (rows = 1; first + rows < s->length && where[b * s->length + first + rows] != 0;) rows++;
            check_document(s, &packed, b, first, rows);
        }
    release(&packed);
    tensor_free(&position);
}

static void as_documents_alone(void)
{
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (uint64_t seed = 1; seed <= (test_long() ? 12u : 3u); seed++) {
            check_shape(&shapes[i], HAPT_F32, seed);
            check_shape(&shapes[i], half_type, seed);
        }
}

/* Positions that are impossible do no harm: a token sees itself at least, and nothing outside of its row. */
static void impossible_positions(void)
{
    const struct shape shape = {45, 2, 0, 16, 0, 0};
    if (is_seen(HAPT_F32)) return;
    struct tensor position = TENSOR(HAPT_I32, 0, 0, 1, shape.length);
    struct operands of = {.count = 1,
                          .in = {TENSOR(HAPT_F32, -2, 2, 1, shape.length, 96)},
                          .out = TENSOR(HAPT_F32, 0, 0, 1, shape.length, 32),
                          .lse = TENSOR(HAPT_F32, 0, 0, 1, 2, shape.length),
                          .dout = TENSOR(HAPT_F32, -1, 1, 1, shape.length, 32),
                          .gradient = {TENSOR(HAPT_F32, 0, 0, 1, shape.length, 96)}};
    for (int64_t i = 0; i < shape.length; i++)
        ((int32_t *)position.view.data)[i] = i % 3 == 0 ? INT32_MIN : i % 3 == 1 ? INT32_MAX : -1;
    attend(&shape, &of, &position);
    for (int64_t i = 0; i < of.out.count; i++) CHECK(isfinite(element_get(&of.out.view, i)));
    for (int64_t i = 0; i < of.gradient[0].count; i++) CHECK(isfinite(element_get(&of.gradient[0].view, i)));
    for (int c = 0; c < 32; c++) /* the first token sees itself */
        CHECK_NEAR(element_get(&of.out.view, c), of.in[0].value[64 + c], 1e-6);
    release(&of);
    tensor_free(&position);
}

int main(int argc, char **argv)
{
    kernels_init(&argc, &argv);
    RUN(impossible_positions);
    for (HALF_TYPES(half)) {
        half_type = half;
        RUN(as_documents_alone);
    }
    return kernels_finish();
}
