/* Rotary positions of a config.json: rope_theta with rope_scaling, or rope_parameters (since transformers 5). */
#include <math.h>
#include <string.h>

#include "shape.h"

static enum hapt_status read_llama3(struct json_options *from, struct hapt_decoder_rope *rope)
{
    rope->scaling = HAPT_ROPE_LLAMA3;
    HAPT_TRY(json_options_need_real(from, "factor", 1e-3, 1e6, &rope->factor));
    HAPT_TRY(json_options_need_real(from, "low_freq_factor", 1e-6, 1e6, &rope->low));
    HAPT_TRY(json_options_need_real(from, "high_freq_factor", 1e-6, 1e6, &rope->high));
    return json_options_need_real(from, "original_max_position_embeddings", 1, 1e12, &rope->original);
}

/* YaRN's factor of sines and cosines (Peng et al. 2023, 3.4). */
static double yarn_magnitude(double factor, double share)
{
    return factor > 1 ? 0.1 * share * log(factor) + 1 : 1;
}

static enum hapt_status read_yarn(struct json_options *from, double positions, struct hapt_decoder_rope *rope)
{
    double scale, scale_all;
    bool truncate;
    rope->scaling = HAPT_ROPE_YARN;
    HAPT_TRY(json_options_need_real(from, "factor", 1e-3, 1e6, &rope->factor));
    HAPT_TRY(json_options_real(from, "beta_slow", 1e-6, 1e6, 1, &rope->low));
    HAPT_TRY(json_options_real(from, "beta_fast", 1e-6, 1e6, 32, &rope->high));
    HAPT_TRY(json_options_real(from, "original_max_position_embeddings", 1, 1e12, positions, &rope->original));
    HAPT_TRY(json_options_real(from, "attention_factor", 1e-6, 1e6, 0, &rope->magnitude));
    HAPT_TRY(json_options_real(from, "mscale", 0, 1e6, 0, &scale));
    HAPT_TRY(json_options_real(from, "mscale_all_dim", 0, 1e6, 0, &scale_all));
    HAPT_TRY(json_options_bool(from, "truncate", true, &truncate));
    rope->ramp_is_exact = !truncate;
    if (rope->magnitude > 0) return HAPT_OK;
    rope->magnitude = scale > 0 && scale_all > 0
                          ? yarn_magnitude(rope->factor, scale) / yarn_magnitude(rope->factor, scale_all)
                          : yarn_magnitude(rope->factor, 1);
    return HAPT_OK;
}

static enum hapt_status read_scaling(struct import_shape *shape, struct json_options *from, double positions,
                                     struct hapt_decoder_rope *rope)
{
    const char *kind, *older;
    HAPT_TRY(json_options_text(from, "type", "default", shape->arena, &older));
    HAPT_TRY(json_options_text(from, "rope_type", older, shape->arena, &kind));
    if (strcmp(kind, "default") == 0) return HAPT_OK;
    if (strcmp(kind, "llama3") == 0) return read_llama3(from, rope);
    if (strcmp(kind, "yarn") == 0) return read_yarn(from, positions, rope);
    if (strcmp(kind, "linear") == 0) {
        rope->scaling = HAPT_ROPE_LINEAR;
        return json_options_need_real(from, "factor", 1e-3, 1e6, &rope->factor);
    }
    return hapt_fail(HAPT_ERR_INPUT, "known are default, linear, llama3 and yarn",
                     "%s: %srope_type \"%.40s\" is unknown", from->path, from->where, kind);
}

enum hapt_status import_rope(struct import_shape *shape, struct json_options *from, int64_t head_size, double base,
                             struct hapt_decoder_rope *rope)
{
    double share;
    /* YaRN's default of the original context; the option itself is read later. */
    const double positions = json_number_value(json_object_get(shape->options->left, "max_position_embeddings"));
    *rope = (struct hapt_decoder_rope){.base = base};
    HAPT_TRY(json_options_real(from, "rope_theta", 1e-3, 1e15, base, &rope->base));
    HAPT_TRY(json_options_real(from, "partial_rotary_factor", 0, 1, 1, &share));
    const int64_t columns = (int64_t)(share * (double)head_size);
    rope->columns = columns < head_size ? columns : 0;
    if (columns < 2 || columns % 2 != 0)
        return hapt_fail(HAPT_ERR_INPUT, "compare it with the published file",
                         "%s: partial_rotary_factor %g of %lld columns is no even number", from->path, share,
                         (long long)head_size);
    HAPT_TRY(read_scaling(shape, from, positions, rope));
    if (rope->scaling >= HAPT_ROPE_LLAMA3 && rope->low >= rope->high)
        return hapt_fail(HAPT_ERR_INPUT, "compare it with the published file",
                         "%s: the low factor of %srope_type is not below the high one", from->path, from->where);
    return json_options_finish(from);
}
