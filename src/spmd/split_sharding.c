/*
 * Shardings for split backward passes. Input: a sharding. Output: the same with copies of those gradients of
 * activations that operators add to while others, which wait, still have to read them.
 */
#include "expansion.h"
#include "rewrite.h"

struct splitting {
    const struct hapt_sharding *from;
    struct rewrite rewrite;
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

/* Appends a copy of a tensor for the readers of a forward operator. */
static enum hapt_status append_copy(struct splitting *splitting, int o, int tensor)
{
    struct rewrite *rewrite = &splitting->rewrite;
    const struct hapt_graph *graph = rewrite->graph;
    const struct hapt_op *reader = &splitting->from->graph->op[o];
    const char *name = hapt_arena_printf(rewrite->arena, "%s.for.%s", graph->tensor[tensor].name, reader->name);
    int index;
    HAPT_TRY(rewrite_add_tensor(rewrite, tensor, name, &index));
    struct hapt_op op = {.type = hapt_op_type_find("copy"),
                         .name = name,
                         .input_count = 1,
                         .output_count = 1,
                         .forward_op = reader->forward_op};
    op.input[0] = tensor;
    op.output[0] = index;
    const int at = rewrite_add(rewrite, o, &op);
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++) {
        rewrite->made->cut[at][axis] = expansion_cut_through(graph, &op, rewrite->made->property[index][axis]);
        rewrite->made->first_rank_inputs[at][axis] = 0;
    }
    rewrite->made->exchange[at] = -1;
    splitting->copy[tensor] =
        (struct copy){index, splitting->writes[splitting->from->storage[tensor]], reader->forward_op};
    return HAPT_OK;
}

/* Appends an operator. Before it, those copies of its inputs that its forward operator does not have yet. */
static enum hapt_status append(struct splitting *splitting, int o)
{
    const struct hapt_sharding *from = splitting->from;
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
    rewrite_copy(&splitting->rewrite, o, &op);
    for (int k = 0; k < op.output_count; k++)
        if (op.output[k] >= 0) splitting->writes[from->storage[op.output[k]]]++;
    return HAPT_OK;
}

static enum hapt_status split(struct splitting *splitting, struct hapt_arena *arena, struct hapt_arena *scratch)
{
    const struct hapt_sharding *from = splitting->from;
    const int tensors = from->graph->tensor_count;
    HAPT_NEW(splitting->last_write, scratch, tensors);
    HAPT_NEW(splitting->writes, scratch, tensors);
    HAPT_NEW(splitting->copy, scratch, tensors);
    count_copies(splitting);
    HAPT_TRY(rewrite_begin(&splitting->rewrite, from, splitting->copies, splitting->copies, arena));
    splitting->rewrite.made->split = true;
    for (int o = 0; o < from->graph->op_count; o++) HAPT_TRY(append(splitting, o));
    return rewrite_end(&splitting->rewrite);
}

enum hapt_status hapt_sharding_split(const struct hapt_sharding *sharding, struct hapt_arena *arena,
                                     struct hapt_sharding **result)
{
    struct splitting splitting = {.from = sharding};
    struct hapt_arena scratch;
    HAPT_ASSERT(!sharding->split);
    hapt_arena_init(&scratch);
    const enum hapt_status status = split(&splitting, arena, &scratch);
    hapt_arena_release(&scratch);
    if (status == HAPT_OK) *result = splitting.rewrite.made;
    return status;
}
