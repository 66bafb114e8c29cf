/* Discovers the cluster that this job runs on. */
#include "subclusters.h"

enum hapt_status hapt_cluster_discover(const struct hapt_env *env, struct hapt_arena *arena,
                                       struct hapt_cluster **cluster)
{
    struct hapt_hosts *hosts;
    enum hapt_status status = hapt_hosts_gather(env, arena, &hosts);
    if (status == HAPT_OK) status = hapt_cluster_form_subclusters(hosts, env->world_size, arena, cluster);
    return hapt_env_agree(env->world, status);
}
