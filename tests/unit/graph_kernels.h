/*
 * For kernels_shape.c and kernels_maps.c: one operator in a graph of its own, behind copies of its inputs as
 * parameters. The graph is differentiated, and the kernels of all its operators run. So gradients that consist of
 * several operators are tested as a whole. The result is compared with a double reference, gradients with its central
 * differences.
 */
#ifndef HAPT_TEST_GRAPH_KERNELS_H
#define HAPT_TEST_GRAPH_KERNELS_H

#include "hapt/graph.h"
#include "hapt/ops.h"
#include "kernels.h"

enum { MOST_TENSORS = 64 };

struct example {
    const char *type;
    int inputs;
    int64_t shape[3][HAPT_MAX_DIMS + 1]; /* ends with 0 */
    int64_t integer[HAPT_MAX_ATTRIBUTES];
    double real[HAPT_MAX_ATTRIBUTES];
    double low, high; /* of the inputs */
    void (*reference)(const struct problem *problem, double *out);
    double tolerance; /* relative, of fp32; 0: 1e-6 */
};

/* Index of each dimension of element k. */
__attribute__((unused)) static void index_of(const struct hapt_view *view, int64_t k, int64_t *index)
{
    for (int d = view->dims - 1; d >= 0; d--) {
        index[d] = k % view->shape[d];
        k /= view->shape[d];
    }
}

__attribute__((unused)) static int64_t place_of(const struct hapt_view *view, const int64_t *index)
{
    int64_t k = 0;
    for (int d = 0; d < view->dims; d++) k = k * view->shape[d] + index[d];
    return k;
}

/* The graph: parameters, copies, the operator once or twice, with a sum of both. */
static int build_graph(const struct example *e, enum hapt_dtype dtype, bool twice, struct hapt_graph *graph)
{
    int copy[3], y[2];
    for (int i = 0; i < e->inputs; i++) {
        char name[16];
        int parameter;
        struct hapt_tensor tensor = {.kind = HAPT_TENSOR_PARAMETER, .dtype = dtype, .trainable = true, .name = name};
        for (; e->shape[i][tensor.dims]; tensor.dims++) tensor.shape[tensor.dims] = e->shape[i][tensor.dims];
        snprintf(name, sizeof name, "p%d", i);
        CHECK_OK(hapt_graph_add_tensor(graph, &tensor, &parameter));
        snprintf(name, sizeof name, "x%d", i);
        CHECK_OK(hapt_graph_add_op(graph, "copy", name, &parameter, 1, NULL, NULL, &copy[i]));
    }
    for (int k = 0; k <= twice; k++)
        CHECK_OK(hapt_graph_add_op(graph, e->type, k ? "again" : "y", copy, e->inputs, e->integer, e->real, &y[k]));
    if (twice) CHECK_OK(hapt_graph_add_op(graph, "add", "both", y, 2, NULL, NULL, &y[0]));
    graph->loss = y[0];
    CHECK_OK(hapt_graph_differentiate(graph));
    CHECK(graph->tensor_count <= MOST_TENSORS);
    return y[0];
}

static void run_operators(const struct hapt_graph *graph, struct tensor *value, int threads)
{
    for (int o = 0; o < graph->op_count; o++) {
        const struct hapt_op *op = &graph->op[o];
        struct hapt_call call = {.input_count = op->input_count,
                                 .output_count = op->output_count,
                                 .accumulate = op->accumulate,
                                 .threads = threads};
        memcpy(call.integer, op->integer, sizeof call.integer);
        memcpy(call.real, op->real, sizeof call.real);
        for (int i = 0; i < op->input_count; i++)
            if (op->input[i] >= 0) call.input[i] = value[op->input[i]].view;
        for (int k = 0; k < op->output_count; k++) call.output[k] = value[op->output[k]].view;
        kernel_run(hapt_op_type_at(op->type)->name, call.input[0].dtype, &call);
    }
}

static void check_example(const struct example *e, enum hapt_dtype dtype, bool twice, int threads)
{
    if (is_seen(dtype)) return;
    struct hapt_arena arena;
    struct hapt_graph *graph;
    struct tensor value[MOST_TENSORS];
    hapt_arena_init(&arena);
    CHECK_OK(hapt_graph_create(&arena, &graph));
    const int y = build_graph(e, dtype, twice, graph), dy = graph->tensor[y].gradient;
    for (int t = 0; t < graph->tensor_count; t++) {
        const struct hapt_tensor *tensor = &graph->tensor[t == dy ? y : t];
        int64_t shape[HAPT_MAX_DIMS + 1] = {0};
        memcpy(shape, tensor->shape, (size_t)tensor->dims * sizeof *shape);
        const bool given = tensor->kind == HAPT_TENSOR_PARAMETER;
        value[t] = tensor_make(tensor->dtype, shape, given ? e->low : -1, given ? e->high : 1);
    }
    struct problem problem = {.forward = e->reference, .out_count = value[y].count, .dy = value[dy].value};
    double *expected = malloc((size_t)value[y].count * sizeof *expected);
    char name[8];
    memcpy(problem.integer, e->integer, sizeof problem.integer);
    memcpy(problem.real, e->real, sizeof problem.real);
    for (int i = 0; i < e->inputs; i++) {
        snprintf(name, sizeof name, "p%d", i);
        problem.input[i] = &value[hapt_graph_find_tensor(graph, name)];
    }
    run_operators(graph, value, threads);
    e->reference(&problem, expected);
    const double exact = e->tolerance > 0 ? e->tolerance : 1e-6,
                 tolerance = dtype == HAPT_F32 ? exact : 2 * HALF_UNIT(dtype);
    const struct hapt_tensor *first = &graph->tensor[hapt_graph_find_tensor(graph, "y")];
    CHECK(first->dims == value[y].view.dims);
    check_close(&value[hapt_graph_find_tensor(graph, "y")].view, expected, tolerance, e->type);
    for (int i = 0; i < e->inputs; i++) {
        const int gradient = graph->tensor[problem.input[i] - value].gradient;
        if (i == 1 && strcmp(e->type, "expand") == 0) continue; /* only its shape is read */
        if (!CHECK_MESSAGE(gradient >= 0, "%s: no gradient of input %d", e->type, i)) continue;
        for (int64_t k = 0; k < value[gradient].count; k++) {
            const float before = (float)value[gradient].value[k]; /* gradients of parameters add */
            const double own = element_get(&value[gradient].view, k) - before;
            element_set(&value[gradient].view, k, twice ? own / 2 : own);
        }
        check_gradient(&problem, i, &value[gradient].view, NULL, 40, (dtype == HAPT_F32 ? 2 : 4) * tolerance, e->type);
    }
    for (int t = 0; t < graph->tensor_count; t++) tensor_free(&value[t]);
    free(expected);
    hapt_arena_release(&arena);
}

/* Each example in fp32 and in each half-precision type, once and with sums of gradients, on one thread and on two. */
static void check_examples(const struct example *examples, int count, enum hapt_dtype half)
{
    for (int k = 0; k < count; k++)
        for (int v = 0; v < 8 && !is_repeat(v & 4); v++)
            check_example(&examples[k], v & 1 ? half : HAPT_F32, v & 2, v & 4 ? 2 : 1);
}

#endif
