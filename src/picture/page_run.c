/* The page of a run: hapt report --html. */
#include <math.h>

#include "page.h"

static void put_validation_best(struct hapt_svg *svg, const struct hapt_report *report)
{
    const struct hapt_validation *best = NULL;
    for (int64_t i = 0; i < report->validation_count; i++)
        if (isfinite(report->validation[i].loss) && (!best || report->validation[i].loss < best->loss))
            best = &report->validation[i];
    if (best)
        hapt_svg_put(svg, " The lowest validation loss is %.4f, after %lld steps.", best->loss, (long long)best->step);
}

/* Losses over steps. Step s of `loss` is the loss of the (s + 1)-th step; a validation loss counts the steps before it.
 */
static enum hapt_status section_loss(struct hapt_svg *svg, const struct hapt_report *report, struct hapt_arena *arena)
{
    const int64_t steps = report->loss ? report->steps : 0, held = report->validation_count,
                  every = picture_mark_every(steps);
    struct picture_series series[2];
    double *at, *held_at, *held_loss;
    int64_t strange = 0;
    hapt_svg_put(svg, "<section id=\"loss\">\n<h2>Loss</h2>\n");
    if (steps == 0) {
        hapt_svg_put(svg, "<p>%s</p>\n</section>\n",
                     report->loss || report->steps == 0
                         ? "The run took no step."
                         : "The devices were modelled: nothing was computed, so there is no loss.");
        return HAPT_OK;
    }
    HAPT_NEW(at, arena, steps);
    HAPT_NEW(held_at, arena, held + 1);
    HAPT_NEW(held_loss, arena, held + 1);
    for (int64_t i = 0; i < steps; i++) {
        at[i] = (double)(i + 1);
        strange += !isfinite(report->loss[i]);
    }
    for (int64_t i = 0; i < held; i++) {
        held_at[i] = (double)report->validation[i].step;
        held_loss[i] = report->validation[i].loss;
    }
    series[0] = (struct picture_series){"training loss", "loss", "step", "value", false, steps, at, report->loss};
    series[1] =
        (struct picture_series){"validation loss", "validation", "step", "value", true, held, held_at, held_loss};
    hapt_svg_put(svg, "<p>The loss of the first step is %.4f, that of the last one %.4f.", report->first_loss,
                 report->last_loss);
    put_validation_best(svg, report);
    if (every > 1) hapt_svg_put(svg, " The chart shows one step in %lld.", (long long)every);
    if (picture_mark_every(held) > 1)
        hapt_svg_put(svg, " It shows one validation loss in %lld.", (long long)picture_mark_every(held));
    if (strange > 0)
        hapt_svg_put(svg, " %lld steps have no finite loss; the chart leaves them out.", (long long)strange);
    hapt_svg_put(svg, "</p>\n<figure>\n");
    picture_lines(
        svg, &(struct picture_chart){.id = "losses",
                                     .title = "Loss over steps",
                                     .desc = "Training loss of each step, and validation loss where it was computed.",
                                     .x_label = "steps done",
                                     .y_label = "loss",
                                     .series_count = held > 0 ? 2 : 1,
                                     .series = series});
    hapt_svg_put(svg, "</figure>\n</section>\n");
    return HAPT_OK;
}

/* Medians over the steps of the run. */
static void section_stages(struct hapt_svg *svg, const struct hapt_report *report)
{
    hapt_svg_put(
        svg, "<section id=\"stages\">\n<h2>Stages</h2>\n<p>Medians over the steps of the run.</p>\n<div "
             "class=\"wide\"><table>\n"
             "<tr><th>stage</th><th>busy</th><th>idle</th><th>sum of gradients</th><th>link busy</th><th>a microbatch, "
             "planned</th><th>a microbatch, measured</th></tr>\n");
    for (int i = 0; i < report->plan->stage_count; i++) {
        const struct hapt_report_stage *stage = &report->stage[i];
        const struct hapt_plan_stage *planned = &report->plan->stage[i];
        char text[6][32] = {"", "", "", "-", "", "-"};
        hapt_units_time(stage->busy_s, text[0]);
        hapt_units_time(stage->idle_s, text[1]);
        hapt_units_time(stage->reduce_s, text[2]);
        if (i + 1 < report->plan->stage_count) hapt_units_time(stage->comm_s, text[3]);
        hapt_units_time(planned->compute_s - planned->step_s / report->plan->microbatches, text[4]);
        if (stage->microbatch_s > 0) hapt_units_time(stage->microbatch_s, text[5]);
        hapt_svg_put(svg, "<tr class=\"stage\" data-stage=\"%d\"", i);
        hapt_svg_number(svg, "busy-s", stage->busy_s);
        hapt_svg_number(svg, "idle-s", stage->idle_s);
        hapt_svg_number(svg, "reduce-s", stage->reduce_s);
        hapt_svg_number(svg, "comm-s", stage->comm_s);
        hapt_svg_number(svg, "microbatch-s", stage->microbatch_s);
        hapt_svg_put(svg, "><td>%d</td>", i);
        for (int k = 0; k < 6; k++) hapt_svg_put(svg, "<td>%s</td>", text[k]);
        hapt_svg_put(svg, "</tr>\n");
    }
    hapt_svg_put(svg, "</table></div>\n</section>\n");
}

static void put_summary(struct hapt_svg *svg, const struct hapt_report *report)
{
    char text[2][32];
    hapt_svg_put(svg, "<p class=\"summary\" data-steps=\"%lld\"", (long long)report->steps);
    hapt_svg_number(svg, "step-s", report->step_s);
    hapt_svg_number(svg, "predicted-step-s", report->predicted_step_s);
    hapt_svg_put(svg, ">The run did %lld step%s%s.", (long long)report->steps, report->steps == 1 ? "" : "s",
                 report->time_scale > 0 ? " on modelled devices (a rehearsal)" : "");
    if (report->step_s > 0) {
        hapt_svg_put(svg, " A step took %s; %s were predicted", hapt_units_time(report->step_s, text[0]),
                     hapt_units_time(report->predicted_step_s, text[1]));
        if (report->predicted_step_s > 0)
            hapt_svg_put(svg, " (%+.1f %%)", 100 * (report->step_s / report->predicted_step_s - 1));
        hapt_svg_put(svg, ". The speed is %.*f ", report->items_per_s < 100 ? 2 : 0, report->items_per_s);
        hapt_svg_textf(svg, "%ss/s, %s.", report->item,
                       hapt_units_flops(report->items_per_s * report->flops_per_item, text[0]));
    }
    hapt_svg_put(svg, "</p>\n");
    if (report->warning_count > 0) hapt_svg_put(svg, "<ul class=\"warnings\">\n");
    for (int w = 0; w < report->warning_count; w++) {
        hapt_svg_put(svg, "<li>Warning at step %lld: ", (long long)report->warning[w].step);
        hapt_svg_text(svg, report->warning[w].text);
        hapt_svg_put(svg, "</li>\n");
    }
    if (report->warning_count > 0) hapt_svg_put(svg, "</ul>\n");
}

static enum hapt_status put_page(struct hapt_svg *svg, const void *content, struct hapt_arena *arena)
{
    const struct hapt_picture_run *picture = content;
    const struct hapt_report *report = picture->report;
    const char *title = hapt_arena_printf(arena, "Run of %s", picture->model ? picture->model : picture->name);
    if (!title) return HAPT_ERR_MEMORY;
    picture_page_open(svg, title);
    picture_page_fact(svg, "Model", picture->model ? picture->model : "unknown");
    picture_page_fact(svg, "Run file", picture->name);
    if (picture->written) picture_page_fact(svg, "Run file written", picture->written);
    picture_page_facts(svg, picture->cluster);
    put_summary(svg, report);
    HAPT_TRY(picture_section_timeline(svg, report->plan, picture->trace, arena));
    if (!picture->trace)
        hapt_svg_put(svg, "<p class=\"soft\">The run kept no trace, so there is no measured timeline. With --trace 1, "
                          "hapt and hapt train "
                          "keep that of the last step.</p>\n");
    HAPT_TRY(section_loss(svg, report, arena));
    section_stages(svg, report);
    HAPT_TRY(picture_section_memory(svg, report->plan, report->stage, arena));
    HAPT_TRY(picture_section_cluster(svg, report->plan, picture->cluster, arena));
    picture_section_words(svg, report->plan);
    picture_page_close(svg);
    return HAPT_OK;
}

enum hapt_status hapt_picture_save_run(const struct hapt_picture_run *picture, const char *path)
{
    return picture_page_save(put_page, picture, path);
}
