/*
 * Host CUDA: NCCL between processes of one host.
 *
 * Each operation sends its messages at the call and receives those of other ranks when its group ends. It concatenates
 * them, or reduces them in the order of ranks, so that sums are equal on all ranks and in all runs. Calls return when
 * the work is done. Messages carry the description of the operation (kind, type, count, root). A mismatch between ranks
 * is ncclInvalidUsage instead of a hang.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "host_cuda.h"
#include "nccl_comm.h"

static const char *const kind_names[] = {"all-reduce", "reduce-scatter", "all-gather", "broadcast",
                                         "reduce",     "send",           "split"};

/* Pending receives: one message from each rank of [first, end). */
struct pending {
    struct pending *next;
    struct ncclComm *comm;
    struct header header;
    void *receive;
    int first, end;
    uint64_t sequence[MAIL_MOST_RANKS];
};

static thread_local int group_depth;
static thread_local struct pending *group_first, **group_end;

static size_t type_bytes(ncclDataType_t type)
{
    switch (type) {
    case ncclInt8:
    case ncclUint8:
        return 1;
    case ncclFloat16:
    case ncclBfloat16:
        return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
        return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
        return 8;
    default:
        return 0;
    }
}

/* A type wide enough to add many values of T: fp32 for the short floats. */
template <typename T> struct wide {
    typedef T type;
};
template <> struct wide<__half> {
    typedef float type;
};
template <> struct wide<__nv_bfloat16> {
    typedef float type;
};

template <typename T>
static void reduce_as(void *to, void *const *messages, size_t offset, int sources, size_t count, int op)
{
    typedef typename wide<T>::type sum_type;
    for (size_t i = 0; i < count; i++) {
        sum_type sum = (sum_type)((const T *)((const char *)messages[0] + offset))[i];
        for (int source = 1; source < sources; source++) {
            const sum_type x = (sum_type)((const T *)((const char *)messages[source] + offset))[i];
            switch (op) {
            case ncclProd:
                sum = (sum_type)(sum * x);
                break;
            case ncclMax:
                sum = x > sum ? x : sum;
                break;
            case ncclMin:
                sum = x < sum ? x : sum;
                break;
            default:
                sum = (sum_type)(sum + x);
                break;
            }
        }
        ((T *)to)[i] = (T)(op == ncclAvg ? (sum_type)(sum / (sum_type)sources) : sum);
    }
}

static void reduce(void *to, void *const *messages, size_t offset, int sources, size_t count, ncclDataType_t type,
                   int op)
{
    switch (type) {
    case ncclInt8:
        reduce_as<int8_t>(to, messages, offset, sources, count, op);
        break;
    case ncclUint8:
        reduce_as<uint8_t>(to, messages, offset, sources, count, op);
        break;
    case ncclInt32:
        reduce_as<int32_t>(to, messages, offset, sources, count, op);
        break;
    case ncclUint32:
        reduce_as<uint32_t>(to, messages, offset, sources, count, op);
        break;
    case ncclInt64:
        reduce_as<int64_t>(to, messages, offset, sources, count, op);
        break;
    case ncclUint64:
        reduce_as<uint64_t>(to, messages, offset, sources, count, op);
        break;
    case ncclFloat16:
        reduce_as<__half>(to, messages, offset, sources, count, op);
        break;
    case ncclFloat32:
        reduce_as<float>(to, messages, offset, sources, count, op);
        break;
    case ncclFloat64:
        reduce_as<double>(to, messages, offset, sources, count, op);
        break;
    case ncclBfloat16:
        reduce_as<__nv_bfloat16>(to, messages, offset, sources, count, op);
        break;
    default:
        break;
    }
}

static ncclResult_t take_in(const struct pending *work)
{
    const struct header *header = &work->header;
    const size_t bytes = header->count * type_bytes((ncclDataType_t)header->type);
    const enum mail_channel channel = header->kind == PAIR ? MAIL_PAIR : MAIL_COLLECTIVE;
    void *messages[MAIL_MOST_RANKS] = {};
    ncclResult_t result = ncclSuccess;
    const int sources = work->end - work->first;
    for (int i = 0; i < sources && !result; i++) {
        size_t got = 0;
        messages[i] = mail_receive(&work->comm->box, channel, work->first + i, work->sequence[i], &got);
        if (!messages[i])
            result = host_nccl_fail(work->comm, ncclSystemError, "no message in time from a peer", work->first + i);
        if (messages[i] && (got != sizeof *header + bytes || memcmp(messages[i], header, sizeof *header))) {
            const struct header *theirs = (const struct header *)messages[i];
            fprintf(
                stderr,
                "host CUDA: rank %d's %s of %llu elements of type %d meets rank %d's %s of %llu elements of type %d\n",
                work->comm->box.rank, kind_names[header->kind], (unsigned long long)header->count, header->type,
                work->first + i, got >= sizeof *theirs ? kind_names[theirs->kind] : "?",
                got >= sizeof *theirs ? (unsigned long long)theirs->count : 0,
                got >= sizeof *theirs ? theirs->type : -1);
            result = host_nccl_fail(work->comm, ncclInvalidUsage, "operations that do not match", work->first + i);
        }
    }
    if (!result && sources && bytes) {
        host_cuda_scope scope;
        if (header->op >= 0)
            reduce(work->receive, messages, sizeof *header, sources, header->count, (ncclDataType_t)header->type,
                   header->op);
        for (int i = 0; i < sources && header->op < 0; i++)
            memcpy((char *)work->receive + (size_t)i * bytes, (char *)messages[i] + sizeof *header, bytes);
    }
    for (int i = 0; i < sources; i++) free(messages[i]);
    return result;
}

ncclResult_t ncclGroupStart(void)
{
    if (group_depth++ == 0) group_end = &group_first;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    ncclResult_t result = ncclSuccess;
    if (group_depth <= 0) return host_nccl_fail(NULL, ncclInvalidUsage, "a group that did not start", -1);
    if (--group_depth) return ncclSuccess;
    while (group_first) {
        struct pending *work = group_first;
        group_first = work->next;
        const ncclResult_t one = result ? result : take_in(work);
        if (!result) result = one;
        free(work);
    }
    return result;
}

struct operation {
    struct header header;
    const void *send;
    size_t send_stride;     /* distance in elements between the parts of two targets; 0: all targets get the same */
    int target, target_end; /* [target, target_end) */
    void *receive;
    int source, source_end; /* [source, source_end) */
    size_t sent, received;  /* elements of the two buffers that are used */
};

static bool on_device(const void *pointer, size_t bytes)
{
    bool outside = false;
    return !bytes || (host_cuda_is_device(pointer, bytes, &outside) && !outside);
}

/* HAPT_HOST_NCCL_UNCONNECTED: the rank whose operations fail after it has created communicators. */
static bool cannot_connect(const struct ncclComm *comm)
{
    const char *rank = getenv("HAPT_HOST_NCCL_UNCONNECTED");
    return rank && *rank && atoi(rank) == comm->box.rank;
}

static ncclResult_t run(const struct operation *op, ncclComm_t comm, cudaStream_t stream)
{
    const size_t size = type_bytes((ncclDataType_t)op->header.type), bytes = op->header.count * size;
    const enum mail_channel channel = op->header.kind == PAIR ? MAIL_PAIR : MAIL_COLLECTIVE;
    int device;
    if (!comm || !size || op->header.op >= ncclNumOps)
        return host_nccl_fail(NULL, ncclInvalidArgument, "no such communicator, type or operation", -1);
    if (comm->error) return comm->error;
    if (cannot_connect(comm)) return host_nccl_fail(comm, ncclSystemError, "no room for a connection", comm->box.rank);
    if (op->target < 0 || op->target_end > comm->box.ranks || op->source < 0 || op->source_end > comm->box.ranks)
        return host_nccl_fail(NULL, ncclInvalidArgument, "no such peer", -1);
    if (!on_device(op->send, op->sent * size) || !on_device(op->receive, op->received * size))
        return host_nccl_fail(NULL, ncclInvalidArgument, "a buffer that is not whole in device memory", comm->box.rank);
    if (cudaGetDevice(&device) || !host_cuda_stream_usable(stream))
        return host_nccl_fail(NULL, ncclUnhandledCudaError, "a stream of another device", comm->box.rank);

    struct pending *work = (struct pending *)calloc(1, sizeof *work);
    if (!work) return ncclSystemError;
    {
        host_cuda_scope scope;
        bool fine = true;
        for (int target = op->target; fine && target < op->target_end;) {
            const int end = op->send_stride ? target + 1 : op->target_end;
            fine = mail_send(&comm->box, channel, target, end, &op->header, sizeof op->header,
                             (const char *)op->send + (size_t)target * op->send_stride * size, bytes);
            target = end;
        }
        *work = {NULL, comm, op->header, op->receive, op->source, op->source_end, {}};
        for (int source = op->source; source < op->source_end; source++)
            work->sequence[source - op->source] = comm->box.received[channel][source]++;
        if (!fine) {
            free(work);
            return host_nccl_fail(comm, ncclSystemError, "cannot write a message", comm->box.rank);
        }
    }
    ncclGroupStart();
    *group_end = work;
    group_end = &work->next;
    return ncclGroupEnd();
}

ncclResult_t ncclAllReduce(const void *send, void *receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream)
{
    const int ranks = comm ? comm->box.ranks : 0;
    const struct operation all_reduce = {
        {ALL_REDUCE, type, op, 0, count}, send, 0, 0, ranks, receive, 0, ranks, count, count};
    return run(&all_reduce, comm, stream);
}

ncclResult_t ncclReduceScatter(const void *send, void *receive, size_t receive_count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
    const int ranks = comm ? comm->box.ranks : 0;
    const struct operation scatter = {{REDUCE_SCATTER, type, op, 0, receive_count},
                                      send,
                                      receive_count,
                                      0,
                                      ranks,
                                      receive,
                                      0,
                                      ranks,
                                      receive_count * (size_t)ranks,
                                      receive_count};
    return run(&scatter, comm, stream);
}

ncclResult_t ncclAllGather(const void *send, void *receive, size_t send_count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream)
{
    const int ranks = comm ? comm->box.ranks : 0;
    const struct operation gather = {{ALL_GATHER, type, -1, 0, send_count},
                                     send,
                                     0,
                                     0,
                                     ranks,
                                     receive,
                                     0,
                                     ranks,
                                     send_count,
                                     send_count * (size_t)ranks};
    return run(&gather, comm, stream);
}

ncclResult_t ncclBroadcast(const void *send, void *receive, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream)
{
    const int ranks = comm ? comm->box.ranks : 0;
    const bool is_root = comm && comm->box.rank == root;
    const struct operation broadcast = {{BROADCAST, type, -1, root, count},
                                        send,
                                        0,
                                        0,
                                        is_root ? ranks : 0,
                                        receive,
                                        root,
                                        root + 1,
                                        is_root ? count : 0,
                                        count};
    return run(&broadcast, comm, stream);
}

ncclResult_t ncclReduce(const void *send, void *receive, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream)
{
    const bool is_root = comm && comm->box.rank == root;
    const struct operation to_root = {{REDUCE, type, op, root, count},
                                      send,
                                      0,
                                      root,
                                      root + 1,
                                      receive,
                                      0,
                                      is_root ? comm->box.ranks : 0,
                                      count,
                                      is_root ? count : 0};
    return run(&to_root, comm, stream);
}

ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    const struct operation one = {{PAIR, type, -1, 0, count}, send, 0, peer, peer + 1, NULL, 0, 0, count, 0};
    return run(&one, comm, stream);
}

ncclResult_t ncclRecv(void *receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream)
{
    const struct operation one = {{PAIR, type, -1, 0, count}, NULL, 0, 0, 0, receive, peer, peer + 1, 0, count};
    return run(&one, comm, stream);
}
