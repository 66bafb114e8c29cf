/* GLPK's simplex method. */
#include <glpk.h>
#include <math.h>
#include <setjmp.h>
#include <stdio.h>

#include "solver.h"

static const char *version(const char **missing)
{
    static char text[32];
    (void)missing;
    snprintf(text, sizeof text, "GLPK %s", glp_version());
    return text;
}

static int kind_of(double lower, double upper)
{
    if (lower == upper) return GLP_FX;
    if (isfinite(lower)) return isfinite(upper) ? GLP_DB : GLP_LO;
    return isfinite(upper) ? GLP_UP : GLP_FR;
}

static void state(const struct hapt_lp *lp, int *index, double *value, glp_prob *problem)
{
    glp_set_obj_dir(problem, GLP_MIN);
    if (lp->column_count > 0) glp_add_cols(problem, lp->column_count);
    if (lp->row_count > 0) glp_add_rows(problem, lp->row_count);
    for (int j = 0; j < lp->column_count; j++) {
        glp_set_obj_coef(problem, j + 1, lp->cost[j]);
        glp_set_col_bnds(problem, j + 1, kind_of(lp->lower[j], lp->upper[j]), lp->lower[j], lp->upper[j]);
    }
    for (int i = 0; i < lp->row_count; i++) {
        const int first = lp->start[i], count = lp->start[i + 1] - first;
        glp_set_row_bnds(problem, i + 1, kind_of(lp->row_lower[i], lp->row_upper[i]), lp->row_lower[i],
                         lp->row_upper[i]);
        for (int k = 0; k < count; k++) {
            index[k + 1] = lp->column[first + k] + 1;
            value[k + 1] = lp->value[first + k];
        }
        glp_set_mat_row(problem, i + 1, count, index, value);
    }
}

static enum hapt_lp_result result_of(int code, glp_prob *problem)
{
    /* The presolver reports by return code, the simplex method by status. */
    if (code == GLP_ENOPFS) return HAPT_LP_INFEASIBLE;
    if (code == GLP_ENODFS) return HAPT_LP_UNBOUNDED; /* if feasible; the caller checks that */
    if (code != 0) return HAPT_LP_FAILED;
    switch (glp_get_status(problem)) {
    case GLP_OPT: return HAPT_LP_OPTIMAL;
    case GLP_NOFEAS: return HAPT_LP_INFEASIBLE;
    case GLP_UNBND: return HAPT_LP_UNBOUNDED;
    default: return HAPT_LP_FAILED;
    }
}

static enum hapt_lp_result optimise(glp_prob *problem)
{
    glp_smcp options;
    glp_init_smcp(&options);
    options.msg_lev = GLP_MSG_OFF;
    options.meth = GLP_DUALP;
    glp_scale_prob(problem, GLP_SF_AUTO);
    int code = glp_simplex(problem, &options);
    if (code != 0 || result_of(code, problem) == HAPT_LP_FAILED) {
        glp_adv_basis(problem, 0);
        options.meth = GLP_PRIMAL;
        code = glp_simplex(problem, &options);
    }
    return result_of(code, problem);
}

static jmp_buf escape; /* used when GLPK aborts; protected by the caller's lock */

static void give_up(void *problem)
{
    (void)problem;
    longjmp(escape, 1);
}

static enum hapt_lp_result solve(const struct hapt_lp *lp, struct hapt_arena *arena, double *x, double *y)
{
    int *index = hapt_arena_alloc(arena, (size_t)lp->column_count + 1, sizeof *index);
    double *value = hapt_arena_alloc(arena, (size_t)lp->column_count + 1, sizeof *value);
    if (!index || !value) return HAPT_LP_FAILED;
    if (setjmp(escape) != 0) {
        glp_free_env();
        return HAPT_LP_FAILED;
    }
    glp_term_out(GLP_OFF);
    glp_error_hook(give_up, NULL);
    glp_prob *problem = glp_create_prob();
    state(lp, index, value, problem);
    const enum hapt_lp_result result = optimise(problem);
    for (int j = 0; j < lp->column_count; j++) x[j] = glp_get_col_prim(problem, j + 1);
    for (int i = 0; i < lp->row_count; i++) y[i] = glp_get_row_dual(problem, i + 1);
    glp_delete_prob(problem);
    glp_error_hook(NULL, NULL);
    return result;
}

const struct lp_library lp_glpk = {"glpk", NULL, version, solve};
