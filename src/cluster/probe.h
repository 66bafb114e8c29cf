/* Inside the measuring of links: what probe.c (values of links) and ways.c (which network) share. */
#ifndef HAPT_CLUSTER_PROBE_H
#define HAPT_CLUSTER_PROBE_H

#include "hapt/cluster.h"

/* All ranks meet; those that wait sleep, so that they leave the cores to the pair that measures. */
void probe_meet(const struct hapt_env *env, double deadline_s);

#endif
