/* Preloaded by tests. MPI loses a message: the agreement number LOST_AT never completes on rank LOST_RANK, but it does
 * on all others. */
#include <mpi.h>
#include <stdbool.h>
#include <stdlib.h>

static MPI_Request *waiting; /* its request; other threads have other requests */
static bool arrived;

int MPI_Iallreduce(const void *send, void *receive, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm,
                   MPI_Request *request)
{
    static int calls;
    const char *rank = getenv("LOST_RANK"), *at = getenv("LOST_AT");
    int mine;
    const int error = PMPI_Iallreduce(send, receive, count, type, op, comm, request);
    MPI_Comm_rank(comm, &mine);
    if (type == MPI_2INT && rank && at && !getenv("LOST_ALL_REDUCE") && mine == atoi(rank) && ++calls == atoi(at))
        waiting = request;
    return error;
}

int MPI_Allreduce(const void *send, void *receive, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm)
{
    static int calls;
    const char *rank = getenv("LOST_RANK"), *at = getenv("LOST_AT");
    int mine, size;
    MPI_Comm_rank(MPI_COMM_WORLD, &mine);
    MPI_Comm_size(comm, &size);
    if (getenv("LOST_ALL_REDUCE") && rank && at && size > 1 && mine == atoi(rank) && ++calls == atoi(at))
        return MPI_ERR_OTHER;
    return PMPI_Allreduce(send, receive, count, type, op, comm);
}

int MPI_Test(MPI_Request *request, int *done, MPI_Status *status)
{
    if (request != waiting) return PMPI_Test(request, done, status);
    const int error = arrived ? MPI_SUCCESS : PMPI_Test(request, done, status); /* so this rank's part is sent */
    arrived = arrived || *done;
    *done = 0;
    return error;
}
