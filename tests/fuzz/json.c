/* Mutations of JSON text: by structure (the content changes), by tokens, and by bytes. */
#include <ctype.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"

/* ---- Structure ---- */

static const char *const quantity[] = {"1 GB",
                                       "400 MB",
                                       "1 TB",
                                       "5 Gbit/s",
                                       "1e308 GB/s",
                                       "3 us",
                                       "1e-320 s",
                                       "-1 us",
                                       "0x10 GB",
                                       "nan GB",
                                       "inf s",
                                       "1 GB GB",
                                       "1e999 TFLOP/s",
                                       "1e400 GB",
                                       "  7 MB ",
                                       "7",
                                       ".",
                                       "12 parsecs",
                                       "999999999999999999999 B",
                                       "1,5 GB"};
static const char *const word[] = {
    "a",    "b",  "fast",         "slow", "cpu", "A100-40GB",    "V100-32GB",       "cuda", "tcp", "mpi",
    "eth0", "lo", "hapt-cluster", "a b",  "",    "\xe2\x80\xae", "\xf0\x9f\x92\xa9"};
static const char *const key[] = {"format",
                                  "version",
                                  "subclusters",
                                  "links",
                                  "collectives",
                                  "name",
                                  "nodes",
                                  "devices_per_node",
                                  "device",
                                  "hosts",
                                  "slowdown",
                                  "memory",
                                  "backend",
                                  "peak_flops",
                                  "memory_bandwidth",
                                  "intra_node_bandwidth",
                                  "inter_node_bandwidth",
                                  "intra_node_latency",
                                  "inter_node_latency",
                                  "between",
                                  "bandwidth",
                                  "latency",
                                  "paced",
                                  "transport",
                                  "interfaces",
                                  "ranks",
                                  "all_reduce",
                                  "padding",
                                  "fp32",
                                  "bf16",
                                  "",
                                  "unknown",
                                  "Format"};
#define ANY_OF(table) (table)[fuzz_below(random, (int)(sizeof(table) / sizeof *(table)))]

static json_t *nest(uint64_t *random, int depth)
{
    json_t *value = json_integer(1);
    for (int i = 0; i < depth; i++)
        value = i % 2 == 0 || fuzz_chance(random, 0.5) ? json_pack("[o]", value) : json_pack("{s:o}", "a", value);
    return value;
}

static json_t *repeated(uint64_t *random, int count)
{
    json_t *list = json_array();
    for (int i = 0; i < count; i++) {
        char name[16];
        snprintf(name, sizeof name, "h%d", fuzz_chance(random, 0.98) ? i : 0);
        json_array_append_new(list, json_string(name));
    }
    return list;
}

static json_t *any_value(uint64_t *random)
{
    double real = fuzz_real(random, 1.5);
    if (!isfinite(real)) real = 1e308;
    switch (fuzz_below(random, 12)) {
    case 0: return json_null();
    case 1: return json_boolean(fuzz_below(random, 2));
    case 2: return json_integer(fuzz_integer(random, 4));
    case 3: return json_integer(1 + fuzz_below(random, 70));
    case 4: return json_real(real);
    case 5:
    case 6: return json_string(ANY_OF(quantity));
    case 7: return json_string(ANY_OF(word));
    case 8: return json_object();
    case 9:
        return fuzz_chance(random, 0.5)
                   ? json_array()
                   : repeated(random, fuzz_chance(random, 0.9) ? fuzz_below(random, 20) : fuzz_below(random, 5000));
    case 10: return nest(random, 1 + fuzz_below(random, 40));
    default: return json_pack("{s:s}", ANY_OF(key), ANY_OF(quantity));
    }
}

/* A number or text near the old one; else anything. */
static json_t *near_value(uint64_t *random, const json_t *old)
{
    char text[400];
    if (json_is_integer(old) && fuzz_chance(random, 0.6))
        return json_integer(fuzz_integer(random, json_integer_value(old)));
    if (json_is_real(old) && fuzz_chance(random, 0.6)) {
        const double value = fuzz_real(random, json_real_value(old));
        return json_real(isfinite(value) ? value : -1);
    }
    if (json_is_string(old) && fuzz_chance(random, 0.5)) {
        snprintf(text, sizeof text, "%s%.100s", fuzz_chance(random, 0.5) ? "1" : "", json_string_value(old));
        const size_t length = strlen(text);
        if (fuzz_chance(random, 0.2)) snprintf(text + length, sizeof text - length, "%0250d", 0);
        if (fuzz_chance(random, 0.3) && length > 0)
            text[fuzz_below(random, (int)length)] = (char)(0x20 + fuzz_below(random, 95));
        return json_string(text);
    }
    if (json_is_boolean(old) && fuzz_chance(random, 0.5)) return json_boolean(!json_boolean_value(old));
    return any_value(random);
}

struct choice {
    uint64_t *random;
    int seen;
    json_t *parent; /* an object or an array */
    const char *key;
    size_t index;
};

/* Chooses a member of any container, each with the same chance. */
static void choose(struct choice *choice, json_t *value)
{
    const char *name;
    json_t *member;
    size_t index;
    if (json_is_object(value)) json_object_foreach(value, name, member)
        {
            if (fuzz_below(choice->random, ++choice->seen) == 0) choice->parent = value, choice->key = name;
            choose(choice, member);
        }
    else
        json_array_foreach(value, index, member)
        {
            if (fuzz_below(choice->random, ++choice->seen) == 0)
                choice->parent = value, choice->key = NULL, choice->index = index;
            choose(choice, member);
        }
}

static json_t *chosen(const struct choice *choice)
{
    return choice->key ? json_object_get(choice->parent, choice->key) : json_array_get(choice->parent, choice->index);
}

static void put(const struct choice *choice, json_t *value)
{
    char name[300];
    if (choice->key) {
        snprintf(name, sizeof name, "%s", choice->key); /* the old name and its value are removed */
        json_object_set_new(choice->parent, name, value);
    } else {
        json_array_set_new(choice->parent, choice->index, value);
    }
}

static void change_member(uint64_t *random, json_t *root)
{
    struct choice choice = {.random = random}, other = {.random = random};
    choose(&choice, root);
    choose(&other, root);
    if (!choice.parent) return;
    json_t *copy = json_deep_copy(chosen(&other));
    switch (fuzz_below(random, 10)) {
    case 0: /* leave out */
        if (choice.key)
            json_object_del(choice.parent, choice.key);
        else
            json_array_remove(choice.parent, choice.index);
        break;
    case 1: /* a copy of another part */ put(&choice, json_incref(copy)); break;
    case 2: /* an unknown name, or one from elsewhere */
        if (choice.key)
            json_object_set_new(choice.parent, ANY_OF(key), any_value(random));
        else
            json_array_append_new(choice.parent, any_value(random));
        break;
    case 3: /* rename it */
        if (choice.key) {
            json_t *value = json_incref(chosen(&choice));
            json_object_del(choice.parent, choice.key);
            json_object_set_new(choice.parent, ANY_OF(key), value);
        }
        break;
    case 4: /* many copies of it */
        for (int i = fuzz_chance(random, 0.8) ? fuzz_below(random, 4) : fuzz_below(random, 80); i >= 0 && !choice.key;
             i--)
            json_array_append_new(choice.parent, json_deep_copy(json_array_get(choice.parent, choice.index)));
        if (choice.key) put(&choice, json_pack("[O]", chosen(&choice)));
        break;
    default: put(&choice, near_value(random, chosen(&choice))); break;
    }
    json_decref(copy);
}

/* Returns 0 if the text is no JSON. */
static size_t change_structure(uint64_t *random, char *text, size_t size, size_t room)
{
    json_t *root = json_loadb(text, size, 0, NULL);
    if (!root) return 0;
    for (int rounds = fuzz_chance(random, 0.6) ? 1 : 1 + fuzz_below(random, 5); rounds > 0; rounds--)
        change_member(random, root);
    char *written = json_dumps(root, fuzz_chance(random, 0.5) ? JSON_INDENT(1) : JSON_COMPACT);
    json_decref(root);
    const size_t length = written ? strlen(written) : 0;
    if (length > 0 && length <= room) memcpy(text, written, length);
    free(written);
    return length <= room ? length : 0;
}

/* ---- Tokens ---- */

/* Replaces `length` bytes at `at` by `text`. */
static size_t replace(char *data, size_t size, size_t room, size_t at, size_t length, const char *text)
{
    const size_t more = strlen(text);
    if (size - length + more > room) return size;
    memmove(data + at + more, data + at + length, size - at - length);
    memcpy(data + at, text, more);
    return size - length + more;
}

/* The token that begins at `at` or later: a string, a number or word, or one character. */
static size_t find_token(const char *data, size_t size, size_t *at)
{
    while (*at < size && isspace((unsigned char)data[*at])) ++*at;
    size_t end = *at;
    if (end == size) return 0;
    if (data[end] == '"') {
        for (end++; end < size && data[end] != '"'; end++) {
        }
        return (end < size ? end + 1 : size) - *at;
    }
    while (end < size && (isalnum((unsigned char)data[end]) || strchr("+-.", data[end]))) end++;
    return end > *at ? end - *at : 1;
}

static void make_value(uint64_t *random, char *value, size_t size, bool quoted)
{
    static const char *const known[] = {"null",        "true",         "[]",
                                        "{}",          "1e999",        "-0",
                                        "\"\"",        "\"1 GB\"",     "\"5 Gbit/s\"",
                                        "\"-1 us\"",   "\"cpu\"",      "[[[[[[[[",
                                        "\"\\u0000\"", "\"\\ud800\"",  "9223372036854775808",
                                        "1.5",         "\"1e400 GB\"", "{\"a\":1,\"a\":2}"};
    switch (fuzz_below(random, 4)) {
    case 0: snprintf(value, size, "%lld", (long long)fuzz_integer(random, 4)); break;
    case 1: snprintf(value, size, quoted ? "\"%.200g\"" : "%.17g", fuzz_real(random, 1)); break;
    case 2: snprintf(value, size, "\"%.200s\"", fuzz_text(random)); break;
    default: snprintf(value, size, "%s", known[fuzz_below(random, (int)(sizeof known / sizeof *known))]); break;
    }
}

/* The value behind some colon becomes one that the reader may misunderstand. */
static size_t change_value(uint64_t *random, char *text, size_t size, size_t room)
{
    static const char *const known[] = {"1",
                                        "2",
                                        "3",
                                        "8",
                                        "0",
                                        "1.5",
                                        "\"1 TB\"",
                                        "\"3 us\"",
                                        "\"10 Gbit/s\"",
                                        "\"fast\"",
                                        "\"slow\"",
                                        "\"A100-40GB\"",
                                        "\"V100-32GB\"",
                                        "\"cpu\"",
                                        "true",
                                        "false",
                                        "1e12",
                                        "4096",
                                        "\"1e-300 s\"",
                                        "0.001"};
    size_t at = (size_t)fuzz_below(random, (int)size);
    while (at < size && text[at] != ':') at++;
    if (at++ >= size) return size;
    const size_t length = find_token(text, size, &at);
    return replace(text, size, room, at, length, known[fuzz_below(random, (int)(sizeof known / sizeof *known))]);
}

/* Replaces, duplicates or removes some tokens. */
static size_t change_tokens(uint64_t *random, char *text, size_t size, size_t room)
{
    const int rounds = fuzz_chance(random, 0.6) ? 1 : 1 + fuzz_below(random, 4);
    char other[512];
    for (int round = 0; round < rounds && size > 0; round++) {
        size_t at = (size_t)fuzz_below(random, (int)size), from = (size_t)fuzz_below(random, (int)size);
        const size_t length = find_token(text, size, &at), length_from = find_token(text, size, &from);
        switch (fuzz_below(random, 5)) {
        case 0: /* another token of the text */
            snprintf(other, sizeof other, "%.*s", (int)(length_from < sizeof other ? length_from : 0), text + from);
            break;
        case 1: other[0] = '\0'; break;
        case 2:
            snprintf(other, sizeof other, "%.*s,%.*s", (int)(length < 200 ? length : 0), text + at,
                     (int)(length < 200 ? length : 0), text + at);
            break;
        default: make_value(random, other, sizeof other, text[at < size ? at : 0] == '"'); break;
        }
        size = replace(text, size, room, at, length, other);
    }
    return size;
}

/* ---- Bytes ---- */

/* Makes text that JSON forbids or that is rare: broken UTF-8, duplicate names, deep nesting, long tokens, an early
 * end. */
static size_t change_text(uint64_t *random, char *text, size_t size, size_t room)
{
    static const char *const broken[] = {"\xff",         "\xc0\x80",
                                         "\xed\xa0\x80", "\xf4\x90\x80\x80",
                                         "\xe2\x82",     "\xef\xbb\xbf",
                                         "\x01",         "\\u0000",
                                         "\\ud800",      "\\ud83d\\udca9",
                                         "\\",           "\"",
                                         "\n",           "/*",
                                         "NaN",          "1e",
                                         "--1",          "+1",
                                         "01",           "0x1"};
    size_t at = size > 0 ? (size_t)fuzz_below(random, (int)size) : 0;
    char *long_text;
    switch (fuzz_below(random, 7)) {
    case 0: return at;
    case 1: return replace(text, size, room, at, 0, ANY_OF(broken));
    case 2: { /* a member twice */
        char member[300];
        while (at < size && text[at] != '"') at++;
        size_t end = at;
        while (end < size && !strchr(",}]", text[end])) end++;
        if (end == size || end - at > 200) return size;
        snprintf(member, sizeof member, "%.*s,", (int)(end - at), text + at);
        return replace(text, size, room, at, 0, member);
    }
    case 3: /* too deep for a recursive reader */
    case 4: /* longer than any name or number */
    case 5: {
        const int length = fuzz_chance(random, 0.5) ? 3000 : 1 << fuzz_below(random, 18);
        if (!(long_text = malloc((size_t)length + 1))) return size;
        memset(long_text, "[{\"19 "[fuzz_below(random, 6)], (size_t)length);
        long_text[length] = '\0';
        size = replace(text, size, room, at, 0, long_text);
        free(long_text);
        return size;
    }
    default: fuzz_flip(random, (unsigned char *)text, size); return size;
    }
}

size_t fuzz_json(uint64_t *random, char *text, size_t size, size_t room)
{
    const double way = hapt_random_unit(random);
    const int rounds = fuzz_chance(random, 0.6) ? 1 : 1 + fuzz_below(random, 4);
    if (way < 0.45) {
        const size_t changed = change_structure(random, text, size, room);
        size = changed > 0 ? changed : size;
        return fuzz_chance(random, 0.1) ? change_text(random, text, size, room) : size;
    }
    if (way < 0.65) {
        for (int round = 0; round < rounds; round++) size = change_value(random, text, size, room);
        return size;
    }
    return way < 0.85 ? change_tokens(random, text, size, room) : change_text(random, text, size, room);
}
