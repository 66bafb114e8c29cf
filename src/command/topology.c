/* hapt topology: prints the cluster that was discovered or described; measures links and collectives on request. */
#include <stdio.h>

#include "hapt/collective_cost.h"
#include "hapt/device.h"
#include "hapt/host.h"
#include "hapt/link.h"
#include "hapt/picture.h"
#include "hapt/progress.h"
#include "outputs.h"
#include "phases.h"

const char hapt_command_topology_help[] =
    "Without --cluster the hosts of all ranks are discovered. Hosts with equal devices, memory and rank count form\n"
    "one subcluster, or one for each kind of GPU that their ranks drive (rank r of a host drives GPU r). With\n"
    "--cluster the file is shown: if there are enough ranks, bound to them and with missing link values measured;\n"
    "else as a plan on paper with assumed values. --json prints a cluster file, --output writes HDF5, --svg a "
    "picture.\n"
    "For a GPU it shows the hardware threads near it, on which its rank runs (--bind), and the nearest network\n"
    "interfaces. Ranks on CPUs share the NUMA nodes of their host (--bind) if the ranks divide evenly over them.\n"
    "HWLOC_XMLFILE and HWLOC_SYNTHETIC fake the discovered topology (HWLOC_THISSYSTEM=1: this machine has it).\n"
    "--device emulated of hapt and hapt train rehearses devices that are not present.\n"
    "\n"
    "A cluster file (JSON) holds:\n"
    "  \"format\"       \"hapt-cluster\"\n"
    "  \"version\"      1\n"
    "  \"subclusters\"  list of objects:\n"
    "      \"name\"              of the subcluster\n"
    "      \"nodes\"             number of nodes\n"
    "      \"devices_per_node\"  devices of each node; one rank drives one device\n"
    "      \"device\"            name in the device database (listed below), or an object with \"name\",\n"
    "                          \"backend\" (\"cuda\", the default, or \"cpu\"), \"peak_flops\" (a rate, or an\n"
    "                          object with \"fp32\", \"bf16\", \"fp16\"), \"memory\", \"memory_bandwidth\"\n"
    "      \"slowdown\"          optional, >= 1: computation takes this many times as long\n"
    "      \"steady\"            optional, with slowdown: true: a pass of a stage of one device takes as long as the\n"
    "                          plan says, so that the drift of the cores' speed has no influence (rehearsal)\n"
    "      \"memory\"            optional: limit of the memory of each device. Plans fill it: leave 1.5 GB of a\n"
    "                          GPU on paper for CUDA's context, unless its real memory is larger than stated\n"
    "      \"host\"              optional object, for data kept on the nodes' hosts: \"memory\" of a node,\n"
    "                          (not given: no limit is planned with), \"bandwidth\" between a device and it, in\n"
    "                          each direction (GPUs of the database: by their PCI Express, others 12 GB/s;\n"
    "                          CPUs: a quarter of the memory bandwidth),\n"
    "                          \"update_rate\", the parameters that a node's CPUs update per second with AdamW (4e9;\n"
    "                          CPU devices: by their memory bandwidth), and\n"
    "                          \"paced\", true (CPUs alone): copies are slowed down to it (rehearsal)\n"
    "      \"hosts\"             optional: one host name for each node; else ranks fill subclusters in order, and\n"
    "                          if GPUs differ, ranks that drive GPUs of the device's name come first\n"
    "      \"intra_node_bandwidth\", \"inter_node_bandwidth\", \"intra_node_latency\", \"inter_node_latency\"\n"
    "                          optional: per direction, between two devices of a node, of two nodes\n"
    "  \"links\"        optional list of objects:\n"
    "      \"between\"           two names of subclusters; twice the same: between stages inside it\n"
    "      \"bandwidth\", \"latency\"   optional: per direction\n"
    "      \"paced\"             optional, true: transfers are slowed to this bandwidth (rehearsal)\n"
    "      \"transport\", \"interfaces\"   optional: how stage boundaries cross it between hosts: \"mpi\", or\n"
    "                          \"tcp\" over the network interfaces of these names at its two ends. If not given,\n"
    "                          both are measured on every network that the hosts share, and the fastest is used\n"
    "  \"collectives\"  optional list of objects, one for each number of ranks (--collectives measures and adds\n"
    "                 them):\n"
    "      \"ranks\", and \"all_reduce\", \"reduce_scatter\", \"all_gather\", \"grouped_broadcast\",\n"
    "      \"all_to_all\": objects with\n"
    "      \"bandwidth\"         of the whole tensor, all shards together\n"
    "      \"latency\"           optional, 0\n"
    "      \"padding\"           optional: cost of a byte by which a shard is smaller than the largest shard,\n"
    "                          relative to the cost of a data byte; default 1, and 0 for all_reduce and\n"
    "                          grouped_broadcast\n"
    "Missing link values are measured. Sizes and rates are numbers in base units (byte, byte/s, s, FLOP/s) or text\n"
    "with a unit: \"400 MB\", \"40 GiB\", \"200 Mbit/s\", \"25 GB/s\", \"50 us\", \"312 TFLOP/s\".\n"
    "\n"
    "Devices: A10 A100-40GB A100-80GB A30 A40 B200 GH200 GH200-144GB H100 H200 L4 L40S\n"
    "MI250 MI250X MI300X P100 RTX-2080Ti RTX-3080 RTX-3090 RTX-4080 RTX-4090 RTX-5090\n"
    "RTX-A6000 T4 Titan-RTX V100-16GB V100-32GB cpu\n";

static void print_hosts(const struct hapt_env *env, const struct hapt_hosts *hosts)
{
    char size[32], rate[32];
    for (int h = 0; h < hosts->count; h++) {
        const struct hapt_host *host = &hosts->host[h];
        if (host->fake_failed)
            hapt_warn(env, "host %s: hwloc cannot use HWLOC_XMLFILE or HWLOC_SYNTHETIC; this is the real machine\n",
                      host->name);
        hapt_print(env, "Host %s: %d rank%s, %d core%s, %d NUMA node%s, %s memory%s%s%s\n", host->name, host->ranks,
                   host->ranks > 1 ? "s" : "", host->cores, host->cores > 1 ? "s" : "", host->numa_nodes,
                   host->numa_nodes > 1 ? "s" : "", hapt_units_bytes(host->memory_bytes, size),
                   host->cpu_model[0] ? ", " : "", host->cpu_model, host->faked ? " (faked)" : "");
        for (int g = 0; g < host->gpu_count; g++) {
            const struct hapt_host_gpu *gpu = &host->gpu[g];
            hapt_print(env, "  GPU %-40s %s", gpu->name, gpu->spec[0] ? gpu->spec : "unknown");
            if (gpu->memory_bytes > 0)
                hapt_print(env, ", %s, %d multiprocessors at %.2f GHz", hapt_units_bytes(gpu->memory_bytes, size),
                           gpu->processors, 1e-9 * gpu->clock_hz);
            hapt_print(env, "%s%s%s%s%s%s\n", gpu->bus[0] ? ", PCI " : "", gpu->bus,
                       gpu->local_cores[0] ? ", near threads " : "", gpu->local_cores,
                       gpu->local_nics[0] ? ", NIC " : "", gpu->local_nics);
            char doubt[192];
            if (hapt_host_gpu_mismatch(gpu, doubt))
                hapt_warn(
                    env,
                    "host %s, GPU %d: %s; check for MIG slices and lowered clocks, or describe it in a cluster file\n",
                    host->name, g, doubt);
        }
        if (host->gpu_count > host->gpus_usable)
            hapt_print(env, "  %d of them usable: see hapt doctor\n", host->gpus_usable);
        for (int n = 0; n < host->nic_count; n++)
            hapt_print(env, "  NIC %-40s %s\n", host->nic[n].name,
                       host->nic[n].bandwidth > 0 ? hapt_units_bandwidth(host->nic[n].bandwidth, rate) : "");
    }
}

static void print_backends(const struct hapt_env *env)
{
    const struct hapt_backend *backend;
    for (int i = 0; (backend = hapt_backend_at(i)); i++) {
        const char *reason = "";
        if (backend->device_count(&reason) > 0)
            hapt_print_wrapped(env, 20, "Back end %-10s %s\n", backend->name, backend->description);
        else
            hapt_print_wrapped(env, 20, "Back end %-10s no devices: %s\n", backend->name, reason);
    }
}

static enum hapt_status write_file(const char *path, const struct hapt_cluster *cluster)
{
    struct hapt_h5 *file;
    HAPT_TRY(hapt_h5_create(path, "hapt-topology", 1, &file));
    return hapt_h5_finish(file, hapt_cluster_write(file, "/topology", cluster));
}

#define COLLECTIVES_SECONDS 5.0
#define COLLECTIVES_TIMEOUT_S 60.0

/* Measures collectives over the ranks with devices, in device order; paced links slow them down. Collective over
 * `devices`. */
static enum hapt_status time_collectives(MPI_Comm devices, const struct hapt_cluster *cluster, struct hapt_arena *arena,
                                         struct hapt_collective_model *model)
{
    struct hapt_collective *collective;
    int at = 0, *rank = hapt_arena_alloc(arena, (size_t)cluster->rank_count, sizeof *rank);
    HAPT_TRY(hapt_link_all_or_none(devices, "the measurement of collectives",
                                   rank ? HAPT_OK
                                        : hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for the ranks of the cluster")));
    for (int c = 0; c < cluster->count; c++)
        for (int j = 0; j < cluster->subcluster[c].nodes * cluster->subcluster[c].devices_per_node; j++)
            rank[at++] = cluster->subcluster[c].ranks[j];
    HAPT_TRY(hapt_collective_create(devices, "the cluster", COLLECTIVES_TIMEOUT_S, true, &collective));
    hapt_cluster_pace(cluster, cluster->rank_count, rank, collective);
    const enum hapt_status status = hapt_collective_measure(collective, COLLECTIVES_SECONDS, model, NULL, NULL);
    hapt_collective_destroy(collective);
    return status;
}

/* Measures; the result replaces the cluster's entry for the same number of ranks. Collective over env->world. */
static enum hapt_status measure_collectives(const struct hapt_env *env, struct hapt_arena *arena,
                                            struct hapt_cluster *cluster)
{
    struct hapt_collective_model model = {.ranks = 0}, *all;
    int device_index = -1, count = 0;
    MPI_Comm devices;
    if (!cluster->subcluster_of_rank)
        return hapt_fail(HAPT_ERR_USAGE, "start as many ranks as the cluster has devices",
                         "--collectives cannot measure: the cluster is on paper");
    for (int c = 0, at = 0; c < cluster->count; c++)
        for (int j = 0; j < cluster->subcluster[c].nodes * cluster->subcluster[c].devices_per_node; j++, at++)
            if (cluster->subcluster[c].ranks[j] == env->world_rank) device_index = at;
    HAPT_MPI(MPI_Comm_split(env->world, device_index < 0 ? MPI_UNDEFINED : 0, device_index, &devices));
    enum hapt_status status = HAPT_OK;
    struct hapt_progress progress;
    hapt_progress_init(&progress, env, "measuring collectives", 0);
    if (devices != MPI_COMM_NULL) {
        status = time_collectives(devices, cluster, arena, &model);
        MPI_Comm_free(&devices);
    }
    hapt_progress_release(&progress);
    HAPT_TRY(hapt_env_agree(env->world, status));
    HAPT_MPI(MPI_Bcast(&model, (int)sizeof model, MPI_BYTE, cluster->subcluster[0].ranks[0],
                       env->world)); /* also to idle ranks */
    if (model.ranks < 2) return HAPT_OK;
    HAPT_NEW(all, arena, cluster->collective_count + 1);
    for (int i = 0; i < cluster->collective_count; i++)
        if (cluster->collective[i].ranks != model.ranks) all[count++] = cluster->collective[i];
    all[count++] = model;
    cluster->collective = all;
    cluster->collective_count = count;
    return hapt_cluster_check(cluster);
}

static void print_routes(const struct hapt_env *env, const struct hapt_cluster *cluster, int count,
                         const struct hapt_cluster_route *route)
{
    if (count > 0) hapt_print(env, "Routes between hosts for stage boundaries\n");
    for (int w = 0; w < count; w++) {
        char link[160], by[48] = "mpi", rate[32] = "no connection", delay[32] = "";
        snprintf(link, sizeof link, "%s - %s", cluster->subcluster[route[w].from].name,
                 cluster->subcluster[route[w].to].name);
        if (route[w].interface[0][0])
            snprintf(by, sizeof by, "tcp, %s - %s", route[w].interface[0], route[w].interface[1]);
        if (route[w].bandwidth > 0) {
            hapt_units_bandwidth(route[w].bandwidth, rate);
            hapt_units_time(route[w].latency, delay);
        }
        hapt_print(env, "  %-24s %-24s %-14s %-10s %s\n", link, by, rate, delay, route[w].chosen ? "chosen" : "");
    }
}

/* Measures every link again. Paced links keep the file's values, which are targets, not measurements. */
static enum hapt_status probe_links(struct hapt_env *env, struct hapt_arena *arena, struct hapt_cluster *cluster)
{
    int count;
    struct hapt_cluster_route *route;
    if (!cluster->subcluster_of_rank)
        return hapt_env_agree(env->world, hapt_fail(HAPT_ERR_USAGE, "start as many ranks as the cluster has devices",
                                                    "--probe cannot measure: the cluster is on paper"));
    for (int c = 0; c < cluster->count; c++) {
        struct hapt_subcluster *own = &cluster->subcluster[c];
        own->intra_node_bandwidth = own->inter_node_bandwidth = 0;
        own->intra_node_latency = own->inter_node_latency = -1;
    }
    for (int l = 0; l < cluster->count * cluster->count; l++) {
        if (cluster->link[l].paced) continue;
        cluster->link[l].bandwidth = 0;
        cluster->link[l].latency = -1;
    }
    HAPT_TRY(hapt_cluster_probe(env, cluster));
    HAPT_TRY(hapt_cluster_choose_routes(env, true, arena, cluster, &count, &route));
    print_routes(env, cluster, count, route);
    return HAPT_OK;
}

enum hapt_status hapt_command_topology(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
{
    struct hapt_cluster *cluster;
    const struct hapt_output outputs[] = {{.option = "output", .format = "hapt-topology"},
                                          {.option = "svg", .begins = HAPT_PICTURE_SVG_HEAD}};
    HAPT_TRY(hapt_outputs_check(env, config, 2, outputs));
    if (!hapt_config_text(config, "cluster")) {
        struct hapt_hosts *hosts;
        HAPT_TRY(hapt_env_agree(env->world, hapt_hosts_gather(env, arena, &hosts)));
        print_hosts(env, hosts);
        print_backends(env);
    }
    HAPT_TRY(hapt_phase_cluster(env, config, false, arena, &cluster));
    if (hapt_config_bool(config, "probe")) HAPT_TRY(probe_links(env, arena, cluster));
    if (hapt_config_bool(config, "collectives"))
        HAPT_TRY(hapt_env_agree(env->world, measure_collectives(env, arena, cluster)));
    hapt_cluster_print(env, cluster);
    if (!cluster->subcluster_of_rank)
        hapt_note(env, "on paper: %d device%s, but %d rank%s cannot drive them; missing link values are assumed\n",
                  cluster->rank_count, cluster->rank_count > 1 ? "s" : "", env->world_size,
                  env->world_size > 1 ? "s" : "");
    else if (env->world_size > cluster->rank_count)
        hapt_note(env, "%d of %d ranks stay idle\n", env->world_size - cluster->rank_count, env->world_size);
    enum hapt_status status = HAPT_OK;
    if (env->world_rank == 0 && env->quiet) status = hapt_cluster_print_json(cluster);
    if (env->world_rank == 0 && status == HAPT_OK && hapt_config_text(config, "output"))
        status = write_file(hapt_config_text(config, "output"), cluster);
    if (env->world_rank == 0 && status == HAPT_OK && hapt_config_text(config, "svg"))
        status = hapt_picture_save_cluster(cluster, hapt_config_text(config, "svg"));
    return hapt_env_agree(env->world, status);
}
