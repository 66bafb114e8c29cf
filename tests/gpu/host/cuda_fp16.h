/* Host CUDA: half precision. Conversions round to nearest even; any NaN becomes 0x7fff, as on the device. */
#ifndef HOST_CUDA_FP16_H
#define HOST_CUDA_FP16_H

#include "cuda_runtime.h"

static inline unsigned short host_cuda_half_from_float(float value)
{
    const unsigned int bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fff;
    if (magnitude >= 0x477ff000u) return (unsigned short)(sign | 0x7c00u); /* 65520 and above */
    if (magnitude >= 0x38800000u) {                                        /* normal: 2^-14 and above */
        const unsigned int rebiased = magnitude - (112u << 23);
        return (unsigned short)(sign | (rebiased + 0xfffu + (rebiased >> 13 & 1)) >> 13);
    }
    /* Subnormal: after adding 0.5 the last place is 2^-24, so the addition itself rounds to nearest even. */
    const float shifted = __uint_as_float(magnitude) + 0.5f;
    return (unsigned short)(sign | (__float_as_uint(shifted) - 0x3f000000u));
}
static inline float host_cuda_half_to_float(unsigned short bits)
{
    const unsigned int sign = (unsigned int)(bits & 0x8000u) << 16, exponent = bits >> 10 & 31u,
                       fraction = bits & 0x3ffu;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
    if (exponent) return __uint_as_float(sign | (exponent + 112u) << 23 | fraction << 13);
    const float magnitude = (float)fraction * 0x1p-24f;
    return sign ? -magnitude : magnitude;
}

struct __half_raw {
    unsigned short x;
};

struct alignas(2) __half {
    unsigned short __x;

    __half() = default;
    __half(const __half_raw &raw) : __x(raw.x) {}
    __half(float value) : __x(host_cuda_half_from_float(value)) {}
    __half(double value) : __x(host_cuda_half_from_float(host_cuda_round_odd(value))) {}
    __half(int value) : __half((double)value) {}
    __half(unsigned int value) : __half((double)value) {}
    operator float() const
    {
        return host_cuda_half_to_float(__x);
    }
    operator __half_raw() const
    {
        return {__x};
    }
    __half &operator=(float value)
    {
        __x = host_cuda_half_from_float(value);
        return *this;
    }
};

struct alignas(4) __half2 {
    __half x, y;
};

typedef __half half;
typedef __half2 half2;

static inline __half __float2half(float value)
{
    return __half(value);
}
static inline __half __float2half_rn(float value)
{
    return __half(value);
}
static inline __half __double2half(double value)
{
    return __half(value);
}
static inline float __half2float(__half value)
{
    return value;
}
static inline __half2 __floats2half2_rn(float low, float high)
{
    return {__half(low), __half(high)};
}
static inline __half2 __float2half2_rn(float value)
{
    return {__half(value), __half(value)};
}
static inline __half2 __float22half2_rn(float2 value)
{
    return {__half(value.x), __half(value.y)};
}
static inline float2 __half22float2(__half2 value)
{
    return {value.x, value.y};
}
static inline __half2 __halves2half2(__half low, __half high)
{
    return {low, high};
}
static inline __half2 __half2half2(__half value)
{
    return {value, value};
}
static inline __half2 make_half2(__half low, __half high)
{
    return {low, high};
}
static inline __half __low2half(__half2 value)
{
    return value.x;
}
static inline __half __high2half(__half2 value)
{
    return value.y;
}
static inline float __low2float(__half2 value)
{
    return value.x;
}
static inline float __high2float(__half2 value)
{
    return value.y;
}
static inline unsigned short __half_as_ushort(__half value)
{
    return value.__x;
}
static inline __half __ushort_as_half(unsigned short bits)
{
    return __half_raw{bits};
}
static inline bool __hisnan(__half value)
{
    return isnan((float)value);
}

#define HOST_CUDA_FP16_OPERATOR(sign, name)                \
    static inline __half operator sign(__half a, __half b) \
    {                                                      \
        return __half((float)a sign(float) b);             \
    }                                                      \
    static inline __half name(__half a, __half b)          \
    {                                                      \
        return a sign b;                                   \
    }                                                      \
    static inline __half2 name##2(__half2 a, __half2 b)    \
    {                                                      \
        return {a.x sign b.x, a.y sign b.y};               \
    }
HOST_CUDA_FP16_OPERATOR(+, __hadd)
HOST_CUDA_FP16_OPERATOR(-, __hsub)
HOST_CUDA_FP16_OPERATOR(*, __hmul)
#undef HOST_CUDA_FP16_OPERATOR

#endif
