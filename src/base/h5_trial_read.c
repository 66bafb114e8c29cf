/* Reads everything that hapt may read of a file and discards it, in the sandbox's children (sandbox.h). */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "h5_private.h"
#include "hapt/sandbox.h"

enum { MAX_OBJECTS = 1 << 16, MAX_DEPTH = 8, MAX_PATH = 1024, BLOCK_ELEMENTS = 1 << 20, ATTRIBUTE_ELEMENTS = 1 << 13 };
static const int64_t max_dataset_bytes = 1 << 26, max_file_bytes = 1 << 28; /* read; larger ones are sampled */

struct trial {
    struct hapt_h5 *file;
    struct hapt_h5_heap *heap;
    int64_t objects, bytes; /* so far */
    bool broken;
    double *block; /* [room], at most BLOCK_ELEMENTS: small files need little */
    int64_t room;
    struct hapt_arena arena; /* reset after each object */
};

/* Unreadable values are reported when they are needed, not here. */
static void forget(struct trial *trial)
{
    hapt_arena_reset(&trial->arena);
    hapt_fail_reset();
    *hapt_h5_noted() = errno = 0;
}

static void give_up(struct trial *trial)
{
    const int error = hapt_h5_system_error(trial->file);
    trial->broken = true;
    if (error) hapt_sandbox_note_system_error(error);
}

static bool make_room(struct trial *trial, int64_t elements)
{
    if (elements <= trial->room) return true;
    free(trial->block);
    trial->block = malloc((size_t)elements * sizeof *trial->block);
    trial->room = trial->block ? elements : 0;
    return trial->block != NULL;
}

/* True if the attribute, its type and its shape can be opened. */
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
    struct trial *trial = context;
    const char *text;
    int count, value;
    char path[MAX_PATH];
    (void)info;
    if (trial->broken) return -1;
    if (!opens(object, name) || !hapt_h5_heap_references_are_valid(trial->heap, object, name)) {
        give_up(trial);
        return -1;
    }
    if (H5Iget_name(object, path, sizeof path) <= 0) return 0;
    if (hapt_h5_read_attribute_text(trial->file, path, name, &trial->arena, &text) != HAPT_OK) {
        hapt_h5_read_attribute_ints(trial->file, path, name, 1, &count, &value);
        if (make_room(trial, ATTRIBUTE_ELEMENTS))
            hapt_h5_read_attribute_reals(trial->file, path, name, ATTRIBUTE_ELEMENTS, &count, trial->block);
    }
    forget(trial);
    return 0;
}

/* Reads a box of at most BLOCK_ELEMENTS elements that starts at `first`: the last dimensions complete, one partly,
 * those before it with extent 1. Returns its number of elements. */
static int64_t read_box(struct trial *trial, hid_t dataset, hid_t type, int dims, const hsize_t *shape, int64_t first)
{
    hsize_t start[H5S_MAX_RANK], extent[H5S_MAX_RANK];
    int64_t elements = 1, rest = first;
    bool partial = false;
    for (int d = dims - 1; d >= 0; d--) {
        start[d] = (hsize_t)(rest % (int64_t)shape[d]);
        rest /= (int64_t)shape[d];
        const int64_t room = partial ? 1 : BLOCK_ELEMENTS / elements;
        const int64_t left = (int64_t)(shape[d] - start[d]);
        extent[d] = (hsize_t)(left < room ? left : room);
        partial = partial || extent[d] < shape[d];
        elements *= (int64_t)extent[d];
    }
    const hid_t space = H5Dget_space(dataset), memory = H5Screate_simple(dims, extent, NULL);
    if (space >= 0 && memory >= 0 && make_room(trial, elements) &&
        H5Sselect_hyperslab(space, H5S_SELECT_SET, start, NULL, extent, NULL) >= 0)
        H5Dread(dataset, type, memory, space, H5P_DEFAULT, trial->block);
    if (memory >= 0) H5Sclose(memory);
    if (space >= 0) H5Sclose(space);
    return elements;
}

/* Reads all elements, or as many evenly spaced boxes as the limits allow; one box of unwritten storage. Chunks are
 * looked up for each box. */
static void read_numbers(struct trial *trial, hid_t dataset, int dims, const int64_t *shape)
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
    const int64_t left = (max_file_bytes - trial->bytes) / width;
    if (left <= 0) return;
    const int64_t wanted = H5Dget_storage_size(dataset) == 0 ? 0 : max_dataset_bytes / width;
    const int64_t most = left < wanted ? left : wanted;
    const int64_t boxes = most / BLOCK_ELEMENTS + 1;
    const int64_t stride = elements <= most ? 0 : elements / boxes;
    for (int64_t first = 0, read = 0; first < elements && read <= most;) {
        const int64_t got = read_box(trial, dataset, whole ? H5T_NATIVE_INT64 : H5T_NATIVE_DOUBLE, dims, extent, first);
        read += got;
        trial->bytes += got * width;
        first += got > stride ? got : stride;
    }
}

static void read_dataset(struct trial *trial, hid_t dataset, const char *path)
{
    int dims;
    int64_t shape[HAPT_H5_MAX_DIMS], count;
    const char **text;
    if (hapt_h5_readable(trial->file, dataset, path, &dims, shape))
        read_numbers(trial, dataset, dims, shape);
    else if (hapt_h5_is_outside(dataset)) /* other files are not opened */
        return;
    else if (!hapt_h5_heap_references_are_valid(trial->heap, dataset, NULL))
        give_up(trial);
    else
        hapt_h5_read_strings(trial->file, path, max_dataset_bytes / (int64_t)sizeof(char *), &trial->arena, &count,
                             &text);
}

static void walk(struct trial *trial, const char *path, int depth);

static void walk_group(struct trial *trial, const char *path, int depth)
{
    struct hapt_arena arena;
    int64_t count = 0;
    const char **name = NULL;
    hapt_arena_init(&arena);
    if (hapt_h5_list(trial->file, path, MAX_OBJECTS, &arena, &count, &name) != HAPT_OK) {
        trial->broken = true;
        if (hapt_h5_last_fault() == HAPT_H5_FAULT_SYSTEM) hapt_sandbox_note_system_error(ENOMEM);
    }
    for (int64_t i = 0; i < count && !trial->broken; i++) {
        const char *member = hapt_arena_printf(&arena, "%s/%s", depth == 0 ? "" : path, name[i]);
        /* A dangling link is no damage: for hapt nothing exists there. Links to other files are refused when they are
         * needed. */
        if (member && hapt_h5_exists(trial->file, member) && hapt_h5_check_inside(trial->file, member) == HAPT_OK)
            walk(trial, member, depth + 1);
    }
    hapt_arena_release(&arena);
}

static void walk(struct trial *trial, const char *path, int depth)
{
    hsize_t first = 0;
    if (++trial->objects > MAX_OBJECTS) return;
    const hid_t id = H5Oopen(trial->file->id, path, H5P_DEFAULT);
    if (id < 0 || !hapt_h5_iterated(H5Aiterate2(id, H5_INDEX_NAME, H5_ITER_NATIVE, &first, read_attribute, trial)))
        give_up(trial);
    if (!trial->broken && H5Iget_type(id) == H5I_DATASET) read_dataset(trial, id, path);
    if (!trial->broken && H5Iget_type(id) == H5I_GROUP && depth < MAX_DEPTH) walk_group(trial, path, depth);
    forget(trial);
    if (id >= 0) H5Oclose(id);
}

bool hapt_h5_trial_read(const char *path)
{
    /* Without free lists, the library's memory always comes from malloc: see M_PERTURB in sandbox.c. */
    if (!path) return H5open() >= 0 && H5set_free_list_limits(0, 0, 0, 0, 0, 0) >= 0;
    H5_HOLD_LOCK;
    struct trial trial = {0};
    hapt_arena_init(&trial.arena);
    if (hapt_h5_open_unsandboxed(path, NULL, 0, true, &trial.file) == HAPT_OK) {
        *hapt_h5_noted() = errno = 0;
        trial.heap = hapt_h5_heap_create(trial.file);
        if (trial.heap)
            walk(&trial, "/", 0);
        else
            give_up(&trial);
        hapt_h5_heap_destroy(trial.heap);
        hapt_h5_close(trial.file);
    }
    hapt_fail_reset();
    hapt_arena_release(&trial.arena);
    free(trial.block);
    return !trial.broken;
}
