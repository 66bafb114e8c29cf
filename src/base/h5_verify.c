/* Reads a whole file to prove that it is readable: `hapt check`. */
#include <errno.h>
#include <stdlib.h>

#include "h5_private.h"

enum { MAX_MEMBERS = 1 << 20, MAX_DEPTH = 32, BLOCK_BYTES = 1 << 24, MAX_TEXT = 1 << 24 };

struct verification {
    struct hapt_h5 *file;
    struct hapt_h5_content *content;
    enum hapt_status status; /* of the first failed attribute */
};

/* Reads text or numbers as they are in memory. */
static enum hapt_status read_values(struct hapt_h5 *file, hid_t id, const char *name)
{
    const hid_t type = H5Aget_type(id), space = H5Aget_space(id);
    const hid_t native = type < 0 ? -1 : H5Tget_native_type(type, H5T_DIR_DEFAULT);
    const hssize_t points = space < 0 ? -1 : H5Sget_simple_extent_npoints(space);
    const size_t bytes = native < 0 ? 0 : H5Tget_size(native);
    const bool fits = points >= 0 && bytes > 0 && points <= (hssize_t)(BLOCK_BYTES / bytes);
    void *value = fits ? calloc((size_t)points + 1, bytes) : NULL;
    const bool read = value && H5Aread(id, native, value) >= 0;
    if (read && H5Tdetect_class(native, H5T_STRING) > 0) H5Dvlen_reclaim(native, space, H5P_DEFAULT, value);
    free(value);
    if (native >= 0) H5Tclose(native);
    if (type >= 0) H5Tclose(type);
    if (space >= 0) H5Sclose(space);
    if (fits && !value) return hapt_h5_fail_system(file->path, ENOMEM);
    return read ? HAPT_OK : hapt_h5_fail(file, "attribute", name);
}

static herr_t read_attribute(hid_t object, const char *name, const H5A_info_t *info, void *context)
{
    (void)info;
    struct verification *verification = context;
    const hid_t id = H5Aopen(object, name, H5P_DEFAULT);
    verification->status =
        id < 0 ? hapt_h5_fail(verification->file, "attribute", name) : read_values(verification->file, id, name);
    if (id >= 0) H5Aclose(id);
    verification->content->attributes++;
    return verification->status == HAPT_OK ? 0 : -1;
}

static enum hapt_status verify_attributes(struct verification *verification, const char *path)
{
    hsize_t first = 0;
    verification->status = HAPT_OK;
    const hid_t id = H5Oopen(verification->file->id, path, H5P_DEFAULT);
    const bool done = id >= 0 && hapt_h5_iterated(H5Aiterate2(id, H5_INDEX_NAME, H5_ITER_NATIVE, &first, read_attribute,
                                                              verification));
    if (id >= 0) H5Oclose(id);
    HAPT_TRY(verification->status);
    return done ? HAPT_OK : hapt_h5_fail(verification->file, "attributes of", path);
}

/* Text is read as text; other data as stored numbers. */
static bool is_text(struct hapt_h5 *file, const char *path, int64_t *row_bytes)
{
    const hid_t id = H5Dopen2(file->id, path, H5P_DEFAULT), type = id < 0 ? -1 : H5Dget_type(id);
    const bool text = type >= 0 && H5Tget_class(type) == H5T_STRING;
    *row_bytes = type < 0 ? 1 : (int64_t)H5Tget_size(type);
    if (type >= 0) H5Tclose(type);
    if (id >= 0) H5Dclose(id);
    return text;
}

static enum hapt_status read_numbers(struct verification *verification, const char *path, int dims,
                                     const int64_t *shape, int64_t row_elements)
{
    struct hapt_h5 *file = verification->file;
    const int64_t row_bytes = row_elements * (int64_t)sizeof(double),
                  rows = row_bytes < BLOCK_BYTES ? BLOCK_BYTES / (row_bytes > 0 ? row_bytes : 1) : 1;
    HAPT_TRY(hapt_h5_check_written(file, path));
    if (dims == 0 || row_bytes == 0) return HAPT_OK;
    if (row_bytes > (int64_t)1 << 36)
        return hapt_h5_fail_content(file, H5_HINT, "%s of %s is unreasonably large", path, file->path);
    void *block = malloc((size_t)((rows < shape[0] ? rows : shape[0]) * row_bytes) + 1);
    enum hapt_status status = block ? HAPT_OK : hapt_h5_fail_system(file->path, ENOMEM);
    for (int64_t first = 0; status == HAPT_OK && first < shape[0]; first += rows)
        status =
            hapt_h5_read_rows(file, path, HAPT_H5_F64, first, shape[0] - first < rows ? shape[0] - first : rows, block);
    free(block);
    return status;
}

static enum hapt_status verify_dataset(struct verification *verification, const char *path)
{
    struct hapt_h5 *file = verification->file;
    int dims = 0;
    int64_t shape[HAPT_H5_MAX_DIMS], row_elements = 1, element_bytes, count;
    const char **text;
    HAPT_TRY(hapt_h5_shape(file, path, &dims, shape));
    for (int d = 1; d < dims; d++)
        row_elements =
            shape[d] == 0 || row_elements <= INT64_MAX / 64 / shape[d] ? row_elements * shape[d] : INT64_MAX / 64;
    verification->content->datasets++;
    if (!is_text(file, path, &element_bytes)) {
        HAPT_TRY(read_numbers(verification, path, dims, shape, row_elements));
    } else {
        struct hapt_arena arena;
        hapt_arena_init(&arena);
        const enum hapt_status status = hapt_h5_read_strings(file, path, MAX_TEXT, &arena, &count, &text);
        hapt_arena_release(&arena);
        HAPT_TRY(status);
    }
    verification->content->bytes += (dims > 0 ? shape[0] : 1) * row_elements * element_bytes;
    return HAPT_OK;
}

static enum hapt_status verify_object(struct verification *verification, const char *path, int depth);

static enum hapt_status verify_group(struct verification *verification, const char *path, int depth)
{
    struct hapt_arena arena;
    int64_t count = 0;
    const char **name = NULL;
    hapt_arena_init(&arena);
    verification->content->groups++;
    enum hapt_status status = hapt_h5_list(verification->file, path, MAX_MEMBERS, &arena, &count, &name);
    for (int64_t i = 0; i < count && status == HAPT_OK; i++) {
        const char *member = hapt_arena_printf(&arena, "%s/%s", depth == 0 ? "" : path, name[i]);
        status = member ? verify_object(verification, member, depth + 1)
                        : hapt_h5_fail_system(verification->file->path, ENOMEM);
    }
    hapt_arena_release(&arena);
    return status;
}

static enum hapt_status verify_object(struct verification *verification, const char *path, int depth)
{
    struct hapt_h5 *file = verification->file;
    HAPT_TRY(hapt_h5_check_inside(file, path));
    if (!hapt_h5_exists(file, path))
        return hapt_h5_fail_content(file, H5_HINT, "%s of %s is a dangling link", path, file->path);
    const hid_t id = H5Oopen(file->id, path, H5P_DEFAULT);
    const H5I_type_t type = id < 0 ? H5I_BADID : H5Iget_type(id);
    if (id >= 0) H5Oclose(id);
    if (id < 0) return hapt_h5_fail(file, "object", path);
    HAPT_TRY(verify_attributes(verification, path));
    if (type == H5I_DATASET) return verify_dataset(verification, path);
    if (type == H5I_GROUP && depth > MAX_DEPTH)
        return hapt_h5_fail_content(file, H5_HINT, "%s has groups in more than %d levels", file->path, MAX_DEPTH);
    return type == H5I_GROUP ? verify_group(verification, path, depth) : HAPT_OK;
}

enum hapt_status hapt_h5_verify(struct hapt_h5 *file, struct hapt_h5_content *content)
{
    H5_HOLD_LOCK;
    struct verification verification = {.file = file, .content = content};
    *content = (struct hapt_h5_content){0};
    return verify_object(&verification, "/", 0);
}
