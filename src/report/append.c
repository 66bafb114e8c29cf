#include "append.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

bool append_open(struct append *file, const char *path)
{
    struct stat about;
    file->descriptor = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
    if (file->descriptor < 0) return false;
    const bool known = fstat(file->descriptor, &about) == 0;
    if (!known || !S_ISREG(about.st_mode)) {
        const int error = known ? EINVAL : errno;
        append_close(file);
        errno = error;
        return false;
    }
    file->end = about.st_size;
    return true;
}

bool append_cut(struct append *file, off_t end)
{
    if (end >= file->end) return true;
    if (ftruncate(file->descriptor, end) != 0) return false;
    file->end = end;
    return true;
}

bool append_write(struct append *file, const void *record, size_t bytes)
{
    ssize_t put;
    do put = pwrite(file->descriptor, record, bytes, file->end);
    while (put < 0 && errno == EINTR);
    if (put == (ssize_t)bytes) {
        file->end += put;
        return true;
    }
    const int error = put < 0 ? errno : ENOSPC;
    if (put > 0 && ftruncate(file->descriptor, file->end) != 0) append_close(file);
    errno = error;
    return false;
}

void append_close(struct append *file)
{
    if (file->descriptor >= 0) close(file->descriptor);
    file->descriptor = -1;
}
