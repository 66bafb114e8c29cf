/* Parts that the pages of plans and runs share. */
#include "page.h"

#include <math.h>
#include <string.h>
#include <time.h>

#include "hapt/version.h"

static const char page_style[] =
    "body{background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,\"Segoe UI\",Helvetica,Arial,\"DejaVu "
    "Sans\","
    "sans-serif;max-width:1120px;margin:24px auto;padding:0 16px}\n"
    "h1{font-size:26px;margin:0 0 12px}h2{font-size:19px;margin:36px 0 8px}p{margin:6px 0;max-width:80ch}\n"
    "svg{max-width:100%;height:auto;display:block}figure{margin:8px "
    "0;overflow-x:auto}figcaption,.soft{color:var(--soft)}\n"
    "dl+p{margin-top:16px}dl{display:grid;grid-template-columns:max-content 1fr;gap:2px "
    "18px;margin:0}dt{color:var(--soft)}dd{margin:0;"
    "overflow-wrap:anywhere}\n"
    "table{border-collapse:collapse;font-size:13px;margin:10px 0}th,td{padding:3px "
    "10px;text-align:right;border-bottom:1px "
    "solid var(--line)}th:first-child,td:first-child,td.text,th.text{text-align:left}td.text{overflow-wrap:anywhere}\n"
    "li{margin:8px 0;max-width:90ch;overflow-wrap:anywhere}div.wide{overflow-x:auto}\n"
    "@media print{body{max-width:none}h2{break-after:avoid}svg{break-inside:avoid}}\n";

enum hapt_status picture_page_save(picture_page_body *body, const void *picture, const char *path)
{
    struct hapt_svg svg;
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    enum hapt_status status = hapt_svg_init(&svg);
    if (status == HAPT_OK) status = body(&svg, picture, &arena);
    if (status == HAPT_OK) status = hapt_svg_save(&svg, path);
    hapt_svg_release(&svg);
    hapt_arena_release(&arena);
    return status;
}

void picture_page_open(struct hapt_svg *svg, const char *title)
{
    hapt_svg_put(svg,
                 HAPT_PICTURE_PAGE_HEAD "<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
                                        "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
                                        "<meta name=\"color-scheme\" content=\"light dark\">\n<title>");
    hapt_svg_text(svg, title);
    hapt_svg_put(svg, "</title>\n<style>\n%s%s</style>\n</head>\n<body>\n<h1>", picture_style, page_style);
    hapt_svg_text(svg, title);
    hapt_svg_put(svg, "</h1>\n<dl>\n");
}

void picture_page_fact(struct hapt_svg *svg, const char *name, const char *value)
{
    hapt_svg_put(svg, "<dt>%s</dt><dd>", name);
    hapt_svg_text(svg, value);
    hapt_svg_put(svg, "</dd>\n");
}

void picture_page_facts(struct hapt_svg *svg, const struct hapt_cluster *cluster)
{
    char text[64] = "";
    const time_t now = time(NULL);
    struct tm local;
    hapt_svg_put(svg, "<dt>Devices</dt><dd>");
    for (int c = 0; c < cluster->count; c++) {
        const struct hapt_subcluster *own = &cluster->subcluster[c];
        hapt_svg_textf(svg, "%s%s: %d node%s \xC3\x97 %d %s", c > 0 ? "; " : "", own->name, own->nodes,
                       own->nodes > 1 ? "s" : "", own->devices_per_node,
                       own->device.name[0]         ? own->device.name
                       : own->devices_per_node > 1 ? "devices"
                                                   : "device");
    }
    hapt_svg_put(svg, "</dd>\n");
    if (localtime_r(&now, &local)) strftime(text, sizeof text, "%Y-%m-%d %H:%M %z", &local);
    picture_page_fact(svg, "Page written", text);
    picture_page_fact(svg, "Version", "hapt " HAPT_VERSION);
    hapt_svg_put(svg, "</dl>\n");
}

void picture_page_close(struct hapt_svg *svg)
{
    hapt_svg_put(svg, "</body>\n</html>\n");
}

enum hapt_status picture_section_timeline(struct hapt_svg *svg, const struct hapt_plan *plan,
                                          const struct hapt_report_trace *trace, struct hapt_arena *arena)
{
    struct picture_timeline timeline[2];
    char time[2][32];
    const int count = trace ? 2 : 1;
    HAPT_TRY(picture_timeline_predict(plan, arena, &timeline[0]));
    if (trace) HAPT_TRY(picture_timeline_measure(plan, trace, arena, &timeline[1]));
    const struct picture_windows windows = picture_timeline_windows(plan, timeline, count);
    hapt_svg_put(svg, "<section id=\"step\">\n<h2>One step</h2>\n<p class=\"step\"");
    hapt_svg_number(svg, "simulated-s", plan->simulated_s);
    hapt_svg_put(svg, ">The simulator predicts %s for a step of %d microbatches.",
                 hapt_units_time(plan->simulated_s, time[0]), plan->microbatches);
    if (hapt_plan_defers(plan) && timeline[0].total_s > plan->simulated_s)
        hapt_svg_put(svg,
                     " Part of its updates overlaps the step after it. The timeline shows one step alone, "
                     "which takes %s.",
                     hapt_units_time(timeline[0].total_s, time[0]));
    if (trace)
        hapt_svg_put(svg, " The measured step below is the last one that the run kept; it took %s.",
                     hapt_units_time(timeline[1].total_s, time[0]));
    if (windows.count > 1)
        hapt_svg_put(svg,
                     " A whole step is too long to show. The chart has three windows of equal length (predicted: %s "
                     "each): the beginning of the step, "
                     "its middle and the end of its passes.",
                     hapt_units_time(picture_window_s(&windows, &timeline[0]), time[1]));
    if (windows.own_scales) hapt_svg_put(svg, " The steps differ much, so each has a scale of its own.");
    hapt_svg_put(svg, "</p>\n<figure>\n");
    picture_timelines(svg, timeline, count, &windows);
    hapt_svg_put(svg, "</figure>\n</section>\n");
    return HAPT_OK;
}

/* Fills the bars of a stage: predicted memory in parts, and the measured one. */
static enum hapt_status fill_bars(const struct hapt_plan *plan, int stage, const struct hapt_report_stage *measured,
                                  struct hapt_arena *arena, struct picture_bar *bar)
{
    const struct hapt_plan_stage *own = &plan->stage[stage];
    char text[2][32];
    const char *key = hapt_arena_printf(arena, "%d", stage);
    bar[0] = (struct picture_bar){
        .label = hapt_arena_printf(arena, "stage %d \xC2\xB7 %s", stage, own->submesh->name),
        .key = key,
        .text = hapt_arena_printf(arena, "%s of %s", hapt_units_bytes(own->memory_bytes, text[0]),
                                  hapt_units_bytes(own->device_memory_bytes, text[1])),
        .segment_count = own->weight_slots > 0 ? 3 : 2,
        .segment = {{"parameters", "parameters", own->parameter_bytes},
                    {"activations", "activations", hapt_plan_stage_slots(own) * own->activation_bytes},
                    {"waiting", "waiting", own->weight_slots * own->weight_slot_bytes}},
        .limit = own->device_memory_bytes};
    if (!key || !bar[0].label || !bar[0].text) return HAPT_ERR_MEMORY;
    if (!measured) return HAPT_OK;
    bar[1] = (struct picture_bar){
        .key = key,
        .text = hapt_arena_printf(arena, "%s measured", hapt_units_bytes(measured->measured_bytes, text[0])),
        .segment_count = 1,
        .segment = {{"measured", "measured", measured->measured_bytes}},
        .limit = own->device_memory_bytes};
    return bar[1].text ? HAPT_OK : HAPT_ERR_MEMORY;
}

/* The bytes of each rank on its host, as the run measured them. */
static enum hapt_status put_host(struct hapt_svg *svg, const struct hapt_plan *plan,
                                 const struct hapt_report_stage *measured, struct hapt_arena *arena)
{
    struct picture_bar *bar;
    bool any = false;
    char text[32];
    if (!measured) {
        if (plan->host_state)
            hapt_svg_put(svg, "<p>The optimizer state is in the memory of the hosts. A run measures its size.</p>\n");
        return HAPT_OK;
    }
    HAPT_NEW(bar, arena, plan->stage_count);
    for (int i = 0; i < plan->stage_count; i++) {
        any = any || measured[i].host_bytes > 0;
        bar[i] = (struct picture_bar){
            .label = hapt_arena_printf(arena, "stage %d \xC2\xB7 %s", i, plan->stage[i].submesh->name),
            .key = hapt_arena_printf(arena, "%d", i),
            .text = hapt_arena_printf(arena, "%s measured", hapt_units_bytes(measured[i].host_bytes, text)),
            .segment_count = 1,
            .segment = {{"measured", "host", measured[i].host_bytes}}};
        if (!bar[i].label || !bar[i].key || !bar[i].text) return HAPT_ERR_MEMORY;
    }
    if (!any) return HAPT_OK;
    hapt_svg_put(svg, "<figure>\n");
    picture_bars(svg, &(struct picture_bars){.id = "host-memory",
                                             .title = "Memory of a rank on its host, by stage",
                                             .desc = "Optimizer state and offloaded weights, as measured.",
                                             .x_label = "host memory of a rank",
                                             .unit = PICTURE_BYTES,
                                             .label_px = 190,
                                             .text_px = 170,
                                             .count = plan->stage_count,
                                             .bar = bar});
    hapt_svg_put(svg, "</figure>\n");
    return HAPT_OK;
}

enum hapt_status picture_section_memory(struct hapt_svg *svg, const struct hapt_plan *plan,
                                        const struct hapt_report_stage *measured, struct hapt_arena *arena)
{
    static const char *const legend[][2] = {{"parameters", "parameters, gradients, optimizer"},
                                            {"activations", "activations in flight"},
                                            {"waiting", "waiting gradients"},
                                            {"measured", "measured"},
                                            {"limit", "device memory"}};
    const char *shown[5][2];
    const int per_stage = measured ? 2 : 1;
    struct picture_bar *bar;
    int legends = 0;
    HAPT_NEW(bar, arena, plan->stage_count * per_stage);
    for (int i = 0; i < plan->stage_count; i++)
        HAPT_TRY(fill_bars(plan, i, measured ? &measured[i] : NULL, arena, bar + i * per_stage));
    for (int k = 0; k < 5; k++)
        if ((k != 2 || plan->split) && (k != 3 || measured)) memcpy(shown[legends++], legend[k], sizeof *legend);
    hapt_svg_put(
        svg,
        "<section id=\"memory\">\n<h2>Memory</h2>\n<p>%s of one device of each stage, the fullest one relative to "
        "its memory.%s</p>\n<figure>\n",
        measured ? "Predicted and measured memory" : "Predicted memory",
        plan->submesh_count < plan->stage_count
            ? " Stages of one submesh share its devices: a device holds the predicted "
              "bytes of all of them, and the measured bytes are those of the device."
            : "");
    picture_bars(svg, &(struct picture_bars){
                          .id = "device-memory",
                          .title = "Memory of a device, by stage",
                          .desc = "Predicted bytes in parts, measured bytes if known, and the device's memory.",
                          .x_label = "memory of a device",
                          .unit = PICTURE_BYTES,
                          .label_px = 190,
                          .text_px = 170,
                          .legend_count = legends,
                          .legend = shown,
                          .count = plan->stage_count * per_stage,
                          .bar = bar});
    hapt_svg_put(svg, "</figure>\n");
    HAPT_TRY(put_host(svg, plan, measured, arena));
    hapt_svg_put(svg, "</section>\n");
    return HAPT_OK;
}

/* "stages 0-3, 5": those that use a subcluster; "idle": none. */
static void stages_text(const struct hapt_plan *plan, const char *name, char text[80])
{
    char list[64] = "";
    int length = 0, count = 0;
    for (int i = 0, first = -1; i <= plan->stage_count; i++) {
        bool used = false;
        for (int k = 0; i < plan->stage_count && k < plan->stage[i].submesh->part_count; k++)
            used = used || strcmp(plan->stage[i].submesh->part_name[k], name) == 0;
        if (used) count++;
        if (used && first < 0) first = i;
        if (used || first < 0) continue;
        if (length >= 40) { /* the others have no room */
            snprintf(list + length, sizeof list - (size_t)length, ", ...");
            break;
        }
        length += snprintf(list + length, sizeof list - (size_t)length, "%s%d", length > 0 ? ", " : "", first);
        if (first < i - 1) length += snprintf(list + length, sizeof list - (size_t)length, "-%d", i - 1);
        first = -1;
    }
    if (count == 0)
        snprintf(text, 80, "idle");
    else
        snprintf(text, 80, "stage%s %s", count > 1 ? "s" : "", list);
}

enum hapt_status picture_section_cluster(struct hapt_svg *svg, const struct hapt_plan *plan,
                                         const struct hapt_cluster *cluster, struct hapt_arena *arena)
{
    const char **note;
    char text[80];
    HAPT_NEW(note, arena, cluster->count);
    for (int c = 0; c < cluster->count; c++) {
        stages_text(plan, cluster->subcluster[c].name, text);
        note[c] = hapt_arena_strdup(arena, text);
        if (!note[c]) return HAPT_ERR_MEMORY;
    }
    hapt_svg_put(svg, "<section id=\"cluster\">\n<h2>Cluster</h2>\n<figure>\n");
    picture_topology_draw(svg, cluster, false, note);
    hapt_svg_put(svg, "</figure>\n</section>\n");
    return HAPT_OK;
}
