/* Everything that hapt may read of a file, read for nothing: what the guard's children do (guard.h). */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "h5_private.h"
#include "hapt/guard.h"

enum {
    MOST_OBJECTS = 1 << 16,
    MOST_DEPTH = 8,
    MOST_PATH = 1024,
    BLOCK_ELEMENTS = 1 << 20,
    ATTRIBUTE_ELEMENTS = 1 << 13
};
static const int64_t most_dataset_bytes = 1 << 26, most_file_bytes = 1 << 28; /* read; of larger ones parts */

struct rehearsal {
    struct hapt_h5 *file;
    struct hapt_h5_heap *heap;
    int64_t objects, bytes; /* so far */
    bool broken;
    double *block; /* [room], BLOCK_ELEMENTS at most: small files need little */
    int64_t room;
    struct hapt_arena arena; /* for what is forgotten at once */
};

/* Values that cannot be read are for those who need them. */
static void forget(struct rehearsal *rehearsal)
{
    hapt_arena_reset(&rehearsal->arena);
    hapt_fail_reset();
    *hapt_h5_noted() = errno = 0;
}

static void give_up(struct rehearsal *rehearsal)
{
    const int error = hapt_h5_system_error(rehearsal->file);
    rehearsal->broken = true;
    if (error) hapt_guard_refused(error);
}

static bool make_room(struct rehearsal *rehearsal, int64_t elements)
{
    if (elements <= rehearsal->room) return true;
    free(rehearsal->block);
    rehearsal->block = malloc((size_t)elements * sizeof *rehearsal->block);
    rehearsal->room = rehearsal->block ? elements : 0;
    return rehearsal->block != NULL;
}

/* An attribute that is there can be opened, and so can its type and shape. */
static bool opens(hid_t object, const char *name)
{
    const hid_t id = H5Aopen(object, name, H5P_DEFAULT);
    const hid_t type = id < 0 ? -1 : H5Aget_type(id), space = id < 0 ? -1 : H5Aget_space(id);
    const bool good = type >= 0 && space >= 0;
    if (space >= 0) H5Sclose(space);
    if (type >= 0) H5Tclose(type);
    if (id >= 0) H5Aclose(id);
    return good;
}

static herr_t read_attribute(hid_t object, const char *name, const H5A_info_t *info, void *context)
{
    struct rehearsal *rehearsal = context;
    const char *text;
    int count, value;
    char path[MOST_PATH];
    (void)info;
    if (rehearsal->broken) return -1;
    if (!opens(object, name) || !hapt_h5_heap_leads(rehearsal->heap, object, name)) {
        give_up(rehearsal);
        return -1;
    }
    if (H5Iget_name(object, path, sizeof path) <= 0) return 0;
    if (hapt_h5_read_attribute_text(rehearsal->file, path, name, &rehearsal->arena, &text) != HAPT_OK) {
        hapt_h5_read_attribute_ints(rehearsal->file, path, name, 1, &count, &value);
        if (make_room(rehearsal, ATTRIBUTE_ELEMENTS))
            hapt_h5_read_attribute_reals(rehearsal->file, path, name, ATTRIBUTE_ELEMENTS, &count, rehearsal->block);
    }
    forget(rehearsal);
    return 0;
}

/* Elements [first, first + BLOCK_ELEMENTS), as far as they make a box: the last dimensions whole, one cut, those before
 * it 1. */
static int64_t read_box(struct rehearsal *rehearsal, hid_t dataset, hid_t type, int dims, const hsize_t *shape,
                        int64_t first)
{
    hsize_t start[H5S_MAX_RANK], extent[H5S_MAX_RANK];
    int64_t elements = 1, rest = first;
    bool cut = false;
    for (int d = dims - 1; d >= 0; d--) {
        start[d] = (hsize_t)(rest % (int64_t)shape[d]);
        rest /= (int64_t)shape[d];
        const int64_t room = cut ? 1 : BLOCK_ELEMENTS / elements;
        const int64_t left = (int64_t)(shape[d] - start[d]);
        extent[d] = (hsize_t)(left < room ? left : room);
        cut = cut || extent[d] < shape[d];
        elements *= (int64_t)extent[d];
    }
    const hid_t space = H5Dget_space(dataset), memory = H5Screate_simple(dims, extent, NULL);
    if (space >= 0 && memory >= 0 && make_room(rehearsal, elements) &&
        H5Sselect_hyperslab(space, H5S_SELECT_SET, start, NULL, extent, NULL) >= 0)
        H5Dread(dataset, type, memory, space, H5P_DEFAULT, rehearsal->block);
    if (memory >= 0) H5Sclose(memory);
    if (space >= 0) H5Sclose(space);
    return elements;
}

/* All of it, or as many boxes as there is time for, evenly spread; one of what was never written. Where its chunks lie
 * is looked up for each of them. */
static void read_numbers(struct rehearsal *rehearsal, hid_t dataset, int dims, const int64_t *shape)
{
    hsize_t extent[H5S_MAX_RANK];
    int64_t elements = 1;
    const hid_t stored = H5Dget_type(dataset);
    const bool whole = H5Tget_class(stored) == H5T_INTEGER;
    const int64_t width = stored < 0 ? 1 : (int64_t)H5Tget_size(stored);
    if (stored >= 0) H5Tclose(stored);
    for (int d = 0; d < dims; d++) {
        if (shape[d] == 0 || elements > INT64_MAX / 16 / shape[d]) return;
        elements *= shape[d];
        extent[d] = (hsize_t)shape[d];
    }
    const int64_t left = (most_file_bytes - rehearsal->bytes) / width;
    if (left <= 0) return;
    const int64_t wanted = H5Dget_storage_size(dataset) == 0 ? 0 : most_dataset_bytes / width;
    const int64_t most = left < wanted ? left : wanted;
    const int64_t boxes = most / BLOCK_ELEMENTS + 1;
    const int64_t stride = elements <= most ? 0 : elements / boxes;
    for (int64_t first = 0, read = 0; first < elements && read <= most;) {
        const int64_t got =
            read_box(rehearsal, dataset, whole ? H5T_NATIVE_INT64 : H5T_NATIVE_DOUBLE, dims, extent, first);
        read += got;
        rehearsal->bytes += got * width;
        first += got > stride ? got : stride;
    }
}

static void read_dataset(struct rehearsal *rehearsal, hid_t dataset, const char *path)
{
    int dims;
    int64_t shape[HAPT_H5_MAX_DIMS], count;
    const char **text;
    if (hapt_h5_readable(rehearsal->file, dataset, path, &dims, shape))
        read_numbers(rehearsal, dataset, dims, shape);
    else if (hapt_h5_is_outside(dataset)) /* no other file is opened for it */
        return;
    else if (!hapt_h5_heap_leads(rehearsal->heap, dataset, NULL))
        give_up(rehearsal);
    else
        hapt_h5_read_strings(rehearsal->file, path, most_dataset_bytes / (int64_t)sizeof(char *), &rehearsal->arena,
                             &count, &text);
}

static void walk(struct rehearsal *rehearsal, const char *path, int depth);

static void walk_group(struct rehearsal *rehearsal, const char *path, int depth)
{
    struct hapt_arena arena;
    int64_t count = 0;
    const char **name = NULL;
    hapt_arena_init(&arena);
    if (hapt_h5_list(rehearsal->file, path, MOST_OBJECTS, &arena, &count, &name) != HAPT_OK) {
        rehearsal->broken = true;
        if (hapt_h5_last_fault() == HAPT_H5_FAULT_SYSTEM) hapt_guard_refused(ENOMEM);
    }
    for (int64_t i = 0; i < count && !rehearsal->broken; i++) {
        const char *member = hapt_arena_printf(&arena, "%s/%s", depth == 0 ? "" : path, name[i]);
        /* Links that lead nowhere are no damage; hapt sees nothing there. Links to other files are refused by those who
         * need them. */
        if (member && hapt_h5_exists(rehearsal->file, member) &&
            hapt_h5_check_inside(rehearsal->file, member) == HAPT_OK)
            walk(rehearsal, member, depth + 1);
    }
    hapt_arena_release(&arena);
}

static void walk(struct rehearsal *rehearsal, const char *path, int depth)
{
    hsize_t first = 0;
    if (++rehearsal->objects > MOST_OBJECTS) return;
    const hid_t id = H5Oopen(rehearsal->file->id, path, H5P_DEFAULT);
    if (id < 0 || H5Aiterate2(id, H5_INDEX_NAME, H5_ITER_NATIVE, &first, read_attribute, rehearsal) < 0)
        give_up(rehearsal);
    if (!rehearsal->broken && H5Iget_type(id) == H5I_DATASET) read_dataset(rehearsal, id, path);
    if (!rehearsal->broken && H5Iget_type(id) == H5I_GROUP && depth < MOST_DEPTH) walk_group(rehearsal, path, depth);
    forget(rehearsal);
    if (id >= 0) H5Oclose(id);
}

bool hapt_h5_rehearse(const char *path)
{
    /* Memory that the library uses again is not as it comes from the system: see the guard. */
    if (!path) return H5open() >= 0 && H5set_free_list_limits(0, 0, 0, 0, 0, 0) >= 0;
    H5_HOLD_LOCK;
    struct rehearsal rehearsal = {0};
    hapt_arena_init(&rehearsal.arena);
    if (hapt_h5_open_unguarded(path, NULL, 0, true, &rehearsal.file) == HAPT_OK) {
        *hapt_h5_noted() = errno = 0;
        rehearsal.heap = hapt_h5_heap_create(rehearsal.file);
        if (rehearsal.heap)
            walk(&rehearsal, "/", 0);
        else
            give_up(&rehearsal);
        hapt_h5_heap_destroy(rehearsal.heap);
        hapt_h5_close(rehearsal.file);
    }
    hapt_fail_reset();
    hapt_arena_release(&rehearsal.arena);
    free(rehearsal.block);
    return !rehearsal.broken;
}
