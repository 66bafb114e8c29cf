/* The page of a plan (hapt plan --html), and the file of a cluster (hapt topology --svg). */
#include <math.h>

#include "page.h"

static enum hapt_status fill_rival(const struct hapt_compare_row *row, struct hapt_arena *arena,
                                   struct picture_bar *bar, int *bars)
{
    const bool best = row->ratio <= 1;
    char text[32];
    struct picture_bar *own = &bar[(*bars)++];
    *own = (struct picture_bar){.label = row->name, .key = row->name, .text = "no plan"};
    if (row->plan) {
        const double step_s = row->plan->simulated_s;
        own->text = isnan(row->ratio) ? hapt_arena_strdup(arena, hapt_units_time(step_s, text))
                                      : hapt_arena_printf(arena, "%s, ratio %.3f", hapt_units_time(step_s, text),
                                                          row->ratio * step_s / hapt_compare_step_s(row));
        own->segment_count = 1;
        own->segment[0] = (struct picture_segment){best ? "best" : "plain", "step", step_s};
    }
    if (!own->text) return HAPT_ERR_MEMORY;
    if (!row->pipelines) return HAPT_OK;
    own = &bar[(*bars)++];
    *own = (struct picture_bar){.key = hapt_arena_printf(arena, "%s, pipelines", row->name),
                                .text = hapt_arena_printf(arena, "%s, %d pipelines",
                                                          hapt_units_time(row->pipelines->simulated_s, text),
                                                          row->pipelines->count),
                                .segment_count = 1,
                                .segment = {{"measured", "step", row->pipelines->simulated_s}}};
    return own->key && own->text ? HAPT_OK : HAPT_ERR_MEMORY;
}

static void put_share(struct hapt_svg *svg, double share)
{
    if (isnan(share))
        hapt_svg_put(svg, "<td>-</td>");
    else
        hapt_svg_put(svg, "<td>%.1f %%</td>", 100 * share);
}

static void put_rival(struct hapt_svg *svg, const struct hapt_compare_row *row)
{
    const struct hapt_plan *plan = row->plan;
    char text[3][32];
    hapt_svg_put(svg, "<tr class=\"rival\" data-name=\"");
    hapt_svg_text(svg, row->name);
    hapt_svg_put(svg, "\"");
    if (plan) hapt_svg_number(svg, "simulated-s", plan->simulated_s);
    hapt_svg_put(svg, "><td>");
    hapt_svg_text(svg, row->name);
    hapt_svg_put(svg, "</td><td class=\"text\">%s%s</td>", hapt_schedule_kind_name(row->schedule),
                 plan && plan->blocking ? ", blocking" : "");
    if (!plan) {
        hapt_svg_put(svg, "<td class=\"text\" colspan=\"7\">no plan: ");
        hapt_svg_text(svg, row->reason ? row->reason : "unknown");
        hapt_svg_put(svg, "</td></tr>\n");
        return;
    }
    const double mfu = hapt_plan_mfu(plan);
    hapt_svg_put(svg, "<td>%s</td><td>%s</td><td>%s</td>", hapt_units_time(plan->simulated_s, text[0]),
                 hapt_units_time(plan->t_max_s, text[1]),
                 row->boundary < 0 ? "-" : hapt_units_time(row->comm_s, text[2]));
    put_share(svg, row->overlap);
    put_share(svg, plan->balance_eta);
    put_share(svg, mfu > 0 ? mfu : NAN);
    hapt_svg_put(svg, "<td>%d</td></tr>\n", plan->stage_count);
}

static enum hapt_status section_rivals(struct hapt_svg *svg, const struct hapt_picture_plan *picture,
                                       struct hapt_arena *arena)
{
    static const char *const legend[][2] = {{"best", "hapt"},
                                            {"plain", "another system, or hapt without a part"},
                                            {"measured", "as independent pipelines, which hapt cannot run"}};
    struct picture_bar *bar;
    int bars = 0;
    HAPT_NEW(bar, arena, 2 * picture->row_count);
    for (int r = 0; r < picture->row_count; r++) HAPT_TRY(fill_rival(&picture->row[r], arena, bar, &bars));
    hapt_svg_put(
        svg, "<section id=\"rivals\">\n<h2>Rivals</h2>\n<p>Simulated steps of the plans that other systems would make "
             "of the same "
             "profile, and of hapt without one of its parts. A ratio is relative to hapt's best plan.</p>\n<figure>\n");
    picture_bars(svg, &(struct picture_bars){.id = "rival-steps",
                                             .title = "Simulated step of each system",
                                             .desc = "A bar for each system; shorter is better.",
                                             .x_label = "simulated step",
                                             .unit = PICTURE_SECONDS,
                                             .label_px = 170,
                                             .text_px = 190,
                                             .legend_count = 3,
                                             .legend = legend,
                                             .count = bars,
                                             .bar = bar});
    hapt_svg_put(svg,
                 "</figure>\n<div class=\"wide\"><table>\n<tr><th>system</th><th "
                 "class=\"text\">schedule</th><th>step</th><th>t_max</th>"
                 "<th>slowest transfer</th><th>of it hidden</th><th>balance</th><th>MFU</th><th>stages</th></tr>\n");
    for (int r = 0; r < picture->row_count; r++) put_rival(svg, &picture->row[r]);
    hapt_svg_put(svg, "</table></div>\n</section>\n");
    return HAPT_OK;
}

static void put_knee_words(struct hapt_svg *svg, const struct hapt_sweep *sweep)
{
    char text[32];
    if (sweep->count > 1 && !sweep->point[sweep->count - 1].plan)
        hapt_svg_put(svg, "<p>There is no knee: there is no plan at the largest value.</p>\n");
    else if (sweep->count > 1 && isnan(sweep->knee))
        hapt_svg_put(svg, "<p>There is no knee: at the largest value, more still shortens the step.</p>\n");
    else if (sweep->count > 1)
        hapt_svg_put(svg, "<p>The knee is at %s: beyond it, more gains almost nothing.</p>\n",
                     hapt_sweep_value_text(sweep->range->kind, sweep->knee, text));
    for (int i = 0; i < sweep->count; i++) {
        if (sweep->point[i].plan) continue;
        hapt_svg_put(
            svg, "<p>At %s there is no plan: ", hapt_sweep_value_text(sweep->range->kind, sweep->point[i].value, text));
        hapt_svg_text(svg, sweep->point[i].obstacle ? sweep->point[i].obstacle : "unknown");
        hapt_svg_put(svg, "</p>\n");
    }
}

static enum hapt_status put_sweep(struct hapt_svg *svg, const struct hapt_sweep *sweep, int number,
                                  struct hapt_arena *arena)
{
    static const char *const labels[HAPT_SWEEP_KINDS] = {
        "bandwidth of the link",   "nodes",
        "memory of a device",      "microbatches of a step",
        "memory of a host",        "bandwidth between a device and its host",
        "bandwidth between nodes", "bandwidth between devices of a node"};
    static const enum picture_unit units[HAPT_SWEEP_KINDS] = {
        PICTURE_BITS_PER_S, PICTURE_NUMBER,      PICTURE_BYTES,      PICTURE_NUMBER,
        PICTURE_BYTES,      PICTURE_BYTES_PER_S, PICTURE_BITS_PER_S, PICTURE_BYTES_PER_S};
    const enum hapt_sweep_kind kind = sweep->range->kind;
    struct picture_marker marker[2];
    char text[32];
    double *value, *step_s;
    int markers = 0;
    HAPT_NEW(value, arena, sweep->count);
    HAPT_NEW(step_s, arena, sweep->count);
    for (int i = 0; i < sweep->count; i++) {
        value[i] = sweep->point[i].value;
        step_s[i] = sweep->point[i].plan ? sweep->point[i].plan->simulated_s : NAN;
    }
    if (sweep->count > 1 && isfinite(sweep->knee))
        marker[markers++] = (struct picture_marker){
            sweep->knee, "knee", hapt_arena_printf(arena, "knee: %s", hapt_sweep_value_text(kind, sweep->knee, text))};
    if (isfinite(sweep->balance_bandwidth) && kind == HAPT_SWEEP_LINK)
        marker[markers++] =
            (struct picture_marker){sweep->balance_bandwidth, "balance",
                                    hapt_arena_printf(arena, "below %s the link sets t_max",
                                                      hapt_sweep_value_text(kind, sweep->balance_bandwidth, text))};
    for (int k = 0; k < markers; k++)
        if (!marker[k].text) return HAPT_ERR_MEMORY;
    const struct picture_series series = {
        "best plan at this value", "point", "value", "simulated-s", false, sweep->count, value, step_s};
    const char *id = hapt_arena_printf(arena, "sweep-%d", number);
    if (!id) return HAPT_ERR_MEMORY;
    hapt_svg_put(svg, "<h3>");
    hapt_svg_text(svg, sweep->range->text);
    hapt_svg_put(svg, "</h3>\n");
    put_knee_words(svg, sweep);
    if (kind == HAPT_SWEEP_LINK)
        hapt_svg_put(svg, "<p>Only links between subclusters vary. Networks and links inside a subcluster keep their "
                          "bandwidth, which then may set the limit.</p>\n");
    hapt_svg_put(svg, "<figure>\n");
    picture_lines(svg, &(struct picture_chart){.id = id,
                                               .title = "Simulated step of the best plan at each value",
                                               .desc = "The knee is the value beyond which more gains almost nothing.",
                                               .x_label = labels[kind],
                                               .y_label = "simulated step",
                                               .x_unit = units[kind],
                                               .y_unit = PICTURE_SECONDS,
                                               .logarithmic_x = true,
                                               .from_zero = true,
                                               .series_count = 1,
                                               .series = &series,
                                               .marker_count = markers,
                                               .marker = marker});
    hapt_svg_put(svg, "</figure>\n");
    return HAPT_OK;
}

static enum hapt_status put_page(struct hapt_svg *svg, const void *content, struct hapt_arena *arena)
{
    const struct hapt_picture_plan *picture = content;
    const struct hapt_plan *plan = picture->plan;
    const char *title = hapt_arena_printf(arena, "Plan of %s", picture->model ? picture->model : picture->name);
    if (!title) return HAPT_ERR_MEMORY;
    picture_page_open(svg, title);
    picture_page_fact(svg, "Model", picture->model ? picture->model : "unknown");
    picture_page_fact(svg, "Plan", picture->name);
    picture_page_facts(svg, picture->cluster);
    HAPT_TRY(picture_section_timeline(svg, plan, NULL, arena));
    HAPT_TRY(picture_section_memory(svg, plan, NULL, arena));
    HAPT_TRY(picture_section_cluster(svg, plan, picture->cluster, arena));
    if (picture->row_count > 0) HAPT_TRY(section_rivals(svg, picture, arena));
    if (picture->sweep_count > 0)
        hapt_svg_put(svg,
                     "<section id=\"what-if\">\n<h2>What if</h2>\n<p>Each point is the best plan at its value%s.</p>\n",
                     hapt_schedule_loops(plan->schedule) ? ", among those without loops" : "");
    for (int k = 0; k < picture->sweep_count; k++) HAPT_TRY(put_sweep(svg, picture->sweep[k], k, arena));
    if (picture->sweep_count > 0) hapt_svg_put(svg, "</section>\n");
    picture_section_words(svg, plan);
    picture_page_close(svg);
    return HAPT_OK;
}

enum hapt_status hapt_picture_save_plan(const struct hapt_picture_plan *picture, const char *path)
{
    return picture_page_save(put_page, picture, path);
}

enum hapt_status hapt_picture_save_cluster(const struct hapt_cluster *cluster, const char *path)
{
    struct hapt_svg svg;
    enum hapt_status status = hapt_svg_init(&svg);
    if (status == HAPT_OK) {
        hapt_svg_put(&svg, HAPT_PICTURE_SVG_HEAD);
        picture_topology_draw(&svg, cluster, true, NULL);
        status = hapt_svg_save(&svg, path);
    }
    hapt_svg_release(&svg);
    return status;
}
