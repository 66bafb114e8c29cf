/*
 * GPT-2: learned positions, pre-LN blocks of causal attention and a tanh-GELU feed-forward of width 4 d, final layer
 * norm, output layer optionally tied to the token embedding. No dropout. Parameter names and layouts ([in][out]) are
 * GPT-2's.
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "zoo.h"

#define NORM_EPSILON 1e-5
#define WEIGHT_STD 0.02 /* GPT-2's, for every weight matrix and both embeddings */

struct gpt {
    struct zoo zoo;
    bool tied;
    double residual_std; /* projections into the residual stream: 0.02 / sqrt(2 layers) */
};

/* One block; *x [rows][T][d] is the residual stream. */
static enum hapt_status block(struct gpt *gpt, int64_t index, int *x)
{
    struct zoo *zoo = &gpt->zoo;
    const int64_t d = zoo->hidden;
    const int64_t attention[HAPT_MAX_ATTRIBUTES] = {zoo->heads, 1};
    char name[64];
    int y, output[HAPT_MAX_OUTPUTS];
#define NAME(suffix) (snprintf(name, sizeof name, "h.%" PRId64 "." suffix, index), name)
    HAPT_TRY(zoo_layer_norm(zoo, NAME("ln_1"), d, NORM_EPSILON, *x, &y));
    HAPT_TRY(zoo_linear_in_out(zoo, NAME("attn.c_attn"), d, 3 * d, WEIGHT_STD, y, &y));
    HAPT_TRY(hapt_graph_add_op(zoo->graph, "attention", NAME("attn"), &y, 1, attention, NULL, output));
    HAPT_TRY(zoo_linear_in_out(zoo, NAME("attn.c_proj"), d, d, gpt->residual_std, output[0], &y));
    HAPT_TRY(zoo_add(zoo, NAME("residual_1"), *x, y, x));
    HAPT_TRY(zoo_layer_norm(zoo, NAME("ln_2"), d, NORM_EPSILON, *x, &y));
    HAPT_TRY(zoo_linear_in_out(zoo, NAME("mlp.c_fc"), d, 4 * d, WEIGHT_STD, y, &y));
    HAPT_TRY(hapt_graph_add_op(zoo->graph, "gelu", NAME("mlp.gelu"), &y, 1, NULL, NULL, &y));
    HAPT_TRY(zoo_linear_in_out(zoo, NAME("mlp.c_proj"), 4 * d, d, gpt->residual_std, y, &y));
    return zoo_add(zoo, NAME("residual_2"), *x, y, x);
#undef NAME
}

static enum hapt_status build(struct gpt *gpt)
{
    struct zoo *zoo = &gpt->zoo;
    const int64_t table[] = {zoo->vocab, zoo->hidden};
    int embedding[3], product[3] = {0, 0, -1}, targets, x;
    HAPT_TRY(zoo_tokens(zoo, &embedding[0], &targets));
    HAPT_TRY(zoo_normal(zoo, "wte.weight", 2, table, WEIGHT_STD, &embedding[1]));
    HAPT_TRY(zoo_normal(zoo, "wpe.weight", 2, (int64_t[]){zoo->sequence, zoo->hidden}, WEIGHT_STD, &embedding[2]));
    HAPT_TRY(hapt_graph_add_op(zoo->graph, "embedding", "embedding", embedding, 3, NULL, NULL, &x));
    for (int64_t index = 0; index < zoo->layers; index++) HAPT_TRY(block(gpt, index, &x));
    HAPT_TRY(zoo_layer_norm(zoo, "ln_f", zoo->hidden, NORM_EPSILON, x, &product[0]));
    product[1] = embedding[1];
    if (!gpt->tied) HAPT_TRY(zoo_normal(zoo, "lm_head.weight", 2, table, WEIGHT_STD, &product[1]));
    HAPT_TRY(hapt_graph_add_op(zoo->graph, "linear_t", "lm_head", product, 3, NULL, NULL, &x));
    return zoo_classify(zoo, x, targets);
}

enum hapt_status hapt_zoo_gpt(const struct hapt_config *config, struct hapt_arena *arena, struct hapt_model *model)
{
    static const char *const numbers[] = {"layers", "hidden", "heads", "sequence", "vocab", "microbatch", NULL};
    struct gpt gpt = {.tied = hapt_config_bool(config, "tied-embeddings")};
    HAPT_TRY(zoo_begin(&gpt.zoo, config, numbers, arena, model));
    HAPT_TRY(zoo_check_blocks(&gpt.zoo));
    HAPT_TRY(hapt_model_set(model, arena, "tied-embeddings", gpt.tied ? "yes" : "no"));
    gpt.residual_std = WEIGHT_STD / sqrt(2.0 * (double)gpt.zoo.layers);
    model->sequence = (int)gpt.zoo.sequence;
    model->vocab = (int)gpt.zoo.vocab;
    return build(&gpt);
}
