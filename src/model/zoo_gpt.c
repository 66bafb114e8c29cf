/*
 * GPT-2: learned positions, pre-LN blocks of causal attention and a tanh-GELU feed-forward of width 4 d, final layer
 * norm, output layer optionally tied to the token embedding. Attention has no dropout. Parameter names and layouts
 * ([in][out]) are GPT-2's.
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "zoo.h"

#define NORM_EPSILON 1e-5
#define WEIGHT_STD 0.02 /* GPT-2's, for every weight matrix and both embeddings */

struct builder {
    struct zoo *zoo;
    const struct hapt_gpt2 *of;
    double residual_std; /* projections into the residual stream: 0.02 / sqrt(2 layers) */
};

/* One block; *x [rows][T][d] is the residual stream. */
static enum hapt_status block(const struct builder *builder, int64_t index, int *x)
{
    struct zoo *zoo = builder->zoo;
    const struct hapt_gpt2 *of = builder->of;
    const int64_t d = of->hidden, attention[HAPT_MAX_ATTRIBUTES] = {of->heads, 1},
                  gelu[HAPT_MAX_ATTRIBUTES] = {of->erf};
    char name[96];
    int y;
#define NAME(suffix) (snprintf(name, sizeof name, "%sh.%" PRId64 "." suffix, of->prefix, index), name)
    HAPT_TRY(zoo_layer_norm(zoo, NAME("ln_1"), d, of->norm_epsilon, *x, &y));
    HAPT_TRY(zoo_linear_in_out(zoo, NAME("attn.c_attn"), d, 3 * d, WEIGHT_STD, y, &y));
    HAPT_TRY(zoo_causal_attention(zoo, NAME("attn"), &y, 1, attention, NULL, &y));
    HAPT_TRY(zoo_linear_in_out(zoo, NAME("attn.c_proj"), d, d, builder->residual_std, y, &y));
    HAPT_TRY(zoo_drop(zoo, NAME("attn.resid_dropout"), zoo->dropout, y, &y));
    HAPT_TRY(zoo_add(zoo, NAME("residual_1"), *x, y, x));
    HAPT_TRY(zoo_layer_norm(zoo, NAME("ln_2"), d, of->norm_epsilon, *x, &y));
    HAPT_TRY(zoo_linear_in_out(zoo, NAME("mlp.c_fc"), d, of->ffn, WEIGHT_STD, y, &y));
    HAPT_TRY(hapt_graph_add_op(zoo->graph, "gelu", NAME("mlp.gelu"), &y, 1, gelu, NULL, &y));
    HAPT_TRY(zoo_linear_in_out(zoo, NAME("mlp.c_proj"), of->ffn, d, builder->residual_std, y, &y));
    HAPT_TRY(zoo_drop(zoo, NAME("mlp.dropout"), zoo->dropout, y, &y));
    return zoo_add(zoo, NAME("residual_2"), *x, y, x);
#undef NAME
}

/* Rows of the table of tokens and of that of positions; input: tokens, both tables. */
static enum hapt_status embed(struct zoo *zoo, const int input[3], int *x)
{
    int position[2] = {0, input[2]}, y;
    if (!zoo->documents) return hapt_graph_add_op(zoo->graph, "embedding", "embedding", input, 3, NULL, NULL, x);
    HAPT_TRY(zoo_positions(zoo, &position[0]));
    HAPT_TRY(hapt_graph_add_op(zoo->graph, "embedding", "embedding", input, 2, NULL, NULL, x));
    HAPT_TRY(hapt_graph_add_op(zoo->graph, "embedding", "position_embedding", position, 2, NULL, NULL, &y));
    return zoo_add(zoo, "embedding_sum", *x, y, x);
}

static enum hapt_status build(struct zoo *zoo, const struct hapt_gpt2 *of)
{
    const struct builder builder = {zoo, of, WEIGHT_STD / sqrt(2.0 * (double)of->layers)};
    const int64_t table[] = {of->vocab, of->hidden}, positions[] = {of->positions, of->hidden};
    int embedding[3], product[3] = {0, 0, -1}, targets, x;
    char name[64];
#define NAME(suffix) (snprintf(name, sizeof name, "%s" suffix, of->prefix), name)
    HAPT_TRY(zoo_tokens(zoo, &embedding[0], &targets));
    HAPT_TRY(zoo_normal(zoo, NAME("wte.weight"), 2, table, WEIGHT_STD, &embedding[1]));
    HAPT_TRY(zoo_normal(zoo, NAME("wpe.weight"), 2, positions, WEIGHT_STD, &embedding[2]));
    HAPT_TRY(embed(zoo, embedding, &x));
    HAPT_TRY(zoo_drop(zoo, NAME("drop"), zoo->dropout, x, &x));
    for (int64_t index = 0; index < of->layers; index++) HAPT_TRY(block(&builder, index, &x));
    HAPT_TRY(zoo_layer_norm(zoo, NAME("ln_f"), of->hidden, of->norm_epsilon, x, &product[0]));
#undef NAME
    product[1] = embedding[1];
    if (!of->tied) HAPT_TRY(zoo_normal(zoo, "lm_head.weight", 2, table, WEIGHT_STD, &product[1]));
    HAPT_TRY(hapt_graph_add_op(zoo->graph, "linear_t", "lm_head", product, 3, NULL, NULL, &x));
    return zoo_classify(zoo, x, targets);
}

enum hapt_status hapt_zoo_gpt(const struct hapt_config *config, struct hapt_arena *arena, struct hapt_model *model)
{
    static const char *const numbers[] = {"layers", "hidden", "heads", "sequence", "vocab", "microbatch", NULL};
    const bool tied = hapt_config_bool(config, "tied-embeddings");
    struct zoo zoo;
    HAPT_TRY(zoo_begin(&zoo, config, numbers, arena, model));
    HAPT_TRY(zoo_take_dropout(&zoo, config, arena, model));
    HAPT_TRY(zoo_take_documents(&zoo, config, zoo.vocab, arena, model));
    HAPT_TRY(zoo_check_blocks(&zoo));
    HAPT_TRY(hapt_model_set(model, arena, "tied-embeddings", tied ? "yes" : "no"));
    model->sequence = (int)zoo.sequence;
    model->vocab = (int)zoo.vocab;
    return build(&zoo, &(struct hapt_gpt2){.layers = zoo.layers,
                                           .hidden = zoo.hidden,
                                           .heads = zoo.heads,
                                           .ffn = 4 * zoo.hidden,
                                           .vocab = zoo.vocab,
                                           .positions = zoo.sequence,
                                           .norm_epsilon = NORM_EPSILON,
                                           .tied = tied,
                                           .prefix = ""});
}

enum hapt_status hapt_gpt2_build(const char *family, const struct hapt_gpt2 *gpt, const struct hapt_config *config,
                                 struct hapt_arena *arena, struct hapt_model **model)
{
    struct hapt_model *built;
    struct zoo zoo;
    HAPT_TRY(hapt_model_begin(family, config, arena, &built));
    HAPT_TRY(zoo_open(&zoo, config, arena, built));
    HAPT_TRY(zoo_take_dropout(&zoo, config, arena, built));
    HAPT_TRY(zoo_take_documents(&zoo, config, gpt->vocab, arena, built));
    HAPT_TRY(zoo_set_number(built, arena, "layers", gpt->layers));
    HAPT_TRY(zoo_set_number(built, arena, "hidden", gpt->hidden));
    HAPT_TRY(zoo_set_number(built, arena, "heads", gpt->heads));
    HAPT_TRY(zoo_set_number(built, arena, "ffn", gpt->ffn));
    HAPT_TRY(zoo_set_number(built, arena, "sequence", zoo.sequence));
    HAPT_TRY(zoo_set_number(built, arena, "vocab", gpt->vocab));
    HAPT_TRY(zoo_set_number(built, arena, "microbatch", zoo.rows));
    HAPT_TRY(hapt_model_set(built, arena, "tied-embeddings", gpt->tied ? "yes" : "no"));
    built->sequence = (int)zoo.sequence;
    built->vocab = (int)gpt->vocab;
    HAPT_TRY(build(&zoo, gpt));
    HAPT_TRY(hapt_model_finish(built, config, arena));
    *model = built;
    return HAPT_OK;
}
