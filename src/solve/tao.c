/*
 * TAO's interior point method. Its Newton systems are solved by a sparse LU with pivoting. KLU takes a tenth of the
 * time of UMFPACK or SuperLU on such small systems. MUMPS fails on degenerate instances, and SuperLU crashes on
 * singular ones. Infeasible and unbounded instances end as errors here, never as proofs.
 */
#include <math.h>
#include <string.h>

#include "hapt/env.h"
#include "petsc.h"
#include "solver.h"

enum { MAX_ITERATIONS = 100 };

/* The instance in TAO's terms: minimise cost . x, equality(x) = 0, inequality(x) >= 0, bounds. */
struct form {
    const struct petsc *petsc;
    Vec x, cost, lower, upper;
    Mat hessian;
    Mat equal, greater; /* gradients */
    Vec equal_side, greater_side;
    Vec equal_value, greater_value;
    PetscInt equal_count, greater_count;
};

static PetscErrorCode objective(Tao tao, Vec x, PetscReal *value, Vec gradient, void *context)
{
    const struct form *form = context;
    (void)tao;
    const PetscErrorCode error = form->petsc->VecCopy(form->cost, gradient);
    return error ? error : form->petsc->VecDot(form->cost, x, value);
}

static PetscErrorCode constant(Tao tao, Vec x, Mat matrix, Mat preconditioner, void *context)
{
    (void)tao, (void)x, (void)matrix, (void)preconditioner, (void)context;
    return 0;
}

static PetscErrorCode residual(const struct form *form, Mat matrix, Vec side, Vec x, Vec value)
{
    const PetscErrorCode error = form->petsc->MatMult(matrix, x, value);
    return error ? error : form->petsc->VecAXPY(value, -1, side);
}

static PetscErrorCode equality(Tao tao, Vec x, Vec value, void *context)
{
    const struct form *form = context;
    (void)tao;
    return residual(form, form->equal, form->equal_side, x, value);
}

static PetscErrorCode inequality(Tao tao, Vec x, Vec value, void *context)
{
    const struct form *form = context;
    (void)tao;
    return residual(form, form->greater, form->greater_side, x, value);
}

/* An error in PETSc ends this attempt. */
#define TRY(call)                      \
    do {                               \
        if ((call) != 0) return false; \
    } while (0)

static bool fill(const struct petsc *p, Vec vector, const double *value, PetscInt count)
{
    PetscScalar *array;
    TRY(p->VecGetArray(vector, &array));
    for (PetscInt i = 0; i < count; i++)
        array[i] = value[i] < PETSC_NINFINITY ? PETSC_NINFINITY : value[i] > PETSC_INFINITY ? PETSC_INFINITY : value[i];
    TRY(p->VecRestoreArray(vector, &array));
    return true;
}

static bool assemble(const struct petsc *p, Mat matrix)
{
    TRY(p->MatAssemblyBegin(matrix, MAT_FINAL_ASSEMBLY));
    TRY(p->MatAssemblyEnd(matrix, MAT_FINAL_ASSEMBLY));
    return true;
}

static bool add_row(const struct petsc *p, const struct hapt_lp *lp, int i, double sign, Mat matrix, PetscInt row)
{
    for (int k = lp->start[i]; k < lp->start[i + 1]; k++) {
        const PetscInt column = lp->column[k];
        const PetscScalar value = sign * lp->value[k];
        TRY(p->MatSetValues(matrix, 1, &row, 1, &column, &value, INSERT_VALUES));
    }
    return true;
}

static bool make_rows(const struct hapt_lp *lp, struct hapt_arena *arena, struct form *form)
{
    const struct petsc *p = form->petsc;
    const size_t rows = (size_t)lp->row_count;
    PetscInt *equal_entries = hapt_arena_alloc(arena, rows + 1, sizeof *equal_entries);
    PetscInt *greater_entries = hapt_arena_alloc(arena, 2 * rows + 1, sizeof *greater_entries);
    double *equal_side = hapt_arena_alloc(arena, rows + 1, sizeof *equal_side);
    double *greater_side = hapt_arena_alloc(arena, 2 * rows + 1, sizeof *greater_side);
    if (!equal_entries || !greater_entries || !equal_side || !greater_side) return false;
    PetscInt equal = 0, greater = 0;
    for (int i = 0; i < lp->row_count; i++) {
        const PetscInt entries = lp->start[i + 1] - lp->start[i];
        const double low = lp->row_lower[i], high = lp->row_upper[i];
        if (low == high) {
            equal_entries[equal] = entries;
            equal_side[equal++] = low;
            continue;
        }
        if (isfinite(low)) greater_entries[greater] = entries, greater_side[greater++] = low;
        if (isfinite(high)) greater_entries[greater] = entries, greater_side[greater++] = -high;
    }
    form->equal_count = equal;
    form->greater_count = greater;
    TRY(p->MatCreateSeqAIJ(MPI_COMM_SELF, equal, lp->column_count, 0, equal_entries, &form->equal));
    TRY(p->MatCreateSeqAIJ(MPI_COMM_SELF, greater, lp->column_count, 0, greater_entries, &form->greater));
    equal = greater = 0;
    for (int i = 0; i < lp->row_count; i++) {
        const double low = lp->row_lower[i], high = lp->row_upper[i];
        if (low == high) {
            if (!add_row(p, lp, i, 1, form->equal, equal++)) return false;
            continue;
        }
        if (isfinite(low) && !add_row(p, lp, i, 1, form->greater, greater++)) return false;
        if (isfinite(high) && !add_row(p, lp, i, -1, form->greater, greater++)) return false;
    }
    if (!assemble(p, form->equal) || !assemble(p, form->greater)) return false;
    Vec *const vector[] = {&form->equal_side, &form->equal_value, &form->greater_side, &form->greater_value};
    for (int v = 0; v < 4; v++) TRY(p->VecCreateSeq(MPI_COMM_SELF, v < 2 ? equal : greater, vector[v]));
    return fill(p, form->equal_side, equal_side, equal) && fill(p, form->greater_side, greater_side, greater);
}

static bool make_form(const struct hapt_lp *lp, struct hapt_arena *arena, struct form *form)
{
    const struct petsc *p = form->petsc;
    const PetscInt n = lp->column_count;
    Vec *const vector[] = {&form->x, &form->cost, &form->lower, &form->upper};
    for (int v = 0; v < 4; v++) TRY(p->VecCreateSeq(MPI_COMM_SELF, n, vector[v]));
    if (!fill(p, form->cost, lp->cost, n) || !fill(p, form->lower, lp->lower, n) || !fill(p, form->upper, lp->upper, n))
        return false;
    TRY(p->MatCreateSeqAIJ(MPI_COMM_SELF, n, n, 1, NULL, &form->hessian));
    for (PetscInt j = 0; j < n; j++) {
        const PetscScalar zero = 0;
        TRY(p->MatSetValues(form->hessian, 1, &j, 1, &j, &zero, INSERT_VALUES));
    }
    return assemble(p, form->hessian) && make_rows(lp, arena, form);
}

static void drop_form(struct form *form)
{
    const struct petsc *p = form->petsc;
    Vec *const vector[] = {&form->x,          &form->cost,        &form->lower,        &form->upper,
                           &form->equal_side, &form->equal_value, &form->greater_side, &form->greater_value};
    Mat *const matrix[] = {&form->hessian, &form->equal, &form->greater};
    for (int v = 0; v < 8; v++) p->VecDestroy(vector[v]);
    for (int m = 0; m < 3; m++) p->MatDestroy(matrix[m]);
}

static bool configure(struct form *form, MatSolverType factorisation, Tao tao)
{
    const struct petsc *p = form->petsc;
    KSP linear;
    PC direct;
    TRY(p->TaoSetType(tao, TAOIPM));
    TRY(p->TaoSetSolution(tao, form->x));
    TRY(p->TaoSetObjectiveAndGradient(tao, NULL, objective, form));
    TRY(p->TaoSetHessian(tao, form->hessian, form->hessian, constant, form));
    TRY(p->TaoSetVariableBounds(tao, form->lower, form->upper));
    if (form->equal_count > 0) {
        TRY(p->TaoSetEqualityConstraintsRoutine(tao, form->equal_value, equality, form));
        TRY(p->TaoSetJacobianEqualityRoutine(tao, form->equal, form->equal, constant, form));
    }
    if (form->greater_count > 0) {
        TRY(p->TaoSetInequalityConstraintsRoutine(tao, form->greater_value, inequality, form));
        TRY(p->TaoSetJacobianInequalityRoutine(tao, form->greater, form->greater, constant, form));
    }
    TRY(p->TaoSetTolerances(tao, 1e-8, 0, 0));
    TRY(p->TaoSetConstraintTolerances(tao, 1e-8, 0));
    TRY(p->TaoSetMaximumIterations(tao, MAX_ITERATIONS));
    TRY(p->TaoGetKSP(tao, &linear));
    TRY(p->KSPSetType(linear, KSPPREONLY));
    TRY(p->KSPSetErrorIfNotConverged(linear, PETSC_TRUE));
    TRY(p->KSPGetPC(linear, &direct));
    TRY(p->PCSetType(direct, PCLU));
    TRY(p->PCFactorSetMatSolverType(direct, factorisation));
    return true;
}

/* A point strictly between the bounds. */
static double inside(double lower, double upper)
{
    if (isfinite(lower)) return isfinite(upper) ? lower + 0.5 * (upper - lower) : lower + 1;
    return isfinite(upper) ? upper - 1 : 0;
}

static bool run(const struct hapt_lp *lp, struct form *form, MatSolverType factorisation, double *x)
{
    const struct petsc *p = form->petsc;
    TaoConvergedReason reason = TAO_DIVERGED_USER;
    const PetscScalar *array;
    Tao tao = NULL;
    for (int j = 0; j < lp->column_count; j++) x[j] = inside(lp->lower[j], lp->upper[j]);
    if (!fill(p, form->x, x, lp->column_count)) return false;
    bool done = p->TaoCreate(MPI_COMM_SELF, &tao) == 0 && configure(form, factorisation, tao) &&
                p->TaoSolve(tao) == 0 && p->TaoGetConvergedReason(tao, &reason) == 0;
    /* After the last iteration x may still be close enough for the pivots that follow. */
    if (done) done = (reason > 0 || reason == TAO_DIVERGED_MAXITS) && p->VecGetArrayRead(form->x, &array) == 0;
    if (done) {
        memcpy(x, array, (size_t)lp->column_count * sizeof *x);
        p->VecRestoreArrayRead(form->x, &array);
    }
    if (tao) p->TaoDestroy(&tao);
    for (int j = 0; j < lp->column_count; j++) done = done && isfinite(x[j]);
    return done;
}

enum hapt_lp_result lp_tao(const struct hapt_lp *lp, struct hapt_arena *arena, double *x, double *y)
{
    const char *missing;
    struct form form = {.petsc = petsc_open(&missing)};
    if (!form.petsc) return HAPT_LP_FAILED;
    memset(y, 0, (size_t)lp->row_count * sizeof *y); /* the pivots that follow compute them */
    const bool done =
        make_form(lp, arena, &form) && (run(lp, &form, MATSOLVERKLU, x) || run(lp, &form, MATSOLVERUMFPACK, x));
    drop_form(&form);
    return done ? HAPT_LP_OPTIMAL : HAPT_LP_FAILED;
}

const char *hapt_lp_petsc_version(const char **missing)
{
    static const char text[] = "PETSc " PetscStringize(PETSC_VERSION_MAJOR) "." PetscStringize(
        PETSC_VERSION_MINOR) "." PetscStringize(PETSC_VERSION_SUBMINOR);
    return petsc_open(missing) ? text : NULL;
}
