/* Sharding rules derived from index signatures. */
#include "hapt/rules.h"

/* The dimension that is sharded if `letter` is, or -1. */
static int position(const struct hapt_signature_operand *operand, char letter)
{
    for (int d = 0; d < operand->dims; d++)
        if (operand->sharded_with[d] == letter) return d;
    return -1;
}

static enum hapt_status refuse(const struct hapt_op *op, const char *why)
{
    return hapt_fail(HAPT_ERR_INFEASIBLE, "use a submesh of one device for this stage", "operator %s (%s) %s", op->name,
                     hapt_op_type_at(op->type)->name, why);
}

/* Elements of an index, from an operand with that dimension or from the attribute with its size; 0: unknown. */
static int64_t letter_extent(const struct hapt_graph *graph, const struct hapt_op *op,
                             const struct hapt_signature *signature, char letter)
{
    for (int k = 0; k < op->input_count + op->output_count; k++) {
        const int tensor = k < op->input_count ? op->input[k] : op->output[k - op->input_count];
        const struct hapt_signature_operand *operand =
            k < op->input_count ? &signature->input[k] : &signature->output[k - op->input_count];
        for (int d = 0; tensor >= 0 && d < operand->dims; d++)
            if (operand->letter[d] == letter) return graph->tensor[tensor].shape[d];
    }
    const char *sized = hapt_op_type_at(op->type)->sized_letters;
    for (int k = 0; sized && sized[k]; k++)
        if (sized[k] == letter) return op->integer[k];
    return 0;
}

struct reading {
    const struct hapt_graph *graph;
    const struct hapt_op *op;
    const struct hapt_signature *signature;
    struct hapt_cut cut;
    bool indexed; /* an integer operand indexes the letter */
};

static enum hapt_status shard_operand(struct reading *reading, const struct hapt_signature_operand *operand, int tensor,
                                      int dim, struct hapt_property *property)
{
    const struct hapt_cut cut = reading->cut;
    if (!operand->shardable[dim]) return refuse(reading->op, "cannot be sharded on that dimension");
    *property =
        (struct hapt_property){HAPT_PROPERTY_SHARDED, dim, operand->blocks[dim] * (cut.blocks > 1 ? cut.blocks : 1),
                               cut.unit > 1 ? cut.unit : 1, cut.ratio};
    if (operand->indexed[dim]) {
        if (property->blocks > 1) return refuse(reading->op, "is indexed by values, so it cannot be sharded in blocks");
        reading->indexed = true;
    }
    if (operand->sharded_with[dim] != operand->letter[dim]) { /* inside a width */
        const int64_t width = reading->graph->tensor[tensor].shape[dim];
        const int64_t units =
            operand->blocks[dim] * letter_extent(reading->graph, reading->op, reading->signature, cut.letter);
        if (units < 1 || width % units != 0)
            return refuse(reading->op, "has a width that is not divisible by its index");
        property->unit *= width / units;
    }
    return HAPT_OK;
}

/*
 * Optional inputs are terms, added to the product that the letters describe. If the outputs become partial sums, only
 * one shard adds a term without the letter. Optional outputs are the gradients of such terms, computed from the last
 * input: if that is replicated, so are they.
 */
static enum hapt_status apply_outputs(struct reading *reading, struct hapt_rule *rule)
{
    const struct hapt_op *op = reading->op;
    const struct hapt_signature *signature = reading->signature;
    const char letter = reading->cut.letter;
    bool partial = false;
    for (int o = 0; o < op->output_count; o++) {
        const struct hapt_signature_operand *operand = &signature->output[o];
        const int dim = position(operand, letter);
        if (dim >= 0) {
            HAPT_TRY(shard_operand(reading, operand, op->output[o], dim, &rule->output[o]));
        } else if (reading->indexed && hapt_op_type_at(op->type)->inner_all_reduces > 0) {
            rule->exchange = true;
        } else if (!operand->optional || position(&signature->input[op->input_count - 1], letter) >= 0) {
            rule->output[o].kind = HAPT_PROPERTY_PARTIAL;
            partial = true;
        }
    }
    for (int i = 0; partial && i < op->input_count; i++)
        if (op->input[i] >= 0 && signature->input[i].optional && position(&signature->input[i], letter) < 0)
            rule->first_rank_inputs |= 1u << i;
    return HAPT_OK;
}

static enum hapt_status pass_partial(const struct hapt_op *op, struct hapt_rule *rule)
{
    if (!hapt_op_type_at(op->type)->linear) return refuse(op, "would read partial sums");
    for (int i = 0; i < op->input_count; i++) rule->input[i].kind = HAPT_PROPERTY_PARTIAL;
    for (int o = 0; o < op->output_count; o++) rule->output[o].kind = HAPT_PROPERTY_PARTIAL;
    return HAPT_OK;
}

/* An outer axis' collective moves data between dimensions integer[1] and integer[2], so the inner axis must not
 * shard them. */
static bool is_moved(const struct hapt_op *op, int axis_index, const struct hapt_property *property)
{
    if (!hapt_op_type_at(op->type)->collective || op->integer[0] >= axis_index) return false;
    return property->kind == HAPT_PROPERTY_SHARDED &&
           (property->dim == op->integer[1] || property->dim == op->integer[2]);
}

enum hapt_status hapt_rule_of_signature(const struct hapt_graph *graph, const struct hapt_op *op, int axis_index,
                                        struct hapt_cut cut, struct hapt_rule *rule)
{
    struct reading reading = {.graph = graph, .op = op, .signature = hapt_op_signature_of(graph, op), .cut = cut};
    struct hapt_rule made = {.cut = cut};
    bool found = false;
    if (cut.letter == HAPT_CUT_REPLICATED) {
        *rule = made;
        return HAPT_OK;
    }
    if (cut.letter == HAPT_CUT_PARTIAL) {
        HAPT_TRY(pass_partial(op, &made));
        *rule = made;
        return HAPT_OK;
    }
    for (int i = 0; i < op->input_count; i++) {
        const int dim = position(&reading.signature->input[i], cut.letter);
        if (op->input[i] < 0 || dim < 0) continue;
        HAPT_TRY(shard_operand(&reading, &reading.signature->input[i], op->input[i], dim, &made.input[i]));
        found = true;
    }
    for (int o = 0; o < op->output_count; o++)
        found = found || position(&reading.signature->output[o], cut.letter) >= 0;
    if (!found) return refuse(op, "has no such index");
    HAPT_TRY(apply_outputs(&reading, &made));
    if (is_moved(op, axis_index, &made.input[0])) return refuse(op, "moves that dimension over another axis");
    *rule = made;
    return HAPT_OK;
}

static enum hapt_status fit(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis,
                            const struct hapt_op *op, int tensor, struct hapt_property *property)
{
    if (tensor < 0) return HAPT_OK;
    if (!hapt_property_fits(sharding, axis_index, axis, tensor, *property))
        return hapt_fail(HAPT_ERR_INFEASIBLE, "use a smaller submesh for this stage",
                         "operator %s (%s): %d devices cannot share dimension %d of %s", op->name,
                         hapt_op_type_at(op->type)->name, axis->size, property->dim,
                         sharding->graph->tensor[tensor].name);
    *property = hapt_property_canonical(sharding, axis_index, axis, tensor, *property);
    return HAPT_OK;
}

enum hapt_status hapt_rule_of_cut(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis,
                                  int op, struct hapt_cut cut, struct hapt_rule *rule)
{
    const struct hapt_op *what = &sharding->graph->op[op];
    struct hapt_rule made;
    if (cut.letter == HAPT_CUT_REPLICATED) return hapt_rule_of_signature(sharding->graph, what, axis_index, cut, rule);
    HAPT_TRY(hapt_rule_of_signature(sharding->graph, what, axis_index, cut, &made));
    for (int i = 0; cut.letter == HAPT_CUT_PARTIAL && i < what->input_count; i++) {
        const enum hapt_tensor_kind kind =
            what->input[i] < 0 ? HAPT_TENSOR_ACTIVATION : sharding->graph->tensor[what->input[i]].kind;
        if (kind == HAPT_TENSOR_INPUT || kind == HAPT_TENSOR_PARAMETER)
            return refuse(what, "would read partial sums of a model input or a parameter");
    }
    for (int i = 0; i < what->input_count; i++)
        HAPT_TRY(fit(sharding, axis_index, axis, what, what->input[i], &made.input[i]));
    for (int o = 0; o < what->output_count; o++)
        HAPT_TRY(fit(sharding, axis_index, axis, what, what->output[o], &made.output[o]));
    *rule = made;
    return HAPT_OK;
}

/* The cut that gives an operand a property. Inside a width the cut's unit is 1: the width's canonical unit may be
 * simpler. */
static struct hapt_cut cut_of(struct hapt_property property, const struct hapt_signature_operand *operand)
{
    const int blocks = (property.blocks > 1 ? property.blocks : 1) / operand->blocks[property.dim];
    const bool inside = operand->sharded_with[property.dim] != operand->letter[property.dim];
    return (struct hapt_cut){operand->sharded_with[property.dim], blocks > 1 ? blocks : 1,
                             inside || property.unit < 1 ? 1 : property.unit, property.ratio};
}

/* The cut that shards the inputs so; HAPT_CUT_REPLICATED if every input is replicated. */
static enum hapt_status cut_of_inputs(const struct hapt_op *op, const struct hapt_signature *signature,
                                      const struct hapt_property *input, struct hapt_cut *cut)
{
    *cut = (struct hapt_cut){.letter = HAPT_CUT_REPLICATED};
    for (int i = 0; i < op->input_count; i++) {
        if (op->input[i] < 0 || input[i].kind == HAPT_PROPERTY_REPLICATED) continue;
        if (input[i].kind == HAPT_PROPERTY_PARTIAL) {
            *cut = (struct hapt_cut){.letter = HAPT_CUT_PARTIAL};
            return HAPT_OK;
        }
        const struct hapt_signature_operand *operand = &signature->input[i];
        if (input[i].dim >= operand->dims) return refuse(op, "cannot be sharded on that dimension");
        const struct hapt_cut its = cut_of(input[i], operand);
        if (cut->letter && its.letter != cut->letter) return refuse(op, "has inputs sharded on different indices");
        const bool inside = operand->sharded_with[input[i].dim] != operand->letter[input[i].dim];
        if (!cut->letter || !inside) *cut = its;
    }
    return HAPT_OK;
}

/* The cut of an output wanted sharded, if no input has its letter. */
static void cut_of_wanted(const struct hapt_op *op, const struct hapt_signature *signature,
                          const struct hapt_property *wanted, struct hapt_cut *cut)
{
    for (int o = 0; o < op->output_count; o++) {
        if (wanted[o].kind != HAPT_PROPERTY_SHARDED || wanted[o].dim >= signature->output[o].dims) continue;
        const char its = signature->output[o].sharded_with[wanted[o].dim];
        bool of_input = false;
        for (int i = 0; i < op->input_count; i++)
            of_input = of_input || (op->input[i] >= 0 && position(&signature->input[i], its) >= 0);
        if (of_input) continue;
        *cut = cut_of(wanted[o], &signature->output[o]);
        return;
    }
}

enum hapt_status hapt_rule_derive(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis,
                                  int op, const struct hapt_property *input, const struct hapt_property *wanted,
                                  struct hapt_rule *rule)
{
    const struct hapt_op *what = &sharding->graph->op[op];
    const struct hapt_signature *signature = hapt_op_signature_of(sharding->graph, what);
    struct hapt_cut cut;
    struct hapt_rule made;
    HAPT_TRY(cut_of_inputs(what, signature, input, &cut));
    if (!cut.letter && wanted) cut_of_wanted(what, signature, wanted, &cut);
    HAPT_TRY(hapt_rule_of_cut(sharding, axis_index, axis, op, cut, &made));
    for (int i = 0; i < what->input_count; i++)
        if (what->input[i] >= 0 && !hapt_property_same(input[i], made.input[i]))
            return refuse(what, "has one input sharded on an index and another that is not");
    *rule = made;
    return HAPT_OK;
}

enum hapt_collective_kind hapt_rule_collective(struct hapt_property from, struct hapt_property to)
{
    if (to.kind == HAPT_PROPERTY_PARTIAL || hapt_property_same(from, to)) return HAPT_COLLECTIVE_NONE;
    if (to.kind == HAPT_PROPERTY_REPLICATED)
        return from.kind == HAPT_PROPERTY_PARTIAL ? HAPT_COLLECTIVE_ALL_REDUCE : HAPT_COLLECTIVE_ALL_GATHER;
    if (from.kind == HAPT_PROPERTY_PARTIAL) return HAPT_COLLECTIVE_REDUCE_SCATTER;
    return from.kind == HAPT_PROPERTY_REPLICATED ? HAPT_COLLECTIVE_SLICE : HAPT_COLLECTIVE_ALL_TO_ALL;
}

bool hapt_rule_moves(enum hapt_collective_kind kind, struct hapt_property from, struct hapt_property to)
{
    if (kind == HAPT_COLLECTIVE_GROUPED_BROADCAST) kind = HAPT_COLLECTIVE_ALL_GATHER;
    return kind != HAPT_COLLECTIVE_NONE && hapt_rule_collective(from, to) == kind;
}

/* ---- enumeration ---- */

static bool note_grain(struct hapt_grains *grains, int tensor, int dim, struct hapt_grain grain)
{
    int *count = &grains->count[tensor][dim];
    struct hapt_grain *known = grains->grain[tensor][dim];
    for (int g = 0; g < *count; g++)
        if (known[g].blocks == grain.blocks && known[g].unit == grain.unit) return false;
    if (*count == HAPT_MAX_GRAINS) return false;
    known[(*count)++] = grain;
    return true;
}

static int operand_of(const struct hapt_op *op, const struct hapt_signature *signature, int k,
                      const struct hapt_signature_operand **operand)
{
    const bool input = k < op->input_count;
    *operand = input ? &signature->input[k] : &signature->output[k - op->input_count];
    return input ? op->input[k] : op->output[k - op->input_count];
}

/* A dimension with a letter gets the grains of all other dimensions with that letter. */
static bool pass_grains(const struct hapt_graph *graph, const struct hapt_op *op, struct hapt_grains *grains)
{
    const struct hapt_signature *signature = hapt_op_signature_of(graph, op);
    const int operands = op->input_count + op->output_count;
    bool changed = false;
    for (int k = 0; k < operands; k++) {
        const struct hapt_signature_operand *from, *to;
        const int tensor = operand_of(op, signature, k, &from);
        for (int d = 0; tensor >= 0 && d < from->dims; d++) {
            if (from->sharded_with[d] != from->letter[d]) {
                const int64_t width = graph->tensor[tensor].shape[d];
                const int64_t units = from->blocks[d] * letter_extent(graph, op, signature, from->sharded_with[d]);
                if (units > 0 && width % units == 0)
                    changed =
                        note_grain(grains, tensor, d, (struct hapt_grain){from->blocks[d], width / units}) || changed;
                continue;
            }
            for (int j = 0; j < operands; j++) {
                const int other = operand_of(op, signature, j, &to);
                for (int e = 0; j != k && other >= 0 && e < to->dims; e++)
                    for (int g = 0; to->letter[e] == from->letter[d] && to->sharded_with[e] == to->letter[e] &&
                                    g < grains->count[tensor][d];
                         g++)
                        changed = note_grain(grains, other, e, grains->grain[tensor][d][g]) || changed;
            }
        }
    }
    return changed;
}

enum hapt_status hapt_grains_find(const struct hapt_graph *graph, struct hapt_arena *arena, struct hapt_grains **grains)
{
    struct hapt_grains *made;
    HAPT_NEW(made, arena, 1);
    HAPT_NEW(made->count, arena, graph->tensor_count);
    HAPT_NEW(made->grain, arena, graph->tensor_count);
    for (int t = 0; t < graph->tensor_count; t++)
        for (int d = 0; d < graph->tensor[t].dims; d++) note_grain(made, t, d, (struct hapt_grain){1, 1});
    for (bool changed = true; changed;) {
        changed = false;
        for (int o = 0; o < graph->op_count; o++) changed = pass_grains(graph, &graph->op[o], made) || changed;
    }
    *grains = made;
    return HAPT_OK;
}

struct listing {
    const struct hapt_graph *graph;
    const struct hapt_op *op;
    int axis_index;
    struct hapt_cut *cut;
    int room, count;
};

static void list_cut(struct listing *listing, struct hapt_cut cut)
{
    struct hapt_rule rule;
    for (int c = 0; c < listing->count && c < listing->room; c++) {
        const struct hapt_cut *known = &listing->cut[c];
        if (known->letter == cut.letter && known->blocks == cut.blocks && known->unit == cut.unit &&
            known->ratio == cut.ratio)
            return;
    }
    if (hapt_rule_of_signature(listing->graph, listing->op, listing->axis_index, cut, &rule) != HAPT_OK) {
        hapt_fail_reset();
        return;
    }
    if (listing->count < listing->room) listing->cut[listing->count] = cut;
    listing->count++;
}

int hapt_rule_cuts(const struct hapt_graph *graph, int op, int axis_index, const struct hapt_axis *axis,
                   const struct hapt_grains *grains, struct hapt_cut *cut, int room)
{
    const struct hapt_op *what = &graph->op[op];
    const struct hapt_signature *signature = hapt_op_signature_of(graph, what);
    const int ratios = axis->ratio ? axis->ratio_count : 1;
    struct listing listing = {.graph = graph, .op = what, .axis_index = axis_index, .cut = cut, .room = room};
    list_cut(&listing, (struct hapt_cut){.letter = HAPT_CUT_REPLICATED, .blocks = 1, .unit = 1});
    if (hapt_op_type_at(what->type)->linear)
        list_cut(&listing, (struct hapt_cut){.letter = HAPT_CUT_PARTIAL, .blocks = 1, .unit = 1});
    for (int k = 0; k < what->input_count + what->output_count; k++) {
        const struct hapt_signature_operand *operand;
        const int tensor = operand_of(what, signature, k, &operand);
        for (int d = 0; tensor >= 0 && d < operand->dims; d++) {
            const bool inside = operand->sharded_with[d] != operand->letter[d];
            const int count = grains && !inside ? grains->count[tensor][d] : 1;
            for (int g = 0; g < count; g++) {
                const struct hapt_grain grain =
                    grains && !inside ? grains->grain[tensor][d][g] : (struct hapt_grain){1, 1};
                for (int ratio = 0; ratio < ratios; ratio++)
                    list_cut(&listing, (struct hapt_cut){operand->sharded_with[d], grain.blocks, grain.unit, ratio});
            }
        }
    }
    return listing.count;
}
