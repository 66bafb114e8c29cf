/* Which parameters train: --trainable and --freeze, shell patterns of parameter names. */
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

enum hapt_status zoo_freeze(struct hapt_model *model, const struct hapt_config *config, struct hapt_arena *arena)
{
    const char *trainable = hapt_config_text(config, "trainable"), *freeze = hapt_config_text(config, "freeze");
    const bool adapted = hapt_config_text(config, "lora") != NULL;
    const struct hapt_graph *graph = model->graph;
    enum hapt_status status = HAPT_OK;
    if (adapted && (trainable || freeze))
        return hapt_fail(HAPT_ERR_USAGE, "leave out --trainable and --freeze", "--lora trains its adapters alone");
    if (trainable) HAPT_TRY(check_patterns("trainable", trainable, graph, arena));
    if (freeze) HAPT_TRY(check_patterns("freeze", freeze, graph, arena));
    if (trainable) HAPT_TRY(hapt_model_set(model, arena, "trainable", trainable));
    if (freeze) HAPT_TRY(hapt_model_set(model, arena, "freeze", freeze));
    for (int t = 0; (trainable || freeze || adapted) && t < graph->tensor_count && status == HAPT_OK; t++) {
        struct hapt_tensor *tensor = &graph->tensor[t];
        if (tensor->kind != HAPT_TENSOR_PARAMETER) continue;
        bool trains = adapted ? hapt_is_adapter(tensor->name) : !trainable;
        if (trainable) trains = trains || matches(trainable, tensor->name, arena, &status);
        if (freeze) trains = trains && !matches(freeze, tensor->name, arena, &status);
        tensor->trainable = trains;
    }
    return status;
}
