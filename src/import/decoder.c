/* Config files of Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE, Gemma 2 and Gemma 3. */
#include <math.h>
#include <string.h>

#include "shape.h"

enum { MAX_LAYERS = 1024, MAX_SIZE = 1 << 24 };

/* Gemma 2 and 3 have norms and scales of their own. */
static bool is_gemma(const struct import_shape *shape)
{
    return strncmp(shape->family, "gemma", 5) == 0;
}

static bool is(const struct import_shape *shape, const char *family)
{
    return strcmp(shape->family, family) == 0;
}

static enum hapt_status read_sizes(struct import_shape *shape, struct hapt_decoder *of)
{
    struct json_options *options = shape->options;
    HAPT_TRY(json_options_need_int(options, "num_hidden_layers", 1, MAX_LAYERS, &of->layers));
    HAPT_TRY(import_check_count(shape, "layers", of->layers));
    HAPT_TRY(json_options_need_int(options, "hidden_size", 1, MAX_SIZE, &of->hidden));
    HAPT_TRY(json_options_need_int(options, "intermediate_size", 1, MAX_SIZE, &of->ffn));
    HAPT_TRY(json_options_need_int(options, "vocab_size", 2, 1 << 30, &of->vocab));
    HAPT_TRY(json_options_need_int(options, "num_attention_heads", 1, MAX_SIZE, &of->heads));
    HAPT_TRY(json_options_int(options, "num_key_value_heads", 1, MAX_SIZE, is(shape, "llama") ? of->heads : 0,
                              &of->kv_heads));
    HAPT_TRY(json_options_int(options, "head_dim", 1, MAX_SIZE,
                              is_gemma(shape) || is(shape, "qwen3") ? 0 : of->hidden / of->heads, &of->head_size));
    if (of->kv_heads == 0 || of->head_size == 0) /* their defaults differ between families */
        return hapt_fail(HAPT_ERR_INPUT, "add it to config.json", "%s: %s is missing", options->path,
                         of->kv_heads == 0 ? "num_key_value_heads" : "head_dim");
    HAPT_TRY(json_options_real(options, "rms_norm_eps", 0, 0.1, is(shape, "mixtral") ? 1e-5 : 1e-6, &of->norm_epsilon));
    HAPT_TRY(json_options_bool(options, "tie_word_embeddings", is_gemma(shape), &of->tied));
    HAPT_TRY(import_dropout(shape, "attention_dropout", false));
    if (of->heads % of->kv_heads != 0)
        return hapt_fail(HAPT_ERR_INPUT, NULL, "%s: %lld heads cannot share %lld heads of keys and values evenly",
                         options->path, (long long)of->heads, (long long)of->kv_heads);
    if (of->head_size < 2 || of->head_size % 2 != 0)
        return hapt_fail(HAPT_ERR_INPUT, NULL, "%s: heads of %lld columns cannot be rotated", options->path,
                         (long long)of->head_size);
    return HAPT_OK;
}

static enum hapt_status read_unit(struct import_shape *shape, struct hapt_decoder *of)
{
    const char *name, *other, *const key = is_gemma(shape) ? "hidden_activation" : "hidden_act";
    HAPT_TRY(json_options_text(shape->options, "hidden_act", is_gemma(shape) ? "gelu_pytorch_tanh" : "silu",
                               shape->arena, &other));
    name = other;
    if (is_gemma(shape)) HAPT_TRY(json_options_text(shape->options, key, other, shape->arena, &name));
    if (strcmp(name, "silu") == 0 || strcmp(name, "swish") == 0)
        of->unit = HAPT_DECODER_SWIGLU;
    else if (strcmp(name, "gelu_pytorch_tanh") == 0 || strcmp(name, "gelu_new") == 0)
        of->unit = HAPT_DECODER_GEGLU_TANH;
    else if (strcmp(name, "gelu") == 0)
        of->unit = HAPT_DECODER_GEGLU_ERF;
    else
        return hapt_fail(HAPT_ERR_INPUT, "known are silu, gelu and gelu_pytorch_tanh", "%s: %s \"%.40s\" is unknown",
                         shape->options->path, key, name);
    return HAPT_OK;
}

/* layer_types: one word per layer. */
static enum hapt_status read_layer_types(struct import_shape *shape, struct hapt_decoder *of, bool *slides)
{
    const json_t *list = json_object_get(shape->options->left, "layer_types");
    char text[64];
    if (!json_is_array(list) || (int64_t)json_array_size(list) != of->layers)
        return hapt_fail(HAPT_ERR_INPUT, NULL, "%s: layer_types is %s, not a list of %lld words", shape->options->path,
                         json_shown(list, text), (long long)of->layers);
    for (int64_t layer = 0; layer < of->layers; layer++) {
        const json_t *word = json_array_get(list, (size_t)layer);
        const char *type = json_is_string(word) ? json_string_value(word) : "";
        slides[layer] = strcmp(type, "sliding_attention") == 0;
        if (slides[layer] && of->window == 0)
            return hapt_fail(HAPT_ERR_INPUT, NULL, "%s: layer_types has sliding layers, but sliding_window is missing",
                             shape->options->path);
        if (slides[layer] || strcmp(type, "full_attention") == 0) continue;
        return hapt_fail(HAPT_ERR_INPUT, "known are full_attention and sliding_attention", "%s: layer_types has %s",
                         shape->options->path, json_shown(word, text));
    }
    json_object_del(shape->options->left, "layer_types");
    return HAPT_OK;
}

/* Which layers slide, if the file has no layer_types: all (Mistral, Mixtral); from a layer on, if they are to (Qwen);
 * all but each second (Gemma 2), or sixth or so (Gemma 3). */
static enum hapt_status choose_sliding(struct import_shape *shape, struct hapt_decoder *of, int64_t first,
                                       int64_t pattern, bool *slides)
{
    if (json_options_has(shape->options, "layer_types")) return read_layer_types(shape, of, slides);
    json_object_del(shape->options->left, "layer_types");
    for (int64_t layer = 0; layer < of->layers; layer++)
        slides[layer] = is_gemma(shape) ? (layer + 1) % pattern != 0 : layer >= first;
    return HAPT_OK;
}

/* Only the families that have an option read it; in the files of others it is unknown. */
static enum hapt_status read_windows(struct import_shape *shape, struct hapt_decoder *of)
{
    struct json_options *options = shape->options;
    const bool qwen = strncmp(shape->family, "qwen", 4) == 0;
    bool wanted = true, *slides;
    int64_t first = 0, pattern = is(shape, "gemma2") ? 2 : 6;
    if (is(shape, "llama")) return HAPT_OK;
    /* Absent, it is the class's default; null is no window. */
    const int64_t absent = json_options_names(options, "sliding_window") || is(shape, "mixtral") ? 0 : 4096;
    HAPT_TRY(json_options_int(options, "sliding_window", 1, INT64_C(1) << 40, absent, &of->window));
    if (qwen) {
        HAPT_TRY(json_options_bool(options, "use_sliding_window", false, &wanted));
        HAPT_TRY(json_options_int(options, "max_window_layers", 0, INT64_C(1) << 40, 28, &first));
        HAPT_TRY(json_options_expect_bool(options, "use_mrope", false));
    }
    if (is_gemma(shape)) {
        HAPT_TRY(json_options_int(options, "_sliding_window_pattern", 1, INT64_C(1) << 40, pattern, &pattern));
        HAPT_TRY(json_options_int(options, "sliding_window_pattern", 1, INT64_C(1) << 40, pattern, &pattern));
    }
    HAPT_NEW(slides, shape->arena, of->layers);
    if (is(shape, "qwen3_moe")) first = 0; /* its windows are those of all layers */
    HAPT_TRY(choose_sliding(shape, of, first, pattern, slides));
    for (int64_t layer = 0; layer < of->layers; layer++) slides[layer] = slides[layer] && wanted && of->window > 0;
    of->slides = slides;
    return HAPT_OK;
}

/* A soft cap: null is none; absent, it is Gemma 2's default. */
static enum hapt_status read_cap(struct import_shape *shape, const char *key, double gemma2, double *cap)
{
    const bool none = json_options_names(shape->options, key) || !is(shape, "gemma2");
    return json_options_real(shape->options, key, 0, 1e9, none ? 0 : gemma2, cap);
}

static enum hapt_status read_attention(struct import_shape *shape, struct hapt_decoder *of)
{
    struct json_options *options = shape->options;
    bool bias = false;
    double scalar;
    if (is(shape, "llama") || is(shape, "qwen3") || is(shape, "qwen3_moe") || is_gemma(shape))
        HAPT_TRY(json_options_bool(options, "attention_bias", false, &bias));
    of->qkv_bias = bias || is(shape, "qwen2");
    of->o_bias = bias;
    of->head_norms = is(shape, "qwen3") || is(shape, "qwen3_moe") || is(shape, "gemma3_text");
    if (is(shape, "llama")) HAPT_TRY(json_options_bool(options, "mlp_bias", false, &of->mlp_bias));
    if (!is_gemma(shape)) return HAPT_OK;
    of->norm_adds_one = of->outer_norms = true;
    of->embedding_scale = sqrt((double)of->hidden);
    HAPT_TRY(json_options_real(options, "query_pre_attn_scalar", 1e-3, 1e9, 256, &scalar));
    of->attention_scale = 1 / sqrt(scalar);
    HAPT_TRY(read_cap(shape, "attn_logit_softcapping", 50, &of->attention_cap));
    HAPT_TRY(read_cap(shape, "final_logit_softcapping", 30, &of->logit_cap));
    if (is(shape, "gemma3_text") && of->attention_cap > 0)
        return hapt_fail(HAPT_ERR_INPUT, "set it to null: transformers does not apply it to Gemma 3",
                         "%s: attn_logit_softcapping is %g", options->path, of->attention_cap);
    return json_options_expect_bool(options, "use_bidirectional_attention", false);
}

/* Gemma 3: one entry for each type of layers; older files scale full attention alone. */
static enum hapt_status read_ropes_by_type(struct import_shape *shape, struct hapt_decoder *of)
{
    struct json_options *options = shape->options, outer, inner;
    static const char *const types[] = {"full_attention", "sliding_attention"};
    HAPT_TRY(json_options_object(options, "rope_parameters", &outer));
    enum hapt_status status = HAPT_OK;
    for (int i = 0; i < 2 && status == HAPT_OK; i++) {
        if (!json_options_has(&outer, types[i])) {
            status = hapt_fail(HAPT_ERR_INPUT, "compare it with the published file", "%s: rope_parameters has no %s",
                               options->path, types[i]);
            break;
        }
        status = json_options_object(&outer, types[i], &inner);
        if (status == HAPT_OK) status = import_rope(shape, &inner, of->head_size, i == 0 ? 1e6 : 10000, &of->rope[i]);
        json_options_release(&inner);
    }
    if (status == HAPT_OK) status = json_options_finish(&outer);
    json_options_release(&outer);
    return status;
}

static enum hapt_status read_ropes(struct import_shape *shape, struct hapt_decoder *of)
{
    struct json_options *options = shape->options, scaling;
    const bool gemma3 = is(shape, "gemma3_text");
    double base, sliding_base = 10000;
    if (gemma3 && json_options_has(options, "rope_parameters")) return read_ropes_by_type(shape, of);
    HAPT_TRY(json_options_real(options, "rope_theta", 1e-3, 1e15, gemma3 || is(shape, "mixtral") ? 1e6 : 10000, &base));
    if (gemma3) HAPT_TRY(json_options_real(options, "rope_local_base_freq", 1e-3, 1e15, 10000, &sliding_base));
    const bool newer = json_options_has(options, "rope_parameters");
    HAPT_TRY(json_options_object(options, newer ? "rope_parameters" : "rope_scaling", &scaling));
    const enum hapt_status status = import_rope(shape, &scaling, of->head_size, base, &of->rope[0]);
    json_options_release(&scaling);
    of->rope[1] = gemma3 ? (struct hapt_decoder_rope){.base = sliding_base} : of->rope[0];
    return status;
}

/* Numbers of layers whose feed-forward is dense although others mix. */
static enum hapt_status read_dense_layers(struct import_shape *shape, const struct hapt_decoder *of, bool *mixes)
{
    json_t *list = json_options_take(shape->options, "mlp_only_layers");
    enum hapt_status status = HAPT_OK;
    char text[64];
    if (list && !json_is_array(list))
        status = hapt_fail(HAPT_ERR_INPUT, NULL, "%s: mlp_only_layers is %s, not a list", shape->options->path,
                           json_shown(list, text));
    for (size_t i = 0; status == HAPT_OK && i < json_array_size(list); i++) {
        const json_t *number = json_array_get(list, i);
        const int64_t layer = json_integer_value(number);
        if (!json_is_integer(number) || layer < 0 || layer >= of->layers)
            status = hapt_fail(HAPT_ERR_INPUT, NULL, "%s: mlp_only_layers has %s", shape->options->path,
                               json_shown(number, text));
        else
            mixes[layer] = false;
    }
    json_decref(list);
    return status;
}

static enum hapt_status read_mixtures(struct import_shape *shape, struct hapt_decoder *of)
{
    struct json_options *options = shape->options;
    int64_t step = 1;
    bool normalised = true, *mixes;
    if (!is(shape, "mixtral") && !is(shape, "qwen3_moe")) return HAPT_OK;
    HAPT_NEW(mixes, shape->arena, of->layers);
    HAPT_TRY(json_options_int(options, "num_local_experts", 1, 65536, is(shape, "mixtral") ? 8 : 128, &of->experts));
    HAPT_TRY(json_options_int(options, "num_experts", 1, 65536, of->experts, &of->experts));
    HAPT_TRY(json_options_int(options, "num_experts_per_tok", 1, 65536, is(shape, "mixtral") ? 2 : 8, &of->top_k));
    HAPT_TRY(import_check_count(shape, "experts", of->experts));
    of->expert_ffn = of->ffn;
    of->mixture = "mlp";
    memcpy(of->expert_weights, (const char *[]){"gate_proj", "up_proj", "down_proj"}, sizeof of->expert_weights);
    if (is(shape, "mixtral")) {
        double jitter;
        of->mixture = "block_sparse_moe";
        memcpy(of->expert_weights, (const char *[]){"w1", "w3", "w2"}, sizeof of->expert_weights);
        HAPT_TRY(json_options_real(options, "router_jitter_noise", 0, 1, 0, &jitter));
        if (jitter > 0)
            return hapt_fail(HAPT_ERR_INPUT, "hapt adds no noise", "%s: router_jitter_noise is %g", options->path,
                             jitter);
    } else {
        HAPT_TRY(json_options_need_int(options, "moe_intermediate_size", 1, MAX_SIZE, &of->expert_ffn));
        HAPT_TRY(json_options_int(options, "decoder_sparse_step", 1, MAX_LAYERS, 1, &step));
        HAPT_TRY(json_options_bool(options, "norm_topk_prob", false, &normalised));
    }
    if (of->top_k > of->experts)
        return hapt_fail(HAPT_ERR_INPUT, NULL, "%s: a token cannot go to %lld of %lld experts", options->path,
                         (long long)of->top_k, (long long)of->experts);
    of->weighs_over_all = !normalised;
    for (int64_t layer = 0; layer < of->layers; layer++) mixes[layer] = (layer + 1) % step == 0;
    of->mixes = mixes;
    of->capacity_factor = hapt_config_real(shape->config, "capacity-factor");
    return read_dense_layers(shape, of, mixes);
}

/* Rotary positions go on beyond those of pre-training, but the model has not seen them. */
static enum hapt_status check_positions(struct import_shape *shape)
{
    int64_t most;
    const int64_t sequence = hapt_config_int(shape->config, "sequence");
    HAPT_TRY(json_options_int(shape->options, "max_position_embeddings", 1, INT64_C(1) << 40, 0, &most));
    if (most > 0 && sequence > most)
        hapt_warn(shape->env, "%s: a sequence of %lld tokens is longer than max_position_embeddings, %lld\n",
                  shape->options->path, (long long)sequence, (long long)most);
    return HAPT_OK;
}

enum hapt_status import_decoder(struct import_shape *shape, struct hapt_model **model)
{
    struct hapt_decoder of = {0};
    HAPT_TRY(read_sizes(shape, &of));
    HAPT_TRY(read_unit(shape, &of));
    HAPT_TRY(read_windows(shape, &of));
    HAPT_TRY(read_attention(shape, &of));
    HAPT_TRY(read_ropes(shape, &of));
    HAPT_TRY(read_mixtures(shape, &of));
    HAPT_TRY(check_positions(shape));
    HAPT_TRY(json_options_finish(shape->options));
    return hapt_decoder_build(shape->family, &of, shape->config, shape->arena, model);
}
