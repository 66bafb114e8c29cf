/* One rank's view of a sharding: local shapes, local size attributes, first values of indexed dimensions. */
#include "localise.h"

#include <string.h>

static void localise_tensor(const struct hapt_sharding *sharding, int index, struct hapt_tensor *tensor)
{
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++) {
        const struct hapt_property property = sharding->property[index][axis];
        int64_t first, count, *extent = &tensor->shape[property.dim];
        if (property.kind != HAPT_PROPERTY_SHARDED) continue;
        HAPT_ASSERT(hapt_property_share(property, &sharding->axis[axis], *extent, sharding->mesh_coordinate[axis],
                                        &first, &count));
        *extent = (property.blocks > 1 ? property.blocks : 1) * count;
    }
}

/* The local size of a letter from one dimension of an operand: that dimension, or its share of a width; 0: unknown. */
static int64_t size_in(const struct hapt_signature_operand *operand, int dim, char letter, int64_t attribute,
                       const struct hapt_tensor *whole, const struct hapt_tensor *local)
{
    if (operand->letter[dim] == letter) return local->shape[dim];
    return operand->sharded_with[dim] == letter ? attribute * local->shape[dim] / whole->shape[dim] : 0;
}

/* Sets the attributes that are sizes of a letter. */
static void localise_op(const struct hapt_graph *graph, const struct hapt_graph *shard, struct hapt_op *op)
{
    const struct hapt_signature *signature = hapt_op_signature_of(graph, op);
    const char *sized = hapt_op_type_at(op->type)->sized_letters;
    for (int k = 0; sized && sized[k]; k++) {
        const int64_t attribute = op->integer[k];
        bool found = false; /* prefer a dimension that is the letter alone */
        for (int j = 0; j < op->input_count + op->output_count; j++) {
            const bool input = j < op->input_count;
            const int tensor = input ? op->input[j] : op->output[j - op->input_count];
            const struct hapt_signature_operand *operand =
                input ? &signature->input[j] : &signature->output[j - op->input_count];
            for (int d = 0; tensor >= 0 && d < operand->dims && !found; d++) {
                const int64_t size =
                    size_in(operand, d, sized[k], attribute, &graph->tensor[tensor], &shard->tensor[tensor]);
                if (size > 0) op->integer[k] = size;
                found = operand->letter[d] == sized[k];
            }
        }
    }
}

/* First value of an operator's shard of an index that is indexed by values. */
static int64_t first_value(const struct hapt_sharding *sharding, const struct hapt_op *op)
{
    const struct hapt_signature *signature = hapt_op_signature_of(sharding->graph, op);
    for (int j = 0; j < op->input_count + op->output_count; j++) {
        const bool input = j < op->input_count;
        const int tensor = input ? op->input[j] : op->output[j - op->input_count];
        const struct hapt_signature_operand *operand =
            input ? &signature->input[j] : &signature->output[j - op->input_count];
        for (int d = 0; tensor >= 0 && d < operand->dims; d++) {
            if (!operand->indexed[d]) continue;
            struct hapt_box box;
            hapt_sharding_box(sharding, tensor, sharding->mesh_coordinate, &box);
            return box.run[d][0].start;
        }
    }
    return 0;
}

enum hapt_status localise(struct hapt_sharding *sharding, struct hapt_arena *arena)
{
    const struct hapt_graph *graph = sharding->graph;
    struct hapt_graph *shard;
    HAPT_NEW(sharding->first_value, arena, graph->op_count);
    sharding->shard = graph;
    if (sharding->axis[0].size * sharding->axis[1].size == 1) return HAPT_OK;
    HAPT_NEW(shard, arena, 1);
    *shard = *graph;
    HAPT_NEW(shard->tensor, arena, graph->tensor_count);
    HAPT_NEW(shard->op, arena, graph->op_count);
    memcpy(shard->tensor, graph->tensor, (size_t)graph->tensor_count * sizeof *graph->tensor);
    memcpy(shard->op, graph->op, (size_t)graph->op_count * sizeof *graph->op);
    shard->tensor_capacity = graph->tensor_count;
    shard->op_capacity = graph->op_count;
    for (int t = 0; t < graph->tensor_count; t++) localise_tensor(sharding, t, &shard->tensor[t]);
    for (int o = 0; o < graph->op_count; o++) {
        localise_op(graph, shard, &shard->op[o]);
        sharding->first_value[o] = first_value(sharding, &graph->op[o]);
    }
    sharding->shard = shard;
    return HAPT_OK;
}
