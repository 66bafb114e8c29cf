/* Reads a whole input of `hapt data` into memory. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "data_files.h"
#include "hapt/progress.h"

enum { PIECE_BYTES = 1 << 22 }; /* read per unit of progress */

enum hapt_status hapt_data_read_file(const char *path, struct hapt_arena *arena, unsigned char **bytes, size_t *size)
{
    struct stat about;
    FILE *stream = fopen(path, "rb");
    if (!stream) return hapt_fail(HAPT_ERR_INPUT, "check the path", "cannot open %s: %s", path, strerror(errno));
    if (fstat(fileno(stream), &about) != 0 || !S_ISREG(about.st_mode)) {
        fclose(stream);
        return hapt_fail(HAPT_ERR_INPUT, "give a file", "%s is not a file", path);
    }
    *size = (size_t)about.st_size;
    *bytes = hapt_arena_alloc(arena, *size, 1);
    size_t done = 0;
    hapt_progress_expect((long)((*size + PIECE_BYTES - 1) / PIECE_BYTES));
    for (size_t piece = 1; *bytes && done < *size && piece > 0; hapt_progress_advance(1)) {
        piece = fread(*bytes + done, 1, *size - done < PIECE_BYTES ? *size - done : PIECE_BYTES, stream);
        done += piece;
    }
    const bool complete = *bytes && done == *size;
    fclose(stream);
    if (!*bytes) return HAPT_ERR_MEMORY;
    if (!complete) return hapt_fail(HAPT_ERR_INPUT, NULL, "cannot read all of %s", path);
    return HAPT_OK;
}
