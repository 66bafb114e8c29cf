/* The buffer of SVG and HTML text: escaping, labels of limited width, and the file. */
#include "hapt/svg.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "hapt/atomic_file.h"

enum { MOST_TEXT = 2000 };
#define REPLACEMENT 0xFFFDu

enum hapt_status hapt_svg_init(struct hapt_svg *svg)
{
    *svg = (struct hapt_svg){0};
    svg->stream = open_memstream(&svg->text, &svg->size);
    return svg->stream ? HAPT_OK : hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for a picture");
}

void hapt_svg_release(struct hapt_svg *svg)
{
    if (svg->stream) fclose(svg->stream);
    free(svg->text);
    *svg = (struct hapt_svg){0};
}

static int write_text(int descriptor, const void *content)
{
    const struct hapt_svg *svg = content;
    for (size_t done = 0; done < svg->size;) {
        const ssize_t count = write(descriptor, svg->text + done, svg->size - done);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) return count < 0 ? errno : EIO;
        done += (size_t)count;
    }
    return 0;
}

enum hapt_status hapt_svg_save(struct hapt_svg *svg, const char *path)
{
    if (ferror(svg->stream) || fflush(svg->stream) != 0)
        return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for a picture");
    return hapt_atomic_file_replace(path, write_text, svg);
}

void hapt_svg_put(struct hapt_svg *svg, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vfprintf(svg->stream, format, list);
    va_end(list);
}

/* Reads one character of UTF-8 and moves *text behind it; REPLACEMENT for an invalid byte. */
static unsigned next_character(const char **text)
{
    const unsigned char *at = (const unsigned char *)*text;
    static const unsigned least[] = {0, 0x80, 0x800, 0x10000};
    const int more = at[0] < 0x80                    ? 0
                     : at[0] >= 0xC2 && at[0] < 0xE0 ? 1
                     : (at[0] & 0xF0) == 0xE0        ? 2
                     : at[0] >= 0xF0 && at[0] < 0xF5 ? 3
                                                     : -1;
    unsigned code = more <= 0 ? at[0] : at[0] & (0x3Fu >> more);
    *text += 1;
    if (more < 0) return REPLACEMENT;
    for (int k = 1; k <= more; k++) {
        if ((at[k] & 0xC0) != 0x80) return REPLACEMENT;
        code = code << 6 | (at[k] & 0x3Fu);
    }
    if (code < least[more] || code > 0x10FFFF) return REPLACEMENT;
    *text += more;
    return code;
}

/* Control characters, surrogates, non-characters, and marks that change the direction of the text around them. */
static bool is_forbidden(unsigned code)
{
    return code < 0x20 || (code >= 0x7F && code < 0xA0) || (code >= 0xD800 && code < 0xE000) ||
           (code & 0xFFFE) == 0xFFFE || (code >= 0x200B && code <= 0x200F) || (code >= 0x2028 && code <= 0x202E) ||
           (code >= 0x2060 && code <= 0x206F) || code == 0xFEFF;
}

static void put_character(FILE *stream, unsigned code)
{
    const char *name = code == '<'    ? "&lt;"
                       : code == '>'  ? "&gt;"
                       : code == '&'  ? "&amp;"
                       : code == '"'  ? "&quot;"
                       : code == '\'' ? "&#39;"
                                      : NULL;
    if (name)
        fputs(name, stream);
    else if (is_forbidden(code))
        fputs("&#xFFFD;", stream);
    else if (code < 0x80)
        fputc((int)code, stream);
    else
        fprintf(stream, "&#x%X;", code);
}

void hapt_svg_text(struct hapt_svg *svg, const char *text)
{
    while (*text) put_character(svg->stream, next_character(&text));
}

void hapt_svg_textf(struct hapt_svg *svg, const char *format, ...)
{
    char text[MOST_TEXT];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    hapt_svg_text(svg, text);
}

void hapt_svg_number(struct hapt_svg *svg, const char *name, double value)
{
    hapt_svg_put(svg, " data-%s=\"%.17g\"", name, value);
}

/* Share of the font size that a character takes at most in usual sans-serif fonts (the widest: DejaVu Sans, Verdana).
 */
static double character_width(unsigned code)
{
    if (code >= 0x80) return code < 0x1100 ? 0.8 : 1.05;
    if (strchr("ijl.,:;'|!()[] ", (int)code)) return 0.42;
    if (strchr("mwMW@%", (int)code)) return 1.02;
    return code >= 'A' && code <= 'Z' ? 0.78 : 0.65;
}

double hapt_svg_width(const char *text, double size)
{
    double width = 0;
    while (*text) width += size * character_width(next_character(&text));
    return width;
}

void hapt_svg_label(struct hapt_svg *svg, double x, double y, double width, double size, const char *class,
                    const char *anchor, const char *text)
{
    const bool fits = hapt_svg_width(text, size) <= width;
    hapt_svg_put(svg, "<text class=\"%s\" x=\"%.2f\" y=\"%.2f\" font-size=\"%g\" text-anchor=\"%s\">", class, x, y,
                 size, anchor);
    double used = size; /* the ellipsis */
    const char *at = text;
    while (*at && !fits) {
        const unsigned code = next_character(&at);
        used += size * character_width(code);
        if (used > width) break;
        put_character(svg->stream, code);
    }
    if (fits)
        hapt_svg_text(svg, text);
    else {
        hapt_svg_put(svg, "&#x2026;<title>");
        hapt_svg_text(svg, text);
        hapt_svg_put(svg, "</title>");
    }
    hapt_svg_put(svg, "</text>\n");
}
