/*
 * Hardware and software of every rank, recorded in the run file to analyse a slow or failed run later.
 *
 * Run file: /environment/NAME, one entry per world rank: texts (host, kernel, cpus, interfaces, subcluster, device,
 * back_end, libraries, hapt, mpi, hdf5, hwloc) and numbers (pid, threads, stage; stage is -1 for an idle rank).
 */
#ifndef HAPT_ENVIRONMENT_H
#define HAPT_ENVIRONMENT_H

#include "hapt/arena.h"
#include "hapt/env.h"
#include "hapt/h5.h"

struct hapt_environment {
    int64_t pid, stage, threads;
    char host[HAPT_HOSTNAME_CHARS];
    char kernel[96];
    char cpus[128];       /* hardware threads that the rank may use, "0-3,8" */
    char interfaces[256]; /* active network interfaces with address and rate: "eth0 10.0.0.2 25000 Mbit/s, ..." */
    char subcluster[64], device[64], back_end[16];
    char libraries[64]; /* of the back end */
    char hapt[24], mpi[96], hdf5[32], hwloc[24];
};

/* This rank's host, kernel, process, interfaces and versions. The caller adds stage, subcluster, device and threads.
 * Rank-local. */
void hapt_environment_collect(struct hapt_environment *environment);
/* Those of all ranks: *all (in `arena`) on rank 0, NULL elsewhere. Collective over env->world. */
enum hapt_status hapt_environment_gather(const struct hapt_env *env, const struct hapt_environment *mine,
                                         struct hapt_arena *arena, struct hapt_environment **all);
enum hapt_status hapt_environment_write(struct hapt_h5 *file, int64_t ranks, const struct hapt_environment *all);
/* *ranks is 0 if the file has none. HAPT_ERR_INPUT: tables differ in length. */
enum hapt_status hapt_environment_read(struct hapt_h5 *file, struct hapt_arena *arena, int64_t *ranks,
                                       struct hapt_environment **all);

#endif
