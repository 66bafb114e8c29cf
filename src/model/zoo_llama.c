/*
 * Llama (Touvron et al. 2023): RMS norm before each half of a block, rotary positions, attention where several query
 * heads may share a head of keys and values, SwiGLU feed-forward, no biases. Parameter names and layouts ([out][in])
 * are Hugging Face's.
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "zoo.h"

#define NORM_EPSILON 1e-5
#define WEIGHT_STD 0.02

struct llama {
    struct zoo zoo;
    int64_t kv_heads, ffn;
    double rope_base;
    bool tied;
};

/* One of q, k, v; q and k are rotated by their positions. */
static enum hapt_status project(struct llama *llama, const char *prefix, int64_t heads, bool turned, int x, int *y)
{
    struct zoo *zoo = &llama->zoo;
    const int64_t rope[HAPT_MAX_ATTRIBUTES] = {heads};
    const double base[HAPT_MAX_ATTRIBUTES] = {llama->rope_base};
    char name[96];
    HAPT_TRY(zoo_linear(zoo, prefix, zoo->hidden, heads * (zoo->hidden / zoo->heads), WEIGHT_STD, false, x, y));
    if (!turned) return HAPT_OK;
    snprintf(name, sizeof name, "%s.rope", prefix);
    return hapt_graph_add_op(zoo->graph, "rope", name, y, 1, rope, base, y);
}

/* One block; *x [rows][T][d] is the residual stream. */
static enum hapt_status block(struct llama *llama, int64_t index, int *x)
{
    struct zoo *zoo = &llama->zoo;
    const int64_t d = zoo->hidden, attention[HAPT_MAX_ATTRIBUTES] = {llama->kv_heads, 1};
    char name[80];
    int y, qkv[3], gated[2], output[HAPT_MAX_OUTPUTS];
#define NAME(suffix) (snprintf(name, sizeof name, "model.layers.%" PRId64 "." suffix, index), name)
    HAPT_TRY(zoo_rms_norm(zoo, NAME("input_layernorm"), d, NORM_EPSILON, *x, &y));
    HAPT_TRY(project(llama, NAME("self_attn.q_proj"), zoo->heads, true, y, &qkv[0]));
    HAPT_TRY(project(llama, NAME("self_attn.k_proj"), llama->kv_heads, true, y, &qkv[1]));
    HAPT_TRY(project(llama, NAME("self_attn.v_proj"), llama->kv_heads, false, y, &qkv[2]));
    HAPT_TRY(hapt_graph_add_op(zoo->graph, "grouped_attention", NAME("self_attn"), qkv, 3, attention, NULL, output));
    HAPT_TRY(zoo_linear(zoo, NAME("self_attn.o_proj"), d, d, WEIGHT_STD, false, output[0], &y));
    HAPT_TRY(zoo_add(zoo, NAME("residual_1"), *x, y, x));
    HAPT_TRY(zoo_rms_norm(zoo, NAME("post_attention_layernorm"), d, NORM_EPSILON, *x, &y));
    HAPT_TRY(zoo_linear(zoo, NAME("mlp.gate_proj"), d, llama->ffn, WEIGHT_STD, false, y, &gated[0]));
    HAPT_TRY(zoo_linear(zoo, NAME("mlp.up_proj"), d, llama->ffn, WEIGHT_STD, false, y, &gated[1]));
    HAPT_TRY(hapt_graph_add_op(zoo->graph, "swiglu", NAME("mlp.swiglu"), gated, 2, NULL, NULL, &y));
    HAPT_TRY(zoo_linear(zoo, NAME("mlp.down_proj"), llama->ffn, d, WEIGHT_STD, false, y, &y));
    return zoo_add(zoo, NAME("residual_2"), *x, y, x);
#undef NAME
}

static enum hapt_status build(struct llama *llama)
{
    struct zoo *zoo = &llama->zoo;
    const int64_t table[] = {zoo->vocab, zoo->hidden};
    int embedding[2], product[2], targets, x;
    HAPT_TRY(zoo_tokens(zoo, &embedding[0], &targets));
    HAPT_TRY(zoo_normal(zoo, "model.embed_tokens.weight", 2, table, WEIGHT_STD, &embedding[1]));
    HAPT_TRY(hapt_graph_add_op(zoo->graph, "embedding", "model.embed_tokens", embedding, 2, NULL, NULL, &x));
    for (int64_t index = 0; index < zoo->layers; index++) HAPT_TRY(block(llama, index, &x));
    HAPT_TRY(zoo_rms_norm(zoo, "model.norm", zoo->hidden, NORM_EPSILON, x, &product[0]));
    product[1] = embedding[1];
    if (!llama->tied) HAPT_TRY(zoo_normal(zoo, "lm_head.weight", 2, table, WEIGHT_STD, &product[1]));
    HAPT_TRY(hapt_graph_add_op(zoo->graph, "linear_t", "lm_head", product, 2, NULL, NULL, &x));
    return zoo_classify(zoo, x, targets);
}

/* Two thirds of 4 d, rounded up to a multiple of 256, as in the published models. */
static int64_t default_ffn(int64_t hidden)
{
    return (8 * hidden / 3 + 255) / 256 * 256;
}

static enum hapt_status check_shape(const struct llama *llama)
{
    HAPT_TRY(zoo_check_blocks(&llama->zoo));
    if (llama->zoo.hidden / llama->zoo.heads % 2 != 0)
        return hapt_fail(HAPT_ERR_USAGE, "rotary positions rotate pairs of columns: choose --hidden / --heads even",
                         "heads of %" PRId64 " columns cannot be split into two halves",
                         llama->zoo.hidden / llama->zoo.heads);
    if (llama->zoo.heads % llama->kv_heads != 0)
        return hapt_fail(HAPT_ERR_USAGE, "choose --kv-heads as a divisor of --heads",
                         "%" PRId64 " heads cannot share %" PRId64 " heads of keys and values evenly", llama->zoo.heads,
                         llama->kv_heads);
    return HAPT_OK;
}

enum hapt_status hapt_zoo_llama(const struct hapt_config *config, struct hapt_arena *arena, struct hapt_model *model)
{
    static const char *const numbers[] = {"layers", "hidden", "heads", "sequence", "vocab", "microbatch", NULL};
    struct llama llama = {.kv_heads = hapt_config_int(config, "kv-heads"),
                          .ffn = hapt_config_int(config, "ffn"),
                          .rope_base = hapt_config_real(config, "rope-base"),
                          /* The option's default (yes) is GPT-2's; llama's is no. */
                          .tied = hapt_config_chosen(config, "tied-embeddings") &&
                                  hapt_config_bool(config, "tied-embeddings")};
    char text[32];
    HAPT_TRY(zoo_begin(&llama.zoo, config, numbers, arena, model));
    if (llama.kv_heads == 0) llama.kv_heads = llama.zoo.heads;
    if (llama.ffn == 0) llama.ffn = default_ffn(llama.zoo.hidden);
    HAPT_TRY(check_shape(&llama));
    HAPT_TRY(zoo_set_number(model, arena, "kv-heads", llama.kv_heads));
    HAPT_TRY(zoo_set_number(model, arena, "ffn", llama.ffn));
    snprintf(text, sizeof text, "%g", llama.rope_base);
    HAPT_TRY(hapt_model_set(model, arena, "rope-base", text));
    HAPT_TRY(hapt_model_set(model, arena, "tied-embeddings", llama.tied ? "yes" : "no"));
    model->sequence = (int)llama.zoo.sequence;
    model->vocab = (int)llama.zoo.vocab;
    return build(&llama);
}
