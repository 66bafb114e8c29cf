/*
 * Linear programs: minimise cost . x subject to row_lower <= A x <= row_upper and lower <= x <= upper.
 *
 * An instance is scaled. Small ones are solved by pivots alone, a dual and primal simplex method, which is fastest
 * there. Larger ones are solved by PETSc/TAO's interior point method and moved from that interior solution to a vertex
 * by pivots. Each takes over where the other fails.
 * `optimal` is reported only after two checks against the instance: x is feasible, and its objective meets the bound
 * from the multipliers (weak duality).
 *
 * Integer programs: the same, and chosen columns take integers. Branch and bound over linear programs.
 */
#ifndef HAPT_SOLVE_H
#define HAPT_SOLVE_H

#include "hapt/arena.h"

struct hapt_lp {
    int column_count, row_count;
    double *cost;                  /* [column_count] */
    double *lower, *upper;         /* [column_count] infinite: no bound; initially 0 and INFINITY */
    double *row_lower, *row_upper; /* [row_count] */
    int *start, *column;           /* row i has entries [start[i], start[i + 1]) */
    double *value;
    int row_capacity, entry_capacity;
};

enum hapt_lp_result {
    HAPT_LP_OPTIMAL,
    HAPT_LP_INFEASIBLE, /* no x satisfies rows and bounds */
    HAPT_LP_UNBOUNDED,  /* the cost decreases without bound */
    HAPT_LP_FAILED      /* no available solver found an answer */
};

enum hapt_lp_solver {
    HAPT_LP_AUTO, /* by size: pivots alone, or TAO and pivots where it is available */
    HAPT_LP_TAO,  /* TAO and pivots, for any size */
    HAPT_LP_PIVOT /* pivots alone, from the origin */
};

struct hapt_lp_solution {
    enum hapt_lp_result result;
    double objective;   /* cost . x, evaluated again; NAN unless optimal */
    double *x;          /* [column_count]; NULL unless optimal */
    const char *solver; /* "tao" or "pivot": the solver that gave the result */
    int pivots;         /* from the interior solution to the vertex */
    int nodes;          /* of an integer program: the linear programs that it took */
};

/* Creates an instance in `arena`, without rows yet. */
enum hapt_status hapt_lp_create(struct hapt_arena *arena, int columns, int row_capacity, int entry_capacity,
                                struct hapt_lp **lp);
/* Adds a row of `count` entries. `column` NULL: value [column_count] is dense; zeros are skipped. The caller must not
 * exceed the capacities nor repeat a column in a row. */
void hapt_lp_add_row(struct hapt_lp *lp, double lower, double upper, int count, const int *column, const double *value);

/* Returns HAPT_OK for every outcome of a valid instance; see solution->result. HAPT_ERR_INPUT: a number is NaN, or
 * infinite where that is not allowed. The solution lives in `arena`. Rank-local and deterministic for one build. TAO is
 * used only between MPI_Init and hapt_env_release, and by one thread at a time. */
enum hapt_status hapt_lp_solve(const struct hapt_lp *lp, enum hapt_lp_solver solver, struct hapt_arena *arena,
                               struct hapt_lp_solution *solution);

/* The same with integer[column_count]: columns that take integers. relative_gap: the objective may be so much of itself
 * above the least one; 0: only by rounding. Equal columns make equal branches: merge them into one column that counts
 * them. HAPT_LP_UNBOUNDED: the linear program is. HAPT_LP_FAILED also after a million nodes. */
enum hapt_status hapt_milp_solve(const struct hapt_lp *lp, const bool *integer, double relative_gap,
                                 struct hapt_arena *arena, struct hapt_lp_solution *solution);

const char *hapt_lp_result_name(enum hapt_lp_result result);
/* PETSc's version ("PETSc 3.18.5"); if it is not available, NULL and the reason. Loads the library. */
const char *hapt_lp_petsc_version(const char **missing);

#endif
