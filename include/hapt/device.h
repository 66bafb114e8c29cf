/*
 * Devices: a back end is one table of functions; a kernel is found by its operator's name.
 *
 * Rank-local, no MPI. The engine binds every kernel once to planned memory, so a call carries final pointers.
 * `cpu` and `emulated` are always there; `cuda` is a plug-in, loaded when it is asked for. To add a back end: one
 * table, one line in src/device/device.c.
 */
#ifndef HAPT_DEVICE_H
#define HAPT_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "hapt/dtype.h"
#include "hapt/status.h"
#include "hapt/strided.h"

#define HAPT_MAX_DIMS 5
#define HAPT_MAX_INPUTS 10
#define HAPT_MAX_OUTPUTS 4
#define HAPT_MAX_ATTRIBUTES 6

/* A dense row-major tensor in device memory, aligned to 64 bytes. */
struct hapt_view {
    void *data;
    enum hapt_dtype dtype;
    int dims;
    int64_t shape[HAPT_MAX_DIMS];
};

static inline int64_t hapt_view_elements(const struct hapt_view *view)
{
    int64_t count = 1;
    for (int i = 0; i < view->dims; i++) count *= view->shape[i];
    return count;
}

/* Sums, or takes the largest, of data[i] over the shards of an operator that exchanges while it runs; fp32, on the
 * host. */
typedef enum hapt_status hapt_exchange(void *context, float *data, size_t elements, bool largest);

/* One bound kernel call. An absent optional input has data NULL. */
struct hapt_call {
    int input_count, output_count;
    struct hapt_view input[HAPT_MAX_INPUTS];
    struct hapt_view output[HAPT_MAX_OUTPUTS];
    int64_t integer[HAPT_MAX_ATTRIBUTES]; /* meaning: the operator's row in the operator table */
    double real[HAPT_MAX_ATTRIBUTES];
    unsigned accumulate; /* bit o: output o is added to instead of overwritten */
    void *workspace;     /* as many bytes as the kernel asked for, 64-byte aligned; garbage on entry */
    size_t workspace_bytes;
    int threads;
    /* On a shard of an index that integer operands name (tables, logits): the first value that this shard serves; the
     * local extent is how many. Others are another shard's: they add nothing. `value_count`: how many there are on all
     * shards together; 0: as many as here. */
    int64_t first_value, value_count;
    hapt_exchange *exchange; /* operators that exchange among shards while they run; NULL: there is one shard */
    void *exchange_context;
};

/* What a driver says of one of its devices. */
struct hapt_device_facts {
    char name[64];
    char bus[16]; /* PCI address, "0000:3b:00.0", lower case; "" unknown */
    size_t memory_bytes;
    int processors;   /* streaming multiprocessors */
    int major, minor; /* compute capability */
    double clock_hz;  /* 0: unknown */
};

/* What a matrix product of so many results (elements, of all batches) wants as workspace on a GPU: room for the
 * library, and the fp32 results of each part of a sum that is split; `most`: enough for any on that kind of GPU. Back
 * end and plans on paper count alike. */
#define HAPT_PRODUCT_WORKSPACE_BYTES ((size_t)32 << 20) /* on the newest ones, the largest */
static inline size_t hapt_product_workspace(int64_t results, size_t most)
{
    const int64_t least = 1 << 20, parts = 32 * (int64_t)sizeof(float);
    return results < ((int64_t)most - least) / parts ? (size_t)(least + results * parts) : most;
}

struct hapt_device;
struct hapt_queue;
struct hapt_event;
struct hapt_replay;

/* Queues by what they are for. Each is filled by one thread: the first by the one that computes, the others by the one
 * that communicates. */
enum hapt_queue_use {
    HAPT_QUEUE_COMPUTE,
    HAPT_QUEUE_COPY_OUT,
    HAPT_QUEUE_COPY_IN,
    HAPT_QUEUE_SEND,
    HAPT_QUEUE_RECEIVE
};

struct hapt_kernel {
    const char *op; /* name in the operator table */
    /* Scratch the call needs; input and output views carry shapes, data may be NULL. NULL: none. */
    size_t (*workspace_bytes)(const struct hapt_call *call);
    /* Starts the work on `queue`. */
    enum hapt_status (*run)(const struct hapt_call *call, struct hapt_queue *queue);
};

/*
 * Groups: devices of several processes, one each, that trade what stands in their memory by a library of their own
 * (NCCL), the host left out.
 *
 * A function that gives a text returns NULL, or what went wrong, good until the next call: the caller knows who was
 * about what. A group belongs to the thread that made it. Work is put into a queue that is the same in all calls, but
 * for such as was waited for; all ranks ask for the same in the same order. Nothing else may be queued before the group
 * has settled, nor anything be asked of it after a fault but its end. For given ranks, shapes and devices results are
 * the same bits in every run, and sums the same on all ranks.
 */
struct hapt_group;
#define HAPT_GROUP_ID_BYTES 128

/* Device memory. */
struct hapt_block {
    void *data;
    size_t bytes;
};

struct hapt_groups {
    const char *(*library)(void); /* "NCCL 2.28.9" */
    /* Where this process's device is, "0000:3b:00.0": ranks of a group must not share one. */
    const char *(*place)(char place[16]);
    /* One process makes it for all of a group to be. */
    const char *(*id)(unsigned char id[HAPT_GROUP_ID_BYTES]);
    /* Joins as rank `rank` of `ranks`; it is made when it has settled. */
    const char *(*create)(const unsigned char id[HAPT_GROUP_ID_BYTES], int rank, int ranks, struct hapt_group **group);
    /* Settled: nothing that was asked of it is on its way into the queue. Tells also of faults of what is in the queue.
     */
    const char *(*settled)(struct hapt_group *group, bool *settled);
    /* Ends all that is under way, peers or none; the group is then good for nothing but to be destroyed. */
    void (*abort)(struct hapt_group *group);
    void (*destroy)(struct hapt_group *group); /* NULL is allowed */
    /* to[i] = sum over ranks of from[i], or the largest; may be the same place. */
    const char *(*all_reduce)(struct hapt_group *group, struct hapt_queue *queue, bool largest, enum hapt_dtype dtype,
                              const void *from, void *to, size_t elements);
    /* Rank r gets the sums of elements [bound[r], bound[r + 1]) of `from`; `to` may be their place there. Slices may
     * differ in size. */
    const char *(*reduce_scatter)(struct hapt_group *group, struct hapt_queue *queue, enum hapt_dtype dtype,
                                  const size_t *bound, const void *from, void *to);
    /* Rank r's `mine` goes to bytes [bound[r], bound[r + 1]) of `whole`, where it may stand already. */
    const char *(*all_gather)(struct hapt_group *group, struct hapt_queue *queue, const size_t *bound, const void *mine,
                              void *whole);
    /* Bytes [send[r], send[r + 1]) of `from` go to rank r, and what rank r sends here to bytes [receive[r], receive[r +
     * 1]) of `to`. */
    const char *(*trade)(struct hapt_group *group, struct hapt_queue *queue, const size_t *send, const void *from,
                         const size_t *receive, void *to);
    /* Runs of bytes from `base` to `dense`, one behind the other, or back. Needs no group. */
    const char *(*pack)(struct hapt_queue *queue, const struct hapt_strided_list *list, const void *base, void *dense);
    const char *(*unpack)(struct hapt_queue *queue, const struct hapt_strided_list *list, void *base,
                          const void *dense);
    /* Optional. Parts of a group: of the ranks that give the same color, in order of their keys; a rank knows its rank
     * there, and of how many. Of a negative color is no part, and *part becomes NULL. Made when the group has settled;
     * all ranks of the group ask. */
    const char *(*split)(struct hapt_group *group, int color, int key, int rank, int ranks, struct hapt_group **part);
    /* Optional. Blocks to a rank, and from it: as many there as here, of the same sizes. The queue goes on when they
     * have met. */
    const char *(*send)(struct hapt_group *group, struct hapt_queue *queue, int count, const struct hapt_block *block,
                        int to);
    const char *(*receive)(struct hapt_group *group, struct hapt_queue *queue, int count,
                           const struct hapt_block *block, int from);
};

/* A shared library that a back end opens while it runs. */
struct hapt_library {
    const char *name;    /* "libcublasLt.so.13" */
    const char *path;    /* of the file; NULL: it is missing */
    const char *missing; /* why, and what happens without it */
    const char *remedy;
    bool needed; /* without it the back end has no device */
};

struct hapt_backend {
    const char *name;
    const char *description;
    /* The libraries it computes with, e.g. "oneDNN 2.6.3"; NULL: none. */
    const char *(*libraries)(void);
    /* Optional. The libraries that were opened or are missing; NULL past the end. It opens those that were not needed
     * yet. */
    const struct hapt_library *(*library)(int index);
    /* Number of devices this process can see; 0 with *reason saying what is missing. */
    int (*device_count)(const char **reason);
    /* Optional. */
    enum hapt_status (*describe)(int index, struct hapt_device_facts *facts);
    /* `threads`: CPU threads of the device; memory_bytes: cap, 0 for none. */
    enum hapt_status (*open)(int index, int threads, size_t memory_bytes, struct hapt_device **device);
    void (*close)(struct hapt_device *device);
    /* Memory, zeroed, 64-byte aligned; HAPT_ERR_MEMORY over the cap. `used` and `peak` count what is handed out. */
    enum hapt_status (*allocate)(struct hapt_device *device, size_t bytes, void **memory);
    void (*free)(struct hapt_device *device, void *memory);
    size_t (*memory_used)(const struct hapt_device *device);
    size_t (*memory_peak)(const struct hapt_device *device);
    /* NULL when the back end lacks the operator in that type. */
    const struct hapt_kernel *(*find_kernel)(const struct hapt_device *device, const char *op, enum hapt_dtype dtype);
    /* Queues run their work in order; an event marks a point in a queue. The cpu back end runs at once. */
    struct hapt_queue *(*queue)(struct hapt_device *device, int index);
    struct hapt_event *(*record)(struct hapt_queue *queue);
    bool (*done)(struct hapt_event *event);
    enum hapt_status (*wait)(struct hapt_event *event);
    /* Copies between host and device memory in queue order. */
    enum hapt_status (*copy)(struct hapt_queue *queue, void *to, const void *from, size_t bytes);
    /* Page-locked host memory, for copies beside computation, once a device is open; NULL: there is none. Absent slots:
     * the host reads and writes the device's memory itself. */
    void *(*pin)(size_t bytes);
    void (*unpin)(void *memory);
    /* Optional. NULL: there are none, *reason says why. Loads their library. */
    const struct hapt_groups *(*groups)(const char **reason);
    /* The device's clock: marks of a queue, used in turn (the last HAPT_MARKS are good), and the seconds from one to a
     * later one, which is waited for; negative: it was never reached. Absent slots: there is none, the host's clock
     * tells. */
    struct hapt_event *(*mark)(struct hapt_queue *queue);
    double (*seconds)(struct hapt_event *from, struct hapt_event *to);
    /* Optional. Keeps the queue busy for so long, some milliseconds at most: what is queued behind it does not wait for
     * the host then. */
    void (*hold)(struct hapt_queue *queue, double time_s);
    /* Replays. What a thread queues between `capture` and `captured` is kept instead of run, with its addresses and
     * arguments; it waits for nothing meanwhile, and other threads leave the queue alone. Each may fail without a word
     * (false, NULL); then nothing has run and the queue is as before, even if something in between failed. Absent
     * slots: work is queued each time. */
    bool (*capture)(struct hapt_queue *queue);
    struct hapt_replay *(*captured)(struct hapt_queue *queue);
    bool (*replay)(struct hapt_replay *replay, struct hapt_queue *queue);
    void (*forget)(struct hapt_replay *replay);
    /* Optional: fp32 matrix products of this process may round their operands to TF32 from here on, or no more. */
    void (*use_tf32)(bool use);
};
#define HAPT_MARKS 256

/* Page-locked memory of a back end that has `pin`; HAPT_ERR_MEMORY where there is none. */
enum hapt_status hapt_backend_pin(const struct hapt_backend *backend, size_t bytes, void **memory);

/* The back end of that name ("cpu", "emulated", "cuda"), or NULL. */
const struct hapt_backend *hapt_backend_find(const char *name);
const struct hapt_backend *hapt_backend_at(int index); /* NULL past the end */

#endif
