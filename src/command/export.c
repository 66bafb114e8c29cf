/* hapt export: writes a checkpoint's weights to a weights file, or to a folder as Hugging Face's transformers reads. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "hapt/command.h"
#include "hapt/import.h"
#include "hapt/progress.h"
#include "hapt/train.h"
#include "outputs.h"

const char hapt_command_export_help[] =
    "--format hdf5 writes /parameters/NAME of a weights file, which hapt model --weights reads.\n"
    "--format safetensors writes a new folder that transformers' from_pretrained loads: the weights under the names\n"
    "with which they were imported, and config.json, the tokenizer's files and generation_config.json unchanged.\n"
    "A tied output layer is not written twice.\n";

/* The parameter whose elements are in memory. */
struct source {
    const struct hapt_checkpoint *checkpoint;
    struct hapt_arena arena;
    int held; /* -1: none */
    float *value;
};

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
        source->held = parameter;
    }
    *value = source->value;
    return HAPT_OK;
}

/* The tensors of parameter `p`: itself, or the elements of a stack. */
static enum hapt_status add_tensors(const struct hapt_checkpoint *checkpoint, int p, struct hapt_arena *arena,
                                    int64_t *capacity, struct hapt_export *export)
{
    const char *name = checkpoint->parameter[p];
    int dims;
    int64_t *shape, each = 1;
    HAPT_NEW(shape, arena, HAPT_H5_MAX_DIMS);
    HAPT_TRY(hapt_checkpoint_shape(checkpoint, name, &dims, shape));
    const bool stack = hapt_tensor_is_stack(name, dims);
    const char *mark = stack ? strstr(name, ".*.") : NULL;
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
        const char *published =
            mark ? hapt_arena_printf(arena, "%.*s.%lld.%s", (int)(mark - name), name, (long long)k, mark + 3) : name;
        if (!published) return HAPT_ERR_MEMORY;
        export->tensor[export->count++] = (struct hapt_export_tensor){
            .name = published, .dims = dims - stack, .shape = shape + stack, .first = k * each, .source = p};
    }
    return HAPT_OK;
}

static enum hapt_status write_folder(const struct hapt_env *env, const struct hapt_config *config,
                                     const struct hapt_checkpoint *checkpoint, struct hapt_arena *arena)
{
    struct hapt_attachments files;
    struct hapt_export export = {.files = &files, .read = read_parameter};
    struct source source = {.checkpoint = checkpoint, .held = -1};
    double shard_bytes;
    int64_t capacity = 0;
    if (!hapt_units_parse_bytes(hapt_config_text(config, "shard-size"), &shard_bytes) || shard_bytes < 1)
        return hapt_fail(HAPT_ERR_USAGE, "write a size such as \"5 GB\"", "--shard-size %s is no size",
                         hapt_config_text(config, "shard-size"));
    export.shard_bytes = (int64_t)fmin(shard_bytes, 1e18);
    HAPT_ASSERT(hapt_dtype_parse(hapt_config_text(config, "dtype"), &export.dtype));
    HAPT_TRY(hapt_checkpoint_files(checkpoint, arena, &files));
    if (files.count == 0) hapt_warn(env, "the model was not imported: the folder gets no config.json\n");
    for (int64_t p = 0; p < checkpoint->parameter_count; p++)
        HAPT_TRY(add_tensors(checkpoint, (int)p, arena, &capacity, &export));
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
    if (!folder && (hapt_config_given(config, "dtype") || hapt_config_given(config, "shard-size")))
        return hapt_env_agree(env->world, hapt_fail(HAPT_ERR_USAGE, "add --format safetensors",
                                                    "weights files (HDF5) are one file, in fp32"));
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
