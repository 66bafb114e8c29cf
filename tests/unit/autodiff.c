/*
 * Differentiation. Gradients of all parameters are compared with central finite differences of the interpreter's loss,
 * for GPTs and for random graphs full of additions. Graphs cut into stages, each with its own memory, must give exactly
 * the uncut result. Losses of a GPT are compared with PyTorch's.
 */
#include "interpreter.h"

#include "hapt/model.h"

static double loss_of(const struct subject *subject)
{
    const struct hapt_graph *graph = subject->graph;
    const struct memory memory = memory_with(subject);
    for (int op = 0; op < graph->forward_count; op++) run_op(graph, op, &memory);
    return memory.value[graph->loss][0];
}

/* The scale of the seed: gradients are those of scale x loss. */
static void check_gradients(const struct subject *subject, const char *what)
{
    const struct hapt_graph *graph = subject->graph;
    const struct memory memory = memory_with(subject);
    const double scale = 0.25, step = 2e-5;
    long checked = 0;
    for (int op = 0; op < graph->op_count; op++) run_op(graph, op, &memory);
    struct hapt_arena kept = arena;
    hapt_arena_init(&arena); /* the forward passes below come and go */
    for (int t = 0; t < graph->tensor_count; t++) {
        if (graph->tensor[t].kind != HAPT_TENSOR_PARAMETER) continue;
        if (!CHECK_MESSAGE(graph->tensor[t].gradient >= 0, "%s: %s has no gradient", what, graph->tensor[t].name))
            continue;
        const double *gradient = memory.value[graph->tensor[t].gradient];
        double *value = subject->given[t];
        const int64_t count = elements(graph, t), stride = test_long() || count < 40 ? 1 : count / 37;
        for (int64_t i = 0; i < count; i += stride) {
            const double here = value[i];
            double loss[5]; /* at here + (k - 2) steps */
            for (int k = 0; k < 5; k++) {
                value[i] = here + (k - 2) * step;
                loss[k] = loss_of(subject);
            }
            value[i] = here;
            hapt_arena_reset(&arena);
            const double expected = scale * (8 * (loss[3] - loss[1]) - (loss[4] - loss[0])) / (12 * step);
            /* Truncation is of order step^4, cancellation of order 1e-16 loss / step: both below 1e-9 here. */
            CHECK_MESSAGE(fabs(gradient[i] - expected) <= 1e-9 * (1 + fabs(expected)),
                          "%s: gradient of %s[%ld] is %.12g, not %.12g", what, graph->tensor[t].name, (long)i,
                          gradient[i], expected);
            checked++;
        }
    }
    hapt_arena_release(&arena);
    arena = kept;
    CHECK(checked > 0);
}

/* The stage of each forward operator. */
static int stage_of(const int *end, int op)
{
    int stage = 0;
    while (op >= end[stage]) stage++;
    return stage;
}

/* Runs the operators of one stage in the memory of that stage. Tensors that others wrote last are copied from the
 * stage that wrote them last. holder[t]: the stage that wrote tensor t last, -1: none. */
static void run_stage(const struct hapt_graph *graph, struct memory *memory, const int *end, int stage, bool backward,
                      int *holder, int *received)
{
    const int first = backward ? graph->forward_count : 0, last = backward ? graph->op_count : graph->forward_count;
    for (int index = first; index < last; index++) {
        const struct hapt_op *op = &graph->op[index];
        if (stage_of(end, op->forward_op) != stage) continue;
        for (int i = 0; i < op->input_count + op->output_count; i++) {
            const int t = i < op->input_count ? op->input[i] : op->output[i - op->input_count];
            if (t < 0 || holder[t] < 0 || holder[t] == stage || received[t] == stage) continue;
            const int64_t count = elements(graph, t);
            double *copy = hapt_arena_alloc(&arena, (size_t)count, sizeof *copy);
            memcpy(copy, memory[holder[t]].value[t], (size_t)count * sizeof *copy);
            memory[stage].value[t] = copy;
            received[t] = stage;
        }
        run_op(graph, index, &memory[stage]);
        for (int o = 0; o < op->output_count; o++) {
            const struct hapt_tensor *tensor = &graph->tensor[op->output[o]];
            const bool parameter = tensor->primal >= 0 && graph->tensor[tensor->primal].kind == HAPT_TENSOR_PARAMETER;
            if (!parameter) holder[op->output[o]] = stage;
        }
    }
}

/* Cuts before the forward operators end[0], end[1], ...; the last end is forward_count. Gradients of parameters: the
 * sum over stages, last stage first, in the order in which one device adds them. */
static void check_cut(const struct subject *subject, const int *end, int stages, const struct memory *whole,
                      const char *what)
{
    const struct hapt_graph *graph = subject->graph;
    struct memory memory[64];
    int *holder = hapt_arena_alloc(&arena, (size_t)graph->tensor_count, sizeof *holder);
    int *received = hapt_arena_alloc(&arena, (size_t)graph->tensor_count, sizeof *received);
    for (int stage = 0; stage < stages; stage++) memory[stage] = memory_with(subject);
    for (int t = 0; t < graph->tensor_count; t++) holder[t] = received[t] = -1;
    for (int stage = 0; stage < stages; stage++) run_stage(graph, memory, end, stage, false, holder, received);
    /* One gradient tensor per stage: a tied parameter's is continued from the stage behind, as one device would add it.
     */
    for (int stage = stages - 1; stage >= 0; stage--) {
        for (int t = 0; stage + 1 < stages && t < graph->tensor_count; t++) {
            if (graph->tensor[t].kind != HAPT_TENSOR_PARAMETER || graph->tensor[t].gradient < 0) continue;
            const int gradient = graph->tensor[t].gradient;
            memcpy(memory[stage].value[gradient], memory[stage + 1].value[gradient],
                   (size_t)elements(graph, gradient) * sizeof(double));
        }
        run_stage(graph, memory, end, stage, true, holder, received);
    }
    for (int t = 0; t < graph->tensor_count; t++) {
        if (graph->tensor[t].kind != HAPT_TENSOR_PARAMETER || graph->tensor[t].gradient < 0) continue;
        const int gradient = graph->tensor[t].gradient;
        const bool equal = !memcmp(memory[0].value[gradient], whole->value[gradient],
                                   (size_t)elements(graph, gradient) * sizeof(double));
        CHECK_MESSAGE(equal, "%s cut into %d stages (first end %d): gradient of %s differs", what, stages, end[0],
                      graph->tensor[t].name);
    }
}

static void check_all_cuts(const struct subject *subject, const char *what)
{
    const struct hapt_graph *graph = subject->graph;
    const struct memory whole = memory_with(subject);
    for (int op = 0; op < graph->op_count; op++) run_op(graph, op, &whole);
    struct hapt_arena kept = arena;
    hapt_arena_init(&arena);
    for (int cut = 1; cut < graph->forward_count; cut++) {
        check_cut(subject, (const int[]){cut, graph->forward_count}, 2, &whole, what);
        hapt_arena_reset(&arena);
    }
    int end[64];
    for (int width = 1; width <= 3; width++) { /* every operator a stage of its own, and wider ones */
        int stages = 0;
        for (int op = width; op < graph->forward_count; op += width) end[stages++] = op;
        end[stages++] = graph->forward_count;
        check_cut(subject, end, stages, &whole, what);
        hapt_arena_reset(&arena);
    }
    hapt_arena_release(&arena);
    arena = kept;
}

static struct hapt_model *gpt(const char *tied, const char *layers, const char *dropout)
{
    const char *argv[] = {"hapt", "model",     "gpt",  "--output",     "x.h5", "--layers",
                          layers, "--hidden",  "6",    "--heads",      "2",    "--sequence",
                          "4",    "--vocab",   "7",    "--microbatch", "2",    "--tied-embeddings",
                          tied,   "--dropout", dropout};
    struct hapt_config *config = NULL;
    struct hapt_model *model = NULL;
    CHECK_OK(hapt_config_parse((int)(sizeof argv / sizeof argv[0]), (char **)argv, &arena, &config));
    CHECK_OK(hapt_model_build("gpt", config, &arena, &model));
    if (!model) exit(1);
    return model;
}

static void gpt_gradients(void)
{
    static const char *const what[] = {"untied gpt", "tied gpt", "gpt with dropout"};
    for (int k = 0; k < 3; k++) {
        const struct hapt_model *model = gpt(k ? "yes" : "no", "2", k == 2 ? "0.3" : "0");
        const struct subject subject = subject_of(model->graph, 7, 11);
        check_gradients(&subject, what[k]);
        check_all_cuts(&subject, what[k]);
    }
}

/* The residual stream has one gradient tensor and no copies. */
static void gpt_shares_the_residual_gradient(void)
{
    const struct hapt_graph *graph = gpt("yes", "3", "0")->graph;
    const int shared = graph->tensor[hapt_graph_find_tensor(graph, "embedding")].gradient;
    for (int op = graph->forward_count; op < graph->op_count; op++) {
        CHECK(strcmp(hapt_op_type_at(graph->op[op].type)->name, "copy") != 0);
    }
    for (int layer = 0; layer < 3; layer++) {
        static const char *const names[] = {"residual_1", "residual_2", "attn.c_proj", "mlp.c_proj"};
        for (int i = 0; i < 4; i++) {
            char name[32];
            snprintf(name, sizeof name, "h.%d.%s", layer, names[i]);
            CHECK(graph->tensor[hapt_graph_find_tensor(graph, name)].gradient == shared);
        }
    }
    CHECK(graph->op_count - graph->forward_count == 149 - 12 * 12 + 3 * 12);
}

/* A random graph over [2][3][4] activations: embedding, then operators on earlier results, many additions, also of one
 * tensor to itself; everything not read yet is added up for the loss. */
static struct hapt_graph *random_graph(uint64_t *seed, int steps)
{
    struct hapt_graph *graph = NULL;
    int pool[64], reads[64] = {0}, count = 0, input[3], output[HAPT_MAX_OUTPUTS], parameters = 0;
    char name[32];
    CHECK_OK(hapt_graph_create(&arena, &graph));
    const struct hapt_tensor tokens = {.name = "tokens",
                                       .kind = HAPT_TENSOR_INPUT,
                                       .role = HAPT_ROLE_TOKENS,
                                       .dtype = HAPT_I32,
                                       .dims = 2,
                                       .shape = {2, 3}};
    struct hapt_tensor targets = tokens;
    targets.name = "targets";
    targets.role = HAPT_ROLE_TARGETS;
    int targets_index;
    CHECK_OK(hapt_graph_add_tensor(graph, &tokens, &input[0]));
    CHECK_OK(hapt_graph_add_tensor(graph, &targets, &targets_index));
#define PARAMETER(slot, rows, columns, rule)                                                \
    do {                                                                                    \
        snprintf(name, sizeof name, "p%d", parameters++);                                   \
        CHECK_OK(hapt_graph_add_tensor(graph,                                               \
                                       &(struct hapt_tensor){.name = name,                  \
                                                             .kind = HAPT_TENSOR_PARAMETER, \
                                                             .dims = (columns) ? 2 : 1,     \
                                                             .shape = {rows, columns},      \
                                                             .trainable = true,             \
                                                             .init = rule},                 \
                                       &input[slot]));                                      \
    } while (0)
    PARAMETER(1, 5, 4, HAPT_INIT_NORMAL);
    CHECK_OK(hapt_graph_add_op(graph, "embedding", "op", input, 2, NULL, NULL, output));
    pool[count++] = output[0];
    for (int step = 0; step < steps; step++) {
        const int a = (int)(hapt_random_next(seed) % (uint64_t)count), kind = (int)(hapt_random_next(seed) % 8);
        const int recent = count > 3 ? count - 3 + (int)(hapt_random_next(seed) % 3) : a;
        char op_name[32];
        snprintf(op_name, sizeof op_name, "op%d", step);
        input[0] = pool[recent];
        reads[recent]++;
        if (kind == 0) {
            CHECK_OK(hapt_graph_add_op(graph, "gelu", op_name, input, 1, NULL, NULL, output));
        } else if (kind == 1) {
            PARAMETER(1, 4, 4, HAPT_INIT_NORMAL);
            PARAMETER(2, 4, 0, HAPT_INIT_ZERO);
            CHECK_OK(hapt_graph_add_op(graph, "linear", op_name, input, 3, NULL, NULL, output));
        } else if (kind == 2) {
            PARAMETER(1, 4, 0, HAPT_INIT_ONE);
            PARAMETER(2, 4, 0, HAPT_INIT_ZERO);
            const double real[HAPT_MAX_ATTRIBUTES] = {1e-2};
            CHECK_OK(hapt_graph_add_op(graph, "layer_norm", op_name, input, 3, NULL, real, output));
        } else {
            input[1] = pool[a];
            reads[a]++;
            if (kind == 3) input[1] = input[0];
            CHECK_OK(hapt_graph_add_op(graph, "add", op_name, input, 2, NULL, NULL, output));
            if (kind == 3) reads[a]--;
        }
        pool[count++] = output[0];
    }
    int sum = pool[count - 1];
    for (int i = 0; i + 1 < count; i++) {
        if (reads[i] > 0) continue;
        snprintf(name, sizeof name, "sum%d", i);
        CHECK_OK(hapt_graph_add_op(graph, "add", name, (const int[]){sum, pool[i]}, 2, NULL, NULL, &sum));
    }
    input[0] = sum;
    PARAMETER(1, 5, 4, HAPT_INIT_NORMAL);
    CHECK_OK(hapt_graph_add_op(graph, "linear_t", "head", input, 2, NULL, NULL, output));
    CHECK_OK(hapt_graph_add_op(graph, "cross_entropy", "loss", (const int[]){output[0], targets_index}, 2, NULL, NULL,
                               output));
    graph->loss = output[0];
    CHECK_OK(hapt_graph_check(graph));
    CHECK_OK(hapt_graph_differentiate(graph));
    CHECK_OK(hapt_graph_check(graph));
#undef PARAMETER
    return graph;
}

static void random_graphs(void)
{
    int shared = 0, copies = 0;
    for (uint64_t round = 0; round < (test_long() ? 2000 : 60); round++) {
        char what[32];
        uint64_t seed = 1000 + round;
        struct hapt_arena kept = arena;
        hapt_arena_init(&arena);
        const struct hapt_graph *graph = random_graph(&seed, 3 + (int)(round % 18));
        const struct subject subject = subject_of(graph, 5, seed);
        snprintf(what, sizeof what, "random graph %d", (int)round);
        check_gradients(&subject, what);
        check_all_cuts(&subject, what);
        for (int t = 0; t < graph->tensor_count; t++) {
            const struct hapt_tensor *tensor = &graph->tensor[t];
            shared += tensor->kind == HAPT_TENSOR_ACTIVATION && tensor->gradient >= 0 &&
                      graph->tensor[tensor->gradient].kind == HAPT_TENSOR_GRADIENT &&
                      graph->tensor[tensor->gradient].primal != t;
        }
        for (int op = graph->forward_count; op < graph->op_count; op++) {
            copies += !strcmp(hapt_op_type_at(graph->op[op].type)->name, "copy");
        }
        hapt_arena_release(&arena);
        arena = kept;
    }
    /* Both happen, or the campaign tests nothing. */
    CHECK_MESSAGE(shared > 100 && copies > 50, "%d shared gradients, %d copies", shared, copies);
}

/* Frozen parameters get no gradient, and what lies before the first trainable one no backward operators. */
static void frozen_parameters(void)
{
    struct hapt_model *model = gpt("no", "1", "0");
    struct hapt_graph *graph = model->graph;
    graph->op_count = graph->forward_count; /* take the backward part off again */
    graph->tensor_count = hapt_graph_find_tensor(graph, "loss_scale");
    for (int t = 0; t < graph->tensor_count; t++) {
        graph->tensor[t].trainable =
            !strncmp(graph->tensor[t].name, "h.0.mlp", 7) || !strcmp(graph->tensor[t].name, "ln_f.bias");
    }
    CHECK_OK(hapt_graph_differentiate(graph));
    CHECK_OK(hapt_graph_check(graph));
    CHECK(graph->tensor[hapt_graph_find_tensor(graph, "wte.weight")].gradient == -1);
    CHECK(graph->tensor[hapt_graph_find_tensor(graph, "h.0.mlp.c_fc.weight")].gradient >= 0);
    const int before = graph->op_count;
    for (int op = graph->forward_count; op < graph->op_count; op++) {
        CHECK(strncmp(graph->op[graph->op[op].forward_op].name, "h.0.attn", 8) != 0);
    }
    CHECK_OK(hapt_graph_differentiate(graph)); /* a second time changes nothing */
    CHECK(graph->op_count == before);
}

/* PyTorch's run in double precision (tests/data/gpt-small.h5: 20 AdamW steps of a small GPT), from the graph alone. */
static void pytorch_losses(void)
{
    enum { ROWS = 8, T = 64, MICROBATCH = 2 };
    const char *path = "tests/data/gpt-small.h5";
    const char *argv[] = {
        "hapt", "model",      "gpt", "--output", "x.h5", "--layers",     "2", "--hidden",          "64", "--heads",
        "4",    "--sequence", "64",  "--vocab",  "256",  "--microbatch", "2", "--tied-embeddings", "yes"};
    struct hapt_config *config = NULL;
    struct hapt_model *model = NULL;
    struct hapt_h5 *file = NULL;
    void *batches = NULL, *losses = NULL;
    int64_t shape[3] = {-1, ROWS, T + 1}, steps[1] = {-1};
    CHECK_OK(hapt_config_parse((int)(sizeof argv / sizeof argv[0]), (char **)argv, &arena, &config));
    CHECK_OK(hapt_model_build("gpt", config, &arena, &model));
    CHECK_OK(hapt_h5_open(path, NULL, 1, true, &file));
    if (!model || !file) return;
    CHECK_OK(hapt_h5_read(file, "/batches", HAPT_H5_I32, 3, shape, 1 << 20, &arena, &batches));
    CHECK_OK(hapt_h5_read(file, "/loss_fp64", HAPT_H5_F64, 1, steps, 1 << 20, &arena, &losses));
    const struct hapt_graph *graph = model->graph;
    const struct subject subject = subject_of(graph, 256, 1);
    double **moment = hapt_arena_alloc(&arena, (size_t)graph->tensor_count * 2, sizeof *moment);
    int tokens = -1, targets = -1;
    for (int t = 0; t < graph->tensor_count; t++) {
        const struct hapt_tensor *tensor = &graph->tensor[t];
        if (tensor->role == HAPT_ROLE_TOKENS) tokens = t;
        if (tensor->role == HAPT_ROLE_TARGETS) targets = t;
        if (tensor->role == HAPT_ROLE_LOSS_SCALE) subject.given[t][0] = 1.0 / (ROWS * T);
        if (tensor->kind != HAPT_TENSOR_PARAMETER) continue;
        char name[128];
        const int64_t count = hapt_tensor_elements(tensor);
        float *value = hapt_arena_alloc(&arena, (size_t)count, sizeof *value);
        snprintf(name, sizeof name, "/parameters/%s", tensor->name);
        CHECK_OK(hapt_h5_read_rows(file, name, HAPT_H5_F32, 0, tensor->shape[0], value));
        for (int64_t i = 0; i < count; i++) subject.given[t][i] = value[i];
        for (int k = 0; k < 2; k++) moment[2 * t + k] = hapt_arena_alloc(&arena, (size_t)count, sizeof(double));
    }
    hapt_h5_close(file);
    for (int step = 0; step < (test_long() ? 20 : 3); step++) {
        const struct memory sums = memory_with(&subject);
        double loss = 0;
        for (int first = 0; first < ROWS; first += MICROBATCH) {
            for (int i = 0; i < MICROBATCH * T; i++) {
                const int32_t *row = (const int32_t *)batches + ((int64_t)step * ROWS + first + i / T) * (T + 1);
                subject.given[tokens][i] = row[i % T];
                subject.given[targets][i] = row[i % T + 1];
            }
            struct memory memory = {hapt_arena_alloc(&arena, (size_t)graph->tensor_count, sizeof(double *))};
            memcpy(memory.value, sums.value, (size_t)graph->tensor_count * sizeof(double *));
            for (int op = 0; op < graph->op_count; op++) run_op(graph, op, &memory);
            loss += memory.value[graph->loss][0] / (ROWS * T);
        }
        /* The same arithmetic up to the order of sums. */
        CHECK_NEAR(loss, ((const double *)losses)[step], 1e-10);
        for (int t = 0; t < graph->tensor_count; t++) {
            if (graph->tensor[t].kind != HAPT_TENSOR_PARAMETER) continue;
            for (int64_t i = 0; i < elements(graph, t); i++) {
                const double gradient = sums.value[graph->tensor[t].gradient][i];
                double *m = &moment[2 * t][i], *v = &moment[2 * t + 1][i], *w = &subject.given[t][i];
                *m = 0.9 * *m + 0.1 * gradient;
                *v = 0.95 * *v + 0.05 * gradient * gradient;
                *w -= 1e-3 * (graph->tensor[t].dims >= 2 ? 0.1 : 0) * *w;
                *w -= 1e-3 * (*m / (1 - pow(0.9, step + 1))) / (sqrt(*v / (1 - pow(0.95, step + 1))) + 1e-8);
            }
        }
    }
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    hapt_arena_init(&arena);
    RUN(gpt_gradients);
    RUN(gpt_shares_the_residual_gradient);
    RUN(pytorch_losses);
    RUN(random_graphs);
    RUN(frozen_parameters);
    hapt_arena_release(&arena);
    return test_finish();
}
