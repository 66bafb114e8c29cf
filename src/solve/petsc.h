/*
 * PETSc, loaded when the first instance is solved.
 *
 * Its hundred libraries would cost every start of the program 75 ms, twice where it starts itself anew; and a binary
 * that finds no PETSc at run time still plans. Functions are reached through a table of pointers; types and constants
 * come from its headers.
 */
#ifndef HAPT_SOLVE_PETSC_H
#define HAPT_SOLVE_PETSC_H

#include <petsctao.h>
#undef I /* PETSc's complex.h */

struct petsc {
#define CALL(name) __typeof__(&name) name;
#include "petsc.def"
#undef CALL
};

/* The table, with PETSc initialised on this process alone; NULL with the reason. Only between MPI_Init and
 * hapt_env_release. */
const struct petsc *petsc_open(const char **missing);

#endif
