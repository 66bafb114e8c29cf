/*
 * Included by every kernel file of the cuda back end: launches, element types, reductions over a block.
 *
 * Determinism: the shapes alone decide the order of reductions; there are no atomic sums of floats. Kernels compute in
 * fp32 for every element type. The sources run on compute capability 6.0 and newer.
 */
#ifndef HAPT_CUDA_KERNEL_CUH
#define HAPT_CUDA_KERNEL_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "plugin.h"

struct cuda_kernel {
    enum hapt_dtype dtype;
    struct hapt_kernel kernel; /* op NULL: end of the table */
};

/* Table rows of an operator whose run function is a template over the element type. */
#define CUDA_KERNEL_F32(op, workspace, run) \
    {                                       \
        HAPT_F32,                           \
        {                                   \
            op, workspace, run<float>       \
        }                                   \
    }
#define CUDA_ROWS(op, workspace, f32, bf16, f16)                          \
    {HAPT_F32, {op, workspace, f32}}, {HAPT_BF16, {op, workspace, bf16}}, \
    {                                                                     \
        HAPT_F16,                                                         \
        {                                                                 \
            op, workspace, f16                                            \
        }                                                                 \
    }
#define CUDA_KERNELS(op, workspace, run) CUDA_ROWS(op, workspace, run<float>, run<__nv_bfloat16>, run<__half>)
/* The same with a second template argument. */
#define CUDA_KERNELS_WITH(op, workspace, run, option) \
    CUDA_ROWS(op, workspace, (run<float, option>), (run<__nv_bfloat16, option>), (run<__half, option>))
#define CUDA_KERNELS_END     \
    {                        \
        HAPT_F32,            \
        {                    \
            NULL, NULL, NULL \
        }                    \
    }

/* Errors in integer operands that kernels detect while they run. The wait for their queue returns HAPT_ERR_INPUT. The
 * first error counts. */
enum cuda_fault_kind {
    CUDA_FAULT_NONE,
    CUDA_FAULT_INDEX,    /* embedding: a, of b */
    CUDA_FAULT_POSITION, /* embedding: position a, of b */
    CUDA_FAULT_TARGET,   /* cross_entropy: class a, of b */
    CUDA_FAULT_ROOM      /* moe_dispatch: a tokens of a row, to expert b, which has room for c */
};

struct cuda_fault {
    int kind, a, b, c;
};

struct hapt_queue {
    cudaStream_t stream;
    struct cuda_fault *fault; /* the device's, in host memory; kernels write it with fault_set */
    bool capturing; /* work is being captured: waiting is not allowed, and a failure says nothing of the call itself */
};

extern const struct cuda_host *cuda_host; /* set before anything runs */

/* Makes the process's device current in this thread. */
void cuda_use_device(void);
/* HAPT_OK, or records CUDA's error: no memory, a lost device, a bug of ours. */
enum hapt_status cuda_check(cudaError_t error, const char *what);
/* Reads or writes `bytes` of device memory, and waits. For the few kernels that communicate among shards while they
 * run. */
enum hapt_status cuda_download(struct hapt_queue *queue, void *host, const void *device, size_t bytes);
enum hapt_status cuda_upload(struct hapt_queue *queue, void *device, const void *host, size_t bytes);

/* `shared`: bytes of dynamic shared memory (SHARED). An empty grid launches nothing. */
template <class... Parameters, class... Arguments>
static enum hapt_status launch(void (*kernel)(Parameters...), dim3 grid, int block, size_t shared,
                               struct hapt_queue *queue, Arguments... arguments)
{
    cudaLaunchConfig_t config = {};
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return HAPT_OK;
    if (shared > 48 << 10) {
        const cudaError_t error =
            cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
        if (error != cudaSuccess) return cuda_check(error, "shared memory of a kernel");
    }
    config.gridDim = grid;
    config.blockDim = dim3((unsigned)block);
    config.dynamicSmemBytes = shared;
    config.stream = queue->stream;
    return cuda_check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), "a kernel's launch");
}

static inline int64_t round_up(int64_t value, int64_t unit)
{
    return (value + unit - 1) / unit * unit;
}

/* Blocks of `per_block` that cover `count`, up to enough to fill any device many times: kernels stride by the grid
 * (GRID_STRIDE). */
static inline dim3 blocks_for(int64_t count, int64_t per_block)
{
    const int64_t blocks = (count + per_block - 1) / per_block, most = 1 << 16;
    return dim3((unsigned)(blocks < most ? blocks : most));
}

/* for (GRID_STRIDE(i, count)): the elements of this thread, with 64-bit indices. */
#define GRID_STRIDE(i, count)                                   \
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; \
    i < (count);                                                \
    i += (int64_t)gridDim.x * blockDim.x

#ifdef HAPT_HOST_CUDA /* tests/gpu/host */
#define SHARED(type, name) type *name = (type *)host_cuda_shared()
#define UNROLL
#else
#define UNROLL _Pragma("unroll") /* before a loop */
/* The block's dynamic shared memory, 16-byte aligned; once per kernel. */
#define SHARED(type, name)                                              \
    extern __shared__ __align__(16) unsigned char cuda_shared_memory[]; \
    type *name = reinterpret_cast<type *>(cuda_shared_memory)
#endif

/* ---- Elements ---- */

__device__ __forceinline__ float to_float(float x)
{
    return x;
}
__device__ __forceinline__ float to_float(__nv_bfloat16 x)
{
    return __bfloat162float(x);
}
__device__ __forceinline__ float to_float(__half x)
{
    return __half2float(x);
}

template <class Element> __device__ __forceinline__ Element from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x)
{
    return x;
}
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x)
{
    return __float2bfloat16(x);
}
template <> __device__ __forceinline__ __half from_float<__half>(float x)
{
    return __float2half(x);
}

/* 16 bytes of elements, which a thread loads or stores at once if addresses are multiples of 16. */
template <class Element> struct alignas(16) pack {
    enum { COUNT = 16 / sizeof(Element) };
    Element element[COUNT];
};

static inline bool aligned_16(const void *address)
{
    return ((uintptr_t)address & 15) == 0;
}

__device__ __forceinline__ void fault_set(struct cuda_fault *fault, enum cuda_fault_kind kind, int64_t a, int64_t b,
                                          int64_t c)
{
    if (atomicCAS(&fault->kind, (int)CUDA_FAULT_NONE, -1) != (int)CUDA_FAULT_NONE) return;
    fault->a = (int)a;
    fault->b = (int)b;
    fault->c = (int)c;
    __threadfence_system();
    *(volatile int *)&fault->kind = (int)kind;
}

/* ---- Reductions: all threads of the block must call them, and all get the result. Blocks have whole warps, at most
 * 1024 threads. ---- */

__device__ __forceinline__ float warp_sum(float value)
{
    for (int apart = 16; apart > 0; apart >>= 1) value += __shfl_xor_sync(0xffffffffu, value, apart);
    return value;
}

__device__ __forceinline__ float warp_largest(float value)
{
    for (int apart = 16; apart > 0; apart >>= 1) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, apart));
    return value;
}

/* `shared`: 32 floats of shared memory for this reduction alone; free again after the call. */
__device__ __forceinline__ float block_sum(float value, float *shared)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = (blockDim.x + 31) >> 5;
    value = warp_sum(value);
    if (lane == 0) shared[warp] = value;
    __syncthreads();
    float total = 0;
    for (int w = 0; w < warps; w++) total += shared[w];
    __syncthreads();
    return total;
}

__device__ __forceinline__ float block_largest(float value, float *shared)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = (blockDim.x + 31) >> 5;
    value = warp_largest(value);
    if (lane == 0) shared[warp] = value;
    __syncthreads();
    float largest = shared[0];
    for (int w = 1; w < warps; w++) largest = fmaxf(largest, shared[w]);
    __syncthreads();
    return largest;
}

#endif
