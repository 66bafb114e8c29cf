/* Host CUDA, private part of its NCCL: communicators, shared by nccl.cpp and nccl_operations.cpp. */
#ifndef HOST_CUDA_NCCL_COMM_H
#define HOST_CUDA_NCCL_COMM_H

#include "nccl.h"
#include "nccl_mail.h"

/* Operations. */
enum kind { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, REDUCE, PAIR, SPLIT };

/* The description of an operation in a message. */
struct header {
    int kind, type, op, root; /* op -1: none */
    uint64_t count;
};

struct ncclComm {
    struct ncclComm *next; /* in the list of live communicators */
    struct mail_box box;
    int device, splits;
    ncclResult_t error;
};

/* Stores `what` for ncclGetLastError and `result` as the communicator's asynchronous error; returns it. */
ncclResult_t host_nccl_fail(struct ncclComm *comm, ncclResult_t result, const char *what, int rank);

#endif
