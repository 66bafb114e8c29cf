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

void hapt_host_gpu_kind(const struct hapt_host_gpu *gpu, char name[64])
{
    snprintf(name, 64, "%s", gpu->spec[0] ? gpu->spec : gpu->name);
    for (char *c = name; *c; c++)
        if ((unsigned char)*c <= 0x20 || *c == 0x7f) *c = '-';
}

/* A GPU that the database does not have, from what its driver says: lanes of its multiprocessors, matrix units four
 * times as fast, and so much memory bandwidth as such devices have for it. Measured profiles need no more. */
static void estimate_gpu(const struct hapt_host_gpu *gpu, struct hapt_device_spec *device)
{
    const double fp32 =
        2.0 * (gpu->lanes > 0 ? gpu->lanes : 128) * gpu->processors * (gpu->clock_hz > 0 ? gpu->clock_hz : 1e9);
    *device = (struct hapt_device_spec){.backend = "cuda", .slowdown = 1, .memory_bandwidth = fp32 / 40};
    hapt_host_gpu_kind(gpu, device->name);
    device->peak_flops[HAPT_F32] = fp32;
    device->peak_flops[HAPT_BF16] = gpu->half_only ? 0 : 4 * fp32;
    device->peak_flops[HAPT_F16] = 4 * fp32;
    device->memory_bytes =
        gpu->memory_bytes > 4 * GPU_OVERHEAD ? gpu->memory_bytes - GPU_OVERHEAD : 0.75 * gpu->memory_bytes;
}

static enum hapt_status gpu_device(const struct hapt_host *host, const struct hapt_host_gpu *gpu,
                                   struct hapt_device_spec *device)
{
    const struct hapt_device_spec *known = hapt_device_spec_find(gpu->spec);
    if (!known && gpu->processors > 0) {
        estimate_gpu(gpu, device);
        return HAPT_OK;
    }
    if (!known)
        return hapt_fail(HAPT_ERR_INPUT, "describe it in a cluster file: hapt topology --help",
                         "the GPU \"%s\" of host %s is not in the device database", gpu->name, host->name);
    *device = *known;
    /* The context, code of the libraries and buffers of NCCL take their part. */
    const double there = gpu->memory_bytes - GPU_OVERHEAD;
    if (there > 0 && there < device->memory_bytes) device->memory_bytes = there;
    return HAPT_OK;
}

const struct hapt_host_gpu *hapt_host_gpu_of(const struct hapt_host *host, int host_rank)
{
    return host->gpus_usable > 0 && host->gpu_count > 0 ? &host->gpu[host_rank % host->gpus_usable % host->gpu_count]
                                                        : NULL;
}

bool hapt_host_gpus_alike(const struct hapt_host_gpu *a, const struct hapt_host_gpu *b)
{
    return strcmp(a->spec, b->spec) == 0 && a->memory_bytes == b->memory_bytes &&
           (a->spec[0] || strcmp(a->name, b->name) == 0);
}

/* The kinds of devices of a host, in the order of its ranks, and how many ranks have each. */
struct kinds {
    int count, ranks[HAPT_HOST_GPUS];
    const struct hapt_host_gpu *gpu[HAPT_HOST_GPUS]; /* NULL: a share of the cores */
    int subcluster[HAPT_HOST_GPUS];                  /* of the first host of its class; -1: not numbered yet */
};

struct grouping {
    const struct hapt_hosts *hosts;
    struct kinds *kinds; /* [hosts] */
    int *alike;          /* [hosts] the first host that is like it */
    int *kind;           /* [world_size] of a rank, in its host's list */
    int *subcluster;     /* [world_size] */
    int count;           /* subclusters */
};

static int find_kind(const struct kinds *kinds, const struct hapt_host_gpu *gpu)
{
    int k = 0;
    while (k < kinds->count && gpu && !hapt_host_gpus_alike(kinds->gpu[k], gpu)) k++;
    return k;
}

static void list_kinds(struct grouping *grouping, int world_size, int *seen)
{
    for (int rank = 0; rank < world_size; rank++) {
        const int h = grouping->hosts->host_of_rank[rank];
        const struct hapt_host *host = &grouping->hosts->host[h];
        struct kinds *kinds = &grouping->kinds[h];
        const struct hapt_host_gpu *gpu = uses_gpus(host) ? hapt_host_gpu_of(host, seen[h]++) : NULL;
        const int k = find_kind(kinds, gpu);
        if (k == kinds->count) {
            kinds->subcluster[k] = -1;
            kinds->gpu[kinds->count++] = gpu;
        }
        kinds->ranks[k]++;
        grouping->kind[rank] = k;
    }
}

static bool alike(const struct grouping *grouping, int first, int other)
{
    const struct hapt_host *a = &grouping->hosts->host[first], *b = &grouping->hosts->host[other];
    const struct kinds *mine = &grouping->kinds[first], *its = &grouping->kinds[other];
    /* Equal machines differ by what their firmware keeps. */
    const bool memory = fabs(a->memory_bytes - b->memory_bytes) <= 0.02 * fmax(a->memory_bytes, b->memory_bytes);
    if (a->ranks != b->ranks || !memory || uses_gpus(a) != uses_gpus(b)) return false;
    if (!uses_gpus(a)) return a->cores == b->cores && strcmp(a->cpu_model, b->cpu_model) == 0;
    if (mine->count != its->count) return false;
    for (int k = 0; k < mine->count; k++) {
        const int same = find_kind(its, mine->gpu[k]);
        if (same == its->count || its->ranks[same] != mine->ranks[k]) return false;
    }
    return true;
}

/* One subcluster for each class of hosts and kind of device, in the order of their lowest ranks. */
static void number_subclusters(struct grouping *grouping, int world_size)
{
    for (int h = 0; h < grouping->hosts->count; h++) {
        int first = 0;
        while (first < h && !alike(grouping, first, h)) first++;
        grouping->alike[h] = first < h ? grouping->alike[first] : h;
    }
    for (int rank = 0; rank < world_size; rank++) {
        const int h = grouping->hosts->host_of_rank[rank];
        struct kinds *kinds = &grouping->kinds[grouping->alike[h]];
        int *number = &kinds->subcluster[find_kind(kinds, grouping->kinds[h].gpu[grouping->kind[rank]])];
        if (*number < 0) *number = grouping->count++;
        grouping->subcluster[rank] = *number;
    }
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

/* The slowest and smallest device speaks for all. */
static void take_least(struct hapt_device_spec *least, const struct hapt_device_spec *device)
{
    for (int type = 0; type < HAPT_DTYPE_COUNT; type++)
        least->peak_flops[type] = fmin(least->peak_flops[type], device->peak_flops[type]);
    least->memory_bytes = fmin(least->memory_bytes, device->memory_bytes);
    least->memory_bandwidth = fmin(least->memory_bandwidth, device->memory_bandwidth);
}

/* The ranks of a host that are part of subcluster `index`; *kind of one of them. */
static int count_members(const struct grouping *grouping, int world_size, int index, int h, int *kind)
{
    int members = 0;
    for (int rank = 0; rank < world_size; rank++)
        if (grouping->subcluster[rank] == index && grouping->hosts->host_of_rank[rank] == h) {
            members++;
            *kind = grouping->kind[rank];
        }
    return members;
}

static enum hapt_status fill_subcluster(const struct grouping *grouping, int world_size, int index,
                                        struct hapt_arena *arena, struct hapt_cluster *cluster)
{
    const struct hapt_hosts *hosts = grouping->hosts;
    struct hapt_subcluster *own = &cluster->subcluster[index];
    int *ranks, placed = 0;
    HAPT_NEW(ranks, arena, world_size);
    HAPT_NEW(own->hosts, arena, hosts->count);
    for (int h = 0; h < hosts->count; h++) {
        struct hapt_device_spec device;
        int kind = 0;
        const int members = count_members(grouping, world_size, index, h, &kind);
        if (members == 0) continue;
        const struct hapt_host_gpu *gpu = grouping->kinds[h].gpu[kind];
        if (gpu)
            HAPT_TRY(gpu_device(&hosts->host[h], gpu, &device));
        else
            hapt_host_cpu_device(&hosts->host[h], &device);
        if (own->nodes++ == 0) own->device = device;
        take_least(&own->device, &device);
        own->devices_per_node = members;
        own->hosts[own->host_count] = hapt_arena_strdup(arena, hosts->host[h].name);
        if (!own->hosts[own->host_count++]) return HAPT_ERR_MEMORY;
        for (int rank = 0; rank < world_size; rank++)
            if (grouping->subcluster[rank] == index && hosts->host_of_rank[rank] == h) ranks[placed++] = rank;
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
    struct grouping grouping = {.hosts = hosts};
    int *seen;
    HAPT_NEW(cluster, arena, 1);
    HAPT_NEW(grouping.kinds, arena, hosts->count);
    HAPT_NEW(grouping.alike, arena, hosts->count);
    HAPT_NEW(grouping.kind, arena, world_size);
    HAPT_NEW(grouping.subcluster, arena, world_size);
    HAPT_NEW(seen, arena, hosts->count);
    list_kinds(&grouping, world_size, seen);
    number_subclusters(&grouping, world_size);
    const int count = grouping.count;
    if (count > HAPT_MAX_SUBCLUSTERS)
        return hapt_fail(HAPT_ERR_INPUT,
                         "describe the cluster in a file (--cluster), with like hosts in one subcluster",
                         "the hosts form %d different subclusters, more than %d", count, HAPT_MAX_SUBCLUSTERS);
    cluster->count = count;
    HAPT_NEW(cluster->subcluster, arena, count);
    HAPT_NEW(cluster->link, arena, count * count);
    for (int i = 0; i < count * count; i++) cluster->link[i] = (struct hapt_link){.latency = -1};
    for (int i = 0; i < count; i++) HAPT_TRY(fill_subcluster(&grouping, world_size, i, arena, cluster));
    cluster->subcluster_of_rank = grouping.subcluster;
    HAPT_TRY(hapt_cluster_check(cluster));
    *result = cluster;
    return HAPT_OK;
}
