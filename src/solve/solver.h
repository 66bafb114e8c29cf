/* What the solvers of this room share: checks of a solution, and one table a library. */
#ifndef HAPT_SOLVE_SOLVER_H
#define HAPT_SOLVE_SOLVER_H

#include "hapt/solve.h"

/* A library that solves instances; absent ones leave `solve` NULL and say in `missing` what is not there. */
struct lp_library {
    const char *name;
    const char *missing; /* NULL: in this build */
    /* Name and version; NULL with the reason in *missing when it cannot be used in this process. */
    const char *(*version)(const char **missing);
    /* x [column_count] and multipliers of rows y [row_count]; HAPT_LP_FAILED without a message whenever it cannot tell.
     */
    enum hapt_lp_result (*solve)(const struct hapt_lp *lp, struct hapt_arena *arena, double *x, double *y);
};
extern const struct lp_library lp_tao, lp_glpk;

/* Largest violation of a row or bound, relative to 1 + the magnitudes that meet there. */
double lp_violation(const struct hapt_lp *lp, const double *x);
double lp_objective(const struct hapt_lp *lp, const double *x);
/* Sum of |cost_j x_j|: what rounding of the objective is measured against. */
double lp_objective_scale(const struct hapt_lp *lp, const double *x);
/* No point that satisfies rows and bounds has a lower objective (weak duality). Reduced costs of columns that have no
 * bound on the side they push to count at x if they are rounding errors, else the bound is -INFINITY. */
double lp_dual_bound(const struct hapt_lp *lp, const double *x, const double *y, double *scratch);

/* Rows without entries and free rows are gone, rows of one entry became bounds, rows, columns, cost and right-hand
 * sides are scaled by powers of two. Columns stay where they are. */
struct lp_scaled {
    struct hapt_lp *lp;
    double *column_scale; /* [column_count] x of the original is column_scale * x of the scaled one */
    bool infeasible;      /* bounds or an empty row contradict each other */
};
enum hapt_status lp_scale(const struct hapt_lp *lp, struct hapt_arena *arena, struct lp_scaled *scaled);

/* Pivots from `x`, any point, to an optimal vertex, or to a proof that there is none. `near`: x is nearly optimal, so
 * constraints that it nearly meets are taken as active. Result, x and y as in lp_library.solve. */
enum hapt_lp_result lp_pivot(const struct hapt_lp *lp, bool near, struct hapt_arena *arena, double *x, double *y,
                             int *pivots);

#endif
