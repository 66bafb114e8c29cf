/* Finds the origin of a loss or gradient that is not finite. */
#include "watch_origin.h"

#include "stage.h"

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
    const bool weight = stage->program->graph->tensor[tensor].kind == HAPT_TENSOR_PARAMETER;
    size_t count = hapt_engine_tensor_bytes(stage->engine, tensor) / sizeof(float);
    const float *value =
        weight ? hapt_engine_master(stage->engine, tensor, &count) : hapt_engine_tensor(stage->engine, tensor, 0);
    for (size_t i = 0; value && i < count; i++)
        if (!isfinite(value[i])) return false;
    return true;
}

/* Finds the first weight; without one the last parameter's gradient, because the backward pass computes it first. */
static void look(struct stage *stage, struct origin *origin)
{
    const struct hapt_program *program = stage->program;
    if (strcmp(stage->worker->backend->name, "cpu") != 0) return; /* only its memory is host memory */
    for (int t = 0; t < program->tensor_count; t++) {
        const struct hapt_tensor *tensor = &program->graph->tensor[program->tensor[t].tensor];
        if (tensor->kind != HAPT_TENSOR_PARAMETER) continue;
        int found = FOUND_NOTHING;
        if (!tensor->packed && !is_finite(stage, program->tensor[t].tensor)) /* packed bits are no numbers */
            found = FOUND_WEIGHT;
        else if (tensor->gradient >= 0 && !is_finite(stage, tensor->gradient))
            found = FOUND_GRADIENT;
        if (found == FOUND_NOTHING || origin->found == FOUND_WEIGHT) continue;
        origin->found = found;
        snprintf(origin->parameter, sizeof origin->parameter, "%s", tensor->name);
    }
}

enum hapt_status watch_origin_find(struct worker *worker, char *text, size_t size, bool *weights)
{
    struct origin *mine, *all;
    const struct origin *best = NULL;
    int rank = -1, stage = -1;
    text[0] = '\0';
    *weights = false;
    HAPT_NEW(mine, worker->arena, worker->most);
    for (int s = 0; s < worker->stage_count; s++) look(&worker->stage[s], &mine[s]);
    HAPT_NEW(all, worker->arena, worker->env->world_size * worker->most);
    HAPT_TRY(hapt_link_all_gather(worker->env->world, "where a value is not finite", worker_agreement_timeout_s(worker),
                                  mine, (size_t)worker->most * sizeof *mine, all));
    for (int c = 0; c < worker->plan->stage_count; c++)
        for (int r = 0; r < stage_size(worker, c); r++) {
            const struct origin *its = &all[worker_record(worker, c, r)];
            /* the first stage with such a weight; else the last with such a gradient */
            if (its->found == FOUND_NOTHING || (best && best->found == FOUND_WEIGHT)) continue;
            if (best && its->found == FOUND_GRADIENT && stage == c) continue;
            best = its;
            rank = stage_world_rank(worker, c, r);
            stage = c;
        }
    if (!best) return HAPT_OK;
    *weights = best->found == FOUND_WEIGHT;
    snprintf(text, size, "; it began at %s %s on rank %d of stage %d, host %s",
             *weights ? "the weight" : "the gradient of", best->parameter, rank, stage, hapt_env_host(rank));
    return HAPT_OK;
}
