/* The summary at the end of a run, for people and as JSON. */
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/report.h"

#define LATENESS_SHARE 0.05 /* share of a step: more lateness may be visible in the step time */

static double ratio_percent(double measured, double predicted)
{
    return predicted > 0 ? 100 * (measured / predicted - 1) : 0;
}

static void print_stages(const struct hapt_env *env, const struct hapt_report *report)
{
    double most_host_bytes = 0;
    hapt_print(env, "\n  stage   busy       idle       reduce     link busy   memory planned / measured\n");
    for (int i = 0; i < report->plan->stage_count; i++) {
        const struct hapt_report_stage *stage = &report->stage[i];
        char busy[32], idle[32], reduce[32], comm[32], planned[32], measured[32];
        hapt_print(env, "  %-7d %-10s %-10s %-10s %-11s %s / %s\n", i, hapt_units_time(stage->busy_s, busy),
                   hapt_units_time(stage->idle_s, idle), hapt_units_time(stage->reduce_s, reduce),
                   i + 1 < report->plan->stage_count ? hapt_units_time(stage->comm_s, comm) : "-",
                   hapt_units_bytes(stage->planned_bytes, planned), hapt_units_bytes(stage->measured_bytes, measured));
        most_host_bytes = fmax(most_host_bytes, stage->host_bytes);
    }
    char host[32];
    if (most_host_bytes > 0)
        hapt_print(env, "  optimizer state on the hosts: at most %s of a rank\n",
                   hapt_units_bytes(most_host_bytes, host));
}

static void print_validation(const struct hapt_env *env, const struct hapt_report *report)
{
    const int64_t count = report->validation_count;
    const struct hapt_validation *all = report->validation, *best = all;
    if (count == 0) return;
    for (int64_t i = 1; i < count; i++)
        if (isfinite(all[i].loss) && !(best->loss <= all[i].loss)) best = &all[i];
    hapt_print(env, "validation   %.4f first, %.4f last, %.4f lowest (after %lld steps)\n", all[0].loss,
               all[count - 1].loss, best->loss, (long long)best->step);
}

void hapt_report_print(const struct hapt_env *env, const struct hapt_report *report)
{
    char measured[32], predicted[32], flops[32];
    hapt_print(env, report->time_scale > 0 ? "\nRehearsal\n" : "\nRun\n");
    print_stages(env, report);
    if (!strcmp(report->state, HAPT_RUN_RUNNING))
        hapt_print(env, "\nstate        running, or ended without a report; written %s", report->written);
    hapt_print(env, "\nsteps        %lld", (long long)report->steps);
    if (report->first_step > 0) hapt_print(env, " (resumed at %lld)", (long long)report->first_step);
    if (report->loss && report->steps == 0)
        hapt_print(env, "\nloss         none: no step was trained\n");
    else if (report->loss)
        hapt_print(env, "\nloss         %.4f first, %.4f last, %.4f mean of the last %d\n", report->first_loss,
                   report->last_loss, report->mean_loss, report->loss_window);
    else
        hapt_print(
            env,
            "\nrehearsal    devices were modelled: nothing was computed, so there is no loss; one modelled second "
            "lasted %.4g s\n",
            report->time_scale);
    print_validation(env, report);
    if (report->step_s > 0 && report->max_lateness_s > LATENESS_SHARE * report->step_s)
        hapt_warn(env,
                  "this host woke modelled devices up to %s late (modelled time): it is too busy for --time-scale "
                  "%.4g; raise it\n",
                  hapt_units_time(report->max_lateness_s, measured), report->time_scale);
    if (report->step_s > 0) {
        hapt_print(env, "step time    %s measured, %s predicted (%+.1f %%)\n",
                   hapt_units_time(report->step_s, measured), hapt_units_time(report->predicted_step_s, predicted),
                   ratio_percent(report->step_s, report->predicted_step_s));
        if (report->plan->profile == HAPT_PROFILE_PREDICTED)
            hapt_print(env, "             (planned with predicted times of the devices, not measured ones)\n");
        hapt_print(env, "speed        %.0f %ss/s, %s\n", report->items_per_s, report->item,
                   hapt_units_flops(report->items_per_s * report->flops_per_item, flops));
    }
    if (report->checkpoint && report->checkpoint[0])
        hapt_print(env, "checkpoint   %s (training waited %s for checkpoints in all)\n", report->checkpoint,
                   hapt_units_time(report->checkpoint_s, measured));
    for (int w = 0; w < report->warning_count; w++)
        hapt_print(env, "warning      step %lld: %s\n", (long long)report->warning[w].step, report->warning[w].text);
}

static json_t *stage_json(const struct hapt_report_stage *stage)
{
    json_t *json =
        json_pack("{s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "microbatch_s", stage->microbatch_s, "busy_s", stage->busy_s,
                  "idle_s", stage->idle_s, "reduce_s", stage->reduce_s, "comm_s", stage->comm_s, "planned_bytes",
                  stage->planned_bytes, "measured_bytes", stage->measured_bytes);
    if (json && stage->host_bytes > 0) json_object_set_new(json, "host_bytes", json_real(stage->host_bytes));
    return json;
}

/* Modelled devices and runs without a step have no loss; a damaged file may hold one that is not finite. */
static json_t *real_or_null(const struct hapt_report *report, double value)
{
    return report->loss && report->steps > 0 && isfinite(value) ? json_real(value) : json_null();
}

static json_t *validation_json(const struct hapt_report *report)
{
    json_t *json = json_array();
    for (int64_t i = 0; i < report->validation_count; i++) {
        const struct hapt_validation *its = &report->validation[i];
        json_t *entry = json_pack("{s:I, s:o}", "step", (json_int_t)its->step, "loss",
                                  isfinite(its->loss) ? json_real(its->loss) : json_null());
        if (entry && isfinite(its->top1)) json_object_set_new(entry, "top1", json_real(its->top1));
        json_array_append_new(json, entry);
    }
    return json;
}

/* Values of the steps; what is not finite is null. NULL: none are known. */
static json_t *curve_json(const double *value, int64_t count)
{
    if (!value) return json_null();
    json_t *json = json_array();
    for (int64_t i = 0; i < count; i++)
        json_array_append_new(json, isfinite(value[i]) ? json_real(value[i]) : json_null());
    return json;
}

/* An amount of each step over its time. */
static json_t *rate_json(const struct hapt_report *report, double amount)
{
    json_t *json = json_array();
    for (int64_t i = 0; i < report->steps; i++)
        json_array_append_new(json, report->time_s[i] > 0 ? json_real(amount / report->time_s[i]) : json_null());
    return json;
}

/* The metrics of each step, but for the loss, which stands beside them. */
static json_t *steps_json(const struct hapt_report *report, const char *rate_name)
{
    const double items = (double)report->items_per_step;
    json_t *step = json_array(), *json;
    for (int64_t i = 0; i < report->steps; i++) json_array_append_new(step, json_integer(i + 1));
    json = json_pack("{s:o, s:o, s:o, s:o, s:o}", "step", step, "gradient_norm",
                     curve_json(report->gradient_norm, report->steps), "learning_rate",
                     curve_json(report->learning_rate, report->steps), "step_time_s",
                     curve_json(report->time_s, report->steps), rate_name, rate_json(report, items));
    if (json && report->peak_flops > 0)
        json_object_set_new(json, "mfu", rate_json(report, items * report->flops_per_item / report->peak_flops));
    return json;
}

enum hapt_status hapt_report_print_json(const struct hapt_report *report)
{
    char rate_name[64], flops_name[64];
    snprintf(rate_name, sizeof rate_name, "%ss_per_second", report->item);
    snprintf(flops_name, sizeof flops_name, "model_flops_per_%s", report->item);
    json_t *stages = json_array();
    for (int i = 0; i < report->plan->stage_count; i++) json_array_append_new(stages, stage_json(&report->stage[i]));
    json_t *loss = curve_json(report->loss, report->steps);
    json_t *train = json_pack(
        "{s:I, s:I, s:s, s:s, s:b, s:o, s:i, s:o, s:o, s:o, s:f, s:f, s:f, s:f, s:f, s:s, s:o, s:o}", "steps",
        (json_int_t)report->steps, "first_step", (json_int_t)report->first_step, "state", report->state, "written",
        report->written, "stopped", (int)report->stopped, "loss", loss, "layers", report->plan->layer_count,
        "first_loss", real_or_null(report, report->first_loss), "last_loss", real_or_null(report, report->last_loss),
        "mean_loss", real_or_null(report, report->mean_loss), "step_time_s", report->step_s, "predicted_step_time_s",
        report->predicted_step_s, rate_name, report->items_per_s, flops_name, report->flops_per_item,
        "checkpoint_time_s", report->checkpoint_s, "checkpoint", report->checkpoint ? report->checkpoint : "", "stages",
        stages, "per_step", steps_json(report, rate_name));
    if (train && report->time_scale > 0)
        json_object_set_new(
            train, "rehearsal",
            json_pack("{s:f, s:f}", "time_scale", report->time_scale, "latest_s", report->max_lateness_s));
    if (train && report->validation_count > 0) json_object_set_new(train, "validation", validation_json(report));
    json_t *root = json_pack("{s:s, s:i, s:o*}", "format", "hapt-run", "version", 1, "train", train);
    char *text = train && root ? json_dumps(root, JSON_REAL_PRECISION(17)) : NULL;
    json_decref(root);
    if (!text) return hapt_fail(HAPT_ERR_MEMORY, NULL, "host memory exhausted");
    /* Put the plan's JSON into the same object. */
    const size_t length = strlen(text);
    printf("%.*s, \"plan\": ", (int)length - 1, text);
    free(text);
    const enum hapt_status status = hapt_plan_print_json(report->plan, NULL);
    printf("}\n");
    return status;
}
