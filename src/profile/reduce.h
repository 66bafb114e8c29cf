/* Seconds of a gradient all-reduce over a submesh: measured on its ranks, or predicted from the links. */
#ifndef HAPT_PROFILE_REDUCE_H
#define HAPT_PROFILE_REDUCE_H

#include "candidates.h"
#include "hapt/ops.h"

enum { REDUCE_SIZES = 4 };

struct reduce_table {
    int submesh_count; /* maximum over subclusters */
    double bytes[REDUCE_SIZES];
    double *time_s; /* [subcluster][submesh][REDUCE_SIZES] */
};

/* Measures every submesh of more than one device, one after the other, while all other ranks sleep. Gradients are
 * summed as in training: on the devices, through the host or on it. `options`: this rank's open device; none on an
 * idle rank. Collective over env->world; every rank gets the same table. */
enum hapt_status reduce_measure(const struct hapt_env *env, const struct hapt_cluster *cluster,
                                const struct hapt_engine_options *options, double timeout_s, struct hapt_arena *arena,
                                struct reduce_table *table);
double reduce_measured_s(const struct reduce_table *table, int subcluster, int submesh, double bytes);
/* All-reduce of `bytes` among `ranks` peers, each with a link of that bandwidth and latency; the faster of two
 * algorithms (Sanders, Speck and Traeff 2009). A ring has 2 (p - 1) rounds of bytes / p. Two trees at once have 2 log2
 * p rounds and twice the bytes. */
double reduce_all_reduce_s(int ranks, double bytes, double bandwidth, double latency);
/* Any collective among such peers on `bytes` (all shards together). `largest_share`: the part in the largest shard;
 * 0: even shards. Reduce-scatter and all-gather cost half an all-reduce. */
double reduce_collective_s(enum hapt_collective_kind kind, int ranks, double bytes, double largest_share,
                           double bandwidth, double latency);
/* Inside a node: the sum over one tensor-parallel group of neighbours. */
double reduce_tensor_s(const struct hapt_subcluster *subcluster, int tp, double bytes);
/* Gradients of `bytes` per device over a submesh's data-parallel groups: first inside the nodes, all groups at
 * once, then the pieces between the nodes over the nodes' shared links. */
double reduce_predicted_s(const struct hapt_subcluster *subcluster, struct hapt_submesh submesh, double bytes);

/* Barrier over `comm`; waiting ranks sleep instead of spinning. */
enum hapt_status reduce_barrier(MPI_Comm comm);

#endif
