/* Versions and their origins: the semantics of an instruction list (sharding.h). */
#include "expansion.h"

#include <stdio.h>
#include <string.h>

#include "hapt/rules.h"

enum hapt_status expansion_begin(struct expansion *expansion, const struct hapt_sharding *sharding, int axis_index,
                                 const struct hapt_axis *axis, struct hapt_arena *scratch)
{
    const struct hapt_graph *graph = sharding->graph;
    *expansion = (struct expansion){
        .sharding = sharding, .graph = graph, .axis_index = axis_index, .axis = *axis, .scratch = scratch};
    HAPT_NEW(expansion->newest, scratch, graph->tensor_count);
    HAPT_NEW(expansion->separate_addend, scratch, graph->tensor_count);
    HAPT_NEW(expansion->layout, scratch, graph->tensor_count);
    for (int t = 0; t < graph->tensor_count; t++)
        expansion->newest[t] = expansion->separate_addend[t] = expansion->layout[t] = NONE;
    return HAPT_OK;
}

static enum hapt_status grow(struct hapt_arena *arena, void **array, int count, int *room, size_t size)
{
    if (count < *room) return HAPT_OK;
    const int wider = *room == 0 ? 256 : 2 * *room;
    void *copy = hapt_arena_alloc(arena, (size_t)wider, size);
    if (!copy) return HAPT_ERR_MEMORY;
    if (count > 0) memcpy(copy, *array, (size_t)count * size);
    *array = copy;
    *room = wider;
    return HAPT_OK;
}

static enum hapt_status add_version(struct expansion *expansion, int tensor, struct hapt_property property, int maker,
                                    int *index)
{
    void *array = expansion->version;
    HAPT_TRY(grow(expansion->scratch, &array, expansion->version_count, &expansion->version_room,
                  sizeof *expansion->version));
    expansion->version = array;
    *index = expansion->version_count++;
    expansion->version[*index] = (struct version){.tensor = tensor,
                                                  .property = property,
                                                  .next = expansion->newest[tensor],
                                                  .maker = maker,
                                                  .writer = maker,
                                                  .valid = true,
                                                  .index = NONE};
    expansion->newest[tensor] = *index;
    return HAPT_OK;
}

static enum hapt_status add_node(struct expansion *expansion, int type, int anchor, int side, int *index)
{
    void *array = expansion->node;
    HAPT_TRY(grow(expansion->scratch, &array, expansion->node_count, &expansion->node_room, sizeof *expansion->node));
    expansion->node = array;
    *index = expansion->node_count++;
    struct node *made = &expansion->node[*index];
    *made = (struct node){.op = NONE, .type = type, .anchor = anchor, .side = side, .from_dim = NONE, .to_dim = NONE};
    for (int i = 0; i < HAPT_MAX_INPUTS; i++) made->input[i] = NONE;
    for (int o = 0; o < HAPT_MAX_OUTPUTS; o++) made->output[o] = NONE;
    return HAPT_OK;
}

static enum hapt_status refuse(const struct expansion *expansion, const char *what, int tensor, const char *why)
{
    return hapt_fail(HAPT_ERR_INFEASIBLE, "the rules of HAP Fig. 9 do not allow this program", "axis %d: %s of %s: %s",
                     expansion->axis_index, what, expansion->graph->tensor[tensor].name, why);
}

/* ---- visibility of versions ---- */

static bool same_section(const struct hapt_graph *graph, int anchor, int op)
{
    return (anchor < graph->forward_count) == (op < graph->forward_count);
}

bool expansion_sees(const struct expansion *expansion, int version, int op)
{
    const struct hapt_graph *graph = expansion->graph;
    const struct version *its = &expansion->version[version];
    const enum hapt_tensor_kind kind = graph->tensor[its->tensor].kind;
    if (!its->valid || its->separate_addend) return false;
    if (its->maker == NONE || kind == HAPT_TENSOR_GRADIENT) return true;
    const struct node *maker = &expansion->node[its->maker];
    if (maker->anchor == NONE) return expansion_sees(expansion, maker->input[0], op); /* will run before `op` */
    const int made = graph->op[maker->anchor].forward_op, read = graph->op[op].forward_op;
    if (kind == HAPT_TENSOR_PARAMETER)
        return made == read && (same_section(graph, maker->anchor, op) || op >= graph->forward_count);
    if (maker->anchor >= graph->forward_count) return made == read && op >= graph->forward_count;
    return made <= read;
}

int expansion_find(const struct expansion *expansion, int tensor, struct hapt_property property, int op)
{
    const int layout = expansion->layout[tensor];
    if (layout != NONE && hapt_property_same(expansion->version[layout].property, property)) return layout;
    for (int v = expansion->newest[tensor]; v != NONE; v = expansion->version[v].next)
        if (hapt_property_same(expansion->version[v].property, property) && expansion_sees(expansion, v, op)) return v;
    return NONE;
}

/* A communication without a reader so far is first read by `op`. So it runs before `op`, and so do the
 * communications it is made from. */
static void anchor_before(struct expansion *expansion, int version, int anchor, int side)
{
    const int maker = expansion->version[version].maker;
    if (maker == NONE || expansion->node[maker].anchor != NONE) return;
    expansion->node[maker].anchor = anchor;
    expansion->node[maker].side = side;
    anchor_before(expansion, expansion->node[maker].input[0], anchor, side);
}

static void invalidate_others(struct expansion *expansion, int tensor, int except)
{
    for (int v = expansion->newest[tensor]; v != NONE; v = expansion->version[v].next)
        if (v != except) expansion->version[v].valid = false;
}

/* ---- computations ---- */

static enum hapt_status read_input(struct expansion *expansion, int op, int tensor, struct hapt_property property,
                                   int *version)
{
    const struct hapt_graph *graph = expansion->graph;
    const enum hapt_tensor_kind kind = graph->tensor[tensor].kind;
    const char *name = graph->op[op].name;
    char wanted[HAPT_PROPERTY_TEXT], why[HAPT_PROPERTY_TEXT + 64];
    if (expansion->separate_addend[tensor] != NONE)
        return refuse(expansion, name, tensor, "the last addend is still separate and not part of it yet");
    *version = expansion_find(expansion, tensor, property, op);
    if (*version != NONE) {
        anchor_before(expansion, *version, op, -1);
        return HAPT_OK;
    }
    if (kind == HAPT_TENSOR_INPUT || (kind == HAPT_TENSOR_PARAMETER && expansion->layout[tensor] == NONE)) {
        HAPT_TRY(add_version(expansion, tensor, property, NONE, version));
        if (kind == HAPT_TENSOR_PARAMETER) expansion->layout[tensor] = *version;
        return HAPT_OK;
    }
    snprintf(why, sizeof why, "no version that is %s is visible to it", hapt_property_text(property, wanted));
    return refuse(expansion, name, tensor, why);
}

/* Adds to the version with that property. If there is none, *accumulate is cleared and the addend stays separate. */
static enum hapt_status add_to(struct expansion *expansion, int node, int tensor, struct hapt_property property,
                               bool *accumulate, int *version)
{
    const int op = expansion->node[node].op;
    if (expansion->separate_addend[tensor] != NONE)
        return refuse(expansion, expansion->graph->op[op].name, tensor,
                      "the previous addend is still separate and not part of it yet");
    *version = expansion_find(expansion, tensor, property, op);
    if (*version != NONE) {
        anchor_before(expansion, *version, op, -1);
        invalidate_others(expansion, tensor, *version);
        expansion->version[*version].writer = node;
        return HAPT_OK;
    }
    HAPT_TRY(add_version(expansion, tensor, property, node, version));
    expansion->version[*version].separate_addend = true;
    expansion->separate_addend[tensor] = *version;
    *accumulate = false;
    return HAPT_OK;
}

/* Parts of a parameter's gradient: one for every property in which an operator writes. */
static enum hapt_status add_part(struct expansion *expansion, int node, int tensor, struct hapt_property property,
                                 bool *accumulate, int *version)
{
    const int op = expansion->node[node].op;
    *version = expansion_find(expansion, tensor, property, op);
    if (*version != NONE && *accumulate) {
        anchor_before(expansion, *version, op, -1);
        expansion->version[*version].writer = node;
        return HAPT_OK;
    }
    if (op >= expansion->sharding->reduce_first) *accumulate = false; /* the first part of the sum */
    return add_version(expansion, tensor, property, node, version);
}

enum hapt_status expansion_compute(struct expansion *expansion, int op, const struct hapt_rule *rule)
{
    const struct hapt_graph *graph = expansion->graph;
    const struct hapt_op *what = &graph->op[op];
    int index;
    if (op != expansion->next_op)
        return hapt_fail(HAPT_ERR_INFEASIBLE, "every operator appears once, in the graph's order",
                         "axis %d: operator %s appears instead of operator %d", expansion->axis_index, what->name,
                         expansion->next_op);
    if (rule->exchange && expansion->sharding->exchange[op] >= 0)
        return refuse(expansion, what->name, what->output[0], "it would communicate over both axes while it runs");
    HAPT_TRY(add_node(expansion, what->type, op, 0, &index));
    expansion->node[index].op = op;
    for (int i = 0; i < what->input_count; i++) {
        int version = NONE;
        if (what->input[i] >= 0) HAPT_TRY(read_input(expansion, op, what->input[i], rule->input[i], &version));
        expansion->node[index].input[i] = version;
    }
    unsigned accumulates = 0;
    for (int o = 0; o < what->output_count; o++) {
        const int tensor = what->output[o];
        bool accumulate = what->accumulate >> o & 1u;
        int version = NONE;
        if (tensor < 0) continue;
        if (hapt_graph_is_parameter_gradient(graph, tensor))
            HAPT_TRY(add_part(expansion, index, tensor, rule->output[o], &accumulate, &version));
        else if (accumulate)
            HAPT_TRY(add_to(expansion, index, tensor, rule->output[o], &accumulate, &version));
        else
            HAPT_TRY(add_version(expansion, tensor, rule->output[o], index, &version));
        expansion->node[index].output[o] = version;
        accumulates |= accumulate ? 1u << o : 0;
    }
    struct node *made = &expansion->node[index];
    made->accumulate = accumulates;
    made->cut = rule->cut, made->first_rank_inputs = rule->first_rank_inputs, made->exchange = rule->exchange;
    made->forward_op = what->forward_op;
    expansion->next_op++;
    return HAPT_OK;
}

/* ---- communications ---- */

static int row_of(enum hapt_collective_kind kind)
{
    for (int type = 0; type < hapt_op_type_count(); type++)
        if (hapt_op_type_at(type)->collective == kind) return type;
    HAPT_ASSERT(false);
    return NONE;
}

static int sharded_dim(struct hapt_property property)
{
    return property.kind == HAPT_PROPERTY_SHARDED ? property.dim : NONE;
}

/* One collective from version `source`; the new version has no reader yet. */
static enum hapt_status add_collective(struct expansion *expansion, enum hapt_collective_kind kind, int source,
                                       struct hapt_property to, int anchor, int side, int *version)
{
    const int tensor = expansion->version[source].tensor;
    const struct hapt_property from = expansion->version[source].property;
    int index;
    HAPT_TRY(add_node(expansion, row_of(kind), anchor, side, &index));
    HAPT_TRY(add_version(expansion, tensor, to, index, version));
    struct node *made = &expansion->node[index];
    made->input[0] = source, made->output[0] = *version;
    made->from_dim = sharded_dim(from), made->to_dim = sharded_dim(to);
    /* A parameter's gradient belongs to its writer; otherwise the operator next to it decides (expand.c). */
    const int writer = expansion->version[source].writer;
    made->forward_op = writer == NONE ? NONE : expansion->node[writer].forward_op;
    return HAPT_OK;
}

/* Adds version `from` to version `to` of the same property: a copy that accumulates. */
static enum hapt_status add_copy(struct expansion *expansion, int from, int to, int anchor, int side)
{
    int index;
    HAPT_TRY(add_node(expansion, hapt_op_type_find("copy"), anchor, side, &index));
    struct node *made = &expansion->node[index];
    made->input[0] = from, made->output[0] = to;
    made->accumulate = 1;
    made->forward_op = expansion->node[expansion->version[from].writer].forward_op;
    expansion->version[to].writer = index;
    expansion->version[from].valid = false;
    return HAPT_OK;
}

static int newest_with(const struct expansion *expansion, int tensor, struct hapt_property property, int except)
{
    for (int v = expansion->newest[tensor]; v != NONE; v = expansion->version[v].next) {
        const struct version *its = &expansion->version[v];
        if (v != except && its->valid && !its->separate_addend && hapt_property_same(its->property, property)) return v;
    }
    return NONE;
}

/* Most operators see the oldest of several equal versions. */
static int oldest_with(const struct expansion *expansion, int tensor, struct hapt_property property)
{
    int found = NONE;
    for (int v = expansion->newest[tensor]; v != NONE; v = expansion->version[v].next) {
        const struct version *its = &expansion->version[v];
        if (its->valid && !its->separate_addend && hapt_property_same(its->property, property)) found = v;
    }
    return found;
}

/* An addend with a separate layout is added to the version that has property `to`. */
static enum hapt_status join(struct expansion *expansion, const struct hapt_axis_instruction *instruction,
                             struct hapt_property to)
{
    const int tensor = instruction->tensor, addend = expansion->separate_addend[tensor];
    const int anchor = expansion->node[expansion->version[addend].maker].anchor;
    const int into = newest_with(expansion, tensor, to, addend);
    int moved;
    if (into == NONE) return refuse(expansion, "a communication", tensor, "there is no version to add its result to");
    anchor_before(expansion, into, anchor, -1);
    HAPT_TRY(add_collective(expansion, instruction->kind, addend, to, anchor, 1, &moved));
    HAPT_TRY(add_copy(expansion, moved, into, anchor, 1));
    invalidate_others(expansion, tensor, into);
    expansion->separate_addend[tensor] = NONE;
    return HAPT_OK;
}

static enum hapt_status communicate_part(struct expansion *expansion, const struct hapt_axis_instruction *instruction,
                                         struct hapt_property from, struct hapt_property to)
{
    const int tensor = instruction->tensor, source = oldest_with(expansion, tensor, from);
    const int next = expansion->next_op; /* an outer axis may sum the result */
    int moved;
    if (expansion->next_op < expansion->sharding->reduce_first)
        return refuse(expansion, "a communication", tensor,
                      "parameter gradients are summed over the microbatches first");
    if (source == NONE) return refuse(expansion, "a communication", tensor, "it has no such version");
    const int into = newest_with(expansion, tensor, to, source);
    HAPT_TRY(add_collective(expansion, instruction->kind, source, to, into == NONE ? NONE : next, -1, &moved));
    expansion->version[source].valid = false;
    if (into == NONE) return HAPT_OK;
    anchor_before(expansion, into, next, -1);
    return add_copy(expansion, moved, into, next, -1);
}

static enum hapt_status communicate_parameter(struct expansion *expansion,
                                              const struct hapt_axis_instruction *instruction,
                                              struct hapt_property from, struct hapt_property to)
{
    const int tensor = instruction->tensor;
    int moved;
    if (instruction->kind != HAPT_COLLECTIVE_SLICE)
        return refuse(expansion, "a communication", tensor,
                      "a parameter has the layout of its readers and is never communicated");
    if (expansion->layout[tensor] == NONE)
        HAPT_TRY(add_version(expansion, tensor, from, NONE, &expansion->layout[tensor]));
    const int source = expansion->layout[tensor];
    if (expansion->version[source].property.kind != HAPT_PROPERTY_REPLICATED)
        return refuse(expansion, "a slice", tensor, "the parameter is not replicated");
    return add_collective(expansion, instruction->kind, source, to, NONE, -1, &moved);
}

/* The version that a communication starts from. In a row of communications, each starts from the result of the one
 * before: an older version of that layout may be visible to later operators only. Otherwise it is a version that the
 * next operator sees, since a communication runs just before its reader. If there are several or none, it is the oldest
 * version, which most operators see. */
static int source_of(const struct expansion *expansion, int tensor, struct hapt_property from)
{
    int seen = NONE;
    for (int v = expansion->newest[tensor]; v != NONE; v = expansion->version[v].next) {
        const struct version *its = &expansion->version[v];
        const bool unread = its->maker != NONE && expansion->node[its->maker].anchor == NONE;
        if (!its->valid || its->separate_addend || !hapt_property_same(its->property, from)) continue;
        if (unread) return v;
        if (expansion->next_op < expansion->graph->op_count && expansion_sees(expansion, v, expansion->next_op))
            seen = v;
    }
    return seen != NONE ? seen : oldest_with(expansion, tensor, from);
}

enum hapt_status expansion_communicate(struct expansion *expansion, const struct hapt_axis_instruction *instruction)
{
    const struct hapt_graph *graph = expansion->graph;
    const int tensor = instruction->tensor;
    if (tensor < 0 || tensor >= graph->tensor_count)
        return hapt_fail(HAPT_ERR_INFEASIBLE, NULL, "axis %d: a communication names no tensor of the graph (%d)",
                         expansion->axis_index, tensor);
    if (!hapt_property_fits(expansion->sharding, expansion->axis_index, &expansion->axis, tensor, instruction->from) ||
        !hapt_property_fits(expansion->sharding, expansion->axis_index, &expansion->axis, tensor, instruction->to))
        return refuse(expansion, "a communication", tensor, "it cannot be shared over the devices in this layout");
    const struct hapt_property from = hapt_property_canonical(expansion->sharding, expansion->axis_index,
                                                              &expansion->axis, tensor, instruction->from);
    const struct hapt_property to =
        hapt_property_canonical(expansion->sharding, expansion->axis_index, &expansion->axis, tensor, instruction->to);
    if (!hapt_rule_moves(instruction->kind, from, to))
        return refuse(expansion, "a communication", tensor, "this collective does not convert between these layouts");
    if (graph->tensor[tensor].kind == HAPT_TENSOR_INPUT)
        return refuse(expansion, "a communication", tensor, "every version of a model input exists already");
    if (graph->tensor[tensor].kind == HAPT_TENSOR_PARAMETER)
        return communicate_parameter(expansion, instruction, from, to);
    if (hapt_graph_is_parameter_gradient(graph, tensor)) return communicate_part(expansion, instruction, from, to);
    if (expansion->separate_addend[tensor] != NONE &&
        hapt_property_same(expansion->version[expansion->separate_addend[tensor]].property, from))
        return join(expansion, instruction, to);
    const int source = source_of(expansion, tensor, from);
    if (source == NONE) return refuse(expansion, "a communication", tensor, "it has no such version");
    const int writer = expansion->version[source].writer;
    int moved;
    if (from.kind != HAPT_PROPERTY_PARTIAL)
        return add_collective(expansion, instruction->kind, source, to, NONE, -1, &moved);
    return add_collective(expansion, instruction->kind, source, to, expansion->node[writer].anchor, 1, &moved);
}

/* ---- the end ---- */

int expansion_final(const struct expansion *expansion, int gradient)
{
    const int layout = expansion->layout[expansion->graph->tensor[gradient].primal];
    const struct hapt_property whole = {.kind = HAPT_PROPERTY_REPLICATED};
    return newest_with(expansion, gradient, layout == NONE ? whole : expansion->version[layout].property, NONE);
}

static int newest_valid(const struct expansion *expansion, int tensor)
{
    int v = expansion->newest[tensor];
    while (v != NONE && !expansion->version[v].valid) v = expansion->version[v].next;
    return v;
}

enum hapt_status expansion_check_end(const struct expansion *expansion)
{
    const struct hapt_graph *graph = expansion->graph;
    if (expansion->next_op != graph->op_count)
        return hapt_fail(HAPT_ERR_INFEASIBLE, "every operator appears once, in the graph's order",
                         "axis %d: operator %s is missing", expansion->axis_index, graph->op[expansion->next_op].name);
    for (int t = 0; t < graph->tensor_count; t++) {
        if (expansion->separate_addend[t] != NONE)
            return refuse(expansion, "the final state", t, "the last addend never became part of it");
        if (!hapt_graph_is_parameter_gradient(graph, t) || expansion->newest[t] == NONE) continue;
        if (!graph->tensor[graph->tensor[t].primal].trainable) continue;
        /* An outer axis' collective sums one version only. */
        const bool ends = expansion_is_trained_gradient(graph, t);
        const int final = ends ? expansion_final(expansion, t) : newest_valid(expansion, t);
        if (final == NONE)
            return refuse(expansion, "the final state", t, "it is not brought to the layout of its parameter");
        for (int v = expansion->newest[t]; v != NONE; v = expansion->version[v].next)
            if (v != final && expansion->version[v].valid)
                return refuse(expansion, "the final state", t, "a part of the sum is left over");
    }
    return HAPT_OK;
}
