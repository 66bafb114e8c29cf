/* Solves an instance with the available solvers, and checks their answers. */
#include <math.h>
#include <pthread.h>
#include <string.h>

#include "solver.h"

/* Constraints are rows and columns together. Up to PIVOT_CONSTRAINTS pivots alone are faster: 0.07 ms against 2.5 ms of
 * the interior point method for the programs of sharding ratios, which have some hundred constraints. Above the other
 * limits the interior point method is slow or fails, and a dense inverse is too expensive. */
enum { PIVOT_CONSTRAINTS = 400, TAO_CONSTRAINTS = 1500, TAO_ENTRIES = 20000, PIVOT_COLUMNS = 2000 };
#define VERTEX_TOLERANCE 1e-9

static enum hapt_status check(const struct hapt_lp *lp)
{
    bool sound = true;
    for (int j = 0; j < lp->column_count; j++)
        sound = sound && isfinite(lp->cost[j]) && lp->lower[j] < INFINITY && lp->upper[j] > -INFINITY;
    for (int i = 0; i < lp->row_count; i++)
        sound = sound && lp->row_lower[i] < INFINITY && lp->row_upper[i] > -INFINITY;
    for (int k = 0; k < lp->start[lp->row_count]; k++) sound = sound && isfinite(lp->value[k]);
    return sound ? HAPT_OK
                 : hapt_fail(HAPT_ERR_INPUT, "look for undefined costs or times in the profile",
                             "a linear program contains undefined or infinite numbers");
}

/* State of one attempt: the scaled instance, a point and row multipliers. */
struct attempt {
    struct hapt_arena *arena;
    const struct hapt_lp *lp;
    double *x, *y, *scratch;
    int pivots;
};

static bool is_verified(const struct attempt *attempt)
{
    const double scale = lp_objective_scale(attempt->lp, attempt->x);
    const double gap =
        lp_objective(attempt->lp, attempt->x) - lp_dual_bound(attempt->lp, attempt->x, attempt->y, attempt->scratch);
    return lp_violation(attempt->lp, attempt->x) <= 2 * VERTEX_TOLERANCE && gap <= VERTEX_TOLERANCE * (scale + 1e-3);
}

/* True if the columns' bounds alone keep the objective from falling without end. */
static bool is_bounded(const struct hapt_lp *lp)
{
    for (int j = 0; j < lp->column_count; j++)
        if ((lp->cost[j] > 0 && isinf(lp->lower[j])) || (lp->cost[j] < 0 && isinf(lp->upper[j]))) return false;
    return true;
}

/* Pivots to a vertex: from the current point (warm_start), or from the bounds. */
static enum hapt_lp_result pivot(struct attempt *attempt, bool warm_start)
{
    if (attempt->lp->column_count > PIVOT_COLUMNS) return HAPT_LP_FAILED;
    const enum hapt_lp_result result =
        lp_pivot(attempt->lp, warm_start, attempt->arena, attempt->x, attempt->y, &attempt->pivots);
    if (result == HAPT_LP_OPTIMAL && !is_verified(attempt)) return HAPT_LP_FAILED;
    if (result == HAPT_LP_UNBOUNDED && is_bounded(attempt->lp))
        return HAPT_LP_FAILED; /* rounding: the other solver may */
    return result;
}

/* The interior point method, then pivots to a vertex. */
static enum hapt_lp_result interior(struct attempt *attempt)
{
    const enum hapt_lp_result result = lp_tao(attempt->lp, attempt->arena, attempt->x, attempt->y);
    return result == HAPT_LP_OPTIMAL ? pivot(attempt, true) : result;
}

static enum hapt_lp_result try_all(struct attempt *attempt, enum hapt_lp_solver solver, const char **solver_name)
{
    const struct hapt_lp *lp = attempt->lp;
    const int constraints = lp->row_count + lp->column_count, entries = lp->start[lp->row_count];
    const bool suits_tao = constraints > PIVOT_CONSTRAINTS && constraints <= TAO_CONSTRAINTS && entries <= TAO_ENTRIES;
    enum hapt_lp_result result = HAPT_LP_FAILED;
    if (lp->column_count == 0) solver = HAPT_LP_PIVOT; /* nothing to optimise */
    if (solver == HAPT_LP_TAO || (solver == HAPT_LP_AUTO && suits_tao)) {
        *solver_name = "tao";
        result = interior(attempt);
    }
    if (result == HAPT_LP_FAILED && solver != HAPT_LP_TAO) {
        *solver_name = "pivot";
        memset(attempt->x, 0, (size_t)lp->column_count * sizeof *attempt->x);
        result = pivot(attempt, false);
    }
    if (result == HAPT_LP_FAILED && solver == HAPT_LP_AUTO && !suits_tao) {
        *solver_name = "tao";
        result = interior(attempt);
    }
    return result;
}

static enum hapt_status solve(const struct hapt_lp *lp, enum hapt_lp_solver solver, struct hapt_arena *arena, double *x,
                              struct hapt_lp_solution *solution)
{
    struct attempt attempt = {.arena = arena};
    struct lp_scaled scaled;
    HAPT_TRY(lp_scale(lp, arena, &scaled));
    attempt.lp = scaled.lp;
    HAPT_NEW(attempt.x, arena, lp->column_count);
    HAPT_NEW(attempt.y, arena, scaled.lp->row_count);
    HAPT_NEW(attempt.scratch, arena, 2 * (size_t)lp->column_count);
    solution->solver = "pivot";
    solution->result = scaled.infeasible ? HAPT_LP_INFEASIBLE : try_all(&attempt, solver, &solution->solver);
    solution->pivots = attempt.pivots;
    for (int j = 0; j < lp->column_count; j++)
        x[j] = fmin(fmax(scaled.column_scale[j] * attempt.x[j], lp->lower[j]), lp->upper[j]);
    return HAPT_OK;
}

enum hapt_status hapt_lp_solve(const struct hapt_lp *lp, enum hapt_lp_solver solver, struct hapt_arena *arena,
                               struct hapt_lp_solution *solution)
{
    /* PETSc is not thread-safe. */
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    struct hapt_arena scratch;
    struct hapt_lp_solution found = {.result = HAPT_LP_FAILED, .objective = NAN};
    double *x;
    HAPT_TRY(check(lp));
    HAPT_NEW(x, arena, lp->column_count);
    hapt_arena_init(&scratch);
    pthread_mutex_lock(&lock);
    const enum hapt_status status = solve(lp, solver, &scratch, x, &found);
    pthread_mutex_unlock(&lock);
    hapt_arena_release(&scratch);
    HAPT_TRY(status);
    if (found.result == HAPT_LP_OPTIMAL) {
        found.x = x;
        found.objective = lp_objective(lp, x);
    }
    *solution = found;
    return HAPT_OK;
}
