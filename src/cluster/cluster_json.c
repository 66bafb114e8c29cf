/* Writes the cluster as JSON: its figures for programs (hapt topology --json), and a cluster file for people. */
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "hapt/atomic_file.h"
#include "hapt/cluster.h"
#include "hapt/config.h"

/* ---- Common parts ---- */

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

static void set_hosts(json_t *object, const struct hapt_subcluster *own)
{
    if (own->host_count == 0) return;
    json_t *hosts = json_array();
    for (int i = 0; i < own->host_count; i++) json_array_append_new(hosts, json_string(own->hosts[i]));
    json_object_set_new(object, "hosts", hosts);
}

static void set_route(json_t *object, const struct hapt_link *link)
{
    if (link->transport[0]) json_object_set_new(object, "transport", json_string(link->transport));
    if (link->interface[0][0])
        json_object_set_new(object, "interfaces", json_pack("[s, s]", link->interface[0], link->interface[1]));
}

/* Steals the arrays. */
static json_t *root_json(json_t *subclusters, json_t *links)
{
    return json_pack("{s:s, s:i, s:o, s:o}", "format", "hapt-cluster", "version", 1, "subclusters", subclusters,
                     "links", links);
}

/* ---- All known figures ---- */

static void set_known(json_t *object, const char *key, double value, bool known)
{
    if (known) json_object_set_new(object, key, json_real(value));
}

static json_t *subcluster_figures(const struct hapt_subcluster *own)
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
    set_hosts(json, own);
    return json;
}

static json_t *link_figures(const struct hapt_cluster *cluster)
{
    json_t *links = json_array();
    for (int i = 0; i < cluster->count; i++)
        for (int j = i; j < cluster->count; j++) {
            const struct hapt_link *link = hapt_cluster_link(cluster, i, j);
            json_t *json = json_pack("{s:[s, s], s:b}", "between", cluster->subcluster[i].name,
                                     cluster->subcluster[j].name, "paced", link->paced);
            set_known(json, "bandwidth", link->bandwidth, link->bandwidth > 0);
            set_known(json, "latency", link->latency, link->latency >= 0);
            set_route(json, link);
            json_array_append_new(links, json);
        }
    return links;
}

static json_t *collective_figures(const struct hapt_cluster *cluster)
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
        json_array_append_new(subclusters, subcluster_figures(&cluster->subcluster[i]));
    json_t *root = root_json(subclusters, link_figures(cluster));
    if (root && cluster->collective_count > 0) json_object_set_new(root, "collectives", collective_figures(cluster));
    if (!root) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory to print the cluster");
    const int written = json_dumpf(root, stdout, JSON_INDENT(2));
    json_decref(root);
    if (written != 0 || putchar('\n') == EOF || fflush(stdout) != 0)
        return hapt_fail(HAPT_ERR_IO, "check where standard output goes", "cannot write to standard output: %m");
    return HAPT_OK;
}

/* ---- A file for people ---- */

/* The name alone if the database has the same figures. */
static json_t *device_text(const struct hapt_device_spec *device)
{
    const struct hapt_device_spec *known = hapt_device_spec_find(device->name);
    if (known && (device->memory_capped || known->memory_bytes == device->memory_bytes) &&
        memcmp(known->peak_flops, device->peak_flops, sizeof known->peak_flops) == 0)
        return json_string(known->name);
    return device_json(device);
}

/* In whole GB of 1e9 byte, or MB of a small host; rounded down, because there is no more. */
static json_t *memory_text(double bytes)
{
    char text[32];
    const bool small = bytes < 10e9;
    snprintf(text, sizeof text, "%.0f %s", floor(bytes / (small ? 1e6 : 1e9)), small ? "MB" : "GB");
    return json_string(text);
}

static void set_link_texts(json_t *object, const char *bandwidth_key, const char *latency_key, double bandwidth,
                           double latency)
{
    char text[32];
    json_object_set_new(object, bandwidth_key, json_string(hapt_units_bandwidth(bandwidth, text)));
    snprintf(text, sizeof text, latency < 0.9995e-3 ? "%.3g us" : "%.3f ms",
             (latency < 0.9995e-3 ? 1e6 : 1e3) * latency);
    json_object_set_new(object, latency_key, json_string(text));
}

static json_t *subcluster_texts(const struct hapt_subcluster *own)
{
    json_t *json = json_pack("{s:s, s:i, s:i, s:o}", "name", own->name, "nodes", own->nodes, "devices_per_node",
                             own->devices_per_node, "device", device_text(&own->device));
    if (own->device.memory_capped) json_object_set_new(json, "memory", memory_text(own->device.memory_bytes));
    if (own->devices_per_node > 1)
        set_link_texts(json, "intra_node_bandwidth", "intra_node_latency", own->intra_node_bandwidth,
                       own->intra_node_latency);
    if (own->nodes > 1)
        set_link_texts(json, "inter_node_bandwidth", "inter_node_latency", own->inter_node_bandwidth,
                       own->inter_node_latency);
    if (own->host_memory_bytes > 0)
        json_object_set_new(json, "host", json_pack("{s:o}", "memory", memory_text(own->host_memory_bytes)));
    set_hosts(json, own);
    return json;
}

static int write_file(int descriptor, const void *root)
{
    errno = 0;
    if (json_dumpfd(root, descriptor, JSON_INDENT(2)) == 0 && write(descriptor, "\n", 1) == 1) return 0;
    return errno ? errno : EIO;
}

enum hapt_status hapt_cluster_save(const struct hapt_cluster *cluster, const char *path)
{
    json_t *subclusters = json_array(), *links = json_array();
    for (int i = 0; i < cluster->count; i++) {
        json_array_append_new(subclusters, subcluster_texts(&cluster->subcluster[i]));
        for (int j = i + 1; j < cluster->count; j++) {
            const struct hapt_link *link = hapt_cluster_link(cluster, i, j);
            json_t *json = json_pack("{s:[s, s]}", "between", cluster->subcluster[i].name, cluster->subcluster[j].name);
            set_link_texts(json, "bandwidth", "latency", link->bandwidth, link->latency);
            set_route(json, link);
            json_array_append_new(links, json);
        }
    }
    json_t *root = root_json(subclusters, links);
    if (!root) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory to write %s", path);
    const enum hapt_status status = hapt_atomic_file_replace(path, write_file, root);
    json_decref(root);
    return status;
}
