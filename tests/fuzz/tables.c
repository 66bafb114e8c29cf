/* Mutations of HDF5 files through the HDF5 library: tables and attributes get other values, shapes, types and
 * storage. */
#include <hdf5.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"

enum { MOST_OBJECTS = 2048, MOST_ELEMENTS = 1 << 16, PATH_CHARS = 512, TEXT_BYTES = 320 };

enum form { INTEGERS, REALS, TEXTS };

/* A table or attribute in memory: data of `count` int64_t, double, or char[TEXT_BYTES]. */
struct table {
    enum form form;
    int dims;
    hsize_t shape[H5S_MAX_RANK];
    int64_t count;
    void *data;
};

static size_t element_bytes(enum form form)
{
    return form == TEXTS ? TEXT_BYTES : 8;
}

static hid_t memory_type(enum form form)
{
    if (form != TEXTS) return H5Tcopy(form == INTEGERS ? H5T_NATIVE_INT64 : H5T_NATIVE_DOUBLE);
    const hid_t type = H5Tcopy(H5T_C_S1);
    H5Tset_size(type, TEXT_BYTES);
    return type;
}

/* Strings of variable length do not convert to fixed ones automatically. */
static bool read_variable(hid_t id, hid_t type, bool attribute, struct table *table)
{
    char **text = calloc((size_t)table->count + 1, sizeof *text);
    const herr_t done = !text       ? -1
                        : attribute ? H5Aread(id, type, text)
                                    : H5Dread(id, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, text);
    for (int64_t i = 0; done >= 0 && i < table->count; i++) {
        snprintf((char *)table->data + i * TEXT_BYTES, TEXT_BYTES, "%s", text[i] ? text[i] : "");
        H5free_memory(text[i]);
    }
    free(text);
    return done >= 0;
}

static bool read_table(hid_t id, bool attribute, struct table *table)
{
    const hid_t type = attribute ? H5Aget_type(id) : H5Dget_type(id),
                space = attribute ? H5Aget_space(id) : H5Dget_space(id);
    const H5T_class_t class = H5Tget_class(type);
    *table = (struct table){.form = class == H5T_STRING ? TEXTS : class == H5T_FLOAT ? REALS : INTEGERS};
    table->dims = H5Sget_simple_extent_dims(space, table->shape, NULL);
    table->count = H5Sget_simple_extent_npoints(space);
    bool good = (class == H5T_STRING || class == H5T_FLOAT || class == H5T_INTEGER) && table->dims >= 0 &&
                table->count >= 0 && table->count <= MOST_ELEMENTS &&
                (table->data = calloc((size_t)table->count + 1, element_bytes(table->form)));
    if (good && H5Tis_variable_str(type) > 0) {
        good = read_variable(id, type, attribute, table);
    } else if (good && table->count > 0) {
        const hid_t memory = memory_type(table->form);
        if (table->form == TEXTS) H5Tset_cset(memory, H5Tget_cset(type));
        good = (attribute ? H5Aread(id, memory, table->data)
                          : H5Dread(id, memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, table->data)) >= 0;
        H5Tclose(memory);
    }
    H5Sclose(space);
    H5Tclose(type);
    if (!good) free(table->data);
    return good;
}

/* ---- Storing ---- */

struct style {
    bool plain;  /* contiguous, natural types, strings of variable length */
    bool honest; /* the sizes are those of the data */
};

static hid_t stored_type(uint64_t *random, const struct style *style, const struct table *table)
{
    const hid_t integers[] = {H5T_STD_I64LE, H5T_STD_I32LE, H5T_STD_U8LE,   H5T_STD_I8LE,   H5T_STD_U16BE,
                              H5T_STD_I32BE, H5T_STD_U64LE, H5T_IEEE_F64LE, H5T_IEEE_F32LE, H5T_STD_B32LE},
                reals[] = {H5T_IEEE_F64LE, H5T_IEEE_F32LE, H5T_IEEE_F64BE, H5T_NATIVE_LDOUBLE,
                           H5T_STD_I32LE,  H5T_STD_U8LE,   H5T_STD_I64BE};
    if (table->form == INTEGERS)
        return H5Tcopy(integers[style->plain || fuzz_chance(random, 0.5) ? 0 : fuzz_below(random, 10)]);
    if (table->form == REALS)
        return H5Tcopy(reals[style->plain || fuzz_chance(random, 0.5) ? 0 : fuzz_below(random, 7)]);
    const hid_t type = H5Tcopy(H5T_C_S1);
    size_t longest = 1;
    for (int64_t i = 0; i < table->count; i++) {
        const size_t length = strlen((char *)table->data + i * TEXT_BYTES);
        longest = length > longest ? length : longest;
    }
    H5Tset_size(type,
                style->plain || fuzz_chance(random, 0.3) ? H5T_VARIABLE : longest + (size_t)fuzz_below(random, 3));
    if (!style->plain) H5Tset_strpad(type, (H5T_str_t)fuzz_below(random, 3));
    if (fuzz_chance(random, 0.5)) H5Tset_cset(type, H5T_CSET_UTF8);
    return type;
}

/* Chunks, filters, and sizes without written data. */
static hid_t stored_layout(uint64_t *random, const struct style *style, struct table *table)
{
    const hid_t layout = H5Pcreate(H5P_DATASET_CREATE);
    hsize_t chunk[H5S_MAX_RANK];
    bool chunked = table->dims > 0 && !style->plain && fuzz_chance(random, 0.6);
    if (chunked && !style->honest && fuzz_chance(random, 0.15)) {
        table->shape[fuzz_below(random, table->dims)] = (hsize_t)1 << fuzz_below(random, 50);
        table->count = -1;
    }
    for (int d = 0; d < table->dims; d++) {
        chunk[d] =
            table->shape[d] > 0 && fuzz_chance(random, 0.7) ? table->shape[d] : 1 + (hsize_t)fuzz_below(random, 9);
        if (chunk[d] > 1 << 16) chunk[d] = 1 << fuzz_below(random, 17);
        if (fuzz_chance(random, 0.03)) chunk[d] = 1 << fuzz_below(random, 31);
    }
    for (int d = 0; d < table->dims; d++) chunked = chunked && (chunk[d] <= table->shape[d] || table->count < 0);
    if (!chunked && !style->plain && fuzz_chance(random, 0.2)) H5Pset_layout(layout, H5D_COMPACT);
    if (chunked) {
        H5Pset_chunk(layout, table->dims, chunk);
        if (fuzz_chance(random, 0.3)) H5Pset_shuffle(layout);
        if (fuzz_chance(random, 0.4)) H5Pset_deflate(layout, 1);
        if (fuzz_chance(random, 0.4)) H5Pset_fletcher32(layout);
    }
    if (!style->plain && fuzz_chance(random, 0.1) && table->form != TEXTS) {
        const double value = fuzz_real(random, 1);
        H5Pset_fill_value(layout, H5T_NATIVE_DOUBLE, &value);
    }
    return layout;
}

static void write_elements(hid_t id, hid_t type, bool attribute, const struct table *table)
{
    const char **text = NULL;
    const void *data = table->data;
    hid_t memory = memory_type(table->form);
    if (H5Tis_variable_str(type) > 0) {
        text = calloc((size_t)table->count + 1, sizeof *text);
        for (int64_t i = 0; text && i < table->count; i++) text[i] = (char *)table->data + i * TEXT_BYTES;
        data = text;
        H5Tset_size(memory, H5T_VARIABLE);
    }
    if (table->form == TEXTS) H5Tset_cset(memory, H5Tget_cset(type));
    if (data && table->count > 0) {
        if (attribute)
            H5Awrite(id, memory, data);
        else
            H5Dwrite(id, memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, data);
    }
    H5Tclose(memory);
    free(text);
}

static void store_dataset(uint64_t *random, const struct style *style, hid_t file, const char *path,
                          struct table *table)
{
    const hid_t type = stored_type(random, style, table), layout = stored_layout(random, style, table);
    const hid_t space = table->dims == 0 ? H5Screate(H5S_SCALAR) : H5Screate_simple(table->dims, table->shape, NULL);
    const hid_t links = H5Pcreate(H5P_LINK_CREATE);
    H5Pset_create_intermediate_group(links, 1);
    if (H5Lexists(file, path, H5P_DEFAULT) > 0) H5Ldelete(file, path, H5P_DEFAULT);
    const hid_t id = H5Dcreate2(file, path, type, space, links, layout, H5P_DEFAULT);
    if (id >= 0) {
        write_elements(id, type, false, table);
        H5Dclose(id);
    }
    H5Pclose(links);
    H5Pclose(layout);
    H5Sclose(space);
    H5Tclose(type);
}

static void store_attribute(uint64_t *random, const struct style *style, hid_t object, const char *name,
                            const struct table *table)
{
    const hid_t type = stored_type(random, style, table);
    const hid_t space = table->dims == 0 ? H5Screate(H5S_SCALAR) : H5Screate_simple(table->dims, table->shape, NULL);
    if (H5Aexists(object, name) > 0) H5Adelete(object, name);
    const hid_t id = H5Acreate2(object, name, type, space, H5P_DEFAULT, H5P_DEFAULT);
    if (id >= 0) {
        write_elements(id, type, true, table);
        H5Aclose(id);
    }
    H5Sclose(space);
    H5Tclose(type);
}

/* ---- Changing ---- */

static void poke(uint64_t *random, struct table *table)
{
    const int count = fuzz_chance(random, 0.6) ? 1 : 1 + fuzz_below(random, 6);
    for (int k = 0; k < count && table->count > 0; k++) {
        const int64_t i = fuzz_below(random, (int)table->count), other = fuzz_below(random, (int)table->count);
        const size_t bytes = element_bytes(table->form);
        char *at = (char *)table->data + (size_t)i * bytes;
        if (fuzz_chance(random, 0.3)) {
            memmove(at, (char *)table->data + (size_t)other * bytes, bytes);
        } else if (table->form == TEXTS) {
            snprintf(at, TEXT_BYTES, "%s", fuzz_text(random));
        } else if (table->form == INTEGERS) {
            int64_t value;
            memcpy(&value, at, sizeof value);
            value = fuzz_integer(random, value);
            memcpy(at, &value, sizeof value);
        } else {
            double value;
            memcpy(&value, at, sizeof value);
            value = fuzz_real(random, value);
            memcpy(at, &value, sizeof value);
        }
    }
}

/* Another extent: elements are removed, or zeros are appended. */
static void reshape(uint64_t *random, struct table *table)
{
    hsize_t shape[H5S_MAX_RANK];
    int dims = table->dims;
    int64_t count = 1;
    memcpy(shape, table->shape, sizeof shape);
    const int at = fuzz_below(random, dims);
    switch (fuzz_below(random, 6)) {
    case 0: dims = fuzz_below(random, 8); break;
    case 1:
        if (dims > 0) shape[at]++;
        break;
    case 2:
        if (dims > 0 && shape[at] > 0) shape[at]--;
        break;
    case 3:
        if (dims > 0) shape[at] *= 2;
        break;
    case 4:
        if (dims > 0) shape[at] = 0;
        break;
    default:
        if (dims > 1) {
            const int other = fuzz_below(random, dims);
            const hsize_t swapped = shape[at];
            shape[at] = shape[other], shape[other] = swapped;
        }
    }
    for (int d = 0; d < dims; d++) {
        if (d >= table->dims) shape[d] = 1 + (hsize_t)fuzz_below(random, 3);
        if (shape[d] > MOST_ELEMENTS || count * (int64_t)shape[d] > MOST_ELEMENTS) return;
        count *= (int64_t)shape[d];
    }
    const size_t bytes = element_bytes(table->form);
    char *data = calloc((size_t)count + 1, bytes);
    if (!data) return;
    memcpy(data, table->data, (size_t)(count < table->count ? count : table->count) * bytes);
    free(table->data);
    table->data = data;
    table->count = count;
    table->dims = dims;
    memcpy(table->shape, shape, sizeof shape);
}

/* Another type of element. */
static void retype(uint64_t *random, struct table *table)
{
    const enum form form = (enum form)fuzz_below(random, 3);
    if (form == table->form) return;
    char *data = calloc((size_t)table->count + 1, element_bytes(form));
    if (!data) return;
    free(table->data);
    table->data = data;
    table->form = form;
    poke(random, table);
}

static void change(uint64_t *random, struct table *table)
{
    const int way = fuzz_below(random, 10);
    if (way < 6) poke(random, table);
    if (way == 6 || way == 7) reshape(random, table);
    if (way == 8) retype(random, table);
}

/* ---- Whole files ---- */

struct listing {
    int count;
    struct entry {
        char path[PATH_CHARS];
        bool dataset;
        int attributes;
    } entry[MOST_OBJECTS];
};

static herr_t list_object(hid_t root, const char *name, const H5O_info_t *info, void *context)
{
    struct listing *listing = context;
    if (listing->count == MOST_OBJECTS) return 0;
    struct entry *entry = &listing->entry[listing->count++];
    snprintf(entry->path, sizeof entry->path, "/%s", strcmp(name, ".") ? name : "");
    entry->dataset = info->type == H5O_TYPE_DATASET;
    const hid_t id = H5Oopen(root, name, H5P_DEFAULT);
    entry->attributes = id < 0 ? 0 : H5Aget_num_attrs(id);
    if (id >= 0) H5Oclose(id);
    return 0;
}

static struct listing *list_objects(hid_t file)
{
    struct listing *listing = calloc(1, sizeof *listing);
#if H5_VERSION_GE(1, 12, 0)
    if (listing) H5Ovisit3(file, H5_INDEX_NAME, H5_ITER_INC, list_object, listing, H5O_INFO_BASIC);
#else
    if (listing) H5Ovisit(file, H5_INDEX_NAME, H5_ITER_INC, list_object, listing);
#endif
    return listing;
}

static void change_attribute(uint64_t *random, hid_t file, const struct entry *entry)
{
    char name[PATH_CHARS] = "";
    struct table table;
    const hid_t object = H5Oopen(file, entry->path, H5P_DEFAULT);
    const hid_t id = object < 0
                         ? -1
                         : H5Aopen_by_idx(object, ".", H5_INDEX_NAME, H5_ITER_INC,
                                          (hsize_t)fuzz_below(random, entry->attributes), H5P_DEFAULT, H5P_DEFAULT);
    const bool read = id >= 0 && H5Aget_name(id, sizeof name, name) > 0 && read_table(id, true, &table);
    if (id >= 0) H5Aclose(id);
    if (read && fuzz_chance(random, 0.1)) {
        H5Adelete(object, name);
    } else if (read) {
        change(random, &table);
        store_attribute(random, &(struct style){.honest = true}, object, name, &table);
    }
    if (read) free(table.data);
    if (object >= 0) H5Oclose(object);
}

static void change_dataset(uint64_t *random, hid_t file, const struct entry *entry)
{
    struct table table;
    const hid_t id = H5Dopen2(file, entry->path, H5P_DEFAULT);
    const bool read = id >= 0 && read_table(id, false, &table);
    if (id >= 0) H5Dclose(id);
    if (!read) return;
    change(random, &table);
    store_dataset(random, &(struct style){0}, file, entry->path, &table);
    free(table.data);
}

/* Links, groups and objects of other kinds in unexpected places. */
static void change_links(uint64_t *random, hid_t file, const struct listing *listing, const struct entry *entry)
{
    const struct entry *other = &listing->entry[fuzz_below(random, listing->count)];
    if (!strcmp(entry->path, "/")) return;
    const int way = fuzz_below(random, 7);
    if (way == 0 && !strcmp(other->path, "/")) return;
    if (way == 0) { /* a second item of the same kind */
        char path[PATH_CHARS];
        snprintf(path, sizeof path, "%.400s", other->path);
        const size_t length = strlen(path);
        path[length - 1] = (char)('0' + fuzz_below(random, 10));
        H5Ocopy(file, entry->path, file, path, H5P_DEFAULT, H5P_DEFAULT);
        return;
    }
    H5Ldelete(file, entry->path, H5P_DEFAULT);
    if (way == 1) H5Lcreate_soft(entry->path, file, entry->path, H5P_DEFAULT, H5P_DEFAULT);
    if (way == 2) H5Lcreate_soft(other->path, file, entry->path, H5P_DEFAULT, H5P_DEFAULT);
    if (way == 3) H5Lcreate_hard(file, other->path, file, entry->path, H5P_DEFAULT, H5P_DEFAULT);
    if (way == 4) H5Lcreate_external("/nowhere.h5", "/x", file, entry->path, H5P_DEFAULT, H5P_DEFAULT);
    if (way == 5) H5Gclose(H5Gcreate2(file, entry->path, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
}

/* Lists the objects of `origin`, which `file` is a copy of. */
static const struct listing *known_objects(hid_t file, const char *origin)
{
    enum { MOST_KNOWN = 256 };
    static struct known {
        char origin[2 * PATH_CHARS];
        struct listing *listing;
    } known[MOST_KNOWN];
    int i = 0;
    while (i < MOST_KNOWN - 1 && known[i].listing && strcmp(known[i].origin, origin) != 0) i++;
    if (known[i].listing && strcmp(known[i].origin, origin) == 0) return known[i].listing;
    free(known[i].listing);
    snprintf(known[i].origin, sizeof known[i].origin, "%s", origin);
    known[i].listing = list_objects(file);
    if (known[i].listing) {
        const size_t bytes = offsetof(struct listing, entry) + (size_t)known[i].listing->count * sizeof(struct entry);
        struct listing *smaller = realloc(known[i].listing, bytes);
        if (smaller) known[i].listing = smaller;
    }
    return known[i].listing;
}

bool fuzz_tables(uint64_t *random, const char *path, const char *origin)
{
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    const hid_t file = H5Fopen(path, H5F_ACC_RDWR, H5P_DEFAULT);
    if (file < 0) return false;
    const struct listing *listing = known_objects(file, origin);
    const int rounds = fuzz_chance(random, 0.6) ? 1 : 1 + fuzz_below(random, 5);
    for (int round = 0; listing && listing->count > 0 && round < rounds; round++) {
        const struct entry *entry = &listing->entry[fuzz_below(random, listing->count)];
        if (fuzz_chance(random, 0.08))
            change_links(random, file, listing, entry);
        else if (entry->attributes > 0 && (!entry->dataset || fuzz_chance(random, 0.1)))
            change_attribute(random, file, entry);
        else if (entry->dataset)
            change_dataset(random, file, entry);
    }
    return H5Fclose(file) >= 0;
}

static herr_t copy_attribute(hid_t from, const char *name, const H5A_info_t *info, void *context)
{
    struct table table;
    uint64_t random = 1;
    const hid_t id = H5Aopen(from, name, H5P_DEFAULT);
    (void)info;
    if (id >= 0 && read_table(id, true, &table)) {
        store_attribute(&random, &(struct style){.plain = true, .honest = true}, *(hid_t *)context, name, &table);
        free(table.data);
    }
    if (id >= 0) H5Aclose(id);
    return 0;
}

static void copy_object(hid_t from, hid_t to, const struct entry *entry)
{
    struct table table;
    uint64_t random = 1;
    hsize_t first = 0;
    const hid_t id = H5Oopen(from, entry->path, H5P_DEFAULT);
    if (entry->dataset && read_table(id, false, &table)) {
        store_dataset(&random, &(struct style){.plain = true, .honest = true}, to, entry->path, &table);
        free(table.data);
    } else if (!entry->dataset && strcmp(entry->path, "/") != 0) {
        H5Gclose(H5Gcreate2(to, entry->path, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
    }
    hid_t made = H5Oopen(to, entry->path, H5P_DEFAULT);
    if (made >= 0) {
        H5Aiterate2(id, H5_INDEX_NAME, H5_ITER_INC, &first, copy_attribute, &made);
        H5Oclose(made);
    }
    H5Oclose(id);
}

bool fuzz_foreign(const char *from_path, const char *to_path)
{
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    const hid_t from = H5Fopen(from_path, H5F_ACC_RDONLY, H5P_DEFAULT);
    const hid_t to = H5Fcreate(to_path, H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
    struct listing *listing = from < 0 || to < 0 ? NULL : list_objects(from);
    for (int i = 0; listing && i < listing->count; i++) copy_object(from, to, &listing->entry[i]);
    const bool done = listing != NULL;
    free(listing);
    if (from >= 0) H5Fclose(from);
    return to >= 0 && H5Fclose(to) >= 0 && done;
}

bool fuzz_put(const char *path, const char *dataset, int64_t count, const int64_t *value)
{
    const hid_t file = H5Fopen(path, H5F_ACC_RDWR, H5P_DEFAULT),
                id = file < 0 ? -1 : H5Dopen2(file, dataset, H5P_DEFAULT);
    const hid_t space = id < 0 ? -1 : H5Dget_space(id);
    const bool fits = space >= 0 && H5Sget_simple_extent_npoints(space) == count;
    const bool done = fits && H5Dwrite(id, H5T_NATIVE_INT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, value) >= 0;
    if (space >= 0) H5Sclose(space);
    if (id >= 0) H5Dclose(id);
    return file >= 0 && H5Fclose(file) >= 0 && done;
}
