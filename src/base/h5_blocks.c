/* Finds the place of a dataset's elements in the file, so that a program can map them instead of reading them. */
#include "h5_private.h"

/* HDF5 searches for each chunk from the first one on, so many of them take long. */
enum { MOST_BLOCKS = 1 << 14 };

static bool stored_type(hid_t id, enum hapt_h5_type *type)
{
    const struct {
        hid_t stored;
        enum hapt_h5_type type;
    } known[] = {{H5T_NATIVE_UINT8, HAPT_H5_U8},  {H5T_NATIVE_UINT16, HAPT_H5_U16}, {H5T_NATIVE_INT32, HAPT_H5_I32},
                 {H5T_NATIVE_INT64, HAPT_H5_I64}, {H5T_NATIVE_FLOAT, HAPT_H5_F32},  {H5T_NATIVE_UINT32, HAPT_H5_I32}};
    const hid_t found = H5Dget_type(id);
    bool known_type = false;
    for (size_t i = 0; found >= 0 && !known_type && i < sizeof known / sizeof *known; i++) {
        known_type = H5Tequal(found, known[i].stored) > 0;
        *type = known[i].type;
    }
    if (found >= 0) H5Tclose(found);
    return known_type;
}

/* Filters that change the bytes, such as compression, leave nothing to map. A checksum follows its chunk. */
static bool plain_bytes(hid_t layout)
{
    unsigned flags;
    const int filters = H5Pget_nfilters(layout);
    for (int i = 0; i < filters; i++)
        if (H5Pget_filter2(layout, (unsigned)i, &flags, NULL, NULL, 0, NULL, NULL) != H5Z_FILTER_FLETCHER32)
            return false;
    return filters >= 0;
}

/* Rows of the leading dimension per chunk, if each chunk holds whole rows; else 0. */
static hsize_t rows_of_chunk(hid_t layout, int dims, const int64_t *shape)
{
    hsize_t chunk[H5S_MAX_RANK];
    if (H5Pget_chunk(layout, H5S_MAX_RANK, chunk) != dims) return 0;
    for (int d = 1; d < dims; d++)
        if ((int64_t)chunk[d] != shape[d]) return 0;
    return chunk[0];
}

static bool find_blocks(struct hapt_h5 *file, hid_t id, struct hapt_h5_blocks *blocks)
{
    const hid_t space = H5Dget_space(id), layout = H5Dget_create_plist(id), creation = H5Fget_create_plist(file->id);
    hsize_t extent[H5S_MAX_RANK], prefix = 1;
    int64_t shape[H5S_MAX_RANK];
    const int dims = space < 0 ? -1 : H5Sget_simple_extent_ndims(space);
    bool found = layout >= 0 && creation >= 0 && H5Pget_userblock(creation, &prefix) >= 0 && prefix == 0 &&
                 !hapt_h5_is_outside(id) && dims >= 1 && H5Sget_simple_extent_dims(space, extent, NULL) == dims &&
                 stored_type(id, &blocks->type) && plain_bytes(layout);
    int64_t row = 1;
    for (int d = 0; found && d < dims; d++) {
        shape[d] = (int64_t)extent[d];
        found = shape[d] > 0 && (d == 0 || !__builtin_mul_overflow(row, shape[d], &row));
    }
    if (found) {
        const bool chunked = H5Pget_layout(layout) == H5D_CHUNKED;
        const int64_t rows = chunked ? (int64_t)rows_of_chunk(layout, dims, shape) : shape[0];
        int64_t bytes; /* of a block, at 8 for an element at most */
        found = rows > 0 && (chunked || H5Pget_layout(layout) == H5D_CONTIGUOUS) &&
                !__builtin_mul_overflow(rows, row, &blocks->elements) &&
                !__builtin_mul_overflow(blocks->elements, 8, &bytes);
        if (found) blocks->count = (shape[0] - 1) / rows + 1;
        found = found && blocks->count <= MOST_BLOCKS;
    }
    if (creation >= 0) H5Pclose(creation);
    if (layout >= 0) H5Pclose(layout);
    if (space >= 0) H5Sclose(space);
    return found;
}

static hid_t open_block(struct hapt_h5 *file, const char *name)
{
    return hapt_h5_exists(file, name) ? H5Dopen2(file->id, name, H5P_DEFAULT) : -1;
}

bool hapt_h5_find_blocks(struct hapt_h5 *file, const char *name, struct hapt_h5_blocks *blocks)
{
    H5_HOLD_LOCK;
#if H5_VERSION_GE(1, 10, 5)
    const hid_t id = open_block(file, name);
    *blocks = (struct hapt_h5_blocks){.count = 0};
    const bool found = id >= 0 && find_blocks(file, id, blocks);
    if (id >= 0) H5Dclose(id);
    return found;
#else
    (void)file, (void)name, (void)blocks, (void)find_blocks, (void)open_block;
    return false;
#endif
}

bool hapt_h5_block_offsets(struct hapt_h5 *file, const char *name, const struct hapt_h5_blocks *blocks,
                           int64_t file_bytes, int64_t *offset)
{
    H5_HOLD_LOCK;
    bool found = false;
#if H5_VERSION_GE(1, 10, 5)
    const hid_t id = open_block(file, name), layout = id < 0 ? -1 : H5Dget_create_plist(id);
    hsize_t chunk[H5S_MAX_RANK], at[H5S_MAX_RANK] = {0}, bytes = 0;
    const bool chunked = layout >= 0 && H5Pget_layout(layout) == H5D_CHUNKED;
    if (chunked) H5Pget_chunk(layout, H5S_MAX_RANK, chunk);
    found = layout >= 0;
    for (int64_t b = 0; found && b < blocks->count; b++) {
        haddr_t address = HADDR_UNDEF;
        unsigned mask = 0;
        if (!chunked) address = H5Dget_offset(id);
        if (chunked) {
            at[0] = (hsize_t)b * chunk[0];
            found = H5Dget_chunk_info_by_coord(id, at, &mask, &address, &bytes) >= 0;
        }
        const int64_t needed = blocks->elements * (int64_t)hapt_h5_type_bytes(blocks->type);
        found = found && address != HADDR_UNDEF && mask == 0 && needed <= file_bytes &&
                address <= (haddr_t)(file_bytes - needed) && (!chunked || (int64_t)bytes >= needed);
        offset[b] = (int64_t)address;
    }
    if (layout >= 0) H5Pclose(layout);
    if (id >= 0) H5Dclose(id);
#else
    (void)file, (void)name, (void)blocks, (void)file_bytes, (void)offset;
#endif
    return found;
}

void hapt_h5_file_identity(const struct hapt_h5 *file, int64_t *bytes, int64_t *device, int64_t *number)
{
    *bytes = file->identity.bytes;
    *device = file->identity.device;
    *number = file->identity.number;
}
