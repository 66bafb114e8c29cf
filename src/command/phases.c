#include "phases.h"

#include <stdio.h>

#include "hapt/progress.h"

enum hapt_status hapt_phase_refuse_unused(const struct hapt_config *config, const char *why, const char *names)
{
    char name[32];
    for (int length; sscanf(names, "%31s%n", name, &length) == 1; names += length)
        if (hapt_config_given(config, name))
            return hapt_fail(HAPT_ERR_USAGE, "leave out one of them", "--%s has no effect: %s", name, why);
    return HAPT_OK;
}

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
    struct hapt_progress progress;
    hapt_progress_init(&progress, env, "loading the model", 0);
    const enum hapt_status status = load_model(config, arena, model);
    hapt_progress_release(&progress);
    return hapt_env_agree(env->world, status);
}

enum hapt_status hapt_phase_layers(struct hapt_env *env, struct hapt_config *config, const struct hapt_model *model,
                                   struct hapt_arena *arena, struct hapt_layers **layers)
{
    const struct hapt_layers_options options = {.granularity = (int)hapt_config_int(config, "layers-per-model"),
                                                .heavy_minimum = (int)hapt_config_int(config, "heavy-minimum")};
    return hapt_env_agree(env->world, hapt_layers_build(model->graph, &options, arena, layers));
}
