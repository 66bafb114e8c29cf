/* Mutations of bytes, independent of the format. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "fuzz.h"

int64_t fuzz_integer(uint64_t *random, int64_t old)
{
    static const int64_t known[] = {0,
                                    1,
                                    -1,
                                    2,
                                    -2,
                                    3,
                                    7,
                                    64,
                                    127,
                                    128,
                                    255,
                                    256,
                                    1000,
                                    32767,
                                    32768,
                                    65535,
                                    65536,
                                    1 << 20,
                                    INT32_MAX,
                                    INT32_MIN,
                                    (int64_t)INT32_MAX + 1,
                                    UINT32_MAX,
                                    (int64_t)1 << 40,
                                    (int64_t)1 << 62,
                                    INT64_MAX,
                                    INT64_MIN};
    switch (fuzz_below(random, 6)) {
    case 0: return (int64_t)((uint64_t)old + 1);
    case 1: return (int64_t)((uint64_t)old - 1);
    case 2: return (int64_t)((uint64_t)old * 2);
    case 3: return (int64_t)(0 - (uint64_t)old);
    default: return known[fuzz_below(random, (int)(sizeof known / sizeof *known))];
    }
}

double fuzz_real(uint64_t *random, double old)
{
    static const double known[] = {0,    -0.0,  1,       -1,     0.5, 1e-320,   1e-9,     1e9,
                                   1e30, 1e300, 1.7e308, -1e300, NAN, INFINITY, -INFINITY};
    switch (fuzz_below(random, 5)) {
    case 0: return -old;
    case 1: return old * 1e30;
    case 2: return nextafter(old, INFINITY);
    default: return known[fuzz_below(random, (int)(sizeof known / sizeof *known))];
    }
}

const char *fuzz_text(uint64_t *random)
{
    static char noise[301];
    static const char *const known[] = {
        "",          " ",    "/",   "..",    "a/b",     "%s%n%d", "\n",     "\033[31mred\033[0m",
        "\xff\xfe",  "fp32", "gpt", "none",  "compute", "h1f1b",  "weight", "tokens",
        "parameter", "0",    "-1",  "1e999", "nan",     "cpu"};
    if (fuzz_chance(random, 0.75)) return known[fuzz_below(random, (int)(sizeof known / sizeof *known))];
    const int length = fuzz_below(random, 300);
    for (int i = 0; i < length; i++) noise[i] = (char)(1 + fuzz_below(random, 255));
    noise[length] = '\0';
    return noise;
}

void fuzz_flip(uint64_t *random, unsigned char *data, size_t size)
{
    const int count = fuzz_chance(random, 0.8) ? 1 : 1 + fuzz_below(random, 4);
    for (int i = 0; i < count && size > 0; i++)
        data[fuzz_below(random, (int)size)] ^=
            (unsigned char)(fuzz_chance(random, 0.5) ? 1u << fuzz_below(random, 8)
                                                     : 1u + (unsigned)fuzz_below(random, 255));
}

/* Changes a number of 1 to 8 bytes, because headers contain sizes, addresses and counts. */
static void put_number(uint64_t *random, unsigned char *data, size_t size)
{
    const size_t width = (size_t)1 << fuzz_below(random, 4);
    if (size < width) return;
    unsigned char *at = data + fuzz_below(random, (int)(size - width + 1));
    int64_t value = 0;
    memcpy(&value, at, width);
    value = fuzz_integer(random, value);
    memcpy(at, &value, width);
}

size_t fuzz_bytes(uint64_t *random, unsigned char *data, size_t size, size_t room)
{
    const int rounds = fuzz_chance(random, 0.5) ? 1 : 1 + fuzz_below(random, 8);
    for (int round = 0; round < rounds && size > 1; round++) {
        const size_t most = size < 4096 || fuzz_chance(random, 0.2) ? size : 4096;
        const size_t length =
            1 + (size_t)fuzz_below(random, (int)(fuzz_chance(random, 0.7) && most > 64 ? 64 : most - 1));
        const size_t from = (size_t)fuzz_below(random, (int)(size - length + 1)),
                     to = (size_t)fuzz_below(random, (int)(size - length + 1));
        switch (fuzz_below(random, 9)) {
        case 0: size = (size_t)fuzz_below(random, (int)size); break;
        case 1:
            if (size + length > room) break;
            memset(data + size, fuzz_below(random, 256), length);
            size += length;
            break;
        case 2: memset(data + from, fuzz_chance(random, 0.5) ? 0 : 0xff, length); break;
        case 3: memmove(data + to, data + from, length); break;
        case 4:
            if (size + length > room) break;
            memmove(data + from + length, data + from, size - from);
            size += length;
            break;
        case 5:
            memmove(data + from, data + from + length, size - from - length);
            size -= length;
            break;
        case 6:
        case 7: put_number(random, data, size); break;
        default: fuzz_flip(random, data, size); break;
        }
    }
    return size;
}
