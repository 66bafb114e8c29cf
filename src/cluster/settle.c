/* Binds ranks to cores near their GPU, or to those of their NUMA node, with all threads that they start from here on.
 */
#include <sched.h>
#include <stdio.h>
#include <string.h>

#include "hapt/cluster.h"
#include "hapt/device.h"
#include "near.h"

/* What the first rank of a node finds out for another. */
struct seat {
    struct near_place place;
    int allowed; /* hardware threads that a rank may use whom nobody has bound */
    int here;    /* 0: the topology is a fake one */
};

static bool runs_by(const struct hapt_env *env, const struct hapt_cluster *cluster, const char *backend)
{
    const int own = cluster->subcluster_of_rank[env->world_rank];
    return own >= 0 && strcmp(hapt_device_backend(&cluster->subcluster[own].device), backend) == 0;
}

/* The device that this rank computes on. */
static void find_want(const struct hapt_env *env, const struct hapt_cluster *cluster, struct near_want *want)
{
    const struct hapt_backend *backend = hapt_backend_find("cuda");
    const char *reason = "";
    struct hapt_device_facts facts = {.bus = ""};
    *want = (struct near_want){.on_cores = runs_by(env, cluster, "cpu")};
    if (!runs_by(env, cluster, "cuda") || !backend || !backend->describe) return;
    const int devices = backend->device_count(&reason);
    if (devices < 1 || backend->describe(hapt_env_device(env, devices), &facts) != HAPT_OK) {
        hapt_fail_reset();
        return;
    }
    snprintf(want->bus, sizeof want->bus, "%s", facts.bus);
}

static int weight(const unsigned char *bits)
{
    int count = 0;
    for (int i = 0; i < NEAR_CPUS / 8; i++) count += __builtin_popcount(bits[i]);
    return count;
}

enum outcome { LEFT, BOUND, FAR };

/* Whom the launcher has bound keeps to that: it may know of other jobs. */
static enum outcome take(const struct seat *seat)
{
    const int cpus = weight(seat->place.cpus);
    const size_t bytes = CPU_ALLOC_SIZE(NEAR_CPUS);
    cpu_set_t *now = CPU_ALLOC(NEAR_CPUS), *wanted = CPU_ALLOC(NEAR_CPUS);
    enum outcome outcome = LEFT;
    if (now && wanted && cpus > 0 && seat->here && sched_getaffinity(0, bytes, now) == 0) {
        int common = 0;
        CPU_ZERO_S(bytes, wanted);
        for (int cpu = 0; cpu < NEAR_CPUS; cpu++) {
            if (!(seat->place.cpus[cpu / 8] >> cpu % 8 & 1)) continue;
            CPU_SET_S(cpu, bytes, wanted);
            common += CPU_ISSET_S(cpu, bytes, now) != 0;
        }
        if (CPU_COUNT_S(bytes, now) < seat->allowed)
            outcome = common > 0 ? LEFT : FAR;
        else if (cpus < seat->allowed && sched_setaffinity(0, bytes, wanted) == 0)
            outcome = BOUND;
    }
    if (now) CPU_FREE(now);
    if (wanted) CPU_FREE(wanted);
    return outcome;
}

static void tell(const struct hapt_env *env, int near_gpu, int by_numa, int far)
{
    if (near_gpu > 0)
        hapt_note(env, "%d rank%s bound to cores near %s GPU%s (--bind no: where the system likes)\n", near_gpu,
                  near_gpu > 1 ? "s are" : " is", near_gpu > 1 ? "their" : "its", near_gpu > 1 ? "s" : "");
    if (by_numa > 0)
        hapt_note(env, "%d rank%s bound to the cores of %s NUMA node%s (--bind no: where the system likes)\n", by_numa,
                  by_numa > 1 ? "s are" : " is", by_numa > 1 ? "their" : "its", by_numa > 1 ? "s" : "");
    if (far > 0)
        hapt_warn(env,
                  "%d rank%s bound by the launcher to other cores than those near %s GPU%s: start with mpirun "
                  "--bind-to none, srun --cpu-bind=none\n",
                  far, far > 1 ? "s are" : " is", far > 1 ? "their" : "its", far > 1 ? "s" : "");
}

enum hapt_status hapt_cluster_settle(const struct hapt_env *env, bool bind, struct hapt_arena *arena,
                                     struct hapt_cluster *cluster)
{
    struct near_want mine, *want = hapt_arena_alloc(arena, (size_t)env->node_size, sizeof *want);
    struct near_place *place = hapt_arena_alloc(arena, (size_t)env->node_size, sizeof *place);
    struct seat *seat = hapt_arena_alloc(arena, (size_t)env->node_size, sizeof *seat), own = {.here = 0};
    HAPT_TRY(hapt_env_agree(env->world, want && place && seat ? HAPT_OK : HAPT_ERR_MEMORY));
    find_want(env, cluster, &mine);
    HAPT_MPI(MPI_Gather(&mine, sizeof mine, MPI_BYTE, want, sizeof mine, MPI_BYTE, 0, env->node));
    if (env->node_rank == 0) {
        bool here = false;
        int allowed = 0;
        const bool known = near_look(env->node_size, want, place, &here, &allowed);
        for (int r = 0; known && r < env->node_size; r++) seat[r] = (struct seat){place[r], allowed, here};
    }
    HAPT_MPI(MPI_Scatter(seat, (int)sizeof own, MPI_BYTE, &own, (int)sizeof own, MPI_BYTE, 0, env->node));
    snprintf(cluster->near_interfaces, sizeof cluster->near_interfaces, "%s", own.place.nics);
    const enum outcome outcome = bind ? take(&own) : LEFT;
    int count[3] = {outcome == BOUND && !mine.on_cores, outcome == BOUND && mine.on_cores,
                    outcome == FAR && !mine.on_cores},
        all[3];
    HAPT_MPI(MPI_Allreduce(count, all, 3, MPI_INT, MPI_SUM, env->world));
    tell(env, all[0], all[1], all[2]);
    return HAPT_OK;
}
