/*
 * Checks variable-length strings, which are stored in global heaps of the file and referenced from datasets and
 * attributes. HDF5 1.10 follows these references without checking that the heap has such an object. In a damaged file
 * it copies bytes beyond the heap's table, or more than it allocated, and a crash depends on the surrounding memory.
 * So the sandbox's children first follow the references in the bytes of the file (HDF5 File Format Specification 3.0:
 * III.E global heap).
 *
 * The library itself delivers the references: it reads strings as opaque bytes, and the conversion between these types
 * is a function of this file. It gets the references as they are in the file, and the library follows none of them.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "h5_private.h"

enum {
    HEAP_INDICES = 1 << 16,
    MAX_STRINGS = 1 << 26, /* of a dataset; larger ones are not checked */
    MAX_CHUNK_BYTES = 1 << 26,
};
static const int64_t nowhere = -1;

struct hapt_h5_heap {
    const struct hapt_h5 *file;
    int disk;             /* descriptor of the file, opened again */
    uint64_t bytes, base; /* size of the file; offset of its address 0 (after a user block) */
    int address_bytes, length_bytes;
    uint64_t collection; /* address of the collection read last */
    bool known;
    bool damaged;               /* a reference of the object being read is not valid */
    int64_t size[HEAP_INDICES]; /* sizes of its objects; `nowhere`: no such object */
};
static struct hapt_h5_heap *reading; /* heap of the object being read; guarded by the library lock */

static uint64_t number(const unsigned char *bytes, int count)
{
    uint64_t value = 0;
    for (int i = count - 1; i >= 0; i--) value = value << 8 | bytes[i];
    return value;
}

static uint64_t padded(uint64_t bytes)
{
    return (bytes + 7) & ~UINT64_C(7);
}

static bool take(const struct hapt_h5_heap *heap, uint64_t address, size_t bytes, void *to)
{
    if (address > heap->bytes - heap->base || bytes > heap->bytes - heap->base - address) return false;
    for (size_t done = 0; done < bytes;) {
        const ssize_t got = pread(heap->disk, (char *)to + done, bytes - done, (off_t)(heap->base + address + done));
        if (got < 0 && *hapt_h5_noted() == 0) *hapt_h5_noted() = errno;
        if (got <= 0) return false;
        done += (size_t)got;
    }
    return true;
}

struct hapt_h5_heap *hapt_h5_heap_create(struct hapt_h5 *file)
{
    struct hapt_h5_heap *heap = calloc(1, sizeof *heap);
    const hid_t made = H5Fget_create_plist(file->id);
    hsize_t base = 0;
    size_t address_bytes = 0, length_bytes = 0;
    off_t bytes = -1;
    if (heap) heap->disk = open(file->path, O_RDONLY | O_CLOEXEC);
    if (heap && heap->disk >= 0) bytes = lseek(heap->disk, 0, SEEK_END);
    const bool good = bytes >= 0 && made >= 0 && H5Pget_userblock(made, &base) >= 0 &&
                      H5Pget_sizes(made, &address_bytes, &length_bytes) >= 0 && address_bytes <= 8 &&
                      length_bytes <= 8 && base <= (hsize_t)bytes;
    if (made >= 0) H5Pclose(made);
    if (!good) {
        if ((!heap || bytes < 0) && *hapt_h5_noted() == 0) *hapt_h5_noted() = errno ? errno : ENOMEM;
        if (heap && heap->disk >= 0) close(heap->disk);
        free(heap);
        return NULL;
    }
    heap->file = file;
    heap->bytes = (uint64_t)bytes;
    heap->base = base;
    heap->address_bytes = (int)address_bytes;
    heap->length_bytes = (int)length_bytes;
    return heap;
}

void hapt_h5_heap_destroy(struct hapt_h5_heap *heap)
{
    if (!heap) return;
    close(heap->disk);
    free(heap);
}

/* ---- Collections ---- */

/* Lists a collection: "GCOL", version, 3 reserved, size; then objects: index 2, users 2, 4 reserved, size, data padded
 * to 8. Index 0 is free space; its size includes the header. */
static bool list_objects(struct hapt_h5_heap *heap, uint64_t address)
{
    unsigned char head[16];
    const uint64_t header = padded(8 + (uint64_t)heap->length_bytes);
    const size_t used = 8 + (size_t)heap->length_bytes;
    for (int i = 0; i < HEAP_INDICES; i++) heap->size[i] = nowhere;
    if (!take(heap, address, used, head) || memcmp(head, "GCOL", 4) || head[4] != 1) return false;
    const uint64_t bytes = number(head + 8, heap->length_bytes);
    if (bytes < header || bytes > heap->bytes - heap->base - address) return false;
    for (uint64_t at = header; bytes - at >= header;) {
        if (!take(heap, address + at, used, head)) return false;
        const uint64_t index = number(head, 2), size = number(head + 8, heap->length_bytes), left = bytes - at;
        if (size > left || (index == 0 ? size == 0 : padded(size) > left - header)) return false;
        if (index > 0) heap->size[index] = (int64_t)size;
        at += index > 0 ? header + padded(size) : size;
    }
    return true;
}

/* Checks a reference: length 4, address of the collection, index 4. Address 0: no string. */
static bool reference_is_valid(struct hapt_h5_heap *heap, const unsigned char *reference)
{
    const uint64_t length = number(reference, 4), address = number(reference + 4, heap->address_bytes);
    const uint64_t index = number(reference + 4 + heap->address_bytes, 4);
    if (address == 0) return true;
    if (!heap->known || heap->collection != address) {
        heap->known = list_objects(heap, address);
        heap->collection = address;
    }
    return heap->known && index < HEAP_INDICES && heap->size[index] == (int64_t)length;
}

/* ---- References ---- */

/* The conversion: `buffer` holds `count` references. Its result is not used. */
static herr_t check_references(hid_t from, hid_t to, H5T_cdata_t *data, size_t count, size_t stride, size_t unused,
                               void *buffer, void *background, hid_t transfer)
{
    (void)to, (void)unused, (void)background, (void)transfer;
    if (data->command == H5T_CONV_INIT) return H5Tis_variable_str(from) > 0 ? 0 : -1;
    if (data->command != H5T_CONV_CONV) return 0;
    if (!reading) return -1;
    if (stride == 0) stride = 8 + (size_t)reading->address_bytes;
    for (size_t i = 0; i < count && !reading->damaged; i++)
        reading->damaged = !reference_is_valid(reading, (const unsigned char *)buffer + i * stride);
    return reading->damaged ? -1 : 0;
}

/* Opaque elements of one byte; the conversion of strings to them is registered. */
static hid_t opaque_type(void)
{
    static hid_t type = -1;
    if (type >= 0) return type;
    const hid_t opaque = H5Tcreate(H5T_OPAQUE, 1), text = H5Tcopy(H5T_C_S1);
    if (opaque >= 0 && text >= 0 && H5Tset_size(text, H5T_VARIABLE) >= 0 &&
        H5Tregister(H5T_PERS_SOFT, "references", text, opaque, check_references) >= 0)
        type = opaque;
    if (text >= 0) H5Tclose(text);
    return type;
}

/* True if the dataset stores `bytes` bytes of references in the file, or has chunks of a reasonable size. */
static bool storage_is_valid(const struct hapt_h5_heap *heap, hid_t dataset, uint64_t bytes, uint64_t width)
{
    hsize_t extent[H5S_MAX_RANK];
    double chunk_bytes = (double)width;
    const hid_t made = H5Dget_create_plist(dataset);
    const bool chunked = made >= 0 && H5Pget_layout(made) == H5D_CHUNKED,
               filtered = chunked && H5Pget_nfilters(made) > 0;
    const int dims = chunked ? H5Pget_chunk(made, H5S_MAX_RANK, extent) : 0;
    for (int d = 0; d < dims; d++) chunk_bytes *= (double)extent[d];
    if (made >= 0) H5Pclose(made);
    if (chunked) return filtered || chunk_bytes <= MAX_CHUNK_BYTES;
    return made >= 0 && bytes <= heap->bytes && bytes <= H5Dget_storage_size(dataset);
}

/* Failures to read that no reference causes are left to later reads, except those of the system. */
static bool stored_references_are_valid(struct hapt_h5_heap *heap, hid_t id, bool is_attribute, uint64_t count)
{
    const uint64_t width = 8 + (uint64_t)heap->address_bytes;
    if (!is_attribute && H5Dget_storage_size(id) == 0) return true;
    if (!is_attribute && !storage_is_valid(heap, id, count * width, width)) return false;
    char *unused = malloc(count);
    const hid_t type = opaque_type();
    const bool able = unused && type >= 0;
    heap->damaged = false;
    reading = heap;
    const bool read = able && (is_attribute ? H5Aread(id, type, unused)
                                            : H5Dread(id, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, unused)) >= 0;
    reading = NULL;
    if (!unused) *hapt_h5_noted() = ENOMEM;
    free(unused);
    return read || (able && !heap->damaged && hapt_h5_system_error(heap->file) == 0);
}

bool hapt_h5_heap_references_are_valid(struct hapt_h5_heap *heap, hid_t object, const char *attribute)
{
    const hid_t id = attribute ? H5Aopen(object, attribute, H5P_DEFAULT) : object;
    const hid_t type = id < 0 ? -1 : attribute ? H5Aget_type(id) : H5Dget_type(id);
    const hid_t space = id < 0 ? -1 : attribute ? H5Aget_space(id) : H5Dget_space(id);
    const hssize_t count = space < 0 ? -1 : H5Sget_simple_extent_npoints(space);
    const bool variable = type >= 0 && H5Tget_class(type) == H5T_STRING && H5Tis_variable_str(type) > 0;
    const bool good = !variable || count <= 0 || count > MAX_STRINGS ||
                      stored_references_are_valid(heap, id, attribute != NULL, (uint64_t)count);
    if (space >= 0) H5Sclose(space);
    if (type >= 0) H5Tclose(type);
    if (attribute && id >= 0) H5Aclose(id);
    return good;
}
