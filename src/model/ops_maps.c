/* Rows of the operator table: functions of one element, products and quotients of two, softmax. */
#include "ops_rows.h"

static enum hapt_status infer_clamp(const struct hapt_graph *graph, const struct hapt_op *op,
                                    struct hapt_tensor *output)
{
    (void)graph, (void)output;
    return op->real[0] < op->real[1] ? HAPT_OK : hapt_op_bad_attribute(op, "its limits are not in order");
}

enum hapt_status hapt_op_check_two(const struct hapt_graph *graph, int op)
{
    const int a = graph->op[op].input[0], b = graph->op[op].input[1];
    if (a != b || !hapt_gradient_needed(graph, a)) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, "let it read the result of the operator copy as well",
                     "operator %s reads tensor %s twice", graph->op[op].name, graph->tensor[a].name);
}

/* The other factor times dy. */
static enum hapt_status gradient_mul(struct hapt_graph *graph, int op)
{
    const int a = graph->op[op].input[0], b = graph->op[op].input[1], dy = hapt_gradient_incoming(graph, op);
    const int to_a[] = {dy, b}, to_b[] = {dy, a};
    HAPT_TRY(hapt_op_check_two(graph, op));
    if (hapt_gradient_needed(graph, a)) HAPT_TRY(hapt_gradient_append(graph, op, "mul", to_a, 2, &a, 1));
    return hapt_gradient_needed(graph, b) ? hapt_gradient_append(graph, op, "mul", to_b, 2, &b, 1) : HAPT_OK;
}

static enum hapt_status gradient_sub(struct hapt_graph *graph, int op)
{
    const int a = graph->op[op].input[0], b = graph->op[op].input[1], dy = hapt_gradient_incoming(graph, op);
    HAPT_TRY(hapt_op_check_two(graph, op));
    if (hapt_gradient_needed(graph, a)) HAPT_TRY(hapt_gradient_append(graph, op, "copy", &dy, 1, &a, 1));
    if (!hapt_gradient_needed(graph, b)) return HAPT_OK;
    HAPT_TRY(hapt_gradient_append(graph, op, "scale", &dy, 1, &b, 1));
    graph->op[graph->op_count - 1].real[0] = -1;
    return HAPT_OK;
}

/* y = a / b: da = dy / b, db = -dy y / b. */
static enum hapt_status gradient_div(struct hapt_graph *graph, int op)
{
    const int a = graph->op[op].input[0], b = graph->op[op].input[1], dy = hapt_gradient_incoming(graph, op);
    const int to_a[] = {dy, b}, to_b[] = {graph->op[op].output[0], b, dy};
    HAPT_TRY(hapt_op_check_two(graph, op));
    if (hapt_gradient_needed(graph, a)) HAPT_TRY(hapt_gradient_append(graph, op, "div", to_a, 2, &a, 1));
    return hapt_gradient_needed(graph, b) ? hapt_gradient_append(graph, op, "div_db", to_b, 3, &b, 1) : HAPT_OK;
}

/* y = f(x), and its gradient from x and dy. */
#define MAP(function, flops, text, ...)                                                                         \
    {.name = function,                                                                                          \
     .signature = "...->...",                                                                                   \
     .dtypes = "c->c",                                                                                          \
     .flops_per_element = flops,                                                                                \
     .reads_no_parameter = true,                                                                                \
     .backward = function "_dx",                                                                                \
     .backward_operands = "0d>0",                                                                               \
     .attributes = text,                                                                                        \
     __VA_ARGS__},                                                                                              \
    {                                                                                                           \
        .name = function "_dx", .signature = "...,...->...", .dtypes = "cc->c", .flops_per_element = flops + 2, \
        .attributes = "x, dy -> dx; as " function                                                               \
    }

/* clang-format off */
const struct hapt_op_type hapt_ops_maps[] = {
    MAP("sigmoid", 8, "x -> 1 / (1 + e^-x)"),
    MAP("silu", 9, "x -> x sigmoid(x)"),
    MAP("quick_gelu", 10, "x -> x sigmoid(1.702 x) (CLIP)"),
    MAP("tanh", 8, "x -> tanh(x)"),
    MAP("hardsigmoid", 3, "x -> x / 6 + 1 / 2, between 0 and 1"),
    MAP("hardswish", 4, "x -> x hardsigmoid(x)"),
    MAP("leaky_relu", 2, "x -> x, or real[0] x where it is negative"),
    MAP("elu", 8, "x -> x, or real[0] (e^x - 1) where it is negative"),
    MAP("softplus", 12, "x -> ln(1 + e^x)"),
    MAP("clamp", 2, "x -> x, at least real[0] and at most real[1]", .infer = infer_clamp),
    MAP("exp", 7, "x -> e^x"),
    MAP("log", 8, "x -> ln(x)"),
    MAP("sin", 8, "x -> sin(x)"),
    MAP("cos", 8, "x -> cos(x)"),
    MAP("power", 16, "x -> x to the power of real[0]"),
    {.name = "mul", .signature = "...,...->...", .dtypes = "cc->c", .flops_per_element = 1, .reads_no_parameter = true,
     .gradient = gradient_mul, .attributes = "a, b -> a b, element by element (expand repeats a smaller one)"},
    {.name = "sub", .signature = "...,...->...", .dtypes = "cc->c", .flops_per_element = 1, .linear = true, .reads_no_parameter = true,
     .gradient = gradient_sub, .attributes = "a, b -> a - b"},
    {.name = "div", .signature = "...,...->...", .dtypes = "cc->c", .flops_per_element = 4, .reads_no_parameter = true,
     .gradient = gradient_div, .attributes = "a, b -> a / b"},
    {.name = "div_db", .signature = "...,...,...->...", .dtypes = "ccc->c", .flops_per_element = 6, .attributes = "y, b, dy -> db"},
    {.name = "softmax", .signature = "...d!->...d!", .dtypes = "c->c", .flops_per_element = 10, .reads_no_parameter = true,
     .backward = "softmax_dx", .backward_operands = "Ad>0", .attributes = "x -> e^x over its sum along the last dimension"},
    {.name = "softmax_dx", .signature = "...d!,...d!->...d!", .dtypes = "cc->c", .flops_per_element = 4, .attributes = "y, dy -> dx"},
    {.name = NULL},
};
/* clang-format on */
