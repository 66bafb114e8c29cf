/* Scales, line charts and bars. */
#include "charts.h"

#include <math.h>

enum { LEFT = 84, RIGHT = 24, PLOT_HEIGHT = 230, ROW = 18 };

double picture_axis_px(const struct picture_axis *axis, double value)
{
    const double low = axis->logarithmic ? log(axis->low) : axis->low;
    const double span = (axis->logarithmic ? log(axis->high) : axis->high) - low;
    const double at = (axis->logarithmic ? log(value) : value) - low;
    return axis->from_px + (span > 0 ? at / span : 0.5) * (axis->to_px - axis->from_px);
}

const char *picture_unit_name(enum picture_unit unit, double largest, double *factor)
{
    static const char *const names[][6] = {
        [PICTURE_BYTES] = {"B", "kB", "MB", "GB", "TB", "PB"},
        [PICTURE_BYTES_PER_S] = {"B/s", "kB/s", "MB/s", "GB/s", "TB/s", "PB/s"},
        [PICTURE_BITS_PER_S] = {"bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s", "Pbit/s"}};
    *factor = 1;
    if (unit == PICTURE_NUMBER) return "";
    if (unit == PICTURE_SECONDS) {
        *factor = largest < 1e-3 ? 1e6 : largest < 1 ? 1e3 : largest < 120 ? 1 : 1 / 60.0;
        return largest < 1e-3 ? "us" : largest < 1 ? "ms" : largest < 120 ? "s" : "min";
    }
    if (unit == PICTURE_BITS_PER_S) *factor = 8;
    int power = 0;
    for (; power < 5 && largest * *factor >= 1000; power++) *factor /= 1000;
    return names[unit][power];
}

static const char *axis_unit(const struct picture_axis *axis, double *factor)
{
    return picture_unit_name(axis->unit, axis->largest > 0 ? axis->largest : axis->high, factor);
}

/* The smallest of 1, 2, 5 x 10^k that is at least `value`. */
static double round_number(double value)
{
    const double decade = pow(10, floor(log10(value)));
    const double share = value / decade;
    return decade * (share <= 1.0001 ? 1 : share <= 2.0001 ? 2 : share <= 5.0001 ? 5 : 10);
}

static int linear_ticks(double low, double high, int most, double tick[PICTURE_MOST_TICKS])
{
    int count = 0;
    if (!(high > low)) {
        tick[0] = low;
        return 1;
    }
    const double step = round_number((high - low) / (most > 1 ? most - 1 : 1));
    for (double at = ceil(low / step - 1e-6); at * step <= high + 1e-6 * step && count < most; at++)
        tick[count++] = at == 0 ? 0 : at * step;
    return count;
}

static int decade_ticks(double low, double high, int most, bool between, double tick[PICTURE_MOST_TICKS])
{
    static const double share[] = {1, 2, 5};
    int count = 0;
    for (int power = (int)floor(log10(low)); power <= (int)ceil(log10(high)); power++)
        for (int k = 0; k < (between ? 3 : 1); k++) {
            const double at = share[k] * pow(10, power);
            if (at < low * (1 - 1e-9) || at > high * (1 + 1e-9)) continue;
            if (count == most) return most + 1;
            tick[count++] = at;
        }
    return count;
}

int picture_axis_ticks(const struct picture_axis *axis, int most, double tick[PICTURE_MOST_TICKS])
{
    double factor;
    int count = 0;
    if (most > PICTURE_MOST_TICKS - 1) most = PICTURE_MOST_TICKS - 1;
    axis_unit(axis, &factor);
    const double low = axis->low * factor, high = axis->high * factor;
    if (axis->logarithmic) {
        count = decade_ticks(low, high, most, true, tick);
        if (count > most) count = decade_ticks(low, high, most, false, tick);
        if (count > most) count = most;
    }
    if (count < 2) count = linear_ticks(low, high, most, tick);
    for (int t = 0; t < count; t++) tick[t] /= factor;
    return count;
}

const char *picture_tick_text(const struct picture_axis *axis, double value, char text[32])
{
    double factor;
    axis_unit(axis, &factor);
    snprintf(text, 32, "%.6g", value * factor);
    return text;
}

void picture_open(struct hapt_svg *svg, const char *id, double height, const char *title, const char *desc)
{
    hapt_svg_put(svg,
                 "<svg id=\"%s\" viewBox=\"0 0 %d %.0f\" width=\"%d\" height=\"%.0f\" role=\"img\" "
                 "aria-labelledby=\"%s-title %s-desc\">\n<title id=\"%s-title\">",
                 id, PICTURE_WIDTH, height, PICTURE_WIDTH, height, id, id, id);
    hapt_svg_text(svg, title);
    hapt_svg_put(svg, "</title>\n<desc id=\"%s-desc\">", id);
    hapt_svg_text(svg, desc);
    hapt_svg_put(svg, "</desc>\n");
}

void picture_close(struct hapt_svg *svg)
{
    hapt_svg_put(svg, "</svg>\n");
}

double picture_legend(struct hapt_svg *svg, double x, double y, const char *class, const char *text)
{
    hapt_svg_put(svg, "<rect class=\"%s\" x=\"%.1f\" y=\"%.1f\" width=\"14\" height=\"10\"/>", class, x, y - 9);
    hapt_svg_label(svg, x + 20, y, 600, 12, "legend", "start", text);
    return 20 + hapt_svg_width(text, 12) + 18;
}

/* "step time (ms)" */
static void axis_label(struct hapt_svg *svg, const struct picture_axis *axis, const char *name, double x, double y,
                       const char *anchor)
{
    double factor;
    char text[96];
    const char *unit = axis_unit(axis, &factor);
    snprintf(text, sizeof text, "%s%s%s%s", name, unit[0] ? " (" : "", unit, unit[0] ? ")" : "");
    hapt_svg_label(svg, x, y, 400, 12, "soft", anchor, text);
}

static void put_y_grid(struct hapt_svg *svg, const struct picture_axis *x, const struct picture_axis *y)
{
    double tick[PICTURE_MOST_TICKS];
    char text[32];
    const int count = picture_axis_ticks(y, 7, tick);
    for (int t = 0; t < count; t++) {
        const double at = picture_axis_px(y, tick[t]);
        hapt_svg_put(svg, "<line class=\"grid\" x1=\"%.2f\" y1=\"%.2f\" x2=\"%.2f\" y2=\"%.2f\"/>\n", x->from_px, at,
                     x->to_px, at);
        hapt_svg_label(svg, x->from_px - 8, at + 4, LEFT - 10, 12, "soft", "end", picture_tick_text(y, tick[t], text));
    }
}

/* Ticks of the x axis at y px, with lines up to `top`. A tick that would touch the one before it is left out. */
static void put_x_grid(struct hapt_svg *svg, const struct picture_axis *x, double top, double bottom)
{
    double tick[PICTURE_MOST_TICKS], free_px = -INFINITY;
    char text[32];
    const int count = picture_axis_ticks(x, 12, tick);
    for (int t = 0; t < count; t++) {
        const double at = picture_axis_px(x, tick[t]);
        const double half = hapt_svg_width(picture_tick_text(x, tick[t], text), 12) / 2;
        hapt_svg_put(svg, "<line class=\"grid\" x1=\"%.2f\" y1=\"%.2f\" x2=\"%.2f\" y2=\"%.2f\"/>\n", at, top, at,
                     bottom);
        if (at - half < free_px) continue;
        hapt_svg_label(svg, at, bottom + 16, 120, 12, "soft", "middle", text);
        free_px = at + half + 6;
    }
}

int64_t picture_mark_every(int64_t count)
{
    return count <= PICTURE_MOST_MARKS ? 1 : (count + PICTURE_MOST_MARKS - 1) / PICTURE_MOST_MARKS;
}

static bool has_mark(const struct picture_series *series, int64_t i)
{
    return (i % picture_mark_every(series->count) == 0 || i == series->count - 1) && isfinite(series->x[i]) &&
           isfinite(series->y[i]);
}

static void put_series(struct hapt_svg *svg, const struct picture_axis *x, const struct picture_axis *y,
                       const struct picture_series *series, int number)
{
    int64_t shown = 0;
    hapt_svg_put(svg, "<polyline class=\"line%s\" points=\"", number > 0 ? " second" : "");
    for (int64_t i = 0; i < series->count; i++)
        if (has_mark(series, i) && ++shown)
            hapt_svg_put(svg, "%.2f,%.2f ", picture_axis_px(x, series->x[i]), picture_axis_px(y, series->y[i]));
    hapt_svg_put(svg, "\"/>\n");
    const double radius = shown > 120 ? 1.6 : 3;
    for (int64_t i = 0; i < series->count; i++) {
        if (!has_mark(series, i)) continue;
        const double at_x = picture_axis_px(x, series->x[i]), at_y = picture_axis_px(y, series->y[i]);
        char text[2][32];
        if (series->square)
            hapt_svg_put(svg, "<rect class=\"%s\" x=\"%.2f\" y=\"%.2f\" width=\"%g\" height=\"%g\"", series->class,
                         at_x - radius, at_y - radius, 2 * radius, 2 * radius);
        else
            hapt_svg_put(svg, "<circle class=\"%s\" cx=\"%.2f\" cy=\"%.2f\" r=\"%g\"", series->class, at_x, at_y,
                         radius);
        hapt_svg_number(svg, series->x_name, series->x[i]);
        hapt_svg_number(svg, series->y_name, series->y[i]);
        hapt_svg_put(svg, "><title>");
        hapt_svg_textf(svg, "%s: %s at %s", series->name, picture_tick_text(y, series->y[i], text[0]),
                       picture_tick_text(x, series->x[i], text[1]));
        hapt_svg_put(svg, "</title></%s>\n", series->square ? "rect" : "circle");
    }
}

/* Sets both axes to the values of all series. */
static void find_ranges(const struct picture_chart *chart, struct picture_axis *x, struct picture_axis *y)
{
    x->low = y->low = INFINITY;
    x->high = y->high = -INFINITY;
    for (int s = 0; s < chart->series_count; s++)
        for (int64_t i = 0; i < chart->series[s].count; i++) {
            const double a = chart->series[s].x[i], b = chart->series[s].y[i];
            if (!isfinite(a) || !isfinite(b)) continue;
            x->low = fmin(x->low, a);
            x->high = fmax(x->high, a);
            y->low = fmin(y->low, b);
            y->high = fmax(y->high, b);
        }
    if (!(x->low <= x->high)) x->low = y->low = 0, x->high = y->high = 1;
    if (chart->from_zero) y->low = fmin(y->low, 0);
    const double margin = y->high > y->low ? 0.05 * (y->high - y->low) : 0.5 * fabs(y->high) + 1e-12;
    y->high += margin;
    if (!chart->from_zero) y->low -= margin;
}

void picture_lines(struct hapt_svg *svg, const struct picture_chart *chart)
{
    struct picture_axis x = {.from_px = LEFT, .to_px = PICTURE_WIDTH - RIGHT, .unit = chart->x_unit};
    struct picture_axis y = {.unit = chart->y_unit};
    find_ranges(chart, &x, &y);
    x.logarithmic = chart->logarithmic_x && x.low > 0 && x.high > x.low;
    const double top = 30 + ROW * chart->marker_count + 8, bottom = top + PLOT_HEIGHT;
    y.from_px = bottom;
    y.to_px = top;
    picture_open(svg, chart->id, bottom + 46, chart->title, chart->desc);
    axis_label(svg, &y, chart->y_label, 8, 16, "start");
    double at = LEFT + 240;
    for (int s = 0; s < chart->series_count; s++)
        at += picture_legend(svg, at, 16, chart->series[s].class, chart->series[s].name);
    put_y_grid(svg, &x, &y);
    put_x_grid(svg, &x, top, bottom);
    hapt_svg_put(svg, "<rect class=\"frame\" x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%d\"/>\n", x.from_px, top,
                 x.to_px - x.from_px, PLOT_HEIGHT);
    axis_label(svg, &x, chart->x_label, x.to_px, bottom + 36, "end");
    for (int k = 0; k < chart->marker_count; k++) {
        const struct picture_marker *marker = &chart->marker[k];
        if (!(marker->x >= x.low && marker->x <= x.high)) continue;
        const double px = picture_axis_px(&x, marker->x), text_y = 30 + ROW * k + 8;
        const bool left = px > PICTURE_WIDTH / 2.0;
        hapt_svg_put(svg, "<line class=\"marker %s\" x1=\"%.2f\" y1=\"%.2f\" x2=\"%.2f\" y2=\"%.2f\"", marker->class,
                     px, text_y - 10, px, bottom);
        hapt_svg_number(svg, "value", marker->x);
        hapt_svg_put(svg, "/>\n");
        hapt_svg_label(svg, left ? px - 6 : px + 6, text_y, left ? px - 16 : x.to_px - px - 6, 12, "strong",
                       left ? "end" : "start", marker->text);
    }
    for (int s = 0; s < chart->series_count; s++) put_series(svg, &x, &y, &chart->series[s], s);
    picture_close(svg);
}

enum { BAR_TOP = 34, BAR_HEIGHT = 15, BAR_PITCH = 19, BAR_GAP = 7 };

static void put_bar(struct hapt_svg *svg, const struct picture_axis *x, const struct picture_bar *bar, double y)
{
    double from = 0;
    for (int s = 0; s < bar->segment_count; s++) {
        const struct picture_segment *segment = &bar->segment[s];
        char text[32];
        const double left = picture_axis_px(x, from), right = picture_axis_px(x, from + segment->value);
        from += segment->value;
        hapt_svg_put(svg, "<rect class=\"bar %s\" data-of=\"", segment->class);
        hapt_svg_text(svg, bar->key);
        hapt_svg_put(svg, "\" data-part=\"%s\"", segment->part);
        hapt_svg_number(svg, "value", segment->value);
        hapt_svg_put(svg, " x=\"%.3f\" y=\"%.2f\" width=\"%.3f\" height=\"%d\"><title>", left, y, right - left,
                     BAR_HEIGHT);
        hapt_svg_textf(svg, "%s: %s", segment->part, picture_tick_text(x, segment->value, text));
        hapt_svg_put(svg, "</title></rect>\n");
    }
    if (bar->limit > 0) {
        const double at = picture_axis_px(x, bar->limit);
        hapt_svg_put(svg, "<line class=\"limit\" data-of=\"");
        hapt_svg_text(svg, bar->key);
        hapt_svg_put(svg, "\"");
        hapt_svg_number(svg, "value", bar->limit);
        hapt_svg_put(svg, " x1=\"%.3f\" y1=\"%.2f\" x2=\"%.3f\" y2=\"%.2f\"/>\n", at, y - 2, at, y + BAR_HEIGHT + 2);
    }
}

void picture_bars(struct hapt_svg *svg, const struct picture_bars *bars)
{
    struct picture_axis x = {
        .from_px = bars->label_px + 16, .to_px = PICTURE_WIDTH - bars->text_px - 16, .unit = bars->unit};
    double height = BAR_TOP;
    for (int b = 0; b < bars->count; b++) {
        double sum = 0;
        for (int s = 0; s < bars->bar[b].segment_count; s++) sum += bars->bar[b].segment[s].value;
        x.high = fmax(x.high, fmax(sum, bars->bar[b].limit));
        height += BAR_PITCH + (bars->bar[b].label && b > 0 ? BAR_GAP : 0);
    }
    if (!(x.high > 0)) x.high = 1;
    const double bottom = height + 4;
    picture_open(svg, bars->id, bottom + 44, bars->title, bars->desc);
    double at = bars->label_px + 16, y = BAR_TOP;
    for (int k = 0; k < bars->legend_count; k++)
        at += picture_legend(svg, at, 16, bars->legend[k][0], bars->legend[k][1]);
    put_x_grid(svg, &x, BAR_TOP - 6, bottom);
    axis_label(svg, &x, bars->x_label, x.to_px, bottom + 36, "end");
    for (int b = 0; b < bars->count; b++) {
        const struct picture_bar *bar = &bars->bar[b];
        if (bar->label && b > 0) y += BAR_GAP;
        if (bar->label) hapt_svg_label(svg, bars->label_px + 8, y + 12, bars->label_px, 12, "name", "end", bar->label);
        put_bar(svg, &x, bar, y);
        hapt_svg_label(svg, x.to_px + 10, y + 12, bars->text_px, 12, "value", "start", bar->text);
        y += BAR_PITCH;
    }
    picture_close(svg);
}
