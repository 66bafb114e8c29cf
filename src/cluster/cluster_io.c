/* The cluster in an HDF5 file: attributes and small tables, one HDF5 group per subcluster. */
#include <stdio.h>
#include <string.h>

#include "hapt/cluster.h"

static enum hapt_status write_subcluster(struct hapt_h5 *file, const char *group, const struct hapt_subcluster *own)
{
    const struct hapt_device_spec *device = &own->device;
    const int64_t types = HAPT_DTYPE_COUNT, devices = (int64_t)own->nodes * own->devices_per_node;
    char name[320];
    snprintf(name, sizeof name, "%s/peak_flops", group);
    HAPT_TRY(hapt_h5_write(file, name, HAPT_H5_F64, 1, &types, device->peak_flops, "FLOP/s"));
    if (own->host_count > 0) {
        snprintf(name, sizeof name, "%s/hosts", group);
        HAPT_TRY(hapt_h5_write_strings(file, name, own->host_count, own->hosts));
    }
    if (own->ranks) {
        snprintf(name, sizeof name, "%s/ranks", group);
        HAPT_TRY(hapt_h5_write(file, name, HAPT_H5_I32, 1, &devices, own->ranks, ""));
    }
    HAPT_TRY(hapt_h5_write_attribute_text(file, group, "name", own->name));
    HAPT_TRY(hapt_h5_write_attribute_int(file, group, "nodes", own->nodes));
    HAPT_TRY(hapt_h5_write_attribute_int(file, group, "devices_per_node", own->devices_per_node));
    HAPT_TRY(hapt_h5_write_attribute_text(file, group, "device", device->name));
    HAPT_TRY(hapt_h5_write_attribute_text(file, group, "backend", device->backend));
    HAPT_TRY(hapt_h5_write_attribute_real(file, group, "memory", device->memory_bytes, "byte"));
    HAPT_TRY(hapt_h5_write_attribute_int(file, group, "memory_capped", device->memory_capped));
    HAPT_TRY(hapt_h5_write_attribute_real(file, group, "memory_bandwidth", device->memory_bandwidth, "byte/s"));
    HAPT_TRY(hapt_h5_write_attribute_real(file, group, "slowdown", device->slowdown, ""));
    if (device->steady) HAPT_TRY(hapt_h5_write_attribute_int(file, group, "steady", 1));
    HAPT_TRY(hapt_h5_write_attribute_real(file, group, "intra_node_bandwidth", own->intra_node_bandwidth, "byte/s"));
    HAPT_TRY(hapt_h5_write_attribute_real(file, group, "inter_node_bandwidth", own->inter_node_bandwidth, "byte/s"));
    HAPT_TRY(hapt_h5_write_attribute_real(file, group, "intra_node_latency", own->intra_node_latency, "s"));
    if (own->host_memory_bytes > 0)
        HAPT_TRY(hapt_h5_write_attribute_real(file, group, "host_memory", own->host_memory_bytes, "byte"));
    if (own->host_bandwidth > 0)
        HAPT_TRY(hapt_h5_write_attribute_real(file, group, "host_bandwidth", own->host_bandwidth, "byte/s"));
    if (own->host_update_rate > 0)
        HAPT_TRY(hapt_h5_write_attribute_real(file, group, "host_update_rate", own->host_update_rate, "1/s"));
    if (own->host_paced) HAPT_TRY(hapt_h5_write_attribute_int(file, group, "host_paced", 1));
    return hapt_h5_write_attribute_real(file, group, "inter_node_latency", own->inter_node_latency, "s");
}

enum { TERMS = 3, COLLECTIVES = HAPT_COLLECTIVE_ALL_TO_ALL - HAPT_COLLECTIVE_ALL_REDUCE + 1 };

static enum hapt_status write_collectives(struct hapt_h5 *file, const char *group, const struct hapt_cluster *cluster)
{
    const int64_t shape[3] = {cluster->collective_count, COLLECTIVES, TERMS};
    int32_t ranks[HAPT_MAX_COLLECTIVE_MODELS];
    double term[HAPT_MAX_COLLECTIVE_MODELS][COLLECTIVES][TERMS];
    char name[256];
    if (cluster->collective_count == 0) return HAPT_OK;
    for (int i = 0; i < cluster->collective_count; i++) {
        ranks[i] = cluster->collective[i].ranks;
        for (int k = 0; k < COLLECTIVES; k++) {
            const struct hapt_collective_term *its = &cluster->collective[i].term[HAPT_COLLECTIVE_ALL_REDUCE + k];
            memcpy(term[i][k], (const double[TERMS]){its->latency_s, its->byte_s, its->skew_s}, sizeof term[i][k]);
        }
    }
    snprintf(name, sizeof name, "%s/collective_ranks", group);
    HAPT_TRY(hapt_h5_write(file, name, HAPT_H5_I32, 1, shape, ranks, ""));
    snprintf(name, sizeof name, "%s/collective_terms", group);
    return hapt_h5_write(file, name, HAPT_H5_F64, 3, shape, term, "s, s/byte, s/byte of padding");
}

static enum hapt_status read_collectives(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                         struct hapt_cluster *cluster)
{
    int64_t count[1] = {-1}, shape[3] = {0, COLLECTIVES, TERMS};
    void *ranks, *terms;
    char name[256];
    snprintf(name, sizeof name, "%s/collective_ranks", group);
    if (!hapt_h5_exists(file, name)) return HAPT_OK;
    HAPT_TRY(hapt_h5_read(file, name, HAPT_H5_I32, 1, count, HAPT_MAX_COLLECTIVE_MODELS, arena, &ranks));
    shape[0] = count[0];
    snprintf(name, sizeof name, "%s/collective_terms", group);
    HAPT_TRY(hapt_h5_read(file, name, HAPT_H5_F64, 3, shape, HAPT_MAX_COLLECTIVE_MODELS * COLLECTIVES * TERMS, arena,
                          &terms));
    cluster->collective_count = (int)count[0];
    HAPT_NEW(cluster->collective, arena, cluster->collective_count);
    for (int i = 0; i < cluster->collective_count; i++) {
        cluster->collective[i] = (struct hapt_collective_model){.ranks = ((const int32_t *)ranks)[i], .measured = true};
        for (int k = 0; k < COLLECTIVES; k++) {
            const double *its = (const double *)terms + (i * COLLECTIVES + k) * TERMS;
            cluster->collective[i].term[HAPT_COLLECTIVE_ALL_REDUCE + k] =
                (struct hapt_collective_term){its[0], its[1], its[2]};
        }
    }
    return HAPT_OK;
}

/* One text per link, row by row: "", "mpi", or "tcp eth0 eth1". */
static enum hapt_status write_routes(struct hapt_h5 *file, const char *group, const struct hapt_cluster *cluster)
{
    char text[HAPT_MAX_SUBCLUSTERS * HAPT_MAX_SUBCLUSTERS][48], name[256];
    const char *route_text[HAPT_MAX_SUBCLUSTERS * HAPT_MAX_SUBCLUSTERS];
    bool any = false;
    for (int i = 0; i < cluster->count * cluster->count; i++) {
        const struct hapt_link *link = &cluster->link[i];
        const bool named = link->interface[0][0] != '\0';
        snprintf(text[i], sizeof text[i], "%s%s%s%s%s", link->transport, named ? " " : "", link->interface[0],
                 named ? " " : "", link->interface[1]);
        route_text[i] = text[i];
        any = any || link->transport[0];
    }
    if (!any) return HAPT_OK;
    snprintf(name, sizeof name, "%s/link_transport", group);
    return hapt_h5_write_strings(file, name, cluster->count * cluster->count, route_text);
}

static enum hapt_status read_routes(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                    struct hapt_cluster *cluster)
{
    int64_t count;
    const char **route_text;
    char name[256];
    snprintf(name, sizeof name, "%s/link_transport", group);
    if (!hapt_h5_exists(file, name)) return HAPT_OK;
    HAPT_TRY(hapt_h5_read_strings(file, name, cluster->count * cluster->count, arena, &count, &route_text));
    for (int64_t i = 0; i < count; i++) {
        struct hapt_link *link = &cluster->link[i];
        const int fields =
            sscanf(route_text[i], "%7s %15s %15s", link->transport, link->interface[0], link->interface[1]);
        if (fields <= 0 || (fields == 1 && strcmp(link->transport, "mpi") == 0) ||
            (fields == 3 && strcmp(link->transport, "tcp") == 0))
            continue;
        return hapt_fail(HAPT_ERR_INPUT, "the file is damaged or written by another program",
                         "%s: no transport of a link is \"%.60s\"", hapt_h5_path(file), route_text[i]);
    }
    return HAPT_OK;
}

enum hapt_status hapt_cluster_write(struct hapt_h5 *file, const char *group, const struct hapt_cluster *cluster)
{
    double bandwidth[HAPT_MAX_SUBCLUSTERS * HAPT_MAX_SUBCLUSTERS], latency[HAPT_MAX_SUBCLUSTERS * HAPT_MAX_SUBCLUSTERS];
    int32_t paced[HAPT_MAX_SUBCLUSTERS * HAPT_MAX_SUBCLUSTERS];
    const int64_t shape[2] = {cluster->count, cluster->count};
    char name[256];
    for (int i = 0; i < cluster->count * cluster->count; i++) {
        bandwidth[i] = cluster->link[i].bandwidth;
        latency[i] = cluster->link[i].latency;
        paced[i] = cluster->link[i].paced;
    }
    snprintf(name, sizeof name, "%s/link_bandwidth", group);
    HAPT_TRY(hapt_h5_write(file, name, HAPT_H5_F64, 2, shape, bandwidth, "byte/s"));
    snprintf(name, sizeof name, "%s/link_latency", group);
    HAPT_TRY(hapt_h5_write(file, name, HAPT_H5_F64, 2, shape, latency, "s"));
    snprintf(name, sizeof name, "%s/link_paced", group);
    HAPT_TRY(hapt_h5_write(file, name, HAPT_H5_I32, 2, shape, paced, ""));
    HAPT_TRY(write_routes(file, group, cluster));
    for (int i = 0; i < cluster->count; i++) {
        snprintf(name, sizeof name, "%s/subcluster_%d", group, i);
        HAPT_TRY(write_subcluster(file, name, &cluster->subcluster[i]));
    }
    HAPT_TRY(write_collectives(file, group, cluster));
    const char *object = group[0] ? group : "/";
    HAPT_TRY(hapt_h5_write_attribute_int(file, object, "subclusters", cluster->count));
    return hapt_h5_write_attribute_int(file, object, "from_file", cluster->from_file);
}

static enum hapt_status read_text(struct hapt_h5 *file, const char *group, const char *key, struct hapt_arena *arena,
                                  char *buffer, size_t size)
{
    const char *text;
    HAPT_TRY(hapt_h5_read_attribute_text(file, group, key, arena, &text));
    if (strlen(text) >= size)
        return hapt_fail(HAPT_ERR_INPUT, "the file is damaged or written by another program",
                         "%s: attribute %s of %s is too long", hapt_h5_path(file), key, group);
    snprintf(buffer, size, "%s", text);
    return HAPT_OK;
}

static enum hapt_status read_int(struct hapt_h5 *file, const char *group, const char *key, int64_t low, int64_t high,
                                 int *value)
{
    int64_t number;
    HAPT_TRY(hapt_h5_read_attribute_int(file, group, key, &number));
    if (number < low || number > high)
        return hapt_fail(HAPT_ERR_INPUT, "the file is damaged or written by another program",
                         "%s: attribute %s of %s is %lld, outside of %lld to %lld", hapt_h5_path(file), key, group,
                         (long long)number, (long long)low, (long long)high);
    *value = (int)number;
    return HAPT_OK;
}

static enum hapt_status read_subcluster(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                        struct hapt_subcluster *own)
{
    struct hapt_device_spec *device = &own->device;
    int64_t types = HAPT_DTYPE_COUNT, hosts;
    char name[320];
    void *peak;
    int capped;
    HAPT_TRY(read_text(file, group, "name", arena, own->name, sizeof own->name));
    HAPT_TRY(read_text(file, group, "device", arena, device->name, sizeof device->name));
    HAPT_TRY(read_text(file, group, "backend", arena, device->backend, sizeof device->backend));
    HAPT_TRY(read_int(file, group, "nodes", 1, 65536, &own->nodes));
    HAPT_TRY(read_int(file, group, "devices_per_node", 1, 65536, &own->devices_per_node));
    HAPT_TRY(read_int(file, group, "memory_capped", 0, 1, &capped));
    device->memory_capped = capped;
    HAPT_TRY(hapt_h5_read_attribute_real(file, group, "memory", &device->memory_bytes));
    HAPT_TRY(hapt_h5_read_attribute_real(file, group, "memory_bandwidth", &device->memory_bandwidth));
    HAPT_TRY(hapt_h5_read_attribute_real(file, group, "slowdown", &device->slowdown));
    device->steady = hapt_h5_has_attribute(file, group, "steady");
    HAPT_TRY(hapt_h5_read_attribute_real(file, group, "intra_node_bandwidth", &own->intra_node_bandwidth));
    HAPT_TRY(hapt_h5_read_attribute_real(file, group, "inter_node_bandwidth", &own->inter_node_bandwidth));
    HAPT_TRY(hapt_h5_read_attribute_real(file, group, "intra_node_latency", &own->intra_node_latency));
    HAPT_TRY(hapt_h5_read_attribute_real(file, group, "inter_node_latency", &own->inter_node_latency));
    if (hapt_h5_has_attribute(file, group, "host_memory"))
        HAPT_TRY(hapt_h5_read_attribute_real(file, group, "host_memory", &own->host_memory_bytes));
    if (hapt_h5_has_attribute(file, group, "host_bandwidth"))
        HAPT_TRY(hapt_h5_read_attribute_real(file, group, "host_bandwidth", &own->host_bandwidth));
    own->host_paced = hapt_h5_has_attribute(file, group, "host_paced");
    if (hapt_h5_has_attribute(file, group, "host_update_rate"))
        HAPT_TRY(hapt_h5_read_attribute_real(file, group, "host_update_rate", &own->host_update_rate));
    snprintf(name, sizeof name, "%s/peak_flops", group);
    HAPT_TRY(hapt_h5_read(file, name, HAPT_H5_F64, 1, &types, HAPT_DTYPE_COUNT, arena, &peak));
    memcpy(device->peak_flops, peak, sizeof device->peak_flops);
    snprintf(name, sizeof name, "%s/hosts", group);
    if (!hapt_h5_exists(file, name)) return HAPT_OK;
    HAPT_TRY(hapt_h5_read_strings(file, name, own->nodes, arena, &hosts, &own->hosts));
    own->host_count = (int)hosts;
    return HAPT_OK;
}

static enum hapt_status read_links(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                   struct hapt_cluster *cluster)
{
    int64_t shape[2] = {cluster->count, cluster->count};
    const int entries = cluster->count * cluster->count;
    void *bandwidth, *latency, *paced;
    char name[256];
    snprintf(name, sizeof name, "%s/link_bandwidth", group);
    HAPT_TRY(hapt_h5_read(file, name, HAPT_H5_F64, 2, shape, entries, arena, &bandwidth));
    snprintf(name, sizeof name, "%s/link_latency", group);
    HAPT_TRY(hapt_h5_read(file, name, HAPT_H5_F64, 2, shape, entries, arena, &latency));
    snprintf(name, sizeof name, "%s/link_paced", group);
    HAPT_TRY(hapt_h5_read(file, name, HAPT_H5_I32, 2, shape, entries, arena, &paced));
    HAPT_NEW(cluster->link, arena, entries);
    for (int i = 0; i < entries; i++)
        cluster->link[i] = (struct hapt_link){.bandwidth = ((const double *)bandwidth)[i],
                                              .latency = ((const double *)latency)[i],
                                              .paced = ((const int32_t *)paced)[i] != 0};
    return read_routes(file, group, arena, cluster);
}

enum hapt_status hapt_cluster_read(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                   struct hapt_cluster **cluster)
{
    struct hapt_cluster *loaded;
    int from_file;
    char name[256];
    const char *object = group[0] ? group : "/";
    HAPT_NEW(loaded, arena, 1);
    HAPT_TRY(read_int(file, object, "subclusters", 1, HAPT_MAX_SUBCLUSTERS, &loaded->count));
    HAPT_TRY(read_int(file, object, "from_file", 0, 1, &from_file));
    loaded->from_file = from_file;
    HAPT_NEW(loaded->subcluster, arena, loaded->count);
    for (int i = 0; i < loaded->count; i++) {
        struct hapt_subcluster *own = &loaded->subcluster[i];
        snprintf(name, sizeof name, "%s/subcluster_%d", group, i);
        HAPT_TRY(read_subcluster(file, name, arena, own));
        if ((int64_t)own->nodes * own->devices_per_node > (1 << 20) - loaded->rank_count)
            return hapt_fail(HAPT_ERR_INPUT, "the file is damaged or written by another program",
                             "%s: the cluster has more than a million devices", hapt_h5_path(file));
        loaded->rank_count += own->nodes * own->devices_per_node;
    }
    HAPT_TRY(read_links(file, group, arena, loaded));
    HAPT_TRY(read_collectives(file, group, arena, loaded));
    HAPT_TRY(hapt_cluster_check(loaded));
    *cluster = loaded;
    return HAPT_OK;
}
