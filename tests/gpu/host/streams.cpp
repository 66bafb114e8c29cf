/*
 * Host CUDA: streams and events.
 *
 * Work is done when the call that asked for it returns, so they have nothing to wait for; they are checked like the
 * real ones: a handle that was destroyed, or one of another device, is refused. Handles are never freed, which is how a
 * dead one is known.
 */
#include <stdlib.h>
#include <time.h>

#include "host_cuda.h"

struct CUstream_st {
    struct CUstream_st *next;
    int device;
    bool alive;
};

struct CUevent_st {
    struct CUevent_st *next;
    int device;
    bool alive, timed, recorded;
    double time_s;
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

bool host_cuda_stream_usable(cudaStream_t stream)
{
    int device;
    if (is_default(stream)) return true;
    return stream->alive && !cudaGetDevice(&device) && stream->device == device;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned int flags, int)
{
    int device;
    if (cudaGetDevice(&device)) return cudaPeekAtLastError();
    if (!stream || flags & ~1u) return host_cuda_result(cudaErrorInvalidValue);
    host_cuda_scope scope;
    *stream = (cudaStream_t)calloc(1, sizeof **stream);
    if (!*stream) return host_cuda_result(cudaErrorMemoryAllocation);
    **stream = {first_stream, device, true};
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
    return check_stream(stream);
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    return check_stream(stream);
}

static cudaError_t check_event(cudaEvent_t event)
{
    return host_cuda_result(event && event->alive ? cudaSuccess : cudaErrorInvalidResourceHandle);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int)
{
    return check_stream(stream) || check_event(event) ? cudaPeekAtLastError() : cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data)
{
    if (check_stream(stream)) return cudaPeekAtLastError();
    function(data);
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags)
{
    int device;
    if (cudaGetDevice(&device)) return cudaPeekAtLastError();
    if (!event || flags & ~7u) return host_cuda_result(cudaErrorInvalidValue);
    host_cuda_scope scope;
    *event = (cudaEvent_t)calloc(1, sizeof **event);
    if (!*event) return host_cuda_result(cudaErrorMemoryAllocation);
    **event = {first_event, device, true, !(flags & cudaEventDisableTiming), false, 0};
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
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    event->time_s = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    event->recorded = true;
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    return check_event(event);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    return check_event(event);
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end)
{
    if (check_event(start) || check_event(end)) return cudaPeekAtLastError();
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
