/*
 * Who measures what: subclusters of one back end, and of GPUs one kind, on one host form a class and share measurements
 * (CPU time, or a device's; their slowdowns are factors).
 */
#ifndef HAPT_PROFILE_CLASSES_H
#define HAPT_PROFILE_CLASSES_H

#include "candidates.h"

struct classes {
    int count;
    int of_subcluster[HAPT_MAX_SUBCLUSTERS];
    int mine;            /* -1: idle rank */
    int active, actives; /* my place among the ranks of my class that measure (-1: none), and their number */
    bool leads;          /* lowest rank of its class */
};

/* `threads` of this rank. Collective over env->world. */
enum hapt_status classes_find(const struct hapt_env *env, const struct hapt_cluster *cluster, int threads,
                              struct classes *classes);
/* Ranks index their tables by structure, so all must have found the same ones (one that was short of memory takes none
 * as equal). HAPT_ERR_MEMORY on every rank where not. Collective over env->world. */
enum hapt_status classes_same_structures(const struct hapt_env *env, const struct candidates *candidates);

#endif
