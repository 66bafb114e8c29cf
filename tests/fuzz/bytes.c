/* Mutations that know nothing of formats, and those of JSON text. */
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "fuzz.h"

int64_t fuzz_integer(uint64_t *random, int64_t old)
{
    static const int64_t known[] = {0, 1, -1, 2, -2, 3, 7, 64, 127, 128, 255, 256, 1000, 32767, 32768, 65535, 65536, 1 << 20,
                                    INT32_MAX, INT32_MIN, (int64_t)INT32_MAX + 1, UINT32_MAX, (int64_t)1 << 40, (int64_t)1 << 62,
                                    INT64_MAX, INT64_MIN};
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
    static const double known[] = {0, -0.0, 1, -1, 0.5, 1e-320, 1e-9, 1e9, 1e30, 1e300, 1.7e308, -1e300, NAN, INFINITY, -INFINITY};
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
    static const char *const known[] = {"", " ", "/", "..", "a/b", "%s%n%d", "\n", "\033[31mred\033[0m", "\xff\xfe", "fp32", "gpt", "none",
                                        "compute", "h1f1b", "weight", "tokens", "parameter", "0", "-1", "1e999", "nan", "cpu"};
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
        data[fuzz_below(random, (int)size)] ^= (unsigned char)(fuzz_chance(random, 0.5) ? 1u << fuzz_below(random, 8) : 1u + (unsigned)fuzz_below(random, 255));
}

/* A number of 1 to 8 bytes somewhere: sizes, addresses and counts in headers. */
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
        const size_t length = 1 + (size_t)fuzz_below(random, (int)(fuzz_chance(random, 0.7) && most > 64 ? 64 : most - 1));
        const size_t from = (size_t)fuzz_below(random, (int)(size - length + 1)), to = (size_t)fuzz_below(random, (int)(size - length + 1));
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

/* A piece of `length` bytes at `at` becomes `text`. */
static size_t replace(char *data, size_t size, size_t room, size_t at, size_t length, const char *text)
{
    const size_t more = strlen(text);
    if (size - length + more > room) return size;
    memmove(data + at + more, data + at + length, size - at - length);
    memcpy(data + at, text, more);
    return size - length + more;
}

/* The token that begins at or behind `at`: a string, a number or word, or one character. */
static size_t find_token(const char *data, size_t size, size_t *at)
{
    while (*at < size && isspace((unsigned char)data[*at])) ++*at;
    size_t end = *at;
    if (end == size) return 0;
    if (data[end] == '"') {
        for (end++; end < size && data[end] != '"'; end++) {}
        return (end < size ? end + 1 : size) - *at;
    }
    while (end < size && (isalnum((unsigned char)data[end]) || strchr("+-.", data[end]))) end++;
    return end > *at ? end - *at : 1;
}

static void make_value(uint64_t *random, char *value, size_t size, bool quoted)
{
    static const char *const known[] = {"null", "true", "[]", "{}", "1e999", "-0", "\"\"", "\"1 GB\"", "\"5 Gbit/s\"", "\"-1 us\"", "\"cpu\"",
                                        "[[[[[[[[", "\"\\u0000\"", "\"\\ud800\"", "9223372036854775808", "1.5", "\"1e400 GB\"", "{\"a\":1,\"a\":2}"};
    switch (fuzz_below(random, 4)) {
    case 0: snprintf(value, size, "%lld", (long long)fuzz_integer(random, 4)); break;
    case 1: snprintf(value, size, quoted ? "\"%.200g\"" : "%.17g", fuzz_real(random, 1)); break;
    case 2: snprintf(value, size, "\"%.200s\"", fuzz_text(random)); break;
    default: snprintf(value, size, "%s", known[fuzz_below(random, (int)(sizeof known / sizeof *known))]); break;
    }
}

/* The value behind some colon: what the reader understands otherwise. */
static size_t change_value(uint64_t *random, char *text, size_t size, size_t room)
{
    static const char *const known[] = {"1", "2", "3", "8", "0", "1.5", "\"1 TB\"", "\"3 us\"", "\"10 Gbit/s\"", "\"fast\"", "\"slow\"", "\"A100-40GB\"",
                                        "\"V100-32GB\"", "\"cpu\"", "true", "false", "1e12", "4096", "\"1e-300 s\"", "0.001"};
    size_t at = (size_t)fuzz_below(random, (int)size);
    while (at < size && text[at] != ':') at++;
    if (at++ >= size) return size;
    const size_t length = find_token(text, size, &at);
    return replace(text, size, room, at, length, known[fuzz_below(random, (int)(sizeof known / sizeof *known))]);
}

size_t fuzz_json(uint64_t *random, char *text, size_t size, size_t room)
{
    const int rounds = fuzz_chance(random, 0.6) ? 1 : 1 + fuzz_below(random, 4);
    char other[512];
    if (fuzz_chance(random, 0.5)) {
        for (int round = 0; round < rounds; round++) size = change_value(random, text, size, room);
        return size;
    }
    for (int round = 0; round < rounds && size > 0; round++) {
        size_t at = (size_t)fuzz_below(random, (int)size), from = (size_t)fuzz_below(random, (int)size);
        const size_t length = find_token(text, size, &at), length_from = find_token(text, size, &from);
        switch (fuzz_below(random, 5)) {
        case 0: /* another token of the text */
            snprintf(other, sizeof other, "%.*s", (int)(length_from < sizeof other ? length_from : 0), text + from);
            break;
        case 1: other[0] = '\0'; break;
        case 2: snprintf(other, sizeof other, "%.*s,%.*s", (int)(length < 200 ? length : 0), text + at, (int)(length < 200 ? length : 0), text + at); break;
        default: make_value(random, other, sizeof other, text[at < size ? at : 0] == '"'); break;
        }
        size = replace(text, size, room, at, length, other);
    }
    return size;
}
