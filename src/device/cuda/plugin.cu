/* The plug-in's table: devices, memory, queues and events of the CUDA runtime. */
#include <ctype.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

#include "cudnn_convolution.h"
#include "kernels.h"
#include "product.h"

enum { QUEUES = HAPT_QUEUE_RECEIVE + 1, EVENTS = 64 };

const struct cuda_host *cuda_host;

struct hapt_event {
    cudaEvent_t event;
    struct hapt_queue *queue;
};

/* Queue 0 computes. Its events are used in turn: no more than EVENTS of a queue are waited for at a time. */
static struct {
    int device;               /* -1: none is open */
    struct cuda_fault *fault; /* on the host, where kernels write, too */
    struct hapt_queue queue[QUEUES];
    struct hapt_event event[QUEUES][EVENTS];
    unsigned next[QUEUES];
    struct hapt_event mark[QUEUES]
                          [HAPT_MARKS]; /* these know when they were reached; each is made when it is first used */
    unsigned next_mark[QUEUES];
} cuda = {-1, NULL, {}, {}, {}, {}, {}};

enum hapt_status cuda_check(cudaError_t error, const char *what)
{
    if (error == cudaSuccess) return HAPT_OK;
    cudaGetLastError(); /* or the next call reports it again */
    const bool memory = error == cudaErrorMemoryAllocation,
               code = strcmp(cudaGetErrorName(error), "cudaErrorNoKernelImageForDevice") == 0;
    return cuda_host->fail(
        memory ? HAPT_ERR_MEMORY
        : code ? HAPT_ERR_INPUT
               : HAPT_ERR_INTERNAL,
        memory ? "use more devices, a smaller microbatch or devices with more memory"
        : code ? "make again with CUDA_ARCHS set to this GPU's compute capability, e.g. make CUDA_ARCHS='75 80 90'"
               : "see hapt doctor and the driver's log (dmesg)",
        "CUDA device %d: %s: %s", cuda.device, what, cudaGetErrorString(error));
}

/* The current device is a thread's own. */
static void use_device(void)
{
    static thread_local int current = -1;
    if (current == cuda.device || cuda.device < 0) return;
    if (cudaSetDevice(cuda.device) == cudaSuccess) current = cuda.device;
}

void cuda_use_device(void)
{
    use_device();
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
    HAPT_TRY(cuda_check(cudaGetDeviceProperties(&property, index), "its properties"));
    memset(facts, 0, sizeof *facts);
    snprintf(facts->name, sizeof facts->name, "%.63s", property.name);
    if (cudaDeviceGetPCIBusId(facts->bus, sizeof facts->bus, index) != cudaSuccess) facts->bus[0] = '\0';
    if (cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, index) != cudaSuccess) clock_khz = 0;
    cudaGetLastError(); /* these two may be missing */
    for (char *c = facts->bus; *c; c++) *c = (char)tolower((unsigned char)*c);
    facts->memory_bytes = property.totalGlobalMem;
    facts->processors = property.multiProcessorCount;
    facts->major = property.major;
    facts->minor = property.minor;
    facts->clock_hz = 1e3 * clock_khz;
    return HAPT_OK;
}

/* Who waits for an event spins, which is the soonest, but not on a core that others of this rank need: the
 * communication thread, NCCL's. */
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

static __global__ void hold_kernel(long long cycles)
{
    const long long start = clock64();
    while (clock64() - start < cycles) {
    }
}

/* Its queues stay until the process ends. */
static enum hapt_status open_device(int index)
{
    if (cuda.device == index) return HAPT_OK;
    if (cuda.device >= 0)
        return cuda_host->fail(HAPT_ERR_INTERNAL, NULL, "CUDA device %d beside device %d: each process has one", index,
                               cuda.device);
    HAPT_TRY(cuda_check(cudaSetDevice(index), "it cannot be used"));
    cuda.device = index;
    use_device();
    cudaFuncAttributes about;
    enum hapt_status status = cuda_check(cudaFuncGetAttributes(&about, hold_kernel), "its code");
    if (status == HAPT_OK) status = make_queues();
    if (status != HAPT_OK) cuda.device = -1;
    return status;
}

static void *reserve(size_t bytes)
{
    void *memory = NULL;
    use_device();
    cudaError_t error = cudaMalloc(&memory, bytes ? bytes : 1);
    if (error == cudaSuccess) error = cudaMemset(memory, 0, bytes);
    if (error == cudaSuccess) error = cudaDeviceSynchronize();
    if (error == cudaSuccess) return memory;
    cudaGetLastError();
    if (memory) cudaFree(memory);
    if (error != cudaErrorMemoryAllocation)
        cuda_check(error, "work that was queued"); /* the first failure is the one that is told */
    return NULL;
}

static void release(void *memory, size_t bytes)
{
    (void)bytes;
    use_device();
    cudaFree(memory); /* waits for what still uses it */
}

static void *pin(size_t bytes)
{
    void *memory = NULL;
    use_device();
    if (cudaMallocHost(&memory, bytes ? bytes : 1) == cudaSuccess) return memory;
    cudaGetLastError();
    return NULL;
}

static void unpin(void *memory)
{
    use_device();
    cudaFreeHost(memory);
}

static struct hapt_queue *queue_at(int index)
{
    return &cuda.queue[(unsigned)index % QUEUES];
}

static struct hapt_event *record(struct hapt_queue *queue)
{
    const int q = (int)(queue - cuda.queue);
    use_device();
    struct hapt_event *event = &cuda.event[q][cuda.next[q]++ % EVENTS];
    cudaEventRecord(event->event, queue->stream); /* what fails here is seen by the wait */
    return event;
}

static bool done(struct hapt_event *event)
{
    use_device();
    return cudaEventQuery(event->event) != cudaErrorNotReady;
}

/* In the words of the cpu back end. */
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
    default: return cuda_host->fail(HAPT_ERR_INTERNAL, NULL, "a kernel's fault is half written");
    }
}

static enum hapt_status wait(struct hapt_event *event)
{
    use_device();
    HAPT_TRY(cuda_check(cudaEventSynchronize(event->event), "work that was queued"));
    HAPT_TRY(cuda_check(cudaGetLastError(), "work that was queued"));
    return event->queue == cuda.queue ? fault_status() : HAPT_OK; /* kernels' faults are for who waits for kernels */
}

static enum hapt_status copy(struct hapt_queue *queue, void *to, const void *from, size_t bytes)
{
    use_device();
    return bytes == 0 ? HAPT_OK
                      : cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, queue->stream), "a copy");
}

enum hapt_status cuda_download(struct hapt_queue *queue, void *host, const void *device, size_t bytes)
{
    HAPT_TRY(copy(queue, host, device, bytes));
    return cuda_check(cudaStreamSynchronize(queue->stream), "work that was queued");
}

enum hapt_status cuda_upload(struct hapt_queue *queue, void *device, const void *host, size_t bytes)
{
    return cuda_download(queue, device, host, bytes);
}

static struct hapt_event *mark(struct hapt_queue *queue)
{
    const int q = (int)(queue - cuda.queue);
    use_device();
    struct hapt_event *event = &cuda.mark[q][cuda.next_mark[q]++ % HAPT_MARKS];
    if (!event->event && cudaEventCreateWithFlags(&event->event, cudaEventDefault | waiting()) != cudaSuccess)
        event->event = NULL;
    if (event->event) cudaEventRecord(event->event, queue->stream); /* what fails here is seen by whoever waits */
    return event;
}

static double seconds(struct hapt_event *from, struct hapt_event *to)
{
    float apart_ms = -1;
    use_device();
    cudaError_t error = from->event && to->event ? cudaEventSynchronize(to->event) : cudaErrorInvalidValue;
    if (error == cudaSuccess) error = cudaEventElapsedTime(&apart_ms, from->event, to->event);
    if (error == cudaSuccess) return 1e-3 * apart_ms;
    cudaGetLastError();
    return -1;
}

static void hold(struct hapt_queue *queue, double time_s)
{
    int clock_khz = 0;
    use_device();
    if (cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, cuda.device) != cudaSuccess || clock_khz <= 0)
        clock_khz = 1500000;
    cudaGetLastError();
    launch(hold_kernel, dim3(1), 1, 0, queue,
           (long long)((time_s < 1e-2 ? time_s : 1e-2) * 1e3 * clock_khz)); /* what fails is seen by the wait */
}

/* ---- Replays: CUDA graphs ---- */

static bool capture(struct hapt_queue *queue)
{
    use_device();
    queue->capturing = cudaStreamBeginCapture(queue->stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess;
    if (!queue->capturing) cudaGetLastError();
    return queue->capturing;
}

static struct hapt_replay *captured(struct hapt_queue *queue)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    use_device();
    queue->capturing = false;
    cudaError_t error = cudaStreamEndCapture(queue->stream, &graph); /* a capture that failed is over, too */
    if (error == cudaSuccess) error = cudaGraphInstantiateWithFlags(&exec, graph, 0);
    if (graph) cudaGraphDestroy(graph);
    if (error == cudaSuccess) return (struct hapt_replay *)exec;
    cudaGetLastError();
    return NULL;
}

static bool replay(struct hapt_replay *replay, struct hapt_queue *queue)
{
    use_device();
    const bool launched = cudaGraphLaunch((cudaGraphExec_t)replay, queue->stream) == cudaSuccess;
    if (!launched) cudaGetLastError();
    return launched;
}

static void forget(struct hapt_replay *replay)
{
    use_device();
    cudaGraphExecDestroy((cudaGraphExec_t)replay);
}

/* nccl.cu, where the toolkit has NCCL's header (Makefile). */
extern const struct hapt_groups *cuda_nccl_groups(const char **reason) __attribute__((weak));

static const struct hapt_groups *groups(const char **reason)
{
    if (cuda_nccl_groups) return cuda_nccl_groups(reason);
    *reason = "this build has no NCCL";
    return NULL;
}

extern "C" __attribute__((visibility("default"))) const struct cuda_plugin *
hapt_cuda_plugin(const struct cuda_host *host, int abi)
{
    static struct cuda_plugin plugin;
    cuda_host = host;
    plugin.abi = CUDA_PLUGIN_ABI;
    plugin.call_bytes = sizeof(struct hapt_call);
    plugin.libraries = libraries;
    plugin.device_count = device_count;
    plugin.describe = describe;
    plugin.open = open_device;
    plugin.reserve = reserve;
    plugin.release = release;
    plugin.pin = pin;
    plugin.unpin = unpin;
    plugin.find_kernel = cuda_kernel_find;
    plugin.queue = queue_at;
    plugin.record = record;
    plugin.done = done;
    plugin.wait = wait;
    plugin.copy = copy;
    plugin.groups = groups;
    plugin.mark = mark;
    plugin.seconds = seconds;
    plugin.hold = hold;
    plugin.capture = capture;
    plugin.captured = captured;
    plugin.replay = replay;
    plugin.forget = forget;
    plugin.use_tf32 = product_use_tf32;
    return abi == CUDA_PLUGIN_ABI ? &plugin : NULL;
}
