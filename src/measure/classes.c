/* Classes of subclusters and the ranks that measure for them. */
#include "classes.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

struct rank_location {
    int node_index, node_rank, threads, cores;
    int device; /* index on its host; -1: cores */
};

/* Cores of a host are alike; a host may have several kinds of GPU. */
static bool of_one_kind(const struct hapt_device_spec *a, const struct hapt_device_spec *b)
{
    return strcmp(a->backend, b->backend) == 0 && (strcmp(a->backend, "cpu") == 0 || strcasecmp(a->name, b->name) == 0);
}

static void group_subclusters(const struct hapt_cluster *cluster, const struct rank_location *location,
                              struct classes *classes)
{
    for (int c = 0; c < cluster->count; c++) {
        classes->of_subcluster[c] = -1;
        for (int other = 0; other < c && classes->of_subcluster[c] < 0; other++) {
            const struct hapt_subcluster *a = &cluster->subcluster[c], *b = &cluster->subcluster[other];
            if (of_one_kind(&a->device, &b->device) &&
                location[a->ranks[0]].node_index == location[b->ranks[0]].node_index)
                classes->of_subcluster[c] = classes->of_subcluster[other];
        }
        if (classes->of_subcluster[c] < 0) classes->of_subcluster[c] = classes->count++;
    }
}

/* True if an earlier rank uses the same device. */
static bool shares_device(const struct rank_location *location, int rank)
{
    bool found = false;
    for (int r = 0; r < rank && location[rank].device >= 0; r++)
        found = found ||
                (location[r].node_index == location[rank].node_index && location[r].device == location[rank].device);
    return found;
}

/* Chooses the ranks that measure at once: at most as many per host as its cores carry, and one per device, since
 * others would disturb them. If that leaves none, all of them measure. */
static void choose_active(const struct hapt_env *env, const struct hapt_cluster *cluster,
                          const struct rank_location *location, struct classes *classes)
{
    int members = 0;
    bool found_lead = false;
    for (int pass = 0; pass < 2 && classes->own_class >= 0 && classes->actives == 0; pass++) {
        for (int r = 0; r < env->world_size; r++) {
            const int its = cluster->subcluster_of_rank[r];
            if (its < 0 || classes->of_subcluster[its] != classes->own_class) continue;
            if (!found_lead) classes->is_lead = r == env->world_rank;
            found_lead = true;
            members++;
            if (pass == 0 &&
                ((location[r].node_rank + 1) * location[r].threads > location[r].cores || shares_device(location, r)))
                continue;
            if (r == env->world_rank) classes->active = classes->actives;
            classes->actives++;
        }
    }
    HAPT_ASSERT(classes->own_class < 0 || (members > 0 && classes->actives > 0));
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
    const struct rank_location mine = {env->node_index, env->node_rank, threads, env->cores, device_of(env, cluster)};
    struct rank_location *location = calloc((size_t)env->world_size, sizeof *location);
    enum hapt_status status = HAPT_OK;
    if (!location)
        status = hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for the locations of %d ranks", env->world_size);
    status = hapt_env_agree(env->world, status); /* otherwise peers would wait in the exchange */
    if (status == HAPT_OK)
        status = hapt_env_mpi(MPI_Allgather(&mine, sizeof mine, MPI_BYTE, location, sizeof mine, MPI_BYTE, env->world),
                              "MPI_Allgather");
    if (status == HAPT_OK) {
        const int subcluster = cluster->subcluster_of_rank[env->world_rank];
        *classes = (struct classes){.active = -1};
        group_subclusters(cluster, location, classes);
        classes->own_class = subcluster < 0 ? -1 : classes->of_subcluster[subcluster];
        choose_active(env, cluster, location, classes);
    }
    free(location);
    return status;
}

double classes_memory(const struct hapt_cluster *cluster, const struct classes *classes)
{
    double most = 0;
    for (int c = 0; c < cluster->count; c++)
        if (classes->of_subcluster[c] == classes->own_class)
            most = fmax(most, cluster->subcluster[c].device.memory_bytes);
    return most;
}

enum hapt_status classes_open_device(const struct hapt_env *env, const struct hapt_cluster *cluster,
                                     const char *do_what, const char *hint, struct hapt_engine_options *options)
{
    const char *name = cluster->subcluster[cluster->subcluster_of_rank[env->world_rank]].device.backend, *reason = "";
    options->backend = hapt_backend_find(name);
    options->slots = 1;
    const int devices = options->backend ? options->backend->device_count(&reason) : 0;
    if (devices < 1)
        return hapt_fail(HAPT_ERR_INPUT, hint, "rank %d has no %s device to %s (%s)", env->world_rank, name, do_what,
                         reason);
    return options->backend->open(hapt_env_device(env, devices), options->threads, 0, &options->device);
}

enum hapt_status classes_same_structures(const struct hapt_env *env, const struct hapt_candidates *candidates)
{
    const size_t cells = (size_t)candidates->layer_count * (size_t)candidates->layer_count;
    const uint64_t mine = hapt_hash(7, candidates->structure, cells * sizeof *candidates->structure);
    uint64_t ends[2] = {mine, ~mine}; /* minimum, and complement of the maximum */
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, ends, 2, MPI_UINT64_T, MPI_MIN, env->world));
    enum hapt_status status = HAPT_OK;
    if (ends[0] != ~ends[1])
        status = hapt_fail(HAPT_ERR_MEMORY, "give every rank more host memory",
                           "a rank had no memory to compare the layers' structures");
    return hapt_env_agree(env->world, status);
}
