/*
 * Groups of devices by NCCL, 2.14 or newer. The library is loaded when the first group is asked for: where it is
 * missing, or no team has several devices, nothing else depends on it. Communicators never block, so that whoever waits
 * can give up.
 *
 * Equal bits in every run: NCCL's rings and trees add in an order that ranks, sizes and the machine decide. Sums in
 * NVLink's switches need not, and stay off unless NCCL_NVLS_ENABLE asks for them; SHARP is off where
 * NCCL_COLLNET_ENABLE does not.
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

static_assert(HAPT_GROUP_ID_BYTES == NCCL_UNIQUE_ID_BYTES, "an id is NCCL's");

enum { END_S = 10 }; /* so long a group's end waits for its peers */

struct hapt_group {
    ncclComm_t comm; /* NULL: none, or none any more */
    ncclComm_t none; /* where a split writes that this rank is of no part */
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
static decltype(&ncclCommSplit) comm_split; /* NULL: the library that is here is older */
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

/* NULL where it is well; `group` NULL: none is there yet. */
static const char *said(const struct hapt_group *group, ncclResult_t result)
{
    if (result == ncclSuccess || result == ncclInProgress) return NULL;
    const char *detail = nccl.GetLastError(group ? group->comm : NULL);
    snprintf(message, sizeof message, "NCCL: %s%s%s", nccl.GetErrorString(result), detail && *detail ? ": " : "",
             detail ? detail : "");
    for (char *c = message + strlen(message); c > message && (c[-1] == ' ' || c[-1] == '\n');) *--c = '\0';
    return message;
}

static const char *cuda_said(cudaError_t error)
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

static const char *place(char place[16])
{
    int device = 0;
    cuda_use_device();
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetPCIBusId(place, 16, device);
    for (char *c = place; error == cudaSuccess && *c; c++) *c = (char)tolower((unsigned char)*c);
    return cuda_said(error);
}

static const char *make_id(unsigned char id[HAPT_GROUP_ID_BYTES])
{
    ncclUniqueId made;
    const ncclResult_t result = nccl.GetUniqueId(&made);
    if (result == ncclSuccess) memcpy(id, made.internal, HAPT_GROUP_ID_BYTES);
    return said(NULL, result);
}

static const char *create(const unsigned char id[HAPT_GROUP_ID_BYTES], int rank, int ranks, struct hapt_group **group)
{
    ncclUniqueId unique;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    struct hapt_group *made = (struct hapt_group *)calloc(1, sizeof *made);
    if (!made) return "no memory for a group";
    memcpy(unique.internal, id, sizeof unique.internal);
    made->rank = rank;
    made->ranks = ranks;
    *group = made;
    return said(made, nccl.CommInitRankConfig(&made->comm, ranks, unique, rank, &config));
}

#ifdef NCCL_HAS_SPLIT
static const char *split(struct hapt_group *group, int color, int key, int rank, int ranks, struct hapt_group **part)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    *part = NULL;
    if (color < 0) return said(group, comm_split(group->comm, NCCL_SPLIT_NOCOLOR, key, &group->none, &config));
    struct hapt_group *made = (struct hapt_group *)calloc(1, sizeof *made);
    if (!made) return "no memory for a group";
    made->rank = rank;
    made->ranks = ranks;
    *part = made;
    return said(group,
                comm_split(group->comm, color, key, &made->comm, &config)); /* written there while the group settles */
}
#endif

static const char *settled(struct hapt_group *group, bool *settled)
{
    ncclResult_t state = ncclSuccess;
    const ncclResult_t result = nccl.CommGetAsyncError(group->comm, &state);
    *settled = state != ncclInProgress;
    return said(group, result != ncclSuccess ? result : state);
}

static void *abort_communicator(void *comm)
{
    pthread_setname_np(pthread_self(), "hapt-abort");
    cuda_use_device();
    nccl.CommAbort((ncclComm_t)comm);
    return NULL;
}

/* NCCL may wait for all peers to abort, too, and for what else runs on the device: nobody here waits for it. */
static void abort_group(struct hapt_group *group)
{
    pthread_t thread;
    if (group->comm && pthread_create(&thread, NULL, abort_communicator, group->comm) == 0) pthread_detach(thread);
    group->comm = NULL;
}

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Its peers may still want from this rank what it has sent. */
static bool end_well(struct hapt_group *group)
{
    const double until_s = now_s() + END_S;
    bool there = false;
    if (said(group, nccl.CommFinalize(group->comm))) return false;
    while (!there && now_s() < until_s) {
        const struct timespec while_ns = {0, 100000};
        if (settled(group, &there)) return false;
        if (!there) nanosleep(&while_ns, NULL);
    }
    return there;
}

static void destroy(struct hapt_group *group)
{
    if (!group) return;
    if (group->comm && end_well(group))
        nccl.CommDestroy(group->comm);
    else
        abort_group(group);
    free(group);
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

static bool is_even(const struct hapt_group *group, const size_t *bound)
{
    for (int r = 1; r < group->ranks; r++)
        if (bound[r + 1] - bound[r] != bound[1] - bound[0]) return false;
    return true;
}

/* The first failure counts, and an open group of calls is closed whatever comes. */
static void keep_first(ncclResult_t *kept, ncclResult_t result)
{
    if (*kept == ncclSuccess || *kept == ncclInProgress) *kept = result;
}

static const char *all_reduce(struct hapt_group *group, struct hapt_queue *queue, bool largest, enum hapt_dtype dtype,
                              const void *from, void *to, size_t elements)
{
    return said(group, nccl.AllReduce(from, to, elements, type_of(dtype), largest ? ncclMax : ncclSum, group->comm,
                                      queue->stream));
}

static const char *reduce_scatter(struct hapt_group *group, struct hapt_queue *queue, enum hapt_dtype dtype,
                                  const size_t *bound, const void *from, void *to)
{
    const size_t width = bytes_of(dtype);
    const char *base = (const char *)from;
    if (is_even(group, bound))
        return said(group, nccl.ReduceScatter(base + bound[0] * width, to, bound[1] - bound[0], type_of(dtype), ncclSum,
                                              group->comm, queue->stream));
    ncclResult_t result = nccl.GroupStart();
    for (int r = 0; r < group->ranks; r++) {
        const char *slice = base + bound[r] * width;
        if (bound[r + 1] > bound[r])
            keep_first(&result, nccl.Reduce(slice, r == group->rank ? to : NULL, bound[r + 1] - bound[r],
                                            type_of(dtype), ncclSum, r, group->comm, queue->stream));
    }
    keep_first(&result, nccl.GroupEnd());
    return said(group, result);
}

static const char *all_gather(struct hapt_group *group, struct hapt_queue *queue, const size_t *bound, const void *mine,
                              void *whole)
{
    char *base = (char *)whole;
    if (is_even(group, bound))
        return said(group,
                    nccl.AllGather(mine, base + bound[0], bound[1] - bound[0], ncclUint8, group->comm, queue->stream));
    ncclResult_t result = nccl.GroupStart();
    for (int r = 0; r < group->ranks; r++) {
        char *slice = base + bound[r];
        if (bound[r + 1] > bound[r])
            keep_first(&result, nccl.Broadcast(r == group->rank ? mine : slice, slice, bound[r + 1] - bound[r],
                                               ncclUint8, r, group->comm, queue->stream));
    }
    keep_first(&result, nccl.GroupEnd());
    return said(group, result);
}

static const char *trade(struct hapt_group *group, struct hapt_queue *queue, const size_t *send, const void *from,
                         const size_t *receive, void *to)
{
    const char *out = (const char *)from;
    char *in = (char *)to;
    const int me = group->rank;
    if (send[me + 1] > send[me]) {
        const cudaError_t error = cudaMemcpyAsync(in + receive[me], out + send[me], send[me + 1] - send[me],
                                                  cudaMemcpyDeviceToDevice, queue->stream);
        if (error != cudaSuccess) return cuda_said(error);
    }
    ncclResult_t result = nccl.GroupStart();
    for (int r = 0; r < group->ranks; r++) {
        if (r == me) continue;
        if (send[r + 1] > send[r])
            keep_first(&result,
                       nccl.Send(out + send[r], send[r + 1] - send[r], ncclUint8, r, group->comm, queue->stream));
        if (receive[r + 1] > receive[r])
            keep_first(&result, nccl.Recv(in + receive[r], receive[r + 1] - receive[r], ncclUint8, r, group->comm,
                                          queue->stream));
    }
    keep_first(&result, nccl.GroupEnd());
    return said(group, result);
}

/* By a thread that may not be the one that made the group. */
static const char *send(struct hapt_group *group, struct hapt_queue *queue, int count, const struct hapt_block *block,
                        int to)
{
    cuda_use_device();
    ncclResult_t result = nccl.GroupStart();
    for (int b = 0; b < count; b++)
        keep_first(&result, nccl.Send(block[b].data, block[b].bytes, ncclUint8, to, group->comm, queue->stream));
    keep_first(&result, nccl.GroupEnd());
    return said(group, result);
}

static const char *receive(struct hapt_group *group, struct hapt_queue *queue, int count,
                           const struct hapt_block *block, int from)
{
    cuda_use_device();
    ncclResult_t result = nccl.GroupStart();
    for (int b = 0; b < count; b++)
        keep_first(&result, nccl.Recv(block[b].data, block[b].bytes, ncclUint8, from, group->comm, queue->stream));
    keep_first(&result, nccl.GroupEnd());
    return said(group, result);
}

/* ---- Runs of bytes ---- */

static const size_t MOST_PITCH = INT32_MAX; /* of copies in two dimensions */

static const char *copy_runs(struct hapt_queue *queue, const struct hapt_strided_list *list, char *base, char *dense,
                             bool packs)
{
    cuda_use_device();
    for (int p = 0; p < list->count; p++) {
        const struct hapt_strided *part = &list->part[p];
        const size_t bytes = part->count * part->run;
        char *place = base + part->offset;
        if (bytes == 0) continue;
        const bool whole = part->count == 1 || part->stride == part->run;
        const size_t run = part->run, pitch = part->stride;
        cudaError_t error = cudaSuccess;
        if (whole)
            error = cudaMemcpyAsync(packs ? dense : place, packs ? place : dense, bytes, cudaMemcpyDeviceToDevice,
                                    queue->stream);
        else if (pitch <= MOST_PITCH)
            error = packs ? cudaMemcpy2DAsync(dense, run, place, pitch, run, part->count, cudaMemcpyDeviceToDevice,
                                              queue->stream)
                          : cudaMemcpy2DAsync(place, pitch, dense, run, run, part->count, cudaMemcpyDeviceToDevice,
                                              queue->stream);
        for (size_t r = 0; !whole && pitch > MOST_PITCH && r < part->count && error == cudaSuccess; r++)
            error = cudaMemcpyAsync(packs ? dense + r * run : place + r * pitch,
                                    packs ? place + r * pitch : dense + r * run, run, cudaMemcpyDeviceToDevice,
                                    queue->stream);
        if (error != cudaSuccess) return cuda_said(error);
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

extern const struct hapt_groups *cuda_nccl_groups(const char **reason);

const struct hapt_groups *cuda_nccl_groups(const char **reason)
{
    static struct hapt_groups groups = {library,     place,      make_id,        create,     settled, abort_group,
                                        destroy,     all_reduce, reduce_scatter, all_gather, trade,   pack_runs,
                                        unpack_runs, NULL,       send,           receive};
    static bool loaded;
    if (!loaded) {
        setenv("NCCL_NVLS_ENABLE", "0", 0);
        if ((*reason = load())) return NULL;
#ifdef NCCL_HAS_SPLIT
        groups.split = comm_split ? split : NULL;
#endif
        loaded = true;
    }
    return &groups;
}
