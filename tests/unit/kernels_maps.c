/* Functions of one element, products, differences and quotients, softmax: against double references. */
#include "graph_kernels.h"

static enum hapt_dtype half_type;

#define REFERENCE(name, expression)                               \
    static void name(const struct problem *p, double *out)        \
    {                                                             \
        for (int64_t i = 0; i < p->out_count; i++) {              \
            const double x = p->input[0]->value[i], *r = p->real; \
            out[i] = (expression);                                \
            (void)r;                                              \
        }                                                         \
    }
REFERENCE(sigmoid, 1 / (1 + exp(-x)))
REFERENCE(silu, x / (1 + exp(-x)))
REFERENCE(quick_gelu, x / (1 + exp(-1.702 * x)))
REFERENCE(tangent, tanh(x))
REFERENCE(hardsigmoid, fmin(fmax(x / 6 + 0.5, 0), 1))
REFERENCE(hardswish, x *fmin(fmax(x / 6 + 0.5, 0), 1))
REFERENCE(leaky_relu, x > 0 ? x : r[0] * x)
REFERENCE(elu, x > 0 ? x : r[0] * expm1(x))
REFERENCE(softplus, fmax(x, 0) + log1p(exp(-fabs(x))))
REFERENCE(clamped, fmin(fmax(x, r[0]), r[1]))
REFERENCE(exponential, exp(x))
REFERENCE(logarithm, log(x))
REFERENCE(sine, sin(x))
REFERENCE(cosine, cos(x))
REFERENCE(power, pow(x, r[0]))

#define OF_TWO(name, expression)                                               \
    static void name(const struct problem *p, double *out)                     \
    {                                                                          \
        for (int64_t i = 0; i < p->out_count; i++) {                           \
            const double a = p->input[0]->value[i], b = p->input[1]->value[i]; \
            out[i] = (expression);                                             \
        }                                                                      \
    }
OF_TWO(product, a *b)
OF_TWO(difference, a - b)
OF_TWO(quotient, a / b)

static void softmax(const struct problem *p, double *out)
{
    const struct hapt_view *x = &p->input[0]->view;
    const int64_t width = x->shape[x->dims - 1];
    for (int64_t r = 0; r < p->out_count / width; r++) {
        double sum = 0;
        for (int64_t c = 0; c < width; c++) sum += exp(p->input[0]->value[r * width + c]);
        for (int64_t c = 0; c < width; c++) out[r * width + c] = exp(p->input[0]->value[r * width + c]) / sum;
    }
}

static void functions(void)
{
    static const struct example examples[] = {
        {"sigmoid", 1, {{3, 7}}, .low = -8, .high = 8, .reference = sigmoid},
        {"silu", 1, {{2, 3, 33}}, .low = -8, .high = 8, .reference = silu},
        {"quick_gelu", 1, {{130}}, .low = -5, .high = 5, .reference = quick_gelu},
        {"tanh", 1, {{2, 1, 5, 9}}, .low = -4, .high = 4, .reference = tangent},
        {"hardsigmoid", 1, {{201}}, .low = -5, .high = 5, .reference = hardsigmoid},
        {"hardswish", 1, {{201}}, .low = -5, .high = 5, .reference = hardswish},
        {"leaky_relu", 1, {{9, 9}}, .real = {0.01}, .low = -3, .high = 3, .reference = leaky_relu},
        {"elu", 1, {{9, 9}}, .real = {1.3}, .low = -5, .high = 3, .reference = elu},
        {"softplus", 1, {{77}}, .low = -9, .high = 9, .reference = softplus},
        {"clamp", 1, {{6, 20}}, .real = {0, 6}, .low = -9, .high = 9, .reference = clamped},
        {"exp", 1, {{100}}, .low = -5, .high = 3, .reference = exponential},
        {"log", 1, {{100}}, .low = 0.2, .high = 9, .reference = logarithm},
        {"sin", 1, {{100}}, .low = -7, .high = 7, .reference = sine},
        {"cos", 1, {{100}}, .low = -7, .high = 7, .reference = cosine},
        {"power", 1, {{50}}, .real = {2}, .low = -3, .high = 3, .reference = power},
        {"power", 1, {{50}}, .real = {0}, .low = -2, .high = 2, .reference = power},
        {"power", 1, {{50}}, .real = {3}, .low = -2, .high = 2, .reference = power},
        {"power", 1, {{50}}, .real = {0.5}, .low = 0.1, .high = 3, .reference = power},
        {"power", 1, {{50}}, .real = {-0.5}, .low = 0.3, .high = 3, .reference = power},
        {"mul", 2, {{4, 5, 7}, {4, 5, 7}}, .low = -2, .high = 2, .reference = product},
        {"sub", 2, {{4, 35}, {4, 35}}, .low = -2, .high = 2, .reference = difference},
        {"div", 2, {{2, 2, 2, 2, 9}, {2, 2, 2, 2, 9}}, .low = 0.5, .high = 2, .reference = quotient},
        {"softmax", 1, {{3, 1}}, .low = -2, .high = 2, .reference = softmax},
        {"softmax", 1, {{2, 3, 5, 17}}, .low = -6, .high = 6, .reference = softmax},
        {"softmax", 1, {{4, 300}}, .low = -3, .high = 3, .reference = softmax, .tolerance = 3e-6},
    };
    check_examples(examples, sizeof examples / sizeof *examples, half_type);
}

/* Values that overflow if they are computed without care; NaN stays NaN. */
static void extremes(void)
{
    static const struct {
        const char *type;
        double low, high; /* results of -100 and 100 */
    } cases[] = {{"sigmoid", 0, 1},     {"silu", 0, 100},      {"quick_gelu", 0, 100}, {"tanh", -1, 1},
                 {"hardsigmoid", 0, 1}, {"hardswish", 0, 100}, {"softplus", 0, 100}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        struct tensor x = TENSOR(HAPT_F32, 0, 0, 3), y = TENSOR(HAPT_F32, 0, 0, 3);
        element_set(&x.view, 0, -100), element_set(&x.view, 1, 100), element_set(&x.view, 2, NAN);
        struct hapt_call call = {
            .input_count = 1, .output_count = 1, .input = {x.view}, .output = {y.view}, .threads = 1};
        kernel_run(cases[k].type, HAPT_F32, &call);
        CHECK_MESSAGE(fabs(element_get(&y.view, 0) - cases[k].low) < 1e-6 &&
                          fabs(element_get(&y.view, 1) - cases[k].high) < 1e-4 && isnan(element_get(&y.view, 2)),
                      "%s of -100, 100, NaN: %g, %g, %g", cases[k].type, element_get(&y.view, 0),
                      element_get(&y.view, 1), element_get(&y.view, 2));
        tensor_free(&x);
        tensor_free(&y);
    }
    struct tensor x = TENSOR(HAPT_F32, 1000, 1000, 2, 9), y = TENSOR(HAPT_F32, 0, 0, 2, 9);
    struct hapt_call call = {.input_count = 1, .output_count = 1, .input = {x.view}, .output = {y.view}, .threads = 1};
    kernel_run("softmax", HAPT_F32, &call);
    for (int i = 0; i < 18; i++) CHECK_NEAR(element_get(&y.view, i), 1.0 / 9, 1e-6);
    tensor_free(&x);
    tensor_free(&y);
}

/* The gradient of one factor alone, and a tensor that is read twice. */
static void single_gradients(void)
{
    static const char *const types[] = {"mul", "sub", "div", "concat", "matmul"};
    for (size_t k = 0; k < sizeof types / sizeof *types; k++)
        for (int frozen = 0; frozen < 3; frozen++) {
            struct hapt_arena arena;
            struct hapt_graph *graph;
            int copy[2], y;
            hapt_arena_init(&arena);
            CHECK_OK(hapt_graph_create(&arena, &graph));
            for (int i = 0; i < 2; i++) {
                const struct hapt_tensor tensor = {.name = i ? "b" : "a",
                                                   .kind = HAPT_TENSOR_PARAMETER,
                                                   .dims = 2,
                                                   .shape = {3, 3},
                                                   .trainable = i != frozen};
                int parameter;
                CHECK_OK(hapt_graph_add_tensor(graph, &tensor, &parameter));
                CHECK_OK(hapt_graph_add_op(graph, "copy", i ? "b2" : "a2", &parameter, 1, NULL, NULL, &copy[i]));
            }
            if (frozen == 2) copy[1] = copy[0];
            CHECK_OK(hapt_graph_add_op(graph, types[k], "y", copy, 2, NULL, NULL, &y));
            graph->loss = y;
            if (frozen == 2) {
                CHECK_FAILS(hapt_graph_differentiate(graph), HAPT_ERR_INPUT);
            } else {
                CHECK_OK(hapt_graph_differentiate(graph));
                CHECK(graph->tensor[copy[frozen]].gradient == -1 && graph->tensor[copy[!frozen]].gradient >= 0);
            }
            hapt_arena_release(&arena);
        }
}

int main(int argc, char **argv)
{
    kernels_init(&argc, &argv);
    for (HALF_TYPES(half)) {
        half_type = half;
        RUN(functions);
    }
    RUN(extremes);
    RUN(single_gradients);
    return kernels_finish();
}
