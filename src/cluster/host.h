/* Describes this process's host; hapt/host.h gathers the hosts of all ranks. */
#ifndef HAPT_CLUSTER_HOST_H
#define HAPT_CLUSTER_HOST_H

#include "hapt/host.h"

/* Rank-local. Unknown values keep a modest default. */
void hapt_host_describe(const struct hapt_env *env, struct hapt_host *host);
/* The fake topology from the environment; "": none. */
void hapt_host_fake_key(char *key, size_t size);

#endif
