/*
 * The transfer table over MPI: a duplicated communicator, non-blocking sends and receives, tests.
 *
 * MPI libraries with CUDA support report it; HAPT_CUDA_MPI=yes or no in the environment overrides their report.
 */
#include <stdlib.h>
#include <string.h>

#include "hapt/link.h"

#if defined(OPEN_MPI) && defined(__has_include)
#if __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif
#endif

struct mpi_context {
    MPI_Comm comm;
};

static bool takes_device(void *context, int peer)
{
    (void)context;
    (void)peer;
    const char *choice = getenv("HAPT_CUDA_MPI");
    if (choice && *choice) return strcmp(choice, "yes") == 0;
#ifdef MPIX_CUDA_AWARE_SUPPORT
    return MPIX_Query_cuda_support() == 1;
#else
    return false;
#endif
}

_Static_assert(sizeof(MPI_Request) < sizeof(struct hapt_transfer_request),
               "a request holds an MPI_Request and one spare byte");

static enum hapt_status open_context(MPI_Comm world, const struct hapt_path *path, void **context)
{
    (void)path;
    struct mpi_context *mpi = calloc(1, sizeof *mpi);
    enum hapt_status status = HAPT_OK;
    if (!mpi) status = hapt_fail(HAPT_ERR_MEMORY, NULL, "host memory exhausted: a communicator");
    status = hapt_link_all_or_none(world, "creating a communicator", status);
    if (status == HAPT_OK) status = hapt_env_mpi(MPI_Comm_dup(world, &mpi->comm), "MPI_Comm_dup");
    if (status != HAPT_OK) {
        free(mpi);
        return status;
    }
    MPI_Comm_set_errhandler(mpi->comm, MPI_ERRORS_RETURN);
    *context = mpi;
    return HAPT_OK;
}

static void close_context(void *context)
{
    struct mpi_context *mpi = context;
    MPI_Comm_free(&mpi->comm);
    free(mpi);
}

static enum hapt_status send_chunk(void *context, const void *data, size_t bytes, int peer, int tag,
                                   struct hapt_transfer_request *request)
{
    const struct mpi_context *mpi = context;
    MPI_Request pending;
    HAPT_MPI(MPI_Isend(data, (int)bytes, MPI_BYTE, peer, tag, mpi->comm, &pending));
    memcpy(request->opaque, &pending, sizeof pending);
    return HAPT_OK;
}

static enum hapt_status receive_chunk(void *context, void *data, size_t bytes, int peer, int tag,
                                      struct hapt_transfer_request *request)
{
    const struct mpi_context *mpi = context;
    MPI_Request pending;
    HAPT_MPI(MPI_Irecv(data, (int)bytes, MPI_BYTE, peer, tag, mpi->comm, &pending));
    memcpy(request->opaque, &pending, sizeof pending);
    return HAPT_OK;
}

static enum hapt_status test_chunk(void *context, struct hapt_transfer_request *request, bool *done)
{
    (void)context;
    MPI_Request pending;
    int flag = 0;
    memcpy(&pending, request->opaque, sizeof pending);
    HAPT_MPI(MPI_Test(&pending, &flag, MPI_STATUS_IGNORE));
    memcpy(request->opaque, &pending, sizeof pending);
    *done = flag != 0;
    return HAPT_OK;
}

const struct hapt_transfer hapt_transfer_mpi = {
    .name = "mpi",
    .description = "messages of the MPI library, over the network that it chooses",
    .open = open_context,
    .close = close_context,
    .send = send_chunk,
    .receive = receive_chunk,
    .test = test_chunk,
    .takes_device = takes_device,
};
