/*
 * Hosts: what one machine of the cluster offers, as hwloc and the system show it.
 *
 * HWLOC_XMLFILE and HWLOC_SYNTHETIC fake the topology, rank by rank where their values differ: such ranks count as
 * different hosts, so that any cluster can be discovered on a laptop.
 */
#ifndef HAPT_HOST_H
#define HAPT_HOST_H

#include "hapt/arena.h"
#include "hapt/dtype.h"
#include "hapt/env.h"

#define HAPT_HOST_GPUS 16
#define HAPT_HOST_NICS 8

struct hapt_host_gpu {
    char name[64];                 /* as its driver names it, or the PCI bus */
    char spec[24];                 /* entry of the device database; "" when the model is not known */
    char bus[16];                  /* PCI address, "0000:3b:00.0" */
    double memory_bytes, clock_hz; /* as its driver says; 0: it was not asked */
    int processors, lanes;         /* multiprocessors, fp32 lanes of each */
    char cores[48];                /* hardware threads near it, "0-15,32-47"; "" unknown */
    char nics[48];                 /* network interfaces nearest to it, "ib0,mlx5_0" */
    bool half_only;                /* it has no bf16 (compute capability below 8.0) */
};

struct hapt_host_nic {
    char name[24];
    double bandwidth; /* byte/s; 0: the system does not say */
};

struct hapt_host {
    char name[64];
    char cpu_model[64];
    int ranks;
    int cores, threads, numa_nodes; /* that the host's ranks may use */
    int threads_unbound;            /* hardware threads that they could use if the launcher bound none of them */
    double memory_bytes;            /* of the host, or of its control group when that is less */
    double clock_hz;
    double core_flops[HAPT_DTYPE_COUNT]; /* estimated FLOP/s of one core: clock x what the vector units do per cycle */
    double rank_bandwidth;               /* byte/s that one rank copies when all of them do */
    int gpu_count;
    struct hapt_host_gpu gpu[HAPT_HOST_GPUS];
    int gpus_usable; /* GPUs that a back end of this build can open */
    int nic_count;
    struct hapt_host_nic nic[HAPT_HOST_NICS];
    bool faked;
    bool fake_failed;  /* HWLOC_XMLFILE or HWLOC_SYNTHETIC is set, but hwloc cannot use it: this is the real machine */
    uint64_t identity; /* ranks with equal identities share the host */
};

struct hapt_hosts {
    int count;
    struct hapt_host *host; /* [count] in order of the lowest world rank */
    int *host_of_rank;      /* [world_size] */
};

/* Looks at the host of every rank. Collective over env->world; every rank gets all of them. */
enum hapt_status hapt_hosts_gather(const struct hapt_env *env, struct hapt_arena *arena, struct hapt_hosts **hosts);

/* Flags of the processor as the system prints them, e.g. " fma avx2 "; `flags` holds at least 2 characters. Rank-local.
 */
void hapt_host_cpu_flags(char *flags, size_t size);
/* Where the driver and the device database tell of a GPU what differs by more than 15 %: what; NULL: they agree, or one
 * of them does not tell. */
const char *hapt_host_gpu_doubt(const struct hapt_host_gpu *gpu, char text[192]);
/* Cores' worth of one rank on its host: less than 1 when ranks outnumber cores. */
double hapt_host_cores_per_rank(const struct hapt_host *host);
/* "2.9.0": the hwloc that this build was made with (the library tells only the version of its interface). */
const char *hapt_host_library_version(void);

#endif
