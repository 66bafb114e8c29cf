/*
 * Shardings of a whole graph: properties flow from the inputs through all operators by their rules, one axis after the
 * other. On a tensor-parallel axis the flow starts where a parameter is cut (cut_parameters); a parameter whose cut leads
 * to a step that no rule allows stays whole, and the flow starts anew.
 */
#include <stdlib.h>
#include <string.h>

#include "hapt/env.h"
#include "rules.h"

#define NONE (-1)

struct flow {
    const struct hapt_graph *graph;
    struct hapt_sharding *made;
    int axis, size;
    bool tensor_parallel;
    bool *whole;      /* [tensor] parameters that a failed attempt excluded from cutting */
    bool *written;    /* [tensor] */
    bool *decided;    /* [tensor] parameters that an operator reads already */
    bool *padded;     /* [tensor] parameters whose cut may leave padding in the last shards */
    int *cause;       /* [tensor] the parameter whose cut shards it, or NONE */
    int *first_part;  /* [tensor] first writer of partial sums that nobody read yet, or NONE */
    int *last_part;   /* [tensor] the last one */
    int *reader;      /* [tensor] its first reader among the forward operators as op * HAPT_MAX_INPUTS + input, or NONE, */
    int *next_reader; /* [op * HAPT_MAX_INPUTS + input] ... and the next one */
    int blame;        /* the parameter whose cut made the last step fail, or NONE */
};

static struct hapt_property *property_of(const struct flow *flow, int tensor)
{
    return &flow->made->property[tensor][flow->axis];
}

static bool is_parameter_gradient(const struct hapt_graph *graph, int tensor)
{
    const struct hapt_tensor *gradient = &graph->tensor[tensor];
    return gradient->kind == HAPT_TENSOR_GRADIENT && gradient->primal >= 0 &&
           graph->tensor[gradient->primal].kind == HAPT_TENSOR_PARAMETER;
}

/* The loss scale is one number for all; every other input has a row per sample. */
static struct hapt_property input_property(const struct flow *flow, const struct hapt_tensor *tensor)
{
    if (tensor->kind != HAPT_TENSOR_INPUT || tensor->role == HAPT_ROLE_LOSS_SCALE || flow->tensor_parallel)
        return (struct hapt_property){.kind = HAPT_PROPERTY_IDENTITY};
    return (struct hapt_property){.kind = HAPT_PROPERTY_ALL_GATHER, .blocks = 1};
}

/* ---- where a cut may begin: can the readers of a tensor work on shards of it? ---- */

static bool can_read_shards(const struct flow *flow, int tensor, int dim, int depth, int *blocks, bool *padded);

/* One reader: its other operands with that index must be parameters that are not laid out otherwise, and its outputs with
 * it must find readers in turn. */
static bool reader_can(const struct flow *flow, const struct hapt_op *op, int input, int dim, int depth, int *blocks,
                       bool *padded)
{
    const struct hapt_graph *graph = flow->graph;
    const struct hapt_signature_operand *operand = &hapt_op_signature_of(graph, op)->input[input];
    struct hapt_rule rule;
    if (hapt_rule_of_letter(flow->graph, op, operand->along[dim], 1, &rule) != HAPT_OK) {
        hapt_fail_reset();
        return false;
    }
    const bool composite = operand->along[dim] != operand->letter[dim];
    if (rule.input[input].dim != dim || (composite && *blocks > 0 && *blocks != operand->blocks[dim])) return false;
    if (composite) *blocks = operand->blocks[dim];
    *padded = *padded && operand->indexed[dim];
    for (int i = 0; i < op->input_count; i++) {
        if (op->input[i] < 0 || i == input || rule.input[i].kind == HAPT_PROPERTY_IDENTITY) continue;
        const int other = op->input[i];
        if (graph->tensor[other].kind != HAPT_TENSOR_PARAMETER || flow->whole[other]) return false;
        if (flow->decided[other] && !hapt_property_same(*property_of(flow, other), rule.input[i])) return false;
    }
    for (int o = 0; o < op->output_count; o++) {
        if (rule.output[o].kind != HAPT_PROPERTY_ALL_GATHER) continue;
        int own = rule.output[o].blocks, *its = composite ? &own : blocks;
        if (!can_read_shards(flow, op->output[o], rule.output[o].dim, depth + 1, its, padded)) return false;
    }
    return true;
}

/* *blocks: as the readers want them, in and out (0: no wish yet); *padded stays true when all readers bear padding. */
static bool can_read_shards(const struct flow *flow, int tensor, int dim, int depth, int *blocks, bool *padded)
{
    if (depth > 32) return false; /* chains of operators without a parameter are short */
    for (int at = flow->reader[tensor]; at != NONE; at = flow->next_reader[at])
        if (!reader_can(flow, &flow->graph->op[at / HAPT_MAX_INPUTS], at % HAPT_MAX_INPUTS, dim, depth, blocks, padded))
            return false;
    return true;
}

/* An operator whose inputs are whole, but for parameters: may it run on shards of `letter`? Then *rule is how. */
static bool may_cut(const struct flow *flow, const struct hapt_op *op, char letter, struct hapt_rule *rule, bool *padded)
{
    int blocks = 0;
    *padded = true;
    enum hapt_status status = hapt_rule_of_letter(flow->graph, op, letter, 1, rule);
    for (int o = 0; status == HAPT_OK && o < op->output_count; o++) {
        if (rule->output[o].kind != HAPT_PROPERTY_ALL_GATHER) continue;
        if (!can_read_shards(flow, op->output[o], rule->output[o].dim, 0, &blocks, padded)) return false;
    }
    if (status == HAPT_OK && blocks > 1) status = hapt_rule_of_letter(flow->graph, op, letter, blocks, rule);
    hapt_fail_reset();
    for (int i = 0; status == HAPT_OK && i < op->input_count; i++) {
        const int tensor = op->input[i];
        if (tensor < 0 || rule->input[i].kind == HAPT_PROPERTY_IDENTITY) continue;
        if (flow->graph->tensor[tensor].kind != HAPT_TENSOR_PARAMETER || flow->whole[tensor]) return false;
        if (flow->decided[tensor] && !hapt_property_same(*property_of(flow, tensor), rule->input[i])) return false;
    }
    return status == HAPT_OK;
}

/* Lays out the parameters of an operator by a rule; those that an earlier operator reads keep theirs. */
static void lay_out_by(struct flow *flow, const struct hapt_op *op, const struct hapt_rule *rule, int cause)
{
    for (int i = 0; i < op->input_count; i++) {
        const int tensor = op->input[i];
        if (tensor < 0 || flow->graph->tensor[tensor].kind != HAPT_TENSOR_PARAMETER || flow->decided[tensor]) continue;
        *property_of(flow, tensor) = rule->input[i];
        flow->cause[tensor] = rule->input[i].kind == HAPT_PROPERTY_IDENTITY ? NONE : cause;
    }
}

/* Chooses the cut of an operator that only has whole inputs: by an index that its outputs keep (columns) or that a table is
 * indexed by. */
static void cut_parameters(struct flow *flow, const struct hapt_op *op)
{
    const struct hapt_signature *signature = hapt_op_signature_of(flow->graph, op);
    for (int i = 0; i < op->input_count; i++) {
        const int tensor = op->input[i];
        if (tensor < 0 || flow->graph->tensor[tensor].kind != HAPT_TENSOR_PARAMETER) continue;
        for (int d = 0; d < signature->input[i].dims; d++) {
            struct hapt_rule rule;
            bool padded, useful = signature->input[i].indexed[d];
            if (!may_cut(flow, op, signature->input[i].along[d], &rule, &padded)) continue;
            for (int o = 0; o < op->output_count; o++)
                useful = useful || rule.output[o].kind == HAPT_PROPERTY_ALL_GATHER;
            if (!useful) continue;
            /* A tied table has one layout; padding must suit all its readers. */
            flow->padded[tensor] = padded && (!flow->decided[tensor] || flow->padded[tensor]);
            lay_out_by(flow, op, &rule, tensor);
            return;
        }
    }
}

/* Parameters follow the activations that meet them. */
static void lay_out_parameters(struct flow *flow, const struct hapt_op *op)
{
    const struct hapt_signature *signature = hapt_op_signature_of(flow->graph, op);
    struct hapt_rule rule;
    int cause = NONE;
    char letter = 0;
    for (int i = 0; i < op->input_count; i++) {
        const int tensor = op->input[i];
        if (tensor < 0 || flow->graph->tensor[tensor].kind == HAPT_TENSOR_PARAMETER) continue;
        if (property_of(flow, tensor)->kind != HAPT_PROPERTY_ALL_GATHER) continue;
        letter = signature->input[i].along[property_of(flow, tensor)->dim];
        cause = flow->cause[tensor];
    }
    if (!letter)
        cut_parameters(flow, op);
    else if (hapt_rule_of_letter(flow->graph, op, letter, 1, &rule) == HAPT_OK)
        lay_out_by(flow, op, &rule, cause);
    hapt_fail_reset();
    for (int i = 0; i < op->input_count; i++)
        if (op->input[i] >= 0 && flow->graph->tensor[op->input[i]].kind == HAPT_TENSOR_PARAMETER)
            flow->decided[op->input[i]] = true;
}

/* ---- the flow ---- */

/* Partial sums that nobody read yet are summed behind their last writer. */
static void reduce(struct flow *flow, int tensor)
{
    if (flow->first_part[tensor] == NONE) return;
    flow->made->reduction[flow->made->reduction_count++] = (struct hapt_sharding_reduction){
        .op = flow->last_part[tensor], .first = flow->first_part[tensor], .tensor = tensor, .axis = flow->axis};
    flow->first_part[tensor] = NONE;
    *property_of(flow, tensor) = (struct hapt_property){.kind = HAPT_PROPERTY_IDENTITY};
}

/* Partial sums of these are kept as such: the loss and the gradients of parameters, which the end of a step sums. */
static bool stays_partial(const struct flow *flow, int tensor)
{
    return !flow->tensor_parallel || tensor == flow->graph->loss || is_parameter_gradient(flow->graph, tensor);
}

/* On a tensor-parallel axis shards are equal, but for tables that bear padding. */
static enum hapt_status check_even(struct flow *flow, int tensor, struct hapt_property property)
{
    if (property.kind != HAPT_PROPERTY_ALL_GATHER || !flow->tensor_parallel) return HAPT_OK;
    const struct hapt_tensor *whole = &flow->graph->tensor[tensor];
    const int cause = flow->cause[tensor], blocks = property.blocks > 1 ? property.blocks : 1;
    if (whole->shape[property.dim] % (blocks * flow->size) == 0) return HAPT_OK;
    if (cause != NONE && flow->padded[cause] && blocks == 1) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INFEASIBLE, NULL, "%d devices cannot share dimension %d of %s evenly", flow->size,
                     property.dim, whole->name);
}

/* An index inside a width is cut between its places (between heads), of which an attribute says how many there are. */
static enum hapt_status check_places(const struct flow *flow, const struct hapt_op *op, char letter)
{
    const char *sized = hapt_op_type_at(op->type)->sized;
    for (int k = 0; sized && sized[k]; k++) {
        if (sized[k] != letter || !flow->tensor_parallel || op->integer[k] % flow->size == 0) continue;
        return hapt_fail(HAPT_ERR_INFEASIBLE, NULL, "%d devices cannot share the %lld places of index %c of %s evenly",
                         flow->size, (long long)op->integer[k], letter, op->name);
    }
    return HAPT_OK;
}

static enum hapt_status write(struct flow *flow, const struct hapt_op *op, int index, int output,
                              struct hapt_property property, int cause)
{
    const int tensor = op->output[output];
    const bool partial = property.kind == HAPT_PROPERTY_ALL_REDUCE && !stays_partial(flow, tensor);
    struct hapt_property *known = property_of(flow, tensor);
    if (!partial) reduce(flow, tensor);
    const bool pending = flow->first_part[tensor] != NONE;
    if (flow->written[tensor] && !(partial && pending) && !hapt_property_same(*known, property))
        return hapt_fail(HAPT_ERR_INFEASIBLE, "use a submesh of one device for this stage",
                         "operator %s adds to %s, which is laid out otherwise", op->name,
                         flow->graph->tensor[tensor].name);
    *known = property;
    if (cause != NONE) flow->cause[tensor] = cause;
    if (partial && !pending) flow->first_part[tensor] = index;
    if (partial) flow->last_part[tensor] = index;
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
        if (op->output[o] < 0 || !is_parameter_gradient(graph, op->output[o])) continue;
        wanted[o] = *property_of(flow, graph->tensor[op->output[o]].primal);
        if (wanted[o].kind == HAPT_PROPERTY_ALL_GATHER) cause = flow->cause[graph->tensor[op->output[o]].primal];
    }
    flow->blame = cause;
    HAPT_TRY(hapt_rule_derive(graph, op, input, wanted, &rule));
    HAPT_TRY(check_places(flow, op, rule.letter));
    for (int i = 0; i < op->input_count; i++)
        if (op->input[i] >= 0) HAPT_TRY(check_even(flow, op->input[i], rule.input[i]));
    for (int o = 0; o < op->output_count; o++)
        if (op->output[o] >= 0) HAPT_TRY(write(flow, op, index, o, rule.output[o], cause));
    flow->made->once[index][flow->axis] = rule.once;
    if (rule.exchange) flow->made->exchange[index] = flow->axis;
    return HAPT_OK;
}

static void start(struct flow *flow)
{
    const struct hapt_graph *graph = flow->graph;
    int kept = 0;
    for (int t = 0; t < graph->tensor_count; t++) {
        *property_of(flow, t) = input_property(flow, &graph->tensor[t]);
        flow->written[t] = flow->decided[t] = flow->padded[t] = false;
        flow->cause[t] = flow->first_part[t] = flow->last_part[t] = NONE;
    }
    for (int o = 0; o < graph->op_count; o++) {
        flow->made->once[o][flow->axis] = 0;
        if (flow->made->exchange[o] == flow->axis) flow->made->exchange[o] = -1;
    }
    for (int r = 0; r < flow->made->reduction_count; r++)
        if (flow->made->reduction[r].axis != flow->axis) flow->made->reduction[kept++] = flow->made->reduction[r];
    flow->made->reduction_count = kept;
    flow->blame = NONE;
}

static enum hapt_status flow_once(struct flow *flow)
{
    start(flow);
    for (int o = 0; o < flow->graph->op_count; o++) HAPT_TRY(flow_through(flow, o));
    for (int t = 0; t < flow->graph->tensor_count; t++) reduce(flow, t);
    return HAPT_OK;
}

/* Every failure takes the cut that caused it out of the next attempt. */
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

static int compare_reductions(const void *a, const void *b)
{
    const struct hapt_sharding_reduction *x = a, *y = b;
    if (x->op != y->op) return x->op < y->op ? -1 : 1;
    if (x->tensor != y->tensor) return x->tensor < y->tensor ? -1 : 1;
    return x->axis - y->axis;
}

static enum hapt_status flow_all(struct hapt_sharding *made, bool tensor_parallel, struct hapt_arena *scratch)
{
    const struct hapt_graph *graph = made->graph;
    struct flow flow = {.graph = graph, .made = made};
    HAPT_NEW(flow.whole, scratch, graph->tensor_count);
    HAPT_NEW(flow.written, scratch, graph->tensor_count);
    HAPT_NEW(flow.decided, scratch, graph->tensor_count);
    HAPT_NEW(flow.padded, scratch, graph->tensor_count);
    HAPT_NEW(flow.cause, scratch, graph->tensor_count);
    HAPT_NEW(flow.first_part, scratch, graph->tensor_count);
    HAPT_NEW(flow.last_part, scratch, graph->tensor_count);
    HAPT_TRY(list_readers(&flow, scratch));
    for (flow.axis = 0; flow.axis < HAPT_MESH_AXES; flow.axis++) {
        flow.size = made->size[flow.axis];
        flow.tensor_parallel = tensor_parallel && flow.axis == 1;
        if (flow.size > 1) HAPT_TRY(flow_axis(&flow));
    }
    qsort(made->reduction, (size_t)made->reduction_count, sizeof *made->reduction, compare_reductions);
    return HAPT_OK;
}

/* ---- the graph of one rank ---- */

static enum hapt_status shard_tensor(const struct hapt_sharding *made, int index, struct hapt_tensor *tensor)
{
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++) {
        const struct hapt_property property = made->property[index][axis];
        if (property.kind != HAPT_PROPERTY_ALL_GATHER) continue;
        int64_t *extent = &tensor->shape[property.dim];
        if (*extent % made->size[axis] != 0 && tensor->kind == HAPT_TENSOR_INPUT)
            return hapt_fail(HAPT_ERR_INFEASIBLE, "choose a microbatch that the number of devices divides",
                             "%d x %d devices cannot share the %lld rows of %s evenly", made->size[0], made->size[1],
                             (long long)made->graph->tensor[index].shape[property.dim], tensor->name);
        *extent = (*extent + made->size[axis] - 1) / made->size[axis];
    }
    return HAPT_OK;
}

/* What of `letter` a local operand still has: its size where a dimension is the letter, its share of `whole` where it stands inside
 * a width; 0: the operand lacks it. */
static int64_t local_size(const struct hapt_signature_operand *operand, const struct hapt_tensor *local,
                          const struct hapt_tensor *global, char letter, int64_t whole)
{
    for (int d = 0; d < operand->dims; d++) {
        if (operand->letter[d] == letter) return local->shape[d];
        if (operand->along[d] == letter) return whole * local->shape[d] / global->shape[d];
    }
    return 0;
}

/* Attributes that are sizes of a letter. */
static void shard_op(const struct hapt_graph *graph, const struct hapt_graph *shard, struct hapt_op *op)
{
    const struct hapt_signature *signature = hapt_op_signature_of(shard, op);
    const char *sized = hapt_op_type_at(op->type)->sized;
    for (int k = 0; sized && sized[k]; k++) {
        int64_t size = 0;
        for (int i = 0; i < op->input_count; i++) {
            if (op->input[i] < 0 || size > 0) continue;
            size = local_size(&signature->input[i], &shard->tensor[op->input[i]], &graph->tensor[op->input[i]], sized[k],
                              op->integer[k]);
        }
        for (int o = 0; o < op->output_count; o++) {
            if (op->output[o] < 0 || size > 0) continue;
            size = local_size(&signature->output[o], &shard->tensor[op->output[o]], &graph->tensor[op->output[o]], sized[k],
                              op->integer[k]);
        }
        if (size > 0) op->integer[k] = size;
    }
}

static enum hapt_status shard_graph(struct hapt_sharding *made, struct hapt_arena *arena)
{
    const struct hapt_graph *graph = made->graph;
    struct hapt_graph *shard;
    HAPT_NEW(shard, arena, 1);
    *shard = *graph;
    HAPT_NEW(shard->tensor, arena, graph->tensor_count);
    HAPT_NEW(shard->op, arena, graph->op_count);
    memcpy(shard->tensor, graph->tensor, (size_t)graph->tensor_count * sizeof *graph->tensor);
    memcpy(shard->op, graph->op, (size_t)graph->op_count * sizeof *graph->op);
    shard->tensor_capacity = graph->tensor_count;
    shard->op_capacity = graph->op_count;
    for (int t = 0; t < graph->tensor_count; t++) HAPT_TRY(shard_tensor(made, t, &shard->tensor[t]));
    for (int o = 0; o < graph->op_count; o++) shard_op(graph, shard, &shard->op[o]);
    made->shard = shard;
    return HAPT_OK;
}

static enum hapt_status build(const struct hapt_graph *graph, int first, int second, bool tensor_parallel,
                              struct hapt_arena *arena, struct hapt_sharding **sharding)
{
    HAPT_ASSERT(first >= 1 && second >= 1);
    struct hapt_sharding *made;
    HAPT_NEW(made, arena, 1);
    *made = (struct hapt_sharding){.graph = graph, .shard = graph, .size = {first, second}};
    HAPT_NEW(made->property, arena, graph->tensor_count);
    HAPT_NEW(made->once, arena, graph->op_count);
    HAPT_NEW(made->exchange, arena, graph->op_count);
    HAPT_NEW(made->reduction, arena, graph->op_count * HAPT_MAX_OUTPUTS);
    for (int o = 0; o < graph->op_count; o++) made->exchange[o] = -1;
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    enum hapt_status status = flow_all(made, tensor_parallel, &scratch);
    hapt_arena_release(&scratch);
    if (status == HAPT_OK && first * second > 1) status = shard_graph(made, arena);
    if (status == HAPT_OK) *sharding = made;
    return status;
}

enum hapt_status hapt_sharding_data_parallel(const struct hapt_graph *graph, int nodes, int devices, struct hapt_arena *arena,
                                             struct hapt_sharding **sharding)
{
    return build(graph, nodes, devices, false, arena, sharding);
}

enum hapt_status hapt_sharding_tensor_parallel(const struct hapt_graph *graph, int dp, int tp, struct hapt_arena *arena,
                                               struct hapt_sharding **sharding)
{
    return build(graph, dp, tp, true, arena, sharding);
}

double hapt_sharding_exchange_bytes(const struct hapt_graph *shard, int op)
{
    const struct hapt_op *of = &shard->op[op];
    const int last = of->output[of->output_count - 1];
    return hapt_op_type_at(of->type)->exchanges * (double)sizeof(float) * (double)hapt_tensor_elements(&shard->tensor[last]);
}

static bool inside(const struct hapt_graph *graph, int op, int first_op, int end_op)
{
    return graph->op[op].forward_op >= first_op && graph->op[op].forward_op < end_op;
}

bool hapt_sharding_allows(const struct hapt_sharding *sharding, int first_op, int end_op)
{
    for (int r = 0; r < sharding->reduction_count; r++) {
        const struct hapt_sharding_reduction *reduction = &sharding->reduction[r];
        if (inside(sharding->graph, reduction->first, first_op, end_op) !=
            inside(sharding->graph, reduction->op, first_op, end_op))
            return false;
    }
    return true;
}

static void mix_into(uint64_t *mark, int64_t value)
{
    *mark = hapt_hash(*mark, &value, sizeof value);
}

void hapt_sharding_mark(const struct hapt_sharding *sharding, uint64_t *mark)
{
    const struct hapt_graph *graph = sharding->graph;
    for (int o = 0; o < graph->op_count; o++) {
        const struct hapt_op *op = &graph->op[o];
        mix_into(&mark[o], sharding->exchange[o]);
        for (int axis = 0; axis < HAPT_MESH_AXES; axis++) {
            mix_into(&mark[o], sharding->once[o][axis]);
            for (int k = 0; k < op->input_count + op->output_count; k++) {
                const int tensor = k < op->input_count ? op->input[k] : op->output[k - op->input_count];
                if (tensor < 0) continue;
                const struct hapt_property property = sharding->property[tensor][axis];
                mix_into(&mark[o], property.kind);
                if (property.kind == HAPT_PROPERTY_ALL_GATHER) mix_into(&mark[o], property.dim * 64 + property.blocks);
            }
        }
    }
    for (int r = 0; r < sharding->reduction_count; r++) {
        const struct hapt_sharding_reduction *reduction = &sharding->reduction[r];
        const int apart = graph->op[reduction->first].forward_op - graph->op[reduction->op].forward_op;
        mix_into(&mark[reduction->op], apart * 2 + reduction->axis);
        mix_into(&mark[reduction->first], -apart * 2 - reduction->axis - 2);
    }
}
