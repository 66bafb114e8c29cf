/* Text from files and users: is it plain, and can a terminal show it? */
#ifndef HAPT_TEXT_H
#define HAPT_TEXT_H

#include <stdbool.h>
#include <stddef.h>

/* State of the UTF-8 check, kept between blocks. Begin with {.plain = true}. */
struct hapt_text {
    bool plain;         /* so far UTF-8 without control characters other than white space */
    int missing;        /* bytes that the current character still needs */
    unsigned low, high; /* bounds of its next byte */
};

void hapt_text_read(struct hapt_text *text, const unsigned char *bytes, size_t size);
/* Replaces what is not UTF-8, and control characters, by '?': names from hostile files must not control the terminal.
 * `lines`: tabs and newlines stay. */
void hapt_text_make_printable(char *text, bool lines);
/* The part of a path after its last '/'. Borrowed. */
const char *hapt_text_base_name(const char *path);

/* For "did you mean": the name that a word is most like. Begin with {0}; `name` is borrowed, and NULL while none is
 * near: three edits are near, of short words one or two. */
struct hapt_nearest {
    const char *name;
    int distance; /* letters to insert, delete or replace (Levenshtein) */
};

void hapt_text_consider(struct hapt_nearest *nearest, const char *word, const char *name);

#endif
