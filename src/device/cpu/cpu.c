/*
 * The cpu back end: this process's threads and memory. Work runs at once in the calling thread's OpenMP team, so queues
 * hold nothing and events are born complete.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "gemm.h"
#include "hapt/device.h"
#include "kernels.h"

#define ALIGNMENT 64
#define HUGE_PAGE ((size_t)2 << 20)
#define QUEUES 8

struct hapt_queue {
    struct hapt_device *device;
};

struct hapt_event {
    char unused;
};

/* What is handed out: a list, since a device holds few blocks. */
struct block {
    struct block *next;
    void *memory;
    size_t bytes;
};

struct hapt_device {
    int threads;
    size_t cap_bytes, used_bytes, peak_bytes;
    struct block *block;
    struct hapt_queue queue[QUEUES];
    pthread_mutex_t lock; /* of the memory account */
};

static int cpu_device_count(const char **reason)
{
    (void)reason;
    return 1;
}

static enum hapt_status cpu_open(int index, int threads, size_t memory_bytes, struct hapt_device **device)
{
    if (index != 0) return hapt_fail(HAPT_ERR_INTERNAL, NULL, "cpu device %d: there is only device 0", index);
    struct hapt_device *made = calloc(1, sizeof *made);
    if (!made) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for a cpu device");
    made->threads = threads > 0 ? threads : 1;
    made->cap_bytes = memory_bytes;
    for (int i = 0; i < QUEUES; i++) made->queue[i].device = made;
    pthread_mutex_init(&made->lock, NULL);
    *device = made;
    return HAPT_OK;
}

static void cpu_close(struct hapt_device *device)
{
    if (!device) return;
    while (device->block) {
        struct block *block = device->block;
        device->block = block->next;
        free(block->memory);
        free(block);
    }
    pthread_mutex_destroy(&device->lock);
    free(device);
}

/* Large blocks stand on huge pages where the kernel grants them: page faults cost a third of the CPU time otherwise. */
static void *memory_reserve(size_t bytes)
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

static enum hapt_status cpu_allocate(struct hapt_device *device, size_t bytes, void **memory)
{
    struct block *block = malloc(sizeof *block);
    if (!block) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for a block's account");
    pthread_mutex_lock(&device->lock);
    const size_t left = device->cap_bytes - device->used_bytes;
    if (device->cap_bytes && bytes > left) {
        pthread_mutex_unlock(&device->lock);
        free(block);
        return hapt_fail(HAPT_ERR_MEMORY, "use more devices, a smaller microbatch or a larger memory cap",
                         "%zu bytes do not fit the cpu device: %zu of its %zu bytes are left", bytes, left,
                         device->cap_bytes);
    }
    device->used_bytes += bytes;
    pthread_mutex_unlock(&device->lock);
    *block = (struct block){.memory = memory_reserve(bytes), .bytes = bytes};
    pthread_mutex_lock(&device->lock);
    if (!block->memory) {
        device->used_bytes -= bytes;
        pthread_mutex_unlock(&device->lock);
        free(block);
        return hapt_fail(HAPT_ERR_MEMORY, "use more devices or a smaller microbatch",
                         "this host has no %zu bytes of memory left", bytes);
    }
    if (device->used_bytes > device->peak_bytes) device->peak_bytes = device->used_bytes;
    block->next = device->block;
    device->block = block;
    *memory = block->memory;
    pthread_mutex_unlock(&device->lock);
    return HAPT_OK;
}

static void cpu_free(struct hapt_device *device, void *memory)
{
    if (!memory) return;
    pthread_mutex_lock(&device->lock);
    struct block **at = &device->block;
    while (*at && (*at)->memory != memory) at = &(*at)->next;
    struct block *block = *at;
    HAPT_ASSERT(block != NULL);
    *at = block->next;
    device->used_bytes -= block->bytes;
    pthread_mutex_unlock(&device->lock);
    free(block->memory);
    free(block);
}

static size_t cpu_memory_used(const struct hapt_device *device)
{
    return device->used_bytes;
}

static size_t cpu_memory_peak(const struct hapt_device *device)
{
    return device->peak_bytes;
}

static const struct hapt_kernel *cpu_find_kernel(const struct hapt_device *device, const char *op,
                                                 enum hapt_dtype dtype)
{
    (void)device;
    return hapt_cpu_kernel_find(op, dtype);
}

static struct hapt_queue *cpu_queue(struct hapt_device *device, int index)
{
    return &device->queue[(unsigned)index % QUEUES];
}

static struct hapt_event *cpu_record(struct hapt_queue *queue)
{
    static struct hapt_event complete;
    (void)queue;
    return &complete;
}

static bool cpu_done(struct hapt_event *event)
{
    (void)event;
    return true;
}

static enum hapt_status cpu_wait(struct hapt_event *event)
{
    (void)event;
    return HAPT_OK;
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
    .device_count = cpu_device_count,
    .open = cpu_open,
    .close = cpu_close,
    .allocate = cpu_allocate,
    .free = cpu_free,
    .memory_used = cpu_memory_used,
    .memory_peak = cpu_memory_peak,
    .find_kernel = cpu_find_kernel,
    .queue = cpu_queue,
    .record = cpu_record,
    .done = cpu_done,
    .wait = cpu_wait,
    .copy = cpu_copy,
};
