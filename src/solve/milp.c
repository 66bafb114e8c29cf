/*
 * Integer programs: branch and bound over linear programs, depth first.
 *
 * A node is the program with narrower bounds of one column than its parent. Its linear program gives a bound; the
 * column farthest from an integer divides it. The half on the side of the nearer integer comes first. Rounded points
 * that satisfy all rows are answers, too, if all columns are integers.
 */
#include <math.h>
#include <string.h>

#include "solver.h"

enum { MOST_NODES = 1000000 };
#define INTEGER_TOLERANCE 1e-6
#define FEASIBLE_TOLERANCE 1e-7
#define COST_TOLERANCE 1e-9

/* The bounds of a column at a depth, in place of those that its ancestors gave it. */
struct narrowing {
    int depth, column;
    double lower, upper;
};

struct branching {
    const struct hapt_lp *lp;
    const bool *integer;
    bool all_integer;
    double gap;
    struct hapt_lp node;        /* the program with the bounds of a node */
    struct hapt_arena *scratch; /* the stacks */
    struct narrowing *open;     /* nodes to visit, the next one last */
    struct narrowing *path;     /* [depth + 1] the bounds that the path to the node has replaced */
    int open_count, depth, room;
    double *x, *rounded; /* [column_count] the best answer so far, if `found` */
    double objective;
    bool found;
    const char *solver;
    int nodes, pivots;
};

static enum hapt_status more_room(struct branching *branching)
{
    const int room = branching->room > 0 ? 2 * branching->room : 64;
    struct narrowing *open, *path;
    HAPT_NEW(open, branching->scratch, room);
    HAPT_NEW(path, branching->scratch, room);
    if (branching->room > 0) {
        memcpy(open, branching->open, (size_t)branching->open_count * sizeof *open);
        memcpy(path, branching->path, (size_t)(branching->depth + 1) * sizeof *path);
    }
    branching->open = open;
    branching->path = path;
    branching->room = room;
    return HAPT_OK;
}

/* Goes from the last node to a child of one of its ancestors, or of itself. */
static void go_to(struct branching *branching, struct narrowing next)
{
    struct hapt_lp *node = &branching->node;
    for (; branching->depth >= next.depth; branching->depth--) {
        const struct narrowing *old = &branching->path[branching->depth];
        node->lower[old->column] = old->lower;
        node->upper[old->column] = old->upper;
    }
    branching->depth = next.depth;
    branching->path[next.depth] =
        (struct narrowing){next.depth, next.column, node->lower[next.column], node->upper[next.column]};
    node->lower[next.column] = next.lower;
    node->upper[next.column] = next.upper;
}

/* Solves the node's linear program; its point lives in `arena`. */
static enum hapt_status relax(struct branching *branching, struct hapt_arena *arena, struct hapt_lp_solution *relaxed)
{
    HAPT_TRY(hapt_lp_solve(&branching->node, HAPT_LP_AUTO, arena, relaxed));
    branching->nodes++;
    branching->pivots += relaxed->pivots;
    branching->solver = relaxed->solver;
    return HAPT_OK;
}

static void keep(struct branching *branching, const double *x)
{
    const double objective = lp_objective(branching->lp, x);
    if (branching->found && objective >= branching->objective) return;
    branching->objective = objective;
    branching->found = true;
    memcpy(branching->x, x, (size_t)branching->lp->column_count * sizeof *x);
}

/* Tries the point with all columns rounded: up from 1 - `up` above an integer on. False: it violates a row. */
static bool keep_rounded(struct branching *branching, const double *x, double up)
{
    for (int j = 0; j < branching->lp->column_count; j++)
        branching->rounded[j] = fmin(fmax(floor(x[j] + up), branching->node.lower[j]), branching->node.upper[j]);
    if (lp_violation(branching->lp, branching->rounded) > FEASIBLE_TOLERANCE) return false;
    keep(branching, branching->rounded);
    return true;
}

/* The integer column that is farthest from an integer; -1: all are integers. */
static int most_fractional(const struct branching *branching, const double *x)
{
    double most = INTEGER_TOLERANCE;
    int column = -1;
    for (int j = 0; j < branching->lp->column_count; j++) {
        const double apart = branching->integer[j] ? fabs(x[j] - round(x[j])) : 0;
        if (apart <= most) continue;
        most = apart;
        column = j;
    }
    return column;
}

/* Takes a node's point whose integer columns are integers but for rounding; the others follow the exact integers. */
static enum hapt_status keep_vertex(struct branching *branching, const double *x, struct hapt_arena *arena,
                                    enum hapt_lp_result *result)
{
    const int columns = branching->lp->column_count;
    struct hapt_lp fixed = *branching->lp;
    struct hapt_lp_solution solution;
    if (branching->all_integer) {
        if (!keep_rounded(branching, x, 0.5)) *result = HAPT_LP_FAILED;
        return HAPT_OK;
    }
    HAPT_NEW(fixed.lower, arena, columns);
    HAPT_NEW(fixed.upper, arena, columns);
    for (int j = 0; j < columns; j++) {
        fixed.lower[j] = branching->integer[j] ? round(x[j]) : branching->lp->lower[j];
        fixed.upper[j] = branching->integer[j] ? round(x[j]) : branching->lp->upper[j];
    }
    HAPT_TRY(hapt_lp_solve(&fixed, HAPT_LP_AUTO, arena, &solution));
    if (solution.result == HAPT_LP_OPTIMAL)
        keep(branching, solution.x);
    else
        *result = HAPT_LP_FAILED;
    return HAPT_OK;
}

/* True if the node may have a better answer than the best so far. */
static bool is_open(const struct branching *branching, double bound)
{
    if (!branching->found) return true;
    const double scale = lp_objective_scale(branching->lp, branching->x);
    return bound < branching->objective - COST_TOLERANCE * scale - branching->gap * fabs(branching->objective);
}

static enum hapt_status divide(struct branching *branching, int column, double value)
{
    const struct hapt_lp *node = &branching->node;
    const int depth = branching->depth + 1;
    const struct narrowing below = {depth, column, node->lower[column], floor(value)},
                           above = {depth, column, ceil(value), node->upper[column]};
    const bool nearer_below = value - floor(value) < 0.5;
    while (branching->open_count + 2 > branching->room || depth + 1 > branching->room) HAPT_TRY(more_room(branching));
    branching->open[branching->open_count++] = nearer_below ? above : below;
    branching->open[branching->open_count++] = nearer_below ? below : above;
    return HAPT_OK;
}

/* Visits the node: closes it, or divides it. `result` changes only to end the search. */
static enum hapt_status visit(struct branching *branching, struct hapt_arena *arena, enum hapt_lp_result *result)
{
    struct hapt_lp_solution relaxed;
    HAPT_TRY(relax(branching, arena, &relaxed));
    if (relaxed.result != HAPT_LP_OPTIMAL) {
        if (relaxed.result != HAPT_LP_INFEASIBLE) *result = relaxed.result;
        return HAPT_OK;
    }
    if (!is_open(branching, relaxed.objective)) return HAPT_OK;
    const int column = most_fractional(branching, relaxed.x);
    if (column < 0) return keep_vertex(branching, relaxed.x, arena, result);
    if (branching->all_integer) {
        keep_rounded(branching, relaxed.x, 0.5);
        keep_rounded(branching, relaxed.x, 0);
        keep_rounded(branching, relaxed.x, 1 - INTEGER_TOLERANCE);
        if (!is_open(branching, relaxed.objective)) return HAPT_OK;
    }
    return divide(branching, column, relaxed.x[column]);
}

/* Copies the program with bounds of integer columns that are integers. False: a column has none. */
static enum hapt_status begin(struct branching *branching, bool *possible)
{
    const struct hapt_lp *lp = branching->lp;
    const int columns = lp->column_count;
    branching->node = *lp;
    branching->all_integer = *possible = true;
    HAPT_NEW(branching->node.lower, branching->scratch, columns);
    HAPT_NEW(branching->node.upper, branching->scratch, columns);
    HAPT_NEW(branching->x, branching->scratch, columns);
    HAPT_NEW(branching->rounded, branching->scratch, columns);
    for (int j = 0; j < columns; j++) {
        const bool integer = branching->integer[j];
        branching->node.lower[j] = integer ? ceil(lp->lower[j] - INTEGER_TOLERANCE) : lp->lower[j];
        branching->node.upper[j] = integer ? floor(lp->upper[j] + INTEGER_TOLERANCE) : lp->upper[j];
        branching->all_integer = branching->all_integer && integer;
        if (branching->node.lower[j] > branching->node.upper[j]) *possible = false;
    }
    return more_room(branching);
}

static enum hapt_status search(struct branching *branching, enum hapt_lp_result *result)
{
    bool possible;
    HAPT_TRY(begin(branching, &possible));
    *result = HAPT_LP_OPTIMAL;
    for (bool root = true; possible && (root || branching->open_count > 0) && *result == HAPT_LP_OPTIMAL;
         root = false) {
        struct hapt_arena arena;
        if (!root) go_to(branching, branching->open[--branching->open_count]);
        hapt_arena_init(&arena);
        const enum hapt_status status = visit(branching, &arena, result);
        hapt_arena_release(&arena);
        HAPT_TRY(status);
        if (branching->nodes >= MOST_NODES && branching->open_count > 0) *result = HAPT_LP_FAILED;
    }
    if (*result == HAPT_LP_OPTIMAL && !branching->found) *result = HAPT_LP_INFEASIBLE;
    return HAPT_OK;
}

enum hapt_status hapt_milp_solve(const struct hapt_lp *lp, const bool *integer, double relative_gap,
                                 struct hapt_arena *arena, struct hapt_lp_solution *solution)
{
    struct hapt_arena scratch;
    struct branching branching = {
        .lp = lp, .integer = integer, .gap = relative_gap, .scratch = &scratch, .solver = "pivot"};
    enum hapt_lp_result result = HAPT_LP_FAILED;
    double *x;
    HAPT_NEW(x, arena, lp->column_count);
    hapt_arena_init(&scratch);
    const enum hapt_status status = search(&branching, &result);
    *solution = (struct hapt_lp_solution){.result = result,
                                          .objective = NAN,
                                          .solver = branching.solver,
                                          .pivots = branching.pivots,
                                          .nodes = branching.nodes};
    if (status == HAPT_OK && result == HAPT_LP_OPTIMAL) {
        memcpy(x, branching.x, (size_t)lp->column_count * sizeof *x);
        solution->x = x;
        solution->objective = branching.objective;
    }
    hapt_arena_release(&scratch);
    return status;
}
