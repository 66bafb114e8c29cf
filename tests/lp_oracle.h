/*
 * GLPK as an oracle for linear and integer programs. The oracles find nothing if its header is missing. The
 * Makefile links -lglpk to the tests that include this file.
 */
#ifndef HAPT_LP_ORACLE_H
#define HAPT_LP_ORACLE_H

#include "hapt/solve.h"

#if __has_include(<glpk.h>)
#include <glpk.h>
#include <math.h>

static int glpk_kind_of(double lower, double upper)
{
    if (lower == upper) return GLP_FX;
    if (isfinite(lower)) return isfinite(upper) ? GLP_DB : GLP_LO;
    return isfinite(upper) ? GLP_UP : GLP_FR;
}

static void glpk_state(const struct hapt_lp *lp, int *index, double *value, glp_prob *problem)
{
    glp_set_obj_dir(problem, GLP_MIN);
    if (lp->column_count > 0) glp_add_cols(problem, lp->column_count);
    if (lp->row_count > 0) glp_add_rows(problem, lp->row_count);
    for (int j = 0; j < lp->column_count; j++) {
        glp_set_obj_coef(problem, j + 1, lp->cost[j]);
        glp_set_col_bnds(problem, j + 1, glpk_kind_of(lp->lower[j], lp->upper[j]), lp->lower[j], lp->upper[j]);
    }
    for (int i = 0; i < lp->row_count; i++) {
        const int first = lp->start[i], count = lp->start[i + 1] - first;
        glp_set_row_bnds(problem, i + 1, glpk_kind_of(lp->row_lower[i], lp->row_upper[i]), lp->row_lower[i],
                         lp->row_upper[i]);
        for (int k = 0; k < count; k++) {
            index[k + 1] = lp->column[first + k] + 1;
            value[k + 1] = lp->value[first + k];
        }
        glp_set_mat_row(problem, i + 1, count, index, value);
    }
}

static enum hapt_lp_result glpk_result_of(int code, glp_prob *problem)
{
    /* The presolver reports by return code, the simplex method by status. */
    if (code == GLP_ENOPFS) return HAPT_LP_INFEASIBLE;
    if (code == GLP_ENODFS) return HAPT_LP_UNBOUNDED; /* if feasible */
    if (code != 0) return HAPT_LP_FAILED;
    switch (glp_get_status(problem)) {
    case GLP_OPT: return HAPT_LP_OPTIMAL;
    case GLP_NOFEAS: return HAPT_LP_INFEASIBLE;
    case GLP_UNBND: return HAPT_LP_UNBOUNDED;
    default: return HAPT_LP_FAILED;
    }
}

static enum hapt_lp_result glpk_optimise(glp_prob *problem)
{
    glp_smcp options;
    glp_init_smcp(&options);
    options.msg_lev = GLP_MSG_OFF;
    options.meth = GLP_DUALP;
    glp_scale_prob(problem, GLP_SF_AUTO);
    int code = glp_simplex(problem, &options);
    if (code != 0 || glpk_result_of(code, problem) == HAPT_LP_FAILED) {
        glp_adv_basis(problem, 0);
        options.meth = GLP_PRIMAL;
        code = glp_simplex(problem, &options);
    }
    return glpk_result_of(code, problem);
}

static enum hapt_lp_result glpk_result(const struct hapt_lp *lp, struct hapt_arena *arena, double *x)
{
    int *index = hapt_arena_alloc(arena, (size_t)lp->column_count + 1, sizeof *index);
    double *value = hapt_arena_alloc(arena, (size_t)lp->column_count + 1, sizeof *value);
    if (!index || !value) return HAPT_LP_FAILED;
    glp_term_out(GLP_OFF);
    glp_prob *problem = glp_create_prob();
    glpk_state(lp, index, value, problem);
    const enum hapt_lp_result result = glpk_optimise(problem);
    for (int j = 0; j < lp->column_count; j++) x[j] = glp_get_col_prim(problem, j + 1);
    glp_delete_prob(problem);
    return result;
}

/* The solution of the instance as given. False: this test is built without GLPK. */
__attribute__((unused)) static bool lp_oracle(const struct hapt_lp *lp, struct hapt_arena *arena,
                                              struct hapt_lp_solution *solution)
{
    double *x = hapt_arena_alloc(arena, (size_t)lp->column_count, sizeof *x);
    *solution = (struct hapt_lp_solution){.result = glpk_result(lp, arena, x), .x = x, .solver = "glpk"};
    for (int j = 0; j < lp->column_count; j++) solution->objective += lp->cost[j] * x[j];
    if (solution->result != HAPT_LP_UNBOUNDED) return true;
    /* Unbounded if feasible: the same constraints without a cost. */
    struct hapt_lp free_of_cost = *lp;
    free_of_cost.cost = hapt_arena_alloc(arena, (size_t)lp->column_count, sizeof(double));
    const enum hapt_lp_result feasible = glpk_result(&free_of_cost, arena, x);
    if (feasible != HAPT_LP_OPTIMAL) solution->result = feasible;
    return true;
}

/* The same with integer columns, without one of an unbounded program. Ended after so many seconds: false. */
__attribute__((unused)) static bool milp_oracle(const struct hapt_lp *lp, const bool *integer, int seconds,
                                                struct hapt_arena *arena, struct hapt_lp_solution *solution)
{
    int *index = hapt_arena_alloc(arena, (size_t)lp->column_count + 1, sizeof *index);
    double *value = hapt_arena_alloc(arena, (size_t)lp->column_count + 1, sizeof *value);
    glp_iocp options;
    if (!index || !value) return false;
    glp_term_out(GLP_OFF);
    glp_prob *problem = glp_create_prob();
    glpk_state(lp, index, value, problem);
    for (int j = 0; j < lp->column_count; j++) {
        if (!integer[j]) continue;
        const double lower = ceil(lp->lower[j]), upper = floor(lp->upper[j]); /* GLPK wants integers */
        glp_set_col_kind(problem, j + 1, GLP_IV);
        glp_set_col_bnds(problem, j + 1, glpk_kind_of(lower, upper), lower, upper);
    }
    glp_init_iocp(&options);
    options.msg_lev = GLP_MSG_OFF;
    options.presolve = GLP_ON;
    options.mip_gap = 0;
    options.tm_lim = seconds * 1000;
    const int code = glp_intopt(problem, &options), status = glp_mip_status(problem);
    *solution = (struct hapt_lp_solution){.result = HAPT_LP_FAILED, .solver = "glpk"};
    if (code == 0 && status == GLP_OPT) {
        solution->result = HAPT_LP_OPTIMAL;
        solution->objective = glp_mip_obj_val(problem);
    } else if (code == GLP_ENOPFS || (code == 0 && status == GLP_NOFEAS)) {
        solution->result = HAPT_LP_INFEASIBLE;
    }
    glp_delete_prob(problem);
    return solution->result != HAPT_LP_FAILED;
}
#else
__attribute__((unused)) static bool milp_oracle(const struct hapt_lp *lp, const bool *integer, int seconds,
                                                struct hapt_arena *arena, struct hapt_lp_solution *solution)
{
    (void)lp, (void)integer, (void)seconds, (void)arena, (void)solution;
    return false;
}
__attribute__((unused)) static bool lp_oracle(const struct hapt_lp *lp, struct hapt_arena *arena,
                                              struct hapt_lp_solution *solution)
{
    (void)lp, (void)arena, (void)solution;
    return false;
}
#endif

#endif
