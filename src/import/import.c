/* From a folder to a model: config.json gives the graph, and each tensor of the files must be one of its parameters. */
#include "hapt/import.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "shape.h"
#include "safetensors.h"

#define FILE_LIMIT ((int64_t)64 << 20) /* of a file that is kept beside the weights; tokenizers have some 10 MB */
enum { MAX_NAME = 240 };

static enum hapt_status keep_file(const char *path, const char *name, struct hapt_arena *arena,
                                  struct hapt_attachments *files)
{
    struct stat about;
    const int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0 && errno == ENOENT) return HAPT_OK;
    if (descriptor < 0) return hapt_fail(HAPT_ERR_INPUT, NULL, "%s cannot be read: %s", path, strerror(errno));
    if (fstat(descriptor, &about) != 0 || !S_ISREG(about.st_mode) || about.st_size > FILE_LIMIT) {
        close(descriptor);
        return hapt_fail(HAPT_ERR_INPUT, "it should be a file of at most 64 MiB", "%s is too large, or no regular file",
                         path);
    }
    unsigned char *bytes = hapt_arena_alloc(arena, (size_t)about.st_size + 1, 1);
    int64_t done = 0;
    ssize_t got = 1;
    while (bytes && done < about.st_size && (got = read(descriptor, bytes + done, (size_t)(about.st_size - done))) > 0)
        done += got;
    close(descriptor);
    if (!bytes) return HAPT_ERR_MEMORY;
    if (done < about.st_size) return hapt_fail(HAPT_ERR_INPUT, NULL, "%s cannot be read", path);
    files->name[files->count] = name;
    files->bytes[files->count] = bytes;
    files->size[files->count++] = about.st_size;
    return HAPT_OK;
}

static enum hapt_status keep_files(const char *folder, struct hapt_arena *arena, struct hapt_attachments *files)
{
    int count = 0;
    while (hapt_attachment_name(count)) count++;
    HAPT_NEW(files->name, arena, count);
    HAPT_NEW(files->bytes, arena, count);
    HAPT_NEW(files->size, arena, count);
    for (int i = 0; i < count; i++) {
        const char *name = hapt_attachment_name(i), *path = hapt_arena_printf(arena, "%s/%s", folder, name);
        if (!path) return HAPT_ERR_MEMORY;
        if (strcmp(name, HAPT_ADAPTER_CONFIG) != 0) HAPT_TRY(keep_file(path, name, arena, files));
    }
    return HAPT_OK;
}

/* Describes the adapters, in the format of PEFT. */
static enum hapt_status describe_adapter(const char *folder, const struct hapt_config *config, struct hapt_arena *arena,
                                         struct hapt_attachments *files)
{
    struct hapt_lora lora;
    HAPT_TRY(hapt_lora_parse(hapt_config_text(config, "lora"), arena, &lora));
    json_t *targets = json_array();
    char *list = hapt_arena_strdup(arena, lora.targets), *rest = NULL;
    for (char *one = list ? strtok_r(list, ",", &rest) : NULL; one; one = strtok_r(NULL, ",", &rest))
        json_array_append_new(targets, json_string(one));
    json_t *root = json_pack("{s:s, s:s, s:s, s:I, s:f, s:f, s:s, s:o, s:b, s:b}", "peft_type", "LORA", "task_type",
                             "CAUSAL_LM", "base_model_name_or_path", folder, "r", (json_int_t)lora.rank, "lora_alpha",
                             lora.alpha, "lora_dropout", lora.dropout, "bias", "none", "target_modules", targets,
                             "fan_in_fan_out", 0, "inference_mode", 1);
    char *text = root ? json_dumps(root, JSON_INDENT(2)) : NULL;
    json_decref(root);
    const char *kept = text ? hapt_arena_printf(arena, "%s\n", text) : NULL;
    free(text);
    if (!list || !kept) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for adapter_config.json");
    files->name[files->count] = HAPT_ADAPTER_CONFIG;
    files->bytes[files->count] = (const unsigned char *)kept;
    files->size[files->count++] = (int64_t)strlen(kept);
    return HAPT_OK;
}

/* "[64, 32]" */
static const char *shape_text(int dims, const int64_t *shape, char text[120])
{
    size_t used = 0;
    text[0] = '\0';
    for (int d = 0; d < dims && used < 90; d++)
        used += (size_t)snprintf(text + used, 120 - used, "%s%" PRId64, d ? ", " : "[", shape[d]);
    snprintf(text + used, 120 - used, dims ? "]" : "[]");
    return text;
}

static enum hapt_status find_element(const struct safetensors *of, const char *folder,
                                     const struct hapt_tensor *parameter, bool stack, int64_t k,
                                     struct safetensors_tensor **found)
{
    char name[MAX_NAME], has[120], needs[120];
    hapt_tensor_published_name(parameter->name, parameter->dims, k, name, sizeof name);
    *found = safetensors_find(of, name);
    if (!*found)
        return hapt_fail(HAPT_ERR_INPUT, "config.json and weights do not belong together, or a file is missing",
                         "%s has no tensor %s", folder, name);
    const int dims = parameter->dims - stack;
    bool equal = (*found)->dims == dims;
    for (int d = 0; equal && d < dims; d++) equal = (*found)->shape[d] == parameter->shape[d + stack];
    if (equal) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, "config.json and weights do not belong together",
                     "%s: tensor %s has the shape %s, config.json asks for %s", (*found)->path, name,
                     shape_text((*found)->dims, (*found)->shape, has),
                     shape_text(dims, parameter->shape + stack, needs));
}

/* Constants that older files contain. */
static bool is_constant(const char *name)
{
    const size_t length = strlen(name);
    static const char *const ends[] = {".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias",
                                       ".embeddings.position_ids"};
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++)
        if (length > strlen(ends[i]) && strcmp(name + length - strlen(ends[i]), ends[i]) == 0) return true;
    return false;
}

/* A copy of the tied embeddings must be one. */
static enum hapt_status check_tied(const struct safetensors_tensor *copy, const struct safetensors_tensor *of)
{
    enum hapt_status status = HAPT_OK;
    if (copy->bytes != of->bytes || strcmp(copy->type, of->type) != 0)
        return hapt_fail(HAPT_ERR_INPUT, NULL, "%s: %s is tied to %s, but has another size or type", copy->path,
                         copy->name, of->name);
    int64_t elements = 1;
    for (int d = 0; d < of->dims; d++) elements *= of->shape[d];
    float *a = malloc((size_t)elements * sizeof *a), *b = malloc((size_t)elements * sizeof *b);
    if (!a || !b) status = hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory to compare %s with %s", copy->name, of->name);
    if (status == HAPT_OK) status = safetensors_read(copy, a);
    if (status == HAPT_OK) status = safetensors_read(of, b);
    if (status == HAPT_OK && memcmp(a, b, (size_t)elements * sizeof *a) != 0)
        status = hapt_fail(HAPT_ERR_INPUT, "set tie_word_embeddings to false if both are trained",
                           "%s: %s is tied to %s, but has other values", copy->path, copy->name, of->name);
    free(a);
    free(b);
    return status;
}

static enum hapt_status check_rest(const struct safetensors *of, const struct hapt_model *model)
{
    const char *tied = hapt_model_setting(model, "tied-embeddings");
    for (int64_t t = 0; t < of->count; t++) {
        const struct safetensors_tensor *tensor = &of->tensor[t];
        if (tensor->used || is_constant(tensor->name)) continue;
        const bool is_bias = strcmp(tensor->name, "cls.predictions.decoder.bias") == 0;
        const bool is_head =
            strcmp(tensor->name, "lm_head.weight") == 0 || strcmp(tensor->name, "cls.predictions.decoder.weight") == 0;
        if (is_bias || (tied && strcmp(tied, "yes") == 0 && is_head)) {
            const int table = model->graph->op[0].input[1]; /* the first operator looks tokens up */
            const char *original = is_bias ? "cls.predictions.bias" : model->graph->tensor[table].name;
            const struct safetensors_tensor *is_of = safetensors_find(of, original);
            if (is_of) HAPT_TRY(check_tied(tensor, is_of));
            if (is_of) continue;
        }
        return hapt_fail(HAPT_ERR_INPUT, "if the model computes the same without it, remove it from the files",
                         "%s: unknown tensor %.100s", tensor->path, tensor->name);
    }
    return HAPT_OK;
}

static enum hapt_status check_tensors(const struct safetensors *of, const char *folder, const struct hapt_model *model)
{
    for (int t = 0; t < model->graph->tensor_count; t++) {
        const struct hapt_tensor published = hapt_tensor_published(&model->graph->tensor[t]), *parameter = &published;
        if (parameter->kind != HAPT_TENSOR_PARAMETER || hapt_is_adapter(parameter->name)) continue;
        const bool stack = hapt_tensor_is_stack(parameter->name, parameter->dims);
        for (int64_t k = 0; k < (stack ? parameter->shape[0] : 1); k++) {
            struct safetensors_tensor *found;
            HAPT_TRY(find_element(of, folder, parameter, stack, k, &found));
            found->used = true;
        }
    }
    return check_rest(of, model);
}

struct opened {
    struct hapt_import import;
    const struct safetensors *weights;
};

static enum hapt_status read_weights(void *context, const struct hapt_tensor *parameter, float *value)
{
    const struct opened *opened = context;
    const struct safetensors *of = opened->weights;
    if (hapt_is_adapter(parameter->name)) /* a new one begins as the rules of the model say */
        return hapt_model_initial(opened->import.model, (int)(parameter - opened->import.model->graph->tensor), value);
    const bool stack = hapt_tensor_is_stack(parameter->name, parameter->dims);
    const int64_t count = stack ? parameter->shape[0] : 1, each = hapt_tensor_elements(parameter) / count;
    for (int64_t k = 0; k < count; k++) {
        char name[MAX_NAME];
        hapt_tensor_published_name(parameter->name, parameter->dims, k, name, sizeof name);
        const struct safetensors_tensor *tensor = safetensors_find(of, name);
        HAPT_ASSERT(tensor); /* check_tensors found it */
        HAPT_TRY(safetensors_read(tensor, value + k * each));
    }
    return HAPT_OK;
}

enum hapt_status hapt_import_open(const struct hapt_env *env, const char *folder, const struct hapt_config *config,
                                  struct hapt_arena *arena, struct hapt_import **import)
{
    struct opened *opened;
    struct safetensors *of;
    struct json_options options;
    HAPT_NEW(opened, arena, 1);
    const char *path = hapt_arena_printf(arena, "%s/config.json", folder);
    if (!path) return HAPT_ERR_MEMORY;
    HAPT_TRY(safetensors_open(folder, arena, &of));
    HAPT_TRY(json_options_open(path, &options));
    struct import_shape shape = {.env = env,
                                 .options = &options,
                                 .folder = folder,
                                 .tensors = of->count,
                                 .has_prefix = !safetensors_find(of, "wte.weight"),
                                 .config = config,
                                 .arena = arena};
    const enum hapt_status status = import_build(&shape, &opened->import.model);
    json_options_release(&options);
    HAPT_TRY(status);
    HAPT_TRY(check_tensors(of, folder, opened->import.model));
    HAPT_TRY(keep_files(folder, arena, &opened->import.files));
    if (hapt_config_text(config, "lora")) HAPT_TRY(describe_adapter(folder, config, arena, &opened->import.files));
    opened->weights = of;
    opened->import.folder = folder;
    opened->import.weights = (struct hapt_weights){.read = read_weights, .context = opened};
    *import = &opened->import;
    return HAPT_OK;
}
