/* Shared by back ends whose devices belong to this process: memory blocks with accounting, queues without work. */
#ifndef HAPT_DEVICE_BLOCKS_H
#define HAPT_DEVICE_BLOCKS_H

#include <pthread.h>

#include "hapt/device.h"

#define DEVICE_QUEUES 8

struct hapt_queue {
    struct hapt_device *device;
};

struct hapt_event {
    char unused;
};

/* An allocated block; in a list, since a device holds few blocks. */
struct device_block {
    struct device_block *next;
    char *memory;
    size_t bytes;
};

/* A source of memory, and its error: a format with the bytes as its only argument, and a hint. */
struct device_memory {
    void *(*reserve)(size_t bytes); /* aligned, zeroed; NULL: none left */
    void (*release)(void *memory, size_t bytes);
    const char *error_format, *hint;
};

struct hapt_device {
    const char *name; /* of the back end */
    const struct device_memory *memory;
    size_t cap_bytes, used_bytes, peak_bytes;
    struct device_block *block;
    struct hapt_queue queue[DEVICE_QUEUES];
    pthread_mutex_t lock; /* of blocks and byte counts */
};

/* Slots of struct hapt_backend, or functions for them. */
enum hapt_status device_open(const char *name, const struct device_memory *memory, int index, size_t cap_bytes,
                             struct hapt_device **device);
void device_close(struct hapt_device *device);
int device_one(const char **reason);
enum hapt_status device_allocate(struct hapt_device *device, size_t bytes, void **memory);
void device_free(struct hapt_device *device, void *memory);
size_t device_memory_used(const struct hapt_device *device);
size_t device_memory_peak(const struct hapt_device *device);
struct hapt_queue *device_queue(struct hapt_device *device, int index);
struct hapt_event *device_record(struct hapt_queue *queue);
bool device_done(struct hapt_event *event);
enum hapt_status device_wait(struct hapt_event *event);

#endif
