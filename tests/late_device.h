/*
 * A device for tests of data movement. The host cannot touch its memory, and its queues run at arbitrary times.
 *
 * The memory is mapped twice. The mapping at the device's addresses is inaccessible. Queues and the test (late_host)
 * use the other mapping. Each queue has a thread that starts a piece of work some time after the request, so two queues
 * run in any order. A communicator has two ranks. A message blocks its queue until the matching message is first in the
 * peer's queue.
 */
#ifndef HAPT_TEST_LATE_DEVICE_H
#define HAPT_TEST_LATE_DEVICE_H

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "hapt/device.h"
#include "hapt/link.h"
#include "test.h"

enum { LATE_QUEUES = 8, LATE_WORK = 4096, LATE_EVENTS = 64 };

struct hapt_event {
    atomic_llong goal; /* the event is complete when its queue has done this much work */
    struct hapt_queue *queue;
};

struct hapt_queue {
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t work;
    bool started, ends;
    struct late_work {
        enum { LATE_COPY, LATE_SEND, LATE_RECEIVE, LATE_PACK, LATE_UNPACK } kind;
        void *to;
        const void *from;
        size_t bytes;
        int peer, tag;
        const struct hapt_strided_list *runs;
    } work_at[LATE_WORK];
    long long asked; /* protected by the mutex */
    atomic_llong done;
    struct hapt_event event[LATE_EVENTS];
    int next_event;
};

struct hapt_device_comm {
    int peer, tag; /* peer: rank in the world; tag: own of this communicator */
    int left;      /* polls until it is ready */
};

static struct {
    char *closed, *open; /* the two mappings of the memory */
    size_t bytes, taken;
    MPI_Comm comm; /* communicator of the devices */
    struct hapt_queue queue[LATE_QUEUES];
    int pinned, pins;    /* blocks of page-locked memory: now; total */
    atomic_ullong moved; /* bytes of all copies */
    bool fails;          /* from now on copies and sends fail */
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
    MPI_Comm_dup(MPI_COMM_WORLD, &late.comm);
}

static enum hapt_status late_allocate(struct hapt_device *device, size_t bytes, void **memory)
{
    (void)device;
    *memory = late.closed + late.taken;
    late.taken += (bytes + 63) / 64 * 64;
    HAPT_ASSERT(late.taken <= late.bytes);
    return HAPT_OK;
}

/* All memory is released at once: the test sets late.taken. */
static void late_free(struct hapt_device *device, void *memory)
{
    (void)device;
    (void)memory;
}

/* The address at which the host can read device memory. Addresses of the host stay as they are. */
static void *late_host(const void *address)
{
    const char *at = address;
    return at >= late.closed && at < late.closed + late.bytes ? late.open + (at - late.closed) : (void *)at;
}

static void late_meet(MPI_Request request)
{
    int done = 0;
    while (!done) {
        MPI_Test(&request, &done, MPI_STATUS_IGNORE);
        if (!done) usleep(50);
    }
}

static void late_do(const struct late_work *work)
{
    MPI_Request request;
    switch (work->kind) {
    case LATE_COPY: memcpy(late_host(work->to), late_host(work->from), work->bytes); break;
    case LATE_SEND:
        MPI_Issend(late_host(work->from), (int)work->bytes, MPI_BYTE, work->peer, work->tag, late.comm, &request);
        late_meet(request);
        break;
    case LATE_RECEIVE:
        MPI_Irecv(late_host(work->to), (int)work->bytes, MPI_BYTE, work->peer, work->tag, late.comm, &request);
        late_meet(request);
        break;
    case LATE_PACK: hapt_strided_pack(work->runs, late_host(work->from), 0, work->bytes, late_host(work->to)); break;
    case LATE_UNPACK:
        hapt_strided_unpack(work->runs, late_host(work->to), 0, work->bytes, late_host(work->from));
        break;
    }
}

static void *late_run(void *argument)
{
    struct hapt_queue *queue = argument;
    uint64_t random = (uint64_t)(queue - late.queue) + 1;
    for (;;) {
        pthread_mutex_lock(&queue->mutex);
        while (queue->asked == atomic_load(&queue->done) && !queue->ends)
            pthread_cond_wait(&queue->work, &queue->mutex);
        const bool idle = queue->asked == atomic_load(&queue->done);
        const struct late_work work = queue->work_at[atomic_load(&queue->done) % LATE_WORK];
        pthread_mutex_unlock(&queue->mutex);
        if (idle) return NULL;
        if (hapt_random_unit(&random) < 0.3) usleep((unsigned)(300 * hapt_random_unit(&random)));
        late_do(&work);
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
    HAPT_ASSERT(pthread_create(&queue->thread, NULL, late_run, queue) == 0);
    queue->started = true;
    return queue;
}

static void late_ask(struct hapt_queue *queue, struct late_work work)
{
    pthread_mutex_lock(&queue->mutex);
    HAPT_ASSERT(queue->asked - atomic_load(&queue->done) < LATE_WORK);
    queue->work_at[queue->asked++ % LATE_WORK] = work;
    atomic_fetch_add(&late.moved, work.bytes);
    pthread_cond_signal(&queue->work);
    pthread_mutex_unlock(&queue->mutex);
}

static enum hapt_status late_copy(struct hapt_queue *queue, void *to, const void *from, size_t bytes)
{
    if (late.fails) return hapt_fail(HAPT_ERR_INTERNAL, "it is late", "the device is gone");
    late_ask(queue, (struct late_work){.kind = LATE_COPY, .to = to, .from = from, .bytes = bytes});
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

/* The communication thread must never wait here. It polls first. */
static enum hapt_status late_past(struct hapt_event *event)
{
    CHECK(late_done(event));
    return HAPT_OK;
}

static void *late_pin(size_t bytes)
{
    late.pinned++;
    late.pins++;
    return malloc(bytes + 1);
}

static void late_unpin(void *memory)
{
    late.pinned--;
    free(memory);
}

/* ---- communicators ---- */

static const char *late_poll(struct hapt_device_comm *group, bool *settled)
{
    *settled = group->left == 0 || --group->left == 0;
    return NULL;
}

static void late_abort(struct hapt_device_comm *group)
{
    group->left = 0;
}

static const char *late_send(struct hapt_device_comm *group, struct hapt_queue *queue, int count,
                             const struct hapt_block *block, int to)
{
    CHECK(to == 1 && group->left == 0);
    if (late.fails) return "the wire is cut";
    group->left = 3;
    for (int b = 0; b < count; b++)
        late_ask(queue, (struct late_work){.kind = LATE_SEND,
                                           .from = block[b].data,
                                           .bytes = block[b].bytes,
                                           .peer = group->peer,
                                           .tag = group->tag});
    return NULL;
}

static const char *late_receive(struct hapt_device_comm *group, struct hapt_queue *queue, int count,
                                const struct hapt_block *block, int from)
{
    CHECK(from == 0 && group->left == 0);
    group->left = 3;
    for (int b = 0; b < count; b++)
        late_ask(queue, (struct late_work){.kind = LATE_RECEIVE,
                                           .to = block[b].data,
                                           .bytes = block[b].bytes,
                                           .peer = group->peer,
                                           .tag = group->tag});
    return NULL;
}

static const char *late_pack(struct hapt_queue *queue, const struct hapt_strided_list *list, const void *base,
                             void *dense)
{
    late_ask(queue, (struct late_work){
                        .kind = LATE_PACK, .to = dense, .from = base, .bytes = hapt_strided_bytes(list), .runs = list});
    return NULL;
}

static const char *late_unpack(struct hapt_queue *queue, const struct hapt_strided_list *list, void *base,
                               const void *dense)
{
    late_ask(queue,
             (struct late_work){
                 .kind = LATE_UNPACK, .to = base, .from = dense, .bytes = hapt_strided_bytes(list), .runs = list});
    return NULL;
}

static const struct hapt_device_comm_ops *late_device_comms(const char **reason)
{
    static const struct hapt_device_comm_ops groups = {.poll = late_poll,
                                                       .abort = late_abort,
                                                       .pack = late_pack,
                                                       .unpack = late_unpack,
                                                       .send = late_send,
                                                       .receive = late_receive};
    *reason = "";
    return &groups;
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
    MPI_Comm_free(&late.comm);
    CHECK_MESSAGE(late.pinned == 0, "%d blocks stay page-locked", late.pinned);
    memset(&late, 0, sizeof late);
}

static __attribute__((unused)) const struct hapt_backend late_backend = {.name = "late",
                                                                         .queue = late_queue,
                                                                         .record = late_record,
                                                                         .done = late_done,
                                                                         .wait = late_past,
                                                                         .copy = late_copy,
                                                                         .pin = late_pin,
                                                                         .unpin = late_unpin,
                                                                         .allocate = late_allocate,
                                                                         .free = late_free,
                                                                         .device_comms = late_device_comms};

#endif
