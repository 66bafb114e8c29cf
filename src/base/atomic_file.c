#include "hapt/atomic_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "hapt/folder.h"

enum { MAX_LEFTOVERS = 100 };

int hapt_atomic_file_open(const char *path, char *temporary_path, size_t size)
{
    int descriptor = -1;
    for (int i = 0; i < MAX_LEFTOVERS && descriptor < 0; i++) {
        if (i == 0)
            snprintf(temporary_path, size, "%s.%ld.tmp", path, (long)getpid());
        else
            snprintf(temporary_path, size, "%s.%ld-%d.tmp", path, (long)getpid(), i);
        descriptor = open(temporary_path, O_RDWR | O_CREAT | O_EXCL | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666);
        if (descriptor < 0 && errno != EEXIST) break;
    }
    if (descriptor < 0) temporary_path[0] = '\0';
    return descriptor;
}

int hapt_atomic_file_commit(int descriptor, const char *temporary_path, const char *path)
{
    int error = fsync(descriptor) == 0 ? 0 : errno;
    if (close(descriptor) != 0 && error == 0) error = errno;
    if (error == 0 && rename(temporary_path, path) != 0) error = errno;
    return error;
}

enum hapt_status hapt_atomic_file_replace(const char *path, hapt_atomic_file_writer *writer, const void *content)
{
    const size_t size = strlen(path) + HAPT_TEMPORARY_SUFFIX_BYTES;
    char *aside = malloc(size);
    if (!aside) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory to write %s", path);
    const int descriptor = hapt_atomic_file_open(path, aside, size);
    int error = descriptor < 0 ? errno : writer(descriptor, content);
    if (descriptor >= 0 && error != 0) close(descriptor);
    if (error == 0) error = hapt_atomic_file_commit(descriptor, aside, path);
    if (error != 0 && aside[0]) unlink(aside);
    free(aside);
    if (error == 0) return HAPT_OK;
    return hapt_fail(HAPT_ERR_IO, "check the folder, its permissions and free space", "%s cannot be written: %s", path,
                     strerror(error));
}

struct leftovers {
    const char *folder, *name; /* of the file */
};

/* NAME.PID.tmp or NAME.PID-N.tmp */
static bool drop_leftover(void *context, const char *name)
{
    const struct leftovers *of = context;
    char path[4096];
    const size_t length = strlen(of->name), total = strlen(name);
    if (total < length + 6 || strncmp(name, of->name, length) != 0 || name[length] != '.') return true;
    if (strcmp(name + total - 4, ".tmp") != 0) return true;
    if (strspn(name + length + 1, "0123456789-") != total - length - 5) return true;
    if (snprintf(path, sizeof path, "%s/%s", of->folder, name) < (int)sizeof path) unlink(path);
    return true;
}

void hapt_atomic_file_drop_leftovers(const char *path)
{
    char folder[4096]; /* "/." because the user may have made the folder itself a link */
    const char *slash = strrchr(path, '/');
    if (snprintf(folder, sizeof folder, "%.*s/.", slash ? (int)(slash - path) : 1, slash ? path : ".") >=
        (int)sizeof folder)
        return;
    struct leftovers of = {folder, slash ? slash + 1 : path};
    struct hapt_failure failure = {0}; /* leftovers do no harm */
    struct hapt_failure *before = hapt_fail_divert(&failure);
    hapt_folder_list(folder, drop_leftover, &of);
    hapt_fail_divert(before);
}
