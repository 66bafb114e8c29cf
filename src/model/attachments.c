/* /files/NAME of model files and of checkpoints: files that travel with the weights, such as a tokenizer. */
#include <stdio.h>
#include <string.h>

#include "hapt/model.h"

enum { MAX_FILES = 64, MAX_NAME = 200 };
#define MAX_BYTES ((int64_t)64 << 20) /* of one file */

enum hapt_status hapt_attachments_write(struct hapt_h5 *file, const struct hapt_attachments *files)
{
    for (int i = 0; i < files->count; i++) {
        char path[MAX_NAME + 16];
        if (files->size[i] == 0) continue; /* a dataset has at least one element */
        snprintf(path, sizeof path, "/files/%s", files->name[i]);
        HAPT_TRY(hapt_h5_write(file, path, HAPT_H5_U8, 1, &files->size[i], files->bytes[i], ""));
    }
    return HAPT_OK;
}

/* Names come from a file: none may lead out of the folder that export writes. */
static bool is_plain(const char *name)
{
    return *name && *name != '.' && !strchr(name, '/') && strlen(name) <= MAX_NAME;
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
        char path[MAX_NAME + 16];
        void *bytes;
        int64_t shape[] = {-1};
        if (!is_plain(name[i]))
            return hapt_fail(HAPT_ERR_INPUT, NULL, "%s carries a file of the name %.100s", hapt_h5_path(file), name[i]);
        snprintf(path, sizeof path, "/files/%s", name[i]);
        HAPT_TRY(hapt_h5_read(file, path, HAPT_H5_U8, 1, shape, MAX_BYTES, arena, &bytes));
        files->bytes[i] = bytes;
        files->size[i] = shape[0];
        files->count++;
    }
    return HAPT_OK;
}
