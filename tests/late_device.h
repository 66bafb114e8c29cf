/*
 * A device for tests of what moves its data: the host cannot touch its memory, not by mistake either, and its queues work when they like.
 *
 * Memory is mapped twice: closed where the device's addresses are, open where the queues, and the test (late_host), read and write it. Each
 * queue has a thread that begins a copy some time after it was asked for, so what two queues do comes in any order.
 */
#ifndef HAPT_TEST_LATE_DEVICE_H
#define HAPT_TEST_LATE_DEVICE_H

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "hapt/device.h"
#include "test.h"

enum { LATE_QUEUES = 8, LATE_WORK = 4096, LATE_EVENTS = 64 };

struct hapt_event {
    atomic_llong goal; /* how much of its queue's work is done when it has come */
    struct hapt_queue *queue;
};

struct hapt_queue {
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t work;
    bool started, ends;
    struct late_copy {
        void *to;
        const void *from;
        size_t bytes;
    } copy[LATE_WORK];
    long long asked; /* under the mutex */
    atomic_llong done;
    struct hapt_event event[LATE_EVENTS];
    int next_event;
};

static struct {
    char *closed, *open; /* the two places of the memory */
    size_t bytes;
    struct hapt_queue queue[LATE_QUEUES];
    int pinned; /* blocks of page-locked memory */
    size_t moved; /* bytes asked for */
    bool fails; /* copies do, from now on */
} late;

static __attribute__((unused)) void late_open(size_t bytes)
{
    const int file = memfd_create("late", 0);
    HAPT_ASSERT(file >= 0 && ftruncate(file, (off_t)bytes) == 0);
    late.bytes = bytes;
    late.closed = mmap(NULL, bytes, PROT_NONE, MAP_SHARED, file, 0);
    late.open = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    HAPT_ASSERT(late.closed != MAP_FAILED && late.open != MAP_FAILED);
    close(file);
}

/* Where the host reads what is at an address of the device; other addresses are the host's. */
static void *late_host(const void *address)
{
    const char *at = address;
    return at >= late.closed && at < late.closed + late.bytes ? late.open + (at - late.closed) : (void *)at;
}

static void *late_work(void *argument)
{
    struct hapt_queue *queue = argument;
    uint64_t random = (uint64_t)(queue - late.queue) + 1;
    for (;;) {
        pthread_mutex_lock(&queue->mutex);
        while (queue->asked == atomic_load(&queue->done) && !queue->ends) pthread_cond_wait(&queue->work, &queue->mutex);
        const bool idle = queue->asked == atomic_load(&queue->done);
        const struct late_copy copy = queue->copy[atomic_load(&queue->done) % LATE_WORK];
        pthread_mutex_unlock(&queue->mutex);
        if (idle) return NULL;
        if (hapt_random_unit(&random) < 0.3) usleep((unsigned)(300 * hapt_random_unit(&random)));
        memcpy(late_host(copy.to), late_host(copy.from), copy.bytes);
        atomic_fetch_add(&queue->done, 1);
    }
}

static struct hapt_queue *late_queue(struct hapt_device *device, int index)
{
    (void)device;
    struct hapt_queue *queue = &late.queue[index];
    HAPT_ASSERT(index >= 0 && index < LATE_QUEUES);
    if (queue->started) return queue;
    pthread_mutex_init(&queue->mutex, NULL);
    pthread_cond_init(&queue->work, NULL);
    HAPT_ASSERT(pthread_create(&queue->thread, NULL, late_work, queue) == 0);
    queue->started = true;
    return queue;
}

static enum hapt_status late_copy(struct hapt_queue *queue, void *to, const void *from, size_t bytes)
{
    if (late.fails) return hapt_fail(HAPT_ERR_INTERNAL, "it is late", "the device is gone");
    pthread_mutex_lock(&queue->mutex);
    HAPT_ASSERT(queue->asked - atomic_load(&queue->done) < LATE_WORK);
    queue->copy[queue->asked++ % LATE_WORK] = (struct late_copy){to, from, bytes};
    late.moved += bytes;
    pthread_cond_signal(&queue->work);
    pthread_mutex_unlock(&queue->mutex);
    return HAPT_OK;
}

static struct hapt_event *late_record(struct hapt_queue *queue)
{
    struct hapt_event *event = &queue->event[queue->next_event++ % LATE_EVENTS];
    pthread_mutex_lock(&queue->mutex);
    event->queue = queue;
    atomic_store(&event->goal, queue->asked);
    pthread_mutex_unlock(&queue->mutex);
    return event;
}

static bool late_done(struct hapt_event *event)
{
    return atomic_load(&event->queue->done) >= atomic_load(&event->goal);
}

static enum hapt_status late_wait(struct hapt_event *event)
{
    while (!late_done(event)) usleep(20);
    return HAPT_OK;
}

static void *late_pin(size_t bytes)
{
    late.pinned++;
    return malloc(bytes + 1);
}

static void late_unpin(void *memory)
{
    late.pinned--;
    free(memory);
}

static __attribute__((unused)) void late_close(void)
{
    for (int q = 0; q < LATE_QUEUES; q++) {
        struct hapt_queue *queue = &late.queue[q];
        if (!queue->started) continue;
        pthread_mutex_lock(&queue->mutex);
        queue->ends = true;
        pthread_cond_signal(&queue->work);
        pthread_mutex_unlock(&queue->mutex);
        pthread_join(queue->thread, NULL);
    }
    munmap(late.closed, late.bytes);
    munmap(late.open, late.bytes);
    CHECK_MESSAGE(late.pinned == 0, "%d blocks stay page-locked", late.pinned);
    memset(&late, 0, sizeof late);
}

static __attribute__((unused)) const struct hapt_backend late_backend = {.name = "late", .queue = late_queue, .record = late_record, .done = late_done,
                                                                         .wait = late_wait, .copy = late_copy, .pin = late_pin, .unpin = late_unpin};

#endif
