/* The cuts of every operator that an axis can share out. Only this file of synthesis uses the sharding rules. */
#include <string.h>

#include "hapt/ratios.h"
#include "hapt/sharding.h"
#include "synthesis_private.h"

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
