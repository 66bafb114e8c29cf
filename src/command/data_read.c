/* The input files of `hapt data`. */
#include <errno.h>
#include <glob.h>
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

enum hapt_status hapt_data_file_size(const char *path, int64_t *size)
{
    struct stat about;
    if (stat(path, &about) != 0)
        return hapt_fail(HAPT_ERR_INPUT, "check the path", "cannot open %s: %s", path, strerror(errno));
    if (!S_ISREG(about.st_mode)) return hapt_fail(HAPT_ERR_INPUT, "give a file", "%s is not a file", path);
    *size = (int64_t)about.st_size;
    return HAPT_OK;
}

/* Files that match a pattern. Release with globfree. */
static enum hapt_status match(const char *word, glob_t *found)
{
    const int result = glob(word, GLOB_ERR, NULL, found);
    if (result == 0) return HAPT_OK;
    if (result == GLOB_NOSPACE) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for the names of files");
    return result == GLOB_NOMATCH
               ? hapt_fail(HAPT_ERR_INPUT, "check the pattern", "no file matches %s", word)
               : hapt_fail(HAPT_ERR_INPUT, "check the pattern", "cannot read the folders of %s", word);
}

enum hapt_status hapt_data_find_inputs(const struct hapt_config *config, struct hapt_arena *arena,
                                       struct hapt_data_inputs *inputs)
{
    const int words = hapt_config_word_count(config);
    int capacity = words;
    *inputs = (struct hapt_data_inputs){.count = 0};
    HAPT_NEW(inputs->path, arena, capacity);
    for (int w = 0; w < words; w++) {
        const char *word = hapt_config_word(config, w);
        struct stat about;
        glob_t found = {.gl_pathc = 0};
        const bool pattern = strpbrk(word, "*?[") && stat(word, &about) != 0;
        if (pattern) HAPT_TRY(match(word, &found));
        const int more = pattern ? (int)found.gl_pathc : 1;
        const char **path = hapt_arena_alloc(arena, (size_t)(capacity + more), sizeof *path);
        for (int i = 0; path && i < inputs->count; i++) path[i] = inputs->path[i];
        for (int i = 0; path && i < more; i++)
            path[inputs->count + i] = pattern ? hapt_arena_strdup(arena, found.gl_pathv[i]) : word;
        if (pattern) globfree(&found);
        if (!path) return HAPT_ERR_MEMORY;
        for (int i = 0; i < more; i++)
            if (!path[inputs->count + i]) return HAPT_ERR_MEMORY;
        capacity += more;
        inputs->path = path;
        inputs->count += more;
    }
    return HAPT_OK;
}
