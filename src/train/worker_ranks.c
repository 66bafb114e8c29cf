/* The ranks of the chunks, the records that ranks keep per chunk, and how two ranks exchange messages. */
#include "stage.h"

int stage_size(const struct worker *worker, int chunk)
{
    return hapt_plan_submesh_size(worker->plan->stage[chunk].submesh);
}

int stage_world_rank(const struct worker *worker, int chunk, int index)
{
    return worker->ranks[chunk][index];
}

bool worker_shares(const struct worker *worker, int chunk, int other)
{
    return worker->plan->stage[chunk].submesh == worker->plan->stage[other].submesh;
}

struct stage *worker_stage(const struct worker *worker, int chunk)
{
    if (worker->stage_count == 0 || !worker_shares(worker, chunk, worker->stage[0].chunk)) return NULL;
    return &worker->stage[worker->index[chunk]];
}

size_t worker_record(const struct worker *worker, int chunk, int index)
{
    return (size_t)stage_world_rank(worker, chunk, index) * (size_t)worker->most + (size_t)worker->index[chunk];
}

int worker_first_chunk(const struct worker *worker, int world_rank)
{
    for (int c = 0; c < worker->plan->stage_count; c++)
        for (int r = 0; r < stage_size(worker, c); r++)
            if (stage_world_rank(worker, c, r) == world_rank) return c;
    return -1;
}

int stage_owner(const struct worker *worker, int tensor)
{
    for (int c = 0; c < worker->plan->stage_count; c++)
        if (worker->program[c]->local[tensor] >= 0) return c;
    return -1;
}

double worker_agreement_timeout_s(const struct worker *worker)
{
    /* Longer than the waits for messages, because these report more detail and should print first. */
    return worker->timeout_s * (worker->stage_count > 0 ? 3 : 4);
}

const struct hapt_pair *worker_find_pair(const struct worker *worker, int edge, int from, int to)
{
    for (int p = 0; p < worker->pair_count; p++) {
        const struct worker_pair *pair = &worker->pair[p];
        if (pair->edge == edge && pair->from == from && pair->to == to) return pair->own.group ? &pair->own : NULL;
    }
    return NULL;
}
