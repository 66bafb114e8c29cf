/*
 * Device communicators by NCCL, 2.14 or newer. The library is loaded when the first communicator is requested. If it is
 * missing, or no team has several devices, nothing else depends on it. Communicators are non-blocking, so that waiting
 * ranks can give up.
 *
 * Bitwise equal results in every run: the order of additions in NCCL's rings and trees depends on ranks, sizes and the
 * machine. Sums in NVLink's switches need not be reproducible, so they stay off unless NCCL_NVLS_ENABLE asks for them.
 * SHARP stays off unless NCCL_COLLNET_ENABLE asks for it.
 */
#include <ctype.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <nccl.h>

#include "kernel.cuh"

static_assert(HAPT_DEVICE_COMM_ID_BYTES == NCCL_UNIQUE_ID_BYTES, "the size of an NCCL id");

enum { END_S = 10 }; /* longest wait for peers when a communicator is destroyed */

struct hapt_device_comm {
    ncclComm_t handle; /* NULL: none, or no longer any */
    ncclComm_t none;   /* written by a split if this rank is in no part */
    int rank, ranks;
};

#define NCCL_CALLS(call)                                                                                          \
    call(GetVersion) call(GetUniqueId) call(CommInitRankConfig) call(CommGetAsyncError) call(CommFinalize)        \
        call(CommDestroy) call(CommAbort) call(GetErrorString) call(GetLastError) call(GroupStart) call(GroupEnd) \
            call(AllReduce) call(ReduceScatter) call(Reduce) call(AllGather) call(Broadcast) call(Send) call(Recv)

static struct {
#define NCCL_MEMBER(name) decltype(&nccl##name) name;
    NCCL_CALLS(NCCL_MEMBER)
} nccl;

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 18, 1)
#define NCCL_HAS_SPLIT 1
static decltype(&ncclCommSplit) comm_split; /* NULL: the installed library is too old */
#endif

static thread_local char message[320];

#ifdef HAPT_HOST_CUDA /* tests/gpu/host */
static const char *load(void)
{
#define NCCL_TAKE(name) nccl.name = nccl##name;
    NCCL_CALLS(NCCL_TAKE)
    comm_split = ncclCommSplit;
    return NULL;
}
#else
static const char *load(void)
{
    const char *reason;
    void *library = cuda_host->open_library("libnccl.so.2", &reason);
    if (!library) return reason;
#define NCCL_TAKE(name)                                            \
    nccl.name = (decltype(nccl.name))dlsym(library, "nccl" #name); \
    if (!nccl.name) return "libnccl.so.2 is too old: it lacks nccl" #name;
    NCCL_CALLS(NCCL_TAKE)
#ifdef NCCL_HAS_SPLIT
    comm_split = (decltype(comm_split))dlsym(library, "ncclCommSplit");
#endif
    return NULL;
}
#endif

/* NULL if all is well; `comm` NULL: none exists yet. */
static const char *error_text(const struct hapt_device_comm *comm, ncclResult_t result)
{
    if (result == ncclSuccess || result == ncclInProgress) return NULL;
    const char *detail = nccl.GetLastError(comm ? comm->handle : NULL);
    snprintf(message, sizeof message, "NCCL: %s%s%s", nccl.GetErrorString(result), detail && *detail ? ": " : "",
             detail ? detail : "");
    for (char *c = message + strlen(message); c > message && (c[-1] == ' ' || c[-1] == '\n');) *--c = '\0';
    return message;
}

static const char *cuda_error_text(cudaError_t error)
{
    if (error == cudaSuccess) return NULL;
    cudaGetLastError();
    snprintf(message, sizeof message, "CUDA: %s", cudaGetErrorString(error));
    return message;
}

static const char *library(void)
{
    static char text[32];
    int version = 0;
    nccl.GetVersion(&version);
    snprintf(text, sizeof text, "NCCL %d.%d.%d", version / 10000, version / 100 % 100, version % 100);
    return text;
}

static const char *pci_address(char address[16])
{
    int device = 0;
    cuda_use_device();
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetPCIBusId(address, 16, device);
    for (char *c = address; error == cudaSuccess && *c; c++) *c = (char)tolower((unsigned char)*c);
    return cuda_error_text(error);
}

static const char *make_id(unsigned char id[HAPT_DEVICE_COMM_ID_BYTES])
{
    ncclUniqueId made;
    const ncclResult_t result = nccl.GetUniqueId(&made);
    if (result == ncclSuccess) memcpy(id, made.internal, HAPT_DEVICE_COMM_ID_BYTES);
    return error_text(NULL, result);
}

static const char *create(const unsigned char id[HAPT_DEVICE_COMM_ID_BYTES], int rank, int ranks,
                          struct hapt_device_comm **comm)
{
    ncclUniqueId unique;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    struct hapt_device_comm *made = (struct hapt_device_comm *)calloc(1, sizeof *made);
    if (!made) return "no host memory for a communicator";
    memcpy(unique.internal, id, sizeof unique.internal);
    made->rank = rank;
    made->ranks = ranks;
    *comm = made;
    return error_text(made, nccl.CommInitRankConfig(&made->handle, ranks, unique, rank, &config));
}

#ifdef NCCL_HAS_SPLIT
static const char *split(struct hapt_device_comm *comm, int color, int key, int rank, int ranks,
                         struct hapt_device_comm **part)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    *part = NULL;
    if (color < 0) return error_text(comm, comm_split(comm->handle, NCCL_SPLIT_NOCOLOR, key, &comm->none, &config));
    struct hapt_device_comm *made = (struct hapt_device_comm *)calloc(1, sizeof *made);
    if (!made) return "no host memory for a communicator";
    made->rank = rank;
    made->ranks = ranks;
    *part = made;
    return error_text(comm, comm_split(comm->handle, color, key, &made->handle,
                                       &config)); /* NCCL writes the communicator until it is ready */
}
#endif

static const char *poll(struct hapt_device_comm *comm, bool *settled)
{
    ncclResult_t state = ncclSuccess;
    const ncclResult_t result = nccl.CommGetAsyncError(comm->handle, &state);
    *settled = state != ncclInProgress;
    return error_text(comm, result != ncclSuccess ? result : state);
}

static void *abort_communicator(void *comm)
{
    pthread_setname_np(pthread_self(), "hapt-abort");
    cuda_use_device();
    nccl.CommAbort((ncclComm_t)comm);
    return NULL;
}

/* Aborts in a thread of its own, without waiting: NCCL may wait until all peers abort and other work on the device
 * ends. */
static void abort_comm(struct hapt_device_comm *comm)
{
    pthread_t thread;
    if (comm->handle && pthread_create(&thread, NULL, abort_communicator, comm->handle) == 0) pthread_detach(thread);
    comm->handle = NULL;
}

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Finalizes first, since peers may still need what this rank has sent. */
static bool finalize(struct hapt_device_comm *comm)
{
    const double until_s = now_s() + END_S;
    bool there = false;
    if (error_text(comm, nccl.CommFinalize(comm->handle))) return false;
    while (!there && now_s() < until_s) {
        const struct timespec while_ns = {0, 100000};
        if (poll(comm, &there)) return false;
        if (!there) nanosleep(&while_ns, NULL);
    }
    return there;
}

static void destroy(struct hapt_device_comm *comm)
{
    if (!comm) return;
    if (comm->handle && finalize(comm))
        nccl.CommDestroy(comm->handle);
    else
        abort_comm(comm);
    free(comm);
}

/* ---- Operations ---- */

static ncclDataType_t type_of(enum hapt_dtype dtype)
{
    return dtype == HAPT_BF16 ? ncclBfloat16 : dtype == HAPT_F16 ? ncclFloat16 : ncclFloat32;
}

static size_t bytes_of(enum hapt_dtype dtype)
{
    return dtype == HAPT_F32 ? 4 : 2;
}

static bool is_even(const struct hapt_device_comm *comm, const size_t *bound)
{
    for (int r = 1; r < comm->ranks; r++)
        if (bound[r + 1] - bound[r] != bound[1] - bound[0]) return false;
    return true;
}

/* Keeps the first failure: an open NCCL group must be closed in any case. */
static void keep_first(ncclResult_t *kept, ncclResult_t result)
{
    if (*kept == ncclSuccess || *kept == ncclInProgress) *kept = result;
}

static const char *all_reduce(struct hapt_device_comm *comm, struct hapt_queue *queue, bool largest,
                              enum hapt_dtype dtype, const void *from, void *to, size_t elements)
{
    return error_text(comm, nccl.AllReduce(from, to, elements, type_of(dtype), largest ? ncclMax : ncclSum,
                                           comm->handle, queue->stream));
}

static const char *reduce_scatter(struct hapt_device_comm *comm, struct hapt_queue *queue, enum hapt_dtype dtype,
                                  const size_t *bound, const void *from, void *to)
{
    const size_t width = bytes_of(dtype);
    const char *base = (const char *)from;
    if (is_even(comm, bound))
        return error_text(comm, nccl.ReduceScatter(base + bound[0] * width, to, bound[1] - bound[0], type_of(dtype),
                                                   ncclSum, comm->handle, queue->stream));
    ncclResult_t result = nccl.GroupStart();
    for (int r = 0; r < comm->ranks; r++) {
        const char *slice = base + bound[r] * width;
        if (bound[r + 1] > bound[r])
            keep_first(&result, nccl.Reduce(slice, r == comm->rank ? to : NULL, bound[r + 1] - bound[r], type_of(dtype),
                                            ncclSum, r, comm->handle, queue->stream));
    }
    keep_first(&result, nccl.GroupEnd());
    return error_text(comm, result);
}

static const char *all_gather(struct hapt_device_comm *comm, struct hapt_queue *queue, const size_t *bound,
                              const void *mine, void *whole)
{
    char *base = (char *)whole;
    if (is_even(comm, bound))
        return error_text(
            comm, nccl.AllGather(mine, base + bound[0], bound[1] - bound[0], ncclUint8, comm->handle, queue->stream));
    ncclResult_t result = nccl.GroupStart();
    for (int r = 0; r < comm->ranks; r++) {
        char *slice = base + bound[r];
        if (bound[r + 1] > bound[r])
            keep_first(&result, nccl.Broadcast(r == comm->rank ? mine : slice, slice, bound[r + 1] - bound[r],
                                               ncclUint8, r, comm->handle, queue->stream));
    }
    keep_first(&result, nccl.GroupEnd());
    return error_text(comm, result);
}

static const char *all_to_all(struct hapt_device_comm *comm, struct hapt_queue *queue, const size_t *send,
                              const void *from, const size_t *receive, void *to)
{
    const char *out = (const char *)from;
    char *in = (char *)to;
    const int me = comm->rank;
    if (send[me + 1] > send[me]) {
        const cudaError_t error = cudaMemcpyAsync(in + receive[me], out + send[me], send[me + 1] - send[me],
                                                  cudaMemcpyDeviceToDevice, queue->stream);
        if (error != cudaSuccess) return cuda_error_text(error);
    }
    ncclResult_t result = nccl.GroupStart();
    for (int r = 0; r < comm->ranks; r++) {
        if (r == me) continue;
        if (send[r + 1] > send[r])
            keep_first(&result,
                       nccl.Send(out + send[r], send[r + 1] - send[r], ncclUint8, r, comm->handle, queue->stream));
        if (receive[r + 1] > receive[r])
            keep_first(&result, nccl.Recv(in + receive[r], receive[r + 1] - receive[r], ncclUint8, r, comm->handle,
                                          queue->stream));
    }
    keep_first(&result, nccl.GroupEnd());
    return error_text(comm, result);
}

/* May be called by another thread than the one that created the communicator. */
static const char *send(struct hapt_device_comm *comm, struct hapt_queue *queue, int count,
                        const struct hapt_block *block, int to)
{
    cuda_use_device();
    ncclResult_t result = nccl.GroupStart();
    for (int b = 0; b < count; b++)
        keep_first(&result, nccl.Send(block[b].data, block[b].bytes, ncclUint8, to, comm->handle, queue->stream));
    keep_first(&result, nccl.GroupEnd());
    return error_text(comm, result);
}

static const char *receive(struct hapt_device_comm *comm, struct hapt_queue *queue, int count,
                           const struct hapt_block *block, int from)
{
    cuda_use_device();
    ncclResult_t result = nccl.GroupStart();
    for (int b = 0; b < count; b++)
        keep_first(&result, nccl.Recv(block[b].data, block[b].bytes, ncclUint8, from, comm->handle, queue->stream));
    keep_first(&result, nccl.GroupEnd());
    return error_text(comm, result);
}

/* ---- Runs of bytes ---- */

static const size_t MOST_PITCH = INT32_MAX; /* of 2D copies */

static const char *copy_runs(struct hapt_queue *queue, const struct hapt_strided_list *list, char *base, char *dense,
                             bool packs)
{
    cuda_use_device();
    for (int p = 0; p < list->count; p++) {
        const struct hapt_strided *part = &list->part[p];
        const size_t bytes = part->count * part->run;
        char *address = base + part->offset;
        if (bytes == 0) continue;
        const bool whole = part->count == 1 || part->stride == part->run;
        const size_t run = part->run, pitch = part->stride;
        cudaError_t error = cudaSuccess;
        if (whole)
            error = cudaMemcpyAsync(packs ? dense : address, packs ? address : dense, bytes, cudaMemcpyDeviceToDevice,
                                    queue->stream);
        else if (pitch <= MOST_PITCH)
            error = packs ? cudaMemcpy2DAsync(dense, run, address, pitch, run, part->count, cudaMemcpyDeviceToDevice,
                                              queue->stream)
                          : cudaMemcpy2DAsync(address, pitch, dense, run, run, part->count, cudaMemcpyDeviceToDevice,
                                              queue->stream);
        for (size_t r = 0; !whole && pitch > MOST_PITCH && r < part->count && error == cudaSuccess; r++)
            error = cudaMemcpyAsync(packs ? dense + r * run : address + r * pitch,
                                    packs ? address + r * pitch : dense + r * run, run, cudaMemcpyDeviceToDevice,
                                    queue->stream);
        if (error != cudaSuccess) return cuda_error_text(error);
        dense += bytes;
    }
    return NULL;
}

static const char *pack_runs(struct hapt_queue *queue, const struct hapt_strided_list *list, const void *base,
                             void *dense)
{
    return copy_runs(queue, list, (char *)base, (char *)dense, true);
}

static const char *unpack_runs(struct hapt_queue *queue, const struct hapt_strided_list *list, void *base,
                               const void *dense)
{
    return copy_runs(queue, list, (char *)base, (char *)dense, false);
}

extern const struct hapt_device_comm_ops *cuda_nccl_comm_ops(const char **reason);

const struct hapt_device_comm_ops *cuda_nccl_comm_ops(const char **reason)
{
    static struct hapt_device_comm_ops ops = {
        library,        pci_address, make_id,    create,    poll,        abort_comm, destroy, all_reduce,
        reduce_scatter, all_gather,  all_to_all, pack_runs, unpack_runs, NULL,       send,    receive};
    static bool loaded;
    if (!loaded) {
        setenv("NCCL_NVLS_ENABLE", "0", 0);
        if ((*reason = load())) return NULL;
#ifdef NCCL_HAS_SPLIT
        ops.split = comm_split ? split : NULL;
#endif
        loaded = true;
    }
    return &ops;
}
