/* Loads, initialises and finalises PETSc. */
#include "petsc.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>

#include "hapt/env.h"

static struct petsc table;
static enum { UNTRIED, OPEN, CLOSED } load_state;
static const char *reason;
static MPI_Comm petsc_comm;

static PetscErrorCode print_nothing(FILE *stream, const char *format, va_list arguments)
{
    (void)stream, (void)format, (void)arguments;
    return 0;
}

static bool load(void)
{
    static char text[512];
    /* The path it was linked with, else the loader's search path. */
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
    /* A communicator of this process alone; a duplicate, because PETSc sets another error handler on it. */
    if (MPI_Comm_dup(MPI_COMM_SELF, &petsc_comm) != MPI_SUCCESS) {
        reason = "MPI cannot create a communicator for PETSc";
        return false;
    }
    *world = petsc_comm;
    *print = print_nothing;
    return true;
}

static void close_petsc(void)
{
    table.PetscPopErrorHandler();
    table.PetscFinalize();
    MPI_Comm_free(&petsc_comm);
    load_state = CLOSED;
    reason = "the process is finalizing MPI";
}

static bool initialise(void)
{
    /* Signals, options and messages are handled by the program, not by PETSc. */
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
    if (load_state == UNTRIED) {
        int ready = 0, over = 0;
        MPI_Initialized(&ready);
        MPI_Finalized(&over);
        if (!ready || over) {
            *missing = "PETSc can be used only between MPI_Init and MPI_Finalize";
            return NULL;
        }
        load_state = load() && initialise() ? OPEN : CLOSED;
    }
    *missing = reason;
    return load_state == OPEN ? &table : NULL;
}
