/*
 * Published models as Hugging Face's transformers stores them: a folder with config.json, safetensors and the
 * tokenizer's files. Import makes a model of it; export writes such a folder again.
 */
#ifndef HAPT_IMPORT_H
#define HAPT_IMPORT_H

#include "hapt/config.h"
#include "hapt/env.h"
#include "hapt/model.h"

/* The file that describes adapters, of PEFT's format: carried by models with --lora. */
#define HAPT_ADAPTER_CONFIG "adapter_config.json"

struct hapt_import {
    const char *folder;
    struct hapt_model *model;
    struct hapt_weights weights;   /* reads the folder's safetensors */
    struct hapt_attachments files; /* config, generation config, tokenizer */
};

/* Reads config.json and the headers of the safetensors, and builds the model with the --sequence, --microbatch, --dtype
 * and training options of `config`. HAPT_ERR_INPUT: an unknown architecture, option, tensor or shape, which the message
 * names. Rank-local. */
enum hapt_status hapt_import_open(const struct hapt_env *env, const char *folder, const struct hapt_config *config,
                                  struct hapt_arena *arena, struct hapt_import **import);

/* One tensor of a folder to write. */
struct hapt_export_tensor {
    const char *name;
    int dims;
    const int64_t *shape;
    int64_t first; /* element of the array that `read` fills where this tensor begins: 0, or inside a stack */
    int source;    /* index for `read` */
};

struct hapt_export {
    int64_t count;
    struct hapt_export_tensor *tensor;
    const char *stem;      /* of the files' names: "model", "adapter_model" */
    enum hapt_dtype dtype; /* of the files: fp32, bf16 or fp16 */
    int64_t shard_bytes;   /* the most bytes of tensors in a file, if a tensor has no more */
    const struct hapt_attachments *files;
    /* Borrows all elements of source `source` as fp32 until the next call. */
    enum hapt_status (*read)(void *context, int source, const float **value);
    void *context;
};

/* Writes the folder, which must not exist or be empty. It appears under its name only when complete. Tensors of one
 * source should follow each other. HAPT_ERR_USAGE, HAPT_ERR_IO. Rank-local. */
enum hapt_status hapt_export_write(const struct hapt_export *export, const char *folder);

#endif
