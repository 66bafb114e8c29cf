/*
 * Shared by the forward and the backward of attention: tiles in shared memory, products of tiles.
 *
 * A thread block takes one tile of rows (queries, or keys) of one head of one sequence and loops over the tiles that
 * they meet: no [t][t] matrix is stored. 16-bit elements use tensor cores through wmma (tensor_*): four warps with 16
 * rows of the tile each. fp32 elements, and all elements on devices without tensor cores, use 16 x 16 threads, each
 * with a patch of every small product (plain_*).
 */
#ifndef HAPT_CUDA_ATTENTION_CUH
#define HAPT_CUDA_ATTENTION_CUH

#include <float.h>
#include <mma.h>

#include "attention.h"
#include "kernels.h"

/* Bytes of shared memory available to a block. */
static inline size_t attention_shared_limit(void)
{
    int device = 0, bytes = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess)
        return 48 << 10;
    return bytes > 48 << 10 ? (size_t)bytes : 48 << 10;
}

/* A head of a sequence: element (row, column) is data[row * width + column]. */
template <class Element> struct head_rows {
    Element *data;
    int64_t width, length;
};

/* Rows of queries, or of a tensor of their shape. */
template <class Element>
__device__ __forceinline__ struct head_rows<Element> query_rows(const struct attention &at, const void *data,
                                                                int64_t width, int64_t batch, int64_t head) {
    return {(Element *)data + batch * at.length * width + head * at.head, width, at.length};
}

/* Rows of keys, values or their gradients. */
template <class Element>
__device__ __forceinline__ struct head_rows<Element> key_rows(const struct attention &at, const void *data,
                                                              int64_t batch, int64_t head) {
    return {(Element *)data + batch * at.keys * at.kv_width + head * at.head, at.kv_width, at.keys};
}

/* The tile that a block works on. */
struct attention_tile {
    int64_t batch, head, first; /* head of keys or of queries; first row of the tile */
};

/* Tiles of a head of `length` rows, in falling order if `falling`. Under a causal mask, the last query tile meets the
 * most keys, and the first key tile the most queries: the longest work starts first. */
__device__ __forceinline__ struct attention_tile attention_tile(int64_t heads, int64_t length, int rows, bool falling)
{
    const int64_t tiles = (length + rows - 1) / rows, tile = blockIdx.x % tiles, pair = blockIdx.x / tiles;
    return {pair / heads, pair % heads, (falling ? tiles - 1 - tile : tile) * rows};
}

static inline dim3 attention_grid(const struct attention &at, int64_t heads, int64_t length, int rows)
{
    return dim3((unsigned)((length + rows - 1) / rows * at.batch * heads));
}

/* Loads rows [first, first + rows) of a head into tile [rows][ld], with zeros past the head's columns and the
 * sequence's end. `columns`: a multiple of 16. */
template <class Element, class To>
__device__ __forceinline__ void tile_load(const struct attention &at, const struct head_rows<Element> &from,
                                          int64_t first, int rows, int columns, int ld, To *tile)
{
    enum { COUNT = pack<Element>::COUNT };
    if (at.packed) {
        const int packs = columns / COUNT;
        for (int i = threadIdx.x; i < rows * packs; i += blockDim.x) {
            const int r = i / packs, c = i % packs * COUNT;
            pack<Element> some = {};
            if (first + r < from.length && c < at.head)
                some = *(const pack<Element> *)(from.data + (first + r) * from.width + c);
            if constexpr (sizeof(Element) == sizeof(To)) {
                *(pack<Element> *)(tile + r * ld + c) = some;
            } else {
                for (int e = 0; e < COUNT; e++) tile[r * ld + c + e] = to_float(some.element[e]);
            }
        }
        return;
    }
    for (int i = threadIdx.x; i < rows * columns; i += blockDim.x) {
        const int r = i / columns, c = i % columns;
        const bool there = first + r < from.length && c < at.head;
        if constexpr (sizeof(Element) == sizeof(To)) {
            tile[r * ld + c] = there ? from.data[(first + r) * from.width + c] : from_float<Element>(0);
        } else {
            tile[r * ld + c] = there ? to_float(from.data[(first + r) * from.width + c]) : 0.0f;
        }
    }
}

template <class Element> __device__ __forceinline__ void put(Element *to, float value, bool add)
{
    *to = from_float<Element>(add ? to_float(*to) + value : value);
}

/* True if row `query` may see `key`. Rows past the end see nothing. */
__device__ __forceinline__ bool visible(const struct attention &at, int64_t query, int64_t key)
{
    return query < at.length && key < at.keys && (!at.causal || key <= query);
}

/* ---- Limits: windows, documents and caps. LIMITED kernels apply them; they would slow the others down. ---- */

/* The operands for one sequence: its positions. */
__device__ __forceinline__ struct attention of_sequence(const struct attention &all, int64_t batch)
{
    struct attention at = all;
    if (at.position) at.position += batch * at.length;
    return at;
}

/* The first key that `query` sees. It rises with the query. Rows past the end are as the last one. */
__device__ __forceinline__ int64_t first_seen(const struct attention &at, int64_t query)
{
    int64_t first = at.window > 0 ? query - at.window + 1 : 0;
    if (at.position) {
        if (query >= at.length) query = at.length - 1;
        int64_t start = query - at.position[query];
        if (start > query) start = query;
        if (start > first) first = start;
    }
    return first > 0 ? first : 0;
}

/* First of the tiles of `rows` keys that a query from `query` on sees. */
template <bool LIMITED>
__device__ __forceinline__ int64_t first_key_tile(const struct attention &at, int64_t query, int rows)
{
    return LIMITED ? first_seen(at, query) / rows * rows : 0;
}

/* End of the queries that see one of the `rows` keys from `key` on. */
template <bool LIMITED>
__device__ __forceinline__ int64_t end_of_queries(const struct attention &at, int64_t key, int rows)
{
    const int64_t end = key + rows - 1 + at.window;
    return LIMITED && at.window > 0 && end < at.length ? end : at.length;
}

/* True if limit() changes dot products of queries up to `query` and keys from `key` on. */
template <bool LIMITED>
__device__ __forceinline__ bool is_limited(const struct attention &at, int64_t query, int64_t key)
{
    return LIMITED && (at.cap > 0 || key < first_seen(at, query));
}

/* Turns a dot product into a capped score, or into -INFINITY if `query` does not see `key` any more. Returns the
 * derivative of the capped score by the score. */
__device__ __forceinline__ float limit(const struct attention &at, int64_t query, int64_t key, float *dot)
{
    float slope = 1;
    if (at.cap > 0) {
        const float part = tanhf(*dot * at.cap_share);
        *dot = at.cap * part;
        slope = 1 - part * part;
    }
    if (key < first_seen(at, query)) *dot = -INFINITY;
    return slope;
}

/* Initial maximum of a row's scores. It is finite in LIMITED kernels, because a row may see no key of the first tiles
 * of its block: -INFINITY minus itself would be NaN. */
#define NO_SCORE (LIMITED ? -FLT_MAX : -INFINITY)

/* ---- Tensor cores ---- */

enum { TENSOR_ROWS = 64, TENSOR_WARPS = TENSOR_ROWS / 16, TENSOR_THREADS = 32 * TENSOR_WARPS };
enum { WEIGHT_LD = TENSOR_ROWS + 8 }; /* makes rows of a warp's 16 x TENSOR_ROWS weights start in different banks */

#ifdef __CUDA_ARCH__
#define ATTENTION_ARCH __CUDA_ARCH__
#else
#define ATTENTION_ARCH 10000
#endif

template <class Element> struct tensor_from {
    enum { ARCH = 700 };
};
template <> struct tensor_from<__nv_bfloat16> {
    enum { ARCH = 800 };
};
template <> struct tensor_from<float> {
    enum { ARCH = 1 << 30 };
};

/* True if this process's device has tensor cores for the type. */
template <class Element> static bool tensor_can(void)
{
    int device = 0, major = 0, minor = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return false;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) return false;
    if (cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) return false;
    return major * 100 + minor * 10 >= tensor_from<Element>::ARCH;
}

/* wmma needs its matrices at multiples of 32 bytes. */
enum { TENSOR_ALIGN = 32 };
__device__ __forceinline__ unsigned char *tensor_aligned(unsigned char *memory)
{
    return memory + (TENSOR_ALIGN - (uintptr_t)memory % TENSOR_ALIGN) % TENSOR_ALIGN;
}

#if ATTENTION_ARCH >= 700
typedef nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> tensor_sum;
template <class Element>
using tensor_a = nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, 16, 16, 16, Element, nvcuda::wmma::row_major>;
template <class Element>
using tensor_b = nvcuda::wmma::fragment<nvcuda::wmma::matrix_b, 16, 16, 16, Element, nvcuda::wmma::row_major>;
template <class Element>
using tensor_bt = nvcuda::wmma::fragment<nvcuda::wmma::matrix_b, 16, 16, 16, Element, nvcuda::wmma::col_major>;

/* Maps element i of a thread's part of a tensor_sum to its element of the 16 x 16 tile. wmma does not document this, so
 * a tile of numbers is loaded to find out. */
struct tensor_layout {
    unsigned char element[tensor_sum::num_elements]; /* row * 16 + column */
    __device__ __forceinline__ int row(int i) const
    {
        return element[i] >> 4;
    }
    __device__ __forceinline__ int column(int i) const
    {
        return element[i] & 15;
    }
};

/* `scratch`: 256 floats for this warp alone. */
__device__ __forceinline__ struct tensor_layout tensor_layout_find(float *scratch)
{
    struct tensor_layout layout;
    tensor_sum numbers;
    for (int i = threadIdx.x & 31; i < 256; i += 32) scratch[i] = (float)i;
    __syncwarp();
    nvcuda::wmma::load_matrix_sync(numbers, scratch, 16, nvcuda::wmma::mem_row_major);
    UNROLL
    for (int i = 0; i < tensor_sum::num_elements; i++) layout.element[i] = (unsigned char)numbers.x[i];
    __syncwarp();
    return layout;
}

/* sum = rows * other', both [16][16 PARTS] with row stride `ld`. */
template <class Element, int PARTS>
__device__ __forceinline__ void tensor_dots(tensor_sum &sum, const Element *rows, const Element *other, int ld)
{
    nvcuda::wmma::fill_fragment(sum, 0.0f);
    UNROLL
    for (int d = 0; d < PARTS; d++) {
        tensor_a<Element> a;
        tensor_bt<Element> b;
        nvcuda::wmma::load_matrix_sync(a, rows + d * 16, ld);
        nvcuda::wmma::load_matrix_sync(b, other + d * 16, ld);
        nvcuda::wmma::mma_sync(sum, a, b, sum);
    }
}

/* sum [16][16 PARTS] += weight [16][TENSOR_ROWS] * tile [TENSOR_ROWS][16 PARTS] */
template <class Element, int PARTS>
__device__ __forceinline__ void tensor_add(tensor_sum *sum, const Element *weight, const Element *tile, int ld)
{
    UNROLL
    for (int n = 0; n < TENSOR_ROWS / 16; n++) {
        tensor_a<Element> a;
        nvcuda::wmma::load_matrix_sync(a, weight + n * 16, WEIGHT_LD);
        UNROLL
        for (int f = 0; f < PARTS; f++) {
            tensor_b<Element> b;
            nvcuda::wmma::load_matrix_sync(b, tile + n * 16 * ld + f * 16, ld);
            nvcuda::wmma::mma_sync(sum[f], a, b, sum[f]);
        }
    }
}

/* Stores rows [first, first + 16) of a head from a warp's sums, times `scale` and, if given, a factor per row. */
template <class Element, int PARTS>
__device__ __forceinline__ void tensor_put(const struct attention &at, const struct tensor_layout &layout,
                                           const tensor_sum *sum, float scale, const float *factor,
                                           const struct head_rows<Element> &to, int64_t first, bool add)
{
    UNROLL
    for (int f = 0; f < PARTS; f++) {
        UNROLL
        for (int i = 0; i < tensor_sum::num_elements; i++) {
            const int r = layout.row(i), c = f * 16 + layout.column(i);
            if (first + r < to.length && c < at.head)
                put(to.data + (first + r) * to.width + c, sum[f].x[i] * (factor ? factor[r] : scale), add);
        }
    }
}
#endif

/* Runs KERNEL<Element, parts of the head, LIMITED>, with as many parts of 16 columns as the head needs. */
#define TENSOR_LAUNCH_OF(KERNEL, LIMITED, ...)                          \
    (at.head <= 32   ? launch(KERNEL<Element, 2, LIMITED>, __VA_ARGS__) \
     : at.head <= 64 ? launch(KERNEL<Element, 4, LIMITED>, __VA_ARGS__) \
     : at.head <= 96 ? launch(KERNEL<Element, 6, LIMITED>, __VA_ARGS__) \
                     : launch(KERNEL<Element, 8, LIMITED>, __VA_ARGS__))
#define TENSOR_LAUNCH(KERNEL, ...)                                          \
    (attention_is_limited(at) ? TENSOR_LAUNCH_OF(KERNEL, true, __VA_ARGS__) \
                              : TENSOR_LAUNCH_OF(KERNEL, false, __VA_ARGS__))
static inline int64_t tensor_columns(int64_t head)
{
    return (head + 31) / 32 * 32;
}

/* ---- Plain threads ---- */

enum { PLAIN_THREADS = 256, PLAIN_MOST = 512 }; /* columns of the largest head */

__device__ __forceinline__ int plain_columns(const struct attention &at)
{
    return (int)((at.head + 15) / 16 * 16);
}

/* sum[i][j] = row i of `rows` times row tx + 16 j of `other`, both with row stride ld */
template <int PATCH>
__device__ __forceinline__ void plain_dots(float (&sum)[PATCH][PATCH], const float *rows, const float *other,
                                           int columns, int ld)
{
    const float *mine = other + (threadIdx.x & 15) * ld;
    for (int i = 0; i < PATCH; i++)
        for (int j = 0; j < PATCH; j++) sum[i][j] = 0;
    for (int d = 0; d < columns; d += 4) {
        float4 a[PATCH], b[PATCH];
        UNROLL
        for (int i = 0; i < PATCH; i++) a[i] = *(const float4 *)(rows + i * ld + d);
        UNROLL
        for (int j = 0; j < PATCH; j++) b[j] = *(const float4 *)(mine + j * 16 * ld + d);
        UNROLL
        for (int i = 0; i < PATCH; i++) UNROLL
        for (int j = 0; j < PATCH; j++) {
            sum[i][j] += a[i].x * b[j].x;
            sum[i][j] += a[i].y * b[j].y;
            sum[i][j] += a[i].z * b[j].z;
            sum[i][j] += a[i].w * b[j].w;
        }
    }
}

/* sum[i][j] += sum over k of weight[i * row + k * depth] * tile[k][tx + 16 j], k < TILE */
template <int TILE, int SPAN>
__device__ __forceinline__ void plain_add(float (&sum)[TILE / 16][SPAN], const float *weight, int row, int depth,
                                          const float *tile, int columns, int ld)
{
    const float *mine = tile + (threadIdx.x & 15);
    for (int k = 0; k < TILE; k++) {
        float a[TILE / 16];
        UNROLL
        for (int i = 0; i < TILE / 16; i++) a[i] = weight[i * row + k * depth];
        UNROLL
        for (int j = 0; j < SPAN; j++) {
            if (j * 16 >= columns) break;
            const float b = mine[k * ld + j * 16];
            UNROLL
            for (int i = 0; i < TILE / 16; i++) sum[i][j] += a[i] * b;
        }
    }
}

/* Stores this thread's rows, first + i, from its sums. */
template <class Element, int PATCH, int SPAN>
__device__ __forceinline__ void plain_put(const struct attention &at, const float (&sum)[PATCH][SPAN], float scale,
                                          const struct head_rows<Element> &to, int64_t first, bool add)
{
    for (int i = 0; i < PATCH; i++) UNROLL
    for (int j = 0; j < SPAN; j++) {
        const int c = (threadIdx.x & 15) + j * 16;
        if (first + i < to.length && c < at.head) put(to.data + (first + i) * to.width + c, sum[i][j] * scale, add);
    }
}

/* Bytes of `tiles` tiles of rows and `squares` of weights. */
static inline size_t plain_shared(const struct attention &at, int tile, int tiles, int squares)
{
    return (size_t)((at.head + 15) / 16 * 16 + 4) * tile * tiles * sizeof(float) +
           (size_t)(tile + 4) * tile * squares * sizeof(float);
}

/* Rows of a tile: as many as fit and are useful. 16-bit elements come here on old devices, and with heads of more than
 * 128 columns. */
template <class Element> static int plain_tile(const struct attention &at, int tiles, int squares)
{
    const size_t limit = attention_shared_limit();
    if (sizeof(Element) == 4 && at.head <= 128 && at.length > 32 && plain_shared(at, 64, tiles, squares) <= limit)
        return 64;
    if (at.head <= 128 && at.length > 16 && plain_shared(at, 32, tiles, squares) <= limit) return 32;
    return 16;
}

#define PLAIN_LAUNCH_OF(KERNEL, TILE, SPAN)                                                                       \
    (attention_is_limited(at) ? launch(KERNEL<Element, TILE, SPAN, true>, grid, PLAIN_THREADS, shared, queue, at) \
                              : launch(KERNEL<Element, TILE, SPAN, false>, grid, PLAIN_THREADS, shared, queue, at))

#define PLAIN_LAUNCH(KERNEL, heads, length, tiles, squares)                                                         \
    {                                                                                                               \
        const int tile = plain_tile<Element>(at, tiles, squares);                                                   \
        const dim3 grid = attention_grid(at, heads, length, tile);                                                  \
        const size_t shared = plain_shared(at, tile, tiles, squares);                                               \
        if (at.head > PLAIN_MOST || shared > attention_shared_limit())                                              \
            return cuda_host->fail(HAPT_ERR_INPUT, "give the model more heads",                                     \
                                   "this GPU cannot run attention with heads of %lld columns", (long long)at.head); \
        if constexpr (sizeof(Element) == 4) {                                                                       \
            if (tile == 64) return PLAIN_LAUNCH_OF(KERNEL, 64, 8);                                                  \
        }                                                                                                           \
        if (tile == 32) return PLAIN_LAUNCH_OF(KERNEL, 32, 8);                                                      \
        return PLAIN_LAUNCH_OF(KERNEL, 16, PLAIN_MOST / 16);                                                        \
    }

#endif
