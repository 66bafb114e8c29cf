#include "logits.h"

static bool find_inputs(const struct worker *worker, int chunk, struct logits *logits)
{
    const struct hapt_graph *graph = worker->program[chunk]->graph;
    const int loss = hapt_op_type_find("cross_entropy");
    for (int op = 0; op < graph->op_count; op++) {
        if (graph->op[op].type != loss) continue;
        logits->tensor = graph->op[op].input[0];
        logits->targets = graph->op[op].input[1];
        return true;
    }
    return false;
}

/* True if the rank at `index` of a chunk has whole rows of logits, with their targets. */
static bool has_rows(const struct worker *worker, int chunk, int index, const struct logits *logits)
{
    struct hapt_box box, targets;
    stage_box(worker, chunk, index, logits->tensor, &box);
    stage_box(worker, chunk, index, logits->targets, &targets);
    int64_t rows = 1, with_target = 1;
    for (int d = 0; d + 1 < box.dims; d++) rows *= box.extent[d];
    for (int d = 0; d < targets.dims; d++) with_target *= targets.extent[d];
    return box.extent[box.dims - 1] == logits->classes && rows == with_target;
}

void logits_find(struct worker *worker, struct logits *logits, bool *known)
{
    const int last = worker->plan->stage_count - 1;
    const struct stage *stage = worker_stage(worker, last);
    *logits = (struct logits){0};
    *known = find_inputs(worker, last, logits);
    if (!*known) return;
    const struct hapt_tensor *tensor = &worker->program[last]->graph->tensor[logits->tensor];
    logits->classes = tensor->shape[tensor->dims - 1];
    logits->dtype = tensor->dtype;
    logits->whole = true;
    for (int r = 0; r < stage_size(worker, last); r++)
        logits->whole = logits->whole && has_rows(worker, last, r, logits);
    if (!stage) return;
    int replicas, replica;
    stage_replica(worker, last, stage->rank, logits->tensor, &replicas, &replica);
    logits->counts = replica == 0;
}

float logits_value(const void *row, enum hapt_dtype dtype, int64_t i)
{
    if (dtype == HAPT_F32) return ((const float *)row)[i];
    const uint16_t bits = ((const uint16_t *)row)[i];
    return dtype == HAPT_BF16 ? hapt_bf16_to_f32(bits) : hapt_f16_to_f32(bits);
}
