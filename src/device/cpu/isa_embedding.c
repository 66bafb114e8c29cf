/* Token plus position embedding and its gradient. On a shard of the table, other shards' tokens give rows of zeros. */
#include "isa.h"

static enum hapt_status check_tokens(const struct hapt_call *call, int64_t here, int64_t positions, int64_t length)
{
    const int64_t vocabulary = call->value_count > 0 ? call->value_count : here;
    const int32_t *token = call->input[0].data;
    const int64_t rows = hapt_view_elements(&call->input[0]);
    for (int64_t r = 0; r < rows; r++)
        if (token[r] < 0 || token[r] >= vocabulary)
            return hapt_fail(HAPT_ERR_INPUT, "tokens must be below the model's vocabulary",
                             "token %d of row %lld is outside the table of %lld rows", token[r], (long long)r,
                             (long long)vocabulary);
    if (positions && length > positions)
        return hapt_fail(HAPT_ERR_INPUT, "shorten the sequence or enlarge the position table",
                         "a sequence of %lld tokens exceeds %lld positions", (long long)length, (long long)positions);
    return HAPT_OK;
}

INLINE enum hapt_status embedding_run(const struct hapt_call *call, bool half)
{
    const int32_t *token = call->input[0].data; /* [batch][length] */
    const void *table = call->input[1].data;    /* [vocabulary][columns] */
    const void *position = call->input[2].data; /* [length or more][columns], may be NULL */
    void *x = call->output[0].data;
    const int64_t rows = hapt_view_elements(&call->input[0]), length = view_columns(&call->input[0]);
    const int64_t columns = view_columns(&call->input[1]);
    HAPT_TRY(check_tokens(call, call->input[1].shape[0], position ? call->input[2].shape[0] : 0, length));
    const int64_t words = call->input[1].shape[0];
#pragma omp parallel for schedule(static) num_threads(threads_for(call, rows *columns))
    for (int64_t r = 0; r < rows; r++) {
        const int64_t word = token[r] - call->first_value;
        const bool here = word >= 0 && word < words;
        for (int64_t c = 0; c < columns; c += LANES) {
            const int64_t left = columns - c;
            vector value = here ? load(table, word * columns + c, left, half) : (vector){0};
            if (position) value += load(position, r % length * columns + c, left, half);
            store(x, r * columns + c, left, half, value);
        }
    }
    return HAPT_OK;
}

KERNELS(embedding, return embedding_run(call, half))

/* Threads own columns, not rows: one thread adds equal tokens in row order, so the bits never change. */
INLINE enum hapt_status embedding_dw_run(const struct hapt_call *call, bool half)
{
    const int32_t *token = call->input[0].data; /* [batch][length] */
    const void *dy = call->input[1].data;       /* [batch][length][columns] */
    float *dtable = call->output[0].data;       /* [vocabulary][columns] */
    float *dposition = call->output_count > 1 ? call->output[1].data : NULL;
    const int64_t rows = hapt_view_elements(&call->input[0]), length = view_columns(&call->input[0]);
    const int64_t columns = view_columns(&call->output[0]);
    const int64_t positions = dposition ? call->output[1].shape[0] : 0;
    HAPT_TRY(check_tokens(call, call->output[0].shape[0], positions, length));
    const int64_t slices = (columns + 63) / 64, words = call->output[0].shape[0];
#pragma omp parallel for schedule(static) num_threads(threads_for(call, rows *columns))
    for (int64_t s = 0; s < slices; s++) {
        const int64_t first = s * 64, end = smaller(columns, first + 64);
        for (int64_t r = 0; r < rows; r++) {
            const int64_t word = token[r] - call->first_value;
            const bool here = word >= 0 && word < words;
            if (!here && !dposition) continue;
            for (int64_t c = first; c < end; c += LANES) {
                const vector value = load(dy, r * columns + c, end - c, half);
                const int64_t to = word * columns + c, at = r % length * columns + c;
                if (here) store(dtable, to, end - c, false, load(dtable, to, end - c, false) + value);
                if (dposition) store(dposition, at, end - c, false, load(dposition, at, end - c, false) + value);
            }
        }
    }
    return HAPT_OK;
}

KERNELS(embedding_dw, return embedding_dw_run(call, half))

/* y = x + the first row of a table. input: x, table */
INLINE void add_row_run(const struct hapt_call *call, bool half)
{
    const struct hapt_view *y = &call->output[0];
    const int64_t rows = view_rows(y), columns = view_columns(y);
    const void *x = call->input[0].data, *table = call->input[1].data;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, rows *columns))
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c += LANES) {
            const int64_t left = columns - c;
            store(y->data, r * columns + c, left, half,
                  load(x, r * columns + c, left, half) + load(table, c, left, half));
        }
}

/* Input: table, dy; output: dx, dtable. Threads own columns and sum the rows in order. */
INLINE void add_row_backward_run(const struct hapt_call *call, bool half)
{
    const struct hapt_view *view = &call->input[1];
    const int64_t rows = view_rows(view), columns = view_columns(view), words = call->input[0].shape[0];
    void *dx = call->output[0].data;
    float *dtable = call->output[1].data;
    const unsigned add = call->accumulate;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, rows *columns))
    for (int64_t c = 0; c < columns; c += LANES) {
        const int64_t left = columns - c;
        vector sum = {0};
        for (int64_t r = 0; r < rows; r++) {
            const int64_t at = r * columns + c;
            const vector value = load(view->data, at, left, half);
            sum += value;
            if (dx) store(dx, at, left, half, add & 1u ? value + load(dx, at, left, half) : value);
        }
        if (!dtable) continue;
        store(dtable, c, left, false, add & 2u ? sum + load(dtable, c, left, false) : sum);
        for (int64_t w = 1; w < words && !(add & 2u); w++) store(dtable, w * columns + c, left, false, (vector){0});
    }
}

KERNELS(add_row, add_row_run(call, half))
KERNELS(add_row_backward, add_row_backward_run(call, half))

const struct cpu_kernel ISA_NAME(hapt_cpu_embedding)[] = {
    KERNEL_ROWS("embedding", NULL, embedding),
    KERNEL_ROWS("embedding_dw", NULL, embedding_dw),
    KERNEL_ROWS("add_row", NULL, add_row),
    KERNEL_ROWS("add_row_backward", NULL, add_row_backward),
    {HAPT_F32, {NULL, NULL, NULL}},
};
