/* Private to src/picture: scales and charts. Each chart is one svg element of PICTURE_WIDTH px, with title and desc. */
#ifndef HAPT_PICTURE_CHARTS_H
#define HAPT_PICTURE_CHARTS_H

#include "hapt/svg.h"

#include <stdbool.h>
#include <stdint.h>

enum { PICTURE_WIDTH = 1120, PICTURE_MOST_TICKS = 24 };

/* CSS of all pictures, light and dark. Colours that stand beside each other differ in lightness. */
extern const char picture_style[];

enum picture_unit {
    PICTURE_NUMBER,
    PICTURE_SECONDS,
    PICTURE_BYTES,
    PICTURE_BYTES_PER_S,
    PICTURE_BITS_PER_S /* of byte/s */
};

struct picture_axis {
    double low, high, from_px, to_px;
    bool logarithmic;
    enum picture_unit unit;
    double largest; /* chooses the unit's prefix, if several axes share it; 0: high */
};
double picture_axis_px(const struct picture_axis *axis, double value);
/* Round values in [low, high], at most `most` of them and PICTURE_MOST_TICKS. Returns their number. */
int picture_axis_ticks(const struct picture_axis *axis, int most, double tick[PICTURE_MOST_TICKS]);
/* "ms" with *factor 1e3, for an axis up to `largest`. */
const char *picture_unit_name(enum picture_unit unit, double largest, double *factor);
/* A tick's number in the axis's unit. */
const char *picture_tick_text(const struct picture_axis *axis, double value, char text[32]);

/* Opens and closes the svg element of a chart in a page. `id` is unique in the page; title and desc are escaped. */
void picture_open(struct hapt_svg *svg, const char *id, double height, const char *title, const char *desc);
void picture_close(struct hapt_svg *svg);
/* One entry of a legend at (x, y), a swatch of `class` and a text. Returns its width in px. */
double picture_legend(struct hapt_svg *svg, double x, double y, const char *class, const char *text);

struct picture_series {
    const char *name;            /* in the legend */
    const char *class;           /* of its marks and its line */
    const char *x_name, *y_name; /* of the marks' data attributes */
    bool square;                 /* marks; else circles */
    int64_t count;
    const double *x, *y; /* [count]; points that are not finite are left out */
};
struct picture_marker { /* a vertical line */
    double x;
    const char *class, *text;
};
struct picture_chart {
    const char *id, *title, *desc, *x_label, *y_label;
    enum picture_unit x_unit, y_unit;
    bool logarithmic_x, from_zero; /* from_zero: y begins at 0 */
    int series_count;
    const struct picture_series *series;
    int marker_count;
    const struct picture_marker *marker;
};
/* Marks of a series, at most; a longer one has a mark at each k-th point and at its last. */
enum { PICTURE_MOST_MARKS = 400 };
/* The k of a series. */
int64_t picture_mark_every(int64_t count);
void picture_lines(struct hapt_svg *svg, const struct picture_chart *chart);

struct picture_segment {
    const char *class, *part; /* `part`: value of data-part and text of its title */
    double value;
};
enum { PICTURE_MOST_SEGMENTS = 3 };
/* Horizontal bars: segments from left to right, and a text behind the plot. */
struct picture_bar {
    const char *label; /* NULL: it belongs to the bar above */
    const char *key;   /* value of data-of */
    const char *text;  /* at the right end */
    int segment_count; /* 0: no bar */
    struct picture_segment segment[PICTURE_MOST_SEGMENTS];
    double limit; /* a mark at this value; 0: none */
};
struct picture_bars {
    const char *id, *title, *desc, *x_label;
    enum picture_unit unit;
    double label_px, text_px; /* widths of the columns beside the plot */
    int legend_count;
    const char *const (*legend)[2]; /* class, text */
    int count;
    const struct picture_bar *bar;
};
void picture_bars(struct hapt_svg *svg, const struct picture_bars *bars);

#endif
