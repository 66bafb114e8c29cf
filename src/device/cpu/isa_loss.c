/* Softmax cross-entropy with its logsumexp, forward and backward. Rows whose target is -100 count for nothing. */
#include <math.h>

#include "isa.h"

#define IGNORED (-100)

static enum hapt_status check_targets(const int32_t *target, int64_t rows, int64_t columns)
{
    for (int64_t r = 0; r < rows; r++)
        if (target[r] != IGNORED && (target[r] < 0 || target[r] >= columns))
            return hapt_fail(HAPT_ERR_INPUT, "targets must be below the model's vocabulary (or -100: ignored)",
                             "target %d of row %lld is outside the %lld classes", target[r], (long long)r,
                             (long long)columns);
    return HAPT_OK;
}

INLINE double row_logsumexp(const void *logits, int64_t at, int64_t columns, bool half)
{
    vector most = vector_set(-INFINITY);
    for (int64_t c = 0; c < columns; c += LANES) {
        const int64_t left = columns - c;
        vector value = load(logits, at + c, left, half);
        if (left < LANES) value = vector_select(lanes_below(left), value, most);
        most = vector_max(most, value);
    }
    const float top = vector_maximum(most);
    struct sum sum = {0};
    for (int64_t c = 0; c < columns; c += LANES) {
        const int64_t left = columns - c;
        vector term = vector_exp(load(logits, at + c, left, half) - top);
        if (left < LANES) term = vector_select(lanes_below(left), term, (vector){0});
        sum_add(&sum, term);
    }
    return top + log(sum_total(&sum));
}

static size_t loss_workspace(const struct hapt_call *call)
{
    return (size_t)view_rows(&call->input[0]) * sizeof(double);
}

INLINE enum hapt_status loss_run(const struct hapt_call *call, bool half)
{
    const int64_t rows = view_rows(&call->input[0]), columns = view_columns(&call->input[0]);
    const void *logits = call->input[0].data;
    const int32_t *target = call->input[1].data; /* [rows] */
    float *loss = call->output[0].data, *lse = call->output[1].data;
    double *row_loss = call->workspace; /* [rows]: summed in row order, whatever the threads */
    HAPT_TRY(check_targets(target, rows, columns));
#pragma omp parallel for schedule(static) num_threads(threads_for(call, rows *columns * 2))
    for (int64_t r = 0; r < rows; r++) {
        const double row_lse = row_logsumexp(logits, r * columns, columns, half);
        lse[r] = (float)row_lse;
        row_loss[r] = 0;
        if (target[r] != IGNORED) row_loss[r] = row_lse - load(logits, r * columns + target[r], 1, half)[0];
    }
    double total = 0;
    for (int64_t r = 0; r < rows; r++) total += row_loss[r];
    if (call->accumulate & 1u) total += loss[0];
    loss[0] = (float)total;
    return HAPT_OK;
}

static enum hapt_status loss_f32(const struct hapt_call *call, struct hapt_queue *queue)
{
    (void)queue;
    return loss_run(call, false);
}

static enum hapt_status loss_bf16(const struct hapt_call *call, struct hapt_queue *queue)
{
    (void)queue;
    return loss_run(call, true);
}

INLINE enum hapt_status loss_dx_run(const struct hapt_call *call, bool half)
{
    const int64_t rows = view_rows(&call->input[0]), columns = view_columns(&call->input[0]);
    const void *logits = call->input[0].data;
    const int32_t *target = call->input[1].data;
    const float *lse = call->input[2].data, scale = *(const float *)call->input[3].data;
    void *dlogits = call->output[0].data;
    const bool accumulate = call->accumulate & 1u;
    HAPT_TRY(check_targets(target, rows, columns));
#pragma omp parallel for schedule(static) num_threads(threads_for(call, rows *columns * 2))
    for (int64_t r = 0; r < rows; r++) {
        const int64_t at = r * columns;
        const float weight = target[r] == IGNORED ? 0.0f : scale;
        const float chosen = target[r] == IGNORED ? 0.0f : load(logits, at + target[r], 1, half)[0];
        const float before = accumulate && target[r] != IGNORED ? load(dlogits, at + target[r], 1, half)[0] : 0.0f;
        for (int64_t c = 0; c < columns; c += LANES) {
            const int64_t left = columns - c;
            vector d = vector_exp(load(logits, at + c, left, half) - lse[r]) * weight;
            if (accumulate) d += load(dlogits, at + c, left, half);
            store(dlogits, at + c, left, half, d);
        }
        if (target[r] == IGNORED) continue;
        const float p = vector_exp(vector_set(chosen - lse[r]))[0]; /* again, so that bf16 rounds p - 1 once */
        store(dlogits, at + target[r], 1, half, vector_set((p - 1.0f) * weight + before));
    }
    return HAPT_OK;
}

static enum hapt_status loss_dx_f32(const struct hapt_call *call, struct hapt_queue *queue)
{
    (void)queue;
    return loss_dx_run(call, false);
}

static enum hapt_status loss_dx_bf16(const struct hapt_call *call, struct hapt_queue *queue)
{
    (void)queue;
    return loss_dx_run(call, true);
}

const struct cpu_kernel ISA_NAME(hapt_cpu_loss)[] = {
    {HAPT_F32, {"cross_entropy", loss_workspace, loss_f32}},
    {HAPT_BF16, {"cross_entropy", loss_workspace, loss_bf16}},
    {HAPT_F32, {"cross_entropy_dx", NULL, loss_dx_f32}},
    {HAPT_BF16, {"cross_entropy_dx", NULL, loss_dx_bf16}},
    {HAPT_F32, {NULL, NULL, NULL}},
};
