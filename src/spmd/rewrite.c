#include "rewrite.h"

#include <string.h>

#include "localise.h"
#include "weight.h"

enum hapt_status rewrite_begin(struct rewrite *rewrite, const struct hapt_sharding *from, int tensors, int ops,
                               struct hapt_arena *arena)
{
    *rewrite = (struct rewrite){.from = from, .arena = arena};
    HAPT_NEW(rewrite->made, arena, 1);
    HAPT_NEW(rewrite->graph, arena, 1);
    struct hapt_sharding *made = rewrite->made;
    struct hapt_graph *graph = rewrite->graph;
    const size_t kept = (size_t)from->graph->tensor_count;
    *made = *from;
    *graph = *from->graph;
    made->graph = graph;
    graph->tensor_capacity = from->graph->tensor_count + tensors;
    graph->op_capacity = from->graph->op_count + ops;
    HAPT_NEW(graph->tensor, arena, graph->tensor_capacity);
    HAPT_NEW(graph->op, arena, graph->op_capacity);
    HAPT_NEW(made->property, arena, graph->tensor_capacity);
    HAPT_NEW(made->origin, arena, graph->tensor_capacity);
    HAPT_NEW(made->storage, arena, graph->tensor_capacity);
    HAPT_NEW(made->cut, arena, graph->op_capacity);
    HAPT_NEW(made->first_rank_inputs, arena, graph->op_capacity);
    HAPT_NEW(made->exchange, arena, graph->op_capacity);
    HAPT_NEW(made->source_op, arena, graph->op_capacity);
    memcpy(graph->tensor, from->graph->tensor, kept * sizeof *graph->tensor);
    memcpy(made->property, from->property, kept * sizeof *made->property);
    memcpy(made->origin, from->origin, kept * sizeof *made->origin);
    memcpy(made->storage, from->storage, kept * sizeof *made->storage);
    graph->op_count = 0;
    made->reduce_first = -1;
    if (!from->again) return HAPT_OK;
    HAPT_NEW(made->again, arena, graph->tensor_capacity);
    HAPT_NEW(made->repeats, arena, graph->op_capacity);
    HAPT_NEW(made->light, arena, graph->op_capacity);
    for (int t = 0; t < graph->tensor_capacity; t++)
        made->again[t] = t < from->graph->tensor_count ? from->again[t] : -1;
    for (int o = 0; o < graph->op_capacity; o++) made->repeats[o] = -1;
    return HAPT_OK;
}

enum hapt_status rewrite_add_tensor(struct rewrite *rewrite, int tensor, const char *name, int *index)
{
    struct hapt_graph *graph = rewrite->graph;
    struct hapt_sharding *made = rewrite->made;
    if (!name) return HAPT_ERR_MEMORY;
    HAPT_ASSERT(graph->tensor_count < graph->tensor_capacity);
    *index = graph->tensor_count++;
    graph->tensor[*index] = graph->tensor[tensor];
    graph->tensor[*index].name = name;
    graph->tensor[*index].producer = graph->op_count;
    made->property[*index][0] = made->property[tensor][0];
    made->property[*index][1] = made->property[tensor][1];
    made->origin[*index] = made->origin[tensor];
    made->storage[*index] = *index;
    return HAPT_OK;
}

int rewrite_add(struct rewrite *rewrite, int o, const struct hapt_op *op)
{
    const struct hapt_sharding *from = rewrite->from;
    struct hapt_sharding *made = rewrite->made;
    HAPT_ASSERT(rewrite->graph->op_count < rewrite->graph->op_capacity);
    const int at = rewrite->graph->op_count++;
    rewrite->graph->op[at] = *op;
    memcpy(made->cut[at], from->cut[o], sizeof *made->cut);
    memcpy(made->first_rank_inputs[at], from->first_rank_inputs[o], sizeof *made->first_rank_inputs);
    made->exchange[at] = from->exchange[o];
    made->source_op[at] = from->source_op[o];
    return at;
}

void rewrite_copy(struct rewrite *rewrite, int o, const struct hapt_op *op)
{
    if (o == rewrite->from->reduce_first) rewrite->made->reduce_first = rewrite->graph->op_count;
    const int at = rewrite_add(rewrite, o, op);
    if (rewrite->from->again) {
        rewrite->made->repeats[at] = rewrite->from->repeats[o];
        rewrite->made->light[at] = rewrite->from->light[o];
    }
    for (int k = 0; k < op->output_count; k++)
        if (op->output[k] >= 0 && rewrite->from->graph->tensor[op->output[k]].producer == o)
            rewrite->graph->tensor[op->output[k]].producer = at;
}

enum hapt_status rewrite_end(struct rewrite *rewrite)
{
    if (rewrite->made->reduce_first < 0) rewrite->made->reduce_first = rewrite->graph->op_count;
    HAPT_TRY(find_weight_operators(rewrite->made, rewrite->arena));
    return localise(rewrite->made, rewrite->arena);
}
