/* Self-test: captures and their replays, and calls that are forbidden during a capture. */
#include <pthread.h>
#include <string.h>

#include "cublasLt.h"
#include "selftest.h"

static __global__ void add_number(float *to, float number)
{
    to[threadIdx.x] += number;
}

static cudaError_t add_on(cudaStream_t stream, float *to, float number)
{
    cudaLaunchConfig_t config = {};
    config.gridDim = 1;
    config.blockDim = 4;
    config.stream = stream;
    return cudaLaunchKernelEx(&config, add_number, to, number);
}

/* to += 2 x from, 4 numbers, by the library. */
static cublasStatus_t multiply_on(cublasLtHandle_t handle, cudaStream_t stream, const float *from, const float *two, float *to)
{
    cublasLtMatmulDesc_t matmul;
    cublasLtMatrixLayout_t one, four;
    const float alpha = 1, beta = 1;
    CHECK(cublasLtMatmulDescCreate(&matmul, CUBLAS_COMPUTE_32F, CUDA_R_32F) == CUBLAS_STATUS_SUCCESS);
    CHECK(cublasLtMatrixLayoutCreate(&four, CUDA_R_32F, 4, 1, 4) == CUBLAS_STATUS_SUCCESS);
    CHECK(cublasLtMatrixLayoutCreate(&one, CUDA_R_32F, 1, 1, 1) == CUBLAS_STATUS_SUCCESS);
    const cublasStatus_t status =
        cublasLtMatmul(handle, matmul, &alpha, from, four, two, one, &beta, to, four, to, four, NULL, NULL, 0, stream);
    cublasLtMatmulDescDestroy(matmul);
    cublasLtMatrixLayoutDestroy(four);
    cublasLtMatrixLayoutDestroy(one);
    return status;
}

/* a = 1 + number, b = a + 2 a = 3 (1 + number). Every replay gives the same. */
static void test_replays(cudaStream_t stream)
{
    const float start[4] = {9, 9, 9, 9}, two[1] = {2};
    float back[4], *a = to_device(start, 4), *b = to_device(start, 4), *factor = to_device(two, 1), *pinned = NULL;
    cublasLtHandle_t handle;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    enum cudaStreamCaptureStatus status;
    CHECK(cublasLtCreate(&handle) == CUBLAS_STATUS_SUCCESS);
    FINE(cudaMallocHost(&pinned, sizeof back));
    for (int i = 0; i < 4; i++) pinned[i] = 1;
    FINE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    FINE(cudaStreamIsCapturing(stream, &status));
    CHECK(status == cudaStreamCaptureStatusActive);
    float number = 0.5f;
    FINE(cudaMemsetAsync(b, 0xff, sizeof back, stream));
    FINE(cudaMemcpyAsync(a, pinned, sizeof back, cudaMemcpyDefault, stream));
    FINE(add_on(stream, a, number));
    FINE(cudaMemcpyAsync(b, a, sizeof back, cudaMemcpyDeviceToDevice, stream));
    CHECK(multiply_on(handle, stream, a, factor, b) == CUBLAS_STATUS_SUCCESS);
    number = 7; /* arguments are those of the capture */
    FINE(cudaStreamEndCapture(stream, &graph));
    FINE(cudaStreamIsCapturing(stream, &status));
    CHECK(status == cudaStreamCaptureStatusNone && graph);
    to_host(back, a, 4);
    CHECK(back[0] == 9 && back[3] == 9); /* nothing has run */
    FINE(cudaGraphInstantiateWithFlags(&exec, graph, 0));
    FINE(cudaGraphDestroy(graph));
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 4; i++) pinned[i] = (float)(1 + round); /* a replay reads the content of the addresses at its time */
        FINE(cudaGraphLaunch(exec, stream));
        FINE(cudaStreamSynchronize(stream));
        to_host(back, b, 4);
        for (int i = 0; i < 4; i++) CHECK(back[i] == 3 * (1.5f + (float)round));
    }
    FINE(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphLaunch(NULL, stream) == cudaErrorInvalidValue);
    FINE(cudaFreeHost(pinned));
    FINE(cudaFree(a));
    FINE(cudaFree(b));
    FINE(cudaFree(factor));
    cublasLtDestroy(handle);
}

enum misuse { SYNCHRONIZE, QUERY, DEVICE, RESERVE, RELEASE, PIN, UNPIN, COPY, SET, PAGEABLE, EVENT, ELSEWHERE, MISUSES };

static cudaError_t misuse(int which, cudaStream_t stream, cudaStream_t other, float *device, float *pinned)
{
    static cudaEvent_t event;
    void *made = NULL;
    float host[4] = {};
    if (!event) FINE(cudaEventCreate(&event));
    switch (which) {
    case SYNCHRONIZE: return cudaStreamSynchronize(stream);
    case QUERY: return cudaStreamQuery(stream);
    case DEVICE: return cudaDeviceSynchronize();
    case RESERVE: return cudaMalloc(&made, 4);
    case RELEASE: return cudaFree(device);
    case PIN: return cudaMallocHost(&made, 4);
    case UNPIN: return cudaFreeHost(pinned);
    case COPY: return cudaMemcpy(host, device, sizeof host, cudaMemcpyDeviceToHost);
    case SET: return cudaMemset(device, 0, 4);
    case PAGEABLE: return cudaMemcpyAsync(host, device, sizeof host, cudaMemcpyDeviceToHost, stream);
    case EVENT: return cudaEventRecord(event, stream) ? cudaErrorUnknown : cudaEventSynchronize(event);
    case ELSEWHERE: return cudaEventRecord(event, stream) ? cudaErrorUnknown : cudaStreamWaitEvent(other, event, 0);
    }
    return cudaSuccess;
}

/* The call is refused, the capture is invalid, and the stream works as before. */
static void test_misuse(cudaStream_t stream)
{
    const float start[4] = {1, 1, 1, 1};
    float back[4], *device = to_device(start, 4), *pinned = NULL;
    cudaStream_t other;
    FINE(cudaMallocHost(&pinned, sizeof back));
    FINE(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    for (int which = 0; which < MISUSES; which++) {
        cudaGraph_t graph = (cudaGraph_t)&which;
        enum cudaStreamCaptureStatus status;
        FINE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        FINE(add_on(stream, device, 1));
        const cudaError_t error = misuse(which, stream, other, device, pinned);
        CHECK(error == (which == EVENT       ? cudaErrorCapturedEvent
                        : which == ELSEWHERE ? cudaErrorStreamCaptureIsolation
                                             : cudaErrorStreamCaptureUnsupported));
        FINE(cudaStreamIsCapturing(stream, &status));
        CHECK(status == cudaStreamCaptureStatusInvalidated);
        CHECK(add_on(stream, device, 1) == cudaErrorStreamCaptureInvalidated);
        CHECK(cudaStreamEndCapture(stream, &graph) == cudaErrorStreamCaptureInvalidated && !graph);
        cudaGetLastError();
        FINE(cudaStreamSynchronize(stream));
    }
    FINE(add_on(stream, device, 1));
    to_host(back, device, 4);
    CHECK(back[0] == 2); /* that alone */
    CHECK(cudaStreamBeginCapture(0, cudaStreamCaptureModeThreadLocal) == cudaErrorStreamCaptureUnsupported);
    cudaGraph_t graph;
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaErrorIllegalState);
    cudaGetLastError();
    FINE(cudaStreamDestroy(other));
    FINE(cudaFreeHost(pinned));
    FINE(cudaFree(device));
}

struct elsewhere {
    cudaStream_t captured;
    int failed;
};

/* Another thread may copy, reserve and wait, but cannot end the capture. */
static void *work_elsewhere(void *data)
{
    struct elsewhere *elsewhere = (struct elsewhere *)data;
    cudaStream_t stream;
    cudaGraph_t graph;
    float *device = NULL, host[4] = {1, 2, 3, 4}, back[4] = {};
    elsewhere->failed = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) || cudaMalloc(&device, sizeof host) ||
                        cudaMemcpyAsync(device, host, sizeof host, cudaMemcpyDefault, stream) ||
                        cudaMemcpyAsync(back, device, sizeof back, cudaMemcpyDefault, stream) || cudaStreamSynchronize(stream) ||
                        memcmp(host, back, sizeof host) || cudaFree(device) || cudaStreamDestroy(stream) ||
                        cudaStreamEndCapture(elsewhere->captured, &graph) != cudaErrorStreamCaptureWrongThread;
    return NULL;
}

static void test_other_threads(cudaStream_t stream)
{
    struct elsewhere elsewhere = {stream, 1};
    pthread_t thread;
    cudaGraph_t graph = NULL;
    FINE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaErrorIllegalState);
    FINE(pthread_create(&thread, NULL, work_elsewhere, &elsewhere));
    pthread_join(thread, NULL);
    CHECK(!elsewhere.failed);
    FINE(cudaStreamEndCapture(stream, &graph));
    FINE(cudaGraphDestroy(graph));
    cudaGetLastError();
}

void test_graphs(void)
{
    cudaStream_t stream;
    FINE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    test_replays(stream);
    test_misuse(stream);
    test_other_threads(stream);
    FINE(cudaStreamDestroy(stream));
}
