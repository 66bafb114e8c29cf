#include "phases.h"

#include <string.h>

enum hapt_status hapt_phase_plan_bind(struct hapt_plan *plan, const struct hapt_layers *layers)
{
    if (plan->layer_count != layers->count)
        return hapt_fail(HAPT_ERR_INPUT, "plan with the granularity of the model at hand",
                         "the plan has %d layers, the model %d", plan->layer_count, layers->count);
    for (int i = 0; i < plan->stage_count; i++) {
        struct hapt_plan_stage *stage = &plan->stage[i];
        stage->first_op = hapt_layers_first_op(layers, stage->first_layer);
        stage->end_op = layers->end_op[stage->end_layer - 1];
    }
    return HAPT_OK;
}

enum hapt_status hapt_phase_plan(struct hapt_env *env, struct hapt_config *config, const struct hapt_profile *profile,
                                 const struct hapt_layers *layers, struct hapt_arena *arena, struct hapt_plan **plan)
{
    struct hapt_search_options options = {.microbatches = (int)hapt_config_int(config, "microbatches"),
                                          .hide_threshold = hapt_config_real(config, "hide-threshold"),
                                          .use_all_devices = hapt_config_bool(config, "use-all-devices")};
    const bool known = hapt_schedule_kind_parse(hapt_config_text(config, "schedule"), &options.schedule);
    HAPT_ASSERT(known);
    const char *stages = hapt_config_text(config, "stages");
    enum hapt_status status;
    if (stages)
        status = hapt_env_agree(env->world, hapt_plan_force(profile, &options, stages, arena, plan));
    else if (strcmp(hapt_config_text(config, "strategy"), "even") == 0)
        status = hapt_plan_even(env->world, profile, &options, arena, plan);
    else
        status = hapt_plan_search(env->world, profile, &options, arena, plan);
    if (status != HAPT_OK || !layers) return status;
    (*plan)->threads = hapt_phase_threads(env, config);
    return hapt_env_agree(env->world, hapt_phase_plan_bind(*plan, layers));
}
