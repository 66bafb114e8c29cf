/* What stands near GPUs, on a machine of two processors that a file describes: cores and network interfaces, shares of ranks; which way between
 * hosts is taken; what drivers say of GPUs against the database. */
#include "test.h"

#include "../../src/cluster/near.h"
#include "../../src/cluster/ways.h"

enum { RANKS = 5 };

static void list_cpus(const struct near_place *place, char text[256])
{
    int length = 0;
    text[0] = '\0';
    for (int cpu = 0; cpu < NEAR_CPUS; cpu++)
        if (place->cpus[cpu / 8] >> cpu % 8 & 1) length += snprintf(text + length, 256 - (size_t)length, "%s%d", length ? " " : "", cpu);
}

/* Threads p and p + 8 are of one core; cores 0 to 3 at the first processor, with GPUs 01 and 03, of which 01 has the InfiniBand card behind its
 * own switch; 4 to 7 at the second, with GPU 81. */
static void shares_cores(void)
{
    static const struct {
        const char *bus[RANKS], *cpus[RANKS], *cores[RANKS], *nics[RANKS];
    } cases[] = {
        {{"0000:01:00.0", "0000:81:00.0", "0000:03:00.0", "", "0000:99:00.0"},
         {"0 1 8 9", "4 5 6 7 12 13 14 15", "2 3 10 11", "", ""},
         {"0-3,8-11", "4-7,12-15", "0-3,8-11", "", ""},
         {"ib0,mlx5_0", "eth1", "ib0,mlx5_0", "", ""}},
        {{"0000:81:00.0", "0000:81:00.0", "0000:81:00.0", "0000:81:00.0", "0000:81:00.0"}, /* too many for two cores each */
         {"4 5 6 7 12 13 14 15", "4 5 6 7 12 13 14 15", "4 5 6 7 12 13 14 15", "4 5 6 7 12 13 14 15", "4 5 6 7 12 13 14 15"},
         {"4-7,12-15", "4-7,12-15", "4-7,12-15", "4-7,12-15", "4-7,12-15"},
         {"eth1", "eth1", "eth1", "eth1", "eth1"}},
    };
    setenv("HWLOC_XMLFILE", "tests/data/two-sockets.xml", 1);
    for (int c = 0; c < 2; c++) {
        char bus[RANKS][NEAR_BUS_CHARS], text[256];
        struct near_place place[RANKS];
        bool here = true;
        int allowed = 0;
        for (int r = 0; r < RANKS; r++) snprintf(bus[r], sizeof bus[r], "%s", cases[c].bus[r]);
        if (!CHECK(near_look(RANKS, (const char (*)[NEAR_BUS_CHARS])bus, place, &here, &allowed))) return;
        CHECK(!here && allowed == 16);
        for (int r = 0; r < RANKS; r++) {
            list_cpus(&place[r], text);
            CHECK_MESSAGE(strcmp(text, cases[c].cpus[r]) == 0, "case %d, rank %d: threads %s", c, r, text);
            CHECK_MESSAGE(strcmp(place[r].cores, cases[c].cores[r]) == 0, "case %d, rank %d: near threads %s", c, r, place[r].cores);
            CHECK_MESSAGE(strcmp(place[r].nics, cases[c].nics[r]) == 0, "case %d, rank %d: near %s", c, r, place[r].nics);
        }
    }
    unsetenv("HWLOC_XMLFILE");
    CHECK(near_has("ib0,mlx5_0", "ib0") && near_has("ib0,mlx5_0", "mlx5_0") && !near_has("ib0,mlx5_0", "mlx5") && !near_has("", "eth0") &&
          !near_has("ib0", ""));
}

static void prefers_near_ways(void)
{
    static const struct {
        double bandwidth[4]; /* by MPI, and three others */
        int near[4], best;
    } cases[] = {
        {{100, 100, 98, 97}, {0, 0, 0, 0}, 1},  /* nothing is near: the fastest */
        {{100, 100, 98, 97}, {0, 0, 1, 2}, 3},  /* as fast, and nearer at both ends */
        {{100, 100, 98, 90}, {0, 0, 1, 2}, 2},  /* the nearest is slower */
        {{100, 100, 100, 100}, {0, 1, 1, 1}, 1},
        {{200, 100, 100, 100}, {0, 2, 2, 2}, 0}, /* MPI is clearly faster */
        {{100, 0, 0, 0}, {0, 2, 2, 2}, 0},
    };
    for (int c = 0; c < 6; c++) {
        struct hapt_cluster_way way[4] = {{0}};
        for (int w = 0; w < 4; w++) way[w].bandwidth = cases[c].bandwidth[w];
        CHECK_MESSAGE(ways_best(4, way, cases[c].near) == cases[c].best, "case %d: way %d", c, ways_best(4, way, cases[c].near));
    }
}

/* As drivers tell: total memory, multiprocessors, boost clock. */
static void doubts_drivers(void)
{
    static const struct {
        struct hapt_host_gpu gpu;
        const char *doubt; /* part of it; NULL: none */
    } cases[] = {
        {{.spec = "A100-40GB", .memory_bytes = 42.3e9, .processors = 108, .lanes = 64, .clock_hz = 1.41e9}, NULL},
        {{.spec = "H100", .memory_bytes = 85e9, .processors = 132, .lanes = 128, .clock_hz = 1.98e9}, NULL},
        {{.spec = "T4", .memory_bytes = 15.6e9, .processors = 40, .lanes = 64, .clock_hz = 1.59e9}, NULL},
        {{.spec = "RTX-3090", .memory_bytes = 25.4e9, .processors = 82, .lanes = 128, .clock_hz = 1.695e9}, NULL},
        {{.spec = "A100-40GB", .memory_bytes = 21e9, .processors = 108, .lanes = 64, .clock_hz = 1.41e9}, "memory"},      /* half of one */
        {{.spec = "A100-40GB", .memory_bytes = 42.3e9, .processors = 56, .lanes = 64, .clock_hz = 1.41e9}, "multiprocessors"},
        {{.spec = "A100-40GB", .memory_bytes = 42.3e9, .processors = 108, .lanes = 64, .clock_hz = 1.1e9}, "multiprocessors"}, /* slowed down */
        {{.spec = "A100-40GB"}, NULL},                                                                                    /* nobody was asked */
        {{.spec = "", .memory_bytes = 1e9, .processors = 1, .lanes = 64, .clock_hz = 1e9}, NULL},
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        char text[192] = "";
        const char *doubt = hapt_host_gpu_doubt(&cases[c].gpu, text);
        CHECK_MESSAGE(cases[c].doubt ? doubt && strstr(doubt, cases[c].doubt) : !doubt, "case %zu: %s", c, doubt ? doubt : "no doubt");
    }
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(shares_cores);
    RUN(prefers_near_ways);
    RUN(doubts_drivers);
    return test_finish();
}
