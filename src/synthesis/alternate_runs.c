/* Decides which neighbouring segments share their ratios (HAP 5.2). Separate ratios are the best for each, but
 * tensors between them are resharded. */
#include <math.h>
#include <string.h>

#include "alternate_private.h"

struct ratio_search {
    const struct alternating *alternating;
    const struct hapt_axis *axis;
    const struct hapt_axis_program *program;
    const struct hapt_program_price *here;
    struct hapt_arena *arena;
    /* The best so far. */
    bool separate[MOST_SEGMENTS]; /* segment k has other ratios than segment k - 1 */
    struct hapt_ratio_result result;
};

static void number_runs(const bool *separate, int segments, int *run_of)
{
    run_of[0] = 0;
    for (int k = 1; k < segments; k++) run_of[k] = run_of[k - 1] + separate[k];
}

static enum hapt_status solve_separate(const struct ratio_search *ratio_search, const bool *separate,
                                       struct hapt_ratio_result *result)
{
    int run_of[MOST_SEGMENTS];
    struct hapt_ratio_problem problem;
    number_runs(separate, ratio_search->axis->ratio_count, run_of);
    HAPT_TRY(alternating_ratio_problem(ratio_search->alternating, ratio_search->axis, run_of, ratio_search->program,
                                       ratio_search->here, ratio_search->arena, &problem));
    return hapt_ratios_solve(&problem, ratio_search->arena, result);
}

/* Local search: changes the entry that gains most until none gains. Ratios that fit no memory cost INFINITY. */
static enum hapt_status descend(struct ratio_search *ratio_search, bool *separate)
{
    const int segments = ratio_search->axis->ratio_count;
    struct hapt_ratio_result best;
    enum hapt_status status = solve_separate(ratio_search, separate, &best);
    if (status == HAPT_ERR_INFEASIBLE)
        best.cost_s = INFINITY;
    else
        HAPT_TRY(status);
    for (int entry = 0; entry >= 0;) {
        entry = -1;
        for (int k = 1; k < segments; k++) {
            struct hapt_ratio_result other;
            separate[k] = !separate[k];
            status = solve_separate(ratio_search, separate, &other);
            separate[k] = !separate[k];
            if (status == HAPT_ERR_INFEASIBLE) continue;
            HAPT_TRY(status);
            if (other.cost_s >= best.cost_s * (1 - 1e-9)) continue;
            best = other;
            entry = k;
        }
        if (entry > 0) separate[entry] = !separate[entry];
    }
    hapt_fail_reset();
    if (best.cost_s >= ratio_search->result.cost_s) return HAPT_OK;
    ratio_search->result = best;
    memcpy(ratio_search->separate, separate, sizeof ratio_search->separate);
    return HAPT_OK;
}

enum hapt_status alternating_solve(const struct alternating *alternating, const struct hapt_axis *axis,
                                   const struct hapt_axis_program *program, const struct hapt_program_price *here,
                                   struct hapt_arena *arena, double **ratio, const char **solver)
{
    const int segments = axis->ratio_count, devices = axis->size;
    struct ratio_search ratio_search = {
        .alternating = alternating, .axis = axis, .program = program, .here = here, .arena = arena};
    int run_of[MOST_SEGMENTS];
    bool separate[MOST_SEGMENTS] = {false};
    double *made;
    HAPT_ASSERT(segments <= MOST_SEGMENTS);
    HAPT_NEW(made, arena, (size_t)segments * devices);
    if (segments == 1) { /* report its own error */
        HAPT_TRY(solve_separate(&ratio_search, separate, &ratio_search.result));
    } else {
        ratio_search.result.cost_s = INFINITY;
        HAPT_TRY(descend(&ratio_search, separate));
        for (int k = 1; k < segments; k++) separate[k] = true; /* two entries may gain only together */
        HAPT_TRY(descend(&ratio_search, separate));
        if (!isfinite(ratio_search.result.cost_s)) /* reports what does not fit */
            HAPT_TRY(solve_separate(&ratio_search, (bool[MOST_SEGMENTS]){false}, &ratio_search.result));
    }
    number_runs(ratio_search.separate, segments, run_of);
    for (int k = 0; k < segments; k++)
        memcpy(made + (size_t)k * devices, ratio_search.result.ratio + (size_t)run_of[k] * devices,
               (size_t)devices * sizeof *made);
    *ratio = made;
    *solver = ratio_search.result.solver;
    return HAPT_OK;
}
