/*
 * Decoder-only transformers with RMS norms and rotary positions: Llama and the published families that descend from it
 * (Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE, Gemma 2 and 3). Parameter names and layouts ([out][in]) are Hugging
 * Face's.
 *
 * A block, with the optional parts in brackets:
 *   y = attention(rotate([norm_head](q)), rotate([norm_head](k)), v) of norm(x);  x += [norm](o(y))
 *   y = down(unit(gate(z)) * up(z)), or a mixture of such units,  of z = norm(x); x += [norm](y)
 */
#ifndef HAPT_DECODER_H
#define HAPT_DECODER_H

#include "hapt/config.h"
#include "hapt/model.h"
#include "hapt/rope.h"

enum hapt_decoder_unit { HAPT_DECODER_SWIGLU, HAPT_DECODER_GEGLU_TANH, HAPT_DECODER_GEGLU_ERF };

/* Rotary positions; the fields are the attributes of the operator (hapt/rope.h). */
struct hapt_decoder_rope {
    int64_t columns; /* of a head; 0: all */
    enum hapt_rope_scaling scaling;
    bool ramp_is_exact;
    double base, factor, low, high, original, magnitude;
};

struct hapt_decoder {
    int64_t layers, hidden, heads, kv_heads, head_size, ffn, vocab;
    double norm_epsilon;
    bool norm_adds_one; /* norms multiply by 1 + weight (Gemma) */
    enum hapt_decoder_unit unit;
    bool qkv_bias, o_bias, mlp_bias;
    bool head_norms;  /* RMS norms of the heads of q and k */
    bool outer_norms; /* norms behind attention and feed-forward, too; the names of the four norms are Gemma's */
    bool tied;
    double embedding_scale;             /* of the embedded tokens, not rounded to 16 bits; 0: none */
    double attention_scale;             /* of the scores; 0: 1 / sqrt(head_size) */
    double attention_cap, logit_cap;    /* soft caps; 0: none */
    int64_t window;                     /* of sliding layers, positions */
    const bool *slides;                 /* [layers]; NULL: none does */
    struct hapt_decoder_rope rope[2];   /* of full layers, of sliding layers */
    const bool *mixes;                  /* [layers]: its feed-forward is a mixture of experts; NULL: none is */
    int64_t experts, top_k, expert_ffn; /* of mixtures */
    double capacity_factor;             /* tokens of a row that an expert takes, in even shares; 0: all */
    bool weighs_over_all;               /* weights are those of the softmax over all experts, not scaled to sum 1 */
    const char *mixture;                /* name of the mixture inside a block: "mlp" */
    const char *expert_weights[3];      /* names of an expert's gate, up and down */
};

/* GPT-2: learned positions, layer norms, one product for q, k and v, biases; layouts are [in][out]. */
struct hapt_gpt2 {
    int64_t layers, hidden, heads, ffn, vocab, positions; /* positions: rows of their table, at least the sequence */
    double norm_epsilon;
    bool erf; /* gelu by the error function */
    bool tied;
    const char *prefix; /* of all names but lm_head.weight: "transformer." */
};

/* Low-rank adapters (Hu et al. 2021), from --lora. */
struct hapt_lora {
    int64_t rank;
    double alpha;        /* the adapter's output is scaled by alpha / rank */
    double dropout;      /* share of the adapter's inputs that is dropped in training */
    const char *targets; /* last parts of the names of layers, separated by commas */
    int64_t layers;      /* that have an adapter so far */
};
/* HAPT_ERR_USAGE: not "rank=R,alpha=A,dropout=P,target=NAME,NAME". */
enum hapt_status hapt_lora_parse(const char *text, struct hapt_arena *arena, struct hapt_lora *lora);
/* True for the name of a parameter of a low-rank adapter (--lora): NAME.lora_A.weight, NAME.lora_B.weight, as in PEFT.
 */
bool hapt_is_adapter(const char *parameter);

/* Builds the model with --sequence, --microbatch, --dtype, --seed and training options of `config`. `family` names it.
 * HAPT_ERR_USAGE: impossible sizes. */
enum hapt_status hapt_decoder_build(const char *family, const struct hapt_decoder *decoder,
                                    const struct hapt_config *config, struct hapt_arena *arena,
                                    struct hapt_model **model);
enum hapt_status hapt_gpt2_build(const char *family, const struct hapt_gpt2 *gpt, const struct hapt_config *config,
                                 struct hapt_arena *arena, struct hapt_model **model);

#endif
