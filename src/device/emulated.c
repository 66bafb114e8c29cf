/*
 * The emulated back end: a device that is counted but not there. Memory is address space without pages behind it, so that a laptop holds
 * the account of 64 GPUs; every operator has a kernel that does nothing. How long its work lasts is its owner's to model (src/train).
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "hapt/device.h"

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
    char *memory;
    size_t bytes;
};

struct hapt_device {
    size_t cap_bytes, used_bytes, peak_bytes;
    struct block *block;
    struct hapt_queue queue[QUEUES];
    pthread_mutex_t lock; /* of the memory account */
};

static int emulated_device_count(const char **reason)
{
    (void)reason;
    return 1;
}

static enum hapt_status emulated_open(int index, int threads, size_t memory_bytes, struct hapt_device **device)
{
    (void)threads;
    if (index != 0) return hapt_fail(HAPT_ERR_INTERNAL, NULL, "emulated device %d: each process has one", index);
    struct hapt_device *made = calloc(1, sizeof *made);
    if (!made) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for an emulated device");
    made->cap_bytes = memory_bytes;
    for (int i = 0; i < QUEUES; i++) made->queue[i].device = made;
    pthread_mutex_init(&made->lock, NULL);
    *device = made;
    return HAPT_OK;
}

/* Blocks of no bytes have an address, too. */
static size_t reserved_bytes(size_t bytes)
{
    return bytes ? bytes : 1;
}

static void emulated_close(struct hapt_device *device)
{
    if (!device) return;
    while (device->block) {
        struct block *block = device->block;
        device->block = block->next;
        munmap(block->memory, reserved_bytes(block->bytes));
        free(block);
    }
    pthread_mutex_destroy(&device->lock);
    free(device);
}

/* Whoever touches it is killed: nothing may compute with memory that is not there. */
static char *reserve(size_t bytes)
{
    void *memory = mmap(NULL, reserved_bytes(bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static enum hapt_status emulated_allocate(struct hapt_device *device, size_t bytes, void **memory)
{
    struct block *block = malloc(sizeof *block);
    if (!block) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for a block's account");
    enum hapt_status status = HAPT_OK;
    pthread_mutex_lock(&device->lock);
    const size_t left = device->cap_bytes - device->used_bytes;
    *block = (struct block){.next = device->block, .bytes = bytes};
    if (device->cap_bytes && bytes > left)
        status = hapt_fail(HAPT_ERR_MEMORY, "use more devices, a smaller microbatch or devices with more memory",
                           "%zu bytes do not fit the emulated device: %zu of its %zu bytes are left", bytes, left, device->cap_bytes);
    else if (!(block->memory = reserve(bytes)))
        status = hapt_fail(HAPT_ERR_MEMORY, "raise the limit of address space (ulimit -v)", "this process has no %zu bytes of addresses left",
                           bytes);
    if (status == HAPT_OK) {
        device->used_bytes += bytes;
        if (device->used_bytes > device->peak_bytes) device->peak_bytes = device->used_bytes;
        device->block = block;
        *memory = block->memory;
    }
    pthread_mutex_unlock(&device->lock);
    if (status != HAPT_OK) free(block);
    return status;
}

static void emulated_free(struct hapt_device *device, void *memory)
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
    munmap(block->memory, reserved_bytes(block->bytes));
    free(block);
}

static size_t emulated_memory_used(const struct hapt_device *device)
{
    return device->used_bytes;
}

static size_t emulated_memory_peak(const struct hapt_device *device)
{
    return device->peak_bytes;
}

static enum hapt_status compute_nothing(const struct hapt_call *call, struct hapt_queue *queue)
{
    (void)call;
    (void)queue;
    return HAPT_OK;
}

static const struct hapt_kernel *emulated_find_kernel(const struct hapt_device *device, const char *op, enum hapt_dtype dtype)
{
    static const struct hapt_kernel any = {.op = "any", .run = compute_nothing};
    (void)device;
    (void)op;
    (void)dtype;
    return &any;
}

static struct hapt_queue *emulated_queue(struct hapt_device *device, int index)
{
    return &device->queue[(unsigned)index % QUEUES];
}

static struct hapt_event *emulated_record(struct hapt_queue *queue)
{
    static struct hapt_event complete;
    (void)queue;
    return &complete;
}

static bool emulated_done(struct hapt_event *event)
{
    (void)event;
    return true;
}

static enum hapt_status emulated_wait(struct hapt_event *event)
{
    (void)event;
    return HAPT_OK;
}

static bool is_here(struct hapt_device *device, const void *address)
{
    bool found = false;
    pthread_mutex_lock(&device->lock);
    for (const struct block *block = device->block; block && !found; block = block->next)
        found = (const char *)address >= block->memory && (const char *)address < block->memory + reserved_bytes(block->bytes);
    pthread_mutex_unlock(&device->lock);
    return found;
}

/* What is written is forgotten; what is read is zero, as memory is when it is handed out. */
static enum hapt_status emulated_copy(struct hapt_queue *queue, void *to, const void *from, size_t bytes)
{
    if (is_here(queue->device, to)) return HAPT_OK;
    if (is_here(queue->device, from))
        memset(to, 0, bytes);
    else
        memmove(to, from, bytes);
    return HAPT_OK;
}

extern const struct hapt_backend hapt_emulated_backend;
const struct hapt_backend hapt_emulated_backend = {
    .name = "emulated",
    .description = "a modelled device: memory counted, time kept, nothing computed (--device emulated)",
    .device_count = emulated_device_count,
    .open = emulated_open,
    .close = emulated_close,
    .allocate = emulated_allocate,
    .free = emulated_free,
    .memory_used = emulated_memory_used,
    .memory_peak = emulated_memory_peak,
    .find_kernel = emulated_find_kernel,
    .queue = emulated_queue,
    .record = emulated_record,
    .done = emulated_done,
    .wait = emulated_wait,
    .copy = emulated_copy,
};
