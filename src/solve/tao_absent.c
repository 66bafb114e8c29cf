/* This build has no PETSc. */
#include "solver.h"

const struct lp_library lp_tao = {"tao", "built without PETSc (Debian: libpetsc-real-dev)", NULL, NULL};
