/* The ranks of the stages, and how two of them exchange messages. */
#include "stage.h"

int stage_size(const struct stage *stage, int chunk)
{
    return hapt_plan_submesh_size(stage->plan->stage[chunk].submesh);
}

int stage_world_rank(const struct stage *stage, int chunk, int index)
{
    return stage->ranks[chunk][index];
}

double stage_agreement_timeout_s(const struct stage *stage)
{
    /* Longer than the waits for messages, because these report more detail and should print first. */
    return stage->timeout_s * (stage->chunk >= 0 ? 3 : 4);
}

const struct hapt_pair *stage_find_pair(const struct stage *stage, int edge, int from, int to)
{
    for (int p = 0; p < stage->pair_count; p++) {
        const struct stage_pair *pair = &stage->pair[p];
        if (pair->edge == edge && pair->from == from && pair->to == to) return pair->own.group ? &pair->own : NULL;
    }
    return NULL;
}
