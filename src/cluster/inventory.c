/* The inventory of a cluster: its kinds of devices, and the cluster that they make. */
#include "hapt/inventory.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/config.h"
#include "hapt/text.h"
#include "inventory_private.h"
#include "subclusters.h"

enum {
    MAX_TEXT_BYTES = 16 << 20, /* sinfo's lines of 65536 nodes in one partition */
    MAX_NODES = 65536,
    MAX_DEVICES = 1 << 20,
};

static enum hapt_status read_stream(FILE *stream, const char *path, char *buffer, size_t *size)
{
    *size = fread(buffer, 1, MAX_TEXT_BYTES + 1, stream);
    if (ferror(stream))
        return hapt_fail(HAPT_ERR_INPUT, "give a text file, or - for standard input", "cannot read %s: %s", path,
                         strerror(errno));
    if (*size > MAX_TEXT_BYTES)
        return hapt_fail(HAPT_ERR_INPUT, "give the output of one command", "%s is larger than 16 MiB", path);
    if (memchr(buffer, 0, *size))
        return hapt_fail(HAPT_ERR_INPUT, "give the printed output of the command", "%s is not a text file", path);
    return HAPT_OK;
}

enum hapt_status hapt_inventory_read_text(const char *path, struct hapt_arena *arena, char **text)
{
    const bool standard = strcmp(path, "-") == 0;
    FILE *stream = standard ? stdin : fopen(path, "rb");
    if (!stream) return hapt_fail(HAPT_ERR_INPUT, "check the path", "cannot read %s: %s", path, strerror(errno));
    char *buffer = malloc(MAX_TEXT_BYTES + 1); /* a pipe's size is unknown until its end */
    size_t size = 0;
    enum hapt_status status = buffer ? read_stream(stream, standard ? "standard input" : path, buffer, &size)
                                     : hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory to read %s", path);
    if (!standard) fclose(stream);
    if (status == HAPT_OK && !(*text = hapt_arena_alloc(arena, size + 1, 1))) status = HAPT_ERR_MEMORY;
    if (status == HAPT_OK) memcpy(*text, buffer, size);
    free(buffer);
    HAPT_TRY(status);
    for (char *c = *text; *c; c++)
        if (*c == '\r') *c = ' ';
    hapt_text_make_printable(*text, true);
    return HAPT_OK;
}

char *hapt_inventory_next_line(char **text)
{
    char *line = *text;
    if (!*line) return NULL;
    char *end = strchr(line, '\n');
    *text = end ? end + 1 : line + strlen(line);
    if (!end) end = *text;
    while (end > line && isspace((unsigned char)end[-1])) end--;
    *end = '\0';
    while (isspace((unsigned char)*line)) line++;
    return line;
}

void hapt_inventory_note(struct hapt_inventory *inventory, const char *format, ...)
{
    char text[sizeof inventory->note[0]];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    for (int i = 0; i < inventory->note_count; i++)
        if (strcmp(inventory->note[i], text) == 0) return;
    if (inventory->note_count == HAPT_INVENTORY_NOTES) return;
    memcpy(inventory->note[inventory->note_count++], text, sizeof text);
}

enum hapt_status hapt_inventory_add(struct hapt_inventory *inventory, const struct hapt_device_spec *device,
                                    int devices, int nodes, double host_memory_bytes)
{
    struct hapt_inventory_kind *kind = inventory->kind;
    long total = (long)devices * nodes;
    for (int i = 0; i < inventory->count; i++) total += (long)kind[i].devices_per_node * kind[i].nodes;
    if (total > MAX_DEVICES)
        return hapt_fail(HAPT_ERR_INPUT, "check the counts", "the cluster has more than %d devices", MAX_DEVICES);
    int k = 0;
    while (k < inventory->count &&
           (strcmp(kind[k].device.name, device->name) != 0 || kind[k].devices_per_node != devices ||
            kind[k].device.peak_flops[HAPT_F32] != device->peak_flops[HAPT_F32]))
        k++;
    if (k == HAPT_MAX_SUBCLUSTERS)
        return hapt_fail(HAPT_ERR_INPUT, "keep the lines of the nodes that a job will use",
                         "there are more than %d kinds of nodes", HAPT_MAX_SUBCLUSTERS);
    kind += k;
    if (k == inventory->count) {
        inventory->count++;
        *kind = (struct hapt_inventory_kind){
            .device = *device, .devices_per_node = devices, .host_memory_bytes = host_memory_bytes};
    }
    if (kind->nodes > MAX_NODES - nodes)
        return hapt_fail(HAPT_ERR_INPUT, "check the counts", "there are more than %d nodes", MAX_NODES);
    kind->nodes += nodes;
    if (host_memory_bytes < kind->host_memory_bytes) kind->host_memory_bytes = host_memory_bytes;
    if (device->memory_bytes < kind->device.memory_bytes) kind->device = *device;
    return HAPT_OK;
}

struct hapt_device_spec hapt_inventory_gpu(struct hapt_inventory *inventory, const struct hapt_device_spec *device,
                                           double memory_bytes)
{
    struct hapt_device_spec gpu = *device;
    char left[32], all[32];
    const double usable_bytes = hapt_host_gpu_usable_bytes(memory_bytes);
    if (memory_bytes == 0 || usable_bytes >= device->memory_bytes) return gpu;
    gpu.memory_bytes = usable_bytes;
    gpu.memory_capped = true;
    hapt_inventory_note(inventory, "memory of %s: %s of %s, because CUDA's context and libraries take some",
                        device->name, hapt_units_bytes(gpu.memory_bytes, left), hapt_units_bytes(memory_bytes, all));
    return gpu;
}

enum hapt_status hapt_inventory_add_hosts(const struct hapt_hosts *hosts, struct hapt_inventory *inventory)
{
    for (int h = 0; h < hosts->count; h++) {
        const struct hapt_host *host = &hosts->host[h];
        for (int g = 0; g < host->gpu_count; g++) {
            const char *name = host->gpu[g].spec;
            double memory_bytes = host->gpu[g].memory_bytes;
            int same = 0;
            bool first = true;
            for (int i = 0; i < host->gpu_count; i++) {
                if (strcmp(host->gpu[i].spec, name) != 0) continue;
                first = first && i >= g;
                const double its = host->gpu[i].memory_bytes; /* 0: unknown */
                if (its > 0) memory_bytes = memory_bytes > 0 ? fmin(memory_bytes, its) : its;
                same++;
            }
            if (!name[0])
                hapt_inventory_note(inventory, "left out: GPU %s of host %s, which the device database does not have",
                                    host->gpu[g].name, host->name);
            if (!name[0] || !first) continue;
            const struct hapt_device_spec gpu =
                hapt_inventory_gpu(inventory, hapt_device_spec_find(name), memory_bytes);
            HAPT_TRY(hapt_inventory_add(inventory, &gpu, same, 1, host->memory_bytes));
        }
    }
    if (inventory->count > 0) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, "describe it in a cluster file by hand: hapt help topology",
                     "no GPU of these hosts is in the device database");
}

/* "a100-40gb", or "a100-40gb-2" if an earlier subcluster has the same device. */
static void name_subcluster(struct hapt_cluster *cluster, int index)
{
    struct hapt_subcluster *own = &cluster->subcluster[index];
    int same = 1;
    for (int i = 0; i < index; i++) same += strcmp(cluster->subcluster[i].device.name, own->device.name) == 0;
    snprintf(own->name, sizeof own->name, "%.40s", own->device.name);
    for (char *c = own->name; *c; c++) *c = (char)tolower((unsigned char)*c);
    if (same > 1) snprintf(own->name + strlen(own->name), 16, "-%d", same);
}

enum hapt_status hapt_inventory_cluster(const struct hapt_inventory *inventory, struct hapt_arena *arena,
                                        struct hapt_cluster **result)
{
    struct hapt_cluster *cluster;
    const int count = inventory->count;
    HAPT_ASSERT(count > 0);
    HAPT_NEW(cluster, arena, 1);
    HAPT_NEW(cluster->subcluster, arena, count);
    HAPT_NEW(cluster->link, arena, count * count);
    cluster->count = count;
    cluster->from_file = true;
    for (int i = 0; i < count * count; i++) cluster->link[i] = (struct hapt_link){.latency = -1};
    for (int i = 0; i < count; i++) {
        struct hapt_subcluster *own = &cluster->subcluster[i];
        *own = (struct hapt_subcluster){.nodes = inventory->kind[i].nodes,
                                        .devices_per_node = inventory->kind[i].devices_per_node,
                                        .device = inventory->kind[i].device,
                                        .host_memory_bytes = inventory->kind[i].host_memory_bytes,
                                        .intra_node_latency = -1,
                                        .inter_node_latency = -1};
        name_subcluster(cluster, i);
        cluster->rank_count += own->nodes * own->devices_per_node;
    }
    HAPT_TRY(hapt_cluster_check(cluster));
    *result = cluster;
    return HAPT_OK;
}
