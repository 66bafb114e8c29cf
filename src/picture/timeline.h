/* Private to src/picture: the pipeline timeline of one step, with a lane for each submesh. */
#ifndef HAPT_PICTURE_TIMELINE_H
#define HAPT_PICTURE_TIMELINE_H

#include "charts.h"
#include "hapt/plan.h"
#include "hapt/report.h"

struct picture_task {
    enum hapt_instruction_kind kind; /* one that computes, or REDUCE, EXCHANGE, NORM, UPDATE */
    int stage, microbatch;           /* microbatch -1: once per step */
    double start_s, end_s;           /* from the beginning of the step */
};
struct picture_lane {
    const char *label;
    int count;
    struct picture_task *task; /* by start */
};
struct picture_timeline {
    const char *origin; /* "predicted", "measured": value of data-origin */
    double total_s;     /* of the step */
    int lane_count;
    struct picture_lane *lane; /* [plan->submesh_count] */
};

/* The simulated step. */
enum hapt_status picture_timeline_predict(const struct hapt_plan *plan, struct hapt_arena *arena,
                                          struct picture_timeline *timeline);
/* The last whole step of a trace, of the lowest rank of each submesh. `trace` must fit the plan: HAPT_ERR_INPUT. */
enum hapt_status picture_timeline_measure(const struct hapt_plan *plan, const struct hapt_report_trace *trace,
                                          struct hapt_arena *arena, struct picture_timeline *timeline);

/* The shown parts of a step: the whole one, or three of equal length: its begin, a part of its middle, its end. */
struct picture_windows {
    int count;        /* 1 or 3 */
    double share;     /* length of a window, of longest_s, or with own_scales of the timeline's step */
    double longest_s; /* of all timelines */
    bool own_scales;  /* the steps differ too much for one scale: each timeline has one of its own */
};
/* Length of each window of a timeline. */
double picture_window_s(const struct picture_windows *windows, const struct picture_timeline *timeline);
/* Chooses the windows so that passes stay visible and the file small. The same for all timelines of a page. */
struct picture_windows picture_timeline_windows(const struct hapt_plan *plan, const struct picture_timeline *timeline,
                                                int count);
/* Draws the timelines below each other. */
void picture_timelines(struct hapt_svg *svg, const struct picture_timeline *timeline, int count,
                       const struct picture_windows *windows);

#endif
