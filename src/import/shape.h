/* A published model under import: from its config.json to a graph. Private to the import room. */
#ifndef HAPT_IMPORT_SHAPE_H
#define HAPT_IMPORT_SHAPE_H

#include "hapt/decoder.h"
#include "hapt/encoder.h"
#include "hapt/env.h"
#include "json_options.h"

/* A model under import. */
struct import_shape {
    const struct hapt_env *env;
    struct json_options *options; /* of config.json */
    const char *folder;
    const char *family; /* model_type */
    int64_t tensors;    /* that the files hold: no layer or expert is without one */
    bool has_prefix;    /* GPT-2: names of weights begin with "transformer." */
    int64_t classes;    /* of images */
    const struct hapt_config *config;
    struct hapt_arena *arena;
};

/* Builds the graph that the options describe. All options are read; an unknown one, or one with a value that hapt
 * cannot compute, is HAPT_ERR_INPUT. */
enum hapt_status import_build(struct import_shape *shape, struct hapt_model **model);
/* Reads the options of rotary positions, all that `from` has: base, scaling, rotated columns. */
enum hapt_status import_rope(struct import_shape *shape, struct json_options *from, int64_t head_size, double base,
                             struct hapt_decoder_rope *rope);
enum hapt_status import_decoder(struct import_shape *shape, struct hapt_model **model);
enum hapt_status import_gpt2(struct import_shape *shape, struct hapt_model **model);
enum hapt_status import_bert(struct import_shape *shape, struct hapt_model **model);
enum hapt_status import_vit(struct import_shape *shape, struct hapt_model **model);
enum hapt_status import_dinov2(struct import_shape *shape, struct hapt_model **model);
/* Reads the option `key`, a kind of GELU. *tanh: the approximation; else by the error function. */
enum hapt_status import_gelu(struct import_shape *shape, const char *key, const char *fallback, bool *tanh);
/* HAPT_ERR_INPUT unless the columns can be divided into heads. */
enum hapt_status import_check_heads(const struct import_shape *shape, int64_t hidden, int64_t heads);
/* HAPT_ERR_USAGE: --sequence is longer than the table of positions. */
enum hapt_status import_check_positions(const struct import_shape *shape, int64_t positions);
/* HAPT_ERR_INPUT unless the files hold at least a tensor for each of `count` layers or experts. */
enum hapt_status import_check_count(const struct import_shape *shape, const char *what, int64_t count);
/* An option that says how much is dropped out. A value above 0 gives a warning, since a model has dropout only by
 * --dropout. can_drop false: hapt has no dropout at this place. */
enum hapt_status import_dropout(struct import_shape *shape, const char *key, bool can_drop);

#endif
