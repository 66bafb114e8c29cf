#include "group.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define GPU_OVERHEAD 1.5e9 /* bytes */

void hapt_host_cpu_device(const struct hapt_host *host, struct hapt_device_spec *device)
{
    const double cores = hapt_host_cores_per_rank(host);
    *device = (struct hapt_device_spec){.name = "cpu", .backend = "cpu", .slowdown = 1};
    for (int type = 0; type < HAPT_DTYPE_COUNT; type++) device->peak_flops[type] = cores * host->core_flops[type];
    device->memory_bytes = floor(host->memory_bytes / (host->ranks > 0 ? host->ranks : 1));
    device->memory_bandwidth = host->rank_bandwidth;
}

/* GPUs are used where every rank of the host finds one that a back end can open. */
static bool uses_gpus(const struct hapt_host *host)
{
    return host->gpus_usable >= host->ranks && host->gpu_count > 0;
}

/* A GPU that the database does not have, from what its driver says: lanes of its multiprocessors, matrix units four times as fast, and so much
 * memory bandwidth as such devices have for it. Measured profiles need no more. */
static void estimate_gpu(const struct hapt_host_gpu *gpu, struct hapt_device_spec *device)
{
    const double fp32 = 2.0 * (gpu->lanes > 0 ? gpu->lanes : 128) * gpu->processors * (gpu->clock_hz > 0 ? gpu->clock_hz : 1e9);
    *device = (struct hapt_device_spec){.backend = "cuda", .slowdown = 1, .memory_bandwidth = fp32 / 40};
    snprintf(device->name, sizeof device->name, "%.*s", (int)sizeof device->name - 1, gpu->name);
    device->peak_flops[HAPT_F32] = fp32;
    device->peak_flops[HAPT_BF16] = gpu->half_only ? 0 : 4 * fp32;
    device->peak_flops[HAPT_F16] = 4 * fp32;
    device->memory_bytes = gpu->memory_bytes > 4 * GPU_OVERHEAD ? gpu->memory_bytes - GPU_OVERHEAD : 0.75 * gpu->memory_bytes;
}

static enum hapt_status host_device(const struct hapt_host *host, struct hapt_device_spec *device)
{
    if (!uses_gpus(host)) {
        hapt_host_cpu_device(host, device);
        return HAPT_OK;
    }
    const struct hapt_device_spec *known = hapt_device_spec_find(host->gpu[0].spec);
    if (!known && host->gpu[0].processors > 0) {
        estimate_gpu(&host->gpu[0], device);
        return HAPT_OK;
    }
    if (!known)
        return hapt_fail(HAPT_ERR_INPUT, "describe it in a cluster file: hapt topology --help",
                         "the GPU \"%s\" of host %s is not in the device database", host->gpu[0].name, host->name);
    *device = *known;
    /* The context, code of the libraries and buffers of NCCL take their part. */
    const double there = host->gpu[0].memory_bytes - GPU_OVERHEAD;
    if (there > 0 && there < device->memory_bytes) device->memory_bytes = there;
    return HAPT_OK;
}

static bool alike(const struct hapt_host *a, const struct hapt_host *b)
{
    /* Equal machines differ by what their firmware keeps. */
    const bool memory = fabs(a->memory_bytes - b->memory_bytes) <= 0.02 * fmax(a->memory_bytes, b->memory_bytes);
    if (a->ranks != b->ranks || !memory || uses_gpus(a) != uses_gpus(b)) return false;
    const bool known = a->gpu[0].spec[0] != '\0';
    if (uses_gpus(a))
        return strcmp(a->gpu[0].spec, b->gpu[0].spec) == 0 && a->gpu[0].memory_bytes == b->gpu[0].memory_bytes &&
               (known || strcmp(a->gpu[0].name, b->gpu[0].name) == 0);
    return a->cores == b->cores && strcmp(a->cpu_model, b->cpu_model) == 0;
}

/* "a100-40gb"; "-2" and so on behind where the name is taken. */
static void name_subcluster(struct hapt_cluster *cluster, int index)
{
    struct hapt_subcluster *own = &cluster->subcluster[index];
    char base[48];
    snprintf(base, sizeof base, "%.47s", own->device.name);
    for (char *c = base; *c; c++) *c = (char)tolower((unsigned char)*c);
    int same = 1;
    for (int i = 0; i < index; i++) same += strcmp(cluster->subcluster[i].device.name, own->device.name) == 0;
    if (same == 1)
        snprintf(own->name, sizeof own->name, "%s", base);
    else
        snprintf(own->name, sizeof own->name, "%s-%d", base, same);
}

/* One subcluster out of the hosts whose group is `index`. */
static enum hapt_status fill_subcluster(const struct hapt_hosts *hosts, const int *group, int world_size, int index,
                                        struct hapt_arena *arena, struct hapt_cluster *cluster, int *subcluster_of_rank)
{
    struct hapt_subcluster *own = &cluster->subcluster[index];
    int *ranks, placed = 0;
    for (int h = 0; h < hosts->count; h++) {
        if (group[h] != index) continue;
        struct hapt_device_spec device;
        HAPT_TRY(host_device(&hosts->host[h], &device));
        if (own->nodes++ == 0) {
            own->device = device;
            own->devices_per_node = hosts->host[h].ranks;
            continue;
        }
        /* The slowest and smallest of them speaks for all. */
        for (int type = 0; type < HAPT_DTYPE_COUNT; type++)
            own->device.peak_flops[type] = fmin(own->device.peak_flops[type], device.peak_flops[type]);
        own->device.memory_bytes = fmin(own->device.memory_bytes, device.memory_bytes);
        own->device.memory_bandwidth = fmin(own->device.memory_bandwidth, device.memory_bandwidth);
    }
    HAPT_NEW(ranks, arena, own->nodes * own->devices_per_node);
    HAPT_NEW(own->hosts, arena, own->nodes);
    for (int h = 0; h < hosts->count; h++) {
        if (group[h] != index) continue;
        own->hosts[own->host_count] = hapt_arena_strdup(arena, hosts->host[h].name);
        if (!own->hosts[own->host_count++]) return HAPT_ERR_MEMORY;
        for (int rank = 0; rank < world_size; rank++) {
            if (hosts->host_of_rank[rank] != h) continue;
            subcluster_of_rank[rank] = index;
            ranks[placed++] = rank;
        }
    }
    own->ranks = ranks;
    own->intra_node_latency = own->inter_node_latency = -1;
    cluster->rank_count += placed;
    name_subcluster(cluster, index);
    return HAPT_OK;
}

enum hapt_status hapt_cluster_group(const struct hapt_hosts *hosts, int world_size, struct hapt_arena *arena,
                                    struct hapt_cluster **result)
{
    struct hapt_cluster *cluster;
    int *group, *subcluster_of_rank, count = 0;
    HAPT_NEW(cluster, arena, 1);
    HAPT_NEW(group, arena, hosts->count);
    HAPT_NEW(subcluster_of_rank, arena, world_size);
    for (int h = 0; h < hosts->count; h++) {
        int first = 0;
        while (first < h && !alike(&hosts->host[first], &hosts->host[h])) first++;
        group[h] = first < h ? group[first] : count++;
    }
    if (count > HAPT_MAX_SUBCLUSTERS)
        return hapt_fail(HAPT_ERR_INPUT, "describe the cluster in a file (--cluster), with like hosts in one subcluster",
                         "the hosts form %d different subclusters, more than %d", count, HAPT_MAX_SUBCLUSTERS);
    cluster->count = count;
    HAPT_NEW(cluster->subcluster, arena, count);
    HAPT_NEW(cluster->link, arena, count * count);
    for (int i = 0; i < count * count; i++) cluster->link[i] = (struct hapt_link){.latency = -1};
    for (int i = 0; i < count; i++)
        HAPT_TRY(fill_subcluster(hosts, group, world_size, i, arena, cluster, subcluster_of_rank));
    cluster->subcluster_of_rank = subcluster_of_rank;
    HAPT_TRY(hapt_cluster_check(cluster));
    *result = cluster;
    return HAPT_OK;
}
