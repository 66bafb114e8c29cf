/* hapt plan: independent pipelines of another system, beside its plan. */
#include <stdio.h>
#include <string.h>

#include "json_print.h"
#include "plan_explain.h"

enum { DEVICES_TEXT = 512 };

/* "16 devices of a100 and 16 of v100" */
static const char *devices_text(const struct hapt_plan *plan, char text[DEVICES_TEXT])
{
    int length = 0;
    text[0] = '\0';
    for (int s = 0; s < plan->submesh_count && length < DEVICES_TEXT; s++) {
        const char *name = plan->submesh[s].name;
        int devices = 0;
        bool first = true;
        for (int other = 0; other < plan->submesh_count; other++) {
            if (strcmp(plan->submesh[other].name, name) != 0) continue;
            first = first && other >= s;
            devices += hapt_plan_submesh_size(&plan->submesh[other]);
        }
        if (first)
            length += snprintf(text + length, (size_t)(DEVICES_TEXT - length), "%s%d%s of %s", length ? " and " : "",
                               devices, length ? "" : " devices", name);
    }
    return text;
}

void hapt_plan_print_pipelines(const struct hapt_env *env, const struct hapt_pipelines *pipelines)
{
    char time[2][32], devices[DEVICES_TEXT];
    hapt_print_wrapped(
        env, 4,
        "  as %d independent pipelines (priced; hapt cannot run them): simulated step %s, of it %s for gradients\n",
        pipelines->count, hapt_units_time(pipelines->simulated_s, time[0]),
        hapt_units_time(pipelines->reduce_s, time[1]));
    for (int p = 0, next; p < pipelines->count; p = next) {
        const struct hapt_plan *plan = pipelines->plan[p];
        for (next = p + 1; next < pipelines->count && pipelines->plan[next] == plan;) next++;
        hapt_print_wrapped(env, 6, "    %d x %d microbatches, schedule %s: %d stages on %s\n", next - p,
                           plan->microbatches, hapt_schedule_kind_name(plan->schedule), plan->stage_count,
                           devices_text(plan, devices));
    }
}

json_t *hapt_plan_pipelines_json(const struct hapt_pipelines *pipelines)
{
    json_t *array = json_array();
    if (!pipelines) {
        json_decref(array);
        return json_null();
    }
    for (int p = 0; array && p < pipelines->count; p++) {
        const struct hapt_plan *plan = pipelines->plan[p];
        json_array_append_new(array, json_pack("{s:i, s:s, s:f, s:o}", "microbatches", plan->microbatches, "schedule",
                                               hapt_schedule_kind_name(plan->schedule), "simulated_s",
                                               plan->simulated_s, "stages", hapt_plan_stages_json(plan)));
    }
    return json_pack("{s:f, s:f, s:o}", "simulated_s", pipelines->simulated_s, "reduce_s", pipelines->reduce_s, "plans",
                     array);
}

enum hapt_status hapt_plan_show_pipelines(const struct hapt_env *env, const struct hapt_config *config,
                                          const struct hapt_profile *profile, const struct hapt_layers *layers,
                                          int microbatches, struct hapt_arena *arena, json_t *extra)
{
    struct hapt_strategy_options options;
    struct hapt_pipelines *pipelines;
    enum hapt_strategy strategy;
    if (!hapt_strategy_parse(hapt_config_text(config, "strategy"), &strategy) || hapt_config_text(config, "stages"))
        return HAPT_OK;
    HAPT_TRY(hapt_env_agree(env->world, hapt_phase_strategy(config, profile, layers, arena, &options)));
    options.search.microbatches = microbatches; /* those of --global-batch */
    HAPT_TRY(hapt_plan_pipelines(env->world, profile, strategy, &options, arena, &pipelines));
    if (!pipelines) return HAPT_OK;
    hapt_plan_print_pipelines(env, pipelines);
    json_object_set_new(extra, "pipelines", hapt_plan_pipelines_json(pipelines));
    return HAPT_OK;
}
