/*
 * Differentiation, judged by an interpreter of this file: every operator in double precision, written from its
 * definition. Gradients of all parameters against central finite differences, for GPTs and for random graphs full of
 * additions; and the graph cut into stages, each with its own memory, tensors relayed from stage to stage: exactly the
 * uncut result.
 */
#include "test.h"

#include "hapt/graph.h"
#include "hapt/model.h"
#include "hapt/ops.h"

static struct hapt_arena arena;

/* The memory of one stage: [tensor] values, NULL where the stage has none. */
struct memory {
    double **value;
};

static int64_t elements(const struct hapt_graph *graph, int tensor)
{
    return hapt_tensor_elements(&graph->tensor[tensor]);
}

/* b x t rows of the first two dimensions. */
static int64_t rows_of(const struct hapt_tensor *tensor)
{
    return tensor->shape[0] * tensor->shape[1];
}

static double gelu(double x, bool erf_kind)
{
    if (erf_kind) return 0.5 * x * (1 + erf(x / sqrt(2)));
    return 0.5 * x * (1 + tanh(sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
}

static double gelu_slope(double x, bool erf_kind)
{
    const double pi = 3.14159265358979323846;
    if (erf_kind) return 0.5 * (1 + erf(x / sqrt(2))) + x * exp(-0.5 * x * x) / sqrt(2 * pi);
    const double scale = sqrt(2 / pi), inner = scale * (x + 0.044715 * x * x * x), t = tanh(inner);
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * scale * (1 + 3 * 0.044715 * x * x);
}

/* One call: inputs, outputs and whether each output is added to. Outputs are written through put(). */
struct call {
    const struct hapt_graph *graph;
    const struct hapt_op *op;
    const double *in[HAPT_MAX_INPUTS];
    double *out[HAPT_MAX_OUTPUTS];
    const struct hapt_tensor *shape_in[HAPT_MAX_INPUTS];
};

/* Starts an output: clears it unless it accumulates; kernels below only add. */
static void begin_output(const struct call *call, int o)
{
    if (call->op->accumulate >> o & 1u) return;
    memset(call->out[o], 0, (size_t)elements(call->graph, call->op->output[o]) * sizeof(double));
}

static void run_embedding(const struct call *call, bool backward)
{
    const struct hapt_tensor *tokens = call->shape_in[0];
    const int64_t T = tokens->shape[1];
    const int wide = backward ? call->op->input[1] : call->op->output[0];
    const int64_t d = call->graph->tensor[wide].shape[2];
    for (int64_t row = 0; row < rows_of(tokens); row++) {
        const int64_t token = (int64_t)call->in[0][row], position = row % T;
        for (int64_t c = 0; c < d; c++) {
            if (!backward) {
                call->out[0][row * d + c] +=
                    call->in[1][token * d + c] + (call->in[2] ? call->in[2][position * d + c] : 0);
            } else {
                call->out[0][token * d + c] += call->in[1][row * d + c];
                if (call->op->output_count > 1) call->out[1][position * d + c] += call->in[1][row * d + c];
            }
        }
    }
}

static void run_layer_norm(const struct call *call)
{
    const struct hapt_tensor *x = call->shape_in[0];
    const int64_t d = x->shape[2];
    for (int64_t row = 0; row < rows_of(x); row++) {
        const double *in = call->in[0] + row * d;
        double mean = 0, variance = 0;
        for (int64_t c = 0; c < d; c++) mean += in[c] / (double)d;
        for (int64_t c = 0; c < d; c++) variance += (in[c] - mean) * (in[c] - mean) / (double)d;
        const double rstd = 1 / sqrt(variance + call->op->real[0]);
        for (int64_t c = 0; c < d; c++) {
            call->out[0][row * d + c] += (in[c] - mean) * rstd * call->in[1][c] + call->in[2][c];
        }
        call->out[1][row] += mean;
        call->out[2][row] += rstd;
    }
}

static void run_layer_norm_backward(const struct call *call)
{
    const struct hapt_tensor *x = call->shape_in[0];
    const int64_t d = x->shape[2];
    for (int64_t row = 0; row < rows_of(x); row++) {
        const double mean = call->in[2][row], rstd = call->in[3][row];
        double sum = 0, dot = 0;
        for (int64_t c = 0; c < d; c++) {
            const double normal = (call->in[0][row * d + c] - mean) * rstd;
            const double slope = call->in[4][row * d + c] * call->in[1][c];
            sum += slope / (double)d;
            dot += slope * normal / (double)d;
            call->out[1][c] += call->in[4][row * d + c] * normal;
            call->out[2][c] += call->in[4][row * d + c];
        }
        for (int64_t c = 0; c < d; c++) {
            const double normal = (call->in[0][row * d + c] - mean) * rstd;
            call->out[0][row * d + c] += rstd * (call->in[4][row * d + c] * call->in[1][c] - sum - normal * dot);
        }
    }
}

/* Products with a weight [in][out] or, transposed, [out][in]: forward, dx and dw in one. */
static void run_linear(const struct call *call, bool transposed, const char *kind)
{
    const bool dw = !strcmp(kind, "dw"), dx = !strcmp(kind, "dx");
    const struct hapt_tensor *weight = dw ? &call->graph->tensor[call->op->output[0]] : call->shape_in[1];
    const int64_t in = weight->shape[transposed ? 1 : 0], out = weight->shape[transposed ? 0 : 1];
    for (int64_t row = 0; row < rows_of(call->shape_in[0]); row++) {
        for (int64_t o = 0; o < out; o++) {
            for (int64_t i = 0; i < in; i++) {
                const int64_t w = transposed ? o * in + i : i * out + o;
                if (dw)
                    call->out[0][w] += call->in[0][row * in + i] * call->in[1][row * out + o];
                else if (dx)
                    call->out[0][row * in + i] += call->in[0][row * out + o] * call->in[1][w];
                else
                    call->out[0][row * out + o] += call->in[0][row * in + i] * call->in[1][w];
            }
            if (dw && call->op->output_count > 1) call->out[1][o] += call->in[1][row * out + o];
            if (!dw && !dx && call->in[2]) call->out[0][row * out + o] += call->in[2][o];
        }
    }
}

static void run_attention(const struct call *call, bool backward)
{
    const struct hapt_tensor *qkv = call->shape_in[0];
    const int64_t B = qkv->shape[0], T = qkv->shape[1], d = qkv->shape[2] / 3, H = call->op->integer[0], size = d / H;
    const double scale = 1 / sqrt((double)size);
    double score[64], slope[64];
    for (int64_t b = 0; b < B; b++) {
        for (int64_t h = 0; h < H; h++) {
            for (int64_t t = 0; t < T; t++) {
                const int64_t last = call->op->integer[1] ? t : T - 1;
                const int64_t q = (b * T + t) * 3 * d + h * size, y = (b * T + t) * d + h * size;
                double sum = 0;
                for (int64_t s = 0; s <= last; s++) {
                    const int64_t k = (b * T + s) * 3 * d + d + h * size;
                    score[s] = 0;
                    for (int64_t c = 0; c < size; c++) score[s] += scale * call->in[0][q + c] * call->in[0][k + c];
                    sum += exp(score[s]);
                }
                const double lse = backward ? call->in[2][(b * H + h) * T + t] : log(sum);
                double mean = 0;
                for (int64_t s = 0; s <= last; s++) {
                    const int64_t v = (b * T + s) * 3 * d + 2 * d + h * size;
                    const double weight = exp(score[s] - lse);
                    slope[s] = 0;
                    for (int64_t c = 0; c < size; c++) {
                        if (!backward) {
                            call->out[0][y + c] += weight * call->in[0][v + c];
                        } else {
                            slope[s] += call->in[3][y + c] * call->in[0][v + c];
                            call->out[0][v + c] += weight * call->in[3][y + c];
                        }
                    }
                    mean += weight * slope[s];
                }
                if (!backward) call->out[1][(b * H + h) * T + t] += lse;
                for (int64_t s = 0; backward && s <= last; s++) {
                    const int64_t k = (b * T + s) * 3 * d + d + h * size;
                    const double by_score = scale * exp(score[s] - lse) * (slope[s] - mean);
                    for (int64_t c = 0; c < size; c++) {
                        call->out[0][q + c] += by_score * call->in[0][k + c];
                        call->out[0][k + c] += by_score * call->in[0][q + c];
                    }
                }
            }
        }
    }
}

static void run_cross_entropy(const struct call *call, bool backward)
{
    const struct hapt_tensor *logits = call->shape_in[0];
    const int64_t V = logits->shape[2];
    for (int64_t row = 0; row < rows_of(logits); row++) {
        const int64_t target = (int64_t)call->in[1][row];
        double sum = 0;
        for (int64_t v = 0; v < V; v++) sum += exp(call->in[0][row * V + v]);
        if (!backward) {
            call->out[1][row] += log(sum);
            if (target >= 0) call->out[0][0] += log(sum) - call->in[0][row * V + target];
            continue;
        }
        for (int64_t v = 0; target >= 0 && v < V; v++) {
            const double share = exp(call->in[0][row * V + v] - call->in[2][row]);
            call->out[0][row * V + v] += call->in[3][0] * (share - (v == target));
        }
    }
}

static void run_elementwise(const struct call *call, const char *name)
{
    const int64_t count = hapt_tensor_elements(call->shape_in[0]);
    const bool erf_kind = call->op->integer[0] == 1;
    for (int64_t i = 0; i < count; i++) {
        if (!strcmp(name, "gelu")) call->out[0][i] += gelu(call->in[0][i], erf_kind);
        if (!strcmp(name, "gelu_dx")) call->out[0][i] += call->in[1][i] * gelu_slope(call->in[0][i], erf_kind);
        if (!strcmp(name, "add")) call->out[0][i] += call->in[0][i] + call->in[1][i];
        if (!strcmp(name, "copy")) call->out[0][i] += call->in[0][i];
    }
}

static void run_op(const struct hapt_graph *graph, int index, const struct memory *memory)
{
    struct call call = {.graph = graph, .op = &graph->op[index]};
    const char *name = hapt_op_type_at(call.op->type)->name;
    for (int i = 0; i < call.op->input_count; i++) {
        if (call.op->input[i] < 0) continue;
        call.in[i] = memory->value[call.op->input[i]];
        call.shape_in[i] = &graph->tensor[call.op->input[i]];
        if (!call.in[i]) {
            CHECK_MESSAGE(false, "%s reads %s, which is not there", call.op->name, call.shape_in[i]->name);
            exit(1);
        }
    }
    for (int o = 0; o < call.op->output_count; o++) {
        double **value = &memory->value[call.op->output[o]];
        /* What is neither cleared nor received is garbage: NaN shows a missing first writer. */
        if (!*value) {
            const int64_t count = elements(graph, call.op->output[o]);
            *value = hapt_arena_alloc(&arena, (size_t)count, sizeof **value);
            for (int64_t i = 0; i < count; i++) (*value)[i] = NAN;
        }
        call.out[o] = *value;
        begin_output(&call, o);
        for (int i = 0; i < call.op->input_count; i++) {
            CHECK_MESSAGE(call.in[i] != call.out[o], "%s works in place", call.op->name);
        }
    }
    if (!strcmp(name, "embedding"))
        run_embedding(&call, false);
    else if (!strcmp(name, "embedding_dw"))
        run_embedding(&call, true);
    else if (!strcmp(name, "layer_norm"))
        run_layer_norm(&call);
    else if (!strcmp(name, "layer_norm_backward"))
        run_layer_norm_backward(&call);
    else if (!strncmp(name, "linear_t", 8))
        run_linear(&call, true, name[8] ? name + 9 : "");
    else if (!strncmp(name, "linear", 6))
        run_linear(&call, false, name[6] ? name + 7 : "");
    else if (!strcmp(name, "attention"))
        run_attention(&call, false);
    else if (!strcmp(name, "attention_backward"))
        run_attention(&call, true);
    else if (!strcmp(name, "cross_entropy"))
        run_cross_entropy(&call, false);
    else if (!strcmp(name, "cross_entropy_dx"))
        run_cross_entropy(&call, true);
    else
        run_elementwise(&call, name);
}

/* A graph with values for its inputs and parameters: double, so that finite differences are sharp. */
struct subject {
    const struct hapt_graph *graph;
    double **given; /* [tensor] inputs and parameters */
};

static struct subject subject_of(const struct hapt_graph *graph, int64_t vocab, uint64_t seed)
{
    struct subject subject = {graph, hapt_arena_alloc(&arena, (size_t)graph->tensor_count, sizeof(double *))};
    for (int t = 0; t < graph->tensor_count; t++) {
        const struct hapt_tensor *tensor = &graph->tensor[t];
        if (tensor->kind != HAPT_TENSOR_INPUT && tensor->kind != HAPT_TENSOR_PARAMETER) continue;
        const int64_t count = hapt_tensor_elements(tensor);
        subject.given[t] = hapt_arena_alloc(&arena, (size_t)count, sizeof(double));
        for (int64_t i = 0; i < count; i++) {
            double value = 0.6 * (hapt_random_unit(&seed) - 0.5) + (tensor->init == HAPT_INIT_ONE ? 1 : 0);
            if (tensor->role == HAPT_ROLE_TOKENS) value = (double)(hapt_random_next(&seed) % (uint64_t)vocab);
            if (tensor->role == HAPT_ROLE_TARGETS)
                value = i % 5 == 3 ? -100 : (double)(hapt_random_next(&seed) % (uint64_t)vocab);
            if (tensor->role == HAPT_ROLE_LOSS_SCALE) value = 0.25;
            subject.given[t][i] = value;
        }
    }
    return subject;
}

static struct memory memory_with(const struct subject *subject)
{
    const struct hapt_graph *graph = subject->graph;
    struct memory memory = {hapt_arena_alloc(&arena, (size_t)graph->tensor_count, sizeof(double *))};
    memcpy(memory.value, subject->given, (size_t)graph->tensor_count * sizeof(double *));
    for (int t = 0; t < graph->tensor_count; t++) {
        if (graph->tensor[t].kind == HAPT_TENSOR_PARAMETER && graph->tensor[t].gradient >= 0) {
            const int gradient = graph->tensor[t].gradient; /* resident, zero at the start of a step */
            memory.value[gradient] = hapt_arena_alloc(&arena, (size_t)elements(graph, gradient), sizeof(double));
        }
    }
    return memory;
}

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

/* Runs the operators of one stage in the memory of that stage. What it touches and others wrote last comes from the
 * stage that wrote it last, as a copy. holder[t]: the stage that wrote tensor t last, -1: none. */
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

static struct hapt_model *gpt(const char *tied, const char *layers)
{
    const char *argv[] = {
        "hapt", "model",      "gpt", "--output", "x.h5", "--layers",     layers, "--hidden",          "6", "--heads",
        "2",    "--sequence", "4",   "--vocab",  "7",    "--microbatch", "2",    "--tied-embeddings", tied};
    struct hapt_config *config = NULL;
    struct hapt_model *model = NULL;
    CHECK_OK(hapt_config_parse((int)(sizeof argv / sizeof argv[0]), (char **)argv, &arena, &config));
    CHECK_OK(hapt_model_build("gpt", config, &arena, &model));
    if (!model) exit(1);
    return model;
}

static void gpt_gradients(void)
{
    for (int tied = 0; tied < 2; tied++) {
        const struct hapt_model *model = gpt(tied ? "yes" : "no", "2");
        const struct subject subject = subject_of(model->graph, 7, 11);
        check_gradients(&subject, tied ? "tied gpt" : "untied gpt");
        check_all_cuts(&subject, tied ? "tied gpt" : "untied gpt");
    }
}

/* The residual stream has one gradient tensor and no copies. */
static void gpt_shares_the_residual_gradient(void)
{
    const struct hapt_graph *graph = gpt("yes", "3")->graph;
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
    struct hapt_model *model = gpt("no", "1");
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
