/*
 * Llama (Touvron et al. 2023): RMS norm before each half of a block, rotary positions, attention where several query
 * heads may share a head of keys and values, SwiGLU feed-forward, no biases. Parameter names and layouts ([out][in])
 * are Hugging Face's.
 */
#include <inttypes.h>
#include <stdio.h>

#include "zoo.h"

/* Two thirds of 4 d, rounded up to a multiple of 256, as in the published models. */
static int64_t default_ffn(int64_t hidden)
{
    return (8 * hidden / 3 + 255) / 256 * 256;
}

static enum hapt_status check_shape(const struct zoo *zoo, const struct hapt_decoder *decoder)
{
    HAPT_TRY(zoo_check_blocks(zoo));
    if (decoder->head_size % 2 != 0)
        return hapt_fail(HAPT_ERR_USAGE, "rotary positions rotate pairs of columns: choose --hidden / --heads even",
                         "heads of %" PRId64 " columns cannot be split into two halves", decoder->head_size);
    if (zoo->heads % decoder->kv_heads != 0)
        return hapt_fail(HAPT_ERR_USAGE, "choose --kv-heads as a divisor of --heads",
                         "%" PRId64 " heads cannot share %" PRId64 " heads of keys and values evenly", zoo->heads,
                         decoder->kv_heads);
    return HAPT_OK;
}

enum hapt_status hapt_zoo_llama(const struct hapt_config *config, struct hapt_arena *arena, struct hapt_model *model)
{
    static const char *const numbers[] = {"layers", "hidden", "heads", "sequence", "vocab", "microbatch", NULL};
    struct hapt_decoder decoder = {.kv_heads = hapt_config_int(config, "kv-heads"),
                                   .ffn = hapt_config_int(config, "ffn"),
                                   .rope[0].base = hapt_config_real(config, "rope-base"),
                                   .norm_epsilon = 1e-5,
                                   /* The option's default (yes) is GPT-2's; llama's is no. */
                                   .tied = hapt_config_chosen(config, "tied-embeddings") &&
                                           hapt_config_bool(config, "tied-embeddings")};
    struct zoo zoo;
    char text[32];
    HAPT_TRY(zoo_begin(&zoo, config, numbers, arena, model));
    HAPT_TRY(zoo_take_documents(&zoo, config, zoo.vocab, arena, model));
    decoder.layers = zoo.layers;
    decoder.hidden = zoo.hidden;
    decoder.heads = zoo.heads;
    decoder.head_size = zoo.hidden / zoo.heads;
    decoder.vocab = zoo.vocab;
    if (decoder.kv_heads == 0) decoder.kv_heads = zoo.heads;
    if (decoder.ffn == 0) decoder.ffn = default_ffn(zoo.hidden);
    HAPT_TRY(check_shape(&zoo, &decoder));
    HAPT_TRY(zoo_set_number(model, arena, "kv-heads", decoder.kv_heads));
    HAPT_TRY(zoo_set_number(model, arena, "ffn", decoder.ffn));
    snprintf(text, sizeof text, "%g", decoder.rope[0].base);
    HAPT_TRY(hapt_model_set(model, arena, "rope-base", text));
    HAPT_TRY(hapt_model_set(model, arena, "tied-embeddings", decoder.tied ? "yes" : "no"));
    model->sequence = (int)zoo.sequence;
    model->vocab = (int)zoo.vocab;
    HAPT_TRY(zoo_decoder(&zoo, &decoder));
    return zoo_record_lora(&zoo, config, arena, model);
}
