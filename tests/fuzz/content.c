/* The content of an HDF5 file, independent of its layout in bytes. */
#include <hdf5.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"

struct walk {
    uint64_t hash;
    bool failed;
};

static void add(struct walk *walk, const void *data, size_t bytes)
{
    walk->hash = hapt_hash(walk->hash, data, bytes);
}

/* Elements are read in the file's own type. Strings of variable length are read as text. */
static void add_elements(struct walk *walk, hid_t id, hid_t type, hid_t space, bool attribute)
{
    const hssize_t count = H5Sget_simple_extent_npoints(space);
    const size_t width = H5Tget_size(type);
    hsize_t extent[H5S_MAX_RANK] = {0};
    const int dims = H5Sget_simple_extent_dims(space, extent, NULL);
    if (count < 0 || dims < 0 || width == 0 || (uint64_t)count > ((uint64_t)1 << 28) / width) {
        walk->failed = true;
        return;
    }
    const H5T_class_t class = H5Tget_class(type);
    add(walk, &class, sizeof class);
    add(walk, extent, (size_t)dims * sizeof *extent);
    unsigned char *data = calloc((size_t)count + 1, width);
    if (!data || (attribute ? H5Aread(id, type, data) : H5Dread(id, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data)) < 0)
        walk->failed = true;
    else if (H5Tis_variable_str(type) > 0)
        for (hssize_t i = 0; i < count; i++) {
            char *text = ((char **)(void *)data)[i];
            add(walk, text ? text : "", text ? strlen(text) + 1 : 1);
            H5free_memory(text);
        }
    else
        add(walk, data, (size_t)count * width);
    free(data);
}

static herr_t add_attribute(hid_t object, const char *name, const H5A_info_t *info, void *context)
{
    const hid_t id = H5Aopen(object, name, H5P_DEFAULT);
    const hid_t type = id < 0 ? -1 : H5Aget_type(id), space = id < 0 ? -1 : H5Aget_space(id);
    struct walk *walk = context;
    (void)info;
    add(walk, name, strlen(name));
    if (space >= 0)
        add_elements(walk, id, type, space, true);
    else
        walk->failed = true;
    if (space >= 0) H5Sclose(space);
    if (type >= 0) H5Tclose(type);
    if (id >= 0) H5Aclose(id);
    return 0;
}

static herr_t add_object(hid_t root, const char *name, const H5O_info_t *info, void *context)
{
    struct walk *walk = context;
    hsize_t first = 0;
    const hid_t id = H5Oopen(root, name, H5P_DEFAULT);
    (void)info;
    add(walk, name, strlen(name) + 1);
    if (id < 0 || H5Aiterate2(id, H5_INDEX_NAME, H5_ITER_INC, &first, add_attribute, walk) < 0) walk->failed = true;
    if (id >= 0 && H5Iget_type(id) == H5I_DATASET) {
        const hid_t type = H5Dget_type(id), space = H5Dget_space(id);
        add_elements(walk, id, type, space, false);
        H5Sclose(space);
        H5Tclose(type);
    }
    if (id >= 0) H5Oclose(id);
    return walk->failed ? -1 : 0;
}

uint64_t fuzz_content(const char *path)
{
    struct walk walk = {.hash = 1};
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    const hid_t file = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT);
    if (file < 0) return 0;
#if H5_VERSION_GE(1, 12, 0)
    const herr_t visited = H5Ovisit3(file, H5_INDEX_NAME, H5_ITER_INC, add_object, &walk, H5O_INFO_BASIC);
#else
    const herr_t visited = H5Ovisit(file, H5_INDEX_NAME, H5_ITER_INC, add_object, &walk);
#endif
    H5Fclose(file);
    return walk.failed || visited < 0 ? 0 : walk.hash | 1;
}
