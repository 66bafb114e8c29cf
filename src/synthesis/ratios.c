/*
 * Input: stages of a program. Output: the best ratios. HAP (3) in epigraph form: minimise sum_i times_i (fixed_i +
 * largest_i M + t_i) over ratios B, with M >= B_j and t_i >= replicated_ij + sharded_ij B_j. Devices with equal
 * coefficients have equal ratios at some optimum (averaging an optimum over their permutations is an optimum, too). So
 * each kind of device is one column. Stages whose computation differs only by a factor are one stage.
 */
#include <math.h>
#include <string.h>

#include "hapt/ratios.h"
#include "hapt/solve.h"

#define EVENNESS 1e-7      /* extra cost of M, relative to the cost: the most even ratios win among equals */
#define FIT_TOLERANCE 1e-8 /* of a linear program's solution; whole units differ by far more */

/* A program's stages, as far as they depend on ratios, by kind of device. */
struct reduced {
    const struct hapt_ratio_problem *problem;
    int kinds;
    int *kind_of;         /* [devices] */
    int *example;         /* [kinds] */
    int *count;           /* [kinds] */
    struct curve **curve; /* [segments] list */
    double *largest_s;    /* [segments] cost of M */
};

/* times * max_k (replicated_k + sharded_k B_k), scaled so that the largest coefficient is 1. */
struct curve {
    struct curve *next;
    double times;
    double *replicated, *sharded; /* [kinds] */
};

static double times_of(const struct hapt_ratio_stage *stage)
{
    return stage->times == 0 ? 1 : stage->times;
}

double hapt_ratios_cost(const struct hapt_ratio_problem *problem, const double *ratio)
{
    double sum = 0;
    for (int k = 0; k < problem->segment_count; k++) {
        const double *share = ratio + (size_t)k * problem->devices;
        double most = 0;
        for (int j = 0; j < problem->devices; j++) most = fmax(most, share[j]);
        for (int i = 0; i < problem->segment[k].stage_count; i++) {
            const struct hapt_ratio_stage *stage = &problem->segment[k].stage[i];
            double slowest = 0;
            for (int j = 0; j < problem->devices; j++)
                slowest = fmax(slowest, stage->replicated_s[j] + stage->sharded_s[j] * share[j]);
            sum += times_of(stage) * (stage->fixed_s + stage->largest_s * most + slowest);
        }
    }
    return sum;
}

static double bytes_of(const struct hapt_ratio_problem *problem, const double *ratio, int device)
{
    double bytes = problem->resident_bytes[device];
    for (int k = 0; k < problem->segment_count; k++) {
        const size_t at = (size_t)k * problem->devices + device;
        bytes += problem->sharded_bytes[at] * ratio[at];
    }
    return bytes;
}

bool hapt_ratios_fit(const struct hapt_ratio_problem *problem, const double *ratio)
{
    for (int j = 0; problem->limit_bytes && j < problem->devices; j++)
        if (bytes_of(problem, ratio, j) > problem->limit_bytes[j] * (1 + FIT_TOLERANCE)) return false;
    return true;
}

static enum hapt_status check(const struct hapt_ratio_problem *problem)
{
    bool sound = problem->devices > 0;
    for (int k = 0; k < problem->segment_count; k++) {
        for (int i = 0; i < problem->segment[k].stage_count; i++) {
            const struct hapt_ratio_stage *stage = &problem->segment[k].stage[i];
            sound = sound && stage->largest_s >= 0 && stage->times >= 0 &&
                    isfinite(stage->fixed_s + stage->largest_s + stage->times);
            for (int j = 0; j < problem->devices; j++)
                sound = sound && stage->replicated_s[j] >= 0 && stage->sharded_s[j] >= 0 &&
                        isfinite(stage->replicated_s[j] + stage->sharded_s[j]);
        }
        for (int j = 0; problem->limit_bytes && j < problem->devices; j++)
            sound = sound && problem->sharded_bytes[(size_t)k * problem->devices + j] >= 0 &&
                    isfinite(problem->sharded_bytes[(size_t)k * problem->devices + j]);
    }
    for (int j = 0; problem->limit_bytes && j < problem->devices; j++)
        sound = sound && problem->limit_bytes[j] >= 0 && isfinite(problem->resident_bytes[j]);
    return sound ? HAPT_OK
                 : hapt_fail(HAPT_ERR_INPUT, "look for undefined or negative times in the profile",
                             "sharding ratios: a time or a size is undefined or negative");
}

/* ---- kinds of devices and of stages ---- */

static bool alike(const struct hapt_ratio_problem *problem, int a, int b)
{
    if (problem->limit_bytes && (problem->limit_bytes[a] != problem->limit_bytes[b] ||
                                 problem->resident_bytes[a] != problem->resident_bytes[b]))
        return false;
    for (int k = 0; k < problem->segment_count; k++) {
        const double *bytes = problem->sharded_bytes ? problem->sharded_bytes + (size_t)k * problem->devices : NULL;
        if (problem->limit_bytes && bytes[a] != bytes[b]) return false;
        for (int i = 0; i < problem->segment[k].stage_count; i++) {
            const struct hapt_ratio_stage *stage = &problem->segment[k].stage[i];
            if (stage->replicated_s[a] != stage->replicated_s[b] || stage->sharded_s[a] != stage->sharded_s[b])
                return false;
        }
    }
    return true;
}

static void find_kinds(struct reduced *reduced)
{
    for (int j = 0; j < reduced->problem->devices; j++) {
        int k = 0;
        while (k < reduced->kinds && !alike(reduced->problem, reduced->example[k], j)) k++;
        if (k == reduced->kinds) reduced->example[reduced->kinds++] = j;
        reduced->kind_of[j] = k;
        reduced->count[k]++;
    }
}

static bool same_shape(const struct reduced *reduced, const struct curve *a, const struct curve *b)
{
    for (int k = 0; k < reduced->kinds; k++)
        if (fabs(a->replicated[k] - b->replicated[k]) > 1e-14 || fabs(a->sharded[k] - b->sharded[k]) > 1e-14)
            return false;
    return true;
}

/* Part of a stage's longest time below which the time of a shard counts as none. Measured times that do not depend on
 * the ratio leave a rest of rounding, and solvers fail on programs whose numbers differ by 1e14. */
#define NEGLIGIBLE 1e-10

static enum hapt_status add_stage(struct reduced *reduced, const struct hapt_ratio_stage *stage, int segment,
                                  struct hapt_arena *arena)
{
    struct curve *curve;
    double largest = 0, sharded = 0;
    reduced->largest_s[segment] += times_of(stage) * stage->largest_s;
    for (int k = 0; k < reduced->kinds; k++) {
        sharded = fmax(sharded, stage->sharded_s[reduced->example[k]]);
        largest = fmax(largest, stage->replicated_s[reduced->example[k]] + stage->sharded_s[reduced->example[k]]);
    }
    if (sharded <= NEGLIGIBLE * largest) return HAPT_OK;
    HAPT_NEW(curve, arena, 1);
    HAPT_NEW(curve->replicated, arena, reduced->kinds);
    HAPT_NEW(curve->sharded, arena, reduced->kinds);
    curve->times = times_of(stage) * largest;
    for (int k = 0; k < reduced->kinds; k++) {
        curve->replicated[k] = stage->replicated_s[reduced->example[k]] / largest;
        const double slope = stage->sharded_s[reduced->example[k]] / largest;
        curve->sharded[k] = slope > NEGLIGIBLE ? slope : 0;
    }
    struct curve **place = &reduced->curve[segment];
    while (*place && !same_shape(reduced, *place, curve)) place = &(*place)->next;
    if (*place)
        (*place)->times += curve->times;
    else
        *place = curve;
    return HAPT_OK;
}

static enum hapt_status reduce(const struct hapt_ratio_problem *problem, struct hapt_arena *arena,
                               struct reduced *reduced)
{
    *reduced = (struct reduced){.problem = problem};
    HAPT_NEW(reduced->kind_of, arena, problem->devices);
    HAPT_NEW(reduced->example, arena, problem->devices);
    HAPT_NEW(reduced->count, arena, problem->devices);
    HAPT_NEW(reduced->curve, arena, problem->segment_count);
    HAPT_NEW(reduced->largest_s, arena, problem->segment_count);
    find_kinds(reduced);
    for (int k = 0; k < problem->segment_count; k++)
        for (int i = 0; i < problem->segment[k].stage_count; i++)
            HAPT_TRY(add_stage(reduced, &problem->segment[k].stage[i], k, arena));
    return HAPT_OK;
}

/* ---- the linear program of segments [first, end) ---- */

static int count_curves(const struct reduced *reduced, int segment)
{
    int count = 0;
    for (const struct curve *curve = reduced->curve[segment]; curve; curve = curve->next) count++;
    return count;
}

/* Columns of a segment: a ratio per kind, the largest ratio, a time per curve. */
static void add_segment(const struct reduced *reduced, int segment, double evenness, int column, struct hapt_lp *lp)
{
    const int kinds = reduced->kinds, largest = column + kinds;
    int time = largest + 1;
    int index[2];
    /* All ratios add up to 1. */
    for (int k = 0; k < kinds; k++) {
        lp->value[lp->start[lp->row_count] + k] = reduced->count[k];
        lp->column[lp->start[lp->row_count] + k] = column + k;
    }
    lp->start[lp->row_count + 1] = lp->start[lp->row_count] + kinds;
    lp->row_lower[lp->row_count] = lp->row_upper[lp->row_count] = 1;
    lp->row_count++;
    lp->cost[largest] = reduced->largest_s[segment] + evenness;
    for (int k = 0; k < kinds; k++) {
        index[0] = largest;
        index[1] = column + k;
        hapt_lp_add_row(lp, 0, INFINITY, 2, index, (const double[]){1, -1});
    }
    for (const struct curve *curve = reduced->curve[segment]; curve; curve = curve->next, time++) {
        lp->cost[time] = curve->times;
        for (int k = 0; k < kinds; k++) {
            index[0] = time;
            index[1] = column + k;
            hapt_lp_add_row(lp, curve->replicated[k], INFINITY, 2, index, (const double[]){1, -curve->sharded[k]});
        }
    }
}

/* Memory of each kind, relative to its limit. */
static void add_memory(const struct reduced *reduced, int first, int end, const int *column, struct hapt_lp *lp)
{
    const struct hapt_ratio_problem *problem = reduced->problem;
    for (int k = 0; problem->limit_bytes && k < reduced->kinds; k++) {
        const int device = reduced->example[k];
        const double limit = fmax(1, problem->limit_bytes[device]);
        const int start = lp->start[lp->row_count];
        int entries = 0;
        for (int s = first; s < end; s++) {
            const double bytes = problem->sharded_bytes[(size_t)s * problem->devices + device];
            if (bytes == 0) continue;
            lp->column[start + entries] = column[s - first] + k;
            lp->value[start + entries++] = bytes / limit;
        }
        lp->start[lp->row_count + 1] = start + entries;
        lp->row_lower[lp->row_count] = -INFINITY;
        lp->row_upper[lp->row_count] = (problem->limit_bytes[device] - problem->resident_bytes[device]) / limit;
        lp->row_count++;
    }
}

static enum hapt_status out_of_memory(const struct hapt_ratio_problem *problem)
{
    double limit = 0, resident = 0;
    for (int j = 0; j < problem->devices; j++) {
        limit += problem->limit_bytes[j];
        resident += problem->resident_bytes[j];
    }
    return hapt_fail(HAPT_ERR_INFEASIBLE, "use more or larger devices, a smaller model, or a program that shards more",
                     "no sharding ratios fit the memory of %d devices: %.3g GB in total, but %.3g GB are needed for "
                     "tensors that are not sharded",
                     problem->devices, 1e-9 * limit, 1e-9 * resident);
}

static enum hapt_status solve_segments(const struct reduced *reduced, int first, int end, double evenness,
                                       struct hapt_arena *scratch, struct hapt_ratio_result *found)
{
    const struct hapt_ratio_problem *problem = reduced->problem;
    const int kinds = reduced->kinds;
    struct hapt_lp *lp;
    struct hapt_lp_solution solution;
    int *column, columns = 0, rows = kinds, entries = kinds * (end - first);
    HAPT_NEW(column, scratch, end - first);
    for (int s = first; s < end; s++) {
        const int curves = count_curves(reduced, s);
        column[s - first] = columns;
        columns += kinds + 1 + curves;
        rows += 1 + kinds + kinds * curves;
        entries += kinds + 2 * kinds * (1 + curves);
    }
    HAPT_TRY(hapt_lp_create(scratch, columns, rows, entries, &lp));
    for (int s = first; s < end; s++) add_segment(reduced, s, evenness, column[s - first], lp);
    add_memory(reduced, first, end, column, lp);
    HAPT_TRY(hapt_lp_solve(lp, HAPT_LP_AUTO, scratch, &solution));
    found->solver = solution.solver;
    if (solution.result == HAPT_LP_INFEASIBLE && problem->limit_bytes) return out_of_memory(problem);
    if (solution.result != HAPT_LP_OPTIMAL)
        return hapt_fail(HAPT_ERR_INTERNAL, "report this with the model and the cluster file",
                         "the linear program of the sharding ratios ended with status %s",
                         hapt_lp_result_name(solution.result));
    for (int s = first; s < end; s++) {
        double *share = found->ratio + (size_t)s * problem->devices, sum = 0;
        for (int j = 0; j < problem->devices; j++)
            sum += share[j] = solution.x[column[s - first] + reduced->kind_of[j]];
        for (int j = 0; j < problem->devices; j++) share[j] /= sum;
    }
    return HAPT_OK;
}

/* ---- ratios to compare with ---- */

static void fill_rows(const struct hapt_ratio_problem *problem, const double *share, double *ratio)
{
    for (int k = 0; k < problem->segment_count; k++)
        memcpy(ratio + (size_t)k * problem->devices, share, (size_t)problem->devices * sizeof *share);
}

/* Proportional to computational power; even if nothing is sharded. */
static void proportional_ratios(const struct hapt_ratio_problem *problem, double *share)
{
    double sum = 0;
    for (int j = 0; j < problem->devices; j++) {
        double seconds = 0;
        for (int k = 0; k < problem->segment_count; k++)
            for (int i = 0; i < problem->segment[k].stage_count; i++)
                seconds += times_of(&problem->segment[k].stage[i]) * problem->segment[k].stage[i].sharded_s[j];
        share[j] = problem->power ? problem->power[j] : seconds > 0 ? 1 / seconds : 0;
        sum += share[j];
    }
    for (int j = 0; j < problem->devices; j++) share[j] = sum > 0 ? share[j] / sum : 1.0 / problem->devices;
}

static double cost_if_fits(const struct hapt_ratio_problem *problem, const double *ratio)
{
    return hapt_ratios_fit(problem, ratio) ? hapt_ratios_cost(problem, ratio) : (double)INFINITY;
}

static enum hapt_status solve(const struct hapt_ratio_problem *problem, struct hapt_arena *scratch,
                              struct hapt_ratio_result *result)
{
    const int segments = problem->segment_count;
    struct reduced reduced;
    double *share, *rival;
    HAPT_NEW(share, scratch, problem->devices);
    HAPT_NEW(rival, scratch, (size_t)segments * (size_t)problem->devices);
    for (int j = 0; j < problem->devices; j++) share[j] = 1.0 / problem->devices;
    fill_rows(problem, share, rival);
    result->even_s = cost_if_fits(problem, rival);
    double scale = hapt_ratios_cost(problem, rival);
    fill_rows(problem, share, result->ratio);
    proportional_ratios(problem, share);
    fill_rows(problem, share, rival);
    result->proportional_s = cost_if_fits(problem, rival);
    scale = fmin(scale, hapt_ratios_cost(problem, rival));
    const double evenness = EVENNESS * scale / fmax(1, segments);
    HAPT_TRY(reduce(problem, scratch, &reduced));
    for (int s = 0; s < segments && reduced.kinds > 1; s++)
        HAPT_TRY(solve_segments(&reduced, s, s + 1, evenness, scratch, result));
    if (!hapt_ratios_fit(problem, result->ratio))
        HAPT_TRY(solve_segments(&reduced, 0, segments, evenness, scratch, result));
    result->cost_s = hapt_ratios_cost(problem, result->ratio);
    return HAPT_OK;
}

enum hapt_status hapt_ratios_solve(const struct hapt_ratio_problem *problem, struct hapt_arena *arena,
                                   struct hapt_ratio_result *result)
{
    struct hapt_ratio_result found = {0};
    struct hapt_arena scratch;
    HAPT_TRY(check(problem));
    HAPT_NEW(found.ratio, arena, (size_t)problem->segment_count * (size_t)problem->devices);
    hapt_arena_init(&scratch);
    const enum hapt_status status = solve(problem, &scratch, &found);
    hapt_arena_release(&scratch);
    HAPT_TRY(status);
    *result = found;
    return HAPT_OK;
}
