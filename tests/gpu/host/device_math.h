/*
 * Host CUDA: the device functions that <math.h> lacks. The device's fast functions (__expf and the like) are exact
 * here. So the tolerance of a test must allow for the device's error.
 *
 * glibc uses some of the names itself, so they are macros.
 */
#ifndef HOST_CUDA_DEVICE_MATH_H
#define HOST_CUDA_DEVICE_MATH_H

#include <limits.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define __expf(x) expf(x)
#define __exp10f(x) powf(10.0f, (x))
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __powf(x, y) powf((x), (y))
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)
#define __sincosf(x, s, c) sincosf((x), (s), (c))
#define __fdividef(x, y) ((float)(x) / (float)(y))
#define __saturatef(x) fminf(fmaxf((x), 0.0f), 1.0f)

static inline float rsqrtf(float x)
{
    return (float)(1.0 / sqrt((double)x));
}
static inline double rsqrt(double x)
{
    return 1.0 / sqrt(x);
}
static inline float fdividef(float x, float y)
{
    return x / y;
}
static inline float normcdff(float x)
{
    return 0.5f * erfcf(-x * 0.70710678118654752f);
}

/* Rounded operations that the compiler may not contract. g++ contracts within one expression only, so the value of a
 * function is safe. */
static inline __attribute__((noinline)) float __fmul_rn(float x, float y)
{
    return x * y;
}
static inline __attribute__((noinline)) float __fadd_rn(float x, float y)
{
    return x + y;
}
static inline __attribute__((noinline)) float __fsub_rn(float x, float y)
{
    return x - y;
}
static inline float __fdiv_rn(float x, float y)
{
    return x / y;
}
static inline float __fsqrt_rn(float x)
{
    return sqrtf(x);
}
static inline float __frsqrt_rn(float x)
{
    return rsqrtf(x);
}
static inline float __frcp_rn(float x)
{
    return 1.0f / x;
}
static inline float __fmaf_rn(float x, float y, float z)
{
    return fmaf(x, y, z);
}

template <typename To, typename From> static inline To host_cuda_bits(From from)
{
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
static inline int __float_as_int(float x)
{
    return host_cuda_bits<int>(x);
}
static inline unsigned int __float_as_uint(float x)
{
    return host_cuda_bits<unsigned int>(x);
}
static inline float __int_as_float(int x)
{
    return host_cuda_bits<float>(x);
}
static inline float __uint_as_float(unsigned int x)
{
    return host_cuda_bits<float>(x);
}
static inline long long __double_as_longlong(double x)
{
    return host_cuda_bits<long long>(x);
}
static inline double __longlong_as_double(long long x)
{
    return host_cuda_bits<double>(x);
}

static inline float __int2float_rn(int x)
{
    return (float)x;
}
static inline float __uint2float_rn(unsigned int x)
{
    return (float)x;
}
static inline float __ll2float_rn(long long x)
{
    return (float)x;
}
static inline int __float2int_rn(float x)
{
    return (int)rintf(x);
}
static inline int __float2int_rz(float x)
{
    return (int)x;
}
static inline int __float2int_rd(float x)
{
    return (int)floorf(x);
}
static inline int __float2int_ru(float x)
{
    return (int)ceilf(x);
}
static inline float __double2float_rn(double x)
{
    return (float)x;
}

/* Rounds `value` to float so that rounding the result once more is the same as rounding `value`. The last bit records
 * lost digits. */
static inline float host_cuda_round_odd(double value)
{
    const float cut = (float)value;
    if ((double)cut == value || isnan(value) || isinf(cut)) return cut;
    const float toward_zero = fabs((double)cut) > fabs(value) ? nextafterf(cut, 0.0f) : cut;
    return __uint_as_float(__float_as_uint(toward_zero) | 1u);
}

static inline int __popc(unsigned int x)
{
    return __builtin_popcount(x);
}
static inline int __popcll(unsigned long long x)
{
    return __builtin_popcountll(x);
}
static inline int __ffs(int x)
{
    return __builtin_ffs(x);
}
static inline int __ffsll(long long x)
{
    return __builtin_ffsll(x);
}
static inline int __clz(int x)
{
    return x ? __builtin_clz((unsigned int)x) : 32;
}
static inline int __clzll(long long x)
{
    return x ? __builtin_clzll((unsigned long long)x) : 64;
}
static inline unsigned int __brev(unsigned int x)
{
    unsigned int reversed = 0;
    for (int bit = 0; bit < 32; bit++) reversed |= ((x >> bit) & 1u) << (31 - bit);
    return reversed;
}
static inline unsigned int __umulhi(unsigned int x, unsigned int y)
{
    return (unsigned int)(((uint64_t)x * y) >> 32);
}
static inline int __mulhi(int x, int y)
{
    return (int)(((int64_t)x * y) >> 32);
}
static inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y)
{
    return (unsigned long long)(((unsigned __int128)x * y) >> 64);
}

/* min and max of mixed types convert to the unsigned or the wider type, as in device code. */
#define HOST_CUDA_MINMAX(type, a, b)                  \
    static inline type min(a x, b y)                  \
    {                                                 \
        return (type)x < (type)y ? (type)x : (type)y; \
    }                                                 \
    static inline type max(a x, b y)                  \
    {                                                 \
        return (type)x > (type)y ? (type)x : (type)y; \
    }
#define HOST_CUDA_MINMAX_OF(type, u_type)    \
    HOST_CUDA_MINMAX(type, type, type)       \
    HOST_CUDA_MINMAX(u_type, u_type, u_type) \
    HOST_CUDA_MINMAX(u_type, type, u_type)   \
    HOST_CUDA_MINMAX(u_type, u_type, type)
HOST_CUDA_MINMAX_OF(int, unsigned int)
HOST_CUDA_MINMAX_OF(long, unsigned long)
HOST_CUDA_MINMAX_OF(long long, unsigned long long)
#undef HOST_CUDA_MINMAX_OF
#undef HOST_CUDA_MINMAX

#define HOST_CUDA_MINMAX(type, a, b, low, high) \
    static inline type min(a x, b y)            \
    {                                           \
        return low((type)x, (type)y);           \
    }                                           \
    static inline type max(a x, b y)            \
    {                                           \
        return high((type)x, (type)y);          \
    }
HOST_CUDA_MINMAX(float, float, float, fminf, fmaxf)
HOST_CUDA_MINMAX(double, double, double, fmin, fmax)
HOST_CUDA_MINMAX(double, float, double, fmin, fmax)
HOST_CUDA_MINMAX(double, double, float, fmin, fmax)
#undef HOST_CUDA_MINMAX

/* Threads of a block switch only at barriers, so plain code is atomic. There is no atomicAdd of floats, because sums
 * must have a fixed order. */
#define HOST_CUDA_ATOMIC(name, type, update)           \
    static inline type name(type *address, type value) \
    {                                                  \
        const type old = *address;                     \
        *address = (update);                           \
        return old;                                    \
    }
#define HOST_CUDA_ATOMICS(type, signed_add)                                        \
    HOST_CUDA_ATOMIC(atomicAdd, type, (type)((signed_add)old + (signed_add)value)) \
    HOST_CUDA_ATOMIC(atomicMax, type, old > value ? old : value)                   \
    HOST_CUDA_ATOMIC(atomicMin, type, old < value ? old : value)                   \
    HOST_CUDA_ATOMIC(atomicExch, type, value)                                      \
    HOST_CUDA_ATOMIC(atomicOr, type, old | value)                                  \
    HOST_CUDA_ATOMIC(atomicAnd, type, old &value)                                  \
    static inline type atomicCAS(type *address, type compare, type value)          \
    {                                                                              \
        const type old = *address;                                                 \
        if (old == compare) *address = value;                                      \
        return old;                                                                \
    }
HOST_CUDA_ATOMICS(int, unsigned int)
HOST_CUDA_ATOMICS(unsigned int, unsigned int)
HOST_CUDA_ATOMICS(unsigned long long, unsigned long long)
#undef HOST_CUDA_ATOMICS
#undef HOST_CUDA_ATOMIC

template <typename T> static inline T __ldg(const T *address)
{
    return *address;
}
template <typename T> static inline T __ldcs(const T *address)
{
    return *address;
}
template <typename T> static inline T __ldcg(const T *address)
{
    return *address;
}
template <typename T> static inline void __stcs(T *address, T value)
{
    *address = value;
}

static inline void __threadfence(void) {}
static inline void __threadfence_block(void) {}
static inline void __threadfence_system(void) {}

#endif
