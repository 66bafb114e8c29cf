/*
 * The cpu back end: this process's threads and memory. Work runs immediately, in the calling thread's OpenMP team.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "../blocks.h"
#include "gemm.h"
#include "kernels.h"

#define ALIGNMENT 64
#define HUGE_PAGE ((size_t)2 << 20)

/* Large blocks use huge pages if the kernel grants them: otherwise page faults cost a third of the CPU time. */
static void *reserve(size_t bytes)
{
    const bool huge = bytes >= HUGE_PAGE;
    const size_t unit = huge ? HUGE_PAGE : ALIGNMENT, rounded = (bytes + unit - 1) / unit * unit;
    void *memory = aligned_alloc(unit, rounded ? rounded : unit);
    if (!memory) return NULL;
#ifdef MADV_HUGEPAGE
    if (huge) madvise(memory, rounded, MADV_HUGEPAGE);
#endif
    memset(memory, 0, rounded);
    return memory;
}

static void release(void *memory, size_t bytes)
{
    (void)bytes;
    free(memory);
}

static enum hapt_status cpu_open(int index, int threads, size_t memory_bytes, struct hapt_device **device)
{
    static const struct device_memory host = {.reserve = reserve,
                                              .release = release,
                                              .error_format = "this host has less than %zu bytes of memory left",
                                              .hint = "use more devices or a smaller microbatch"};
    (void)threads; /* every call gives its number of threads */
    return device_open("cpu", &host, index, memory_bytes, device);
}

static const struct hapt_kernel *cpu_find_kernel(const struct hapt_device *device, const char *op,
                                                 enum hapt_dtype dtype)
{
    (void)device;
    return hapt_cpu_kernel_find(op, dtype);
}

static enum hapt_status cpu_copy(struct hapt_queue *queue, void *to, const void *from, size_t bytes)
{
    (void)queue;
    memcpy(to, from, bytes);
    return HAPT_OK;
}

extern const struct hapt_backend hapt_cpu_backend;
const struct hapt_backend hapt_cpu_backend = {
    .name = "cpu",
    .description = "this host's cores: oneDNN matrix products, fused vector kernels",
    .libraries = hapt_gemm_library,
    .device_count = device_one,
    .open = cpu_open,
    .close = device_close,
    .allocate = device_allocate,
    .free = device_free,
    .memory_used = device_memory_used,
    .memory_peak = device_memory_peak,
    .find_kernel = cpu_find_kernel,
    .queue = device_queue,
    .record = device_record,
    .done = device_done,
    .wait = device_wait,
    .copy = cpu_copy,
};
