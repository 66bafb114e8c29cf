/* This build has no PETSc. */
#include "solver.h"

enum hapt_lp_result lp_tao(const struct hapt_lp *lp, struct hapt_arena *arena, double *x, double *y)
{
    (void)lp, (void)arena, (void)x, (void)y;
    return HAPT_LP_FAILED;
}

const char *hapt_lp_petsc_version(const char **missing)
{
    *missing = "built without PETSc (Debian: libpetsc-real-dev)";
    return NULL;
}
