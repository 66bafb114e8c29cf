/* Which neighbouring segments share their ratios (HAP 5.2): apart, each has its own best, and what passes between them
 * is shared out anew. */
#include <math.h>
#include <string.h>

#include "alternate_private.h"

struct parting {
    const struct alternating *alternating;
    const struct hapt_axis *axis;
    const struct hapt_axis_program *program;
    const struct hapt_program_price *here;
    struct hapt_arena *arena;
    /* The best so far. */
    bool apart[MOST_SEGMENTS]; /* segment k from the one in front of it */
    struct hapt_ratio_result result;
};

static void number_runs(const bool *apart, int segments, int *run_of)
{
    run_of[0] = 0;
    for (int k = 1; k < segments; k++) run_of[k] = run_of[k - 1] + apart[k];
}

static enum hapt_status solve_parted(const struct parting *parting, const bool *apart, struct hapt_ratio_result *result)
{
    int run_of[MOST_SEGMENTS];
    struct hapt_ratio_problem problem;
    number_runs(apart, parting->axis->ratio_count, run_of);
    HAPT_TRY(alternating_ratio_problem(parting->alternating, parting->axis, run_of, parting->program, parting->here,
                                       parting->arena, &problem));
    return hapt_ratios_solve(&problem, parting->arena, result);
}

/* Changes the place that gains most until none does. What fits no memory costs infinitely much. */
static enum hapt_status descend(struct parting *parting, bool *apart)
{
    const int segments = parting->axis->ratio_count;
    struct hapt_ratio_result best;
    enum hapt_status status = solve_parted(parting, apart, &best);
    if (status == HAPT_ERR_INFEASIBLE)
        best.cost_s = INFINITY;
    else
        HAPT_TRY(status);
    for (int place = 0; place >= 0;) {
        place = -1;
        for (int k = 1; k < segments; k++) {
            struct hapt_ratio_result other;
            apart[k] = !apart[k];
            status = solve_parted(parting, apart, &other);
            apart[k] = !apart[k];
            if (status == HAPT_ERR_INFEASIBLE) continue;
            HAPT_TRY(status);
            if (other.cost_s >= best.cost_s * (1 - 1e-9)) continue;
            best = other;
            place = k;
        }
        if (place > 0) apart[place] = !apart[place];
    }
    hapt_fail_reset();
    if (best.cost_s >= parting->result.cost_s) return HAPT_OK;
    parting->result = best;
    memcpy(parting->apart, apart, sizeof parting->apart);
    return HAPT_OK;
}

enum hapt_status alternating_solve(const struct alternating *alternating, const struct hapt_axis *axis,
                                   const struct hapt_axis_program *program, const struct hapt_program_price *here,
                                   struct hapt_arena *arena, double **ratio, const char **solver)
{
    const int segments = axis->ratio_count, devices = axis->size;
    struct parting parting = {
        .alternating = alternating, .axis = axis, .program = program, .here = here, .arena = arena};
    int run_of[MOST_SEGMENTS];
    bool apart[MOST_SEGMENTS] = {false};
    double *made;
    HAPT_ASSERT(segments <= MOST_SEGMENTS);
    HAPT_NEW(made, arena, (size_t)segments * devices);
    if (segments == 1) { /* its own errors */
        HAPT_TRY(solve_parted(&parting, apart, &parting.result));
    } else {
        parting.result.cost_s = INFINITY;
        HAPT_TRY(descend(&parting, apart));
        for (int k = 1; k < segments; k++) apart[k] = true; /* two places may only gain together */
        HAPT_TRY(descend(&parting, apart));
        if (!isfinite(parting.result.cost_s)) /* says what does not fit */
            HAPT_TRY(solve_parted(&parting, (bool[MOST_SEGMENTS]){false}, &parting.result));
    }
    number_runs(parting.apart, segments, run_of);
    for (int k = 0; k < segments; k++)
        memcpy(made + (size_t)k * devices, parting.result.ratio + (size_t)run_of[k] * devices,
               (size_t)devices * sizeof *made);
    *ratio = made;
    *solver = parting.result.solver;
    return HAPT_OK;
}
