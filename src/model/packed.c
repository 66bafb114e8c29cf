/* Packed parameters (packing.h): their published shape, and conversion in place. */
#include "hapt/packing.h"

#include <float.h>

#include "hapt/model.h"

struct hapt_tensor hapt_tensor_published(const struct hapt_tensor *parameter)
{
    struct hapt_tensor published = *parameter;
    if (!parameter->packed) return published;
    published.packed = false;
    published.dims = 2;
    published.shape[1] = parameter->shape[1] * HAPT_PACKING_COLUMNS;
    published.shape[2] = 0;
    return published;
}

/* 16 significant bits: each product with a byte is exact, so unpacked weights pack to the same bits. */
static float short_scale(float scale)
{
    uint32_t bits;
    memcpy(&bits, &scale, sizeof bits);
    bits = (bits + 0x80u) & ~0xffu;
    memcpy(&scale, &bits, sizeof scale);
    return scale;
}

static void pack_int8(const float *value, float *block)
{
    signed char column[HAPT_PACKING_COLUMNS];
    float most = 0;
    for (int c = 0; c < HAPT_PACKING_COLUMNS; c++) most = fmaxf(most, fabsf(value[c]));
    const float scale = short_scale(most / 127);
    for (int c = 0; c < HAPT_PACKING_COLUMNS; c++)
        column[c] = (signed char)(scale > 0 ? fmaxf(-127, fminf(127, rintf(value[c] / scale))) : 0);
    memcpy(block, column, sizeof column);
    memcpy((char *)block + sizeof column, &scale, sizeof scale);
}

static void pack_bf16(const float *value, float *block)
{
    uint16_t column[HAPT_PACKING_COLUMNS];
    for (int c = 0; c < HAPT_PACKING_COLUMNS; c++) column[c] = hapt_bf16_from_f32(value[c]);
    memcpy(block, column, sizeof column);
}

/* The nearest level, the lower one of two. Blocks of denormal numbers become zeros, so that levels stay apart. */
static void pack_nf4(const float *value, float *block)
{
    unsigned char code[HAPT_PACKING_COLUMNS / 2] = {0};
    float scale = 0;
    for (int c = 0; c < HAPT_PACKING_COLUMNS; c++) scale = fmaxf(scale, fabsf(value[c]));
    if (scale < FLT_MIN) scale = 0;
    for (int c = 0; c < HAPT_PACKING_COLUMNS; c++) {
        const float share = scale > 0 ? value[c] / scale : 0;
        int nearest = 0;
        for (int k = 1; k < HAPT_PACKING_NF4_LEVELS; k++)
            if (fabsf(share - hapt_packing_nf4_level(k)) < fabsf(share - hapt_packing_nf4_level(nearest))) nearest = k;
        code[c / 2] |= (unsigned char)(nearest << 4 * (c % 2));
    }
    memcpy(block, code, sizeof code);
    memcpy((char *)block + sizeof code, &scale, sizeof scale);
}

/* Blocks shrink, so that those in front leave room. */
void hapt_parameter_pack(const struct hapt_tensor *parameter, int64_t rows, float *value)
{
    if (!parameter->packed) return;
    const int64_t words = parameter->shape[2], blocks = rows * parameter->shape[1];
    for (int64_t b = 0; b < blocks; b++) {
        float block[HAPT_PACKING_COLUMNS];
        memcpy(block, value + b * HAPT_PACKING_COLUMNS, sizeof block);
        switch (hapt_packing_of(words)) {
        case HAPT_PACKING_INT8: pack_int8(block, value + b * words); break;
        case HAPT_PACKING_BF16: pack_bf16(block, value + b * words); break;
        case HAPT_PACKING_NF4: pack_nf4(block, value + b * words); break;
        case HAPT_PACKING_NONE:
        case HAPT_PACKINGS: HAPT_ASSERT(false);
        }
    }
}

void hapt_parameter_unpack(const struct hapt_tensor *parameter, int64_t rows, float *value)
{
    if (!parameter->packed) return;
    const int64_t words = parameter->shape[2];
    for (int64_t b = rows * parameter->shape[1] - 1; b >= 0; b--) {
        float block[HAPT_PACKING_BF16_WORDS];
        memcpy(block, value + b * words, (size_t)words * sizeof *block);
        for (int c = 0; c < HAPT_PACKING_COLUMNS; c++)
            value[b * HAPT_PACKING_COLUMNS + c] = hapt_packing_value(hapt_packing_of(words), block, c);
    }
}
