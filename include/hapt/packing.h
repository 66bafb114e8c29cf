/*
 * Packed weights of frozen linear layers, for all back ends. A packed matrix [out][in] is a tensor [out][in /
 * 32][words] of 32-bit words, of dtype fp32: its bits are moved as they are. A block of 32 columns has
 *
 *   int8: 9 words: 32 signed bytes q, then the fp32 scale s. The weights are s q; s = (largest magnitude) / 127,
 *         rounded to 16 significant bits
 *   bf16: 16 words: 32 bf16 numbers
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
    HAPT_PACKINGS,
};
enum { HAPT_PACKING_COLUMNS = 32, HAPT_PACKING_INT8_WORDS = 9, HAPT_PACKING_BF16_WORDS = 16 };

/* Words of a block; 0: NONE. */
HAPT_PACKING_FUNCTION int64_t hapt_packing_words(enum hapt_packing packing)
{
    return packing == HAPT_PACKING_INT8   ? HAPT_PACKING_INT8_WORDS
           : packing == HAPT_PACKING_BF16 ? HAPT_PACKING_BF16_WORDS
                                          : 0;
}

/* The packing with blocks of so many words; NONE: there is none. */
HAPT_PACKING_FUNCTION enum hapt_packing hapt_packing_of(int64_t words)
{
    return words == HAPT_PACKING_INT8_WORDS   ? HAPT_PACKING_INT8
           : words == HAPT_PACKING_BF16_WORDS ? HAPT_PACKING_BF16
                                              : HAPT_PACKING_NONE;
}

/* Column `c` of a block of int8. */
HAPT_PACKING_FUNCTION float hapt_packing_int8(const void *block, int c)
{
    float scale;
    memcpy(&scale, (const char *)block + HAPT_PACKING_COLUMNS, sizeof scale);
    return scale * (float)((const signed char *)block)[c];
}

#endif
