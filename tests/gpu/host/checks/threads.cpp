/* Self-test: barriers, votes and shuffles of fibers, compared with plain loops; bugs that must abort; conversions of
 * short floats. */
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "selftest.h"

#define MOST 1024

/* A tree sum in shared memory. It is wrong unless every barrier works. */
static __global__ void reduce_block(const float *in, float *out, int count)
{
    __shared__ float part[MOST];
    const int thread = (int)threadIdx.x, threads = (int)blockDim.x;
    part[thread] = 0;
    for (int i = thread; i < count; i += threads) part[thread] += in[(int)blockIdx.x * count + i];
    __syncthreads();
    for (int half = threads / 2; half; half /= 2) {
        if (thread < half) part[thread] += part[thread + half];
        __syncthreads();
    }
    if (thread == 0) out[blockIdx.x] = part[0];
}

static void test_reduction(void)
{
    enum { BLOCKS = 5, COUNT = 3000 };
    static float in[BLOCKS * COUNT];
    float out[BLOCKS];
    for (float &x : in) x = (float)(random_bits() % 100); /* whole numbers: sums are exact in any order */
    float *device_in = to_device(in, BLOCKS * COUNT), *device_out = to_device(in, BLOCKS);
    for (int threads = 1; threads <= MOST; threads *= 2) {
        FINE(run_kernel(reduce_block, BLOCKS, threads, 0, device_in, device_out, (int)COUNT));
        to_host(out, device_out, BLOCKS);
        for (int block = 0; block < BLOCKS; block++) {
            float sum = 0;
            for (int i = 0; i < COUNT; i++) sum += in[block * COUNT + i];
            CHECK(out[block] == sum);
        }
    }
    FINE(cudaFree(device_in));
    FINE(cudaFree(device_out));
}

/* Host threads that launch at the same time wait for each other. Only the thread that holds the device can touch its
 * memory. */
struct host_thread {
    pthread_t thread;
    float sum;
};
static void *launch_often(void *data)
{
    struct host_thread *mine = (struct host_thread *)data;
    float in[400], out;
    for (int i = 0; i < 400; i++) in[i] = mine->sum;
    float *device_in, *device_out;
    bool fine = !cudaMalloc(&device_in, sizeof in) && !cudaMalloc(&device_out, sizeof out);
    mine->sum = 0;
    for (int round = 0; fine && round < 50; round++) {
        fine = !cudaMemcpy(device_in, in, sizeof in, cudaMemcpyHostToDevice) &&
               !run_kernel(reduce_block, 1, 128, 0, device_in, device_out, 400) &&
               !cudaMemcpy(&out, device_out, sizeof out, cudaMemcpyDeviceToHost);
        mine->sum += out;
    }
    return fine && !cudaFree(device_in) && !cudaFree(device_out) ? data : NULL;
}

static void test_host_threads(void)
{
    struct host_thread threads[4];
    for (int i = 0; i < 4; i++) {
        threads[i].sum = (float)(i + 1);
        CHECK(pthread_create(&threads[i].thread, NULL, launch_often, &threads[i]) == 0);
    }
    for (int i = 0; i < 4; i++) {
        void *fine = NULL;
        CHECK(pthread_join(threads[i].thread, &fine) == 0 && fine);
        CHECK(threads[i].sum == (float)(50 * 400 * (i + 1)));
    }
}

/* out[kind][thread] */
template <typename T>
static __global__ void shuffle_kernel(const T *in, T *out, unsigned int mask, int argument, int width)
{
    const int threads = (int)(blockDim.x * blockDim.y), i = (int)(threadIdx.y * blockDim.x + threadIdx.x);
    if (!(mask >> i % 32 & 1)) return;
    out[0 * threads + i] = __shfl_sync(mask, in[i], argument, width);
    out[1 * threads + i] = __shfl_up_sync(mask, in[i], (unsigned int)argument, width);
    out[2 * threads + i] = __shfl_down_sync(mask, in[i], (unsigned int)argument, width);
    out[3 * threads + i] = __shfl_xor_sync(mask, in[i], argument, width);
}

template <typename T> static void test_shuffle(int threads_x, int threads_y, unsigned int mask, int argument, int width)
{
    const int threads = threads_x * threads_y;
    T in[256], out[4 * 256], expected[4 * 256];
    for (int i = 0; i < threads; i++) in[i] = (T)random_bits();
    for (T &x : out) x = 0;
    memcpy(expected, out, sizeof out);
    for (int i = 0; i < threads; i++) {
        const int first = i / width * width, end = first + width, lane = i % 32, wave = i - lane;
        int source[4] = {first + argument % width, i - argument, i + argument, wave + (lane ^ argument)};
        if (source[1] < first) source[1] = i;
        if (source[2] >= end) source[2] = i;
        if (source[3] >= end) source[3] = i;
        for (int kind = 0; kind < 4; kind++)
            if (mask >> lane & 1) expected[kind * threads + i] = in[source[kind]];
    }
    T *device_in = to_device(in, 256), *device_out = to_device(out, 4 * 256);
    FINE(run_kernel(shuffle_kernel<T>, 1, dim3((unsigned int)threads_x, (unsigned int)threads_y), 0, device_in,
                    device_out, mask, argument, width));
    to_host(out, device_out, 4 * 256);
    for (int kind = 0; kind < 4; kind++)
        for (int i = 0; i < threads; i++) {
            const int lane = i % 32, first = lane / width * width;
            /* A source lane outside the mask gives garbage, which is not compared. */
            const int source[4] = {first + argument % width, lane - argument, lane + argument, lane ^ argument};
            if (source[kind] >= 0 && source[kind] < 32 && !(mask >> source[kind] & 1)) continue;
            CHECK(!memcmp(&out[kind * threads + i], &expected[kind * threads + i], sizeof(T)));
        }
    FINE(cudaFree(device_in));
    FINE(cudaFree(device_out));
}

/* Per thread: ballot, any, all, count, or, and. */
static __global__ void vote_kernel(const int *in, int *out)
{
    const int i = (int)threadIdx.x;
    int *mine = out + 6 * i;
    mine[0] = (int)__ballot_sync(0xffffffffu, in[i]);
    mine[1] = __any_sync(0xffffffffu, in[i]);
    mine[2] = __all_sync(0xffffffffu, in[i]);
    mine[3] = __syncthreads_count(in[i]);
    mine[4] = __syncthreads_or(in[i]);
    mine[5] = __syncthreads_and(in[i]);
}

static void test_votes(void)
{
    for (int round = 0; round < 12; round++) {
        const int threads = round % 2 ? 96 : 70;
        int in[96], out[6 * 96];
        for (int i = 0; i < 96; i++) in[i] = round < 4 ? 0 : round < 8 ? 3 : (int)(random_bits() % 8 == 0);
        int *device_in = to_device(in, 96), *device_out = to_device(out, 6 * 96);
        FINE(run_kernel(vote_kernel, 1, (unsigned int)threads, 0, device_in, device_out));
        to_host(out, device_out, 6 * 96);
        int count = 0;
        for (int i = 0; i < threads; i++) count += in[i] != 0;
        for (int i = 0; i < threads; i++) {
            const int first = i / 32 * 32, end = first + 32 < threads ? first + 32 : threads;
            unsigned int ballot = 0;
            for (int lane = first; lane < end; lane++) ballot |= (unsigned int)(in[lane] != 0) << (lane - first);
            CHECK((unsigned int)out[6 * i] == ballot && out[6 * i + 1] == (ballot != 0));
            CHECK(out[6 * i + 2] == (ballot == (end - first == 32 ? 0xffffffffu : (1u << (end - first)) - 1)));
            CHECK(out[6 * i + 3] == count && out[6 * i + 4] == (count != 0) && out[6 * i + 5] == (count == threads));
        }
        FINE(cudaFree(device_in));
        FINE(cudaFree(device_out));
    }
}

static __global__ void indices_kernel(int *out)
{
    const unsigned int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const unsigned int threads = blockDim.x * blockDim.y * blockDim.z;
    __syncwarp();
    const unsigned int number = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    out[number * threads + thread] = (int)(threadIdx.x + 10 * threadIdx.y + 100 * threadIdx.z + 1000 * blockIdx.z);
    __syncthreads();
    atomicAdd(&out[gridDim.x * gridDim.y * gridDim.z * threads],
              (int)(threadIdx.x == 1)); /* an index that survives its barrier */
}

static void test_indices(void)
{
    static int out[2 * 3 * 2 * 60 + 1];
    out[12 * 60] = 0;
    int *device = to_device(out, sizeof out / sizeof *out);
    FINE(run_kernel(indices_kernel, dim3(2, 3, 2), dim3(5, 4, 3), 0, device));
    to_host(out, device, sizeof out / sizeof *out);
    CHECK(out[12 * 60] == 12 * 12);
    for (int i = 0; i < 12 * 60; i++)
        CHECK(out[i] == i % 60 % 5 + 10 * (i % 60 / 5 % 4) + 100 * (i % 60 / 20) + 1000 * (i / 360));
    FINE(cudaFree(device));
}

/* Right in one order of threads only, because a barrier is missing. */
static __global__ void racy_kernel(int *out, int first)
{
    __shared__ int place[64];
    place[threadIdx.x] = first + (int)(100 * blockIdx.x + threadIdx.x);
    out[64 * blockIdx.x + threadIdx.x] = place[threadIdx.x ? threadIdx.x - 1 : 0];
}

static void test_orders(void)
{
    int zeros[128] = {}, out[2][128], *device = to_device(zeros, 128);
    for (int backwards = 0; backwards < 2; backwards++) {
        setenv("HAPT_HOST_ORDER", backwards ? "backwards" : "", 1);
        FINE(run_kernel(racy_kernel, 2, 64, 0, device, 1000 * backwards));
        to_host(out[backwards], device, 128);
    }
    CHECK(out[0][127] == 162 && out[1][127] != 1162);
    FINE(cudaFree(device));
    test_reduction();
    test_votes();
    test_indices();
    test_shuffle<float>(64, 3, 0xffffffffu, 5, 16);
    test_shuffle<unsigned int>(32, 1, 0x7f00ff31u, 3, 8);
    unsetenv("HAPT_HOST_ORDER");
}

static __global__ void hang_kernel(int kind)
{
    const int i = (int)threadIdx.x;
    if (kind == 0 && i == 3) return; /* ended threads do not count */
    if (kind == 0) __syncthreads();
    if (kind == 1 && i < 32) __syncthreads();
    if (kind == 1 && i >= 32)
        __syncwarp(), __shfl_sync(0xffffffffu, 1, i == 40 ? 0 : 1), i == 40 ? __syncthreads() : __syncwarp();
    if (kind == 2 && i != 5) __syncwarp();
    if (kind == 3) __syncwarp(i == 1 ? 0xffffffffu : 0x0000ffffu | 1u << i);
    if (kind == 4 && i == 1) __syncwarp(1u);
    if (kind == 7 && i < 4) __syncwarp(i ? 0xfu : 3u); /* all threads arrive, but with different masks */
    if (kind == 5) i == 1 ? (void)__syncthreads_or(1) : __syncthreads();
}
static void hang(void *data)
{
    run_kernel(hang_kernel, 2, 64, 0, *(int *)data);
}

void test_threads(void)
{
    test_reduction();
    test_host_threads();
    test_votes();
    test_indices();
    for (int width = 1; width <= 32; width *= 2)
        for (int argument = 0; argument < 32; argument++) {
            test_shuffle<float>(32, 1, 0xffffffffu, argument, width);
            test_shuffle<int>(64, 3, 0xffffffffu, argument, width);
            test_shuffle<double>(16, 4, 0x0000ffffu, argument, width);
            test_shuffle<unsigned int>(32, 1, 0x7f00ff31u, argument, width);
            test_shuffle<long long>(8, 32, 0xffffffffu, argument, width);
        }
    for (int kind : {0, 1, 2, 3, 4, 5, 7}) CHECK(child_end(hang, &kind) == SIGABRT);
    test_orders();
    int fine = 6;
    CHECK(child_end(hang, &fine) == 0);
}

/* The nearest value of the short type; of two equally near, the even one. A plain search over neighbours. */
template <float (*to_float)(unsigned short)> static unsigned short nearest(float value, unsigned short infinity)
{
    const unsigned short sign = signbit(value) ? 0x8000 : 0;
    const double magnitude = fabs((double)value);
    unsigned int
        low = 0,
        high = infinity; /* to_float(low) <= magnitude < to_float(high), infinity counting as the next power of two */
    while (high - low > 1) {
        const unsigned int middle = (low + high) / 2;
        *((double)to_float((unsigned short)middle) <= magnitude ? &low : &high) = middle;
    }
    const double below = to_float((unsigned short)low), step = below - to_float((unsigned short)(low - 1));
    const double above = high == infinity ? below + step : to_float((unsigned short)high);
    const double down = magnitude - below, up = above - magnitude;
    return (unsigned short)(sign | (down < up || (down == up && low % 2 == 0) ? low : high));
}
static float from_bf16(unsigned short bits)
{
    return __bfloat162float(__ushort_as_bfloat16(bits));
}
static float from_half(unsigned short bits)
{
    return __half2float(__ushort_as_half(bits));
}

void test_conversions(void)
{
    int wrong = 0;
    for (unsigned int bits = 0; bits < 65536; bits++) {
        const float bf16 = from_bf16((unsigned short)bits), half = from_half((unsigned short)bits);
        const unsigned int exponent = bits >> 10 & 31, fraction = bits & 1023;
        wrong += __bfloat16_as_ushort(__float2bfloat16(bf16)) != (isnan(bf16) ? 0x7fff : bits);
        wrong += __half_as_ushort(__float2half(half)) != (isnan(half) ? 0x7fff : bits);
        const unsigned int wide = bits << 16;
        wrong += memcmp(&bf16, &wide, sizeof wide) != 0;
        if (exponent == 31) wrong += fraction ? !isnan(half) : !isinf(half);
        if (exponent < 31) {
            const double magnitude =
                exponent ? ldexp(1024.0 + fraction, (int)exponent - 25) : ldexp((double)fraction, -24);
            wrong += (double)half != (bits >> 15 ? -magnitude : magnitude) || (signbit(half) ? 1u : 0u) != bits >> 15;
        }
    }
    CHECK(wrong == 0);
    wrong = 0;
    for (int i = 0; i < 400000; i++) {
        uint32_t bits = random_bits();
        if (i % 3 == 1) bits = (bits & 0x8fffffffu) | 0x30000000u; /* near the range of a half */
        if (i % 3 == 2) bits &= 0xfffff000u;                       /* ties */
        float value;
        memcpy(&value, &bits, sizeof value);
        if (isnan(value) || isinf(value)) continue;
        wrong += __bfloat16_as_ushort(__float2bfloat16(value)) != nearest<from_bf16>(value, 0x7f80);
        wrong += __half_as_ushort(__float2half(value)) != nearest<from_half>(value, 0x7c00);
    }
    CHECK(wrong == 0);
    CHECK(__half_as_ushort(__float2half(65519.996f)) == 0x7bff && __half_as_ushort(__float2half(65520.0f)) == 0x7c00);
    CHECK(__half_as_ushort(__double2half(1.0 + 0x1p-11 + 0x1p-50)) == 0x3c01 &&
          __half_as_ushort(__double2half(1.0 + 0x1p-11)) == 0x3c00);
    const float2 pair = __bfloat1622float2(__floats2bfloat162_rn(1.5f, -2.0f)),
                 half_pair = __half22float2(__floats2half2_rn(0.1f, 3.0f));
    CHECK(pair.x == 1.5f && pair.y == -2.0f && half_pair.y == 3.0f && half_pair.x == (float)__float2half(0.1f));
}
