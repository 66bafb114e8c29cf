/* The cluster and the threads of a command: apart from the other phases, since topology and doctor need nothing else.
 */
#include <stdio.h>
#include <string.h>

#include "hapt/device.h"
#include "phases.h"

/* Devices of a back end that has none here can be planned for, but never run on. Collective: the same answer on every
 * rank. */
static bool runs_here(const struct hapt_env *env, const struct hapt_cluster *cluster)
{
    enum hapt_status status = HAPT_OK;
    for (int c = 0; c < cluster->count; c++) {
        const char *reason = "";
        const struct hapt_backend *backend = hapt_backend_find(hapt_device_backend(&cluster->subcluster[c].device));
        if (!backend || backend->device_count(&reason) == 0) status = HAPT_ERR_INFEASIBLE;
    }
    return hapt_env_agree_quietly(env->world, status) == HAPT_OK;
}

/* Absent values of links, and the network that each one takes. */
static enum hapt_status look_at_links(struct hapt_env *env, const struct hapt_config *config, struct hapt_arena *arena,
                                      struct hapt_cluster *cluster)
{
    int count;
    struct hapt_cluster_way *way;
    HAPT_TRY(hapt_cluster_settle(env, hapt_config_bool(config, "bind"), arena, cluster)); /* where the ranks will run */
    HAPT_TRY(hapt_cluster_choose_ways(env, false, arena, cluster, &count, &way));
    return hapt_cluster_probe(env, cluster);
}

static enum hapt_status demand_gpus(const struct hapt_cluster *cluster)
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
                                 ? "name GPUs in the cluster file (hapt topology --help), or leave out --device"
                                 : "start at most one rank for each GPU of a host, or leave out --device",
                             "--device cuda: the devices of subcluster %s are %s", own->name, own->device.name);
        return hapt_fail(
            HAPT_ERR_INPUT,
            "hapt doctor says what is missing; --device cpu computes on cores, --device emulated rehearses",
            "--device cuda: no GPU can be used here: %s", reason);
    }
    return HAPT_OK;
}

/* --device. */
static enum hapt_status choose_devices(const struct hapt_config *config, struct hapt_cluster *cluster)
{
    const char *choice = hapt_config_text(config, "device");
    if (strcmp(choice, "cuda") == 0) return demand_gpus(cluster);
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
        return (*cluster)->subcluster[0].device.emulated ? HAPT_OK : look_at_links(env, config, arena, *cluster);
    }
    HAPT_TRY(hapt_env_agree(env->world, hapt_cluster_load(path, arena, cluster)));
    HAPT_TRY(hapt_env_agree(env->world, choose_devices(config, *cluster)));
    const bool emulated = (*cluster)->subcluster[0].device.emulated;
    const bool paper =
        env->world_size < (*cluster)->rank_count || !runs_here(env, *cluster) || hapt_config_bool(config, "predict");
    if (!bind && paper) {
        hapt_cluster_assume(*cluster);
        return HAPT_OK;
    }
    HAPT_TRY(hapt_cluster_bind(env, arena, *cluster));
    return emulated ? HAPT_OK : look_at_links(env, config, arena, *cluster);
}
