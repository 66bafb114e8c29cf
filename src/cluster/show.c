/* Prints the cluster as a table for people. */
#include <stdio.h>
#include <string.h>

#include "hapt/cluster.h"
#include "hapt/config.h"

/* World ranks as "0-3,6": consecutive ranks are joined, in the given order. */
static void ranks_text(const int *ranks, int count, char *text, size_t size)
{
    size_t used = 0;
    text[0] = '\0';
    for (int first = 0, last; first < count; first = last + 1) {
        last = first;
        while (last + 1 < count && ranks[last + 1] == ranks[last] + 1) last++;
        if (used + 32 > size) {
            snprintf(text + used, size - used, ",...");
            return;
        }
        used += (size_t)snprintf(text + used, size - used, "%s%d", first ? "," : "", ranks[first]);
        if (last > first) used += (size_t)snprintf(text + used, size - used, "-%d", ranks[last]);
    }
}

static void print_subcluster(const struct hapt_env *env, const struct hapt_subcluster *own)
{
    const struct hapt_device_spec *device = &own->device;
    char fp32[32], bf16[32] = "-", memory[48], size[32], ranks[160] = "not bound";
    hapt_units_flops(device->peak_flops[HAPT_F32], fp32);
    if (device->peak_flops[HAPT_BF16] > 0) hapt_units_flops(device->peak_flops[HAPT_BF16], bf16);
    snprintf(memory, sizeof memory, "%s%s", hapt_units_bytes(device->memory_bytes, size),
             device->memory_capped ? " cap" : "");
    if (own->ranks) ranks_text(own->ranks, own->nodes * own->devices_per_node, ranks, sizeof ranks);
    hapt_print(env, "  %-14s %5d x %-7d %-12s %-12s %-12s %-9s %-8g %s\n", own->name, own->nodes, own->devices_per_node,
               device->name, fp32, bf16, memory, device->slowdown, ranks);
}

/* `link` NULL: neither paced nor with a route of its own. */
static void print_link(const struct hapt_env *env, const char *from, const char *to, double bandwidth, double latency,
                       const struct hapt_link *link)
{
    char route_text[64] = "";
    char label[160], rate[32] = "unknown", delay[32] = "unknown";
    snprintf(label, sizeof label, "%s %s", from, to);
    if (bandwidth > 0) hapt_units_bandwidth(bandwidth, rate);
    if (latency >= 0) hapt_units_time(latency, delay);
    if (link && strcmp(link->transport, "tcp") == 0)
        snprintf(route_text, sizeof route_text, "  (tcp, %s - %s)", link->interface[0], link->interface[1]);
    hapt_print(env, "  %-34s %-14s %s%s%s\n", label, rate, delay, link && link->paced ? "  (paced)" : "", route_text);
}

static void print_collectives(const struct hapt_env *env, const struct hapt_collective_model *model)
{
    char rate[32], delay[32];
    hapt_print(env, "  %-34s %-14s %s\n", "collective, measured", "of the tensor", "latency");
    for (int kind = 0; kind < HAPT_COLLECTIVE_COUNT; kind++) {
        char label[64];
        if (!hapt_collective_communicates((enum hapt_collective_kind)kind) || !(model->term[kind].byte_s > 0)) continue;
        snprintf(label, sizeof label, "%s over %d ranks", hapt_collective_key((enum hapt_collective_kind)kind),
                 model->ranks);
        hapt_print(env, "  %-34s %-14s %s\n", label, hapt_units_bandwidth(1 / model->term[kind].byte_s, rate),
                   hapt_units_time(model->term[kind].latency_s, delay));
    }
}

void hapt_cluster_print(const struct hapt_env *env, const struct hapt_cluster *cluster)
{
    hapt_print(env, "Cluster, %s: %d subcluster%s, %d device%s\n", cluster->from_file ? "from its file" : "discovered",
               cluster->count, cluster->count > 1 ? "s" : "", cluster->rank_count, cluster->rank_count > 1 ? "s" : "");
    hapt_print(env, "  %-14s %5s x %-7s %-12s %-12s %-12s %-9s %-8s %s\n", "subcluster", "nodes", "devices", "device",
               "fp32 peak", "bf16 peak", "memory", "slowdown", "ranks");
    for (int i = 0; i < cluster->count; i++) print_subcluster(env, &cluster->subcluster[i]);
    hapt_print(env, "  %-34s %-14s %s\n", "link", "each direction", "latency");
    for (int i = 0; i < cluster->count; i++) {
        const struct hapt_subcluster *own = &cluster->subcluster[i];
        const struct hapt_link *self = hapt_cluster_link(cluster, i, i);
        const bool wide = own->nodes > 1;
        if (own->devices_per_node > 1)
            print_link(env, own->name, "in a node", own->intra_node_bandwidth, own->intra_node_latency, NULL);
        if (wide) print_link(env, own->name, "between nodes", own->inter_node_bandwidth, own->inter_node_latency, NULL);
        if (self->paced || self->interface[0][0] ||
            self->bandwidth != (wide ? own->inter_node_bandwidth : own->intra_node_bandwidth))
            print_link(env, own->name, "between stages", self->bandwidth, self->latency, self);
    }
    for (int i = 0; i < cluster->count; i++)
        for (int j = i + 1; j < cluster->count; j++) {
            char pair[144];
            const struct hapt_link *link = hapt_cluster_link(cluster, i, j);
            snprintf(pair, sizeof pair, "- %s", cluster->subcluster[j].name);
            print_link(env, cluster->subcluster[i].name, pair, link->bandwidth, link->latency, link);
        }
    for (int i = 0; i < cluster->collective_count; i++) print_collectives(env, &cluster->collective[i]);
}
