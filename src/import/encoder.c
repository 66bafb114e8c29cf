/* Config files of BERT, ViT and DINOv2. */
#include <string.h>

#include "shape.h"

enum { MAX_LAYERS = 1024, MAX_SIZE = 1 << 24, MAX_IMAGE = 1 << 14 };

enum hapt_status import_gelu(struct import_shape *shape, const char *key, const char *fallback, bool *tanh)
{
    const char *name;
    HAPT_TRY(json_options_text(shape->options, key, fallback, shape->arena, &name));
    *tanh = strcmp(name, "gelu_new") == 0 || strcmp(name, "gelu_pytorch_tanh") == 0;
    if (*tanh || strcmp(name, "gelu") == 0) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, "known are gelu, gelu_new and gelu_pytorch_tanh", "%s: %s \"%.40s\" is unknown",
                     shape->options->path, key, name);
}

enum hapt_status import_check_heads(const struct import_shape *shape, int64_t hidden, int64_t heads)
{
    if (hidden % heads == 0) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, NULL, "%s: %lld columns cannot be divided into %lld heads", shape->options->path,
                     (long long)hidden, (long long)heads);
}

enum hapt_status import_check_positions(const struct import_shape *shape, int64_t positions)
{
    const long long sequence = (long long)hapt_config_int(shape->config, "sequence");
    if (sequence <= positions) return HAPT_OK;
    return hapt_fail(HAPT_ERR_USAGE, "shorten --sequence", "%s has %lld positions: a sequence of %lld is too long",
                     shape->folder, (long long)positions, sequence);
}

/* Reads the options that all encoders have. */
static enum hapt_status read_blocks(struct import_shape *shape, int64_t *layers, int64_t *hidden, int64_t *heads,
                                    double default_epsilon, double *epsilon, bool *tanh)
{
    struct json_options *options = shape->options;
    HAPT_TRY(json_options_need_int(options, "num_hidden_layers", 1, MAX_LAYERS, layers));
    HAPT_TRY(import_check_count(shape, "layers", *layers));
    HAPT_TRY(json_options_need_int(options, "hidden_size", 1, MAX_SIZE, hidden));
    HAPT_TRY(json_options_need_int(options, "num_attention_heads", 1, MAX_SIZE, heads));
    HAPT_TRY(json_options_real(options, "layer_norm_eps", 0, 0.1, default_epsilon, epsilon));
    HAPT_TRY(import_gelu(shape, "hidden_act", "gelu", tanh));
    HAPT_TRY(import_dropout(shape, "attention_probs_dropout_prob", false));
    HAPT_TRY(import_dropout(shape, "hidden_dropout_prob", true));
    return import_check_heads(shape, *hidden, *heads);
}

enum hapt_status import_bert(struct import_shape *shape, struct hapt_model **model)
{
    static const char *const no_effect[] = {"classifier_dropout", NULL}; /* of another head */
    struct json_options *options = shape->options;
    struct hapt_bert of = {0};
    const char *positions;
    json_options_drop(options, no_effect);
    HAPT_TRY(read_blocks(shape, &of.layers, &of.hidden, &of.heads, 1e-12, &of.norm_epsilon, &of.tanh));
    HAPT_TRY(json_options_int(options, "intermediate_size", 1, MAX_SIZE, 3072, &of.ffn));
    HAPT_TRY(json_options_need_int(options, "vocab_size", 2, 1 << 30, &of.vocab));
    HAPT_TRY(json_options_int(options, "max_position_embeddings", 1, 1 << 30, 512, &of.positions));
    HAPT_TRY(json_options_int(options, "type_vocab_size", 1, MAX_SIZE, 2, &of.types));
    of.tied = true;
    HAPT_TRY(json_options_expect_bool(options, "tie_word_embeddings", true)); /* else a bias of the file has no use */
    HAPT_TRY(json_options_text(options, "position_embedding_type", "absolute", shape->arena, &positions));
    if (strcmp(positions, "absolute") != 0)
        return hapt_fail(HAPT_ERR_INPUT, "known is absolute", "%s: position_embedding_type \"%.40s\" is unknown",
                         options->path, positions);
    HAPT_TRY(json_options_finish(options));
    HAPT_TRY(import_check_positions(shape, of.positions));
    return hapt_bert_build(shape->family, &of, shape->config, shape->arena, model);
}

/* Reads the options of images, then finishes. */
static enum hapt_status read_images(struct import_shape *shape, int64_t patch, struct hapt_vit *of)
{
    struct json_options *options = shape->options;
    of->classes = shape->classes;
    HAPT_TRY(json_options_int(options, "image_size", 1, MAX_IMAGE, 224, &of->image));
    HAPT_TRY(json_options_int(options, "patch_size", 1, MAX_IMAGE, patch, &of->patch));
    HAPT_TRY(json_options_int(options, "num_channels", 1, MAX_SIZE, 3, &of->channels));
    HAPT_TRY(json_options_bool(options, "qkv_bias", true, &of->qkv_bias));
    HAPT_TRY(json_options_finish(options));
    if (of->image % of->patch == 0) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, NULL, "%s: images of %lld x %lld do not divide into patches of %lld",
                     options->path, (long long)of->image, (long long)of->image, (long long)of->patch);
}

enum hapt_status import_vit(struct import_shape *shape, struct hapt_model **model)
{
    static const char *const no_effect[] = {"encoder_stride", "pooler_act", "pooler_output_size", NULL};
    struct json_options *options = shape->options;
    struct hapt_vit of = {0};
    json_options_drop(options, no_effect);
    HAPT_TRY(read_blocks(shape, &of.layers, &of.hidden, &of.heads, 1e-12, &of.norm_epsilon, &of.tanh));
    HAPT_TRY(json_options_int(options, "intermediate_size", 1, MAX_SIZE, 3072, &of.ffn));
    HAPT_TRY(read_images(shape, 16, &of));
    return hapt_vit_build(shape->family, &of, shape->config, shape->arena, model);
}

enum hapt_status import_dinov2(struct import_shape *shape, struct hapt_model **model)
{
    /* initial values, and outputs of a backbone */
    static const char *const no_effect[] = {"layerscale_value",
                                            "apply_layernorm",
                                            "out_features",
                                            "out_indices",
                                            "reshape_hidden_states",
                                            "stage_names",
                                            NULL};
    struct json_options *options = shape->options;
    struct hapt_vit of = {.dinov2 = true};
    double ratio;
    json_options_drop(options, no_effect);
    HAPT_TRY(read_blocks(shape, &of.layers, &of.hidden, &of.heads, 1e-6, &of.norm_epsilon, &of.tanh));
    HAPT_TRY(json_options_real(options, "mlp_ratio", 1e-3, 1024, 4, &ratio));
    HAPT_TRY(import_dropout(shape, "drop_path_rate", false));
    HAPT_TRY(json_options_bool(options, "use_mask_token", true, &of.mask_token));
    HAPT_TRY(json_options_expect_bool(options, "use_swiglu_ffn", false));
    HAPT_TRY(read_images(shape, 14, &of));
    of.ffn = (int64_t)((double)of.hidden * ratio);
    if (of.ffn < 1 || of.ffn > MAX_SIZE)
        return hapt_fail(HAPT_ERR_INPUT, NULL, "%s: mlp_ratio %g of %lld columns is impossible", options->path, ratio,
                         (long long)of.hidden);
    return hapt_vit_build(shape->family, &of, shape->config, shape->arena, model);
}
