/* The plug-in's table: devices, memory, queues and events of the CUDA runtime. */
#include <ctype.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

#include "cudnn_convolution.h"
#include "kernels.h"
#include "product.h"

enum { QUEUES = HAPT_QUEUES, EVENTS = 64 };

const struct cuda_host *cuda_host;

struct hapt_event {
    cudaEvent_t event;
    struct hapt_queue *queue;
};

/* Queue 0 computes. Each queue reuses its events in turn: at most EVENTS of a queue may be waited for at a time. */
static struct {
    int device;               /* -1: none is open */
    struct cuda_fault *fault; /* in host memory; kernels write it too */
    struct hapt_queue queue[QUEUES];
    struct hapt_event event[QUEUES][EVENTS];
    unsigned next[QUEUES];
    struct hapt_event timestamp[QUEUES][HAPT_TIMESTAMPS]; /* with timing; each is created at its first use */
    unsigned next_timestamp[QUEUES];
} cuda = {-1, NULL, {}, {}, {}, {}, {}};

enum hapt_status cuda_check(cudaError_t error, const char *what)
{
    if (error == cudaSuccess) return HAPT_OK;
    cudaGetLastError(); /* otherwise the next call reports it again */
    const bool memory = error == cudaErrorMemoryAllocation,
               code = strcmp(cudaGetErrorName(error), "cudaErrorNoKernelImageForDevice") == 0;
    return cuda_host->fail(
        memory ? HAPT_ERR_MEMORY
        : code ? HAPT_ERR_INPUT
               : HAPT_ERR_INTERNAL,
        memory ? "use more devices, a smaller microbatch or devices with more memory"
        : code ? "rebuild with CUDA_ARCHS set to this GPU's compute capability, e.g. make CUDA_ARCHS='75 80 90'"
               : "see hapt doctor and the driver's log (dmesg)",
        "CUDA device %d: %s: %s", cuda.device, what, cudaGetErrorString(error));
}

/* CUDA's current device is per thread. */
void cuda_use_device(void)
{
    static thread_local int current = -1;
    if (current == cuda.device || cuda.device < 0) return;
    if (cudaSetDevice(cuda.device) == cudaSuccess) current = cuda.device;
}

static const char *libraries(void)
{
    static char text[96];
    int runtime = 0;
    cudaRuntimeGetVersion(&runtime);
    const char *also = cudnn_library ? cudnn_library() : NULL;
    snprintf(text, sizeof text, "CUDA %d.%d%s%s", runtime / 1000, runtime % 1000 / 10, also ? ", " : "",
             also ? also : "");
    return text;
}

static int device_count(const char **reason)
{
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaSuccess && count > 0) return count;
    cudaGetLastError();
    *reason = error == cudaSuccess ? "no CUDA device" : cudaGetErrorString(error);
    return 0;
}

static enum hapt_status describe(int index, struct hapt_device_facts *facts)
{
    cudaDeviceProp property;
    int clock_khz = 0;
    HAPT_TRY(cuda_check(cudaGetDeviceProperties(&property, index), "device properties"));
    memset(facts, 0, sizeof *facts);
    snprintf(facts->name, sizeof facts->name, "%.63s", property.name);
    if (cudaDeviceGetPCIBusId(facts->pci_address, sizeof facts->pci_address, index) != cudaSuccess)
        facts->pci_address[0] = '\0';
    if (cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, index) != cudaSuccess) clock_khz = 0;
    cudaGetLastError(); /* these two may be missing */
    for (char *c = facts->pci_address; *c; c++) *c = (char)tolower((unsigned char)*c);
    facts->memory_bytes = property.totalGlobalMem;
    facts->processors = property.multiProcessorCount;
    facts->major = property.major;
    facts->minor = property.minor;
    facts->clock_hz = 1e3 * clock_khz;
    return HAPT_OK;
}

/* Waiting for an event spins, which is the fastest. With fewer than CORES_TO_SPIN cores it blocks, because the
 * communication thread and NCCL's threads need a core. */
enum { CORES_TO_SPIN = 3 };

static unsigned waiting(void)
{
    cpu_set_t cores;
    return sched_getaffinity(0, sizeof cores, &cores) == 0 && CPU_COUNT(&cores) < CORES_TO_SPIN ? cudaEventBlockingSync
                                                                                                : 0;
}

static enum hapt_status make_queues(void)
{
    HAPT_TRY(
        cuda_check(cudaHostAlloc((void **)&cuda.fault, sizeof *cuda.fault, cudaHostAllocMapped), "page-locked memory"));
    cuda.fault->kind = CUDA_FAULT_NONE;
    for (int q = 0; q < QUEUES; q++) {
        cuda.queue[q].fault = cuda.fault;
        HAPT_TRY(cuda_check(cudaStreamCreateWithFlags(&cuda.queue[q].stream, cudaStreamNonBlocking), "a stream"));
        for (int e = 0; e < EVENTS; e++) {
            cuda.event[q][e].queue = &cuda.queue[q];
            HAPT_TRY(cuda_check(cudaEventCreateWithFlags(&cuda.event[q][e].event, cudaEventDisableTiming | waiting()),
                                "an event"));
        }
    }
    return HAPT_OK;
}

static __global__ void delay_kernel(long long cycles)
{
    const long long start = clock64();
    while (clock64() - start < cycles) {
    }
}

/* Its queues exist until the process ends. */
static enum hapt_status open_device(int index)
{
    if (cuda.device == index) return HAPT_OK;
    if (cuda.device >= 0)
        return cuda_host->fail(HAPT_ERR_INTERNAL, NULL,
                               "cannot open CUDA device %d beside device %d: each process has one", index, cuda.device);
    HAPT_TRY(cuda_check(cudaSetDevice(index), "the device cannot be used"));
    cuda.device = index;
    cuda_use_device();
    cudaFuncAttributes about;
    enum hapt_status status = cuda_check(cudaFuncGetAttributes(&about, delay_kernel), "loading its code");
    if (status == HAPT_OK) status = make_queues();
    if (status != HAPT_OK) cuda.device = -1;
    return status;
}

static void *reserve(size_t bytes)
{
    void *memory = NULL;
    cuda_use_device();
    cudaError_t error = cudaMalloc(&memory, bytes ? bytes : 1);
    if (error == cudaSuccess) error = cudaMemset(memory, 0, bytes);
    if (error == cudaSuccess) error = cudaDeviceSynchronize();
    if (error == cudaSuccess) return memory;
    cudaGetLastError();
    if (memory) cudaFree(memory);
    if (error != cudaErrorMemoryAllocation)
        cuda_check(error, "queued work"); /* the first failure is the one that is reported */
    return NULL;
}

static void release(void *memory, size_t bytes)
{
    (void)bytes;
    cuda_use_device();
    cudaFree(memory); /* waits for work that still uses it */
}

static void *pin(size_t bytes)
{
    void *memory = NULL;
    cuda_use_device();
    if (cudaMallocHost(&memory, bytes ? bytes : 1) == cudaSuccess) return memory;
    cudaGetLastError();
    return NULL;
}

static void unpin(void *memory)
{
    cuda_use_device();
    cudaFreeHost(memory);
}

static const struct hapt_kernel *find_kernel(const struct hapt_device *device, const char *op, enum hapt_dtype dtype)
{
    (void)device;
    return cuda_kernel_find(op, dtype);
}

static struct hapt_queue *queue_at(struct hapt_device *device, int index)
{
    (void)device;
    return &cuda.queue[(unsigned)index % QUEUES];
}

static struct hapt_event *record(struct hapt_queue *queue)
{
    const int q = (int)(queue - cuda.queue);
    cuda_use_device();
    struct hapt_event *event = &cuda.event[q][cuda.next[q]++ % EVENTS];
    cudaEventRecord(event->event, queue->stream); /* a failure here is seen by the wait */
    return event;
}

static bool done(struct hapt_event *event)
{
    cuda_use_device();
    return cudaEventQuery(event->event) != cudaErrorNotReady;
}

/* Messages as on the cpu back end. */
static enum hapt_status fault_status(void)
{
    const struct cuda_fault found = *cuda.fault;
    cuda.fault->kind = CUDA_FAULT_NONE;
    switch (found.kind) {
    case CUDA_FAULT_NONE: return HAPT_OK;
    case CUDA_FAULT_INDEX:
        return cuda_host->fail(HAPT_ERR_INPUT, "tokens must be below the model's vocabulary",
                               "token %d in a table of %d rows", found.a, found.b);
    case CUDA_FAULT_POSITION:
        return cuda_host->fail(HAPT_ERR_INPUT, "shorten the sequence or enlarge the position table",
                               "%d positions, but the table has %d", found.a, found.b);
    case CUDA_FAULT_TARGET:
        return cuda_host->fail(HAPT_ERR_INPUT, "targets must be below the model's vocabulary (or -100: ignored)",
                               "target %d of %d classes", found.a, found.b);
    case CUDA_FAULT_ROOM:
        return cuda_host->fail(HAPT_ERR_INPUT, "give the model a larger --capacity-factor, or 0: room for every token",
                               "%d tokens of one row go to expert %d, which has room for %d", found.a, found.b,
                               found.c);
    default: return cuda_host->fail(HAPT_ERR_INTERNAL, NULL, "a kernel's error record is incomplete");
    }
}

static enum hapt_status wait(struct hapt_event *event)
{
    cuda_use_device();
    HAPT_TRY(cuda_check(cudaEventSynchronize(event->event), "queued work"));
    HAPT_TRY(cuda_check(cudaGetLastError(), "queued work"));
    return event->queue == cuda.queue ? fault_status()
                                      : HAPT_OK; /* only waits for the kernels' queue report faults of kernels */
}

static enum hapt_status copy(struct hapt_queue *queue, void *to, const void *from, size_t bytes)
{
    cuda_use_device();
    return bytes == 0 ? HAPT_OK
                      : cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, queue->stream), "a copy");
}

enum hapt_status cuda_download(struct hapt_queue *queue, void *host, const void *device, size_t bytes)
{
    HAPT_TRY(copy(queue, host, device, bytes));
    return cuda_check(cudaStreamSynchronize(queue->stream), "queued work");
}

enum hapt_status cuda_upload(struct hapt_queue *queue, void *device, const void *host, size_t bytes)
{
    return cuda_download(queue, device, host, bytes);
}

static struct hapt_event *timestamp(struct hapt_queue *queue)
{
    const int q = (int)(queue - cuda.queue);
    cuda_use_device();
    struct hapt_event *event = &cuda.timestamp[q][cuda.next_timestamp[q]++ % HAPT_TIMESTAMPS];
    if (!event->event && cudaEventCreateWithFlags(&event->event, cudaEventDefault | waiting()) != cudaSuccess)
        event->event = NULL;
    if (event->event) cudaEventRecord(event->event, queue->stream); /* a failure here is seen by the wait */
    return event;
}

static double elapsed_s(struct hapt_event *from, struct hapt_event *to)
{
    float apart_ms = -1;
    cuda_use_device();
    cudaError_t error = from->event && to->event ? cudaEventSynchronize(to->event) : cudaErrorInvalidValue;
    if (error == cudaSuccess) error = cudaEventElapsedTime(&apart_ms, from->event, to->event);
    if (error == cudaSuccess) return 1e-3 * apart_ms;
    cudaGetLastError();
    return -1;
}

static void delay(struct hapt_queue *queue, double time_s)
{
    int clock_khz = 0;
    cuda_use_device();
    if (cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, cuda.device) != cudaSuccess || clock_khz <= 0)
        clock_khz = 1500000;
    cudaGetLastError();
    launch(delay_kernel, dim3(1), 1, 0, queue,
           (long long)((time_s < 1e-2 ? time_s : 1e-2) * 1e3 * clock_khz)); /* a failure here is seen by the wait */
}

/* ---- Replays: CUDA graphs ---- */

static bool capture(struct hapt_queue *queue)
{
    cuda_use_device();
    queue->capturing = cudaStreamBeginCapture(queue->stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess;
    if (!queue->capturing) cudaGetLastError();
    return queue->capturing;
}

static struct hapt_replay *capture_end(struct hapt_queue *queue)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    cuda_use_device();
    queue->capturing = false;
    cudaError_t error = cudaStreamEndCapture(queue->stream, &graph); /* a failed capture also ends here */
    if (error == cudaSuccess) error = cudaGraphInstantiateWithFlags(&exec, graph, 0);
    if (graph) cudaGraphDestroy(graph);
    if (error == cudaSuccess) return (struct hapt_replay *)exec;
    cudaGetLastError();
    return NULL;
}

static bool replay(struct hapt_replay *replay, struct hapt_queue *queue)
{
    cuda_use_device();
    const bool launched = cudaGraphLaunch((cudaGraphExec_t)replay, queue->stream) == cudaSuccess;
    if (!launched) cudaGetLastError();
    return launched;
}

static void replay_destroy(struct hapt_replay *replay)
{
    cuda_use_device();
    cudaGraphExecDestroy((cudaGraphExec_t)replay);
}

/* In nccl.cu, if the toolkit has NCCL's header (Makefile). */
extern const struct hapt_device_comm_ops *cuda_nccl_comm_ops(const char **reason) __attribute__((weak));

static const struct hapt_device_comm_ops *device_comms(const char **reason)
{
    if (cuda_nccl_comm_ops) return cuda_nccl_comm_ops(reason);
    *reason = "this build has no NCCL";
    return NULL;
}

extern "C" __attribute__((visibility("default"))) const struct cuda_plugin *
hapt_cuda_plugin(const struct cuda_host *host, int abi, struct hapt_backend *backend)
{
    static const struct cuda_plugin plugin = {open_device, reserve, release};
    if (abi != CUDA_PLUGIN_ABI || host->call_bytes != sizeof(struct hapt_call)) return NULL;
    cuda_host = host;
    backend->libraries = libraries;
    backend->device_count = device_count;
    backend->describe = describe;
    backend->pin = pin;
    backend->unpin = unpin;
    backend->find_kernel = find_kernel;
    backend->queue = queue_at;
    backend->record = record;
    backend->done = done;
    backend->wait = wait;
    backend->copy = copy;
    backend->device_comms = device_comms;
    backend->timestamp = timestamp;
    backend->elapsed_s = elapsed_s;
    backend->delay = delay;
    backend->capture = capture;
    backend->capture_end = capture_end;
    backend->replay = replay;
    backend->replay_destroy = replay_destroy;
    backend->use_tf32 = product_use_tf32;
    return &plugin;
}
