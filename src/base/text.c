#include "hapt/text.h"

#include <string.h>

static void begin_character(struct hapt_text *text, unsigned char byte)
{
    text->low = 0x80;
    text->high = 0xbf;
    if (byte < 0x80) {
        text->plain = (byte >= 0x20 && byte != 0x7f) || (byte >= '\t' && byte <= '\r');
        return;
    }
    text->missing = byte >= 0xf0 ? 3 : byte >= 0xe0 ? 2 : 1;
    text->plain = byte >= 0xc2 && byte <= 0xf4;
    if (byte == 0xe0) text->low = 0xa0; /* lower bytes: an overlong form */
    if (byte == 0xf0) text->low = 0x90;
    if (byte == 0xed) text->high = 0x9f; /* higher bytes: surrogates */
    if (byte == 0xf4) text->high = 0x8f; /* higher bytes: above U+10FFFF */
}

void hapt_text_read(struct hapt_text *text, const unsigned char *bytes, size_t size)
{
    for (size_t i = 0; i < size && text->plain; i++) {
        if (text->missing == 0) {
            begin_character(text, bytes[i]);
            continue;
        }
        text->plain = bytes[i] >= text->low && bytes[i] <= text->high;
        text->missing--;
        text->low = 0x80;
        text->high = 0xbf;
    }
}

/* Bytes of the character at `text`; 0: it is no plain one. */
static size_t character(const char *text)
{
    struct hapt_text state = {.plain = true};
    for (size_t size = 0; text[size]; size++) {
        const unsigned char byte = (unsigned char)text[size];
        hapt_text_read(&state, &byte, 1);
        if (!state.plain) return 0;
        if (state.missing == 0) return size + 1;
    }
    return 0;
}

void hapt_text_make_printable(char *text, bool lines)
{
    while (*text) {
        const size_t size = character(text);
        const bool white = *text >= '\t' && *text <= '\r', kept = lines && (*text == '\t' || *text == '\n');
        if (size == 0 || (white && !kept)) *text = '?';
        text += size > 0 ? size : 1;
    }
}

const char *hapt_text_base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* Number of insertions, deletions and replacements of letters (Levenshtein). */
static int edit_distance(const char *a, const char *b)
{
    enum { MAX_LENGTH = 40 };
    int row[MAX_LENGTH + 1];
    const int width = (int)strlen(b);
    if (width > MAX_LENGTH) return MAX_LENGTH;
    for (int j = 0; j <= width; j++) row[j] = j;
    for (int i = 1; a[i - 1]; i++) {
        int corner = row[0];
        row[0] = i;
        for (int j = 1; j <= width; j++) {
            const int change = corner + (a[i - 1] != b[j - 1]);
            corner = row[j];
            const int insert = row[j - 1] + 1, erase = row[j] + 1;
            row[j] = change < insert ? (change < erase ? change : erase) : (insert < erase ? insert : erase);
        }
    }
    return row[width];
}

void hapt_text_consider(struct hapt_nearest *nearest, const char *word, const char *name)
{
    const size_t length = strlen(word);
    const int limit = length < 4 ? 1 : length < 7 ? 2 : 3, distance = edit_distance(word, name);
    if (distance > limit || (nearest->name && distance >= nearest->distance)) return;
    *nearest = (struct hapt_nearest){name, distance};
}
