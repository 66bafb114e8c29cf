#include "phases.h"

enum hapt_status hapt_phase_profile(struct hapt_env *env, struct hapt_config *config, const struct hapt_cluster *cluster,
                                    const struct hapt_model *model, const struct hapt_layers *layers,
                                    struct hapt_arena *arena, struct hapt_profile **profile)
{
    const char *path = hapt_config_command(config) == HAPT_COMMAND_PROFILE ? NULL : hapt_config_text(config, "profile");
    if (path) return hapt_profile_load_shared(env, path, arena, profile);
    const bool bound = cluster->subcluster_of_rank != NULL;
    if (bound && !hapt_config_bool(config, "predict"))
        return hapt_profile_measure(env, cluster, model, layers, config, arena, profile);
    return hapt_env_agree(env->world, hapt_profile_predict(cluster, model, layers, config, arena, profile));
}
