/* The check of UTF-8 against glibc's iconv, on random bytes near valid text; texts that a terminal can show. */
#include "hapt/text.h"

#include <iconv.h>
#include <string.h>

#include "hapt/env.h"
#include "test.h"

static iconv_t converter;

static int below(uint64_t *seed, int count)
{
    return (int)(hapt_random_unit(seed) * count);
}

static bool converts(const unsigned char *bytes, size_t size)
{
    char *in = (char *)bytes, room[256], *out = room;
    size_t left = size, space = sizeof room;
    iconv(converter, NULL, NULL, NULL, NULL);
    return iconv(converter, &in, &left, &out, &space) != (size_t)-1 && left == 0;
}

static bool has_control(const unsigned char *bytes, size_t size)
{
    for (size_t i = 0; i < size; i++)
        if ((bytes[i] < 0x20 && !strchr("\t\n\v\f\r", bytes[i])) || bytes[i] == 0x7f || bytes[i] == 0) return true;
    return false;
}

/* Bytes that are often characters of one to four bytes, sometimes damaged. */
static size_t draw(uint64_t *seed, unsigned char *bytes)
{
    static const char *const piece[] = {"a",
                                        "~",
                                        "\n",
                                        "\xc2\x80",
                                        "\xdf\xbf",
                                        "\xe0\xa0\x80",
                                        "\xed\x9f\xbf",
                                        "\xee\x80\x80",
                                        "\xef\xbf\xbf",
                                        "\xf0\x90\x80\x80",
                                        "\xf4\x8f\xbf\xbf",
                                        "\x1b["};
    size_t size = 0;
    for (int k = 1 + below(seed, 6); k > 0; k--) {
        const char *text = piece[below(seed, sizeof piece / sizeof piece[0])];
        memcpy(&bytes[size], text, strlen(text));
        size += strlen(text);
    }
    if (below(seed, 2)) bytes[below(seed, (int)size)] = (unsigned char)below(seed, 256);
    return size;
}

static void random_bytes(void)
{
    uint64_t seed = 7;
    int plain = 0;
    for (int k = 0; k < 100000; k++) {
        unsigned char bytes[64];
        const size_t size = draw(&seed, bytes), first = (size_t)below(&seed, (int)size + 1);
        struct hapt_text text = {.plain = true};
        hapt_text_read(&text, bytes, first); /* in two blocks */
        hapt_text_read(&text, bytes + first, size - first);
        const bool expected = converts(bytes, size) && !has_control(bytes, size);
        CHECK((text.plain && text.missing == 0) == expected);
        plain += expected;
        char shown[65] = "";
        memcpy(shown, bytes, size);
        shown[size] = 0;
        hapt_text_make_printable(shown, below(&seed, 2));
        const size_t left = strlen(shown);
        CHECK(converts((unsigned char *)shown, left) && !has_control((unsigned char *)shown, left));
    }
    CHECK(plain > 10000 && plain < 90000);
}

static void by_hand(void)
{
    char line[] = "a\tb\nc\x1b[31m\xda \xc3\xa4\xe2\x82", lines[] = "a\tb\nc\x1b[31m\xda \xc3\xa4\xe2\x82";
    hapt_text_make_printable(line, false);
    hapt_text_make_printable(lines, true);
    CHECK(strcmp(line, "a?b?c?[31m? \xc3\xa4??") == 0);
    CHECK(strcmp(lines, "a\tb\nc?[31m? \xc3\xa4??") == 0);
}

/* Distances counted by hand. */
static void near_names(void)
{
    const struct {
        const char *word, *names[3], *nearest;
    } cases[] = {
        {"steps", {"step", "steps", "stripes"}, "steps"},
        {"stpes", {"slow", "steps"}, "steps"},
        {"abcd", {"abxy", "abcx"}, "abcx"},
        {"abc", {"axy"}, NULL},
        {"abcdefg", {"abcdxyz"}, "abcdxyz"},
        {"abcdefg", {"abcwxyz"}, NULL},
        {"", {"a"}, "a"},
        {"", {"ab"}, NULL},
    };
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        struct hapt_nearest nearest = {0};
        for (int n = 0; n < 3 && cases[c].names[n]; n++) hapt_text_consider(&nearest, cases[c].word, cases[c].names[n]);
        CHECK(cases[c].nearest ? nearest.name && !strcmp(nearest.name, cases[c].nearest) : !nearest.name);
    }
}

int main(void)
{
    converter = iconv_open("UTF-32LE", "UTF-8");
    CHECK(converter != (iconv_t)-1);
    RUN(random_bytes);
    RUN(by_hand);
    RUN(near_names);
    iconv_close(converter);
    return test_finish();
}
