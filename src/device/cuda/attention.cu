/* Multi-head attention, forward: query blocks over all keys they see, with a running softmax. */
#include "attention.cuh"
#include "cudnn_attention.h"

#if ATTENTION_ARCH >= 700
/* One warp's scores [16][WEIGHT_LD], fp32: two lanes per row. */
struct stripe {
    float top, total; /* of this lane's row */
};

/* Applies limits to the dot products of row `query` with the keys from `key` on. */
__device__ __forceinline__ void stripe_limit(const struct attention &at, float *score, int64_t query, int64_t key)
{
    const int r = (threadIdx.x & 31) >> 1, side = threadIdx.x & 1;
    for (int j = 0; j < TENSOR_ROWS / 8; j++)
        for (int c = (2 * j + side) * 4; c < (2 * j + side) * 4 + 4; c++)
            limit(at, query, key + c, score + r * WEIGHT_LD + c);
}

/* Turns scores into weights exp(score - top), stored as elements in the same memory. Returns the factor that rescales
 * earlier sums. */
template <class Element>
__device__ __forceinline__ float stripe_softmax(struct stripe &stripe, float *score, float scale, int seen)
{
    const int r = (threadIdx.x & 31) >> 1, side = threadIdx.x & 1;
    float weight[TENSOR_ROWS / 2], higher = stripe.top, sum = 0;
    UNROLL
    for (int j = 0; j < TENSOR_ROWS / 8; j++) {
        const int c = (2 * j + side) * 4;
        const float4 some = *(const float4 *)(score + r * WEIGHT_LD + c);
        const float four[4] = {some.x, some.y, some.z, some.w};
        UNROLL
        for (int e = 0; e < 4; e++) {
            weight[4 * j + e] = c + e < seen ? four[e] * scale : -INFINITY;
            higher = fmaxf(higher, weight[4 * j + e]);
        }
    }
    higher = fmaxf(higher, __shfl_xor_sync(0xffffffffu, higher, 1));
    Element *to = (Element *)score + r * WEIGHT_LD; /* after the shuffle, all lanes have read their scores */
    __syncwarp();
    UNROLL
    for (int j = 0; j < TENSOR_ROWS / 2; j++) {
        const float value = __expf(weight[j] - higher);
        sum += value;
        to[(2 * (j / 4) + side) * 4 + j % 4] = from_float<Element>(value);
    }
    const float shrink = __expf(stripe.top - higher);
    stripe.total = stripe.total * shrink + (sum + __shfl_xor_sync(0xffffffffu, sum, 1));
    stripe.top = higher;
    return shrink;
}

template <class Element, int PARTS, bool LIMITED>
__device__ __forceinline__ void tensor_forward_block(const struct attention &all, unsigned char *memory)
{
    enum { COLUMNS = PARTS * 16, LD = COLUMNS + 8, TILE = TENSOR_ROWS * LD };
    Element *query = (Element *)tensor_aligned(memory), *key = query + TILE, *value = key + TILE;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float *score = (float *)(value + TILE) + warp * 16 * WEIGHT_LD,
          *factor = (float *)(value + TILE) + TENSOR_ROWS * WEIGHT_LD + warp * 16;
    const struct attention_tile tile = attention_tile(all.heads, all.length, TENSOR_ROWS, true);
    const struct attention at = of_sequence(all, tile.batch);
    const int64_t kv_head = tile.head / (at.heads / at.kv_heads), own = tile.first + warp * 16, row = own + lane / 2;
    const int64_t end = at.causal && tile.first + TENSOR_ROWS < at.keys ? tile.first + TENSOR_ROWS : at.keys;
    const struct tensor_layout layout = tensor_layout_find(score);
    struct stripe stripe = {NO_SCORE, 0};
    tensor_sum out[PARTS];
    for (int f = 0; f < PARTS; f++) nvcuda::wmma::fill_fragment(out[f], 0.0f);
    tile_load(at, query_rows<Element>(at, at.q, at.q_width, tile.batch, tile.head), tile.first, TENSOR_ROWS, COLUMNS,
              LD, query);
    for (int64_t first = first_key_tile<LIMITED>(at, tile.first, TENSOR_ROWS); first < end; first += TENSOR_ROWS) {
        __syncthreads();
        tile_load(at, key_rows<Element>(at, at.k, tile.batch, kv_head), first, TENSOR_ROWS, COLUMNS, LD, key);
        tile_load(at, key_rows<Element>(at, at.v, tile.batch, kv_head), first, TENSOR_ROWS, COLUMNS, LD, value);
        __syncthreads();
        UNROLL
        for (int n = 0; n < TENSOR_ROWS / 16; n++) {
            tensor_sum dots;
            tensor_dots<Element, PARTS>(dots, query + warp * 16 * LD, key + n * 16 * LD, LD);
            nvcuda::wmma::store_matrix_sync(score + n * 16, dots, WEIGHT_LD, nvcuda::wmma::mem_row_major);
        }
        __syncwarp();
        if (is_limited<LIMITED>(at, own + 15, first)) stripe_limit(at, score, row, first);
        const int64_t keys = at.keys - first, seen = at.causal && row - first + 1 < keys ? row - first + 1 : keys;
        const float shrink =
            stripe_softmax<Element>(stripe, score, at.dot_scale, seen < TENSOR_ROWS ? (int)seen : (int)TENSOR_ROWS);
        if (lane % 2 == 0) factor[lane / 2] = shrink;
        __syncwarp();
        if (!__all_sync(0xffffffffu, shrink == 1.0f)) {
            UNROLL
            for (int f = 0; f < PARTS; f++) UNROLL
            for (int i = 0; i < tensor_sum::num_elements; i++) out[f].x[i] *= factor[layout.row(i)];
        }
        tensor_add<Element, PARTS>(out, (const Element *)score, value, LD);
    }
    __syncwarp();
    if (lane % 2 == 0) {
        factor[lane / 2] = 1.0f / stripe.total;
        if (row < at.length)
            at.logsumexp[(tile.batch * at.heads + tile.head) * at.length + row] = stripe.top + logf(stripe.total);
    }
    __syncwarp();
    tensor_put<Element, PARTS>(at, layout, out, 1, factor,
                               query_rows<Element>(at, at.y, at.out_width, tile.batch, tile.head), own, false);
}
#endif

template <class Element, int PARTS, bool LIMITED>
__global__ __launch_bounds__(TENSOR_THREADS) void tensor_forward(const struct attention at)
{
    SHARED(unsigned char, memory);
    if constexpr ((int)tensor_from<Element>::ARCH <= ATTENTION_ARCH) {
#if ATTENTION_ARCH >= 700
        tensor_forward_block<Element, PARTS, LIMITED>(at, memory);
#endif
    } else {
        (void)memory;
        asm("trap;"); /* the device supports it, but this build's code does not */
    }
}

static size_t tensor_forward_shared(const struct attention &at)
{
    const int64_t ld = tensor_columns(at.head) + 8;
    return (size_t)(TENSOR_ALIGN + 3 * TENSOR_ROWS * ld * 2 + TENSOR_ROWS * (WEIGHT_LD + 1) * 4);
}

/* Maximum and sum over the 16 threads that share a row. */
__device__ __forceinline__ float row_largest(float value)
{
    for (int apart = 8; apart > 0; apart >>= 1) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, apart));
    return value;
}

__device__ __forceinline__ float row_sum(float value)
{
    for (int apart = 8; apart > 0; apart >>= 1) value += __shfl_xor_sync(0xffffffffu, value, apart);
    return value;
}

template <class Element, int TILE, int SPAN, bool LIMITED>
__global__ __launch_bounds__(PLAIN_THREADS) void plain_forward(const struct attention all)
{
    enum { PATCH = TILE / 16, SQUARE = TILE + 4 };
    SHARED(float, query);
    const int columns = plain_columns(all), ld = columns + 4, tx = threadIdx.x & 15, ty = threadIdx.x >> 4;
    float *other = query + TILE * ld, *weight = other + TILE * ld; /* keys, then values */
    const struct attention_tile tile = attention_tile(all.heads, all.length, TILE, true);
    const struct attention at = of_sequence(all, tile.batch);
    const int64_t kv_head = tile.head / (at.heads / at.kv_heads), own = tile.first + ty * PATCH;
    const int64_t end = at.causal && tile.first + TILE < at.keys ? tile.first + TILE : at.keys;
    float out[PATCH][SPAN], score[PATCH][PATCH], top[PATCH], total[PATCH];
    for (int i = 0; i < PATCH; i++) {
        top[i] = NO_SCORE;
        total[i] = 0;
        for (int j = 0; j < SPAN; j++) out[i][j] = 0;
    }
    tile_load(at, query_rows<Element>(at, at.q, at.q_width, tile.batch, tile.head), tile.first, TILE, columns, ld,
              query);
    for (int64_t first = first_key_tile<LIMITED>(at, tile.first, TILE); first < end; first += TILE) {
        const bool limited = is_limited<LIMITED>(at, tile.first + TILE - 1, first);
        __syncthreads();
        tile_load(at, key_rows<Element>(at, at.k, tile.batch, kv_head), first, TILE, columns, ld, other);
        __syncthreads();
        plain_dots<PATCH>(score, query + ty * PATCH * ld, other, columns, ld);
        for (int i = 0; i < PATCH; i++) {
            const int64_t row =
                own + i < at.length ? own + i : at.length - 1; /* rows past the end repeat the last row */
            float higher = top[i], sum = 0;
            for (int j = 0; limited && j < PATCH; j++) limit(at, row, first + tx + 16 * j, &score[i][j]);
            for (int j = 0; j < PATCH; j++) {
                score[i][j] = visible(at, row, first + tx + 16 * j) ? score[i][j] * at.dot_scale : -INFINITY;
                higher = fmaxf(higher, score[i][j]);
            }
            higher = row_largest(higher);
            for (int j = 0; j < PATCH; j++) {
                const float value = expf(score[i][j] - higher);
                sum += value;
                weight[(ty * PATCH + i) * SQUARE + tx + 16 * j] = value;
            }
            const float shrink = expf(top[i] - higher);
            total[i] = total[i] * shrink + row_sum(sum);
            top[i] = higher;
            UNROLL
            for (int j = 0; j < SPAN; j++) out[i][j] *= shrink;
        }
        __syncthreads();
        tile_load(at, key_rows<Element>(at, at.v, tile.batch, kv_head), first, TILE, columns, ld, other);
        __syncthreads();
        plain_add<TILE, SPAN>(out, weight + ty * PATCH * SQUARE, SQUARE, 1, other, columns, ld);
    }
    for (int i = 0; i < PATCH; i++) {
        if (tx == 0 && own + i < at.length)
            at.logsumexp[(tile.batch * at.heads + tile.head) * at.length + own + i] = top[i] + logf(total[i]);
        for (int j = 0; j < SPAN; j++) out[i][j] *= 1.0f / total[i];
    }
    plain_put(at, out, 1, query_rows<Element>(at, at.y, at.out_width, tile.batch, tile.head), own, false);
}

/* Workspace of cuDNN. */
template <bool GROUPED> static size_t forward_workspace(const struct hapt_call *call)
{
    const struct attention at = attention_of(call, GROUPED, false);
    return cudnn_attention_workspace ? cudnn_attention_workspace(&at, call->input[0].dtype, false) : 0;
}

template <class Element, bool GROUPED>
static enum hapt_status forward_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct attention at = attention_of(call, GROUPED, false);
    bool done = false;
    if (cudnn_attention_run)
        HAPT_TRY(cudnn_attention_run(&at, call->input[0].dtype, false, call->workspace, call->workspace_bytes, queue,
                                     &done));
    if (done) return HAPT_OK;
    if constexpr (sizeof(Element) == 2) {
        const size_t shared = tensor_forward_shared(at);
        if (at.head <= 128 && tensor_can<Element>() && shared <= attention_shared_limit())
            return TENSOR_LAUNCH(tensor_forward, attention_grid(at, at.heads, at.length, TENSOR_ROWS), TENSOR_THREADS,
                                 shared, queue, at);
    }
    PLAIN_LAUNCH(plain_forward, at.heads, at.length, 2, 1)
}

extern const struct cuda_kernel hapt_cuda_attention[] = {
    CUDA_KERNELS_WITH("attention", forward_workspace<false>, forward_run, false),
    CUDA_KERNELS_WITH("grouped_attention", forward_workspace<true>, forward_run, true),
    CUDA_KERNELS_WITH("document_attention", forward_workspace<false>, forward_run, false),
    CUDA_KERNELS_WITH("grouped_document_attention", forward_workspace<true>, forward_run, true),
    CUDA_KERNELS_END,
};
