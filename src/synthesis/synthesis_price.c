/*
 * The costs of operators and communications on an axis: the cuts of every operator, the collectives between layouts,
 * and the check and the price of a program, instruction by instruction and device by device. Independent of the search.
 */
#include <math.h>
#include <string.h>

#include "synthesis_private.h"

/* ---- cuts ---- */

enum { MOST_CUTS = 64 };

bool hapt_axis_split(const struct hapt_axis *axis, int ratio, int64_t units, int64_t *first)
{
    return hapt_split(axis->ratio ? axis->ratio + (size_t)ratio * (size_t)axis->size : NULL, axis->size, units, first);
}

/* Elements of the cut index; 0: unknown. */
static int64_t letter_size(const struct hapt_graph *graph, const struct hapt_op *op, char letter)
{
    const struct hapt_signature *signature = hapt_op_signature_of(graph, op);
    for (int k = 0; k < op->input_count + op->output_count; k++) {
        const bool input = k < op->input_count;
        const int tensor = input ? op->input[k] : op->output[k - op->input_count];
        const struct hapt_signature_operand *operand =
            input ? &signature->input[k] : &signature->output[k - op->input_count];
        for (int d = 0; tensor >= 0 && d < operand->dims; d++)
            if (operand->letter[d] == letter) return graph->tensor[tensor].shape[d];
    }
    const char *sized = hapt_op_type_at(op->type)->sized_letters;
    const char *at = sized ? strchr(sized, letter) : NULL;
    return at ? op->integer[at - sized] : 0;
}

enum hapt_status hapt_cut_rule_make(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis,
                                    int op, struct hapt_cut cut, struct hapt_cut_rule *made)
{
    struct hapt_cut_rule rule = {.cut = cut};
    if (rule.cut.blocks < 1) rule.cut.blocks = 1;
    if (rule.cut.unit < 1) rule.cut.unit = 1;
    HAPT_TRY(hapt_rule_of_cut(sharding, axis_index, axis, op, rule.cut, &rule.rule));
    if (rule.rule.exchange && sharding->exchange[op] >= 0)
        return hapt_fail(HAPT_ERR_INFEASIBLE, NULL, "operator %s would communicate over both axes while it runs",
                         sharding->graph->op[op].name);
    if (cut.letter != HAPT_CUT_REPLICATED && cut.letter != HAPT_CUT_PARTIAL) {
        const struct hapt_op *what = &sharding->shard->op[op];
        rule.units = letter_size(sharding->shard, what, cut.letter) / (rule.cut.blocks * rule.cut.unit);
        if (rule.units < axis->size)
            return hapt_fail(HAPT_ERR_INFEASIBLE, NULL,
                             "operator %s: index %c has fewer units than the axis has devices", what->name, cut.letter);
    }
    *made = rule;
    return HAPT_OK;
}

static bool same_rule(const struct hapt_op *op, const struct hapt_cut_rule *a, const struct hapt_cut_rule *b)
{
    if (a->cut.letter != b->cut.letter || a->rule.exchange != b->rule.exchange) return false;
    for (int i = 0; i < op->input_count; i++)
        if (op->input[i] >= 0 && !hapt_property_same(a->rule.input[i], b->rule.input[i])) return false;
    for (int o = 0; o < op->output_count; o++)
        if (op->output[o] >= 0 && !hapt_property_same(a->rule.output[o], b->rule.output[o])) return false;
    return true;
}

enum hapt_status hapt_cuts_enumerate(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis,
                                     const int *ratio_of, struct hapt_arena *arena, struct hapt_op_cuts *cuts)
{
    const struct hapt_graph *graph = sharding->graph;
    struct hapt_grains *grains;
    HAPT_TRY(hapt_grains_find(graph, arena, &grains));
    for (int o = 0; o < graph->op_count; o++) {
        struct hapt_cut cut[MOST_CUTS];
        const int ratio = ratio_of ? ratio_of[graph->op[o].forward_op] : 0,
                  listed = hapt_rule_cuts(graph, o, axis_index, axis, grains, cut, MOST_CUTS);
        struct hapt_cut_rule rule[MOST_CUTS];
        int count = 0;
        for (int c = 0; c < listed && c < MOST_CUTS; c++) {
            if (cut[c].letter != HAPT_CUT_REPLICATED && cut[c].letter != HAPT_CUT_PARTIAL && cut[c].ratio != ratio)
                continue;
            if (hapt_cut_rule_make(sharding, axis_index, axis, o, cut[c], &rule[count]) != HAPT_OK) continue;
            bool known = false; /* several units may give the same shares */
            for (int k = 0; k < count; k++) known = known || same_rule(&graph->op[o], &rule[k], &rule[count]);
            count += !known;
        }
        hapt_fail_reset(); /* from indices that cannot be cut */
        cuts[o].count = count;
        HAPT_NEW(cuts[o].rule, arena, count);
        memcpy(cuts[o].rule, rule, (size_t)count * sizeof *rule);
    }
    return HAPT_OK;
}

struct hapt_spmd_work hapt_work_of_rule(const struct hapt_graph *graph, int index, const struct hapt_cut_rule *rule)
{
    const struct hapt_op *op = &graph->op[index];
    struct hapt_spmd_work work = {.graph = graph, .op = index, .cut = rule->cut, .share = 1};
    for (int i = 0; i < op->input_count; i++)
        if (op->input[i] >= 0 && rule->rule.input[i].kind == HAPT_PROPERTY_SHARDED) work.sharded_input |= 1u << i;
    for (int o = 0; o < op->output_count; o++)
        if (op->output[o] >= 0 && rule->rule.output[o].kind == HAPT_PROPERTY_SHARDED) work.sharded_output |= 1u << o;
    return work;
}

/* ---- bytes of operators ---- */

static bool has_rows(const struct hapt_graph *graph, int tensor)
{
    const struct hapt_tensor *of = &graph->tensor[tensor];
    if (of->primal >= 0) of = &graph->tensor[of->primal];
    return of->kind != HAPT_TENSOR_PARAMETER && !hapt_role_is_scalar(of->role) && tensor != graph->loss;
}

double hapt_spmd_tensor_bytes(const struct hapt_graph *graph, int tensor, int sharers)
{
    return (double)hapt_tensor_bytes(&graph->tensor[tensor]) / (has_rows(graph, tensor) ? sharers : 1);
}

static double operand_bytes(const struct hapt_spmd_work *work, int tensor, bool sharded, int sharers)
{
    return hapt_spmd_tensor_bytes(work->graph, tensor, sharers) * (sharded ? work->share : 1);
}

double hapt_spmd_work_bytes(const struct hapt_spmd_work *work, int sharers)
{
    const struct hapt_op *op = &work->graph->op[work->op];
    const struct hapt_op_type *type = hapt_op_type_at(op->type);
    /* Only the indexed rows of a table are touched. */
    const double limit =
        type->operand_bytes_limit ? type->operand_bytes_limit(work->graph, op, work->share / sharers) : INFINITY;
    double bytes = 0;
    for (int i = 0; i < op->input_count; i++)
        if (op->input[i] >= 0)
            bytes += fmin(limit, operand_bytes(work, op->input[i], work->sharded_input >> i & 1u, sharers));
    for (int o = 0; o < op->output_count; o++)
        if (op->output[o] >= 0)
            bytes += fmin(limit, operand_bytes(work, op->output[o], work->sharded_output >> o & 1u, sharers)) *
                     (op->accumulate >> o & 1u ? 2 : 1);
    return bytes;
}

/* ---- collectives between layouts ---- */

/* Seconds of the collective that converts between two layouts, or of another one of the same effect. */
static double conversion_seconds(const struct hapt_spmd_costs *costs, enum hapt_collective_kind kind, double bytes,
                                 double from_share, double to_share)
{
    const double largest = kind == HAPT_COLLECTIVE_ALL_REDUCE       ? 1
                           : kind == HAPT_COLLECTIVE_REDUCE_SCATTER ? to_share
                           : kind == HAPT_COLLECTIVE_ALL_TO_ALL     ? fmax(from_share, to_share)
                                                                    : from_share;
    return kind == HAPT_COLLECTIVE_SLICE ? 0 : costs->collective_s(costs->context, kind, bytes, largest);
}

enum hapt_collective_kind hapt_conversion(const struct hapt_spmd_costs *costs, double bytes, struct hapt_property from,
                                          double from_share, struct hapt_property to, double to_share, double *seconds)
{
    const enum hapt_collective_kind kind = hapt_rule_collective(from, to), other = HAPT_COLLECTIVE_GROUPED_BROADCAST;
    *seconds = INFINITY;
    if (kind == HAPT_COLLECTIVE_NONE) return kind;
    *seconds = conversion_seconds(costs, kind, bytes, from_share, to_share);
    if (kind != HAPT_COLLECTIVE_ALL_GATHER) return kind;
    const double other_s = conversion_seconds(costs, other, bytes, from_share, to_share);
    if (!(other_s < *seconds)) return kind;
    *seconds = other_s;
    return other;
}

double hapt_exchange_seconds(const struct hapt_spmd_costs *costs, const struct hapt_graph *graph, int index)
{
    const struct hapt_op *op = &graph->op[index];
    const int last = op->output[op->output_count - 1];
    const double elements = (double)hapt_tensor_elements(&graph->tensor[last]);
    const double part = hapt_full_bytes(costs, graph, last) / (double)hapt_tensor_bytes(&graph->tensor[last]);
    return hapt_op_type_at(op->type)->inner_all_reduces *
           conversion_seconds(costs, HAPT_COLLECTIVE_ALL_REDUCE, 4 * elements * part, 1, 1);
}

/* ---- the price of a program: versions ---- */

enum { MOST_VERSIONS = 16 };

/* `kept`: for the backward part; for a parameter's gradient: has storage of its own. `past`: no operator can read
 * it any more. */
struct version {
    struct hapt_property property;
    bool forward, kept, past;
};
struct versions {
    int count;
    struct version version[MOST_VERSIONS];
    bool separate_addend; /* the last addend has a separate layout, `added`, and is not part of the others yet */
    struct hapt_property added;
};

struct pricing {
    const struct hapt_sharding *sharding; /* so far */
    int axis_index;
    const struct hapt_graph *graph;
    const struct hapt_axis *axis;
    const struct hapt_spmd_costs *costs;
    struct hapt_arena *arena;
    int64_t *first;      /* [size + 1] */
    struct versions *of; /* [tensor] of an activation, a gradient, or the one layout of a parameter */
    int *writers;        /* [tensor] number of operators that write it */
    double *since;       /* [device] s since the last synchronisation */
    int done;            /* number of operators done */
    double microbatches, in_flight, state_bytes;
    struct hapt_program_price *price;
};

static enum hapt_status refuse(const struct pricing *pricing, int tensor, const char *what)
{
    return hapt_fail(HAPT_ERR_INFEASIBLE, NULL, "tensor %s: %s", pricing->graph->tensor[tensor].name, what);
}

static const struct hapt_property whole = {.kind = HAPT_PROPERTY_REPLICATED};

static struct version *version_of(const struct pricing *pricing, int tensor, struct hapt_property property)
{
    struct versions *of = &pricing->of[tensor];
    for (int v = 0; v < of->count; v++)
        if (!of->version[v].past && hapt_property_same(of->version[v].property, property)) return &of->version[v];
    return NULL;
}

static void add(const struct pricing *pricing, int tensor, struct version version)
{
    struct versions *of = &pricing->of[tensor];
    if (version_of(pricing, tensor, version.property)) return;
    HAPT_ASSERT(of->count < MOST_VERSIONS);
    of->version[of->count++] = version;
}

static void add_version(const struct pricing *pricing, int tensor, struct hapt_property property, bool forward)
{
    add(pricing, tensor, (struct version){.property = property, .forward = forward});
}

/* Adds a version of a parameter's gradient: each of several is a part of the sum. */
static void add_part(const struct pricing *pricing, int tensor, struct hapt_property property, bool own_place)
{
    add(pricing, tensor, (struct version){.property = property, .kept = own_place});
}

static int parts_of(const struct pricing *pricing, int tensor)
{
    int parts = 0;
    for (int v = 0; v < pricing->of[tensor].count; v++) parts += !pricing->of[tensor].version[v].past;
    return parts;
}

/* The part of a tensor that every device holds, into `share` (may be NULL); *largest: the largest. */
static enum hapt_status shares(const struct pricing *pricing, int tensor, struct hapt_property property, double *share,
                               double *largest)
{
    const int size = pricing->axis->size;
    *largest = 1;
    for (int j = 0; share && j < size; j++) share[j] = 1;
    if (property.kind != HAPT_PROPERTY_SHARDED) return HAPT_OK;
    if (property.dim < 0 || property.dim >= pricing->graph->tensor[tensor].dims)
        return refuse(pricing, tensor, "has no such dimension");
    const int64_t step = (property.blocks > 1 ? property.blocks : 1) * (property.unit > 1 ? property.unit : 1);
    const int64_t extent = pricing->sharding->shard->tensor[tensor].shape[property.dim];
    if (extent % step || !hapt_axis_split(pricing->axis, property.ratio, extent / step, pricing->first))
        return refuse(pricing, tensor, "cannot be shared out in this layout");
    *largest = 0;
    for (int j = 0; j < size; j++) {
        const double part = (double)(pricing->first[j + 1] - pricing->first[j]) / (double)(extent / step);
        if (share) share[j] = part;
        *largest = fmax(*largest, part);
    }
    return HAPT_OK;
}

static void synchronise(struct pricing *pricing)
{
    pricing->price->compute_s += slowest(pricing->since, pricing->axis->size);
    memset(pricing->since, 0, (size_t)pricing->axis->size * sizeof *pricing->since);
    pricing->price->stages++;
}

/* ---- communications ---- */

static enum hapt_status communicate(struct pricing *pricing, const struct hapt_axis_instruction *instruction)
{
    const int tensor = instruction->tensor;
    const struct hapt_tensor *of = &pricing->graph->tensor[tensor];
    const bool sum = hapt_graph_is_parameter_gradient(pricing->graph, tensor),
               forward = pricing->done < pricing->graph->forward_count;
    const enum hapt_collective_kind kind = hapt_rule_collective(instruction->from, instruction->to);
    const bool grouped = instruction->kind == HAPT_COLLECTIVE_GROUPED_BROADCAST && kind == HAPT_COLLECTIVE_ALL_GATHER;
    double from_share, to_share;
    if (kind == HAPT_COLLECTIVE_NONE || (instruction->kind != kind && !grouped))
        return refuse(pricing, tensor, "no collective of that kind converts between these layouts");
    if (of->kind == HAPT_TENSOR_INPUT || (of->kind == HAPT_TENSOR_PARAMETER && kind != HAPT_COLLECTIVE_SLICE))
        return refuse(pricing, tensor, "inputs and parameters are not communicated");
    const bool joins =
        pricing->of[tensor].separate_addend && hapt_property_same(pricing->of[tensor].added, instruction->from);
    struct version *source =
        joins ? version_of(pricing, tensor, instruction->to) : version_of(pricing, tensor, instruction->from);
    if (!source) return refuse(pricing, tensor, "has no version in the source layout of a communication");
    HAPT_TRY(shares(pricing, tensor, instruction->from, NULL, &from_share));
    HAPT_TRY(shares(pricing, tensor, instruction->to, NULL, &to_share));
    if (!forward && source->forward) source->kept = true;
    if (sum && pricing->done < pricing->sharding->reduce_first)
        return refuse(pricing, tensor, "gradients of parameters are brought to their layout at the end of the step");
    if (kind != HAPT_COLLECTIVE_SLICE) {
        const struct hapt_spmd_costs costs = hapt_costs_of_tensor(pricing->costs, sum);
        const double bytes = hapt_full_bytes(pricing->costs, pricing->graph, tensor),
                     seconds = conversion_seconds(&costs, instruction->kind, bytes, from_share, to_share);
        if (sum) {
            pricing->price->end_s += seconds / pricing->microbatches;
        } else {
            synchronise(pricing);
            pricing->price->communicate_s += seconds;
        }
    }
    if (joins) pricing->of[tensor].separate_addend = false, pricing->of[tensor].count = 0;
    if (sum) {
        source->past = true;
        add_part(pricing, tensor, instruction->to, kind != HAPT_COLLECTIVE_ALL_REDUCE);
    } else {
        add_version(pricing, tensor, instruction->to, forward);
    }
    return HAPT_OK;
}

/* ---- computation ---- */

static enum hapt_status read_input(struct pricing *pricing, int tensor, struct hapt_property need)
{
    const enum hapt_tensor_kind kind = pricing->graph->tensor[tensor].kind;
    if (kind == HAPT_TENSOR_INPUT) return HAPT_OK;
    if (kind == HAPT_TENSOR_PARAMETER && pricing->of[tensor].count == 0) add_version(pricing, tensor, need, true);
    struct version *version = version_of(pricing, tensor, need);
    if (pricing->of[tensor].separate_addend) return refuse(pricing, tensor, "the last addend is not part of it yet");
    if (hapt_graph_is_parameter_gradient(pricing->graph, tensor) && parts_of(pricing, tensor) != 1)
        return refuse(pricing, tensor, "is summed over the outer axis in several parts");
    if (!version) return refuse(pricing, tensor, "has no version in the layout that an operator needs");
    if (version->forward && pricing->done >= pricing->graph->forward_count) version->kept = true;
    return HAPT_OK;
}

static void write_part(struct pricing *pricing, const struct hapt_op *op, int tensor, struct hapt_property made)
{
    const bool ends = pricing->done >= pricing->sharding->reduce_first;
    const bool in_place =
        hapt_op_type_at(op->type)->collective == HAPT_COLLECTIVE_ALL_REDUCE && pricing->writers[tensor] == 1;
    add_part(pricing, tensor, made, !(ends && in_place));
}

static enum hapt_status write_output(struct pricing *pricing, const struct hapt_op *op, int o,
                                     struct hapt_property made)
{
    const int tensor = op->output[o];
    struct versions *of = &pricing->of[tensor];
    if (hapt_graph_is_parameter_gradient(pricing->graph, tensor)) {
        write_part(pricing, op, tensor, made);
        return HAPT_OK;
    }
    if (of->separate_addend) return refuse(pricing, tensor, "the last addend is not part of it yet");
    if (op->accumulate >> o & 1u && of->count > 0 && !version_of(pricing, tensor, made)) {
        of->separate_addend = true;
        of->added = made;
        return HAPT_OK;
    }
    of->count = 0;
    add_version(pricing, tensor, made, pricing->done < pricing->graph->forward_count);
    return HAPT_OK;
}

static enum hapt_status compute(struct pricing *pricing, const struct hapt_axis_instruction *instruction)
{
    const struct hapt_op *op = &pricing->graph->op[instruction->op];
    struct hapt_cut_rule rule;
    if (instruction->op != pricing->done)
        return hapt_fail(HAPT_ERR_INFEASIBLE, NULL, "operator %s is not the next one", op->name);
    HAPT_TRY(hapt_cut_rule_make(pricing->sharding, pricing->axis_index, pricing->axis, instruction->op,
                                instruction->cut, &rule));
    for (int i = 0; i < op->input_count; i++)
        if (op->input[i] >= 0) HAPT_TRY(read_input(pricing, op->input[i], rule.rule.input[i]));
    for (int o = 0; o < op->output_count; o++)
        if (op->output[o] >= 0) HAPT_TRY(write_output(pricing, op, o, rule.rule.output[o]));
    if (rule.rule.exchange) {
        const double seconds = hapt_exchange_seconds(pricing->costs, pricing->graph, instruction->op);
        if (seconds > 0) synchronise(pricing);
        pricing->price->communicate_s += seconds;
    }
    if (rule.units && !hapt_axis_split(pricing->axis, rule.cut.ratio, rule.units, pricing->first))
        return hapt_fail(HAPT_ERR_INFEASIBLE, NULL, "operator %s cannot be shared out", op->name);
    const bool ends = instruction->op >= pricing->sharding->reduce_first;
    struct hapt_spmd_work work = hapt_work_of_rule(pricing->graph, instruction->op, &rule);
    double most = 0;
    for (int j = 0; j < pricing->axis->size; j++) {
        work.share = rule.units ? (double)(pricing->first[j + 1] - pricing->first[j]) / (double)rule.units : 1;
        const double seconds = pricing->costs->compute_s(pricing->costs->context, &work, j);
        pricing->since[j] += ends ? 0 : seconds;
        most = fmax(most, seconds);
    }
    if (ends) pricing->price->end_s += most / pricing->microbatches;
    pricing->done++;
    return HAPT_OK;
}

/* ---- the end ---- */

static enum hapt_status check_end(const struct pricing *pricing)
{
    const struct hapt_graph *graph = pricing->graph;
    if (pricing->done != graph->op_count)
        return hapt_fail(HAPT_ERR_INFEASIBLE, NULL, "the program ends before its last operator");
    for (int t = 0; t < graph->tensor_count; t++) {
        const int primal = graph->tensor[t].primal;
        if (pricing->of[t].separate_addend) return refuse(pricing, t, "the last addend never became part of it");
        if (!hapt_graph_is_parameter_gradient(graph, t) || pricing->of[t].count == 0) continue;
        if (parts_of(pricing, t) != 1) return refuse(pricing, t, "ends in several parts");
        const struct hapt_property layout = pricing->of[primal].count ? pricing->of[primal].version[0].property : whole;
        if (graph->tensor[primal].gradient == t && !version_of(pricing, t, layout))
            return refuse(pricing, t, "is not brought to the layout of its parameter");
    }
    return HAPT_OK;
}

static enum hapt_status add_bytes(struct pricing *pricing, int tensor, struct hapt_property property, double times,
                                  double *scratch)
{
    double largest;
    HAPT_TRY(shares(pricing, tensor, property, scratch, &largest));
    const double bytes = hapt_full_bytes(pricing->costs, pricing->graph, tensor);
    for (int j = 0; j < pricing->axis->size; j++) pricing->price->memory_bytes[j] += bytes * scratch[j] * times;
    return HAPT_OK;
}

static enum hapt_status add_memory(struct pricing *pricing)
{
    const struct hapt_graph *graph = pricing->graph;
    double *scratch;
    HAPT_NEW(scratch, pricing->arena, pricing->axis->size);
    for (int t = 0; t < graph->tensor_count; t++) {
        const struct hapt_tensor *tensor = &graph->tensor[t];
        const struct versions *of = &pricing->of[t];
        if (of->count == 0) continue;
        if (tensor->kind == HAPT_TENSOR_PARAMETER) {
            const double times = hapt_parameter_copies(tensor, pricing->state_bytes);
            HAPT_TRY(add_bytes(pricing, t, of->version[0].property, times, scratch));
        } else {
            const double times = hapt_graph_is_parameter_gradient(graph, t) ? 1 : pricing->in_flight;
            for (int v = 0; v < of->count; v++)
                if (of->version[v].kept) HAPT_TRY(add_bytes(pricing, t, of->version[v].property, times, scratch));
        }
    }
    return HAPT_OK;
}

enum hapt_status hapt_axis_program_price(const struct hapt_sharding *sharding, int axis_index,
                                         const struct hapt_axis *axis, const struct hapt_spmd_costs *costs,
                                         const struct hapt_synthesis_options *options,
                                         const struct hapt_axis_program *program, struct hapt_arena *arena,
                                         struct hapt_program_price *price)
{
    struct hapt_program_price made = {0};
    const struct hapt_graph *graph = sharding->graph;
    struct pricing pricing = {.sharding = sharding,
                              .axis_index = axis_index,
                              .graph = graph,
                              .axis = axis,
                              .costs = costs,
                              .arena = arena,
                              .price = &made,
                              .microbatches = hapt_microbatches(options),
                              .in_flight = hapt_in_flight(options),
                              .state_bytes = hapt_state_bytes(options)};
    HAPT_NEW(pricing.first, arena, axis->size + 1);
    HAPT_NEW(pricing.of, arena, graph->tensor_count);
    HAPT_NEW(pricing.writers, arena, graph->tensor_count);
    for (int o = 0; o < graph->op_count; o++)
        for (int k = 0; k < graph->op[o].output_count; k++)
            if (graph->op[o].output[k] >= 0) pricing.writers[graph->op[o].output[k]]++;
    HAPT_NEW(pricing.since, arena, axis->size);
    HAPT_NEW(made.memory_bytes, arena, axis->size);
    for (int i = 0; i < program->count; i++) {
        const struct hapt_axis_instruction *instruction = &program->instruction[i];
        if (instruction->op >= graph->op_count ||
            (instruction->op < 0 && (instruction->tensor < 0 || instruction->tensor >= graph->tensor_count)))
            return hapt_fail(HAPT_ERR_INPUT, NULL, "instruction %d names no operator or tensor of the graph", i);
        HAPT_TRY(instruction->op >= 0 ? compute(&pricing, instruction) : communicate(&pricing, instruction));
    }
    synchronise(&pricing); /* the last stage */
    HAPT_TRY(check_end(&pricing));
    HAPT_TRY(add_memory(&pricing));
    made.cost_s = made.compute_s + made.communicate_s + made.end_s;
    *price = made;
    return HAPT_OK;
}
