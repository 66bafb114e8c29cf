/* Memory blocks with accounting, and queues that hold no work: it runs immediately, so every event is complete. */
#include "blocks.h"

#include <stdlib.h>

int device_one(const char **reason)
{
    (void)reason;
    return 1;
}

enum hapt_status device_open(const char *name, const struct device_memory *memory, int index, size_t cap_bytes,
                             struct hapt_device **device)
{
    if (index != 0)
        return hapt_fail(HAPT_ERR_INTERNAL, NULL, "%s device %d does not exist: each process has one device", name,
                         index);
    struct hapt_device *made = calloc(1, sizeof *made);
    if (!made) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no host memory for a device");
    made->name = name;
    made->memory = memory;
    made->cap_bytes = cap_bytes;
    for (int i = 0; i < DEVICE_QUEUES; i++) made->queue[i].device = made;
    pthread_mutex_init(&made->lock, NULL);
    *device = made;
    return HAPT_OK;
}

void device_close(struct hapt_device *device)
{
    if (!device) return;
    while (device->block) {
        struct device_block *block = device->block;
        device->block = block->next;
        device->memory->release(block->memory, block->bytes);
        free(block);
    }
    pthread_mutex_destroy(&device->lock);
    free(device);
}

/* Counts the bytes before they are reserved: reserving may take long, and other threads may allocate meanwhile. */
static enum hapt_status count_in(struct hapt_device *device, size_t bytes)
{
    pthread_mutex_lock(&device->lock);
    const size_t left = device->cap_bytes - device->used_bytes;
    const bool fits = device->cap_bytes == 0 || bytes <= left;
    if (fits) device->used_bytes += bytes;
    pthread_mutex_unlock(&device->lock);
    if (fits) return HAPT_OK;
    return hapt_fail(HAPT_ERR_MEMORY, "use more devices, a smaller microbatch or devices with more memory",
                     "%zu bytes do not fit the %s device: %zu of its %zu bytes are left", bytes, device->name, left,
                     device->cap_bytes);
}

enum hapt_status device_allocate(struct hapt_device *device, size_t bytes, void **memory)
{
    struct device_block *block = malloc(sizeof *block);
    if (!block) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no host memory for a block's record");
    const enum hapt_status status = count_in(device, bytes);
    if (status != HAPT_OK) {
        free(block);
        return status;
    }
    *block = (struct device_block){.memory = device->memory->reserve(bytes), .bytes = bytes};
    pthread_mutex_lock(&device->lock);
    if (!block->memory) {
        device->used_bytes -= bytes;
        pthread_mutex_unlock(&device->lock);
        free(block);
        return hapt_fail(HAPT_ERR_MEMORY, device->memory->hint, device->memory->error_format, bytes);
    }
    if (device->used_bytes > device->peak_bytes) device->peak_bytes = device->used_bytes;
    block->next = device->block;
    device->block = block;
    *memory = block->memory;
    pthread_mutex_unlock(&device->lock);
    return HAPT_OK;
}

void device_free(struct hapt_device *device, void *memory)
{
    if (!memory) return;
    pthread_mutex_lock(&device->lock);
    struct device_block **at = &device->block;
    while (*at && (*at)->memory != memory) at = &(*at)->next;
    struct device_block *block = *at;
    HAPT_ASSERT(block != NULL);
    *at = block->next;
    device->used_bytes -= block->bytes;
    pthread_mutex_unlock(&device->lock);
    device->memory->release(block->memory, block->bytes);
    free(block);
}

size_t device_memory_used(const struct hapt_device *device)
{
    return device->used_bytes;
}

size_t device_memory_peak(const struct hapt_device *device)
{
    return device->peak_bytes;
}

struct hapt_queue *device_queue(struct hapt_device *device, int index)
{
    return &device->queue[(unsigned)index % DEVICE_QUEUES];
}

struct hapt_event *device_record(struct hapt_queue *queue)
{
    static struct hapt_event complete;
    (void)queue;
    return &complete;
}

bool device_done(struct hapt_event *event)
{
    (void)event;
    return true;
}

enum hapt_status device_wait(struct hapt_event *event)
{
    (void)event;
    return HAPT_OK;
}
