/* Looking at this process's own host; hapt/host.h gathers those of all ranks. */
#ifndef HAPT_CLUSTER_HOST_H
#define HAPT_CLUSTER_HOST_H

#include "hapt/host.h"

/* Rank-local. What cannot be found keeps a modest default. */
void hapt_host_look(const struct hapt_env *env, struct hapt_host *host);
/* The environment's fake topology, "" for none. */
void hapt_host_fake_key(char *key, size_t size);

#endif
