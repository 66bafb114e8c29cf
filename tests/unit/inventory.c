/* The inventory: what sinfo and nvidia-smi print becomes kinds of nodes; what is wrong in it is one error with its
 * line. system/cluster_init.sh tests the command. */
#include "test.h"

#include <unistd.h>

#include "../../src/cluster/database.h"
#include "hapt/inventory.h"

enum { NVIDIA, SINFO };

static enum hapt_status read_bytes(int tool, const char *bytes, size_t size, struct hapt_inventory *inventory)
{
    char path[] = "/tmp/hapt-inventory-XXXXXX";
    const int descriptor = mkstemp(path);
    struct hapt_arena arena;
    HAPT_ASSERT(descriptor >= 0 && write(descriptor, bytes, size) == (ssize_t)size);
    close(descriptor);
    hapt_arena_init(&arena);
    hapt_fail_reset();
    *inventory = (struct hapt_inventory){.count = 0};
    const enum hapt_status status = tool == SINFO ? hapt_inventory_read_sinfo(path, &arena, inventory)
                                                  : hapt_inventory_read_nvidia_smi(path, 1, &arena, inventory);
    hapt_arena_release(&arena);
    unlink(path);
    return status;
}

static enum hapt_status read_text(int tool, const char *text, struct hapt_inventory *inventory)
{
    return read_bytes(tool, text, strlen(text), inventory);
}

#define HEAD "HOSTNAMES STATE GRES AVAIL_FEATURES\n"

/* "2x4 A100-80GB": nodes, devices per node, device; kinds are separated by commas. */
static void takes(const char *text, const char *wanted)
{
    struct hapt_inventory inventory;
    char found[256] = "";
    const enum hapt_status status = read_text(SINFO, text, &inventory);
    for (int k = 0; status == HAPT_OK && k < inventory.count; k++)
        snprintf(found + strlen(found), sizeof found - strlen(found), "%s%dx%d %s", k ? "," : "",
                 inventory.kind[k].nodes, inventory.kind[k].devices_per_node, inventory.kind[k].device.name);
    CHECK_MESSAGE(status == HAPT_OK && !strcmp(found, wanted), "%s\nis \"%s\", not \"%s\": %s", text, found, wanted,
                  hapt_fail_message());
}

static void reads_types(void)
{
    static const char *const words[][2] = {{"gpu:a100_80gb:4", "A100-80GB"},
                                           {"gpu:a100-sxm4-40gb:4", "A100-40GB"},
                                           {"gpu:nvidia_a100_80gb_pcie:4", "A100-80GB"},
                                           {"gpu:A100:4", "A100-40GB"},
                                           {"gpu:tesla_v100-sxm2-32gb:4", "V100-32GB"},
                                           {"gpu:v100:4", "V100-16GB"},
                                           {"gpu:2080ti:4", "RTX-2080Ti"},
                                           {"gpu:rtx_2080_ti:4", "RTX-2080Ti"},
                                           {"gpu:nvidia_geforce_rtx_4080:4", "RTX-4080"},
                                           {"gpu:rtx_a6000:4", "RTX-A6000"},
                                           {"gpu:a6000:4", "RTX-A6000"},
                                           {"gpu:titan_rtx:4", "Titan-RTX"},
                                           {"gpu:gh200:4", "GH200"},
                                           {"gpu:gh200_144g_hbm3e:4", "GH200-144GB"},
                                           {"gpu:mi250:4", "MI250"},
                                           {"gpu:amd_instinct_mi300x:4", "MI300X"},
                                           {"gpu:a100:no_consume:4", "A100-40GB"},
                                           {"gpu:a100:4(S:0,1),shard:8", "A100-40GB"},
                                           {"nvme:2,gpu:l4:4(S:0-1)", "L4"},
                                           {"gpu:tesla:4", "P100"}};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        char text[200], wanted[64];
        snprintf(text, sizeof text, HEAD "n1 idle %s ib,p100\n", words[i][0]);
        snprintf(wanted, sizeof wanted, "1x4 %s", words[i][1]);
        takes(text, wanted);
    }
    takes(HEAD "n1 idle gpu:a100:4 xeon,80gb\nn2 idle gpu:a100:4 xeon,40gb\n", "1x4 A100-80GB,1x4 A100-40GB");
    takes(HEAD "n1 idle gpu:4 xeon,v100,v100_32gb\n", "1x4 V100-32GB");
    takes(HEAD "n1 idle gpu:v100:8,gpu:a100_80gb:2 x\nn2 mixed gpu:v100:8 x\nn2 mixed gpu:v100:8 x\n",
          "2x8 V100-16GB,1x2 A100-80GB");
    takes("gres nodelist partition\r\ngpu:t4:2 n1 p*\r\n\r\n", "1x2 T4");
}

static void leaves_out(void)
{
    static const char *const away[] = {"down", "down*", "drained", "drng",   "draining",
                                       "fail", "maint", "idle*",   "unknown"};
    struct hapt_inventory inventory;
    for (size_t i = 0; i < sizeof away / sizeof *away; i++) {
        char text[200];
        snprintf(text, sizeof text, HEAD "n1 %s gpu:v100:4 x\nn2 idle~ gpu:v100:4 x\n", away[i]);
        takes(text, "1x4 V100-16GB");
    }
    takes(HEAD "n1 idle gpu:a100_1g.5gb:7 x\nn2 idle gpu:a100_80gb:2,gpu:a100_3g.40gb:4 x\nn3 idle (null) x\n",
          "1x2 A100-80GB");
    CHECK(read_text(SINFO,
                    HEAD "n1 down gpu:v100:4 x\nn2 idle gpu:a100:4 x\nn3 idle gpu:1g.5gb:7 x\nn4 idle (null) x\n",
                    &inventory) == HAPT_OK);
    CHECK(inventory.note_count == 4 && strstr(inventory.note[0], "may have more memory") &&
          strstr(inventory.note[1], "1 node that is down or drained: n1") && strstr(inventory.note[2], "MIG slices") &&
          strstr(inventory.note[3], "1 node without a GPU"));
}

/* Notes and errors about many nodes stay short, and a large site is read in time. */
static void reads_large_sites(void)
{
    enum { NODES = 40000 };
    struct hapt_inventory inventory;
    char *text = malloc(64 * NODES), *at = text;
    HAPT_ASSERT(text);
    at += sprintf(at, HEAD);
    for (int n = 0; n < NODES; n++) at += sprintf(at, "node%05d %s gpu:h100:8(S:0-1) x\n", n, n % 2 ? "idle" : "down");
    CHECK(read_text(SINFO, text, &inventory) == HAPT_OK);
    CHECK(inventory.count == 1 && inventory.kind[0].nodes == NODES / 2 && inventory.kind[0].devices_per_node == 8);
    CHECK(inventory.note_count == 1 && strstr(inventory.note[0], "left out: 20000 nodes") &&
          strstr(inventory.note[0], "..."));
    free(text);
}

static void refused(int tool, const char *text, const char *message, const char *hint)
{
    struct hapt_inventory inventory;
    CHECK_MESSAGE(read_text(tool, text, &inventory) == HAPT_ERR_INPUT, "%s is accepted", text);
    CHECK_MESSAGE(strstr(hapt_fail_message(), message) != NULL, "\"%s\" lacks \"%s\"", hapt_fail_message(), message);
    CHECK_MESSAGE(strstr(hapt_fail_hint(), hint) != NULL, "\"%s\" lacks \"%s\"", hapt_fail_hint(), hint);
}

static void refuses(void)
{
    static const char *const counts[] = {"", "x", "-1", "4x", "1025", "99999999999999999999", "4:", "0x4"};
    struct hapt_inventory inventory;
    char text[4096] = HEAD;
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        snprintf(text, sizeof text, HEAD "n1 idle gpu:a100:%s x\n", counts[i]);
        refused(SINFO, text, "line 2: \"gpu:a100:", "sinfo --Node");
    }
    refused(SINFO, HEAD "n1 idle gpu x\n", "is not gpu:TYPE:COUNT", "sinfo --Node");
    refused(SINFO, HEAD "n1 idle gpu:a100:4 x\n\nn2 idle gpu:rtx_a600:4 x\n",
            "line 4: the device database has no GPU "
            "\"rtx_a600\"",
            "did you mean RTX-A6000?");
    refused(SINFO, HEAD "n1 idle gpu:k80:2 x\n", "has no GPU \"k80\"", "did you mean ");
    refused(SINFO, HEAD "n1 idle gpu:h100_pcie:2 x\n", "has no GPU \"h100_pcie\"", "did you mean H100?");
    refused(SINFO, HEAD "n1 idle gpu:4 (null)\n", "line 2: the GPUs have no type", "--nvidia-smi");
    refused(SINFO, HEAD "n1 idle\n", "line 2: 2 columns, the header has 4", "sinfo --Node");
    refused(SINFO, HEAD "n[1-4] idle gpu:a100:4 x\n", "stands for several nodes", "sinfo --Node");
    refused(SINFO, HEAD "n1 down gpu:a100:4 x\n", "lists no node that a job can use", "sinfo --Node");
    refused(SINFO, HEAD "n1 idle gpu:1g.5gb:7 x\n", "lists no node that a job can use", "sinfo --Node");
    refused(SINFO, HEAD "n1 idle (null) x\n", "no node has a GPU", "sinfo --Node");
    refused(SINFO, HEAD, "lists no node", "sinfo --Node");
    refused(SINFO, "n1 gpu:a100:4\n", "line 1: the header has no column HOSTNAMES", "sinfo --Node");
    refused(SINFO, "HOSTNAMES STATE\nn1 idle\n", "line 1: the header has no column GRES", "sinfo --Node");
    refused(SINFO, "", "is empty", "sinfo --Node");
    refused(SINFO, HEAD "n1 idle gpu:\033[31m\377:4 x\n", "has no GPU \"?[31m?\"", "did you mean");
    CHECK(read_bytes(SINFO, HEAD "n1\0 idle", sizeof HEAD + 8, &inventory) == HAPT_ERR_INPUT &&
          strstr(hapt_fail_message(), "is not a text file"));
    strcpy(text, HEAD);
    for (int k = 1; k <= 17; k++) sprintf(text + strlen(text), "n%d idle gpu:h100:%d x\n", k, k);
    refused(SINFO, text, "more than 16 kinds of nodes", "keep the lines");
}

static void reads_nvidia_smi(void)
{
    struct hapt_inventory inventory;
    CHECK(read_text(NVIDIA,
                    "name, memory.total [MiB]\nTesla V100-SXM2-32GB, 32768 MiB\n\nNVIDIA GeForce RTX 4090, 24564\n"
                    "Tesla V100-SXM2-32GB, 32768 MiB\r\n",
                    &inventory) == HAPT_OK);
    CHECK(inventory.count == 2 && !strcmp(inventory.kind[0].device.name, "V100-32GB") &&
          inventory.kind[0].devices_per_node == 2 && !strcmp(inventory.kind[1].device.name, "RTX-4090") &&
          inventory.kind[1].devices_per_node == 1 && inventory.kind[1].nodes == 1);
    refused(NVIDIA, "NVIDIA A100-SXM4-40GB, 40960 MiB\nNVIDIA GeForce RTX 3070, 8192 MiB\n",
            "line 2: the device database has no \"NVIDIA GeForce RTX 3070\" with 8192 MiB", "did you mean RTX-30");
    refused(NVIDIA, "NVIDIA A100-SXM4-40GB, 20480 MiB\n", "with 20480 MiB", "did you mean A100-40GB?");
    static const char *const wrong[] = {"NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB, [N/A]",
                                        "No devices were found", "A100, -5 MiB",
                                        "A100, 40960 potatoes",  "A100, inf",
                                        "A100, nan MiB"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        refused(NVIDIA, wrong[i], "is not a GPU's name and its memory in MiB", "nvidia-smi --query-gpu");
    refused(NVIDIA, "\n\n", "lists no GPU", "nvidia-smi --query-gpu");
    char *many = malloc(1025 * 16 + 1);
    HAPT_ASSERT(many);
    for (int g = 0; g < 1025; g++) strcpy(many + 15 * g, "L4, 23034  MiB\n");
    refused(NVIDIA, many, "more than 1024 GPUs", "nvidia-smi --query-gpu");
    free(many);
}

/* Each byte of a valid file damaged in turn: an error or a valid inventory, and no crash. */
static void survives_damage(void)
{
    static const char text[] = HEAD "gpu01 idle gpu:a100:4(S:0-1),nvme:1 ib,80gb\ngpu02 drained gpu:v100:8 x\n";
    static const char bytes[] = {0, '\n', ' ', ':', '(', ',', '9', -1, '|', '\t'};
    struct hapt_inventory inventory;
    int accepted = 0, refusals = 0;
    for (size_t at = 0; at < sizeof text - 1; at++)
        for (size_t b = 0; b < sizeof bytes; b++) {
            char damaged[sizeof text];
            memcpy(damaged, text, sizeof text);
            damaged[at] = bytes[b];
            const enum hapt_status status = read_bytes(SINFO, damaged, sizeof text - 1, &inventory);
            CHECK(status == HAPT_OK ? inventory.count > 0 : status == HAPT_ERR_INPUT && *hapt_fail_hint());
            if (status == HAPT_OK)
                accepted++;
            else
                refusals++;
        }
    CHECK_MESSAGE(accepted > 100 && refusals > 100, "%d accepted, %d refused", accepted, refusals);
}

static void makes_clusters(void)
{
    struct hapt_inventory inventory;
    struct hapt_cluster *cluster;
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    CHECK(read_text(SINFO, "HOSTNAMES MEMORY GRES\na 515000 gpu:l4:4\nb 515000+ gpu:l4:2\nc 510000 gpu:l4:4\n",
                    &inventory) == HAPT_OK);
    CHECK(hapt_inventory_cluster(&inventory, &arena, &cluster) == HAPT_OK);
    CHECK(cluster->count == 2 && cluster->rank_count == 10 && !cluster->subcluster_of_rank);
    CHECK(!strcmp(cluster->subcluster[0].name, "l4") && !strcmp(cluster->subcluster[1].name, "l4-2"));
    CHECK(cluster->subcluster[0].host_memory_bytes == 510000 * 0x1p20 &&
          cluster->subcluster[0].inter_node_bandwidth == 0);
    CHECK(hapt_cluster_link(cluster, 0, 1)->bandwidth == 0 && hapt_cluster_link(cluster, 0, 1)->latency < 0);
    hapt_arena_release(&arena);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(reads_types);
    RUN(leaves_out);
    RUN(reads_large_sites);
    RUN(refuses);
    RUN(reads_nvidia_smi);
    RUN(survives_damage);
    RUN(makes_clusters);
    return test_finish();
}
