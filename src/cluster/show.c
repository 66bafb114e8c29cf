/* Prints the cluster: as a table for people, as a cluster file for programs. */
#include <jansson.h>
#include <math.h>
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

static json_t *device_json(const struct hapt_device_spec *device)
{
    static const enum hapt_dtype types[] = {HAPT_F32, HAPT_BF16, HAPT_F16};
    json_t *peak = json_object();
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (device->peak_flops[types[i]] > 0)
            json_object_set_new(peak, hapt_dtype_name(types[i]), json_real(device->peak_flops[types[i]]));
    return json_pack("{s:s, s:s, s:o, s:f, s:f}", "name", device->name, "backend", device->backend, "peak_flops", peak,
                     "memory", device->memory_bytes, "memory_bandwidth", device->memory_bandwidth);
}

static void set_known(json_t *object, const char *key, double value, bool known)
{
    if (known) json_object_set_new(object, key, json_real(value));
}

static json_t *subcluster_json(const struct hapt_subcluster *own)
{
    json_t *json =
        json_pack("{s:s, s:i, s:i, s:o, s:f}", "name", own->name, "nodes", own->nodes, "devices_per_node",
                  own->devices_per_node, "device", device_json(&own->device), "slowdown", own->device.slowdown);
    if (!json) return NULL;
    if (own->device.steady) json_object_set_new(json, "steady", json_true());
    set_known(json, "memory", own->device.memory_bytes, own->device.memory_capped);
    set_known(json, "intra_node_bandwidth", own->intra_node_bandwidth, own->intra_node_bandwidth > 0);
    set_known(json, "inter_node_bandwidth", own->inter_node_bandwidth, own->inter_node_bandwidth > 0);
    set_known(json, "intra_node_latency", own->intra_node_latency, own->intra_node_latency >= 0);
    set_known(json, "inter_node_latency", own->inter_node_latency, own->inter_node_latency >= 0);
    if (own->host_memory_bytes > 0 || own->host_bandwidth > 0 || own->host_update_rate > 0) {
        json_t *host = json_object();
        set_known(host, "memory", own->host_memory_bytes, own->host_memory_bytes > 0);
        set_known(host, "bandwidth", own->host_bandwidth, own->host_bandwidth > 0);
        set_known(host, "update_rate", own->host_update_rate, own->host_update_rate > 0);
        if (own->host_paced) json_object_set_new(host, "paced", json_true());
        json_object_set_new(json, "host", host);
    }
    if (own->host_count > 0) {
        json_t *hosts = json_array();
        for (int i = 0; i < own->host_count; i++) json_array_append_new(hosts, json_string(own->hosts[i]));
        json_object_set_new(json, "hosts", hosts);
    }
    return json;
}

static json_t *links_json(const struct hapt_cluster *cluster)
{
    json_t *links = json_array();
    for (int i = 0; i < cluster->count; i++)
        for (int j = i; j < cluster->count; j++) {
            const struct hapt_link *link = hapt_cluster_link(cluster, i, j);
            json_t *json = json_pack("{s:[s, s], s:b}", "between", cluster->subcluster[i].name,
                                     cluster->subcluster[j].name, "paced", link->paced);
            set_known(json, "bandwidth", link->bandwidth, link->bandwidth > 0);
            set_known(json, "latency", link->latency, link->latency >= 0);
            if (link->transport[0]) json_object_set_new(json, "transport", json_string(link->transport));
            if (link->interface[0][0])
                json_object_set_new(json, "interfaces", json_pack("[s, s]", link->interface[0], link->interface[1]));
            json_array_append_new(links, json);
        }
    return links;
}

static json_t *collectives_json(const struct hapt_cluster *cluster)
{
    json_t *all = json_array();
    for (int i = 0; i < cluster->collective_count; i++) {
        const struct hapt_collective_model *model = &cluster->collective[i];
        json_t *entry = json_pack("{s:i}", "ranks", model->ranks);
        for (int kind = 0; kind < HAPT_COLLECTIVE_COUNT; kind++) {
            const struct hapt_collective_term *term = &model->term[kind];
            if (!hapt_collective_communicates((enum hapt_collective_kind)kind) || !(term->byte_s > 0)) continue;
            json_object_set_new(entry, hapt_collective_key((enum hapt_collective_kind)kind),
                                json_pack("{s:f, s:f, s:f}", "latency", term->latency_s, "bandwidth", 1 / term->byte_s,
                                          "padding", term->skew_s / term->byte_s));
        }
        json_array_append_new(all, entry);
    }
    return all;
}

enum hapt_status hapt_cluster_print_json(const struct hapt_cluster *cluster)
{
    json_t *subclusters = json_array();
    for (int i = 0; i < cluster->count; i++)
        json_array_append_new(subclusters, subcluster_json(&cluster->subcluster[i]));
    json_t *root = json_pack("{s:s, s:i, s:o, s:o}", "format", "hapt-cluster", "version", 1, "subclusters", subclusters,
                             "links", links_json(cluster));
    if (root && cluster->collective_count > 0) json_object_set_new(root, "collectives", collectives_json(cluster));
    if (!root) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory to print the cluster");
    const int written = json_dumpf(root, stdout, JSON_INDENT(2));
    json_decref(root);
    if (written != 0 || putchar('\n') == EOF || fflush(stdout) != 0)
        return hapt_fail(HAPT_ERR_IO, "check where standard output goes", "cannot write to standard output: %m");
    return HAPT_OK;
}
