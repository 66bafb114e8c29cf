/*
 * Affinity. Ranks that compute on cores share the NUMA nodes of their host. Cores are near a PCI device when they hang
 * below the same object of hwloc (package, NUMA node) as the bridge that it hangs on. The nearest network interfaces
 * are those that part from it last on the way down from the machine: behind the same switch, at the same processor.
 */
#include <stdio.h>
#include <string.h>

#include "near_hwloc.h"

/* Below a share of two cores the communication thread would have none beside the computing one. */
enum { CORES_LEAST = 2, DOMAINS = 256 };

static int level_of(hwloc_obj_t object)
{
    int level = 0;
    for (; object->parent; object = object->parent) level++;
    return level;
}

/* Levels that two objects have in common. */
static int common(hwloc_obj_t a, hwloc_obj_t b)
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
        if (is_network(nic) && common(gpu, nic) > nearest) nearest = common(gpu, nic);
    for (hwloc_obj_t nic = NULL; (nic = hwloc_get_next_osdev(topology, nic));) {
        if (!is_network(nic) || common(gpu, nic) < nearest || length + strlen(nic->name) + 2 > size) continue;
        length += (size_t)snprintf(nics + length, size - length, "%s%s", length ? "," : "", nic->name);
    }
}

static hwloc_const_cpuset_t cores_near(hwloc_topology_t topology, hwloc_obj_t gpu)
{
    const hwloc_obj_t holder = gpu ? hwloc_get_non_io_ancestor_obj(topology, gpu) : NULL;
    return holder ? holder->cpuset : NULL;
}

void near_describe(hwloc_topology_t topology, const char *bus, char *cores, size_t cores_size, char *nics,
                   size_t nics_size)
{
    const hwloc_obj_t gpu = *bus ? hwloc_get_pcidev_by_busidstring(topology, bus) : NULL;
    hwloc_const_cpuset_t set = cores_near(topology, gpu);
    cores[0] = nics[0] = '\0';
    if (!set) return;
    hwloc_bitmap_list_snprintf(cores, cores_size, set);
    name_nearest(topology, gpu, nics, nics_size);
}

/* Some virtual machines tell of hardware threads alone. */
static hwloc_obj_type_t core_type(hwloc_topology_t topology)
{
    return hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_CORE) > 0 ? HWLOC_OBJ_CORE : HWLOC_OBJ_PU;
}

static int count_cores(hwloc_topology_t topology, hwloc_const_cpuset_t set)
{
    return hwloc_get_nbobjs_inside_cpuset_by_type(topology, set, core_type(topology));
}

/* Adds cores [first, end) of `from`, counted inside it, with all their hardware threads. */
static void add_cores(hwloc_topology_t topology, hwloc_const_cpuset_t from, int first, int end, hwloc_bitmap_t set)
{
    for (int k = first; k < end; k++) {
        const hwloc_obj_t core = hwloc_get_obj_inside_cpuset_by_type(topology, from, core_type(topology), (unsigned)k);
        if (core) hwloc_bitmap_or(set, set, core->cpuset);
    }
}

/* The share of number `index` of `sharing` ranks: of cores that are too few for so many, all. */
static void add_share(hwloc_topology_t topology, hwloc_const_cpuset_t from, int index, int sharing, hwloc_bitmap_t set)
{
    const int cores = count_cores(topology, from);
    const bool all = cores / sharing < CORES_LEAST;
    add_cores(topology, from, all ? 0 : cores * index / sharing, all ? cores : cores * (index + 1) / sharing, set);
}

static void keep(hwloc_const_bitmap_t set, struct near_place *place)
{
    for (int cpu = hwloc_bitmap_first(set); cpu >= 0; cpu = hwloc_bitmap_next(set, cpu))
        if (cpu < NEAR_CPUS) place->cpus[cpu / 8] |= (unsigned char)(1u << cpu % 8);
}

static void share_near_gpu(hwloc_topology_t topology, int count, const struct near_want *want, int rank,
                           hwloc_bitmap_t set)
{
    hwloc_const_cpuset_t mine = NULL;
    int sharing = 0, before = 0;
    if (want[rank].bus[0]) mine = cores_near(topology, hwloc_get_pcidev_by_busidstring(topology, want[rank].bus));
    if (!mine) return;
    for (int r = 0; r < count; r++) {
        hwloc_const_cpuset_t its =
            want[r].bus[0] ? cores_near(topology, hwloc_get_pcidev_by_busidstring(topology, want[r].bus)) : NULL;
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

/* Has it cores, of which no smaller NUMA node, nor an equal one before it, has some? */
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

/* False: they are not the parts of one whole. */
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

/* NUMA nodes [*first, *end) of a rank; a single one it shares with others: it is number *index of *sharing. */
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
    /* In the one that holds the middle of an even share of all cores. */
    int of[2] = {0, 0}; /* of this rank, of another */
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

bool near_numa_share(hwloc_topology_t topology, int rank, int count, hwloc_bitmap_t set)
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

/* Number of a rank among those that compute on cores, and how many these are; false: it is none, or GPUs' ranks stand
 * beside them. */
static bool count_on_cores(int count, const struct near_want *want, int rank, int *index, int *total)
{
    *index = *total = 0;
    for (int r = 0; r < count; r++) {
        if (want[r].bus[0]) return false;
        *index += want[r].on_cores && r < rank;
        *total += want[r].on_cores;
    }
    return want[rank].on_cores;
}

static void find_place(hwloc_topology_t topology, int count, const struct near_want *want, int rank,
                       struct near_place *place)
{
    hwloc_bitmap_t set = hwloc_bitmap_alloc();
    int index, total;
    if (!set) return;
    if (!count_on_cores(count, want, rank, &index, &total))
        share_near_gpu(topology, count, want, rank, set);
    else if (!near_numa_share(topology, index, total, set))
        hwloc_bitmap_zero(set);
    keep(set, place);
    near_describe(topology, want[rank].bus, place->cores, sizeof place->cores, place->nics, sizeof place->nics);
    hwloc_bitmap_free(set);
}

bool near_look(int count, const struct near_want *want, struct near_place *place, bool *here, int *allowed)
{
    hwloc_topology_t topology;
    memset(place, 0, (size_t)count * sizeof *place);
    if (hwloc_topology_init(&topology) != 0) return false;
    bool gpus = false;
    for (int r = 0; r < count; r++) gpus = gpus || want[r].bus[0];
    if (gpus) hwloc_topology_set_io_types_filter(topology, HWLOC_TYPE_FILTER_KEEP_IMPORTANT);
    const bool loaded = hwloc_topology_load(topology) == 0;
    for (int r = 0; loaded && r < count; r++) find_place(topology, count, want, r, &place[r]);
    if (loaded) {
        *here = hwloc_topology_is_thissystem(topology);
        *allowed = hwloc_bitmap_weight(hwloc_topology_get_allowed_cpuset(topology));
    }
    hwloc_topology_destroy(topology);
    return loaded;
}

bool near_has(const char *nics, const char *interface)
{
    const size_t length = strlen(interface);
    for (const char *at = nics; length > 0 && *at; at += strcspn(at, ","), at += *at == ',')
        if (strcspn(at, ",") == length && strncmp(at, interface, length) == 0) return true;
    return false;
}
