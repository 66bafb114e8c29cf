/* Which parameters train: --trainable and --freeze, shell patterns of parameter names. How the others are held. */
#include <fnmatch.h>
#include <string.h>

#include "zoo.h"

/* Does the name match one of the patterns, which commas separate? */
static bool matches(const char *patterns, const char *name, struct hapt_arena *arena, enum hapt_status *status)
{
    char *list = hapt_arena_strdup(arena, patterns), *rest = NULL;
    if (!list) *status = HAPT_ERR_MEMORY;
    for (char *one = list ? strtok_r(list, ",", &rest) : NULL; one; one = strtok_r(NULL, ",", &rest))
        if (fnmatch(one, name, 0) == 0) return true;
    return false;
}

/* Each pattern must match some parameter: a misspelt one would silently do nothing. */
static enum hapt_status check_patterns(const char *option, const char *patterns, const struct hapt_graph *graph,
                                       struct hapt_arena *arena)
{
    char *list = hapt_arena_strdup(arena, patterns), *rest = NULL;
    if (!list) return HAPT_ERR_MEMORY;
    for (char *one = strtok_r(list, ",", &rest); one; one = strtok_r(NULL, ",", &rest)) {
        bool found = false;
        for (int t = 0; t < graph->tensor_count && !found; t++)
            found = graph->tensor[t].kind == HAPT_TENSOR_PARAMETER && fnmatch(one, graph->tensor[t].name, 0) == 0;
        if (found) continue;
        return hapt_fail(HAPT_ERR_USAGE, "patterns are the shell's: \"model.layers.[01].*\"; commas separate them",
                         "--%s: no parameter has a name like %s", option, one);
    }
    return HAPT_OK;
}

struct zoo_frozen zoo_frozen_of(const struct hapt_config *config)
{
    const char *held = hapt_config_text(config, "frozen-weights");
    return (struct zoo_frozen){.trainable = hapt_config_text(config, "trainable"),
                               .freeze = hapt_config_text(config, "freeze"),
                               .adapted = hapt_config_text(config, "lora") != NULL,
                               .packing = !strcmp(held, "int8")   ? HAPT_PACKING_INT8
                                          : !strcmp(held, "bf16") ? HAPT_PACKING_BF16
                                                                  : HAPT_PACKING_NONE};
}

bool zoo_trains(const struct zoo_frozen *frozen, const char *name, struct hapt_arena *arena, enum hapt_status *status)
{
    bool trains = frozen->adapted ? hapt_is_adapter(name) : !frozen->trainable;
    if (frozen->trainable) trains = trains || matches(frozen->trainable, name, arena, status);
    if (frozen->freeze) trains = trains && !matches(frozen->freeze, name, arena, status);
    return trains;
}

/* --frozen-weights must have an effect. */
static enum hapt_status record_packing(struct hapt_model *model, const struct hapt_config *config,
                                       struct hapt_arena *arena)
{
    const char *held = hapt_config_text(config, "frozen-weights");
    if (!hapt_config_given(config, "frozen-weights")) return HAPT_OK;
    if (!strcmp(held, "fp32")) return hapt_model_set(model, arena, "frozen-weights", held);
    for (int t = 0; t < model->graph->tensor_count; t++)
        if (model->graph->tensor[t].packed) return hapt_model_set(model, arena, "frozen-weights", held);
    return hapt_fail(HAPT_ERR_USAGE,
                     "freeze linear layers (--lora, --freeze, --trainable) whose inputs are a multiple of 32 wide",
                     "--frozen-weights %s: no layer can be packed", held);
}

enum hapt_status zoo_freeze(struct hapt_model *model, const struct hapt_config *config, struct hapt_arena *arena)
{
    const struct zoo_frozen frozen = zoo_frozen_of(config);
    const char *trainable = frozen.trainable, *freeze = frozen.freeze;
    const struct hapt_graph *graph = model->graph;
    enum hapt_status status = HAPT_OK;
    if (frozen.adapted && (trainable || freeze))
        return hapt_fail(HAPT_ERR_USAGE, "leave out --trainable and --freeze", "--lora trains its adapters alone");
    if (trainable) HAPT_TRY(check_patterns("trainable", trainable, graph, arena));
    if (freeze) HAPT_TRY(check_patterns("freeze", freeze, graph, arena));
    if (trainable) HAPT_TRY(hapt_model_set(model, arena, "trainable", trainable));
    if (freeze) HAPT_TRY(hapt_model_set(model, arena, "freeze", freeze));
    for (int t = 0; (trainable || freeze || frozen.adapted) && t < graph->tensor_count && status == HAPT_OK; t++) {
        struct hapt_tensor *tensor = &graph->tensor[t];
        if (tensor->kind != HAPT_TENSOR_PARAMETER) continue;
        tensor->trainable = zoo_trains(&frozen, tensor->name, arena, &status);
    }
    return status == HAPT_OK ? record_packing(model, config, arena) : status;
}
