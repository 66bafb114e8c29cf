/*
 * The squared error, and softmax cross-entropy with its logsumexp, forward and backward. Rows with target -100, and
 * targets that are NaN, are ignored. Label smoothing changes the gradient alone: the loss is the plain one.
 *
 * If the classes are sharded, the shards exchange the largest logit of each row. Then they exchange its sum of
 * exponentials and its target's logit, which only one shard has. So all shards get the same loss and logsumexp.
 */
#include <math.h>

#include "isa.h"

#define IGNORED (-100)

static enum hapt_status check_targets(const struct hapt_call *call, int64_t rows, int64_t here)
{
    const int32_t *target = call->input[1].data;
    const int64_t classes = call->value_count > 0 ? call->value_count : here;
    for (int64_t r = 0; r < rows; r++)
        if (target[r] != IGNORED && (target[r] < 0 || target[r] >= classes))
            return hapt_fail(HAPT_ERR_INPUT, "targets must be below the model's vocabulary (or -100: ignored)",
                             "target %d of row %lld is outside the %lld classes", target[r], (long long)r,
                             (long long)classes);
    return HAPT_OK;
}

/* The column of a row's target in this shard, or -1. */
INLINE int64_t target_column(const struct hapt_call *call, int64_t row, int64_t columns)
{
    const int32_t target = ((const int32_t *)call->input[1].data)[row];
    const int64_t column = target - call->first_value;
    return target == IGNORED || column < 0 || column >= columns ? -1 : column;
}

INLINE float row_top(const void *logits, int64_t at, int64_t columns, bool half)
{
    vector most = vector_set(-INFINITY);
    for (int64_t c = 0; c < columns; c += LANES) {
        const int64_t left = columns - c;
        vector value = load(logits, at + c, left, half);
        if (left < LANES) value = vector_select(lanes_below(left), value, most);
        most = vector_max(most, value);
    }
    return vector_maximum(most);
}

/* Sum of exp(logit - top). */
INLINE double row_sum(const void *logits, int64_t at, int64_t columns, float top, bool half)
{
    struct sum sum = {0};
    for (int64_t c = 0; c < columns; c += LANES) {
        const int64_t left = columns - c;
        vector term = vector_exp(load(logits, at + c, left, half) - top);
        if (left < LANES) term = vector_select(lanes_below(left), term, (vector){0});
        sum_add(&sum, term);
    }
    return sum_total(&sum);
}

/* [rows] double: losses of rows. On shards [rows] float: largest logits, and [2][rows]: sums and targets' logits. */
static size_t loss_workspace(const struct hapt_call *call)
{
    return (size_t)view_rows(&call->input[0]) * (sizeof(double) + 3 * sizeof(float));
}

/* Each row's logsumexp and target logit over all shards, into lse[r] and chosen[r]. */
INLINE enum hapt_status exchange_rows(const struct hapt_call *call, bool half, float *top, float *sum, float *lse)
{
    const int64_t rows = view_rows(&call->input[0]), columns = view_columns(&call->input[0]);
    const void *logits = call->input[0].data;
    float *chosen = sum + rows;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, rows *columns))
    for (int64_t r = 0; r < rows; r++) top[r] = row_top(logits, r * columns, columns, half);
    HAPT_TRY(call->shard_reduce(call->shard_reduce_context, top, (size_t)rows, true));
#pragma omp parallel for schedule(static) num_threads(threads_for(call, rows *columns))
    for (int64_t r = 0; r < rows; r++) {
        const int64_t column = target_column(call, r, columns);
        sum[r] = (float)row_sum(logits, r * columns, columns, top[r], half);
        chosen[r] = column < 0 ? 0 : load(logits, r * columns + column, 1, half)[0];
    }
    HAPT_TRY(call->shard_reduce(call->shard_reduce_context, sum, 2 * (size_t)rows, false));
    for (int64_t r = 0; r < rows; r++) lse[r] = (float)(top[r] + log((double)sum[r]));
    return HAPT_OK;
}

/* The loss: the sum over the rows, in their order. */
INLINE void add_rows(const struct hapt_call *call, const double *row_loss, int64_t rows)
{
    float *loss = call->output[0].data;
    double total = 0;
    for (int64_t r = 0; r < rows; r++) total += row_loss[r];
    if (call->accumulate & 1u) total += loss[0];
    loss[0] = (float)total;
}

INLINE enum hapt_status loss_run(const struct hapt_call *call, bool half)
{
    const int64_t rows = view_rows(&call->input[0]), columns = view_columns(&call->input[0]);
    const void *logits = call->input[0].data;
    const int32_t *target = call->input[1].data; /* [rows] */
    float *lse = call->output[1].data;
    double *row_loss = call->workspace; /* [rows]: summed in row order for any number of threads */
    float *top = (float *)(row_loss + rows), *sum = top + rows;
    HAPT_TRY(check_targets(call, rows, columns));
    if (call->shard_reduce) {
        HAPT_TRY(exchange_rows(call, half, top, sum, lse));
        for (int64_t r = 0; r < rows; r++)
            row_loss[r] = target[r] == IGNORED ? 0 : top[r] + log((double)sum[r]) - sum[rows + r];
    } else {
#pragma omp parallel for schedule(static) num_threads(threads_for(call, rows *columns * 2))
        for (int64_t r = 0; r < rows; r++) {
            const int64_t column = target_column(call, r, columns);
            const float most = row_top(logits, r * columns, columns, half);
            const double row_lse = most + log(row_sum(logits, r * columns, columns, most, half));
            lse[r] = (float)row_lse;
            row_loss[r] = column < 0 ? 0 : row_lse - load(logits, r * columns + column, 1, half)[0];
        }
    }
    add_rows(call, row_loss, rows);
    return HAPT_OK;
}

KERNELS(loss, return loss_run(call, half))

INLINE enum hapt_status loss_dx_run(const struct hapt_call *call, bool half)
{
    const int64_t rows = view_rows(&call->input[0]), columns = view_columns(&call->input[0]);
    const void *logits = call->input[0].data;
    const int32_t *target = call->input[1].data;
    const float *lse = call->input[2].data, scale = *(const float *)call->input[3].data;
    const int64_t classes = call->value_count > 0 ? call->value_count : columns;
    const float hot = (float)(1 - call->real[0]), share = (float)(call->real[0] / (double)classes); /* 1, 0: plain */
    void *dlogits = call->output[0].data;
    const bool accumulate = call->accumulate & 1u;
    HAPT_TRY(check_targets(call, rows, columns));
#pragma omp parallel for schedule(static) num_threads(threads_for(call, rows *columns * 2))
    for (int64_t r = 0; r < rows; r++) {
        const int64_t at = r * columns, column = target_column(call, r, columns);
        const float weight = target[r] == IGNORED ? 0.0f : scale;
        const float chosen = column < 0 ? 0.0f : load(logits, at + column, 1, half)[0];
        const float before = accumulate && column >= 0 ? load(dlogits, at + column, 1, half)[0] : 0.0f;
        for (int64_t c = 0; c < columns; c += LANES) {
            const int64_t left = columns - c;
            vector d = (vector_exp(load(logits, at + c, left, half) - lse[r]) - share) * weight;
            if (accumulate) d += load(dlogits, at + c, left, half);
            store(dlogits, at + c, left, half, d);
        }
        if (column < 0) continue;
        const float p = vector_exp(vector_set(chosen - lse[r]))[0]; /* recomputed, so that bf16 rounds p - 1 once */
        store(dlogits, at + column, 1, half, vector_set((p - hot - share) * weight + before));
    }
    return HAPT_OK;
}

KERNELS(loss_dx, return loss_dx_run(call, half))

/* [rows] double: losses of rows */
static size_t errors_workspace(const struct hapt_call *call)
{
    return (size_t)view_rows(&call->input[0]) * sizeof(double);
}

/* Losses of elements, and their derivatives by x. */
struct errors {
    vector loss, slope;
};

/* -target log s(x) - (1 - target) log(1 - s(x)) with s(x) = 1 / (1 + e^-x) */
INLINE struct errors logistic_errors(vector x, vector target)
{
    const vector small = vector_exp((vector)((ivector)x | (int32_t)0x80000000)), all = 1.0f + small; /* e^-|x| */
    vector rest;
    for (int l = 0; l < LANES; l++) rest[l] = log1pf(small[l]);
    const vector sigmoid = vector_select(x < 0.0f, small, vector_set(1.0f)) / all;
    return (struct errors){vector_max((vector){0}, x) - x * target + rest, sigmoid - target};
}

/* 0 where the target is NaN or there is no element: `left` are. */
INLINE struct errors errors_at(const struct hapt_call *call, int64_t at, int64_t left, bool logistic, bool half)
{
    const vector x = load(call->input[0].data, at, left, half), target = load(call->input[1].data, at, left, false);
    const vector off = x - target;
    const struct errors all = logistic ? logistic_errors(x, target) : (struct errors){off * off, 2.0f * off};
    ivector known = target == target;
    if (left < LANES) known &= lanes_below(left);
    return (struct errors){vector_select(known, all.loss, (vector){0}), vector_select(known, all.slope, (vector){0})};
}

INLINE enum hapt_status errors_run(const struct hapt_call *call, bool logistic, bool half)
{
    const int64_t rows = view_rows(&call->input[0]), columns = view_columns(&call->input[0]);
    double *row_loss = call->workspace; /* [rows]: summed in row order for any number of threads */
#pragma omp parallel for schedule(static) num_threads(threads_for(call, rows *columns * 2))
    for (int64_t r = 0; r < rows; r++) {
        struct sum sum = {0};
        for (int64_t c = 0; c < columns; c += LANES)
            sum_add(&sum, errors_at(call, r * columns + c, columns - c, logistic, half).loss);
        row_loss[r] = sum_total(&sum);
    }
    add_rows(call, row_loss, rows);
    return HAPT_OK;
}

KERNELS(mse, return errors_run(call, false, half))
KERNELS(bce, return errors_run(call, true, half))

INLINE enum hapt_status errors_dx_run(const struct hapt_call *call, bool logistic, bool half)
{
    const int64_t elements = hapt_view_elements(&call->input[0]);
    const float scale = *(const float *)call->input[2].data;
    void *dx = call->output[0].data;
    const bool accumulate = call->accumulate & 1u;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, elements * 2))
    for (int64_t first = 0; first < elements; first += CHUNK) {
        const int64_t end = smaller(elements, first + CHUNK);
        for (int64_t i = first; i < end; i += LANES) {
            vector d = errors_at(call, i, end - i, logistic, half).slope * scale;
            if (accumulate) d += load(dx, i, end - i, half);
            store(dx, i, end - i, half, d);
        }
    }
    return HAPT_OK;
}

KERNELS(mse_dx, return errors_dx_run(call, false, half))
KERNELS(bce_dx, return errors_dx_run(call, true, half))

const struct cpu_kernel ISA_NAME(hapt_cpu_loss)[] = {
    KERNEL_ROWS("cross_entropy", loss_workspace, loss),
    KERNEL_ROWS("cross_entropy_dx", NULL, loss_dx),
    KERNEL_ROWS("mse", errors_workspace, mse),
    KERNEL_ROWS("mse_dx", NULL, mse_dx),
    KERNEL_ROWS("bce", errors_workspace, bce),
    KERNEL_ROWS("bce_dx", NULL, bce_dx),
    {HAPT_F32, {NULL, NULL, NULL}},
};
