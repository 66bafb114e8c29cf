/*
 * The crossings of a profile file; optional. `hapt help profile` describes the tables:
 *
 *     crossing_bytes [K], crossing_start [K + 1], crossing_layer [N], crossing_writes [N]
 */
#include <stdio.h>

#include "profile_private.h"

#define PATH_MAX_CHARS 512

static const char *join(char path[PATH_MAX_CHARS], const char *group, const char *name)
{
    snprintf(path, PATH_MAX_CHARS, "%s/%s", group, name);
    return path;
}

enum hapt_status profile_write_crossings(struct hapt_h5 *file, const char *group,
                                         const struct hapt_crossings *crossings)
{
    const int64_t count = crossings->count, starts = count + 1, layers = crossings->start[count];
    struct hapt_arena scratch;
    char path[PATH_MAX_CHARS];
    hapt_arena_init(&scratch);
    int *writes = hapt_arena_alloc(&scratch, (size_t)layers, sizeof *writes);
    enum hapt_status status = writes ? HAPT_OK : HAPT_ERR_MEMORY;
    for (int64_t i = 0; writes && i < layers; i++) writes[i] = crossings->writes[i];
    if (status == HAPT_OK)
        status =
            hapt_h5_write(file, join(path, group, "crossing_bytes"), HAPT_H5_F64, 1, &count, crossings->bytes, "byte");
    if (status == HAPT_OK)
        status =
            hapt_h5_write(file, join(path, group, "crossing_start"), HAPT_H5_I32, 1, &starts, crossings->start, "");
    if (status == HAPT_OK)
        status =
            hapt_h5_write(file, join(path, group, "crossing_layer"), HAPT_H5_I32, 1, &layers, crossings->layer, "");
    if (status == HAPT_OK)
        status = hapt_h5_write(file, join(path, group, "crossing_writes"), HAPT_H5_I32, 1, &layers, writes, "");
    hapt_arena_release(&scratch);
    return status;
}

static enum hapt_status damaged(struct hapt_h5 *file, const char *what)
{
    return hapt_fail(HAPT_ERR_INPUT, "`hapt help profile` describes the tables", "%s: %s", hapt_h5_path(file), what);
}

enum hapt_status profile_read_crossings(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                        const struct hapt_crossings **crossings)
{
    char path[PATH_MAX_CHARS];
    struct hapt_crossings *read;
    int64_t count = -1, starts, layers = -1;
    void *bytes, *start, *layer, *writes;
    if (!hapt_h5_exists(file, join(path, group, "crossing_bytes"))) return HAPT_OK;
    HAPT_NEW(read, arena, 1);
    HAPT_TRY(hapt_h5_read(file, path, HAPT_H5_F64, 1, &count, HAPT_PROFILE_MAX_CROSSINGS, arena, &bytes));
    starts = count + 1;
    HAPT_TRY(hapt_h5_read(file, join(path, group, "crossing_start"), HAPT_H5_I32, 1, &starts,
                          HAPT_PROFILE_MAX_CROSSINGS + 1, arena, &start));
    HAPT_TRY(hapt_h5_read(file, join(path, group, "crossing_layer"), HAPT_H5_I32, 1, &layers,
                          HAPT_PROFILE_MAX_CROSSINGS, arena, &layer));
    HAPT_TRY(hapt_h5_read(file, join(path, group, "crossing_writes"), HAPT_H5_I32, 1, &layers,
                          HAPT_PROFILE_MAX_CROSSINGS, arena, &writes));
    *read = (struct hapt_crossings){.count = (int)count, .bytes = bytes, .start = start, .layer = layer};
    HAPT_NEW(read->writes, arena, layers);
    for (int64_t i = 0; i < layers; i++) read->writes[i] = ((const int *)writes)[i] != 0;
    for (int64_t k = 0; k < starts; k++)
        if (read->start[k] < 0 || read->start[k] > layers || (k > 0 && read->start[k] < read->start[k - 1]))
            return damaged(file, "crossing_start does not ascend up to the length of crossing_layer");
    *crossings = read;
    return HAPT_OK;
}
