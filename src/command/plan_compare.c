/* hapt plan --compare: prices other systems' plans and ablations in the same simulator. */
#include <math.h>
#include <stdio.h>

#include "hapt/progress.h"
#include "json_print.h"
#include "plan_explain.h"

static const char *percent(double share, char text[16])
{
    if (isnan(share))
        snprintf(text, 16, "-");
    else
        snprintf(text, 16, "%.1f %%", 100 * share);
    return text;
}

static void print_pipelines(const struct hapt_env *env, const struct hapt_compare_row *row)
{
    char time[2][32], ratio[24] = "";
    const struct hapt_pipelines *pipelines = row->pipelines;
    if (!pipelines) return;
    if (pipelines->simulated_s <= hapt_compare_step_s(row) && !isnan(row->ratio))
        snprintf(ratio, sizeof ratio, ", ratio %.3f", row->ratio);
    hapt_print_wrapped(env, 24,
                       "  %-20s  (as %d independent pipelines, which hapt cannot run: step %s%s, of it %s "
                       "for gradients)\n",
                       "", pipelines->count, hapt_units_time(pipelines->simulated_s, time[0]), ratio,
                       hapt_units_time(pipelines->reduce_s, time[1]));
}

static void print_row(const struct hapt_env *env, const struct hapt_compare_row *row)
{
    const struct hapt_plan *plan = row->plan;
    char time[3][32], share[3][16], ratio[16] = "-", schedule[32];
    snprintf(schedule, sizeof schedule, "%s%s", hapt_schedule_kind_name(row->schedule),
             plan && plan->blocking ? ", blocking" : "");
    if (!plan) {
        hapt_print_wrapped(env, 24, "  %-20s %-14s  none: %s\n", row->name, schedule, row->reason);
        print_pipelines(env, row);
        return;
    }
    const double mfu = hapt_plan_mfu(plan); /* 0: the model is unknown */
    if (!isnan(row->ratio))
        snprintf(ratio, sizeof ratio, "%.3f", row->ratio * plan->simulated_s / hapt_compare_step_s(row));
    hapt_print(env, "  %-20s %-14s %9s %6s %9s %9s %7s %7s %6s %2d\n", row->name, schedule,
               hapt_units_time(plan->simulated_s, time[0]), ratio, hapt_units_time(plan->t_max_s, time[1]),
               row->boundary < 0 ? "-" : hapt_units_time(row->comm_s, time[2]), percent(row->overlap, share[0]),
               percent(plan->balance_eta, share[1]), percent(mfu > 0 ? mfu : NAN, share[2]), plan->stage_count);
    if (row->note) hapt_print_wrapped(env, 24, "  %-20s  (%s)\n", "", row->note);
    print_pipelines(env, row);
}

static void print_rows(const struct hapt_env *env, const struct hapt_compare_row *row, int count, int microbatches)
{
    hapt_print(env, "one simulated step of %d microbatches; transfer: the slowest one between subclusters; S: stages\n",
               microbatches);
    hapt_print(env, "  %-20s %-14s %9s %6s %9s %9s %7s %7s %6s %2s\n", "", "schedule", "step", "ratio", "t_max",
               "transfer", "hidden", "balance", "MFU", "S");
    for (int r = 0; r < count; r++) print_row(env, &row[r]);
}

static json_t *row_object(const struct hapt_compare_row *row)
{
    const struct hapt_plan *plan = row->plan;
    json_t *object = json_pack("{s:s, s:s, s:s, s:i, s:b}", "name", row->name, "strategy",
                               hapt_strategy_name(row->strategy), "schedule", hapt_schedule_kind_name(row->schedule),
                               "granularity", row->granularity, "ignore_communication", row->ignore_communication);
    if (!object) return NULL;
    json_object_set_new(object, "note", row->note ? json_string(row->note) : json_null());
    json_object_set_new(object, "reason", row->reason ? json_string(row->reason) : json_null());
    if (row->pipelines) json_object_set_new(object, "pipelines", hapt_plan_pipelines_json(row->pipelines));
    if (!plan) return object;
    const double mfu = hapt_plan_mfu(plan);
    json_object_set_new(object, "blocking", json_boolean(plan->blocking));
    json_object_set_new(object, "simulated_s", json_real(plan->simulated_s));
    json_object_set_new(object, "ratio", hapt_plan_number(row->ratio));
    json_object_set_new(object, "latency_s", json_real(plan->latency_s));
    json_object_set_new(object, "t_max_s", json_real(plan->t_max_s));
    json_object_set_new(object, "limit", json_string(plan->limit));
    json_object_set_new(object, "boundary", row->boundary < 0 ? json_null() : json_integer(row->boundary));
    json_object_set_new(object, "comm_s", hapt_plan_number(row->comm_s));
    json_object_set_new(object, "overlap", hapt_plan_number(row->overlap));
    json_object_set_new(object, "balance_eta", json_real(plan->balance_eta));
    if (mfu > 0) json_object_set_new(object, "mfu", json_real(mfu));
    json_object_set_new(object, "search_seconds", json_real(plan->search.seconds));
    json_object_set_new(object, "stages", hapt_plan_stages_json(plan));
    return object;
}

static enum hapt_status print_json(const struct hapt_compare_row *row, int count, int microbatches)
{
    json_t *rows = json_array();
    for (int r = 0; rows && r < count; r++) json_array_append_new(rows, row_object(&row[r]));
    json_t *object = json_pack("{s:s, s:i, s:i, s:o}", "format", "hapt-comparison", "version", 1, "microbatches",
                               microbatches, "rows", rows);
    return hapt_json_print(object, "the comparison's", 2);
}

enum hapt_status hapt_plan_compare_rows(struct hapt_env *env, struct hapt_config *config,
                                        const struct hapt_profile *profile, const struct hapt_layers *layers,
                                        struct hapt_arena *arena, struct hapt_compare_row **rows, int *count,
                                        int *microbatches)
{
    struct hapt_strategy_options options;
    HAPT_TRY(hapt_env_agree(env->world, hapt_phase_strategy(config, profile, layers, arena, &options)));
    struct hapt_progress progress;
    hapt_progress_init(&progress, env, "comparing", 0);
    const enum hapt_status compared = hapt_plan_compare(env->world, profile, &options, arena, rows, count);
    hapt_progress_release(&progress);
    *microbatches = options.search.microbatches;
    return compared;
}

enum hapt_status hapt_plan_compare_print(struct hapt_env *env, struct hapt_config *config,
                                         const struct hapt_profile *profile, const struct hapt_layers *layers,
                                         struct hapt_arena *arena)
{
    struct hapt_compare_row *rows;
    int count, microbatches;
    HAPT_TRY(hapt_plan_compare_rows(env, config, profile, layers, arena, &rows, &count, &microbatches));
    enum hapt_status status = HAPT_OK;
    print_rows(env, rows, count, microbatches);
    if (env->world_rank == 0 && env->quiet) status = print_json(rows, count, microbatches);
    return hapt_env_agree(env->world, status);
}
