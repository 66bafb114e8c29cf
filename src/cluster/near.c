/*
 * Where GPUs stand. Cores are near a PCI device that hang below the same object of hwloc (package, NUMA node) as the bridge it hangs on; of the
 * network interfaces those are nearest that part from it last on the way down from the machine: behind the same switch, at the same processor.
 */
#include <stdio.h>
#include <string.h>

#include "near_hwloc.h"

/* Below a share of two cores the communication thread would have none beside the computing one. */
enum { CORES_LEAST = 2 };

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
    return object->name && (object->attr->osdev.type == HWLOC_OBJ_OSDEV_NETWORK || object->attr->osdev.type == HWLOC_OBJ_OSDEV_OPENFABRICS);
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

void near_describe(hwloc_topology_t topology, const char *bus, char *cores, size_t cores_size, char *nics, size_t nics_size)
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

/* Cores [first, end) of a set, counted inside it, with all their hardware threads. */
static void take_cores(hwloc_topology_t topology, hwloc_const_cpuset_t set, int first, int end, struct near_place *place)
{
    for (int k = first; k < end; k++) {
        const hwloc_obj_t core = hwloc_get_obj_inside_cpuset_by_type(topology, set, core_type(topology), (unsigned)k);
        int cpu;
        for (cpu = core ? hwloc_bitmap_first(core->cpuset) : -1; cpu >= 0; cpu = hwloc_bitmap_next(core->cpuset, cpu))
            if (cpu < NEAR_CPUS) place->cpus[cpu / 8] |= (unsigned char)(1u << cpu % 8);
    }
}

static void share(hwloc_topology_t topology, int count, const char (*bus)[NEAR_BUS_CHARS], int rank, struct near_place *place)
{
    hwloc_const_cpuset_t mine = NULL;
    int sharing = 0, before = 0;
    if (bus[rank][0]) mine = cores_near(topology, hwloc_get_pcidev_by_busidstring(topology, bus[rank]));
    if (!mine) return;
    for (int r = 0; r < count; r++) {
        hwloc_const_cpuset_t its = bus[r][0] ? cores_near(topology, hwloc_get_pcidev_by_busidstring(topology, bus[r])) : NULL;
        if (!its || !hwloc_bitmap_isequal(its, mine)) continue;
        before += r < rank;
        sharing++;
    }
    const int cores = hwloc_get_nbobjs_inside_cpuset_by_type(topology, mine, core_type(topology));
    if (cores / sharing >= CORES_LEAST)
        take_cores(topology, mine, cores * before / sharing, cores * (before + 1) / sharing, place);
    else
        take_cores(topology, mine, 0, cores, place);
}

bool near_look(int count, const char (*bus)[NEAR_BUS_CHARS], struct near_place *place, bool *here, int *allowed)
{
    hwloc_topology_t topology;
    memset(place, 0, (size_t)count * sizeof *place);
    if (hwloc_topology_init(&topology) != 0) return false;
    hwloc_topology_set_io_types_filter(topology, HWLOC_TYPE_FILTER_KEEP_IMPORTANT);
    const bool loaded = hwloc_topology_load(topology) == 0;
    for (int r = 0; loaded && r < count; r++) {
        share(topology, count, bus, r, &place[r]);
        near_describe(topology, bus[r], place[r].cores, sizeof place[r].cores, place[r].nics, sizeof place[r].nics);
    }
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
