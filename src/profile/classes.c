/* Classes of subclusters, and the ranks that measure for them. */
#include "classes.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

struct seat {
    int node_index, node_rank, threads, cores;
    int device; /* of its host; -1: cores */
};

/* Cores of a host are alike; a host may have several kinds of GPU. */
static bool of_one_kind(const struct hapt_device_spec *a, const struct hapt_device_spec *b)
{
    return strcmp(a->backend, b->backend) == 0 && (strcmp(a->backend, "cpu") == 0 || strcasecmp(a->name, b->name) == 0);
}

static void group_subclusters(const struct hapt_cluster *cluster, const struct seat *seat, struct classes *classes)
{
    for (int c = 0; c < cluster->count; c++) {
        classes->of_subcluster[c] = -1;
        for (int other = 0; other < c && classes->of_subcluster[c] < 0; other++) {
            const struct hapt_subcluster *a = &cluster->subcluster[c], *b = &cluster->subcluster[other];
            if (of_one_kind(&a->device, &b->device) && seat[a->ranks[0]].node_index == seat[b->ranks[0]].node_index)
                classes->of_subcluster[c] = classes->of_subcluster[other];
        }
        if (classes->of_subcluster[c] < 0) classes->of_subcluster[c] = classes->count++;
    }
}

/* Does an earlier rank drive the same device? */
static bool shares_device(const struct seat *seat, int rank)
{
    bool found = false;
    for (int r = 0; r < rank && seat[rank].device >= 0; r++)
        found = found || (seat[r].node_index == seat[rank].node_index && seat[r].device == seat[rank].device);
    return found;
}

/* No more ranks of a host measure at once than its cores carry, and one on a device: others would only disturb them.
 * Where that leaves none, all do. */
static void choose_active(const struct hapt_env *env, const struct hapt_cluster *cluster, const struct seat *seat,
                          struct classes *classes)
{
    int members = 0;
    bool found_lead = false;
    for (int pass = 0; pass < 2 && classes->mine >= 0 && classes->actives == 0; pass++) {
        for (int r = 0; r < env->world_size; r++) {
            const int its = cluster->subcluster_of_rank[r];
            if (its < 0 || classes->of_subcluster[its] != classes->mine) continue;
            if (!found_lead) classes->leads = r == env->world_rank;
            found_lead = true;
            members++;
            if (pass == 0 && ((seat[r].node_rank + 1) * seat[r].threads > seat[r].cores || shares_device(seat, r)))
                continue;
            if (r == env->world_rank) classes->active = classes->actives;
            classes->actives++;
        }
    }
    HAPT_ASSERT(classes->mine < 0 || (members > 0 && classes->actives > 0));
}

static int device_of(const struct hapt_env *env, const struct hapt_cluster *cluster)
{
    const int mine = cluster->subcluster_of_rank[env->world_rank];
    const char *name = mine < 0 ? "cpu" : cluster->subcluster[mine].device.backend, *reason = "";
    const struct hapt_backend *backend = strcmp(name, "cpu") == 0 ? NULL : hapt_backend_find(name);
    const int devices = backend ? backend->device_count(&reason) : 0;
    return devices > 0 ? hapt_env_device(env, devices) : -1;
}

enum hapt_status classes_find(const struct hapt_env *env, const struct hapt_cluster *cluster, int threads,
                              struct classes *classes)
{
    const struct seat mine = {env->node_index, env->node_rank, threads, env->cores, device_of(env, cluster)};
    struct seat *seat = calloc((size_t)env->world_size, sizeof *seat);
    enum hapt_status status = HAPT_OK;
    if (!seat) status = hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for the places of %d ranks", env->world_size);
    status = hapt_env_agree(env->world, status); /* or peers would wait in the exchange */
    if (status == HAPT_OK)
        status = hapt_env_mpi(MPI_Allgather(&mine, sizeof mine, MPI_BYTE, seat, sizeof mine, MPI_BYTE, env->world),
                              "MPI_Allgather");
    if (status == HAPT_OK) {
        const int subcluster = cluster->subcluster_of_rank[env->world_rank];
        *classes = (struct classes){.active = -1};
        group_subclusters(cluster, seat, classes);
        classes->mine = subcluster < 0 ? -1 : classes->of_subcluster[subcluster];
        choose_active(env, cluster, seat, classes);
    }
    free(seat);
    return status;
}

enum hapt_status classes_same_structures(const struct hapt_env *env, const struct candidates *candidates)
{
    const size_t cells = (size_t)candidates->layer_count * (size_t)candidates->layer_count;
    const uint64_t mine = hapt_hash(7, candidates->structure, cells * sizeof *candidates->structure);
    uint64_t ends[2] = {mine, ~mine}; /* the least, and the complement of the most */
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, ends, 2, MPI_UINT64_T, MPI_MIN, env->world));
    enum hapt_status status = HAPT_OK;
    if (ends[0] != ~ends[1])
        status = hapt_fail(HAPT_ERR_MEMORY, "give every rank more host memory",
                           "a rank had no memory to compare the layers' structures");
    return hapt_env_agree(env->world, status);
}
