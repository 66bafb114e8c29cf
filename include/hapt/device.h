/*
 * Devices. A back end is one table of functions; a kernel is found by its operator's name.
 *
 * Rank-local, no MPI. The engine binds each kernel once to planned memory, so a call carries final addresses. `cpu` and
 * `emulated` are always built in; `cuda` is a plug-in, loaded on demand. To add a back end: write one table and add one
 * line to src/device/device.c.
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

/* Sum, or maximum, of data[i] over the shards of an operator that communicates while it runs. fp32, in host memory. */
typedef enum hapt_status hapt_shard_reduce(void *context, float *data, size_t elements, bool largest);

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
    /* For a shard of an index that integer operands select from (tables, logits): `first_value` is the shard's first
     * value; its local extent is their number. Values of other shards contribute nothing. `value_count`: values on all
     * shards; 0: as many as here. */
    int64_t first_value, value_count;
    hapt_shard_reduce *shard_reduce; /* for operators that communicate while they run; NULL: there is one shard */
    void *shard_reduce_context;
};

/* Facts that the driver reports about a device. */
struct hapt_device_facts {
    char name[64];
    char pci_address[16]; /* "0000:3b:00.0", lower case; "" unknown */
    size_t memory_bytes;
    int processors;   /* streaming multiprocessors */
    int major, minor; /* compute capability */
    double clock_hz;  /* 0: unknown */
};

/* Workspace of a GPU matrix product with `results` elements (all batches): room for the library and the fp32 partial
 * sums of a split k. `most`: enough for any product on that kind of GPU. The back end and plans without hardware use
 * the same figure. */
#define HAPT_PRODUCT_WORKSPACE_BYTES ((size_t)32 << 20) /* the newest GPUs need most */
static inline size_t hapt_product_workspace(int64_t results, size_t most)
{
    const int64_t least = 1 << 20, parts = 32 * (int64_t)sizeof(float);
    return results < ((int64_t)most - least) / parts ? (size_t)(least + results * parts) : most;
}

struct hapt_device;
struct hapt_queue;
struct hapt_event;
struct hapt_replay;

/* Queues by purpose. The computing thread fills the first and the last two, the communication thread the others. During
 * an update on the host its thread fills the last two. */
enum hapt_queue_use {
    HAPT_QUEUE_COMPUTE,
    HAPT_QUEUE_COPY_OUT,
    HAPT_QUEUE_COPY_IN,
    HAPT_QUEUE_SEND,
    HAPT_QUEUE_RECEIVE,
    HAPT_QUEUE_STATE_OUT, /* optimizer state and master weights on the host */
    HAPT_QUEUE_STATE_IN,
    HAPT_QUEUES
};

struct hapt_kernel {
    const char *op; /* name in the operator table */
    /* Scratch bytes of the call. The views carry shapes; their data may be NULL. Slot absent: no scratch. */
    size_t (*workspace_bytes)(const struct hapt_call *call);
    /* Starts the work on `queue`. */
    enum hapt_status (*run)(const struct hapt_call *call, struct hapt_queue *queue);
};

/*
 * Device communicators: devices of several processes, one each, exchange device memory through a library of
 * their own (NCCL), bypassing the host.
 *
 * Functions that return a text return NULL on success, else the error, valid until the next call; the caller adds the
 * context. A communicator belongs to the thread that created it. All ranks make the same calls in the same order. All
 * calls use the same queue, unless earlier work was waited for. Queue nothing else until `poll` reports true. After
 * an error, only abort or destroy it. For given ranks, shapes and devices, results are bitwise equal in every run, and
 * sums are equal on all ranks.
 */
struct hapt_device_comm;
#define HAPT_DEVICE_COMM_ID_BYTES 128

/* Device memory. */
struct hapt_block {
    void *data;
    size_t bytes;
};

struct hapt_device_comm_ops {
    const char *(*library)(void); /* "NCCL 2.28.9" */
    /* PCI address of this process's device, "0000:3b:00.0". Ranks of a communicator must not share a device. */
    const char *(*pci_address)(char address[16]);
    /* One process makes the id for all ranks of the future communicator. */
    const char *(*id)(unsigned char id[HAPT_DEVICE_COMM_ID_BYTES]);
    /* Joins as rank `rank` of `ranks`. The communicator is ready when it has settled. */
    const char *(*create)(const unsigned char id[HAPT_DEVICE_COMM_ID_BYTES], int rank, int ranks,
                          struct hapt_device_comm **comm);
    /* Poll. *settled: no requested operation is still on its way into the queue. Also reports errors of queued work. */
    const char *(*poll)(struct hapt_device_comm *comm, bool *settled);
    /* Stops all pending work without waiting for peers. The communicator can then only be destroyed. */
    void (*abort)(struct hapt_device_comm *comm);
    void (*destroy)(struct hapt_device_comm *comm); /* NULL is allowed */
    /* to[i] = sum, or maximum, over ranks of from[i]; `to` may equal `from`. */
    const char *(*all_reduce)(struct hapt_device_comm *comm, struct hapt_queue *queue, bool largest,
                              enum hapt_dtype dtype, const void *from, void *to, size_t elements);
    /* Rank r gets the sums of elements [bound[r], bound[r + 1]) of `from`. `to` may be that part of `from`. Slices may
     * differ in size. */
    const char *(*reduce_scatter)(struct hapt_device_comm *comm, struct hapt_queue *queue, enum hapt_dtype dtype,
                                  const size_t *bound, const void *from, void *to);
    /* Rank r's `mine` goes to bytes [bound[r], bound[r + 1]) of `whole`; it may be there already. */
    const char *(*all_gather)(struct hapt_device_comm *comm, struct hapt_queue *queue, const size_t *bound,
                              const void *mine, void *whole);
    /* All-to-all. Bytes [send[r], send[r + 1]) of `from` go to rank r; bytes from rank r arrive at [receive[r],
     * receive[r + 1]) of `to`. */
    const char *(*all_to_all)(struct hapt_device_comm *comm, struct hapt_queue *queue, const size_t *send,
                              const void *from, const size_t *receive, void *to);
    /* Copies runs of bytes from `base` to contiguous `dense`, or back. Needs no communicator. */
    const char *(*pack)(struct hapt_queue *queue, const struct hapt_strided_list *list, const void *base, void *dense);
    const char *(*unpack)(struct hapt_queue *queue, const struct hapt_strided_list *list, void *base,
                          const void *dense);
    /* Optional. Splits a communicator by color, with ranks ordered by key. The caller knows its `rank` in its part and
     * the part's `ranks`. color < 0: *part = NULL. Ready when `comm` has settled (`poll`). All its ranks must call. */
    const char *(*split)(struct hapt_device_comm *comm, int color, int key, int rank, int ranks,
                         struct hapt_device_comm **part);
    /* Optional. Sends blocks to a rank, or receives them; number and sizes must match. The queue continues when both
     * sides have met. Another thread than the communicator's may call. */
    const char *(*send)(struct hapt_device_comm *comm, struct hapt_queue *queue, int count,
                        const struct hapt_block *block, int to);
    const char *(*receive)(struct hapt_device_comm *comm, struct hapt_queue *queue, int count,
                           const struct hapt_block *block, int from);
};

/* A shared library that a back end opens at run time. */
struct hapt_library {
    const char *name;           /* "libcublasLt.so.13" */
    const char *path;           /* of the file; NULL: missing */
    const char *missing_reason; /* and the consequence */
    const char *hint;
    bool needed; /* required: without it the back end has no device */
};

struct hapt_backend {
    const char *name;
    const char *description;
    /* The libraries it computes with, e.g. "oneDNN 2.6.3"; NULL: none. */
    const char *(*libraries)(void);
    /* Optional. Libraries that were opened or are missing; NULL past the end. Opens those that were not needed yet. */
    const struct hapt_library *(*loaded_library)(int index);
    /* Number of devices that this process can see; 0: *reason says what is missing. */
    int (*device_count)(const char **reason);
    /* Optional. */
    enum hapt_status (*describe)(int index, struct hapt_device_facts *facts);
    /* `threads`: CPU threads of the device; memory_bytes: cap, 0 for none. */
    enum hapt_status (*open)(int index, int threads, size_t memory_bytes, struct hapt_device **device);
    void (*close)(struct hapt_device *device);
    /* Zeroed memory, 64-byte aligned; HAPT_ERR_MEMORY over the cap. `used` and `peak` count allocated bytes. */
    enum hapt_status (*allocate)(struct hapt_device *device, size_t bytes, void **memory);
    void (*free)(struct hapt_device *device, void *memory);
    size_t (*memory_used)(const struct hapt_device *device);
    size_t (*memory_peak)(const struct hapt_device *device);
    /* NULL when the back end lacks the operator in that type. */
    const struct hapt_kernel *(*find_kernel)(const struct hapt_device *device, const char *op, enum hapt_dtype dtype);
    /* Queues run their work in order; an event marks a point in a queue. The cpu back end runs work immediately. */
    struct hapt_queue *(*queue)(struct hapt_device *device, int index);
    struct hapt_event *(*record)(struct hapt_queue *queue);
    bool (*done)(struct hapt_event *event);
    enum hapt_status (*wait)(struct hapt_event *event);
    /* Copies between host and device memory in queue order. */
    enum hapt_status (*copy)(struct hapt_queue *queue, void *to, const void *from, size_t bytes);
    /* Page-locked host memory, so that copies overlap computation. Needs an open device; NULL: none left. Slots absent:
     * the host accesses device memory directly. */
    void *(*pin)(size_t bytes);
    void (*unpin)(void *memory);
    /* Optional. Loads the communication library; NULL: unavailable, *reason says why. */
    const struct hapt_device_comm_ops *(*device_comms)(const char **reason);
    /* Device clock. `timestamp` records an event in a queue; these events are reused, the last HAPT_TIMESTAMPS are
     * valid. `elapsed_s`: from one to a later one, which it waits for; negative: never reached. Slots absent: use the
     * host's clock. */
    struct hapt_event *(*timestamp)(struct hapt_queue *queue);
    double (*elapsed_s)(struct hapt_event *from, struct hapt_event *to);
    /* Optional. Keeps the queue busy for `time_s`, some milliseconds at most, so that work behind it need not wait for
     * the host. */
    void (*delay)(struct hapt_queue *queue, double time_s);
    /* Replays. Work that a thread queues between `capture` and `capture_end` is recorded, with its addresses and
     * arguments, instead of run. Meanwhile the thread must not wait, and other threads must not use the queue. Each
     * function may fail silently (false, NULL): then nothing has run and the queue is as before, even if a call in
     * between failed. Slots absent: work is queued each time. */
    bool (*capture)(struct hapt_queue *queue);
    struct hapt_replay *(*capture_end)(struct hapt_queue *queue);
    bool (*replay)(struct hapt_replay *replay, struct hapt_queue *queue);
    void (*replay_destroy)(struct hapt_replay *replay);
    /* Optional. Allows or forbids TF32 rounding of operands in this process's fp32 matrix products from now on. */
    void (*use_tf32)(bool use);
};
#define HAPT_TIMESTAMPS 256

/* Page-locked memory of a back end that has `pin`; HAPT_ERR_MEMORY if none is left. */
enum hapt_status hapt_backend_pin(const struct hapt_backend *backend, size_t bytes, void **memory);

/* The back end of that name ("cpu", "emulated", "cuda"), or NULL. */
const struct hapt_backend *hapt_backend_find(const char *name);
const struct hapt_backend *hapt_backend_at(int index); /* NULL past the end */

#endif
