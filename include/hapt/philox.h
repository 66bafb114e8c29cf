/*
 * Random numbers of dropout: Philox4x32-10 (Salmon et al., SC 2011), for all back ends. A number is a function of a key
 * and a counter, so any rank computes those of its elements, and recomputation finds the same again. Each row has a key
 * (HAPT_ROLE_ROW_KEYS). The counter holds the number of the operator and a block of 4 words. 64 elements of a row take
 * 16 blocks: element e takes word (e / 16) % 4 of block (e / 64) * 16 + e % 16.
 *
 * A source for another compiler defines HAPT_PHILOX_FUNCTION first.
 */
#ifndef HAPT_PHILOX_H
#define HAPT_PHILOX_H

#include <stdint.h>

#ifndef HAPT_PHILOX_FUNCTION
#define HAPT_PHILOX_FUNCTION static inline
#endif

#define HAPT_PHILOX_ROUNDS 10
#define HAPT_PHILOX_FACTOR_0 0xD2511F53u
#define HAPT_PHILOX_FACTOR_1 0xCD9E8D57u
#define HAPT_PHILOX_STEP_0 0x9E3779B9u /* of the key after each round */
#define HAPT_PHILOX_STEP_1 0xBB67AE85u
#define HAPT_DROPOUT_LANES 16 /* neighbouring elements that take the same word of different blocks */

struct hapt_philox {
    uint32_t word[4];
};

HAPT_PHILOX_FUNCTION struct hapt_philox hapt_philox_words(struct hapt_philox counter, uint32_t key_0, uint32_t key_1)
{
    uint32_t *word = counter.word;
    for (int round = 0; round < HAPT_PHILOX_ROUNDS; round++) {
        const uint64_t even = (uint64_t)HAPT_PHILOX_FACTOR_0 * word[0], odd = (uint64_t)HAPT_PHILOX_FACTOR_1 * word[2];
        word[0] = (uint32_t)(odd >> 32) ^ word[1] ^ key_0;
        word[1] = (uint32_t)odd;
        word[2] = (uint32_t)(even >> 32) ^ word[3] ^ key_1;
        word[3] = (uint32_t)even;
        key_0 += HAPT_PHILOX_STEP_0;
        key_1 += HAPT_PHILOX_STEP_1;
    }
    return counter;
}

/* The random word of an element of a row, for operator `number`. */
HAPT_PHILOX_FUNCTION uint32_t hapt_dropout_word(uint32_t key_0, uint32_t key_1, uint32_t number, int64_t element)
{
    const int64_t block = element / (4 * HAPT_DROPOUT_LANES) * HAPT_DROPOUT_LANES + element % HAPT_DROPOUT_LANES;
    const struct hapt_philox counter = {{(uint32_t)block, (uint32_t)((uint64_t)block >> 32), number, 0}};
    return hapt_philox_words(counter, key_0, key_1).word[element / HAPT_DROPOUT_LANES % 4];
}

/* Elements whose word is below this are dropped: those of a share `dropped` of all words. */
HAPT_PHILOX_FUNCTION uint32_t hapt_dropout_limit(double dropped)
{
    return (uint32_t)(dropped * 4294967296.0);
}

#endif
