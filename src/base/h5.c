/* Implements hapt/h5.h with HDF5: opens and closes files, limits sizes and translates errors. Datasets and attributes:
 * h5_data.c. */
#include "h5_private.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "hapt/atomic_file.h"
#include "hapt/sandbox.h"
#include "hapt/text.h"
#include "hapt/version.h"

const char *hapt_h5_library_version(void)
{
    return H5_VERS_INFO;
}

bool hapt_h5_library_is_parallel(void)
{
#ifdef H5_HAVE_PARALLEL
    return true;
#else
    return false;
#endif
}

static enum hapt_status make_folders(const char *path)
{
    char folder[4096];
    if (snprintf(folder, sizeof folder, "%s", path) >= (int)sizeof folder)
        return hapt_fail(HAPT_ERR_IO, "use a shorter path", "path too long: %.60s...", path);
    for (char *slash = strchr(folder + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        if (mkdir(folder, 0777) && errno != EEXIST)
            return hapt_fail(HAPT_ERR_IO, "check permissions", "cannot create folder %s: %s", folder, strerror(errno));
        *slash = '/';
    }
    return HAPT_OK;
}

static struct hapt_h5 *allocate(const char *path)
{
    struct hapt_h5 *file = calloc(1, sizeof *file);
    const size_t bytes = strlen(path) + 1;
    if (file && (file->path = malloc(bytes)) && (file->temporary_path = malloc(bytes + HAPT_TEMPORARY_SUFFIX_BYTES))) {
        memcpy(file->path, path, bytes);
        file->id = file->descriptor = -1;
        return file;
    }
    if (file) free(file->path);
    free(file);
    hapt_h5_set_fault(HAPT_H5_FAULT_SYSTEM);
    hapt_fail(HAPT_ERR_MEMORY, NULL, "host memory exhausted");
    return NULL;
}

/* A new file may replace a regular file, but no device or folder. */
static enum hapt_status check_replaceable(const char *path)
{
    struct stat about;
    if (stat(path, &about) != 0 || S_ISREG(about.st_mode)) return HAPT_OK;
    return hapt_fail(HAPT_ERR_IO, "give the path of a file", "cannot write %s: it is %s", path,
                     S_ISDIR(about.st_mode) ? "a folder" : "not a regular file");
}

enum hapt_status hapt_h5_create(const char *path, const char *format, int version, struct hapt_h5 **result)
{
    H5_HOLD_LOCK;
    HAPT_TRY(check_replaceable(path));
    HAPT_TRY(make_folders(path));
    struct hapt_h5 *file = allocate(path);
    if (!file) return HAPT_ERR_MEMORY;
    file->writing = true;
    file->descriptor = hapt_atomic_file_open(path, file->temporary_path, strlen(path) + HAPT_TEMPORARY_SUFFIX_BYTES);
    if (file->descriptor < 0) {
        file->error = errno;
        const enum hapt_status status = hapt_h5_fail(file, "a new file", "");
        hapt_h5_close(file);
        return status;
    }
    const hid_t access = H5Pcreate(H5P_FILE_ACCESS);
    H5Pset_libver_bounds(access, H5F_LIBVER_LATEST, H5F_LIBVER_LATEST);
    H5Pset_fclose_degree(access, H5F_CLOSE_STRONG); /* also closes objects that a failed write left open */
    if (hapt_h5_use_disk(access, file->descriptor, true, &file->error))
        file->id = H5Fcreate(file->temporary_path, H5F_ACC_TRUNC, H5P_DEFAULT, access);
    hapt_h5_leave_disk();
    H5Pclose(access);
    enum hapt_status status = file->id < 0 ? hapt_h5_fail(file, "a new file", "") : HAPT_OK;
    if (status == HAPT_OK) status = hapt_h5_write_attribute_text(file, "/", "format", format);
    if (status == HAPT_OK) status = hapt_h5_write_attribute_int(file, "/", "version", version);
    if (status == HAPT_OK) status = hapt_h5_write_attribute_text(file, "/", "creator", "hapt " HAPT_VERSION);
    if (status != HAPT_OK) {
        hapt_h5_close(file);
        return status;
    }
    *result = file;
    return HAPT_OK;
}

/* Commits the file to disk under its final name; false: the error is kept in file->error. */
static bool rename_to_path(struct hapt_h5 *file)
{
    file->error = hapt_atomic_file_commit(file->descriptor, file->temporary_path, file->path);
    file->descriptor = -1;
    return file->error == 0;
}

/* Flushes the library's buffers to the system. */
static bool finish_writing(struct hapt_h5 *file)
{
    H5_HOLD_LOCK;
    const herr_t flushed = H5Fflush(file->id, H5F_SCOPE_LOCAL);
    const herr_t closed = H5Fclose(file->id);
    file->id = -1;
    return flushed >= 0 && closed >= 0 && file->error == 0;
}

enum hapt_status hapt_h5_commit(struct hapt_h5 *file)
{
    enum hapt_status status = HAPT_OK;
    /* Waits for the disk without holding the lock. */
    if (!finish_writing(file) || !rename_to_path(file))
        status = hapt_h5_fail(file, "the file", "");
    else
        hapt_sandbox_trust(file->path);
    hapt_h5_close(file);
    return status;
}

enum hapt_status hapt_h5_finish(struct hapt_h5 *file, enum hapt_status status)
{
    if (status == HAPT_OK) return hapt_h5_commit(file);
    hapt_h5_close(file);
    return status;
}

/* For files that are not damaged, but that the caller cannot read. */
#define REFUSE_KIND(fault, ...) (hapt_h5_set_fault(fault), hapt_fail(HAPT_ERR_INPUT, __VA_ARGS__))

static enum hapt_status check_version(struct hapt_h5 *file, int version)
{
    int64_t number = 0;
    if (!hapt_h5_has_attribute(file, "/", "version")) return HAPT_OK;
    HAPT_TRY(hapt_h5_read_attribute_int(file, "/", "version", &number));
    if (number <= version) return HAPT_OK;
    return REFUSE_KIND(HAPT_H5_FAULT_NEWER, "use a newer hapt", "%s has version %lld, this hapt reads up to %d",
                       file->path, (long long)number, version);
}

/* Checks the format and version attributes. For callers that accept any format (NULL) it limits the version only of
 * hapt's own formats. */
static enum hapt_status check_format(struct hapt_h5 *file, const char *format, int version, bool foreign)
{
    if (!format && version == 0) return HAPT_OK;
    if (!hapt_h5_has_attribute(file, "/", "format")) {
        const int error = format ? hapt_h5_system_error(file) : 0;
        if (error) return hapt_h5_fail_system(file->path, error);
        if (!format || foreign) return HAPT_OK;
        return REFUSE_KIND(HAPT_H5_FAULT_FOREIGN, "give a file that was written by hapt",
                           "%s is not a %s file: it has no format attribute", file->path, format);
    }
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const char *found = NULL;
    enum hapt_status status = hapt_h5_read_attribute_text(file, "/", "format", &arena, &found);
    const bool ours = status == HAPT_OK && (format ? !strcmp(found, format) : !strncmp(found, "hapt-", 5));
    if (status == HAPT_OK && format && !ours)
        status = REFUSE_KIND(HAPT_H5_FAULT_FOREIGN, "give the file that this option expects",
                             "%s is a %.40s file, not a %s file", file->path, found, format);
    hapt_arena_release(&arena);
    if (!format && status == HAPT_ERR_INPUT) { /* another program's file with a `format` of another type */
        hapt_fail_reset();
        status = HAPT_OK;
    }
    return ours ? check_version(file, version) : status;
}

/* HDF5 uses this descriptor, so a failed open is caused by the path or the system, never by damage. */
static enum hapt_status open_descriptor(struct hapt_h5 *file)
{
    file->descriptor = open(file->path, O_RDONLY | O_CLOEXEC);
    if (file->descriptor >= 0) {
        unsigned char head[9];
        struct stat about;
        if (fstat(file->descriptor, &about) == 0) {
            file->identity.bytes = (int64_t)about.st_size;
            file->identity.device = (int64_t)about.st_dev;
            file->identity.number = (int64_t)about.st_ino;
        }
        file->checked_sizes = pread(file->descriptor, head, sizeof head, 0) == sizeof head &&
                              memcmp(head, "\211HDF\r\n\032\n", 8) == 0 && head[8] >= 2;
        return HAPT_OK;
    }
    if (errno != EACCES && hapt_h5_is_system_error(errno)) return hapt_h5_fail_system(file->path, errno);
    return REFUSE_KIND(errno == EACCES ? HAPT_H5_FAULT_SYSTEM : HAPT_H5_FAULT_MISSING, "check the path and permissions",
                       "cannot open %s: %s", file->path, strerror(errno));
}

/* A hint for a file that is not HDF5, by its first bytes. */
static const char *hint_of_content(const char *path)
{
    unsigned char head[256];
    struct hapt_text text = {.plain = true};
    FILE *file = fopen(path, "rbe");
    const size_t size = file ? fread(head, 1, sizeof head, file) : 0;
    if (file) fclose(file);
    hapt_text_read(&text, head, size);
    if (size > 0 && head[0] == '{') return "it looks like JSON: a cluster file is given with --cluster";
    if (size > 0 && text.plain)
        return "it looks like text; as training data, `hapt data TEXT --output tokens.h5` converts it";
    return "it is truncated, damaged or not HDF5";
}

static enum hapt_status open_content(struct hapt_h5 *file, const char *format, int version, bool foreign)
{
    HAPT_TRY(open_descriptor(file));
    const hid_t access = H5Pcreate(H5P_FILE_ACCESS);
    if (access >= 0 && hapt_h5_use_disk(access, file->descriptor, false, hapt_h5_noted()))
        file->id = H5Fopen(file->path, H5F_ACC_RDONLY, access);
    if (hapt_h5_leave_disk()) file->descriptor = -1;
    if (access >= 0) H5Pclose(access);
    if (file->id < 0)
        return hapt_h5_fail_content(file, hint_of_content(file->path), "%s cannot be opened as HDF5", file->path);
    return check_format(file, format, version, foreign);
}

enum hapt_status hapt_h5_open_unsandboxed(const char *path, const char *format, int version, bool foreign,
                                          struct hapt_h5 **result)
{
    H5_HOLD_LOCK;
    struct hapt_h5 *file = allocate(path);
    if (!file) return HAPT_ERR_MEMORY;
    const enum hapt_status status = open_content(file, format, version, foreign);
    if (status != HAPT_OK) {
        hapt_h5_close(file);
        return status;
    }
    *result = file;
    return HAPT_OK;
}

enum hapt_status hapt_h5_open(const char *path, const char *format, int version, bool foreign, struct hapt_h5 **result)
{
    struct stat about;
    hapt_h5_set_fault(HAPT_H5_FAULT_NONE);
    if (stat(path, &about)) {
        if (errno != EACCES && hapt_h5_is_system_error(errno)) return hapt_h5_fail_system(path, errno);
        return REFUSE_KIND(errno == EACCES ? HAPT_H5_FAULT_SYSTEM : HAPT_H5_FAULT_MISSING, "check the path",
                           "cannot open %s: %s", path, strerror(errno));
    }
    if (!S_ISREG(about.st_mode)) return REFUSE_KIND(HAPT_H5_FAULT_MISSING, "give a file", "%s is not a file", path);
    if (access(path, R_OK))
        return REFUSE_KIND(HAPT_H5_FAULT_SYSTEM, "check permissions", "cannot open %s: %s", path, strerror(errno));
    const enum hapt_status status = hapt_sandbox_check(path, &about);
    if (status != HAPT_OK) {
        hapt_h5_set_fault(status == HAPT_ERR_INPUT ? HAPT_H5_FAULT_DAMAGED : HAPT_H5_FAULT_SYSTEM);
        return status;
    }
    return hapt_h5_open_unsandboxed(path, format, version, foreign, result);
}

void hapt_h5_close(struct hapt_h5 *file)
{
    H5_HOLD_LOCK;
    if (!file) return;
    if (file->id >= 0) H5Fclose(file->id);
    if (file->descriptor >= 0) close(file->descriptor);
    if (file->writing && file->temporary_path[0]) unlink(file->temporary_path);
    free(file->temporary_path);
    free(file->path);
    free(file);
}

const char *hapt_h5_path(const struct hapt_h5 *file)
{
    return file->path;
}

struct listing {
    struct hapt_arena *arena;
    const char **name;
    int64_t count, limit;
    bool memory;
};

static herr_t collect(hid_t group, const char *name, const H5L_info_t *info, void *context)
{
    (void)group, (void)info;
    struct listing *listing = context;
    if (listing->count == listing->limit) return -1;
    listing->name[listing->count] = hapt_arena_strdup(listing->arena, name);
    if (!listing->name[listing->count]) {
        listing->memory = true;
        return -1;
    }
    listing->count++;
    return 0;
}

enum hapt_status hapt_h5_list(struct hapt_h5 *file, const char *group, int64_t limit, struct hapt_arena *arena,
                              int64_t *count, const char ***names)
{
    H5_HOLD_LOCK;
    if (!hapt_h5_exists(file, group)) return hapt_h5_fail(file, "the missing group", group);
    HAPT_TRY(hapt_h5_check_inside(file, group));
    const hid_t id = H5Gopen2(file->id, group, H5P_DEFAULT);
    H5G_info_t info;
    if (id < 0 || H5Gget_info(id, &info) < 0) {
        if (id >= 0) H5Gclose(id);
        return hapt_h5_fail(file, "group", group);
    }
    enum hapt_status status = HAPT_OK;
    struct listing listing = {.arena = arena, .limit = limit};
    if (info.nlinks > (hsize_t)limit)
        status = hapt_h5_fail_content(file, H5_HINT, "group %s of %s has too many members", group, file->path);
    else if (!(listing.name = hapt_arena_alloc(arena, (size_t)info.nlinks + 1, sizeof *listing.name)))
        status = hapt_h5_fail_system(file->path, ENOMEM);
    else if (!hapt_h5_iterated(H5Literate(id, H5_INDEX_NAME, H5_ITER_INC, NULL, collect, &listing)))
        status = listing.memory ? hapt_h5_fail_system(file->path, ENOMEM) : hapt_h5_fail(file, "group", group);
    H5Gclose(id);
    *count = listing.count;
    *names = listing.name;
    return status;
}

enum hapt_status hapt_h5_peek_text(const char *path, const char *format, int version, bool foreign, const char *name,
                                   char *text, size_t size)
{
    struct hapt_h5 *file;
    struct hapt_arena arena;
    const char *value = "";
    text[0] = '\0';
    HAPT_TRY(hapt_h5_open(path, format, version, foreign, &file));
    hapt_arena_init(&arena);
    enum hapt_status status = HAPT_OK;
    if (hapt_h5_has_attribute(file, "/", name)) status = hapt_h5_read_attribute_text(file, "/", name, &arena, &value);
    if (status == HAPT_OK) snprintf(text, size, "%s", value);
    hapt_arena_release(&arena);
    hapt_h5_close(file);
    return status;
}
