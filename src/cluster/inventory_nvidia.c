/* Reads the output of `nvidia-smi --query-gpu=name,memory.total --format=csv,noheader`: the GPUs of one node. */
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "database.h"
#include "inventory_private.h"

static const char command[] = "print the file with: nvidia-smi --query-gpu=name,memory.total --format=csv,noheader";

/* "40960 MiB", "40960": bytes; 0 for anything else. */
static double memory_of(const char *text)
{
    char *end;
    const double number = strtod(text, &end);
    while (isspace((unsigned char)*end)) end++;
    const double bytes = number * (strcasecmp(end, "GiB") == 0 ? 0x1p30 : 0x1p20);
    if (end == text || (*end && strcasecmp(end, "MiB") != 0 && strcasecmp(end, "GiB") != 0)) return 0;
    return bytes >= 0x1p20 && bytes < 1e15 ? bytes : 0;
}

static enum hapt_status read_line(const char *path, int number, char *line, const struct hapt_device_spec **spec,
                                  double *memory_bytes)
{
    char hint[160], *comma = strrchr(line, ',');
    const double memory = *memory_bytes = comma ? memory_of(comma + 1) : 0;
    if (memory == 0)
        return hapt_fail(HAPT_ERR_INPUT, command, "%s: line %d: \"%.60s\" is not a GPU's name and its memory in MiB",
                         path, number, line);
    *comma = '\0';
    *spec = hapt_device_spec_of_name(line, memory);
    if (*spec) return HAPT_OK;
    snprintf(hint, sizeof hint, "did you mean %s? Write \"NAME, MEMORY MiB\", or describe it in the cluster file later",
             hapt_device_nearest(line));
    return hapt_fail(HAPT_ERR_INPUT, hint, "%s: line %d: the device database has no \"%.60s\" with %.0f MiB of memory",
                     path, number, line, memory / 0x1p20);
}

enum hapt_status hapt_inventory_read_nvidia_smi(const char *path, int nodes, struct hapt_arena *arena,
                                                struct hapt_inventory *inventory)
{
    enum { MAX_GPUS = 1024 };
    const struct hapt_device_spec *spec[MAX_GPUS];
    double memory_bytes[MAX_GPUS];
    int count = 0, number = 0;
    char *text, *line;
    HAPT_TRY(hapt_inventory_read_text(path, arena, &text));
    while ((line = hapt_inventory_next_line(&text))) {
        number++;
        if (!*line || strncasecmp(line, "name,", 5) == 0) continue; /* csv without noheader */
        if (count == MAX_GPUS)
            return hapt_fail(HAPT_ERR_INPUT, command, "%s lists more than %d GPUs of one node", path, MAX_GPUS);
        HAPT_TRY(read_line(path, number, line, &spec[count], &memory_bytes[count]));
        count++;
    }
    if (count == 0) return hapt_fail(HAPT_ERR_INPUT, command, "%s lists no GPU", path);
    for (int g = 0; g < count; g++) {
        double least = memory_bytes[g];
        int same = 0;
        bool first = true;
        for (int i = 0; i < count; i++) {
            if (spec[i] != spec[g]) continue;
            first = first && i >= g;
            least = fmin(least, memory_bytes[i]);
            same++;
        }
        if (!first) continue;
        const struct hapt_device_spec gpu = hapt_inventory_gpu(inventory, spec[g], least);
        HAPT_TRY(hapt_inventory_add(inventory, &gpu, same, nodes, 0));
    }
    return HAPT_OK;
}
