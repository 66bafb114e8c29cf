/*
 * Multi-head attention, backward. Weights are recomputed from the scores and their logsumexp in two passes: by key
 * tiles for the gradients of keys and values, by query tiles for those of queries. So every sum has one owner and one
 * order.
 */
#include "attention.cuh"
#include "cudnn_attention.h"

/* delta: the sum of out * dout of each row of each head; one warp per row. */
template <class Element> __global__ void delta_kernel(const struct attention at)
{
    const int64_t rows = at.batch * at.heads * at.length, warps = (int64_t)gridDim.x * (blockDim.x / 32);
    for (int64_t i = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; i < rows; i += warps) {
        const int64_t t = i % at.length, head = i / at.length % at.heads, batch = i / at.length / at.heads;
        const Element *out = query_rows<Element>(at, at.out, at.out_width, batch, head).data + t * at.out_width;
        const Element *dout = query_rows<Element>(at, at.dout, at.out_width, batch, head).data + t * at.out_width;
        float sum = 0;
        for (int c = threadIdx.x % 32; c < at.head; c += 32) sum += to_float(out[c]) * to_float(dout[c]);
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) at.delta[i] = sum;
    }
}

/* Loads logsumexp and delta of `rows` queries from `first` on into shared memory. */
__device__ __forceinline__ void statistics_load(const struct attention &at, int64_t batch, int64_t head, int64_t first,
                                                int rows, float *logsumexp, float *delta)
{
    const int64_t from = (batch * at.heads + head) * at.length + first;
    for (int r = threadIdx.x; r < rows; r += blockDim.x) {
        logsumexp[r] = first + r < at.length ? at.logsumexp[from + r] : 0;
        delta[r] = first + r < at.length ? at.delta[from + r] : 0;
    }
}

/* Applies limits. Afterwards, weight (dweight - delta) is the gradient of the scaled dot product. */
__device__ __forceinline__ void limit_gradient(const struct attention &at, int64_t query, int64_t key, float delta,
                                               float *dot, float *dweight)
{
    const float slope = limit(at, query, key, dot);
    if (at.cap > 0) *dweight = delta + slope * (*dweight - delta);
}

#if ATTENTION_ARCH >= 700
/* Shared memory of both passes: a query tile with its gradients and statistics, and a key tile with its values. */
template <class Element> struct tensor_tiles {
    Element *query, *dout, *key, *value; /* [TENSOR_ROWS][LD] */
    Element *weight, *dscore;            /* [16][WEIGHT_LD], this warp's */
    float *logsumexp, *delta;            /* [TENSOR_ROWS] */
};

template <class Element, int PARTS>
__device__ __forceinline__ struct tensor_tiles<Element> tensor_divide(unsigned char *memory) {
    enum { TILE = TENSOR_ROWS * (PARTS * 16 + 8), STRIPE = 16 * WEIGHT_LD };
    struct tensor_tiles<Element> of;
    of.query = (Element *)tensor_aligned(memory);
    of.dout = of.query + TILE;
    of.key = of.dout + TILE;
    of.value = of.key + TILE;
    of.weight = of.value + TILE + threadIdx.x / 32 * 2 * STRIPE;
    of.dscore = of.weight + STRIPE;
    of.logsumexp = (float *)(of.value + TILE + TENSOR_WARPS * 2 * STRIPE);
    of.delta = of.logsumexp + TENSOR_ROWS;
    return of;
}

template <class Element, int PARTS>
__device__ __forceinline__ void load_queries(const struct attention &at, const struct tensor_tiles<Element> &of,
                                             int64_t batch, int64_t head, int64_t first)
{
    enum { COLUMNS = PARTS * 16, LD = COLUMNS + 8 };
    tile_load(at, query_rows<Element>(at, at.q, at.q_width, batch, head), first, TENSOR_ROWS, COLUMNS, LD, of.query);
    tile_load(at, query_rows<Element>(at, at.dout, at.out_width, batch, head), first, TENSOR_ROWS, COLUMNS, LD,
              of.dout);
    statistics_load(at, batch, head, first, TENSOR_ROWS, of.logsumexp, of.delta);
}

template <class Element, int PARTS>
__device__ __forceinline__ void load_keys(const struct attention &at, const struct tensor_tiles<Element> &of,
                                          int64_t batch, int64_t kv_head, int64_t first)
{
    enum { COLUMNS = PARTS * 16, LD = COLUMNS + 8 };
    tile_load(at, key_rows<Element>(at, at.k, batch, kv_head), first, TENSOR_ROWS, COLUMNS, LD, of.key);
    tile_load(at, key_rows<Element>(at, at.v, batch, kv_head), first, TENSOR_ROWS, COLUMNS, LD, of.value);
}

/* Weight and score gradient of `query` with `key`; `logsumexp` and `delta` are the query's. */
__device__ __forceinline__ void score_gradient(const struct attention &at, int64_t query, int64_t key, float logsumexp,
                                               float delta, float dot, float dweight, float *weight, float *dscore)
{
    *weight = visible(at, query, key) ? __expf(dot * at.dot_scale - logsumexp) : 0.0f;
    *dscore = *weight * (dweight - delta);
}

/* A warp's 16 keys against a tile of queries: weight and dscore [keys][queries]. */
template <class Element, int PARTS, bool LIMITED>
__device__ __forceinline__ void scores_by_key(const struct attention &at, const struct tensor_tiles<Element> &of,
                                              const struct tensor_layout &layout, int64_t first_key,
                                              int64_t first_query)
{
    enum { LD = PARTS * 16 + 8 };
    const int own = threadIdx.x / 32 * 16;
    UNROLL
    for (int n = 0; n < TENSOR_ROWS; n += 16) {
        tensor_sum dots, dweights;
        tensor_dots<Element, PARTS>(dots, of.key + own * LD, of.query + n * LD, LD);
        tensor_dots<Element, PARTS>(dweights, of.value + own * LD, of.dout + n * LD, LD);
        if (is_limited<LIMITED>(at, first_query + n + 15, first_key + own)) {
            UNROLL
            for (int i = 0; i < tensor_sum::num_elements; i++) {
                const int r = layout.row(i), c = n + layout.column(i);
                limit_gradient(at, first_query + c, first_key + own + r, of.delta[c], &dots.x[i], &dweights.x[i]);
            }
        }
        UNROLL
        for (int i = 0; i < tensor_sum::num_elements; i++) {
            const int r = layout.row(i), c = n + layout.column(i);
            float weight, dscore;
            score_gradient(at, first_query + c, first_key + own + r, of.logsumexp[c], of.delta[c], dots.x[i],
                           dweights.x[i], &weight, &dscore);
            of.weight[r * WEIGHT_LD + c] = from_float<Element>(weight);
            of.dscore[r * WEIGHT_LD + c] = from_float<Element>(dscore);
        }
    }
    __syncwarp();
}

/* A warp's 16 queries against a tile of keys: dscore [queries][keys]. */
template <class Element, int PARTS, bool LIMITED>
__device__ __forceinline__ void scores_by_query(const struct attention &at, const struct tensor_tiles<Element> &of,
                                                const struct tensor_layout &layout, int64_t first_key,
                                                int64_t first_query)
{
    enum { LD = PARTS * 16 + 8 };
    const int own = threadIdx.x / 32 * 16;
    UNROLL
    for (int n = 0; n < TENSOR_ROWS; n += 16) {
        tensor_sum dots, dweights;
        tensor_dots<Element, PARTS>(dots, of.query + own * LD, of.key + n * LD, LD);
        tensor_dots<Element, PARTS>(dweights, of.dout + own * LD, of.value + n * LD, LD);
        if (is_limited<LIMITED>(at, first_query + own + 15, first_key + n)) {
            UNROLL
            for (int i = 0; i < tensor_sum::num_elements; i++) {
                const int r = own + layout.row(i), c = n + layout.column(i);
                limit_gradient(at, first_query + r, first_key + c, of.delta[r], &dots.x[i], &dweights.x[i]);
            }
        }
        UNROLL
        for (int i = 0; i < tensor_sum::num_elements; i++) {
            const int r = own + layout.row(i), c = n + layout.column(i);
            float weight, dscore;
            score_gradient(at, first_query + r, first_key + c, of.logsumexp[r], of.delta[r], dots.x[i], dweights.x[i],
                           &weight, &dscore);
            of.dscore[layout.row(i) * WEIGHT_LD + c] = from_float<Element>(dscore);
        }
    }
    __syncwarp();
}

template <class Element, int PARTS, bool LIMITED>
__device__ __forceinline__ void tensor_keys_block(const struct attention &all, unsigned char *memory)
{
    enum { LD = PARTS * 16 + 8 };
    const struct tensor_tiles<Element> of = tensor_divide<Element, PARTS>(memory);
    const struct attention_tile tile = attention_tile(all.kv_heads, all.keys, TENSOR_ROWS, false);
    const struct attention at = of_sequence(all, tile.batch);
    const struct tensor_layout layout = tensor_layout_find((float *)of.weight);
    const int64_t group = at.heads / at.kv_heads, own = tile.first + threadIdx.x / 32 * 16,
                  end = end_of_queries<LIMITED>(at, tile.first, TENSOR_ROWS);
    tensor_sum dkey[PARTS], dvalue[PARTS];
    for (int f = 0; f < PARTS; f++) {
        nvcuda::wmma::fill_fragment(dkey[f], 0.0f);
        nvcuda::wmma::fill_fragment(dvalue[f], 0.0f);
    }
    load_keys<Element, PARTS>(at, of, tile.batch, tile.head, tile.first);
    for (int64_t head = tile.head * group; head < (tile.head + 1) * group; head++)
        for (int64_t first = at.causal ? tile.first : 0; first < end; first += TENSOR_ROWS) {
            __syncthreads();
            load_queries<Element, PARTS>(at, of, tile.batch, head, first);
            __syncthreads();
            scores_by_key<Element, PARTS, LIMITED>(at, of, layout, tile.first, first);
            tensor_add<Element, PARTS>(dvalue, of.weight, of.dout, LD);
            tensor_add<Element, PARTS>(dkey, of.dscore, of.query, LD);
        }
    tensor_put<Element, PARTS>(at, layout, dkey, at.scale, NULL, key_rows<Element>(at, at.dk, tile.batch, tile.head),
                               own, at.add_k);
    tensor_put<Element, PARTS>(at, layout, dvalue, 1, NULL, key_rows<Element>(at, at.dv, tile.batch, tile.head), own,
                               at.add_v);
}

template <class Element, int PARTS, bool LIMITED>
__device__ __forceinline__ void tensor_queries_block(const struct attention &all, unsigned char *memory)
{
    enum { LD = PARTS * 16 + 8 };
    const struct tensor_tiles<Element> of = tensor_divide<Element, PARTS>(memory);
    const struct attention_tile tile = attention_tile(all.heads, all.length, TENSOR_ROWS, true);
    const struct attention at = of_sequence(all, tile.batch);
    const struct tensor_layout layout = tensor_layout_find((float *)of.weight);
    const int64_t kv_head = tile.head / (at.heads / at.kv_heads), own = tile.first + threadIdx.x / 32 * 16;
    const int64_t end = at.causal && tile.first + TENSOR_ROWS < at.keys ? tile.first + TENSOR_ROWS : at.keys;
    tensor_sum dquery[PARTS];
    for (int f = 0; f < PARTS; f++) nvcuda::wmma::fill_fragment(dquery[f], 0.0f);
    load_queries<Element, PARTS>(at, of, tile.batch, tile.head, tile.first);
    for (int64_t first = first_key_tile<LIMITED>(at, tile.first, TENSOR_ROWS); first < end; first += TENSOR_ROWS) {
        __syncthreads();
        load_keys<Element, PARTS>(at, of, tile.batch, kv_head, first);
        __syncthreads();
        scores_by_query<Element, PARTS, LIMITED>(at, of, layout, first, tile.first);
        tensor_add<Element, PARTS>(dquery, of.dscore, of.key, LD);
    }
    tensor_put<Element, PARTS>(at, layout, dquery, at.scale, NULL,
                               query_rows<Element>(at, at.dq, at.q_width, tile.batch, tile.head), own, at.add_q);
}
#endif

template <class Element, int PARTS, bool LIMITED, bool KEYS>
__device__ __forceinline__ void tensor_backward(const struct attention &at, unsigned char *memory)
{
    if constexpr ((int)tensor_from<Element>::ARCH <= ATTENTION_ARCH) {
#if ATTENTION_ARCH >= 700
        if constexpr (KEYS)
            tensor_keys_block<Element, PARTS, LIMITED>(at, memory);
        else
            tensor_queries_block<Element, PARTS, LIMITED>(at, memory);
#endif
    } else {
        asm("trap;"); /* the device could, the build's code cannot */
    }
}

template <class Element, int PARTS, bool LIMITED>
__global__ __launch_bounds__(TENSOR_THREADS) void tensor_keys(const struct attention at)
{
    SHARED(unsigned char, memory);
    tensor_backward<Element, PARTS, LIMITED, true>(at, memory);
}

template <class Element, int PARTS, bool LIMITED>
__global__ __launch_bounds__(TENSOR_THREADS) void tensor_queries(const struct attention at)
{
    SHARED(unsigned char, memory);
    tensor_backward<Element, PARTS, LIMITED, false>(at, memory);
}

static size_t tensor_backward_shared(const struct attention &at)
{
    const int64_t ld = tensor_columns(at.head) + 8;
    return (size_t)(TENSOR_ALIGN + 4 * TENSOR_ROWS * ld * 2 + 2 * TENSOR_ROWS * WEIGHT_LD * 2 + 2 * TENSOR_ROWS * 4);
}

/* weight and dscore [TILE queries][TILE + 4]; each only if requested. */
template <int TILE, bool LIMITED>
__device__ __forceinline__ void plain_scores(const struct attention &at, const float *query, const float *dout,
                                             const float *key, const float *value, int columns, int ld,
                                             int64_t first_query, int64_t first_key, int64_t statistics, float *weight,
                                             float *dscore)
{
    enum { PATCH = TILE / 16, SQUARE = TILE + 4 };
    const int tx = threadIdx.x & 15, ty = threadIdx.x >> 4;
    const bool limited = is_limited<LIMITED>(at, first_query + TILE - 1, first_key);
    float dots[PATCH][PATCH], dweights[PATCH][PATCH];
    plain_dots<PATCH>(dots, query + ty * PATCH * ld, key, columns, ld);
    plain_dots<PATCH>(dweights, dout + ty * PATCH * ld, value, columns, ld);
    for (int i = 0; i < PATCH; i++) {
        const int64_t row = first_query + ty * PATCH + i, from = statistics + (row < at.length ? row : at.length - 1);
        const float logsumexp = at.logsumexp[from], delta = at.delta[from];
        for (int j = 0; limited && j < PATCH; j++)
            limit_gradient(at, row, first_key + tx + 16 * j, delta, &dots[i][j], &dweights[i][j]);
        for (int j = 0; j < PATCH; j++) {
            const int at_square = (ty * PATCH + i) * SQUARE + tx + 16 * j;
            const float p =
                visible(at, row, first_key + tx + 16 * j) ? expf(dots[i][j] * at.dot_scale - logsumexp) : 0.0f;
            if (weight) weight[at_square] = p;
            dscore[at_square] = p * (dweights[i][j] - delta);
        }
    }
}

template <class Element, int TILE, int SPAN, bool LIMITED>
__global__ __launch_bounds__(PLAIN_THREADS) void plain_keys(const struct attention all)
{
    enum { PATCH = TILE / 16, SQUARE = TILE + 4 };
    SHARED(float, key);
    const int columns = plain_columns(all), ld = columns + 4, ty = threadIdx.x >> 4;
    float *value = key + TILE * ld, *query = value + TILE * ld, *dout = query + TILE * ld, *weight = dout + TILE * ld,
          *dscore = weight + TILE * SQUARE;
    const struct attention_tile tile = attention_tile(all.kv_heads, all.keys, TILE, false);
    const struct attention at = of_sequence(all, tile.batch);
    const int64_t group = at.heads / at.kv_heads, own = tile.first + ty * PATCH,
                  end = end_of_queries<LIMITED>(at, tile.first, TILE);
    float dkey[PATCH][SPAN] = {}, dvalue[PATCH][SPAN] = {};
    tile_load(at, key_rows<Element>(at, at.k, tile.batch, tile.head), tile.first, TILE, columns, ld, key);
    tile_load(at, key_rows<Element>(at, at.v, tile.batch, tile.head), tile.first, TILE, columns, ld, value);
    for (int64_t head = tile.head * group; head < (tile.head + 1) * group; head++)
        for (int64_t first = at.causal ? tile.first : 0; first < end; first += TILE) {
            __syncthreads();
            tile_load(at, query_rows<Element>(at, at.q, at.q_width, tile.batch, head), first, TILE, columns, ld, query);
            tile_load(at, query_rows<Element>(at, at.dout, at.out_width, tile.batch, head), first, TILE, columns, ld,
                      dout);
            __syncthreads();
            plain_scores<TILE, LIMITED>(at, query, dout, key, value, columns, ld, first, tile.first,
                                        (tile.batch * at.heads + head) * at.length, weight, dscore);
            __syncthreads();
            plain_add<TILE, SPAN>(dvalue, weight + ty * PATCH, 1, SQUARE, dout, columns, ld);
            plain_add<TILE, SPAN>(dkey, dscore + ty * PATCH, 1, SQUARE, query, columns, ld);
        }
    plain_put(at, dkey, at.scale, key_rows<Element>(at, at.dk, tile.batch, tile.head), own, at.add_k);
    plain_put(at, dvalue, 1, key_rows<Element>(at, at.dv, tile.batch, tile.head), own, at.add_v);
}

template <class Element, int TILE, int SPAN, bool LIMITED>
__global__ __launch_bounds__(PLAIN_THREADS) void plain_queries(const struct attention all)
{
    enum { PATCH = TILE / 16, SQUARE = TILE + 4 };
    SHARED(float, query);
    const int columns = plain_columns(all), ld = columns + 4, ty = threadIdx.x >> 4;
    float *dout = query + TILE * ld, *key = dout + TILE * ld, *value = key + TILE * ld, *dscore = value + TILE * ld;
    const struct attention_tile tile = attention_tile(all.heads, all.length, TILE, true);
    const struct attention at = of_sequence(all, tile.batch);
    const int64_t kv_head = tile.head / (at.heads / at.kv_heads), own = tile.first + ty * PATCH;
    const int64_t end = at.causal && tile.first + TILE < at.keys ? tile.first + TILE : at.keys;
    float dquery[PATCH][SPAN] = {};
    tile_load(at, query_rows<Element>(at, at.q, at.q_width, tile.batch, tile.head), tile.first, TILE, columns, ld,
              query);
    tile_load(at, query_rows<Element>(at, at.dout, at.out_width, tile.batch, tile.head), tile.first, TILE, columns, ld,
              dout);
    for (int64_t first = first_key_tile<LIMITED>(at, tile.first, TILE); first < end; first += TILE) {
        __syncthreads();
        tile_load(at, key_rows<Element>(at, at.k, tile.batch, kv_head), first, TILE, columns, ld, key);
        tile_load(at, key_rows<Element>(at, at.v, tile.batch, kv_head), first, TILE, columns, ld, value);
        __syncthreads();
        plain_scores<TILE, LIMITED>(at, query, dout, key, value, columns, ld, tile.first, first,
                                    (tile.batch * at.heads + tile.head) * at.length, NULL, dscore);
        __syncthreads();
        plain_add<TILE, SPAN>(dquery, dscore + ty * PATCH * SQUARE, SQUARE, 1, key, columns, ld);
    }
    plain_put(at, dquery, at.scale, query_rows<Element>(at, at.dq, at.q_width, tile.batch, tile.head), own, at.add_q);
}

template <class Element> static enum hapt_status keys_run(const struct attention &at, struct hapt_queue *queue)
{
    PLAIN_LAUNCH(plain_keys, at.kv_heads, at.keys, 4, 2)
}

template <class Element> static enum hapt_status queries_run(const struct attention &at, struct hapt_queue *queue)
{
    PLAIN_LAUNCH(plain_queries, at.heads, at.length, 4, 1)
}

template <class Element> static enum hapt_status backward_of(const struct attention &at, struct hapt_queue *queue)
{
    HAPT_TRY(launch(delta_kernel<Element>, blocks_for(at.batch * at.heads * at.length, 8), 256, 0, queue, at));
    if constexpr (sizeof(Element) == 2) {
        const size_t shared = tensor_backward_shared(at);
        if (at.head <= 128 && tensor_can<Element>() && shared <= attention_shared_limit()) {
            HAPT_TRY(TENSOR_LAUNCH(tensor_keys, attention_grid(at, at.kv_heads, at.keys, TENSOR_ROWS), TENSOR_THREADS,
                                   shared, queue, at));
            return TENSOR_LAUNCH(tensor_queries, attention_grid(at, at.heads, at.length, TENSOR_ROWS), TENSOR_THREADS,
                                 shared, queue, at);
        }
    }
    HAPT_TRY(keys_run<Element>(at, queue));
    return queries_run<Element>(at, queue);
}

/* Workspace for the deltas, or of cuDNN. */
template <bool GROUPED> static size_t backward_workspace(const struct hapt_call *call)
{
    const struct attention at = attention_of(call, GROUPED, true);
    const size_t deltas = (size_t)(at.batch * at.heads * at.length) * sizeof(float);
    const size_t larger = cudnn_attention_workspace ? cudnn_attention_workspace(&at, call->input[0].dtype, true) : 0;
    return larger > deltas ? larger : deltas;
}

template <class Element, bool GROUPED>
static enum hapt_status backward_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct attention at = attention_of(call, GROUPED, true);
    bool done = false;
    if (cudnn_attention_run)
        HAPT_TRY(
            cudnn_attention_run(&at, call->input[0].dtype, true, call->workspace, call->workspace_bytes, queue, &done));
    return done ? HAPT_OK : backward_of<Element>(at, queue);
}

extern const struct cuda_kernel hapt_cuda_attention_backward[] = {
    CUDA_KERNELS_WITH("attention_backward", backward_workspace<false>, backward_run, false),
    CUDA_KERNELS_WITH("grouped_attention_backward", backward_workspace<true>, backward_run, true),
    CUDA_KERNELS_WITH("document_attention_backward", backward_workspace<false>, backward_run, false),
    CUDA_KERNELS_WITH("grouped_document_attention_backward", backward_workspace<true>, backward_run, true),
    CUDA_KERNELS_END,
};
