/* Profile files. The tables and their meaning: DESIGN "Profile", `hapt profile --help`. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "profile_private.h"

#define FORMAT "hapt-profile"
#define VERSION 1
#define PATH_MAX_CHARS 512

static const char *join(char path[PATH_MAX_CHARS], const char *group, const char *name)
{
    snprintf(path, PATH_MAX_CHARS, "%s/%s", group, name);
    return path;
}

static enum hapt_status write_cluster(struct hapt_h5 *file, const char *group, const struct hapt_profile *profile,
                                      int c)
{
    const struct hapt_profile_cluster *cluster = &profile->cluster[c];
    char folder[PATH_MAX_CHARS], path[PATH_MAX_CHARS + 64];
    snprintf(folder, sizeof folder, "%s/cluster_%d", group, c);
    const int64_t L = profile->layer_count, S = cluster->submesh_count;
    const int64_t shape[3] = {S, L, L}, pairs[2] = {S, 2};
    snprintf(path, sizeof path, "%s/submesh", folder);
    HAPT_TRY(hapt_h5_write(file, path, HAPT_H5_I32, 2, pairs, cluster->submesh, ""));
    const struct {
        const char *name, *units;
        const double *table;
    } tables[] = {
        {"stage_time", "s", cluster->stage_time},
        {"stage_forward_time", "s", cluster->stage_forward_time},
        {"parameter_bytes", "byte", cluster->parameter_bytes},
        {"activation_bytes", "byte", cluster->activation_bytes},
        {"step_time", "s", cluster->step_time},
    };
    for (int k = 0; k < 5; k++) {
        if (!tables[k].table) continue;
        snprintf(path, sizeof path, "%s/%s", folder, tables[k].name);
        HAPT_TRY(hapt_h5_write(file, path, HAPT_H5_F64, 3, shape, tables[k].table, tables[k].units));
    }
    HAPT_TRY(hapt_h5_write_attribute_text(file, folder, "name", cluster->name));
    HAPT_TRY(hapt_h5_write_attribute_int(file, folder, "nodes", cluster->nodes));
    HAPT_TRY(hapt_h5_write_attribute_int(file, folder, "devices_per_node", cluster->devices_per_node));
    HAPT_TRY(hapt_h5_write_attribute_real(file, folder, "device_memory_bytes", cluster->device_memory_bytes, "byte"));
    return hapt_h5_write_attribute_real(file, folder, "peak_flops", cluster->peak_flops, "FLOP/s");
}

enum hapt_status hapt_profile_write(struct hapt_h5 *file, const char *group, const struct hapt_profile *profile)
{
    char path[PATH_MAX_CHARS];
    const int64_t L = profile->layer_count, square[2] = {profile->cluster_count, profile->cluster_count};
    HAPT_TRY(
        hapt_h5_write(file, join(path, group, "boundary_bytes"), HAPT_H5_F64, 1, &L, profile->boundary_bytes, "byte"));
    HAPT_TRY(hapt_h5_write(file, join(path, group, "link_bandwidth"), HAPT_H5_F64, 2, square, profile->link_bandwidth,
                           "byte/s"));
    HAPT_TRY(
        hapt_h5_write(file, join(path, group, "link_latency"), HAPT_H5_F64, 2, square, profile->link_latency, "s"));
    for (int c = 0; c < profile->cluster_count; c++) HAPT_TRY(write_cluster(file, group, profile, c));
    return HAPT_OK;
}

enum hapt_status hapt_profile_save(const char *path, const struct hapt_profile *profile)
{
    struct hapt_h5 *file;
    HAPT_TRY(hapt_h5_create(path, FORMAT, VERSION, &file));
    const enum hapt_status status = hapt_profile_write(file, "", profile);
    if (status == HAPT_OK) return hapt_h5_commit(file);
    hapt_h5_close(file);
    return status;
}

static enum hapt_status read_count(struct hapt_h5 *file, const char *folder, const char *name, int *count)
{
    int64_t value;
    HAPT_TRY(hapt_h5_read_attribute_int(file, folder, name, &value));
    if (value < 1 || value > HAPT_PROFILE_MAX_DEVICES)
        return hapt_fail(HAPT_ERR_INPUT, "`hapt profile --help` describes the tables", "%s: %s/%s is %lld",
                         hapt_h5_path(file), folder, name, (long long)value);
    *count = (int)value;
    return HAPT_OK;
}

static enum hapt_status read_table(struct hapt_h5 *file, const char *folder, const char *name, int64_t S, int64_t L,
                                   struct hapt_arena *arena, double **table)
{
    char path[PATH_MAX_CHARS];
    int64_t shape[3] = {S, L, L};
    void *data;
    HAPT_TRY(hapt_h5_read(file, join(path, folder, name), HAPT_H5_F64, 3, shape, HAPT_PROFILE_MAX_CELLS, arena, &data));
    *table = data;
    return HAPT_OK;
}

static enum hapt_status read_cluster(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                     const struct hapt_profile *profile, int c)
{
    struct hapt_profile_cluster *cluster = &profile->cluster[c];
    char folder[PATH_MAX_CHARS - 64], path[PATH_MAX_CHARS];
    const char *name;
    void *data;
    snprintf(folder, sizeof folder, "%s/cluster_%d", group, c);
    HAPT_TRY(hapt_h5_read_attribute_text(file, folder, "name", arena, &name));
    if (strlen(name) == 0 || strlen(name) >= sizeof cluster->name)
        return hapt_fail(HAPT_ERR_INPUT, "give it 1 to 63 characters", "%s: the name of %s has %zu characters",
                         hapt_h5_path(file), folder, strlen(name));
    snprintf(cluster->name, sizeof cluster->name, "%s", name);
    HAPT_TRY(read_count(file, folder, "nodes", &cluster->nodes));
    HAPT_TRY(read_count(file, folder, "devices_per_node", &cluster->devices_per_node));
    HAPT_TRY(hapt_h5_read_attribute_real(file, folder, "device_memory_bytes", &cluster->device_memory_bytes));
    HAPT_TRY(hapt_h5_read_attribute_real(file, folder, "peak_flops", &cluster->peak_flops));
    int64_t pairs[2] = {-1, 2};
    HAPT_TRY(hapt_h5_read(file, join(path, folder, "submesh"), HAPT_H5_I32, 2, pairs, 2 * HAPT_PROFILE_MAX_DEVICES,
                          arena, &data));
    cluster->submesh = data;
    cluster->submesh_count = (int)pairs[0];
    const int64_t S = pairs[0], L = profile->layer_count;
    HAPT_TRY(read_table(file, folder, "stage_time", S, L, arena, &cluster->stage_time));
    HAPT_TRY(read_table(file, folder, "stage_forward_time", S, L, arena, &cluster->stage_forward_time));
    HAPT_TRY(read_table(file, folder, "parameter_bytes", S, L, arena, &cluster->parameter_bytes));
    HAPT_TRY(read_table(file, folder, "activation_bytes", S, L, arena, &cluster->activation_bytes));
    if (hapt_h5_exists(file, join(path, folder, "step_time")))
        HAPT_TRY(read_table(file, folder, "step_time", S, L, arena, &cluster->step_time));
    return HAPT_OK;
}

enum hapt_status hapt_profile_read(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                   struct hapt_profile **profile)
{
    char path[PATH_MAX_CHARS];
    struct hapt_profile *read;
    void *data;
    HAPT_NEW(read, arena, 1);
    int64_t L = -1, square[2] = {-1, -1};
    HAPT_TRY(hapt_h5_read(file, join(path, group, "boundary_bytes"), HAPT_H5_F64, 1, &L, HAPT_PROFILE_MAX_LAYERS, arena,
                          &data));
    read->boundary_bytes = data;
    HAPT_TRY(hapt_h5_read(file, join(path, group, "link_bandwidth"), HAPT_H5_F64, 2, square,
                          HAPT_MAX_SUBCLUSTERS * HAPT_MAX_SUBCLUSTERS, arena, &data));
    read->link_bandwidth = data;
    if (square[0] != square[1] || square[0] < 1 || L < 1)
        return hapt_fail(HAPT_ERR_INPUT, "`hapt profile --help` describes the tables",
                         "%s: link_bandwidth is %lld x %lld for %lld layers", hapt_h5_path(file), (long long)square[0],
                         (long long)square[1], (long long)L);
    HAPT_TRY(hapt_h5_read(file, join(path, group, "link_latency"), HAPT_H5_F64, 2, square,
                          HAPT_MAX_SUBCLUSTERS * HAPT_MAX_SUBCLUSTERS, arena, &data));
    read->link_latency = data;
    read->layer_count = (int)L;
    read->cluster_count = (int)square[0];
    HAPT_NEW(read->cluster, arena, read->cluster_count);
    for (int c = 0; c < read->cluster_count; c++) HAPT_TRY(read_cluster(file, group, arena, read, c));
    HAPT_TRY(hapt_profile_check(read));
    *profile = read;
    return HAPT_OK;
}

enum hapt_status hapt_profile_load(const char *path, struct hapt_arena *arena, struct hapt_profile **profile)
{
    struct hapt_h5 *file;
    HAPT_TRY(hapt_h5_open(path, FORMAT, VERSION, true, &file));
    const enum hapt_status status = hapt_profile_read(file, "", arena, profile);
    hapt_h5_close(file);
    return status;
}
