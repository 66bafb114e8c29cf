#include "subclusters.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define GPU_OVERHEAD 1.5e9 /* bytes: CUDA context, library code and NCCL buffers */

void hapt_host_cpu_device(const struct hapt_host *host, struct hapt_device_spec *device)
{
    const double cores = hapt_host_cores_per_rank(host);
    *device = (struct hapt_device_spec){.name = "cpu", .backend = "cpu", .slowdown = 1};
    for (int type = 0; type < HAPT_DTYPE_COUNT; type++) device->peak_flops[type] = cores * host->core_flops[type];
    device->memory_bytes = floor(host->memory_bytes / (host->ranks > 0 ? host->ranks : 1));
    device->memory_bandwidth = host->rank_bandwidth;
}

/* GPUs are used if each rank of the host has one that a back end can open. */
static bool uses_gpus(const struct hapt_host *host)
{
    return host->gpus_usable >= host->ranks && host->gpu_count > 0;
}

double hapt_host_gpu_usable_bytes(double memory_bytes)
{
    return memory_bytes > 4 * GPU_OVERHEAD ? memory_bytes - GPU_OVERHEAD : 0.75 * memory_bytes;
}

void hapt_host_gpu_kind(const struct hapt_host_gpu *gpu, char name[64])
{
    snprintf(name, 64, "%s", gpu->spec[0] ? gpu->spec : gpu->name);
    for (char *c = name; *c; c++)
        if ((unsigned char)*c <= 0x20 || *c == 0x7f) *c = '-';
}

/* Estimates a GPU that is not in the database from its driver's figures: its fp32 lanes, matrix units four times as
 * fast, and the memory bandwidth usual for such a rate. This suffices for measured profiles. */
static void estimate_gpu(const struct hapt_host_gpu *gpu, struct hapt_device_spec *device)
{
    const double fp32 = 2.0 * (gpu->lanes_per_processor > 0 ? gpu->lanes_per_processor : 128) * gpu->processors *
                        (gpu->clock_hz > 0 ? gpu->clock_hz : 1e9);
    *device = (struct hapt_device_spec){.backend = "cuda", .slowdown = 1, .memory_bandwidth = fp32 / 40};
    hapt_host_gpu_kind(gpu, device->name);
    device->peak_flops[HAPT_F32] = fp32;
    device->peak_flops[HAPT_BF16] = gpu->no_bf16 ? 0 : 4 * fp32;
    device->peak_flops[HAPT_F16] = 4 * fp32;
    device->memory_bytes = hapt_host_gpu_usable_bytes(gpu->memory_bytes);
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
        return hapt_fail(HAPT_ERR_INPUT, "describe it in a cluster file: hapt help topology",
                         "the GPU \"%s\" of host %s is not in the device database", gpu->name, host->name);
    *device = *known;
    const double there = hapt_host_gpu_usable_bytes(gpu->memory_bytes);
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

/* The kinds of devices of a host, ordered by its ranks, and the number of ranks of each kind. */
struct kinds {
    int count, ranks[HAPT_HOST_GPUS];
    const struct hapt_host_gpu *gpu[HAPT_HOST_GPUS]; /* NULL: a share of the cores */
    int subcluster[HAPT_HOST_GPUS];                  /* of the first host of its class; -1: not numbered yet */
};

struct formation {
    const struct hapt_hosts *hosts;
    struct kinds *kinds; /* [hosts] */
    int *alike;          /* [hosts] first host of the same class */
    int *kind;           /* [world_size] index of the rank's kind in its host's list */
    int *subcluster;     /* [world_size] */
    int count;           /* subclusters */
};

static int find_kind(const struct kinds *kinds, const struct hapt_host_gpu *gpu)
{
    int k = 0;
    while (k < kinds->count && gpu && !hapt_host_gpus_alike(kinds->gpu[k], gpu)) k++;
    return k;
}

static void list_kinds(struct formation *formation, int world_size, int *seen)
{
    for (int rank = 0; rank < world_size; rank++) {
        const int h = formation->hosts->host_of_rank[rank];
        const struct hapt_host *host = &formation->hosts->host[h];
        struct kinds *kinds = &formation->kinds[h];
        const struct hapt_host_gpu *gpu = uses_gpus(host) ? hapt_host_gpu_of(host, seen[h]++) : NULL;
        const int k = find_kind(kinds, gpu);
        if (k == kinds->count) {
            kinds->subcluster[k] = -1;
            kinds->gpu[kinds->count++] = gpu;
        }
        kinds->ranks[k]++;
        formation->kind[rank] = k;
    }
}

static bool alike(const struct formation *formation, int first, int other)
{
    const struct hapt_host *a = &formation->hosts->host[first], *b = &formation->hosts->host[other];
    const struct kinds *mine = &formation->kinds[first], *its = &formation->kinds[other];
    /* Firmware reserves different amounts of memory on equal machines. */
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

/* Numbers one subcluster per class of hosts and kind of device, ordered by lowest rank. */
static void number_subclusters(struct formation *formation, int world_size)
{
    for (int h = 0; h < formation->hosts->count; h++) {
        int first = 0;
        while (first < h && !alike(formation, first, h)) first++;
        formation->alike[h] = first < h ? formation->alike[first] : h;
    }
    for (int rank = 0; rank < world_size; rank++) {
        const int h = formation->hosts->host_of_rank[rank];
        struct kinds *kinds = &formation->kinds[formation->alike[h]];
        int *number = &kinds->subcluster[find_kind(kinds, formation->kinds[h].gpu[formation->kind[rank]])];
        if (*number < 0) *number = formation->count++;
        formation->subcluster[rank] = *number;
    }
}

/* "a100-40gb"; with "-2" and so on if the name is taken. */
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

/* Lowers each figure to the device's: a subcluster has the figures of its slowest and smallest device. */
static void take_least(struct hapt_device_spec *least, const struct hapt_device_spec *device)
{
    for (int type = 0; type < HAPT_DTYPE_COUNT; type++)
        least->peak_flops[type] = fmin(least->peak_flops[type], device->peak_flops[type]);
    least->memory_bytes = fmin(least->memory_bytes, device->memory_bytes);
    least->memory_bandwidth = fmin(least->memory_bandwidth, device->memory_bandwidth);
}

/* Counts the ranks of host `h` in subcluster `index`; *kind is the kind of one of them. */
static int count_members(const struct formation *formation, int world_size, int index, int h, int *kind)
{
    int members = 0;
    for (int rank = 0; rank < world_size; rank++)
        if (formation->subcluster[rank] == index && formation->hosts->host_of_rank[rank] == h) {
            members++;
            *kind = formation->kind[rank];
        }
    return members;
}

static enum hapt_status fill_subcluster(const struct formation *formation, int world_size, int index,
                                        struct hapt_arena *arena, struct hapt_cluster *cluster)
{
    const struct hapt_hosts *hosts = formation->hosts;
    struct hapt_subcluster *own = &cluster->subcluster[index];
    int *ranks, placed = 0;
    HAPT_NEW(ranks, arena, world_size);
    HAPT_NEW(own->hosts, arena, hosts->count);
    for (int h = 0; h < hosts->count; h++) {
        struct hapt_device_spec device;
        int kind = 0;
        const int members = count_members(formation, world_size, index, h, &kind);
        if (members == 0) continue;
        const struct hapt_host_gpu *gpu = formation->kinds[h].gpu[kind];
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
            if (formation->subcluster[rank] == index && hosts->host_of_rank[rank] == h) ranks[placed++] = rank;
    }
    own->ranks = ranks;
    own->intra_node_latency = own->inter_node_latency = -1;
    cluster->rank_count += placed;
    name_subcluster(cluster, index);
    return HAPT_OK;
}

enum hapt_status hapt_cluster_form_subclusters(const struct hapt_hosts *hosts, int world_size, struct hapt_arena *arena,
                                               struct hapt_cluster **result)
{
    struct hapt_cluster *cluster;
    struct formation formation = {.hosts = hosts};
    int *seen;
    HAPT_NEW(cluster, arena, 1);
    HAPT_NEW(formation.kinds, arena, hosts->count);
    HAPT_NEW(formation.alike, arena, hosts->count);
    HAPT_NEW(formation.kind, arena, world_size);
    HAPT_NEW(formation.subcluster, arena, world_size);
    HAPT_NEW(seen, arena, hosts->count);
    list_kinds(&formation, world_size, seen);
    number_subclusters(&formation, world_size);
    const int count = formation.count;
    if (count > HAPT_MAX_SUBCLUSTERS)
        return hapt_fail(HAPT_ERR_INPUT,
                         "describe the cluster in a file (--cluster), with similar hosts in one subcluster",
                         "the hosts form %d different subclusters; the maximum is %d", count, HAPT_MAX_SUBCLUSTERS);
    cluster->count = count;
    HAPT_NEW(cluster->subcluster, arena, count);
    HAPT_NEW(cluster->link, arena, count * count);
    for (int i = 0; i < count * count; i++) cluster->link[i] = (struct hapt_link){.latency = -1};
    for (int i = 0; i < count; i++) HAPT_TRY(fill_subcluster(&formation, world_size, i, arena, cluster));
    cluster->subcluster_of_rank = formation.subcluster;
    HAPT_TRY(hapt_cluster_check(cluster));
    *result = cluster;
    return HAPT_OK;
}
