/*
 * An interpreter of graphs in double precision, for the tests of differentiation. Each operator is written from its
 * definition.
 */
#ifndef HAPT_TEST_INTERPRETER_H
#define HAPT_TEST_INTERPRETER_H

#include "hapt/graph.h"
#include "hapt/ops.h"
#include "hapt/philox.h"
#include "test.h"

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

static void run_dropout(const struct call *call)
{
    const int64_t rows = call->shape_in[0]->shape[0], width = hapt_tensor_elements(call->shape_in[0]) / rows;
    const double dropped = call->op->real[0];
    for (int64_t i = 0; i < rows * width; i++) {
        const double *key = &call->in[1][2 * (i / width)];
        const uint32_t word =
            hapt_dropout_word((uint32_t)key[0], (uint32_t)key[1], (uint32_t)call->op->integer[0], i % width);
        if (word * 0x1p-32 >= dropped) call->out[0][i] += call->in[0][i] / (1 - dropped);
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
        /* Memory that is neither cleared nor received is garbage: NaN shows a missing first writer. */
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
    else if (!strcmp(name, "dropout"))
        run_dropout(&call);
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

#endif
