/* Units of recomputation, and of weights on the host. */
#include <stdio.h>
#include <string.h>

#include "hapt/layers.h"

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
        (*unit)[(*count)++] = (struct hapt_unit){module->first_op, module->end_op, false};
    }
    return HAPT_OK;
}

enum hapt_status hapt_layers_weight_units(const struct hapt_layers *layers, struct hapt_arena *arena,
                                          struct hapt_unit **unit, int *count)
{
    HAPT_NEW(*unit, arena, layers->module_count);
    *count = layers->module_count;
    for (int m = 0; m < layers->module_count; m++)
        (*unit)[m] = (struct hapt_unit){layers->module[m].first_op, layers->module[m].end_op, false};
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

int hapt_layers_units_of(const struct hapt_unit *unit, int count, int first_op, int end_op, int recompute, int *first,
                         int *full)
{
    const int parts = recompute % HAPT_RECOMPUTE_SELECTIVE;
    int end;
    *first = 0;
    while (*first < count && unit[*first].first_op < first_op) ++*first;
    for (end = *first; end < count && unit[end].end_op <= end_op; end++) {
    }
    *full = ((end - *first) * parts + HAPT_RECOMPUTE_PARTS - 1) / HAPT_RECOMPUTE_PARTS;
    return recompute >= HAPT_RECOMPUTE_SELECTIVE ? end - *first : *full;
}
