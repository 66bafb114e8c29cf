/* Gathers the hosts of all ranks on every rank. */
#include <stdlib.h>
#include <string.h>

#include "host.h"

/* Bytes per second (reads plus writes) that one rank copies while all ranks of its host copy; best of three. */
static double measure_bandwidth(void)
{
    enum { BYTES = 16 << 20, ROUNDS = 3 };
    char *from = malloc(BYTES), *to = malloc(BYTES);
    double best = 0;
    if (from && to) {
        memset(from, 1, BYTES);
        memset(to, 2, BYTES);
        for (int round = 0; round < ROUNDS; round++) {
            const double start = hapt_time_s();
            memcpy(to, from, BYTES);
            __asm__ volatile("" : : "r"(to) : "memory"); /* the copy must happen */
            const double seconds = hapt_time_s() - start;
            if (seconds > 0 && 2.0 * BYTES / seconds > best) best = 2.0 * BYTES / seconds;
        }
    }
    free(from);
    free(to);
    return best > 0 ? best : 1e9;
}

/* Describes the host on every rank. Loading a topology in many ranks of a big node is slow, so the first rank does it
 * for all, unless some rank's topology is faked. */
static enum hapt_status describe_all(const struct hapt_env *env, struct hapt_host *mine)
{
    char fake[1024];
    hapt_host_fake_key(fake, sizeof fake);
    int faked = fake[0] != '\0';
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, &faked, 1, MPI_INT, MPI_MAX, env->node));
    if (faked || env->node_rank == 0) hapt_host_describe(env, mine);
    if (!faked) HAPT_MPI(MPI_Bcast(mine, (int)sizeof *mine, MPI_BYTE, 0, env->node));
    HAPT_MPI(MPI_Barrier(env->node));
    mine->rank_bandwidth = measure_bandwidth();
    return HAPT_OK;
}

enum hapt_status hapt_hosts_gather(const struct hapt_env *env, struct hapt_arena *arena, struct hapt_hosts **result)
{
    struct hapt_hosts *hosts;
    struct hapt_host mine, *all = malloc((size_t)env->world_size * sizeof *all);
    hosts = hapt_arena_alloc(arena, 1, sizeof *hosts);
    if (hosts) hosts->host = hapt_arena_alloc(arena, (size_t)env->world_size, sizeof *hosts->host);
    if (hosts) hosts->host_of_rank = hapt_arena_alloc(arena, (size_t)env->world_size, sizeof *hosts->host_of_rank);
    /* Abort here: an early return would leave other ranks waiting in the collectives below. */
    if (!all || !hosts || !hosts->host || !hosts->host_of_rank)
        hapt_die(hapt_fail(HAPT_ERR_MEMORY, "give the job more memory", "no memory for the list of hosts"));
    enum hapt_status status = describe_all(env, &mine);
    if (status == HAPT_OK)
        status =
            hapt_env_mpi(MPI_Allgather(&mine, (int)sizeof mine, MPI_BYTE, all, (int)sizeof mine, MPI_BYTE, env->world),
                         "gathering the hosts");
    for (int rank = 0; status == HAPT_OK && rank < env->world_size; rank++) {
        int h = 0;
        while (h < hosts->count && hosts->host[h].identity != all[rank].identity) h++;
        hosts->host_of_rank[rank] = h;
        if (h == hosts->count) {
            hosts->host[hosts->count++] = all[rank];
            continue;
        }
        hosts->host[h].ranks++;
        if (all[rank].rank_bandwidth < hosts->host[h].rank_bandwidth)
            hosts->host[h].rank_bandwidth = all[rank].rank_bandwidth;
    }
    free(all);
    if (status == HAPT_OK) *result = hosts;
    return status;
}

double hapt_host_cores_per_rank(const struct hapt_host *host)
{
    return (double)host->cores / (host->ranks > 0 ? host->ranks : 1);
}
