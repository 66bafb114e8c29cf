/* Builders of the zoo's families, and their shared functions. Private to the model room. */
#ifndef HAPT_MODEL_ZOO_H
#define HAPT_MODEL_ZOO_H

#include "hapt/decoder.h"
#include "hapt/encoder.h"
#include "hapt/model.h"
#include "hapt/packing.h"

/* Records a hyper-parameter of the model; `value` is copied. */
enum hapt_status hapt_model_set(struct hapt_model *model, struct hapt_arena *arena, const char *name,
                                const char *value);

/* Starts and completes a model that is built: graph, seed; then training options, checks, backward graph. */
enum hapt_status hapt_model_begin(const char *family, const struct hapt_config *config, struct hapt_arena *arena,
                                  struct hapt_model **model);
enum hapt_status hapt_model_finish(struct hapt_model *model, const struct hapt_config *config,
                                   struct hapt_arena *arena);

/* Marks which parameters train (--trainable, --freeze, --lora), and records these settings. HAPT_ERR_USAGE: a pattern
 * that no parameter matches. */
enum hapt_status zoo_freeze(struct hapt_model *model, const struct hapt_config *config, struct hapt_arena *arena);

/* Each builder fills settings, shape fields and the forward graph. */
enum hapt_status hapt_zoo_bert(const struct hapt_config *config, struct hapt_arena *arena, struct hapt_model *model);
enum hapt_status hapt_zoo_bert_moe(const struct hapt_config *config, struct hapt_arena *arena,
                                   struct hapt_model *model);
enum hapt_status hapt_zoo_llama(const struct hapt_config *config, struct hapt_arena *arena, struct hapt_model *model);
enum hapt_status hapt_zoo_vit(const struct hapt_config *config, struct hapt_arena *arena, struct hapt_model *model);
enum hapt_status hapt_zoo_gpt(const struct hapt_config *config, struct hapt_arena *arena, struct hapt_model *model);
enum hapt_status hapt_zoo_vgg(const struct hapt_config *config, struct hapt_arena *arena, struct hapt_model *model);
enum hapt_status hapt_zoo_resnet(const struct hapt_config *config, struct hapt_arena *arena, struct hapt_model *model);

/* Which parameters train: --trainable and --freeze (NULL: not given), or the adapters alone; and what packs those of
 * linear layers that do not. */
struct zoo_frozen {
    const char *trainable, *freeze;
    bool adapted;
    enum hapt_packing packing;
};
struct zoo_frozen zoo_frozen_of(const struct hapt_config *config);
bool zoo_trains(const struct zoo_frozen *frozen, const char *name);

/* A model under construction. The sizes are the options of these names; `rows` is the microbatch. */
struct zoo {
    struct hapt_graph *graph;
    enum hapt_dtype dtype;
    int64_t layers, hidden, heads, sequence, vocab, rows;
    struct hapt_lora *lora; /* NULL: no adapters */
    struct zoo_frozen frozen;
    double dropout; /* zoo_take_dropout */
    int dropouts;   /* operators so far */
    int row_keys;   /* their input, once there is one */
    bool documents; /* zoo_take_documents: rows hold several documents */
    int positions;  /* their input, once there is one */
    int training;   /* zoo_follow_statistics: the input; -1: batch norms keep no running statistics */
};

/* Reads --dtype and the sizes, and records them and the options in `numbers` (ended by NULL) as the model's settings.
 */
enum hapt_status zoo_begin(struct zoo *zoo, const struct hapt_config *config, const char *const *numbers,
                           struct hapt_arena *arena, struct hapt_model *model);
/* Reads --dtype, --microbatch and --sequence alone, and records the type: for shapes that are not options. */
enum hapt_status zoo_open(struct zoo *zoo, const struct hapt_config *config, struct hapt_arena *arena,
                          struct hapt_model *model);
/* Records a number that is not the option's own value: a default that depends on other options. */
enum hapt_status zoo_set_number(struct hapt_model *model, struct hapt_arena *arena, const char *name, int64_t value);
/* HAPT_ERR_USAGE: the hidden size is not a multiple of the heads, or there are too many blocks for a graph. */
enum hapt_status zoo_check_blocks(const struct zoo *zoo);
enum hapt_status zoo_input(struct zoo *zoo, const char *name, enum hapt_tensor_role role, enum hapt_dtype dtype,
                           int dims, const int64_t *shape, int *index);
/* Adds inputs tokens and targets [rows][sequence]. */
enum hapt_status zoo_tokens(struct zoo *zoo, int *tokens, int *targets);
/* Adds the cross-entropy loss of logits [...][classes] and their labels, the graph's last operator. */
enum hapt_status zoo_classify(struct zoo *zoo, int logits, int labels);
/* Adds a trainable parameter under its published name; `std` is used for HAPT_INIT_NORMAL only. */
enum hapt_status zoo_parameter(struct zoo *zoo, const char *name, int dims, const int64_t *shape, enum hapt_init init,
                               double std, int *index);
enum hapt_status zoo_normal(struct zoo *zoo, const char *name, int dims, const int64_t *shape, double std, int *index);
/* y = layer norm of x over its last dimension; parameters PREFIX.weight, PREFIX.bias [width]. */
enum hapt_status zoo_layer_norm(struct zoo *zoo, const char *prefix, int64_t width, double epsilon, int x, int *y);
/* y = x w + bias, PREFIX.weight [in][out] (GPT-2's layout), PREFIX.bias [out]. */
enum hapt_status zoo_linear_in_out(struct zoo *zoo, const char *prefix, int64_t in, int64_t out, double std, int x,
                                   int *y);
/* y = x w' + bias, PREFIX.weight [out][in] (the usual layout), PREFIX.bias [out] if `bias`. */
enum hapt_status zoo_linear(struct zoo *zoo, const char *prefix, int64_t in, int64_t out, double std, bool bias, int x,
                            int *y);
/* Records --lora as a setting. HAPT_ERR_USAGE: no layer is a target. Call when the graph is complete. */
enum hapt_status zoo_record_lora(const struct zoo *zoo, const struct hapt_config *config, struct hapt_arena *arena,
                                 struct hapt_model *model);
/* *y += the adapter of layer `prefix`, if it is a target: of x [...][in], *y [...][out]. */
enum hapt_status zoo_adapt(struct zoo *zoo, const char *prefix, int64_t in, int64_t out, int x, int *y);
/* Reads --dropout, and records it if it is given: for families that use it. */
enum hapt_status zoo_take_dropout(struct zoo *zoo, const struct hapt_config *config, struct hapt_arena *arena,
                                  struct hapt_model *model);
/* *y: a share of x [rows][T][d] is dropped in training; x itself if the share is 0. */
enum hapt_status zoo_drop(struct zoo *zoo, const char *name, double share, int x, int *y);
/* Reads --document-end, and records it if it is given: for families with causal attention. */
enum hapt_status zoo_take_documents(struct zoo *zoo, const struct hapt_config *config, int64_t vocab,
                                    struct hapt_arena *arena, struct hapt_model *model);
/* The input with the positions of tokens in their documents. */
enum hapt_status zoo_positions(struct zoo *zoo, int *positions);
/* Causal attention of `count` inputs: qkv, or q, k, v; inside documents if rows hold several. */
enum hapt_status zoo_causal_attention(struct zoo *zoo, const char *name, const int *input, int count,
                                      const int64_t *integer, const double *real, int *y);
enum hapt_status zoo_add(struct zoo *zoo, const char *name, int a, int b, int *y);
/* Adds the whole forward graph of a decoder (zoo_decoder.c). */
enum hapt_status zoo_decoder(struct zoo *zoo, const struct hapt_decoder *of);

/* ---- images (zoo_image.c) ---- */

enum { ZOO_MAX_STAGES = 8 };
struct zoo_stages {
    int count, depth[ZOO_MAX_STAGES];
};
struct zoo_convolution {
    int64_t out, kernel, stride, padding;
    bool bias;
};

/* Reads --stages: one number is the number of stages, each with `default_depth` blocks; a list gives the depth of each.
 * Default: 2 stages. */
enum hapt_status zoo_take_stages(const struct hapt_config *config, int default_depth, struct hapt_arena *arena,
                                 struct hapt_model *model, struct zoo_stages *stages);
/* Adds inputs images [rows][channels][image][image], in the model's type, and labels [rows]. Reads --image, --channels,
 * --classes. */
enum hapt_status zoo_images(struct zoo *zoo, const struct hapt_config *config, struct hapt_model *model, int *images,
                            int *labels);
/* y = convolution of x [rows][in][h][w]; PREFIX.weight [out][in][kernel][kernel], PREFIX.bias [out]. */
enum hapt_status zoo_convolution(struct zoo *zoo, const char *prefix, const struct zoo_convolution *convolution, int x,
                                 int *y);
/* Reads --running-statistics, records it, and adds the input that batch norms with such statistics need. */
enum hapt_status zoo_follow_statistics(struct zoo *zoo, const struct hapt_config *config, struct hapt_arena *arena,
                                       struct hapt_model *model);
/* y = batch norm of x with the statistics of the microbatch; PREFIX.weight, PREFIX.bias [channels], and with running
 * statistics PREFIX.running_mean, PREFIX.running_var [channels]. */
enum hapt_status zoo_batch_norm(struct zoo *zoo, const char *prefix, int x, int *y);
enum hapt_status zoo_relu(struct zoo *zoo, const char *name, int x, int *y);
enum hapt_status zoo_max_pool(struct zoo *zoo, const char *name, int64_t kernel, int64_t stride, int64_t padding, int x,
                              int *y);

#endif
