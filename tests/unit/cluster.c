/* The cluster file: valid files are read, invalid ones are refused with the line, and no file crashes the reader. */
#include "test.h"

#include <unistd.h>

#include "hapt/cluster.h"
#include "hapt/config.h"

static char path[64];

static void save(const char *text, size_t size)
{
    FILE *file = fopen(path, "wb");
    if (!CHECK(file != NULL)) return;
    CHECK(fwrite(text, 1, size, file) == size);
    fclose(file);
}

static const char good[] =
    "{ \"format\": \"hapt-cluster\", \"version\": 1,\n"                                             /* 1 */
    "  \"subclusters\": [\n"                                                                        /* 2 */
    "    { \"name\": \"a100\", \"nodes\": 4, \"devices_per_node\": 8, \"device\": \"A100-40GB\",\n" /* 3 */
    "      \"intra_node_bandwidth\": \"300 GB/s\", \"inter_node_bandwidth\": \"200 Gbit/s\" },\n"   /* 4 */
    "    { \"name\": \"own\", \"nodes\": 2, \"devices_per_node\": 1,\n"                             /* 5 */
    "      \"device\": { \"name\": \"X1\", \"peak_flops\": { \"fp32\": \"20 TFLOP/s\",\n"           /* 6 */
    "          \"bf16\": 3e14 }, \"memory\": \"40 GiB\",\n"                                         /* 7 */
    "          \"memory_bandwidth\": 1.5e12 },\n"                                                   /* 8 */
    "      \"slowdown\": 2.5, \"steady\": true, \"memory\": \"400 MB\", \"hosts\": [\"n1\",\n"      /* 9 */
    "          \"n2\"], \"inter_node_latency\": \"5 us\" }\n"                                       /* 10 */
    "  ],\n"                                                                                        /* 11 */
    "  \"links\": [ { \"between\": [\"a100\", \"own\"],\n"                                          /* 12 */
    "      \"bandwidth\": \"5 Gbit/s\", \"latency\": \"50 us\", \"paced\": true, \"transport\": \"tcp\", "
    "\"interfaces\": [\"eth0\", \"ib1\"] } ],\n" /* 13 */
    "  \"collectives\": [ { \"ranks\": 34, \"all_reduce\": { \"latency\": \"1 ms\", \"bandwidth\": \"500 MB/s\" "
    "},\n" /* 14 */
    "      \"reduce_scatter\": { \"bandwidth\": \"1 GB/s\" }, \"all_gather\": { \"bandwidth\": 8e8, \"padding\": "
    "0.5 },\n"                                                                                             /* 15 */
    "      \"grouped_broadcast\": { \"bandwidth\": 4e8 }, \"all_to_all\": { \"bandwidth\": 8e9 } } ] }\n"; /* 16 */

/* Saved to an HDF5 file and loaded. */
static void keeps(const struct hapt_cluster *cluster, struct hapt_arena *arena)
{
    char file_path[80];
    struct hapt_h5 *file;
    struct hapt_cluster *again = NULL;
    snprintf(file_path, sizeof file_path, "%s.h5", path);
    CHECK_OK(hapt_h5_create(file_path, "test", 1, &file));
    CHECK_OK(hapt_cluster_write(file, "/topology", cluster));
    CHECK_OK(hapt_h5_commit(file));
    CHECK_OK(hapt_h5_open(file_path, "test", 1, false, &file));
    CHECK_OK(hapt_cluster_read(file, "/topology", arena, &again));
    hapt_h5_close(file);
    unlink(file_path);
    if (!again || !CHECK(again->collective_count == cluster->collective_count)) return;
    for (int i = 0; i < again->collective_count; i++)
        CHECK(again->collective[i].ranks == cluster->collective[i].ranks &&
              !memcmp(again->collective[i].term, cluster->collective[i].term, sizeof again->collective[i].term));
}

static void accepts(void)
{
    struct hapt_arena arena;
    struct hapt_cluster *cluster = NULL;
    hapt_arena_init(&arena);
    save(good, strlen(good));
    CHECK_OK(hapt_cluster_load(path, &arena, &cluster));
    if (!cluster) return;
    const struct hapt_subcluster *a = &cluster->subcluster[0], *own = &cluster->subcluster[1];
    CHECK(cluster->count == 2 && cluster->rank_count == 34 && cluster->from_file && !cluster->subcluster_of_rank);
    CHECK(!strcmp(a->name, "a100") && a->nodes == 4 && a->devices_per_node == 8 && a->device.slowdown == 1);
    CHECK(a->device.peak_flops[HAPT_BF16] == 312e12 && a->device.memory_bytes == 40e9 && !a->device.memory_capped);
    CHECK(a->intra_node_bandwidth == 300e9 && a->inter_node_bandwidth == 25e9 && a->intra_node_latency < 0);
    CHECK(own->device.peak_flops[HAPT_F32] == 20e12 && own->device.peak_flops[HAPT_BF16] == 3e14 &&
          own->device.peak_flops[HAPT_F16] == 0);
    CHECK(own->device.memory_bytes == 400e6 && own->device.memory_capped && own->device.slowdown == 2.5);
    CHECK(own->device.steady && !a->device.steady);
    CHECK(own->host_count == 2 && !strcmp(own->hosts[1], "n2"));
    CHECK_NEAR(own->inter_node_latency, 5e-6, 1e-12);
    for (int i = 0; i < 2; i++) {
        const struct hapt_link *link = hapt_cluster_link(cluster, i, 1 - i);
        CHECK(link->bandwidth == 625e6 && link->paced);
        CHECK_NEAR(link->latency, 50e-6, 1e-12);
        CHECK(!strcmp(link->transport, "tcp") && !strcmp(link->interface[i], "eth0") &&
              !strcmp(link->interface[1 - i], "ib1"));
    }
    CHECK(!hapt_cluster_link(cluster, 0, 0)->transport[0]);
    CHECK(hapt_cluster_link(cluster, 0, 0)->bandwidth == 25e9 && hapt_cluster_link(cluster, 1, 1)->bandwidth == 0);
    if (CHECK(cluster->collective_count == 1)) {
        const struct hapt_collective_model *model = &cluster->collective[0];
        CHECK(model->ranks == 34 && model->measured && model->term[HAPT_COLLECTIVE_ALL_REDUCE].latency_s == 1e-3);
        CHECK_NEAR(model->term[HAPT_COLLECTIVE_ALL_REDUCE].byte_s, 2e-9, 1e-20);
        CHECK(model->term[HAPT_COLLECTIVE_ALL_REDUCE].skew_s == 0 &&
              model->term[HAPT_COLLECTIVE_GROUPED_BROADCAST].skew_s == 0);
        CHECK_NEAR(model->term[HAPT_COLLECTIVE_REDUCE_SCATTER].skew_s, 1e-9, 1e-20);
        CHECK_NEAR(model->term[HAPT_COLLECTIVE_ALL_GATHER].skew_s, 0.5 / 8e8, 1e-20);
    }
    keeps(cluster, &arena);
    hapt_cluster_assume(cluster);
    CHECK_OK(hapt_cluster_check(cluster));
    CHECK(hapt_cluster_link(cluster, 1, 1)->bandwidth > 0 && hapt_cluster_link(cluster, 0, 0)->latency >= 0);
    CHECK(hapt_cluster_link(cluster, 0, 1)->bandwidth == 625e6);
    hapt_arena_release(&arena);
}

/* The valid file with `from` replaced by `to` must be refused. The message must name the line and contain `word`. */
static void refuse(const char *from, const char *to, int line, const char *word)
{
    char text[2048];
    const char *at = strstr(good, from);
    if (!CHECK_MESSAGE(at != NULL, "the test's file lacks %s", from)) return;
    snprintf(text, sizeof text, "%.*s%s%s", (int)(at - good), good, to, at + strlen(from));
    save(text, strlen(text));
    struct hapt_arena arena;
    struct hapt_cluster *cluster;
    hapt_arena_init(&arena);
    const enum hapt_status status = hapt_cluster_load(path, &arena, &cluster);
    char expected[96];
    snprintf(expected, sizeof expected, "%s: line %d: ", path, line);
    CHECK_MESSAGE(status == HAPT_ERR_INPUT, "%s for %s gives %s", to, from, hapt_status_name(status));
    CHECK_MESSAGE(strncmp(hapt_fail_message(), expected, strlen(expected)) == 0, "%s for %s: expected line %d: %s", to,
                  from, line, hapt_fail_message());
    CHECK_MESSAGE(strstr(hapt_fail_message(), word) != NULL, "expected the word %s: %s", word, hapt_fail_message());
    CHECK_MESSAGE(hapt_fail_hint()[0] && !strchr(hapt_fail_message(), '\n'), "no hint or two lines: %s",
                  hapt_fail_message());
    hapt_fail_reset();
    hapt_arena_release(&arena);
}

static void refuses(void)
{
    refuse("\"hapt-cluster\"", "\"hapt-plan\"", 1, "format");
    refuse("\"version\": 1", "\"version\": 2", 1, "version");
    refuse("\"nodes\": 4", "\"nodes\": 0", 3, "nodes");
    refuse("\"nodes\": 4", "\"nodes\": -3", 3, "nodes");
    refuse("\"nodes\": 4", "\"nodes\": 4.5", 3, "fraction");
    refuse("\"nodes\": 4", "\"nodes\": \"4\"", 3, "nodes");
    refuse("\"nodes\": 4, ", "", 3, "\"nodes\" is missing");
    refuse("\"nodes\": 4", "\"nodes\": 99999999", 3, "nodes");
    refuse("\"nodes\": 4", "\"nodes\": 4, \"nodes\": 4", 3, "duplicate");
    refuse("\"A100-40GB\"", "\"A100-41GB\"", 3, "unknown device");
    refuse("\"A100-40GB\"", "7", 3, "device");
    refuse("300 GB/s", "300 GB", 4, "300 GB");
    refuse("300 GB/s", "fast", 4, "fast");
    refuse("300 GB/s", "-1 GB/s", 4, "outside");
    refuse("300 GB/s", "0 GB/s", 4, "outside");
    refuse("\"intra_node_bandwidth\"", "\"intra_bandwidth\"", 4, "unknown key \"intra_bandwidth\"");
    refuse("\"own\"", "\"a100\"", 5, "a100");
    refuse("\"own\"", "\"\"", 5, "name");
    refuse("\"own\"", "\"line\\nbreak\"", 5, "name");
    refuse("20 TFLOP/s", "20 TFLOPS", 6, "TFLOPS");
    refuse("\"fp32\"", "\"fp64\"", 6, "fp64");
    refuse("\"bf16\": 3e14", "\"bf16\": 0", 7, "outside");
    refuse("40 GiB", "40 Gibit", 7, "40 Gibit");
    refuse("40 GiB", "40 Gb", 7, "40 Gb");
    refuse("40 GiB", "40 gigabyte", 7, "gigabyte");
    refuse("1.5e12", "true", 8, "memory_bandwidth");
    refuse("2.5", "0.5", 9, "slowdown");
    refuse("2.5", "\"twice\"", 9, "slowdown");
    refuse("\"steady\": true", "\"steady\": 1", 9, "steady");
    refuse("\"slowdown\": 2.5, ", "", 9, "a slowed device");
    refuse("400 MB", "400 MB/s", 9, "400 MB/s");
    refuse("\"n1\",\n", "\n", 9, "hosts");
    refuse("\"n2\"", "\"n1\"", 10, "twice");
    refuse("\"n2\"", "5", 10, "hosts");
    refuse("5 us", "5 MB", 10, "5 MB");
    refuse("5 us", "5 h", 10, "outside");
    refuse("[\"a100\", \"own\"]", "[\"a100\",\n\"owns\"]", 13, "owns");
    refuse("[\"a100\", \"own\"]", "[\"a100\"]", 12, "between");
    refuse("[\"a100\", \"own\"]", "\"a100\"", 12, "between");
    refuse("5 Gbit/s", "5 Gbit", 13, "5 Gbit");
    refuse("\"bandwidth\": \"5 Gbit/s\", ", "", 13, "paced");
    refuse("\"paced\": true", "\"paced\": 1", 13, "paced");
    refuse("\"paced\": true", "\"pace\": true", 13, "unknown key");
    refuse("\"transport\": \"tcp\"", "\"transport\": \"ucx\"", 13, "transport");
    refuse("\"transport\": \"tcp\"", "\"transport\": \"mpi\"", 13, "interfaces");
    refuse("\"transport\": \"tcp\", ", "", 13, "interfaces");
    refuse(", \"interfaces\": [\"eth0\", \"ib1\"]", "", 13, "interfaces");
    refuse("[\"eth0\", \"ib1\"]", "[\"eth0\"]", 13, "two network interfaces");
    refuse("\"ib1\"", "\"an-interface-whose-name-is-too-long\"", 13, "two network interfaces");
    refuse("\"ib1\"] } ]", "\"ib1\"] }, { \"between\": [\"own\", \"a100\"] } ]", 13, "second link");
    refuse("  ],\n", "  \n", 12, "");
    refuse("\"ranks\": 34", "\"ranks\": 0", 14, "ranks");
    refuse("\"ranks\": 34", "\"rank\": 34", 14, "unknown key");
    refuse("500 MB/s", "500 MB", 14, "500 MB");
    refuse("\"reduce_scatter\"", "\"scatter\"", 15, "unknown key \"scatter\"");
    refuse("\"reduce_scatter\": { \"bandwidth\": \"1 GB/s\" }, ", "", 14, "\"reduce_scatter\" is missing");
    refuse("\"padding\": 0.5", "\"padding\": -1", 15, "outside");
    refuse("{ \"bandwidth\": 4e8 }", "4e8", 16, "grouped_broadcast");
    refuse("{ \"bandwidth\": 4e8 }", "{ \"latency\": 0 }", 16, "\"bandwidth\" is missing");
}

static void refuses_whole_files(void)
{
    static const char *const text[] = {"",
                                       " ",
                                       "null",
                                       "[]",
                                       "7",
                                       "{}",
                                       "{\"format\": \"hapt-cluster\"}",
                                       "\"format\"",
                                       "{\"format\": \"hapt-cluster\", \"version\": 1}",
                                       "{\"format\": \"hapt-cluster\", \"version\": 1, \"subclusters\": []}",
                                       "{\"format\": \"hapt-cluster\", \"version\": 1, \"subclusters\": {}}",
                                       "{\"format\": \"hapt-cluster\", \"version\": 1, \"subclusters\": [1]}",
                                       "{\"format\": \"hapt-cluster\", \"version\": 1, \"subclusters\": [{}]}"};
    struct hapt_arena arena;
    struct hapt_cluster *cluster;
    hapt_arena_init(&arena);
    for (size_t i = 0; i < sizeof text / sizeof *text; i++) {
        save(text[i], strlen(text[i]));
        CHECK_FAILS(hapt_cluster_load(path, &arena, &cluster), HAPT_ERR_INPUT);
    }
    CHECK_FAILS(hapt_cluster_load("/nonexistent/cluster.json", &arena, &cluster), HAPT_ERR_INPUT);
    CHECK_FAILS(hapt_cluster_load("/", &arena, &cluster), HAPT_ERR_INPUT);
    /* Deep nesting, and a file of absurd size. */
    static char deep[3 << 20];
    memset(deep, '[', 200000);
    save(deep, 200000);
    CHECK_FAILS(hapt_cluster_load(path, &arena, &cluster), HAPT_ERR_INPUT);
    memset(deep, ' ', sizeof deep);
    save(deep, sizeof deep);
    CHECK_FAILS(hapt_cluster_load(path, &arena, &cluster), HAPT_ERR_INPUT);
    hapt_arena_release(&arena);
}

/* Every prefix of the file, and thousands of damaged files. Each is refused with a message, or read with all
 * invariants. */
static void survives_damage(void)
{
    const size_t size = strlen(good);
    const int rounds = test_long() ? 200000 : 3000;
    uint64_t state = 20;
    char text[sizeof good + 64];
    int accepted = 0, refused = 0;
    for (int round = 0; round < (int)size - 1 + rounds; round++) {
        size_t length = size;
        memcpy(text, good, size);
        if (round < (int)size - 1) {
            length = (size_t)round;
        } else {
            for (int hits = 1 + (int)(hapt_random_next(&state) % 3); hits > 0; hits--) {
                const size_t at = hapt_random_next(&state) % length;
                switch (hapt_random_next(&state) % 4) {
                case 0: text[at] = (char)hapt_random_next(&state); break;
                case 1: text[at] = "{}[]\",:0-9eE.\\\n"[hapt_random_next(&state) % 15]; break;
                case 2: memmove(text + at, text + at + 1, --length - at); break;
                default: text[at] ^= (char)(1 << hapt_random_next(&state) % 8);
                }
            }
        }
        save(text, length);
        struct hapt_arena arena;
        struct hapt_cluster *cluster;
        hapt_arena_init(&arena);
        const enum hapt_status status = hapt_cluster_load(path, &arena, &cluster);
        if (status == HAPT_OK) {
            accepted++;
            CHECK_OK(hapt_cluster_check(cluster));
        } else {
            refused++;
            CHECK_MESSAGE(status == HAPT_ERR_INPUT, "round %d gives %s", round, hapt_status_name(status));
            CHECK_MESSAGE(hapt_fail_message()[0] && !strchr(hapt_fail_message(), '\n'), "round %d: no message", round);
            hapt_fail_reset();
        }
        hapt_arena_release(&arena);
    }
    /* A changed name or number may still be valid. Other damage must be refused. */
    CHECK(refused > (int)size - 10 && accepted > 0);
}

static void knows_devices(void)
{
    static const char *const name[] = {"A100-40GB",   "A100-80GB", "V100-16GB", "V100-32GB", "P100",      "T4",
                                       "H100",        "H200",      "RTX-3090",  "RTX-4090",  "MI250X",    "A30",
                                       "A40",         "L40S",      "L4",        "cpu",       "A10",       "RTX-A6000",
                                       "RTX-2080Ti",  "RTX-3080",  "RTX-4080",  "RTX-5090",  "Titan-RTX", "GH200",
                                       "GH200-144GB", "B200",      "MI250",     "MI300X"};
    for (size_t i = 0; i < sizeof name / sizeof *name; i++) {
        const struct hapt_device_spec *device = hapt_device_spec_find(name[i]);
        if (!CHECK_MESSAGE(device != NULL, "no %s", name[i])) continue;
        CHECK(device->peak_flops[HAPT_F32] > 0 && device->memory_bytes >= 4e9 && device->memory_bandwidth > 0);
        /* Each device of the database computes between 2 and 500 operations per byte that it reads. */
        const double intensity = device->peak_flops[HAPT_F32] / device->memory_bandwidth;
        CHECK_MESSAGE(intensity > 2 && intensity < 500, "%s: %g", name[i], intensity);
        /* Matrix units with fp32 accumulation: GeForce cards since Ampere twice the vector rate, Turing four times,
         * others up to 30 times. Figures with sparsity or with fp16 accumulation of a GeForce card exceed this. */
        const bool geforce = strstr(name[i], "RTX-") && name[i][4] != 'A', turing = !strcmp(name[i], "RTX-2080Ti");
        const double units = device->peak_flops[HAPT_F16] / device->peak_flops[HAPT_F32];
        CHECK_MESSAGE(units == 0 || (units >= 1 && units <= (turing    ? 4.1
                                                             : geforce ? 2.1
                                                                       : 31)),
                      "%s: fp16 %g x fp32", name[i], units);
        CHECK(device->peak_flops[HAPT_BF16] == 0 || device->peak_flops[HAPT_BF16] == device->peak_flops[HAPT_F16] ||
              !strcmp(name[i], "cpu"));
    }
    CHECK(hapt_device_spec_find("a100-40gb") != NULL && hapt_device_spec_find("A100") == NULL);
    CHECK(hapt_device_spec_find("V100-32GB")->peak_flops[HAPT_BF16] == 0);
    int count = 0;
    while (hapt_device_spec_at(count)) count++;
    CHECK(count == (int)(sizeof name / sizeof *name) && hapt_device_spec_at(-1) == NULL);
}

/* The bus decides: generation 5 is twice as fast as 4, and 4 as 3, but for their overheads. A file's value counts. */
static void knows_hosts(void)
{
    static const struct {
        const char *device;
        double least, most;
    } buses[] = {{"V100-32GB", 8e9, 16e9}, {"A100-40GB", 16e9, 32e9}, {"H200", 32e9, 64e9}};
    for (size_t b = 0; b < sizeof buses / sizeof *buses; b++) {
        struct hapt_subcluster own = {.device = *hapt_device_spec_find(buses[b].device)};
        const double bandwidth = hapt_cluster_host_bandwidth(&own);
        CHECK(bandwidth > buses[b].least && bandwidth < buses[b].most);
        own.host_bandwidth = 1e9;
        CHECK(hapt_cluster_host_bandwidth(&own) == 1e9);
    }
    struct hapt_subcluster own = {.device = {.name = "unknown", .backend = "cuda"}};
    CHECK(hapt_cluster_host_bandwidth(&own) > 0);
    own.device = *hapt_device_spec_find("cpu");
    CHECK(hapt_cluster_host_bandwidth(&own) > 0 && hapt_cluster_host_bandwidth(&own) < own.device.memory_bandwidth);
}

static void saves_and_loads(void)
{
    struct hapt_arena arena;
    struct hapt_cluster *cluster = NULL, *again = NULL;
    struct hapt_h5 *file;
    char h5[80];
    snprintf(h5, sizeof h5, "%s.h5", path);
    hapt_arena_init(&arena);
    save(good, strlen(good));
    CHECK_OK(hapt_cluster_load(path, &arena, &cluster));
    cluster->subcluster[0].host_memory_bytes = 64e9;
    cluster->subcluster[0].host_bandwidth = 12e9;
    cluster->subcluster[0].host_paced = true;
    CHECK_OK(hapt_h5_create(h5, "hapt-topology", 1, &file));
    CHECK_OK(hapt_cluster_write(file, "/topology", cluster));
    CHECK_OK(hapt_h5_commit(file));
    CHECK_OK(hapt_h5_open(h5, "hapt-topology", 1, false, &file));
    CHECK_OK(hapt_cluster_read(file, "/topology", &arena, &again));
    CHECK_FAILS(hapt_cluster_read(file, "/elsewhere", &arena, &again), HAPT_ERR_INPUT);
    hapt_h5_close(file);
    if (again) {
        CHECK(again->count == cluster->count && again->rank_count == cluster->rank_count && again->from_file);
        for (int i = 0; i < again->count; i++) {
            const struct hapt_subcluster *a = &cluster->subcluster[i], *b = &again->subcluster[i];
            CHECK(!strcmp(a->name, b->name) && a->nodes == b->nodes && a->devices_per_node == b->devices_per_node);
            CHECK(!strcmp(a->device.name, b->device.name) && !strcmp(a->device.backend, b->device.backend));
            CHECK(!memcmp(a->device.peak_flops, b->device.peak_flops, sizeof a->device.peak_flops));
            CHECK(a->device.memory_bytes == b->device.memory_bytes && a->device.slowdown == b->device.slowdown &&
                  a->device.steady == b->device.steady && a->device.memory_bandwidth == b->device.memory_bandwidth &&
                  a->device.memory_capped == b->device.memory_capped);
            CHECK(a->intra_node_bandwidth == b->intra_node_bandwidth &&
                  a->inter_node_latency == b->inter_node_latency &&
                  a->inter_node_bandwidth == b->inter_node_bandwidth && a->intra_node_latency == b->intra_node_latency);
            CHECK(a->host_memory_bytes == b->host_memory_bytes && a->host_bandwidth == b->host_bandwidth &&
                  a->host_paced == b->host_paced);
            CHECK(a->host_count == b->host_count);
            for (int h = 0; h < a->host_count; h++) CHECK(!strcmp(a->hosts[h], b->hosts[h]));
            for (int j = 0; j < again->count; j++) {
                const struct hapt_link *x = hapt_cluster_link(cluster, i, j), *y = hapt_cluster_link(again, i, j);
                CHECK(x->bandwidth == y->bandwidth && x->latency == y->latency && x->paced == y->paced);
                CHECK(!strcmp(x->transport, y->transport) && !memcmp(x->interface, y->interface, sizeof x->interface));
            }
        }
    }
    unlink(h5);
    hapt_arena_release(&arena);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    snprintf(path, sizeof path, "/tmp/hapt-cluster-%d.json", (int)getpid());
    RUN(accepts);
    RUN(refuses);
    RUN(refuses_whole_files);
    RUN(survives_damage);
    RUN(knows_devices);
    RUN(knows_hosts);
    RUN(saves_and_loads);
    unlink(path);
    return test_finish();
}
