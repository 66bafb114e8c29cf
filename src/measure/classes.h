/*
 * Assigns measurements to ranks. Subclusters on one host with the same back end (for GPUs also the same kind) form a
 * class. They share measurements of CPU or device time; their slowdowns are factors.
 */
#ifndef HAPT_MEASURE_CLASSES_H
#define HAPT_MEASURE_CLASSES_H

#include "hapt/candidates.h"

struct classes {
    int count;
    int of_subcluster[HAPT_MAX_SUBCLUSTERS];
    int own_class;       /* -1: idle rank */
    int active, actives; /* my index among the measuring ranks of my class (-1: none), and their number */
    bool is_lead;        /* lowest rank of its class */
};

/* `threads`: of this rank. Collective over env->world. */
enum hapt_status classes_find(const struct hapt_env *env, const struct hapt_cluster *cluster, int threads,
                              struct classes *classes);
/* Memory of the largest device of my class. */
double classes_memory(const struct hapt_cluster *cluster, const struct classes *classes);
/* Opens this rank's device for an engine of one slot, with options->threads and ->state_count. Without such a device
 * HAPT_ERR_INPUT: it cannot `do_what`. Rank-local. */
enum hapt_status classes_open_device(const struct hapt_env *env, const struct hapt_cluster *cluster,
                                     const char *do_what, const char *hint, struct hapt_engine_options *options);
/* Checks that all ranks found the same structures, since their tables are indexed by structure. (A rank short of
 * memory treats all structures as different.) Otherwise HAPT_ERR_MEMORY on every rank. Collective over env->world. */
enum hapt_status classes_same_structures(const struct hapt_env *env, const struct hapt_candidates *candidates);

#endif
