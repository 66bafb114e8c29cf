/* Sharding ratios: rounding to shards, the linear program against a grid and against its plain form, HAP Fig. 2. */
#include "lp_oracle.h"
#include "test.h"

#include "hapt/ratios.h"
#include "hapt/sharding.h"
#include "hapt/solve.h"

enum { MAX_RANKS = 40 };

static void even_shards(void)
{
    for (int ranks = 1; ranks <= MAX_RANKS; ranks++) {
        const double third = 1.0 / 3;
        double equal[MAX_RANKS];
        for (int j = 0; j < ranks; j++) equal[j] = third;
        for (int64_t units = ranks; units <= 300; units++) {
            int64_t even[MAX_RANKS + 1], same[MAX_RANKS + 1];
            CHECK(hapt_split(NULL, ranks, units, even));
            CHECK(hapt_split(equal, ranks, units, same));
            CHECK(even[0] == 0 && even[ranks] == units);
            for (int j = 0; j < ranks; j++) CHECK(even[j + 1] - even[j] == units / ranks + (j < units % ranks));
            CHECK_MESSAGE(memcmp(even, same, (size_t)(ranks + 1) * sizeof *even) == 0,
                          "%d equal ratios of %d units are not the even split", ranks, (int)units);
        }
    }
}

/* The least sum of absolute errors over all shards of at least one unit, by dynamic programming. */
static double least_error(const double *ideal, int ranks, int units)
{
    double best[2][64];
    for (int u = 0; u <= units; u++) best[0][u] = u == 0 ? 0 : INFINITY;
    for (int j = 0; j < ranks; j++) {
        const double *before = best[j % 2];
        double *after = best[(j + 1) % 2];
        for (int u = 0; u <= units; u++) {
            after[u] = INFINITY;
            for (int size = 1; size <= u; size++) after[u] = fmin(after[u], before[u - size] + fabs(size - ideal[j]));
        }
    }
    return best[ranks % 2][units];
}

static void rounding_properties(void)
{
    const int cases = test_long() ? 400000 : 20000;
    int bound = 0, compared = 0;
    for (int c = 0; c < cases; c++) {
        uint64_t seed = (uint64_t)c + 1;
        const int ranks = 1 + (int)(hapt_random_next(&seed) % MAX_RANKS);
        const int64_t units = ranks + (int64_t)pow(10, 9 * hapt_random_unit(&seed) * hapt_random_unit(&seed));
        double ratio[MAX_RANKS], ideal[MAX_RANKS], sum = 0, error = 0;
        int64_t first[MAX_RANKS + 1];
        const double skew = 6 * hapt_random_unit(&seed);
        for (int j = 0; j < ranks; j++) {
            ratio[j] = hapt_random_next(&seed) % 8 == 0 ? 0 : pow(hapt_random_unit(&seed), skew);
            sum += ratio[j];
        }
        if (sum == 0) sum = ratio[0] = 1;
        bool binds = false;
        if (!CHECK_MESSAGE(hapt_split(ratio, ranks, units, first), "seed %d: no split", c + 1)) continue;
        for (int j = 0; j < ranks; j++) {
            ideal[j] = (double)units * ratio[j] / sum;
            binds = binds || ideal[j] < 1;
            error += fabs((double)(first[j + 1] - first[j]) - ideal[j]);
            CHECK_MESSAGE(first[j + 1] - first[j] >= 1, "seed %d: shard %d of %d units is empty", c + 1, j, (int)units);
        }
        CHECK_MESSAGE(first[0] == 0 && first[ranks] == units, "seed %d: shards do not add up", c + 1);
        for (int j = 0; j < ranks && !binds; j++)
            CHECK_MESSAGE(fabs((double)(first[j + 1] - first[j]) - ideal[j]) < 1 + 1e-12 * (double)units,
                          "seed %d: shard %d is %lld units instead of %g", c + 1, j,
                          (long long)(first[j + 1] - first[j]), ideal[j]);
        bound += binds;
        if (units >= 64) continue;
        const double least = least_error(ideal, ranks, (int)units);
        CHECK_MESSAGE(error <= least + 1e-9, "seed %d: errors add up to %g, possible are %g", c + 1, error, least);
        compared++;
    }
    CHECK(bound > cases / 20 && bound < cases - cases / 20);
    CHECK(compared > cases / 20);
}

static void impossible_splits(void)
{
    const double none[2] = {0, 0}, negative[2] = {1, -1}, undefined[2] = {1, NAN}, endless[2] = {1, INFINITY},
                 fine[2] = {1, 3};
    int64_t first[3] = {7, 7, 7};
    CHECK(!hapt_split(NULL, 2, 1, first));
    CHECK(!hapt_split(fine, 2, 1, first));
    CHECK(!hapt_split(NULL, 0, 1, first));
    CHECK(!hapt_split(none, 2, 10, first));
    CHECK(!hapt_split(negative, 2, 10, first));
    CHECK(!hapt_split(undefined, 2, 10, first));
    CHECK(!hapt_split(endless, 2, 10, first));
    CHECK(first[0] == 7 && first[1] == 7 && first[2] == 7);
    CHECK(hapt_split(fine, 2, 2, first) && first[1] == 1 && first[2] == 2);
    CHECK(hapt_split(fine, 2, 12, first) && first[1] == 3 && first[2] == 12);
}

enum { MAX_DEVICES = 16, MAX_STAGES = 24, MAX_SEGMENTS = 3 };

/* A problem that owns its memory. */
struct sample {
    struct hapt_ratio_problem problem;
    struct hapt_ratio_segment segment[MAX_SEGMENTS];
    struct hapt_ratio_stage stage[MAX_SEGMENTS][MAX_STAGES];
    double replicated[MAX_SEGMENTS][MAX_STAGES][MAX_DEVICES], sharded[MAX_SEGMENTS][MAX_STAGES][MAX_DEVICES];
    double limit[MAX_DEVICES], resident[MAX_DEVICES], bytes[MAX_SEGMENTS][MAX_DEVICES],
        packed[MAX_SEGMENTS * MAX_DEVICES];
};

static void join(struct sample *sample, int devices, int segments)
{
    sample->problem = (struct hapt_ratio_problem){devices, segments, sample->segment, NULL, NULL, NULL, NULL};
    for (int k = 0; k < segments; k++) {
        sample->segment[k].stage = sample->stage[k];
        for (int i = 0; i < sample->segment[k].stage_count; i++) {
            sample->stage[k][i].replicated_s = sample->replicated[k][i];
            sample->stage[k][i].sharded_s = sample->sharded[k][i];
        }
    }
}

/* A model of HAP's Fig. 2 on 2 P100 and 2 A100. FLOP/s limit matrix products, memory bandwidth limits attention and
 * norms, and the largest shard limits all-gathers. `traffic`: seconds of an all-gather of even shards per second of
 * even computation. */
static void make_figure_2(struct sample *sample, double traffic)
{
    static const double flops[4] = {9.5e12, 9.5e12, 19.5e12, 19.5e12}, bandwidth[4] = {732e9, 732e9, 1555e9, 1555e9};
    sample->segment[0].stage_count = 12;
    for (int i = 0; i < 12; i++) {
        const bool product = i % 2 == 0;
        double slowest = 0;
        for (int j = 0; j < 4; j++) {
            sample->replicated[0][i][j] = product ? 1e9 / flops[j] : 2e8 / bandwidth[j];
            sample->sharded[0][i][j] = product ? 4e11 / flops[j] : 1e9 / bandwidth[j];
            slowest = fmax(slowest, sample->replicated[0][i][j] + sample->sharded[0][i][j] / 4);
        }
        sample->stage[0][i] = (struct hapt_ratio_stage){.fixed_s = 1e-5, .largest_s = traffic * 4 * slowest};
    }
    join(sample, 4, 1);
}

static void three_regimes(void)
{
    static struct sample sample;
    struct hapt_ratio_result result;
    struct hapt_arena arena;
    int mixtures = 0;
    bool was_even = false;
    hapt_arena_init(&arena);
    make_figure_2(&sample, 0);
    CHECK_OK(hapt_ratios_solve(&sample.problem, &arena, &result));
    CHECK_MESSAGE(result.cost_s < 0.7 * result.even_s && result.cost_s > 0.99 * result.proportional_s,
                  "compute-bound: %g, even %g, proportional %g", result.cost_s, result.even_s, result.proportional_s);
    CHECK_NEAR(result.ratio[2] / result.ratio[0], 19.5 / 9.5, 0.05);
    make_figure_2(&sample, 100);
    CHECK_OK(hapt_ratios_solve(&sample.problem, &arena, &result));
    for (int j = 0; j < 4; j++) CHECK_NEAR(result.ratio[j], 0.25, 1e-9);
    CHECK_NEAR(result.cost_s, result.even_s, 1e-9 * result.even_s);
    CHECK(result.proportional_s > 1.2 * result.even_s);
    /* In between the proportional ratios first become worse, then the even ones become best. A mixture is better than
     * both there. */
    for (double traffic = 0.05; traffic < 20; traffic *= 1.05) {
        make_figure_2(&sample, traffic);
        CHECK_OK(hapt_ratios_solve(&sample.problem, &arena, &result));
        const double rival = fmin(result.even_s, result.proportional_s);
        CHECK(result.cost_s <= rival * (1 + 1e-6));
        mixtures += result.cost_s < rival * (1 - 1e-3);
        const bool even = fabs(result.ratio[0] - 0.25) < 1e-9;
        CHECK(even || !was_even);
        was_even = even;
    }
    CHECK(was_even);
    CHECK_MESSAGE(mixtures >= 3, "%d mixtures", mixtures);
    hapt_arena_release(&arena);
}

static void random_sample(struct sample *sample, uint64_t *seed, int devices, int segments, bool limits)
{
    const int kinds = 1 + (int)(hapt_random_next(seed) % (uint64_t)(devices < 4 ? devices : 4));
    const double unit = pow(10, -6 * hapt_random_unit(seed)), traffic = pow(10, 3 * hapt_random_unit(seed) - 2);
    for (int k = 0; k < segments; k++) {
        sample->segment[k].stage_count = 1 + (int)(hapt_random_next(seed) % MAX_STAGES);
        for (int i = 0; i < sample->segment[k].stage_count; i++) {
            const bool copy = i > 0 && hapt_random_next(seed) % 3 == 0, plain = hapt_random_next(seed) % 4 == 0;
            const double factor = 0.5 + hapt_random_unit(seed);
            sample->stage[k][i] =
                (struct hapt_ratio_stage){.fixed_s = unit * hapt_random_unit(seed),
                                          .largest_s = plain ? 0 : unit * traffic * hapt_random_unit(seed),
                                          .times = hapt_random_next(seed) % 3 ? 0 : 0.125};
            for (int j = 0; j < devices; j++) {
                double *replicated = &sample->replicated[k][i][j], *sharded = &sample->sharded[k][i][j];
                if (copy) {
                    *replicated = factor * sample->replicated[k][i - 1][j];
                    *sharded = factor * sample->sharded[k][i - 1][j];
                } else if (j >= kinds) {
                    *replicated = sample->replicated[k][i][j % kinds];
                    *sharded = sample->sharded[k][i][j % kinds];
                } else {
                    *replicated = plain ? 0 : unit * hapt_random_unit(seed);
                    *sharded = unit * devices * 4 * hapt_random_unit(seed);
                }
            }
        }
    }
    join(sample, devices, segments);
    if (!limits) return;
    for (int j = 0; j < devices; j++) {
        sample->limit[j] = j < kinds ? 1e9 * (1 + hapt_random_unit(seed)) : sample->limit[j % kinds];
        sample->resident[j] = j < kinds ? 3e8 * hapt_random_unit(seed) : sample->resident[j % kinds];
        for (int k = 0; k < segments; k++)
            sample->packed[k * devices + j] =
                j < kinds ? 2e9 * devices * hapt_random_unit(seed) / segments : sample->packed[k * devices + j % kinds];
    }
    sample->problem.limit_bytes = sample->limit;
    sample->problem.resident_bytes = sample->resident;
    sample->problem.sharded_bytes = sample->packed;
}

/* HAP (3) literally: a column for every ratio, stage and segment, nothing merged. */
static enum hapt_lp_result solve_plainly(const struct hapt_ratio_problem *problem, struct hapt_arena *arena,
                                         double *cost)
{
    const int n = problem->devices;
    int columns = 0, rows = n, entries = 0, first[MAX_SEGMENTS];
    struct hapt_lp *lp;
    struct hapt_lp_solution solution;
    double fixed = 0;
    for (int k = 0; k < problem->segment_count; k++) {
        first[k] = columns;
        columns += n + 1 + problem->segment[k].stage_count;
        rows += 1 + n * (1 + problem->segment[k].stage_count);
        entries += 2 * n + 2 * n * (1 + problem->segment[k].stage_count);
    }
    CHECK_OK(hapt_lp_create(arena, columns, rows, entries, &lp));
    for (int k = 0; k < problem->segment_count; k++) {
        int index[MAX_DEVICES];
        double ones[MAX_DEVICES];
        for (int j = 0; j < n; j++) index[j] = first[k] + j, ones[j] = 1;
        hapt_lp_add_row(lp, 1, 1, n, index, ones);
        for (int j = 0; j < n; j++)
            hapt_lp_add_row(lp, 0, INFINITY, 2, (int[2]){first[k] + n, first[k] + j}, (double[2]){1, -1});
        for (int i = 0; i < problem->segment[k].stage_count; i++) {
            const struct hapt_ratio_stage *stage = &problem->segment[k].stage[i];
            const double times = stage->times == 0 ? 1 : stage->times;
            const int time = first[k] + n + 1 + i;
            fixed += times * stage->fixed_s;
            lp->cost[first[k] + n] += times * stage->largest_s;
            lp->cost[time] = times;
            for (int j = 0; j < n; j++)
                hapt_lp_add_row(lp, stage->replicated_s[j], INFINITY, 2, (int[2]){time, first[k] + j},
                                (double[2]){1, -stage->sharded_s[j]});
        }
    }
    for (int j = 0; j < n && problem->limit_bytes; j++) {
        int index[MAX_SEGMENTS];
        double bytes[MAX_SEGMENTS];
        for (int k = 0; k < problem->segment_count; k++) {
            index[k] = first[k] + j;
            bytes[k] = problem->sharded_bytes[k * n + j];
        }
        hapt_lp_add_row(lp, -INFINITY, problem->limit_bytes[j] - problem->resident_bytes[j], problem->segment_count,
                        index, bytes);
    }
    if (!lp_oracle(lp, arena, &solution)) CHECK_OK(hapt_lp_solve(lp, HAPT_LP_PIVOT, arena, &solution));
    *cost = solution.objective + fixed;
    return solution.result;
}

/* Sharded tensors of a few bytes beside a limit of gigabytes: the bound of a ratio is 1e8 and more, and the rounding of
 * reduced costs times such a bound is no gap. A change by 1e-3 of one ratio in favour of another costs at least as
 * much. */
static void far_limits(void)
{
    static struct sample sample;
    const int cases = test_long() ? 40000 : 2000;
    for (int c = 0; c < cases; c++) {
        uint64_t seed = (uint64_t)c + 9001;
        const int devices = 2 + c % 2;
        struct hapt_ratio_result result;
        struct hapt_arena arena;
        hapt_arena_init(&arena);
        random_sample(&sample, &seed, devices, 1, true);
        for (int j = 0; j < devices; j++) sample.packed[j] = 1 + floor(10 * hapt_random_unit(&seed));
        const enum hapt_status status = hapt_ratios_solve(&sample.problem, &arena, &result);
        CHECK_OK(status);
        if (status == HAPT_OK)
            for (int a = 0; a < devices; a++) {
                double ratio[MAX_DEVICES];
                const int b = (a + 1) % devices;
                memcpy(ratio, result.ratio, (size_t)devices * sizeof *ratio);
                const double moved = fmin(1e-3, ratio[a]);
                ratio[a] -= moved;
                ratio[b] += moved;
                CHECK(hapt_ratios_cost(&sample.problem, ratio) >= result.cost_s * (1 - 1e-6));
            }
        hapt_arena_release(&arena);
    }
}

static void plain_form_agrees(void)
{
    static struct sample sample;
    const int cases = test_long() ? 4000 : 300;
    int infeasible = 0, joined = 0;
    for (int c = 0; c < cases; c++) {
        uint64_t seed = (uint64_t)c + 77;
        const int devices = 1 + (int)(hapt_random_next(&seed) % MAX_DEVICES);
        const int segments = 1 + (int)(hapt_random_next(&seed) % MAX_SEGMENTS);
        struct hapt_ratio_result result;
        struct hapt_arena arena;
        double expected;
        hapt_arena_init(&arena);
        random_sample(&sample, &seed, devices, segments, c % 2);
        const enum hapt_lp_result outcome = solve_plainly(&sample.problem, &arena, &expected);
        if (outcome == HAPT_LP_INFEASIBLE) {
            CHECK_FAILS(hapt_ratios_solve(&sample.problem, &arena, &result), HAPT_ERR_INFEASIBLE);
            infeasible++;
        } else {
            CHECK(outcome == HAPT_LP_OPTIMAL);
            CHECK_OK(hapt_ratios_solve(&sample.problem, &arena, &result));
            CHECK_MESSAGE(fabs(result.cost_s - expected) <= 1e-6 * expected, "seed %d: %.12g, plain form %.12g", c + 77,
                          result.cost_s, expected);
            CHECK(hapt_ratios_fit(&sample.problem, result.ratio));
            CHECK(result.cost_s <= fmin(result.even_s, result.proportional_s) * (1 + 1e-6));
            joined += segments > 1 && c % 2;
            for (int k = 0; k < segments; k++) {
                double sum = 0;
                for (int j = 0; j < devices; j++) {
                    sum += result.ratio[k * devices + j];
                    CHECK(result.ratio[k * devices + j] >= 0);
                }
                CHECK_NEAR(sum, 1, 1e-12);
            }
        }
        hapt_arena_release(&arena);
    }
    CHECK_MESSAGE(infeasible > cases / 50 && joined > cases / 20, "%d infeasible, %d joined", infeasible, joined);
}

/* Every point of a grid costs at least as much. The best point costs not much more than the optimum, given the grid's
 * step. */
static void grid_agrees(void)
{
    static struct sample sample;
    const int cases = test_long() ? 500 : 60, steps = 120;
    for (int c = 0; c < cases; c++) {
        uint64_t seed = (uint64_t)c + 4242;
        const int devices = 2 + c % 2;
        struct hapt_ratio_result result;
        struct hapt_arena arena;
        double best = INFINITY, slope = 0;
        hapt_arena_init(&arena);
        random_sample(&sample, &seed, devices, 1, false);
        CHECK_OK(hapt_ratios_solve(&sample.problem, &arena, &result));
        for (int a = 0; a <= steps; a++) {
            for (int b = 0; a + b <= steps; b++) {
                if (devices == 2 && a + b < steps) continue;
                const double ratio[3] = {(double)a / steps, (double)b / steps, (double)(steps - a - b) / steps};
                const double cost = hapt_ratios_cost(&sample.problem, ratio);
                best = fmin(best, cost);
                CHECK(cost >= result.cost_s * (1 - 1e-6));
            }
        }
        for (int i = 0; i < sample.segment[0].stage_count; i++) {
            double steepest = 0;
            for (int j = 0; j < devices; j++) steepest = fmax(steepest, sample.sharded[0][i][j]);
            slope += (sample.stage[0][i].times == 0 ? 1 : 0.125) * (steepest + sample.stage[0][i].largest_s);
        }
        CHECK_MESSAGE(best - result.cost_s <= slope / steps, "seed %d: %g, on the grid %g", c + 4242, result.cost_s,
                      best);
        hapt_arena_release(&arena);
    }
}

/* The least cost on two devices: a convex function of one ratio, by ternary search. */
static double least_of_two(const struct hapt_ratio_problem *problem)
{
    double low = 0, high = 1, cost[2] = {0};
    for (int i = 0; i < 200; i++) {
        const double third[2] = {low + (high - low) / 3, high - (high - low) / 3};
        for (int k = 0; k < 2; k++) cost[k] = hapt_ratios_cost(problem, (double[2]){third[k], 1 - third[k]});
        if (cost[0] <= cost[1])
            high = third[1];
        else
            low = third[0];
    }
    return fmin(cost[0], cost[1]);
}

/* Measured times that do not depend on a ratio leave a slope of some 1e-14. */
static void slopes_of_rounding(void)
{
    static struct sample sample;
    const int cases = test_long() ? 40000 : 2000;
    struct hapt_ratio_result result;
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    sample.segment[0].stage_count = 3; /* as measured, once */
    sample.stage[0][0] = (struct hapt_ratio_stage){.largest_s = 6.1699708820379359e-07, .times = 1};
    for (int i = 0; i < 3; i++) {
        static const double replicated[3][2] = {{0, 0}, {3.5e-6, 1.506e-5}, {5.217e-5, 5.91e-5}},
                            sharded[3][2] = {{0, 0}, {1.4345e-5, 6.758e-19}, {0, 7.96e-5}};
        memcpy(sample.replicated[0][i], replicated[i], sizeof replicated[i]);
        memcpy(sample.sharded[0][i], sharded[i], sizeof sharded[i]);
    }
    join(&sample, 2, 1);
    CHECK_OK(hapt_ratios_solve(&sample.problem, &arena, &result));
    for (int c = 0; c < cases; c++) {
        uint64_t seed = (uint64_t)c + 555;
        hapt_arena_reset(&arena);
        random_sample(&sample, &seed, 2, 1, false);
        for (int i = 0; i < sample.segment[0].stage_count; i++)
            for (int j = 0; j < 2; j++)
                if (hapt_random_next(&seed) % 3 == 0)
                    sample.sharded[0][i][j] *= hapt_random_next(&seed) % 2 ? 0 : 1e-14;
        const enum hapt_status status = hapt_ratios_solve(&sample.problem, &arena, &result);
        CHECK_OK(status);
        const double expected = least_of_two(&sample.problem);
        CHECK_MESSAGE(status != HAPT_OK || fabs(result.cost_s - expected) <= 1e-6 * expected,
                      "seed %d: %.12g, ternary search %.12g", c + 555, result.cost_s, expected);
    }
    hapt_arena_release(&arena);
}

static void ties_and_bad_input(void)
{
    static struct sample sample;
    struct hapt_ratio_result result;
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    /* One slow device hides all others: all ratios up to its time have equal cost. The most even ones are chosen. */
    sample.segment[0].stage_count = 1;
    sample.stage[0][0] = (struct hapt_ratio_stage){.fixed_s = 1};
    for (int j = 0; j < 3; j++) {
        sample.replicated[0][0][j] = j == 0 ? 10 : 0;
        sample.sharded[0][0][j] = j == 0 ? 0 : 1 + j;
    }
    join(&sample, 3, 1);
    CHECK_OK(hapt_ratios_solve(&sample.problem, &arena, &result));
    CHECK_NEAR(result.cost_s, 11, 1e-9);
    for (int j = 0; j < 3; j++) CHECK_NEAR(result.ratio[j], 1.0 / 3, 1e-6);
    sample.sharded[0][0][1] = NAN;
    CHECK_FAILS(hapt_ratios_solve(&sample.problem, &arena, &result), HAPT_ERR_INPUT);
    hapt_arena_release(&arena);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv); /* PETSc needs MPI */
    RUN(even_shards);
    RUN(rounding_properties);
    RUN(impossible_splits);
    RUN(three_regimes);
    RUN(far_limits);
    RUN(plain_form_agrees);
    RUN(grid_agrees);
    RUN(slopes_of_rounding);
    RUN(ties_and_bad_input);
    return test_finish();
}
