/* Small models for tests. */
#ifndef HAPT_TEST_FIXTURE_H
#define HAPT_TEST_FIXTURE_H

#include "hapt/model.h"
#include "test.h"

struct fixture_gpt {
    int layers, hidden, heads, sequence, vocab, microbatch;
    bool tied, bf16;
};

__attribute__((unused)) static struct hapt_model *fixture_gpt(struct hapt_arena *arena, struct fixture_gpt shape)
{
    char number[6][16];
    const int value[6] = {shape.layers, shape.hidden, shape.heads, shape.sequence, shape.vocab, shape.microbatch};
    for (int i = 0; i < 6; i++) snprintf(number[i], sizeof number[i], "%d", value[i]);
    char *words[] = {"hapt",
                     "model",
                     "gpt",
                     "--layers",
                     number[0],
                     "--hidden",
                     number[1],
                     "--heads",
                     number[2],
                     "--sequence",
                     number[3],
                     "--vocab",
                     number[4],
                     "--microbatch",
                     number[5],
                     "--dtype",
                     shape.bf16 ? "bf16" : "fp32",
                     "--tied-embeddings",
                     shape.tied ? "yes" : "no"};
    struct hapt_config *config = NULL;
    struct hapt_model *model = NULL;
    CHECK_OK(hapt_config_parse((int)(sizeof words / sizeof words[0]), words, arena, &config));
    CHECK_OK(hapt_model_build("gpt", config, arena, &model));
    if (!model) exit(1);
    return model;
}

/* A random residual network on [rows][T][d]: linear, gelu, layer norm, add and copy, with skips of any length. It ends
 * with a loss. */
__attribute__((unused)) static struct hapt_graph *fixture_random(struct hapt_arena *arena, uint64_t *random, int ops)
{
    struct hapt_graph *graph = NULL;
    int activation[64], count = 0, tokens, targets, weight, output[HAPT_MAX_OUTPUTS];
    const int64_t d = 8, vocab = 11, rows = 4, sequence = 5;
    char name[32];
    CHECK_OK(hapt_graph_create(arena, &graph));
    struct hapt_tensor input = {.name = "tokens",
                                .kind = HAPT_TENSOR_INPUT,
                                .role = HAPT_ROLE_TOKENS,
                                .dtype = HAPT_I32,
                                .dims = 2,
                                .shape = {rows, sequence}};
    CHECK_OK(hapt_graph_add_tensor(graph, &input, &tokens));
    input.name = "targets", input.role = HAPT_ROLE_TARGETS;
    CHECK_OK(hapt_graph_add_tensor(graph, &input, &targets));
    struct hapt_tensor parameter = {.name = "table",
                                    .kind = HAPT_TENSOR_PARAMETER,
                                    .dtype = HAPT_F32,
                                    .dims = 2,
                                    .shape = {vocab, d},
                                    .trainable = true,
                                    .init = HAPT_INIT_NORMAL,
                                    .init_std = 0.3};
    CHECK_OK(hapt_graph_add_tensor(graph, &parameter, &weight));
    CHECK_OK(hapt_graph_add_op(graph, "embedding", "embedding", (int[]){tokens, weight, -1}, 3, NULL, NULL, output));
    activation[count++] = output[0];
    for (int o = 0; o < ops; o++) {
        const int kind = (int)(hapt_random_next(random) % 5);
        /* Mostly the newest tensor, sometimes an older one. */
        const int x =
            activation[hapt_random_next(random) % 3 ? count - 1 : (int)(hapt_random_next(random) % (uint64_t)count)];
        const int y = activation[hapt_random_next(random) % (uint64_t)count];
        snprintf(name, sizeof name, "op%d", o);
        if (kind == 0) {
            int w;
            parameter.name = hapt_arena_printf(arena, "w%d", o), parameter.dims = 2,
            parameter.shape[0] = parameter.shape[1] = d;
            CHECK_OK(hapt_graph_add_tensor(graph, &parameter, &w));
            CHECK_OK(hapt_graph_add_op(graph, "linear", name, (int[]){x, w, -1}, 3, NULL, NULL, output));
        } else if (kind == 1) {
            CHECK_OK(hapt_graph_add_op(graph, "gelu", name, &x, 1, NULL, NULL, output));
        } else if (kind == 2) {
            int gamma, beta;
            parameter.name = hapt_arena_printf(arena, "gamma%d", o), parameter.dims = 1, parameter.shape[0] = d;
            CHECK_OK(hapt_graph_add_tensor(graph, &parameter, &gamma));
            parameter.name = hapt_arena_printf(arena, "beta%d", o);
            CHECK_OK(hapt_graph_add_tensor(graph, &parameter, &beta));
            CHECK_OK(hapt_graph_add_op(graph, "layer_norm", name, (int[]){x, gamma, beta}, 3, NULL, (double[6]){1e-5},
                                       output));
        } else if (kind == 3 && x != y) {
            CHECK_OK(hapt_graph_add_op(graph, "add", name, (int[]){x, y}, 2, NULL, NULL, output));
        } else {
            CHECK_OK(hapt_graph_add_op(graph, "copy", name, &x, 1, NULL, NULL, output));
        }
        activation[count++] = output[0];
    }
    /* Adds up all tensors that nothing reads, so that every result is used. */
    int sum = -1;
    for (int a = 0; a < count; a++) {
        bool read = false;
        for (int o = 0; o < graph->op_count; o++)
            for (int i = 0; i < graph->op[o].input_count; i++) read = read || graph->op[o].input[i] == activation[a];
        if (read) continue;
        snprintf(name, sizeof name, "sum%d", a);
        if (sum >= 0)
            CHECK_OK(hapt_graph_add_op(graph, "add", name, (int[]){sum, activation[a]}, 2, NULL, NULL, output));
        sum = sum < 0 ? activation[a] : output[0];
    }
    CHECK_OK(hapt_graph_add_op(graph, "linear_t", "head", (int[]){sum, weight, -1}, 3, NULL, NULL, output));
    CHECK_OK(hapt_graph_add_op(graph, "cross_entropy", "loss", (int[]){output[0], targets}, 2, NULL, NULL, output));
    graph->loss = output[0];
    CHECK_OK(hapt_graph_check(graph));
    CHECK_OK(hapt_graph_differentiate(graph));
    return graph;
}

#endif
