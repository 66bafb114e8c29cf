/* Affinity: cores and network interfaces near GPUs, on a machine with two sockets that a file describes; NUMA nodes for
 * ranks on CPUs, on synthetic machines; the route between two hosts; drivers' figures of GPUs compared with the
 * database. */
#include "test.h"

#include "../../src/cluster/affinity_hwloc.h"
#include "../../src/cluster/routes.h"

enum { RANKS = 5 };

static void list_cpus(const struct affinity *place, char text[256])
{
    int length = 0;
    text[0] = '\0';
    for (int cpu = 0; cpu < AFFINITY_CPUS; cpu++)
        if (place->cpus[cpu / 8] >> cpu % 8 & 1)
            length += snprintf(text + length, 256 - (size_t)length, "%s%d", length ? " " : "", cpu);
}

/* Hardware threads p and p + 8 are on one core. Cores 0 to 3 are on the first socket, with GPUs 01 and 03; GPU 01 has
 * the InfiniBand card behind its own switch. Cores 4 to 7 are on the second socket, with GPU 81. */
static void shares_cores(void)
{
    static const struct {
        const char *bus[RANKS], *cpus[RANKS], *cores[RANKS], *nics[RANKS];
    } cases[] = {
        {{"0000:01:00.0", "0000:81:00.0", "0000:03:00.0", "", "0000:99:00.0"},
         {"0 1 8 9", "4 5 6 7 12 13 14 15", "2 3 10 11", "", ""},
         {"0-3,8-11", "4-7,12-15", "0-3,8-11", "", ""},
         {"ib0,mlx5_0", "eth1", "ib0,mlx5_0", "", ""}},
        {{"0000:81:00.0", "0000:81:00.0", "0000:81:00.0", "0000:81:00.0",
          "0000:81:00.0"}, /* too many for two cores each */
         {"4 5 6 7 12 13 14 15", "4 5 6 7 12 13 14 15", "4 5 6 7 12 13 14 15", "4 5 6 7 12 13 14 15",
          "4 5 6 7 12 13 14 15"},
         {"4-7,12-15", "4-7,12-15", "4-7,12-15", "4-7,12-15", "4-7,12-15"},
         {"eth1", "eth1", "eth1", "eth1", "eth1"}},
    };
    setenv("HWLOC_XMLFILE", "tests/data/two-sockets.xml", 1);
    for (int c = 0; c < 2; c++) {
        char text[256];
        struct affinity_request want[RANKS] = {{.bus = ""}};
        struct affinity place[RANKS];
        bool here = true;
        int allowed = 0;
        for (int r = 0; r < RANKS; r++) {
            snprintf(want[r].bus, sizeof want[r].bus, "%s", cases[c].bus[r]);
            want[r].on_cores = !cases[c].bus[r][0]; /* next to ranks with GPUs, ranks on CPUs are not bound */
        }
        if (!CHECK(affinity_find(RANKS, want, place, &here, &allowed))) return;
        CHECK(!here && allowed == 16);
        for (int r = 0; r < RANKS; r++) {
            list_cpus(&place[r], text);
            CHECK_MESSAGE(strcmp(text, cases[c].cpus[r]) == 0, "case %d, rank %d: threads %s", c, r, text);
            CHECK_MESSAGE(strcmp(place[r].local_cores, cases[c].cores[r]) == 0, "case %d, rank %d: near threads %s", c,
                          r, place[r].local_cores);
            CHECK_MESSAGE(strcmp(place[r].local_nics, cases[c].nics[r]) == 0, "case %d, rank %d: near %s", c, r,
                          place[r].local_nics);
        }
    }
    unsetenv("HWLOC_XMLFILE");
    CHECK(affinity_has("ib0,mlx5_0", "ib0") && affinity_has("ib0,mlx5_0", "mlx5_0") &&
          !affinity_has("ib0,mlx5_0", "mlx5") && !affinity_has("", "eth0") && !affinity_has("ib0", ""));
}

/* A synthetic machine. `allowed`: the hardware threads that may be used; NULL: all. */
static hwloc_topology_t make_topology(const char *synthetic, const char *allowed)
{
    hwloc_topology_t topology;
    HAPT_ASSERT(hwloc_topology_init(&topology) == 0 && hwloc_topology_set_synthetic(topology, synthetic) == 0 &&
                hwloc_topology_load(topology) == 0);
    if (allowed) {
        hwloc_bitmap_t set = hwloc_bitmap_alloc();
        HAPT_ASSERT(hwloc_bitmap_list_sscanf(set, allowed) == 0 && hwloc_topology_restrict(topology, set, 0) == 0);
        hwloc_bitmap_free(set);
    }
    return topology;
}

/* Expected bindings, by hand. Hardware threads are numbered through cores, NUMA nodes and packages, from 0. */
static void shares_numa_nodes(void)
{
    static const struct {
        const char *machine, *allowed;
        int count;
        const char *threads; /* of each rank; "": no rank is bound */
    } cases[] = {
        {"pack:2 numa:2 core:4 pu:1", NULL, 1, ""},
        {"pack:2 numa:2 core:4 pu:1", NULL, 2, "0-7 8-15"},
        {"pack:2 numa:2 core:4 pu:1", NULL, 3, ""}, /* 5 cores each would be even, but a NUMA node has 4 */
        {"pack:2 numa:2 core:4 pu:1", NULL, 4, "0-3 4-7 8-11 12-15"},
        {"pack:2 numa:2 core:4 pu:1", NULL, 6, "0-3 4-5 6-7 8-11 12-13 14-15"},
        {"pack:2 numa:2 core:4 pu:1", NULL, 8, "0-1 2-3 4-5 6-7 8-9 10-11 12-13 14-15"},
        {"pack:2 numa:2 core:4 pu:1", NULL, 12,
         "0-3 0-3 0-3 4-7 4-7 4-7 8-11 8-11 8-11 12-15 12-15 12-15"}, /* fewer than two cores each */
        {"pack:2 numa:2 core:4 pu:1", NULL, 17, ""},                  /* more ranks than cores */
        {"numa:1 core:16 pu:1", NULL, 2, ""},
        {"numa:1 core:2 pu:1", NULL, 32, ""},
        {"pack:1 core:4 pu:2", NULL, 4, ""},
        {"numa:2 core:2 pu:2", NULL, 2, "0-3 4-7"}, /* cores whose two threads are both allowed */
        {"numa:2 core:4 pu:2", NULL, 4, "0-3 4-7 8-11 12-15"},
        {"numa:2 core:1 pu:2", NULL, 2, "0-1 2-3"},
        {"numa:2 core:1 pu:2", NULL, 4, ""},  /* threads are not cores */
        {"numa:2 core:4 pu:1", "4-7", 2, ""}, /* only one NUMA node is allowed */
        {"numa:2 core:4 pu:1", "0-1,4-7", 2, ""},
        {"numa:2 core:4 pu:1", "0-1,4-7", 3, "0-1 4-5 6-7"},
        {"numa:2 core:4 pu:1", "1-3,5-7", 2, "1-3 5-7"},
        {"numa:2 core:4 pu:2", "1,3,5,7,9,11,13,15", 4, "1,3 5,7 9,11 13,15"}, /* one thread of each core */
        {"[numa] pack:2 [numa] core:4 pu:1", NULL, 2,
         "0-3 4-7"}, /* memory of each package, and memory of the machine */
        {"pack:2 [numa] [numa] core:4 pu:1", NULL, 2, "0-3 4-7"}, /* two memories at the same cores */
        {"pack:2 [numa] [numa] core:4 pu:1", NULL, 4, "0-1 2-3 4-5 6-7"},
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const hwloc_topology_t topology = make_topology(cases[c].machine, cases[c].allowed);
        const hwloc_bitmap_t set = hwloc_bitmap_alloc();
        char text[512] = "";
        size_t length = 0;
        bool all = true, none = true;
        for (int r = 0; r < cases[c].count; r++) {
            const bool bound = affinity_numa_share(topology, r, cases[c].count, set);
            all = all && bound;
            none = none && !bound;
            length += (size_t)snprintf(text + length, sizeof text - length, "%s", bound && r > 0 ? " " : "");
            if (bound) length += (size_t)hwloc_bitmap_list_snprintf(text + length, sizeof text - length, set);
        }
        CHECK_MESSAGE(all || none, "%s, %d ranks: some are bound", cases[c].machine, cases[c].count);
        CHECK_MESSAGE(strcmp(text, cases[c].threads) == 0, "%s (%s), %d ranks: %s", cases[c].machine,
                      cases[c].allowed ? cases[c].allowed : "all", cases[c].count, text);
        hwloc_bitmap_free(set);
        hwloc_topology_destroy(topology);
    }
}

static int cores_in(hwloc_topology_t topology, hwloc_const_bitmap_t set)
{
    return hwloc_get_nbobjs_inside_cpuset_by_type(topology, set, HWLOC_OBJ_CORE);
}

/* Random machines and numbers of ranks. A rank gets its even share of the host's cores, inside one NUMA node if there
 * are at least as many ranks as NUMA nodes. Ranks of one NUMA node are neighbours. No core has more ranks than
 * necessary. */
static void check_shares(const char *machine, int count)
{
    const hwloc_topology_t topology = make_topology(machine, NULL);
    const int nodes = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_NUMANODE),
              cores = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_CORE);
    const hwloc_bitmap_t set = hwloc_bitmap_alloc(), before = hwloc_bitmap_alloc(), whole = hwloc_bitmap_alloc();
    int of_core[256] = {0}, last = 0;
    bool bound = true;
    for (int r = 0; r < count && bound; r++) {
        bound = affinity_numa_share(topology, r, count, set);
        if (!bound) break;
        const int first = hwloc_bitmap_first(set);
        CHECK_MESSAGE(cores_in(topology, set) >= cores / count, "%s, %d ranks: rank %d has %d cores", machine, count, r,
                      cores_in(topology, set));
        CHECK_MESSAGE(first >= last, "%s, %d ranks: rank %d starts before rank %d", machine, count, r, r - 1);
        CHECK_MESSAGE(!hwloc_bitmap_intersects(set, before) || hwloc_bitmap_last(before) == hwloc_bitmap_last(set),
                      "%s, %d ranks: rank %d", machine, count, r);
        int inside = 0;
        for (int n = 0; n < nodes; n++)
            inside +=
                hwloc_bitmap_isincluded(set, hwloc_get_obj_by_type(topology, HWLOC_OBJ_NUMANODE, (unsigned)n)->cpuset);
        CHECK_MESSAGE(inside == 1 || count < nodes, "%s, %d ranks: rank %d is not in one NUMA node", machine, count, r);
        for (int k = 0; k < cores; k++)
            of_core[k] +=
                hwloc_bitmap_isincluded(hwloc_get_obj_by_type(topology, HWLOC_OBJ_CORE, (unsigned)k)->cpuset, set);
        hwloc_bitmap_copy(before, set);
        hwloc_bitmap_or(whole, whole, set);
        last = first;
    }
    if (bound)
        CHECK_MESSAGE(hwloc_bitmap_isequal(whole, hwloc_get_root_obj(topology)->cpuset), "%s, %d ranks: cores are left",
                      machine, count);
    for (int k = 0; bound && cores / count >= 2 && count >= nodes && count % nodes == 0; k++) {
        CHECK_MESSAGE(of_core[k] == 1, "%s, %d ranks: %d on core %d", machine, count, of_core[k], k);
        if (k == cores - 1) break;
    }
    if (nodes > 1 && count > 1 && count <= cores && (count % nodes == 0 || nodes % count == 0))
        CHECK_MESSAGE(bound, "%s, %d ranks: not bound", machine, count);
    if (nodes == 1 || count > cores || count == 1) CHECK_MESSAGE(!bound, "%s, %d ranks: bound", machine, count);
    hwloc_bitmap_free(set);
    hwloc_bitmap_free(before);
    hwloc_bitmap_free(whole);
    hwloc_topology_destroy(topology);
}

static void shares_any_machine(void)
{
    for (int packages = 1; packages <= 3; packages++)
        for (int nodes = 1; nodes <= 3; nodes++)
            for (int cores = 1; cores <= 6; cores++) {
                char machine[64];
                snprintf(machine, sizeof machine, "pack:%d numa:%d core:%d pu:%d", packages, nodes, cores,
                         1 + cores % 2);
                for (int count = 1; count <= packages * nodes * cores + 1; count += count < 12 ? 1 : 5)
                    check_shares(machine, count);
            }
}

/* The same through the environment, with a rank that has no device. */
static void looks_at_cores(void)
{
    struct affinity_request want[5] = {
        {.on_cores = true}, {.on_cores = true}, {.on_cores = false}, {.on_cores = true}, {.on_cores = true}};
    struct affinity place[5];
    static const char *const expected[5] = {"0 1 2", "3 4 5", "", "6 7 8", "9 10 11"};
    bool here = true;
    int allowed = 0;
    char text[256];
    setenv("HWLOC_SYNTHETIC", "numa:2 core:6 pu:1", 1);
    CHECK(affinity_find(5, want, place, &here, &allowed) && !here && allowed == 12);
    unsetenv("HWLOC_SYNTHETIC");
    for (int r = 0; r < 5; r++) {
        list_cpus(&place[r], text);
        CHECK_MESSAGE(strcmp(text, expected[r]) == 0, "rank %d: threads %s", r, text);
    }
}

static void prefers_near_ways(void)
{
    static const struct {
        double bandwidth[4]; /* over MPI, and three other routes */
        int near[4], best;
    } cases[] = {
        {{100, 100, 98, 97}, {0, 0, 0, 0}, 1}, /* no interface is near: the fastest */
        {{100, 100, 98, 97}, {0, 0, 1, 2}, 3}, /* equally fast, and nearer at both ends */
        {{100, 100, 98, 90}, {0, 0, 1, 2}, 2}, /* the nearest route is slower */
        {{100, 100, 100, 100}, {0, 1, 1, 1}, 1}, {{200, 100, 100, 100}, {0, 2, 2, 2}, 0}, /* MPI is clearly faster */
        {{100, 0, 0, 0}, {0, 2, 2, 2}, 0},
    };
    for (int c = 0; c < 6; c++) {
        struct hapt_cluster_route way[4] = {{0}};
        for (int w = 0; w < 4; w++) way[w].bandwidth = cases[c].bandwidth[w];
        CHECK_MESSAGE(routes_best(4, way, cases[c].near) == cases[c].best, "case %d: route %d", c,
                      routes_best(4, way, cases[c].near));
    }
}

/* Figures as drivers report them: total memory, multiprocessors, boost clock. */
static void doubts_drivers(void)
{
    static const struct {
        struct hapt_host_gpu gpu;
        const char *doubt; /* NULL: no part of it */
    } cases[] = {
        {{.spec = "A100-40GB",
          .memory_bytes = 42.3e9,
          .processors = 108,
          .lanes_per_processor = 64,
          .clock_hz = 1.41e9},
         NULL},
        {{.spec = "H100", .memory_bytes = 85e9, .processors = 132, .lanes_per_processor = 128, .clock_hz = 1.98e9},
         NULL},
        {{.spec = "T4", .memory_bytes = 15.6e9, .processors = 40, .lanes_per_processor = 64, .clock_hz = 1.59e9}, NULL},
        {{.spec = "RTX-3090",
          .memory_bytes = 25.4e9,
          .processors = 82,
          .lanes_per_processor = 128,
          .clock_hz = 1.695e9},
         NULL},
        {{.spec = "A100-40GB", .memory_bytes = 21e9, .processors = 108, .lanes_per_processor = 64, .clock_hz = 1.41e9},
         "memory"}, /* half of one */
        {{.spec = "A100-40GB", .memory_bytes = 42.3e9, .processors = 56, .lanes_per_processor = 64, .clock_hz = 1.41e9},
         "multiprocessors"},
        {{.spec = "A100-40GB", .memory_bytes = 42.3e9, .processors = 108, .lanes_per_processor = 64, .clock_hz = 1.1e9},
         "multiprocessors"},           /* slowed down */
        {{.spec = "A100-40GB"}, NULL}, /* no driver was asked */
        {{.spec = "", .memory_bytes = 1e9, .processors = 1, .lanes_per_processor = 64, .clock_hz = 1e9}, NULL},
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        char text[192] = "";
        const char *doubt = hapt_host_gpu_mismatch(&cases[c].gpu, text);
        CHECK_MESSAGE(cases[c].doubt ? doubt && strstr(doubt, cases[c].doubt) : !doubt, "case %zu: %s", c,
                      doubt ? doubt : "no doubt");
    }
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(shares_cores);
    RUN(shares_numa_nodes);
    RUN(shares_any_machine);
    RUN(looks_at_cores);
    RUN(prefers_near_ways);
    RUN(doubts_drivers);
    return test_finish();
}
