/* Hosts into subclusters, and ranks onto the devices of a cluster file: the local parts, on invented hosts. */
#include "test.h"

#include "../../src/cluster/bind.h"
#include "../../src/cluster/database.h"
#include "../../src/cluster/subclusters.h"
#include "../../src/cluster/host.h"

static struct hapt_arena arena;

/* Hosts with ranks, cores and memory in GB. Ranks are assigned to hosts in blocks, or round-robin. */
static struct hapt_hosts *make_hosts(int count, const int *ranks, const int *cores, const double *memory,
                                     bool round_robin, int *world_size)
{
    struct hapt_hosts *hosts = hapt_arena_alloc(&arena, 1, sizeof *hosts);
    int total = 0;
    for (int h = 0; h < count; h++) total += ranks[h];
    hosts->count = count;
    hosts->host = hapt_arena_alloc(&arena, (size_t)count, sizeof *hosts->host);
    hosts->host_of_rank = hapt_arena_alloc(&arena, (size_t)total, sizeof *hosts->host_of_rank);
    for (int h = 0; h < count; h++) {
        struct hapt_host *host = &hosts->host[h];
        snprintf(host->name, sizeof host->name, "node%d.lab", h);
        strcpy(host->cpu_model, "Test CPU");
        host->ranks = ranks[h];
        host->cores = cores[h];
        host->memory_bytes = memory[h] * 1e9;
        host->core_flops[HAPT_F32] = host->core_flops[HAPT_BF16] = 1e11;
        host->rank_bandwidth = 1e10;
    }
    int rank = 0;
    for (int turn = 0; round_robin && turn < total; turn++)
        for (int h = 0; h < count; h++)
            if (turn < ranks[h]) hosts->host_of_rank[rank++] = h;
    for (int h = 0; !round_robin && h < count; h++)
        for (int i = 0; i < ranks[h]; i++) hosts->host_of_rank[rank++] = h;
    *world_size = total;
    return hosts;
}

static void groups_like_hosts(void)
{
    /* Hosts 0 and 2 are alike (memory within 2 %). Host 1 differs in cores, 3 in ranks, 4 in memory. */
    const int ranks[] = {2, 2, 2, 4, 2}, cores[] = {8, 4, 8, 8, 8};
    const double memory[] = {64, 64, 64.9, 64, 32};
    int world_size;
    struct hapt_cluster *cluster = NULL;
    const struct hapt_hosts *hosts = make_hosts(5, ranks, cores, memory, true, &world_size);
    CHECK_OK(hapt_cluster_form_subclusters(hosts, world_size, &arena, &cluster));
    if (!cluster) return;
    CHECK(cluster->count == 4 && cluster->rank_count == 12 && !cluster->from_file);
    const struct hapt_subcluster *first = &cluster->subcluster[0];
    CHECK(first->nodes == 2 && first->devices_per_node == 2 && !strcmp(first->name, "cpu"));
    CHECK(!strcmp(cluster->subcluster[1].name, "cpu-2") && cluster->subcluster[2].devices_per_node == 4);
    /* Node-major: both ranks of host 0, then both of host 2. Round-robin ranks: 0,5 and 2,7. */
    CHECK(first->ranks[0] == 0 && first->ranks[1] == 5 && first->ranks[2] == 2 && first->ranks[3] == 7);
    CHECK(!strcmp(first->hosts[1], "node2.lab"));
    CHECK(first->device.memory_bytes == 32e9); /* the share of the smaller host */
    CHECK_NEAR(first->device.peak_flops[HAPT_F32], 4e11, 1);
    CHECK_NEAR(cluster->subcluster[2].device.peak_flops[HAPT_F32], 2e11, 1);
    for (int rank = 0; rank < world_size; rank++) {
        const struct hapt_subcluster *own = &cluster->subcluster[cluster->subcluster_of_rank[rank]];
        int found = 0;
        for (int i = 0; i < own->nodes * own->devices_per_node; i++) found += own->ranks[i] == rank;
        CHECK(found == 1);
    }
}

/* Names as drivers print them, with the memory that they report. */
static void names_gpus(void)
{
    static const struct {
        const char *name;
        double gigabytes;
        const char *spec; /* NULL: no GPU */
    } known[] = {{"NVIDIA A100-SXM4-40GB", 42.3, "A100-40GB"},
                 {"NVIDIA A100-SXM4-80GB", 84.9, "A100-80GB"},
                 {"NVIDIA A100 80GB PCIe", 84.9, "A100-80GB"},
                 {"Tesla V100-SXM2-16GB", 16.9, "V100-16GB"},
                 {"Tesla V100-SXM2-32GB", 34, "V100-32GB"},
                 {"Tesla P100-SXM2-16GB", 17, "P100"},
                 {"Tesla T4", 15.6, "T4"},
                 {"NVIDIA H100 80GB HBM3", 85, "H100"},
                 {"NVIDIA H100 PCIe", 85, NULL},
                 {"NVIDIA H200", 150, "H200"},
                 {"NVIDIA GH200 480GB", 102.6, "GH200"},
                 {"NVIDIA GH200 144G HBM3e", 150.7, "GH200-144GB"},
                 {"NVIDIA B200", 192.3, "B200"},
                 {"NVIDIA GB200", 198, NULL},
                 {"NVIDIA A10", 24.1, "A10"},
                 {"NVIDIA A10G", 24.1, NULL},
                 {"NVIDIA A40", 48.3, "A40"},
                 {"NVIDIA L4", 24.1, "L4"},
                 {"NVIDIA L40S", 48.3, "L40S"},
                 {"NVIDIA RTX A6000", 51.5, "RTX-A6000"},
                 {"NVIDIA RTX 6000 Ada Generation", 51.5, NULL},
                 {"NVIDIA GeForce RTX 2080 Ti", 11.8, "RTX-2080Ti"},
                 {"NVIDIA GeForce RTX 2080", 8.6, NULL},
                 {"NVIDIA TITAN RTX", 25.8, "Titan-RTX"},
                 {"NVIDIA GeForce RTX 3080", 10.7, "RTX-3080"},
                 {"NVIDIA GeForce RTX 3080", 12.9, NULL}, /* the model of 12 GB has more lanes */
                 {"NVIDIA GeForce RTX 4080", 17.2, "RTX-4080"},
                 {"NVIDIA GeForce RTX 5090", 34.2, "RTX-5090"},
                 {"NVIDIA A30", 25, "A30"},
                 {"NVIDIA A300", 25, NULL},
                 {"NVIDIA GeForce RTX 4090", 25, "RTX-4090"},
                 {"NVIDIA GeForce RTX 3090 Ti", 25, "RTX-3090"},
                 {"NVIDIA A100-SXM4-40GB", 20, NULL}, /* half of one */
                 {"GeForce GTX 1080", 8, NULL},
                 {"", 0, NULL}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const struct hapt_device_spec *found = hapt_device_spec_of_name(known[i].name, 1e9 * known[i].gigabytes);
        CHECK_MESSAGE(found ? known[i].spec && !strcmp(found->name, known[i].spec) : !known[i].spec,
                      "%s with %g GB is taken for %s", known[i].name, known[i].gigabytes, found ? found->name : "none");
    }
}

static void groups_gpus(void)
{
    const int ranks[] = {2, 2, 2}, cores[] = {8, 8, 8};
    const double memory[] = {64, 64, 64};
    int world_size;
    struct hapt_cluster *cluster = NULL;
    struct hapt_hosts *hosts = make_hosts(3, ranks, cores, memory, false, &world_size);
    for (int h = 0; h < 3; h++) {
        hosts->host[h].gpu_count = 2;
        hosts->host[h].gpus_usable = h == 2 ? 1 : 2; /* too few GPUs on host 2: its ranks compute on cores */
        for (int g = 0; g < 2; g++) strcpy(hosts->host[h].gpu[g].spec, h == 0 ? "A100-40GB" : "V100-32GB");
    }
    CHECK_OK(hapt_cluster_form_subclusters(hosts, world_size, &arena, &cluster));
    if (cluster)
        CHECK(cluster->count == 3 && !strcmp(cluster->subcluster[0].name, "a100-40gb") &&
              !strcmp(cluster->subcluster[1].device.name, "V100-32GB") && !strcmp(cluster->subcluster[2].name, "cpu"));
    hosts->host[0].gpu[1].spec[0] = '\0'; /* each rank counts the GPU that it drives */
    CHECK_FAILS(hapt_cluster_form_subclusters(hosts, world_size, &arena, &cluster), HAPT_ERR_INPUT);

    /* Seventeen different hosts are too many subclusters. */
    int many_ranks[17], many_cores[17];
    double many_memory[17];
    for (int h = 0; h < 17; h++) {
        many_ranks[h] = 1;
        many_cores[h] = h + 1;
        many_memory[h] = 16;
    }
    hosts = make_hosts(17, many_ranks, many_cores, many_memory, false, &world_size);
    CHECK_FAILS(hapt_cluster_form_subclusters(hosts, world_size, &arena, &cluster), HAPT_ERR_INPUT);
}

/* Four hosts with four ranks and GPUs each. Two of them have two kinds, in different order. The third has three of one
 * kind and one of the other. The last has slices of one GPU. */
static struct hapt_hosts *make_mixed_hosts(int *world_size)
{
    static const char *const specs[4][4] = {{"V100-32GB", "A100-40GB", "V100-32GB", "A100-40GB"},
                                            {"A100-40GB", "A100-40GB", "V100-32GB", "V100-32GB"},
                                            {"A100-40GB", "V100-32GB", "A100-40GB", "A100-40GB"},
                                            {"A100-40GB", "A100-40GB", "A100-40GB", "A100-40GB"}};
    const int ranks[] = {4, 4, 4, 4}, cores[] = {8, 8, 8, 8};
    const double memory[] = {64, 64, 64, 64};
    struct hapt_hosts *hosts = make_hosts(4, ranks, cores, memory, true, world_size);
    for (int h = 0; h < 4; h++) {
        hosts->host[h].gpu_count = hosts->host[h].gpus_usable = 4;
        for (int g = 0; g < 4; g++) {
            strcpy(hosts->host[h].gpu[g].spec, specs[h][g]);
            hosts->host[h].gpu[g].memory_bytes = specs[h][g][0] == 'V' ? 34e9 : h == 3 && g > 1 ? 21e9 : 42e9;
        }
    }
    return hosts;
}

/* Round-robin ranks: rank r is number r / 4 on host r % 4. */
static void groups_two_kinds(void)
{
    int world_size;
    struct hapt_cluster *cluster = NULL;
    const struct hapt_hosts *hosts = make_mixed_hosts(&world_size);
    static const struct {
        const char *name;
        double gigabytes;
        int nodes, devices, ranks[4];
        const char *hosts[2];
    } expected[] = {
        {"v100-32gb", 32, 2, 2, {0, 8, 9, 13}, {"node0.lab", "node1.lab"}},
        {"a100-40gb", 40, 2, 2, {4, 12, 1, 5}, {"node0.lab", "node1.lab"}},
        {"a100-40gb-2", 40, 1, 3, {2, 10, 14}, {"node2.lab"}},
        {"a100-40gb-3", 40, 1, 2, {3, 7}, {"node3.lab"}},
        {"v100-32gb-2", 32, 1, 1, {6}, {"node2.lab"}},
        {"a100-40gb-4", 19.5, 1, 2, {11, 15}, {"node3.lab"}},
    };
    CHECK_OK(hapt_cluster_form_subclusters(hosts, world_size, &arena, &cluster));
    if (!CHECK(cluster && cluster->count == 6 && cluster->rank_count == 16)) return;
    for (int c = 0; c < 6; c++) {
        const struct hapt_subcluster *own = &cluster->subcluster[c];
        CHECK_MESSAGE(strcmp(own->name, expected[c].name) == 0, "subcluster %d is %s", c, own->name);
        CHECK_MESSAGE(own->nodes == expected[c].nodes && own->devices_per_node == expected[c].devices, "%s: %d x %d",
                      own->name, own->nodes, own->devices_per_node);
        CHECK_NEAR(own->device.memory_bytes, 1e9 * expected[c].gigabytes, 1);
        CHECK(own->host_count == own->nodes);
        for (int n = 0; n < own->nodes; n++) CHECK(strcmp(own->hosts[n], expected[c].hosts[n]) == 0);
        for (int i = 0; i < own->nodes * own->devices_per_node; i++) {
            CHECK_MESSAGE(own->ranks[i] == expected[c].ranks[i], "%s: rank %d at %d", own->name, own->ranks[i], i);
            CHECK(cluster->subcluster_of_rank[own->ranks[i]] == c);
        }
    }
    /* The same cluster, read from a file: every rank gets a GPU of its subcluster's kind again. */
    struct hapt_cluster again = *cluster;
    again.subcluster_of_rank = NULL;
    CHECK_OK(hapt_cluster_assign(hosts, world_size, &arena, &again));
    for (int rank = 0; rank < world_size; rank++) {
        const struct hapt_host_gpu *gpu = hapt_host_gpu_of(&hosts->host[rank % 4], rank / 4);
        CHECK_MESSAGE(strcmp(again.subcluster[again.subcluster_of_rank[rank]].device.name, gpu->spec) == 0, "rank %d",
                      rank);
    }
}

/* A machine that a file describes: an A100, two V100, an A100. */
static void reads_two_kinds(void)
{
    static const int expected[4] = {0, 1, 1, 0};
    const struct hapt_env env = {.cores = 4};
    struct hapt_host host;
    struct hapt_cluster *cluster = NULL;
    int host_of_rank[4] = {0, 0, 0, 0};
    setenv("HWLOC_XMLFILE", "tests/data/two-kinds.xml", 1);
    hapt_host_describe(&env, &host);
    unsetenv("HWLOC_XMLFILE");
    CHECK(host.faked && host.gpu_count == 4 && strcmp(host.name, "two-kinds-3") == 0);
    host.ranks = host.gpus_usable = 4; /* as if there were a driver */
    host.rank_bandwidth = 1e10;
    const struct hapt_hosts hosts = {.count = 1, .host = &host, .host_of_rank = host_of_rank};
    CHECK_OK(hapt_cluster_form_subclusters(&hosts, 4, &arena, &cluster));
    if (!CHECK(cluster && cluster->count == 2)) return;
    CHECK(strcmp(cluster->subcluster[0].device.name, "A100-40GB") == 0 &&
          strcmp(cluster->subcluster[1].device.name, "V100-32GB") == 0);
    for (int c = 0; c < 2; c++)
        CHECK(cluster->subcluster[c].nodes == 1 && cluster->subcluster[c].devices_per_node == 2);
    for (int rank = 0; rank < 4; rank++) CHECK(cluster->subcluster_of_rank[rank] == expected[rank]);
    host.gpus_usable = 3; /* one GPU too few: all ranks compute on cores, in one subcluster */
    CHECK_OK(hapt_cluster_form_subclusters(&hosts, 4, &arena, &cluster));
    CHECK(cluster->count == 1 && strcmp(cluster->subcluster[0].device.backend, "cpu") == 0);
}

/* A cluster as from a file, with `count` cpu subclusters. */
static struct hapt_cluster *make_cluster(int count, const int *nodes, const int *devices)
{
    struct hapt_cluster *cluster = hapt_arena_alloc(&arena, 1, sizeof *cluster);
    cluster->count = count;
    cluster->from_file = true;
    cluster->subcluster = hapt_arena_alloc(&arena, (size_t)count, sizeof *cluster->subcluster);
    cluster->link = hapt_arena_alloc(&arena, (size_t)(count * count), sizeof *cluster->link);
    for (int i = 0; i < count; i++) {
        struct hapt_subcluster *own = &cluster->subcluster[i];
        snprintf(own->name, sizeof own->name, "s%d", i);
        own->nodes = nodes[i];
        own->devices_per_node = devices[i];
        own->device = *hapt_device_spec_find("cpu");
        cluster->rank_count += nodes[i] * devices[i];
    }
    return cluster;
}

static void binds_in_order(void)
{
    const int ranks[] = {4, 3}, cores[] = {8, 6};
    const double memory[] = {64, 30};
    const int nodes[] = {1, 1}, devices[] = {2, 4};
    int world_size;
    struct hapt_hosts *hosts = make_hosts(2, ranks, cores, memory, false, &world_size);
    struct hapt_cluster *cluster = make_cluster(2, nodes, devices);
    cluster->subcluster[0].device.memory_bytes = 1e9;
    cluster->subcluster[0].device.memory_capped = true;
    CHECK_OK(hapt_cluster_assign(hosts, world_size, &arena, cluster));
    static const int expected[] = {0, 0, 1, 1, 1, 1, -1};
    for (int rank = 0; rank < 7; rank++) CHECK(cluster->subcluster_of_rank[rank] == expected[rank]);
    CHECK(cluster->subcluster[1].ranks[0] == 2 && cluster->subcluster[1].ranks[3] == 5);
    CHECK(cluster->subcluster[0].device.memory_bytes == 1e9); /* the memory limit stays */
    CHECK_NEAR(cluster->subcluster[0].device.peak_flops[HAPT_F32], 2e11, 1);
    /* Subcluster 1 spans both hosts and gets the smaller share, which is 10 GB on the second host. */
    CHECK_NEAR(cluster->subcluster[1].device.memory_bytes, 10e9, 1);
}

static void binds_by_host(void)
{
    const int ranks[] = {3, 3}, cores[] = {8, 8};
    const double memory[] = {64, 64};
    const int nodes[] = {1, 1}, devices[] = {2, 3};
    static const char *host[] = {"node1"}; /* the file may leave out the domain */
    int world_size;
    struct hapt_hosts *hosts = make_hosts(2, ranks, cores, memory, true, &world_size);
    struct hapt_cluster *cluster = make_cluster(2, nodes, devices);
    cluster->subcluster[1].hosts = host;
    cluster->subcluster[1].host_count = 1;
    CHECK_OK(hapt_cluster_assign(hosts, world_size, &arena, cluster));
    /* Round-robin: host 1 has the odd ranks, and subcluster 1 takes all of them. */
    static const int expected[] = {0, 1, 0, 1, -1, 1};
    for (int rank = 0; rank < 6; rank++) CHECK(cluster->subcluster_of_rank[rank] == expected[rank]);
    static const char *unknown[] = {"node7"}, *other_domain[] = {"node1.elsewhere"};
    cluster->subcluster[1].hosts = unknown;
    CHECK_FAILS(hapt_cluster_assign(hosts, world_size, &arena, cluster), HAPT_ERR_INPUT);
    cluster->subcluster[1].hosts = other_domain;
    CHECK_FAILS(hapt_cluster_assign(hosts, world_size, &arena, cluster), HAPT_ERR_INPUT);
    const int too_many[] = {1, 4};
    cluster = make_cluster(2, nodes, too_many);
    cluster->subcluster[1].hosts = host;
    cluster->subcluster[1].host_count = 1;
    CHECK_FAILS(hapt_cluster_assign(hosts, world_size, &arena, cluster), HAPT_ERR_INPUT);
}

/* One host with GPUs A V A V, and subclusters that name a kind or none. Neither the order in the file nor a subcluster
 * on cores changes the result. */
static void binds_by_kind(void)
{
    static const char *kinds[] = {"V100-32GB", "A100-40GB", "cpu"}, *host[] = {"node0"};
    static const int expected[5] = {1, 0, 1, 0, -1};
    const int ranks[] = {5}, cores[] = {8}, nodes[] = {1, 1, 1}, devices[] = {2, 2, 1};
    const double memory[] = {64};
    int world_size;
    struct hapt_hosts *hosts = make_hosts(1, ranks, cores, memory, false, &world_size);
    hosts->host[0].gpu_count = hosts->host[0].gpus_usable = 4;
    for (int g = 0; g < 4; g++) strcpy(hosts->host[0].gpu[g].spec, g % 2 ? "V100-32GB" : "A100-40GB");
    for (int c = 0; c < 3; c++) {
        struct hapt_cluster *cluster = make_cluster(c == 2 ? 3 : 2, nodes, devices);
        for (int i = 0; i < cluster->count; i++) {
            cluster->subcluster[i].device = *hapt_device_spec_find(kinds[i]);
            if (c == 0) cluster->subcluster[i].hosts = host;
            cluster->subcluster[i].host_count = c == 0;
        }
        CHECK_OK(hapt_cluster_assign(hosts, world_size, &arena, cluster));
        for (int rank = 0; rank < 5 && c < 2; rank++)
            CHECK_MESSAGE(cluster->subcluster_of_rank[rank] == expected[rank], "case %d: rank %d in %d", c, rank,
                          cluster->subcluster_of_rank[rank]);
        /* Rank 4 shares GPU 0 with rank 0. So rank 4 takes the subcluster on cores, and the other ranks take GPUs. */
        if (c == 2)
            CHECK(cluster->subcluster_of_rank[1] == 0 && cluster->subcluster_of_rank[3] == 0 &&
                  cluster->subcluster_of_rank[4] == 2);
    }
    /* A kind that no subcluster names goes to the subcluster that names an absent kind. Ranks with a named kind are
     * kept for their subcluster. */
    struct hapt_cluster *cluster = make_cluster(2, nodes, devices);
    cluster->subcluster[0].device = *hapt_device_spec_find("A100-40GB");
    strcpy(cluster->subcluster[0].device.name, "mine");
    cluster->subcluster[1].device = *hapt_device_spec_find("A100-40GB");
    CHECK_OK(hapt_cluster_assign(hosts, world_size, &arena, cluster));
    CHECK(cluster->subcluster_of_rank[0] == 1 && cluster->subcluster_of_rank[1] == 0 &&
          cluster->subcluster_of_rank[2] == 1 && cluster->subcluster_of_rank[3] == 0);
}

static void refuses_what_is_not_there(void)
{
    const int ranks[] = {2}, cores[] = {2};
    const double memory[] = {4};
    const int nodes[] = {1, 1}, devices[] = {2, 2};
    int world_size;
    struct hapt_hosts *hosts = make_hosts(1, ranks, cores, memory, false, &world_size);
    struct hapt_cluster *cluster = make_cluster(2, nodes, devices);
    const enum hapt_status status = hapt_cluster_assign(hosts, world_size, &arena, cluster);
    CHECK(status == HAPT_ERR_INPUT && strstr(hapt_fail_hint(), "mpirun -np 4") != NULL);
    hapt_fail_reset();
    CHECK(cluster->subcluster_of_rank == NULL && cluster->subcluster[0].ranks == NULL);
    cluster = make_cluster(1, nodes, devices);
    cluster->subcluster[0].device = *hapt_device_spec_find("A100-40GB");
    CHECK_FAILS(hapt_cluster_assign(hosts, world_size, &arena, cluster), HAPT_ERR_INPUT);
    hosts->host[0].gpus_usable = 2;
    CHECK_OK(hapt_cluster_assign(hosts, world_size, &arena, cluster));
    CHECK(cluster->subcluster[0].device.memory_bytes == 40e9);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    hapt_arena_init(&arena);
    RUN(groups_like_hosts);
    RUN(names_gpus);
    RUN(groups_gpus);
    RUN(groups_two_kinds);
    RUN(reads_two_kinds);
    RUN(binds_in_order);
    RUN(binds_by_host);
    RUN(binds_by_kind);
    RUN(refuses_what_is_not_there);
    hapt_arena_release(&arena);
    return test_finish();
}
