/* From weights to a folder that transformers loads: safetensors in shards, their index, and the files that came with
 * the model. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "hapt/folder.h"
#include "hapt/import.h"
#include "hapt/progress.h"
#include "hapt/text.h"

enum { BLOCK = 1 << 16 /* elements that are converted at a time */, MAX_LEFTOVERS = 100 };

struct writer {
    const struct hapt_export *export;
    const char *folder; /* under its temporary name */
    struct hapt_arena *arena;
    int shard_count;
    int *shard; /* [tensors] */
    FILE *file;
    const char *path;
};

static int64_t elements_of(const struct hapt_export_tensor *tensor)
{
    int64_t elements = 1;
    for (int d = 0; d < tensor->dims; d++) elements *= tensor->shape[d];
    return elements;
}

static int64_t bytes_of(const struct writer *writer, const struct hapt_export_tensor *tensor)
{
    return elements_of(tensor) * (int64_t)hapt_dtype_bytes(writer->export->dtype);
}

static const char *type_name(enum hapt_dtype dtype)
{
    return dtype == HAPT_BF16 ? "BF16" : dtype == HAPT_F16 ? "F16" : "F32";
}

static enum hapt_status cannot_write(const char *path)
{
    return hapt_fail(HAPT_ERR_IO, "check free space on the disk, and the folder's permissions",
                     "%s cannot be written: %s", path, strerror(errno));
}

static enum hapt_status write_bytes(struct writer *writer, const void *bytes, size_t size)
{
    return fwrite(bytes, 1, size, writer->file) == size ? HAPT_OK : cannot_write(writer->path);
}

static enum hapt_status open_file(struct writer *writer, const char *name)
{
    writer->path = hapt_arena_printf(writer->arena, "%s/%s", writer->folder, name);
    if (!writer->path) return HAPT_ERR_MEMORY;
    const int descriptor = open(writer->path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    writer->file = descriptor >= 0 ? fdopen(descriptor, "wb") : NULL;
    if (writer->file) return HAPT_OK;
    const enum hapt_status status = cannot_write(writer->path);
    if (descriptor >= 0) close(descriptor);
    return status;
}

/* Completes the file if `status` is HAPT_OK; returns the first failure. */
static enum hapt_status close_file(struct writer *writer, enum hapt_status status)
{
    if (status == HAPT_OK && (fflush(writer->file) != 0 || fsync(fileno(writer->file)) != 0))
        status = cannot_write(writer->path);
    if (fclose(writer->file) != 0 && status == HAPT_OK) status = cannot_write(writer->path);
    writer->file = NULL;
    return status;
}

/* Tensors go to shards in their order; a shard ends before it would have more than the limit. */
static enum hapt_status divide(struct writer *writer)
{
    const struct hapt_export *export = writer->export;
    int64_t used = 0;
    HAPT_NEW(writer->shard, writer->arena, export->count);
    writer->shard_count = 1;
    for (int64_t t = 0; t < export->count; t++) {
        const int64_t bytes = bytes_of(writer, &export->tensor[t]);
        if (used > 0 && bytes > export->shard_bytes - used) {
            writer->shard_count++;
            used = 0;
        }
        used += bytes;
        writer->shard[t] = writer->shard_count - 1;
    }
    return HAPT_OK;
}

static const char *shard_name(struct writer *writer, int shard)
{
    const char *stem = writer->export->stem;
    return writer->shard_count == 1
               ? hapt_arena_printf(writer->arena, "%s.safetensors", stem)
               : hapt_arena_printf(writer->arena, "%s-%05d-of-%05d.safetensors", stem, shard + 1, writer->shard_count);
}

static json_t *describe(const struct writer *writer, const struct hapt_export_tensor *tensor, int64_t first)
{
    json_t *shape = json_array();
    for (int d = 0; d < tensor->dims; d++) json_array_append_new(shape, json_integer(tensor->shape[d]));
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", type_name(writer->export->dtype), "shape", shape, "data_offsets",
                     (json_int_t)first, (json_int_t)(first + bytes_of(writer, tensor)));
}

/* 8 bytes of length, then the header, padded with blanks to a multiple of 8 bytes. */
static enum hapt_status write_header(struct writer *writer, int shard)
{
    const struct hapt_export *export = writer->export;
    json_t *header = json_pack("{s:{s:s}}", "__metadata__", "format", "pt");
    int64_t first = 0;
    for (int64_t t = 0; t < export->count; t++) {
        if (writer->shard[t] != shard) continue;
        const bool doubled = json_object_get(header, export->tensor[t].name) != NULL;
        if (doubled ||
            json_object_set_new(header, export->tensor[t].name, describe(writer, &export->tensor[t], first)) != 0) {
            json_decref(header);
            return hapt_fail(HAPT_ERR_INPUT, "rename the parameter in the model file",
                             "tensor %.100s cannot be written: its name %s", export->tensor[t].name,
                             doubled ? "is there twice" : "is not UTF-8");
        }
        first += bytes_of(writer, &export->tensor[t]);
    }
    char *text = header ? json_dumps(header, JSON_COMPACT) : NULL;
    json_decref(header);
    if (!text) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for the header of %s", writer->path);
    const size_t length = strlen(text), padded = (length + 7) / 8 * 8;
    unsigned char prefix[8];
    for (int i = 0; i < 8; i++) prefix[i] = (unsigned char)((uint64_t)padded >> (8 * i));
    enum hapt_status status = write_bytes(writer, prefix, sizeof prefix);
    if (status == HAPT_OK) status = write_bytes(writer, text, length);
    if (status == HAPT_OK) status = write_bytes(writer, "        ", padded - length);
    free(text);
    return status;
}

static enum hapt_status write_tensor(struct writer *writer, const struct hapt_export_tensor *tensor, uint16_t *narrow)
{
    const struct hapt_export *export = writer->export;
    const int64_t elements = elements_of(tensor);
    const float *value;
    HAPT_TRY(export->read(export->context, tensor->source, &value));
    value += tensor->first;
    if (export->dtype == HAPT_F32) return write_bytes(writer, value, (size_t)elements * sizeof *value);
    for (int64_t i = 0; i < elements; i += BLOCK) {
        const int64_t count = elements - i < BLOCK ? elements - i : BLOCK;
        for (int64_t k = 0; k < count; k++) {
            narrow[k] = export->dtype == HAPT_BF16 ? hapt_bf16_from_f32(value[i + k]) : hapt_f16_from_f32(value[i + k]);
            if (export->dtype == HAPT_F16 && isfinite(value[i + k]) && (narrow[k] & 0x7fff) == 0x7c00)
                return hapt_fail(HAPT_ERR_INPUT, "choose --dtype bf16 or fp32",
                                 "element %" PRId64 " of tensor %s is %g, which fp16 cannot hold", i + k, tensor->name,
                                 (double)value[i + k]);
        }
        HAPT_TRY(write_bytes(writer, narrow, (size_t)count * sizeof *narrow));
    }
    return HAPT_OK;
}

static enum hapt_status fill_shard(struct writer *writer, int shard, uint16_t *narrow)
{
    HAPT_TRY(write_header(writer, shard));
    for (int64_t t = 0; t < writer->export->count; t++) {
        if (writer->shard[t] != shard) continue;
        HAPT_TRY(write_tensor(writer, &writer->export->tensor[t], narrow));
        hapt_progress_advance(1);
    }
    return HAPT_OK;
}

static enum hapt_status write_shards(struct writer *writer)
{
    uint16_t *narrow;
    HAPT_NEW(narrow, writer->arena, BLOCK);
    hapt_progress_expect((long)writer->export->count);
    for (int shard = 0; shard < writer->shard_count; shard++) {
        const char *name = shard_name(writer, shard);
        if (!name) return HAPT_ERR_MEMORY;
        HAPT_TRY(open_file(writer, name));
        HAPT_TRY(close_file(writer, fill_shard(writer, shard, narrow)));
    }
    return HAPT_OK;
}

static enum hapt_status write_index(struct writer *writer)
{
    const struct hapt_export *export = writer->export;
    int64_t total = 0;
    if (writer->shard_count == 1) return HAPT_OK;
    json_t *map = json_object();
    for (int64_t t = 0; t < export->count; t++) {
        total += bytes_of(writer, &export->tensor[t]);
        json_object_set_new(map, export->tensor[t].name, json_string(shard_name(writer, writer->shard[t])));
    }
    json_t *index = json_pack("{s:{s:I}, s:o}", "metadata", "total_size", (json_int_t)total, "weight_map", map);
    char *text = index ? json_dumps(index, JSON_INDENT(2) | JSON_SORT_KEYS) : NULL;
    json_decref(index);
    if (!text) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for the index of the shards");
    const char *name = hapt_arena_printf(writer->arena, "%s.safetensors.index.json", export->stem);
    enum hapt_status status = name ? open_file(writer, name) : HAPT_ERR_MEMORY;
    if (status == HAPT_OK) {
        status = write_bytes(writer, text, strlen(text));
        if (status == HAPT_OK) status = write_bytes(writer, "\n", 1);
        status = close_file(writer, status);
    }
    free(text);
    return status;
}

static enum hapt_status write_files(struct writer *writer)
{
    const struct hapt_attachments *files = writer->export->files;
    for (int i = 0; files && i < files->count; i++) {
        HAPT_TRY(open_file(writer, files->name[i]));
        HAPT_TRY(close_file(writer, write_bytes(writer, files->bytes[i], (size_t)files->size[i])));
    }
    return HAPT_OK;
}

static bool count_one(void *context, const char *name)
{
    (void)name;
    ++*(int *)context;
    return true;
}

static bool any_file(const char *name)
{
    (void)name;
    return true;
}

/* HAPT_ERR_USAGE unless the name is free, or an empty folder. */
static enum hapt_status check_target(const char *folder)
{
    struct stat about;
    const char *name = hapt_text_base_name(folder);
    const bool exists = lstat(folder, &about) == 0;
    bool is_free = !exists;
    if (exists && S_ISDIR(about.st_mode)) {
        int count = 0;
        HAPT_TRY(hapt_folder_list(folder, count_one, &count));
        is_free = count == 0;
    }
    if (is_free && *name && strcmp(name, ".") != 0 && strcmp(name, "..") != 0) return HAPT_OK;
    return hapt_fail(HAPT_ERR_USAGE, "choose a new --output", "%s exists and is no empty folder", folder);
}

/* Creates a folder of a temporary name beside the final one: .NAME.PID.partial, or with a number if that exists. */
static enum hapt_status make_partial(struct writer *writer, const char *parent, const char *name)
{
    for (int i = 0; i < MAX_LEFTOVERS; i++) {
        writer->folder =
            i == 0 ? hapt_arena_printf(writer->arena, "%s/.%s.%ld.partial", parent, name, (long)getpid())
                   : hapt_arena_printf(writer->arena, "%s/.%s.%ld-%d.partial", parent, name, (long)getpid(), i);
        if (!writer->folder) return HAPT_ERR_MEMORY;
        if (mkdir(writer->folder, 0777) == 0) return HAPT_OK;
        if (errno != EEXIST) break;
    }
    return cannot_write(writer->folder);
}

static enum hapt_status write_folder(struct writer *writer, const char *parent, const char *folder)
{
    const char *slash = strrchr(folder, '/');
    HAPT_TRY(check_target(folder));
    HAPT_TRY(hapt_folder_make(parent));
    HAPT_TRY(make_partial(writer, parent, slash ? slash + 1 : folder));
    enum hapt_status status = divide(writer);
    if (status == HAPT_OK) status = write_shards(writer);
    if (status == HAPT_OK) status = write_index(writer);
    if (status == HAPT_OK) status = write_files(writer);
    if (status == HAPT_OK) status = hapt_folder_sync(writer->folder);
    if (status == HAPT_OK && rename(writer->folder, folder) != 0) /* also onto an empty folder */
        status = cannot_write(folder);
    if (status != HAPT_OK) hapt_folder_remove(parent, strrchr(writer->folder, '/') + 1, any_file);
    return status == HAPT_OK ? hapt_folder_sync(parent) : status;
}

enum hapt_status hapt_export_write(const struct hapt_export *export, const char *folder)
{
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    char *path = hapt_arena_strdup(&arena, folder);
    struct writer writer = {.export = export, .arena = &arena};
    enum hapt_status status = path ? HAPT_OK : HAPT_ERR_MEMORY;
    if (status == HAPT_OK) {
        size_t length = strlen(path);
        while (length > 1 && path[length - 1] == '/') path[--length] = '\0';
        const char *slash = strrchr(path, '/'), *parent = slash ? "/" : ".";
        if (slash > path) parent = hapt_arena_printf(&arena, "%.*s", (int)(slash - path), path);
        status = parent ? write_folder(&writer, parent, path) : HAPT_ERR_MEMORY;
    }
    hapt_arena_release(&arena);
    return status;
}
