/*
 * Host CUDA: the view that a thread of a kernel has of its block: indices, shared memory, barriers, warps.
 *
 * Threads run in the order of their numbers (or backwards, see cuda_runtime.h). Each runs until it waits for others, so
 * a kernel without barriers never switches. Lanes outside a mask, or beyond the end of a block, give garbage to their
 * readers.
 */
#ifndef HOST_CUDA_DEVICE_THREADS_H
#define HOST_CUDA_DEVICE_THREADS_H

#include "cuda_runtime.h"

#define HOST_CUDA_LANE_GARBAGE 0x7fc17fc17fc17fc1ull
#define HOST_CUDA_HIDDEN __attribute__((visibility("hidden")))
extern HOST_CUDA_HIDDEN uint3 threadIdx, blockIdx;
extern HOST_CUDA_HIDDEN dim3 blockDim, gridDim;
static constexpr int warpSize = 32;

/* The running block's dynamic shared memory. It holds garbage at first and has a guard page behind its end (rounded up
 * to 32 bytes). */
void *host_cuda_shared(void);

enum host_cuda_barrier { HOST_CUDA_SYNC, HOST_CUDA_SYNC_COUNT, HOST_CUDA_SYNC_AND, HOST_CUDA_SYNC_OR };
enum host_cuda_meeting { HOST_CUDA_MEET_SYNC, HOST_CUDA_MEET_SHUFFLE, HOST_CUDA_MEET_VOTE, HOST_CUDA_MEET_MATRIX };

/* Waits for the whole block. Returns how many of its threads had a non-zero predicate. */
unsigned int host_cuda_block_barrier(enum host_cuda_barrier kind, int predicate);
/*
 * Waits for the lanes of `mask`, each with a value, and returns all values [32]. They are valid until the lane's next
 * synchronisation. The last lane to arrive calls `work`, if given, once, before any lane goes on.
 */
const uint64_t *host_cuda_warp_meet(unsigned int mask, enum host_cuda_meeting kind, uint64_t value,
                                    void (*work)(const uint64_t *values) = NULL);
unsigned int host_cuda_lane(void);

/* A thread that waits for the clock to advance makes a few calls. */
static inline long long clock64(void)
{
    static long long now;
    return now += 100000;
}

static inline void __syncthreads(void)
{
    host_cuda_block_barrier(HOST_CUDA_SYNC, 0);
}
static inline int __syncthreads_count(int predicate)
{
    return (int)host_cuda_block_barrier(HOST_CUDA_SYNC_COUNT, predicate);
}
static inline int __syncthreads_or(int predicate)
{
    return host_cuda_block_barrier(HOST_CUDA_SYNC_OR, predicate) != 0;
}
static inline int __syncthreads_and(int predicate)
{
    return host_cuda_block_barrier(HOST_CUDA_SYNC_AND, predicate) == blockDim.x * blockDim.y * blockDim.z;
}
static inline void __syncwarp(unsigned int mask = 0xffffffffu)
{
    host_cuda_warp_meet(mask, HOST_CUDA_MEET_SYNC, 0);
}

static inline unsigned int __ballot_sync(unsigned int mask, int predicate)
{
    const uint64_t *votes = host_cuda_warp_meet(mask, HOST_CUDA_MEET_VOTE, predicate != 0);
    unsigned int ballot = 0;
    for (int lane = 0; lane < warpSize; lane++)
        if (mask >> lane & 1 && votes[lane] == 1) ballot |= 1u << lane;
    return ballot;
}
static inline int __any_sync(unsigned int mask, int predicate)
{
    return __ballot_sync(mask, predicate) != 0;
}
/* Lanes beyond the block's end do not vote. */
static inline int __all_sync(unsigned int mask, int predicate)
{
    return __ballot_sync(mask, !predicate) == 0;
}

/* The lane's own value if its source is outside its segment. */
template <typename T> static inline T host_cuda_shuffle(unsigned int mask, T value, int source)
{
    static_assert(std::is_trivially_copyable<T>::value && sizeof(T) <= 8, "values of up to 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    const uint64_t *values = host_cuda_warp_meet(mask, HOST_CUDA_MEET_SHUFFLE, bits);
    if (source < 0) return value;
    bits = mask >> source & 1 ? values[source] : HOST_CUDA_LANE_GARBAGE;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#define HOST_CUDA_SHUFFLES(T)                                                                              \
    static inline T __shfl_sync(unsigned int mask, T value, int source, int width = warpSize)              \
    {                                                                                                      \
        const int lane = (int)host_cuda_lane();                                                            \
        return host_cuda_shuffle(mask, value, (lane & ~(width - 1)) | (source & (width - 1)));             \
    }                                                                                                      \
    static inline T __shfl_up_sync(unsigned int mask, T value, unsigned int delta, int width = warpSize)   \
    {                                                                                                      \
        const int lane = (int)host_cuda_lane(), source = lane - (int)delta;                                \
        return host_cuda_shuffle(mask, value, source < (lane & ~(width - 1)) ? -1 : source);               \
    }                                                                                                      \
    static inline T __shfl_down_sync(unsigned int mask, T value, unsigned int delta, int width = warpSize) \
    {                                                                                                      \
        const int lane = (int)host_cuda_lane(), source = lane + (int)delta;                                \
        return host_cuda_shuffle(mask, value, source > (lane | (width - 1)) ? -1 : source);                \
    }                                                                                                      \
    static inline T __shfl_xor_sync(unsigned int mask, T value, int lanes, int width = warpSize)           \
    {                                                                                                      \
        const int lane = (int)host_cuda_lane(), source = (lane ^ lanes) & (warpSize - 1);                  \
        return host_cuda_shuffle(mask, value, source > (lane | (width - 1)) ? -1 : source);                \
    }
HOST_CUDA_SHUFFLES(int)
HOST_CUDA_SHUFFLES(unsigned int)
HOST_CUDA_SHUFFLES(long)
HOST_CUDA_SHUFFLES(unsigned long)
HOST_CUDA_SHUFFLES(long long)
HOST_CUDA_SHUFFLES(unsigned long long)
HOST_CUDA_SHUFFLES(float)
HOST_CUDA_SHUFFLES(double)

#endif
