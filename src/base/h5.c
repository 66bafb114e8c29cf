/* HDF5 behind hapt/h5.h: files are opened and closed, sizes bounded, errors translated here. Tables: h5_data.c. */
#include "h5_private.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "hapt/aside.h"
#include "hapt/guard.h"
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

enum hapt_status hapt_h5_fail(struct hapt_h5 *file, const char *what, const char *name)
{
    if (file->writing)
        return hapt_fail(HAPT_ERR_IO, "check free space and permissions", "cannot write %s%s%s to %s%s%s", what,
                         *name ? " " : "", name, file->path, file->error ? ": " : "",
                         file->error ? strerror(file->error) : "");
    return hapt_h5_refuse(file, "the file is damaged or was made by something else", "cannot read %s%s%s of %s", what,
                          *name ? " " : "", name, file->path);
}

static enum hapt_status make_folders(const char *path)
{
    char folder[4096];
    if (snprintf(folder, sizeof folder, "%s", path) >= (int)sizeof folder)
        return hapt_fail(HAPT_ERR_IO, "use a shorter path", "path too long: %.60s...", path);
    for (char *slash = strchr(folder + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        if (mkdir(folder, 0777) && errno != EEXIST)
            return hapt_fail(HAPT_ERR_IO, "check permissions", "cannot make folder %s: %s", folder, strerror(errno));
        *slash = '/';
    }
    return HAPT_OK;
}

static struct hapt_h5 *allocate(const char *path)
{
    struct hapt_h5 *file = calloc(1, sizeof *file);
    const size_t bytes = strlen(path) + 1;
    if (file && (file->path = malloc(bytes)) && (file->aside = malloc(bytes + HAPT_ASIDE_BYTES))) {
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

/* A new file replaces what has its name: never a device or a folder. */
static enum hapt_status check_replaceable(const char *path)
{
    struct stat about;
    if (stat(path, &about) != 0 || S_ISREG(about.st_mode)) return HAPT_OK;
    return hapt_fail(HAPT_ERR_IO, "give the path of a file", "cannot write %s: it is %s", path,
                     S_ISDIR(about.st_mode) ? "a folder" : "no regular file");
}

enum hapt_status hapt_h5_create(const char *path, const char *format, int version, struct hapt_h5 **result)
{
    H5_HOLD_LOCK;
    HAPT_TRY(check_replaceable(path));
    HAPT_TRY(make_folders(path));
    struct hapt_h5 *file = allocate(path);
    if (!file) return HAPT_ERR_MEMORY;
    file->writing = true;
    file->descriptor = hapt_aside_open(path, file->aside, strlen(path) + HAPT_ASIDE_BYTES);
    if (file->descriptor < 0) {
        file->error = errno;
        const enum hapt_status status = hapt_h5_fail(file, "a new file", "");
        hapt_h5_close(file);
        return status;
    }
    const hid_t access = H5Pcreate(H5P_FILE_ACCESS);
    H5Pset_libver_bounds(access, H5F_LIBVER_LATEST, H5F_LIBVER_LATEST);
    H5Pset_fclose_degree(access, H5F_CLOSE_STRONG); /* also what a failed write left open */
    if (hapt_h5_use_disk(access, file->descriptor, true, &file->error))
        file->id = H5Fcreate(file->aside, H5F_ACC_TRUNC, H5P_DEFAULT, access);
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

/* On the disk under its own name; else the error is kept. */
static bool put_in_place(struct hapt_h5 *file)
{
    file->error = hapt_aside_commit(file->descriptor, file->aside, file->path);
    file->descriptor = -1;
    return file->error == 0;
}

/* The buffers of the library reach the system. */
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
    /* The disk is waited for without the lock. */
    if (!finish_writing(file) || !put_in_place(file))
        status = hapt_h5_fail(file, "the file", "");
    else
        hapt_guard_trust(file->path);
    hapt_h5_close(file);
    return status;
}

static enum hapt_status refuse_kind(enum hapt_h5_fault fault, const char *hint, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Not damaged, but nothing that the caller can read. */
static enum hapt_status refuse_kind(enum hapt_h5_fault fault, const char *hint, const char *format, ...)
{
    char message[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    hapt_h5_set_fault(fault);
    return hapt_fail(HAPT_ERR_INPUT, hint, "%s", message);
}

static enum hapt_status check_version(struct hapt_h5 *file, int version)
{
    int64_t number = 0;
    if (!hapt_h5_has_attribute(file, "/", "version")) return HAPT_OK;
    HAPT_TRY(hapt_h5_read_attribute_int(file, "/", "version", &number));
    if (number <= version) return HAPT_OK;
    return refuse_kind(HAPT_H5_FAULT_NEWER, "use a newer hapt", "%s has version %lld, this hapt reads up to %d",
                       file->path, (long long)number, version);
}

/* The format and version attributes against what the caller knows. */
static enum hapt_status check_format(struct hapt_h5 *file, const char *format, int version, bool foreign)
{
    if (!hapt_h5_has_attribute(file, "/", "format")) {
        const int error = hapt_h5_system_error(file);
        if (error) return hapt_h5_lack(file->path, error);
        if (foreign) return HAPT_OK;
        return refuse_kind(HAPT_H5_FAULT_FOREIGN, "was it made by hapt?",
                           "%s is not a %s file: it has no format attribute", file->path, format);
    }
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const char *found = NULL;
    enum hapt_status status = hapt_h5_read_attribute_text(file, "/", "format", &arena, &found);
    if (status == HAPT_OK && strcmp(found, format))
        status = refuse_kind(HAPT_H5_FAULT_FOREIGN, "give the file that this option expects",
                             "%s is a %.40s file, not a %s file", file->path, found, format);
    hapt_arena_release(&arena);
    return status == HAPT_OK ? check_version(file, version) : status;
}

/* Files of any format may be of a later version only if their format is not hapt's. */
static enum hapt_status check_any_format(struct hapt_h5 *file, int version)
{
    struct hapt_arena arena;
    const char *found = NULL;
    if (!hapt_h5_has_attribute(file, "/", "format")) return HAPT_OK;
    hapt_arena_init(&arena);
    enum hapt_status status = hapt_h5_read_attribute_text(file, "/", "format", &arena, &found);
    const bool ours = status == HAPT_OK && strncmp(found, "hapt-", 5) == 0;
    hapt_arena_release(&arena);
    if (status == HAPT_ERR_INPUT) { /* a foreign file's attribute of another type */
        hapt_fail_reset();
        status = HAPT_OK;
    }
    return ours ? check_version(file, version) : status;
}

/* HDF5 works on this descriptor: an open that fails is the path's or the system's, never damage. */
static enum hapt_status open_descriptor(struct hapt_h5 *file)
{
    file->descriptor = open(file->path, O_RDONLY | O_CLOEXEC);
    if (file->descriptor >= 0) {
        unsigned char head[9];
        file->checked_sizes = pread(file->descriptor, head, sizeof head, 0) == sizeof head &&
                              memcmp(head, "\211HDF\r\n\032\n", 8) == 0 && head[8] >= 2;
        return HAPT_OK;
    }
    if (errno != EACCES && hapt_h5_is_system_error(errno)) return hapt_h5_lack(file->path, errno);
    return refuse_kind(errno == EACCES ? HAPT_H5_FAULT_SYSTEM : HAPT_H5_FAULT_MISSING, "check the path and permissions",
                       "cannot open %s: %s", file->path, strerror(errno));
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
        return hapt_h5_refuse(file, "it is truncated, damaged or not HDF5", "%s cannot be opened as HDF5", file->path);
    return format        ? check_format(file, format, version, foreign)
           : version > 0 ? check_any_format(file, version)
                         : HAPT_OK;
}

enum hapt_status hapt_h5_open_unguarded(const char *path, const char *format, int version, bool foreign,
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
        if (errno != EACCES && hapt_h5_is_system_error(errno)) return hapt_h5_lack(path, errno);
        return refuse_kind(errno == EACCES ? HAPT_H5_FAULT_SYSTEM : HAPT_H5_FAULT_MISSING, "check the path",
                           "cannot open %s: %s", path, strerror(errno));
    }
    if (!S_ISREG(about.st_mode)) return refuse_kind(HAPT_H5_FAULT_MISSING, "give a file", "%s is not a file", path);
    if (access(path, R_OK))
        return refuse_kind(HAPT_H5_FAULT_SYSTEM, "check permissions", "cannot open %s: %s", path, strerror(errno));
    const enum hapt_status status = hapt_guard_check(path, &about);
    if (status != HAPT_OK) {
        hapt_h5_set_fault(status == HAPT_ERR_INPUT ? HAPT_H5_FAULT_DAMAGED : HAPT_H5_FAULT_SYSTEM);
        return status;
    }
    return hapt_h5_open_unguarded(path, format, version, foreign, result);
}

void hapt_h5_close(struct hapt_h5 *file)
{
    H5_HOLD_LOCK;
    if (!file) return;
    if (file->id >= 0) H5Fclose(file->id);
    if (file->descriptor >= 0) close(file->descriptor);
    if (file->writing && file->aside[0]) unlink(file->aside);
    free(file->aside);
    free(file->path);
    free(file);
}

const char *hapt_h5_path(const struct hapt_h5 *file)
{
    return file->path;
}

/* The kind of a link's target. A question that got no answer is kept: nothing more is read of the file. */
enum leads { NOWHERE, INSIDE, OUTSIDE };

static enum leads no_answer(struct hapt_h5 *file)
{
    const int error = hapt_h5_system_error(file);
    if (error && !file->writing) file->error = error;
    return NOWHERE;
}

static enum leads follow_link(struct hapt_h5 *file, const char *path)
{
    H5L_info_t about;
    const htri_t exists = H5Lexists(file->id, path, H5P_DEFAULT);
    if (exists == 0) return NOWHERE;
    if (exists < 0 || H5Lget_info(file->id, path, &about, H5P_DEFAULT) < 0) return no_answer(file);
    return about.type >= H5L_TYPE_UD_MIN ? OUTSIDE : INSIDE;
}

static enum leads follow(struct hapt_h5 *file, const char *name)
{
    char prefix[1024];
    if (!strcmp(name, "/")) return INSIDE;
    if (snprintf(prefix, sizeof prefix, "%s", name) >= (int)sizeof prefix) return NOWHERE;
    for (char *slash = strchr(prefix + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        const enum leads leads = follow_link(file, prefix);
        *slash = '/';
        if (leads != INSIDE) return leads;
    }
    const enum leads leads = follow_link(file, prefix);
    if (leads != INSIDE) return leads;
    const htri_t there = H5Oexists_by_name(file->id, prefix, H5P_DEFAULT);
    return there > 0 ? INSIDE : there < 0 ? no_answer(file) : NOWHERE;
}

bool hapt_h5_exists(struct hapt_h5 *file, const char *name)
{
    H5_HOLD_LOCK;
    return follow(file, name) != NOWHERE;
}

enum hapt_status hapt_h5_check_inside(struct hapt_h5 *file, const char *name)
{
    if (file->writing || follow(file, name) != OUTSIDE) return HAPT_OK;
    return hapt_h5_refuse(file, "copy the data into the file (h5repack, h5copy)",
                          "%s of %s lies behind a link to another file, which is not followed", name, file->path);
}

bool hapt_h5_is_outside(hid_t dataset)
{
    const hid_t made = H5Dget_create_plist(dataset);
    const bool outside = made < 0 || H5Pget_layout(made) == H5D_VIRTUAL || H5Pget_external_count(made) > 0;
    if (made >= 0) H5Pclose(made);
    return outside;
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
        status = hapt_h5_refuse(file, H5_HINT, "group %s of %s has too many members", group, file->path);
    else if (!(listing.name = hapt_arena_alloc(arena, (size_t)info.nlinks + 1, sizeof *listing.name)))
        status = hapt_h5_lack(file->path, ENOMEM);
    else if (H5Literate(id, H5_INDEX_NAME, H5_ITER_INC, NULL, collect, &listing) < 0)
        status = listing.memory ? hapt_h5_lack(file->path, ENOMEM) : hapt_h5_fail(file, "group", group);
    H5Gclose(id);
    *count = listing.count;
    *names = listing.name;
    return status;
}
