/* Files and folders of files: read, written, copied, linked, removed. */
#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fuzz.h"

enum { PATH_CHARS = 1200 };

size_t fuzz_load(const char *path, unsigned char *data, size_t room)
{
    FILE *file = fopen(path, "rb");
    const size_t size = file ? fread(data, 1, room, file) : 0;
    if (file) fclose(file);
    return size;
}

bool fuzz_store(const char *path, const unsigned char *data, size_t size)
{
    FILE *file = fopen(path, "wb");
    if (!file) return false;
    const bool written = fwrite(data, 1, size, file) == size;
    return fclose(file) == 0 && written;
}

bool fuzz_is_folder(const char *path)
{
    struct stat about;
    return stat(path, &about) == 0 && S_ISDIR(about.st_mode);
}

static bool copy_file(const char *from, const char *to)
{
    static unsigned char data[2 * FUZZ_MOST_BYTES];
    return fuzz_store(to, data, fuzz_load(from, data, sizeof data));
}

static bool link_file(const char *from, const char *to)
{
    return link(from, to) == 0 || copy_file(from, to);
}

/* Calls `take` for each file of `from`, with the same name in `to`. */
static bool each_file(const char *from, const char *to, bool (*take)(const char *from, const char *to))
{
    bool done = true;
    mkdir(to, 0777);
    DIR *listing = opendir(from);
    for (struct dirent *entry; listing && (entry = readdir(listing));) {
        char source[PATH_CHARS], target[PATH_CHARS];
        if (entry->d_name[0] == '.') continue;
        snprintf(source, sizeof source, "%.900s/%s", from, entry->d_name);
        snprintf(target, sizeof target, "%.900s/%s", to, entry->d_name);
        done = take(source, target) && done;
    }
    if (!listing) return false;
    closedir(listing);
    return done;
}

bool fuzz_copy(const char *from, const char *to)
{
    return fuzz_is_folder(from) ? each_file(from, to, copy_file) : copy_file(from, to);
}

bool fuzz_link(const char *from, const char *to)
{
    return each_file(from, to, link_file);
}

void fuzz_remove(const char *path)
{
    DIR *listing = opendir(path);
    for (struct dirent *entry; listing && (entry = readdir(listing));) {
        char inner[PATH_CHARS];
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        snprintf(inner, sizeof inner, "%.900s/%s", path, entry->d_name);
        fuzz_remove(inner);
    }
    if (listing) closedir(listing);
    remove(path);
}
