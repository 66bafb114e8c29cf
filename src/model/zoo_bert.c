/*
 * BERT (Devlin et al. 2018) for masked language modelling: learned positions, post-LN encoder with attention in both
 * directions, and an erf-GELU feed-forward of width 4 d. The output layer is a transform and the word embeddings (with
 * --tied-embeddings no, a separate matrix). Token types only in imported models. Attention has no dropout.
 *
 * bert-moe (HAP table 1): every second feed-forward is a mixture of experts as in GShard. Each expert is a feed-forward
 * of width 4 d. The gate has no bias: the top k of a softmax over all experts, scaled to sum 1. No auxiliary loss. No
 * token is dropped: more tokens than --capacity-factor allows are an error. Names and layouts ([out][in]) are Hugging
 * Face's.
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "zoo.h"

#define NORM_EPSILON 1e-12
#define WEIGHT_STD 0.02 /* BERT's, for every weight matrix and all embeddings */

struct bert {
    struct zoo zoo;
    int64_t ffn, positions, types;
    double norm_epsilon;
    bool tanh, tied;
    int64_t experts, top_k, capacity; /* experts 0: no layer has experts */
    char layer[48], name[160];        /* "bert.encoder.layer.3"; last result of path() */
};

/* Name inside the current layer. */
static const char *path(struct bert *bert, const char *suffix)
{
    snprintf(bert->name, sizeof bert->name, "%s.%s", bert->layer, suffix);
    return bert->name;
}

static enum hapt_status gelu(struct bert *bert, const char *name, int x, int *y)
{
    return hapt_graph_add_op(bert->zoo.graph, "gelu", name, &x, 1, (int64_t[HAPT_MAX_ATTRIBUTES]){!bert->tanh}, NULL,
                             y);
}

static enum hapt_status linear(struct bert *bert, const char *suffix, int64_t in, int64_t out, int x, int *y)
{
    return zoo_linear(&bert->zoo, path(bert, suffix), in, out, WEIGHT_STD, true, x, y);
}

/* x <- layer norm of x + dropout of y */
static enum hapt_status add_and_norm(struct bert *bert, const char *dropout, const char *residual, const char *norm,
                                     int y, int *x)
{
    HAPT_TRY(zoo_drop(&bert->zoo, path(bert, dropout), bert->zoo.dropout, y, &y));
    HAPT_TRY(zoo_add(&bert->zoo, path(bert, residual), *x, y, x));
    return zoo_layer_norm(&bert->zoo, path(bert, norm), bert->zoo.hidden, bert->norm_epsilon, *x, x);
}

static enum hapt_status attention(struct bert *bert, int *x)
{
    const int64_t d = bert->zoo.hidden, heads[HAPT_MAX_ATTRIBUTES] = {bert->zoo.heads, 0};
    int qkv[3], output[HAPT_MAX_OUTPUTS], y;
    HAPT_TRY(linear(bert, "attention.self.query", d, d, *x, &qkv[0]));
    HAPT_TRY(linear(bert, "attention.self.key", d, d, *x, &qkv[1]));
    HAPT_TRY(linear(bert, "attention.self.value", d, d, *x, &qkv[2]));
    HAPT_TRY(hapt_graph_add_op(bert->zoo.graph, "grouped_attention", path(bert, "attention.self"), qkv, 3, heads, NULL,
                               output));
    HAPT_TRY(linear(bert, "attention.output.dense", d, d, output[0], &y));
    return add_and_norm(bert, "attention.output.dropout", "attention.output.residual", "attention.output.LayerNorm", y,
                        x);
}

static enum hapt_status feed_forward(struct bert *bert, int x, int *y)
{
    const int64_t d = bert->zoo.hidden;
    HAPT_TRY(linear(bert, "intermediate.dense", d, bert->ffn, x, y));
    HAPT_TRY(gelu(bert, path(bert, "intermediate.gelu"), *y, y));
    return linear(bert, "output.dense", bert->ffn, d, *y, y);
}

/* One linear layer of all experts: parameters are stacks over the experts (graph.h). */
static enum hapt_status expert_linear(struct bert *bert, const char *part, int64_t in, int64_t out, int x, int counts,
                                      int *y)
{
    const double slots = (double)bert->experts * (double)bert->capacity;
    const double real[HAPT_MAX_ATTRIBUTES] = {fmin(1, (double)(bert->top_k * bert->zoo.sequence) / slots)};
    int input[] = {x, 0, counts, 0};
    char suffix[64];
    snprintf(suffix, sizeof suffix, "moe.experts.*.%s.weight", part);
    HAPT_TRY(zoo_normal(&bert->zoo, path(bert, suffix), 3, (int64_t[]){bert->experts, out, in}, WEIGHT_STD, &input[1]));
    snprintf(suffix, sizeof suffix, "moe.experts.*.%s.bias", part);
    HAPT_TRY(zoo_parameter(&bert->zoo, path(bert, suffix), 2, (int64_t[]){bert->experts, out}, HAPT_INIT_ZERO, 0,
                           &input[3]));
    snprintf(suffix, sizeof suffix, "moe.experts.%s", part);
    return hapt_graph_add_op(bert->zoo.graph, "expert_linear", path(bert, suffix), input, 4, NULL, real, y);
}

static enum hapt_status mixture(struct bert *bert, int x, int *y)
{
    struct hapt_graph *graph = bert->zoo.graph;
    const int64_t d = bert->zoo.hidden, chosen[HAPT_MAX_ATTRIBUTES] = {bert->top_k};
    const int64_t slots[HAPT_MAX_ATTRIBUTES] = {bert->experts, bert->capacity};
    int logits, gate[HAPT_MAX_OUTPUTS], counts, h;
    HAPT_TRY(zoo_linear(&bert->zoo, path(bert, "moe.gate"), d, bert->experts, WEIGHT_STD, false, x, &logits));
    HAPT_TRY(hapt_graph_add_op(graph, "moe_gate", path(bert, "moe.top_k"), &logits, 1, chosen, NULL, gate));
    HAPT_TRY(hapt_graph_add_op(graph, "moe_count", path(bert, "moe.counts"), &gate[1], 1, slots, NULL, &counts));
    HAPT_TRY(
        hapt_graph_add_op(graph, "moe_dispatch", path(bert, "moe.dispatch"), (int[]){x, gate[1]}, 2, slots, NULL, &h));
    HAPT_TRY(expert_linear(bert, "intermediate.dense", d, 4 * d, h, counts, &h));
    HAPT_TRY(gelu(bert, path(bert, "moe.experts.intermediate.gelu"), h, &h));
    HAPT_TRY(expert_linear(bert, "output.dense", 4 * d, d, h, counts, &h));
    return hapt_graph_add_op(graph, "moe_combine", path(bert, "moe.combine"), (int[]){h, gate[0], gate[1]}, 3, NULL,
                             NULL, y);
}

static enum hapt_status layer(struct bert *bert, int64_t index, int *x)
{
    int y;
    snprintf(bert->layer, sizeof bert->layer, "bert.encoder.layer.%" PRId64, index);
    HAPT_TRY(attention(bert, x));
    if (bert->experts > 0 && index % 2 == 1)
        HAPT_TRY(mixture(bert, *x, &y));
    else
        HAPT_TRY(feed_forward(bert, *x, &y));
    return add_and_norm(bert, "output.dropout", "output.residual", "output.LayerNorm", y, x);
}

/* Adds the first row of the token types' table to *x. */
static enum hapt_status add_token_type(struct bert *bert, int *x)
{
    struct zoo *zoo = &bert->zoo;
    int input[2] = {*x};
    HAPT_TRY(zoo_normal(zoo, "bert.embeddings.token_type_embeddings.weight", 2, (int64_t[]){bert->types, zoo->hidden},
                        WEIGHT_STD, &input[1]));
    return hapt_graph_add_op(zoo->graph, "add_row", "bert.embeddings.token_type", input, 2, NULL, NULL, x);
}

/* Word and position embeddings. *words is the table; the output layer shares it. */
static enum hapt_status embeddings(struct bert *bert, int *words, int *targets, int *x)
{
    struct zoo *zoo = &bert->zoo;
    const int64_t d = zoo->hidden;
    int input[3];
    HAPT_TRY(zoo_tokens(zoo, &input[0], targets));
    HAPT_TRY(
        zoo_normal(zoo, "bert.embeddings.word_embeddings.weight", 2, (int64_t[]){zoo->vocab, d}, WEIGHT_STD, words));
    HAPT_TRY(zoo_normal(zoo, "bert.embeddings.position_embeddings.weight", 2, (int64_t[]){bert->positions, d},
                        WEIGHT_STD, &input[2]));
    input[1] = *words;
    HAPT_TRY(hapt_graph_add_op(zoo->graph, "embedding", "bert.embeddings", input, 3, NULL, NULL, x));
    if (bert->types > 0) HAPT_TRY(add_token_type(bert, x));
    HAPT_TRY(zoo_layer_norm(zoo, "bert.embeddings.LayerNorm", d, bert->norm_epsilon, *x, x));
    return zoo_drop(zoo, "bert.embeddings.dropout", zoo->dropout, *x, x);
}

static enum hapt_status head(struct bert *bert, int words, int targets, int x)
{
    struct zoo *zoo = &bert->zoo;
    const int64_t d = zoo->hidden;
    int product[3] = {0, words, 0};
    HAPT_TRY(zoo_linear(zoo, "cls.predictions.transform.dense", d, d, WEIGHT_STD, true, x, &x));
    HAPT_TRY(gelu(bert, "cls.predictions.transform.gelu", x, &x));
    HAPT_TRY(zoo_layer_norm(zoo, "cls.predictions.transform.LayerNorm", d, bert->norm_epsilon, x, &product[0]));
    if (!bert->tied)
        HAPT_TRY(
            zoo_normal(zoo, "cls.predictions.decoder.weight", 2, (int64_t[]){zoo->vocab, d}, WEIGHT_STD, &product[1]));
    HAPT_TRY(zoo_parameter(zoo, "cls.predictions.bias", 1, &zoo->vocab, HAPT_INIT_ZERO, 0, &product[2]));
    HAPT_TRY(hapt_graph_add_op(zoo->graph, "linear_t", "cls.predictions", product, 3, NULL, NULL, &x));
    return zoo_classify(zoo, x, targets);
}

static enum hapt_status check(const struct bert *bert)
{
    HAPT_TRY(zoo_check_blocks(&bert->zoo));
    if (bert->experts > 0 && bert->zoo.layers < 2)
        return hapt_fail(HAPT_ERR_USAGE, "every second layer has experts: give --layers 2 or more, or the family bert",
                         "a bert-moe of one layer has no experts");
    if (bert->top_k > bert->experts)
        return hapt_fail(HAPT_ERR_USAGE, "choose --top-k at most --experts",
                         "a token cannot go to %" PRId64 " of %" PRId64 " experts", bert->top_k, bert->experts);
    return HAPT_OK;
}

/* The shape of hapt's own models. */
static void set_shape(struct bert *bert)
{
    bert->ffn = 4 * bert->zoo.hidden;
    bert->positions = bert->zoo.sequence;
    bert->norm_epsilon = NORM_EPSILON;
}

static enum hapt_status build(struct bert *bert, struct hapt_model *model)
{
    int words, targets, x;
    model->sequence = (int)bert->zoo.sequence;
    model->vocab = (int)bert->zoo.vocab;
    HAPT_TRY(embeddings(bert, &words, &targets, &x));
    for (int64_t index = 0; index < bert->zoo.layers; index++) HAPT_TRY(layer(bert, index, &x));
    return head(bert, words, targets, x);
}

enum hapt_status hapt_zoo_bert(const struct hapt_config *config, struct hapt_arena *arena, struct hapt_model *model)
{
    static const char *const numbers[] = {"layers", "hidden", "heads", "sequence", "vocab", "microbatch", NULL};
    struct bert bert = {.tied = hapt_config_bool(config, "tied-embeddings")};
    HAPT_TRY(zoo_begin(&bert.zoo, config, numbers, arena, model));
    HAPT_TRY(zoo_take_dropout(&bert.zoo, config, arena, model));
    set_shape(&bert);
    HAPT_TRY(check(&bert));
    HAPT_TRY(hapt_model_set(model, arena, "tied-embeddings", bert.tied ? "yes" : "no"));
    return build(&bert, model);
}

enum hapt_status hapt_bert_build(const char *family, const struct hapt_bert *of, const struct hapt_config *config,
                                 struct hapt_arena *arena, struct hapt_model **model)
{
    const struct {
        const char *name;
        int64_t value;
    } number[] = {
        {"layers", of->layers}, {"hidden", of->hidden}, {"heads", of->heads}, {"ffn", of->ffn}, {"vocab", of->vocab}};
    struct hapt_model *built;
    struct bert bert = {.ffn = of->ffn,
                        .positions = of->positions,
                        .types = of->types,
                        .norm_epsilon = of->norm_epsilon,
                        .tanh = of->tanh,
                        .tied = of->tied};
    HAPT_TRY(hapt_model_begin(family, config, arena, &built));
    HAPT_TRY(zoo_open(&bert.zoo, config, arena, built));
    HAPT_TRY(zoo_take_dropout(&bert.zoo, config, arena, built));
    bert.zoo.layers = of->layers;
    bert.zoo.hidden = of->hidden;
    bert.zoo.heads = of->heads;
    bert.zoo.vocab = of->vocab;
    for (size_t i = 0; i < sizeof number / sizeof *number; i++)
        HAPT_TRY(zoo_set_number(built, arena, number[i].name, number[i].value));
    HAPT_TRY(zoo_set_number(built, arena, "sequence", bert.zoo.sequence));
    HAPT_TRY(zoo_set_number(built, arena, "microbatch", bert.zoo.rows));
    HAPT_TRY(check(&bert));
    HAPT_TRY(hapt_model_set(built, arena, "tied-embeddings", of->tied ? "yes" : "no"));
    HAPT_TRY(build(&bert, built));
    HAPT_TRY(hapt_model_finish(built, config, arena));
    *model = built;
    return HAPT_OK;
}

enum hapt_status hapt_zoo_bert_moe(const struct hapt_config *config, struct hapt_arena *arena, struct hapt_model *model)
{
    static const char *const numbers[] = {"layers",     "hidden",  "heads", "sequence", "vocab",
                                          "microbatch", "experts", "top-k", NULL};
    const double factor = hapt_config_real(config, "capacity-factor");
    struct bert bert = {.tied = hapt_config_bool(config, "tied-embeddings")};
    char text[32];
    bert.experts = hapt_config_int(config, "experts");
    bert.top_k = hapt_config_int(config, "top-k");
    HAPT_TRY(zoo_begin(&bert.zoo, config, numbers, arena, model));
    HAPT_TRY(zoo_take_dropout(&bert.zoo, config, arena, model));
    set_shape(&bert);
    HAPT_TRY(check(&bert));
    HAPT_TRY(hapt_model_set(model, arena, "tied-embeddings", bert.tied ? "yes" : "no"));
    snprintf(text, sizeof text, "%.9g", factor);
    HAPT_TRY(hapt_model_set(model, arena, "capacity-factor", text));
    bert.capacity = bert.zoo.sequence; /* enough for all tokens of a row: a token uses an expert at most once */
    if (factor > 0) {
        const double even = (double)(bert.zoo.sequence * bert.top_k) / (double)bert.experts;
        bert.capacity = (int64_t)fmax(1, fmin((double)bert.zoo.sequence, ceil(factor * even)));
    }
    return build(&bert, model);
}
