/* Host CUDA: NCCL's communicators, between processes of one host. nccl_operations.cpp contains the operations. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "host_cuda.h"
#include "nccl_comm.h"

#define ID_START "hapt-host-nccl-"

static struct ncclComm *living;
static thread_local char last_error[200];

ncclResult_t host_nccl_fail(struct ncclComm *comm, ncclResult_t result, const char *what, int rank)
{
    snprintf(last_error, sizeof last_error, "%s (rank %d)", what, rank);
    if (comm) comm->error = result;
    return result;
}

ncclResult_t ncclGetVersion(int *version)
{
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result)
{
    static const char *const texts[] = {"no error",
                                        "unhandled cuda error",
                                        "unhandled system error",
                                        "internal error",
                                        "invalid argument",
                                        "invalid usage",
                                        "remote process exited or there was a network error",
                                        "NCCL operation in progress"};
    return (unsigned int)result < ncclNumResults ? texts[result] : "unknown result code";
}

const char *ncclGetLastError(ncclComm_t)
{
    return last_error;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    uint64_t bits[2];
    if (getrandom(bits, sizeof bits, 0) != (ssize_t)sizeof bits) return ncclSystemError;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, ID_START "%016llx%016llx", (unsigned long long)bits[0],
             (unsigned long long)bits[1]);
    return ncclSuccess;
}

/* When the process ends, the files of communicators that were not destroyed are removed. */
static void leave_all(void)
{
    for (struct ncclComm *comm = living; comm; comm = comm->next) mail_leave(&comm->box);
}

static ncclResult_t open_comm(ncclComm_t *result, const char *folder, int rank, int ranks)
{
    static bool registered;
    struct ncclComm *comm = (struct ncclComm *)calloc(1, sizeof *comm);
    *result = NULL;
    if (!comm) return ncclSystemError;
    if (cudaGetDevice(&comm->device)) {
        free(comm);
        return ncclUnhandledCudaError;
    }
    if (!mail_open(&comm->box, folder, rank, ranks)) {
        free(comm);
        return host_nccl_fail(NULL, ncclSystemError, "the ranks of a communicator did not meet in time", rank);
    }
    host_cuda_scope scope; /* for its lock */
    if (!registered) atexit(leave_all);
    registered = true;
    comm->next = living;
    living = comm;
    host_cuda_count_groups(1);
    *result = comm;
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config)
{
    char folder[200];
    if (!comm || ranks < 1 || ranks > MAIL_MOST_RANKS || rank < 0 || rank >= ranks)
        return host_nccl_fail(NULL, ncclInvalidArgument, "no such rank", rank);
    if (config && config->magic != 0xcafebeef)
        return host_nccl_fail(NULL, ncclInvalidArgument, "a configuration without its initializer", rank);
    if (strncmp(id.internal, ID_START, strlen(ID_START)) || memchr(id.internal, '/', sizeof id.internal) ||
        !memchr(id.internal, 0, sizeof id.internal))
        return host_nccl_fail(NULL, ncclInvalidArgument, "an id that ncclGetUniqueId did not make", rank);
    snprintf(folder, sizeof folder, "/dev/shm/%s", id.internal);
    return open_comm(comm, folder, rank, ranks);
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank)
{
    return ncclCommInitRankConfig(comm, ranks, id, rank, NULL);
}

ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    return comm ? ncclSuccess : ncclInvalidArgument;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    if (!comm) return ncclSuccess;
    host_cuda_scope scope;
    struct ncclComm **link = &living;
    while (*link && *link != comm) link = &(*link)->next;
    if (!*link) return host_nccl_fail(NULL, ncclInvalidArgument, "no such communicator", -1);
    *link = comm->next;
    host_cuda_count_groups(-1);
    mail_leave(&comm->box);
    free(comm);
    return ncclSuccess;
}

/* Waits of other threads end. The memory stays, because they may still read it. Like NCCL with open connections, it
 * returns when all peers have left, which dead or waiting peers never do. */
ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    if (!comm) return ncclSuccess;
    comm->box.given_up = true;
    mail_leave(&comm->box);
    mail_wait_for_all(&comm->box);
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error)
{
    if (!comm || !error) return ncclInvalidArgument;
    *error = comm->error;
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *ranks)
{
    *ranks = comm->box.ranks;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank)
{
    *rank = comm->box.rank;
    return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device)
{
    *device = comm->device;
    return ncclSuccess;
}

/* All ranks exchange color and key. Each finds its part and its rank there. */
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *part, ncclConfig_t *)
{
    struct choice {
        struct header header;
        int color, key;
    } mine = {{SPLIT, -1, -1, 0, 0}, color, key};
    struct mail_box *box = &comm->box;
    int rank = 0, ranks = 0;
    *part = NULL;
    if (!mail_send(box, MAIL_COLLECTIVE, 0, box->ranks, &mine, sizeof mine, NULL, 0))
        return host_nccl_fail(comm, ncclSystemError, "cannot send", box->rank);
    for (int source = 0; source < box->ranks; source++) {
        size_t bytes = 0;
        struct choice *theirs = (struct choice *)mail_receive(box, MAIL_COLLECTIVE, source,
                                                              box->received[MAIL_COLLECTIVE][source]++, &bytes);
        if (!theirs) return host_nccl_fail(comm, ncclSystemError, "no message in time from a peer of a split", source);
        const bool matches = bytes == sizeof mine && theirs->header.kind == SPLIT;
        if (matches && theirs->color == color) {
            ranks++;
            rank += theirs->key < key || (theirs->key == key && source < box->rank);
        }
        free(theirs);
        if (!matches) return host_nccl_fail(comm, ncclInvalidUsage, "a split meets another operation", source);
    }
    comm->splits++;
    if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
    char folder[200];
    const int length = snprintf(folder, sizeof folder, "%s-%d.%d", box->folder, comm->splits, color);
    if (length >= (int)sizeof folder)
        return host_nccl_fail(comm, ncclInternalError, "too many splits of splits", box->rank);
    return open_comm(part, folder, rank, ranks);
}
