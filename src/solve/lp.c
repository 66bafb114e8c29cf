/* Linear programs: construction, violation, objective and dual bound of a solution. */
#include <math.h>
#include <string.h>

#include "solver.h"

enum hapt_status hapt_lp_create(struct hapt_arena *arena, int columns, int row_capacity, int entry_capacity,
                                struct hapt_lp **out)
{
    struct hapt_lp *lp;
    HAPT_ASSERT(columns >= 0 && row_capacity >= 0 && entry_capacity >= 0);
    HAPT_NEW(lp, arena, 1);
    lp->column_count = columns;
    lp->row_capacity = row_capacity;
    lp->entry_capacity = entry_capacity;
    HAPT_NEW(lp->cost, arena, columns);
    HAPT_NEW(lp->lower, arena, columns);
    HAPT_NEW(lp->upper, arena, columns);
    HAPT_NEW(lp->row_lower, arena, row_capacity);
    HAPT_NEW(lp->row_upper, arena, row_capacity);
    HAPT_NEW(lp->start, arena, row_capacity + 1);
    HAPT_NEW(lp->column, arena, entry_capacity);
    HAPT_NEW(lp->value, arena, entry_capacity);
    for (int j = 0; j < columns; j++) lp->upper[j] = INFINITY;
    *out = lp;
    return HAPT_OK;
}

void hapt_lp_add_row(struct hapt_lp *lp, double lower, double upper, int count, const int *column, const double *value)
{
    HAPT_ASSERT(lp->row_count < lp->row_capacity);
    const int row = lp->row_count++;
    int end = lp->start[row];
    lp->row_lower[row] = lower;
    lp->row_upper[row] = upper;
    for (int k = 0; k < count; k++) {
        if (value[k] == 0) continue;
        HAPT_ASSERT(end < lp->entry_capacity);
        lp->column[end] = column ? column[k] : k;
        HAPT_ASSERT(lp->column[end] >= 0 && lp->column[end] < lp->column_count);
        lp->value[end++] = value[k];
    }
    lp->start[row + 1] = end;
}

const char *hapt_lp_result_name(enum hapt_lp_result result)
{
    static const char *const name[] = {"optimal", "infeasible", "unbounded", "failed"};
    return name[result];
}

double lp_objective(const struct hapt_lp *lp, const double *x)
{
    double sum = 0;
    for (int j = 0; j < lp->column_count; j++) sum += lp->cost[j] * x[j];
    return sum;
}

double lp_objective_scale(const struct hapt_lp *lp, const double *x)
{
    double sum = 0;
    for (int j = 0; j < lp->column_count; j++) sum += fabs(lp->cost[j] * x[j]);
    return sum;
}

double lp_violation(const struct hapt_lp *lp, const double *x)
{
    double worst = 0;
    for (int j = 0; j < lp->column_count; j++) {
        if (!isfinite(x[j])) return INFINITY;
        worst = fmax(worst, fmax(lp->lower[j] - x[j], x[j] - lp->upper[j]) / (1 + fabs(x[j])));
    }
    for (int i = 0; i < lp->row_count; i++) {
        double sum = 0, scale = 1;
        for (int k = lp->start[i]; k < lp->start[i + 1]; k++) {
            const double term = lp->value[k] * x[lp->column[k]];
            sum += term;
            scale += fabs(term);
        }
        worst = fmax(worst, fmax(lp->row_lower[i] - sum, sum - lp->row_upper[i]) / scale);
    }
    return worst;
}

double lp_dual_bound(const struct hapt_lp *lp, const double *x, const double *y, double *scratch)
{
    double bound = 0, *reduced = scratch, *scale = scratch + lp->column_count;
    for (int j = 0; j < lp->column_count; j++) {
        reduced[j] = lp->cost[j];
        scale[j] = fabs(lp->cost[j]);
    }
    for (int i = 0; i < lp->row_count; i++) {
        const double side = y[i] > 0 ? lp->row_lower[i] : lp->row_upper[i];
        if (y[i] == 0 || !isfinite(y[i]) || !isfinite(side)) continue; /* such a multiplier proves nothing */
        bound += y[i] * side;
        for (int k = lp->start[i]; k < lp->start[i + 1]; k++) {
            reduced[lp->column[k]] -= lp->value[k] * y[i];
            scale[lp->column[k]] += fabs(lp->value[k] * y[i]);
        }
    }
    for (int j = 0; j < lp->column_count; j++) {
        const double side = reduced[j] > 0 ? lp->lower[j] : lp->upper[j];
        /* Rounding alone: a bound far from x, such as the memory of a large device, would make a gap of it. */
        const double rounding = isfinite(side) ? 1e-14 * scale[j] : 1e-10 * (1 + scale[j]);
        if (reduced[j] == 0) continue;
        if (fabs(reduced[j]) <= rounding)
            bound += reduced[j] * x[j];
        else if (isfinite(side))
            bound += reduced[j] * side;
        else
            return -INFINITY;
    }
    return bound;
}
