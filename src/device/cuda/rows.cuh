/* Tensors as rows of their last dimension: loads and stores of several elements, loops over rows, column sums. */
#ifndef HAPT_CUDA_ROWS_CUH
#define HAPT_CUDA_ROWS_CUH

#include "kernel.cuh"

static inline int64_t view_columns(const struct hapt_view *view)
{
    return view->dims > 0 ? view->shape[view->dims - 1] : 1;
}

static inline int64_t view_rows(const struct hapt_view *view)
{
    const int64_t columns = view_columns(view);
    return columns > 0 ? hapt_view_elements(view) / columns : 0;
}

/* ---- N elements: 1, or as many as a pack of the kernel's element has; then the address is a multiple of 16 ---- */

template <int N, class Element> __device__ __forceinline__ void load(const Element *from, float *to)
{
    if constexpr (N == 1) {
        to[0] = to_float(from[0]);
    } else {
        static_assert(N % pack<Element>::COUNT == 0, "whole packs");
        for (int p = 0; p < N; p += pack<Element>::COUNT) {
            const pack<Element> some = *reinterpret_cast<const pack<Element> *>(from + p);
            for (int e = 0; e < pack<Element>::COUNT; e++) to[p + e] = to_float(some.element[e]);
        }
    }
}

template <int N, class Element> __device__ __forceinline__ void store(Element *to, const float *from, bool accumulate)
{
    float before[N];
    if (accumulate) load<N>(to, before);
    if constexpr (N == 1) {
        to[0] = from_float<Element>(accumulate ? from[0] + before[0] : from[0]);
    } else {
        for (int p = 0; p < N; p += pack<Element>::COUNT) {
            pack<Element> some;
            for (int e = 0; e < pack<Element>::COUNT; e++)
                some.element[e] = from_float<Element>(accumulate ? from[p + e] + before[p + e] : from[p + e]);
            *reinterpret_cast<pack<Element> *>(to + p) = some;
        }
    }
}

/* True if rows of `columns` elements can be loaded in packs: all start at multiples of 16 bytes, as the tensors do. */
template <class Element, class... Addresses> static bool packs_fit(int64_t columns, Addresses... address)
{
    return columns % pack<Element>::COUNT == 0 && (aligned_16((const void *)address) && ...);
}

/*
 * Calls body(width<N>{}, i) for elements i to i + N - 1, over those of [first, end) that belong to `thread` of
 * `threads`. N is a pack's size if packs are at multiples of 16 bytes, which holds if element 0 of each array is
 * (`packed`); at the ends it is 1.
 */
template <int N> struct width {
    enum { COUNT = N };
};

template <class Element, class Body>
__device__ __forceinline__ void over(int64_t first, int64_t end, int64_t thread, int64_t threads, bool packed,
                                     Body body)
{
    constexpr int N = pack<Element>::COUNT;
    int64_t low = end, high = end; /* packs between them */
    if (packed) {
        low = (first + N - 1) / N * N;
        high = end / N * N;
        if (low > end) low = end;
        if (high < low) high = low;
    }
    for (int64_t i = first + thread; i < low; i += threads) body(width<1>{}, i);
    for (int64_t i = low + thread * N; i < high; i += threads * N) body(width<N>{}, i);
    for (int64_t i = high + thread; i < end; i += threads) body(width<1>{}, i);
}

/* ---- Rows of at most NARROW_ROW elements take a warp each (WARP), others a block of ROW_THREADS ---- */

enum { ROW_THREADS = 256, ROW_WARPS = ROW_THREADS / 32, NARROW_ROW = 1024 };

static inline dim3 row_blocks(int64_t rows, bool warp)
{
    return blocks_for(rows, warp ? ROW_WARPS : 1);
}

template <bool WARP> static __device__ __forceinline__ float row_total(float value, float *shared)
{
    return WARP ? warp_sum(value) : block_sum(value, shared);
}

/* The rows of this warp or block, and its elements in each. */
#define FOR_ROWS(row, rows)                                                                       \
    const int team = WARP ? 32 : ROW_THREADS, member = WARP ? threadIdx.x & 31 : threadIdx.x,     \
              teams = WARP ? ROW_WARPS : 1;                                                       \
    for (int64_t row = (int64_t)blockIdx.x * teams + (WARP ? threadIdx.x >> 5 : 0); row < (rows); \
         row += (int64_t)gridDim.x * teams)
#define FOR_COLUMNS(c, columns) for (int64_t c = (int64_t)member * N; c < (columns); c += (int64_t)team * N)

/* ---- Sums over all rows, column by column ---- */

enum { COLUMN_LANES = 32, COLUMN_WARPS = 8, CHUNK_ROWS = 64, CHUNKS = 128 };

/* Rows are summed in chunks; the shape alone decides the bounds. */
static inline int64_t chunk_rows(int64_t rows)
{
    const int64_t even = (rows + CHUNKS - 1) / CHUNKS;
    return even > CHUNK_ROWS ? even : (int64_t)CHUNK_ROWS;
}

static inline int64_t chunk_count(int64_t rows)
{
    const int64_t each = chunk_rows(rows);
    return (rows + each - 1) / each;
}

template <int SUMS> struct column_out {
    float *out[SUMS]; /* [columns] each; NULL: not wanted */
    bool accumulate[SUMS];
    int64_t stride; /* from one chunk's sums to the next */
};

/*
 * term(width<N>, row, column, values) gives values[s][N], to be added to sum s at `column` and the next N - 1. A block
 * sums a chunk of rows (grid.y) of COLUMN_LANES x N columns (grid.x); each warp takes every 8th row.
 */
template <int SUMS, int N, class Term>
__global__ void column_kernel(Term term, int64_t rows, int64_t columns, int64_t chunk, struct column_out<SUMS> to)
{
    __shared__ float shared[COLUMN_WARPS][COLUMN_LANES * N];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int64_t column = ((int64_t)blockIdx.x * COLUMN_LANES + lane) * N, first = blockIdx.y * chunk,
                  end = first + chunk < rows ? first + chunk : rows;
    float sum[SUMS][N] = {};
    if (column < columns)
        for (int64_t r = first + warp; r < end; r += COLUMN_WARPS) {
            float value[SUMS][N];
            term(width<N>{}, r, column, value);
            for (int s = 0; s < SUMS; s++)
                for (int e = 0; e < N; e++) sum[s][e] += value[s][e];
        }
    for (int s = 0; s < SUMS; s++) {
        for (int e = 0; e < N; e++) shared[warp][lane * N + e] = sum[s][e];
        __syncthreads();
        for (int c = threadIdx.x; c < COLUMN_LANES * N; c += COLUMN_LANES * COLUMN_WARPS) {
            const int64_t at = (int64_t)blockIdx.x * COLUMN_LANES * N + c;
            float total = 0;
            for (int w = 0; w < COLUMN_WARPS; w++) total += shared[w][c];
            if (at >= columns || !to.out[s]) continue;
            float *out = to.out[s] + blockIdx.y * to.stride + at;
            *out = to.accumulate[s] ? *out + total : total;
        }
        __syncthreads();
    }
}

/* out[s][column] (+)= the sum over the chunks of part [chunks][SUMS][columns]: sum s by grid.y, COLUMN_LANES columns by
 * grid.x; each warp takes every TOTAL_WARPSth chunk. */
enum { TOTAL_WARPS = 32 };
template <int SUMS>
__global__ void column_total_kernel(const float *part, int64_t chunks, int64_t columns, struct column_out<SUMS> to)
{
    __shared__ float shared[TOTAL_WARPS][COLUMN_LANES];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, s = blockIdx.y;
    const int64_t column = (int64_t)blockIdx.x * COLUMN_LANES + lane;
    float sum = 0, *out = to.out[0];
    bool accumulate = to.accumulate[0];
    for (int o = 1; o < SUMS; o++)
        if (o == s) {
            out = to.out[o];
            accumulate = to.accumulate[o];
        }
    if (column < columns)
        for (int64_t c = warp; c < chunks; c += TOTAL_WARPS) sum += part[(c * SUMS + s) * columns + column];
    shared[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || column >= columns || !out) return;
    sum = 0;
    for (int w = 0; w < TOTAL_WARPS; w++) sum += shared[w][lane];
    out[column] = accumulate ? out[column] + sum : sum;
}

static inline size_t column_sums_workspace(int64_t rows, int64_t columns, int sums)
{
    const int64_t chunks = chunk_count(rows);
    return chunks > 1 ? (size_t)(chunks * columns * sums) * sizeof(float) : 0;
}

template <int SUMS>
static enum hapt_status column_totals(const float *part, int64_t chunks, int64_t columns, float *const *out,
                                      const bool *accumulate, struct hapt_queue *queue)
{
    struct column_out<SUMS> to = {
    };
    for (int s = 0; s < SUMS; s++) {
        to.out[s] = out[s];
        to.accumulate[s] = accumulate[s];
    }
    return launch(column_total_kernel<SUMS>, dim3((unsigned)((columns + COLUMN_LANES - 1) / COLUMN_LANES), SUMS),
                  32 * TOTAL_WARPS, 0, queue, part, chunks, columns, to);
}

/* out[s][column] (+)= the sum over all rows of term's value s. N: elements that the term can read at once at multiples
 * of N. */
template <int SUMS, int N, class Term>
static enum hapt_status column_sums(Term term, int64_t rows, int64_t columns, float *const *out, const bool *accumulate,
                                    void *workspace, struct hapt_queue *queue)
{
    const int64_t chunks = chunk_count(rows), chunk = chunk_rows(rows), wide = COLUMN_LANES * N;
    const dim3 grid((unsigned)((columns + wide - 1) / wide), (unsigned)(chunks > 0 ? chunks : 1));
    struct column_out<SUMS> to = {
    };
    float *part = (float *)workspace; /* [chunks][SUMS][columns] */
    to.stride = SUMS * columns;
    for (int s = 0; s < SUMS; s++) {
        to.out[s] = chunks > 1 ? part + s * columns : out[s];
        to.accumulate[s] = chunks <= 1 && accumulate[s];
    }
    HAPT_TRY(launch(column_kernel<SUMS, N, Term>, grid, COLUMN_LANES * COLUMN_WARPS, 0, queue, term, rows, columns,
                    chunk, to));
    return chunks > 1 ? column_totals<SUMS>(part, chunks, columns, out, accumulate, queue) : HAPT_OK;
}

/* A term that sums a matrix [rows][columns]. */
template <class Element> struct column_matrix {
    const Element *x;
    int64_t columns;
    template <int N> __device__ void operator()(struct width<N>, int64_t row, int64_t column, float (*value)[N]) const
    {
        load<N>(x + row * columns + column, value[0]);
    }
};

#endif
