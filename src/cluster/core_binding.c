/* Binds ranks, and the threads they start later, to the cores near their GPU or of their NUMA node. */
#include <sched.h>
#include <stdio.h>
#include <string.h>

#include "hapt/cluster.h"
#include "hapt/device.h"
#include "affinity.h"

/* Result of the node's first rank for another rank. */
struct assignment {
    struct affinity affinity;
    int allowed; /* hardware threads that an unbound rank may use */
    int here;    /* 0: the topology is faked */
};

static bool runs_by(const struct hapt_env *env, const struct hapt_cluster *cluster, const char *backend)
{
    const int own = cluster->subcluster_of_rank[env->world_rank];
    return own >= 0 && strcmp(hapt_device_backend(&cluster->subcluster[own].device), backend) == 0;
}

/* Finds the device that this rank computes on. */
static void find_request(const struct hapt_env *env, const struct hapt_cluster *cluster,
                         struct affinity_request *request)
{
    const struct hapt_backend *backend = hapt_backend_find("cuda");
    const char *reason = "";
    struct hapt_device_facts facts = {.pci_address = ""};
    *request = (struct affinity_request){.on_cores = runs_by(env, cluster, "cpu")};
    if (!runs_by(env, cluster, "cuda") || !backend) return;
    const int devices = backend->device_count(&reason);
    if (devices < 1 || backend->describe(hapt_env_device(env, devices), &facts) != HAPT_OK) {
        hapt_fail_reset();
        return;
    }
    snprintf(request->bus, sizeof request->bus, "%s", facts.pci_address);
}

static int weight(const unsigned char *bits)
{
    int count = 0;
    for (int i = 0; i < AFFINITY_CPUS / 8; i++) count += __builtin_popcount(bits[i]);
    return count;
}

/* BOUND_REMOTE: its launcher has bound it to other cores. */
enum outcome { UNCHANGED, BOUND, BOUND_REMOTE };

/* Binds this rank, unless its launcher has bound it: the launcher may know of other jobs. */
static enum outcome apply_binding(const struct assignment *assignment)
{
    const int cpus = weight(assignment->affinity.cpus);
    const size_t bytes = CPU_ALLOC_SIZE(AFFINITY_CPUS);
    cpu_set_t *now = CPU_ALLOC(AFFINITY_CPUS), *wanted = CPU_ALLOC(AFFINITY_CPUS);
    enum outcome outcome = UNCHANGED;
    if (now && wanted && cpus > 0 && assignment->here && sched_getaffinity(0, bytes, now) == 0) {
        int shared = 0;
        CPU_ZERO_S(bytes, wanted);
        for (int cpu = 0; cpu < AFFINITY_CPUS; cpu++) {
            if (!(assignment->affinity.cpus[cpu / 8] >> cpu % 8 & 1)) continue;
            CPU_SET_S(cpu, bytes, wanted);
            shared += CPU_ISSET_S(cpu, bytes, now) != 0;
        }
        if (CPU_COUNT_S(bytes, now) < assignment->allowed)
            outcome = shared > 0 ? UNCHANGED : BOUND_REMOTE;
        else if (cpus < assignment->allowed && sched_setaffinity(0, bytes, wanted) == 0)
            outcome = BOUND;
    }
    if (now) CPU_FREE(now);
    if (wanted) CPU_FREE(wanted);
    return outcome;
}

static void report_binding(const struct hapt_env *env, int near_gpu, int by_numa, int remote)
{
    if (near_gpu > 0)
        hapt_note(env, "%d rank%s bound to cores near %s GPU%s (--bind no: leave unbound)\n", near_gpu,
                  near_gpu > 1 ? "s are" : " is", near_gpu > 1 ? "their" : "its", near_gpu > 1 ? "s" : "");
    if (by_numa > 0)
        hapt_note(env, "%d rank%s bound to the cores of %s NUMA node%s (--bind no: leave unbound)\n", by_numa,
                  by_numa > 1 ? "s are" : " is", by_numa > 1 ? "their" : "its", by_numa > 1 ? "s" : "");
    if (remote > 0)
        hapt_warn(env,
                  "%d rank%s bound by the launcher to other cores than those near %s GPU%s: start with mpirun "
                  "--bind-to none or srun --cpu-bind=none\n",
                  remote, remote > 1 ? "s are" : " is", remote > 1 ? "their" : "its", remote > 1 ? "s" : "");
}

enum hapt_status hapt_cluster_bind_cores(const struct hapt_env *env, bool bind, struct hapt_arena *arena,
                                         struct hapt_cluster *cluster)
{
    struct affinity_request mine, *request = hapt_arena_alloc(arena, (size_t)env->node_size, sizeof *request);
    struct affinity *affinity = hapt_arena_alloc(arena, (size_t)env->node_size, sizeof *affinity);
    struct assignment *assignment = hapt_arena_alloc(arena, (size_t)env->node_size, sizeof *assignment),
                      own = {.here = 0};
    HAPT_TRY(hapt_env_agree(env->world, request && affinity && assignment ? HAPT_OK : HAPT_ERR_MEMORY));
    find_request(env, cluster, &mine);
    HAPT_MPI(MPI_Gather(&mine, sizeof mine, MPI_BYTE, request, sizeof mine, MPI_BYTE, 0, env->node));
    if (env->node_rank == 0) {
        bool here = false;
        int allowed = 0;
        const bool known = affinity_find(env->node_size, request, affinity, &here, &allowed);
        for (int r = 0; known && r < env->node_size; r++)
            assignment[r] = (struct assignment){affinity[r], allowed, here};
    }
    HAPT_MPI(MPI_Scatter(assignment, (int)sizeof own, MPI_BYTE, &own, (int)sizeof own, MPI_BYTE, 0, env->node));
    snprintf(cluster->gpu_local_interfaces, sizeof cluster->gpu_local_interfaces, "%s", own.affinity.local_nics);
    const enum outcome outcome = bind ? apply_binding(&own) : UNCHANGED;
    int count[3] = {outcome == BOUND && !mine.on_cores, outcome == BOUND && mine.on_cores,
                    outcome == BOUND_REMOTE && !mine.on_cores},
        all[3];
    HAPT_MPI(MPI_Allreduce(count, all, 3, MPI_INT, MPI_SUM, env->world));
    report_binding(env, all[0], all[1], all[2]);
    return HAPT_OK;
}
