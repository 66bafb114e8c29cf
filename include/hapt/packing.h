/*
 * Packed weights of frozen linear layers, for all back ends. A packed matrix [out][in] is a tensor [out][in /
 * 32][words] of 32-bit words, of dtype fp32: its bits are moved as they are. A block of 32 columns has
 *
 *   int8: 9 words: 32 signed bytes q, then the fp32 scale s. The weights are s q; s = (largest magnitude) / 127,
 *         rounded to 16 significant bits
 *   bf16: 16 words: 32 bf16 numbers
 *   nf4:  5 words: 32 codes of 4 bits, the even column in the low 4 bits of a byte, then the fp32 scale s = (largest
 *         magnitude). The weights are s times a level, quantiles of the normal distribution (QLoRA, arXiv 2305.14314,
 *         appendix E)
 *
 * A source for another compiler defines HAPT_PACKING_FUNCTION first.
 */
#ifndef HAPT_PACKING_H
#define HAPT_PACKING_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifndef HAPT_PACKING_FUNCTION
#define HAPT_PACKING_FUNCTION static inline
#endif

enum hapt_packing {
    HAPT_PACKING_NONE,
    HAPT_PACKING_INT8,
    HAPT_PACKING_BF16,
    HAPT_PACKING_NF4,
    HAPT_PACKINGS,
};
enum {
    HAPT_PACKING_COLUMNS = 32,
    HAPT_PACKING_INT8_WORDS = 9,
    HAPT_PACKING_BF16_WORDS = 16,
    HAPT_PACKING_NF4_WORDS = 5,
    HAPT_PACKING_NF4_LEVELS = 16
};

/* Words of a block; 0: NONE. */
HAPT_PACKING_FUNCTION int64_t hapt_packing_words(enum hapt_packing packing)
{
    return packing == HAPT_PACKING_INT8   ? HAPT_PACKING_INT8_WORDS
           : packing == HAPT_PACKING_BF16 ? HAPT_PACKING_BF16_WORDS
           : packing == HAPT_PACKING_NF4  ? HAPT_PACKING_NF4_WORDS
                                          : 0;
}

/* The packing with blocks of so many words; NONE: there is none. */
HAPT_PACKING_FUNCTION enum hapt_packing hapt_packing_of(int64_t words)
{
    return words == HAPT_PACKING_INT8_WORDS   ? HAPT_PACKING_INT8
           : words == HAPT_PACKING_BF16_WORDS ? HAPT_PACKING_BF16
           : words == HAPT_PACKING_NF4_WORDS  ? HAPT_PACKING_NF4
                                              : HAPT_PACKING_NONE;
}

/* Column `c` of a block of int8. */
HAPT_PACKING_FUNCTION float hapt_packing_int8(const void *block, int c)
{
    float scale;
    memcpy(&scale, (const char *)block + HAPT_PACKING_COLUMNS, sizeof scale);
    return scale * (float)((const signed char *)block)[c];
}

/* The level of a code of nf4. Levels increase with the code. */
HAPT_PACKING_FUNCTION float hapt_packing_nf4_level(int code)
{
    const float level[HAPT_PACKING_NF4_LEVELS] = {-1.0f,
                                                  -0.6961928009986877f,
                                                  -0.5250730514526367f,
                                                  -0.39491748809814453f,
                                                  -0.28444138169288635f,
                                                  -0.18477343022823334f,
                                                  -0.09105003625154495f,
                                                  0.0f,
                                                  0.07958029955625534f,
                                                  0.16093020141124725f,
                                                  0.24611230194568634f,
                                                  0.33791524171829224f,
                                                  0.44070982933044434f,
                                                  0.5626170039176941f,
                                                  0.7229568362236023f,
                                                  1.0f};
    return level[code];
}

/* Column `c` of a block of nf4. */
HAPT_PACKING_FUNCTION float hapt_packing_nf4(const void *block, int c)
{
    float scale;
    memcpy(&scale, (const char *)block + HAPT_PACKING_COLUMNS / 2, sizeof scale);
    return scale * hapt_packing_nf4_level(((const unsigned char *)block)[c / 2] >> 4 * (c % 2) & 15);
}

/* Column `c` of a block of bf16. */
HAPT_PACKING_FUNCTION float hapt_packing_bf16(const void *block, int c)
{
    const uint32_t bits = (uint32_t)((const uint16_t *)block)[c] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Column `c` of a block of any packing. */
HAPT_PACKING_FUNCTION float hapt_packing_value(enum hapt_packing packing, const void *block, int c)
{
    switch (packing) {
    case HAPT_PACKING_INT8: return hapt_packing_int8(block, c);
    case HAPT_PACKING_BF16: return hapt_packing_bf16(block, c);
    case HAPT_PACKING_NF4: return hapt_packing_nf4(block, c);
    case HAPT_PACKING_NONE:
    case HAPT_PACKINGS: break;
    }
    return NAN;
}

#endif
