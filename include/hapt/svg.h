/*
 * Writes SVG and HTML text: a buffer in memory, and a file that appears when it is complete.
 *
 * Text from files and users enters through hapt_svg_text and the functions below it alone. They escape markup, and
 * replace control characters, invalid UTF-8 and characters that change the direction of text by U+FFFD. Numbers enter
 * as attributes data-NAME with 17 digits, so that programs read the same bits. Rank-local.
 */
#ifndef HAPT_SVG_H
#define HAPT_SVG_H

#include <stdio.h>

#include "hapt/status.h"

struct hapt_svg {
    FILE *stream;
    char *text;  /* the buffer; valid after hapt_svg_save or fflush(stream) */
    size_t size; /* bytes */
};

/* HAPT_ERR_MEMORY. hapt_svg_release frees the buffer also after a failure. */
enum hapt_status hapt_svg_init(struct hapt_svg *svg);
void hapt_svg_release(struct hapt_svg *svg);
/* Writes the buffer to a new file beside `path` and renames it. HAPT_ERR_MEMORY: the buffer is not complete.
 * HAPT_ERR_IO: the file cannot be written; the old file of that name is unchanged. */
enum hapt_status hapt_svg_save(struct hapt_svg *svg, const char *path);

/* Markup, as printf. `format` and its arguments must not contain text from files. */
void hapt_svg_put(struct hapt_svg *svg, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Text from anywhere, escaped. Valid in elements and in attributes with double quotes. */
void hapt_svg_text(struct hapt_svg *svg, const char *text);
/* The same, as printf; the result is cut to 2,000 bytes. */
void hapt_svg_textf(struct hapt_svg *svg, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* ` data-NAME="VALUE"` with 17 digits. */
void hapt_svg_number(struct hapt_svg *svg, const char *name, double value);

/* A text element at (x, y). `class` names its style; `anchor` is "start", "middle" or "end". A text wider than `width`
 * px at `size` px ends in an ellipsis, and its title has the whole text. */
void hapt_svg_label(struct hapt_svg *svg, double x, double y, double width, double size, const char *class,
                    const char *anchor, const char *text);
/* An upper estimate of the width of a text in px, for sans-serif fonts of `size` px. */
double hapt_svg_width(const char *text, double size);

#endif
