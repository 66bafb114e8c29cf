#include "bind.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "subclusters.h"
#include "hapt/device.h"

/* Are the names equal? A missing domain matches any domain. */
static bool same_host(const char *a, const char *b)
{
    const size_t short_a = strcspn(a, "."), short_b = strcspn(b, ".");
    if (strcmp(a, b) == 0) return true;
    return (!a[short_a] || !b[short_b]) && short_a == short_b && strncmp(a, b, short_a) == 0;
}

static int find_host(const struct hapt_hosts *hosts, const char *name)
{
    for (int h = 0; h < hosts->count; h++)
        if (same_host(hosts->host[h].name, name)) return h;
    return hosts->count == 1 && strcmp(name, "localhost") == 0 ? 0 : -1;
}

struct binding {
    const struct hapt_hosts *hosts;
    int world_size;
    const struct hapt_cluster *cluster;
    const struct hapt_host_gpu *
        *gpu; /* [world_size] GPU of each rank; NULL: at most one kind of GPU, so any rank fits */
    int *subcluster_of_rank;
};

static bool is_kind(const struct hapt_device_spec *device, const struct hapt_host_gpu *gpu)
{
    char kind[64];
    hapt_host_gpu_kind(gpu, kind);
    return strcmp(device->backend, "cuda") == 0 && strcmp(device->name, kind) == 0;
}

/* How well a rank fits a subcluster: 2 if it drives the subcluster's GPU, 1 if no subcluster names its GPU, 0 if
 * another one does. */
static int fitness(const struct binding *binding, int rank, int subcluster)
{
    const struct hapt_cluster *cluster = binding->cluster;
    if (!binding->gpu || !binding->gpu[rank]) return 1;
    if (is_kind(&cluster->subcluster[subcluster].device, binding->gpu[rank])) return 2;
    for (int c = 0; c < cluster->count; c++)
        if (is_kind(&cluster->subcluster[c].device, binding->gpu[rank])) return 0;
    return 1;
}

/* Takes the lowest free rank with the best fitness, on host `h` or on any host (h < 0); -1: none. */
static int take_rank(const struct binding *binding, int h, int subcluster)
{
    int best = -1;
    for (int rank = 0; rank < binding->world_size; rank++) {
        if (binding->subcluster_of_rank[rank] >= 0 || (h >= 0 && binding->hosts->host_of_rank[rank] != h)) continue;
        if (best < 0 || fitness(binding, rank, subcluster) > fitness(binding, best, subcluster)) best = rank;
    }
    if (best >= 0) binding->subcluster_of_rank[best] = subcluster;
    return best;
}

/* Lists the ranks' GPUs if the hosts have several kinds. */
static enum hapt_status find_gpus(struct binding *binding, struct hapt_arena *arena)
{
    const struct hapt_hosts *hosts = binding->hosts;
    const struct hapt_host_gpu **gpu, *one = NULL;
    int *seen;
    bool several = false;
    if (hosts->count == 0) return HAPT_OK;
    HAPT_NEW(gpu, arena, binding->world_size);
    HAPT_NEW(seen, arena, hosts->count);
    for (int rank = 0; rank < binding->world_size; rank++) {
        const int h = hosts->host_of_rank[rank];
        gpu[rank] = hapt_host_gpu_of(&hosts->host[h], seen[h]++);
        if (!one) one = gpu[rank];
        several = several || (gpu[rank] && !hapt_host_gpus_alike(gpu[rank], one));
    }
    if (several) binding->gpu = gpu;
    return HAPT_OK;
}

static enum hapt_status fill_by_host(const struct binding *binding, int index, int *ranks)
{
    const struct hapt_subcluster *own = &binding->cluster->subcluster[index];
    for (int node = 0; node < own->nodes; node++) {
        const int h = find_host(binding->hosts, own->hosts[node]);
        char hint[400];
        snprintf(hint, sizeof hint, "start %d ranks on each of its hosts, e.g. mpirun --host %.200s:%d,...",
                 own->devices_per_node, own->hosts[node], own->devices_per_node);
        if (h < 0)
            return hapt_fail(HAPT_ERR_INPUT, hint, "no rank runs on host %.200s of subcluster %s", own->hosts[node],
                             own->name);
        for (int device = 0; device < own->devices_per_node; device++) {
            const int rank = take_rank(binding, h, index);
            if (rank < 0)
                return hapt_fail(HAPT_ERR_INPUT, hint, "host %.200s has too few ranks for subcluster %s: %d of %d",
                                 own->hosts[node], own->name, device, own->devices_per_node);
            ranks[node * own->devices_per_node + device] = rank;
        }
    }
    return HAPT_OK;
}

/* Subclusters with host names choose first; the others take the remaining ranks. If GPUs differ, GPU subclusters choose
 * before CPU subclusters. */
static enum hapt_status fill_all(const struct binding *binding, int **ranks)
{
    const struct hapt_cluster *cluster = binding->cluster;
    for (int turn = 0; turn < 4; turn++)
        for (int i = 0; i < cluster->count; i++) {
            const struct hapt_subcluster *own = &cluster->subcluster[i];
            const bool late = binding->gpu && strcmp(own->device.backend, "cuda") != 0;
            if (turn != 2 * (own->host_count == 0) + late) continue;
            if (own->host_count > 0) HAPT_TRY(fill_by_host(binding, i, ranks[i]));
            for (int d = 0; own->host_count == 0 && d < own->nodes * own->devices_per_node; d++)
                ranks[i][d] = take_rank(binding, -1, i);
        }
    return HAPT_OK;
}

/* Checks that the hosts have the file's back end, and at least as many devices of it as ranks that use them. */
static enum hapt_status check_devices(const struct hapt_hosts *hosts, const struct hapt_subcluster *own)
{
    if (own->device.emulated || strcmp(own->device.backend, "cpu") == 0) return HAPT_OK;
    for (int i = 0; i < own->nodes * own->devices_per_node; i++) {
        const struct hapt_host *host = &hosts->host[hosts->host_of_rank[own->ranks[i]]];
        if (strcmp(own->device.backend, "cuda") == 0 && host->gpus_usable >= own->devices_per_node) continue;
        const char *reason = "";
        const struct hapt_backend *backend = hapt_backend_find(own->device.backend);
        if (backend && backend->device_count(&reason) > 0) reason = "";
        return hapt_fail(HAPT_ERR_INPUT, "hapt plan needs no devices; hapt doctor lists what is missing here",
                         "subcluster %s needs %d %s device%s (%s) on host %s, which offers %d%s%s", own->name,
                         own->devices_per_node, own->device.backend, own->devices_per_node == 1 ? "" : "s",
                         own->device.name, host->name, host->gpus_usable,
                         *reason   ? ": "
                         : backend ? ""
                                   : ": this build has no such back end",
                         reason);
    }
    return HAPT_OK;
}

/* Replaces the figures of `"device": "cpu"` by the lowest ones of its hosts. */
static void fit_cpu(const struct hapt_hosts *hosts, struct hapt_subcluster *own)
{
    const struct hapt_device_spec *database_spec = hapt_device_spec_find("cpu");
    struct hapt_device_spec *device = &own->device;
    if (device->emulated || strcmp(device->name, database_spec->name) != 0 ||
        memcmp(device->peak_flops, database_spec->peak_flops, sizeof database_spec->peak_flops) != 0)
        return;
    for (int i = 0; i < own->nodes * own->devices_per_node; i++) {
        struct hapt_device_spec found;
        hapt_host_cpu_device(&hosts->host[hosts->host_of_rank[own->ranks[i]]], &found);
        for (int type = 0; type < HAPT_DTYPE_COUNT; type++)
            device->peak_flops[type] =
                i == 0 ? found.peak_flops[type] : fmin(device->peak_flops[type], found.peak_flops[type]);
        device->memory_bandwidth =
            i == 0 ? found.memory_bandwidth : fmin(device->memory_bandwidth, found.memory_bandwidth);
        if (!device->memory_capped)
            device->memory_bytes = i == 0 ? found.memory_bytes : fmin(device->memory_bytes, found.memory_bytes);
    }
}

enum hapt_status hapt_cluster_assign(const struct hapt_hosts *hosts, int world_size, struct hapt_arena *arena,
                                     struct hapt_cluster *cluster)
{
    if (world_size < cluster->rank_count) {
        char hint[160];
        snprintf(hint, sizeof hint, "start one rank for each device: mpirun -np %d hapt ...", cluster->rank_count);
        return hapt_fail(HAPT_ERR_INPUT, hint, "the cluster has %d devices, but there %s only %d rank%s",
                         cluster->rank_count, world_size == 1 ? "is" : "are", world_size, world_size == 1 ? "" : "s");
    }
    int *ranks[HAPT_MAX_SUBCLUSTERS];
    struct binding binding = {.hosts = hosts, .world_size = world_size, .cluster = cluster};
    HAPT_NEW(binding.subcluster_of_rank, arena, world_size);
    for (int rank = 0; rank < world_size; rank++) binding.subcluster_of_rank[rank] = -1;
    for (int i = 0; i < cluster->count; i++)
        HAPT_NEW(ranks[i], arena, cluster->subcluster[i].nodes * cluster->subcluster[i].devices_per_node);
    HAPT_TRY(find_gpus(&binding, arena));
    HAPT_TRY(fill_all(&binding, ranks));
    for (int i = 0; i < cluster->count; i++) {
        cluster->subcluster[i].ranks = ranks[i];
        HAPT_TRY(check_devices(hosts, &cluster->subcluster[i]));
        fit_cpu(hosts, &cluster->subcluster[i]);
    }
    cluster->subcluster_of_rank = binding.subcluster_of_rank;
    return HAPT_OK;
}

/* Warns if a file names other GPUs than the drivers do. */
static void warn_gpu_names(const struct hapt_env *env, const struct hapt_hosts *hosts,
                           const struct hapt_cluster *cluster)
{
    int wrong = 0, first = -1;
    const struct hapt_host_gpu *its = NULL;
    for (int rank = 0; rank < env->world_size && hosts->count > 0; rank++) {
        const int own = cluster->subcluster_of_rank[rank], h = hosts->host_of_rank[rank];
        int host_rank = 0;
        for (int r = 0; r < rank; r++) host_rank += hosts->host_of_rank[r] == h;
        const struct hapt_host_gpu *gpu = hapt_host_gpu_of(&hosts->host[h], host_rank);
        if (own < 0 || !gpu || !gpu->spec[0] || strcmp(cluster->subcluster[own].device.backend, "cuda") != 0) continue;
        if (!hapt_device_spec_find(cluster->subcluster[own].device.name) ||
            is_kind(&cluster->subcluster[own].device, gpu))
            continue;
        if (wrong++ == 0) {
            first = rank;
            its = gpu;
        }
    }
    if (wrong > 0)
        hapt_warn(env,
                  "%d rank%s drive%s a GPU of another kind than in the cluster file: rank %d of subcluster %s (%s) "
                  "drives a %s\n",
                  wrong, wrong > 1 ? "s" : "", wrong > 1 ? "" : "s", first,
                  cluster->subcluster[cluster->subcluster_of_rank[first]].name,
                  cluster->subcluster[cluster->subcluster_of_rank[first]].device.name, its->spec);
}

enum hapt_status hapt_cluster_bind(const struct hapt_env *env, struct hapt_arena *arena, struct hapt_cluster *cluster)
{
    struct hapt_hosts none = {0}, *hosts = &none; /* emulated devices need nothing from their hosts */
    enum hapt_status status = cluster->subcluster[0].device.emulated ? HAPT_OK : hapt_hosts_gather(env, arena, &hosts);
    if (status == HAPT_OK) status = hapt_cluster_assign(hosts, env->world_size, arena, cluster);
    if (status == HAPT_OK) warn_gpu_names(env, hosts, cluster);
    return hapt_env_agree(env->world, status);
}
