#include "safetensors.h"

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

#include "json_options.h"

#define HEADER_LIMIT ((int64_t)100 << 20) /* the format's own limit */
#define INDEX_LIMIT ((size_t)64 << 20)
#define DAMAGED "the file is damaged: download it again"
enum { MAX_NAME = 200, MAX_TENSORS = 1 << 18 };

/* Bytes of an element; 0: no type of the format. */
static int element_bytes(const char *type)
{
    static const struct {
        const char *name;
        int bytes;
    } types[] = {{"F32", 4}, {"BF16", 2}, {"F16", 2}, {"F64", 8}, {"I64", 8}, {"I32", 4},     {"I16", 2},    {"I8", 1},
                 {"U8", 1},  {"BOOL", 1}, {"U16", 2}, {"U32", 4}, {"U64", 8}, {"F8_E4M3", 1}, {"F8_E5M2", 1}};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
        if (strcmp(types[i].name, type) == 0) return types[i].bytes;
    return 0;
}

static bool is_supported(const char *type)
{
    return strcmp(type, "F32") == 0 || strcmp(type, "BF16") == 0 || strcmp(type, "F16") == 0;
}

/* Reads exactly `size` bytes at `offset`. */
static enum hapt_status read_at(int descriptor, const char *path, int64_t offset, void *to, size_t size)
{
    for (size_t done = 0; done < size;) {
        const ssize_t got = pread(descriptor, (char *)to + done, size - done, (off_t)(offset + (int64_t)done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return hapt_fail(HAPT_ERR_IO, "check the disk", "%s cannot be read: %s", path, strerror(errno));
        if (got == 0) return hapt_fail(HAPT_ERR_INPUT, DAMAGED, "%s ends too early", path);
        done += (size_t)got;
    }
    return HAPT_OK;
}

static enum hapt_status bad_tensor(const char *path, const char *name, const char *what)
{
    return hapt_fail(HAPT_ERR_INPUT, DAMAGED, "%s: tensor %.100s %s", path, name, what);
}

static enum hapt_status parse_shape(const char *path, const json_t *shape, struct safetensors_tensor *tensor)
{
    int64_t elements = 1;
    const int bytes = element_bytes(tensor->type);
    if (bytes == 0) return bad_tensor(path, tensor->name, "has an element type that the format lacks");
    if (!json_is_array(shape)) return bad_tensor(path, tensor->name, "has no shape");
    if (json_array_size(shape) > SAFETENSORS_MAX_DIMS)
        return bad_tensor(path, tensor->name, "has more than 5 dimensions");
    tensor->dims = (int)json_array_size(shape);
    for (int d = 0; d < tensor->dims; d++) {
        const json_t *size = json_array_get(shape, (size_t)d);
        tensor->shape[d] = json_integer_value(size);
        if (!json_is_integer(size) || tensor->shape[d] < 0 || tensor->shape[d] > (int64_t)1 << 40)
            return bad_tensor(path, tensor->name, "has an impossible shape");
        if (tensor->shape[d] > 0 && elements > ((int64_t)1 << 56) / tensor->shape[d])
            return bad_tensor(path, tensor->name, "has an impossible shape");
        elements *= tensor->shape[d];
    }
    if (elements * bytes != tensor->bytes)
        return bad_tensor(path, tensor->name, "has another number of bytes than its shape and type need");
    return HAPT_OK;
}

/* One entry of a header; `data` is where the tensors' bytes begin, `room` how many there are. */
static enum hapt_status parse_tensor(const char *path, const char *name, const json_t *entry, int64_t data,
                                     int64_t room, struct hapt_arena *arena, struct safetensors_tensor *tensor)
{
    const char *key;
    json_t *value;
    *tensor = (struct safetensors_tensor){.path = path, .name = hapt_arena_strdup(arena, name)};
    if (!tensor->name) return HAPT_ERR_MEMORY;
    if (strlen(name) > MAX_NAME || strchr(name, '/'))
        return bad_tensor(path, name, "has a name of more than 200 characters, or with a slash");
    if (!json_is_object(entry)) return bad_tensor(path, name, "is not described by an object");
    json_object_foreach((json_t *)entry, key, value)
    {
        if (strcmp(key, "dtype") != 0 && strcmp(key, "shape") != 0 && strcmp(key, "data_offsets") != 0)
            return bad_tensor(path, name, "has an unknown property");
    }
    const json_t *type = json_object_get(entry, "dtype"), *offsets = json_object_get(entry, "data_offsets");
    if (!json_is_string(type)) return bad_tensor(path, name, "has no dtype");
    tensor->type = hapt_arena_strdup(arena, json_string_value(type));
    if (!tensor->type) return HAPT_ERR_MEMORY;
    const json_t *first = json_array_get(offsets, 0), *end = json_array_get(offsets, 1);
    if (!json_is_array(offsets) || json_array_size(offsets) != 2 || !json_is_integer(first) || !json_is_integer(end))
        return bad_tensor(path, name, "has no data_offsets");
    const int64_t from = json_integer_value(first), to = json_integer_value(end);
    if (from < 0 || to < from || to > room) return bad_tensor(path, name, "lies outside of the file");
    tensor->offset = data + from;
    tensor->bytes = to - from;
    return parse_shape(path, json_object_get(entry, "shape"), tensor);
}

static int by_offset(const void *a, const void *b)
{
    const struct safetensors_tensor *x = a, *y = b;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct safetensors_tensor *)a)->name, ((const struct safetensors_tensor *)b)->name);
}

/* The tensors' bytes must follow each other without holes up to the end of the file. */
static enum hapt_status check_cover(const char *path, struct safetensors_tensor *tensor, int64_t count, int64_t data,
                                    int64_t size)
{
    qsort(tensor, (size_t)count, sizeof *tensor, by_offset);
    int64_t at = data;
    for (int64_t t = 0; t < count; t++) {
        if (tensor[t].offset < at) return bad_tensor(path, tensor[t].name, "overlaps another one");
        if (tensor[t].offset > at) return bad_tensor(path, tensor[t].name, "has unused bytes before it");
        at += tensor[t].bytes;
    }
    if (at == size) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, DAMAGED, "%s has %" PRId64 " bytes behind its last tensor", path, size - at);
}

static enum hapt_status parse_header(const char *path, const json_t *header, int64_t data, int64_t size,
                                     struct hapt_arena *arena, struct safetensors *found)
{
    const char *name;
    json_t *entry;
    int64_t count = 0;
    if (!json_is_object(header)) return hapt_fail(HAPT_ERR_INPUT, DAMAGED, "%s has no header", path);
    if (json_object_size(header) > MAX_TENSORS)
        return hapt_fail(HAPT_ERR_INPUT, DAMAGED, "%s holds more than %d tensors", path, MAX_TENSORS);
    HAPT_NEW(found->tensor, arena, json_object_size(header) + 1);
    json_object_foreach((json_t *)header, name, entry)
    {
        if (strcmp(name, "__metadata__") == 0) {
            if (!json_is_object(entry)) return hapt_fail(HAPT_ERR_INPUT, DAMAGED, "%s: bad __metadata__", path);
            continue;
        }
        HAPT_TRY(parse_tensor(path, name, entry, data, size - data, arena, &found->tensor[count++]));
    }
    found->count = count;
    if (count == 0) return hapt_fail(HAPT_ERR_INPUT, DAMAGED, "%s holds no tensors", path);
    return check_cover(path, found->tensor, count, data, size);
}

static enum hapt_status read_header(const char *path, int descriptor, struct hapt_arena *arena,
                                    struct safetensors *found)
{
    struct stat about;
    unsigned char prefix[8];
    uint64_t length = 0;
    json_error_t error;
    if (fstat(descriptor, &about) != 0 || !S_ISREG(about.st_mode))
        return hapt_fail(HAPT_ERR_INPUT, NULL, "%s is not a regular file", path);
    if (about.st_size < 10) return hapt_fail(HAPT_ERR_INPUT, DAMAGED, "%s ends too early", path);
    HAPT_TRY(read_at(descriptor, path, 0, prefix, sizeof prefix));
    for (int i = 7; i >= 0; i--) length = length << 8 | prefix[i];
    if (length < 2 || length > (uint64_t)HEADER_LIMIT || (int64_t)length > about.st_size - 8)
        return hapt_fail(HAPT_ERR_INPUT, DAMAGED,
                         "%s is no safetensors file: its header would have %" PRIu64 " bytes, the file has %lld", path,
                         length, (long long)about.st_size);
    char *text = malloc((size_t)length);
    if (!text) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for the header of %s", path);
    enum hapt_status status = read_at(descriptor, path, 8, text, (size_t)length);
    json_t *header = NULL;
    if (status == HAPT_OK) {
        header = json_loadb(text, (size_t)length, JSON_REJECT_DUPLICATES, &error);
        if (!header)
            status = hapt_fail(HAPT_ERR_INPUT, DAMAGED, "the header of %s is no JSON: %s", path, error.text);
        else
            status = parse_header(path, header, 8 + (int64_t)length, (int64_t)about.st_size, arena, found);
    }
    json_decref(header);
    free(text);
    return status;
}

static enum hapt_status open_file(const char *path, int *descriptor)
{
    *descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (*descriptor >= 0) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, NULL, "%s cannot be read: %s", path, strerror(errno));
}

static enum hapt_status open_one(const char *path, struct hapt_arena *arena, struct safetensors *found)
{
    int descriptor;
    HAPT_TRY(open_file(path, &descriptor));
    const enum hapt_status status = read_header(path, descriptor, arena, found);
    close(descriptor);
    return status;
}

static enum hapt_status join(struct safetensors *all, const struct safetensors *more, struct hapt_arena *arena)
{
    struct safetensors_tensor *joined;
    HAPT_NEW(joined, arena, all->count + more->count);
    if (all->count > 0) memcpy(joined, all->tensor, (size_t)all->count * sizeof *joined);
    memcpy(joined + all->count, more->tensor, (size_t)more->count * sizeof *joined);
    all->tensor = joined;
    all->count += more->count;
    return HAPT_OK;
}

/* Files named in the index, each once, in the order of their first tensors. */
static enum hapt_status open_shards(const char *folder, const char *index, const json_t *map, struct hapt_arena *arena,
                                    struct safetensors *all)
{
    const char *name;
    json_t *file;
    json_t *seen = json_object();
    enum hapt_status status = seen ? HAPT_OK : hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for %s", index);
    json_object_foreach((json_t *)map, name, file)
    {
        const char *base = json_string_value(file);
        if (status != HAPT_OK) break;
        if (!base || !*base || *base == '.' || strchr(base, '/') || strlen(base) > MAX_NAME) {
            status =
                hapt_fail(HAPT_ERR_INPUT, DAMAGED, "%s: tensor %.100s is in a file without a plain name", index, name);
            break;
        }
        if (json_object_get(seen, base)) continue;
        struct safetensors shard;
        const char *path = hapt_arena_printf(arena, "%s/%s", folder, base);
        if (!path || json_object_set_new(seen, base, json_true()) != 0) status = HAPT_ERR_MEMORY;
        if (status == HAPT_OK) status = open_one(path, arena, &shard);
        if (status == HAPT_OK) status = join(all, &shard, arena);
    }
    json_decref(seen);
    return status;
}

/* Index and shards must name the same tensors in the same files. */
static enum hapt_status check_index(const char *folder, const char *index, const json_t *map,
                                    const struct safetensors *all)
{
    const size_t prefix = strlen(folder) + 1;
    for (int64_t t = 0; t < all->count; t++) {
        const char *file = json_string_value(json_object_get(map, all->tensor[t].name));
        if (!file || strcmp(file, all->tensor[t].path + prefix) != 0)
            return hapt_fail(HAPT_ERR_INPUT, DAMAGED, "%s does not name tensor %.100s of %s", index,
                             all->tensor[t].name, all->tensor[t].path);
    }
    const char *name;
    json_t *file;
    json_object_foreach((json_t *)map, name, file)
    {
        if (safetensors_find(all, name)) continue;
        return hapt_fail(HAPT_ERR_INPUT, DAMAGED, "%s names tensor %.100s, which %s does not hold", index, name,
                         json_string_value(file));
    }
    return HAPT_OK;
}

static enum hapt_status check_names(const struct safetensors *all)
{
    for (int64_t t = 1; t < all->count; t++)
        if (strcmp(all->tensor[t - 1].name, all->tensor[t].name) == 0)
            return hapt_fail(HAPT_ERR_INPUT, DAMAGED, "tensor %.100s is in %s and in %s", all->tensor[t].name,
                             all->tensor[t - 1].path, all->tensor[t].path);
    return HAPT_OK;
}

static enum hapt_status open_indexed(const char *folder, const char *index, struct hapt_arena *arena,
                                     struct safetensors *all)
{
    json_t *root = NULL;
    HAPT_TRY(json_read(index, INDEX_LIMIT, &root));
    const json_t *map = json_object_get(root, "weight_map");
    enum hapt_status status = json_is_object(map) && json_object_size(map) > 0
                                  ? open_shards(folder, index, map, arena, all)
                                  : hapt_fail(HAPT_ERR_INPUT, DAMAGED, "%s has no object weight_map", index);
    if (status == HAPT_OK) {
        qsort(all->tensor, (size_t)all->count, sizeof *all->tensor, by_name);
        status = check_names(all);
    }
    if (status == HAPT_OK) status = check_index(folder, index, map, all);
    json_decref(root);
    return status;
}

enum hapt_status safetensors_open(const char *folder, struct hapt_arena *arena, struct safetensors **opened)
{
    struct safetensors *all;
    HAPT_NEW(all, arena, 1);
    const char *single = hapt_arena_printf(arena, "%s/model.safetensors", folder);
    const char *index = hapt_arena_printf(arena, "%s/model.safetensors.index.json", folder);
    if (!single || !index) return HAPT_ERR_MEMORY;
    if (access(single, F_OK) == 0) {
        HAPT_TRY(open_one(single, arena, all));
        qsort(all->tensor, (size_t)all->count, sizeof *all->tensor, by_name);
    } else if (access(index, F_OK) == 0) {
        HAPT_TRY(open_indexed(folder, index, arena, all));
    } else {
        return hapt_fail(HAPT_ERR_INPUT,
                         "give the folder of a published model with safetensors; convert pickled weights (*.bin) first",
                         "%s has neither model.safetensors nor model.safetensors.index.json", folder);
    }
    *opened = all;
    return HAPT_OK;
}

struct safetensors_tensor *safetensors_find(const struct safetensors *of, const char *name)
{
    const struct safetensors_tensor key = {.name = name};
    return bsearch(&key, of->tensor, (size_t)of->count, sizeof key, by_name);
}

/* 16-bit elements are read into the end of the fp32 array and widened from the front. */
static void widen(float *value, int64_t elements, bool bf16)
{
    const char *narrow = (const char *)value + 2 * elements;
    for (int64_t i = 0; i < elements; i++) {
        uint16_t bits;
        memcpy(&bits, narrow + 2 * i, sizeof bits);
        value[i] = bf16 ? hapt_bf16_to_f32(bits) : hapt_f16_to_f32(bits);
    }
}

enum hapt_status safetensors_read(const struct safetensors_tensor *tensor, float *value)
{
    int descriptor;
    if (!is_supported(tensor->type))
        return hapt_fail(HAPT_ERR_INPUT, "hapt reads F32, BF16 and F16; convert quantised weights first",
                         "%s: tensor %.100s is of type %.20s", tensor->path, tensor->name, tensor->type);
    const int bytes = element_bytes(tensor->type);
    const int64_t elements = tensor->bytes / bytes;
    HAPT_TRY(open_file(tensor->path, &descriptor));
    const enum hapt_status status = read_at(descriptor, tensor->path, tensor->offset,
                                            (char *)value + (4 - bytes) * elements, (size_t)tensor->bytes);
    close(descriptor);
    HAPT_TRY(status);
    if (bytes == 2) widen(value, elements, tensor->type[0] == 'B');
    for (int64_t i = 0; i < elements; i++)
        if (!isfinite(value[i]))
            return hapt_fail(HAPT_ERR_INPUT, "weights must be finite", "%s: element %" PRId64 " of tensor %.100s is %g",
                             tensor->path, i, tensor->name, (double)value[i]);
    return HAPT_OK;
}
