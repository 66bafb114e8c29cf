/* Input: a cut or a rule for every operator. Output: a program with the communications that they need. */
#include "expansion.h"

struct completing {
    struct expansion *state;
    const struct hapt_rule *rule;      /* [op_count] */
    struct hapt_axis_program *program; /* NULL: instructions are not listed */
    int room;
    struct hapt_property *layout; /* [tensor_count] layouts of parameters */
};

static enum hapt_status note(struct completing *completing, struct hapt_axis_instruction instruction)
{
    struct hapt_axis_program *program = completing->program;
    if (!program) return HAPT_OK;
    if (program->count == completing->room) {
        struct hapt_axis_instruction *wider;
        completing->room = completing->room == 0 ? 256 : 2 * completing->room;
        HAPT_NEW(wider, completing->state->scratch, completing->room);
        for (int i = 0; i < program->count; i++) wider[i] = program->instruction[i];
        program->instruction = wider;
    }
    program->instruction[program->count++] = instruction;
    return HAPT_OK;
}

/* Rough cost of a collective: shares of a tensor that cross the links. */
static int price(struct hapt_property from, struct hapt_property to)
{
    switch (hapt_rule_collective(from, to)) {
    case HAPT_COLLECTIVE_SLICE: return 0;
    case HAPT_COLLECTIVE_ALL_TO_ALL: return 1;
    case HAPT_COLLECTIVE_REDUCE_SCATTER:
    case HAPT_COLLECTIVE_ALL_GATHER: return 2;
    case HAPT_COLLECTIVE_ALL_REDUCE: return 4;
    default: return -1;
    }
}

static enum hapt_status communicate(struct completing *completing, int tensor, struct hapt_property from,
                                    struct hapt_property to)
{
    const struct hapt_axis_instruction instruction = {
        .op = -1, .tensor = tensor, .kind = hapt_rule_collective(from, to), .from = from, .to = to};
    HAPT_TRY(expansion_communicate(completing->state, &instruction));
    return note(completing, instruction);
}

/* Makes a version that operator `op` can read (or add to). *found: false if nothing can be converted into it. */
static enum hapt_status make_version(struct completing *completing, int op, int tensor, struct hapt_property wanted,
                                     bool *found)
{
    const struct expansion *state = completing->state;
    int best = NONE, least = 0;
    *found = expansion_find(state, tensor, wanted, op) != NONE;
    for (int v = state->newest[tensor]; v != NONE && !*found; v = state->version[v].next) {
        const int its = price(state->version[v].property, wanted);
        if (its < 0 || !expansion_sees(state, v, op) || (best != NONE && its > least)) continue;
        best = v, least = its; /* the oldest of equally cheap ones */
    }
    if (*found || best == NONE) return HAPT_OK;
    *found = true;
    return communicate(completing, tensor, state->version[best].property, wanted);
}

static enum hapt_status prepare_input(struct completing *completing, int op, int tensor, struct hapt_property wanted)
{
    const struct hapt_graph *graph = completing->state->graph;
    const enum hapt_tensor_kind kind = graph->tensor[tensor].kind;
    bool found;
    if (kind == HAPT_TENSOR_INPUT) return HAPT_OK;
    if (kind == HAPT_TENSOR_PARAMETER) {
        if (hapt_property_same(completing->layout[tensor], wanted)) return HAPT_OK;
        if (expansion_find(completing->state, tensor, wanted, op) != NONE) return HAPT_OK;
        return communicate(completing, tensor, completing->layout[tensor], wanted);
    }
    HAPT_TRY(make_version(completing, op, tensor, wanted, &found));
    return found ? HAPT_OK
                 : hapt_fail(HAPT_ERR_INFEASIBLE, "choose another cut for it",
                             "operator %s: no version of %s can be converted into %s", graph->op[op].name,
                             graph->tensor[tensor].name,
                             wanted.kind == HAPT_PROPERTY_PARTIAL ? "partial sums" : "the layout that it reads");
}

/* An operator adds to a version of the activation's gradient that has the layout of the addend. Such a version is
 * made if that is possible and no dearer than converting the addend to an existing version. */
static enum hapt_status prepare_output(struct completing *completing, int op, int tensor, struct hapt_property written)
{
    const struct expansion *state = completing->state;
    bool found;
    int there = NONE, back = NONE; /* costs */
    for (int v = state->newest[tensor]; v != NONE; v = state->version[v].next) {
        if (!expansion_sees(state, v, op)) continue;
        const int forth_price = price(state->version[v].property, written),
                  back_price = price(written, state->version[v].property);
        if (forth_price >= 0 && (there == NONE || forth_price < there)) there = forth_price;
        if (back_price >= 0 && (back == NONE || back_price < back)) back = back_price;
    }
    if (back != NONE && (there == NONE || back < there) && expansion_find(state, tensor, written, op) == NONE)
        return HAPT_OK;
    return make_version(completing, op, tensor, written, &found);
}

/* A separate addend joins the cheapest version after the operator. */
static enum hapt_status join(struct completing *completing, int tensor)
{
    const struct expansion *state = completing->state;
    if (state->separate_addend[tensor] == NONE) return HAPT_OK;
    const struct hapt_property from = state->version[state->separate_addend[tensor]].property;
    int best = NONE, least = 0;
    for (int v = state->newest[tensor]; v != NONE; v = state->version[v].next) {
        const int its = price(from, state->version[v].property);
        if (its < 0 || !state->version[v].valid || state->version[v].separate_addend || (best != NONE && its > least))
            continue;
        best = v, least = its;
    }
    if (best == NONE)
        return hapt_fail(HAPT_ERR_INFEASIBLE, "choose another cut for it",
                         "the addend to %s cannot be converted to any of its layouts",
                         state->graph->tensor[tensor].name);
    return communicate(completing, tensor, from, state->version[best].property);
}

static enum hapt_status complete_op(struct completing *completing, int op)
{
    const struct hapt_graph *graph = completing->state->graph;
    const struct hapt_op *what = &graph->op[op];
    const struct hapt_rule *rule = &completing->rule[op];
    for (int i = 0; i < what->input_count; i++)
        if (what->input[i] >= 0) HAPT_TRY(prepare_input(completing, op, what->input[i], rule->input[i]));
    for (int o = 0; o < what->output_count; o++)
        if (what->output[o] >= 0 && what->accumulate >> o & 1u &&
            !hapt_graph_is_parameter_gradient(graph, what->output[o]))
            HAPT_TRY(prepare_output(completing, op, what->output[o], rule->output[o]));
    HAPT_TRY(expansion_compute(completing->state, op, rule));
    HAPT_TRY(note(completing, (struct hapt_axis_instruction){.op = op, .cut = rule->cut, .tensor = -1}));
    for (int o = 0; o < what->output_count; o++)
        if (what->output[o] >= 0) HAPT_TRY(join(completing, what->output[o]));
    return HAPT_OK;
}

/* An outer axis' collective reads one version only, so all parts of its input are joined. */
static enum hapt_status gather_parts(struct completing *completing, int op)
{
    const struct expansion *state = completing->state;
    const int tensor = state->graph->op[op].input[0];
    const struct hapt_property wanted = completing->rule[op].input[0];
    if (!hapt_graph_is_parameter_gradient(state->graph, tensor)) return HAPT_OK;
    for (int v = state->newest[tensor]; v != NONE; v = state->version[v].next)
        if (state->version[v].valid && !hapt_property_same(state->version[v].property, wanted))
            HAPT_TRY(communicate(completing, tensor, state->version[v].property, wanted));
    return HAPT_OK;
}

/* Brings every part of a parameter's gradient to the parameter's layout. */
static enum hapt_status finish_gradients(struct completing *completing)
{
    const struct expansion *state = completing->state;
    for (int t = 0; t < state->graph->tensor_count; t++) {
        if (!expansion_is_trained_gradient(state->graph, t)) continue;
        const struct hapt_property layout = completing->layout[state->graph->tensor[t].primal];
        const int last = state->newest[t]; /* the loop adds newer versions */
        for (int v = last; v != NONE; v = state->version[v].next)
            if (state->version[v].valid && !hapt_property_same(state->version[v].property, layout))
                HAPT_TRY(communicate(completing, t, state->version[v].property, layout));
    }
    return HAPT_OK;
}

/* One layout for all readers of a parameter, or replicated. */
static enum hapt_status lay_out_parameters(struct completing *completing)
{
    const struct hapt_graph *graph = completing->state->graph;
    bool *known;
    HAPT_NEW(known, completing->state->scratch, graph->tensor_count);
    HAPT_NEW(completing->layout, completing->state->scratch, graph->tensor_count);
    for (int o = 0; o < graph->op_count; o++) {
        for (int i = 0; i < graph->op[o].input_count; i++) {
            const int tensor = graph->op[o].input[i];
            if (tensor < 0 || graph->tensor[tensor].kind != HAPT_TENSOR_PARAMETER) continue;
            const struct hapt_property wanted = completing->rule[o].input[i];
            if (!known[tensor])
                completing->layout[tensor] = wanted;
            else if (!hapt_property_same(completing->layout[tensor], wanted))
                completing->layout[tensor] = (struct hapt_property){.kind = HAPT_PROPERTY_REPLICATED};
            known[tensor] = true;
        }
    }
    return HAPT_OK;
}

enum hapt_status expansion_complete(struct expansion *expansion, const struct hapt_rule *rule,
                                    struct hapt_axis_program *program)
{
    struct completing completing = {.state = expansion, .rule = rule, .program = program};
    HAPT_TRY(lay_out_parameters(&completing));
    for (int o = 0; o < expansion->graph->op_count; o++) {
        if (o >= expansion->sharding->reduce_first) HAPT_TRY(gather_parts(&completing, o));
        HAPT_TRY(complete_op(&completing, o));
    }
    return finish_gradients(&completing);
}

enum hapt_status expansion_program_of_rules(const struct hapt_sharding *sharding, int axis_index,
                                            const struct hapt_axis *axis, const struct hapt_rule *rule,
                                            struct hapt_arena *arena, struct hapt_axis_program **program)
{
    struct expansion expansion;
    struct hapt_axis_program completed = {0}, *made;
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    enum hapt_status status = expansion_begin(&expansion, sharding, axis_index, axis, &scratch);
    if (status == HAPT_OK) status = expansion_complete(&expansion, rule, &completed);
    made = status == HAPT_OK ? hapt_arena_alloc(arena, 1, sizeof *made) : NULL;
    if (status == HAPT_OK && !made) status = HAPT_ERR_MEMORY;
    if (made) status = hapt_axis_program_copy(&completed, arena, made);
    hapt_arena_release(&scratch);
    if (status == HAPT_OK) *program = made;
    return status;
}

static enum hapt_status rules_of_cuts(const struct hapt_sharding *sharding, int axis_index,
                                      const struct hapt_axis *axis, const struct hapt_cut *cut,
                                      struct hapt_arena *scratch, struct hapt_rule **rule)
{
    HAPT_NEW(*rule, scratch, sharding->graph->op_count);
    for (int o = 0; o < sharding->graph->op_count; o++)
        HAPT_TRY(hapt_rule_of_cut(sharding, axis_index, axis, o, cut[o], &(*rule)[o]));
    return HAPT_OK;
}

enum hapt_status hapt_axis_program_complete(const struct hapt_sharding *sharding, int axis_index,
                                            const struct hapt_axis *axis, const struct hapt_cut *cut,
                                            struct hapt_arena *arena, struct hapt_axis_program **program)
{
    struct hapt_rule *rule;
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    enum hapt_status status = rules_of_cuts(sharding, axis_index, axis, cut, &scratch, &rule);
    if (status == HAPT_OK) status = expansion_program_of_rules(sharding, axis_index, axis, rule, arena, program);
    hapt_arena_release(&scratch);
    return status;
}
