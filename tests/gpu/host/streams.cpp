/*
 * Host CUDA: streams, events and graphs.
 *
 * Work is complete when its call returns, so streams and events never wait. Handles are checked like real ones: a
 * destroyed handle, or one of another device, is refused. Handles are never freed, so that a destroyed one can be
 * recognised. A stream that is being captured stores its work.
 */
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include <vector>

#include "host_cuda.h"

struct CUgraph_st {
    std::vector<host_cuda_work> work;
};

struct CUgraphExec_st {
    std::vector<host_cuda_work> work;
};

struct CUstream_st {
    struct CUstream_st *next;
    int device;
    bool alive;
    /* During a capture: */
    struct CUgraph_st *graph; /* NULL: no capture */
    bool broken, local;       /* the capture is invalid; it belongs to one thread */
    pthread_t thread;
};

struct CUevent_st {
    struct CUevent_st *next;
    int device;
    bool alive, timed, recorded;
    double time_s;
    cudaStream_t captured; /* recorded in a capture of that stream, not in time */
};

static struct CUstream_st *first_stream;
static struct CUevent_st *first_event;

static bool is_default(cudaStream_t stream)
{
    return !stream || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
}

static cudaError_t check_stream(cudaStream_t stream)
{
    int device;
    if (cudaGetDevice(&device)) return cudaPeekAtLastError();
    return host_cuda_result(is_default(stream) || stream->alive ? cudaSuccess : cudaErrorInvalidResourceHandle);
}

bool host_cuda_stream_alive(cudaStream_t stream)
{
    int device;
    return (is_default(stream) || stream->alive) && !cudaGetDevice(&device);
}

bool host_cuda_stream_takes(cudaStream_t stream)
{
    int device;
    if (is_default(stream)) return true;
    return stream->alive && !cudaGetDevice(&device) && stream->device == device;
}

bool host_cuda_stream_usable(cudaStream_t stream)
{
    return host_cuda_stream_takes(stream) && !host_cuda_captures(stream);
}

/* ---- captures ---- */

bool host_cuda_captures(cudaStream_t stream)
{
    return !is_default(stream) && stream->graph;
}

cudaError_t host_cuda_keep(cudaStream_t stream, const host_cuda_work &work)
{
    if (stream->broken) return host_cuda_result(cudaErrorStreamCaptureInvalidated);
    stream->graph->work.push_back(work);
    return cudaSuccess;
}

cudaError_t host_cuda_not_captured(void)
{
    host_cuda_scope scope;
    bool some = false;
    for (cudaStream_t stream = first_stream; stream; stream = stream->next) {
        if (!stream->graph || !stream->local || !pthread_equal(stream->thread, pthread_self())) continue;
        some = stream->broken = true;
    }
    return host_cuda_result(some ? cudaErrorStreamCaptureUnsupported : cudaSuccess);
}

/* For calls that wait for the stream. */
static cudaError_t check_waiting(cudaStream_t stream)
{
    if (check_stream(stream)) return cudaPeekAtLastError();
    if (!host_cuda_captures(stream)) return cudaSuccess;
    stream->broken = true;
    return host_cuda_result(cudaErrorStreamCaptureUnsupported);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    if (check_stream(stream)) return cudaPeekAtLastError();
    if (is_default(stream)) return host_cuda_result(cudaErrorStreamCaptureUnsupported);
    if (stream->graph) return host_cuda_result(cudaErrorIllegalState);
    host_cuda_scope scope;
    stream->graph = new CUgraph_st;
    stream->broken = false;
    stream->local = mode != cudaStreamCaptureModeRelaxed;
    stream->thread = pthread_self();
    return cudaSuccess;
}

static bool captures_fail(void)
{
    const char *wish = getenv("HAPT_HOST_CAPTURE");
    return wish && wish[0] == '0';
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    if (check_stream(stream)) return cudaPeekAtLastError();
    *graph = NULL;
    if (!host_cuda_captures(stream)) return host_cuda_result(cudaErrorIllegalState);
    if (stream->local && !pthread_equal(stream->thread, pthread_self()))
        return host_cuda_result(cudaErrorStreamCaptureWrongThread);
    host_cuda_scope scope;
    struct CUgraph_st *made = stream->graph;
    stream->graph = NULL;
    if (stream->broken || captures_fail()) {
        delete made;
        return host_cuda_result(cudaErrorStreamCaptureInvalidated);
    }
    *graph = made;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    if (check_stream(stream)) return cudaPeekAtLastError();
    *status = !host_cuda_captures(stream) ? cudaStreamCaptureStatusNone
              : stream->broken            ? cudaStreamCaptureStatusInvalidated
                                          : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags)
{
    if (!exec || !graph || flags) return host_cuda_result(cudaErrorInvalidValue);
    *exec = new CUgraphExec_st{graph->work};
    return cudaSuccess;
}

/* On a device its errors come later, at the next synchronisation of the stream. */
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    if (check_stream(stream)) return cudaPeekAtLastError();
    if (!exec) return host_cuda_result(cudaErrorInvalidValue);
    if (host_cuda_captures(stream)) return check_waiting(stream); /* a graph in a graph */
    for (const host_cuda_work &work : exec->work) {
        const cudaError_t error = work();
        if (error) return host_cuda_result(error);
    }
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    delete exec;
    return host_cuda_result(exec ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    delete graph;
    return host_cuda_result(graph ? cudaSuccess : cudaErrorInvalidValue);
}

/* ---- streams ---- */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned int flags, int)
{
    int device;
    if (cudaGetDevice(&device)) return cudaPeekAtLastError();
    if (!stream || flags & ~1u) return host_cuda_result(cudaErrorInvalidValue);
    host_cuda_scope scope;
    *stream = (cudaStream_t)calloc(1, sizeof **stream);
    if (!*stream) return host_cuda_result(cudaErrorMemoryAllocation);
    **stream = {first_stream, device, true, NULL, false, false, {}};
    first_stream = *stream;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags)
{
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    if (is_default(stream) || !stream->alive) return host_cuda_result(cudaErrorInvalidResourceHandle);
    stream->alive = false;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    return check_waiting(stream);
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    return check_waiting(stream);
}

/* ---- events ---- */

static cudaError_t check_event(cudaEvent_t event)
{
    return host_cuda_result(event && event->alive ? cudaSuccess : cudaErrorInvalidResourceHandle);
}

/* For calls that ask whether it was reached. */
static cudaError_t check_reached(cudaEvent_t event)
{
    if (check_event(event)) return cudaPeekAtLastError();
    if (!event->captured) return cudaSuccess;
    if (event->captured->graph) event->captured->broken = true;
    return host_cuda_result(cudaErrorCapturedEvent);
}

/* Captures that spread to other streams are not supported here. */
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int)
{
    if (check_stream(stream) || check_event(event)) return cudaPeekAtLastError();
    const cudaStream_t from = event->captured && event->captured->graph ? event->captured : NULL;
    const cudaStream_t to = host_cuda_captures(stream) ? stream : NULL;
    if (from == to) return cudaSuccess;
    if (from) from->broken = true;
    if (to) to->broken = true;
    return host_cuda_result(cudaErrorStreamCaptureIsolation);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data)
{
    const host_cuda_work work = [function, data] {
        function(data);
        return cudaSuccess;
    };
    if (check_stream(stream)) return cudaPeekAtLastError();
    return host_cuda_captures(stream) ? host_cuda_keep(stream, work) : work();
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags)
{
    int device;
    if (cudaGetDevice(&device)) return cudaPeekAtLastError();
    if (!event || flags & ~7u) return host_cuda_result(cudaErrorInvalidValue);
    host_cuda_scope scope;
    *event = (cudaEvent_t)calloc(1, sizeof **event);
    if (!*event) return host_cuda_result(cudaErrorMemoryAllocation);
    **event = {first_event, device, true, !(flags & cudaEventDisableTiming), false, 0, NULL};
    first_event = *event;
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event, unsigned int flags)
{
    return cudaEventCreateWithFlags(event, flags);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    if (check_stream(stream) || check_event(event)) return cudaPeekAtLastError();
    int device;
    if (cudaGetDevice(&device)) return cudaPeekAtLastError();
    if ((is_default(stream) ? device : stream->device) != event->device)
        return host_cuda_result(cudaErrorInvalidResourceHandle);
    event->captured = host_cuda_captures(stream) ? stream : NULL;
    event->recorded = false;
    if (event->captured) return stream->broken ? host_cuda_result(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    event->time_s = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    event->recorded = true;
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    return check_reached(event);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    return check_reached(event);
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end)
{
    if (check_reached(start) || check_reached(end)) return cudaPeekAtLastError();
    if (!start->timed || !end->timed || !start->recorded || !end->recorded)
        return host_cuda_result(cudaErrorInvalidResourceHandle);
    *milliseconds = (float)(1e3 * (end->time_s - start->time_s));
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    if (check_event(event)) return cudaPeekAtLastError();
    event->alive = false;
    return cudaSuccess;
}
