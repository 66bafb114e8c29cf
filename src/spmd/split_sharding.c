/*
 * Shardings for split backward passes. Input: a sharding. Output: the same with copies of those gradients of
 * activations that operators add to while others, which wait, still have to read them.
 */
#include <string.h>

#include "expansion.h"
#include "localise.h"
#include "weight.h"

struct splitting {
    const struct hapt_sharding *from;
    struct hapt_sharding *made;
    struct hapt_graph *graph; /* made->graph */
    struct hapt_arena *arena;
    int *last_write; /* [from->graph->tensor_count] by storage, by operators that do not wait; -1: none */
    int *writes;     /* [from->graph->tensor_count] by storage: writers so far */
    struct copy {
        int tensor, writes; /* the copy; the writers before it */
        int forward_op;     /* of its readers: no boundary may separate them */
    } * copy;               /* [from->graph->tensor_count] the newest of each tensor; tensor 0: none */
    int copies;             /* at most; to reserve memory */
};

static bool changes_later(const struct splitting *splitting, int o, int input)
{
    const int tensor = splitting->from->graph->op[o].input[input];
    return tensor >= 0 && splitting->from->weight[o] && splitting->last_write[splitting->from->storage[tensor]] > o;
}

static void count_copies(struct splitting *splitting)
{
    const struct hapt_graph *graph = splitting->from->graph;
    for (int t = 0; t < graph->tensor_count; t++) splitting->last_write[t] = -1;
    for (int o = graph->forward_count; o < splitting->from->reduce_first; o++)
        for (int k = 0; k < graph->op[o].output_count && !splitting->from->weight[o]; k++)
            if (graph->op[o].output[k] >= 0)
                splitting->last_write[splitting->from->storage[graph->op[o].output[k]]] = o;
    for (int o = graph->forward_count; o < splitting->from->reduce_first; o++)
        for (int i = 0; i < graph->op[o].input_count; i++) splitting->copies += changes_later(splitting, o, i);
}

static enum hapt_status reserve(struct splitting *splitting)
{
    const struct hapt_sharding *from = splitting->from;
    struct hapt_sharding *made = splitting->made;
    struct hapt_graph *graph = splitting->graph;
    const int tensors = from->graph->tensor_count + splitting->copies, ops = from->graph->op_count + splitting->copies;
    graph->tensor_capacity = tensors;
    graph->op_capacity = ops;
    HAPT_NEW(graph->tensor, splitting->arena, tensors);
    HAPT_NEW(graph->op, splitting->arena, ops);
    HAPT_NEW(made->property, splitting->arena, tensors);
    HAPT_NEW(made->origin, splitting->arena, tensors);
    HAPT_NEW(made->storage, splitting->arena, tensors);
    HAPT_NEW(made->cut, splitting->arena, ops);
    HAPT_NEW(made->first_rank_inputs, splitting->arena, ops);
    HAPT_NEW(made->exchange, splitting->arena, ops);
    HAPT_NEW(made->source_op, splitting->arena, ops);
    const size_t kept = (size_t)from->graph->tensor_count;
    memcpy(graph->tensor, from->graph->tensor, kept * sizeof *graph->tensor);
    memcpy(made->property, from->property, kept * sizeof *made->property);
    memcpy(made->origin, from->origin, kept * sizeof *made->origin);
    memcpy(made->storage, from->storage, kept * sizeof *made->storage);
    graph->op_count = 0;
    return HAPT_OK;
}

/* Appends a copy of a tensor for the readers of a forward operator. */
static enum hapt_status append_copy(struct splitting *splitting, int o, int tensor)
{
    struct hapt_sharding *made = splitting->made;
    struct hapt_graph *graph = splitting->graph;
    const struct hapt_op *reader = &splitting->from->graph->op[o];
    const int index = graph->tensor_count++, at = graph->op_count++;
    graph->tensor[index] = graph->tensor[tensor];
    graph->tensor[index].name =
        hapt_arena_printf(splitting->arena, "%s.for.%s", graph->tensor[tensor].name, reader->name);
    if (!graph->tensor[index].name) return HAPT_ERR_MEMORY;
    graph->tensor[index].producer = at;
    made->property[index][0] = made->property[tensor][0];
    made->property[index][1] = made->property[tensor][1];
    made->origin[index] = made->origin[tensor];
    made->storage[index] = index;
    struct hapt_op *op = &graph->op[at];
    *op = (struct hapt_op){.type = hapt_op_type_find("copy"),
                           .name = graph->tensor[index].name,
                           .input_count = 1,
                           .output_count = 1,
                           .forward_op = reader->forward_op};
    op->input[0] = tensor;
    op->output[0] = index;
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++)
        made->cut[at][axis] = expansion_cut_through(graph, op, made->property[index][axis]);
    made->exchange[at] = -1;
    made->source_op[at] = splitting->from->source_op[o];
    splitting->copy[tensor] =
        (struct copy){index, splitting->writes[splitting->from->storage[tensor]], reader->forward_op};
    return HAPT_OK;
}

/* Appends an operator. Before it, those copies of its inputs that its forward operator does not have yet. */
static enum hapt_status append(struct splitting *splitting, int o)
{
    const struct hapt_sharding *from = splitting->from;
    struct hapt_sharding *made = splitting->made;
    struct hapt_graph *graph = splitting->graph;
    struct hapt_op op = from->graph->op[o];
    for (int i = 0; i < op.input_count; i++) {
        const int tensor = op.input[i];
        if (!changes_later(splitting, o, i)) continue;
        const struct copy *copy = &splitting->copy[tensor];
        if (copy->tensor == 0 || copy->forward_op != op.forward_op ||
            copy->writes != splitting->writes[from->storage[tensor]])
            HAPT_TRY(append_copy(splitting, o, tensor));
        op.input[i] = copy->tensor;
    }
    const int at = graph->op_count++;
    graph->op[at] = op;
    memcpy(made->cut[at], from->cut[o], sizeof *made->cut);
    memcpy(made->first_rank_inputs[at], from->first_rank_inputs[o], sizeof *made->first_rank_inputs);
    made->exchange[at] = from->exchange[o];
    made->source_op[at] = from->source_op[o];
    for (int k = 0; k < op.output_count; k++) {
        if (op.output[k] < 0) continue;
        if (from->graph->tensor[op.output[k]].producer == o) graph->tensor[op.output[k]].producer = at;
        splitting->writes[from->storage[op.output[k]]]++;
    }
    return HAPT_OK;
}

static enum hapt_status split(struct splitting *splitting)
{
    const struct hapt_sharding *from = splitting->from;
    HAPT_TRY(reserve(splitting));
    for (int o = 0; o < from->graph->op_count; o++) {
        if (o == from->reduce_first) splitting->made->reduce_first = splitting->graph->op_count;
        HAPT_TRY(append(splitting, o));
    }
    if (from->reduce_first == from->graph->op_count) splitting->made->reduce_first = splitting->graph->op_count;
    HAPT_TRY(find_weight_operators(splitting->made, splitting->arena));
    return localise(splitting->made, splitting->arena);
}

static enum hapt_status split_with(struct splitting *splitting, struct hapt_arena *scratch)
{
    const int tensors = splitting->from->graph->tensor_count;
    HAPT_NEW(splitting->last_write, scratch, tensors);
    HAPT_NEW(splitting->writes, scratch, tensors);
    HAPT_NEW(splitting->copy, scratch, tensors);
    count_copies(splitting);
    return split(splitting);
}

enum hapt_status hapt_sharding_split(const struct hapt_sharding *sharding, struct hapt_arena *arena,
                                     struct hapt_sharding **result)
{
    struct splitting splitting = {.from = sharding, .arena = arena};
    struct hapt_arena scratch;
    HAPT_ASSERT(!sharding->split);
    HAPT_NEW(splitting.made, arena, 1);
    HAPT_NEW(splitting.graph, arena, 1);
    *splitting.made = *sharding;
    *splitting.graph = *sharding->graph;
    splitting.made->graph = splitting.graph;
    splitting.made->split = true;
    hapt_arena_init(&scratch);
    const enum hapt_status status = split_with(&splitting, &scratch);
    hapt_arena_release(&scratch);
    if (status == HAPT_OK) *result = splitting.made;
    return status;
}
