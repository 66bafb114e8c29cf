/* Discovery on faked topologies, probes of links, and binding across ranks.
 * ranks: 1 2 3 4 */
#include "test.h"

#include "hapt/cluster.h"
#include "hapt/host.h"

/* All ranks must hold the same cluster. */
static void check_same(const struct hapt_cluster *cluster)
{
    uint64_t hash = hapt_hash(1, cluster->link, (size_t)(cluster->count * cluster->count) * sizeof *cluster->link);
    for (int i = 0; i < cluster->count; i++) {
        const struct hapt_subcluster *own = &cluster->subcluster[i];
        hash = hapt_hash(hash, own->name, strlen(own->name));
        hash = hapt_hash(hash, &own->device, sizeof own->device);
        hash = hapt_hash(hash, &own->intra_node_bandwidth, sizeof own->intra_node_bandwidth);
        hash = hapt_hash(hash, own->ranks, (size_t)(own->nodes * own->devices_per_node) * sizeof *own->ranks);
    }
    uint64_t first = hash;
    MPI_Bcast(&first, 1, MPI_UINT64_T, 0, test_env.world);
    CHECK(first == hash);
}

static void check_links(const struct hapt_cluster *cluster)
{
    /* Shared memory has a bandwidth between 1 MB/s and 1 TB/s, and a latency below 0.1 s even if every core is busy. */
    for (int i = 0; i < cluster->count; i++)
        for (int j = 0; j < cluster->count; j++) {
            const struct hapt_link *link = hapt_cluster_link(cluster, i, j);
            CHECK_MESSAGE(link->bandwidth > 1e6 && link->bandwidth < 1e12, "%g byte/s", link->bandwidth);
            CHECK_MESSAGE(link->latency >= 0 && link->latency < 0.1, "%g s", link->latency);
            CHECK(!link->paced);
        }
}

static void discovers_this_machine(void)
{
    struct hapt_arena arena;
    struct hapt_cluster *cluster = NULL;
    hapt_arena_init(&arena);
    CHECK_OK(hapt_cluster_discover(&test_env, &arena, &cluster));
    if (cluster) {
        CHECK(cluster->count == 1 && cluster->rank_count == test_env.world_size);
        CHECK(cluster->subcluster[0].nodes == 1 && cluster->subcluster[0].device.memory_bytes > 1e6);
        CHECK_OK(hapt_cluster_check(cluster));
        CHECK_OK(hapt_cluster_probe(&test_env, cluster));
        check_links(cluster);
        check_same(cluster);
    }
    hapt_arena_release(&arena);
}

/* Even ranks run on a big machine, odd ranks on a small one. */
static void discovers_faked_machines(void)
{
    struct hapt_arena arena;
    struct hapt_cluster *cluster = NULL;
    struct hapt_hosts *hosts = NULL;
    hapt_arena_init(&arena);
    setenv("HWLOC_SYNTHETIC",
           test_env.world_rank % 2 ? "numa:1(memory=8GiB) core:4 pu:1" : "pack:2 numa:1(memory=64GiB) core:8 pu:2", 1);
    CHECK_OK(hapt_hosts_gather(&test_env, &arena, &hosts));
    CHECK_OK(hapt_cluster_discover(&test_env, &arena, &cluster));
    unsetenv("HWLOC_SYNTHETIC");
    if (hosts && cluster) {
        const int even = (test_env.world_size + 1) / 2, odd = test_env.world_size / 2;
        CHECK(hosts->count == (odd ? 2 : 1) && hosts->host[0].faked);
        CHECK(hosts->host[0].cores == 16 && hosts->host[0].threads == 32 && hosts->host[0].numa_nodes == 2);
        CHECK(hosts->host[0].memory_bytes == 128 * 0x1p30 && hosts->host[0].ranks == even);
        CHECK(cluster->count == hosts->count && cluster->rank_count == test_env.world_size);
        CHECK(cluster->subcluster[0].devices_per_node == even);
        CHECK_NEAR(cluster->subcluster[0].device.memory_bytes, 128 * 0x1p30 / even, 1);
        if (odd) {
            CHECK(cluster->subcluster[1].devices_per_node == odd && cluster->subcluster[1].ranks[0] == 1);
            /* The CPU clock may change between two measurements, but not by half. */
            const double ratio = cluster->subcluster[1].device.peak_flops[HAPT_F32] * odd / 4 /
                                 (cluster->subcluster[0].device.peak_flops[HAPT_F32] * even / 16);
            CHECK_MESSAGE(ratio > 0.5 && ratio < 2, "peak rates per core differ by %g", ratio);
        }
        CHECK_OK(hapt_cluster_probe(&test_env, cluster));
        check_links(cluster);
        check_same(cluster);
    }
    hapt_arena_release(&arena);
}

/* A cluster as from a file: one subcluster per rank. Given link values stay; absent values are measured. */
static void probes_only_what_is_absent(void)
{
    struct hapt_arena arena;
    const int count = test_env.world_size;
    struct hapt_cluster cluster = {.count = count, .from_file = true, .rank_count = count};
    hapt_arena_init(&arena);
    cluster.subcluster = hapt_arena_alloc(&arena, (size_t)count, sizeof *cluster.subcluster);
    cluster.link = hapt_arena_alloc(&arena, (size_t)(count * count), sizeof *cluster.link);
    for (int i = 0; i < count; i++) {
        struct hapt_subcluster *own = &cluster.subcluster[i];
        snprintf(own->name, sizeof own->name, "s%d", i);
        own->nodes = own->devices_per_node = 1;
        own->device = *hapt_device_spec_find("cpu");
        own->intra_node_latency = own->inter_node_latency = -1;
    }
    for (int i = 0; i < count * count; i++) cluster.link[i] = (struct hapt_link){.latency = -1};
    if (count > 1) cluster.link[1].bandwidth = cluster.link[count].bandwidth = 12345678;
    if (count > 2) cluster.link[2].latency = cluster.link[2 * count].latency = 0.25;
    CHECK_OK(hapt_cluster_bind(&test_env, &arena, &cluster));
    const double start = hapt_time_s();
    CHECK_OK(hapt_cluster_probe(&test_env, &cluster));
    /* The work is bounded: a few seconds, with a margin for a busy machine. */
    CHECK(hapt_time_s() - start < 30);
    check_same(&cluster);
    for (int i = 0; i < count; i++) CHECK(cluster.subcluster_of_rank[i] == i);
    if (count > 1) {
        CHECK(cluster.link[1].bandwidth == 12345678 && cluster.link[count].bandwidth == 12345678);
        CHECK(cluster.link[1].latency >= 0 && cluster.link[1].latency < 0.1);
    }
    if (count > 2) CHECK(cluster.link[2].latency == 0.25 && cluster.link[2 * count].bandwidth > 1e6);
    hapt_arena_release(&arena);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    RUN(discovers_this_machine);
    RUN(discovers_faked_machines);
    RUN(probes_only_what_is_absent);
    return test_finish();
}
