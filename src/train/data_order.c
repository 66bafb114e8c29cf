/* A Feistel network permutes the numbers of 2k bits. Numbers beyond the rows are permuted again (cycle walking), so the
 * rest is a permutation of the rows. */
#include "data_order.h"

#include "hapt/env.h"

enum { ROUNDS = 16 }; /* fewer favour some orders of a few rows */

static uint64_t permute(uint64_t key, int half_bits, uint64_t value)
{
    const uint64_t mask = ((uint64_t)1 << half_bits) - 1;
    uint64_t left = value >> half_bits, right = value & mask;
    for (int round = 0; round < ROUNDS; round++) {
        const uint64_t next = left ^ (hapt_hash_word(key + (uint64_t)round, (int64_t)right) & mask);
        left = right;
        right = next;
    }
    return left << half_bits | right;
}

int64_t data_order_row(uint64_t seed, int64_t epoch, int64_t rows, int64_t index)
{
    const uint64_t key = hapt_hash_word(seed, epoch);
    int half_bits = 1;
    while (half_bits < 31 && (uint64_t)1 << 2 * half_bits < (uint64_t)rows) half_bits++;
    uint64_t value = (uint64_t)index;
    do value = permute(key, half_bits, value);
    while (value >= (uint64_t)rows);
    return (int64_t)value;
}
