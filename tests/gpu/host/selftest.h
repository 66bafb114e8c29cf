/* The self-test of the host CUDA: declarations that its files share. Checks are counted, and a failed one prints its
 * place. */
#ifndef HOST_CUDA_SELFTEST_H
#define HOST_CUDA_SELFTEST_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_runtime.h"

extern int checks, failures;

#define CHECK(condition) check_that((condition), #condition, __FILE__, __LINE__)
#define FINE(call) check_fine((int)(call), #call, __FILE__, __LINE__)

void check_that(bool holds, const char *text, const char *file, int line);
void check_fine(int error, const char *text, const char *file, int line);

/* The result of a child that runs body(data): the signal that killed it, or minus its exit code. Its standard error is
 * closed. */
int child_end(void (*body)(void *data), void *data);

/* Uniform in [0, 1). Every run has the same sequence. */
uint32_t random_bits(void);
float random_unit(void);

template <typename... Parameters, typename... Arguments>
static cudaError_t run_kernel(void (*kernel)(Parameters...), dim3 grid, dim3 threads, size_t shared_bytes,
                              Arguments... arguments)
{
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = threads;
    config.dynamicSmemBytes = shared_bytes;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

/* Copies `count` elements of `host` to new device memory, and back. */
template <typename T> static T *to_device(const T *host, size_t count)
{
    T *device = NULL;
    FINE(cudaMalloc(&device, count * sizeof(T)));
    FINE(cudaMemcpy(device, host, count * sizeof(T), cudaMemcpyHostToDevice));
    return device;
}
template <typename T> static void to_host(T *host, const T *device, size_t count)
{
    FINE(cudaMemcpy(host, device, count * sizeof(T), cudaMemcpyDeviceToHost));
}

void test_threads(void);
void test_conversions(void);
void test_matrices(void);
void test_cublaslt(void);
void test_cudnn(void);
void test_graphs(void);
void test_nccl(void);

#endif
