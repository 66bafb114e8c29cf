/*
 * The units of operators of stages in plan files; each table is optional:
 *
 *     recomputed_unit [K][3]  the stage, and the operators [first, end) of each unit that is recomputed. If some are
 *                             selective, [K][4]: whether the unit is
 *     weight_unit [K][3]      the stage, and the operators [first, end) of each unit of weights on the host
 */
#include <stdio.h>

#include "plan_private.h"

#define MAX_UNITS (1 << 20)

static const struct table {
    const char *name;
    bool weights;
} tables[] = {{"recomputed_unit", false}, {"weight_unit", true}};
enum { TABLES = sizeof tables / sizeof *tables };

static const struct hapt_unit *units_of(const struct table *table, const struct hapt_layout *layout, int *count)
{
    *count = table->weights ? layout->weight_unit_count : layout->unit_count;
    return table->weights ? layout->weight_unit : layout->unit;
}

static void add_unit(const struct table *table, struct hapt_layout *layout, struct hapt_unit *unit)
{
    int *const count = table->weights ? &layout->weight_unit_count : &layout->unit_count;
    if ((*count)++ > 0) return; /* the units of a stage lie side by side */
    if (table->weights)
        layout->weight_unit = unit;
    else
        layout->unit = unit;
}

static enum hapt_status write_table(struct hapt_h5 *file, const char *group, const struct hapt_plan *plan,
                                    const struct table *table, struct hapt_arena *scratch)
{
    int64_t shape[2] = {0, 3};
    char path[512];
    int *row, *next, count;
    for (int i = 0; i < plan->stage_count; i++) {
        const struct hapt_unit *unit = units_of(table, &plan->stage[i].layout, &count);
        shape[0] += count;
        for (int u = 0; u < count && !table->weights; u++)
            if (unit[u].selective) shape[1] = 4;
    }
    if (shape[0] == 0) return HAPT_OK;
    HAPT_NEW(row, scratch, shape[0] * shape[1]);
    next = row;
    for (int i = 0; i < plan->stage_count; i++) {
        const struct hapt_unit *unit = units_of(table, &plan->stage[i].layout, &count);
        for (int u = 0; u < count; u++, next += shape[1]) {
            next[0] = i;
            next[1] = unit[u].first_op;
            next[2] = unit[u].end_op;
            if (shape[1] == 4) next[3] = unit[u].selective;
        }
    }
    snprintf(path, sizeof path, "%s/%s", group, table->name);
    return hapt_h5_write(file, path, HAPT_H5_I32, 2, shape, row, "");
}

enum hapt_status plan_write_units(struct hapt_h5 *file, const char *group, const struct hapt_plan *plan,
                                  struct hapt_arena *scratch)
{
    for (int t = 0; t < TABLES; t++) HAPT_TRY(write_table(file, group, plan, &tables[t], scratch));
    return HAPT_OK;
}

static enum hapt_status damaged(struct hapt_h5 *file, const struct table *table, const char *what)
{
    return hapt_fail(HAPT_ERR_INPUT, "create the plan again with `hapt plan --output`", "%s: %s %s", hapt_h5_path(file),
                     table->name, what);
}

static enum hapt_status read_table(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                   struct hapt_plan *plan, const struct table *table)
{
    int64_t shape[2] = {-1, table->weights ? 3 : -1};
    char path[512];
    struct hapt_unit *unit;
    void *data;
    snprintf(path, sizeof path, "%s/%s", group, table->name);
    if (!hapt_h5_exists(file, path)) return HAPT_OK;
    HAPT_TRY(hapt_h5_read(file, path, HAPT_H5_I32, 2, shape, 4 * MAX_UNITS, arena, &data));
    if (shape[1] != 3 && shape[1] != 4) return damaged(file, table, "has neither 3 nor 4 columns");
    HAPT_NEW(unit, arena, shape[0]);
    for (int64_t k = 0; k < shape[0]; k++) {
        const int *row = (const int *)data + shape[1] * k;
        if (row[0] < (k > 0 ? row[-shape[1]] : 0) || row[0] >= plan->stage_count)
            return damaged(file, table, "names stages that do not exist, or not in order");
        if (shape[1] == 4 && row[3] != 0 && row[3] != 1)
            return damaged(file, table, "says neither 0 nor 1 of whether a unit is selective");
        unit[k] = (struct hapt_unit){row[1], row[2], shape[1] == 4 && row[3] == 1, 0};
        add_unit(table, &plan->stage[row[0]].layout, &unit[k]);
    }
    return HAPT_OK;
}

enum hapt_status plan_read_units(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                 struct hapt_plan *plan)
{
    for (int t = 0; t < TABLES; t++) HAPT_TRY(read_table(file, group, arena, plan, &tables[t]));
    return HAPT_OK;
}
