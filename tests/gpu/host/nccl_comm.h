/* Host CUDA, private part of its NCCL: communicators, for the two files that make them and that work with them. */
#ifndef HOST_CUDA_NCCL_COMM_H
#define HOST_CUDA_NCCL_COMM_H

#include "nccl.h"
#include "nccl_mail.h"

/* Of operations. */
enum kind { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, REDUCE, PAIR, SPLIT };

/* What a message says of its operation. */
struct header {
    int kind, type, op, root; /* op -1: none */
    uint64_t count;
};

struct ncclComm {
    struct ncclComm *next; /* among the living */
    struct mail_box box;
    int device, splits;
    ncclResult_t error;
};

/* Keeps `what` for ncclGetLastError and `result` for the communicator's asynchronous error; returns it. */
ncclResult_t host_nccl_fail(struct ncclComm *comm, ncclResult_t result, const char *what, int rank);

#endif
