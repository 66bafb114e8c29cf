/* Host CUDA: bfloat16. Conversions round to nearest even; any NaN becomes 0x7fff, as on the device. */
#ifndef HOST_CUDA_BF16_H
#define HOST_CUDA_BF16_H

#include "cuda_runtime.h"

static inline unsigned short host_cuda_bf16_from_float(float value)
{
    const unsigned int bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (unsigned short)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
static inline float host_cuda_bf16_to_float(unsigned short bits)
{
    return __uint_as_float((unsigned int)bits << 16);
}

struct __nv_bfloat16_raw {
    unsigned short x;
};

struct alignas(2) __nv_bfloat16 {
    unsigned short __x;

    __nv_bfloat16() = default;
    __nv_bfloat16(const __nv_bfloat16_raw &raw) : __x(raw.x) {}
    __nv_bfloat16(float value) : __x(host_cuda_bf16_from_float(value)) {}
    __nv_bfloat16(double value) : __x(host_cuda_bf16_from_float(host_cuda_round_odd(value))) {}
    __nv_bfloat16(int value) : __nv_bfloat16((double)value) {}
    __nv_bfloat16(unsigned int value) : __nv_bfloat16((double)value) {}
    operator float() const
    {
        return host_cuda_bf16_to_float(__x);
    }
    operator __nv_bfloat16_raw() const
    {
        return {__x};
    }
    __nv_bfloat16 &operator=(float value)
    {
        __x = host_cuda_bf16_from_float(value);
        return *this;
    }
};

struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

static inline __nv_bfloat16 __float2bfloat16(float value)
{
    return __nv_bfloat16(value);
}
static inline __nv_bfloat16 __float2bfloat16_rn(float value)
{
    return __nv_bfloat16(value);
}
static inline __nv_bfloat16 __double2bfloat16(double value)
{
    return __nv_bfloat16(value);
}
static inline float __bfloat162float(__nv_bfloat16 value)
{
    return value;
}
static inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high)
{
    return {__nv_bfloat16(low), __nv_bfloat16(high)};
}
static inline __nv_bfloat162 __float2bfloat162_rn(float value)
{
    return {__nv_bfloat16(value), __nv_bfloat16(value)};
}
static inline __nv_bfloat162 __float22bfloat162_rn(float2 value)
{
    return {__nv_bfloat16(value.x), __nv_bfloat16(value.y)};
}
static inline float2 __bfloat1622float2(__nv_bfloat162 value)
{
    return {value.x, value.y};
}
static inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 low, __nv_bfloat16 high)
{
    return {low, high};
}
static inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 value)
{
    return {value, value};
}
static inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 low, __nv_bfloat16 high)
{
    return {low, high};
}
static inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 value)
{
    return value.x;
}
static inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 value)
{
    return value.y;
}
static inline float __low2float(__nv_bfloat162 value)
{
    return value.x;
}
static inline float __high2float(__nv_bfloat162 value)
{
    return value.y;
}
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value)
{
    return value.__x;
}
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits)
{
    return __nv_bfloat16_raw{bits};
}
static inline bool __hisnan(__nv_bfloat16 value)
{
    return isnan((float)value);
}

#define HOST_CUDA_BF16_OPERATOR(sign, name)                                     \
    static inline __nv_bfloat16 operator sign(__nv_bfloat16 a, __nv_bfloat16 b) \
    {                                                                           \
        return __nv_bfloat16((float)a sign(float) b);                           \
    }                                                                           \
    static inline __nv_bfloat16 name(__nv_bfloat16 a, __nv_bfloat16 b)          \
    {                                                                           \
        return a sign b;                                                        \
    }                                                                           \
    static inline __nv_bfloat162 name##2(__nv_bfloat162 a, __nv_bfloat162 b)    \
    {                                                                           \
        return {a.x sign b.x, a.y sign b.y};                                    \
    }
HOST_CUDA_BF16_OPERATOR(+, __hadd)
HOST_CUDA_BF16_OPERATOR(-, __hsub)
HOST_CUDA_BF16_OPERATOR(*, __hmul)
#undef HOST_CUDA_BF16_OPERATOR

#endif
