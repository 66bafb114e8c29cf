/* Collectives over submeshes, from the links. */
#include "hapt/calibration.h"
#include "hapt/submesh_cost.h"

#include <math.h>

#include "hapt/link.h"

/* fraction of a link's bandwidth that all-reduces of well-tuned libraries reach */
#define LINK_SHARE 0.8

double hapt_links_all_reduce_s(int ranks, double bytes, double bandwidth, double latency)
{
    if (ranks < 2 || bytes <= 0) return 0;
    const double rate = bandwidth > 0 ? LINK_SHARE * bandwidth : INFINITY, hop_s = fmax(latency, 0);
    const double ring_s = hapt_ring_s(HAPT_COLLECTIVE_ALL_REDUCE, ranks, bytes, 0, rate, hop_s);
    const double trees_s = 2 * (ceil(log2(ranks)) * hop_s + bytes / rate);
    return fmin(ring_s, trees_s);
}

double hapt_links_collective_s(enum hapt_collective_kind kind, int ranks, double bytes, double largest_share,
                               double bandwidth, double latency)
{
    const double all_reduce_s = hapt_links_all_reduce_s(ranks, bytes, bandwidth, latency),
                 skew = fmax(1, ranks * largest_share);
    if (ranks < 2 || bytes <= 0 || kind == HAPT_COLLECTIVE_SLICE || kind == HAPT_COLLECTIVE_NONE) return 0;
    if (kind == HAPT_COLLECTIVE_ALL_REDUCE) return all_reduce_s;
    if (kind == HAPT_COLLECTIVE_REDUCE_SCATTER || kind == HAPT_COLLECTIVE_ALL_GATHER) return 0.5 * all_reduce_s * skew;
    return hapt_ring_s(kind, ranks, bytes, largest_share, bandwidth > 0 ? LINK_SHARE * bandwidth : INFINITY,
                       fmax(latency, 0));
}

double hapt_submesh_tensor_s(const struct hapt_subcluster *subcluster, int tp, double bytes)
{
    return hapt_links_all_reduce_s(tp, bytes, subcluster->intra_node_bandwidth, subcluster->intra_node_latency);
}

double hapt_submesh_collective_s(const struct hapt_cluster *cluster, int subcluster, struct hapt_submesh submesh,
                                 enum hapt_dtype dtype, const struct hapt_efficiency *efficiency, int axis,
                                 enum hapt_collective_kind kind, double bytes)
{
    const struct hapt_subcluster *where = &cluster->subcluster[subcluster];
    const bool outer = axis == 0;
    double seconds;
    if (submesh.program > 0) /* the devices of a node share its link to others */
        seconds = hapt_links_collective_s(kind, outer ? submesh.n : submesh.m, bytes * (outer ? submesh.m : 1), 0,
                                          outer ? where->inter_node_bandwidth : where->intra_node_bandwidth,
                                          outer ? where->inter_node_latency : where->intra_node_latency);
    else
        seconds =
            (kind == HAPT_COLLECTIVE_ALL_REDUCE ? 1 : 0.5) *
            (outer ? hapt_submesh_gradients_s(where, submesh, bytes) : hapt_submesh_tensor_s(where, submesh.tp, bytes));
    return seconds * hapt_calibration_sum_factor(efficiency, &where->device, dtype, bytes);
}

double hapt_submesh_gradients_s(const struct hapt_subcluster *subcluster, struct hapt_submesh submesh, double bytes)
{
    /* Every tensor-parallel rank of a node sends its own gradients. */
    return hapt_links_all_reduce_s(submesh.m / submesh.tp, bytes, subcluster->intra_node_bandwidth,
                                   subcluster->intra_node_latency) +
           hapt_links_all_reduce_s(submesh.n, bytes * submesh.tp, subcluster->inter_node_bandwidth,
                                   subcluster->inter_node_latency);
}
