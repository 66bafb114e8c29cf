/* The choice between devices that compute and modelled ones: the only place of this room that knows both. */
#include "runtime.h"

#include <string.h>

bool runtime_is_modelled(const struct hapt_config *config)
{
    return strcmp(hapt_config_text(config, "device"), "emulated") == 0;
}

const struct stage_runtime *runtime_of(const struct hapt_cluster *cluster)
{
    return cluster->subcluster[0].device.emulated ? &runtime_modelled : &runtime_computing;
}
