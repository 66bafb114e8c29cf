/*
 * The cluster: homogeneous subclusters of nodes x devices, joined by links.
 *
 * Comes from a JSON cluster file (any cluster on earth can be planned on a laptop) or from discovery (hwloc, devices,
 * hosts). Formats: see `hapt topology --help`.
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
    double memory_bytes;                 /* the cap when the file gave one */
    double memory_bandwidth;             /* byte/s */
    double slowdown;                     /* >= 1: compute is stretched by this factor */
    bool memory_capped;                  /* memory_bytes is a limit to enforce, not a property found */
    bool tf32;     /* products of fp32 are rounded to TF32 (--precision tf32), half as fast as those of bf16 */
    bool emulated; /* modelled by whatever process stands for it (hapt_cluster_emulate) */
};

struct hapt_subcluster {
    char name[64];
    int nodes, devices_per_node;
    struct hapt_device_spec device;
    double intra_node_bandwidth, inter_node_bandwidth; /* byte/s; 0: not known yet (measured by the probe) */
    double intra_node_latency, inter_node_latency;     /* s; negative: not known yet */
    int host_count;                                    /* "hosts" of the file; 0: ranks fill in order of world rank */
    const char **hosts;
    const int *ranks; /* [nodes * devices_per_node] world ranks, node-major; NULL before binding */
};

struct hapt_link {
    double bandwidth;      /* byte/s per direction; 0: not known yet */
    double latency;        /* s; negative: not known yet */
    bool paced;            /* rehearsal: transfers are slowed to this rate (never a real link) */
    char transport[8];     /* how stage boundaries cross it between hosts: "mpi", "tcp"; "": not chosen */
    char interface[2][16]; /* tcp: network interfaces of the hosts at its two ends */
};

struct hapt_cluster {
    int count;
    struct hapt_subcluster *subcluster; /* [count] */
    struct hapt_link *link;             /* [count][count], symmetric; the diagonal is between stages inside one */
    int collective_count; /* collectives measured over so many numbers of ranks (hapt topology --collectives) */
    struct hapt_collective_model *collective; /* [collective_count] each over ranks of its own */
    char near_interfaces[48];                 /* network interfaces nearest this rank's GPU, "ib0,mlx5_0"; "": not known
                                                 (hapt_cluster_settle) */
    bool from_file;
    int rank_count;                /* devices in all */
    const int *subcluster_of_rank; /* [world_size]; -1: idle rank; NULL before binding */
};

/* Parses a JSON cluster file. Unknown keys and bad units fail with HAPT_ERR_INPUT naming file and line. Rank-local. */
enum hapt_status hapt_cluster_load(const char *path, struct hapt_arena *arena, struct hapt_cluster **cluster);
/* Looks at every host by hwloc and groups ranks: hosts with equal devices, memory and rank count form one subcluster,
 * or one for each kind of GPU that their ranks drive. Collective over env->world; every rank gets the same cluster,
 * already bound. */
enum hapt_status hapt_cluster_discover(const struct hapt_env *env, struct hapt_arena *arena,
                                       struct hapt_cluster **cluster);
/* The name of the back end that runs the device. */
static inline const char *hapt_device_backend(const struct hapt_device_spec *device)
{
    return device->emulated ? "emulated" : device->backend;
}
/* Every device is modelled from here on: any rank stands for any device, memory is a limit, link values that are absent
 * are assumed, and all links are paced. */
void hapt_cluster_emulate(struct hapt_cluster *cluster);
/* Gives world ranks to the devices of a loaded cluster (by "hosts", else in order of world rank; of GPUs of several
 * kinds, those of the device's name first). HAPT_ERR_INPUT when there are fewer ranks than devices. Collective. */
enum hapt_status hapt_cluster_bind(const struct hapt_env *env, struct hapt_arena *arena, struct hapt_cluster *cluster);
/* Measures link values that are absent (latency by small, bandwidth by large messages over MPI). Collective; bound
 * clusters only. hapt_cluster_assume fills absent values of an unbound cluster from the device database instead. */
enum hapt_status hapt_cluster_probe(const struct hapt_env *env, struct hapt_cluster *cluster);
void hapt_cluster_assume(struct hapt_cluster *cluster);

/* Binds ranks (`bind`) and the threads that they start from here on, unless their launcher has bound them. Ranks with a
 * GPU: to their share of the cores of its package or NUMA node. Ranks on CPUs: to their share of a NUMA node's cores,
 * neighbours in the order of ranks together, where their host has several NUMA nodes and they divide them evenly.
 * Emulated devices' ranks are left alone. Fills near_interfaces. Before other threads are started. Collective over
 * env->world; bound clusters only. */
enum hapt_status hapt_cluster_settle(const struct hapt_env *env, bool bind, struct hapt_arena *arena,
                                     struct hapt_cluster *cluster);

/* A way between the hosts of two subclusters (or of one: equal), as it was measured. */
struct hapt_cluster_way {
    int from, to; /* subclusters */
    char transport[8], interface[2][16];
    double bandwidth, latency; /* byte/s, s; 0: it leads nowhere */
    bool chosen;
};
/* Chooses how stage boundaries cross each link between hosts where the file does not say: by the TCP connection over
 * the fastest of the networks that the hosts share, unless MPI is measured clearly faster; the link's absent values
 * then are that way's. `all`: measures also where the file has chosen, and takes the values in the place of the file's
 * (not of paced links). Some seconds at most. way [count]: what was measured. Collective over env->world; bound
 * clusters only; ends in agreement. */
enum hapt_status hapt_cluster_choose_ways(const struct hapt_env *env, bool all, struct hapt_arena *arena,
                                          struct hapt_cluster *cluster, int *count, struct hapt_cluster_way **way);
/* path [world_size]: how this rank reaches every other. Collective over env->world. */
struct hapt_path;
enum hapt_status hapt_cluster_paths(const struct hapt_env *env, const struct hapt_cluster *cluster,
                                    struct hapt_arena *arena, struct hapt_path **path);
/* Every invariant above; HAPT_ERR_INPUT. */
enum hapt_status hapt_cluster_check(const struct hapt_cluster *cluster);

static inline const struct hapt_link *hapt_cluster_link(const struct hapt_cluster *cluster, int from, int to)
{
    return &cluster->link[from * cluster->count + to];
}

/* Collectives over these world ranks of a bound cluster rehearse the slowest paced link between any two of them; none:
 * as fast as they go. */
struct hapt_collective;
void hapt_cluster_pace(const struct hapt_cluster *cluster, int count, const int *world_rank,
                       struct hapt_collective *collective);

void hapt_cluster_print(const struct hapt_env *env, const struct hapt_cluster *cluster);
enum hapt_status hapt_cluster_print_json(const struct hapt_cluster *cluster);
/* Saves under `group` of a run file; loads it again (unbound). */
enum hapt_status hapt_cluster_write(struct hapt_h5 *file, const char *group, const struct hapt_cluster *cluster);
enum hapt_status hapt_cluster_read(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                   struct hapt_cluster **cluster);

/* The built-in device database: spec-sheet figures. NULL when unknown; names at index 0.. until NULL. */
const struct hapt_device_spec *hapt_device_spec_find(const char *name);
const struct hapt_device_spec *hapt_device_spec_at(int index);

#endif
