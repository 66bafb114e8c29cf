/* This build has no GLPK. */
#include "solver.h"

const struct lp_library lp_glpk = {"glpk", "built without GLPK (Debian: libglpk-dev)", NULL, NULL};
