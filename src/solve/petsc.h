/*
 * PETSc, loaded when the first instance is solved.
 *
 * Its hundred libraries would cost every start of the program 75 ms, twice where it starts itself anew; and a binary that finds
 * no PETSc at run time still plans. Functions are reached through a table of pointers; types and constants come from its headers.
 */
#ifndef HAPT_SOLVE_PETSC_H
#define HAPT_SOLVE_PETSC_H

#include <petsctao.h>
#undef I /* PETSc's complex.h */

#define PETSC_CALLS(CALL)                                                                                                   \
    CALL(PetscInitialize) CALL(PetscFinalize) CALL(PetscPushErrorHandler) CALL(PetscPopErrorHandler)                        \
    CALL(PetscIgnoreErrorHandler) CALL(VecCreateSeq) CALL(VecCreateSeqWithArray) CALL(VecDestroy) CALL(VecSet)              \
    CALL(VecCopy) CALL(VecDot) CALL(VecAXPY) CALL(VecGetArray) CALL(VecRestoreArray) CALL(VecGetArrayRead)                  \
    CALL(VecRestoreArrayRead) CALL(MatCreateSeqAIJ) CALL(MatSetValues) CALL(MatAssemblyBegin) CALL(MatAssemblyEnd)          \
    CALL(MatMult) CALL(MatDestroy) CALL(TaoCreate) CALL(TaoDestroy) CALL(TaoSetType) CALL(TaoSetSolution)                   \
    CALL(TaoSetObjectiveAndGradient) CALL(TaoSetHessian) CALL(TaoSetVariableBounds) CALL(TaoSetEqualityConstraintsRoutine)  \
    CALL(TaoSetInequalityConstraintsRoutine) CALL(TaoSetJacobianEqualityRoutine) CALL(TaoSetJacobianInequalityRoutine)      \
    CALL(TaoSetTolerances) CALL(TaoSetConstraintTolerances) CALL(TaoSetMaximumIterations) CALL(TaoSetFromOptions)           \
    CALL(TaoSetOptionsPrefix) CALL(TaoGetKSP) CALL(TaoSolve) CALL(TaoGetConvergedReason) CALL(KSPSetType) CALL(KSPGetPC)    \
    CALL(KSPSetErrorIfNotConverged) CALL(PCSetType) CALL(PCFactorSetMatSolverType)

struct petsc {
#define PETSC_POINTER(name) __typeof__(&name) name;
    PETSC_CALLS(PETSC_POINTER)
#undef PETSC_POINTER
};

/* The table, PETSc initialised on this process alone; NULL with the reason. Only between MPI_Init and hapt_env_release. */
const struct petsc *petsc_open(const char **missing);

#endif
