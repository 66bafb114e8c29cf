/*
 * A model: its graph, its hyper-parameters, and what its file carries along (initial weights, training defaults,
 * tokens). The model file is described in `hapt model --help` and src/model/model_io.c.
 */
#ifndef HAPT_MODEL_H
#define HAPT_MODEL_H

#include "hapt/config.h"
#include "hapt/graph.h"
#include "hapt/h5.h"

struct hapt_model_setting {
    const char *name, *value;
};

struct hapt_model {
    const char *family; /* "gpt" */
    int setting_count;  /* hyper-parameters by name: layers, hidden, heads, sequence, vocab, microbatch, dtype,
                           tied-embeddings */
    struct hapt_model_setting *setting;
    int training_count; /* defaults for training options: those that were given or came with a named model */
    struct hapt_model_setting *training;
    struct hapt_graph *graph;      /* forward and backward */
    int microbatch;                /* rows */
    int sequence;                  /* T; 0: a model of images */
    int vocab;                     /* 0: a model of images */
    int classes;                   /* of a model of images, else 0 */
    enum hapt_dtype dtype;         /* of activations */
    enum hapt_precision precision; /* what it computes in: `dtype`, or TF32 */
    uint64_t seed;                 /* of initial weights */
    const char *path;              /* the file it came from; NULL when built */
    bool has_parameters;           /* the file holds /parameters */
    bool has_data;                 /* the file holds /tokens, /batches or /images */
};

/* A named model ("gpt-39b") sets the options of its family that were not given; *family is then "gpt". Any other name
 * is taken for a family. */
enum hapt_status hapt_model_preset(const char *name, struct hapt_config *config, const char **family);
/* Builds a zoo model from the options of `hapt model FAMILY`. HAPT_ERR_USAGE for unknown families or impossible shapes.
 */
enum hapt_status hapt_model_build(const char *family, const struct hapt_config *config, struct hapt_arena *arena,
                                  struct hapt_model **model);
enum hapt_status hapt_model_load(const char *path, struct hapt_arena *arena, struct hapt_model **model);
/* Copies initial weights from `weights` (a Weights file, may be NULL) and data from `data` (a Data file, may be NULL).
 * One rank. */
enum hapt_status hapt_model_save(const struct hapt_model *model, const char *weights, const char *data,
                                 const char *path);
enum hapt_status hapt_model_check(const struct hapt_model *model);
/* From here on the model computes in another type: its graph (forward and backward, so all indices of it) is made anew,
 * as hapt_model_build would have made it. HAPT_ERR_INPUT where an operator of a foreign file takes what stays fp32 for
 * its compute type. */
enum hapt_status hapt_model_compute_in(struct hapt_model *model, enum hapt_precision precision);
/* The input tensor of that role, or -1. */
int hapt_model_input(const struct hapt_model *model, enum hapt_tensor_role role);
const char *hapt_model_setting(const struct hapt_model *model, const char *name); /* NULL: not there */

/* Initial value of a parameter, all elements as fp32 [elements]: from the model file's /parameters, else by its rule
 * from seed and name alone. */
enum hapt_status hapt_model_initial(const struct hapt_model *model, int tensor, float *value);

/* Writes /parameters/NAME of a weights file, a stack (graph.h) element by element. */
enum hapt_status hapt_weights_write(struct hapt_h5 *file, const char *name, int dims, const int64_t *shape,
                                    const float *value);

/* What rows are made of, for figures of speed: "token" or "image"; how many a microbatch has. */
const char *hapt_model_item(const struct hapt_model *model);
int64_t hapt_model_items(const struct hapt_model *model);
/* 6 N-style training FLOPs of one microbatch (forward and backward), from the operators. */
double hapt_model_flops(const struct hapt_model *model);
int64_t hapt_model_parameter_count(const struct hapt_model *model);

#endif
