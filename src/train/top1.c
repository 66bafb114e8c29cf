#include "top1.h"

#include "data.h"

enum { BLOCK_BYTES = 1 << 26 }; /* of logits that are copied at once */

/* The inputs of the cross entropy in the last chunk. */
static bool find_inputs(const struct worker *worker, int chunk, struct top1 *top1)
{
    const struct hapt_graph *graph = worker->program[chunk]->graph;
    const int loss = hapt_op_type_find("cross_entropy");
    for (int op = 0; op < graph->op_count; op++) {
        if (graph->op[op].type != loss) continue;
        top1->logits = graph->op[op].input[0];
        top1->targets = graph->op[op].input[1];
        return true;
    }
    return false;
}

/* True if the rank at `index` of a chunk has whole rows of logits, with their targets. */
static bool has_rows(const struct worker *worker, int chunk, int index, const struct top1 *top1)
{
    struct hapt_box logits, targets;
    stage_box(worker, chunk, index, top1->logits, &logits);
    stage_box(worker, chunk, index, top1->targets, &targets);
    int64_t rows = 1, with_target = 1;
    for (int d = 0; d + 1 < logits.dims; d++) rows *= logits.extent[d];
    for (int d = 0; d < targets.dims; d++) with_target *= targets.extent[d];
    return logits.extent[logits.dims - 1] == top1->classes && rows == with_target;
}

enum hapt_status top1_create(struct worker *worker, struct top1 **top1)
{
    const int last = worker->plan->stage_count - 1;
    const struct stage *stage = worker_stage(worker, last);
    struct top1 *made;
    *top1 = NULL;
    HAPT_NEW(made, worker->arena, 1);
    if (!find_inputs(worker, last, made)) return HAPT_OK;
    const struct hapt_tensor *logits = &worker->program[last]->graph->tensor[made->logits];
    made->classes = logits->shape[logits->dims - 1];
    for (int r = 0; r < stage_size(worker, last); r++)
        if (!has_rows(worker, last, r, made)) return HAPT_OK;
    *top1 = made;
    if (!stage) return HAPT_OK;
    int replicas, replica;
    stage_replica(worker, last, stage->rank, made->logits, &replicas, &replica);
    made->counts = replica == 0;
    if (!made->counts) return HAPT_OK;
    char *logit;
    const int64_t row_bytes = made->classes * (int64_t)hapt_dtype_bytes(logits->dtype),
                  rows = (int64_t)hapt_engine_tensor_bytes(stage->engine, made->logits) / row_bytes;
    made->block_rows = row_bytes < BLOCK_BYTES ? BLOCK_BYTES / row_bytes : 1;
    if (made->block_rows > rows) made->block_rows = rows;
    HAPT_NEW(logit, worker->arena, made->block_rows * row_bytes);
    HAPT_NEW(made->target, worker->arena, rows);
    made->logit = logit;
    return HAPT_OK;
}

static float value_of(const void *logit, enum hapt_dtype dtype, int64_t i)
{
    if (dtype == HAPT_F32) return ((const float *)logit)[i];
    const uint16_t bits = ((const uint16_t *)logit)[i];
    return dtype == HAPT_BF16 ? hapt_bf16_to_f32(bits) : hapt_f16_to_f32(bits);
}

/* The first of the largest values. */
static int64_t largest(const void *logit, enum hapt_dtype dtype, int64_t first, int64_t count)
{
    int64_t best = 0;
    float most = value_of(logit, dtype, first);
    for (int64_t i = 1; i < count; i++) {
        const float value = value_of(logit, dtype, first + i);
        if (!(value > most)) continue;
        most = value;
        best = i;
    }
    return best;
}

enum hapt_status top1_add(struct top1 *top1, struct stage *stage, int slot)
{
    struct worker *worker = stage->worker;
    const enum hapt_dtype dtype = stage->program->graph->tensor[top1->logits].dtype;
    const size_t target_bytes = hapt_engine_tensor_bytes(stage->engine, top1->targets),
                 row_bytes = (size_t)top1->classes * hapt_dtype_bytes(dtype);
    const int64_t rows = (int64_t)(target_bytes / sizeof(int32_t));
    const char *logits = hapt_engine_tensor(stage->engine, top1->logits, slot);
    if (!top1->counts) return HAPT_OK;
    HAPT_TRY(worker_copy(worker, top1->target, hapt_engine_tensor(stage->engine, top1->targets, slot), target_bytes));
    for (int64_t first = 0; first < rows; first += top1->block_rows) {
        const int64_t count = rows - first < top1->block_rows ? rows - first : top1->block_rows;
        const int32_t *target = top1->target + first;
        int64_t hits = 0;
        HAPT_TRY(worker_copy(worker, top1->logit, logits + (size_t)first * row_bytes, (size_t)count * row_bytes));
#pragma omp parallel for reduction(+ : hits) num_threads(worker->threads)
        for (int64_t row = 0; row < count; row++)
            if (target[row] != DATA_IGNORED)
                hits += largest(top1->logit, dtype, row * top1->classes, top1->classes) == target[row];
        top1->hits += hits;
    }
    return HAPT_OK;
}
