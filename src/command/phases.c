#include "phases.h"

#include <string.h>

static enum hapt_status load_model(struct hapt_config *config, struct hapt_arena *arena, struct hapt_model **model)
{
    const char *path = hapt_config_text(config, "input");
    if (!path)
        return hapt_fail(HAPT_ERR_USAGE, "make one with `hapt model gpt --output m.h5`, then give --input m.h5",
                         "no model file given");
    HAPT_TRY(hapt_model_load(path, arena, model));
    for (int i = 0; i < (*model)->training_count; i++)
        HAPT_TRY(hapt_config_default(config, (*model)->training[i].name, (*model)->training[i].value));
    return HAPT_OK;
}

enum hapt_status hapt_phase_model(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena,
                                  struct hapt_model **model)
{
    return hapt_env_agree(env->world, load_model(config, arena, model));
}

enum hapt_status hapt_phase_layers(struct hapt_env *env, struct hapt_config *config, const struct hapt_model *model,
                                   struct hapt_arena *arena, struct hapt_layers **layers)
{
    const struct hapt_layers_options options = {.granularity = (int)hapt_config_int(config, "layers-per-model"),
                                                .heavy_minimum = (int)hapt_config_int(config, "heavy-minimum")};
    return hapt_env_agree(env->world, hapt_layers_build(model->graph, &options, arena, layers));
}

enum hapt_status hapt_phase_profile(struct hapt_env *env, struct hapt_config *config, const struct hapt_cluster *cluster,
                                    const struct hapt_model *model, const struct hapt_layers *layers,
                                    struct hapt_arena *arena, struct hapt_profile **profile)
{
    const bool bound = cluster->subcluster_of_rank != NULL;
    const bool predict = hapt_config_command(config) != HAPT_COMMAND_PLAN && hapt_config_bool(config, "predict");
    if (bound && !predict)
        return hapt_profile_measure(env, cluster, model, layers, config, arena, profile);
    return hapt_env_agree(env->world, hapt_profile_predict(cluster, model, layers, config, arena, profile));
}

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
    else
        status = hapt_plan_search(env->world, profile, &options, arena, plan);
    if (status != HAPT_OK || !layers) return status;
    (*plan)->threads = hapt_phase_threads(env, config);
    return hapt_env_agree(env->world, hapt_phase_plan_bind(*plan, layers));
}

int hapt_phase_threads(const struct hapt_env *env, const struct hapt_config *config)
{
    const int64_t asked = hapt_config_int(config, "threads");
    if (asked > 0) return (int)asked;
    const int share = env->cores / env->node_size;
    return share > 1 ? share : 1;
}
