/* hapt cluster init: writes a cluster file, from the machine it runs on, or from what sinfo or nvidia-smi print. */
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "hapt/atomic_file.h"
#include "hapt/inventory.h"
#include "outputs.h"
#include "phases.h"

const char hapt_command_cluster_help[] =
    "hapt cluster init writes a cluster file (JSON; hapt topology --help describes it) for\n"
    "--cluster of the other commands, from one of:\n"
    "  this machine   without options. Under mpirun or srun all hosts of the job are\n"
    "                 described; with one rank for each GPU the links between them are\n"
    "                 measured as well\n"
    "  --sinfo FILE   the nodes of a Slurm cluster, as printed by\n"
    "                     sinfo --Node --format=\"%n %T %c %m %G %f\" >FILE\n"
    "                 Equal nodes form a subcluster. The columns may have another order;\n"
    "                 HOSTNAMES and GRES are needed. Types of GPUs come from GRES\n"
    "                 (gpu:a100:4) or from features. Nodes that are down or drained, nodes\n"
    "                 without GPUs, and MIG slices are left out. To describe one partition,\n"
    "                 add --partition=NAME to sinfo\n"
    "  --nvidia-smi FILE=NODES,...\n"
    "                 the GPUs of one node in a file, and the number of such nodes, as\n"
    "                 printed by\n"
    "                     nvidia-smi --query-gpu=name,memory.total --format=csv,noheader >FILE\n"
    "Devices get the data sheet's figures of the device database. Unknown link values are\n"
    "written as 10 Gbit/s and 50 us: a plan for a slow network also suits a faster one. The\n"
    "command prints what to check in the file. `hapt topology --cluster FILE --probe`, with\n"
    "one rank for each device, measures all links.\n";

/* Networks slower than 10 Gbit/s are rare in clusters. */
#define UNKNOWN_BANDWIDTH 1.25e9
#define UNKNOWN_LATENCY 50e-6

/* "FILE=NODES,FILE": reads each file for its number of nodes. */
static enum hapt_status read_files(const char *list, struct hapt_arena *arena, struct hapt_inventory *inventory)
{
    char *state, *copy = hapt_arena_strdup(arena, list);
    if (!copy) return HAPT_ERR_MEMORY;
    for (char *entry = strtok_r(copy, ",", &state); entry; entry = strtok_r(NULL, ",", &state)) {
        char *end, *equals = strrchr(entry, '=');
        const long nodes = equals ? strtol(equals + 1, &end, 10) : 1;
        if (equals && (end == equals + 1 || *end || nodes < 1 || nodes > 65536))
            return hapt_fail(HAPT_ERR_USAGE, "write FILE=NODES, with 1 to 65536 nodes",
                             "bad value \"%s\" of --nvidia-smi", entry);
        if (equals) *equals = '\0';
        HAPT_TRY(hapt_inventory_read_nvidia_smi(entry, (int)nodes, arena, inventory));
    }
    return HAPT_OK;
}

/* Rank 0 reads the files; the cluster exists there alone. */
static enum hapt_status describe_files(const struct hapt_env *env, const struct hapt_config *config,
                                       struct hapt_arena *arena, struct hapt_inventory *inventory,
                                       struct hapt_cluster **cluster)
{
    const char *sinfo = hapt_config_text(config, "sinfo"), *list = hapt_config_text(config, "nvidia-smi");
    if (env->world_rank != 0) return HAPT_OK;
    HAPT_TRY(sinfo ? hapt_inventory_read_sinfo(sinfo, arena, inventory) : read_files(list, arena, inventory));
    return hapt_inventory_cluster(inventory, arena, cluster);
}

/* Fewer ranks than GPUs: the hosts' GPUs are described, and nothing is measured. Else as `hapt topology` does. */
static enum hapt_status describe_machine(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena,
                                         struct hapt_inventory *inventory, struct hapt_cluster **cluster)
{
    struct hapt_hosts *hosts;
    bool few = false;
    HAPT_TRY(hapt_env_agree(env->world, hapt_hosts_gather(env, arena, &hosts)));
    for (int h = 0; h < hosts->count; h++) few |= hosts->host[h].ranks < hosts->host[h].gpu_count;
    if (!few) return hapt_phase_cluster(env, config, false, arena, cluster);
    enum hapt_status status = hapt_inventory_add_hosts(hosts, inventory);
    if (status == HAPT_OK) status = hapt_inventory_cluster(inventory, arena, cluster);
    if (status == HAPT_OK)
        hapt_inventory_note(inventory, "start one rank for each GPU to measure the links between them");
    return hapt_env_agree(env->world, status);
}

/* Fills unknown link values, and says which. */
static void assume_links(struct hapt_cluster *cluster, struct hapt_inventory *inventory)
{
    char rate[32];
    for (int i = 0; i < cluster->count; i++) {
        struct hapt_subcluster *own = &cluster->subcluster[i];
        const bool inside = own->devices_per_node > 1 && own->intra_node_bandwidth == 0;
        if (own->nodes > 1 && own->inter_node_bandwidth == 0) {
            own->inter_node_bandwidth = UNKNOWN_BANDWIDTH;
            hapt_inventory_note(inventory, "inter_node_bandwidth of %s: 10 Gbit/s is assumed", own->name);
        }
        if (own->nodes > 1 && own->inter_node_latency < 0) own->inter_node_latency = UNKNOWN_LATENCY;
        for (int j = 0; j < cluster->count; j++) {
            struct hapt_link *link = &cluster->link[i * cluster->count + j];
            if (i != j && link->bandwidth == 0) {
                link->bandwidth = UNKNOWN_BANDWIDTH;
                if (i < j)
                    hapt_inventory_note(inventory, "bandwidth of the link %s - %s: 10 Gbit/s is assumed", own->name,
                                        cluster->subcluster[j].name);
            }
            if (i != j && link->latency < 0) link->latency = UNKNOWN_LATENCY;
        }
        hapt_cluster_assume(cluster);
        if (inside)
            hapt_inventory_note(inventory, "intra_node_bandwidth of %s: %s between two %s, by data sheet", own->name,
                                hapt_units_bandwidth(own->intra_node_bandwidth, rate), own->device.name);
    }
}

static json_t *device_json(const struct hapt_device_spec *device)
{
    const struct hapt_device_spec *known = hapt_device_spec_find(device->name);
    if (known && memcmp(known->peak_flops, device->peak_flops, sizeof known->peak_flops) == 0 &&
        known->memory_bytes == device->memory_bytes)
        return json_string(known->name);
    static const enum hapt_dtype types[] = {HAPT_F32, HAPT_BF16, HAPT_F16};
    json_t *peak = json_object();
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (device->peak_flops[types[i]] > 0)
            json_object_set_new(peak, hapt_dtype_name(types[i]), json_real(device->peak_flops[types[i]]));
    return json_pack("{s:s, s:s, s:o, s:f, s:f}", "name", device->name, "backend", device->backend, "peak_flops", peak,
                     "memory", device->memory_bytes, "memory_bandwidth", device->memory_bandwidth);
}

static void set_link(json_t *object, const char *bandwidth_key, const char *latency_key, double bandwidth,
                     double latency)
{
    char text[32];
    json_object_set_new(object, bandwidth_key, json_string(hapt_units_bandwidth(bandwidth, text)));
    json_object_set_new(object, latency_key, json_string(hapt_units_time(latency, text)));
}

static json_t *subcluster_json(const struct hapt_subcluster *own)
{
    char text[32];
    json_t *json = json_pack("{s:s, s:i, s:i, s:o}", "name", own->name, "nodes", own->nodes, "devices_per_node",
                             own->devices_per_node, "device", device_json(&own->device));
    if (own->devices_per_node > 1)
        set_link(json, "intra_node_bandwidth", "intra_node_latency", own->intra_node_bandwidth,
                 own->intra_node_latency);
    if (own->nodes > 1)
        set_link(json, "inter_node_bandwidth", "inter_node_latency", own->inter_node_bandwidth,
                 own->inter_node_latency);
    if (own->host_memory_bytes > 0)
        json_object_set_new(json, "host", json_pack("{s:s}", "memory", hapt_units_bytes(own->host_memory_bytes, text)));
    if (own->host_count > 0) {
        json_t *hosts = json_array();
        for (int i = 0; i < own->host_count; i++) json_array_append_new(hosts, json_string(own->hosts[i]));
        json_object_set_new(json, "hosts", hosts);
    }
    return json;
}

static json_t *cluster_json(const struct hapt_cluster *cluster)
{
    json_t *subclusters = json_array(), *links = json_array();
    for (int i = 0; i < cluster->count; i++) {
        json_array_append_new(subclusters, subcluster_json(&cluster->subcluster[i]));
        for (int j = i + 1; j < cluster->count; j++) {
            const struct hapt_link *link = hapt_cluster_link(cluster, i, j);
            json_t *json = json_pack("{s:[s, s]}", "between", cluster->subcluster[i].name, cluster->subcluster[j].name);
            set_link(json, "bandwidth", "latency", link->bandwidth, link->latency);
            if (link->transport[0]) json_object_set_new(json, "transport", json_string(link->transport));
            if (link->interface[0][0])
                json_object_set_new(json, "interfaces", json_pack("[s, s]", link->interface[0], link->interface[1]));
            json_array_append_new(links, json);
        }
    }
    return json_pack("{s:s, s:i, s:o, s:o}", "format", "hapt-cluster", "version", 1, "subclusters", subclusters,
                     "links", links);
}

static enum hapt_status write_cluster(const char *path, const struct hapt_cluster *cluster, struct hapt_arena *arena)
{
    const size_t size = strlen(path) + HAPT_TEMPORARY_SUFFIX_BYTES;
    char *temporary;
    HAPT_NEW(temporary, arena, size);
    json_t *root = cluster_json(cluster);
    if (!root) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory to write %s", path);
    const int descriptor = hapt_atomic_file_open(path, temporary, size);
    int error = descriptor < 0 ? errno : 0;
    if (!error && (json_dumpfd(root, descriptor, JSON_INDENT(2)) != 0 || write(descriptor, "\n", 1) != 1))
        error = errno ? errno : EIO;
    json_decref(root);
    if (error && descriptor >= 0) close(descriptor);
    if (!error) error = hapt_atomic_file_commit(descriptor, temporary, path);
    if (error && temporary[0]) unlink(temporary);
    if (!error) return HAPT_OK;
    return hapt_fail(HAPT_ERR_IO, "check permissions and free space", "%s cannot be written: %s", path,
                     strerror(error));
}

static enum hapt_status check_usage(const struct hapt_config *config)
{
    if (hapt_config_word_count(config) != 1 || strcmp(hapt_config_word(config, 0), "init") != 0)
        return hapt_fail(HAPT_ERR_USAGE, "hapt cluster init --output C.json", "hapt cluster does one thing: init");
    if (!hapt_config_text(config, "output"))
        return hapt_fail(HAPT_ERR_USAGE, "hapt cluster init --output C.json", "hapt cluster init needs --output");
    if (hapt_config_text(config, "sinfo") && hapt_config_text(config, "nvidia-smi"))
        return hapt_fail(HAPT_ERR_USAGE, "leave out one of them", "--sinfo and --nvidia-smi exclude each other");
    return HAPT_OK;
}

enum hapt_status hapt_command_cluster(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
{
    struct hapt_cluster *cluster = NULL;
    struct hapt_inventory inventory = {.count = 0};
    const struct hapt_output file = {.option = "output", .key = "subclusters", .kind = "a cluster file"};
    HAPT_TRY(hapt_env_agree(env->world, check_usage(config)));
    HAPT_TRY(hapt_outputs_check(env, config, 1, &file));
    if (hapt_config_text(config, "sinfo") || hapt_config_text(config, "nvidia-smi"))
        HAPT_TRY(hapt_env_agree(env->world, describe_files(env, config, arena, &inventory, &cluster)));
    else
        HAPT_TRY(describe_machine(env, config, arena, &inventory, &cluster));
    if (env->world_rank != 0) return hapt_env_agree(env->world, HAPT_OK);
    const char *path = hapt_config_text(config, "output");
    assume_links(cluster, &inventory);
    HAPT_TRY(hapt_env_agree(env->world, write_cluster(path, cluster, arena)));
    hapt_cluster_print(env, cluster);
    if (inventory.note_count > 0) hapt_print(env, "Check in %s:\n", path);
    for (int i = 0; i < inventory.note_count; i++) hapt_print(env, "  - %s\n", inventory.note[i]);
    hapt_print(env,
               "Next: hapt topology --cluster %s; with one rank for each device, add --probe to measure all links\n",
               path);
    return HAPT_OK;
}
