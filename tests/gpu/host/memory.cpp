/*
 * Host CUDA: memory of the devices and of the host, copies.
 *
 * Each allocation of device memory is a separate mapping between guard pages. Only the thread that holds the device can
 * access it (struct host_cuda_scope). A protection key does this with one instruction if the CPU has them; else
 * mprotect on every mapping. Fresh memory holds garbage.
 */
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "host_cuda.h"

struct allocation {
    struct allocation *next;
    char *base;
    size_t bytes, mapped_bytes; /* requested size; size of the mapping without guard pages */
    int device;                 /* -1: page-locked memory of the host */
};

static struct {
    pthread_mutex_t lock; /* recursive: represents the device */
    struct allocation *first;
    size_t used_bytes[64]; /* by device */
    int depth;
    int key; /* -1: protection by mprotect */
    bool readable; /* no protection */
    size_t page;
} memory;
static pthread_once_t memory_once = PTHREAD_ONCE_INIT;

void host_cuda_die(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("host CUDA: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    abort();
}

static void init_memory(void)
{
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&memory.lock, &attributes);
    pthread_mutexattr_destroy(&attributes);
    memory.page = (size_t)sysconf(_SC_PAGESIZE);
    memory.key = -1;
    const char *readable = getenv("HAPT_HOST_READABLE");
    memory.readable = readable && readable[0] == '1';
#if defined(__x86_64__) && defined(PKEY_DISABLE_ACCESS)
    const char *wish = getenv("HAPT_HOST_PKEYS");
    if (!memory.readable && (!wish || wish[0] != '0')) memory.key = pkey_alloc(0, PKEY_DISABLE_ACCESS);
#endif
}

static void protect(const struct allocation *block, bool open)
{
    if (block->device >= 0 && mprotect(block->base, block->mapped_bytes, open ? PROT_READ | PROT_WRITE : PROT_NONE))
        host_cuda_die("mprotect failed");
}

static void protect_all(bool open)
{
    if (memory.readable) return;
#if defined(__x86_64__) && defined(PKEY_DISABLE_ACCESS)
    if (memory.key >= 0) {
        pkey_set(memory.key, open ? 0 : PKEY_DISABLE_ACCESS);
        return;
    }
#endif
    for (const struct allocation *block = memory.first; block; block = block->next) protect(block, open);
}

host_cuda_scope::host_cuda_scope()
{
    pthread_once(&memory_once, init_memory);
    pthread_mutex_lock(&memory.lock);
    if (memory.depth++ == 0) protect_all(true);
}

host_cuda_scope::~host_cuda_scope()
{
    if (--memory.depth == 0) protect_all(false);
    pthread_mutex_unlock(&memory.lock);
}

size_t host_cuda_device_bytes(void)
{
    const char *text = getenv("HAPT_HOST_GPU_BYTES");
    const unsigned long long bytes = text ? strtoull(text, NULL, 10) : 0;
    return bytes ? (size_t)bytes : (size_t)4 << 30;
}

void host_cuda_fill_garbage(void *pointer, size_t bytes)
{
    const uint32_t word = HOST_CUDA_GARBAGE;
    uint32_t *words = (uint32_t *)pointer;
    for (size_t i = 0; i < bytes / sizeof word; i++) words[i] = word;
    memcpy(words + bytes / sizeof word, &word, bytes % sizeof word);
}

/* The allocation that contains `pointer`. The scope is held. */
static struct allocation **find(const void *pointer)
{
    struct allocation **link = &memory.first;
    while (*link &&
           !((const char *)pointer >= (*link)->base && (const char *)pointer < (*link)->base + (*link)->mapped_bytes))
        link = &(*link)->next;
    return link;
}

bool host_cuda_is_device(const void *pointer, size_t bytes, bool *outside)
{
    host_cuda_scope scope;
    const struct allocation *block = *find(pointer);
    if (!block) return false;
    if (bytes > block->bytes - (size_t)((const char *)pointer - block->base)) *outside = true;
    return block->device >= 0;
}

/* The guard pages on both sides stay closed. */
static cudaError_t reserve(void **pointer, size_t bytes, int device)
{
    if (!pointer) return host_cuda_result(cudaErrorInvalidValue);
    if (host_cuda_not_captured()) return cudaPeekAtLastError();
    *pointer = NULL;
    if (!bytes) return host_cuda_result(cudaSuccess);
    host_cuda_scope scope;
    if (device >= 0 && bytes > host_cuda_device_bytes() - memory.used_bytes[device])
        return host_cuda_result(cudaErrorMemoryAllocation);
    const size_t mapped = (bytes + memory.page - 1) / memory.page * memory.page;
    struct allocation *block = (struct allocation *)calloc(1, sizeof *block);
    char *whole =
        (char *)mmap(NULL, mapped + 2 * memory.page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!block || whole == MAP_FAILED || mprotect(whole + memory.page, mapped, PROT_READ | PROT_WRITE)) {
        if (whole != MAP_FAILED) munmap(whole, mapped + 2 * memory.page);
        free(block);
        return host_cuda_result(cudaErrorMemoryAllocation);
    }
    *block = {memory.first, whole + memory.page, bytes, mapped, device};
#if defined(__x86_64__) && defined(PKEY_DISABLE_ACCESS)
    if (memory.key >= 0 && device >= 0 && pkey_mprotect(block->base, mapped, PROT_READ | PROT_WRITE, memory.key))
        host_cuda_die("pkey_mprotect failed");
#endif
    host_cuda_fill_garbage(block->base, mapped);
    memory.first = block;
    if (device >= 0) memory.used_bytes[device] += bytes;
    *pointer = block->base;
    return host_cuda_result(cudaSuccess);
}

static cudaError_t release(void *pointer, bool on_device)
{
    if (host_cuda_not_captured()) return cudaPeekAtLastError();
    if (!pointer) return host_cuda_result(cudaSuccess);
    host_cuda_scope scope;
    struct allocation **link = find(pointer), *block = *link;
    if (!block || block->base != pointer || (block->device >= 0) != on_device)
        return host_cuda_result(cudaErrorInvalidValue);
    if (on_device) memory.used_bytes[block->device] -= block->bytes;
    *link = block->next;
    munmap(block->base - memory.page, block->mapped_bytes + 2 * memory.page);
    free(block);
    return host_cuda_result(cudaSuccess);
}

cudaError_t cudaMalloc(void **pointer, size_t bytes)
{
    int device, count;
    if (cudaGetDeviceCount(&count) || cudaGetDevice(&device)) return cudaPeekAtLastError();
    return reserve(pointer, bytes, device);
}

cudaError_t cudaFree(void *pointer)
{
    return release(pointer, true);
}

cudaError_t cudaMallocHost(void **pointer, size_t bytes)
{
    return reserve(pointer, bytes, -1);
}

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned int flags)
{
    if (flags & ~7u) return host_cuda_result(cudaErrorInvalidValue);
    return reserve(pointer, bytes, -1);
}

cudaError_t cudaFreeHost(void *pointer)
{
    return release(pointer, false);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    int device, count;
    if (cudaGetDeviceCount(&count) || cudaGetDevice(&device)) return cudaPeekAtLastError();
    host_cuda_scope scope;
    *total_bytes = host_cuda_device_bytes();
    *free_bytes = *total_bytes - memory.used_bytes[device];
    return host_cuda_result(cudaSuccess);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer)
{
    host_cuda_scope scope;
    const struct allocation *block = *find(pointer);
    *attributes = {cudaMemoryTypeUnregistered, -2, NULL, (void *)pointer};
    if (block && block->device >= 0) *attributes = {cudaMemoryTypeDevice, block->device, (void *)pointer, NULL};
    if (block && block->device < 0) *attributes = {cudaMemoryTypeHost, 0, (void *)pointer, (void *)pointer};
    return host_cuda_result(cudaSuccess);
}

/* Are the sides where `kind` says, and the ranges within their allocations? The scope is held. */
static cudaError_t check_copy(const void *to, size_t to_bytes, const void *from, size_t from_bytes,
                              enum cudaMemcpyKind kind)
{
    bool outside = false;
    const bool to_device = host_cuda_is_device(to, to_bytes, &outside),
               from_device = host_cuda_is_device(from, from_bytes, &outside);
    if (outside) return cudaErrorInvalidValue;
    switch (kind) {
    case cudaMemcpyHostToHost:
        return to_device || from_device ? cudaErrorInvalidValue : cudaSuccess;
    case cudaMemcpyHostToDevice:
        return !to_device || from_device ? cudaErrorInvalidValue : cudaSuccess;
    case cudaMemcpyDeviceToHost:
        return to_device || !from_device ? cudaErrorInvalidValue : cudaSuccess;
    case cudaMemcpyDeviceToDevice:
        return !to_device || !from_device ? cudaErrorInvalidValue : cudaSuccess;
    case cudaMemcpyDefault:
        return cudaSuccess;
    }
    return cudaErrorInvalidMemcpyDirection;
}

/* When a captured copy runs, the memory at the address may have changed. */
static bool is_pageable(const void *pointer)
{
    return !*find(pointer);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    if (!host_cuda_stream_alive(stream)) return host_cuda_result(cudaErrorInvalidResourceHandle);
    if (!width || !height) return host_cuda_result(cudaSuccess);
    if (width > to_pitch || width > from_pitch) return host_cuda_result(cudaErrorInvalidValue);
    host_cuda_scope scope;
    const cudaError_t error =
        check_copy(to, (height - 1) * to_pitch + width, from, (height - 1) * from_pitch + width, kind);
    if (error) return host_cuda_result(error);
    const host_cuda_work work = [=] {
        host_cuda_scope inside;
        for (size_t row = 0; row < height; row++)
            memcpy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
        return cudaSuccess;
    };
    if (!host_cuda_captures(stream)) return host_cuda_result(work());
    if (is_pageable(to) || is_pageable(from)) return cudaStreamQuery(stream);
    return host_cuda_keep(stream, work);
}

cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                         enum cudaMemcpyKind kind)
{
    if (host_cuda_not_captured()) return cudaPeekAtLastError();
    return cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, 0);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    return cudaMemcpy2DAsync(to, bytes, from, bytes, bytes, 1, kind, stream);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    if (host_cuda_not_captured()) return cudaPeekAtLastError();
    return cudaMemcpyAsync(to, from, bytes, kind, 0);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t bytes, cudaStream_t stream)
{
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}

cudaError_t cudaMemsetAsync(void *pointer, int value, size_t bytes, cudaStream_t stream)
{
    if (!host_cuda_stream_alive(stream)) return host_cuda_result(cudaErrorInvalidResourceHandle);
    if (!bytes) return host_cuda_result(cudaSuccess);
    host_cuda_scope scope;
    bool outside = false;
    if (!*find(pointer)) return host_cuda_result(cudaErrorInvalidValue);
    host_cuda_is_device(pointer, bytes, &outside);
    if (outside) return host_cuda_result(cudaErrorInvalidValue);
    const host_cuda_work work = [=] {
        host_cuda_scope inside;
        memset(pointer, value, bytes);
        return cudaSuccess;
    };
    return host_cuda_captures(stream) ? host_cuda_keep(stream, work) : host_cuda_result(work());
}

cudaError_t cudaMemset(void *pointer, int value, size_t bytes)
{
    if (host_cuda_not_captured()) return cudaPeekAtLastError();
    return cudaMemsetAsync(pointer, value, bytes, 0);
}
