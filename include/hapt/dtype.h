/* Element types of tensors, and the bfloat16 conversions. */
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

#endif
