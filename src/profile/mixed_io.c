/* Groups of mixed stages in profile files: /mixed_0, /mixed_1, ... (`hapt help profile`). */
#include <stdio.h>
#include <string.h>

#include "profile_private.h"

enum { PATH_CHARS = 512 };

#define HINT "`hapt help profile` describes the tables"

static const char *folder_of(char folder[PATH_CHARS - 64], const char *group, int k)
{
    snprintf(folder, PATH_CHARS - 64, "%s/mixed_%d", group, k);
    return folder;
}

static const char *join(char path[PATH_CHARS], const char *folder, const char *name)
{
    snprintf(path, PATH_CHARS, "%s/%s", folder, name);
    return path;
}

static enum hapt_status write_one(struct hapt_h5 *file, const char *group, const struct hapt_profile *profile, int k)
{
    const struct hapt_profile_mixed *mixed = &profile->mixed[k];
    const int64_t L = profile->layer_count, square[2] = {L, L}, cube[3] = {mixed->memory_rows, L, L};
    char folder[PATH_CHARS - 64], path[PATH_CHARS];
    folder_of(folder, group, k);
    const struct {
        const char *name, *units;
        const double *table;
        bool rows;
    } tables[] = {{"stage_time", "s", mixed->stage_time, false},
                  {"stage_forward_time", "s", mixed->stage_forward_time, false},
                  {"step_time", "s", mixed->step_time, false},
                  {"parameter_bytes", "byte", mixed->parameter_bytes, mixed->memory_rows > 1},
                  {"activation_bytes", "byte", mixed->activation_bytes, mixed->memory_rows > 1}};
    for (int t = 0; t < 5; t++)
        if (tables[t].table)
            HAPT_TRY(hapt_h5_write(file, join(path, folder, tables[t].name), HAPT_H5_F64, tables[t].rows ? 3 : 2,
                                   tables[t].rows ? cube : square, tables[t].table, tables[t].units));
    HAPT_TRY(hapt_h5_write_attribute_ints(file, folder, "clusters", mixed->count, mixed->cluster));
    HAPT_TRY(hapt_h5_write_attribute_ints(file, folder, "counts", mixed->count, mixed->devices));
    if (mixed->program > 0) HAPT_TRY(hapt_h5_write_attribute_int(file, folder, "program", mixed->program));
    int devices = 0;
    for (int i = 0; i < mixed->count; i++) devices += mixed->devices[i];
    return mixed->ratio ? hapt_h5_write_attribute_reals(file, folder, "ratios", devices, mixed->ratio, "") : HAPT_OK;
}

enum hapt_status hapt_profile_write_mixed(struct hapt_h5 *file, const char *group, const struct hapt_profile *profile)
{
    for (int k = 0; k < profile->mixed_count; k++) HAPT_TRY(write_one(file, group, profile, k));
    return HAPT_OK;
}

enum hapt_status hapt_profile_count_mixed(struct hapt_h5 *file, const char *group, int L, int *count, double *bytes)
{
    char folder[PATH_CHARS - 64], path[PATH_CHARS];
    *count = 0;
    *bytes = 0;
    for (int k = 0; k <= HAPT_PROFILE_MAX_MIXED; k++) {
        int dims;
        int64_t shape[HAPT_H5_MAX_DIMS] = {0};
        if (!hapt_h5_exists(file, folder_of(folder, group, k))) continue;
        if (k > *count || k == HAPT_PROFILE_MAX_MIXED)
            return hapt_fail(HAPT_ERR_INPUT, HINT, "%s has %s, but not %d groups before it", hapt_h5_path(file), folder,
                             k < HAPT_PROFILE_MAX_MIXED ? k : HAPT_PROFILE_MAX_MIXED);
        ++*count;
        HAPT_TRY(hapt_h5_shape(file, join(path, folder, "parameter_bytes"), &dims, shape));
        /* larger counts are refused when they are read */
        const double rows = dims != 3 ? 1 : shape[0] < HAPT_MAX_SUBCLUSTERS ? (double)shape[0] : HAPT_MAX_SUBCLUSTERS;
        *bytes += (3 + 2 * rows) * (double)L * L * sizeof(double);
    }
    return HAPT_OK;
}

/* Reads [L][L] or [rows][L][L], at most `most` rows; *rows: their number. */
static enum hapt_status read_table(struct hapt_h5 *file, const char *folder, const char *name, int L, int most,
                                   struct hapt_arena *arena, int *rows, double **table)
{
    char path[PATH_CHARS];
    int dims;
    int64_t extent[HAPT_H5_MAX_DIMS] = {0}, square[2] = {L, L}, cube[3] = {-1, L, L};
    void *data;
    HAPT_TRY(hapt_h5_shape(file, join(path, folder, name), &dims, extent));
    HAPT_TRY(hapt_h5_read(file, path, HAPT_H5_F64, dims == 3 ? 3 : 2, dims == 3 ? cube : square, HAPT_PROFILE_MAX_CELLS,
                          arena, &data));
    *rows = dims == 3 ? (int)cube[0] : 1;
    if (*rows != 1 && *rows != most)
        return hapt_fail(HAPT_ERR_INPUT, HINT, "%s: %s holds %d tables, not one%s", hapt_h5_path(file), path, *rows,
                         most > 1 ? " or one for each of its subclusters" : "");
    *table = data;
    return HAPT_OK;
}

/* Reads ratios of each device; ratios of each subcluster are spread evenly over its devices. */
static enum hapt_status read_ratios(struct hapt_h5 *file, const char *folder, struct hapt_arena *arena,
                                    struct hapt_profile_mixed *mixed)
{
    int devices = 0, count;
    double *given;
    for (int i = 0; i < mixed->count; i++) devices += mixed->devices[i];
    HAPT_NEW(given, arena, devices);
    HAPT_TRY(hapt_h5_read_attribute_reals(file, folder, "ratios", devices, &count, given));
    mixed->ratio = given;
    if (count == devices) return HAPT_OK;
    if (count != mixed->count)
        return hapt_fail(HAPT_ERR_INPUT, HINT, "%s: %s has %d ratios for %d subclusters with %d devices",
                         hapt_h5_path(file), folder, count, mixed->count, devices);
    HAPT_NEW(mixed->ratio, arena, devices);
    for (int i = 0, device = 0; i < mixed->count; i++)
        for (int d = 0; d < mixed->devices[i]; d++) mixed->ratio[device++] = given[i] / mixed->devices[i];
    return HAPT_OK;
}

static enum hapt_status read_devices(struct hapt_h5 *file, const char *folder, const struct hapt_profile *profile,
                                     struct hapt_arena *arena, struct hapt_profile_mixed *mixed)
{
    int counts;
    HAPT_NEW(mixed->cluster, arena, HAPT_MAX_SUBCLUSTERS);
    HAPT_NEW(mixed->devices, arena, HAPT_MAX_SUBCLUSTERS);
    HAPT_TRY(
        hapt_h5_read_attribute_ints(file, folder, "clusters", HAPT_MAX_SUBCLUSTERS, &mixed->count, mixed->cluster));
    HAPT_TRY(hapt_h5_read_attribute_ints(file, folder, "counts", HAPT_MAX_SUBCLUSTERS, &counts, mixed->devices));
    if (counts != mixed->count || mixed->count < 2 || mixed->count > profile->cluster_count)
        return hapt_fail(HAPT_ERR_INPUT, HINT,
                         "%s: %s has %d clusters and %d counts; both must be equal, and at least 2", hapt_h5_path(file),
                         folder, mixed->count, counts);
    for (int i = 0; i < counts; i++)
        if (mixed->devices[i] < 1 || mixed->devices[i] > HAPT_PROFILE_MAX_DEVICES)
            return hapt_fail(HAPT_ERR_INPUT, HINT, "%s: %s takes %d devices of a subcluster; 1 to 65536 are possible",
                             hapt_h5_path(file), folder, mixed->devices[i]);
    return HAPT_OK;
}

/* Absent: data-parallel. Whether the program exists is checked after all have been read. */
static enum hapt_status read_program(struct hapt_h5 *file, const char *folder, struct hapt_profile_mixed *mixed)
{
    int64_t program;
    if (!hapt_h5_has_attribute(file, folder, "program")) return HAPT_OK;
    HAPT_TRY(hapt_h5_read_attribute_int(file, folder, "program", &program));
    if (program < 0 || program > HAPT_MAX_LAYOUTS)
        return hapt_fail(HAPT_ERR_INPUT, HINT, "%s: %s runs program %lld, which is out of range", hapt_h5_path(file),
                         folder, (long long)program);
    mixed->program = (int)program;
    return HAPT_OK;
}

static enum hapt_status read_one(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                 const struct hapt_profile *profile, int k)
{
    struct hapt_profile_mixed *mixed = &profile->mixed[k];
    const int L = profile->layer_count;
    char folder[PATH_CHARS - 64], path[PATH_CHARS];
    int rows;
    folder_of(folder, group, k);
    HAPT_TRY(read_devices(file, folder, profile, arena, mixed));
    HAPT_TRY(read_program(file, folder, mixed));
    if (hapt_h5_has_attribute(file, folder, "ratios")) HAPT_TRY(read_ratios(file, folder, arena, mixed));
    HAPT_TRY(read_table(file, folder, "stage_time", L, 1, arena, &rows, &mixed->stage_time));
    HAPT_TRY(read_table(file, folder, "stage_forward_time", L, 1, arena, &rows, &mixed->stage_forward_time));
    if (hapt_h5_exists(file, join(path, folder, "step_time")))
        HAPT_TRY(read_table(file, folder, "step_time", L, 1, arena, &rows, &mixed->step_time));
    HAPT_TRY(read_table(file, folder, "parameter_bytes", L, mixed->count, arena, &mixed->memory_rows,
                        &mixed->parameter_bytes));
    HAPT_TRY(read_table(file, folder, "activation_bytes", L, mixed->count, arena, &rows, &mixed->activation_bytes));
    if (rows != mixed->memory_rows)
        return hapt_fail(HAPT_ERR_INPUT, HINT, "%s: %s holds %d tables of parameter_bytes but %d of activation_bytes",
                         hapt_h5_path(file), folder, mixed->memory_rows, rows);
    return HAPT_OK;
}

enum hapt_status hapt_profile_read_mixed(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                         struct hapt_profile *profile)
{
    HAPT_NEW(profile->mixed, arena, profile->mixed_count);
    for (int k = 0; k < profile->mixed_count; k++) HAPT_TRY(read_one(file, group, arena, profile, k));
    return HAPT_OK;
}
