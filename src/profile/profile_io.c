/* Profile files. `hapt help profile` describes the tables and their meaning. */
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "profile_private.h"

#define FORMAT "hapt-profile"
#define VERSION 1
#define PATH_MAX_CHARS 512

static const char *const origins[] = {"unknown", "measured", "predicted"};

const char *hapt_profile_origin_name(enum hapt_profile_origin origin)
{
    return origins[origin];
}

enum hapt_profile_origin hapt_profile_origin_find(const char *name)
{
    return strcmp(name, "measured") == 0    ? HAPT_PROFILE_MEASURED
           : strcmp(name, "predicted") == 0 ? HAPT_PROFILE_PREDICTED
                                            : HAPT_PROFILE_UNKNOWN;
}

static const char *join(char path[PATH_MAX_CHARS], const char *group, const char *name)
{
    snprintf(path, PATH_MAX_CHARS, "%s/%s", group, name);
    return path;
}

/* Writes one property of every submesh, if some are not the default. */
static enum hapt_status write_property(struct hapt_h5 *file, const char *folder, const char *name,
                                       const struct hapt_profile_cluster *cluster, size_t offset, int usual)
{
    const int64_t S = cluster->submesh_count;
    char path[PATH_MAX_CHARS];
    bool unusual = false;
    int *value = calloc((size_t)S, sizeof *value);
    if (!value)
        return hapt_fail(HAPT_ERR_MEMORY, "give the job more host memory", "no memory to write %d submeshes", (int)S);
    for (int s = 0; s < S; s++) {
        memcpy(&value[s], (const char *)&cluster->submesh[s] + offset, sizeof value[s]);
        unusual = unusual || value[s] != usual;
    }
    enum hapt_status status = HAPT_OK;
    if (unusual) status = hapt_h5_write(file, join(path, folder, name), HAPT_H5_I32, 1, &S, value, "");
    free(value);
    return status;
}

/* Writes submesh [S][2] of (n, m), and tensor_parallel, program, recompute and host_weights [S]. */
static enum hapt_status write_submeshes(struct hapt_h5 *file, const char *folder,
                                        const struct hapt_profile_cluster *cluster)
{
    const int64_t S = cluster->submesh_count, shape[2] = {S, 2};
    char path[PATH_MAX_CHARS];
    int *pairs = calloc((size_t)S, 2 * sizeof *pairs);
    if (!pairs)
        return hapt_fail(HAPT_ERR_MEMORY, "give the job more host memory", "no memory to write %d submeshes", (int)S);
    for (int s = 0; s < S; s++) pairs[2 * s] = cluster->submesh[s].n, pairs[2 * s + 1] = cluster->submesh[s].m;
    const enum hapt_status status =
        hapt_h5_write(file, join(path, folder, "submesh"), HAPT_H5_I32, 2, shape, pairs, "");
    free(pairs);
    HAPT_TRY(status);
    HAPT_TRY(write_property(file, folder, "tensor_parallel", cluster, offsetof(struct hapt_submesh, tp), 1));
    HAPT_TRY(write_property(file, folder, "program", cluster, offsetof(struct hapt_submesh, program), 0));
    HAPT_TRY(write_property(file, folder, "recompute", cluster, offsetof(struct hapt_submesh, recompute), 0));
    return write_property(file, folder, "host_weights", cluster, offsetof(struct hapt_submesh, weights_at), 0);
}

static enum hapt_status read_property(struct hapt_h5 *file, const char *folder, const char *name, int64_t *shape,
                                      struct hapt_arena *arena, void **value)
{
    char path[PATH_MAX_CHARS];
    *value = NULL;
    if (!hapt_h5_exists(file, join(path, folder, name))) return HAPT_OK;
    return hapt_h5_read(file, path, HAPT_H5_I32, 1, shape, HAPT_PROFILE_MAX_DEVICES, arena, value);
}

static enum hapt_status read_submeshes(struct hapt_h5 *file, const char *folder, struct hapt_arena *arena,
                                       struct hapt_profile_cluster *cluster)
{
    char path[PATH_MAX_CHARS];
    int64_t shape[2] = {-1, 2};
    void *pairs, *tp, *program, *recompute, *away;
    HAPT_TRY(hapt_h5_read(file, join(path, folder, "submesh"), HAPT_H5_I32, 2, shape, 2 * HAPT_PROFILE_MAX_DEVICES,
                          arena, &pairs));
    HAPT_TRY(read_property(file, folder, "tensor_parallel", shape, arena, &tp));
    HAPT_TRY(read_property(file, folder, "program", shape, arena, &program));
    HAPT_TRY(read_property(file, folder, "recompute", shape, arena, &recompute));
    HAPT_TRY(read_property(file, folder, "host_weights", shape, arena, &away));
    cluster->submesh_count = (int)shape[0];
    HAPT_NEW(cluster->submesh, arena, shape[0]);
    for (int s = 0; s < cluster->submesh_count; s++)
        cluster->submesh[s] = (struct hapt_submesh){((int *)pairs)[2 * s],
                                                    ((int *)pairs)[2 * s + 1],
                                                    tp ? ((int *)tp)[s] : 1,
                                                    program ? ((int *)program)[s] : 0,
                                                    recompute ? ((int *)recompute)[s] : 0,
                                                    away ? ((int *)away)[s] : 0};
    return HAPT_OK;
}

static enum hapt_status write_cluster(struct hapt_h5 *file, const char *group, const struct hapt_profile *profile,
                                      int c)
{
    const struct hapt_profile_cluster *cluster = &profile->cluster[c];
    char folder[PATH_MAX_CHARS - 64], path[PATH_MAX_CHARS];
    snprintf(folder, sizeof folder, "%s/cluster_%d", group, c);
    const int64_t L = profile->layer_count, S = cluster->submesh_count;
    const int64_t shape[3] = {S, L, L};
    HAPT_TRY(write_submeshes(file, folder, cluster));
    const struct {
        const char *name, *units;
        const double *table;
    } tables[] = {
        {"stage_time", "s", cluster->stage_time},
        {"stage_forward_time", "s", cluster->stage_forward_time},
        {"parameter_bytes", "byte", cluster->parameter_bytes},
        {"activation_bytes", "byte", cluster->activation_bytes},
        {"step_time", "s", cluster->step_time},
        {"weight_time", "s", cluster->weight_time},
        {"split_parameter_bytes", "byte", cluster->split_parameter_bytes},
        {"weight_slot_bytes", "byte", cluster->weight_slot_bytes},
    };
    for (size_t k = 0; k < sizeof tables / sizeof *tables; k++) {
        if (!tables[k].table) continue;
        snprintf(path, sizeof path, "%s/%s", folder, tables[k].name);
        HAPT_TRY(hapt_h5_write(file, path, HAPT_H5_F64, 3, shape, tables[k].table, tables[k].units));
    }
    HAPT_TRY(hapt_h5_write_attribute_text(file, folder, "name", cluster->name));
    HAPT_TRY(hapt_h5_write_attribute_int(file, folder, "nodes", cluster->nodes));
    HAPT_TRY(hapt_h5_write_attribute_int(file, folder, "devices_per_node", cluster->devices_per_node));
    HAPT_TRY(hapt_h5_write_attribute_real(file, folder, "device_memory_bytes", cluster->device_memory_bytes, "byte"));
    if (cluster->weight_time && cluster->split_overhead > 0)
        HAPT_TRY(hapt_h5_write_attribute_real(file, folder, "split_overhead", cluster->split_overhead, "1"));
    if (cluster->deferrable > 0)
        HAPT_TRY(hapt_h5_write_attribute_real(file, folder, "deferrable", cluster->deferrable, "1"));
    return hapt_h5_write_attribute_real(file, folder, "peak_flops", cluster->peak_flops, "FLOP/s");
}

enum hapt_status hapt_profile_write(struct hapt_h5 *file, const char *group, const struct hapt_profile *profile)
{
    char path[PATH_MAX_CHARS];
    const int64_t L = profile->layer_count, square[2] = {profile->cluster_count, profile->cluster_count};
    HAPT_TRY(
        hapt_h5_write(file, join(path, group, "boundary_bytes"), HAPT_H5_F64, 1, &L, profile->boundary_bytes, "byte"));
    if (profile->exchange != HAPT_TIED_EXCHANGE_FP32)
        HAPT_TRY(hapt_h5_write_attribute_text(file, *group ? group : "/", "tied_exchange",
                                              hapt_tied_exchange_name(profile->exchange)));
    if (profile->tied_bytes)
        HAPT_TRY(hapt_h5_write(file, join(path, group, "tied_bytes"), HAPT_H5_F64, 1, &L, profile->tied_bytes, "byte"));
    HAPT_TRY(hapt_h5_write(file, join(path, group, "link_bandwidth"), HAPT_H5_F64, 2, square, profile->link_bandwidth,
                           "byte/s"));
    HAPT_TRY(
        hapt_h5_write(file, join(path, group, "link_latency"), HAPT_H5_F64, 2, square, profile->link_latency, "s"));
    if (profile->crossings) HAPT_TRY(profile_write_crossings(file, group, profile->crossings));
    for (int c = 0; c < profile->cluster_count; c++) HAPT_TRY(write_cluster(file, group, profile, c));
    HAPT_TRY(hapt_profile_write_mixed(file, group, profile));
    for (int k = 0; k < profile->layout_count; k++)
        HAPT_TRY(hapt_stage_layout_write(file, group, k + 1, profile->layout[k]));
    const char *root = *group ? group : "/";
    if (profile->precision != HAPT_PRECISION_UNKNOWN)
        HAPT_TRY(hapt_h5_write_attribute_text(file, root, "precision", hapt_precision_name(profile->precision)));
    if (profile->host_state)
        HAPT_TRY(hapt_h5_write_attribute_text(file, root, "offload", profile->host_update ? "update" : "optimizer"));
    if (profile->origin != HAPT_PROFILE_UNKNOWN)
        HAPT_TRY(hapt_h5_write_attribute_text(file, root, "origin", hapt_profile_origin_name(profile->origin)));
    if (profile->noise > 0) {
        HAPT_TRY(hapt_h5_write_attribute_real(file, root, "noise", profile->noise, "1"));
        HAPT_TRY(hapt_h5_write_attribute_real(file, root, "drift", profile->drift, "1"));
    }
    if (profile->flops <= 0) return HAPT_OK;
    return hapt_h5_write_attribute_real(file, root, "flops_per_microbatch", profile->flops, "FLOP");
}

enum hapt_status hapt_profile_save(const char *path, const struct hapt_profile *profile)
{
    struct hapt_h5 *file;
    HAPT_TRY(hapt_h5_create(path, FORMAT, VERSION, &file));
    return hapt_h5_finish(file, hapt_profile_write(file, "", profile));
}

static enum hapt_status read_count(struct hapt_h5 *file, const char *folder, const char *name, int *count)
{
    int64_t value;
    HAPT_TRY(hapt_h5_read_attribute_int(file, folder, name, &value));
    if (value < 1 || value > HAPT_PROFILE_MAX_DEVICES)
        return hapt_fail(HAPT_ERR_INPUT, "`hapt help profile` describes the tables",
                         "%s: %s/%s is %lld; 1 to 65536 are possible", hapt_h5_path(file), folder, name,
                         (long long)value);
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

/* Checks the memory of all tables before reading the first: each may be within its limit while all together exceed
 * the host's memory. Tables move one by one into the node's shared memory, so the largest temporarily exists twice. */
static enum hapt_status check_memory(struct hapt_h5 *file, const char *group, int L, int C, int *mixed_count)
{
    char path[PATH_MAX_CHARS];
    double cells = 0, largest = 0, mixed_bytes = 0;
    for (int c = 0; c < C; c++) {
        int dims;
        int64_t shape[HAPT_H5_MAX_DIMS] = {0};
        snprintf(path, sizeof path, "%s/cluster_%d/submesh", group, c);
        HAPT_TRY(hapt_h5_shape(file, path, &dims, shape));
        const double table = (double)shape[0] * L * L;
        snprintf(path, sizeof path, "%s/cluster_%d/weight_time", group, c);
        cells += (hapt_h5_exists(file, path) ? 8 : 5) * table;
        largest = fmax(largest, table);
    }
    HAPT_TRY(hapt_profile_count_mixed(file, group, L, mixed_count, &mixed_bytes));
    const double bytes = (cells + largest) * sizeof(double) + mixed_bytes, available = hapt_memory_available();
    char needed[32], left[32];
    if (bytes <= HAPT_PROFILE_SMALL_BYTES || bytes <= available) return HAPT_OK;
    return hapt_fail(HAPT_ERR_MEMORY,
                     "plan on a host with more memory, or over fewer layers (hapt profile --layers-per-model)",
                     "%s: its tables need %s, but this host has only %s left", hapt_h5_path(file),
                     hapt_units_bytes(bytes, needed), hapt_units_bytes(available, left));
}

static enum hapt_status read_layouts(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                     struct hapt_profile *profile)
{
    const struct hapt_stage_layout **layout;
    int count = 0;
    while (count < HAPT_MAX_LAYOUTS && hapt_stage_layout_exists(file, group, count + 1)) count++;
    HAPT_NEW(layout, arena, count);
    for (int k = 0; k < count; k++) {
        struct hapt_stage_layout *read;
        HAPT_TRY(hapt_stage_layout_read(file, group, k + 1, arena, &read));
        layout[k] = read;
    }
    profile->layout_count = count;
    profile->layout = layout;
    return HAPT_OK;
}

/* Reads what only files of this program contain. */
static enum hapt_status read_making(struct hapt_h5 *file, const char *root, struct hapt_arena *arena,
                                    struct hapt_profile *profile)
{
    const char *text;
    if (hapt_h5_has_attribute(file, root, "offload")) {
        HAPT_TRY(hapt_h5_read_attribute_text(file, root, "offload", arena, &text));
        profile->host_update = !strcmp(text, "update");
        profile->host_state = profile->host_update || !strcmp(text, "optimizer");
        if (!profile->host_state)
            return hapt_fail(HAPT_ERR_INPUT, "only the optimizer can be offloaded", "%s: offload is \"%.20s\"",
                             hapt_h5_path(file), text);
    }
    if (hapt_h5_has_attribute(file, root, "precision")) {
        HAPT_TRY(hapt_h5_read_attribute_text(file, root, "precision", arena, &text));
        profile->precision = hapt_precision_find(text);
        if (profile->precision == HAPT_PRECISION_UNKNOWN)
            return hapt_fail(HAPT_ERR_INPUT, "precisions are fp32, tf32, bf16 and fp16", "%s: precision is \"%.20s\"",
                             hapt_h5_path(file), text);
    }
    if (hapt_h5_has_attribute(file, root, "origin")) {
        HAPT_TRY(hapt_h5_read_attribute_text(file, root, "origin", arena, &text));
        profile->origin = hapt_profile_origin_find(text);
    }
    return HAPT_OK;
}

static enum hapt_status read_cluster(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                     const struct hapt_profile *profile, int c)
{
    struct hapt_profile_cluster *cluster = &profile->cluster[c];
    char folder[PATH_MAX_CHARS - 64], path[PATH_MAX_CHARS];
    const char *name;
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
    if (hapt_h5_has_attribute(file, folder, "deferrable"))
        HAPT_TRY(hapt_h5_read_attribute_real(file, folder, "deferrable", &cluster->deferrable));
    HAPT_TRY(read_submeshes(file, folder, arena, cluster));
    const int64_t S = cluster->submesh_count, L = profile->layer_count;
    HAPT_TRY(read_table(file, folder, "stage_time", S, L, arena, &cluster->stage_time));
    HAPT_TRY(read_table(file, folder, "stage_forward_time", S, L, arena, &cluster->stage_forward_time));
    HAPT_TRY(read_table(file, folder, "parameter_bytes", S, L, arena, &cluster->parameter_bytes));
    HAPT_TRY(read_table(file, folder, "activation_bytes", S, L, arena, &cluster->activation_bytes));
    if (hapt_h5_exists(file, join(path, folder, "step_time")))
        HAPT_TRY(read_table(file, folder, "step_time", S, L, arena, &cluster->step_time));
    if (!hapt_h5_exists(file, join(path, folder, "weight_time"))) return HAPT_OK;
    if (hapt_h5_has_attribute(file, folder, "split_overhead"))
        HAPT_TRY(hapt_h5_read_attribute_real(file, folder, "split_overhead", &cluster->split_overhead));
    HAPT_TRY(read_table(file, folder, "weight_time", S, L, arena, &cluster->weight_time));
    HAPT_TRY(read_table(file, folder, "split_parameter_bytes", S, L, arena, &cluster->split_parameter_bytes));
    return read_table(file, folder, "weight_slot_bytes", S, L, arena, &cluster->weight_slot_bytes);
}

/* Reads the uncertainty of the times, which is not used in computations. */
static enum hapt_status read_noise(struct hapt_h5 *file, const char *root, struct hapt_profile *profile)
{
    double noise = 0, drift = 0;
    if (hapt_h5_has_attribute(file, root, "noise")) HAPT_TRY(hapt_h5_read_attribute_real(file, root, "noise", &noise));
    if (hapt_h5_has_attribute(file, root, "drift")) HAPT_TRY(hapt_h5_read_attribute_real(file, root, "drift", &drift));
    if (!isfinite(noise) || noise < 0 || !isfinite(drift)) return HAPT_OK;
    profile->noise = noise;
    profile->drift = drift;
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
    if (hapt_h5_has_attribute(file, *group ? group : "/", "tied_exchange")) {
        const char *name;
        HAPT_TRY(hapt_h5_read_attribute_text(file, *group ? group : "/", "tied_exchange", arena, &name));
        if (!hapt_tied_exchange_find(name, &read->exchange))
            return hapt_fail(HAPT_ERR_INPUT, "`hapt help profile` describes the tables",
                             "%s: unknown tied_exchange \"%.20s\"", hapt_h5_path(file), name);
    }
    if (hapt_h5_exists(file, join(path, group, "tied_bytes"))) {
        HAPT_TRY(hapt_h5_read(file, path, HAPT_H5_F64, 1, &L, HAPT_PROFILE_MAX_LAYERS, arena, &data));
        read->tied_bytes = data;
    }
    HAPT_TRY(profile_read_crossings(file, group, arena, &read->crossings));
    HAPT_TRY(hapt_h5_read(file, join(path, group, "link_bandwidth"), HAPT_H5_F64, 2, square,
                          HAPT_MAX_SUBCLUSTERS * HAPT_MAX_SUBCLUSTERS, arena, &data));
    read->link_bandwidth = data;
    if (square[0] != square[1] || square[0] < 1 || L < 1)
        return hapt_fail(
            HAPT_ERR_INPUT, "`hapt help profile` describes the tables",
            "%s: link_bandwidth is %lld x %lld and there are %lld layers; it must be square, with at least one layer",
            hapt_h5_path(file), (long long)square[0], (long long)square[1], (long long)L);
    HAPT_TRY(hapt_h5_read(file, join(path, group, "link_latency"), HAPT_H5_F64, 2, square,
                          HAPT_MAX_SUBCLUSTERS * HAPT_MAX_SUBCLUSTERS, arena, &data));
    read->link_latency = data;
    read->layer_count = (int)L;
    read->cluster_count = (int)square[0];
    HAPT_TRY(check_memory(file, group, read->layer_count, read->cluster_count, &read->mixed_count));
    HAPT_NEW(read->cluster, arena, read->cluster_count);
    if (hapt_h5_has_attribute(file, *group ? group : "/", "flops_per_microbatch"))
        HAPT_TRY(hapt_h5_read_attribute_real(file, *group ? group : "/", "flops_per_microbatch", &read->flops));
    HAPT_TRY(read_noise(file, *group ? group : "/", read));
    HAPT_TRY(read_making(file, *group ? group : "/", arena, read));
    for (int c = 0; c < read->cluster_count; c++) HAPT_TRY(read_cluster(file, group, arena, read, c));
    HAPT_TRY(hapt_profile_read_mixed(file, group, arena, read));
    HAPT_TRY(read_layouts(file, group, arena, read));
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

enum hapt_status hapt_profile_precision(const char *path, enum hapt_precision *precision)
{
    char name[16];
    HAPT_TRY(hapt_h5_peek_text(path, FORMAT, VERSION, true, "precision", name, sizeof name));
    *precision = hapt_precision_find(name); /* an unknown name fails when the file is read */
    return HAPT_OK;
}
