/* HDF5 behind hapt/h5.h: files are opened and closed, sizes bounded, errors translated here. Tables: h5_data.c. */
#include "h5_private.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

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

static pthread_mutex_t library = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

struct hapt_h5_held hapt_h5_lock(void)
{
    pthread_mutex_lock(&library);
    return (struct hapt_h5_held){0};
}

void hapt_h5_unlock(struct hapt_h5_held *held)
{
    (void)held;
    pthread_mutex_unlock(&library);
}

/* HDF5 prints its own error stack unless told not to. */
static void silence(void)
{
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
}

enum hapt_status hapt_h5_fail(struct hapt_h5 *file, const char *what, const char *name)
{
    if (file->writing)
        return hapt_fail(HAPT_ERR_IO, "check free space and permissions", "cannot write %s%s%s to %s%s%s", what, *name ? " " : "",
                         name, file->path, file->error ? ": " : "", file->error ? strerror(file->error) : "");
    return hapt_fail(HAPT_ERR_INPUT, "the file is damaged or was made by something else", "cannot read %s%s%s of %s", what,
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
    if (file && (file->path = malloc(bytes)) && (file->aside = malloc(bytes + 32))) {
        memcpy(file->path, path, bytes);
        snprintf(file->aside, bytes + 32, "%s.%ld.tmp", path, (long)getpid());
        file->id = -1;
        return file;
    }
    if (file) free(file->path);
    free(file);
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
    silence();
    HAPT_TRY(check_replaceable(path));
    HAPT_TRY(make_folders(path));
    struct hapt_h5 *file = allocate(path);
    if (!file) return HAPT_ERR_MEMORY;
    file->writing = true;
    const hid_t access = H5Pcreate(H5P_FILE_ACCESS);
    H5Pset_libver_bounds(access, H5F_LIBVER_LATEST, H5F_LIBVER_LATEST);
    H5Pset_fclose_degree(access, H5F_CLOSE_STRONG); /* also what a failed write left open */
    hapt_h5_use_disk(access, &file->error);
    file->id = H5Fcreate(file->aside, H5F_ACC_TRUNC, H5P_DEFAULT, access);
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
    const int descriptor = open(file->aside, O_RDWR);
    const bool done = descriptor >= 0 && fsync(descriptor) == 0;
    if (!done) file->error = errno;
    if (descriptor >= 0) close(descriptor);
    if (done && rename(file->aside, file->path) == 0) return true;
    if (done) file->error = errno;
    return false;
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

/* The format and version attributes against what the caller knows. */
static enum hapt_status check_format(struct hapt_h5 *file, const char *format, int version, bool foreign)
{
    if (!hapt_h5_has_attribute(file, "/", "format")) {
        if (foreign) return HAPT_OK;
        return hapt_fail(HAPT_ERR_INPUT, "was it made by hapt?", "%s is not a %s file: it has no format attribute", file->path,
                         format);
    }
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const char *found = NULL;
    enum hapt_status status = hapt_h5_read_attribute_text(file, "/", "format", &arena, &found);
    if (status == HAPT_OK && strcmp(found, format))
        status = hapt_fail(HAPT_ERR_INPUT, "give the file that this option expects", "%s is a %.40s file, not a %s file",
                           file->path, found, format);
    hapt_arena_release(&arena);
    int64_t number = 0;
    if (status == HAPT_OK && hapt_h5_has_attribute(file, "/", "version"))
        status = hapt_h5_read_attribute_int(file, "/", "version", &number);
    if (status == HAPT_OK && number > version)
        status = hapt_fail(HAPT_ERR_INPUT, "use a newer hapt", "%s has version %lld, this hapt reads up to %d", file->path,
                           (long long)number, version);
    return status;
}

enum hapt_status hapt_h5_open_unguarded(const char *path, const char *format, int version, bool foreign, struct hapt_h5 **result)
{
    H5_HOLD_LOCK;
    silence();
    struct hapt_h5 *file = allocate(path);
    if (!file) return HAPT_ERR_MEMORY;
    file->id = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT);
    enum hapt_status status = HAPT_OK;
    if (file->id < 0)
        status = hapt_fail(HAPT_ERR_INPUT, "it is truncated, damaged or not HDF5", "%s cannot be opened as HDF5", path);
    else if (format)
        status = check_format(file, format, version, foreign);
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
    if (stat(path, &about))
        return hapt_fail(HAPT_ERR_INPUT, "check the path", "cannot open %s: %s", path, strerror(errno));
    if (!S_ISREG(about.st_mode)) return hapt_fail(HAPT_ERR_INPUT, "give a file", "%s is not a file", path);
    if (access(path, R_OK))
        return hapt_fail(HAPT_ERR_INPUT, "check permissions", "cannot open %s: %s", path, strerror(errno));
    HAPT_TRY(hapt_guard_check(path, &about));
    return hapt_h5_open_unguarded(path, format, version, foreign, result);
}

void hapt_h5_close(struct hapt_h5 *file)
{
    H5_HOLD_LOCK;
    if (!file) return;
    if (file->id >= 0) {
        H5Fclose(file->id);
        if (file->writing) unlink(file->aside);
    }
    if (file->writing) unlink(file->aside);
    free(file->aside);
    free(file->path);
    free(file);
}

const char *hapt_h5_path(const struct hapt_h5 *file)
{
    return file->path;
}

/* True when every link on the way to `name` exists. */
bool hapt_h5_exists(struct hapt_h5 *file, const char *name)
{
    H5_HOLD_LOCK;
    char prefix[1024];
    if (!strcmp(name, "/")) return true;
    if (snprintf(prefix, sizeof prefix, "%s", name) >= (int)sizeof prefix) return false;
    for (char *slash = strchr(prefix + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        const bool there = H5Lexists(file->id, prefix, H5P_DEFAULT) > 0;
        *slash = '/';
        if (!there) return false;
    }
    return H5Lexists(file->id, prefix, H5P_DEFAULT) > 0 && H5Oexists_by_name(file->id, prefix, H5P_DEFAULT) > 0;
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
    const hid_t id = H5Gopen2(file->id, group, H5P_DEFAULT);
    H5G_info_t info;
    if (id < 0 || H5Gget_info(id, &info) < 0) {
        if (id >= 0) H5Gclose(id);
        return hapt_h5_fail(file, "group", group);
    }
    enum hapt_status status = HAPT_OK;
    struct listing listing = {.arena = arena, .limit = limit};
    if (info.nlinks > (hsize_t)limit)
        status = hapt_fail(HAPT_ERR_INPUT, H5_HINT, "group %s of %s has too many members", group, file->path);
    else if (!(listing.name = hapt_arena_alloc(arena, (size_t)info.nlinks + 1, sizeof *listing.name)))
        status = HAPT_ERR_MEMORY;
    else if (H5Literate(id, H5_INDEX_NAME, H5_ITER_INC, NULL, collect, &listing) < 0)
        status = listing.memory ? HAPT_ERR_MEMORY : hapt_h5_fail(file, "group", group);
    H5Gclose(id);
    *count = listing.count;
    *names = listing.name;
    return status;
}
