/* hapt cluster init: writes a cluster file, from the machine it runs on, or from what sinfo or nvidia-smi print. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "hapt/inventory.h"
#include "outputs.h"
#include "phases.h"

const char hapt_command_cluster_help[] =
    "hapt cluster init writes a cluster file (JSON; hapt help topology describes it) for\n"
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
    "Devices get the data sheet's figures of the device database; a GPU whose memory has no\n"
    "room for CUDA's context beside that gets less, its own memory without 1.5 GB. Unknown link values are\n"
    "written as 10 Gbit/s and 50 us: a plan for a slow network also suits a faster one. The\n"
    "command prints what to check in the file; --overwrite replaces a file. `hapt topology\n"
    "--cluster FILE --probe`, with one rank for each device, measures all links.\n";

/* Networks slower than 10 Gbit/s are rare in clusters. */
#define UNKNOWN_BANDWIDTH 1.25e9
#define UNKNOWN_LATENCY 50e-6

/* "FILE=NODES,FILE": reads each file for its number of nodes. */
static enum hapt_status read_files(const char *list, struct hapt_arena *arena, struct hapt_inventory *inventory)
{
    char *state, *copy = hapt_arena_strdup(arena, list);
    if (!copy) return HAPT_ERR_MEMORY;
    if (!list[strspn(list, ",")])
        return hapt_fail(HAPT_ERR_USAGE, "write FILE=NODES,...", "--nvidia-smi \"%s\" names no file", list);
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

/* Fills unknown values of the networks, and says which. */
static void assume_networks(struct hapt_cluster *cluster, struct hapt_inventory *inventory)
{
    const int count = cluster->count;
    int unknown = 0;
    for (int i = 0; i < count; i++) {
        struct hapt_subcluster *own = &cluster->subcluster[i];
        if (own->nodes > 1 && own->inter_node_bandwidth == 0) {
            own->inter_node_bandwidth = UNKNOWN_BANDWIDTH;
            hapt_inventory_note(inventory, "inter_node_bandwidth of %s: 10 Gbit/s is assumed", own->name);
        }
        if (own->nodes > 1 && own->inter_node_latency < 0) own->inter_node_latency = UNKNOWN_LATENCY;
        for (int j = 0; j < count; j++) {
            struct hapt_link *link = &cluster->link[i * count + j];
            if (i == j) continue;
            if (link->latency < 0) link->latency = UNKNOWN_LATENCY;
            if (link->bandwidth > 0) continue;
            link->bandwidth = UNKNOWN_BANDWIDTH;
            unknown += i < j;
        }
    }
    if (unknown > 0)
        hapt_inventory_note(inventory, "bandwidth of %d link%s between subclusters: 10 Gbit/s is assumed", unknown,
                            unknown > 1 ? "s" : "");
}

/* Fills all unknown link values, and says which. */
static void assume_links(struct hapt_cluster *cluster, struct hapt_inventory *inventory)
{
    bool unknown[HAPT_MAX_SUBCLUSTERS];
    char rate[32];
    assume_networks(cluster, inventory);
    for (int i = 0; i < cluster->count; i++)
        unknown[i] = cluster->subcluster[i].devices_per_node > 1 && cluster->subcluster[i].intra_node_bandwidth == 0;
    hapt_cluster_assume(cluster);
    for (int i = 0; i < cluster->count; i++) {
        const struct hapt_subcluster *own = &cluster->subcluster[i];
        if (unknown[i])
            hapt_inventory_note(inventory, "intra_node_bandwidth of %s: %s between two %s, by data sheet", own->name,
                                hapt_units_bandwidth(own->intra_node_bandwidth, rate), own->device.name);
        if (own->host_memory_bytes == 0 && strcmp(own->device.backend, "cpu") != 0)
            hapt_inventory_note(inventory,
                                "memory of the hosts of %s is unknown, so offloading has no limit: add "
                                "\"host\": {\"memory\": \"256 GB\"}",
                                own->name);
    }
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

/* Cluster files are edited by hand, so an existing one is kept. */
static enum hapt_status keep_edited(const struct hapt_env *env, const struct hapt_config *config)
{
    struct stat about;
    const char *path = hapt_config_text(config, "output");
    if (env->world_rank != 0 || hapt_config_bool(config, "overwrite")) return HAPT_OK;
    if (stat(path, &about) != 0 || about.st_size == 0) return HAPT_OK;
    return hapt_fail(HAPT_ERR_USAGE, "--overwrite replaces it", "%s exists, and may have been edited", path);
}

enum hapt_status hapt_command_cluster(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
{
    struct hapt_cluster *cluster = NULL;
    struct hapt_inventory inventory = {.count = 0};
    const struct hapt_output file = {.option = "output", .key = "subclusters", .kind = "a cluster file"};
    HAPT_TRY(hapt_env_agree(env->world, check_usage(config)));
    HAPT_TRY(hapt_outputs_check(env, config, 1, &file));
    HAPT_TRY(hapt_env_agree(env->world, keep_edited(env, config)));
    if (hapt_config_text(config, "sinfo") || hapt_config_text(config, "nvidia-smi"))
        HAPT_TRY(hapt_env_agree(env->world, describe_files(env, config, arena, &inventory, &cluster)));
    else
        HAPT_TRY(describe_machine(env, config, arena, &inventory, &cluster));
    if (env->world_rank != 0) return hapt_env_agree(env->world, HAPT_OK);
    const char *path = hapt_config_text(config, "output");
    assume_links(cluster, &inventory);
    HAPT_TRY(hapt_env_agree(env->world, hapt_cluster_save(cluster, path)));
    hapt_cluster_print(env, cluster);
    if (inventory.note_count > 0) hapt_print(env, "Check in %s:\n", path);
    for (int i = 0; i < inventory.note_count; i++) hapt_print(env, "  - %s\n", inventory.note[i]);
    hapt_print(env,
               "Next: hapt topology --cluster %s; with one rank for each device, add --probe to measure all links\n",
               path);
    return HAPT_OK;
}
