/* Units of recomputation, and of weights on the host. */
#include <stdio.h>
#include <string.h>

#include "hapt/layers.h"

/* A module that is not repeated is of its own kind. */
static int kind_of(const struct hapt_layers *layers, int m)
{
    return layers->module[m].kind >= 0 ? layers->module[m].kind : -1 - m;
}

enum hapt_status hapt_layers_units(const struct hapt_layers *layers, struct hapt_arena *arena, struct hapt_unit **unit,
                                   int *count)
{
    bool repeated = false;
    HAPT_NEW(*unit, arena, layers->module_count);
    *count = 0;
    for (int m = 0; m < layers->module_count; m++) repeated = repeated || layers->module[m].kind >= 0;
    for (int m = 0; m < layers->module_count; m++) {
        const struct hapt_module *module = &layers->module[m];
        if (repeated && module->kind < 0) continue;
        (*unit)[(*count)++] = (struct hapt_unit){module->first_op, module->end_op, false, kind_of(layers, m)};
    }
    return HAPT_OK;
}

enum hapt_status hapt_layers_weight_units(const struct hapt_layers *layers, struct hapt_arena *arena,
                                          struct hapt_unit **unit, int *count)
{
    HAPT_NEW(*unit, arena, layers->module_count);
    *count = layers->module_count;
    for (int m = 0; m < layers->module_count; m++)
        (*unit)[m] =
            (struct hapt_unit){layers->module[m].first_op, layers->module[m].end_op, false, kind_of(layers, m)};
    return HAPT_OK;
}

int hapt_layers_recompute(const char *choice)
{
    int every, end = 0;
    if (!strcmp(choice, "no")) return 0;
    if (!strcmp(choice, "selective")) return HAPT_RECOMPUTE_SELECTIVE;
    if (!strcmp(choice, "all")) return HAPT_RECOMPUTE_PARTS;
    if (sscanf(choice, "every=%6d%n", &every, &end) != 1 || choice[end] || every < 1) return -1;
    return (HAPT_RECOMPUTE_PARTS + every - 1) / every;
}
