/*
 * Published encoders: BERT (masked language modelling), ViT and DINOv2 (image classification). Parameter names and
 * layouts ([out][in]) are Hugging Face's.
 */
#ifndef HAPT_ENCODER_H
#define HAPT_ENCODER_H

#include "hapt/config.h"
#include "hapt/model.h"

/* Post-LN blocks of attention in both directions; learned positions. The head is a transform and the word embeddings.
 */
struct hapt_bert {
    int64_t layers, hidden, heads, ffn, vocab;
    int64_t positions; /* rows of their table, at least the sequence */
    int64_t types;     /* rows of the table of token types, of which all tokens have the first; 0: no table */
    double norm_epsilon;
    bool tanh; /* gelu by its approximation; else by the error function */
    bool tied;
};

/* Pre-LN blocks on patches behind a class token; learned positions; a classifier on the class token. DINOv2 scales the
 * columns of what each half of a block adds, and classifies by the class token and the mean of the patches. */
struct hapt_vit {
    int64_t layers, hidden, heads, ffn, image, channels, patch, classes;
    double norm_epsilon;
    bool tanh;     /* as above */
    bool qkv_bias; /* q, k and v have biases */
    bool dinov2;
    bool mask_token; /* dinov2: the model has one, which classification does not use */
};

/* Builds the model with --sequence (BERT), --microbatch, --dtype, --seed and training options of `config`. `family`
 * names it. HAPT_ERR_USAGE: impossible sizes. */
enum hapt_status hapt_bert_build(const char *family, const struct hapt_bert *bert, const struct hapt_config *config,
                                 struct hapt_arena *arena, struct hapt_model **model);
enum hapt_status hapt_vit_build(const char *family, const struct hapt_vit *vit, const struct hapt_config *config,
                                struct hapt_arena *arena, struct hapt_model **model);

#endif
