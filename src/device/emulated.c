/*
 * The emulated back end: a device whose memory is counted but not used. Memory is address space without pages, so that
 * a laptop can account for 64 GPUs. Every operator has a kernel that does nothing; the owner models how long it takes
 * (src/train).
 */
#include <string.h>
#include <sys/mman.h>

#include "blocks.h"

/* A block of 0 bytes also has an address. */
static size_t reserved_bytes(size_t bytes)
{
    return bytes ? bytes : 1;
}

/* PROT_NONE: access kills the process, since nothing may compute with memory that does not exist. */
static void *reserve(size_t bytes)
{
    void *memory = mmap(NULL, reserved_bytes(bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static void release(void *memory, size_t bytes)
{
    munmap(memory, reserved_bytes(bytes));
}

static enum hapt_status emulated_open(int index, int threads, size_t memory_bytes, struct hapt_device **device)
{
    static const struct device_memory addresses = {.reserve = reserve,
                                                   .release = release,
                                                   .error_format =
                                                       "this process has less than %zu bytes of address space left",
                                                   .hint = "raise the limit of address space (ulimit -v)"};
    (void)threads;
    return device_open("emulated", &addresses, index, memory_bytes, device);
}

static enum hapt_status compute_nothing(const struct hapt_call *call, struct hapt_queue *queue)
{
    (void)call;
    (void)queue;
    return HAPT_OK;
}

static const struct hapt_kernel *emulated_find_kernel(const struct hapt_device *device, const char *op,
                                                      enum hapt_dtype dtype)
{
    static const struct hapt_kernel any = {.op = "any", .run = compute_nothing};
    (void)device;
    (void)op;
    (void)dtype;
    return &any;
}

static bool owns_address(struct hapt_device *device, const void *address)
{
    bool found = false;
    pthread_mutex_lock(&device->lock);
    for (const struct device_block *block = device->block; block && !found; block = block->next)
        found = (const char *)address >= block->memory &&
                (const char *)address < block->memory + reserved_bytes(block->bytes);
    pthread_mutex_unlock(&device->lock);
    return found;
}

/* Writes are dropped; reads give zeros, like newly allocated memory. */
static enum hapt_status emulated_copy(struct hapt_queue *queue, void *to, const void *from, size_t bytes)
{
    if (owns_address(queue->device, to)) return HAPT_OK;
    if (owns_address(queue->device, from))
        memset(to, 0, bytes);
    else
        memmove(to, from, bytes);
    return HAPT_OK;
}

extern const struct hapt_backend hapt_emulated_backend;
const struct hapt_backend hapt_emulated_backend = {
    .name = "emulated",
    .description = "modelled devices: count memory, model times, compute nothing (--device emulated)",
    .device_count = device_one,
    .open = emulated_open,
    .close = device_close,
    .allocate = device_allocate,
    .free = device_free,
    .memory_used = device_memory_used,
    .memory_peak = device_memory_peak,
    .find_kernel = emulated_find_kernel,
    .queue = device_queue,
    .record = device_record,
    .done = device_done,
    .wait = device_wait,
    .copy = emulated_copy,
};
