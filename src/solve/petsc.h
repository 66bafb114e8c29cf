/*
 * PETSc, loaded when the first instance is solved.
 *
 * Its hundred libraries would add 75 ms to every start of the program, twice if it restarts itself; and a binary
 * without PETSc at run time can still plan. Functions are called through a table of pointers; types and constants come
 * from PETSc's headers.
 */
#ifndef HAPT_SOLVE_PETSC_H
#define HAPT_SOLVE_PETSC_H

#include <petsctao.h>
#undef I /* defined by PETSc's complex.h */

struct petsc {
#define CALL(name) __typeof__(&name) name;
#include "petsc.def"
#undef CALL
};

/* Returns the table, with PETSc initialised on this process alone; NULL: not available, *missing is the reason. Call
 * only between MPI_Init and hapt_env_release. */
const struct petsc *petsc_open(const char **missing);

#endif
