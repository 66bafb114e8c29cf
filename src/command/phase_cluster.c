/* Loads or discovers the cluster, chooses devices and checks links: hapt_phase_cluster. */
#include <stdio.h>
#include <string.h>

#include "hapt/device.h"
#include "phases.h"

/* True if every back end of the cluster has devices here; otherwise the cluster can only be planned for. Collective:
 * same result on every rank. */
static bool has_devices_here(const struct hapt_env *env, const struct hapt_cluster *cluster)
{
    enum hapt_status status = HAPT_OK;
    for (int c = 0; c < cluster->count; c++) {
        const char *reason = "";
        const struct hapt_backend *backend = hapt_backend_find(hapt_device_backend(&cluster->subcluster[c].device));
        if (!backend || backend->device_count(&reason) == 0) status = HAPT_ERR_INFEASIBLE;
    }
    return hapt_env_agree_quietly(env->world, status) == HAPT_OK;
}

/* Measures missing link values and chooses the network of each link. */
static enum hapt_status measure_links(struct hapt_env *env, const struct hapt_config *config, struct hapt_arena *arena,
                                      struct hapt_cluster *cluster)
{
    int count;
    struct hapt_cluster_route *route;
    HAPT_TRY(hapt_cluster_bind_cores(env, hapt_config_bool(config, "bind"), arena, cluster)); /* final CPU binding */
    HAPT_TRY(hapt_cluster_choose_routes(env, false, arena, cluster, &count, &route));
    return hapt_cluster_probe(env, cluster);
}

static enum hapt_status require_gpus(const struct hapt_cluster *cluster)
{
    for (int c = 0; c < cluster->count; c++) {
        const struct hapt_subcluster *own = &cluster->subcluster[c];
        const struct hapt_backend *backend = hapt_backend_find("cuda");
        const char *reason = "";
        if (strcmp(own->device.backend, "cuda") == 0) continue;
        const int devices = backend ? backend->device_count(&reason) : 0;
        if (cluster->from_file || devices > 0)
            return hapt_fail(HAPT_ERR_INPUT,
                             cluster->from_file
                                 ? "name GPUs in the cluster file (hapt help topology), or leave out --device"
                                 : "start at most one rank for each GPU of a host, or leave out --device",
                             "--device cuda: the devices of subcluster %s are %s", own->name, own->device.name);
        return hapt_fail(
            HAPT_ERR_INPUT,
            "run hapt doctor to see what is missing, or use --device cpu (cores) or --device emulated (rehearsal)",
            "--device cuda: no GPU can be used here: %s", reason);
    }
    return HAPT_OK;
}

/* Applies --device. */
static enum hapt_status choose_devices(const struct hapt_config *config, struct hapt_cluster *cluster)
{
    const char *choice = hapt_config_text(config, "device");
    if (strcmp(choice, "cuda") == 0) return require_gpus(cluster);
    if (strcmp(choice, "emulated") == 0) hapt_cluster_emulate(cluster);
    for (int c = 0; strcmp(choice, "cpu") == 0 && c < cluster->count; c++)
        snprintf(cluster->subcluster[c].device.backend, sizeof cluster->subcluster[c].device.backend, "%s", choice);
    return HAPT_OK;
}

enum hapt_status hapt_phase_cluster(struct hapt_env *env, struct hapt_config *config, bool bind,
                                    struct hapt_arena *arena, struct hapt_cluster **cluster)
{
    const char *path = hapt_config_text(config, "cluster");
    if (!path) {
        HAPT_TRY(hapt_cluster_discover(env, arena, cluster));
        HAPT_TRY(hapt_env_agree(env->world, choose_devices(config, *cluster)));
        return (*cluster)->subcluster[0].device.emulated ? HAPT_OK : measure_links(env, config, arena, *cluster);
    }
    HAPT_TRY(hapt_env_agree(env->world, hapt_cluster_load(path, arena, cluster)));
    HAPT_TRY(hapt_env_agree(env->world, choose_devices(config, *cluster)));
    const bool emulated = (*cluster)->subcluster[0].device.emulated;
    const bool paper = env->world_size < (*cluster)->rank_count || !has_devices_here(env, *cluster) ||
                       hapt_config_bool(config, "predict");
    if (!bind && paper) {
        hapt_cluster_assume(*cluster);
        return HAPT_OK;
    }
    HAPT_TRY(hapt_cluster_bind(env, arena, *cluster));
    return emulated ? HAPT_OK : measure_links(env, config, arena, *cluster);
}
