/*
 * Hosts: the resources of each machine of the cluster, as reported by hwloc and the system.
 *
 * HWLOC_XMLFILE and HWLOC_SYNTHETIC fake the topology. Ranks with different values count as different hosts, so any
 * cluster can be discovered on a laptop.
 */
#ifndef HAPT_HOST_H
#define HAPT_HOST_H

#include "hapt/arena.h"
#include "hapt/dtype.h"
#include "hapt/env.h"

#define HAPT_HOST_GPUS 16
#define HAPT_HOST_NICS 8

struct hapt_host_gpu {
    char name[64];                 /* from the driver, else from the PCI bus */
    char spec[24];                 /* entry of the device database; "": unknown model */
    char bus[16];                  /* PCI address, "0000:3b:00.0" */
    double memory_bytes, clock_hz; /* from the driver; 0: not queried */
    int processors;                /* multiprocessors */
    int lanes_per_processor;       /* fp32 lanes */
    char local_cores[48];          /* hardware threads with affinity to it, "0-15,32-47"; "": unknown */
    char local_nics[48];           /* network interfaces nearest to it, "ib0,mlx5_0" */
    bool no_bf16;                  /* no bf16 (compute capability below 8.0) */
};

struct hapt_host_nic {
    char name[24];
    double bandwidth; /* byte/s; 0: unknown */
};

struct hapt_host {
    char name[64];
    char cpu_model[64];
    int ranks;
    int cores, threads, numa_nodes; /* usable by the host's ranks */
    int threads_unbound;            /* hardware threads they could use if the launcher bound none of them */
    double memory_bytes;            /* of the host, or its cgroup limit if lower */
    double clock_hz;
    double core_flops[HAPT_DTYPE_COUNT]; /* estimated FLOP/s of one core: clock x vector FLOPs per cycle */
    double rank_bandwidth;               /* byte/s that one rank copies while all ranks copy */
    int gpu_count;
    struct hapt_host_gpu gpu[HAPT_HOST_GPUS];
    int gpus_usable; /* GPUs that a back end of this build can open */
    int nic_count;
    struct hapt_host_nic nic[HAPT_HOST_NICS];
    bool faked;
    bool fake_failed;  /* HWLOC_XMLFILE or HWLOC_SYNTHETIC is set but hwloc cannot use it: these are the real machine's
                          values */
    uint64_t identity; /* ranks with equal identities share the host */
};

struct hapt_hosts {
    int count;
    struct hapt_host *host; /* [count] ordered by lowest world rank */
    int *host_of_rank;      /* [world_size] */
};

/* Describes the host of every rank. Collective over env->world; every rank gets all hosts. */
enum hapt_status hapt_hosts_gather(const struct hapt_env *env, struct hapt_arena *arena, struct hapt_hosts **hosts);

/* Processor flags as the system prints them, e.g. " fma avx2 ". `flags` holds at least 2 characters. Rank-local. */
void hapt_host_cpu_flags(char *flags, size_t size);
/* Describes a difference of more than 15 % between the driver's and the device database's figures for a GPU. NULL: they
 * agree, or one of them is unknown. */
const char *hapt_host_gpu_mismatch(const struct hapt_host_gpu *gpu, char text[192]);
/* Cores per rank of the host; less than 1 when ranks outnumber cores. */
double hapt_host_cores_per_rank(const struct hapt_host *host);
/* The hwloc version that this build was compiled with, "2.9.0". (At run time hwloc only tells its API version.) */
const char *hapt_host_library_version(void);

#endif
