/* Linear programs: TAO with pivots behind it, pivots alone and GLPK agree on every instance. */
#include "lp_oracle.h"
#include "test.h"

#include <signal.h>

#include "hapt/solve.h"

enum { KINDS = 8 };
static const char *const kind_name[KINDS] = {"dense",        "degenerate", "badly scaled", "ratios",
                                             "ratios, ties", "free",       "infeasible",   "unbounded"};

static double between(uint64_t *seed, double low, double high)
{
    return low + (high - low) * hapt_random_unit(seed);
}

static int count_from(uint64_t *seed, int low, int high)
{
    return low + (int)(hapt_random_next(seed) % (uint64_t)(high - low + 1));
}

/* Rows around a point inside the box: feasible and bounded. `integer`: small whole numbers, so that many rows meet in
 * one vertex. */
static struct hapt_lp *random_box(uint64_t *seed, struct hapt_arena *arena, bool integer)
{
    const int n = count_from(seed, 1, 30), m = count_from(seed, 0, 40);
    struct hapt_lp *lp;
    double inside[32], row[32];
    CHECK_OK(hapt_lp_create(arena, n, m + 2, (m + 2) * n, &lp));
    for (int j = 0; j < n; j++) {
        lp->cost[j] = integer ? count_from(seed, -3, 3) : between(seed, -1, 1);
        lp->lower[j] = integer ? count_from(seed, -2, 0) : between(seed, -10, 0);
        lp->upper[j] = integer ? count_from(seed, 1, 3) : between(seed, 0, 10);
        inside[j] =
            integer ? (lp->lower[j] > -1 ? 0 : count_from(seed, -1, 1)) : between(seed, lp->lower[j], lp->upper[j]);
    }
    for (int i = 0; i < m; i++) {
        double sum = 0;
        for (int j = 0; j < n; j++) {
            row[j] = hapt_random_next(seed) % 3 == 0 ? 0 : integer ? count_from(seed, -1, 1) : between(seed, -1, 1);
            sum += row[j] * inside[j];
        }
        const double below = integer ? count_from(seed, 0, 2) : between(seed, 0, 1),
                     above = integer ? 0 : between(seed, 0, 1);
        switch (hapt_random_next(seed) % 5) {
        case 0: hapt_lp_add_row(lp, sum, sum, n, NULL, row); break;
        case 1: hapt_lp_add_row(lp, -INFINITY, sum + above, n, NULL, row); break;
        case 2: hapt_lp_add_row(lp, sum - below, sum + above, n, NULL, row); break;
        default: hapt_lp_add_row(lp, sum - below, INFINITY, n, NULL, row);
        }
    }
    return lp;
}

/* Scales rows and columns differently. */
static void distort(struct hapt_lp *lp, uint64_t *seed)
{
    for (int j = 0; j < lp->column_count; j++) {
        const double unit = pow(10, between(seed, -4, 4));
        lp->cost[j] *= unit;
        lp->lower[j] /= unit;
        lp->upper[j] /= unit;
        for (int k = 0; k < lp->start[lp->row_count]; k++)
            if (lp->column[k] == j) lp->value[k] *= unit;
    }
    for (int i = 0; i < lp->row_count; i++) {
        const double unit = pow(10, between(seed, -4, 4));
        lp->row_lower[i] *= unit;
        lp->row_upper[i] *= unit;
        for (int k = lp->start[i]; k < lp->start[i + 1]; k++) lp->value[k] *= unit;
    }
}

/* HAP (3) in epigraph form: ratios B, their largest M, and a time for each stage. `ties`: equal devices and equal
 * stages. */
static struct hapt_lp *random_ratios(uint64_t *seed, struct hapt_arena *arena, bool ties)
{
    enum { STAGES = 64, DEVICES = 8, WIDTH = DEVICES + 1 + STAGES };
    struct hapt_lp *lp;
    double row[WIDTH], speed[DEVICES];
    const double unit = pow(10, between(seed, -6, 0)), traffic = pow(10, between(seed, -3, 3));
    CHECK_OK(hapt_lp_create(arena, WIDTH, STAGES * DEVICES + DEVICES + 1, 3 * STAGES * DEVICES + 3 * DEVICES, &lp));
    for (int d = 0; d < DEVICES; d++) speed[d] = ties ? 1 + d / 4 : between(seed, 1, 8);
    memset(row, 0, sizeof row);
    for (int d = 0; d < DEVICES; d++) row[d] = 1;
    hapt_lp_add_row(lp, 1, 1, WIDTH, NULL, row);
    for (int d = 0; d < DEVICES; d++) {
        memset(row, 0, sizeof row);
        row[d] = -1;
        row[DEVICES] = 1;
        hapt_lp_add_row(lp, 0, INFINITY, WIDTH, NULL, row);
    }
    for (int s = 0; s < STAGES; s++) {
        const double work = ties ? 1 + s % 3 : pow(10, between(seed, -2, 2));
        const double whole = hapt_random_next(seed) % 3 ? 0 : ties ? 0.5 : work * between(seed, 0, 1);
        lp->cost[DEVICES + 1 + s] = 1;
        lp->cost[DEVICES] += unit * traffic * (ties ? 1 : between(seed, 0, 1)) / STAGES;
        for (int d = 0; d < DEVICES; d++) {
            memset(row, 0, sizeof row);
            row[d] = -unit * work / speed[d];
            row[DEVICES + 1 + s] = 1;
            hapt_lp_add_row(lp, unit * whole / speed[d], INFINITY, WIDTH, NULL, row);
        }
    }
    return lp;
}

/* Columns without bounds, limited by rows only. The cost is a combination of rows with the right signs. */
static struct hapt_lp *random_free(uint64_t *seed, struct hapt_arena *arena, bool bounded)
{
    const int n = count_from(seed, 2, 20), m = count_from(seed, n, 2 * n);
    struct hapt_lp *lp;
    double row[32], inside[32];
    CHECK_OK(hapt_lp_create(arena, n, m, m * n, &lp));
    for (int j = 0; j < n; j++) {
        lp->lower[j] = -INFINITY;
        inside[j] = between(seed, -5, 5);
    }
    for (int i = 0; i < m; i++) {
        const double weight = hapt_random_next(seed) % 2 ? between(seed, 0, 1) : 0;
        double sum = 0;
        for (int j = 0; j < n; j++) {
            row[j] = between(seed, -1, 1);
            sum += row[j] * inside[j];
            lp->cost[j] += weight * row[j];
        }
        hapt_lp_add_row(lp, sum - between(seed, 0, 1), INFINITY, n, NULL, row);
    }
    /* A direction that reaches no row and reduces the cost. */
    for (int j = 0; !bounded && j < n; j++) lp->cost[j] = j == 0 ? -1 : 0;
    for (int k = 0; !bounded && k < lp->start[lp->row_count]; k++)
        if (lp->column[k] == 0) lp->value[k] = fabs(lp->value[k]);
    return lp;
}

/* Two rows that contradict a combination of others. */
static struct hapt_lp *random_infeasible(uint64_t *seed, struct hapt_arena *arena)
{
    struct hapt_lp *lp = random_box(seed, arena, false), *more;
    const int n = lp->column_count, m = lp->row_count;
    double row[32], sum = 0;
    CHECK_OK(hapt_lp_create(arena, n, m + 2, (m + 2) * n, &more));
    for (int j = 0; j < n; j++) {
        more->cost[j] = lp->cost[j];
        more->lower[j] = lp->lower[j];
        more->upper[j] = lp->upper[j];
        row[j] = between(seed, 0.1, 1);
        sum += row[j] * lp->upper[j];
    }
    for (int i = 0; i < m; i++)
        hapt_lp_add_row(more, lp->row_lower[i], lp->row_upper[i], lp->start[i + 1] - lp->start[i],
                        lp->column + lp->start[i], lp->value + lp->start[i]);
    hapt_lp_add_row(more, sum + between(seed, 0.01, 1), INFINITY, n, NULL, row);
    return more;
}

static struct hapt_lp *make(int kind, uint64_t *seed, struct hapt_arena *arena)
{
    struct hapt_lp *lp;
    switch (kind) {
    case 0: return random_box(seed, arena, false);
    case 1: return random_box(seed, arena, true);
    case 2:
        lp = random_box(seed, arena, hapt_random_next(seed) % 2);
        distort(lp, seed);
        return lp;
    case 3: return random_ratios(seed, arena, false);
    case 4: return random_ratios(seed, arena, true);
    case 5: return random_free(seed, arena, true);
    case 6: return random_infeasible(seed, arena);
    default: return random_free(seed, arena, false);
    }
}

/* The size of a column: its largest finite bound, or its value. */
static double reach(const struct hapt_lp *lp, const double *x, int j)
{
    const double low = isfinite(lp->lower[j]) ? fabs(lp->lower[j]) : 0,
                 high = isfinite(lp->upper[j]) ? fabs(lp->upper[j]) : 0;
    return fmax(fabs(x[j]), fmax(low, high));
}

/* The largest violation of rows and bounds, each relative to the size of its terms. */
static double violation(const struct hapt_lp *lp, const double *x)
{
    double worst = 0;
    for (int j = 0; j < lp->column_count; j++)
        worst = fmax(worst, fmax(lp->lower[j] - x[j], x[j] - lp->upper[j]) / fmax(1e-12, reach(lp, x, j)));
    for (int i = 0; i < lp->row_count; i++) {
        double sum = 0, scale = 1e-12;
        for (int k = lp->start[i]; k < lp->start[i + 1]; k++) {
            sum += lp->value[k] * x[lp->column[k]];
            scale += fabs(lp->value[k]) * reach(lp, x, lp->column[k]);
        }
        worst = fmax(worst, fmax(lp->row_lower[i] - sum, sum - lp->row_upper[i]) / scale);
    }
    return worst;
}

static double apart(const struct hapt_lp *lp, const struct hapt_lp_solution *a, const struct hapt_lp_solution *b)
{
    double scale = 1e-12;
    /* Objectives near zero are compared relative to the size of their terms. */
    for (int j = 0; j < lp->column_count; j++) scale += fabs(lp->cost[j]) * reach(lp, b->x, j);
    return fabs(a->objective - b->objective) / fmax(fabs(b->objective), 1e-3 * scale);
}

static bool agree(const struct hapt_lp *lp, const struct hapt_lp_solution *a, const struct hapt_lp_solution *b)
{
    if (a->result != b->result) return false;
    return a->result != HAPT_LP_OPTIMAL || apart(lp, a, b) <= 1e-6;
}

struct tally {
    int solved[4], by_tao, pivots;
    double seconds, worst;
};

static void compare(int kind, int instance, struct tally *tally)
{
    static const enum hapt_lp_result expected[KINDS] = {[6] = HAPT_LP_INFEASIBLE, [7] = HAPT_LP_UNBOUNDED};
    uint64_t seed = (uint64_t)(1000003 * kind + instance);
    struct hapt_lp_solution own, tao, pivot, reference;
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const struct hapt_lp *lp = make(kind, &seed, &arena);
    const double start = hapt_time_s();
    CHECK_OK(hapt_lp_solve(lp, HAPT_LP_AUTO, &arena, &own));
    tally->seconds += hapt_time_s() - start;
    CHECK_OK(hapt_lp_solve(lp, HAPT_LP_PIVOT, &arena, &pivot));
    if (!lp_oracle(lp, &arena, &reference)) reference = pivot;
    CHECK_OK(hapt_lp_solve(lp, HAPT_LP_TAO, &arena, &tao));
    tally->solved[own.result]++;
    tally->by_tao += tao.result != HAPT_LP_FAILED;
    tally->pivots += own.pivots;
    CHECK_MESSAGE(own.result == expected[kind], "%s %d: %s by %s", kind_name[kind], instance,
                  hapt_lp_result_name(own.result), own.solver);
    CHECK_MESSAGE(agree(lp, &own, &reference), "%s %d: %s %.12g by %s, reference %s %.12g", kind_name[kind], instance,
                  hapt_lp_result_name(own.result), own.objective, own.solver, hapt_lp_result_name(reference.result),
                  reference.objective);
    CHECK_MESSAGE(agree(lp, &pivot, &own), "%s %d: %s %.12g by pivots alone, %s %.12g by %s", kind_name[kind], instance,
                  hapt_lp_result_name(pivot.result), pivot.objective, hapt_lp_result_name(own.result), own.objective,
                  own.solver);
    if (tao.result != HAPT_LP_FAILED)
        CHECK_MESSAGE(agree(lp, &tao, &own), "%s %d: tao says %s %.12g", kind_name[kind], instance,
                      hapt_lp_result_name(tao.result), tao.objective);
    if (own.result == HAPT_LP_OPTIMAL) {
        CHECK_MESSAGE(violation(lp, own.x) < 1e-7, "%s %d: constraints are violated by %g", kind_name[kind], instance,
                      violation(lp, own.x));
        if (reference.result == HAPT_LP_OPTIMAL) tally->worst = fmax(tally->worst, apart(lp, &own, &reference));
    }
    hapt_arena_release(&arena);
}

static void random_instances(void)
{
    const char *no_tao, *tao = hapt_lp_petsc_version(&no_tao);
    fprintf(stderr, "%s\n", tao ? tao : no_tao);
    CHECK(tao || no_tao);
    for (int kind = 0; kind < KINDS; kind++) {
        const int count = (test_long() ? 20 : 1) * (kind == 3 || kind == 4 ? 50 : 120);
        struct tally tally = {0};
        for (int i = 0; i < count; i++) compare(kind, i, &tally);
        fprintf(stderr, "%-13s %5d instances: %d optimal, %d infeasible, %d unbounded, %d failed; %d by tao; ",
                kind_name[kind], count, tally.solved[0], tally.solved[1], tally.solved[2], tally.solved[3],
                tally.by_tao);
        fprintf(stderr, "%.2f ms, %.1f pivots each; apart by %.1e at most\n", 1e3 * tally.seconds / count,
                (double)tally.pivots / count, tally.worst);
        if (tao && kind < 6)
            CHECK_MESSAGE(tally.by_tao >= 0.8 * count, "%s: tao solved %d of %d", kind_name[kind], tally.by_tao, count);
    }
}

static enum hapt_lp_result result_of(const struct hapt_lp *lp, struct hapt_arena *arena, double *objective)
{
    struct hapt_lp_solution solution = {0};
    CHECK_OK(hapt_lp_solve(lp, HAPT_LP_AUTO, arena, &solution));
    *objective = solution.objective;
    return solution.result;
}

static void special_instances(void)
{
    const double one[2] = {1, 1}, none[2] = {0, 0};
    double objective;
    struct hapt_lp *lp;
    struct hapt_lp_solution solution;
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    CHECK_OK(hapt_lp_create(&arena, 0, 0, 0, &lp));
    CHECK(result_of(lp, &arena, &objective) == HAPT_LP_OPTIMAL && objective == 0);

    /* bounds alone */
    CHECK_OK(hapt_lp_create(&arena, 2, 2, 4, &lp));
    lp->cost[0] = 1;
    lp->cost[1] = -2;
    CHECK(result_of(lp, &arena, &objective) == HAPT_LP_UNBOUNDED && isnan(objective));
    lp->upper[1] = 5;
    CHECK(result_of(lp, &arena, &objective) == HAPT_LP_OPTIMAL);
    CHECK_NEAR(objective, -10, 1e-9);
    /* a fixed column, an empty row, a free row */
    lp->lower[0] = lp->upper[0] = 3;
    hapt_lp_add_row(lp, -1, 1, 2, NULL, none);
    hapt_lp_add_row(lp, -INFINITY, INFINITY, 2, NULL, one);
    CHECK(result_of(lp, &arena, &objective) == HAPT_LP_OPTIMAL);
    CHECK_NEAR(objective, -7, 1e-9);
    lp->row_lower[0] = 0.5;
    CHECK(result_of(lp, &arena, &objective) == HAPT_LP_INFEASIBLE);
    lp->row_lower[0] = 0;
    lp->row_lower[1] = 9;
    CHECK(result_of(lp, &arena, &objective) == HAPT_LP_INFEASIBLE);
    lp->row_lower[1] = -INFINITY;
    lp->row_upper[1] = 4;
    CHECK(result_of(lp, &arena, &objective) == HAPT_LP_OPTIMAL);
    CHECK_NEAR(objective, 1, 1e-9);
    lp->lower[1] = 6;
    CHECK(result_of(lp, &arena, &objective) == HAPT_LP_INFEASIBLE);

    /* infeasible and unbounded at once counts as infeasible */
    CHECK_OK(hapt_lp_create(&arena, 2, 2, 4, &lp));
    lp->cost[0] = -1;
    lp->lower[1] = -INFINITY;
    hapt_lp_add_row(lp, 1, INFINITY, 1, &(int){1}, one);
    hapt_lp_add_row(lp, -INFINITY, -1, 2, NULL, (double[2]){0, 1});
    CHECK(result_of(lp, &arena, &objective) == HAPT_LP_INFEASIBLE);

    lp->cost[0] = NAN;
    CHECK_FAILS(hapt_lp_solve(lp, HAPT_LP_AUTO, &arena, &solution), HAPT_ERR_INPUT);
    hapt_arena_release(&arena);
}

/* Larger than the limit of the interior point method. */
static void large_instance(void)
{
    enum { STAGES = 120, DEVICES = 24, WIDTH = DEVICES + STAGES };
    uint64_t seed = 5;
    double row[WIDTH] = {0}, lowest = 0;
    struct hapt_lp *lp;
    struct hapt_lp_solution own, reference;
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    CHECK_OK(hapt_lp_create(&arena, WIDTH, STAGES * DEVICES + 1, 3 * STAGES * DEVICES, &lp));
    for (int d = 0; d < DEVICES; d++) row[d] = 1;
    hapt_lp_add_row(lp, 1, 1, WIDTH, NULL, row);
    for (int s = 0; s < STAGES; s++) {
        double speed = 0;
        lp->cost[DEVICES + s] = 1;
        for (int d = 0; d < DEVICES; d++) {
            const int column[2] = {d, DEVICES + s};
            const double slowness = between(&seed, 1, 6);
            speed += 1 / slowness;
            hapt_lp_add_row(lp, 0, INFINITY, 2, column, (double[2]){-slowness, 1});
        }
        lowest += 1 / speed; /* each stage has its own ratios */
    }
    CHECK_OK(hapt_lp_solve(lp, HAPT_LP_AUTO, &arena, &own));
    CHECK(own.result == HAPT_LP_OPTIMAL && strcmp(own.solver, "pivot") == 0);
    CHECK_MESSAGE(own.objective > lowest && own.objective < 3 * lowest, "%g, bound %g", own.objective, lowest);
    if (lp_oracle(lp, &arena, &reference)) {
        CHECK(reference.result == HAPT_LP_OPTIMAL);
        CHECK_NEAR(reference.objective, own.objective, 1e-6 * own.objective);
    }
    CHECK(violation(lp, own.x) < 1e-9);
    hapt_arena_release(&arena);
}

/* When the solver library is loaded, signals and MPI's error handling stay those of the program. */
static void nothing_else_changes(void)
{
    enum { SIGNALS = 32 };
    struct sigaction before[SIGNALS], after;
    MPI_Errhandler world, self, now;
    const char *missing;
    struct hapt_lp_solution solution;
    struct hapt_lp *lp;
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    for (int s = 1; s < SIGNALS; s++) sigaction(s, NULL, &before[s]);
    MPI_Comm_get_errhandler(MPI_COMM_WORLD, &world);
    MPI_Comm_get_errhandler(MPI_COMM_SELF, &self);
    CHECK_OK(hapt_lp_create(&arena, 2, 1, 2, &lp));
    lp->cost[0] = lp->cost[1] = 1;
    hapt_lp_add_row(lp, 2, INFINITY, 2, NULL, (double[2]){1, 2});
    const bool tao = hapt_lp_petsc_version(&missing) != NULL;
    CHECK_OK(hapt_lp_solve(lp, tao ? HAPT_LP_TAO : HAPT_LP_AUTO, &arena, &solution));
    CHECK(strcmp(solution.solver, tao ? "tao" : "pivot") == 0);
    CHECK_NEAR(solution.objective, 1, 1e-9);
    for (int s = 1; s < SIGNALS; s++) {
        sigaction(s, NULL, &after);
        CHECK_MESSAGE(before[s].sa_handler == after.sa_handler, "the handler of signal %d has changed", s);
    }
    MPI_Comm_get_errhandler(MPI_COMM_WORLD, &now);
    CHECK(now == world);
    MPI_Comm_get_errhandler(MPI_COMM_SELF, &now);
    CHECK(now == self);
    hapt_arena_release(&arena);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    RUN(nothing_else_changes);
    RUN(special_instances);
    RUN(large_instance);
    RUN(random_instances);
    return test_finish();
}
