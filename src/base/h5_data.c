/* Datasets and attributes. Sizes are checked before memory is reserved; HDF5 converts the values. */
#include "h5_private.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_TEXT = 1 << 20, MAX_SPARE_BYTES = 1 << 26, MAX_FILLED_BYTES = 1 << 30 };

static hid_t native(enum hapt_h5_type type)
{
    switch (type) {
    case HAPT_H5_U8: return H5T_NATIVE_UINT8;
    case HAPT_H5_U16: return H5T_NATIVE_UINT16;
    case HAPT_H5_I32: return H5T_NATIVE_INT32;
    case HAPT_H5_I64: return H5T_NATIVE_INT64;
    case HAPT_H5_F32: return H5T_NATIVE_FLOAT;
    case HAPT_H5_F64: return H5T_NATIVE_DOUBLE;
    }
    return -1;
}

size_t hapt_h5_type_bytes(enum hapt_h5_type type)
{
    static const size_t bytes[] = {1, 2, 4, 8, 4, 8};
    return bytes[type];
}

static hid_t text_type(void)
{
    const hid_t type = H5Tcopy(H5T_C_S1);
    H5Tset_size(type, H5T_VARIABLE);
    H5Tset_cset(type, H5T_CSET_UTF8);
    return type;
}

/* Creates a dataset and missing groups. fletcher32 needs chunked storage, so small datasets are one chunk. */
static hid_t create(struct hapt_h5 *file, const char *name, hid_t type, int dims, const int64_t *shape)
{
    hsize_t extent[HAPT_H5_MAX_DIMS] = {0}, chunk[HAPT_H5_MAX_DIMS] = {0};
    int64_t rest = 1;
    bool empty = false;
    for (int i = 0; i < dims; i++) {
        extent[i] = (hsize_t)shape[i];
        empty = empty || shape[i] == 0;
    }
    for (int i = dims - 1; i >= 0; i--) {
        const int64_t room = HAPT_H5_CHUNK_ELEMENTS / rest > 1 ? HAPT_H5_CHUNK_ELEMENTS / rest : 1;
        chunk[i] = (hsize_t)(shape[i] < room ? (shape[i] > 0 ? shape[i] : 1) : room);
        rest *= (int64_t)chunk[i];
    }
    const hid_t space = H5Screate_simple(dims, extent, NULL);
    const hid_t links = H5Pcreate(H5P_LINK_CREATE), layout = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_create_intermediate_group(links, 1);
    if (!empty) {
        H5Pset_chunk(layout, dims, chunk);
        H5Pset_fletcher32(layout);
    }
    const hid_t id = H5Dcreate2(file->id, name, type, space, links, layout, H5P_DEFAULT);
    H5Pclose(layout);
    H5Pclose(links);
    H5Sclose(space);
    return id;
}

enum hapt_status hapt_h5_write(struct hapt_h5 *file, const char *name, enum hapt_h5_type type, int dims,
                               const int64_t *shape, const void *data, const char *units)
{
    H5_HOLD_LOCK;
    HAPT_ASSERT(dims >= 1 && dims <= HAPT_H5_MAX_DIMS);
    const hid_t id = create(file, name, native(type), dims, shape);
    bool empty = false;
    for (int i = 0; i < dims; i++) empty = empty || shape[i] == 0;
    const bool failed = id < 0 || (!empty && H5Dwrite(id, native(type), H5S_ALL, H5S_ALL, H5P_DEFAULT, data) < 0) ||
                        H5Dflush(id) < 0 || file->error != 0;
    const bool closed = id >= 0 && H5Dclose(id) >= 0;
    if (failed || !closed) return hapt_h5_fail(file, "dataset", name);
    return units ? hapt_h5_write_attribute_text(file, name, "units", units) : HAPT_OK;
}

enum hapt_status hapt_h5_write_begin(struct hapt_h5 *file, const char *name, enum hapt_h5_type type, int dims,
                                     const int64_t *shape, const char *units)
{
    H5_HOLD_LOCK;
    HAPT_ASSERT(dims >= 1 && dims <= HAPT_H5_MAX_DIMS);
    const hid_t id = create(file, name, native(type), dims, shape);
    const bool closed = id >= 0 && H5Dclose(id) >= 0;
    return closed ? hapt_h5_write_attribute_text(file, name, "units", units) : hapt_h5_fail(file, "dataset", name);
}

enum hapt_status hapt_h5_write_strings(struct hapt_h5 *file, const char *name, int64_t count, const char *const *text)
{
    H5_HOLD_LOCK;
    /* Fixed-length strings: variable ones are stored outside the dataset, without a checksum. */
    size_t width = 1;
    for (int64_t i = 0; i < count; i++) width = strlen(text[i]) > width ? strlen(text[i]) : width;
    char *table = calloc((size_t)count + 1, width + 1);
    if (!table) return hapt_fail(HAPT_ERR_MEMORY, NULL, "host memory exhausted");
    for (int64_t i = 0; i < count; i++) memcpy(table + (size_t)i * (width + 1), text[i], strlen(text[i]));
    const hid_t type = H5Tcopy(H5T_C_S1);
    H5Tset_size(type, width + 1);
    H5Tset_cset(type, H5T_CSET_UTF8);
    const hid_t id = create(file, name, type, 1, &count);
    const bool failed = id < 0 || (count > 0 && H5Dwrite(id, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, table) < 0) ||
                        H5Dflush(id) < 0 || file->error != 0;
    const bool closed = id >= 0 && H5Dclose(id) >= 0;
    H5Tclose(type);
    free(table);
    return failed || !closed ? hapt_h5_fail(file, "dataset", name) : HAPT_OK;
}

/* Reads rows [first, first + count) of the leading dimension to `to`, or (NULL) writes them from `from`. */
static bool move_rows(hid_t id, hid_t type, int dims, const int64_t *shape, int64_t first, int64_t count, void *to,
                      const void *from)
{
    hsize_t start[HAPT_H5_MAX_DIMS] = {(hsize_t)first}, extent[HAPT_H5_MAX_DIMS] = {(hsize_t)count};
    for (int i = 1; i < dims; i++) extent[i] = (hsize_t)shape[i];
    const hid_t space = H5Dget_space(id), memory = H5Screate_simple(dims, extent, NULL);
    bool moved =
        space >= 0 && memory >= 0 && H5Sselect_hyperslab(space, H5S_SELECT_SET, start, NULL, extent, NULL) >= 0;
    if (moved && to) moved = H5Dread(id, type, memory, space, H5P_DEFAULT, to) >= 0;
    if (moved && !to) moved = H5Dwrite(id, type, memory, space, H5P_DEFAULT, from) >= 0;
    if (memory >= 0) H5Sclose(memory);
    if (space >= 0) H5Sclose(space);
    return moved;
}

static enum hapt_status extent_of(struct hapt_h5 *file, hid_t id, const char *name, int *dims, int64_t *shape)
{
    hsize_t extent[H5S_MAX_RANK];
    const hid_t space = H5Dget_space(id);
    const int rank = space < 0 ? -1 : H5Sget_simple_extent_ndims(space);
    const bool known = rank >= 0 && rank <= HAPT_H5_MAX_DIMS && H5Sget_simple_extent_dims(space, extent, NULL) == rank;
    if (space >= 0) H5Sclose(space);
    if (!known) return hapt_h5_fail(file, "the shape of", name);
    *dims = rank;
    for (int i = 0; i < rank; i++) {
        if (extent[i] > (hsize_t)INT64_MAX) return hapt_h5_fail(file, "the shape of", name);
        shape[i] = (int64_t)extent[i];
    }
    return HAPT_OK;
}

/* Compact data are stored in the object header, with a length of their own. HDF5 reads as many bytes as the shape
 * needs, whether they exist or not. */
static bool is_cut_short(hid_t id)
{
    const hid_t layout = H5Dget_create_plist(id), space = H5Dget_space(id), type = H5Dget_type(id);
    bool cut_short = layout < 0 || space < 0 || type < 0;
    if (!cut_short && H5Pget_layout(layout) == H5D_COMPACT)
        cut_short =
            (double)H5Sget_simple_extent_npoints(space) * (double)H5Tget_size(type) > (double)H5Dget_storage_size(id);
    if (type >= 0) H5Tclose(type);
    if (space >= 0) H5Sclose(space);
    if (layout >= 0) H5Pclose(layout);
    return cut_short;
}

static enum hapt_status open_dataset(struct hapt_h5 *file, const char *name, hid_t *id)
{
    if (!hapt_h5_exists(file, name))
        return hapt_h5_fail_content(file, "the file is incomplete or of another format", "dataset %s is missing in %s",
                                    name, file->path);
    HAPT_TRY(hapt_h5_check_inside(file, name));
    if (file->error && !file->writing) return hapt_h5_fail_system(file->path, file->error);
    *id = H5Dopen2(file->id, name, H5P_DEFAULT);
    if (*id < 0) return hapt_h5_fail(file, "dataset", name);
    const bool outside = hapt_h5_is_outside(*id);
    if (!outside && !is_cut_short(*id)) return HAPT_OK;
    H5Dclose(*id);
    if (outside)
        return hapt_h5_fail_content(
            file, "copy the data into the file (h5repack, h5copy)",
            "dataset %s of %s is stored in other files (external or virtual storage), which are not read", name,
            file->path);
    return hapt_h5_fail_content(file, "use another copy, or create the file again",
                                "%s is damaged: %s has fewer bytes than its shape needs", file->path, name);
}

enum hapt_status hapt_h5_shape(struct hapt_h5 *file, const char *name, int *dims, int64_t *shape)
{
    H5_HOLD_LOCK;
    hid_t id;
    HAPT_TRY(open_dataset(file, name, &id));
    const enum hapt_status status = extent_of(file, id, name, dims, shape);
    H5Dclose(id);
    return status;
}

/* True for IEEE and two's complement number types. A damaged header can describe any bit field; HDF5's conversions
 * trust it, and some crash. */
static bool is_integer(hid_t type)
{
    const size_t size = H5Tget_size(type);
    const H5T_order_t order = H5Tget_order(type);
    return (size == 1 || size == 2 || size == 4 || size == 8) && H5Tget_offset(type) == 0 &&
           H5Tget_precision(type) == 8 * size && (order == H5T_ORDER_LE || order == H5T_ORDER_BE);
}

static bool is_half(hid_t type)
{
    size_t sign, exponent, exponent_bits, mantissa, mantissa_bits;
    const H5T_order_t order = H5Tget_order(type);
    return H5Tget_size(type) == 2 && H5Tget_offset(type) == 0 && H5Tget_precision(type) == 16 &&
           (order == H5T_ORDER_LE || order == H5T_ORDER_BE) &&
           H5Tget_fields(type, &sign, &exponent, &exponent_bits, &mantissa, &mantissa_bits) >= 0 && sign == 15 &&
           exponent == 10 && exponent_bits == 5 && mantissa == 0 && mantissa_bits == 10 && H5Tget_ebias(type) == 15 &&
           H5Tget_norm(type) == H5T_NORM_IMPLIED;
}

static bool is_number_type(hid_t type)
{
    const H5T_class_t class = type < 0 ? H5T_NO_CLASS : H5Tget_class(type);
    if (class == H5T_INTEGER) return is_integer(type);
    if (class != H5T_FLOAT) return false;
    const hid_t known[] = {H5T_IEEE_F32LE, H5T_IEEE_F64LE, H5T_IEEE_F32BE, H5T_IEEE_F64BE, H5T_NATIVE_LDOUBLE};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (H5Tequal(type, known[i]) > 0) return true;
    return is_half(type);
}

bool hapt_h5_is_byte(struct hapt_h5 *file, const char *name)
{
    H5_HOLD_LOCK;
    const hid_t id = hapt_h5_exists(file, name) ? H5Dopen2(file->id, name, H5P_DEFAULT) : -1;
    const hid_t type = id < 0 ? -1 : H5Dget_type(id);
    const bool byte = type >= 0 && H5Tequal(type, H5T_NATIVE_UINT8) > 0;
    if (type >= 0) H5Tclose(type);
    if (id >= 0) H5Dclose(id);
    return byte;
}

bool hapt_h5_is_integer(struct hapt_h5 *file, const char *name)
{
    H5_HOLD_LOCK;
    const hid_t id = hapt_h5_exists(file, name) ? H5Dopen2(file->id, name, H5P_DEFAULT) : -1;
    const hid_t type = id < 0 ? -1 : H5Dget_type(id);
    const bool integer = type >= 0 && H5Tget_class(type) == H5T_INTEGER;
    if (type >= 0) H5Tclose(type);
    if (id >= 0) H5Dclose(id);
    return integer;
}

static bool is_number(hid_t id)
{
    const hid_t type = H5Dget_type(id);
    const bool number = is_number_type(type);
    if (type >= 0) H5Tclose(type);
    return number;
}

/* Compares the shape with the expected one and counts the elements. */
static enum hapt_status match_shape(struct hapt_h5 *file, const char *name, int want_dims, int64_t *want, int dims,
                                    const int64_t *shape, int64_t limit, int64_t *elements)
{
    if (dims != want_dims)
        return hapt_h5_fail_content(file, H5_HINT, "%s of %s has %d dimensions, not %d", name, file->path, dims,
                                    want_dims);
    int64_t count = 1;
    for (int i = 0; i < dims; i++) {
        if (want[i] >= 0 && shape[i] != want[i])
            return hapt_h5_fail_content(file, H5_HINT, "dimension %d of %s of %s is %lld, not %lld", i, name,
                                        file->path, (long long)shape[i], (long long)want[i]);
        if (shape[i] > 0 && count > limit / shape[i])
            return hapt_h5_fail_content(file, H5_HINT, "%s of %s is unreasonably large", name, file->path);
        count *= shape[i];
    }
    for (int i = 0; i < dims; i++) want[i] = shape[i];
    *elements = count;
    return HAPT_OK;
}

/* Compares the number of chunks that the shape needs with the number written. */
static bool all_chunks_written(hid_t id, int dims, const hsize_t *chunk)
{
#if H5_VERSION_GE(1, 10, 5)
    hsize_t extent[H5S_MAX_RANK], there = 0;
    double needed = 1;
    const hid_t space = H5Dget_space(id);
    const bool counted = space >= 0 && H5Sget_simple_extent_dims(space, extent, NULL) == dims &&
                         H5Dget_num_chunks(id, space, &there) >= 0;
    if (space >= 0) H5Sclose(space);
    for (int i = 0; counted && i < dims; i++) needed *= (double)((extent[i] + chunk[i] - 1) / chunk[i]);
    return counted && (double)there >= needed;
#else
    (void)dims, (void)chunk;
    return H5Dget_storage_size(id) > 0;
#endif
}

/* Refuses two kinds of storage. Chunks are read as a whole, so huge chunks could take gigabytes for a small table.
 * Unwritten storage reads as zeros, possibly terabytes; it is allowed up to 1 GiB if the writer defined a fill
 * value. */
static enum hapt_status check_storage(struct hapt_h5 *file, hid_t id, const char *name, double bytes)
{
    const double max_chunk_bytes = bytes > MAX_SPARE_BYTES / 4 ? 4 * bytes : MAX_SPARE_BYTES;
    const hid_t layout = H5Dget_create_plist(id), type = H5Dget_type(id);
    hsize_t extent[H5S_MAX_RANK];
    H5D_fill_value_t fill = H5D_FILL_VALUE_UNDEFINED;
    double chunk_bytes = type < 0 ? 0 : (double)H5Tget_size(type);
    const int dims =
        layout < 0 || H5Pget_layout(layout) != H5D_CHUNKED ? 0 : H5Pget_chunk(layout, H5S_MAX_RANK, extent);
    for (int i = 0; i < dims; i++) chunk_bytes *= (double)extent[i];
    const bool filled = layout >= 0 && H5Pfill_value_defined(layout, &fill) >= 0 &&
                        fill == H5D_FILL_VALUE_USER_DEFINED && bytes <= MAX_FILLED_BYTES;
    if (layout >= 0) H5Pclose(layout);
    if (type >= 0) H5Tclose(type);
    if (dims > 0 && chunk_bytes > max_chunk_bytes)
        return hapt_h5_fail_content(file, "write it in chunks of at most 64 MB",
                                    "%s of %s has unreasonably large chunks of %.3g bytes", name, file->path,
                                    chunk_bytes);
    if (bytes > 0 && !filled && (dims > 0 ? !all_chunks_written(id, dims, extent) : H5Dget_storage_size(id) == 0))
        return hapt_h5_fail_content(file, "write the dataset, or give it a fill value", "%s of %s was never written",
                                    name, file->path);
    return HAPT_OK;
}

enum hapt_status hapt_h5_check_written(struct hapt_h5 *file, const char *name)
{
    hid_t id;
    int dims;
    int64_t shape[HAPT_H5_MAX_DIMS];
    double bytes = sizeof(double);
    HAPT_TRY(open_dataset(file, name, &id));
    enum hapt_status status = extent_of(file, id, name, &dims, shape);
    for (int i = 0; status == HAPT_OK && i < dims; i++) bytes *= (double)shape[i];
    if (status == HAPT_OK) status = check_storage(file, id, name, bytes);
    H5Dclose(id);
    return status;
}

bool hapt_h5_readable(struct hapt_h5 *file, hid_t id, const char *name, int *dims, int64_t *shape)
{
    double bytes = sizeof(double);
    bool readable = is_number(id) && !hapt_h5_is_outside(id) && extent_of(file, id, name, dims, shape) == HAPT_OK;
    for (int i = 0; readable && i < *dims; i++) bytes *= (double)shape[i];
    readable = readable && check_storage(file, id, name, bytes) == HAPT_OK;
    hapt_fail_reset();
    return readable;
}

static enum hapt_status read_open(struct hapt_h5 *file, hid_t id, const char *name, enum hapt_h5_type type, int dims,
                                  int64_t *shape, int64_t limit, struct hapt_arena *arena, void **data)
{
    int found_dims = 0;
    int64_t found[HAPT_H5_MAX_DIMS] = {0}, elements = 0;
    if (!is_number(id)) return hapt_h5_fail_content(file, H5_HINT, "%s of %s does not hold numbers", name, file->path);
    HAPT_TRY(extent_of(file, id, name, &found_dims, found));
    HAPT_TRY(match_shape(file, name, dims, shape, found_dims, found, limit, &elements));
    HAPT_TRY(check_storage(file, id, name, (double)elements * (double)hapt_h5_type_bytes(type)));
    void *memory = hapt_arena_alloc(arena, (size_t)elements, hapt_h5_type_bytes(type));
    if (!memory) return hapt_h5_fail_system(file->path, ENOMEM);
    if (elements > 0 && H5Dread(id, native(type), H5S_ALL, H5S_ALL, H5P_DEFAULT, memory) < 0)
        return hapt_h5_fail(file, "dataset", name);
    *data = memory;
    return HAPT_OK;
}

enum hapt_status hapt_h5_read(struct hapt_h5 *file, const char *name, enum hapt_h5_type type, int dims, int64_t *shape,
                              int64_t limit, struct hapt_arena *arena, void **data)
{
    H5_HOLD_LOCK;
    hid_t id;
    HAPT_TRY(open_dataset(file, name, &id));
    const enum hapt_status status = read_open(file, id, name, type, dims, shape, limit, arena, data);
    H5Dclose(id);
    return status;
}

static enum hapt_status read_rows_open(struct hapt_h5 *file, hid_t id, const char *name, enum hapt_h5_type type,
                                       int64_t first, int64_t count, void *data)
{
    int dims;
    int64_t shape[HAPT_H5_MAX_DIMS];
    if (!is_number(id)) return hapt_h5_fail_content(file, H5_HINT, "%s of %s does not hold numbers", name, file->path);
    HAPT_TRY(extent_of(file, id, name, &dims, shape));
    if (dims < 1 || first < 0 || count < 0 || first > shape[0] - count)
        return hapt_h5_fail_content(file, H5_HINT, "%s of %s has no rows %lld to %lld", name, file->path,
                                    (long long)first, (long long)(first + count));
    if (count == 0) return HAPT_OK;
    return move_rows(id, native(type), dims, shape, first, count, data, NULL) ? HAPT_OK
                                                                              : hapt_h5_fail(file, "dataset", name);
}

enum hapt_status hapt_h5_read_rows(struct hapt_h5 *file, const char *name, enum hapt_h5_type type, int64_t first,
                                   int64_t count, void *data)
{
    H5_HOLD_LOCK;
    hid_t id;
    HAPT_TRY(open_dataset(file, name, &id));
    const enum hapt_status status = read_rows_open(file, id, name, type, first, count, data);
    H5Dclose(id);
    return status;
}

enum hapt_status hapt_h5_write_rows(struct hapt_h5 *file, const char *name, enum hapt_h5_type type, int64_t first,
                                    int64_t count, const void *data)
{
    H5_HOLD_LOCK;
    int dims;
    int64_t shape[HAPT_H5_MAX_DIMS];
    const hid_t id = H5Dopen2(file->id, name, H5P_DEFAULT);
    if (id < 0) return hapt_h5_fail(file, "dataset", name);
    enum hapt_status status = extent_of(file, id, name, &dims, shape);
    if (status == HAPT_OK && count > 0 &&
        (!move_rows(id, native(type), dims, shape, first, count, NULL, data) || file->error != 0))
        status = hapt_h5_fail(file, "dataset", name);
    const bool closed = H5Dclose(id) >= 0;
    return closed || status != HAPT_OK ? status : hapt_h5_fail(file, "dataset", name);
}

/* Copies the strings of a dataset or attribute (`read` is the reader), of fixed or variable length, to the arena. */
typedef herr_t text_reader(hid_t id, hid_t memory_type, void *buffer);

static herr_t read_dataset_text(hid_t id, hid_t memory_type, void *buffer)
{
    return H5Dread(id, memory_type, H5S_ALL, H5S_ALL, H5P_DEFAULT, buffer);
}

static herr_t read_attribute_text(hid_t id, hid_t memory_type, void *buffer)
{
    return H5Aread(id, memory_type, buffer);
}

static enum hapt_status copy_fixed(hid_t id, hid_t type, text_reader *read, int64_t count, struct hapt_arena *arena,
                                   const char **text)
{
    const size_t width = H5Tget_size(type);
    if (width == 0 || width > MAX_TEXT || (int64_t)width * count > (int64_t)64 * MAX_TEXT) return HAPT_ERR_INPUT;
    char *table = hapt_arena_alloc(arena, (size_t)count, width);
    if (!table) return HAPT_ERR_MEMORY;
    const hid_t memory = H5Tcopy(H5T_C_S1);
    H5Tset_size(memory, width);
    H5Tset_cset(memory, H5Tget_cset(type));
    H5Tset_strpad(memory, H5Tget_strpad(type));
    const herr_t done = read(id, memory, table);
    H5Tclose(memory);
    if (done < 0) return HAPT_ERR_INPUT;
    const bool spaces = H5Tget_strpad(type) == H5T_STR_SPACEPAD;
    for (int64_t i = 0; i < count; i++) {
        const char *entry = table + (size_t)i * width;
        size_t length = strnlen(entry, width);
        while (spaces && length > 0 && entry[length - 1] == ' ') length--;
        if (!(text[i] = hapt_arena_printf(arena, "%.*s", (int)length, entry))) return HAPT_ERR_MEMORY;
    }
    return HAPT_OK;
}

static enum hapt_status copy_variable(hid_t id, hid_t space, hid_t type, text_reader *read, int64_t count,
                                      struct hapt_arena *arena, const char **text)
{
    char **table = calloc((size_t)count + 1, sizeof *table);
    if (!table) return hapt_fail(HAPT_ERR_MEMORY, NULL, "host memory exhausted");
    const hid_t memory = text_type();
    H5Tset_cset(memory, H5Tget_cset(type));
    enum hapt_status status = read(id, memory, table) < 0 ? HAPT_ERR_INPUT : HAPT_OK;
    for (int64_t i = 0; status == HAPT_OK && i < count; i++)
        if (!(text[i] = hapt_arena_strdup(arena, table[i] ? table[i] : ""))) status = HAPT_ERR_MEMORY;
    if (status != HAPT_ERR_INPUT) H5Dvlen_reclaim(memory, space, H5P_DEFAULT, table);
    H5Tclose(memory);
    free(table);
    return status;
}

static enum hapt_status copy_text(hid_t id, hid_t space, hid_t type, text_reader *read, int64_t count,
                                  struct hapt_arena *arena, const char **text)
{
    if (H5Tget_class(type) != H5T_STRING) return HAPT_ERR_INPUT;
    return H5Tis_variable_str(type) > 0 ? copy_variable(id, space, type, read, count, arena, text)
                                        : copy_fixed(id, type, read, count, arena, text);
}

enum hapt_status hapt_h5_read_strings(struct hapt_h5 *file, const char *name, int64_t limit, struct hapt_arena *arena,
                                      int64_t *count, const char ***text)
{
    H5_HOLD_LOCK;
    hid_t id;
    HAPT_TRY(open_dataset(file, name, &id));
    const hid_t space = H5Dget_space(id), type = H5Dget_type(id);
    const hssize_t elements = space < 0 ? -1 : H5Sget_simple_extent_npoints(space);
    enum hapt_status status = HAPT_ERR_INPUT;
    const char **table = NULL;
    if (elements >= 0 && elements <= limit && type >= 0) {
        table = hapt_arena_alloc(arena, (size_t)elements + 1, sizeof *table);
        status = !table          ? HAPT_ERR_MEMORY
                 : elements == 0 ? HAPT_OK
                                 : copy_text(id, space, type, read_dataset_text, elements, arena, table);
    }
    if (type >= 0) H5Tclose(type);
    if (space >= 0) H5Sclose(space);
    H5Dclose(id);
    if (status == HAPT_ERR_INPUT) return hapt_h5_fail(file, "strings", name);
    if (status == HAPT_ERR_MEMORY) return hapt_h5_fail_system(file->path, ENOMEM);
    *count = elements;
    *text = table;
    return status;
}

/* `count` 0: a scalar. */
static enum hapt_status write_attribute(struct hapt_h5 *file, const char *object, const char *name, hid_t type,
                                        int count, const void *value)
{
    if (!hapt_h5_exists(file, object)) {
        const hid_t links = H5Pcreate(H5P_LINK_CREATE);
        H5Pset_create_intermediate_group(links, 1);
        const hid_t group = H5Gcreate2(file->id, object, links, H5P_DEFAULT, H5P_DEFAULT);
        H5Pclose(links);
        if (group < 0) return hapt_h5_fail(file, "group", object);
        H5Gclose(group);
    }
    const hsize_t extent = (hsize_t)count;
    const hid_t space = count > 0 ? H5Screate_simple(1, &extent, NULL) : H5Screate(H5S_SCALAR);
    const hid_t id = H5Acreate_by_name(file->id, object, name, type, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    const bool failed = id < 0 || H5Awrite(id, type, value) < 0;
    if (id >= 0) H5Aclose(id);
    H5Sclose(space);
    return failed ? hapt_h5_fail(file, "attribute", name) : HAPT_OK;
}

enum hapt_status hapt_h5_write_attribute_int(struct hapt_h5 *file, const char *object, const char *name, int64_t value)
{
    H5_HOLD_LOCK;
    return write_attribute(file, object, name, H5T_NATIVE_INT64, 0, &value);
}

static enum hapt_status write_units(struct hapt_h5 *file, const char *object, const char *name, const char *units)
{
    char label[256];
    snprintf(label, sizeof label, "%s_units", name);
    return units && *units ? hapt_h5_write_attribute_text(file, object, label, units) : HAPT_OK;
}

enum hapt_status hapt_h5_write_attribute_real(struct hapt_h5 *file, const char *object, const char *name, double value,
                                              const char *units)
{
    H5_HOLD_LOCK;
    HAPT_TRY(write_attribute(file, object, name, H5T_NATIVE_DOUBLE, 0, &value));
    return write_units(file, object, name, units);
}

enum hapt_status hapt_h5_write_attribute_ints(struct hapt_h5 *file, const char *object, const char *name, int count,
                                              const int *value)
{
    H5_HOLD_LOCK;
    return write_attribute(file, object, name, H5T_NATIVE_INT, count, value);
}

enum hapt_status hapt_h5_write_attribute_reals(struct hapt_h5 *file, const char *object, const char *name, int count,
                                               const double *value, const char *units)
{
    H5_HOLD_LOCK;
    HAPT_TRY(write_attribute(file, object, name, H5T_NATIVE_DOUBLE, count, value));
    return write_units(file, object, name, units);
}

enum hapt_status hapt_h5_write_attribute_text(struct hapt_h5 *file, const char *object, const char *name,
                                              const char *value)
{
    H5_HOLD_LOCK;
    const hid_t type = H5Tcopy(H5T_C_S1);
    H5Tset_size(type, strlen(value) + 1);
    H5Tset_cset(type, H5T_CSET_UTF8);
    const enum hapt_status status = write_attribute(file, object, name, type, 0, value);
    H5Tclose(type);
    return status;
}

bool hapt_h5_has_attribute(struct hapt_h5 *file, const char *object, const char *name)
{
    H5_HOLD_LOCK;
    const htri_t there = hapt_h5_exists(file, object) ? H5Aexists_by_name(file->id, object, name, H5P_DEFAULT) : 0;
    if (there < 0 && !file->writing && file->error == 0) file->error = hapt_h5_system_error(file);
    return there > 0;
}

static enum hapt_status find_attribute(struct hapt_h5 *file, const char *object, const char *name)
{
    HAPT_TRY(hapt_h5_check_inside(file, object));
    if (file->error && !file->writing) return hapt_h5_fail_system(file->path, file->error);
    if (hapt_h5_has_attribute(file, object, name)) return HAPT_OK;
    return hapt_h5_fail_content(file, H5_HINT, "attribute %s of %s is missing in %s", name, object, file->path);
}

/* Reads 1 to `limit` numbers; *count is how many. */
static enum hapt_status read_attribute_numbers(struct hapt_h5 *file, const char *object, const char *name, hid_t type,
                                               int limit, int *count, void *value)
{
    HAPT_TRY(find_attribute(file, object, name));
    const hid_t id = H5Aopen_by_name(file->id, object, name, H5P_DEFAULT, H5P_DEFAULT);
    const hid_t space = id < 0 ? -1 : H5Aget_space(id), stored = id < 0 ? -1 : H5Aget_type(id);
    const hssize_t points = space < 0 ? -1 : H5Sget_simple_extent_npoints(space);
    const bool failed = points < 1 || points > limit || !is_number_type(stored) || H5Aread(id, type, value) < 0;
    if (stored >= 0) H5Tclose(stored);
    if (space >= 0) H5Sclose(space);
    if (id >= 0) H5Aclose(id);
    if (failed) return hapt_h5_fail(file, "attribute", name);
    *count = (int)points;
    return HAPT_OK;
}

static enum hapt_status read_attribute_number(struct hapt_h5 *file, const char *object, const char *name, hid_t type,
                                              void *value)
{
    int count;
    return read_attribute_numbers(file, object, name, type, 1, &count, value);
}

enum hapt_status hapt_h5_read_attribute_ints(struct hapt_h5 *file, const char *object, const char *name, int limit,
                                             int *count, int *value)
{
    H5_HOLD_LOCK;
    return read_attribute_numbers(file, object, name, H5T_NATIVE_INT, limit, count, value);
}

enum hapt_status hapt_h5_read_attribute_reals(struct hapt_h5 *file, const char *object, const char *name, int limit,
                                              int *count, double *value)
{
    H5_HOLD_LOCK;
    return read_attribute_numbers(file, object, name, H5T_NATIVE_DOUBLE, limit, count, value);
}

enum hapt_status hapt_h5_read_attribute_int(struct hapt_h5 *file, const char *object, const char *name, int64_t *value)
{
    H5_HOLD_LOCK;
    return read_attribute_number(file, object, name, H5T_NATIVE_INT64, value);
}

enum hapt_status hapt_h5_read_attribute_real(struct hapt_h5 *file, const char *object, const char *name, double *value)
{
    H5_HOLD_LOCK;
    return read_attribute_number(file, object, name, H5T_NATIVE_DOUBLE, value);
}

enum hapt_status hapt_h5_read_attribute_text(struct hapt_h5 *file, const char *object, const char *name,
                                             struct hapt_arena *arena, const char **value)
{
    H5_HOLD_LOCK;
    HAPT_TRY(find_attribute(file, object, name));
    const hid_t id = H5Aopen_by_name(file->id, object, name, H5P_DEFAULT, H5P_DEFAULT);
    const hid_t space = id < 0 ? -1 : H5Aget_space(id), type = id < 0 ? -1 : H5Aget_type(id);
    enum hapt_status status = HAPT_ERR_INPUT;
    if (space >= 0 && type >= 0 && H5Sget_simple_extent_npoints(space) == 1)
        status = copy_text(id, space, type, read_attribute_text, 1, arena, value);
    if (type >= 0) H5Tclose(type);
    if (space >= 0) H5Sclose(space);
    if (id >= 0) H5Aclose(id);
    if (status == HAPT_ERR_MEMORY) return hapt_h5_fail_system(file->path, ENOMEM);
    return status == HAPT_ERR_INPUT ? hapt_h5_fail(file, "attribute", name) : status;
}
