#include "hapt/atomic_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

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
