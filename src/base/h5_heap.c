/*
 * Checks variable-length strings, which are stored in global heaps of the file and referenced from datasets and
 * attributes. HDF5 1.10 follows these references without checking that the heap has such an object. In a damaged file
 * it copies bytes beyond the heap's table, or more than it allocated, and a crash depends on the surrounding memory.
 * So the sandbox's children first follow the references in the bytes of the file (HDF5 File Format Specification 3.0:
 * III.E global heap, IV.A object headers).
 *
 * Not checked: references in filtered or virtual datasets and in shared attributes. Nor are attributes outside the
 * object header (only in the newest file formats, with more than eight attributes).
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "h5_private.h"

enum {
    MAX_BLOCKS = 256, /* limit per object header */
    HEAP_INDICES = 1 << 16,
    REFERENCES = 1 << 12, /* limit per read */
    MAX_CHUNK_BYTES = 1 << 26,
    MESSAGE_LAYOUT = 0x08,
    MESSAGE_ATTRIBUTE = 0x0c,
    MESSAGE_CONTINUATION = 0x10,
    FLAG_SHARED = 0x02,
};
static const int64_t nowhere = -1;

struct hapt_h5_heap {
    int disk;             /* descriptor of the file, opened again */
    uint64_t bytes, base; /* size of the file; offset of its address 0 (after a user block) */
    int address_bytes, length_bytes;
    uint64_t collection; /* address of the collection read last */
    bool known;
    int64_t size[HEAP_INDICES]; /* sizes of its objects; `nowhere`: no such object */
};

struct span {
    uint64_t first, end; /* addresses in the file */
};

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

static bool references_are_valid(struct hapt_h5_heap *heap, const unsigned char *references, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        if (!reference_is_valid(heap, references + i * (8 + heap->address_bytes))) return false;
    return true;
}

/* ---- Object headers ---- */

/* True if the message is the attribute `name`; *value is its data. Layout: version, flags, sizes of name, type and
 * shape, then these (padded in version 1). */
static bool is_attribute(const struct hapt_h5_heap *heap, struct span message, const char *name, struct span *value)
{
    unsigned char head[9];
    char found[256];
    const size_t length = strlen(name) + 1;
    if (message.end - message.first < sizeof head || !take(heap, message.first, sizeof head, head) || head[0] < 1 ||
        head[0] > 3)
        return false;
    const bool pads = head[0] == 1;
    const uint64_t name_bytes = number(head + 2, 2), type = number(head + 4, 2), shape = number(head + 6, 2);
    const uint64_t text = message.first + (head[0] == 3 ? 9 : 8);
    const uint64_t data = text + (pads ? padded(name_bytes) + padded(type) + padded(shape) : name_bytes + type + shape);
    if (length > sizeof found || name_bytes < length || data > message.end || !take(heap, text, length, found))
        return false;
    *value = (struct span){data, message.end};
    return memcmp(found, name, length) == 0;
}

/* True if the message has the data of a compact dataset: version 3 or 4, class 0, size 2, data. */
static bool is_compact(const struct hapt_h5_heap *heap, struct span message, struct span *value)
{
    unsigned char head[4];
    if (message.end - message.first < sizeof head || !take(heap, message.first, sizeof head, head)) return false;
    if (head[0] < 3 || head[0] > 4 || head[1] != 0) return false;
    *value = (struct span){message.first + 4, message.first + 4 + number(head + 2, 2)};
    return value->end <= message.end;
}

struct header {
    bool newer;        /* version 2 */
    int message_bytes; /* bytes before a message's data */
    int blocks;
    struct span block[MAX_BLOCKS];
};

static bool open_header(const struct hapt_h5_heap *heap, uint64_t address, struct header *header)
{
    unsigned char head[40];
    memset(head, 0, sizeof head);
    header->blocks = 1;
    if (!take(heap, address, 16, head)) return false;
    header->newer = memcmp(head, "OHDR", 4) == 0;
    if (!header->newer) { /* version, reserved, messages 2, users 4, size 4, padding */
        header->message_bytes = 8;
        header->block[0] = (struct span){address + 16, address + 16 + number(head + 8, 4)};
        return head[0] == 1;
    }
    const int flags = head[5], at = 6 + (flags & 0x20 ? 16 : 0) + (flags & 0x10 ? 4 : 0), size_bytes = 1 << (flags & 3);
    if (!take(heap, address, (size_t)(at + size_bytes), head)) return false;
    const uint64_t first = address + (uint64_t)(at + size_bytes);
    header->message_bytes = flags & 4 ? 6 : 4;
    header->block[0] = (struct span){first, first + number(head + at, size_bytes)};
    return true;
}

static void add_block(const struct hapt_h5_heap *heap, struct span message, struct header *header)
{
    unsigned char where[16];
    const int width = heap->address_bytes;
    if (header->blocks == MAX_BLOCKS || !take(heap, message.first, (size_t)(width + heap->length_bytes), where)) return;
    const uint64_t first = number(where, width), bytes = number(where + width, heap->length_bytes);
    const uint64_t around = header->newer ? 4 : 0; /* "OCHK" before, a checksum after */
    if (bytes > 2 * around && first < heap->bytes && bytes < heap->bytes)
        header->block[header->blocks++] = (struct span){first + around, first + bytes - around};
}

/* Finds the value of an attribute, or (name NULL) the data of a compact dataset. False: not in the header. */
static bool find_value(const struct hapt_h5_heap *heap, uint64_t address, const char *name, struct span *value)
{
    struct header header;
    bool found = false;
    if (!open_header(heap, address, &header)) return false;
    for (int b = 0; b < header.blocks && !found; b++) {
        const uint64_t width = (uint64_t)header.message_bytes, end = header.block[b].end;
        uint64_t next;
        for (uint64_t at = header.block[b].first; !found && at + width <= end; at = next) {
            unsigned char head[8];
            if (!take(heap, at, (size_t)width, head)) break;
            const int kind_bytes = header.newer ? 1 : 2, kind = (int)number(head, kind_bytes),
                      flags = head[kind_bytes + 2];
            const struct span message = {at + width, at + width + number(head + kind_bytes, 2)};
            next = message.end;
            if (next > end) break;
            if (kind == MESSAGE_CONTINUATION) add_block(heap, message, &header);
            if (flags & FLAG_SHARED) continue;
            if (name && kind == MESSAGE_ATTRIBUTE) found = is_attribute(heap, message, name, value);
            if (!name && kind == MESSAGE_LAYOUT) found = is_compact(heap, message, value);
        }
    }
    return found;
}

static bool header_of(hid_t object, uint64_t *address)
{
#if H5_VERSION_GE(1, 12, 0)
    H5O_info1_t about;
    if (H5Oget_info1(object, &about) < 0) return false;
#else
    H5O_info_t about;
    if (H5Oget_info(object, &about) < 0) return false;
#endif
    *address = about.addr;
    return true;
}

/* ---- Storage of references ---- */

static bool span_references_are_valid(struct hapt_h5_heap *heap, struct span span, int64_t count)
{
    static unsigned char block[REFERENCES * 16];
    const uint64_t width = 8 + (uint64_t)heap->address_bytes;
    if (count < 0 || span.end < span.first || (uint64_t)count > (span.end - span.first) / width) return false;
    for (int64_t done = 0; done < count; done += REFERENCES) {
        const int64_t now = count - done < REFERENCES ? count - done : REFERENCES;
        if (!take(heap, span.first + (uint64_t)done * width, (size_t)now * width, block) ||
            !references_are_valid(heap, block, now))
            return false;
    }
    return true;
}

static bool header_references_are_valid(struct hapt_h5_heap *heap, hid_t object, const char *name, int64_t count)
{
    uint64_t address;
    struct span span;
    return !header_of(object, &address) || !find_value(heap, address, name, &span) ||
           span_references_are_valid(heap, span, count);
}

static bool chunk_references_are_valid(struct hapt_h5_heap *heap, hid_t dataset)
{
    hsize_t chunks = 0;
    const hid_t space = H5Dget_space(dataset);
    bool good = space >= 0 && H5Dget_num_chunks(dataset, space, &chunks) >= 0;
    for (hsize_t i = 0; good && i < chunks; i++) {
        hsize_t offset[H5S_MAX_RANK], bytes = 0;
        haddr_t address;
        unsigned filters = 0;
        uint32_t skipped = 0;
        good =
            H5Dget_chunk_info(dataset, space, i, offset, &filters, &address, &bytes) >= 0 && bytes <= MAX_CHUNK_BYTES;
        unsigned char *chunk = good ? malloc((size_t)bytes + 1) : NULL;
        if (good && !chunk) *hapt_h5_noted() = ENOMEM;
        good = chunk && H5Dread_chunk(dataset, H5P_DEFAULT, offset, &skipped, chunk) >= 0 &&
               references_are_valid(heap, chunk, (int64_t)bytes / (8 + heap->address_bytes));
        free(chunk);
    }
    if (space >= 0) H5Sclose(space);
    return good;
}

static bool stored_references_are_valid(struct hapt_h5_heap *heap, hid_t dataset, int64_t count)
{
    const hid_t made = H5Dget_create_plist(dataset);
    const H5D_layout_t layout = made < 0 ? H5D_LAYOUT_ERROR : H5Pget_layout(made);
    const int filters = made < 0 ? 0 : H5Pget_nfilters(made), files = made < 0 ? 0 : H5Pget_external_count(made);
    if (made >= 0) H5Pclose(made);
    if (layout == H5D_COMPACT) return header_references_are_valid(heap, dataset, NULL, count);
    if (layout == H5D_CHUNKED) return filters > 0 || chunk_references_are_valid(heap, dataset);
    if (layout != H5D_CONTIGUOUS || files > 0) return true;
    const haddr_t at = H5Dget_offset(dataset); /* offset in the file; undefined if nothing is stored */
    if (at == HADDR_UNDEF) return true;
    return at >= heap->base &&
           span_references_are_valid(heap, (struct span){at - heap->base, heap->bytes - heap->base}, count);
}

static bool is_variable_text(hid_t type)
{
    return type >= 0 && H5Tget_class(type) == H5T_STRING && H5Tis_variable_str(type) > 0;
}

bool hapt_h5_heap_references_are_valid(struct hapt_h5_heap *heap, hid_t object, const char *attribute)
{
    const hid_t id = attribute ? H5Aopen(object, attribute, H5P_DEFAULT) : object;
    const hid_t type = id < 0 ? -1 : attribute ? H5Aget_type(id) : H5Dget_type(id);
    const hid_t space = id < 0 ? -1 : attribute ? H5Aget_space(id) : H5Dget_space(id);
    const hssize_t count = space < 0 ? -1 : H5Sget_simple_extent_npoints(space);
    bool good = true;
    if (is_variable_text(type) && count > 0)
        good = attribute ? header_references_are_valid(heap, object, attribute, count)
                         : stored_references_are_valid(heap, object, count);
    if (space >= 0) H5Sclose(space);
    if (type >= 0) H5Tclose(type);
    if (attribute && id >= 0) H5Aclose(id);
    return good;
}
