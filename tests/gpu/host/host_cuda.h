/*
 * Host CUDA, private declarations for its own files. Sources under test never include this header.
 *
 * One process-wide lock represents the device. A kernel, a copy or a library call holds it while it runs, on the
 * calling thread. Only the thread that holds it can touch device memory.
 */
#ifndef HOST_CUDA_H
#define HOST_CUDA_H

#include <stdbool.h>
#include <stddef.h>

#include <functional>

#include "cuda_runtime.h"

#define HOST_CUDA_SHARED_DEFAULT (48 << 10)
#define HOST_CUDA_SHARED_MOST (227 << 10)
/* The half 0x7fc1 is a NaN in fp16 and bf16, two of them are a NaN in fp32, and as an index it is out of every
 * range. */
#define HOST_CUDA_GARBAGE 0x7fc17fc1u

/* Takes the device and opens its memory to this thread. Scopes may be nested. */
struct host_cuda_scope {
    host_cuda_scope();
    ~host_cuda_scope();
    host_cuda_scope(const host_cuda_scope &) = delete;
    host_cuda_scope &operator=(const host_cuda_scope &) = delete;
};

/* Stores `error` for cudaGetLastError and returns it. */
cudaError_t host_cuda_result(cudaError_t error);
/* Prints "host CUDA: ..." and aborts. For bugs of a kernel or its caller that hardware would report less clearly. */
[[noreturn]] void host_cuda_die(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Is `pointer` in device memory? If `bytes` from there leave the allocation, *outside becomes true. */
bool host_cuda_is_device(const void *pointer, size_t bytes, bool *outside);
void host_cuda_fill_garbage(void *memory, size_t bytes);
size_t host_cuda_device_bytes(void);

/* Is the stream's device the thread's current one (or the stream a default one)? Launches require it. */
bool host_cuda_stream_takes(cudaStream_t stream);
/* Has the stream not been destroyed? Copies require it. */
bool host_cuda_stream_alive(cudaStream_t stream);
/* Does the stream accept work, and is it not being captured? Libraries that cannot be captured require it. */
bool host_cuda_stream_usable(cudaStream_t stream);

/* Graphs. A function that queues work checks it first. Then it runs the work or, if the stream is being captured,
 * stores it with copies of all operands. The error of stored work is that of the replay. */
typedef std::function<cudaError_t(void)> host_cuda_work;
bool host_cuda_captures(cudaStream_t stream);
cudaError_t host_cuda_keep(cudaStream_t stream, const host_cuda_work &work);
/* Returns cudaErrorStreamCaptureUnsupported and invalidates this thread's capture; cudaSuccess if there is none. */
cudaError_t host_cuda_not_captured(void);

/* Number of NCCL communicators of this process: +1, -1. */
void host_cuda_count_groups(int more);
/* HAPT_HOST_LAZY=1: the first use of a kernel, or of a product of some size, while a communicator exists ends the
 * process. On hardware a first use loads the kernel. That may wait for the device, which may wait for a peer. */
void host_cuda_first_use(const void *kernel, const size_t sizes[3]);

/* Runs one block of blockDim threads, each calling run(arguments). blockIdx, blockDim, gridDim are set. `backwards`:
 * the last thread first. In fibers.cpp. */
void host_cuda_run_block(const void *kernel, void (*run)(void *), void *arguments, bool backwards);

#endif
