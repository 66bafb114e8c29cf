/*
 * Cuts of Megatron-LM and of data parallelism: properties flow from the inputs through all operators by their rules. On
 * a tensor-parallel axis the flow starts where a parameter is cut (cut_parameters). If a parameter's cut leads to a
 * step that no rule allows, it stays replicated and the flow restarts. Output: a rule for every operator; complete.c
 * adds the communications.
 */
#include "expansion.h"
#include "hapt/rules.h"

struct flow {
    const struct hapt_sharding *sharding;
    const struct hapt_graph *graph;
    int axis_index;
    struct hapt_axis axis;
    bool tensor_parallel;
    struct hapt_property *property; /* [tensor] */
    struct hapt_rule *rule;         /* [op] result */
    bool *whole;                    /* [tensor] parameters that a failed attempt excluded from cutting */
    bool *written;                  /* [tensor] */
    bool *decided;                  /* [tensor] parameters that an operator has read already */
    bool *uneven;                   /* [tensor] parameters whose cut may leave unequal shards */
    int *cause;                     /* [tensor] the parameter whose cut shards it, or NONE */
    int *reader; /* [tensor] its first reader among the forward operators as op * HAPT_MAX_INPUTS + input, or NONE */
    int *next_reader; /* [op * HAPT_MAX_INPUTS + input] the reader after it */
    int blame;        /* the parameter whose cut made the last step fail, or NONE */
};

static struct hapt_property *property_of(const struct flow *flow, int tensor)
{
    return &flow->property[tensor];
}

static enum hapt_status rule_of(const struct flow *flow, const struct hapt_op *op, char letter, int blocks,
                                struct hapt_rule *rule)
{
    return hapt_rule_of_cut(flow->sharding, flow->axis_index, &flow->axis, (int)(op - flow->graph->op),
                            (struct hapt_cut){.letter = letter, .blocks = blocks, .unit = 1}, rule);
}

/* Scalars are one for all; every other input has a row per sample. */
static struct hapt_property input_property(const struct flow *flow, const struct hapt_tensor *tensor)
{
    if (tensor->kind != HAPT_TENSOR_INPUT || hapt_role_is_scalar(tensor->role) || flow->tensor_parallel)
        return (struct hapt_property){.kind = HAPT_PROPERTY_REPLICATED};
    return (struct hapt_property){.kind = HAPT_PROPERTY_SHARDED, .blocks = 1, .unit = 1};
}

/* ---- where a cut may begin: can all readers of a tensor work on its shards? ---- */

static bool can_read_shards(const struct flow *flow, int tensor, int dim, int depth, int *blocks, bool *uneven);

static bool parameter_can(const struct flow *flow, int tensor, struct hapt_property property)
{
    if (flow->graph->tensor[tensor].kind != HAPT_TENSOR_PARAMETER || flow->whole[tensor]) return false;
    return !flow->decided[tensor] || hapt_property_same(*property_of(flow, tensor), property);
}

/* For an activation beside the one to be sharded (keys beside queries, a gate's product): true if it is sharded
 * alike, or if its maker can be cut so. */
static bool can_make_shards(const struct flow *flow, int tensor, struct hapt_property property, int depth)
{
    const struct hapt_tensor *its = &flow->graph->tensor[tensor];
    struct hapt_rule rule;
    if (its->kind != HAPT_TENSOR_ACTIVATION || its->producer < 0 || depth > 32) return false;
    if (flow->written[tensor]) return hapt_property_same(*property_of(flow, tensor), property);
    const struct hapt_op *maker = &flow->graph->op[its->producer];
    const struct hapt_signature *signature = hapt_op_signature_of(flow->graph, maker);
    int output = 0;
    while (maker->output[output] != tensor) output++;
    if (rule_of(flow, maker, signature->output[output].sharded_with[property.dim], property.blocks, &rule) != HAPT_OK) {
        hapt_fail_reset();
        return false;
    }
    if (!hapt_property_same(rule.output[output], property)) return false;
    for (int i = 0; i < maker->input_count; i++) {
        if (maker->input[i] < 0 || rule.input[i].kind == HAPT_PROPERTY_REPLICATED) continue;
        if (!parameter_can(flow, maker->input[i], rule.input[i]) &&
            !can_make_shards(flow, maker->input[i], rule.input[i], depth + 1))
            return false;
    }
    return true;
}

/* For one reader: true if its other operands with that index are sharded alike or are parameters without another
 * layout, and its outputs with the index find readers in turn. */
static bool reader_can(const struct flow *flow, const struct hapt_op *op, int input, int dim, int depth, int *blocks,
                       bool *uneven)
{
    const struct hapt_graph *graph = flow->graph;
    const struct hapt_signature_operand *operand = &hapt_op_signature_of(graph, op)->input[input];
    struct hapt_rule rule;
    if (rule_of(flow, op, operand->sharded_with[dim], 1, &rule) != HAPT_OK) {
        hapt_fail_reset();
        return false;
    }
    const bool composite = operand->sharded_with[dim] != operand->letter[dim];
    if (rule.input[input].dim != dim || (composite && *blocks > 0 && *blocks != operand->blocks[dim])) return false;
    if (composite) *blocks = operand->blocks[dim];
    *uneven = *uneven && operand->indexed[dim];
    for (int i = 0; i < op->input_count; i++) {
        if (op->input[i] < 0 || i == input || rule.input[i].kind == HAPT_PROPERTY_REPLICATED) continue;
        if (!parameter_can(flow, op->input[i], rule.input[i]) &&
            !can_make_shards(flow, op->input[i], rule.input[i], depth))
            return false;
    }
    for (int o = 0; o < op->output_count; o++) {
        if (rule.output[o].kind != HAPT_PROPERTY_SHARDED) continue;
        int own = rule.output[o].blocks, *its = composite ? &own : blocks;
        if (!can_read_shards(flow, op->output[o], rule.output[o].dim, depth + 1, its, uneven)) return false;
    }
    return true;
}

/* *blocks: wanted by the readers, in and out (0: none yet); *uneven stays true if all readers accept unequal shards. */
static bool can_read_shards(const struct flow *flow, int tensor, int dim, int depth, int *blocks, bool *uneven)
{
    if (depth > 32) return false; /* chains of operators without a parameter are short */
    for (int at = flow->reader[tensor]; at != NONE; at = flow->next_reader[at])
        if (!reader_can(flow, &flow->graph->op[at / HAPT_MAX_INPUTS], at % HAPT_MAX_INPUTS, dim, depth, blocks, uneven))
            return false;
    return true;
}

/* For an operator whose inputs are replicated, except parameters: true if it may run on shards of `letter`, by
 * *rule. */
static bool may_cut(const struct flow *flow, const struct hapt_op *op, char letter, struct hapt_rule *rule,
                    bool *uneven)
{
    int blocks = 0;
    *uneven = true;
    enum hapt_status status = rule_of(flow, op, letter, 1, rule);
    for (int o = 0; status == HAPT_OK && o < op->output_count; o++) {
        if (rule->output[o].kind != HAPT_PROPERTY_SHARDED) continue;
        if (!can_read_shards(flow, op->output[o], rule->output[o].dim, 0, &blocks, uneven)) return false;
    }
    if (status == HAPT_OK && blocks > 1) status = rule_of(flow, op, letter, blocks, rule);
    hapt_fail_reset();
    for (int i = 0; status == HAPT_OK && i < op->input_count; i++) {
        const int tensor = op->input[i];
        if (tensor < 0 || rule->input[i].kind == HAPT_PROPERTY_REPLICATED) continue;
        if (!parameter_can(flow, tensor, rule->input[i])) return false;
    }
    return status == HAPT_OK;
}

/* Sets the layouts of an operator's parameters by a rule; parameters that an earlier operator reads keep theirs. */
static void lay_out_by(struct flow *flow, const struct hapt_op *op, const struct hapt_rule *rule, int cause)
{
    for (int i = 0; i < op->input_count; i++) {
        const int tensor = op->input[i];
        if (tensor < 0 || flow->graph->tensor[tensor].kind != HAPT_TENSOR_PARAMETER || flow->decided[tensor]) continue;
        *property_of(flow, tensor) = rule->input[i];
        flow->cause[tensor] = rule->input[i].kind == HAPT_PROPERTY_REPLICATED ? NONE : cause;
    }
}

/* Chooses the cut of an operator whose inputs are all replicated: an index that its outputs keep (columns), or one
 * that indexes a table. */
static void cut_parameters(struct flow *flow, const struct hapt_op *op)
{
    const struct hapt_signature *signature = hapt_op_signature_of(flow->graph, op);
    for (int i = 0; i < op->input_count; i++) {
        const int tensor = op->input[i];
        if (tensor < 0 || flow->graph->tensor[tensor].kind != HAPT_TENSOR_PARAMETER) continue;
        for (int d = 0; d < signature->input[i].dims; d++) {
            struct hapt_rule rule;
            bool uneven, useful = signature->input[i].indexed[d];
            if (!may_cut(flow, op, signature->input[i].sharded_with[d], &rule, &uneven)) continue;
            for (int o = 0; o < op->output_count; o++) useful = useful || rule.output[o].kind == HAPT_PROPERTY_SHARDED;
            if (!useful) continue;
            /* A tied table has one layout, so all its readers must accept unequal shards. */
            flow->uneven[tensor] = uneven && (!flow->decided[tensor] || flow->uneven[tensor]);
            lay_out_by(flow, op, &rule, tensor);
            return;
        }
    }
}

/* Parameters follow the activations of the same operator. */
static void lay_out_parameters(struct flow *flow, const struct hapt_op *op)
{
    const struct hapt_signature *signature = hapt_op_signature_of(flow->graph, op);
    struct hapt_rule rule;
    int cause = NONE;
    char letter = 0;
    for (int i = 0; i < op->input_count; i++) {
        const int tensor = op->input[i];
        if (tensor < 0 || flow->graph->tensor[tensor].kind == HAPT_TENSOR_PARAMETER) continue;
        if (property_of(flow, tensor)->kind != HAPT_PROPERTY_SHARDED) continue;
        letter = signature->input[i].sharded_with[property_of(flow, tensor)->dim];
        cause = flow->cause[tensor];
    }
    if (!letter)
        cut_parameters(flow, op);
    else if (rule_of(flow, op, letter, 1, &rule) == HAPT_OK)
        lay_out_by(flow, op, &rule, cause);
    hapt_fail_reset();
    for (int i = 0; i < op->input_count; i++)
        if (op->input[i] >= 0 && flow->graph->tensor[op->input[i]].kind == HAPT_TENSOR_PARAMETER)
            flow->decided[op->input[i]] = true;
}

/* ---- the flow ---- */

/* These partial sums are kept: the loss and the gradients of parameters, which are summed at the end of a step. */
static bool stays_partial(const struct flow *flow, int tensor)
{
    return tensor == flow->graph->loss || hapt_graph_is_parameter_gradient(flow->graph, tensor);
}

/* Other partial sums are summed before any operator reads them. */
static void reduce(struct flow *flow, int tensor)
{
    if (property_of(flow, tensor)->kind == HAPT_PROPERTY_PARTIAL && !stays_partial(flow, tensor))
        *property_of(flow, tensor) = (struct hapt_property){.kind = HAPT_PROPERTY_REPLICATED};
}

/* On a tensor-parallel axis shards are equal, except for tables whose readers all index their rows by value. */
static enum hapt_status check_even(struct flow *flow, int tensor, struct hapt_property property)
{
    if (property.kind != HAPT_PROPERTY_SHARDED || !flow->tensor_parallel) return HAPT_OK;
    const struct hapt_tensor *whole = &flow->graph->tensor[tensor];
    const int cause = flow->cause[tensor], blocks = property.blocks > 1 ? property.blocks : 1;
    if (whole->shape[property.dim] % (blocks * flow->axis.size) == 0) return HAPT_OK;
    if (cause != NONE && flow->uneven[cause] && blocks == 1) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INFEASIBLE, NULL, "%d devices cannot share dimension %d of %s evenly", flow->axis.size,
                     property.dim, whole->name);
}

static enum hapt_status write(struct flow *flow, const struct hapt_op *op, int output, struct hapt_property property,
                              int cause)
{
    const int tensor = op->output[output];
    const bool partial = property.kind == HAPT_PROPERTY_PARTIAL;
    struct hapt_property *known = property_of(flow, tensor);
    if (!partial) reduce(flow, tensor);
    /* complete.c sums a partial sum that is added to a replicated gradient. */
    if (partial && flow->written[tensor] && known->kind == HAPT_PROPERTY_REPLICATED && flow->tensor_parallel)
        return HAPT_OK;
    if (flow->written[tensor] && !hapt_property_same(*known, property))
        return hapt_fail(HAPT_ERR_INFEASIBLE, "use a submesh of one device for this stage",
                         "operator %s adds to %s, which has another layout", op->name,
                         flow->graph->tensor[tensor].name);
    *known = property;
    if (cause != NONE) flow->cause[tensor] = cause;
    flow->written[tensor] = true;
    return check_even(flow, tensor, property);
}

static enum hapt_status flow_through(struct flow *flow, int index)
{
    const struct hapt_graph *graph = flow->graph;
    const struct hapt_op *op = &graph->op[index];
    struct hapt_property input[HAPT_MAX_INPUTS] = {{0}}, wanted[HAPT_MAX_OUTPUTS] = {{0}};
    struct hapt_rule rule;
    int cause = NONE;
    for (int i = 0; i < op->input_count; i++)
        if (op->input[i] >= 0) reduce(flow, op->input[i]);
    if (flow->tensor_parallel && index < graph->forward_count) lay_out_parameters(flow, op);
    for (int i = 0; i < op->input_count; i++) {
        if (op->input[i] < 0) continue;
        input[i] = *property_of(flow, op->input[i]);
        if (flow->cause[op->input[i]] != NONE) cause = flow->cause[op->input[i]];
    }
    for (int o = 0; o < op->output_count; o++) {
        if (op->output[o] < 0 || !hapt_graph_is_parameter_gradient(graph, op->output[o])) continue;
        wanted[o] = *property_of(flow, graph->tensor[op->output[o]].primal);
        if (wanted[o].kind == HAPT_PROPERTY_SHARDED) cause = flow->cause[graph->tensor[op->output[o]].primal];
    }
    flow->blame = cause;
    HAPT_TRY(hapt_rule_derive(flow->sharding, flow->axis_index, &flow->axis, index, input, wanted, &rule));
    for (int i = 0; i < op->input_count; i++)
        if (op->input[i] >= 0) HAPT_TRY(check_even(flow, op->input[i], rule.input[i]));
    for (int o = 0; o < op->output_count; o++)
        if (op->output[o] >= 0) HAPT_TRY(write(flow, op, o, rule.output[o], cause));
    flow->rule[index] = rule;
    return HAPT_OK;
}

static enum hapt_status flow_once(struct flow *flow)
{
    const struct hapt_graph *graph = flow->graph;
    for (int t = 0; t < graph->tensor_count; t++) {
        *property_of(flow, t) = input_property(flow, &graph->tensor[t]);
        flow->written[t] = flow->decided[t] = flow->uneven[t] = false;
        flow->cause[t] = NONE;
    }
    flow->blame = NONE;
    for (int o = 0; o < graph->op_count; o++) HAPT_TRY(flow_through(flow, o));
    return HAPT_OK;
}

/* After each failure, the cut that caused it is excluded from the next attempt. */
static enum hapt_status flow_axis(struct flow *flow)
{
    enum hapt_status status = flow_once(flow);
    while (status == HAPT_ERR_INFEASIBLE && flow->tensor_parallel && flow->blame != NONE && !flow->whole[flow->blame]) {
        flow->whole[flow->blame] = true;
        hapt_fail_reset();
        status = flow_once(flow);
    }
    return status;
}

static enum hapt_status list_readers(struct flow *flow, struct hapt_arena *scratch)
{
    const struct hapt_graph *graph = flow->graph;
    HAPT_NEW(flow->reader, scratch, graph->tensor_count);
    HAPT_NEW(flow->next_reader, scratch, graph->forward_count * HAPT_MAX_INPUTS);
    for (int t = 0; t < graph->tensor_count; t++) flow->reader[t] = NONE;
    for (int o = graph->forward_count - 1; o >= 0; o--) {
        for (int i = graph->op[o].input_count - 1; i >= 0; i--) {
            const int tensor = graph->op[o].input[i], at = o * HAPT_MAX_INPUTS + i;
            if (tensor < 0) continue;
            flow->next_reader[at] = flow->reader[tensor];
            flow->reader[tensor] = at;
        }
    }
    return HAPT_OK;
}

static enum hapt_status check_rows(const struct flow *flow)
{
    for (int t = 0; t < flow->graph->tensor_count; t++) {
        const struct hapt_tensor *whole = &flow->graph->tensor[t];
        if (hapt_property_fits(flow->sharding, flow->axis_index, &flow->axis, t, input_property(flow, whole))) continue;
        return hapt_fail(HAPT_ERR_INFEASIBLE, "choose a microbatch with at least one row per device",
                         "%d devices cannot share the %lld rows of %s", flow->axis.size * flow->sharding->axis[0].size,
                         (long long)whole->shape[0], whole->name);
    }
    return HAPT_OK;
}

static enum hapt_status find_rules(struct flow *flow, struct hapt_arena *scratch)
{
    const struct hapt_graph *graph = flow->graph;
    HAPT_NEW(flow->property, scratch, graph->tensor_count);
    flow->rule = hapt_arena_alloc_unset(scratch, (size_t)graph->op_count, sizeof *flow->rule);
    if (!flow->rule) return HAPT_ERR_MEMORY;
    HAPT_NEW(flow->whole, scratch, graph->tensor_count);
    HAPT_NEW(flow->written, scratch, graph->tensor_count);
    HAPT_NEW(flow->decided, scratch, graph->tensor_count);
    HAPT_NEW(flow->uneven, scratch, graph->tensor_count);
    HAPT_NEW(flow->cause, scratch, graph->tensor_count);
    HAPT_TRY(check_rows(flow));
    HAPT_TRY(list_readers(flow, scratch));
    return flow_axis(flow);
}

static enum hapt_status add_axis(const struct hapt_sharding *sharding, int axis_index, struct hapt_axis axis,
                                 bool tensor_parallel, struct hapt_arena *arena, struct hapt_sharding **expanded)
{
    struct flow flow = {.sharding = sharding,
                        .graph = sharding->graph,
                        .axis_index = axis_index,
                        .axis = axis,
                        .tensor_parallel = tensor_parallel};
    struct hapt_arena scratch;
    enum hapt_status status = HAPT_OK;
    hapt_arena_init(&scratch);
    if (axis.size > 1) status = find_rules(&flow, &scratch);
    if (status == HAPT_OK) status = expansion_apply_rules(sharding, axis_index, &flow.axis, flow.rule, arena, expanded);
    hapt_arena_release(&scratch);
    return status;
}

static enum hapt_status axis_program(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis,
                                     bool tensor_parallel, struct hapt_arena *arena, struct hapt_axis_program **program)
{
    struct flow flow = {.sharding = sharding,
                        .graph = sharding->graph,
                        .axis_index = axis_index,
                        .axis = *axis,
                        .tensor_parallel = tensor_parallel};
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    enum hapt_status status = find_rules(&flow, &scratch);
    if (status == HAPT_OK) status = expansion_program_of_rules(sharding, axis_index, axis, flow.rule, arena, program);
    hapt_arena_release(&scratch);
    return status;
}

enum hapt_status hapt_axis_program_data_parallel(const struct hapt_sharding *sharding, int axis_index,
                                                 const struct hapt_axis *axis, struct hapt_arena *arena,
                                                 struct hapt_axis_program **program)
{
    return axis_program(sharding, axis_index, axis, false, arena, program);
}

enum hapt_status hapt_axis_program_tensor_parallel(const struct hapt_sharding *sharding, int axis_index,
                                                   const struct hapt_axis *axis, struct hapt_arena *arena,
                                                   struct hapt_axis_program **program)
{
    return axis_program(sharding, axis_index, axis, true, arena, program);
}

static enum hapt_status share_rows(const struct hapt_graph *graph, struct hapt_axis axis, struct hapt_arena *arena,
                                   struct hapt_sharding **outer)
{
    struct hapt_sharding *trivial;
    HAPT_ASSERT(axis.size >= 1);
    HAPT_TRY(hapt_sharding_trivial(graph, arena, &trivial));
    return add_axis(trivial, 0, axis, false, arena, outer);
}

/* Rows over both axes. */
static enum hapt_status build(const struct hapt_graph *graph, struct hapt_axis first, int second,
                              struct hapt_arena *arena, struct hapt_sharding **sharding)
{
    struct hapt_sharding *outer;
    HAPT_ASSERT(second >= 1);
    HAPT_TRY(share_rows(graph, first, arena, &outer));
    return add_axis(outer, 1, (struct hapt_axis){.size = second}, false, arena, sharding);
}

enum hapt_status hapt_sharding_data_parallel(const struct hapt_graph *graph, int nodes, int devices,
                                             struct hapt_arena *arena, struct hapt_sharding **sharding)
{
    return build(graph, (struct hapt_axis){.size = nodes}, devices, arena, sharding);
}

enum hapt_status hapt_sharding_rows(const struct hapt_graph *graph, const struct hapt_axis *axis,
                                    struct hapt_arena *arena, struct hapt_sharding **sharding)
{
    return build(graph, *axis, 1, arena, sharding);
}

enum hapt_status hapt_sharding_tensor_parallel(const struct hapt_graph *graph, int dp, int tp, struct hapt_arena *arena,
                                               struct hapt_sharding **sharding)
{
    struct hapt_sharding *outer;
    HAPT_TRY(hapt_sharding_outer_rows(graph, dp, arena, &outer));
    return hapt_sharding_inner_tensor(outer, tp, arena, sharding);
}

enum hapt_status hapt_sharding_outer_rows(const struct hapt_graph *graph, int dp, struct hapt_arena *arena,
                                          struct hapt_sharding **outer)
{
    return share_rows(graph, (struct hapt_axis){.size = dp}, arena, outer);
}

enum hapt_status hapt_sharding_inner_tensor(const struct hapt_sharding *outer, int tp, struct hapt_arena *arena,
                                            struct hapt_sharding **sharding)
{
    HAPT_ASSERT(tp >= 1);
    return add_axis(outer, 1, (struct hapt_axis){.size = tp}, true, arena, sharding);
}
