/* Shared by probe.c (link values) and routes.c (choice of network). */
#ifndef HAPT_CLUSTER_PROBE_H
#define HAPT_CLUSTER_PROBE_H

#include "hapt/cluster.h"

/* Barrier of all ranks. Waiting ranks sleep, so that the measuring pair has the cores. */
void probe_barrier(const struct hapt_env *env, double deadline_s);

#endif
