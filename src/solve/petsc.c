/* Loading and unloading PETSc. */
#include "petsc.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>

#include "hapt/env.h"

static struct petsc table;
static enum { UNTRIED, OPEN, CLOSED } state;
static const char *reason;
static MPI_Comm alone;

static PetscErrorCode print_nothing(FILE *stream, const char *format, va_list arguments)
{
    (void)stream, (void)format, (void)arguments;
    return 0;
}

static bool load(void)
{
    static char text[512];
    /* As it was linked here, else wherever the loader finds it. */
    void *library = dlopen(HAPT_PETSC_FOLDER "/" HAPT_PETSC_LIBRARY, RTLD_LAZY | RTLD_LOCAL);
    if (!library) library = dlopen(HAPT_PETSC_LIBRARY, RTLD_LAZY | RTLD_LOCAL);
    if (!library) {
        snprintf(text, sizeof text, "%s", dlerror());
        reason = text;
        return false;
    }
#define CALL(name)                                             \
    *(void **)&table.name = dlsym(library, #name);             \
    if (!table.name) {                                         \
        reason = HAPT_PETSC_LIBRARY " has no function " #name; \
        return false;                                          \
    }
#include "petsc.def"
#undef CALL
    MPI_Comm *world = dlsym(library, "PETSC_COMM_WORLD");
    __typeof__(&PetscVFPrintf) print = dlsym(library, "PetscVFPrintf");
    if (!world || !print) {
        reason = HAPT_PETSC_LIBRARY " lacks PETSC_COMM_WORLD or PetscVFPrintf";
        return false;
    }
    /* One process of its own; a copy, since PETSc gives it another error handler. */
    if (MPI_Comm_dup(MPI_COMM_SELF, &alone) != MPI_SUCCESS) {
        reason = "no communicator for PETSc";
        return false;
    }
    *world = alone;
    *print = print_nothing;
    return true;
}

static void close_petsc(void)
{
    table.PetscPopErrorHandler();
    table.PetscFinalize();
    MPI_Comm_free(&alone);
    state = CLOSED;
    reason = "the process is about to leave";
}

static bool initialise(void)
{
    /* Signals, options and messages are the program's own matter. */
    static char *argument[] = {"hapt", "-skip_petscrc", "-no_signal_handler", "-options_left", "no", NULL};
    int count = 5;
    char **arguments = argument;
    if (table.PetscInitialize(&count, &arguments, NULL, NULL) != 0) {
        reason = "PetscInitialize failed";
        return false;
    }
    table.PetscPushErrorHandler(table.PetscIgnoreErrorHandler, NULL);
    hapt_env_at_release(close_petsc);
    return true;
}

const struct petsc *petsc_open(const char **missing)
{
    if (state == UNTRIED) {
        int ready = 0, over = 0;
        MPI_Initialized(&ready);
        MPI_Finalized(&over);
        if (!ready || over) {
            *missing = "PETSc works between MPI_Init and MPI_Finalize only";
            return NULL;
        }
        state = load() && initialise() ? OPEN : CLOSED;
    }
    *missing = reason;
    return state == OPEN ? &table : NULL;
}
