/* hapt export: writes a checkpoint's weights to a weights file, or to a folder as Hugging Face's transformers reads. */
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "hapt/command.h"
#include "hapt/decoder.h"
#include "hapt/import.h"
#include "hapt/progress.h"
#include "hapt/train.h"
#include "outputs.h"

const char hapt_command_export_help[] =
    "--format hdf5 writes /parameters/NAME of a weights file, for hapt model --weights.\n"
    "--format safetensors writes a new folder that transformers' from_pretrained loads: the weights under the names\n"
    "with which they were imported, and config.json, the tokenizer's files and generation_config.json unchanged.\n"
    "A tied output layer is not written twice. A model with --lora gives a folder of adapters, which PEFT loads:\n"
    "adapter_model.safetensors and adapter_config.json. --merge writes the whole model instead, adapters added.\n";

/* The parameter whose elements are in memory. */
struct source {
    const struct hapt_checkpoint *checkpoint;
    double merged; /* factor of adapters that are added to their layers; 0: none are */
    struct hapt_arena arena;
    int held; /* -1: none */
    float *value;
};

/* Reads a matrix of the checkpoint; *value NULL: it has none of that name. */
static enum hapt_status read_matrix(struct source *source, const char *name, int64_t *shape, float **value)
{
    int dims;
    int64_t sizes[HAPT_H5_MAX_DIMS];
    const struct hapt_checkpoint *checkpoint = source->checkpoint;
    *value = NULL;
    int64_t p = 0;
    while (p < checkpoint->parameter_count && strcmp(checkpoint->parameter[p], name) != 0) p++;
    if (p == checkpoint->parameter_count) return HAPT_OK;
    HAPT_TRY(hapt_checkpoint_shape(checkpoint, name, &dims, sizes));
    if (dims != 2) return hapt_fail(HAPT_ERR_INPUT, NULL, "%s of %s is no matrix", name, checkpoint->path);
    memcpy(shape, sizes, 2 * sizeof *shape);
    HAPT_NEW(*value, &source->arena, sizes[0] * sizes[1]);
    return hapt_checkpoint_read(checkpoint, name, -1, sizes[0] * sizes[1], *value);
}

/* W [out][in] += factor * B [out][rank] A [rank][in], if layer `name` has an adapter. */
static enum hapt_status merge(struct source *source, const char *name, int64_t elements)
{
    const size_t length = strlen(name), end = strlen(".weight");
    int64_t thin[2], wide[2];
    float *a, *b;
    if (length <= end || strcmp(name + length - end, ".weight") != 0) return HAPT_OK;
    const char *first = hapt_arena_printf(&source->arena, "%.*s.lora_A.weight", (int)(length - end), name);
    const char *second = hapt_arena_printf(&source->arena, "%.*s.lora_B.weight", (int)(length - end), name);
    if (!first || !second) return HAPT_ERR_MEMORY;
    HAPT_TRY(read_matrix(source, first, thin, &a));
    HAPT_TRY(read_matrix(source, second, wide, &b));
    if (!a || !b) return HAPT_OK;
    if (thin[0] != wide[1] || wide[0] * thin[1] != elements)
        return hapt_fail(HAPT_ERR_INPUT, NULL, "the adapter of %s in %s has another shape than its layer", name,
                         source->checkpoint->path);
    double *row;
    HAPT_NEW(row, &source->arena, thin[1]);
    for (int64_t o = 0; o < wide[0]; o++) {
        float *weight = source->value + o * thin[1];
        memset(row, 0, (size_t)thin[1] * sizeof *row);
        for (int64_t r = 0; r < thin[0]; r++)
            for (int64_t i = 0; i < thin[1]; i++) row[i] += (double)b[o * thin[0] + r] * (double)a[r * thin[1] + i];
        for (int64_t i = 0; i < thin[1]; i++) weight[i] = (float)((double)weight[i] + source->merged * row[i]);
    }
    return HAPT_OK;
}

static enum hapt_status read_parameter(void *context, int parameter, const float **value)
{
    struct source *source = context;
    if (source->held != parameter) {
        source->held = -1;
        hapt_arena_reset(&source->arena);
        int dims;
        int64_t shape[HAPT_H5_MAX_DIMS], elements = 1;
        const char *name = source->checkpoint->parameter[parameter];
        HAPT_TRY(hapt_checkpoint_shape(source->checkpoint, name, &dims, shape));
        for (int d = 0; d < dims; d++) elements *= shape[d];
        HAPT_NEW(source->value, &source->arena, elements);
        HAPT_TRY(hapt_checkpoint_read(source->checkpoint, name, -1, elements, source->value));
        if (source->merged > 0) HAPT_TRY(merge(source, name, elements));
        source->held = parameter;
    }
    *value = source->value;
    return HAPT_OK;
}

/* The tensors of parameter `p`: itself, or the elements of a stack. PEFT's names of adapters begin with base_model. */
static enum hapt_status add_tensors(const struct hapt_checkpoint *checkpoint, int p, struct hapt_arena *arena,
                                    int64_t *capacity, struct hapt_export *export)
{
    const char *name = checkpoint->parameter[p];
    int dims;
    int64_t *shape, each = 1;
    HAPT_NEW(shape, arena, HAPT_H5_MAX_DIMS);
    HAPT_TRY(hapt_checkpoint_shape(checkpoint, name, &dims, shape));
    const bool stack = hapt_tensor_is_stack(name, dims);
    const int64_t count = stack ? shape[0] : 1;
    for (int d = stack; d < dims; d++) each *= shape[d];
    if (export->count + count > *capacity) {
        struct hapt_export_tensor *more;
        *capacity = 2 * (export->count + count);
        HAPT_NEW(more, arena, *capacity);
        if (export->count > 0) memcpy(more, export->tensor, (size_t) export->count * sizeof *more);
        export->tensor = more;
    }
    for (int64_t k = 0; k < count; k++) {
        char text[256];
        hapt_tensor_published_name(name, dims, k, text, sizeof text);
        const char *published =
            hapt_arena_printf(arena, "%s%s", hapt_is_adapter(name) ? "base_model.model." : "", text);
        if (!published) return HAPT_ERR_MEMORY;
        export->tensor[export->count++] = (struct hapt_export_tensor){
            .name = published, .dims = dims - stack, .shape = shape + stack, .first = k * each, .source = p};
    }
    return HAPT_OK;
}

/* alpha / r of the adapters, from their description. */
static enum hapt_status read_factor(const struct hapt_attachments *files, double *factor)
{
    for (int i = 0; i < files->count; i++) {
        if (strcmp(files->name[i], HAPT_ADAPTER_CONFIG) != 0) continue;
        json_t *root = json_loadb((const char *)files->bytes[i], (size_t)files->size[i], 0, NULL);
        const double alpha = json_number_value(json_object_get(root, "lora_alpha")),
                     rank = json_number_value(json_object_get(root, "r"));
        json_decref(root);
        *factor = alpha / rank;
        if (*factor > 0 && isfinite(*factor)) return HAPT_OK;
    }
    return hapt_fail(HAPT_ERR_INPUT, NULL,
                     "the checkpoint has adapters, but no " HAPT_ADAPTER_CONFIG " with r and lora_alpha");
}

/* The files that belong to adapters, or to a whole model. */
static void choose_files(struct hapt_attachments *files, bool adapters)
{
    int kept = 0;
    for (int i = 0; i < files->count; i++) {
        if ((strcmp(files->name[i], HAPT_ADAPTER_CONFIG) == 0) != adapters) continue;
        files->name[kept] = files->name[i];
        files->bytes[kept] = files->bytes[i];
        files->size[kept++] = files->size[i];
    }
    files->count = kept;
}

static enum hapt_status write_folder(const struct hapt_env *env, const struct hapt_config *config,
                                     const struct hapt_checkpoint *checkpoint, struct hapt_arena *arena)
{
    const bool merges = hapt_config_bool(config, "merge");
    struct hapt_attachments files;
    struct hapt_export export = {.stem = "model", .files = &files, .read = read_parameter};
    struct source source = {.checkpoint = checkpoint, .held = -1};
    double shard_bytes;
    int64_t capacity = 0;
    bool adapted = false;
    if (!hapt_units_parse_bytes(hapt_config_text(config, "shard-size"), &shard_bytes) || shard_bytes < 1)
        return hapt_fail(HAPT_ERR_USAGE, "write a size such as \"5 GB\"", "--shard-size %s is no size",
                         hapt_config_text(config, "shard-size"));
    export.shard_bytes = (int64_t)fmin(shard_bytes, 1e18);
    HAPT_ASSERT(hapt_dtype_parse(hapt_config_text(config, "dtype"), &export.dtype));
    HAPT_TRY(hapt_checkpoint_files(checkpoint, arena, &files));
    for (int64_t p = 0; p < checkpoint->parameter_count; p++)
        adapted = adapted || hapt_is_adapter(checkpoint->parameter[p]);
    if (merges && !adapted)
        return hapt_fail(HAPT_ERR_USAGE, "leave out --merge", "the model of %s has no adapters", checkpoint->path);
    if (merges) HAPT_TRY(read_factor(&files, &source.merged));
    const bool alone = adapted && !merges;
    if (alone) export.stem = "adapter_model";
    choose_files(&files, alone);
    if (files.count == 0)
        hapt_warn(env, "the model was not imported: the folder gets no %s\n",
                  alone ? HAPT_ADAPTER_CONFIG : "config.json");
    for (int64_t p = 0; p < checkpoint->parameter_count; p++) {
        if (adapted && hapt_is_adapter(checkpoint->parameter[p]) != alone) continue;
        HAPT_TRY(add_tensors(checkpoint, (int)p, arena, &capacity, &export));
    }
    hapt_arena_init(&source.arena);
    export.context = &source;
    const enum hapt_status status = hapt_export_write(&export, hapt_config_text(config, "output"));
    hapt_arena_release(&source.arena);
    return status;
}

enum hapt_status hapt_command_export(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
{
    const char *path = hapt_config_text(config, "checkpoint"), *output = hapt_config_text(config, "output");
    const bool folder = strcmp(hapt_config_text(config, "format"), "safetensors") == 0;
    struct hapt_checkpoint *checkpoint = NULL;
    if (!path || !output)
        return hapt_env_agree(env->world, hapt_fail(HAPT_ERR_USAGE, "give --checkpoint DIR --output w.h5",
                                                    "hapt export needs --%s", path ? "output" : "checkpoint"));
    if (!folder && (hapt_config_given(config, "dtype") || hapt_config_given(config, "shard-size") ||
                    hapt_config_given(config, "merge")))
        return hapt_env_agree(env->world, hapt_fail(HAPT_ERR_USAGE, "add --format safetensors",
                                                    "weights files (HDF5) are one file, in fp32"));
    if (folder && hapt_config_bool(config, "overwrite"))
        return hapt_env_agree(env->world, hapt_fail(HAPT_ERR_USAGE, "choose a new --output",
                                                    "--format safetensors never replaces a folder"));
    if (!folder)
        HAPT_TRY(
            hapt_outputs_check(env, config, 1, &(struct hapt_output){.option = "output", .format = "hapt-weights"}));
    struct hapt_progress progress;
    hapt_progress_init(&progress, env, "exporting", 0);
    enum hapt_status status = hapt_checkpoint_find(env, path, arena, &checkpoint);
    if (status != HAPT_OK) {
        hapt_progress_release(&progress);
        return status;
    }
    if (env->world_rank == 0)
        status = folder ? write_folder(env, config, checkpoint, arena) : hapt_checkpoint_export(checkpoint, output);
    hapt_progress_release(&progress);
    HAPT_TRY(hapt_env_agree(env->world, status));
    hapt_print(env, "%s: %lld parameters of step %lld from %s\n", output, (long long)checkpoint->parameter_count,
               (long long)checkpoint->step, checkpoint->path);
    return HAPT_OK;
}
