/* Seconds of a gradient all-reduce over a submesh, measured on its ranks. */
#ifndef HAPT_MEASURE_MEASURE_SUMS_H
#define HAPT_MEASURE_MEASURE_SUMS_H

#include "hapt/candidates.h"

enum { SUMS_SIZES = 4 };

struct sums_table {
    int submesh_count; /* maximum over subclusters */
    double bytes[SUMS_SIZES];
    double *time_s; /* [subcluster][submesh][SUMS_SIZES] */
};

/* Measures every submesh of more than one device, one after the other, while all other ranks sleep. Gradients are
 * summed as in training: on the devices, through the host or on it. `options`: this rank's open device; none on an
 * idle rank. Collective over env->world; every rank gets the same table. */
enum hapt_status sums_measure(const struct hapt_env *env, const struct hapt_cluster *cluster,
                              const struct hapt_engine_options *options, double timeout_s, struct hapt_arena *arena,
                              struct sums_table *table);
double sums_measured_s(const struct sums_table *table, int subcluster, int submesh, double bytes);
/* Barrier over `comm`; waiting ranks sleep instead of spinning. */
enum hapt_status sums_barrier(MPI_Comm comm);

#endif
