/* Token plus position embedding and its gradient. On a shard of the table, other shards' tokens give rows of zeros. */
#include "kernels.h"
#include "rows.cuh"

enum { THREADS = 256, WARPS = THREADS / 32 };

static enum hapt_status check_length(int64_t positions, int64_t length)
{
    if (!positions || length <= positions) return HAPT_OK;
    return cuda_host->fail(HAPT_ERR_INPUT, "shorten the sequence or enlarge the position table",
                           "a sequence of %lld tokens exceeds %lld positions", (long long)length, (long long)positions);
}

struct tokens {
    const int32_t *token; /* [batch][length] */
    int64_t rows, length, columns;
    int64_t first, words, vocabulary; /* first word and words of this shard of the table; words of all shards */
    struct cuda_fault *fault;
};

/* `table`: the table whose rows `token` selects. */
static struct tokens tokens_of(const struct hapt_call *call, const struct hapt_view *table, struct hapt_queue *queue)
{
    struct tokens tokens;
    tokens.token = (const int32_t *)call->input[0].data;
    tokens.rows = hapt_view_elements(&call->input[0]);
    tokens.length = view_columns(&call->input[0]);
    tokens.columns = view_columns(table);
    tokens.first = call->first_value;
    tokens.words = table->shape[0];
    tokens.vocabulary = call->value_count > 0 ? call->value_count : tokens.words;
    tokens.fault = queue->fault;
    return tokens;
}

/* One warp per row. */
template <class Element, int N>
static __global__ void embedding_kernel(struct tokens tokens, const Element *table, const Element *position, Element *x)
{
    const int lane = threadIdx.x & 31;
    for (int64_t r = (int64_t)blockIdx.x * WARPS + (threadIdx.x >> 5); r < tokens.rows;
         r += (int64_t)gridDim.x * WARPS) {
        const int32_t token = tokens.token[r];
        const int64_t word = token - tokens.first;
        const bool here = word >= 0 && word < tokens.words;
        if (lane == 0 && (token < 0 || token >= tokens.vocabulary))
            fault_set(tokens.fault, CUDA_FAULT_INDEX, token, tokens.vocabulary, 0);
        for (int64_t c = (int64_t)lane * N; c < tokens.columns; c += 32 * N) {
            float value[N] = {}, added[N];
            if (here) load<N>(table + word * tokens.columns + c, value);
            if (position) {
                load<N>(position + r % tokens.length * tokens.columns + c, added);
                for (int e = 0; e < N; e++) value[e] += added[e];
            }
            store<N>(x + r * tokens.columns + c, value, false);
        }
    }
}

template <class Element> static enum hapt_status embedding_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct tokens tokens = tokens_of(call, &call->input[1], queue);
    const Element *table = (const Element *)call->input[1].data,
                  *position = (const Element *)(call->input_count > 2 ? call->input[2].data : NULL);
    Element *x = (Element *)call->output[0].data;
    HAPT_TRY(check_length(position ? call->input[2].shape[0] : 0, tokens.length));
    const bool packed = packs_fit<Element>(tokens.columns, table, position, x);
    return launch(packed ? embedding_kernel<Element, pack<Element>::COUNT> : embedding_kernel<Element, 1>,
                  blocks_for(tokens.rows, WARPS), THREADS, 0, queue, tokens, table, position, x);
}

/*
 * ---- The gradient: rows are ordered by token, equal tokens in row order; then each token's rows are summed ----
 *
 * A row's position in that order is the count of rows before it. Up to some 100,000 rows, comparing all pairs costs
 * less than the passes of a sort. The cost does not depend on the table's size.
 */
static __global__ void rank_kernel(const int32_t *token, int64_t rows, int64_t slice, int *rank)
{
    __shared__ int32_t others[THREADS];
    const int64_t r = (int64_t)blockIdx.x * THREADS + threadIdx.x, first = blockIdx.y * slice,
                  end = first + slice < rows ? first + slice : rows;
    const int32_t mine = r < rows ? token[r] : 0;
    int before = 0;
    for (int64_t tile = first; tile < end; tile += THREADS) {
        const int count = end - tile < THREADS ? (int)(end - tile) : (int)THREADS;
        if ((int)threadIdx.x < count) others[threadIdx.x] = token[tile + threadIdx.x];
        __syncthreads();
        if (tile + count <= r) {
            for (int i = 0; i < count; i++) before += others[i] <= mine;
        } else if (tile > r) {
            for (int i = 0; i < count; i++) before += others[i] < mine;
        } else {
            for (int i = 0; i < count; i++) before += others[i] < mine || (others[i] == mine && tile + i < r);
        }
        __syncthreads();
    }
    if (r < rows && before) atomicAdd(&rank[r], before);
}

static __global__ void order_kernel(struct tokens tokens, const int *rank, int32_t *sorted, int *row)
{
    for (GRID_STRIDE(r, tokens.rows)) {
        const int32_t token = tokens.token[r];
        if (token < 0 || token >= tokens.vocabulary)
            fault_set(tokens.fault, CUDA_FAULT_INDEX, token, tokens.vocabulary, 0);
        sorted[rank[r]] = token;
        row[rank[r]] = (int)r;
    }
}

/* The end of the run of equal tokens that contains `position`. */
static __device__ __forceinline__ int64_t run_end(const int32_t *sorted, int64_t position, int64_t rows)
{
    const int32_t token = sorted[position];
    int64_t low = position + 1, high = rows; /* the end is in [low, high] */
    if (low >= rows || sorted[low] != token) return low;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (sorted[middle] == token)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The block of a token's first position (grid.x) adds its rows to the table, 32 N columns at a time (grid.y); each warp
 * takes every 8th row. */
template <class Element, int N>
static __global__ void table_kernel(struct tokens tokens, const int32_t *sorted, const int *row, const Element *dy,
                                    float *dtable)
{
    __shared__ float shared[WARPS][32 * N];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int64_t c = ((int64_t)blockIdx.y * 32 + lane) * N;
    for (int64_t p = blockIdx.x; p < tokens.rows; p += gridDim.x) {
        const int64_t word = sorted[p] - tokens.first;
        if ((p > 0 && sorted[p - 1] == sorted[p]) || word < 0 || word >= tokens.words) continue;
        const int64_t end = run_end(sorted, p, tokens.rows);
        float sum[N] = {};
        if (c < tokens.columns)
            for (int64_t q = p + warp; q < end; q += WARPS) {
                float value[N];
                load<N>(dy + row[q] * tokens.columns + c, value);
                for (int e = 0; e < N; e++) sum[e] += value[e];
            }
        if (end - p > 1) { /* otherwise the first warp has the only row */
            for (int e = 0; e < N; e++) shared[warp][lane * N + e] = sum[e];
            __syncthreads();
            for (int w = 1; w < WARPS && warp == 0; w++)
                for (int e = 0; e < N; e++) sum[e] += shared[w][lane * N + e];
            __syncthreads();
        }
        if (warp == 0 && c < tokens.columns) store<N>(dtable + word * tokens.columns + c, sum, true);
    }
}

template <class Element, int N>
static __global__ void position_kernel(struct tokens tokens, const Element *dy, float *dposition)
{
    const int64_t count = tokens.length * tokens.columns, batch = tokens.rows / tokens.length;
    for (GRID_STRIDE(i, count / N)) {
        float sum[N] = {};
        for (int64_t b = 0; b < batch; b++) {
            float value[N];
            load<N>(dy + b * count + i * N, value);
            for (int e = 0; e < N; e++) sum[e] += value[e];
        }
        store<N>(dposition + i * N, sum, true);
    }
}

/* Ranks, sorted tokens and their rows. */
static size_t embedding_dw_workspace(const struct hapt_call *call)
{
    return (size_t)hapt_view_elements(&call->input[0]) * 3 * sizeof(int32_t);
}

template <class Element, int N>
static enum hapt_status embedding_dw_launch(const struct tokens &tokens, const Element *dy, float *dtable,
                                            float *dposition, void *workspace, struct hapt_queue *queue)
{
    const int64_t rows = tokens.rows, tiles = (rows + THREADS - 1) / THREADS, wide = 32 * N;
    const int64_t slices = tiles < 16 ? tiles : 16, slice = slices ? (tiles + slices - 1) / slices * THREADS : 0;
    int *rank = (int *)workspace, *row = rank + rows;
    int32_t *sorted = (int32_t *)(row + rows);
    if (rows == 0) return HAPT_OK;
    HAPT_TRY(cuda_check(cudaMemsetAsync(rank, 0, (size_t)rows * sizeof *rank, queue->stream), "zeroing"));
    HAPT_TRY(launch(rank_kernel, dim3((unsigned)tiles, (unsigned)slices), THREADS, 0, queue, tokens.token, rows, slice,
                    rank));
    HAPT_TRY(
        launch(order_kernel, blocks_for(rows, THREADS), THREADS, 0, queue, tokens, (const int *)rank, sorted, row));
    const dim3 grid(blocks_for(rows, 1).x, (unsigned)((tokens.columns + wide - 1) / wide));
    HAPT_TRY(launch(table_kernel<Element, N>, grid, THREADS, 0, queue, tokens, (const int32_t *)sorted,
                    (const int *)row, dy, dtable));
    if (!dposition) return HAPT_OK;
    return launch(position_kernel<Element, N>, blocks_for(tokens.length * tokens.columns / N, THREADS), THREADS, 0,
                  queue, tokens, dy, dposition);
}

/* Input: tokens, dy; output: dtable, dposition. Both are always added to. */
template <class Element>
static enum hapt_status embedding_dw_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct tokens tokens = tokens_of(call, &call->output[0], queue);
    const Element *dy = (const Element *)call->input[1].data;
    float *dtable = (float *)call->output[0].data,
          *dposition = (float *)(call->output_count > 1 ? call->output[1].data : NULL);
    HAPT_TRY(check_length(dposition ? call->output[1].shape[0] : 0, tokens.length));
    if (packs_fit<Element>(tokens.columns, dy, dtable, dposition))
        return embedding_dw_launch<Element, pack<Element>::COUNT>(tokens, dy, dtable, dposition, call->workspace,
                                                                  queue);
    return embedding_dw_launch<Element, 1>(tokens, dy, dtable, dposition, call->workspace, queue);
}

/* y = x + the first row of a table. */
template <class Element, int N>
static __global__ void add_row_kernel(int64_t rows, int64_t columns, const Element *x, const Element *table, Element *y)
{
    const int64_t parts = columns / N;
    for (GRID_STRIDE(i, rows * parts)) {
        float value[N], added[N];
        load<N>(x + i * N, value);
        load<N>(table + i % parts * N, added);
        for (int e = 0; e < N; e++) value[e] += added[e];
        store<N>(y + i * N, value, false);
    }
}

template <class Element> static enum hapt_status add_row_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct hapt_view *y = &call->output[0];
    const int64_t columns = view_columns(y), elements = hapt_view_elements(y);
    const Element *x = (const Element *)call->input[0].data, *table = (const Element *)call->input[1].data;
    const bool packed = packs_fit<Element>(columns, x, table, y->data);
    if (elements == 0) return HAPT_OK;
    return launch(packed ? add_row_kernel<Element, pack<Element>::COUNT> : add_row_kernel<Element, 1>,
                  blocks_for(elements / (packed ? pack<Element>::COUNT : 1), THREADS), THREADS, 0, queue,
                  elements / columns, columns, x, table, (Element *)y->data);
}

/* A thread owns a column and sums the rows in order; the other rows of the table have no gradient. */
template <class Element>
static __global__ void add_row_backward_kernel(int64_t rows, int64_t columns, int64_t words, const Element *dy,
                                               Element *dx, float *dtable, unsigned add)
{
    for (GRID_STRIDE(c, columns)) {
        float sum = 0;
        const float zero = 0;
        for (int64_t r = 0; r < rows; r++) {
            const float value = to_float(dy[r * columns + c]);
            sum += value;
            if (dx) store<1>(dx + r * columns + c, &value, add & 1u);
        }
        if (!dtable) continue;
        store<1>(dtable + c, &sum, add & 2u);
        for (int64_t w = 1; w < words && !(add & 2u); w++) store<1>(dtable + w * columns + c, &zero, false);
    }
}

template <class Element>
static enum hapt_status add_row_backward_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct hapt_view *dy = &call->input[1];
    const int64_t columns = view_columns(dy);
    if (columns == 0) return HAPT_OK;
    return launch(add_row_backward_kernel<Element>, blocks_for(columns, 64), 64, 0, queue,
                  hapt_view_elements(dy) / columns, columns, call->input[0].shape[0], (const Element *)dy->data,
                  (Element *)call->output[0].data, (float *)call->output[1].data, call->accumulate);
}

extern const struct cuda_kernel hapt_cuda_embedding[] = {
    CUDA_KERNELS("embedding", NULL, embedding_run),
    CUDA_KERNELS("embedding_dw", embedding_dw_workspace, embedding_dw_run),
    CUDA_KERNELS("add_row", NULL, add_row_run),
    CUDA_KERNELS("add_row_backward", NULL, add_row_backward_run),
    CUDA_KERNELS_END,
};
