/* Self-test of the host CUDA: errors, memory and launches here, the rest in checks/. Exit code 0 only if every check
 * holds. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "selftest.h"

int checks, failures;

void check_that(bool holds, const char *text, const char *file, int line)
{
    checks++;
    if (holds) return;
    failures++;
    printf("%s:%d: %s\n", file, line, text);
}

void check_fine(int error, const char *text, const char *file, int line)
{
    checks++;
    if (!error) return;
    failures++;
    printf("%s:%d: %s is %d\n", file, line, text, error);
}

int child_end(void (*body)(void *data), void *data)
{
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        close(STDERR_FILENO);
        body(data);
        _exit(0);
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child) return -1000;
    return WIFSIGNALED(status) ? WTERMSIG(status) : -WEXITSTATUS(status);
}

static uint64_t random_state = 88172645463325252u;

uint32_t random_bits(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 24);
}

float random_unit(void)
{
    return (float)(random_bits() >> 8) * 0x1p-24f;
}

static void test_devices(void)
{
    int count = 0, device = -1, value = 0;
    char text[16];
    struct cudaDeviceProp prop;
    FINE(cudaGetDeviceCount(&count));
    CHECK(count == 1);
    FINE(cudaGetDevice(&device));
    CHECK(device == 0);
    CHECK(cudaSetDevice(1) == cudaErrorInvalidDevice);
    CHECK(cudaPeekAtLastError() == cudaErrorInvalidDevice && cudaGetLastError() == cudaErrorInvalidDevice &&
          cudaGetLastError() == cudaSuccess);
    CHECK(!strcmp(cudaGetErrorName(cudaErrorInvalidDevice), "cudaErrorInvalidDevice"));
    CHECK(!strcmp(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory"));
    FINE(cudaGetDeviceProperties(&prop, 0));
    CHECK(prop.major == 9 && prop.warpSize == 32 && prop.totalGlobalMem > 0);
    FINE(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    CHECK(value == 227 << 10);
    FINE(cudaDeviceGetPCIBusId(text, sizeof text, 0));
    CHECK(!strcmp(text, "0000:01:00.0"));
    CHECK(cudaDeviceGetPCIBusId(text, 12, 0) == cudaErrorInvalidValue);

    setenv("HAPT_HOST_GPUS", "2", 1);
    cudaStream_t stream;
    cudaEvent_t event;
    FINE(cudaSetDevice(1));
    FINE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    FINE(cudaSetDevice(0));
    FINE(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    CHECK(cudaEventRecord(event, stream) == cudaErrorInvalidResourceHandle);
    FINE(cudaStreamWaitEvent(stream, event, 0));
    FINE(cudaEventDestroy(event));
    CHECK(cudaEventQuery(event) == cudaErrorInvalidResourceHandle);
    FINE(cudaStreamDestroy(stream));
    CHECK(cudaStreamSynchronize(stream) == cudaErrorInvalidResourceHandle);
    setenv("HAPT_HOST_GPUS", "0", 1);
    CHECK(cudaGetDeviceCount(&count) == cudaErrorNoDevice && count == 0);
    unsetenv("HAPT_HOST_GPUS");
}

static void read_byte(void *data)
{
    *(volatile char *)data;
}
static void write_byte(void *data)
{
    *(volatile char *)data = 1;
}

static __global__ void read_kernel(const char *pointer, char *out)
{
    *out = *pointer;
}
struct read_call {
    const char *pointer;
    char *out;
};
static void read_in_kernel(void *data)
{
    struct read_call *call = (struct read_call *)data;
    run_kernel(read_kernel, 1, 1, 0, call->pointer, call->out);
}

static void test_memory(void)
{
    unsigned char host[64], back[64], grid[48];
    char *device = NULL, *pinned = NULL;
    size_t free_before, free_now, total;
    FINE(cudaMemGetInfo(&free_before, &total));
    CHECK(free_before == total);
    FINE(cudaMalloc(&device, 4096));
    FINE(cudaMemGetInfo(&free_now, &total));
    CHECK(free_before - free_now == 4096);
    FINE(cudaMemcpy(back, device, sizeof back, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < sizeof back; i++) CHECK(back[i] != 0);

    for (size_t i = 0; i < sizeof host; i++) host[i] = (unsigned char)i;
    FINE(cudaMemcpy(device, host, sizeof host, cudaMemcpyHostToDevice));
    FINE(cudaMemcpy(device + 1000, device, sizeof host, cudaMemcpyDefault));
    FINE(cudaMemcpyAsync(back, device + 1000, sizeof back, cudaMemcpyDefault));
    CHECK(!memcmp(host, back, sizeof host));
    FINE(cudaMemset(device + 1001, 7, 3));
    FINE(cudaMemcpy(back, device + 1000, sizeof back, cudaMemcpyDeviceToHost));
    CHECK(back[0] == 0 && back[1] == 7 && back[3] == 7 && back[4] == 4);
    FINE(cudaMemcpy2DAsync(grid, 12, device, 16, 10, 4, cudaMemcpyDeviceToHost, 0));
    CHECK(grid[0] == 0 && grid[9] == 9 && grid[12] == 16 && grid[45] == 57);

    CHECK(cudaMemcpy(host, back, sizeof host, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
    CHECK(cudaMemcpy(device, back, sizeof back, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
    CHECK(cudaMemcpy(device + 4090, host, 7, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
    CHECK(cudaMemset(device, 0, 4097) == cudaErrorInvalidValue);
    CHECK(cudaMemset(host, 0, 4) == cudaErrorInvalidValue);
    FINE(cudaMallocHost(&pinned, 100));
    CHECK(pinned[0] != 0);
    FINE(cudaMemcpy(pinned, device, 100, cudaMemcpyDeviceToHost));
    CHECK(pinned[9] == 9);
    CHECK(cudaFree(pinned) == cudaErrorInvalidValue && cudaFreeHost(device) == cudaErrorInvalidValue);
    CHECK(cudaFree(device + 1) == cudaErrorInvalidValue);
    FINE(cudaFree(NULL));

    /* Device memory is closed to the host and open to kernels. Guard pages are closed to both. */
    CHECK(child_end(read_byte, device) == SIGSEGV);
    CHECK(child_end(write_byte, device + 4095) == SIGSEGV);
    CHECK(child_end(read_byte, pinned) == 0);
    struct read_call call = {device + 9, device};
    CHECK(child_end(read_in_kernel, &call) == 0);
    call.pointer = device + 4096;
    CHECK(child_end(read_in_kernel, &call) == SIGSEGV);
    call.pointer = device - 1;
    CHECK(child_end(read_in_kernel, &call) == SIGSEGV);
    FINE(cudaFreeHost(pinned));
    FINE(cudaFree(device));
    CHECK(cudaFree(device) == cudaErrorInvalidValue);
    FINE(cudaMemGetInfo(&free_now, &total));
    CHECK(free_now == total);
    CHECK(cudaMalloc(&device, total + 1) == cudaErrorMemoryAllocation && device == NULL);
    cudaGetLastError();
}

static __global__ void touch_shared(int *out, int words)
{
    int *shared = (int *)host_cuda_shared();
    out[0] = shared[0];
    shared[words - 1] = 1;
}
static __global__ void count_up(long long *out, int first, float second)
{
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    out[i] = first + (long long)second + i;
    first++; /* a thread's own copy */
}
static void past_shared(void *data)
{
    run_kernel(touch_shared, 1, 1, 1024, (int *)data, 257);
}

static void test_launches(void)
{
    int zero[2] = {0, 0}, back[2];
    int *out = to_device(zero, 2);
    FINE(run_kernel(touch_shared, 1, 1, 48 << 10, out, 48 << 8));
    to_host(back, out, 2);
    CHECK(back[0] != 0);
    CHECK(run_kernel(touch_shared, 1, 1, (48 << 10) + 1, out, 1) == cudaErrorInvalidValue);
    FINE(cudaFuncSetAttribute(touch_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 << 10));
    FINE(run_kernel(touch_shared, 1, 1, 227 << 10, out, 227 << 8));
    CHECK(cudaFuncSetAttribute(touch_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, (227 << 10) + 1) ==
          cudaErrorInvalidValue);
    CHECK(run_kernel(touch_shared, 1, 1, (227 << 10) + 1, out, 1) == cudaErrorInvalidValue);
    CHECK(child_end(past_shared, out) == SIGSEGV);

    const dim3 wrong_grids[] = {{0, 1, 1}, {1, 0, 1}, {1, 1, 0}, {0x80000000u, 1, 1}, {1, 65536, 1}, {1, 1, 65536}};
    for (const dim3 &grid : wrong_grids)
        CHECK(run_kernel(touch_shared, grid, 1, 16, out, 1) == cudaErrorInvalidConfiguration);
    const dim3 wrong_blocks[] = {{0, 1, 1}, {1, 0, 1}, {1, 1, 0}, {1025, 1, 1}, {1, 1, 65}, {32, 32, 2}};
    for (const dim3 &threads : wrong_blocks)
        CHECK(run_kernel(touch_shared, 1, threads, 16, out, 1) == cudaErrorInvalidConfiguration);
    FINE(run_kernel(touch_shared, dim3(1, 65535, 1), dim3(1, 1, 1), 16, out, 4));
    CHECK(cudaGetLastError() == cudaErrorInvalidConfiguration);
    FINE(cudaFree(out));

    long long counted[96], garbage[96] = {};
    long long *numbers = to_device(garbage, 96);
    FINE(run_kernel(count_up, 3, 32, 0, numbers, 5, 2)); /* 2 is converted to float */
    to_host(counted, numbers, 96);
    for (int i = 0; i < 96; i++) CHECK(counted[i] == 7 + i);
    FINE(cudaFree(numbers));

    int blocks = 0;
    FINE(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, count_up, 256, 0));
    CHECK(blocks == 8);
    FINE(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, touch_shared, 64, 100 << 10));
    CHECK(blocks == 2);
    cudaEvent_t start, end;
    float time_ms = -1;
    FINE(cudaEventCreate(&start));
    FINE(cudaEventCreate(&end));
    CHECK(cudaEventElapsedTime(&time_ms, start, end) == cudaErrorInvalidResourceHandle);
    FINE(cudaEventRecord(start));
    FINE(cudaEventRecord(end));
    FINE(cudaEventElapsedTime(&time_ms, start, end));
    CHECK(time_ms >= 0 && cudaGetLastError() == cudaErrorInvalidResourceHandle);
}

int main(void)
{
    test_devices();
    test_memory();
    test_launches();
    test_threads();
    test_conversions();
    test_matrices();
    test_cublaslt();
    test_cudnn();
    test_graphs();
    test_nccl();
    printf("%d checks, %d failed\n", checks, failures);
    return failures != 0;
}
