/* The cluster structure: its invariants, and the values assumed for what is neither given nor measured. */
#include "hapt/cluster.h"

#include <math.h>
#include <string.h>

#include "database.h"
#include "hapt/link.h"

static bool within(double value, double low, double high)
{
    return value >= low && value <= high; /* false for NaN */
}

static enum hapt_status check_subcluster(const struct hapt_subcluster *subcluster)
{
    const struct hapt_device_spec *device = &subcluster->device;
    const char *wrong = NULL;
    if (!subcluster->name[0] || !memchr(subcluster->name, 0, sizeof subcluster->name))
        wrong = "no name";
    else if (subcluster->nodes < 1 || subcluster->nodes > 65536)
        wrong = "an impossible number of nodes";
    else if (subcluster->devices_per_node < 1 || subcluster->devices_per_node > 65536)
        wrong = "an impossible number of devices per node";
    else if (!within(device->memory_bytes, 1, 1e18))
        wrong = "an impossible device memory";
    else if (!within(device->peak_flops[HAPT_F32], 1, 1e24))
        wrong = "an impossible peak rate";
    else if (!within(device->memory_bandwidth, 1, 1e18))
        wrong = "an impossible memory bandwidth";
    else if (!within(device->slowdown, 1, 1e6))
        wrong = "an impossible slowdown";
    else if (!within(subcluster->host_memory_bytes, 0, 1e18) || !within(subcluster->host_bandwidth, 0, 1e18) ||
             !within(subcluster->host_update_rate, 0, 1e18))
        wrong = "an impossible host";
    else if (!within(subcluster->intra_node_bandwidth, 0, 1e18) || !within(subcluster->inter_node_bandwidth, 0, 1e18))
        wrong = "an impossible bandwidth";
    else if (!within(subcluster->intra_node_latency, -1, 1e3) || !within(subcluster->inter_node_latency, -1, 1e3))
        wrong = "an impossible latency";
    else if (subcluster->host_count != 0 && subcluster->host_count != subcluster->nodes)
        wrong = "a different number of hosts than nodes";
    if (!wrong) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, "hapt topology prints the cluster as it was read", "subcluster \"%.63s\" has %s",
                     subcluster->name, wrong);
}

static enum hapt_status check_collectives(const struct hapt_cluster *cluster)
{
    if (cluster->collective_count < 0 || cluster->collective_count > HAPT_MAX_COLLECTIVE_MODELS)
        return hapt_fail(HAPT_ERR_INPUT, NULL, "the cluster has %d tables of collectives (0 to 64 are allowed)",
                         cluster->collective_count);
    for (int i = 0; i < cluster->collective_count; i++) {
        const struct hapt_collective_model *model = &cluster->collective[i];
        bool sound = model->ranks >= 1;
        for (int kind = 0; kind < HAPT_COLLECTIVE_COUNT; kind++) {
            const struct hapt_collective_term *term = &model->term[kind];
            sound = sound && within(term->latency_s, 0, 1e3) && within(term->byte_s, 0, 1e3) &&
                    within(term->skew_s, 0, 1e6);
        }
        for (int j = 0; j < i; j++) sound = sound && cluster->collective[j].ranks != model->ranks;
        if (!sound)
            return hapt_fail(HAPT_ERR_INPUT, "measure them again: hapt topology --collectives",
                             "the collectives of the cluster over %d ranks are impossible or listed twice",
                             model->ranks);
    }
    return HAPT_OK;
}

enum hapt_status hapt_cluster_check(const struct hapt_cluster *cluster)
{
    if (cluster->count < 1 || cluster->count > HAPT_MAX_SUBCLUSTERS)
        return hapt_fail(HAPT_ERR_INPUT, "a cluster has 1 to 16 subclusters", "the cluster has %d subclusters",
                         cluster->count);
    long devices = 0;
    for (int i = 0; i < cluster->count; i++) {
        HAPT_TRY(check_subcluster(&cluster->subcluster[i]));
        devices += (long)cluster->subcluster[i].nodes * cluster->subcluster[i].devices_per_node;
        for (int j = 0; j < i; j++)
            if (strcmp(cluster->subcluster[i].name, cluster->subcluster[j].name) == 0)
                return hapt_fail(HAPT_ERR_INPUT, "give every subcluster its own name",
                                 "two subclusters are called \"%s\"", cluster->subcluster[i].name);
    }
    if (devices != cluster->rank_count)
        return hapt_fail(HAPT_ERR_INPUT, "the file is damaged or written by another program",
                         "the cluster counts %d devices, its subclusters have %ld", cluster->rank_count, devices);
    for (int i = 0; i < cluster->count; i++)
        for (int j = 0; j < cluster->count; j++) {
            const struct hapt_link *forth = hapt_cluster_link(cluster, i, j), *back = hapt_cluster_link(cluster, j, i);
            if (!within(forth->bandwidth, 0, 1e18) || !within(forth->latency, -1, 1e3))
                return hapt_fail(HAPT_ERR_INPUT, "bandwidths are byte/s, latencies are seconds",
                                 "the link between \"%s\" and \"%s\" is impossible", cluster->subcluster[i].name,
                                 cluster->subcluster[j].name);
            if (forth->bandwidth != back->bandwidth || forth->latency != back->latency || forth->paced != back->paced ||
                strcmp(forth->transport, back->transport) != 0)
                return hapt_fail(HAPT_ERR_INPUT, "links are symmetric", "the links between \"%s\" and \"%s\" differ",
                                 cluster->subcluster[i].name, cluster->subcluster[j].name);
        }
    return check_collectives(cluster);
}

/* Values of typical hardware, for links that are neither given nor measured. */
#define ASSUMED_PEER_BANDWIDTH 10e9 /* PCI Express, shared memory */
#define ASSUMED_PEER_LATENCY 5e-6
#define ASSUMED_NETWORK_BANDWIDTH 12.5e9 /* 100 Gbit/s inside a subcluster */
#define ASSUMED_NETWORK_LATENCY 5e-6
#define ASSUMED_CROSS_BANDWIDTH 1.25e9 /* 10 Gbit/s between subclusters: common in labs */
#define ASSUMED_CROSS_LATENCY 50e-6

void hapt_cluster_assume(struct hapt_cluster *cluster)
{
    for (int i = 0; i < cluster->count; i++) {
        struct hapt_subcluster *own = &cluster->subcluster[i];
        struct hapt_link *link = &cluster->link[i * cluster->count + i];
        const double peer = hapt_device_peer_bandwidth(own->device.name);
        if (own->intra_node_bandwidth == 0) own->intra_node_bandwidth = peer > 0 ? peer : ASSUMED_PEER_BANDWIDTH;
        if (own->intra_node_latency < 0) own->intra_node_latency = ASSUMED_PEER_LATENCY;
        if (own->inter_node_bandwidth == 0) own->inter_node_bandwidth = ASSUMED_NETWORK_BANDWIDTH;
        if (own->inter_node_latency < 0) own->inter_node_latency = ASSUMED_NETWORK_LATENCY;
        const bool wide = own->nodes > 1;
        if (link->bandwidth == 0) link->bandwidth = wide ? own->inter_node_bandwidth : own->intra_node_bandwidth;
        if (link->latency < 0) link->latency = wide ? own->inter_node_latency : own->intra_node_latency;
        for (int j = 0; j < cluster->count; j++) {
            struct hapt_link *cross = &cluster->link[i * cluster->count + j];
            if (cross->bandwidth == 0 && i != j) cross->bandwidth = ASSUMED_CROSS_BANDWIDTH;
            if (cross->latency < 0 && i != j) cross->latency = ASSUMED_CROSS_LATENCY;
        }
    }
}

#define ASSUMED_HOST_BANDWIDTH 12e9 /* of unknown devices: PCI Express 3.0 x16 */
/* Share of the memory bandwidth of CPU devices: a copy reads and writes, and other ranks copy at the same time. */
#define ASSUMED_HOST_SHARE 0.25

double hapt_cluster_host_bandwidth(const struct hapt_subcluster *subcluster)
{
    if (subcluster->host_bandwidth > 0) return subcluster->host_bandwidth;
    if (strcmp(subcluster->device.backend, "cpu") == 0) return ASSUMED_HOST_SHARE * subcluster->device.memory_bandwidth;
    const double known = hapt_device_host_bandwidth(subcluster->device.name);
    return known > 0 ? known : ASSUMED_HOST_BANDWIDTH;
}

#define ASSUMED_UPDATE_RATE 4e9 /* AutoHete, section 6 */
#define UPDATE_BYTES 30.0       /* AdamW reads a gradient, reads and writes master and two states, writes a copy */

double hapt_cluster_host_update_rate(const struct hapt_subcluster *subcluster)
{
    if (subcluster->host_update_rate > 0) return subcluster->host_update_rate / subcluster->devices_per_node;
    if (strcmp(subcluster->device.backend, "cpu") == 0) return subcluster->device.memory_bandwidth / UPDATE_BYTES;
    return ASSUMED_UPDATE_RATE / subcluster->devices_per_node;
}

void hapt_cluster_emulate(struct hapt_cluster *cluster)
{
    for (int i = 0; i < cluster->count; i++) {
        struct hapt_subcluster *own = &cluster->subcluster[i];
        own->device.emulated = own->device.memory_capped = true;
        own->host_count = 0; /* the file's hosts need not exist here */
    }
    hapt_cluster_assume(cluster);
    for (int i = 0; i < cluster->count * cluster->count; i++) cluster->link[i].paced = true;
}

void hapt_cluster_pace(const struct hapt_cluster *cluster, int count, const int *world_rank,
                       struct hapt_collective *collective)
{
    const struct hapt_link *slowest = NULL;
    for (int i = 0; i < count; i++)
        for (int j = 0; j < i; j++) {
            const int from = cluster->subcluster_of_rank[world_rank[j]],
                      to = cluster->subcluster_of_rank[world_rank[i]];
            const struct hapt_link *link = hapt_cluster_link(cluster, from, to);
            if (from == to || !link->paced || !(link->bandwidth > 0)) continue;
            if (!slowest || link->bandwidth < slowest->bandwidth) slowest = link;
        }
    if (slowest) hapt_collective_emulate_link(collective, slowest->bandwidth, fmax(slowest->latency, 0));
}
