/* Folder operations that follow no links: include/hapt/folder.h. Entries are reached from an open folder (openat,
 * unlinkat), not by path. */
#include "hapt/folder.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OPEN_FOLDER = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, MAX_TRIES = 10000 };

enum hapt_status hapt_folder_sync(const char *path)
{
    const int descriptor = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const bool good = descriptor >= 0 && fsync(descriptor) == 0;
    const int error = errno;
    if (descriptor >= 0) close(descriptor);
    return good ? HAPT_OK
                : hapt_fail(HAPT_ERR_IO, "check free space on the disk", "cannot sync folder %s: %s", path,
                            strerror(error));
}

static enum hapt_status make_parts(char *partial)
{
    for (char *slash = strchr(partial + 1, '/'), *above = NULL;; above = slash, slash = strchr(slash + 1, '/')) {
        if (slash) *slash = '\0';
        const bool made = mkdir(partial, 0777) == 0;
        struct stat about;
        if (!made && (errno != EEXIST || stat(partial, &about) != 0 || !S_ISDIR(about.st_mode)))
            return hapt_fail(HAPT_ERR_IO, "choose another --output, or check its permissions",
                             "cannot create folder %s: %s", partial,
                             errno == EEXIST ? "a file has that name" : strerror(errno));
        if (made) {
            if (above) *above = '\0';
            HAPT_TRY(hapt_folder_sync(above == partial ? "/" : above ? partial : partial[0] == '/' ? "/" : "."));
            if (above) *above = '/';
        }
        if (!slash) return HAPT_OK;
        *slash = '/';
        while (slash[1] == '/') slash++;
        if (!slash[1]) return HAPT_OK;
    }
}

enum hapt_status hapt_folder_make(const char *path)
{
    char *partial = strdup(path);
    if (!partial) return hapt_fail(HAPT_ERR_MEMORY, NULL, "host memory exhausted");
    const enum hapt_status status = make_parts(partial);
    free(partial);
    return status;
}

static bool is_dots(const char *name)
{
    return strcmp(name, ".") == 0 || strcmp(name, "..") == 0;
}

/* Only errno distinguishes a failure of readdir from the end of the folder. */
static bool next_entry(DIR *listing, struct dirent **entry)
{
    do {
        errno = 0;
        *entry = readdir(listing);
    } while (*entry && is_dots((*entry)->d_name));
    return *entry != NULL;
}

enum hapt_status hapt_folder_list(const char *path, hapt_folder_visitor *visit, void *context)
{
    struct dirent *entry;
    const int descriptor = open(path, OPEN_FOLDER);
    if (descriptor < 0 && errno == ENOENT) return HAPT_OK;
    DIR *listing = descriptor < 0 ? NULL : fdopendir(descriptor);
    if (!listing) {
        const int error = errno;
        if (descriptor >= 0) close(descriptor);
        return hapt_fail(error == ENOMEM ? HAPT_ERR_MEMORY : HAPT_ERR_IO, "check its type and permissions",
                         "cannot read folder %s: %s", path,
                         error == ELOOP || error == ENOTDIR ? "it is a link or a file, not a folder" : strerror(error));
    }
    while (next_entry(listing, &entry) && visit(context, entry->d_name)) {
    }
    const int error = entry ? 0 : errno;
    closedir(listing);
    return error ? hapt_fail(HAPT_ERR_IO, "check the disk", "cannot read folder %s: %s", path, strerror(error))
                 : HAPT_OK;
}

bool hapt_folder_is(const char *path)
{
    struct stat about;
    return lstat(path, &about) == 0 && S_ISDIR(about.st_mode);
}

static void remove_files(int folder, bool (*ours)(const char *name))
{
    struct dirent *entry;
    const int copy = dup(folder);
    DIR *listing = copy < 0 ? NULL : fdopendir(copy);
    if (!listing) {
        if (copy >= 0) close(copy);
        return;
    }
    while (next_entry(listing, &entry)) {
        struct stat about;
        if (!ours(entry->d_name) || fstatat(folder, entry->d_name, &about, AT_SYMLINK_NOFOLLOW)) continue;
        if (!S_ISDIR(about.st_mode)) unlinkat(folder, entry->d_name, 0); /* removes a link itself, not its target */
    }
    closedir(listing);
}

bool hapt_folder_remove(const char *parent, const char *name, bool (*ours)(const char *name))
{
    struct stat about;
    const int above = open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (above < 0) return false;
    const bool found = fstatat(above, name, &about, AT_SYMLINK_NOFOLLOW) == 0;
    bool gone = !found && errno == ENOENT;
    if (found && S_ISLNK(about.st_mode)) gone = unlinkat(above, name, 0) == 0;
    const int folder = gone ? -1 : openat(above, name, OPEN_FOLDER);
    if (folder >= 0) {
        remove_files(folder, ours);
        close(folder);
        gone = unlinkat(above, name, AT_REMOVEDIR) == 0;
    }
    close(above);
    return gone;
}

bool hapt_folder_rename_with_suffix(const char *parent, const char *name, const char *why, char *now, size_t size)
{
    bool done = false;
    now[0] = '\0';
    const int above = open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    for (int i = 1; above >= 0 && !done && i < MAX_TRIES; i++) {
        const int length =
            i == 1 ? snprintf(now, size, "%s.%s", name, why) : snprintf(now, size, "%s.%s-%d", name, why, i);
        if (length >= (int)size) break;
        struct stat about;
        if (fstatat(above, now, &about, AT_SYMLINK_NOFOLLOW) == 0) continue;
        /* On a file system without RENAME_NOREPLACE the check above must suffice. */
        done = renameat2(above, name, above, now, RENAME_NOREPLACE) == 0 ||
               (errno == EINVAL && renameat(above, name, above, now) == 0);
        if (!done && errno != EEXIST) break;
    }
    if (above >= 0) close(above);
    if (!done) now[0] = '\0';
    return done;
}

#define TRY ".try-"

static bool drop_try(void *context, const char *name)
{
    char path[4096];
    if (strncmp(name, TRY, strlen(TRY)) == 0 &&
        snprintf(path, sizeof path, "%s/%s", (const char *)context, name) < (int)sizeof path)
        unlink(path);
    return true;
}

void hapt_folder_drop_tries(const char *path)
{
    char copy[4096];
    if (snprintf(copy, sizeof copy, "%s", path) < (int)sizeof copy && hapt_folder_list(path, drop_try, copy) != HAPT_OK)
        hapt_fail_reset();
}

enum hapt_status hapt_folder_try(const char *path)
{
    char name[4096];
    int descriptor = -1, length = 0;
    for (int i = 0; i < MAX_TRIES && descriptor < 0 && (i == 0 || errno == EEXIST); i++) {
        length = snprintf(name, sizeof name, "%s/" TRY "%ld-%d", path, (long)getpid(), i);
        if (length >= (int)sizeof name)
            return hapt_fail(HAPT_ERR_IO, "use a shorter path", "path too long: %.60s...", path);
        descriptor = open(name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    }
    const bool made = descriptor >= 0;
    const bool good = made && write(descriptor, "try\n", 4) == 4 && fsync(descriptor) == 0;
    const int error = errno;
    if (made) {
        close(descriptor);
        unlink(name);
    }
    return good ? HAPT_OK
                : hapt_fail(HAPT_ERR_IO, "choose another --output, or check permissions and free space",
                            "folder %s cannot be written: %s", path, strerror(error));
}
