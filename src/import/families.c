#include "shape.h"

#include <stdio.h>
#include <string.h>

static const struct {
    const char *type, *architecture;
    enum hapt_status (*build)(struct import_shape *shape, struct hapt_model **model);
} families[] = {
    {"bert", "BertForMaskedLM", import_bert},
    {"dinov2", "Dinov2ForImageClassification", import_dinov2},
    {"gemma2", "Gemma2ForCausalLM", import_decoder},
    {"gemma3_text", "Gemma3ForCausalLM", import_decoder},
    {"gpt2", "GPT2LMHeadModel", import_gpt2},
    {"llama", "LlamaForCausalLM", import_decoder},
    {"mistral", "MistralForCausalLM", import_decoder},
    {"mixtral", "MixtralForCausalLM", import_decoder},
    {"qwen2", "Qwen2ForCausalLM", import_decoder},
    {"qwen3", "Qwen3ForCausalLM", import_decoder},
    {"qwen3_moe", "Qwen3MoeForCausalLM", import_decoder},
    {"vit", "ViTForImageClassification", import_vit},
};
enum { FAMILIES = sizeof families / sizeof families[0] };

/* Options without an effect on what hapt computes: names, tokens, generation, the library's bookkeeping, and outputs
 * that it does not ask for. */
static const char *const no_effect[] = {"_attn_implementation_autoset",
                                        "_name_or_path",
                                        "_num_labels",
                                        "architectures",
                                        "auto_map",
                                        "bos_token_id",
                                        "cache_implementation",
                                        "chunk_size_feed_forward",
                                        "do_sample",
                                        "dtype",
                                        "eos_token_id",
                                        "finetuning_task",
                                        "gradient_checkpointing",
                                        "id2label",
                                        "initializer_range",
                                        "is_decoder",
                                        "label2id",
                                        "max_length",
                                        "max_new_tokens",
                                        "model_type",
                                        "num_labels",
                                        "output_attentions",
                                        "output_hidden_states",
                                        "pad_token_id",
                                        "prefix",
                                        "pretraining_tp", /* how the published weights were trained */
                                        "problem_type",
                                        "return_dict",
                                        "router_aux_loss_coef", /* of a loss that output_router_logits asks for */
                                        "task_specific_params",
                                        "temperature",
                                        "tokenizer_class",
                                        "top_k",
                                        "top_p",
                                        "torch_dtype",
                                        "torchscript",
                                        "transformers_version",
                                        "unsloth_fixed",
                                        "unsloth_version",
                                        "use_cache",
                                        NULL};

static enum hapt_status unknown_family(const struct import_shape *shape)
{
    char known[256] = "";
    for (int i = 0; i < FAMILIES; i++) {
        const size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", families[i].type);
    }
    return hapt_fail(HAPT_ERR_INPUT, "hapt help import lists what is known",
                     "%s: unknown model_type \"%.60s\"; known are %s", shape->options->path, shape->family, known);
}

/* The architecture, if given, must be the one that is known of the family. */
static enum hapt_status check_architecture(const struct import_shape *shape, const char *expected)
{
    const json_t *list = json_object_get(shape->options->left, "architectures");
    const json_t *first = json_array_get(list, 0);
    char text[64];
    if (!list || json_is_null(list)) return HAPT_OK;
    if (json_array_size(list) == 1 && json_is_string(first) && strcmp(json_string_value(first), expected) == 0)
        return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, "hapt help import lists the architectures",
                     "%s: architectures is %s, not [\"%s\"]", shape->options->path, json_shown(list, text), expected);
}

/* The classes of images: the labels with a name, or their number; transformers assumes 2. The loss must be that of one
 * label per image. */
static enum hapt_status read_classes(struct import_shape *shape)
{
    enum { ASSUMED = 2, MOST = 1 << 24 };
    const json_t *names = json_object_get(shape->options->left, "id2label"),
                 *count = json_object_get(shape->options->left, "num_labels"),
                 *problem = json_object_get(shape->options->left, "problem_type");
    char text[64];
    shape->classes = json_is_object(names)    ? (int64_t)json_object_size(names)
                     : json_is_integer(count) ? (int64_t)json_integer_value(count)
                                              : ASSUMED;
    if (shape->classes < 1 || shape->classes > MOST)
        return hapt_fail(HAPT_ERR_INPUT, NULL, "%s: %lld labels are impossible", shape->options->path,
                         (long long)shape->classes);
    const bool one_label =
        !problem || json_is_null(problem) ||
        (json_is_string(problem) && strcmp(json_string_value(problem), "single_label_classification") == 0);
    if (one_label && shape->classes > 1) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, "hapt classifies: one label per image, of at least two",
                     "%s: problem_type %s with %lld labels is unknown", shape->options->path,
                     problem ? json_shown(problem, text) : "none", (long long)shape->classes);
}

enum hapt_status import_build(struct import_shape *shape, struct hapt_model **model)
{
    const json_t *type = json_object_get(shape->options->left, "model_type");
    if (!json_is_string(type))
        return hapt_fail(HAPT_ERR_INPUT, "give the folder of a model that transformers can load",
                         "%s has no model_type", shape->options->path);
    shape->family = hapt_arena_strdup(shape->arena, json_string_value(type));
    if (!shape->family) return HAPT_ERR_MEMORY;
    for (int i = 0; i < FAMILIES; i++) {
        if (strcmp(shape->family, families[i].type) != 0) continue;
        HAPT_TRY(check_architecture(shape, families[i].architecture));
        if (families[i].build == import_vit || families[i].build == import_dinov2) HAPT_TRY(read_classes(shape));
        json_options_drop(shape->options, no_effect);
        HAPT_TRY(json_options_expect_bool(shape->options, "output_router_logits", false));
        HAPT_TRY(json_options_expect_bool(shape->options, "is_encoder_decoder", false));
        HAPT_TRY(json_options_expect_bool(shape->options, "add_cross_attention", false));
        return families[i].build(shape, model);
    }
    return unknown_family(shape);
}
