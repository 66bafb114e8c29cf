/* Presolve: removes trivial rows, and scales the rest to magnitudes near one. */
#include <math.h>

#include "solver.h"

enum { ROUNDS = 8 };

/* Turns a row of one entry into a bound of its column. */
static void tighten(struct hapt_lp *to, int column, double value, double row_lower, double row_upper)
{
    const double a = row_lower / value, b = row_upper / value;
    to->lower[column] = fmax(to->lower[column], value > 0 ? a : b);
    to->upper[column] = fmin(to->upper[column], value > 0 ? b : a);
}

static bool copy_rows(const struct hapt_lp *lp, struct hapt_lp *to)
{
    bool possible = true;
    for (int i = 0; i < lp->row_count; i++) {
        const int first = lp->start[i], count = lp->start[i + 1] - first;
        const double low = lp->row_lower[i], high = lp->row_upper[i];
        if (low > high) possible = false;
        if (low == -INFINITY && high == INFINITY) continue;
        if (count == 0)
            possible = possible && low <= 0 && high >= 0;
        else if (count == 1)
            tighten(to, lp->column[first], lp->value[first], low, high);
        else
            hapt_lp_add_row(to, low, high, count, lp->column + first, lp->value + first);
    }
    return possible;
}

static double power_of_two(double value)
{
    return value > 0 && isfinite(value) ? ldexp(1, ilogb(value * M_SQRT2)) : 1;
}

/* Scales rows and columns in turn by the geometric mean of their smallest and largest entries. */
static void equilibrate(const struct hapt_lp *lp, double *row, double *column, double *least, double *most)
{
    for (int round = 0; round < ROUNDS; round++) {
        for (int j = 0; j < lp->column_count; j++) least[j] = INFINITY, most[j] = 0;
        for (int i = 0; i < lp->row_count; i++) {
            double low = INFINITY, high = 0;
            for (int k = lp->start[i]; k < lp->start[i + 1]; k++) {
                const double size = fabs(lp->value[k]) * column[lp->column[k]];
                low = fmin(low, size);
                high = fmax(high, size);
            }
            row[i] = power_of_two(1 / sqrt(low * high));
            for (int k = lp->start[i]; k < lp->start[i + 1]; k++) {
                const double size = fabs(lp->value[k]) * row[i];
                least[lp->column[k]] = fmin(least[lp->column[k]], size);
                most[lp->column[k]] = fmax(most[lp->column[k]], size);
            }
        }
        for (int j = 0; j < lp->column_count; j++)
            if (most[j] > 0) column[j] = power_of_two(1 / sqrt(least[j] * most[j]));
    }
}

/* Geometric mean of finite nonzero values. */
struct mean {
    double octaves;
    int count;
};

static void include(struct mean *mean, double value)
{
    if (value == 0 || !isfinite(value)) return;
    mean->octaves += log2(fabs(value));
    mean->count++;
}

static double factor_of(struct mean mean)
{
    return mean.count > 0 ? exp2(round(mean.octaves / mean.count)) : 1;
}

/* Applies one factor to all bounds and right-hand sides, and one to the cost. */
static void normalise(struct hapt_lp *lp, double *column_scale)
{
    struct mean sides = {0}, costs = {0};
    for (int j = 0; j < lp->column_count; j++) {
        include(&costs, lp->cost[j]);
        include(&sides, lp->lower[j]);
        include(&sides, lp->upper[j]);
    }
    for (int i = 0; i < lp->row_count; i++) {
        include(&sides, lp->row_lower[i]);
        include(&sides, lp->row_upper[i]);
    }
    const double side_factor = factor_of(sides), cost_factor = factor_of(costs);
    for (int j = 0; j < lp->column_count; j++) {
        lp->cost[j] /= cost_factor;
        lp->lower[j] /= side_factor;
        lp->upper[j] /= side_factor;
        column_scale[j] *= side_factor;
    }
    for (int i = 0; i < lp->row_count; i++) {
        lp->row_lower[i] /= side_factor;
        lp->row_upper[i] /= side_factor;
    }
}

enum hapt_status lp_scale(const struct hapt_lp *lp, struct hapt_arena *arena, struct lp_scaled *scaled)
{
    struct hapt_lp *to;
    double *row, *least, *most;
    const int n = lp->column_count;
    HAPT_TRY(hapt_lp_create(arena, n, lp->row_count, lp->start[lp->row_count], &to));
    HAPT_NEW(scaled->column_scale, arena, n);
    HAPT_NEW(row, arena, lp->row_count);
    HAPT_NEW(least, arena, n);
    HAPT_NEW(most, arena, n);
    for (int j = 0; j < n; j++) {
        to->cost[j] = lp->cost[j];
        to->lower[j] = lp->lower[j];
        to->upper[j] = lp->upper[j];
        scaled->column_scale[j] = 1;
    }
    scaled->infeasible = !copy_rows(lp, to);
    for (int j = 0; j < n; j++) {
        /* Bounds that cross only by rounding errors become equal. */
        if (to->lower[j] <= to->upper[j]) continue;
        if (to->lower[j] - to->upper[j] > 1e-11 * (fabs(to->lower[j]) + fabs(to->upper[j]))) scaled->infeasible = true;
        to->lower[j] = to->upper[j];
    }
    double *const column = scaled->column_scale;
    equilibrate(to, row, column, least, most);
    for (int i = 0; i < to->row_count; i++) {
        to->row_lower[i] *= row[i];
        to->row_upper[i] *= row[i];
        for (int k = to->start[i]; k < to->start[i + 1]; k++) to->value[k] *= row[i] * column[to->column[k]];
    }
    for (int j = 0; j < n; j++) {
        to->cost[j] *= column[j];
        to->lower[j] /= column[j];
        to->upper[j] /= column[j];
    }
    normalise(to, column);
    scaled->lp = to;
    return HAPT_OK;
}
