/* Finds the origin of a loss or gradient that is not finite. */
#include "watch_origin.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { FOUND_NOTHING, FOUND_GRADIENT, FOUND_WEIGHT };

struct origin {
    int found;
    char parameter[120];
};

static bool is_finite(struct stage *stage, int tensor)
{
    const float *value = hapt_engine_tensor(stage->engine, tensor, 0);
    const size_t count = hapt_engine_tensor_bytes(stage->engine, tensor) / sizeof *value;
    for (size_t i = 0; value && i < count; i++)
        if (!isfinite(value[i])) return false;
    return true;
}

/* Finds the first weight; without one the last parameter's gradient, because the backward pass computes it first. */
static void look(struct stage *stage, struct origin *origin)
{
    memset(origin, 0, sizeof *origin);
    if (stage->chunk < 0 || strcmp(stage->backend->name, "cpu") != 0) return; /* only its memory is host memory */
    const struct hapt_program *program = stage->program[stage->chunk];
    for (int t = 0; t < program->tensor_count; t++) {
        const struct hapt_tensor *tensor = &program->graph->tensor[program->tensor[t].tensor];
        if (tensor->kind != HAPT_TENSOR_PARAMETER) continue;
        int found = FOUND_NOTHING;
        if (!is_finite(stage, program->tensor[t].tensor))
            found = FOUND_WEIGHT;
        else if (tensor->gradient >= 0 && !is_finite(stage, tensor->gradient))
            found = FOUND_GRADIENT;
        if (found == FOUND_NOTHING || origin->found == FOUND_WEIGHT) continue;
        origin->found = found;
        snprintf(origin->parameter, sizeof origin->parameter, "%s", tensor->name);
    }
}

enum hapt_status watch_origin_find(struct stage *stage, char *text, size_t size, bool *weights)
{
    struct origin mine, *all;
    int best = -1;
    text[0] = '\0';
    *weights = false;
    look(stage, &mine);
    HAPT_NEW(all, stage->arena, stage->env->world_size);
    HAPT_TRY(hapt_link_all_gather(stage->env->world, "where a value is not finite", stage_agreement_timeout_s(stage),
                                  &mine, sizeof mine, all));
    int best_stage = -1;
    for (int c = 0; c < stage->plan->stage_count; c++)
        for (int r = 0; r < stage_size(stage, c); r++) {
            const int rank = stage_world_rank(stage, c, r);
            /* the first stage with such a weight; else the last with such a gradient */
            if (all[rank].found == FOUND_NOTHING || (best >= 0 && all[best].found == FOUND_WEIGHT)) continue;
            if (best >= 0 && all[rank].found == FOUND_GRADIENT && best_stage == c) continue;
            best = rank;
            best_stage = c;
        }
    if (best < 0) return HAPT_OK;
    *weights = all[best].found == FOUND_WEIGHT;
    snprintf(text, size, "; it began at %s %s on rank %d of stage %d, host %s",
             *weights ? "the weight" : "the gradient of", all[best].parameter, best, best_stage, hapt_env_host(best));
    return HAPT_OK;
}
