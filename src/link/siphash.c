#include "siphash.h"

#include <stdint.h>

struct state {
    uint64_t v[4];
};

static uint64_t rotate(uint64_t value, int bits)
{
    return value << bits | value >> (64 - bits);
}

/* Little-endian on every host. */
static uint64_t read_word(const unsigned char *bytes, size_t count)
{
    uint64_t word = 0;
    for (size_t i = 0; i < count; i++) word |= (uint64_t)bytes[i] << 8 * i;
    return word;
}

static void write_word(uint64_t word, unsigned char *bytes)
{
    for (int i = 0; i < 8; i++) bytes[i] = (unsigned char)(word >> 8 * i);
}

static void run_rounds(struct state *state, int rounds)
{
    uint64_t *v = state->v;
    for (int i = 0; i < rounds; i++) {
        v[0] += v[1];
        v[1] = rotate(v[1], 13) ^ v[0];
        v[0] = rotate(v[0], 32);
        v[2] += v[3];
        v[3] = rotate(v[3], 16) ^ v[2];
        v[0] += v[3];
        v[3] = rotate(v[3], 21) ^ v[0];
        v[2] += v[1];
        v[1] = rotate(v[1], 17) ^ v[2];
        v[2] = rotate(v[2], 32);
    }
}

static void compress(struct state *state, uint64_t word)
{
    state->v[3] ^= word;
    run_rounds(state, 2);
    state->v[0] ^= word;
}

static uint64_t finish(struct state *state)
{
    run_rounds(state, 4);
    return state->v[0] ^ state->v[1] ^ state->v[2] ^ state->v[3];
}

void siphash_tag(const unsigned char key[SIPHASH_BYTES], const void *data, size_t bytes,
                 unsigned char tag[SIPHASH_BYTES])
{
    const uint64_t k0 = read_word(key, 8), k1 = read_word(key + 8, 8);
    const unsigned char *at = data;
    /* The ASCII text "somepseudorandomlygeneratedbytes"; 0xee marks the longer tag. */
    struct state state = {
        {k0 ^ 0x736f6d6570736575, k1 ^ 0x646f72616e646f6d ^ 0xee, k0 ^ 0x6c7967656e657261, k1 ^ 0x7465646279746573}};
    size_t left = bytes;
    for (; left >= 8; left -= 8, at += 8) compress(&state, read_word(at, 8));
    compress(&state, read_word(at, left) | (uint64_t)bytes << 56);
    state.v[2] ^= 0xee;
    write_word(finish(&state), tag);
    state.v[1] ^= 0xdd;
    write_word(finish(&state), tag + 8);
}

bool siphash_equal(const unsigned char a[SIPHASH_BYTES], const unsigned char b[SIPHASH_BYTES])
{
    unsigned char difference = 0;
    for (int i = 0; i < SIPHASH_BYTES; i++) difference |= (unsigned char)(a[i] ^ b[i]);
    return difference == 0;
}
