/* Seconds of collectives over the devices of a submesh, and over any devices. */
#include "hapt/collective_cost.h"

#include <math.h>

/* ---- devices of a submesh ---- */

/* fraction of a link's bandwidth that all-reduces of well-tuned libraries reach */
#define LINK_SHARE 0.8

struct hapt_collective_span hapt_collective_span_of(const struct hapt_subcluster *subcluster,
                                                    struct hapt_submesh submesh, int axis)
{
    const bool program = submesh.program > 0, outer = axis == 0;
    const int inside = outer ? (program ? 1 : submesh.m / submesh.tp) : (program ? submesh.m : submesh.tp);
    return (struct hapt_collective_span){
        .subcluster = subcluster, .inside = inside, .nodes = outer ? submesh.n : 1, .beside = submesh.m / inside};
}

/* Peers, each with a link of that bandwidth and latency. */
static double peers_s(enum hapt_collective_kind kind, int ranks, double bytes, double largest_share, double bandwidth,
                      double latency)
{
    const double rate = bandwidth > 0 ? LINK_SHARE * bandwidth : INFINITY, hop_s = fmax(latency, 0);
    if (ranks < 2 || bytes <= 0 || !hapt_collective_communicates(kind)) return 0;
    if (kind == HAPT_COLLECTIVE_ALL_TO_ALL || kind == HAPT_COLLECTIVE_GROUPED_BROADCAST)
        return hapt_ring_s(kind, ranks, bytes, largest_share, rate, hop_s);
    const double ring_s = hapt_ring_s(HAPT_COLLECTIVE_ALL_REDUCE, ranks, bytes, 0, rate, hop_s);
    const double trees_s = 2 * (ceil(log2(ranks)) * hop_s + bytes / rate);
    const double all_reduce_s = fmin(ring_s, trees_s);
    return kind == HAPT_COLLECTIVE_ALL_REDUCE ? all_reduce_s : 0.5 * all_reduce_s * fmax(1, ranks * largest_share);
}

double hapt_collective_span_s(const struct hapt_collective_span *span, enum hapt_collective_kind kind, double bytes,
                              double largest_share)
{
    const struct hapt_subcluster *links = span->subcluster;
    return peers_s(kind, span->inside, bytes, largest_share, links->intra_node_bandwidth, links->intra_node_latency) +
           peers_s(kind, span->nodes, bytes * span->beside, largest_share, links->inter_node_bandwidth,
                   links->inter_node_latency);
}

double hapt_collective_corrected_s(const struct hapt_collective_span *span, const struct hapt_efficiency *efficiency,
                                   enum hapt_dtype dtype, enum hapt_collective_kind kind, double bytes,
                                   double largest_share)
{
    return hapt_collective_span_s(span, kind, bytes, largest_share) *
           hapt_calibration_sum_factor(efficiency, &span->subcluster->device, dtype, bytes);
}

/* ---- any devices ---- */

double hapt_collective_cost_s(const struct hapt_collective_model *model, enum hapt_collective_kind kind, double bytes,
                              double largest_share)
{
    const struct hapt_collective_term *term = &model->term[kind];
    if (model->ranks < 2 || !hapt_collective_communicates(kind)) return 0;
    return term->latency_s + bytes * (term->byte_s + term->skew_s * fmax(0, model->ranks * largest_share - 1));
}

void hapt_collective_model_links(const struct hapt_collective_links *links, struct hapt_collective_model *model)
{
    const int n = links->ranks;
    const double bandwidth = links->bandwidth;
    *model = (struct hapt_collective_model){.ranks = n};
    for (int k = 0; k < HAPT_COLLECTIVE_COUNT && n > 1; k++) {
        const enum hapt_collective_kind kind = (enum hapt_collective_kind)k;
        const double byte_s = hapt_ring_s(kind, n, 1, 1.0 / n, bandwidth, 0);
        model->term[k] = (struct hapt_collective_term){hapt_ring_s(kind, n, 0, 1.0 / n, bandwidth, links->latency_s),
                                                       byte_s, hapt_ring_s(kind, n, 1, 2.0 / n, bandwidth, 0) - byte_s};
    }
}

const struct hapt_collective_model *hapt_collective_model_measured(const struct hapt_cluster *cluster, int ranks)
{
    for (int i = 0; i < cluster->collective_count; i++)
        if (cluster->collective[i].ranks == ranks) return &cluster->collective[i];
    return NULL;
}

static bool slower(double bandwidth, double latency_s, struct hapt_collective_links *links)
{
    if (!(bandwidth > 0) || !(latency_s >= 0)) return false;
    links->bandwidth = fmin(links->bandwidth, bandwidth);
    links->latency_s = fmax(links->latency_s, latency_s);
    return true;
}

enum hapt_status hapt_collective_links_slowest(const struct hapt_cluster *cluster, const int *devices,
                                               struct hapt_collective_links *links)
{
    struct hapt_collective_links found = {.bandwidth = INFINITY};
    bool known = true;
    for (int i = 0; i < cluster->count; i++) {
        const struct hapt_subcluster *own = &cluster->subcluster[i];
        HAPT_ASSERT(devices[i] >= 0 && devices[i] <= own->nodes * own->devices_per_node);
        found.ranks += devices[i];
        if (devices[i] > 1 && own->devices_per_node > 1)
            known = slower(own->intra_node_bandwidth, own->intra_node_latency, &found) && known;
        if (devices[i] > own->devices_per_node)
            known = slower(own->inter_node_bandwidth, own->inter_node_latency, &found) && known;
        for (int j = 0; j < i; j++) {
            const struct hapt_link *link = hapt_cluster_link(cluster, j, i);
            if (devices[i] > 0 && devices[j] > 0) known = slower(link->bandwidth, link->latency, &found) && known;
        }
    }
    if (!known)
        return hapt_fail(HAPT_ERR_INPUT, "give the bandwidth and latency of every link in the cluster file",
                         "the cost of collectives needs the bandwidth and latency of every link, and some are unknown");
    *links = found;
    return HAPT_OK;
}
