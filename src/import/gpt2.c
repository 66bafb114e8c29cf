/* Config files of GPT-2. */
#include "shape.h"

enum { MAX_LAYERS = 1024, MAX_SIZE = 1 << 24 };

enum hapt_status import_gpt2(struct import_shape *shape, struct hapt_model **model)
{
    static const char *const no_effect[] = {"reorder_and_upcast_attn", /* fp32 scores: hapt's always are */
                                            "n_special",
                                            "output_past",
                                            "predict_special_tokens",
                                            "summary_activation",
                                            "summary_first_dropout",
                                            "summary_proj_to_labels",
                                            "summary_type",
                                            "summary_use_proj",
                                            "n_ctx",
                                            NULL};
    struct json_options *options = shape->options;
    bool tanh;
    struct hapt_gpt2 of = {.prefix = shape->has_prefix ? "transformer." : ""};
    json_options_drop(options, no_effect);
    HAPT_TRY(json_options_need_int(options, "n_layer", 1, MAX_LAYERS, &of.layers));
    HAPT_TRY(import_check_count(shape, "layers", of.layers));
    HAPT_TRY(json_options_need_int(options, "n_embd", 1, MAX_SIZE, &of.hidden));
    HAPT_TRY(json_options_need_int(options, "n_head", 1, MAX_SIZE, &of.heads));
    HAPT_TRY(json_options_need_int(options, "n_positions", 1, 1 << 30, &of.positions));
    HAPT_TRY(json_options_need_int(options, "vocab_size", 2, 1 << 30, &of.vocab));
    HAPT_TRY(json_options_int(options, "n_inner", 1, MAX_SIZE, 4 * of.hidden, &of.ffn));
    HAPT_TRY(json_options_real(options, "layer_norm_epsilon", 0, 0.1, 1e-5, &of.norm_epsilon));
    HAPT_TRY(json_options_bool(options, "tie_word_embeddings", true, &of.tied));
    HAPT_TRY(import_gelu(shape, "activation_function", "gelu_new", &tanh));
    of.erf = !tanh;
    HAPT_TRY(import_dropout(shape, "attn_pdrop", false));
    HAPT_TRY(import_dropout(shape, "embd_pdrop", true));
    HAPT_TRY(import_dropout(shape, "resid_pdrop", true));
    HAPT_TRY(json_options_expect_bool(options, "scale_attn_weights", true));
    HAPT_TRY(json_options_expect_bool(options, "scale_attn_by_inverse_layer_idx", false));
    HAPT_TRY(json_options_finish(options));
    HAPT_TRY(import_check_positions(shape, of.positions));
    HAPT_TRY(import_check_heads(shape, of.hidden, of.heads));
    return hapt_gpt2_build(shape->family, &of, shape->config, shape->arena, model);
}
