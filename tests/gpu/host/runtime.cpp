/*
 * Host CUDA: errors, devices and launches.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <set>
#include <vector>

#include "host_cuda.h"

#define MOST_DEVICES 64

/* The limit that cudaFuncSetAttribute set for a kernel. */
struct kernel_limit {
    struct kernel_limit *next;
    const void *kernel;
    size_t shared_bytes;
};

static thread_local cudaError_t last_error;
static thread_local int current_device;
static struct {
    struct kernel_limit *limit;
    char *shared_end; /* of the mapping that holds the running block's dynamic shared memory; a guard page follows */
    char *shared;
} runtime;

static const struct {
    cudaError_t error;
    const char *name, *text;
} errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInvalidDevicePointer, "cudaErrorInvalidDevicePointer", "invalid device pointer"},
    {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorIllegalState, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources", "too many resources requested for launch"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"},
    {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

cudaError_t host_cuda_result(cudaError_t error)
{
    if (error) last_error = error;
    return error;
}

const char *cudaGetErrorName(cudaError_t error)
{
    for (const auto &row : errors)
        if (row.error == error) return row.name;
    return "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t error)
{
    for (const auto &row : errors)
        if (row.error == error) return row.text;
    return "unrecognized error code";
}

cudaError_t cudaGetLastError(void)
{
    const cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void)
{
    return last_error;
}

/* ---- devices ---- */

static int device_count(void)
{
    const char *text = getenv("HAPT_HOST_GPUS");
    const int count = text ? atoi(text) : 1;
    return count < 0 ? 0 : count > MOST_DEVICES ? MOST_DEVICES : count;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = device_count();
    return host_cuda_result(*count ? cudaSuccess : cudaErrorNoDevice);
}

static cudaError_t check_device(int device)
{
    if (!device_count()) return host_cuda_result(cudaErrorNoDevice);
    return host_cuda_result(device < 0 || device >= device_count() ? cudaErrorInvalidDevice : cudaSuccess);
}

cudaError_t cudaSetDevice(int device)
{
    if (check_device(device)) return last_error;
    current_device = device;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    if (check_device(current_device)) return last_error;
    *device = current_device;
    return cudaSuccess;
}

cudaError_t cudaSetDeviceFlags(unsigned int)
{
    return host_cuda_result(cudaSuccess);
}

/* HAPT_HOST_NAMES: names of the devices in order, "one,two". */
static void name_device(int device, char *name, size_t size)
{
    const char *names = getenv("HAPT_HOST_NAMES"), *at = names;
    for (int i = 0; at && i < device; i++) {
        at = strchr(at, ',');
        at = at ? at + 1 : names;
    }
    snprintf(name, size, "%.*s", at ? (int)strcspn(at, ",") : 9, at ? at : "Host CUDA");
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device)
{
    if (check_device(device)) return last_error;
    memset(prop, 0, sizeof *prop);
    name_device(device, prop->name, sizeof prop->name);
    snprintf(prop->uuid.bytes, sizeof prop->uuid.bytes, "host-%d", device);
    prop->totalGlobalMem = host_cuda_device_bytes();
    prop->sharedMemPerBlock = HOST_CUDA_SHARED_DEFAULT;
    prop->sharedMemPerBlockOptin = HOST_CUDA_SHARED_MOST;
    prop->sharedMemPerMultiprocessor = HOST_CUDA_SHARED_MOST + 1024;
    prop->regsPerBlock = prop->regsPerMultiprocessor = 65536;
    prop->warpSize = 32;
    prop->maxThreadsPerBlock = prop->maxThreadsDim[0] = prop->maxThreadsDim[1] = 1024;
    prop->maxThreadsDim[2] = 64;
    prop->maxGridSize[0] = INT_MAX;
    prop->maxGridSize[1] = prop->maxGridSize[2] = 65535;
    prop->totalConstMem = 65536;
    prop->major = 9;
    prop->multiProcessorCount = 4; /* few, so that grid-stride loops have more than one iteration */
    prop->canMapHostMemory = prop->concurrentKernels = prop->unifiedAddressing = 1;
    prop->pciBusID = device + 1;
    prop->asyncEngineCount = 2;
    prop->memoryBusWidth = 64;
    prop->l2CacheSize = 1 << 20;
    prop->maxThreadsPerMultiProcessor = 2048;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int len, int device)
{
    if (check_device(device)) return last_error;
    const int length = text ? snprintf(text, len > 0 ? (size_t)len : 0, "0000:%02X:00.0", device + 1) : 0;
    return host_cuda_result(length <= 0 || length >= len ? cudaErrorInvalidValue : cudaSuccess);
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    struct cudaDeviceProp prop;
    if (cudaGetDeviceProperties(&prop, device)) return last_error;
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
        *value = prop.maxThreadsPerBlock;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
        *value = (int)prop.sharedMemPerBlock;
        break;
    case cudaDevAttrWarpSize:
        *value = prop.warpSize;
        break;
    case cudaDevAttrClockRate:
        *value = 1000000;
        break;
    case cudaDevAttrMultiProcessorCount:
        *value = prop.multiProcessorCount;
        break;
    case cudaDevAttrIntegrated:
        *value = prop.integrated;
        break;
    case cudaDevAttrPciBusId:
        *value = prop.pciBusID;
        break;
    case cudaDevAttrPciDeviceId:
        *value = prop.pciDeviceID;
        break;
    case cudaDevAttrPciDomainId:
        *value = prop.pciDomainID;
        break;
    case cudaDevAttrMemoryClockRate:
        *value = 1000000;
        break;
    case cudaDevAttrGlobalMemoryBusWidth:
        *value = prop.memoryBusWidth;
        break;
    case cudaDevAttrL2CacheSize:
        *value = prop.l2CacheSize;
        break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
        *value = prop.maxThreadsPerMultiProcessor;
        break;
    case cudaDevAttrComputeCapabilityMajor:
        *value = prop.major;
        break;
    case cudaDevAttrComputeCapabilityMinor:
        *value = prop.minor;
        break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        *value = (int)prop.sharedMemPerMultiprocessor;
        break;
    case cudaDevAttrManagedMemory:
        *value = prop.managedMemory;
        break;
    case cudaDevAttrPageableMemoryAccess:
        *value = prop.pageableMemoryAccess;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = (int)prop.sharedMemPerBlockOptin;
        break;
    default:
        return host_cuda_result(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
    if (check_device(device) || check_device(peer)) return last_error;
    *can = device != peer;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned int)
{
    return check_device(peer);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return check_device(current_device);
}

cudaError_t cudaDeviceSynchronize(void)
{
    return check_device(current_device) || host_cuda_not_captured() ? last_error : cudaSuccess;
}

cudaError_t cudaDeviceReset(void)
{
    return check_device(current_device);
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = device_count() ? CUDART_VERSION : 0;
    return cudaSuccess;
}

/* ---- launches ---- */

static struct kernel_limit *find_limit(const void *kernel)
{
    struct kernel_limit *limit = runtime.limit;
    while (limit && limit->kernel != kernel) limit = limit->next;
    return limit;
}

cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value)
{
    if (check_device(current_device)) return last_error;
    if (!kernel) return host_cuda_result(cudaErrorInvalidDeviceFunction);
    if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 || value > HOST_CUDA_SHARED_MOST)
        return host_cuda_result(cudaErrorInvalidValue);
    host_cuda_scope scope;
    struct kernel_limit *limit = find_limit(kernel);
    if (!limit) {
        limit = (struct kernel_limit *)calloc(1, sizeof *limit);
        if (!limit) return host_cuda_result(cudaErrorMemoryAllocation);
        limit->next = runtime.limit;
        limit->kernel = kernel;
        runtime.limit = limit;
    }
    limit->shared_bytes = (size_t)value;
    return cudaSuccess;
}

static size_t shared_limit(const void *kernel)
{
    const struct kernel_limit *limit = find_limit(kernel);
    return limit ? limit->shared_bytes : HOST_CUDA_SHARED_DEFAULT;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *kernel)
{
    if (check_device(current_device)) return last_error;
    host_cuda_scope scope;
    *attributes = {0, 0, 0, 1024, 32, (int)shared_limit(kernel)};
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int block_size,
                                                          size_t shared_bytes)
{
    if (check_device(current_device)) return last_error;
    if (!blocks || !kernel || block_size <= 0) return host_cuda_result(cudaErrorInvalidValue);
    host_cuda_scope scope;
    /* A block uses 1 KiB of shared memory for itself. */
    const size_t by_shared = (HOST_CUDA_SHARED_MOST + 1024) / (shared_bytes + 1024),
                 by_threads = 64 / (((size_t)block_size + 31) / 32);
    const size_t fit = by_shared < by_threads ? by_shared : by_threads;
    *blocks = block_size > 1024 || shared_bytes > shared_limit(kernel) ? 0 : (int)(fit < 32 ? fit : 32);
    return cudaSuccess;
}

void *host_cuda_shared(void)
{
    return runtime.shared;
}

static void init_shared(void)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), bytes = (HOST_CUDA_SHARED_MOST + page - 1) / page * page;
    char *whole = (char *)mmap(NULL, bytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (whole == MAP_FAILED || mprotect(whole + bytes, page, PROT_NONE)) host_cuda_die("no memory for shared memory");
    runtime.shared_end = whole + bytes;
}

static cudaError_t check_launch(const cudaLaunchConfig_t *config, const void *kernel)
{
    const dim3 grid = config->gridDim, threads = config->blockDim;
    if (!grid.x || !grid.y || !grid.z || !threads.x || !threads.y || !threads.z) return cudaErrorInvalidConfiguration;
    if (grid.x > INT_MAX || grid.y > 65535 || grid.z > 65535) return cudaErrorInvalidConfiguration;
    if (threads.x > 1024 || threads.y > 1024 || threads.z > 64) return cudaErrorInvalidConfiguration;
    if (threads.x * threads.y * threads.z > 1024) return cudaErrorInvalidConfiguration;
    if (!host_cuda_stream_takes(config->stream)) return cudaErrorInvalidResourceHandle;
    return config->dynamicSmemBytes > shared_limit(kernel) ? cudaErrorInvalidValue : cudaSuccess;
}

static std::atomic<int> groups;

void host_cuda_count_groups(int more)
{
    groups += more;
}

void host_cuda_first_use(const void *kernel, const size_t sizes[3])
{
    static std::set<std::array<size_t, 4>> used;
    const char *wish = getenv("HAPT_HOST_LAZY");
    if (!wish || strcmp(wish, "1")) return;
    host_cuda_scope scope;
    const bool first = used.insert({(size_t)kernel, sizes ? sizes[0] : 0, sizes ? sizes[1] : 0, sizes ? sizes[2] : 0}).second;
    Dl_info about;
    if (!first || groups == 0) return;
    if (sizes) host_cuda_die("a product of %zu x %zu x %zu for the first time while there is a group of devices", sizes[0], sizes[1], sizes[2]);
    host_cuda_die("%s for the first time while there is a group of devices", dladdr(kernel, &about) && about.dli_sname ? about.dli_sname : "a kernel");
}

/* Runs a launch that was checked. */
static cudaError_t run_grid(const cudaLaunchConfig_t &config, const void *kernel, void (*run)(void *), void *arguments)
{
    host_cuda_scope scope;
    if (!runtime.shared_end) init_shared();
    const size_t shared_bytes = (config.dynamicSmemBytes + 31) / 32 * 32;
    runtime.shared = runtime.shared_end - shared_bytes;
    gridDim = config.gridDim;
    blockDim = config.blockDim;
    const char *order = getenv("HAPT_HOST_ORDER");
    const bool backwards = order && !strcmp(order, "backwards");
    const uint64_t x = gridDim.x, y = gridDim.y, blocks = x * y * gridDim.z;
    for (uint64_t number = 0; number < blocks; number++) {
        const uint64_t i = backwards ? blocks - 1 - number : number;
        blockIdx = {(unsigned int)(i % x), (unsigned int)(i / x % y), (unsigned int)(i / x / y)};
        host_cuda_fill_garbage(runtime.shared, shared_bytes);
        host_cuda_run_block(kernel, run, arguments, backwards);
    }
    return cudaSuccess;
}

cudaError_t host_cuda_launch(const cudaLaunchConfig_t *config, const void *kernel, void (*run)(void *), void *arguments,
                             size_t bytes)
{
    if (check_device(current_device)) return last_error;
    if (!kernel) return host_cuda_result(cudaErrorInvalidDeviceFunction);
    host_cuda_scope scope;
    const cudaError_t error = check_launch(config, kernel);
    if (error) return host_cuda_result(error);
    host_cuda_first_use(kernel, NULL);
    const cudaLaunchConfig_t how = *config;
    if (!host_cuda_captures(how.stream)) return run_grid(how, kernel, run, arguments);
    const std::vector<char> copy((const char *)arguments, (const char *)arguments + bytes);
    return host_cuda_keep(how.stream, [how, kernel, run, copy] { return run_grid(how, kernel, run, (void *)copy.data()); });
}
