/*
 * Host CUDA, private part: what its own files ask of each other. Sources under test never include it.
 *
 * One process-wide lock stands for the device: a kernel, a copy or a library call holds it while it runs, on the
 * calling thread. Device memory can be touched only by the thread that holds it.
 */
#ifndef HOST_CUDA_H
#define HOST_CUDA_H

#include <stdbool.h>
#include <stddef.h>

#include <functional>

#include "cuda_runtime.h"

#define HOST_CUDA_SHARED_DEFAULT (48 << 10)
#define HOST_CUDA_SHARED_MOST (227 << 10)
/* A half of 0x7fc1 is a NaN in fp16 and bf16, two of them one in fp32, and as an index they are out of every range. */
#define HOST_CUDA_GARBAGE 0x7fc17fc1u

/* Takes the device and opens its memory to this thread; scopes nest. */
struct host_cuda_scope {
    host_cuda_scope();
    ~host_cuda_scope();
    host_cuda_scope(const host_cuda_scope &) = delete;
    host_cuda_scope &operator=(const host_cuda_scope &) = delete;
};

/* Keeps `error` for cudaGetLastError and returns it. */
cudaError_t host_cuda_result(cudaError_t error);
/* Prints "host CUDA: ..." and aborts: a bug of the kernel or of its caller that hardware would not report as plainly.
 */
[[noreturn]] void host_cuda_die(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Whether `pointer` lies in device memory; `bytes` from there must then lie in the same allocation, or *outside becomes
 * true. */
bool host_cuda_is_device(const void *pointer, size_t bytes, bool *outside);
void host_cuda_fill_garbage(void *memory, size_t bytes);
size_t host_cuda_device_bytes(void);

/* The stream's device is the thread's current one (or the stream is a default one): what a launch demands. */
bool host_cuda_stream_takes(cudaStream_t stream);
/* It was not destroyed: what copies demand. */
bool host_cuda_stream_alive(cudaStream_t stream);
/* That it takes work, and is not being captured: of libraries that do not know how to be. */
bool host_cuda_stream_usable(cudaStream_t stream);

/* Graphs. Whoever queues work checks it, then either runs it or, where the stream is being captured, hands it over with
 * copies of all that it refers to; what it returns when it is replayed is the replay's error. */
typedef std::function<cudaError_t(void)> host_cuda_work;
bool host_cuda_captures(cudaStream_t stream);
cudaError_t host_cuda_keep(cudaStream_t stream, const host_cuda_work &work);
/* cudaErrorStreamCaptureUnsupported, and what this thread captures is void; cudaSuccess where it captures nothing. */
cudaError_t host_cuda_not_captured(void);

/* Groups of devices that this process is in; +1, -1. */
void host_cuda_count_groups(int more);
/* HAPT_HOST_LAZY=1: a kernel, or a product of sizes, that is used for the first time while there is a group ends the
 * process. On hardware it is loaded then, which may wait for the device, which may wait for a peer. */
void host_cuda_first_use(const void *kernel, const size_t sizes[3]);

/* Runs one block of blockDim threads, each calling run(arguments); blockIdx, blockDim, gridDim are set. `backwards`:
 * the last thread first. fibers.cpp. */
void host_cuda_run_block(const void *kernel, void (*run)(void *), void *arguments, bool backwards);

#endif
