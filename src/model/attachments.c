/* /files/NAME of model files and of checkpoints: files that travel with the weights, such as a tokenizer. */
#include <stdio.h>
#include <string.h>

#include "hapt/model.h"

#define MAX_BYTES ((int64_t)64 << 20) /* of one file */
enum { MAX_FILES = 64, MAX_PATH = 64 };

/* Files that may travel. A file of another name, such as code, is none of these. */
static const char *const known[] = {
    "adapter_config.json",    "added_tokens.json", "chat_template.jinja",     "chat_template.json", "config.json",
    "generation_config.json", "merges.txt",        "special_tokens_map.json", "tokenizer.json",     "tokenizer.model",
    "tokenizer_config.json",  "vocab.json"};
enum { KNOWN = sizeof known / sizeof known[0] };

const char *hapt_attachment_name(int index)
{
    return index < KNOWN ? known[index] : NULL;
}

static bool is_known(const char *name)
{
    for (int i = 0; i < KNOWN; i++)
        if (strcmp(known[i], name) == 0) return true;
    return false;
}

/* A dataset has at least one element: an empty file is one byte with the attribute "empty". */
static enum hapt_status write_file(struct hapt_h5 *file, const char *path, const unsigned char *bytes, int64_t size)
{
    const int64_t shape[] = {size > 0 ? size : 1};
    HAPT_TRY(hapt_h5_write(file, path, HAPT_H5_U8, 1, shape, size > 0 ? bytes : (const unsigned char *)"", ""));
    return size > 0 ? HAPT_OK : hapt_h5_write_attribute_int(file, path, "empty", 1);
}

enum hapt_status hapt_attachments_write(struct hapt_h5 *file, const struct hapt_attachments *files)
{
    for (int i = 0; i < files->count; i++) {
        char path[MAX_PATH];
        HAPT_ASSERT(is_known(files->name[i]));
        snprintf(path, sizeof path, "/files/%s", files->name[i]);
        HAPT_TRY(write_file(file, path, files->bytes[i], files->size[i]));
    }
    return HAPT_OK;
}

static enum hapt_status read_file(struct hapt_h5 *file, const char *name, struct hapt_arena *arena,
                                  const unsigned char **bytes, int64_t *size)
{
    char path[MAX_PATH];
    int64_t shape[] = {-1};
    void *data;
    if (!is_known(name))
        return hapt_fail(HAPT_ERR_INPUT, "remove it from /files",
                         "%s carries a file of the name %.100s, which no model has", hapt_h5_path(file), name);
    snprintf(path, sizeof path, "/files/%s", name);
    if (!hapt_h5_is_byte(file, path))
        return hapt_fail(HAPT_ERR_INPUT, "store its bytes", "%s of %s does not hold bytes", path, hapt_h5_path(file));
    HAPT_TRY(hapt_h5_read(file, path, HAPT_H5_U8, 1, shape, MAX_BYTES, arena, &data));
    *bytes = data;
    *size = hapt_h5_has_attribute(file, path, "empty") ? 0 : shape[0];
    return HAPT_OK;
}

enum hapt_status hapt_attachments_read(struct hapt_h5 *file, struct hapt_arena *arena, struct hapt_attachments *files)
{
    const char **name;
    int64_t count;
    *files = (struct hapt_attachments){0};
    if (!hapt_h5_exists(file, "/files")) return HAPT_OK;
    HAPT_TRY(hapt_h5_list(file, "/files", MAX_FILES, arena, &count, &name));
    HAPT_NEW(files->bytes, arena, count);
    HAPT_NEW(files->size, arena, count);
    files->name = name;
    for (int64_t i = 0; i < count; i++) {
        HAPT_TRY(read_file(file, name[i], arena, &files->bytes[i], &files->size[i]));
        files->count++;
    }
    return HAPT_OK;
}
