/*
 * Linear programs: minimise cost . x subject to row_lower <= A x <= row_upper and lower <= x <= upper.
 *
 * An instance is scaled, solved by PETSc/TAO's interior point method and carried from that interior solution to a
 * vertex by pivots; GLPK's simplex method takes what is large or what TAO could not solve. Whoever solved it, `optimal`
 * is only said of a point whose feasibility was checked against the instance and whose objective meets a bound from the
 * multipliers (weak duality).
 */
#ifndef HAPT_SOLVE_H
#define HAPT_SOLVE_H

#include "hapt/arena.h"

struct hapt_lp {
    int column_count, row_count;
    double *cost;                  /* [column_count] */
    double *lower, *upper;         /* [column_count] infinite: no bound; 0 and INFINITY at first */
    double *row_lower, *row_upper; /* [row_count] */
    int *start, *column;           /* row i has entries [start[i], start[i + 1]) */
    double *value;
    int row_capacity, entry_capacity;
};

enum hapt_lp_result {
    HAPT_LP_OPTIMAL,
    HAPT_LP_INFEASIBLE, /* no x satisfies rows and bounds */
    HAPT_LP_UNBOUNDED,  /* the cost falls for ever */
    HAPT_LP_FAILED      /* no solver at hand could tell */
};

enum hapt_lp_solver {
    HAPT_LP_AUTO, /* TAO where it is good and there, else GLPK, else pivots alone */
    HAPT_LP_TAO,  /* TAO and pivots, whatever the size */
    HAPT_LP_GLPK, /* GLPK alone on the instance as given */
    HAPT_LP_PIVOT /* pivots alone, from the origin */
};

struct hapt_lp_solution {
    enum hapt_lp_result result;
    double objective;   /* cost . x, evaluated anew; NAN unless optimal */
    double *x;          /* [column_count]; NULL unless optimal */
    const char *solver; /* "tao", "glpk", "pivot": who settled it */
    int pivots;         /* from the interior solution to the vertex */
};

/* An instance in `arena` without rows yet. */
enum hapt_status hapt_lp_create(struct hapt_arena *arena, int columns, int row_capacity, int entry_capacity,
                                struct hapt_lp **lp);
/* One more row of `count` entries; `column` NULL: value [column_count] in order, where zeros are left out. Capacity is
 * the caller's promise; a column appears once in a row. */
void hapt_lp_add_row(struct hapt_lp *lp, double lower, double upper, int count, const int *column, const double *value);

/* Every outcome of a sound instance is HAPT_OK and stands in solution->result; HAPT_ERR_INPUT: a number is NaN, or
 * infinite where it must not be. The solution lives in `arena`. Rank-local and deterministic for one build; TAO takes
 * part only between MPI_Init and hapt_env_release, and one thread at a time. */
enum hapt_status hapt_lp_solve(const struct hapt_lp *lp, enum hapt_lp_solver solver, struct hapt_arena *arena,
                               struct hapt_lp_solution *solution);

const char *hapt_lp_result_name(enum hapt_lp_result result);
/* Name and version of a solver library ("PETSc 3.18.5"), or NULL and why it is not at hand. Loads the library. */
const char *hapt_lp_solver_version(enum hapt_lp_solver solver, const char **missing);

#endif
