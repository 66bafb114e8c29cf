/* The operator table compared with its signatures, costs by hand, and graphs that must be refused. */
#include "test.h"

#include "../../src/model/signature.h"
#include "hapt/graph.h"
#include "hapt/ops.h"

static struct hapt_arena arena;

static void signatures_parse(void)
{
    struct hapt_signature signature;
    CHECK(hapt_signature_parse("bti,i!o,o?->bto,", &signature));
    CHECK(signature.input_count == 3 && signature.output_count == 2);
    CHECK(signature.input[0].dims == 3 && signature.input[0].letter[2] == 'i' && signature.input[0].shardable[2]);
    CHECK(signature.input[1].dims == 2 && !signature.input[1].shardable[0] && signature.input[1].shardable[1]);
    CHECK(signature.input[2].optional && !signature.input[1].optional);
    CHECK(signature.output[1].dims == 0);
    static const char *const bad[] = {"",        "bt",     "bt-bt",          "bt->",   "bT->b",  "abcdef->a",
                                      "a->b->c", "a!!->a", "a,b->c,d,e,f,g", "a?b->c", "a ,b->c"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        const bool accepted = hapt_signature_parse(bad[i], &signature);
        CHECK_MESSAGE(accepted == !strcmp(bad[i], "bt->"), "\"%s\" is %s", bad[i], accepted ? "accepted" : "refused");
    }
}

/* Each row has a valid signature, one type letter per operand and a name that can be looked up. Gradient rules exist
 * only where they make sense. */
static void table_is_consistent(void)
{
    CHECK(hapt_op_type_find("no_such_operator") == -1);
    for (int type = 0; type < hapt_op_type_count(); type++) {
        const struct hapt_op_type *row = hapt_op_type_at(type);
        const struct hapt_signature *signature = hapt_op_signature(type);
        CHECK(hapt_op_type_find(row->name) == type);
        CHECK(strlen(row->dtypes) == (size_t)(signature->input_count + 2 + signature->output_count));
        CHECK(!strncmp(row->dtypes + signature->input_count, "->", 2));
        CHECK(row->attributes && row->attributes[0]);
        for (int i = 0; i < signature->input_count; i++) CHECK(strchr("icf", row->dtypes[i]) != NULL);
        for (int o = 0; o < signature->output_count; o++) {
            const char code = row->dtypes[signature->input_count + 2 + o];
            /* Gradients flow through the first output, so it is floating point. */
            CHECK(strchr(o == 0 ? "cf" : "icf", code) != NULL);
        }
        /* A microbatch can always be split into rows: letter b can be sharded in every operand that has it. */
        for (int i = 0; i < signature->input_count; i++) {
            for (int d = 0; d < signature->input[i].dims; d++) {
                CHECK(signature->input[i].letter[d] != 'b' || signature->input[i].shardable[d]);
            }
        }
    }
}

static int tensor(struct hapt_graph *graph, const char *name, enum hapt_tensor_kind kind, enum hapt_tensor_role role,
                  enum hapt_dtype dtype, int dims, int64_t a, int64_t b)
{
    int index = -1;
    const struct hapt_tensor made = {.name = name,
                                     .kind = kind,
                                     .role = role,
                                     .dtype = dtype,
                                     .dims = dims,
                                     .shape = {a, b},
                                     .trainable = kind == HAPT_TENSOR_PARAMETER};
    CHECK_OK(hapt_graph_add_tensor(graph, &made, &index));
    return index;
}
#define PARAMETER(name, dims, a, b) tensor(graph, name, HAPT_TENSOR_PARAMETER, HAPT_ROLE_NONE, dtype, dims, a, b)

enum { B = 2, T = 6, D = 12, V = 10, H = 3 };

static int add(struct hapt_graph *graph, const char *type, const char *name, const int *input, int count,
               const int64_t *integer, const double *real)
{
    int output[HAPT_MAX_OUTPUTS] = {-1};
    CHECK_OK(hapt_graph_add_op(graph, type, name, input, count, integer, real, output));
    return output[0];
}

/* embedding, norm, qkv, attention, gelu, add, head, loss. */
static struct hapt_graph *sample(enum hapt_dtype dtype)
{
    struct hapt_graph *graph = NULL;
    const int64_t attention[HAPT_MAX_ATTRIBUTES] = {H, 1};
    const double epsilon[HAPT_MAX_ATTRIBUTES] = {1e-5};
    CHECK_OK(hapt_graph_create(&arena, &graph));
    const int tokens = tensor(graph, "tokens", HAPT_TENSOR_INPUT, HAPT_ROLE_TOKENS, HAPT_I32, 2, B, T);
    const int targets = tensor(graph, "targets", HAPT_TENSOR_INPUT, HAPT_ROLE_TARGETS, HAPT_I32, 2, B, T);
    const int table = PARAMETER("table", 2, V, D), gamma = PARAMETER("gamma", 1, D, 0),
              beta = PARAMETER("beta", 1, D, 0);
    const int weight = PARAMETER("weight", 2, D, 3 * D);
    const int x = add(graph, "embedding", "x", (const int[]){tokens, table}, 2, NULL, NULL);
    const int y = add(graph, "layer_norm", "norm", (const int[]){x, gamma, beta}, 3, NULL, epsilon);
    const int qkv = add(graph, "linear", "qkv", (const int[]){y, weight, -1}, 3, NULL, NULL);
    const int out = add(graph, "attention", "attention", &qkv, 1, attention, NULL);
    const int act = add(graph, "gelu", "gelu", &out, 1, NULL, NULL);
    const int sum = add(graph, "add", "sum", (const int[]){x, act}, 2, NULL, NULL);
    const int logits = add(graph, "linear_t", "logits", (const int[]){sum, table}, 2, NULL, NULL);
    graph->loss = add(graph, "cross_entropy", "loss", (const int[]){logits, targets}, 2, NULL, NULL);
    CHECK_OK(hapt_graph_check(graph));
    return graph;
}

static const struct hapt_tensor *named(const struct hapt_graph *graph, const char *name)
{
    const int index = hapt_graph_find_tensor(graph, name);
    CHECK_MESSAGE(index >= 0, "no tensor %s", name);
    return &graph->tensor[index < 0 ? 0 : index];
}

static void shapes_are_inferred(void)
{
    for (int bf16 = 0; bf16 < 2; bf16++) {
        const enum hapt_dtype dtype = bf16 ? HAPT_BF16 : HAPT_F32;
        const struct hapt_graph *graph = sample(dtype);
        const struct hapt_tensor *qkv = named(graph, "qkv"), *lse = named(graph, "attention.1"),
                                 *loss = named(graph, "loss");
        CHECK(qkv->dims == 3 && qkv->shape[0] == B && qkv->shape[1] == T && qkv->shape[2] == 3 * D &&
              qkv->dtype == dtype);
        CHECK(lse->dims == 3 && lse->shape[1] == H && lse->shape[2] == T && lse->dtype == HAPT_F32);
        CHECK(named(graph, "attention")->shape[2] == D);
        CHECK(loss->dims == 1 && loss->shape[0] == 1 && loss->dtype == HAPT_F32);
        CHECK(named(graph, "norm.2")->dims == 2 && named(graph, "norm.2")->dtype == HAPT_F32);
        CHECK(hapt_tensor_bytes(qkv) == (size_t)B * T * 3 * D * (bf16 ? 2 : 4));
        CHECK(named(graph, "logits")->shape[2] == V);
    }
}

static const struct hapt_op *op_named(const struct hapt_graph *graph, const char *name)
{
    for (int op = 0; op < graph->op_count; op++) {
        if (!strcmp(graph->op[op].name, name)) return &graph->op[op];
    }
    CHECK_MESSAGE(false, "no operator %s", name);
    return &graph->op[0];
}

static void costs_by_hand(void)
{
    struct hapt_graph *graph = sample(HAPT_F32);
    CHECK_OK(hapt_graph_differentiate(graph));
    CHECK_OK(hapt_graph_check(graph));
    const double product = 2.0 * B * T * D * 3 * D;
    CHECK(hapt_op_flops(graph, op_named(graph, "qkv"), 1) == product);
    CHECK(hapt_op_flops(graph, op_named(graph, "qkv.linear_dx"), 1) == product);
    CHECK(hapt_op_flops(graph, op_named(graph, "qkv.linear_dw"), 0.5) == product / 2);
    CHECK(hapt_op_flops(graph, op_named(graph, "logits"), 1) == 2.0 * B * T * D * V);
    /* QK^T and PV over the lower triangle; softmax takes 5 operations per score. */
    const double scores = 0.5 * B * T * T;
    CHECK_NEAR(hapt_op_flops(graph, op_named(graph, "attention"), 1), scores * (4 * D + 5 * H), 1e-9);
    CHECK(hapt_op_flops(graph, op_named(graph, "sum"), 1) == B * T * D);
    /* x and y shrink with the rows; the weight does not. */
    const double rows = 4.0 * (B * T * D + B * T * 3 * D), weight = 4.0 * D * 3 * D;
    CHECK(hapt_op_bytes(graph, op_named(graph, "qkv"), 1) == rows + weight);
    CHECK(hapt_op_bytes(graph, op_named(graph, "qkv"), 0.5) == rows / 2 + weight);
    /* 12 tokens read at most 12 rows of the table, which has 10. */
    CHECK(hapt_op_bytes(graph, op_named(graph, "x"), 1) == 4.0 * (B * T + V * D + B * T * D));
    CHECK(hapt_op_bytes(graph, op_named(graph, "x"), 0.5) == 4.0 * (B * T + B * T * D + B * T * D) / 2);
    /* The gradient of the weight is read and written. */
    CHECK(hapt_op_bytes(graph, op_named(graph, "qkv.linear_dw"), 1) == rows + 2 * weight);
}

/* Failures during construction. */
static void additions_are_checked(void)
{
    struct hapt_graph *graph = sample(HAPT_F32);
    const enum hapt_dtype dtype = HAPT_F32;
    const int norm = hapt_graph_find_tensor(graph, "norm"), tokens = hapt_graph_find_tensor(graph, "tokens");
    const int wrong = PARAMETER("wrong", 2, D + 1, D), weight = hapt_graph_find_tensor(graph, "weight");
    const int half = tensor(graph, "half", HAPT_TENSOR_PARAMETER, HAPT_ROLE_NONE, HAPT_BF16, 2, D, D);
    const int64_t heads[HAPT_MAX_ATTRIBUTES] = {5, 1}, kind[HAPT_MAX_ATTRIBUTES] = {2};
    const double epsilon[HAPT_MAX_ATTRIBUTES] = {-1};
    const int gamma = hapt_graph_find_tensor(graph, "gamma"), qkv = hapt_graph_find_tensor(graph, "qkv");
    int index;
#define REFUSED(type, count, integer, real, ...)                                                               \
    CHECK_FAILS(hapt_graph_add_op(graph, type, "bad", (const int[]){__VA_ARGS__}, count, integer, real, NULL), \
                HAPT_ERR_INPUT)
    REFUSED("linear", 2, NULL, NULL, norm, wrong);
    REFUSED("linear", 2, NULL, NULL, norm, half);
    REFUSED("linear", 2, NULL, NULL, norm, gamma);
    REFUSED("linear", 2, NULL, NULL, tokens, weight);
    REFUSED("linear", 1, NULL, NULL, norm);
    REFUSED("linear", 2, NULL, NULL, norm, 1000);
    REFUSED("linear", 2, NULL, NULL, norm, -2);
    REFUSED("linear", 4, NULL, NULL, norm, weight, gamma, gamma);
    REFUSED("add", 2, NULL, NULL, norm, qkv);
    REFUSED("attention", 1, heads, NULL, qkv);
    REFUSED("attention", 1, NULL, NULL, norm);
    REFUSED("gelu", 1, kind, NULL, norm);
    REFUSED("layer_norm", 3, NULL, epsilon, norm, gamma, gamma);
    REFUSED("convolution", 1, NULL, NULL, norm);
#undef REFUSED
    CHECK_FAILS(hapt_graph_add_tensor(graph, &(struct hapt_tensor){.name = "norm"}, &index), HAPT_ERR_INPUT);
    CHECK_FAILS(hapt_graph_add_tensor(graph, &(struct hapt_tensor){.name = ""}, &index), HAPT_ERR_INPUT);
}

/* One fault at a time in an otherwise valid graph. The message names the faulty item. */
static void faults_are_named(void)
{
#define FAULT(culprit, ...)                                                                                          \
    do {                                                                                                             \
        struct hapt_graph *graph = sample(HAPT_F32);                                                                 \
        __VA_ARGS__;                                                                                                 \
        CHECK(hapt_graph_check(graph) == HAPT_ERR_INPUT);                                                            \
        CHECK_MESSAGE(strstr(hapt_fail_message(), culprit), "\"%s\" does not say %s", hapt_fail_message(), culprit); \
        hapt_fail_reset();                                                                                           \
    } while (0)
#define AT(name) hapt_graph_find_tensor(graph, name)
#define OP(name) ((struct hapt_op *)op_named(graph, name))
#define TENSOR(name) graph->tensor[AT(name)]
    FAULT("cycle", OP("norm")->input[0] = AT("gelu"));
    FAULT("norm", OP("norm")->input[0] = AT("gelu"));
    FAULT("cycle", OP("sum")->input[0] = AT("sum"));
    FAULT("topological", struct hapt_op swap = graph->op[1]; graph->op[1] = graph->op[2]; graph->op[2] = swap;
          TENSOR("norm").producer = TENSOR("norm.1").producer = TENSOR("norm.2").producer = 2;
          TENSOR("qkv").producer = 1);
    FAULT("table2", tensor(graph, "table2", HAPT_TENSOR_PARAMETER, HAPT_ROLE_NONE, HAPT_F32, 2, V, D));
    FAULT("gelu", OP("sum")->input[1] = AT("x"));
    FAULT("ghost", int ghost = tensor(graph, "ghost", HAPT_TENSOR_ACTIVATION, HAPT_ROLE_NONE, HAPT_F32, 2, 4, 4);
          (void)ghost);
    FAULT("another producer", OP("gelu")->output[0] = AT("attention"));
    FAULT("not an activation", OP("gelu")->output[0] = AT("gamma"));
    FAULT("gelu", TENSOR("gelu").shape[1] = T + 1);
    FAULT("qkv", TENSOR("qkv").dtype = HAPT_BF16);
    FAULT("weight", TENSOR("weight").shape[0] = D + 1);
    FAULT("x", TENSOR("x").shape[2] = 0);
    FAULT("table", TENSOR("table").shape[0] = INT64_MAX / 2);
    FAULT("table", TENSOR("table").shape[0] = -3);
    FAULT("table", TENSOR("table").dims = 6);
    FAULT("table", TENSOR("table").dims = 0);
    FAULT("table", TENSOR("table").init_std = NAN);
    FAULT("tokens", TENSOR("tokens").role = HAPT_ROLE_NONE);
    FAULT("tokens", TENSOR("tokens").dtype = HAPT_F32);
    FAULT("sum", OP("sum")->input[0] = 999);
    FAULT("sum", OP("sum")->input[1] = -1);
    FAULT("sum", OP("sum")->output[0] = -1);
    FAULT("sum", OP("sum")->output[0] = 999);
    FAULT("sum", OP("sum")->type = 12345);
    FAULT("sum", OP("sum")->input_count = 3);
    FAULT("norm", OP("norm")->output_count = 2);
    FAULT("norm", OP("norm")->real[3] = INFINITY);
    FAULT("attention", OP("attention")->integer[0] = 0);
    FAULT("twice", TENSOR("gamma").name = "beta");
    FAULT("loss", graph->loss = -1);
    FAULT("gelu", graph->loss = AT("gelu"));
    FAULT("loss.1", graph->loss = AT("loss.1"));
    FAULT("0 operators", graph->forward_count = graph->op_count = 0);
#undef FAULT
#undef AT
#undef OP
#undef TENSOR
}

/* Faults in the backward part. */
static void backward_faults(void)
{
    for (int fault = 0; fault < 5; fault++) {
        struct hapt_graph *graph = sample(HAPT_F32);
        CHECK_OK(hapt_graph_differentiate(graph));
        CHECK_OK(hapt_graph_check(graph));
        struct hapt_op *first = &graph->op[graph->forward_count],
                       *dw = (struct hapt_op *)op_named(graph, "qkv.linear_dw");
        if (fault == 0) first->accumulate = 1;
        if (fault == 1) dw->accumulate = 0;
        if (fault == 2) first->forward_op = 0;
        if (fault == 3) first->output[0] = graph->op[0].output[0];
        if (fault == 4) first->input[0] = hapt_graph_find_tensor(graph, "weight.grad");
        CHECK_FAILS(hapt_graph_check(graph), HAPT_ERR_INPUT);
    }
}

/* A gradient through a second output would be lost, so it is refused. */
static void second_outputs_carry_no_gradient(void)
{
    struct hapt_graph *graph = NULL;
    const enum hapt_dtype dtype = HAPT_F32;
    const int64_t one_head[HAPT_MAX_ATTRIBUTES] = {1, 0};
    int output[HAPT_MAX_OUTPUTS];
    CHECK_OK(hapt_graph_create(&arena, &graph));
    const int tokens = tensor(graph, "tokens", HAPT_TENSOR_INPUT, HAPT_ROLE_TOKENS, HAPT_I32, 2, 2, 4);
    const int targets = tensor(graph, "targets", HAPT_TENSOR_INPUT, HAPT_ROLE_TARGETS, HAPT_I32, 2, 2, 1);
    const int table = PARAMETER("table", 2, V, D);
    const int x = add(graph, "embedding", "x", (const int[]){tokens, table}, 2, NULL, NULL);
    CHECK_OK(hapt_graph_add_op(graph, "attention", "attention", &x, 1, one_head, NULL, output));
    const int lse = output[1]; /* [2][1][4], as if it were logits */
    graph->loss = add(graph, "cross_entropy", "loss", (const int[]){lse, targets}, 2, NULL, NULL);
    CHECK_FAILS(hapt_graph_differentiate(graph), HAPT_ERR_INPUT);
}

/* A convolution, batch norm and a classifier. `extra`: another operator reads the mean as well. */
static enum hapt_status normed_graph(bool extra, int64_t count_of_mean)
{
    struct hapt_graph *graph;
    struct hapt_tensor images = {
        .name = "images", .kind = HAPT_TENSOR_INPUT, .role = HAPT_ROLE_IMAGES, .dims = 4, .shape = {2, 3, 4, 4}};
    struct hapt_tensor labels = {.name = "labels",
                                 .kind = HAPT_TENSOR_INPUT,
                                 .role = HAPT_ROLE_LABELS,
                                 .dtype = HAPT_I32,
                                 .dims = 1,
                                 .shape = {2}};
    struct hapt_tensor kernel = {
        .name = "w", .kind = HAPT_TENSOR_PARAMETER, .trainable = true, .dims = 4, .shape = {5, 3, 1, 1}};
    struct hapt_tensor gamma = {.name = "gamma",
                                .kind = HAPT_TENSOR_PARAMETER,
                                .trainable = true,
                                .dims = 1,
                                .shape = {5}},
                       beta = gamma;
    const int64_t stride[HAPT_MAX_ATTRIBUTES] = {1}, count[HAPT_MAX_ATTRIBUTES] = {32},
                  of_mean[HAPT_MAX_ATTRIBUTES] = {count_of_mean};
    int x[3] = {0, 0, -1}, norm[5], loss[2], made[HAPT_MAX_OUTPUTS];
    beta.name = "beta";
    HAPT_TRY(hapt_graph_create(&arena, &graph));
    HAPT_TRY(hapt_graph_add_tensor(graph, &images, &x[0]));
    HAPT_TRY(hapt_graph_add_tensor(graph, &labels, &loss[1]));
    HAPT_TRY(hapt_graph_add_tensor(graph, &kernel, &x[1]));
    HAPT_TRY(hapt_graph_add_tensor(graph, &gamma, &norm[3]));
    HAPT_TRY(hapt_graph_add_tensor(graph, &beta, &norm[4]));
    HAPT_TRY(hapt_graph_add_op(graph, "conv2d", "conv", x, 3, stride, NULL, &norm[0]));
    HAPT_TRY(hapt_graph_add_op(graph, "batch_mean", "mean", norm, 1, of_mean, NULL, &norm[1]));
    HAPT_TRY(hapt_graph_add_op(graph, "batch_variance", "variance", norm, 2, count, NULL, &norm[2]));
    if (extra) HAPT_TRY(hapt_graph_add_op(graph, "relu", "reader", &norm[1], 1, NULL, NULL, made));
    HAPT_TRY(hapt_graph_add_op(graph, "batch_norm", "norm", norm, 5, count, NULL, made));
    HAPT_TRY(hapt_graph_add_op(graph, "mean_pool", "pool", made, 1, NULL, NULL, loss));
    HAPT_TRY(hapt_graph_add_op(graph, "cross_entropy", "loss", loss, 2, NULL, NULL, made));
    graph->loss = made[0];
    return hapt_graph_differentiate(graph);
}

/* Batch norm's gradient includes those of its statistics. Gradients of other readers of the statistics would be
 * lost. */
static void statistics_belong_to_one_norm(void)
{
    CHECK_OK(normed_graph(false, 32));
    CHECK_FAILS(normed_graph(true, 32), HAPT_ERR_INPUT);
    CHECK_FAILS(normed_graph(false, 64), HAPT_ERR_INPUT);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    hapt_arena_init(&arena);
    RUN(signatures_parse);
    RUN(table_is_consistent);
    RUN(shapes_are_inferred);
    RUN(costs_by_hand);
    RUN(additions_are_checked);
    RUN(faults_are_named);
    RUN(backward_faults);
    RUN(second_outputs_carry_no_gradient);
    RUN(statistics_belong_to_one_norm);
    hapt_arena_release(&arena);
    return test_finish();
}
