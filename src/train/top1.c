#include "top1.h"

#include "data.h"

enum { BLOCK_BYTES = 1 << 26 }; /* of logits that are copied at once */

enum hapt_status top1_create(struct worker *worker, struct top1 **top1)
{
    const int last = worker->plan->stage_count - 1;
    const struct stage *stage = worker_stage(worker, last);
    struct top1 *made;
    *top1 = NULL;
    HAPT_NEW(made, worker->arena, 1);
    bool known;
    logits_find(worker, &made->logits, &known);
    if (!known || !made->logits.whole) return HAPT_OK;
    *top1 = made;
    if (!made->logits.counts) return HAPT_OK;
    char *logit;
    const int64_t row_bytes = made->logits.classes * (int64_t)hapt_dtype_bytes(made->logits.dtype),
                  rows = (int64_t)hapt_engine_tensor_bytes(stage->engine, made->logits.tensor) / row_bytes;
    made->block_rows = row_bytes < BLOCK_BYTES ? BLOCK_BYTES / row_bytes : 1;
    if (made->block_rows > rows) made->block_rows = rows;
    HAPT_NEW(logit, worker->arena, made->block_rows * row_bytes);
    HAPT_NEW(made->target, worker->arena, rows);
    made->logit = logit;
    return HAPT_OK;
}

/* The first of the largest values. */
static int64_t largest(const void *logit, enum hapt_dtype dtype, int64_t first, int64_t count)
{
    int64_t best = 0;
    float most = logits_value(logit, dtype, first);
    for (int64_t i = 1; i < count; i++) {
        const float value = logits_value(logit, dtype, first + i);
        if (!(value > most)) continue;
        most = value;
        best = i;
    }
    return best;
}

enum hapt_status top1_add(void *context, struct stage *stage, int microbatch, int slot)
{
    struct top1 *top1 = context;
    struct worker *worker = stage->worker;
    const enum hapt_dtype dtype = top1->logits.dtype;
    const int64_t classes = top1->logits.classes;
    const size_t target_bytes = hapt_engine_tensor_bytes(stage->engine, top1->logits.targets),
                 row_bytes = (size_t)classes * hapt_dtype_bytes(dtype);
    const int64_t rows = (int64_t)(target_bytes / sizeof(int32_t));
    const char *logits = hapt_engine_tensor(stage->engine, top1->logits.tensor, slot);
    (void)microbatch;
    if (!top1->logits.counts) return HAPT_OK;
    HAPT_TRY(
        worker_copy(worker, top1->target, hapt_engine_tensor(stage->engine, top1->logits.targets, slot), target_bytes));
    for (int64_t first = 0; first < rows; first += top1->block_rows) {
        const int64_t count = rows - first < top1->block_rows ? rows - first : top1->block_rows;
        const int32_t *target = top1->target + first;
        int64_t hits = 0;
        HAPT_TRY(worker_copy(worker, top1->logit, logits + (size_t)first * row_bytes, (size_t)count * row_bytes));
#pragma omp parallel for reduction(+ : hits) num_threads(worker->threads)
        for (int64_t row = 0; row < count; row++)
            if (target[row] != DATA_IGNORED) hits += largest(top1->logit, dtype, row * classes, classes) == target[row];
        top1->hits += hits;
    }
    return HAPT_OK;
}
