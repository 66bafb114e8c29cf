/* Element types of tensors, and conversions of the 16-bit types. */
#ifndef HAPT_DTYPE_H
#define HAPT_DTYPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum hapt_dtype { HAPT_F32, HAPT_BF16, HAPT_F16, HAPT_I32, HAPT_DTYPE_COUNT };

size_t hapt_dtype_bytes(enum hapt_dtype dtype);
/* "fp32", "bf16", "fp16", "int32". */
const char *hapt_dtype_name(enum hapt_dtype dtype);
bool hapt_dtype_parse(const char *name, enum hapt_dtype *dtype);

/* The precision that a model computes in: an element type, or fp32 with the operands of matrix products rounded to TF32
 * (GPUs). Sums, weights and optimizer state are always fp32. */
enum hapt_precision {
    HAPT_PRECISION_UNKNOWN,
    HAPT_PRECISION_FP32,
    HAPT_PRECISION_TF32,
    HAPT_PRECISION_BF16,
    HAPT_PRECISION_FP16
};

const char *hapt_precision_name(enum hapt_precision precision); /* "fp32", "tf32", "bf16", "fp16", "unknown" */
/* HAPT_PRECISION_UNKNOWN if no precision has that name. */
enum hapt_precision hapt_precision_find(const char *name);
/* The type of activations, and of tensors between stages. */
enum hapt_dtype hapt_precision_dtype(enum hapt_precision precision);
enum hapt_precision hapt_precision_of(enum hapt_dtype dtype);

static inline float hapt_bf16_to_f32(uint16_t bits)
{
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* Round to nearest even; a NaN stays a NaN. */
static inline uint16_t hapt_bf16_from_f32(float value)
{
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    if ((wide & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((wide >> 16) | 0x40u);
    return (uint16_t)((wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16);
}

static inline float hapt_f16_to_f32(uint16_t bits)
{
    const uint32_t sign = (uint32_t)(bits & 0x8000u) << 16, exponent = bits >> 10 & 0x1fu, fraction = bits & 0x3ffu;
    if (exponent == 0) { /* zero, subnormal */
        const float value = (float)fraction * 0x1p-24f;
        return sign ? -value : value;
    }
    const uint32_t wide = sign | (exponent == 0x1fu ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* Round to nearest even; values beyond 65504 become infinity; a NaN stays a NaN. */
static inline uint16_t hapt_f16_from_f32(float value)
{
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    const uint16_t sign = (uint16_t)(wide >> 16 & 0x8000u);
    wide &= 0x7fffffffu;
    if (wide > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (wide >= 0x47800000u) return (uint16_t)(sign | 0x7c00u);
    if (wide < 0x38800000u) { /* below 2^-14: the low bits of the sum are the rounded subnormal number */
        const float magic = 0.5f;
        float sum;
        uint32_t rounded;
        memcpy(&sum, &wide, sizeof sum);
        sum += magic;
        memcpy(&rounded, &sum, sizeof rounded);
        return (uint16_t)(sign | (rounded - 0x3f000000u));
    }
    return (uint16_t)(sign | ((wide + 0xfffu + (wide >> 13 & 1u) - 0x38000000u) >> 13));
}

#endif
