/* Shared by the solvers of this room: checks of a solution, and the solvers. */
#ifndef HAPT_SOLVE_SOLVER_H
#define HAPT_SOLVE_SOLVER_H

#include "hapt/solve.h"

/* TAO's interior point method: x [column_count] inside the bounds, and row multipliers y [row_count] of 0. Returns
 * HAPT_LP_FAILED, without a message, if it finds no answer or is not part of this build. */
enum hapt_lp_result lp_tao(const struct hapt_lp *lp, struct hapt_arena *arena, double *x, double *y);

/* Largest violation of a row or bound, relative to 1 + the magnitudes of its terms. */
double lp_violation(const struct hapt_lp *lp, const double *x);
double lp_objective(const struct hapt_lp *lp, const double *x);
/* Sum of |cost_j x_j|: the scale for rounding errors of the objective. */
double lp_objective_scale(const struct hapt_lp *lp, const double *x);
/* Lower bound on the objective of every feasible point (weak duality). A reduced cost that pushes towards a missing
 * bound is evaluated at x if it is a rounding error; otherwise the bound is -INFINITY. */
double lp_dual_bound(const struct hapt_lp *lp, const double *x, const double *y, double *scratch);

/* An instance without empty and free rows, with rows of one entry turned into bounds. Rows, columns, cost and
 * right-hand sides are scaled by powers of two. Columns keep their indices. */
struct lp_scaled {
    struct hapt_lp *lp;
    double *column_scale; /* [column_count] original x = column_scale * scaled x */
    bool infeasible;      /* bounds or an empty row contradict each other */
};
enum hapt_status lp_scale(const struct hapt_lp *lp, struct hapt_arena *arena, struct lp_scaled *scaled);

/* Pivots from any point `x` to an optimal vertex, or to a proof that there is none. `warm_start`: x is nearly optimal,
 * so constraints it nearly meets are taken as active. Result, x and y as in lp_library.solve. */
enum hapt_lp_result lp_pivot(const struct hapt_lp *lp, bool warm_start, struct hapt_arena *arena, double *x, double *y,
                             int *pivots);

#endif
