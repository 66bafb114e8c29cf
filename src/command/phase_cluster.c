/* The cluster of a command: apart from the other phases, since topology and doctor need nothing else. */
#include "phases.h"

enum hapt_status hapt_phase_cluster(struct hapt_env *env, struct hapt_config *config, bool bind, struct hapt_arena *arena,
                                    struct hapt_cluster **cluster)
{
    const char *path = hapt_config_text(config, "cluster");
    if (!path) {
        HAPT_TRY(hapt_cluster_discover(env, arena, cluster));
        return hapt_cluster_probe(env, *cluster);
    }
    HAPT_TRY(hapt_env_agree(env->world, hapt_cluster_load(path, arena, cluster)));
    if (!bind && env->world_size < (*cluster)->rank_count) {
        hapt_cluster_assume(*cluster);
        return HAPT_OK;
    }
    HAPT_TRY(hapt_cluster_bind(env, arena, *cluster));
    return hapt_cluster_probe(env, *cluster);
}
