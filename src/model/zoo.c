/* Shared by the zoo's families: inputs, parameters and common layers. */
#include "zoo.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { MAX_NAME = 160 };

enum hapt_status zoo_set_number(struct hapt_model *model, struct hapt_arena *arena, const char *name, int64_t value)
{
    char text[32];
    snprintf(text, sizeof text, "%" PRId64, value);
    return hapt_model_set(model, arena, name, text);
}

enum hapt_status zoo_check_blocks(const struct zoo *zoo)
{
    if (zoo->hidden % zoo->heads != 0)
        return hapt_fail(HAPT_ERR_USAGE, "choose --hidden as a multiple of --heads",
                         "hidden size %" PRId64 " does not divide into %" PRId64 " heads", zoo->hidden, zoo->heads);
    if (zoo->layers > 1024)
        return hapt_fail(HAPT_ERR_USAGE, "at most 1024 layers are possible", "%" PRId64 " layers are too many",
                         zoo->layers);
    return HAPT_OK;
}

enum hapt_status zoo_open(struct zoo *zoo, const struct hapt_config *config, struct hapt_arena *arena,
                          struct hapt_model *model)
{
    *zoo = (struct zoo){.graph = model->graph,
                        .sequence = hapt_config_int(config, "sequence"),
                        .rows = hapt_config_int(config, "microbatch")};
    HAPT_ASSERT(hapt_dtype_parse(hapt_config_text(config, "dtype"), &zoo->dtype));
    zoo->frozen = zoo_frozen_of(config);
    if (hapt_config_text(config, "lora")) {
        HAPT_NEW(zoo->lora, arena, 1);
        HAPT_TRY(hapt_lora_parse(hapt_config_text(config, "lora"), arena, zoo->lora));
    }
    model->microbatch = (int)zoo->rows;
    model->dtype = zoo->dtype;
    return hapt_model_set(model, arena, "dtype", hapt_dtype_name(zoo->dtype));
}

enum hapt_status zoo_begin(struct zoo *zoo, const struct hapt_config *config, const char *const *numbers,
                           struct hapt_arena *arena, struct hapt_model *model)
{
    for (; *numbers; numbers++) HAPT_TRY(zoo_set_number(model, arena, *numbers, hapt_config_int(config, *numbers)));
    HAPT_TRY(zoo_open(zoo, config, arena, model));
    zoo->layers = hapt_config_int(config, "layers");
    zoo->hidden = hapt_config_int(config, "hidden");
    zoo->heads = hapt_config_int(config, "heads");
    zoo->vocab = hapt_config_int(config, "vocab");
    return HAPT_OK;
}

enum hapt_status zoo_input(struct zoo *zoo, const char *name, enum hapt_tensor_role role, enum hapt_dtype dtype,
                           int dims, const int64_t *shape, int *index)
{
    struct hapt_tensor tensor = {.name = name, .kind = HAPT_TENSOR_INPUT, .role = role, .dtype = dtype, .dims = dims};
    memcpy(tensor.shape, shape, (size_t)dims * sizeof *shape);
    return hapt_graph_add_tensor(zoo->graph, &tensor, index);
}

enum hapt_status zoo_tokens(struct zoo *zoo, int *tokens, int *targets)
{
    const int64_t shape[] = {zoo->rows, zoo->sequence};
    HAPT_TRY(zoo_input(zoo, "tokens", HAPT_ROLE_TOKENS, HAPT_I32, 2, shape, tokens));
    return zoo_input(zoo, "targets", HAPT_ROLE_TARGETS, HAPT_I32, 2, shape, targets);
}

enum hapt_status zoo_classify(struct zoo *zoo, int logits, int labels)
{
    int output[HAPT_MAX_OUTPUTS];
    HAPT_TRY(hapt_graph_add_op(zoo->graph, "cross_entropy", "loss", (int[]){logits, labels}, 2, NULL, NULL, output));
    zoo->graph->loss = output[0];
    return HAPT_OK;
}

enum hapt_status zoo_parameter(struct zoo *zoo, const char *name, int dims, const int64_t *shape, enum hapt_init init,
                               double std, int *index)
{
    struct hapt_tensor tensor = {.name = name,
                                 .kind = HAPT_TENSOR_PARAMETER,
                                 .dtype = zoo->dtype,
                                 .dims = dims,
                                 .trainable = true,
                                 .init = init,
                                 .init_std = std};
    memcpy(tensor.shape, shape, (size_t)dims * sizeof *shape);
    return hapt_graph_add_tensor(zoo->graph, &tensor, index);
}

enum hapt_status zoo_normal(struct zoo *zoo, const char *name, int dims, const int64_t *shape, double std, int *index)
{
    return zoo_parameter(zoo, name, dims, shape, HAPT_INIT_NORMAL, std, index);
}

enum hapt_status zoo_layer_norm(struct zoo *zoo, const char *prefix, int64_t width, double epsilon, int x, int *y)
{
    char name[MAX_NAME];
    const double real[HAPT_MAX_ATTRIBUTES] = {epsilon};
    int input[3] = {x}, output[HAPT_MAX_OUTPUTS];
    snprintf(name, sizeof name, "%s.weight", prefix);
    HAPT_TRY(zoo_parameter(zoo, name, 1, &width, HAPT_INIT_ONE, 0, &input[1]));
    snprintf(name, sizeof name, "%s.bias", prefix);
    HAPT_TRY(zoo_parameter(zoo, name, 1, &width, HAPT_INIT_ZERO, 0, &input[2]));
    HAPT_TRY(hapt_graph_add_op(zoo->graph, "layer_norm", prefix, input, 3, NULL, real, output));
    *y = output[0];
    return HAPT_OK;
}

static enum hapt_status product(struct zoo *zoo, const char *type, const char *prefix, const int64_t *shape,
                                int64_t out, double std, bool bias, int x, int *y)
{
    char name[MAX_NAME];
    int input[3] = {x, 0, -1};
    snprintf(name, sizeof name, "%s.weight", prefix);
    HAPT_TRY(zoo_normal(zoo, name, 2, shape, std, &input[1]));
    snprintf(name, sizeof name, "%s.bias", prefix);
    if (bias) HAPT_TRY(zoo_parameter(zoo, name, 1, &out, HAPT_INIT_ZERO, 0, &input[2]));
    return hapt_graph_add_op(zoo->graph, type, prefix, input, 3, NULL, NULL, y);
}

enum hapt_status zoo_linear_in_out(struct zoo *zoo, const char *prefix, int64_t in, int64_t out, double std, int x,
                                   int *y)
{
    return product(zoo, "linear", prefix, (int64_t[]){in, out}, out, std, true, x, y);
}

static bool trains(const struct zoo *zoo, const char *prefix, const char *end)
{
    char name[MAX_NAME];
    snprintf(name, sizeof name, "%s.%s", prefix, end);
    return zoo_trains(&zoo->frozen, name);
}

/* A frozen layer without a bias that trains is packed, if its inputs are whole blocks. */
static bool is_packed(const struct zoo *zoo, const char *prefix, int64_t in, bool bias)
{
    return zoo->frozen.packing != HAPT_PACKING_NONE && in % HAPT_PACKING_COLUMNS == 0 &&
           !trains(zoo, prefix, "weight") && !(bias && trains(zoo, prefix, "bias"));
}

static enum hapt_status packed_product(struct zoo *zoo, const char *prefix, int64_t in, int64_t out, double std,
                                       bool bias, int x, int *y)
{
    char name[MAX_NAME];
    int input[3] = {x, 0, -1};
    snprintf(name, sizeof name, "%s.weight", prefix);
    const struct hapt_tensor weight = {
        .name = name,
        .kind = HAPT_TENSOR_PARAMETER,
        .dtype = HAPT_F32,
        .dims = 3,
        .shape = {out, in / HAPT_PACKING_COLUMNS, hapt_packing_words(zoo->frozen.packing)},
        .init = HAPT_INIT_NORMAL,
        .init_std = std};
    HAPT_TRY(hapt_graph_add_tensor(zoo->graph, &weight, &input[1]));
    snprintf(name, sizeof name, "%s.bias", prefix);
    if (bias) {
        HAPT_TRY(zoo_parameter(zoo, name, 1, &out, HAPT_INIT_ZERO, 0, &input[2]));
        zoo->graph->tensor[input[2]].trainable = false; /* is_packed */
    }
    return hapt_graph_add_op(zoo->graph, "linear_packed", prefix, input, 3, NULL, NULL, y);
}

enum hapt_status zoo_linear(struct zoo *zoo, const char *prefix, int64_t in, int64_t out, double std, bool bias, int x,
                            int *y)
{
    if (is_packed(zoo, prefix, in, bias))
        HAPT_TRY(packed_product(zoo, prefix, in, out, std, bias, x, y));
    else
        HAPT_TRY(product(zoo, "linear_t", prefix, (int64_t[]){out, in}, out, std, bias, x, y));
    return zoo_adapt(zoo, prefix, in, out, x, y);
}

enum hapt_status zoo_take_dropout(struct zoo *zoo, const struct hapt_config *config, struct hapt_arena *arena,
                                  struct hapt_model *model)
{
    char text[32];
    if (!hapt_config_given(config, "dropout")) return HAPT_OK;
    zoo->dropout = hapt_config_real(config, "dropout");
    snprintf(text, sizeof text, "%.9g", zoo->dropout);
    return hapt_model_set(model, arena, "dropout", text);
}

enum hapt_status zoo_drop(struct zoo *zoo, const char *name, double share, int x, int *y)
{
    const int64_t number[HAPT_MAX_ATTRIBUTES] = {zoo->dropouts};
    const double real[HAPT_MAX_ATTRIBUTES] = {share};
    *y = x;
    if (share == 0) return HAPT_OK;
    if (zoo->dropouts++ == 0)
        HAPT_TRY(
            zoo_input(zoo, "row_keys", HAPT_ROLE_ROW_KEYS, HAPT_I32, 2, (int64_t[]){zoo->rows, 2}, &zoo->row_keys));
    return hapt_graph_add_op(zoo->graph, "dropout", name, (int[]){x, zoo->row_keys}, 2, number, real, y);
}

enum hapt_status zoo_take_documents(struct zoo *zoo, const struct hapt_config *config, int64_t vocab,
                                    struct hapt_arena *arena, struct hapt_model *model)
{
    const int64_t end = hapt_config_int(config, "document-end");
    zoo->documents = end >= 0;
    zoo->positions = -1;
    if (end < 0)
        return hapt_config_given(config, "document-end") ? zoo_set_number(model, arena, "document-end", -1) : HAPT_OK;
    if (end >= vocab)
        return hapt_fail(HAPT_ERR_USAGE, "give the token that the data have after each document",
                         "--document-end %" PRId64 " is no token: the vocabulary has %" PRId64, end, vocab);
    return zoo_set_number(model, arena, "document-end", end);
}

enum hapt_status zoo_positions(struct zoo *zoo, int *positions)
{
    const int64_t shape[] = {zoo->rows, zoo->sequence};
    if (zoo->positions < 0)
        HAPT_TRY(zoo_input(zoo, "positions", HAPT_ROLE_POSITIONS, HAPT_I32, 2, shape, &zoo->positions));
    *positions = zoo->positions;
    return HAPT_OK;
}

enum hapt_status zoo_causal_attention(struct zoo *zoo, const char *name, const int *input, int count,
                                      const int64_t *integer, const double *real, int *y)
{
    static const char *const type[2][2] = {{"attention", "grouped_attention"},
                                           {"document_attention", "grouped_document_attention"}};
    int operand[4], output[HAPT_MAX_OUTPUTS];
    HAPT_ASSERT(count < 4 && integer[1] == 1);
    for (int i = 0; i < count; i++) operand[i] = input[i];
    if (zoo->documents) HAPT_TRY(zoo_positions(zoo, &operand[count++]));
    HAPT_TRY(hapt_graph_add_op(zoo->graph, type[zoo->documents][count - zoo->documents > 1], name, operand, count,
                               integer, real, output));
    *y = output[0];
    return HAPT_OK;
}

enum hapt_status zoo_add(struct zoo *zoo, const char *name, int a, int b, int *y)
{
    return hapt_graph_add_op(zoo->graph, "add", name, (int[]){a, b}, 2, NULL, NULL, y);
}
