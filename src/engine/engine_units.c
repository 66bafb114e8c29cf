/* The units (hapt_weight_unit) that steps belong to, for weights that move and gradients on the host. */
#include "engine_private.h"

static int unit_of(const struct hapt_engine *engine, int op)
{
    const struct hapt_memory_plan *plan = engine->plan;
    const int forward = engine->program->graph->op[op].forward_op;
    for (int u = 0; u < plan->unit_count; u++)
        if (forward >= plan->unit[u].first_op && forward < plan->unit[u].end_op) return u;
    return -1;
}

size_t hapt_engine_element_in_place(const struct hapt_engine *engine, int op, int parameter, int *u)
{
    int k = 0;
    *u = unit_of(engine, op);
    HAPT_ASSERT(*u >= 0);
    const struct hapt_weight_unit *unit = &engine->plan->unit[*u];
    while (k < unit->count && unit->weight[k].parameter != engine->program->local[parameter]) k++;
    HAPT_ASSERT(k < unit->count);
    return unit->weight[k].element;
}

enum hapt_status hapt_engine_find_units(struct hapt_engine *engine, enum hapt_section section, hapt_op_test *needs,
                                        struct step_units *units)
{
    const struct hapt_program *program = engine->program;
    const int count = program->step_count[section];
    HAPT_NEW(units->unit, &engine->arena, count);
    HAPT_NEW(units->next, &engine->arena, count);
    for (int s = count - 1, last = -1, other = -1; s >= 0; s--) {
        const int op = program->step[section][s].op, u = needs(engine, op) ? unit_of(engine, op) : -1;
        if (u >= 0 && u != last) {
            other = last;
            last = u;
        }
        units->unit[s] = u;
        units->next[s] = other;
    }
    return HAPT_OK;
}

static bool begins(const struct step_units *units, int step)
{
    int before = step - 1;
    if (!units->unit || units->unit[step] < 0) return false;
    while (before >= 0 && units->unit[before] < 0) before--;
    return before < 0 || units->unit[before] != units->unit[step];
}

bool hapt_engine_begins_unit(const struct hapt_engine *engine, enum hapt_section section, int step)
{
    return begins(&engine->weights.steps[section], step) || begins(&engine->gradients.steps[section], step);
}
