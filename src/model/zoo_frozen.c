/* Which parameters train: --trainable and --freeze, shell patterns of parameter names. How the others are held. */
#include <string.h>

#include "zoo.h"

struct zoo_frozen zoo_frozen_of(const struct hapt_config *config)
{
    const char *held = hapt_config_text(config, "frozen-weights");
    return (struct zoo_frozen){.trainable = hapt_config_text(config, "trainable"),
                               .freeze = hapt_config_text(config, "freeze"),
                               .adapted = hapt_config_text(config, "lora") != NULL,
                               .packing = !strcmp(held, "int8")   ? HAPT_PACKING_INT8
                                          : !strcmp(held, "bf16") ? HAPT_PACKING_BF16
                                          : !strcmp(held, "nf4")  ? HAPT_PACKING_NF4
                                                                  : HAPT_PACKING_NONE};
}

bool zoo_trains(const struct zoo_frozen *frozen, const char *name)
{
    bool trains = frozen->adapted ? hapt_is_adapter(name) : !frozen->trainable;
    if (frozen->trainable) trains = trains || hapt_patterns_match(frozen->trainable, name);
    if (frozen->freeze) trains = trains && !hapt_patterns_match(frozen->freeze, name);
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
                     "freeze linear layers (--lora, --freeze, --trainable) whose inputs are a multiple of 32 wide; "
                     "GPT-2's cannot be "
                     "packed",
                     "--frozen-weights %s: no layer can be packed", held);
}

enum hapt_status zoo_freeze(struct hapt_model *model, const struct hapt_config *config, struct hapt_arena *arena)
{
    const struct zoo_frozen frozen = zoo_frozen_of(config);
    const char *trainable = frozen.trainable, *freeze = frozen.freeze;
    const struct hapt_graph *graph = model->graph;
    if (frozen.adapted && (trainable || freeze))
        return hapt_fail(HAPT_ERR_USAGE, "leave out --trainable and --freeze", "--lora trains its adapters alone");
    if (trainable) HAPT_TRY(hapt_patterns_check("trainable", trainable, graph));
    if (freeze) HAPT_TRY(hapt_patterns_check("freeze", freeze, graph));
    if (trainable) HAPT_TRY(hapt_model_set(model, arena, "trainable", trainable));
    if (freeze) HAPT_TRY(hapt_model_set(model, arena, "freeze", freeze));
    for (int t = 0; (trainable || freeze || frozen.adapted) && t < graph->tensor_count; t++) {
        struct hapt_tensor *tensor = &graph->tensor[t];
        if (tensor->kind != HAPT_TENSOR_PARAMETER) continue;
        tensor->trainable = zoo_trains(&frozen, tensor->name);
    }
    return record_packing(model, config, arena);
}
