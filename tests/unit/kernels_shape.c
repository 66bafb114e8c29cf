/* Operators that move elements, sum them along dimensions, or multiply matrices: against double references. */
#include "graph_kernels.h"

static enum hapt_dtype half_type;

static void permuted(const struct problem *p, double *out)
{
    const struct hapt_view *x = &p->input[0]->view;
    struct hapt_view y = {.dims = x->dims};
    int64_t from[HAPT_MAX_DIMS] = {0}, to[HAPT_MAX_DIMS] = {0};
    for (int d = 0; d < x->dims; d++) y.shape[d] = x->shape[p->integer[d]];
    for (int64_t k = 0; k < p->out_count; k++) {
        index_of(&y, k, to);
        for (int d = 0; d < x->dims; d++) from[p->integer[d]] = to[d];
        out[k] = p->input[0]->value[place_of(x, from)];
    }
}

static void same_elements(const struct problem *p, double *out)
{
    for (int64_t k = 0; k < p->out_count; k++) out[k] = p->input[0]->value[k];
}

static void repeated(const struct problem *p, double *out)
{
    const struct hapt_view *x = &p->input[0]->view;
    struct hapt_view y = p->input[1] ? p->input[1]->view : *x;
    int64_t index[HAPT_MAX_DIMS] = {0};
    for (int d = 0; d < x->dims; d++)
        if (p->integer[d]) y.shape[d] = p->integer[d];
    for (int64_t k = 0; k < p->out_count; k++) {
        index_of(&y, k, index);
        for (int d = 0; d < x->dims; d++) index[d] %= x->shape[d];
        out[k] = p->input[0]->value[place_of(x, index)];
    }
}

static void sliced(const struct problem *p, double *out)
{
    const struct hapt_view *x = &p->input[0]->view;
    const int64_t dim = p->integer[0], step = p->integer[3] ? p->integer[3] : 1;
    int64_t index[HAPT_MAX_DIMS] = {0}, k = 0;
    for (int64_t i = 0; i < p->input[0]->count; i++) {
        index_of(x, i, index);
        const int64_t at = index[dim] - p->integer[1];
        if (at >= 0 && index[dim] < p->integer[2] && at % step == 0) out[k++] = p->input[0]->value[i];
    }
    CHECK(k == p->out_count);
}

static void padded(const struct problem *p, double *out)
{
    const struct hapt_view *x = &p->input[0]->view;
    struct hapt_view y = *x;
    int64_t index[HAPT_MAX_DIMS] = {0};
    const int64_t dim = p->integer[0];
    y.shape[dim] += p->integer[1] + p->integer[2];
    for (int64_t k = 0; k < p->out_count; k++) {
        index_of(&y, k, index);
        index[dim] -= p->integer[1];
        out[k] = index[dim] >= 0 && index[dim] < x->shape[dim] ? p->input[0]->value[place_of(x, index)] : 0;
    }
}

static void joined(const struct problem *p, double *out)
{
    const struct hapt_view *a = &p->input[0]->view, *b = &p->input[1]->view;
    struct hapt_view y = *a;
    int64_t index[HAPT_MAX_DIMS] = {0};
    const int64_t dim = p->integer[0];
    y.shape[dim] += b->shape[dim];
    for (int64_t k = 0; k < p->out_count; k++) {
        index_of(&y, k, index);
        const bool second = index[dim] >= a->shape[dim];
        if (second) index[dim] -= a->shape[dim];
        out[k] = p->input[second]->value[place_of(second ? b : a, index)];
    }
}

/* Sums or means: elements of x in order, each added to its place. */
static void reduced(const struct problem *p, double *out, bool mean)
{
    const struct hapt_view *x = &p->input[0]->view;
    int64_t index[HAPT_MAX_DIMS] = {0};
    for (int64_t k = 0; k < p->out_count; k++) out[k] = 0;
    for (int64_t i = 0; i < p->input[0]->count; i++) {
        int64_t place = 0;
        index_of(x, i, index);
        for (int d = 0; d < x->dims; d++)
            if (!(p->integer[0] >> d & 1)) place = place * x->shape[d] + index[d];
        out[place] += p->input[0]->value[i] * (mean ? (double)p->out_count / (double)p->input[0]->count : 1);
    }
}

static void summed(const struct problem *p, double *out)
{
    reduced(p, out, false);
}

static void averaged(const struct problem *p, double *out)
{
    reduced(p, out, true);
}

static void multiplied(const struct problem *p, double *out)
{
    const struct hapt_view *a = &p->input[0]->view, *b = &p->input[1]->view;
    const bool first = p->integer[0] & 1, second = p->integer[0] >> 1 & 1;
    const int64_t m = a->shape[a->dims - (first ? 1 : 2)], k = a->shape[a->dims - (first ? 2 : 1)],
                  n = b->shape[b->dims - (second ? 2 : 1)];
    for (int64_t i = 0; i < p->out_count; i++) {
        const int64_t column = i % n, row = i / n % m, batch = i / n / m;
        const double *left = p->input[0]->value + batch * m * k, *right = p->input[1]->value + batch * k * n;
        out[i] = 0;
        for (int64_t j = 0; j < k; j++)
            out[i] += left[first ? j * m + row : row * k + j] * right[second ? column * k + j : j * n + column];
    }
}

static void shapes(void)
{
    static const struct example examples[] = {
        {"permute", 1, {{5}}, {0}, .low = -1, .high = 1, .reference = permuted},
        {"permute", 1, {{4, 7}}, {1, 0}, .low = -1, .high = 1, .reference = permuted},
        {"permute", 1, {{2, 9, 3, 17}}, {0, 2, 1, 3}, .low = -1, .high = 1, .reference = permuted},
        {"permute", 1, {{2, 3, 4, 5, 33}}, {4, 0, 3, 1, 2}, .low = -1, .high = 1, .reference = permuted},
        {"permute", 1, {{1, 6, 1, 70}}, {2, 3, 0, 1}, .low = -1, .high = 1, .reference = permuted},
        {"reshape", 1, {{4, 6}}, {-1}, .low = -1, .high = 1, .reference = same_elements},
        {"reshape", 1, {{2, 3, 24}}, {-1, 3, 4, 6}, .low = -1, .high = 1, .reference = same_elements},
        {"reshape", 1, {{2, 3, 4, 6}}, {6, -1}, .low = -1, .high = 1, .reference = same_elements},
        {"reshape", 1, {{1}}, {1, 1, 1}, .low = -1, .high = 1, .reference = same_elements},
        {"expand", 2, {{1, 7}, {5, 7}}, .low = -1, .high = 1, .reference = repeated},
        {"expand", 2, {{5, 1}, {5, 70}}, .low = -1, .high = 1, .reference = repeated},
        {"expand", 2, {{2, 1, 3, 1, 4}, {2, 5, 3, 6, 4}}, .low = -1, .high = 1, .reference = repeated},
        {"expand", 2, {{1, 4, 1, 1}, {3, 4, 9, 9}}, .low = -1, .high = 1, .reference = repeated},
        {"expand", 1, {{1, 4, 1}}, {3, 0, 20}, .low = -1, .high = 1, .reference = repeated},
        {"expand", 2, {{1, 4, 1}, {3, 4, 8}}, {0, 0, 20}, .low = -1, .high = 1, .reference = repeated},
        {"strided_slice", 1, {{9}}, {0, 2, 8, 3}, .low = -1, .high = 1, .reference = sliced},
        {"strided_slice", 1, {{3, 50, 4}}, {1, 7, 48}, .low = -1, .high = 1, .reference = sliced},
        {"strided_slice", 1, {{2, 3, 40}}, {2, 1, 40, 2}, .low = -1, .high = 1, .reference = sliced},
        {"pad", 1, {{3, 4, 5}}, {1, 2, 1}, .low = -1, .high = 1, .reference = padded},
        {"pad", 1, {{2, 2, 3, 9}}, {3, 0, 8}, .low = -1, .high = 1, .reference = padded},
        {"concat", 2, {{3, 4}, {3, 9}}, {1}, .low = -1, .high = 1, .reference = joined},
        {"concat", 2, {{2, 4, 5, 5}, {2, 1, 5, 5}}, {1}, .low = -1, .high = 1, .reference = joined},
        {"concat", 2, {{2, 70}, {3, 70}}, {0}, .low = -1, .high = 1, .reference = joined},
        {"sum", 1, {{6, 70}}, {1}, .low = -1, .high = 1, .reference = summed},
        {"sum", 1, {{6, 70}}, {2, 1}, .low = -1, .high = 1, .reference = summed},
        {"sum", 1, {{6, 7}}, {3}, .low = 0, .high = 1, .reference = summed},
        {"sum", 1, {{2, 3, 4, 5, 6}}, {0x15, 1}, .low = 0, .high = 1, .reference = summed},
        {"sum", 1, {{2, 3, 4, 5, 17}}, {0xa}, .low = 0, .high = 1, .reference = summed},
        {"sum", 1, {{3, 1, 1, 5}}, {6}, .low = 0, .high = 1, .reference = summed},
        {"mean", 1, {{2, 8, 6, 6}}, {12}, .low = -1, .high = 1, .reference = averaged},
        {"mean", 1, {{4, 50, 33}}, {2}, .low = -1, .high = 1, .reference = averaged},
        {"mean", 1, {{4, 50}}, {2, 1}, .low = -1, .high = 1, .reference = averaged},
        {"matmul", 2, {{4, 6}, {6, 5}}, {0}, .low = -1, .high = 1, .reference = multiplied},
        {"matmul", 2, {{3, 4, 16}, {3, 16, 7}}, {0}, .low = -1, .high = 1, .reference = multiplied},
        {"matmul", 2, {{2, 3, 8, 5}, {2, 3, 8, 9}}, {1}, .low = -1, .high = 1, .reference = multiplied},
        {"matmul", 2, {{2, 2, 2, 5, 32}, {2, 2, 2, 33, 32}}, {2}, .low = -1, .high = 1, .reference = multiplied},
        {"matmul", 2, {{6, 40, 10}, {6, 3, 40}}, {3}, .low = -1, .high = 1, .reference = multiplied, .tolerance = 3e-6},
    };
    check_examples(examples, sizeof examples / sizeof *examples, half_type);
}

/* An operator of one input or two, of these shapes, which become tensor[0] and tensor[1]. */
static struct hapt_op operator_of(const char *type, const int64_t shape[2][HAPT_MAX_DIMS + 1], const int64_t *integer,
                                  struct hapt_tensor *tensor)
{
    struct hapt_op op = {.type = hapt_op_type_find(type), .name = "op", .input = {0, -1}};
    op.input_count = hapt_op_signature(op.type)->input_count;
    memcpy(op.integer, integer, sizeof op.integer);
    for (int i = 0; i < 2; i++) {
        tensor[i] = (struct hapt_tensor){.name = i ? "b" : "a", .kind = HAPT_TENSOR_ACTIVATION};
        for (; shape[i][tensor[i].dims]; tensor[i].dims++) tensor[i].shape[tensor[i].dims] = shape[i][tensor[i].dims];
    }
    if (tensor[1].dims > 0) op.input[1] = 1;
    return op;
}

/* Signatures of some operators. The letters say which dimensions shard together. */
static void signatures(void)
{
    static const struct {
        const char *type;
        int64_t shape[2][HAPT_MAX_DIMS + 1], integer[HAPT_MAX_ATTRIBUTES];
        const char *signature;
    } cases[] = {
        {"permute", {{2, 3, 4}}, {2, 0, 1}, "bcd->dbc"},
        {"reshape", {{2, 3, 24}}, {-1, 3, 4, 6}, "bdf/g->bdgh!"},
        {"reshape", {{2, 3, 4, 6}}, {-1, 3, 24}, "bdfg!->bdh/f"},
        {"reshape", {{8, 5, 7}}, {-1, 7}, "bc!e->d/be"},
        {"reshape", {{6, 4}}, {3, 8}, "b/dc!->de!"},
        {"reshape", {{3, 8}}, {6, 4}, "bc!->d/be!"},
        {"reshape", {{4, 6}}, {3, 8}, "b!c!->d!e!"},
        {"reshape", {{1, 6}}, {6}, "b!c->c"},
        {"reshape", {{5, 6}}, {5, 1, 6, 1}, "bd->be!dg!"},
        {"expand", {{1, 4, 1}, {3, 4, 5}}, {0}, "e!cf!,bcd?->bcd"},
        {"strided_slice", {{2, 9}}, {1, 0, 3}, "bc!->bd!"},
        {"concat", {{2, 3, 4}, {2, 3, 5}}, {2}, "bcd!,bce!->bcf!"},
        {"sum", {{2, 3, 4}}, {6}, "bcd->b"},
        {"sum", {{2, 3, 4}}, {2, 1}, "bcd->be!d"},
        {"mean", {{2, 3, 4}}, {6}, "bc!d!->b"},
        {"matmul", {{2, 3, 4, 5}, {2, 3, 5, 6}}, {0}, "bcde,bcef->bcdf"},
        {"matmul", {{3, 5, 4}, {3, 6, 5}}, {3}, "bdc,bed->bce"},
    };
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        struct hapt_tensor tensor[2] = {{0}};
        const struct hapt_graph graph = {.tensor = tensor, .tensor_count = 2};
        struct hapt_tensor made[HAPT_MAX_OUTPUTS] = {{0}};
        const struct hapt_op op = operator_of(cases[k].type, cases[k].shape, cases[k].integer, tensor);
        CHECK_OK(hapt_op_infer(&graph, &op, made));
        CHECK_MESSAGE(strcmp(hapt_op_signature_of(&graph, &op)->text, cases[k].signature) == 0, "%s: %s, not %s",
                      cases[k].type, hapt_op_signature_of(&graph, &op)->text, cases[k].signature);
    }
}

/* Attributes that fit no input. */
static void mistakes(void)
{
    static const struct {
        const char *type;
        int64_t shape[2][HAPT_MAX_DIMS + 1], integer[HAPT_MAX_ATTRIBUTES];
    } cases[] = {{"permute", {{2, 3}}, {0, 0}},
                 {"permute", {{2, 3}}, {0, 2}},
                 {"permute", {{2, 3}}, {-1, 0}},
                 {"reshape", {{2, 3}}, {4}},
                 {"reshape", {{2, 3}}, {-1, -1}},
                 {"reshape", {{2, 3}}, {-1, 4}},
                 {"reshape", {{2, 3}}, {-2, 3}},
                 {"reshape", {{2, 3}}, {0}},
                 {"reshape", {{2, 3}}, {INT64_MAX, 2}},
                 {"expand", {{2, 3}, {4, 3}}, {0}},
                 {"expand", {{1, 3}, {4, 4, 3}}, {0}},
                 {"expand", {{1, 3}}, {-4}},
                 {"strided_slice", {{2, 3}}, {2, 0, 1}},
                 {"strided_slice", {{2, 3}}, {1, 2, 2}},
                 {"strided_slice", {{2, 3}}, {1, 0, 4}},
                 {"strided_slice", {{2, 3}}, {1, 0, 3, -1}},
                 {"strided_slice", {{2, 3}}, {1, 0, 1, INT64_MAX}},
                 {"reshape", {{INT64_MAX, 3}}, {-1, 3}},
                 {"expand", {{1, 3}}, {INT64_MAX}},
                 {"pad", {{2, 3}}, {1, -1, 0}},
                 {"pad", {{2, 3}}, {1, INT64_MAX, 0}},
                 {"concat", {{2, 3}, {3, 3}}, {1}},
                 {"concat", {{2, 3}, {2, 3}}, {5}},
                 {"sum", {{2, 3}}, {0}},
                 {"sum", {{2, 3}}, {4}},
                 {"sum", {{2, 3}}, {1, 2}},
                 {"mean", {{2, 3}}, {-1}},
                 {"matmul", {{3}, {3}}, {0}},
                 {"matmul", {{2, 3}, {2, 3}}, {0}},
                 {"matmul", {{2, 3}, {3, 2}}, {4}},
                 {"clamp", {{2, 3}}, {0}}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        struct hapt_tensor tensor[2] = {{0}};
        const struct hapt_graph graph = {.tensor = tensor, .tensor_count = 2};
        struct hapt_tensor made[HAPT_MAX_OUTPUTS] = {{0}};
        const struct hapt_op op = operator_of(cases[k].type, cases[k].shape, cases[k].integer, tensor);
        const bool fails = hapt_op_infer(&graph, &op, made) == HAPT_ERR_INPUT;
        CHECK_MESSAGE(fails && strstr(hapt_fail_message(), "operator op"), "case %zu (%s) is taken: %s", k,
                      cases[k].type, hapt_fail_message());
        hapt_fail_reset();
    }
    /* A parameter is read through a copy. */
    struct hapt_tensor weight = {.name = "weight", .kind = HAPT_TENSOR_PARAMETER, .dims = 1, .shape = {3}},
                       made[HAPT_MAX_OUTPUTS] = {{0}};
    const struct hapt_graph graph = {.tensor = &weight, .tensor_count = 1};
    const struct hapt_op op = {.type = hapt_op_type_find("tanh"), .name = "op", .input_count = 1};
    CHECK(hapt_op_infer(&graph, &op, made) == HAPT_ERR_INPUT);
    CHECK(strstr(hapt_fail_message(), "reads parameter weight itself"));
    hapt_fail_reset();
}

int main(int argc, char **argv)
{
    kernels_init(&argc, &argv);
    for (HALF_TYPES(half)) {
        half_type = half;
        RUN(shapes);
    }
    RUN(signatures);
    RUN(mistakes);
    return kernels_finish();
}
