/* Layers as a table for people and as an HDF5 group of a run file. */
#include <stdio.h>
#include <string.h>

#include "hapt/config.h"
#include "hapt/layers.h"
#include "hapt/ops.h"

static int module_layers(const struct hapt_layers *layers, int module)
{
    int count = 0;
    for (int l = 0; l < layers->count; l++) count += layers->module_of[l] == module;
    return count;
}

/* Number of consecutive modules, from `first` on, that are equal layer by layer; the table shows them once. */
static int repetitions(const struct hapt_layers *layers, int first)
{
    int count = 1;
    while (layers->module[first].kind >= 0 && first + count < layers->module_count &&
           layers->module[first + count].kind == layers->module[first].kind &&
           module_layers(layers, first + count) == module_layers(layers, first))
        count++;
    return count;
}

/* Operator names of a layer, "layer_norm linear attention ...", truncated to the width of the table. */
static void layer_operators(const struct hapt_layers *layers, const struct hapt_graph *graph, int layer, char *text,
                            size_t size)
{
    size_t used = 0;
    text[0] = '\0';
    for (int op = hapt_layers_first_op(layers, layer); op < layers->end_op[layer] && used + 1 < size; op++) {
        const int written =
            snprintf(text + used, size - used, "%s%s", used > 0 ? " " : "", hapt_op_type_at(graph->op[op].type)->name);
        used += written > 0 ? (size_t)written : 0;
    }
    if (used >= size) memcpy(text + size - 4, "...", 4);
}

void hapt_layers_print(const struct hapt_env *env, const struct hapt_layers *layers, const struct hapt_graph *graph)
{
    double total = 0;
    for (int l = 0; l < layers->count; l++) total += layers->flops[l];
    hapt_print(env, "layers: %d in %d modules, %d operators\n", layers->count, layers->module_count,
               graph->forward_count);
    hapt_print(env, "  layer  times  share of FLOPs  boundary  operators\n");
    for (int l = 0; l < layers->count;) {
        const int module = layers->module_of[l], times = repetitions(layers, module);
        const int count = module_layers(layers, module);
        for (int i = l; i < l + count; i++) {
            char operators[64], boundary[32];
            layer_operators(layers, graph, i, operators, sizeof operators);
            hapt_print(env, "  %5d  %5d  %12.2f %%  %8s  %s\n", i, times,
                       total > 0 ? 100 * layers->flops[i] / total : 0.0,
                       hapt_units_bytes(layers->boundary_bytes[i], boundary), operators);
        }
        l += count * times;
    }
}

enum hapt_status hapt_layers_write(struct hapt_h5 *file, const char *group, const struct hapt_layers *layers)
{
    char name[256];
    struct hapt_arena arena;
    const int64_t count = layers->count, modules[] = {layers->module_count, 3};
    enum hapt_status status = HAPT_OK;
    hapt_arena_init(&arena);
    int32_t *table = hapt_arena_alloc(&arena, (size_t)modules[0] * 3, sizeof *table);
    if (!table) status = HAPT_ERR_MEMORY;
    for (int m = 0; table && m < layers->module_count; m++) {
        table[3 * m] = layers->module[m].first_op;
        table[3 * m + 1] = layers->module[m].end_op;
        table[3 * m + 2] = layers->module[m].kind;
    }
#define WRITE(dataset, type, dims, shape, data, units)                      \
    if (status == HAPT_OK) {                                                \
        snprintf(name, sizeof name, "%s/%s", group, dataset);               \
        status = hapt_h5_write(file, name, type, dims, shape, data, units); \
    }
    WRITE("end_op", HAPT_H5_I32, 1, &count, layers->end_op, "operator")
    WRITE("module_of", HAPT_H5_I32, 1, &count, layers->module_of, "module")
    WRITE("flops", HAPT_H5_F64, 1, &count, layers->flops, "FLOP/microbatch")
    WRITE("boundary_bytes", HAPT_H5_F64, 1, &count, layers->boundary_bytes, "byte")
    WRITE("modules", HAPT_H5_I32, 2, modules, table, "first operator, end operator, kind")
#undef WRITE
    hapt_arena_release(&arena);
    return status;
}
