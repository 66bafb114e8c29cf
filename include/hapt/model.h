/*
 * A model: its graph, hyper-parameters, and other contents of its file (initial weights, training defaults, tokens).
 * The model file is described in `hapt help model` and src/model/model_io.c.
 */
#ifndef HAPT_MODEL_H
#define HAPT_MODEL_H

#include "hapt/config.h"
#include "hapt/graph.h"
#include "hapt/h5.h"

#define HAPT_MODEL_VERSION 2 /* of model files that are read; hapt writes version 1 */
/* Opens a file for its data or weights: a model file, another file of hapt of version 1, or one of another program. */
enum hapt_status hapt_model_open_content(const char *path, struct hapt_h5 **file);

struct hapt_model_setting {
    const char *name, *value;
};

struct hapt_model {
    const char *family; /* "gpt" */
    int setting_count;  /* hyper-parameters by name: layers, hidden, heads, sequence, vocab, microbatch, dtype,
                           tied-embeddings */
    struct hapt_model_setting *setting;
    int training_count; /* defaults for training options: given by the user or by a named model */
    struct hapt_model_setting *training;
    struct hapt_graph *graph;      /* forward and backward */
    int microbatch;                /* rows */
    int sequence;                  /* T; 0: an image model */
    int vocab;                     /* 0: an image model */
    int classes;                   /* of an image model, else 0 */
    enum hapt_dtype dtype;         /* of activations */
    enum hapt_precision precision; /* compute precision: `dtype`, or TF32 */
    uint64_t seed;                 /* of initial weights */
    const char *path;              /* the file it was loaded from; NULL if built */
    bool has_parameters;           /* the file holds /parameters */
    bool has_data;                 /* the file holds /tokens, /batches or /images */
};

enum { HAPT_MODEL_TITLE = 320 };
/* "gpt.h5 (gpt)", the family alone if the model is no file; printable. Returns `text`. */
const char *hapt_model_title(const struct hapt_model *model, char text[HAPT_MODEL_TITLE]);

/* Names of the families and of the named models, each in the order of its table. NULL after the last. */
const char *hapt_model_family_name(int index);
const char *hapt_model_preset_name(int index);
/* A named model ("gpt-39b") sets its family's options that were not given; *family is then "gpt". Any other name is
 * taken as a family. */
enum hapt_status hapt_model_preset(const char *name, struct hapt_config *config, const char **family);
/* Builds a zoo model from the options of `hapt model FAMILY`. HAPT_ERR_USAGE: unknown family or impossible shapes. */
enum hapt_status hapt_model_build(const char *family, const struct hapt_config *config, struct hapt_arena *arena,
                                  struct hapt_model **model);
enum hapt_status hapt_model_load(const char *path, struct hapt_arena *arena, struct hapt_model **model);
/* A source of initial weights. `read` fills all elements of a parameter, as fp32. */
struct hapt_weights {
    enum hapt_status (*read)(void *context, const struct hapt_tensor *parameter, float *value);
    void *context;
};
/* Files that a model file carries for export: a tokenizer and the like. */
struct hapt_attachments {
    int count;
    const char **name;
    const unsigned char **bytes;
    int64_t *size;
};
/* Names of the files that may travel with a model, by number; NULL after the last. */
const char *hapt_attachment_name(int index);
/* As hapt_model_save, with weights from anywhere (NULL: none) and with files. */
enum hapt_status hapt_model_save_with(const struct hapt_model *model, const struct hapt_weights *weights,
                                      const struct hapt_attachments *files, const char *data, const char *path);
/* Reads the files that a model file (format "hapt-model") or a checkpoint's manifest carries; none: count 0. */
enum hapt_status hapt_attachments_read(struct hapt_h5 *file, struct hapt_arena *arena, struct hapt_attachments *files);
/* Those of the file that the model was loaded from. */
enum hapt_status hapt_model_files(const struct hapt_model *model, struct hapt_arena *arena,
                                  struct hapt_attachments *files);
enum hapt_status hapt_attachments_write(struct hapt_h5 *file, const struct hapt_attachments *files);
/* Copies initial weights from `weights` (a Weights file or NULL) and data from `data` (a Data file or NULL). Call on
 * one rank. */
enum hapt_status hapt_model_save(const struct hapt_model *model, const char *weights, const char *data,
                                 const char *path);
enum hapt_status hapt_model_check(const struct hapt_model *model);
/* Switches the model to another compute precision. The graph (forward and backward) is rebuilt as hapt_model_build
 * would build it, so old indices are invalid. HAPT_ERR_INPUT if an operator of a foreign file uses a tensor that stays
 * fp32 as its compute type. */
enum hapt_status hapt_model_compute_in(struct hapt_model *model, enum hapt_precision precision);
/* Makes the same model with other rows of a microbatch: the graph that hapt_model_build makes with --microbatch `rows`,
 * in the model's precision. The two models share all else. HAPT_ERR_INPUT: the graph of a foreign file fits only its
 * own rows; the message names the operator. */
enum hapt_status hapt_model_rebatch(const struct hapt_model *model, int rows, struct hapt_arena *arena,
                                    struct hapt_model **rebatched);
/* True if the loss of a row depends on the other rows of its microbatch (batch norm). Losses of different rows of a
 * microbatch then differ. */
bool hapt_model_mixes_rows(const struct hapt_model *model);
/* The token that ends a document of a row, for models with the input positions (--document-end); else -1. */
int64_t hapt_model_document_end(const struct hapt_model *model);
/* HAPT_ERR_USAGE: --batch-norm-momentum is given for a model without running statistics. */
enum hapt_status hapt_model_check_momentum(const struct hapt_model *model, const struct hapt_config *config);
/* Number of running statistics that /parameters of a weights file (NULL: 0) lacks. Such begin at 0 and 1. */
enum hapt_status hapt_model_missing_statistics(const struct hapt_model *model, const char *weights, int *missing);
/* True if the name matches one of the shell patterns, which commas separate. */
bool hapt_patterns_match(const char *patterns, const char *name);
/* HAPT_ERR_USAGE: a pattern of the option matches no parameter. A misspelt one would silently do nothing. */
enum hapt_status hapt_patterns_check(const char *option, const char *patterns, const struct hapt_graph *graph);
/* The input tensor with that role, or -1. */
int hapt_model_input(const struct hapt_model *model, enum hapt_tensor_role role);
/* The tensor of field `number`: the fields of a model are numbered in the order of their tensors. -1: it has no more.
 */
int hapt_model_field(const struct hapt_model *model, int number);
/* The number of the field with that name, or -1. */
int hapt_model_find_field(const struct hapt_model *model, const char *name);
/* Units of the loss per target: "nat" (cross-entropies), or "" (a squared error). */
const char *hapt_model_loss_units(const struct hapt_model *model);
/* The field with the targets of the loss, or -1: the model has no fields. */
int hapt_model_target_field(const struct hapt_model *model);
/* Elements of an int32 field are in [0, this): the least size of a table or of logits that it indexes, at most the
 * vocabulary. */
int64_t hapt_model_field_limit(const struct hapt_model *model, int number);
const char *hapt_model_setting(const struct hapt_model *model, const char *name); /* NULL: absent */

/* Initial value of a parameter, rows [first, first + count) of its leading dimension, or all, as fp32: from the model
 * file's /parameters, else by its rule from seed and name alone. Packed, if the parameter is; `value` has the elements
 * of these rows of the published tensor. */
enum hapt_status hapt_model_initial_rows(const struct hapt_model *model, int tensor, int64_t first, int64_t count,
                                         float *value);
enum hapt_status hapt_model_initial(const struct hapt_model *model, int tensor, float *value);

/* Writes /parameters/NAME of a weights file; a stack (graph.h) is written element by element. */
enum hapt_status hapt_weights_write(struct hapt_h5 *file, const char *name, int dims, const int64_t *shape,
                                    const float *value);

/* Unit of training speed, "token", "image" or (of fields) "row"; and how many of them a microbatch has. */
const char *hapt_model_item(const struct hapt_model *model);
int64_t hapt_model_items(const struct hapt_model *model);
/* Training FLOPs of one microbatch (forward and backward, "6 N" style), summed over the operators. */
double hapt_model_flops(const struct hapt_model *model);
int64_t hapt_model_parameter_count(const struct hapt_model *model);

#endif
