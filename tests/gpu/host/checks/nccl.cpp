/* Self-test: NCCL among forked processes. Each operation is compared with a loop over the ranks. Also mismatches,
 * time-outs and leftover files. */
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "nccl.h"
#include "selftest.h"

#define COUNT 37

/* Small whole numbers, exact in every type: element i of the operand of `rank`. */
static int brought(int rank, int i)
{
    return (i * 7 + rank * 5) % 11 - 3 * (rank % 2) + 4;
}

template <typename T> static void test_type(ncclComm_t comm, int rank, int ranks, ncclDataType_t type)
{
    const int total = COUNT * ranks;
    T *in = (T *)malloc(sizeof(T) * (size_t)total), *out = (T *)malloc(sizeof(T) * (size_t)total);
    for (int i = 0; i < total; i++) in[i] = (T)brought(rank, i);
    T *device_in = to_device(in, (size_t)total), *device_out = to_device(in, (size_t)total);
    int wrong = 0;
    for (const ncclRedOp_t op : {ncclSum, ncclMax}) {
        FINE(ncclAllReduce(device_in, device_out, (size_t)total, type, op, comm, 0));
        to_host(out, device_out, (size_t)total);
        for (int i = 0; i < total; i++) {
            int expected = brought(0, i);
            for (int r = 1; r < ranks; r++)
                expected = op == ncclSum ? expected + brought(r, i) : max(expected, brought(r, i));
            wrong += (double)out[i] != expected;
        }
    }
    FINE(ncclReduceScatter(device_in, device_out, COUNT, type, ncclSum, comm, 0));
    to_host(out, device_out, COUNT);
    for (int i = 0; i < COUNT; i++) {
        int expected = 0;
        for (int r = 0; r < ranks; r++) expected += brought(r, rank * COUNT + i);
        wrong += (double)out[i] != expected;
    }
    FINE(cudaMemcpy(device_out + rank * COUNT, device_in, COUNT * sizeof(T), cudaMemcpyDeviceToDevice)); /* in place */
    FINE(ncclAllGather(device_out + rank * COUNT, device_out, COUNT, type, comm, 0));
    to_host(out, device_out, (size_t)total);
    for (int i = 0; i < total; i++) wrong += (double)out[i] != brought(i / COUNT, i % COUNT);
    for (int root = 0; root < ranks; root++) {
        FINE(ncclBroadcast(device_in, device_out, COUNT, type, root, comm, 0));
        to_host(out, device_out, COUNT);
        for (int i = 0; i < COUNT; i++) wrong += (double)out[i] != brought(root, i);
        FINE(ncclReduce(device_in, device_out, COUNT, type, ncclMin, root, comm, 0));
        to_host(out, device_out, COUNT);
        for (int i = 0; i < COUNT && rank == root; i++) {
            int expected = brought(0, i);
            for (int r = 1; r < ranks; r++) expected = min(expected, brought(r, i));
            wrong += (double)out[i] != expected;
        }
    }
    CHECK(wrong == 0);
    FINE(cudaFree(device_in));
    FINE(cudaFree(device_out));
    free(in);
    free(out);
}

static void test_pairs(ncclComm_t comm, int rank, int ranks)
{
    int numbers[COUNT], got[3][COUNT];
    for (int i = 0; i < COUNT; i++) numbers[i] = brought(rank, i);
    int *device = to_device(numbers, COUNT), *device_got = to_device(numbers, COUNT), *sum = to_device(numbers, COUNT);
    const int next = (rank + 1) % ranks, before = (rank + ranks - 1) % ranks;
    /* A group receives before it sends, with a collective between; then twice without a group, sending first. */
    FINE(ncclGroupStart());
    FINE(ncclRecv(device_got, COUNT, ncclInt32, before, comm, 0));
    FINE(ncclAllReduce(device, sum, COUNT, ncclInt32, ncclSum, comm, 0));
    FINE(ncclSend(device, COUNT, ncclInt32, next, comm, 0));
    FINE(ncclGroupEnd());
    to_host(got[0], device_got, COUNT);
    for (int round = 0; round < 2; round++) FINE(ncclSend(device + round, COUNT - 1, ncclInt32, next, comm, 0));
    for (int round = 0; round < 2; round++) {
        FINE(ncclRecv(device_got, COUNT - 1, ncclInt32, before, comm, 0));
        to_host(got[1 + round], device_got, COUNT - 1);
    }
    int wrong = 0;
    for (int i = 0; i < COUNT - 1; i++)
        wrong +=
            got[0][i] != brought(before, i) || got[1][i] != brought(before, i) || got[2][i] != brought(before, i + 1);
    CHECK(wrong == 0);
    CHECK(ncclSend(numbers, 1, ncclInt32, next, comm, 0) == ncclInvalidArgument); /* not device memory */
    CHECK(ncclSend(device, 1, ncclInt32, ranks, comm, 0) == ncclInvalidArgument);
    CHECK(ncclGroupEnd() == ncclInvalidUsage);
    FINE(cudaFree(device));
    FINE(cudaFree(device_got));
    FINE(cudaFree(sum));
}

static void test_split(ncclComm_t comm, int rank, int ranks)
{
    ncclComm_t part = NULL, none = NULL;
    FINE(ncclCommSplit(comm, rank % 2, -rank, &part, NULL)); /* odd and even, backwards */
    FINE(ncclCommSplit(comm, rank ? NCCL_SPLIT_NOCOLOR : 3, 0, &none, NULL));
    CHECK((none != NULL) == (rank == 0));
    int part_rank = -1, part_ranks = -1;
    FINE(ncclCommCount(part, &part_ranks));
    FINE(ncclCommUserRank(part, &part_rank));
    CHECK(part_ranks == (ranks + 1 - rank % 2) / 2 && part_rank == part_ranks - 1 - rank / 2);
    const float mine = (float)(rank + 1);
    float *sum = to_device(&mine, 1), total = 0;
    FINE(ncclAllReduce(sum, sum, 1, ncclFloat32, ncclSum, part, 0));
    to_host(&total, sum, 1);
    float expected = 0;
    for (int r = rank % 2; r < ranks; r += 2) expected += (float)(r + 1);
    CHECK(total == expected);
    FINE(cudaFree(sum));
    FINE(ncclCommDestroy(part));
    FINE(ncclCommDestroy(none));
}

static const float pair[] = {1, 2};

/* Rank 0 and the others call different operations. */
static void test_mismatch(ncclUniqueId id, int rank, int ranks, bool by_type)
{
    ncclComm_t comm;
    ncclResult_t error;
    float *device = to_device(pair, 2);
    FINE(ncclCommInitRank(&comm, ranks, id, rank));
    const bool other = rank != 0;
    const ncclResult_t result = ncclAllReduce(device, device, other && !by_type ? 2 : 1,
                                              other && by_type ? ncclInt32 : ncclFloat32, ncclSum, comm, 0);
    CHECK(result == (ranks > 1 ? ncclInvalidUsage : ncclSuccess));
    FINE(ncclCommGetAsyncError(comm, &error));
    CHECK(error == result);
    FINE(ncclCommAbort(comm));
    FINE(cudaFree(device));
}

/* The last rank does not take part in an operation. */
static void test_time_out(ncclUniqueId id, int rank, int ranks)
{
    ncclComm_t comm;
    float *device = to_device(pair, 2);
    FINE(ncclCommInitRank(&comm, ranks, id, rank));
    setenv("HAPT_HOST_NCCL_TIMEOUT_S", "0.2", 1);
    if (rank < ranks - 1) CHECK(ncclAllReduce(device, device, 1, ncclFloat32, ncclSum, comm, 0) == ncclSystemError);
    unsetenv("HAPT_HOST_NCCL_TIMEOUT_S");
    FINE(cudaFree(device)); /* not destroyed: exit does it */
}

/* Number of files in the communicator's folder: only the rank's presence file when all messages have been received. */
static int file_count(const ncclUniqueId *id)
{
    char path[200];
    int files = 0;
    snprintf(path, sizeof path, "/dev/shm/%s", id->internal);
    DIR *list = opendir(path);
    for (struct dirent *entry; list && (entry = readdir(list));) files += entry->d_name[0] != '.';
    if (list) closedir(list);
    return files;
}

static void run_rank(const ncclUniqueId id[4], int rank, int ranks)
{
    ncclComm_t comm;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    FINE(ncclCommInitRankConfig(&comm, ranks, id[0], rank, &config));
    test_type<float>(comm, rank, ranks, ncclFloat32);
    test_type<__nv_bfloat16>(comm, rank, ranks, ncclBfloat16);
    test_type<__half>(comm, rank, ranks, ncclFloat16);
    test_type<int>(comm, rank, ranks, ncclInt32);
    test_type<unsigned char>(comm, rank, ranks, ncclUint8);
    test_type<double>(comm, rank, ranks, ncclDouble);
    test_pairs(comm, rank, ranks);
    test_split(comm, rank, ranks);
    if (ranks == 1) CHECK(file_count(&id[0]) == 1);
    FINE(ncclCommFinalize(comm));
    FINE(ncclCommDestroy(comm));
    test_mismatch(id[1], rank, ranks, false);
    test_mismatch(id[2], rank, ranks, true);
    test_time_out(id[3], rank, ranks);
}

static bool left_over(const ncclUniqueId *id)
{
    DIR *list = opendir("/dev/shm");
    bool found = false;
    for (struct dirent *entry; list && (entry = readdir(list));)
        found |= !strncmp(entry->d_name, id->internal, strlen(id->internal));
    if (list) closedir(list);
    return found;
}

static __global__ void nothing(void)
{
}
static __global__ void something(void)
{
}

static void leave(int)
{
    exit(7); /* unlike abort: its files are removed */
}

/* HAPT_HOST_LAZY: a first use must fail while a communicator exists, and work otherwise. */
static void run_beside(void *data)
{
    const bool before = *(const bool *)data;
    ncclComm_t comm;
    ncclUniqueId id;
    setenv("HAPT_HOST_LAZY", "1", 1);
    signal(SIGABRT, leave);
    if (before) FINE(run_kernel(nothing, 1, 1, 0));
    FINE(ncclGetUniqueId(&id));
    FINE(ncclCommInitRank(&comm, 1, id, 0));
    for (int run = 0; run < 2 * before; run++) FINE(run_kernel(nothing, 1, 1, 0));
    FINE(ncclCommDestroy(comm));
    FINE(run_kernel(nothing, 1, 1, 0));
    FINE(ncclGetUniqueId(&id));
    FINE(ncclCommInitRank(&comm, 1, id, 0));
    if (!before) FINE(run_kernel(something, 1, 1, 0));
    exit(0); /* exits without destroying its communicator */
}

void test_nccl(void)
{
    const bool yes = true, no = false;
    CHECK(child_end(run_beside, (void *)&yes) == 0 && child_end(run_beside, (void *)&no) == -7);
    ncclComm_t comm;
    ncclUniqueId id[4], wrong_id = {};
    CHECK(ncclCommInitRank(&comm, 1, wrong_id, 0) == ncclInvalidArgument);
    FINE(ncclGetUniqueId(&id[0]));
    CHECK(ncclCommInitRank(&comm, 2, id[0], 2) == ncclInvalidArgument);
    setenv("HAPT_HOST_NCCL_TIMEOUT_S", "0.1", 1);
    CHECK(ncclCommInitRank(&comm, 2, id[0], 0) == ncclSystemError && comm == NULL && !left_over(&id[0]));
    unsetenv("HAPT_HOST_NCCL_TIMEOUT_S");
    for (int ranks = 1; ranks <= 4; ranks++) {
        pid_t child[4];
        for (ncclUniqueId &one : id) FINE(ncclGetUniqueId(&one));
        fflush(stdout);
        for (int rank = 0; rank < ranks; rank++) {
            child[rank] = fork();
            if (child[rank]) continue;
            close(STDERR_FILENO);
            checks = failures = 0;
            run_rank(id, rank, ranks);
            fflush(stdout);
            exit(failures != 0 || checks < 20);
        }
        for (int rank = 0; rank < ranks; rank++) {
            int status = -1;
            CHECK(waitpid(child[rank], &status, 0) == child[rank] && status == 0);
        }
        for (const ncclUniqueId &one : id) CHECK(!left_over(&one));
    }
}
