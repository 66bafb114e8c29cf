/*
 * GPT-2: learned positions, pre-LN blocks of causal attention and a tanh-GELU feed-forward of width 4 d, final layer norm, output
 * layer tied to the token embedding or not. No dropout. Parameter names and layouts are GPT-2's own ([in][out]).
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "zoo.h"

#define NORM_EPSILON 1e-5
#define WEIGHT_STD 0.02 /* GPT-2's, for every weight matrix and both embeddings */

struct gpt {
    struct hapt_graph *graph;
    enum hapt_dtype dtype;
    int64_t layers, hidden, heads, sequence, vocab, rows;
    bool tied;
    double residual_std; /* projections back into the residual stream: 0.02 / sqrt(2 layers) */
};

static enum hapt_status parameter(struct gpt *gpt, const char *name, int dims, int64_t rows, int64_t columns,
                                  enum hapt_init init, double std, int *index)
{
    const struct hapt_tensor tensor = {.name = name, .kind = HAPT_TENSOR_PARAMETER, .dtype = gpt->dtype, .dims = dims,
                                       .shape = {rows, columns}, .trainable = true, .init = init, .init_std = std};
    return hapt_graph_add_tensor(gpt->graph, &tensor, index);
}

static enum hapt_status token_input(struct gpt *gpt, const char *name, enum hapt_tensor_role role, int *index)
{
    const struct hapt_tensor tensor = {.name = name, .kind = HAPT_TENSOR_INPUT, .role = role, .dtype = HAPT_I32,
                                       .dims = 2, .shape = {gpt->rows, gpt->sequence}};
    return hapt_graph_add_tensor(gpt->graph, &tensor, index);
}

/* y = layer norm of x, under the published name `prefix`. */
static enum hapt_status norm(struct gpt *gpt, const char *prefix, int x, int *y)
{
    char name[128];
    const double real[HAPT_MAX_ATTRIBUTES] = {NORM_EPSILON};
    int input[3] = {x}, output[HAPT_MAX_OUTPUTS];
    snprintf(name, sizeof name, "%s.weight", prefix);
    HAPT_TRY(parameter(gpt, name, 1, gpt->hidden, 0, HAPT_INIT_ONE, 0, &input[1]));
    snprintf(name, sizeof name, "%s.bias", prefix);
    HAPT_TRY(parameter(gpt, name, 1, gpt->hidden, 0, HAPT_INIT_ZERO, 0, &input[2]));
    HAPT_TRY(hapt_graph_add_op(gpt->graph, "layer_norm", prefix, input, 3, NULL, real, output));
    *y = output[0];
    return HAPT_OK;
}

/* y = x w + bias, w [in][out]. */
static enum hapt_status linear(struct gpt *gpt, const char *prefix, int64_t in, int64_t out, double std, int x, int *y)
{
    char name[128];
    int input[3] = {x};
    snprintf(name, sizeof name, "%s.weight", prefix);
    HAPT_TRY(parameter(gpt, name, 2, in, out, HAPT_INIT_NORMAL, std, &input[1]));
    snprintf(name, sizeof name, "%s.bias", prefix);
    HAPT_TRY(parameter(gpt, name, 1, out, 0, HAPT_INIT_ZERO, 0, &input[2]));
    return hapt_graph_add_op(gpt->graph, "linear", prefix, input, 3, NULL, NULL, y);
}

static enum hapt_status add(struct gpt *gpt, const char *name, int a, int b, int *y)
{
    const int input[] = {a, b};
    return hapt_graph_add_op(gpt->graph, "add", name, input, 2, NULL, NULL, y);
}

/* One block; *x [rows][T][d] is the residual stream. */
static enum hapt_status block(struct gpt *gpt, int64_t index, int *x)
{
    const int64_t d = gpt->hidden;
    const int64_t attention[HAPT_MAX_ATTRIBUTES] = {gpt->heads, 1};
    char name[64];
    int y, output[HAPT_MAX_OUTPUTS];
#define NAME(suffix) (snprintf(name, sizeof name, "h.%" PRId64 "." suffix, index), name)
    HAPT_TRY(norm(gpt, NAME("ln_1"), *x, &y));
    HAPT_TRY(linear(gpt, NAME("attn.c_attn"), d, 3 * d, WEIGHT_STD, y, &y));
    HAPT_TRY(hapt_graph_add_op(gpt->graph, "attention", NAME("attn"), &y, 1, attention, NULL, output));
    HAPT_TRY(linear(gpt, NAME("attn.c_proj"), d, d, gpt->residual_std, output[0], &y));
    HAPT_TRY(add(gpt, NAME("residual_1"), *x, y, x));
    HAPT_TRY(norm(gpt, NAME("ln_2"), *x, &y));
    HAPT_TRY(linear(gpt, NAME("mlp.c_fc"), d, 4 * d, WEIGHT_STD, y, &y));
    HAPT_TRY(hapt_graph_add_op(gpt->graph, "gelu", NAME("mlp.gelu"), &y, 1, NULL, NULL, &y));
    HAPT_TRY(linear(gpt, NAME("mlp.c_proj"), 4 * d, d, gpt->residual_std, y, &y));
    return add(gpt, NAME("residual_2"), *x, y, x);
#undef NAME
}

static enum hapt_status build(struct gpt *gpt)
{
    int embedding[3], product[3] = {0, 0, -1}, loss[2], x, output[HAPT_MAX_OUTPUTS];
    HAPT_TRY(token_input(gpt, "tokens", HAPT_ROLE_TOKENS, &embedding[0]));
    HAPT_TRY(token_input(gpt, "targets", HAPT_ROLE_TARGETS, &loss[1]));
    HAPT_TRY(parameter(gpt, "wte.weight", 2, gpt->vocab, gpt->hidden, HAPT_INIT_NORMAL, WEIGHT_STD, &embedding[1]));
    HAPT_TRY(parameter(gpt, "wpe.weight", 2, gpt->sequence, gpt->hidden, HAPT_INIT_NORMAL, WEIGHT_STD, &embedding[2]));
    HAPT_TRY(hapt_graph_add_op(gpt->graph, "embedding", "embedding", embedding, 3, NULL, NULL, &x));
    for (int64_t index = 0; index < gpt->layers; index++) HAPT_TRY(block(gpt, index, &x));
    HAPT_TRY(norm(gpt, "ln_f", x, &product[0]));
    product[1] = embedding[1];
    if (!gpt->tied) {
        HAPT_TRY(parameter(gpt, "lm_head.weight", 2, gpt->vocab, gpt->hidden, HAPT_INIT_NORMAL, WEIGHT_STD, &product[1]));
    }
    HAPT_TRY(hapt_graph_add_op(gpt->graph, "linear_t", "lm_head", product, 3, NULL, NULL, &loss[0]));
    HAPT_TRY(hapt_graph_add_op(gpt->graph, "cross_entropy", "loss", loss, 2, NULL, NULL, output));
    gpt->graph->loss = output[0];
    return HAPT_OK;
}

enum hapt_status hapt_zoo_gpt(const struct hapt_config *config, struct hapt_arena *arena, struct hapt_model *model)
{
    static const char *const numbers[] = {"layers", "hidden", "heads", "sequence", "vocab", "microbatch"};
    struct gpt gpt = {.layers = hapt_config_int(config, "layers"), .hidden = hapt_config_int(config, "hidden"),
                      .heads = hapt_config_int(config, "heads"), .sequence = hapt_config_int(config, "sequence"),
                      .vocab = hapt_config_int(config, "vocab"), .rows = hapt_config_int(config, "microbatch"),
                      .tied = hapt_config_bool(config, "tied-embeddings")};
    char text[32];
    if (gpt.hidden % gpt.heads != 0) {
        return hapt_fail(HAPT_ERR_USAGE, "choose --hidden as a multiple of --heads",
                         "hidden size %" PRId64 " does not divide into %" PRId64 " heads", gpt.hidden, gpt.heads);
    }
    if (gpt.layers > 1024) {
        return hapt_fail(HAPT_ERR_USAGE, "at most 1024 are possible", "%" PRId64 " layers are too many", gpt.layers);
    }
    HAPT_ASSERT(hapt_dtype_parse(hapt_config_text(config, "dtype"), &gpt.dtype));
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        snprintf(text, sizeof text, "%" PRId64, hapt_config_int(config, numbers[i]));
        HAPT_TRY(hapt_model_set(model, arena, numbers[i], text));
    }
    HAPT_TRY(hapt_model_set(model, arena, "dtype", hapt_dtype_name(gpt.dtype)));
    HAPT_TRY(hapt_model_set(model, arena, "tied-embeddings", gpt.tied ? "yes" : "no"));
    gpt.residual_std = WEIGHT_STD / sqrt(2.0 * (double)gpt.layers);
    gpt.graph = model->graph;
    model->microbatch = (int)gpt.rows;
    model->sequence = (int)gpt.sequence;
    model->vocab = (int)gpt.vocab;
    model->dtype = gpt.dtype;
    return build(&gpt);
}
