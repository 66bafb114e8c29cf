/* Writes the expanded graph: the operators and versions of an expansion in order and numbered, and what follows
 * from them. */
#include <stdlib.h>
#include <string.h>

#include "expansion.h"
#include "localise.h"
#include "weight.h"

struct node_order {
    int anchor, side, node;
};

struct expanding {
    struct expansion state;
    struct hapt_sharding *made;
    struct hapt_graph *graph; /* made->graph, writable */
    struct hapt_arena *arena;
    struct node_order *order; /* nodes in the order of the expanded graph */
    int order_count;
};

/* ---- operators in order ---- */

static int compare_order(const void *a, const void *b)
{
    const struct node_order *x = a, *y = b;
    if (x->anchor != y->anchor) return x->anchor < y->anchor ? -1 : 1;
    if (x->side != y->side) return x->side < y->side ? -1 : 1;
    return x->node < y->node ? -1 : x->node > y->node;
}

/* Leaves out communications without readers, except those that make final gradients. */
static enum hapt_status find_order(struct expanding *expanding)
{
    struct expansion *state = &expanding->state;
    for (int n = state->node_count - 1; n >= 0; n--) { /* readers before their inputs */
        struct node *node = &state->node[n];
        const int tensor = node->op == NONE ? state->version[node->output[0]].tensor : NONE;
        if (node->anchor == NONE && hapt_graph_is_parameter_gradient(state->graph, tensor) &&
            state->version[node->output[0]].valid)
            node->anchor = state->graph->op_count;
        const int maker = node->op == NONE && node->anchor != NONE ? state->version[node->input[0]].maker : NONE;
        if (maker != NONE && state->node[maker].anchor == NONE) state->node[maker].anchor = node->anchor;
    }
    HAPT_NEW(expanding->order, state->scratch, state->node_count);
    for (int n = 0; n < state->node_count; n++)
        if (state->node[n].anchor != NONE)
            expanding->order[expanding->order_count++] =
                (struct node_order){state->node[n].anchor, state->node[n].side, n};
    qsort(expanding->order, (size_t)expanding->order_count, sizeof *expanding->order, compare_order);
    return HAPT_OK;
}

static bool is_used(const struct expansion *state, int version)
{
    const int maker = state->version[version].maker;
    return maker == NONE || state->node[maker].anchor != NONE;
}

/* ---- tensors ---- */

/* The version that keeps the source's index. */
static int main_version(const struct expansion *state, int tensor)
{
    int first = NONE;
    if (expansion_is_trained_gradient(state->graph, tensor)) return expansion_final(state, tensor);
    if (state->layout[tensor] != NONE) return state->layout[tensor];
    for (int v = state->newest[tensor]; v != NONE; v = state->version[v].next)
        if (is_used(state, v)) first = v;
    return first;
}

static enum hapt_status describe_version(struct expanding *expanding, int version, int index)
{
    const struct expansion *state = &expanding->state;
    const struct version *its = &state->version[version];
    struct hapt_tensor *tensor = &expanding->graph->tensor[index];
    struct hapt_sharding *made = expanding->made;
    const int of = its->tensor;
    *tensor = state->graph->tensor[of];
    if (index >= state->graph->tensor_count) {
        tensor->name = hapt_arena_printf(expanding->arena, "%s'%d", tensor->name, index);
        if (!tensor->name) return HAPT_ERR_MEMORY;
        if (tensor->kind == HAPT_TENSOR_PARAMETER) tensor->kind = HAPT_TENSOR_ACTIVATION; /* a slice */
        tensor->gradient = -1;
    }
    made->property[index][0] = state->sharding->property[of][0];
    made->property[index][1] = state->sharding->property[of][1];
    made->property[index][state->axis_index] = its->property;
    made->origin[index] = state->sharding->origin[of];
    return HAPT_OK;
}

static enum hapt_status number_tensors(struct expanding *expanding)
{
    struct expansion *state = &expanding->state;
    struct hapt_sharding *made = expanding->made;
    const int kept = state->graph->tensor_count;
    int count = kept;
    for (int t = 0; t < kept; t++) {
        const int version = main_version(state, t);
        if (version != NONE) state->version[version].index = t;
    }
    for (int v = 0; v < state->version_count; v++)
        if (state->version[v].index == NONE && is_used(state, v)) state->version[v].index = count++;
    expanding->graph->tensor_count = expanding->graph->tensor_capacity = count;
    HAPT_NEW(expanding->graph->tensor, expanding->arena, count);
    HAPT_NEW(made->property, expanding->arena, count);
    HAPT_NEW(made->origin, expanding->arena, count);
    for (int t = 0; t < kept; t++) { /* tensors that no operator touches */
        expanding->graph->tensor[t] = state->graph->tensor[t];
        made->property[t][0] = state->sharding->property[t][0];
        made->property[t][1] = state->sharding->property[t][1];
        made->origin[t] = state->sharding->origin[t];
    }
    for (int v = 0; v < state->version_count; v++)
        if (state->version[v].index != NONE) HAPT_TRY(describe_version(expanding, v, state->version[v].index));
    /* The loss may have been summed. */
    for (int v = state->newest[state->graph->loss]; v != NONE; v = state->version[v].next)
        if (state->version[v].index != NONE && state->version[v].property.kind == HAPT_PROPERTY_REPLICATED)
            expanding->graph->loss = state->version[v].index;
    return HAPT_OK;
}

/* ---- operators ---- */

/* The operator of the source next to a node; for the sum of a parameter's gradient, the one that wrote it. */
static int source_op_of(const struct expansion *state, int node)
{
    const struct node *its = &state->node[node];
    while (its->op == NONE && its->anchor == state->graph->op_count)
        its = &state->node[state->version[its->input[0]].writer];
    return state->sharding->source_op[its->anchor];
}

static enum hapt_status name_movement(struct expanding *expanding, const struct node *node, struct hapt_op *op)
{
    const struct expansion *state = &expanding->state;
    op->name =
        hapt_arena_printf(expanding->arena, "%s.%s", state->graph->tensor[state->version[node->output[0]].tensor].name,
                          hapt_op_type_at(node->type)->name);
    return op->name ? HAPT_OK : HAPT_ERR_MEMORY;
}

static enum hapt_status write_op(struct expanding *expanding, int index)
{
    const struct expansion *state = &expanding->state;
    const struct node *node = &state->node[expanding->order[index].node];
    struct hapt_sharding *made = expanding->made;
    struct hapt_op *op = &expanding->graph->op[index];
    const int axis = state->axis_index;
    made->exchange[index] = node->exchange ? axis : -1;
    if (node->op != NONE) {
        *op = state->graph->op[node->op];
        made->cut[index][1 - axis] = state->sharding->cut[node->op][1 - axis];
        made->first_rank_inputs[index][1 - axis] = state->sharding->first_rank_inputs[node->op][1 - axis];
        if (state->sharding->exchange[node->op] >= 0) made->exchange[index] = state->sharding->exchange[node->op];
    } else {
        const bool in_reduce = hapt_graph_is_parameter_gradient(state->graph, state->version[node->output[0]].tensor);
        *op = (struct hapt_op){.type = node->type, .input_count = 1, .output_count = 1};
        op->forward_op = in_reduce ? node->forward_op : state->graph->op[node->anchor].forward_op;
        if (hapt_op_type_at(node->type)->collective)
            op->integer[0] = axis, op->integer[1] = node->from_dim, op->integer[2] = node->to_dim;
        HAPT_TRY(name_movement(expanding, node, op));
    }
    for (int i = 0; i < op->input_count; i++)
        op->input[i] = node->input[i] == NONE ? -1 : state->version[node->input[i]].index;
    for (int o = 0; o < op->output_count; o++)
        op->output[o] = node->output[o] == NONE ? -1 : state->version[node->output[o]].index;
    op->accumulate = node->accumulate;
    made->cut[index][axis] = node->cut;
    made->first_rank_inputs[index][axis] = node->first_rank_inputs;
    made->source_op[index] = source_op_of(state, expanding->order[index].node);
    return HAPT_OK;
}

struct hapt_cut expansion_cut_through(const struct hapt_graph *graph, const struct hapt_op *op,
                                      struct hapt_property property)
{
    if (property.kind == HAPT_PROPERTY_REPLICATED) return (struct hapt_cut){.letter = HAPT_CUT_REPLICATED};
    if (property.kind == HAPT_PROPERTY_PARTIAL) return (struct hapt_cut){.letter = HAPT_CUT_PARTIAL};
    return (struct hapt_cut){hapt_op_signature_of(graph, op)->input[0].letter[property.dim], property.blocks,
                             property.unit, property.ratio};
}

static enum hapt_status write_operators(struct expanding *expanding)
{
    const struct expansion *state = &expanding->state;
    struct hapt_sharding *made = expanding->made;
    struct hapt_graph *graph = expanding->graph;
    graph->op_count = graph->op_capacity = expanding->order_count;
    HAPT_NEW(graph->op, expanding->arena, graph->op_count);
    HAPT_NEW(made->cut, expanding->arena, graph->op_count);
    HAPT_NEW(made->first_rank_inputs, expanding->arena, graph->op_count);
    HAPT_NEW(made->exchange, expanding->arena, graph->op_count);
    HAPT_NEW(made->source_op, expanding->arena, graph->op_count);
    graph->forward_count = made->reduce_first = 0;
    for (int o = 0; o < graph->op_count; o++) {
        HAPT_TRY(write_op(expanding, o));
        graph->forward_count += expanding->order[o].anchor < state->graph->forward_count;
        made->reduce_first += expanding->order[o].anchor < state->sharding->reduce_first;
    }
    for (int o = 0; o < graph->op_count; o++) {
        const struct node *node = &state->node[expanding->order[o].node];
        const struct hapt_op *op = &graph->op[o];
        const int other = 1 - state->axis_index;
        if (node->op == NONE)
            made->cut[o][other] = expansion_cut_through(graph, op, made->property[op->input[0]][other]);
        /* A copy that adds is a computation on its own axis, too. */
        if (node->op == NONE && !hapt_op_type_at(op->type)->collective)
            made->cut[o][state->axis_index] =
                expansion_cut_through(graph, op, made->property[op->input[0]][state->axis_index]);
    }
    return HAPT_OK;
}

/* ---- what follows ---- */

static void find_producers(struct hapt_graph *graph)
{
    for (int t = 0; t < graph->tensor_count; t++) graph->tensor[t].producer = -1;
    for (int o = graph->op_count - 1; o >= 0; o--)
        for (int k = 0; k < graph->op[o].output_count; k++)
            if (graph->op[o].output[k] >= 0) graph->tensor[graph->op[o].output[k]].producer = o;
}

/* Every tensor leads to a lower one of the same storage; the lowest leads to itself. */
static int lowest(const int *storage, int tensor)
{
    while (storage[tensor] != tensor) tensor = storage[tensor];
    return tensor;
}

/* An all-reduce works in place if nothing else reads the partial sums. Sums of parameter gradients are moved
 * forward to form one collective of many, so nothing else may write them either. */
static enum hapt_status share_storage(struct hapt_sharding *made, struct hapt_arena *arena, struct hapt_arena *scratch)
{
    const struct hapt_graph *graph = made->graph;
    int *readers, *writers;
    HAPT_NEW(readers, scratch, graph->tensor_count);
    HAPT_NEW(writers, scratch, graph->tensor_count);
    HAPT_NEW(made->storage, arena, graph->tensor_count);
    for (int t = 0; t < graph->tensor_count; t++) made->storage[t] = t;
    for (int o = 0; o < graph->op_count; o++) {
        for (int i = 0; i < graph->op[o].input_count; i++)
            if (graph->op[o].input[i] >= 0) readers[graph->op[o].input[i]]++;
        for (int k = 0; k < graph->op[o].output_count; k++)
            if (graph->op[o].output[k] >= 0) writers[graph->op[o].output[k]]++;
    }
    for (int o = 0; o < graph->op_count; o++) {
        if (hapt_op_type_at(graph->op[o].type)->collective != HAPT_COLLECTIVE_ALL_REDUCE) continue;
        const int from = graph->op[o].input[0], to = graph->op[o].output[0];
        if (readers[from] > 1 || writers[from] == 0 || (o >= made->reduce_first && writers[to] > 1)) continue;
        const int a = lowest(made->storage, from), b = lowest(made->storage, to);
        made->storage[a > b ? a : b] = a < b ? a : b;
    }
    for (int t = 0; t < graph->tensor_count; t++) made->storage[t] = lowest(made->storage, t);
    return HAPT_OK;
}

static bool is_partial(const struct hapt_sharding *sharding, int tensor)
{
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++)
        if (sharding->property[tensor][axis].kind == HAPT_PROPERTY_PARTIAL) return true;
    return false;
}

/* No range may begin or end between operators that touch the same partial sums. */
static enum hapt_status find_parted(struct hapt_sharding *made, struct hapt_arena *arena, struct hapt_arena *scratch)
{
    const struct hapt_graph *graph = made->graph;
    struct span {
        int first, last;
    } * span; /* first and last forward operator + 1; 0: not touched */
    HAPT_NEW(span, scratch, graph->tensor_count);
    HAPT_NEW(made->not_a_boundary, arena, made->source->forward_count + 1);
    for (int o = 0; o < made->reduce_first; o++) {
        const struct hapt_op *op = &graph->op[o];
        for (int k = 0; k < op->input_count + op->output_count; k++) {
            const int tensor = k < op->input_count ? op->input[k] : op->output[k - op->input_count];
            if (tensor < 0 || !is_partial(made, tensor) || hapt_graph_is_parameter_gradient(graph, tensor)) continue;
            if (span[tensor].first == 0 || op->forward_op + 1 < span[tensor].first)
                span[tensor].first = op->forward_op + 1;
            if (op->forward_op + 1 > span[tensor].last) span[tensor].last = op->forward_op + 1;
        }
    }
    for (int t = 0; t < graph->tensor_count; t++)
        for (int cut = span[t].first; cut < span[t].last; cut++) made->not_a_boundary[cut] = true;
    return HAPT_OK;
}

static enum hapt_status run_instructions(struct expansion *state, const struct hapt_axis_program *program)
{
    for (int i = 0; i < program->count; i++) {
        const struct hapt_axis_instruction *instruction = &program->instruction[i];
        struct hapt_rule rule;
        if (instruction->op < 0) {
            HAPT_TRY(expansion_communicate(state, instruction));
            continue;
        }
        if (instruction->op != state->next_op || instruction->op >= state->graph->op_count)
            return hapt_fail(HAPT_ERR_INFEASIBLE, "every operator appears once, in the graph's order",
                             "axis %d: instruction %d computes operator %d, but operator %d comes next",
                             state->axis_index, i, instruction->op, state->next_op);
        HAPT_TRY(hapt_rule_of_cut(state->sharding, state->axis_index, &state->axis, instruction->op, instruction->cut,
                                  &rule));
        HAPT_TRY(expansion_compute(state, instruction->op, &rule));
    }
    return HAPT_OK;
}

/* program NULL: by the rules. */
static enum hapt_status expand(struct expanding *expanding, const struct hapt_axis_program *program,
                               const struct hapt_rule *rule)
{
    HAPT_TRY(program ? run_instructions(&expanding->state, program)
                     : expansion_complete(&expanding->state, rule, NULL));
    HAPT_TRY(expansion_check_end(&expanding->state));
    HAPT_TRY(find_order(expanding));
    HAPT_TRY(number_tensors(expanding));
    HAPT_TRY(write_operators(expanding));
    find_producers(expanding->graph);
    HAPT_TRY(share_storage(expanding->made, expanding->arena, expanding->state.scratch));
    HAPT_TRY(find_parted(expanding->made, expanding->arena, expanding->state.scratch));
    HAPT_TRY(find_weight_operators(expanding->made, expanding->arena));
    return localise(expanding->made, expanding->arena);
}

static enum hapt_status copy_axis(const struct hapt_axis *axis, struct hapt_arena *arena, struct hapt_axis *copy)
{
    double *ratio;
    *copy = (struct hapt_axis){.size = axis->size};
    if (!axis->ratio || axis->ratio_count < 1) return HAPT_OK;
    HAPT_NEW(ratio, arena, (size_t)axis->ratio_count * (size_t)axis->size);
    memcpy(ratio, axis->ratio, (size_t)axis->ratio_count * (size_t)axis->size * sizeof *ratio);
    copy->ratio_count = axis->ratio_count;
    copy->ratio = ratio;
    return HAPT_OK;
}

static enum hapt_status apply(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis,
                              const struct hapt_axis_program *program, const struct hapt_rule *rule,
                              struct hapt_arena *arena, struct hapt_sharding **expanded)
{
    HAPT_ASSERT(axis_index >= 0 && axis_index < HAPT_MESH_AXES && axis->size >= 1);
    HAPT_ASSERT(sharding->axis[axis_index].size == 1 && (axis_index == 1 || sharding->axis[1].size == 1));
    struct expanding expanding = {.arena = arena};
    struct hapt_arena scratch;
    HAPT_NEW(expanding.made, arena, 1);
    *expanding.made = *sharding;
    expanding.made->mesh_coordinate[0] = expanding.made->mesh_coordinate[1] = 0;
    HAPT_TRY(copy_axis(axis, arena, &expanding.made->axis[axis_index]));
    if (axis->size == 1) {
        *expanded = expanding.made;
        return HAPT_OK;
    }
    HAPT_ASSERT(program || rule);
    HAPT_NEW(expanding.graph, arena, 1);
    *expanding.graph = *sharding->graph;
    expanding.made->graph = expanding.graph;
    hapt_arena_init(&scratch);
    enum hapt_status status =
        expansion_begin(&expanding.state, sharding, axis_index, &expanding.made->axis[axis_index], &scratch);
    if (status == HAPT_OK) status = expand(&expanding, program, rule);
    hapt_arena_release(&scratch);
    if (status == HAPT_OK) *expanded = expanding.made;
    return status;
}

enum hapt_status hapt_sharding_apply(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis,
                                     const struct hapt_axis_program *program, struct hapt_arena *arena,
                                     struct hapt_sharding **expanded)
{
    return apply(sharding, axis_index, axis, program, NULL, arena, expanded);
}

enum hapt_status expansion_apply_rules(const struct hapt_sharding *sharding, int axis_index,
                                       const struct hapt_axis *axis, const struct hapt_rule *rule,
                                       struct hapt_arena *arena, struct hapt_sharding **expanded)
{
    return apply(sharding, axis_index, axis, NULL, rule, arena, expanded);
}
