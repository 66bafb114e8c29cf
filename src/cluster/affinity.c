/*
 * Affinity: cores and network interfaces near a PCI device, and each rank's share of its host's NUMA nodes.
 *
 * Cores are near a PCI device if they belong to the hwloc object (package, NUMA node) that the device's bridge is
 * attached to. The nearest network interfaces share the deepest common ancestor with the device: the same switch, else
 * the same processor.
 */
#include <stdio.h>
#include <string.h>

#include "affinity_hwloc.h"

/* CORES_LEAST: with fewer cores per rank, the communication thread has no core of its own. */
enum { CORES_LEAST = 2, DOMAINS = 256 };

bool affinity_load(bool with_devices, hwloc_topology_t *topology)
{
    if (hwloc_topology_init(topology) != 0) return false;
    for (int i = 0; i < 2; i++)
        hwloc_topology_set_components(*topology, HWLOC_TOPOLOGY_COMPONENTS_FLAG_BLACKLIST, i ? "opencl" : "gl");
    if (with_devices) hwloc_topology_set_io_types_filter(*topology, HWLOC_TYPE_FILTER_KEEP_IMPORTANT);
    if (hwloc_topology_load(*topology) == 0) return true;
    hwloc_topology_destroy(*topology);
    return false;
}

static int level_of(hwloc_obj_t object)
{
    int level = 0;
    for (; object->parent; object = object->parent) level++;
    return level;
}

/* Depth of the deepest common ancestor of two objects. */
static int common_depth(hwloc_obj_t a, hwloc_obj_t b)
{
    int level_a = level_of(a), level_b = level_of(b);
    for (; level_a > level_b; level_a--) a = a->parent;
    for (; level_b > level_a; level_b--) b = b->parent;
    for (; a != b; level_a--) a = a->parent, b = b->parent;
    return level_a;
}

static bool is_network(hwloc_obj_t object)
{
    return object->name && (object->attr->osdev.type == HWLOC_OBJ_OSDEV_NETWORK ||
                            object->attr->osdev.type == HWLOC_OBJ_OSDEV_OPENFABRICS);
}

static void name_nearest(hwloc_topology_t topology, hwloc_obj_t gpu, char *nics, size_t size)
{
    int nearest = 0;
    size_t length = 0;
    for (hwloc_obj_t nic = NULL; (nic = hwloc_get_next_osdev(topology, nic));)
        if (is_network(nic) && common_depth(gpu, nic) > nearest) nearest = common_depth(gpu, nic);
    for (hwloc_obj_t nic = NULL; (nic = hwloc_get_next_osdev(topology, nic));) {
        if (!is_network(nic) || common_depth(gpu, nic) < nearest || length + strlen(nic->name) + 2 > size) continue;
        length += (size_t)snprintf(nics + length, size - length, "%s%s", length ? "," : "", nic->name);
    }
}

static hwloc_const_cpuset_t cores_local_to(hwloc_topology_t topology, hwloc_obj_t gpu)
{
    const hwloc_obj_t holder = gpu ? hwloc_get_non_io_ancestor_obj(topology, gpu) : NULL;
    return holder ? holder->cpuset : NULL;
}

void affinity_describe(hwloc_topology_t topology, const char *bus, char *cores, size_t cores_size, char *nics,
                       size_t nics_size)
{
    const hwloc_obj_t gpu = *bus ? hwloc_get_pcidev_by_busidstring(topology, bus) : NULL;
    hwloc_const_cpuset_t set = cores_local_to(topology, gpu);
    cores[0] = nics[0] = '\0';
    if (!set) return;
    hwloc_bitmap_list_snprintf(cores, cores_size, set);
    name_nearest(topology, gpu, nics, nics_size);
}

/* Some virtual machines report hardware threads but no cores. */
static hwloc_obj_type_t core_type(hwloc_topology_t topology)
{
    return hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_CORE) > 0 ? HWLOC_OBJ_CORE : HWLOC_OBJ_PU;
}

static int count_cores(hwloc_topology_t topology, hwloc_const_cpuset_t set)
{
    return hwloc_get_nbobjs_inside_cpuset_by_type(topology, set, core_type(topology));
}

/* Adds cores [first, end) of `from` (indices within `from`), with all their hardware threads. */
static void add_cores(hwloc_topology_t topology, hwloc_const_cpuset_t from, int first, int end, hwloc_bitmap_t set)
{
    for (int k = first; k < end; k++) {
        const hwloc_obj_t core = hwloc_get_obj_inside_cpuset_by_type(topology, from, core_type(topology), (unsigned)k);
        if (core) hwloc_bitmap_or(set, set, core->cpuset);
    }
}

/* Adds the share of rank `index` of `sharing` ranks. If there are fewer than CORES_LEAST cores per rank, it is all of
 * them. */
static void add_share(hwloc_topology_t topology, hwloc_const_cpuset_t from, int index, int sharing, hwloc_bitmap_t set)
{
    const int cores = count_cores(topology, from);
    const bool all = cores / sharing < CORES_LEAST;
    add_cores(topology, from, all ? 0 : cores * index / sharing, all ? cores : cores * (index + 1) / sharing, set);
}

static void keep(hwloc_const_bitmap_t set, struct affinity *affinity)
{
    for (int cpu = hwloc_bitmap_first(set); cpu >= 0; cpu = hwloc_bitmap_next(set, cpu))
        if (cpu < AFFINITY_CPUS) affinity->cpus[cpu / 8] |= (unsigned char)(1u << cpu % 8);
}

static void share_gpu_cores(hwloc_topology_t topology, int count, const struct affinity_request *request, int rank,
                            hwloc_bitmap_t set)
{
    hwloc_const_cpuset_t mine = NULL;
    int sharing = 0, before = 0;
    if (request[rank].bus[0])
        mine = cores_local_to(topology, hwloc_get_pcidev_by_busidstring(topology, request[rank].bus));
    if (!mine) return;
    for (int r = 0; r < count; r++) {
        hwloc_const_cpuset_t its =
            request[r].bus[0] ? cores_local_to(topology, hwloc_get_pcidev_by_busidstring(topology, request[r].bus))
                              : NULL;
        if (!its || !hwloc_bitmap_isequal(its, mine)) continue;
        before += r < rank;
        sharing++;
    }
    add_share(topology, mine, before, sharing, set);
}

/* ---- NUMA nodes ---- */

struct domains {
    int count, cores;
    hwloc_const_cpuset_t set[DOMAINS];
    int first[DOMAINS + 1]; /* cores before it */
};

/* Is the node a domain: it has cores, and contains neither a smaller NUMA node nor an equal one before it? */
static bool is_domain(hwloc_topology_t topology, int index)
{
    const hwloc_obj_t node = hwloc_get_obj_by_type(topology, HWLOC_OBJ_NUMANODE, (unsigned)index);
    if (hwloc_bitmap_iszero(node->cpuset)) return false;
    for (int i = 0; i < hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_NUMANODE); i++) {
        const hwloc_obj_t other = hwloc_get_obj_by_type(topology, HWLOC_OBJ_NUMANODE, (unsigned)i);
        const bool equal = hwloc_bitmap_isequal(other->cpuset, node->cpuset);
        if (i == index || hwloc_bitmap_iszero(other->cpuset) || !hwloc_bitmap_isincluded(other->cpuset, node->cpuset))
            continue;
        if (!equal || i < index) return false;
    }
    return true;
}

/* False: the NUMA nodes overlap or do not cover all cores. */
static bool find_domains(hwloc_topology_t topology, struct domains *domains)
{
    *domains = (struct domains){0};
    for (int i = 0; i < hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_NUMANODE); i++) {
        if (!is_domain(topology, i)) continue;
        if (domains->count == DOMAINS) return false;
        hwloc_const_cpuset_t set = hwloc_get_obj_by_type(topology, HWLOC_OBJ_NUMANODE, (unsigned)i)->cpuset;
        for (int d = 0; d < domains->count; d++)
            if (hwloc_bitmap_intersects(domains->set[d], set)) return false;
        domains->first[domains->count] = domains->cores;
        domains->set[domains->count++] = set;
        domains->cores += count_cores(topology, set);
    }
    domains->first[domains->count] = domains->cores;
    return domains->cores == count_cores(topology, hwloc_get_root_obj(topology)->cpuset);
}

/* Finds the NUMA nodes [*first, *end) of a rank. If it shares a single one, it is rank *index of the *sharing ranks
 * there. */
static void find_share(const struct domains *domains, int rank, int count, int *first, int *end, int *index,
                       int *sharing)
{
    *index = 0;
    *sharing = 1;
    if (count < domains->count) {
        *first = domains->count * rank / count;
        *end = domains->count * (rank + 1) / count;
        return;
    }
    /* The rank goes to the NUMA node that holds the middle of its even share of all cores. */
    int of[2] = {0, 0}; /* node of this rank, node of another */
    const long cores = domains->cores;
    while (domains->first[of[0] + 1] <= (int)(cores * (2L * rank + 1) / (2L * count))) of[0]++;
    *sharing = 0;
    for (int r = 0; r < count; r++) {
        while (domains->first[of[1] + 1] <= (int)(cores * (2L * r + 1) / (2L * count))) of[1]++;
        *index += of[1] == of[0] && r < rank;
        *sharing += of[1] == of[0];
    }
    *first = of[0];
    *end = of[0] + 1;
}

bool affinity_numa_share(hwloc_topology_t topology, int rank, int count, hwloc_bitmap_t set)
{
    struct domains domains;
    int first, end, index, sharing;
    hwloc_bitmap_zero(set);
    if (!find_domains(topology, &domains) || domains.count < 2 || count < 2 || count > domains.cores) return false;
    for (int r = 0; r < count; r++) {
        find_share(&domains, r, count, &first, &end, &index, &sharing);
        if (domains.first[end] - domains.first[first] < sharing * (domains.cores / count)) return false;
    }
    find_share(&domains, rank, count, &first, &end, &index, &sharing);
    if (end - first == 1) add_share(topology, domains.set[first], index, sharing, set);
    for (int d = first; end - first > 1 && d < end; d++) hwloc_bitmap_or(set, set, domains.set[d]);
    return true;
}

/* Index of the rank among the host's CPU ranks, and their total. False: not a CPU rank, or the host has GPU ranks. */
static bool count_on_cores(int count, const struct affinity_request *request, int rank, int *index, int *total)
{
    *index = *total = 0;
    for (int r = 0; r < count; r++) {
        if (request[r].bus[0]) return false;
        *index += request[r].on_cores && r < rank;
        *total += request[r].on_cores;
    }
    return request[rank].on_cores;
}

static void find_rank_affinity(hwloc_topology_t topology, int count, const struct affinity_request *request, int rank,
                               struct affinity *affinity)
{
    hwloc_bitmap_t set = hwloc_bitmap_alloc();
    int index, total;
    if (!set) return;
    if (!count_on_cores(count, request, rank, &index, &total))
        share_gpu_cores(topology, count, request, rank, set);
    else if (!affinity_numa_share(topology, index, total, set))
        hwloc_bitmap_zero(set);
    keep(set, affinity);
    affinity_describe(topology, request[rank].bus, affinity->local_cores, sizeof affinity->local_cores,
                      affinity->local_nics, sizeof affinity->local_nics);
    hwloc_bitmap_free(set);
}

bool affinity_find(int count, const struct affinity_request *request, struct affinity *affinity, bool *here,
                   int *allowed)
{
    hwloc_topology_t topology;
    memset(affinity, 0, (size_t)count * sizeof *affinity);
    bool gpus = false;
    for (int r = 0; r < count; r++) gpus = gpus || request[r].bus[0];
    if (!affinity_load(gpus, &topology)) return false;
    for (int r = 0; r < count; r++) find_rank_affinity(topology, count, request, r, &affinity[r]);
    *here = hwloc_topology_is_thissystem(topology);
    *allowed = hwloc_bitmap_weight(hwloc_topology_get_allowed_cpuset(topology));
    hwloc_topology_destroy(topology);
    return true;
}

bool affinity_has(const char *nics, const char *interface)
{
    const size_t length = strlen(interface);
    for (const char *at = nics; length > 0 && *at; at += strcspn(at, ","), at += *at == ',')
        if (strcspn(at, ",") == length && strncmp(at, interface, length) == 0) return true;
    return false;
}
