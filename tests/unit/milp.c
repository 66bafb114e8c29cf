/*
 * Integer programs against enumeration and GLPK: AutoHete's choices for unlike units (what is recomputed, whose state
 * and whose weights are on the host), recomputation that frees given bytes, and random programs with columns of both
 * kinds. HAPT_LONG=1: 2,000 programs.
 */
#include "lp_oracle.h"
#include "test.h"

#include "hapt/solve.h"

static double between(uint64_t *seed, double low, double high)
{
    return low + (high - low) * hapt_random_unit(seed);
}

static int count_from(uint64_t *seed, int low, int high)
{
    return low + (int)(hapt_random_next(seed) % (uint64_t)(high - low + 1));
}

enum kind { KEEPS, COVER, COUNTS, MIXED, KINDS };
static const char *const kind_name[KINDS] = {"keeps", "cover", "counts", "mixed"};
enum { MOST_COLUMNS = 80 };

struct instance {
    struct hapt_lp *lp;
    bool integer[MOST_COLUMNS];
};

static void make_integers(struct instance *instance, int first, int end, double upper)
{
    for (int j = first; j < end; j++) {
        instance->integer[j] = true;
        instance->lp->upper[j] = upper;
    }
}

/* Column 0 is the time T. Then c, o and p of each unit: recomputed, state on the host, weights on the host. T covers
 * the computation, the copies in both directions and the updates of the host; p <= o; the rest fits into memory. */
static struct instance keeps(uint64_t *seed, int units, struct hapt_arena *arena)
{
    struct instance instance = {0};
    double row[4][MOST_COLUMNS] = {{1}, {1}, {1}, {1}}, memory[MOST_COLUMNS] = {0}, all = 0, base = 0;
    const double ratio = between(seed, 0.2, 2), copy = between(seed, 0.2, 2), update = between(seed, 0.5, 4);
    CHECK_OK(hapt_lp_create(arena, 1 + 3 * units, units + 5, 6 * MOST_COLUMNS + 2 * units, &instance.lp));
    instance.lp->cost[0] = 1;
    make_integers(&instance, 1, 1 + 3 * units, 1);
    for (int u = 0; u < units; u++) {
        const int c = 1 + 3 * u, o = c + 1, p = c + 2;
        const double activations = between(seed, 0.1, 4), weights = between(seed, 0.1, 4),
                     compute = between(seed, 0.5, 2);
        row[0][c] = -compute; /* runs again */
        base += 3 * compute;
        row[1][o] = -copy * weights / 4;
        row[1][p] = -copy * weights / 2; /* fetched */
        row[2][o] = -copy * weights / 4; /* gradients leave */
        row[3][o] = -update * weights / 4;
        memory[c] = -activations * ratio;
        memory[o] = -weights * 3;
        memory[p] = -weights;
        all += activations * ratio + 4 * weights;
        const double order[2] = {1, -1};
        const int of[2] = {o, p};
        hapt_lp_add_row(instance.lp, 0, INFINITY, 2, of, order);
    }
    for (int r = 0; r < 4; r++) hapt_lp_add_row(instance.lp, r == 0 ? base : 0, INFINITY, 1 + 3 * units, NULL, row[r]);
    hapt_lp_add_row(instance.lp, -INFINITY, -all * between(seed, 0.05, 1.02), 1 + 3 * units, NULL, memory);
    return instance;
}

/* The least time to run again units that free so many bytes; `most`: how often each kind of unit occurs. */
static struct instance cover(uint64_t *seed, int units, int most, struct hapt_arena *arena)
{
    struct instance instance = {0};
    double bytes[MOST_COLUMNS], all = 0;
    CHECK_OK(hapt_lp_create(arena, units, 1, units, &instance.lp));
    make_integers(&instance, 0, units, 1);
    for (int j = 0; j < units; j++) {
        instance.lp->upper[j] = count_from(seed, 1, most);
        instance.lp->cost[j] = between(seed, 0.1, 4);
        bytes[j] = hapt_random_next(seed) % 2 == 0 ? instance.lp->cost[j] + between(seed, 0, 1) : between(seed, 0.1, 4);
        all += bytes[j] * instance.lp->upper[j];
    }
    hapt_lp_add_row(instance.lp, all * between(seed, 0.02, 1.01), INFINITY, units, NULL, bytes);
    return instance;
}

/* Rows around an integer point, or around none; a third of the columns is continuous. */
static struct instance mixed(uint64_t *seed, struct hapt_arena *arena)
{
    struct instance instance = {0};
    const int n = count_from(seed, 1, 10), m = count_from(seed, 0, 8);
    double inside[MOST_COLUMNS], row[MOST_COLUMNS];
    CHECK_OK(hapt_lp_create(arena, n, m, m * n, &instance.lp));
    for (int j = 0; j < n; j++) {
        instance.integer[j] = hapt_random_next(seed) % 3 > 0;
        instance.lp->cost[j] = between(seed, -1, 1);
        instance.lp->lower[j] = instance.integer[j] ? count_from(seed, -2, 0) - 0.5 : between(seed, -3, 0);
        instance.lp->upper[j] = instance.integer[j] ? count_from(seed, 1, 2) + 0.25 : between(seed, 0, 3);
        inside[j] = instance.integer[j] ? count_from(seed, 0, 1) : 0;
    }
    for (int i = 0; i < m; i++) {
        double sum = 0;
        for (int j = 0; j < n; j++) sum += (row[j] = count_from(seed, -3, 3)) * inside[j];
        const double slack = hapt_random_next(seed) % 8 == 0 ? -1.5 : count_from(seed, 0, 2);
        if (hapt_random_next(seed) % 2 == 0)
            hapt_lp_add_row(instance.lp, -INFINITY, sum + slack, n, NULL, row);
        else
            hapt_lp_add_row(instance.lp, sum - slack, INFINITY, n, NULL, row);
    }
    return instance;
}

static struct instance make(enum kind kind, bool small, uint64_t *seed, struct hapt_arena *arena)
{
    switch (kind) {
    case KEEPS: return keeps(seed, small ? count_from(seed, 1, 4) : count_from(seed, 5, 16), arena);
    case COVER: return cover(seed, small ? count_from(seed, 1, 14) : count_from(seed, 15, 60), 1, arena);
    case COUNTS: return cover(seed, small ? count_from(seed, 1, 4) : count_from(seed, 4, 6), small ? 6 : 48, arena);
    default: return mixed(seed, arena);
    }
}

static double violation(const struct hapt_lp *lp, const double *x)
{
    double worst = 0;
    for (int j = 0; j < lp->column_count; j++) worst = fmax(worst, fmax(lp->lower[j] - x[j], x[j] - lp->upper[j]));
    for (int i = 0; i < lp->row_count; i++) {
        double sum = 0;
        for (int k = lp->start[i]; k < lp->start[i + 1]; k++) sum += lp->value[k] * x[lp->column[k]];
        worst = fmax(worst, fmax(lp->row_lower[i] - sum, sum - lp->row_upper[i]));
    }
    return worst;
}

/* The least objective over all integer points; INFINITY: none is feasible. T of keeps and the continuous columns of
 * mixed programs follow from a linear program with fixed integers. */
static double enumerate(const struct instance *instance)
{
    struct hapt_lp fixed = *instance->lp;
    const int n = fixed.column_count;
    double x[MOST_COLUMNS], low[MOST_COLUMNS], high[MOST_COLUMNS], least = INFINITY, points = 1;
    bool all_integer = true;
    fixed.lower = low;
    fixed.upper = high;
    for (int j = 0; j < n; j++) {
        low[j] = instance->integer[j] ? ceil(instance->lp->lower[j]) : instance->lp->lower[j];
        high[j] = instance->integer[j] ? floor(instance->lp->upper[j]) : instance->lp->upper[j];
        x[j] = low[j];
        all_integer = all_integer && instance->integer[j];
        if (instance->integer[j]) points *= high[j] - low[j] + 1;
    }
    if (points > (all_integer ? 1 << 17 : 1 << 13)) return NAN;
    double end[MOST_COLUMNS], begin[MOST_COLUMNS];
    memcpy(end, high, sizeof end);
    memcpy(begin, low, sizeof begin);
    for (bool more = true; more;) {
        double objective = 0;
        if (all_integer) {
            for (int j = 0; j < n; j++) objective += instance->lp->cost[j] * x[j];
            if (objective < least && violation(instance->lp, x) <= 1e-9) least = objective;
        } else {
            struct hapt_lp_solution solution;
            struct hapt_arena scratch;
            for (int j = 0; j < n; j++)
                if (instance->integer[j]) low[j] = high[j] = x[j];
            hapt_arena_init(&scratch);
            CHECK_OK(hapt_lp_solve(&fixed, HAPT_LP_AUTO, &scratch, &solution));
            if (solution.result == HAPT_LP_OPTIMAL) least = fmin(least, solution.objective);
            hapt_arena_release(&scratch);
        }
        more = false;
        for (int j = 0; j < n && !more; j++) {
            if (!instance->integer[j]) continue;
            if (x[j] < end[j]) {
                x[j]++;
                more = true;
            } else {
                x[j] = begin[j];
            }
        }
    }
    return least;
}

static int compare_doubles(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

struct tally {
    int enumerated, by_glpk, infeasible, nodes, gaps;
    double ms[4000];
    int count;
};

static void compare(enum kind kind, int k, struct tally *tally)
{
    uint64_t seed = (uint64_t)k * 7 + 1000000u * (uint64_t)kind;
    struct hapt_lp_solution own, near, reference;
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const struct instance instance = make(kind, k % 2 == 0, &seed, &arena);
    const double start = MPI_Wtime();
    CHECK_OK(hapt_milp_solve(instance.lp, instance.integer, 0, &arena, &own));
    tally->ms[tally->count++] = 1000 * (MPI_Wtime() - start);
    CHECK_MESSAGE(own.result == HAPT_LP_OPTIMAL || own.result == HAPT_LP_INFEASIBLE, "%s %d: %s", kind_name[kind], k,
                  hapt_lp_result_name(own.result));
    tally->nodes += own.nodes;
    tally->infeasible += own.result == HAPT_LP_INFEASIBLE;
    if (own.result == HAPT_LP_OPTIMAL) {
        CHECK_MESSAGE(violation(instance.lp, own.x) < 1e-6, "%s %d: violated by %g", kind_name[kind], k,
                      violation(instance.lp, own.x));
        for (int j = 0; j < instance.lp->column_count; j++) CHECK(!instance.integer[j] || own.x[j] == round(own.x[j]));
        CHECK_OK(hapt_milp_solve(instance.lp, instance.integer, 0.05, &arena, &near));
        CHECK(near.result == HAPT_LP_OPTIMAL && near.objective >= own.objective - 1e-9 &&
              near.objective - own.objective <= 0.05 * fabs(near.objective) + 1e-9 && near.nodes <= own.nodes);
        tally->gaps += near.objective > own.objective + 1e-9;
    }
    const double own_objective = own.result == HAPT_LP_OPTIMAL ? own.objective : INFINITY,
                 least = k % 2 == 0 ? enumerate(&instance) : NAN;
    if (!isnan(least)) {
        tally->enumerated++;
        CHECK_MESSAGE(least == own_objective || fabs(least - own_objective) <= 1e-7 * (1 + fabs(least)),
                      "%s %d: %.12g, enumeration %.12g", kind_name[kind], k, own_objective, least);
    }
    if (milp_oracle(instance.lp, instance.integer, 2, &arena, &reference)) {
        const double theirs = reference.result == HAPT_LP_OPTIMAL ? reference.objective : INFINITY;
        tally->by_glpk++;
        CHECK_MESSAGE(theirs == own_objective || fabs(theirs - own_objective) <= 1e-6 * (1 + fabs(theirs)),
                      "%s %d: %.12g, GLPK %.12g", kind_name[kind], k, own_objective, theirs);
    }
    hapt_arena_release(&arena);
}

static void random_programs(void)
{
    const int count = test_long() ? 500 : 60;
    for (int kind = 0; kind < KINDS; kind++) {
        static struct tally tally;
        tally = (struct tally){0};
        for (int k = 0; k < count; k++) compare(kind, k, &tally);
        qsort(tally.ms, (size_t)tally.count, sizeof *tally.ms, compare_doubles);
        printf("%s: %d programs, %d enumerated, %d by GLPK, %d infeasible, %d nodes, %d within a gap; median %.2f ms, "
               "longest %.1f ms\n",
               kind_name[kind], tally.count, tally.enumerated, tally.by_glpk, tally.infeasible, tally.nodes, tally.gaps,
               tally.ms[tally.count / 2], tally.ms[tally.count - 1]);
        CHECK(tally.enumerated >= count / 3 && tally.infeasible < count);
    }
}

static void special_programs(void)
{
    struct hapt_arena arena;
    struct hapt_lp_solution solution;
    struct hapt_lp *lp;
    const double row[2] = {2, 2};
    const bool integer[2] = {true, true}, first[2] = {true, false};
    hapt_arena_init(&arena);
    CHECK_OK(hapt_lp_create(&arena, 0, 0, 0, &lp));
    CHECK_OK(hapt_milp_solve(lp, integer, 0, &arena, &solution));
    CHECK(solution.result == HAPT_LP_OPTIMAL && solution.objective == 0);
    CHECK_OK(hapt_lp_create(&arena, 2, 2, 4, &lp));
    lp->cost[0] = -1;
    CHECK_OK(hapt_milp_solve(lp, integer, 0, &arena, &solution));
    CHECK(solution.result == HAPT_LP_UNBOUNDED && isnan(solution.objective) && !solution.x);
    hapt_lp_add_row(lp, 1, 1, 2, NULL, row); /* 2 x + 2 y = 1 has no integers, but x = 0, y = 1/2 */
    CHECK_OK(hapt_milp_solve(lp, first, 0, &arena, &solution));
    CHECK(solution.result == HAPT_LP_OPTIMAL && solution.x[0] == 0 && fabs(solution.x[1] - 0.5) < 1e-9);
    lp->upper[0] = lp->upper[1] = 9;
    CHECK_OK(hapt_milp_solve(lp, integer, 0, &arena, &solution));
    CHECK(solution.result == HAPT_LP_INFEASIBLE && !solution.x);
    lp->lower[0] = 0.25; /* no integer inside the bounds */
    lp->upper[0] = 0.75;
    CHECK_OK(hapt_milp_solve(lp, integer, 0, &arena, &solution));
    CHECK(solution.result == HAPT_LP_INFEASIBLE);
    lp->cost[0] = NAN;
    lp->lower[0] = 0;
    CHECK_FAILS(hapt_milp_solve(lp, first, 0, &arena, &solution), HAPT_ERR_INPUT);
    hapt_arena_release(&arena);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    RUN(special_programs);
    RUN(random_programs);
    return test_finish();
}
