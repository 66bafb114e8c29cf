/* Errors of MPI as errors of this program. */
#include <mpi.h>

#include "hapt/env.h"

enum hapt_status hapt_env_mpi(int mpi_error, const char *what)
{
    if (mpi_error == MPI_SUCCESS) return HAPT_OK;
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(mpi_error, text, &length);
    return hapt_fail(HAPT_ERR_COMM, "check the launcher's messages and the network", "MPI: %s: %s", what, text);
}
