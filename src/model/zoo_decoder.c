/* The graph of a decoder (hapt/decoder.h). */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "zoo.h"

#define WEIGHT_STD 0.02

struct builder {
    struct zoo *zoo;
    const struct hapt_decoder *of;
    int64_t layer;
    char name[128];
};

/* Name of a part of the current layer, valid until the next call. */
static const char *path(struct builder *builder, const char *part)
{
    snprintf(builder->name, sizeof builder->name, "model.layers.%" PRId64 ".%s", builder->layer, part);
    return builder->name;
}

static bool slides(const struct builder *builder)
{
    return builder->of->slides && builder->of->slides[builder->layer];
}

/* y = RMS norm of x, of each of `heads` heads if not 0; parameter NAME.weight [width]. */
static enum hapt_status norm(struct builder *builder, const char *name, int64_t width, int64_t heads, int x, int *y)
{
    const struct hapt_decoder *of = builder->of;
    const int64_t integer[HAPT_MAX_ATTRIBUTES] = {heads};
    const double real[HAPT_MAX_ATTRIBUTES] = {of->norm_epsilon, of->norm_adds_one ? 1 : 0};
    int input[2] = {x}, output[HAPT_MAX_OUTPUTS];
    char weight[160];
    snprintf(weight, sizeof weight, "%s.weight", name);
    HAPT_TRY(zoo_parameter(builder->zoo, weight, 1, &width, of->norm_adds_one ? HAPT_INIT_ZERO : HAPT_INIT_ONE, 0,
                           &input[1]));
    HAPT_TRY(hapt_graph_add_op(builder->zoo->graph, heads ? "head_rms_norm" : "rms_norm", name, input, 2, integer, real,
                               output));
    *y = output[0];
    return HAPT_OK;
}

static enum hapt_status rotate(struct builder *builder, const char *projection, int64_t heads, int *x)
{
    const struct hapt_decoder_rope *rope = &builder->of->rope[slides(builder)];
    const int64_t integer[HAPT_MAX_ATTRIBUTES] = {heads, rope->columns, rope->scaling, rope->ramp_is_exact};
    const double real[HAPT_MAX_ATTRIBUTES] = {rope->base, rope->factor,   rope->low,
                                              rope->high, rope->original, rope->magnitude};
    char part[64];
    snprintf(part, sizeof part, "self_attn.%s.rope", projection);
    return hapt_graph_add_op(builder->zoo->graph, "rope", path(builder, part), x, 1, integer, real, x);
}

/* q, k or v of y. q and k may be normalised, and are rotated by their positions. */
static enum hapt_status project(struct builder *builder, char letter, int64_t heads, int y, int *x)
{
    const struct hapt_decoder *of = builder->of;
    char projection[8], part[64];
    snprintf(projection, sizeof projection, "%c_proj", letter);
    snprintf(part, sizeof part, "self_attn.%s", projection);
    HAPT_TRY(zoo_linear(builder->zoo, path(builder, part), of->hidden, heads * of->head_size, WEIGHT_STD, of->qkv_bias,
                        y, x));
    if (letter == 'v') return HAPT_OK;
    snprintf(part, sizeof part, "self_attn.%c_norm", letter);
    if (of->head_norms) HAPT_TRY(norm(builder, path(builder, part), of->head_size, heads, *x, x));
    return rotate(builder, projection, heads, x);
}

static enum hapt_status attention(struct builder *builder, int x, int *y)
{
    const struct hapt_decoder *of = builder->of;
    struct zoo *zoo = builder->zoo;
    const int64_t integer[HAPT_MAX_ATTRIBUTES] = {of->kv_heads, 1, slides(builder) ? of->window : 0};
    const double real[HAPT_MAX_ATTRIBUTES] = {of->attention_scale, of->attention_cap};
    int qkv[3], out;
    HAPT_TRY(project(builder, 'q', of->heads, x, &qkv[0]));
    HAPT_TRY(project(builder, 'k', of->kv_heads, x, &qkv[1]));
    HAPT_TRY(project(builder, 'v', of->kv_heads, x, &qkv[2]));
    HAPT_TRY(zoo_causal_attention(zoo, path(builder, "self_attn"), qkv, 3, integer, real, &out));
    return zoo_linear(zoo, path(builder, "self_attn.o_proj"), of->heads * of->head_size, of->hidden, WEIGHT_STD,
                      of->o_bias, out, y);
}

/* y = unit(gate) up, named after the unit inside `part`. */
static enum hapt_status gated_unit(struct builder *builder, const char *part, const int *gate_and_up, int *y)
{
    const bool silu = builder->of->unit == HAPT_DECODER_SWIGLU;
    const int64_t kind[HAPT_MAX_ATTRIBUTES] = {builder->of->unit == HAPT_DECODER_GEGLU_ERF};
    char name[64];
    snprintf(name, sizeof name, "%s.%s", part, silu ? "swiglu" : "geglu");
    return hapt_graph_add_op(builder->zoo->graph, silu ? "swiglu" : "geglu", path(builder, name), gate_and_up, 2,
                             silu ? NULL : kind, NULL, y);
}

static enum hapt_status feed_forward(struct builder *builder, int x, int *y)
{
    const struct hapt_decoder *of = builder->of;
    struct zoo *zoo = builder->zoo;
    const int64_t d = of->hidden;
    int gated[2];
    HAPT_TRY(zoo_linear(zoo, path(builder, "mlp.gate_proj"), d, of->ffn, WEIGHT_STD, of->mlp_bias, x, &gated[0]));
    HAPT_TRY(zoo_linear(zoo, path(builder, "mlp.up_proj"), d, of->ffn, WEIGHT_STD, of->mlp_bias, x, &gated[1]));
    HAPT_TRY(gated_unit(builder, "mlp", gated, y));
    return zoo_linear(zoo, path(builder, "mlp.down_proj"), of->ffn, d, WEIGHT_STD, of->mlp_bias, *y, y);
}

/* Slots of an expert in each row: all tokens may choose it, or `capacity_factor` even shares. */
static int64_t capacity_of(const struct builder *builder)
{
    const struct hapt_decoder *of = builder->of;
    const double sequence = (double)builder->zoo->sequence, even = sequence * (double)of->top_k / (double)of->experts;
    return of->capacity_factor > 0 ? (int64_t)fmax(1, fmin(sequence, ceil(of->capacity_factor * even)))
                                   : builder->zoo->sequence;
}

/* One linear layer of all experts; its weights are a stack over the experts (graph.h). */
static enum hapt_status expert_linear(struct builder *builder, const char *weight, int64_t in, int64_t out, int x,
                                      int counts, int *y)
{
    const struct hapt_decoder *of = builder->of;
    const double slots = (double)of->experts * (double)capacity_of(builder);
    const double real[HAPT_MAX_ATTRIBUTES] = {fmin(1, (double)(of->top_k * builder->zoo->sequence) / slots)};
    int input[4] = {x, 0, counts, -1};
    char part[96];
    snprintf(part, sizeof part, "%s.experts.*.%s.weight", of->mixture, weight);
    HAPT_TRY(
        zoo_normal(builder->zoo, path(builder, part), 3, (int64_t[]){of->experts, out, in}, WEIGHT_STD, &input[1]));
    snprintf(part, sizeof part, "%s.experts.%s", of->mixture, weight);
    return hapt_graph_add_op(builder->zoo->graph, "expert_linear", path(builder, part), input, 4, NULL, real, y);
}

static enum hapt_status mixture(struct builder *builder, int x, int *y)
{
    const struct hapt_decoder *of = builder->of;
    struct hapt_graph *graph = builder->zoo->graph;
    const int64_t chosen[HAPT_MAX_ATTRIBUTES] = {of->top_k};
    const int64_t slots[HAPT_MAX_ATTRIBUTES] = {of->experts, capacity_of(builder)};
    int logits, gate[HAPT_MAX_OUTPUTS], counts, h, gated[2];
    char part[64];
#define PART(suffix) (snprintf(part, sizeof part, "%s." suffix, of->mixture), path(builder, part))
    HAPT_TRY(zoo_linear(builder->zoo, PART("gate"), of->hidden, of->experts, WEIGHT_STD, false, x, &logits));
    HAPT_TRY(hapt_graph_add_op(graph, of->weighs_over_all ? "moe_gate_over_all" : "moe_gate", PART("top_k"), &logits, 1,
                               chosen, NULL, gate));
    HAPT_TRY(hapt_graph_add_op(graph, "moe_count", PART("counts"), &gate[1], 1, slots, NULL, &counts));
    HAPT_TRY(hapt_graph_add_op(graph, "moe_dispatch", PART("dispatch"), (int[]){x, gate[1]}, 2, slots, NULL, &h));
    for (int k = 0; k < 2; k++)
        HAPT_TRY(expert_linear(builder, of->expert_weights[k], of->hidden, of->expert_ffn, h, counts, &gated[k]));
    snprintf(part, sizeof part, "%s.experts", of->mixture);
    HAPT_TRY(gated_unit(builder, part, gated, &h));
    HAPT_TRY(expert_linear(builder, of->expert_weights[2], of->expert_ffn, of->hidden, h, counts, &h));
    return hapt_graph_add_op(graph, "moe_combine", PART("combine"), (int[]){h, gate[0], gate[1]}, 3, NULL, NULL, y);
#undef PART
}

/* One block; *x [rows][T][d] is the residual stream. */
static enum hapt_status block(struct builder *builder, int *x)
{
    const struct hapt_decoder *of = builder->of;
    const bool outer = of->outer_norms;
    int y;
    HAPT_TRY(norm(builder, path(builder, "input_layernorm"), of->hidden, 0, *x, &y));
    HAPT_TRY(attention(builder, y, &y));
    if (outer) HAPT_TRY(norm(builder, path(builder, "post_attention_layernorm"), of->hidden, 0, y, &y));
    HAPT_TRY(zoo_add(builder->zoo, path(builder, "residual_1"), *x, y, x));
    HAPT_TRY(norm(builder, path(builder, outer ? "pre_feedforward_layernorm" : "post_attention_layernorm"), of->hidden,
                  0, *x, &y));
    HAPT_TRY(of->mixes && of->mixes[builder->layer] ? mixture(builder, y, &y) : feed_forward(builder, y, &y));
    if (outer) HAPT_TRY(norm(builder, path(builder, "post_feedforward_layernorm"), of->hidden, 0, y, &y));
    return zoo_add(builder->zoo, path(builder, "residual_2"), *x, y, x);
}

enum hapt_status zoo_decoder(struct zoo *zoo, const struct hapt_decoder *of)
{
    struct builder builder = {.zoo = zoo, .of = of};
    const int64_t table[] = {of->vocab, of->hidden};
    int embedding[2], product[2], targets, x;
    HAPT_TRY(zoo_tokens(zoo, &embedding[0], &targets));
    HAPT_TRY(zoo_normal(zoo, "model.embed_tokens.weight", 2, table, WEIGHT_STD, &embedding[1]));
    HAPT_TRY(hapt_graph_add_op(zoo->graph, "embedding", "model.embed_tokens", embedding, 2, NULL, NULL, &x));
    const double scale[HAPT_MAX_ATTRIBUTES] = {of->embedding_scale}, cap[HAPT_MAX_ATTRIBUTES] = {of->logit_cap};
    if (of->embedding_scale > 0)
        HAPT_TRY(hapt_graph_add_op(zoo->graph, "scale", "model.embed_tokens.scale", &x, 1, NULL, scale, &x));
    for (builder.layer = 0; builder.layer < of->layers; builder.layer++) HAPT_TRY(block(&builder, &x));
    HAPT_TRY(norm(&builder, "model.norm", of->hidden, 0, x, &product[0]));
    product[1] = embedding[1];
    if (!of->tied) HAPT_TRY(zoo_normal(zoo, "lm_head.weight", 2, table, WEIGHT_STD, &product[1]));
    HAPT_TRY(hapt_graph_add_op(zoo->graph, "linear_t", "lm_head", product, 2, NULL, NULL, &x));
    if (of->logit_cap > 0) HAPT_TRY(hapt_graph_add_op(zoo->graph, "softcap", "lm_head.softcap", &x, 1, NULL, cap, &x));
    return zoo_classify(zoo, x, targets);
}

static enum hapt_status set_numbers(struct hapt_model *model, const struct hapt_decoder *of, const struct zoo *zoo,
                                    struct hapt_arena *arena)
{
    HAPT_TRY(zoo_set_number(model, arena, "layers", of->layers));
    HAPT_TRY(zoo_set_number(model, arena, "hidden", of->hidden));
    HAPT_TRY(zoo_set_number(model, arena, "heads", of->heads));
    HAPT_TRY(zoo_set_number(model, arena, "kv-heads", of->kv_heads));
    HAPT_TRY(zoo_set_number(model, arena, "ffn", of->ffn));
    HAPT_TRY(zoo_set_number(model, arena, "sequence", zoo->sequence));
    HAPT_TRY(zoo_set_number(model, arena, "vocab", of->vocab));
    HAPT_TRY(zoo_set_number(model, arena, "microbatch", zoo->rows));
    HAPT_TRY(hapt_model_set(model, arena, "tied-embeddings", of->tied ? "yes" : "no"));
    if (of->experts == 0) return HAPT_OK;
    char text[32];
    snprintf(text, sizeof text, "%.9g", of->capacity_factor);
    HAPT_TRY(zoo_set_number(model, arena, "experts", of->experts));
    HAPT_TRY(zoo_set_number(model, arena, "top-k", of->top_k));
    return hapt_model_set(model, arena, "capacity-factor", text);
}

enum hapt_status hapt_decoder_build(const char *family, const struct hapt_decoder *decoder,
                                    const struct hapt_config *config, struct hapt_arena *arena,
                                    struct hapt_model **model)
{
    struct hapt_model *built;
    struct zoo zoo;
    HAPT_TRY(hapt_model_begin(family, config, arena, &built));
    HAPT_TRY(zoo_open(&zoo, config, arena, built));
    zoo.vocab = decoder->vocab;
    HAPT_TRY(set_numbers(built, decoder, &zoo, arena));
    HAPT_TRY(zoo_take_documents(&zoo, config, decoder->vocab, arena, built));
    built->sequence = (int)zoo.sequence;
    built->vocab = (int)decoder->vocab;
    HAPT_TRY(zoo_decoder(&zoo, decoder));
    HAPT_TRY(zoo_record_lora(&zoo, config, arena, built));
    HAPT_TRY(hapt_model_finish(built, config, arena));
    *model = built;
    return HAPT_OK;
}
