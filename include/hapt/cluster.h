/*
 * The cluster: homogeneous subclusters of nodes x devices, joined by links.
 *
 * It comes from a JSON cluster file (so any cluster can be planned on a laptop) or from discovery (hwloc, devices,
 * hosts). For the formats see `hapt help topology`.
 */
#ifndef HAPT_CLUSTER_H
#define HAPT_CLUSTER_H

#include "hapt/arena.h"
#include "hapt/collective_kind.h"
#include "hapt/dtype.h"
#include "hapt/env.h"
#include "hapt/h5.h"

#define HAPT_MAX_SUBCLUSTERS 16
#define HAPT_MAX_COLLECTIVE_MODELS 64

struct hapt_device_spec {
    char name[64];
    char backend[16];                    /* "cpu" or "cuda" */
    double peak_flops[HAPT_DTYPE_COUNT]; /* FLOP/s by element type, dense; 0 where unsupported */
    double memory_bytes;                 /* the cap, if the file gives one */
    double memory_bandwidth;             /* byte/s */
    double slowdown;                     /* >= 1: factor on compute times */
    bool steady;        /* slowed down to the planned times, whatever the speed of the cores (hapt_team_set_steady) */
    bool memory_capped; /* memory_bytes is a limit to enforce, not a measured property */
    bool tf32;          /* fp32 products are rounded to TF32 (--precision tf32), half as fast as bf16 */
    bool emulated;      /* any process emulates this device (hapt_cluster_emulate) */
};

struct hapt_subcluster {
    char name[64];
    int nodes, devices_per_node;
    struct hapt_device_spec device;
    double intra_node_bandwidth, inter_node_bandwidth; /* byte/s; 0: unknown (the probe measures it) */
    double intra_node_latency, inter_node_latency;     /* s; negative: unknown */
    double host_memory_bytes;                          /* of a node, for offloaded data; 0: unknown */
    double host_bandwidth;   /* byte/s in each direction between a device and its node's memory; 0: unknown */
    bool host_paced;         /* CPUs: copies are slowed down to that bandwidth */
    double host_update_rate; /* parameters/s that the CPUs of a node update with AdamW; 0: unknown */
    int host_count;          /* number of "hosts" in the file; 0: ranks are assigned in order of world rank */
    const char **hosts;
    const int *ranks; /* [nodes * devices_per_node] world ranks, node-major; NULL before binding */
};

struct hapt_link {
    double bandwidth;      /* byte/s per direction; 0: unknown */
    double latency;        /* s; negative: unknown */
    bool paced;            /* rehearsal: transfers are slowed to this rate (never a real link) */
    char transport[8];     /* how stage boundaries cross it between hosts: "mpi" or "tcp"; "": not chosen */
    char interface[2][16]; /* tcp: network interfaces of the hosts at the two ends */
};

struct hapt_cluster {
    int count;
    struct hapt_subcluster *subcluster; /* [count] */
    struct hapt_link *link; /* [count][count], symmetric; the diagonal is for stages of the same subcluster */
    int collective_count;   /* tables of measured collectives, one per number of ranks (hapt topology --collectives) */
    struct hapt_collective_model *collective; /* [collective_count] each for its own number of ranks */
    char gpu_local_interfaces[48]; /* network interfaces nearest to this rank's GPU, "ib0,mlx5_0"; "": unknown
                                      (hapt_cluster_bind_cores) */
    bool from_file;
    int rank_count;                /* total number of devices */
    const int *subcluster_of_rank; /* [world_size]; -1: idle rank; NULL before binding */
};

/* Parses a JSON cluster file. Rank-local. HAPT_ERR_INPUT names file and line of an unknown key or a bad unit. */
enum hapt_status hapt_cluster_load(const char *path, struct hapt_arena *arena, struct hapt_cluster **cluster);
/* Describes every host with hwloc and groups the ranks. Hosts with equal devices, memory and rank count form one
 * subcluster, or one per kind of GPU that their ranks drive. Collective over env->world; every rank gets the same
 * cluster, already bound. */
enum hapt_status hapt_cluster_discover(const struct hapt_env *env, struct hapt_arena *arena,
                                       struct hapt_cluster **cluster);
/* Name of the back end that runs the device. */
static inline const char *hapt_device_backend(const struct hapt_device_spec *device)
{
    return device->emulated ? "emulated" : device->backend;
}
/* Makes every device emulated: any rank can run any device, memory is a limit, unknown link values are assumed, and all
 * links are paced. */
void hapt_cluster_emulate(struct hapt_cluster *cluster);
/* Assigns world ranks to the devices of a loaded cluster: by "hosts", else in order of world rank. If hosts have
 * several kinds of GPUs, ranks with the device's kind come first. HAPT_ERR_INPUT if there are fewer ranks than devices.
 * Collective. */
enum hapt_status hapt_cluster_bind(const struct hapt_env *env, struct hapt_arena *arena, struct hapt_cluster *cluster);
/* Measures unknown link values over MPI: latency with small messages, bandwidth with large ones. Collective; bound
 * clusters only. For an unbound cluster, hapt_cluster_assume fills unknown values from the device database instead. */
enum hapt_status hapt_cluster_probe(const struct hapt_env *env, struct hapt_cluster *cluster);
void hapt_cluster_assume(struct hapt_cluster *cluster);
/* The given bandwidth between a device and its host's memory, or that of typical hardware; byte/s in each direction. */
double hapt_cluster_host_bandwidth(const struct hapt_subcluster *subcluster);
/* Parameters/s that a node's CPUs update with AdamW for one of its devices, while they do so for all of them. If the
 * cluster does not say so: of CPU devices by their memory bandwidth, else that of AutoHete's host, 4e9. */
double hapt_cluster_host_update_rate(const struct hapt_subcluster *subcluster);

/* Sets gpu_local_interfaces. If `bind`, also binds each rank, and the threads it starts later, unless its launcher has
 * bound it. A rank with a GPU gets its share of the cores of the GPU's package or NUMA node. A CPU rank gets its share
 * of a NUMA node's cores, with consecutive ranks together, if the ranks divide the host's NUMA nodes (more than one)
 * evenly. Ranks of emulated devices are not bound. Call before other threads start. Collective over env->world; bound
 * clusters only. */
enum hapt_status hapt_cluster_bind_cores(const struct hapt_env *env, bool bind, struct hapt_arena *arena,
                                         struct hapt_cluster *cluster);

/* A measured route between the hosts of two subclusters (or of one, from == to). */
struct hapt_cluster_route {
    int from, to; /* subclusters */
    char transport[8], interface[2][16];
    double bandwidth, latency; /* byte/s, s; 0: unreachable */
    bool chosen;
};
/* Chooses the transport of stage boundaries for each link between hosts, unless the file chooses it. The choice is the
 * TCP connection over the fastest network that the hosts share, unless MPI is measured clearly faster. Unknown link
 * values then come from that route. `all`: also measures links whose transport the file chooses, and replaces the
 * file's values (not those of paced links). Takes a few seconds at most. route [count]: the measurements. Collective
 * over env->world; bound clusters only; ends in agreement. */
enum hapt_status hapt_cluster_choose_routes(const struct hapt_env *env, bool all, struct hapt_arena *arena,
                                            struct hapt_cluster *cluster, int *count,
                                            struct hapt_cluster_route **route);
/* path [world_size]: how this rank reaches each other rank. Collective over env->world. */
struct hapt_path;
enum hapt_status hapt_cluster_paths(const struct hapt_env *env, const struct hapt_cluster *cluster,
                                    struct hapt_arena *arena, struct hapt_path **path);
/* Checks every invariant above; HAPT_ERR_INPUT. */
enum hapt_status hapt_cluster_check(const struct hapt_cluster *cluster);

static inline const struct hapt_link *hapt_cluster_link(const struct hapt_cluster *cluster, int from, int to)
{
    return &cluster->link[from * cluster->count + to];
}

/* Makes collectives over these world ranks of a bound cluster as slow as the slowest paced link between any two of
 * them. Without a paced link they run at full speed. */
struct hapt_collective;
void hapt_cluster_pace(const struct hapt_cluster *cluster, int count, const int *world_rank,
                       struct hapt_collective *collective);

void hapt_cluster_print(const struct hapt_env *env, const struct hapt_cluster *cluster);
enum hapt_status hapt_cluster_print_json(const struct hapt_cluster *cluster);
/* Writes a cluster file for people: devices of the database by name, values with units. HAPT_ERR_IO, HAPT_ERR_MEMORY.
 */
enum hapt_status hapt_cluster_save(const struct hapt_cluster *cluster, const char *path);
/* Saves under the HDF5 group `group` of a run file, and loads it again (unbound). */
enum hapt_status hapt_cluster_write(struct hapt_h5 *file, const char *group, const struct hapt_cluster *cluster);
enum hapt_status hapt_cluster_read(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                   struct hapt_cluster **cluster);

/* The built-in device database (data sheet figures). NULL: unknown name, or index past the end (indices start at 0). */
const struct hapt_device_spec *hapt_device_spec_find(const char *name);
const struct hapt_device_spec *hapt_device_spec_at(int index);

#endif
