#include "hapt/aside.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

enum { MOST_LEFTOVERS = 100 };

int hapt_aside_open(const char *path, char *aside, size_t size)
{
    int descriptor = -1;
    for (int i = 0; i < MOST_LEFTOVERS && descriptor < 0; i++) {
        if (i == 0)
            snprintf(aside, size, "%s.%ld.tmp", path, (long)getpid());
        else
            snprintf(aside, size, "%s.%ld-%d.tmp", path, (long)getpid(), i);
        descriptor = open(aside, O_RDWR | O_CREAT | O_EXCL | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666);
        if (descriptor < 0 && errno != EEXIST) break;
    }
    if (descriptor < 0) aside[0] = '\0';
    return descriptor;
}

int hapt_aside_commit(int descriptor, const char *aside, const char *path)
{
    int error = fsync(descriptor) == 0 ? 0 : errno;
    if (close(descriptor) != 0 && error == 0) error = errno;
    if (error == 0 && rename(aside, path) != 0) error = errno;
    return error;
}
