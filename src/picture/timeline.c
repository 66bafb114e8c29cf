/* The pipeline timeline: from the simulation or a trace, and drawn. */
#include "timeline.h"

#include <math.h>
#include <string.h>

enum { LANE_LEFT = 196, TIMELINE_RIGHT = 20, HEAD = 28, FOOT = 30 };
enum { MOST_TASKS = 9000 /* drawn of a timeline: a page stays below some MB */ };
#define LEAST_PASS_PX 5.0
/* Microbatches in a window, at least and at most: passes are visible, and the schedule's rhythm is. */
#define WINDOW_LEAST 12.0
#define WINDOW_MOST 46.0
#define MOST_RATIO 4 /* of two steps on one scale */

static const char *kind_class(enum hapt_instruction_kind kind)
{
    return kind == HAPT_INSTRUCTION_FORWARD    ? "forward"
           : kind == HAPT_INSTRUCTION_BACKWARD ? "backward"
           : kind == HAPT_INSTRUCTION_WEIGHT   ? "weight"
                                               : "once";
}

static const char *kind_name(enum hapt_instruction_kind kind)
{
    switch (kind) {
    case HAPT_INSTRUCTION_FORWARD: return "forward";
    case HAPT_INSTRUCTION_BACKWARD: return "backward";
    case HAPT_INSTRUCTION_WEIGHT: return "weight";
    case HAPT_INSTRUCTION_REDUCE: return "reduce";
    case HAPT_INSTRUCTION_EXCHANGE: return "exchange";
    case HAPT_INSTRUCTION_NORM: return "norm";
    case HAPT_INSTRUCTION_UPDATE: return "update";
    default: return NULL; /* communication */
    }
}

/* "stage 3 - a100"; of a trace "stage 3, rank 12". */
static enum hapt_status name_lane(const struct hapt_plan *plan, int submesh, int64_t rank, struct hapt_arena *arena,
                                  const char **label)
{
    char stages[64] = "";
    int length = 0, count = 0;
    for (int i = 0; i < plan->stage_count; i++) {
        if (plan->stage[i].submesh != &plan->submesh[submesh]) continue;
        const bool has_room = length < (int)sizeof stages - 14;
        length += has_room ? snprintf(stages + length, sizeof stages - (size_t)length, "%s%d", count++ ? ", " : "", i)
                           : snprintf(stages + length, sizeof stages - (size_t)length, ", ...");
        if (!has_room) break;
    }
    if (rank >= 0)
        *label = hapt_arena_printf(arena, "stage%s %s, rank %lld", count > 1 ? "s" : "", stages, (long long)rank);
    else
        *label = hapt_arena_printf(arena, "stage%s %s \xC2\xB7 %s", count > 1 ? "s" : "", stages,
                                   plan->submesh[submesh].name);
    return *label ? HAPT_OK : HAPT_ERR_MEMORY;
}

enum hapt_status picture_timeline_predict(const struct hapt_plan *plan, struct hapt_arena *arena,
                                          struct picture_timeline *timeline)
{
    struct hapt_schedule *schedule;
    struct hapt_costs costs;
    struct hapt_simulation *simulation;
    HAPT_TRY(hapt_plan_lay_out(plan, arena, &schedule, &costs));
    HAPT_TRY(hapt_simulate(schedule, &costs, arena, &simulation));
    *timeline = (struct picture_timeline){"predicted", simulation->total_s, schedule->submesh_count, NULL};
    HAPT_NEW(timeline->lane, arena, schedule->submesh_count);
    for (int s = 0; s < schedule->submesh_count; s++) {
        const struct hapt_instruction_list *list = &schedule->list[s];
        struct picture_lane *lane = &timeline->lane[s];
        int first = 0; /* the submesh's first stage stands for all of them */
        while (first + 1 < schedule->chunk_count && schedule->submesh_of[first] != s) first++;
        HAPT_TRY(name_lane(plan, (int)(plan->stage[first].submesh - plan->submesh), -1, arena, &lane->label));
        HAPT_NEW(lane->task, arena, list->count > 0 ? list->count : 1);
        for (int i = 0; i < list->count; i++) {
            const struct hapt_instruction *own = &list->instruction[i];
            if (!kind_name(own->kind) || own->step != 0) continue;
            lane->task[lane->count++] =
                (struct picture_task){own->kind, own->chunk >= 0 ? own->chunk : first, own->microbatch,
                                      simulation->time[s][i].start_s, simulation->time[s][i].end_s};
        }
    }
    return HAPT_OK;
}

/* The kind of a trace's event; false: it is not a task of a lane. */
static bool find_kind(const char *name, enum hapt_instruction_kind *kind)
{
    for (int k = 0; k <= HAPT_INSTRUCTION_UPDATE; k++) {
        *kind = (enum hapt_instruction_kind)k;
        if (kind_name(*kind) && strcmp(kind_name(*kind), name) == 0) return true;
    }
    return false;
}

/* The submesh of an event's stage; -1: the plan has no such stage. */
static int submesh_of(const struct hapt_plan *plan, int64_t stage)
{
    return stage >= 0 && stage < plan->stage_count ? (int)(plan->stage[stage].submesh - plan->submesh) : -1;
}

enum hapt_status picture_timeline_measure(const struct hapt_plan *plan, const struct hapt_report_trace *trace,
                                          struct hapt_arena *arena, struct picture_timeline *timeline)
{
    enum hapt_instruction_kind kind;
    int64_t step = -1, *rank;
    int *room;
    double begin_s = INFINITY, end_s = -INFINITY;
    HAPT_NEW(rank, arena, plan->submesh_count);
    HAPT_NEW(room, arena, plan->submesh_count);
    for (int s = 0; s < plan->submesh_count; s++) rank[s] = -1;
    for (int64_t i = 0; i < trace->count; i++)
        if (trace->step[i] > step) step = trace->step[i];
    for (int64_t i = 0; i < trace->count; i++) {
        const int s = submesh_of(plan, trace->stage[i]);
        if (trace->step[i] != step || !find_kind(trace->kind[i], &kind)) continue;
        if (s < 0)
            return hapt_fail(HAPT_ERR_INPUT, "the file is damaged", "/trace has stage %lld of %d",
                             (long long)trace->stage[i], plan->stage_count);
        if (rank[s] < 0 || trace->rank[i] < rank[s]) rank[s] = trace->rank[i], room[s] = 0;
        if (trace->rank[i] == rank[s]) room[s]++;
        begin_s = fmin(begin_s, trace->begin_s[i]);
        end_s = fmax(end_s, trace->end_s[i]);
    }
    *timeline = (struct picture_timeline){"measured", end_s > begin_s ? end_s - begin_s : 0, plan->submesh_count, NULL};
    HAPT_NEW(timeline->lane, arena, plan->submesh_count);
    for (int s = 0; s < plan->submesh_count; s++) {
        if (rank[s] < 0)
            return hapt_fail(HAPT_ERR_INPUT, "the file is damaged", "/trace has no events of submesh %d of %d", s,
                             plan->submesh_count);
        HAPT_TRY(name_lane(plan, s, rank[s], arena, &timeline->lane[s].label));
        HAPT_NEW(timeline->lane[s].task, arena, room[s] > 0 ? room[s] : 1);
    }
    for (int64_t i = 0; i < trace->count; i++) {
        const int s = submesh_of(plan, trace->stage[i]);
        if (trace->step[i] != step || !find_kind(trace->kind[i], &kind) || trace->rank[i] != rank[s]) continue;
        timeline->lane[s].task[timeline->lane[s].count++] =
            (struct picture_task){kind, (int)trace->stage[i], (int)trace->microbatch[i], trace->begin_s[i] - begin_s,
                                  trace->end_s[i] - begin_s};
    }
    return HAPT_OK;
}

enum { PLOT_PX = PICTURE_WIDTH - LANE_LEFT - TIMELINE_RIGHT };

static double longest_s(const struct picture_timeline *timeline, int count)
{
    double longest = 0;
    for (int t = 0; t < count; t++) longest = fmax(longest, timeline[t].total_s);
    return longest;
}

/* End of the last pass. */
static double passes_end_s(const struct picture_timeline *timeline)
{
    double end_s = 0;
    for (int l = 0; l < timeline->lane_count; l++)
        for (int i = 0; i < timeline->lane[l].count; i++)
            if (timeline->lane[l].task[i].microbatch >= 0) end_s = fmax(end_s, timeline->lane[l].task[i].end_s);
    return end_s;
}

/* The longer of filling, up to the first backward pass of each submesh, and draining, from its last forward pass. */
static double edge_s(const struct picture_timeline *timeline)
{
    const double end_s = passes_end_s(timeline);
    double fill_s = 0, drain_s = 0;
    for (int l = 0; l < timeline->lane_count; l++) {
        const struct picture_lane *lane = &timeline->lane[l];
        double first_backward_s = INFINITY, last_forward_s = 0;
        for (int i = 0; i < lane->count; i++) {
            if (lane->task[i].kind == HAPT_INSTRUCTION_BACKWARD)
                first_backward_s = fmin(first_backward_s, lane->task[i].end_s);
            if (lane->task[i].kind == HAPT_INSTRUCTION_FORWARD)
                last_forward_s = fmax(last_forward_s, lane->task[i].end_s);
        }
        if (isfinite(first_backward_s)) fill_s = fmax(fill_s, first_backward_s);
        drain_s = fmax(drain_s, end_s - last_forward_s);
    }
    return fmax(fill_s, drain_s);
}

struct picture_windows picture_timeline_windows(const struct hapt_plan *plan, const struct picture_timeline *timeline,
                                                int count)
{
    const double longest = longest_s(timeline, count), first_s = timeline[0].total_s;
    struct picture_windows whole = {1, 1, longest, false};
    for (int t = 0; t < count; t++) whole.own_scales = whole.own_scales || timeline[t].total_s * MOST_RATIO < longest;
    struct picture_windows parts = whole;
    parts.count = 3;
    const double tasks = (double)plan->stage_count * plan->microbatches * (plan->split ? 3 : 2);
    const double pass_px = PLOT_PX / (plan->microbatches * 2.0 + 2.0 * plan->stage_count);
    if ((tasks <= MOST_TASKS && pass_px >= LEAST_PASS_PX) || !(first_s > 0)) return whole;
    parts.share = fmax(1.3 * edge_s(&timeline[0]) / first_s, WINDOW_LEAST / plan->microbatches);
    parts.share = fmin(parts.share, fmin(WINDOW_MOST / plan->microbatches, MOST_TASKS / tasks / parts.count));
    return parts.share * parts.count < 0.9 ? parts : whole;
}

double picture_window_s(const struct picture_windows *windows, const struct picture_timeline *timeline)
{
    return windows->share * (windows->own_scales ? timeline->total_s : windows->longest_s);
}

/* Begin of window k. The last one ends behind the last pass; what follows once per step may take much longer. */
static double window_begin_s(const struct picture_windows *windows, const struct picture_timeline *timeline, int k)
{
    const double length_s = picture_window_s(windows, timeline);
    if (windows->count == 1) return 0;
    const double end_s = fmin(timeline->total_s, passes_end_s(timeline) + 0.25 * length_s);
    return fmax(0, end_s - length_s) * k / (windows->count - 1);
}

static void put_task(struct hapt_svg *svg, const struct picture_timeline *timeline, const struct picture_task *task,
                     const struct picture_axis *x, double y, double height)
{
    const double left = picture_axis_px(x, fmax(task->start_s, x->low)),
                 right = picture_axis_px(x, fmin(task->end_s, x->high));
    const bool clipped = task->start_s < x->low || task->end_s > x->high;
    const char *class = kind_class(task->kind);
    char number[16], time[3][32];
    hapt_svg_put(svg,
                 "<rect class=\"task %s\" data-origin=\"%s\" data-stage=\"%d\" data-microbatch=\"%d\" data-kind=\"%s\"",
                 class, timeline->origin, task->stage, task->microbatch, kind_name(task->kind));
    hapt_svg_number(svg, "start-s", task->start_s);
    hapt_svg_number(svg, "end-s", task->end_s);
    hapt_svg_put(svg, "%s x=\"%.3f\" y=\"%.1f\" width=\"%.3f\" height=\"%.1f\"><title>stage %d, ",
                 clipped ? " data-clipped=\"yes\"" : "", left, y, right - left, height, task->stage);
    if (task->microbatch >= 0) hapt_svg_put(svg, "microbatch %d, ", task->microbatch);
    hapt_svg_put(svg, "%s: %s to %s (%s)</title></rect>\n", kind_name(task->kind),
                 hapt_units_time(task->start_s, time[0]), hapt_units_time(task->end_s, time[1]),
                 hapt_units_time(task->end_s - task->start_s, time[2]));
    snprintf(number, sizeof number, "%d", task->microbatch);
    const double size = height < 12 ? 8 : 10;
    if (task->microbatch >= 0 && hapt_svg_width(number, size) + 2 <= right - left && !clipped)
        hapt_svg_put(svg,
                     "<text class=\"on-%s\" x=\"%.2f\" y=\"%.1f\" font-size=\"%g\" text-anchor=\"middle\">%s</text>\n",
                     class, (left + right) / 2, y + height / 2 + 0.36 * size, size, number);
}

static void put_time_axis(struct hapt_svg *svg, const struct picture_axis *x, double top, double bottom)
{
    double tick[PICTURE_MOST_TICKS], free_px = x->from_px - 20;
    char text[32];
    const int count = picture_axis_ticks(x, (int)((x->to_px - x->from_px) / 80) + 2, tick);
    for (int t = 0; t < count; t++) {
        const double at = picture_axis_px(x, tick[t]);
        const double half = hapt_svg_width(picture_tick_text(x, tick[t], text), 11) / 2;
        hapt_svg_put(svg, "<line class=\"grid\" x1=\"%.2f\" y1=\"%.1f\" x2=\"%.2f\" y2=\"%.1f\"/>\n", at, top, at,
                     bottom + 4);
        if (at - half < free_px || at + half > x->to_px + TIMELINE_RIGHT - 2) continue;
        hapt_svg_label(svg, at, bottom + 16, 90, 11, "soft", "middle", text);
        free_px = at + half + 8;
    }
}

static double lane_height(const struct picture_timeline *timeline)
{
    return timeline->lane_count <= 8 ? 24 : timeline->lane_count <= 20 ? 18 : 14;
}

static double window_height(const struct picture_timeline *timeline)
{
    return HEAD + timeline->lane_count * lane_height(timeline) + FOOT;
}

/* The time that chooses the unit of a timeline's axes. */
static double unit_for_s(const struct picture_windows *windows, const struct picture_timeline *timeline)
{
    return windows->count == 1 ? picture_window_s(windows, timeline) : timeline->total_s;
}

static void put_window(struct hapt_svg *svg, const struct picture_timeline *timeline,
                       const struct picture_windows *windows, int k, double y)
{
    const double begin_s = window_begin_s(windows, timeline, k), pitch = lane_height(timeline);
    const struct picture_axis x = {.low = begin_s,
                                   .high = begin_s + picture_window_s(windows, timeline),
                                   .from_px = LANE_LEFT,
                                   .to_px = LANE_LEFT + PLOT_PX,
                                   .unit = PICTURE_SECONDS,
                                   .largest = unit_for_s(windows, timeline)};
    hapt_svg_put(svg, "<g class=\"window\" data-origin=\"%s\"", timeline->origin);
    hapt_svg_number(svg, "first-s", x.low);
    hapt_svg_number(svg, "end-s", x.high);
    hapt_svg_put(svg, ">\n");
    put_time_axis(svg, &x, y, y + timeline->lane_count * pitch);
    hapt_svg_put(svg, "<rect class=\"frame\" x=\"%d\" y=\"%.1f\" width=\"%d\" height=\"%.1f\"/>\n", LANE_LEFT, y,
                 PLOT_PX, timeline->lane_count * pitch);
    for (int l = 0; l < timeline->lane_count; l++)
        for (int i = 0; i < timeline->lane[l].count; i++) {
            const struct picture_task *task = &timeline->lane[l].task[i];
            if (task->end_s > x.low && task->start_s < x.high && task->end_s > task->start_s)
                put_task(svg, timeline, task, &x, y + l * pitch + 1.5, pitch - 3);
        }
    hapt_svg_put(svg, "</g>\n");
}

static void put_lane_labels(struct hapt_svg *svg, const struct picture_windows *windows,
                            const struct picture_timeline *timeline, double y)
{
    char text[32];
    double factor;
    snprintf(text, sizeof text, "time (%s)",
             picture_unit_name(PICTURE_SECONDS, unit_for_s(windows, timeline), &factor));
    for (int l = 0; l < timeline->lane_count; l++)
        hapt_svg_label(svg, LANE_LEFT - 8, y + (l + 0.5) * lane_height(timeline) + 4, LANE_LEFT - 16, 11, "lane", "end",
                       timeline->lane[l].label);
    hapt_svg_label(svg, LANE_LEFT - 24, y + timeline->lane_count * lane_height(timeline) + 16, LANE_LEFT - 32, 11,
                   "soft", "end", text);
}

static bool has_weights(const struct picture_timeline *timeline)
{
    for (int l = 0; l < timeline->lane_count; l++)
        for (int i = 0; i < timeline->lane[l].count; i++)
            if (timeline->lane[l].task[i].kind == HAPT_INSTRUCTION_WEIGHT) return true;
    return false;
}

void picture_timelines(struct hapt_svg *svg, const struct picture_timeline *timeline, int count,
                       const struct picture_windows *windows)
{
    static const char *const legend[][2] = {{"forward", "forward"},
                                            {"backward", "backward"},
                                            {"weight", "gradients of parameters"},
                                            {"once", "once per step: sum of gradients, update"}};
    static const char *const part[] = {"beginning of the step", "middle of the step", "end of the passes"};
    double height = 28, at = LANE_LEFT;
    for (int t = 0; t < count; t++) height += windows->count * window_height(&timeline[t]);
    picture_open(
        svg, "timeline", height, "Pipeline timeline of one step",
        "A lane for each submesh, from the first stage to the last. Each box is a pass of one microbatch, with "
        "its number. Gaps are idle time.");
    for (size_t k = 0; k < sizeof legend / sizeof *legend; k++)
        if (k != 2 || has_weights(timeline)) at += picture_legend(svg, at, 16, legend[k][0], legend[k][1]);
    double y = 28;
    for (int w = 0; w < windows->count; w++) /* the same window of all timelines, below each other */
        for (int t = 0; t < count; t++) {
            char text[160], time[32];
            snprintf(text, sizeof text, "%s: %s%s%s", timeline[t].origin, hapt_units_time(timeline[t].total_s, time),
                     windows->count > 1 ? ", " : "", windows->count > 1 ? part[w] : "");
            hapt_svg_label(svg, 8, y + 18, PICTURE_WIDTH - 16, 13, "strong", "start", text);
            put_lane_labels(svg, windows, &timeline[t], y + HEAD);
            put_window(svg, &timeline[t], windows, w, y + HEAD);
            y += window_height(&timeline[t]);
        }
    picture_close(svg);
}
