/* Predicted seconds of the collectives of a submesh, from the latency and bandwidth of its links. */
#ifndef HAPT_SUBMESH_COST_H
#define HAPT_SUBMESH_COST_H

#include "hapt/calibration.h"
#include "hapt/profile.h"

/* All-reduce of `bytes` among `ranks` peers, each with a link of that bandwidth and latency; the faster of two
 * algorithms (Sanders, Speck and Traeff 2009). A ring has 2 (p - 1) rounds of bytes / p. Two trees at once have 2 log2
 * p rounds and twice the bytes. */
double hapt_links_all_reduce_s(int ranks, double bytes, double bandwidth, double latency);
/* Any collective among such peers on `bytes` (all shards together). `largest_share`: the part in the largest shard;
 * 0: even shards. Reduce-scatter and all-gather cost half an all-reduce. */
double hapt_links_collective_s(enum hapt_collective_kind kind, int ranks, double bytes, double largest_share,
                               double bandwidth, double latency);
/* Inside a node: the sum over one tensor-parallel group of neighbours. */
double hapt_submesh_tensor_s(const struct hapt_subcluster *subcluster, int tp, double bytes);
/* Gradients of `bytes` per device over a submesh's data-parallel groups: first inside the nodes, all groups at
 * once, then the pieces between the nodes over the nodes' shared links. */
double hapt_submesh_gradients_s(const struct hapt_subcluster *subcluster, struct hapt_submesh submesh, double bytes);
/* Predicted seconds of a collective of a stage's program. `axis`: of the submesh; in plain programs axis 0 is
 * data-parallel, axis 1 tensor-parallel. `bytes`: of all shards along the axis together (0: shares are even).
 * `efficiency` NULL: the built-in tables. */
double hapt_submesh_collective_s(const struct hapt_cluster *cluster, int subcluster, struct hapt_submesh submesh,
                                 enum hapt_dtype dtype, const struct hapt_efficiency *efficiency, int axis,
                                 enum hapt_collective_kind kind, double bytes);

#endif
